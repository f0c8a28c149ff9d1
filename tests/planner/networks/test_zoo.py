"""Built-in networks have the published sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.networks import list_networks, load_network
from simulator.errors import InputError, NetworkError

ROOT = Path(__file__).parents[3]
PUBLISHED = {
    "mlp": 784 * 512 + 512 + 512 * 512 + 512 + 512 + 1,
    "resnet50": 25_557_032,
    "gpt2": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama3-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", [summary.name for summary in list_networks()])
def test_listed_parameter_counts_are_those_of_the_modules(name: str) -> None:
    summary = next(s for s in list_networks() if s.name == name)
    with torch.device("meta"):
        module = load_network(f"zoo:{name}").make(None)
    assert sum(p.numel() for p in module.parameters()) == summary.parameters
    assert summary.parameters == PUBLISHED.get(name, summary.parameters)


def test_rounded_published_sizes() -> None:
    sizes = {summary.name: summary.parameters for summary in list_networks()}
    assert sizes["gpt3-175b"] == pytest.approx(175e9, rel=0.003)
    assert 335e6 <= sizes["bert-large"] <= 340e6


@pytest.mark.parametrize("name", [summary.name for summary in list_networks()])
def test_captured_parameter_counts_are_the_listed_ones(name: str) -> None:
    summary = next(s for s in list_networks() if s.name == name)
    network = load_network(summary.spec, sequence_length=16 if summary.family == "language" else None)
    assert network.capture().parameter_count == summary.parameters


def test_builds_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    network = load_network("zoo:gpt2-tiny", sequence_length=8)
    before = torch.random.get_rng_state()
    one, same, other = (network.build(seed, depth=1).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not torch.equal(one["blocks.0.expand.weight"], other["blocks.0.expand.weight"])
    assert "blocks.1.expand.weight" not in one


def test_listing_and_loading_import_no_torch() -> None:
    script = (
        "import sys; from planner.networks import *; list_networks(); load_network('zoo:llama2-7b'); "
        "print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("spec", "length", "kind", "parts"),
    [
        ("zoo:gtp2", None, NetworkError, ("'gtp2'", "zoo:gpt2")),
        ("gpt2", None, NetworkError, ("'gpt2'", "zoo:NAME", "did you mean")),
        ("zoo:", None, NetworkError, ("'zoo:'",)),
        ("git:gpt2", None, NetworkError, ("'git'", "hf:PATH")),
        ("pt2:model.pt2", None, NetworkError, ("no file model.pt2", "torch.export.save")),
        ("zoo:resnet50", 128, InputError, ("128", "resnet50")),
        ("zoo:gpt2", 2048, InputError, ("1024", "2048")),
        ("zoo:gpt2", 0, InputError, ("0",)),
    ],
)
def test_wrong_specifications_say_what_to_write(
    spec: str, length: int | None, kind: type[InputError], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        load_network(spec, sequence_length=length)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
