"""Requests at the edge of what makes sense get an answer or a clear error, each in its own process."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROMISE_CPU_S = 60.0
PROMISE_BYTES = 4 * 2**30
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
NO_PARAMETERS = """
import torch
from torch import nn


class Mean(nn.Module):
    def forward(self, values):
        return (values * values).mean()


def make():
    return Mean(), (torch.zeros(2, 8),)
"""

DISTINCT = """
import random
import torch
from torch import nn


class Distinct(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [random.Random(place).randint(4, 40) for place in range(10_001)]
        widths[0] = 8
        self.layers = nn.Sequential(*(nn.Linear(*pair) for pair in zip(widths, widths[1:])))

    def forward(self, values):
        return self.layers(values).mean()


def make():
    return Distinct(), (torch.zeros(2, 8),)
"""
AT_ONCE = 20
WATCHED = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024))
sys.exit(code)
"""
"""Runs a command and writes its peak memory. What this process has would count as its child's until that is another
program, and so would earlier children."""


def planned(network: str, options: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Plan in a process that may use no more processor time than is promised; its peak memory is in ``peak``."""
    command = [sys.executable, "-m", "planner.cli", "plan", network, "--hw", "dgx-a100", *options]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (int(PROMISE_CPU_S), int(PROMISE_CPU_S) + 5))

    return subprocess.run(
        [sys.executable, "-c", WATCHED, str(folder / "peak"), *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder))), "OMP_NUM_THREADS": "1"},
        preexec_fn=limited,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options", "code", "says"),
    [
        ({"num_hidden_layers": 2000}, ("--devices", "64", "--global-batch", "64"), 0, ""),
        ({"vocab_size": 10_000_000}, ("--devices", "8", "--global-batch", "8"), 0, ""),
        ({}, ("--devices", "1", "--global-batch", "1", "--seq-len", "1"), 0, ""),
        ({}, ("--devices", "8", "--global-batch", "1"), 0, ""),
        ({}, ("--devices", "8", "--global-batch", "1000000000"), 2, "more than 16777216 samples a device"),
        ({}, ("--devices", "8", "--global-batch", "16777259"), 3, "device memory binds"),
        ({}, ("--devices", "8", "--global-batch", "33554432"), 0, ""),
        ({}, ("--devices", "7", "--global-batch", "7"), 0, ""),
        ({}, ("--devices", "13"), 2, "13 devices do not fit profile dgx-a100"),
        ({}, ("--devices", "1021"), 2, "use 1016 or 1024"),
        ({}, ("--devices", "1000000"), 2, "up to 16384 devices"),
    ],
)
def test_a_request_at_the_edge(
    sizes: dict[str, int], options: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **sizes}))
    found = planned(f"hf:{tmp_path}", options, tmp_path)
    assert found.returncode == code, found.stderr[-2000:]
    assert says in found.stderr
    assert "Traceback" not in found.stderr
    assert int((tmp_path / "peak").read_text()) < PROMISE_BYTES


@pytest.mark.slow
def test_a_network_without_parameters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "parameterless.py").write_text(NO_PARAMETERS)
    found = planned("py:parameterless:make", ("--devices", "8", "--global-batch", "8"), tmp_path)
    assert found.returncode == 2
    assert "none of them has a gradient: there is nothing to train" in found.stderr


@pytest.mark.slow
def test_ten_thousand_distinct_layers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "distinct.py").write_text(DISTINCT)
    found = planned("py:distinct:make", ("--devices", "8", "--global-batch", "8"), tmp_path)
    assert found.returncode == 2
    assert "has 20,000 parameters in layers that do not repeat, and at most 10,000 are traced" in found.stderr
    assert int((tmp_path / "peak").read_text()) < PROMISE_BYTES


@pytest.mark.slow
def test_many_plans_share_a_cache_and_an_output(tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "planner.cli", "plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "4"]
    command += ["--out", str(out / "strategy.json")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}

    def plan() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    together = [plan() for _ in range(AT_ONCE)]
    said = [process.communicate() for process in together]
    assert [process.returncode for process in together] == [0] * AT_ONCE, said
    assert [file.name for file in out.iterdir()] == ["strategy.json"]
    strategy = (out / "strategy.json").read_bytes()
    (graph,) = (cache / "meshwright").iterdir()
    whole = graph.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"\0" * len(whole)):
        graph.write_bytes(damaged)
        process = plan()
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        assert (out / "strategy.json").read_bytes() == strategy
        assert graph.read_bytes() == whole
