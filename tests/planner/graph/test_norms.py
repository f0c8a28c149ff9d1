"""Norms of one operator: the same numbers, found wherever they stand, and left where others look in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from planner.graph.capture import capture_module
from planner.graph.folding import fold, unfold
from planner.graph.norms import RMS_NORM, RMS_NORM_BACKWARD, with_norms
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.rewriting import INVERSE_ROOT
from planner.graph.scaling import at_batch, at_precision
from planner.networks import load_network
from simulator.errors import InputError
from simulator.program import Kernel, Phase
from tests.oracles.graph_interpreter import assert_equals_autograd
from tests.planner.graph.conftest import small_network
from tests.planner.sharding.small_networks import BatchTensor


def fused(name: str, batch: int = 2) -> OperatorGraph:
    return unfold(at_precision(at_batch(replace(small_network(name), norms="fused").capture(), batch), "float64"))


def operators(graph: OperatorGraph, op: str) -> int:
    return sum(node.op == op for node in graph.nodes)


def test_fused_norms_equal_autograd() -> None:
    assert_equals_autograd(fused("llama"), small_network("llama").build(seed=1).double(), seed=2)


def test_every_norm_of_a_decoder_is_found_and_the_graph_folds() -> None:
    deep = load_network("zoo:llama2-7b", norms="fused").capture()
    whole = unfold(deep)
    assert operators(whole, INVERSE_ROOT) == 0
    assert operators(whole, RMS_NORM) == operators(whole, RMS_NORM_BACKWARD) == 2 * 32 + 1
    assert deep.runs[0].count == fold(whole).runs[0].count == 32
    assert len({node.name for node in whole.nodes}) == len(whole.nodes)
    for index, node in enumerate(whole.nodes):
        assert all(ref.node < index for ref in node.tensor_inputs)
        if node.op == RMS_NORM_BACKWARD:
            assert node.forward is not None
            assert whole.nodes[node.forward].op == RMS_NORM


def test_a_fused_norm_moves_a_fraction_and_keeps_narrow_numbers() -> None:
    moved = {}
    for kind in ("fused", "unfused"):
        graph = at_precision(load_network("zoo:llama2-7b", norms=kind).capture(), "bfloat16")
        nodes = [node for node in graph.nodes if node.module.endswith("norm") and node.role is Role.OPERATOR]
        refs = [ref for node in nodes for ref in node.tensor_inputs]
        moved[kind] = sum(graph.spec(ref).size_bytes for ref in refs) + sum(
            spec.size_bytes for node in nodes for spec in node.outputs
        )
        if kind == "fused":
            assert {spec.dtype for node in nodes for spec in node.outputs} == {"bfloat16"}
            assert {node.kernel for node in nodes} == {Kernel.NORMALIZATION}
    assert moved["fused"] < moved["unfused"] / 5


def test_networks_without_such_norms_stay_as_they_are() -> None:
    prints = {kind: load_network("zoo:gpt2-tiny", norms=kind).capture().fingerprint for kind in ("", "fused")}
    assert prints["fused"] == prints[""]
    assert load_network("zoo:llama2-7b", norms="fused").capture() != load_network("zoo:llama2-7b").capture()


class _Norms(nn.Module):
    """Two norms, between them a product; where a ``watched`` one hands its inverse root out, it is no kernel's."""

    def __init__(self, *, watched: bool) -> None:
        super().__init__()
        self.first, self.last = nn.RMSNorm(8, eps=1e-6), nn.Parameter(torch.ones(8))
        self.product, self.watched = nn.Linear(8, 8), watched

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.product(self.first(x))
        inverse = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        z = self.last * (y * inverse)
        return (z * z).mean() + (inverse.mean() if self.watched else 0.0)


@pytest.mark.parametrize("watched", [False, True])
def test_torchs_own_norm_is_found_and_one_that_others_look_into_is_left(watched: bool) -> None:
    inputs = (BatchTensor(name="x", kind="features", shape=(4, 8)),)
    graph = capture_module(lambda: _Norms(watched=watched), inputs, name="norms")
    network = at_precision(at_batch(with_norms(graph, "fused"), 2), "float64")
    assert operators(network, RMS_NORM) == (1 if watched else 2)
    assert sum(node.op == INVERSE_ROOT and node.phase is Phase.FORWARD for node in network.nodes) == watched
    assert_equals_autograd(network, _Norms(watched=watched).double(), seed=3)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="norms 'apex' is not one of fused, unfused"):
        load_network("zoo:llama2-7b", norms="apex")
