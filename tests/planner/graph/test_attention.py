"""Attention that is written out: the same numbers with the scores in memory, and what cannot be written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.graph.attention import KINDS, WRITTEN_OUT, with_attention
from planner.graph.folding import fold, unfold
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch, at_precision
from planner.networks import load_network
from simulator.errors import InputError, UnsupportedError
from simulator.program import Kernel, Phase
from tests.oracles.graph_interpreter import assert_equals_autograd
from tests.planner.graph.conftest import small_network
from tests.planner.sharding.small_networks import graph


def written(name: str, kind: str, batch: int = 2) -> OperatorGraph:
    return unfold(at_precision(at_batch(replace(small_network(name), attention=kind).capture(), batch), "float64"))


@pytest.mark.parametrize("kind", WRITTEN_OUT)
@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_what_is_written_out_equals_autograd(name: str, kind: str) -> None:
    network = written(name, kind)
    assert not any(node.kernel is Kernel.ATTENTION for node in network.nodes)
    assert_equals_autograd(network, small_network(name).build(seed=1).double(), seed=2)


@pytest.mark.parametrize("kind", WRITTEN_OUT)
def test_the_graph_stays_one_that_folds_and_is_in_order(kind: str) -> None:
    network = with_attention(graph("gpt"), kind)
    assert len({node.name for node in network.nodes}) == len(network.nodes)
    for index, node in enumerate(network.nodes):
        assert all(ref.node < index for ref in node.tensor_inputs)
        if node.phase is Phase.BACKWARD and node.forward is not None:
            assert network.nodes[node.forward].phase is Phase.FORWARD
    deep = load_network("zoo:gpt2", attention=kind).capture()
    assert deep.runs[0].count == 12
    assert fold(unfold(deep)).runs[0].count == 12


def test_kinds_are_different_networks_to_a_strategy_file_but_for_fused_ones() -> None:
    prints = {kind: load_network("zoo:gpt2-tiny", attention=kind).capture().fingerprint for kind in ("", *KINDS)}
    assert len(set(prints.values())) == 3
    assert {prints[kind] for kind in ("flash", "flash2", "vendor")} == {prints[""]}


def test_what_cannot_be_written_out_is_refused() -> None:
    with pytest.raises(InputError, match="'quick' is not one of fused_softmax, unfused, flash"):
        load_network("zoo:gpt2", attention="quick")
    with pytest.raises(UnsupportedError, match="mlp has no attention to write out"):
        load_network("zoo:mlp", attention="unfused").capture()
