"""Networks whose text or configuration is wrong are refused without torch, in well under 5 s and 500 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.networks.trust import TRUST

ROOT = Path(__file__).parents[3]
CONFIGS = {
    "heads": ({"model_type": "bert", "hidden_size": 100, "num_attention_heads": 3}, "3 attention heads"),
    "checked": ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}, "attention heads"),
    "no_width": ({"model_type": "mixtral", "hidden_size": 17, "num_attention_heads": 256}, "256 attention heads"),
    "activation": ({"model_type": "bert", "hidden_act": "gelo"}, "did you mean 'gelu'"),
    "activation_of_any": ({"model_type": "qwen2", "hidden_act": "gelo"}, "did you mean 'gelu'"),
    "kind": ({"model_type": "qwen22"}, "did you mean qwen2"),
    "experts": ({"model_type": "mixtral", "num_experts_per_tok": 9}, "a layer has 8 experts"),
    "patch": ({"model_type": "vit", "patch_size": 0}, "'patch_size' is 0; it must be above 0"),
    "part": ({"model_type": "clip", "text_config": {"hidden_size": -1}}, "'hidden_size' is -1"),
    "parameters": ({"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "'x'"),
    "theta": ({"model_type": "llama", "rope_theta": "10000.0"}, "rope_theta"),
}
MODULES = {
    "syntax:f": ("def f(:\n", "SyntaxError at syntax.py:1"),
    "bytes:f": ("x = '\N{DEGREE SIGN}'\n", "SyntaxError at bytes.py:1"),
    "missing:f": ("import nosuchmodule\n", "needs module 'nosuchmodule'"),
    "other:f": ("import torch\n\ndef make():\n    return torch\n", "has no function 'f'; it has make"),
    "absent:f": (None, "no module 'absent'"),
}
PROGRAMS = {
    "absent.pt2": (None, "there is no file"),
    "text.pt2": ("hello", "it is no zip archive"),
}
SCRIPT = """
import json, resource, sys
from planner.networks import load_network
from simulator.errors import MeshwrightError

said = {}
for spec in sys.argv[1:]:
    try:
        load_network(spec).capture()
    except MeshwrightError as error:
        said[spec] = str(error)
# What getrusage says of this process is at least what the one that started it held.
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([said, "torch" in sys.modules, max(own, children)]))
"""


def refusals(folder: Path, *specs: str) -> dict[str, str]:
    """What each network is refused with in a process of its own, which imports no torch."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *specs],
        cwd=folder, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    said, with_torch, kilobytes = json.loads(done.stdout)
    assert not with_torch
    assert kilobytes < 200_000
    assert said.keys() == {*specs}
    return dict(said)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_configurations_are_checked_by_transformers_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name, (config, _) in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    said = refusals(tmp_path, *(f"hf:{name}" for name in CONFIGS))
    assert {name: part for name, (_, part) in CONFIGS.items() if part not in said[f"hf:{name}"]} == {}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_what_the_text_of_a_module_shows_is_said_before_it_is_imported(tmp_path: Path) -> None:
    for place, (text, _) in MODULES.items():
        if text is not None:
            (tmp_path / f"{place.partition(':')[0]}.py").write_bytes(text.encode("latin-1"))
    said = refusals(tmp_path, *(f"py:{place}" for place in MODULES))
    assert {place: part for place, (_, part) in MODULES.items() if part not in said[f"py:{place}"]} == {}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_file_that_is_no_saved_program_is_not_handed_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRUST, "1")
    for name, (text, _) in PROGRAMS.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    said = refusals(tmp_path, *(f"pt2:{name}" for name in PROGRAMS))
    assert {name: part for name, (_, part) in PROGRAMS.items() if part not in said[f"pt2:{name}"]} == {}


def test_execute_refuses_a_strategy_file_without_torch(tmp_path: Path) -> None:
    (tmp_path / "strategy.json").write_text("{}")
    code = (
        "import sys\nfrom planner.cli import main\ntry:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "execute", "strategy.json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "strategy.json" in done.stderr
