"""Folding finds repeated blocks; unfolding gives the same graph back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph.capture import capture_module
from planner.graph.folding import fold, repeat, run_start, unfold
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.networks import load_network
from planner.networks.inputs import InputSpec
from simulator.errors import NetworkError
from tests.planner.graph.conftest import small_network

Full = Callable[[str], OperatorGraph]


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "resnet50"])
def test_unfolding_gives_the_full_capture_back(name: str, full_graph: Full) -> None:
    full = full_graph(name)
    folded = fold(full)
    assert folded.runs
    assert len(folded.nodes) < len(full.nodes)
    assert unfold(folded) == full


@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_two_captured_blocks_stand_for_all(name: str, full_graph: Full) -> None:
    network = small_network(name)
    short = capture_module(lambda: network.make(2), network.inputs, name=name)
    assert network.depth is not None
    repeated = repeat(short, network.depth)
    assert repeated == fold(full_graph(name))
    assert unfold(repeated) == full_graph(name)


def test_behind_a_first_block_of_its_own_the_last_two_stand_for_all(full_graph: Full) -> None:
    """As in a network whose embeddings are frozen: nothing goes back into its first block."""

    def spoiled(count: int) -> OperatorGraph:
        folded = fold(full_graph("llama"))
        whole = unfold(replace(folded, runs=(replace(folded.runs[0], count=count),)))
        changed = [replace(n, flops=n.flops + n.name.startswith("blocks.0/silu")) for n in whole.nodes]
        return replace(whole, nodes=tuple(changed))

    repeated = repeat(spoiled(3), 6)
    assert [(run.count, run_start(repeated, run)) for run in repeated.runs] == [(5, 1)]
    assert unfold(repeated) == spoiled(6)


def test_blocks_that_hold_constants_fold() -> None:
    """Buffers of blocks stand in front of the whole graph, as parameters do: biases of routers, tables of positions."""
    import torch
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.linear(x) * self.scale + torch.arange(8)
            return made

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(6))
            self.register_buffer("last", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return (x * self.last).mean()

    full = capture_module(Blocks, (InputSpec(name="x", kind="features", shape=(8,), dtype="float32"),), name="blocks")
    folded = fold(full)
    assert [run.count for run in folded.runs] == [4]  # nothing goes back into the first, and no block follows the last
    assert unfold(folded) == full


def test_counts_survive_folding(full_graph: Full) -> None:
    for name in ("gpt", "resnet50"):
        full, folded = full_graph(name), fold(full_graph(name))
        assert folded.parameter_count == full.parameter_count
        assert folded.flops() == pytest.approx(full.flops(), rel=1e-12)
        assert sum(folded.multiplicity) == len(full.nodes)


def test_resnet_runs_leave_out_the_blocks_that_downsample(full_graph: Full) -> None:
    folded = fold(full_graph("resnet50"))
    assert [(run.prefix, run_start(folded, run), run.count) for run in folded.runs] == [
        ("layer2", 1, 3),
        ("layer3", 1, 5),
    ]


def test_both_blocks_of_a_run_are_aligned(full_graph: Full) -> None:
    for name in ("gpt", "llama", "bert", "resnet50"):
        folded = fold(full_graph(name))
        for run in folded.runs:
            start = run_start(folded, run)
            for i, j in zip(run.first, run.second, strict=True):
                one, two = folded.nodes[i], folded.nodes[j]
                assert (one.op, one.role, one.phase, one.outputs) == (two.op, two.role, two.phase, two.outputs)
                assert two.name == one.name.replace(f"{run.prefix}.{start}", f"{run.prefix}.{start + 1}", 1)


def test_scaling_and_unfolding_commute(full_graph: Full) -> None:
    folded = fold(full_graph("gpt"))
    assert unfold(at_batch(folded, 6)) == at_batch(unfold(folded), 6)


@settings(max_examples=10, deadline=None)
@given(count=st.integers(2, 9))
def test_any_number_of_blocks_unfolds_in_order(count: int, full_graph: Full) -> None:
    folded = fold(full_graph("llama"))
    deeper = unfold(replace(folded, runs=(replace(folded.runs[0], count=count),)))
    names = [node.name for node in deeper.nodes]
    assert len(set(names)) == len(names)
    assert all(ref.node < i for i, node in enumerate(deeper.nodes) for ref in node.tensor_inputs)
    assert {int(node.module.split(".")[1]) for node in deeper.nodes if node.module.startswith("blocks.")} == set(
        range(count)
    )
    assert all(deeper.nodes[p.node].name == p.name for p in deeper.parameters)


def test_blocks_that_differ_are_not_folded(full_graph: Full) -> None:
    full = full_graph("gpt")
    spoiled = tuple(replace(node, kwargs=()) if node.name == "blocks.1/gelu" else node for node in full.nodes)
    assert fold(replace(full, nodes=spoiled)).runs == ()


def test_a_network_without_equal_blocks_cannot_be_repeated(full_graph: Full) -> None:
    with pytest.raises(NetworkError, match="no single run"):
        repeat(full_graph("mlp"), 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert-large"])
def test_full_depth_of_published_networks(name: str) -> None:
    network = replace(load_network(f"zoo:{name}", sequence_length=64), decoder=None)
    full = capture_module(lambda: network.make(None), network.inputs, name=name)
    assert unfold(network.capture()) == replace(full, fingerprint=network.capture().fingerprint)


def test_of_two_kinds_of_blocks_in_one_list_the_longer_row_is_folded(full_graph: Full) -> None:
    """Names tell runs apart, so that a list of blocks has one of them."""
    full = full_graph("llama")
    whole = unfold(replace(fold(full), runs=(replace(fold(full).runs[0], count=7),)))
    first = tuple(f"blocks.{number}/silu" for number in range(3))
    spoiled = tuple(
        replace(node, flops=node.flops + 1) if node.name.startswith(first) else node for node in whole.nodes
    )
    folded = fold(replace(whole, nodes=spoiled))
    assert [(run.prefix, run.count, run_start(folded, run)) for run in folded.runs] == [("blocks", 4, 3)]
    assert unfold(folded) == replace(whole, nodes=spoiled)
