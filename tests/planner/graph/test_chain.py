"""Units follow each other, and only the boundary tensor and its gradient cross between them."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor, nn

from planner.graph.capture import capture_module
from planner.graph.chain import Chain, chain
from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph, Role
from planner.networks import load_network
from planner.networks.inputs import InputSpec
from simulator.program import Phase
from tests.planner.graph.conftest import small_network

NETWORKS = ("gpt", "llama", "bert", "mlp", "resnet50")
SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 4}
MIXTRAL = {**SIZES, "num_key_value_heads": 2, "vocab_size": 61, "num_local_experts": 4, "num_experts_per_tok": 2}


@cache
def captured(name: str) -> OperatorGraph:
    return small_network(name).capture()


def holds_together(graph: OperatorGraph, cut: Chain) -> None:
    """Every trained operator is in one unit, and nothing but the boundaries crosses between units."""
    trained = [i for i, n in enumerate(graph.nodes) if n.role is Role.OPERATOR and depends_on_parameters(graph, i)]
    times = Counter(i for unit in cut.units for i in unit.nodes)
    assert all(times[i] == 1 for i in trained)
    assert set(times) == set(range(len(graph.nodes)))
    sums = [i for i, n in enumerate(graph.nodes) if n.role is Role.GRADIENT_SUM]
    assert all(times[i] == 1 for i in sums)
    unit_of = {i: number for number, unit in enumerate(cut.units) for i in unit.nodes if times[i] == 1}
    tied = {p.gradient.node for p in graph.parameters if p.gradient and times[p.node] > 1}
    for index in (*trained, *sums):
        if index in tied:
            continue
        for ref in graph.nodes[index].tensor_inputs:
            source = graph.nodes[ref.node]
            if source.role not in (Role.OPERATOR, Role.GRADIENT_SUM) or times[ref.node] > 1:
                continue
            here, there = unit_of[index], unit_of[ref.node]
            if here != there:
                forward = source.phase is Phase.FORWARD
                assert here - there == (1 if forward else -1)
                boundary = cut.boundaries[min(here, there)]
                assert ref == (boundary.forward if forward else boundary.gradient)


def depends_on_parameters(graph: OperatorGraph, index: int) -> bool:
    node = graph.nodes[index]
    if node.role is Role.PARAMETER or node.phase is Phase.BACKWARD:
        return True
    return any(depends_on_parameters(graph, ref.node) for ref in node.tensor_inputs)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("unfolded", [False, True], ids=["folded", "unfolded"])
def test_units_of_the_built_in_families_follow_each_other(name: str, unfolded: bool) -> None:
    graph = captured(name)
    graph = unfold(graph) if unfolded else graph
    cut = chain(graph)
    assert len(cut.units) == len(cut.boundaries) + 1 > 2
    holds_together(graph, cut)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_folded_graph_and_its_unfolded_form_have_the_same_units(name: str) -> None:
    graph = captured(name)
    folded, whole = chain(graph), chain(unfold(graph))
    assert folded.names() == whole.names()
    assert len(set(whole.names())) == len(whole.names())
    assert [whole.units[i].name for i in whole.positions] == list(whole.names())


def test_blocks_of_gpt3_are_units_between_its_embedding_and_its_head() -> None:
    graph = load_network("zoo:gpt3-175b").capture()
    cut = chain(graph)
    assert cut.names() == ("token_embedding", *(f"blocks.{i}" for i in range(96)), "norm")
    assert [(u.run, u.count) for u in cut.units] == [(None, 1), (0, 1), (0, 95), (None, 1)]
    assert [set(u.nodes) for u in cut.units[1:3]] == [set(graph.runs[0].first), set(graph.runs[0].second)]
    shared = set(cut.units[0].nodes) & set(cut.units[-1].nodes)
    assert [graph.nodes[i].name for i in shared] == ["token_embedding.weight"]


def test_residual_networks_are_cut_between_blocks() -> None:
    names = chain(captured("resnet50")).names()
    assert names[1:-1] == tuple(
        f"layer{s}.{b}" for s, blocks in ((1, 3), (2, 4), (3, 6), (4, 3)) for b in range(blocks)
    )


def test_layers_without_products_stay_with_the_one_before() -> None:
    assert chain(captured("mlp")).names() == ("layers.0", "layers.1", "layers.2")


@pytest.mark.slow
def test_mixtures_of_experts_are_cut_between_blocks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mixtral", **MIXTRAL, "max_position_embeddings": 32})
    )
    graph = load_network(f"hf:{tmp_path / 'config.json'}", sequence_length=8).capture()
    cut = chain(graph)
    holds_together(graph, cut)
    assert [name.rpartition(".")[2] for name in cut.names()[1:-1]] == ["0", "1", "2"]


class Ladder(nn.Module):
    """Layers in a row; those that climb up again read what those that went down left."""

    def __init__(self, skips: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.skips = skips

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        kept = []
        for number, layer in enumerate(self.layers):
            features = layer(features).relu()
            mirrored = len(self.layers) - 2 - number
            if number < self.skips:
                kept.append(features)
            elif mirrored < self.skips and kept:
                features = features + kept.pop()
        loss: Tensor = (features - target).abs().mean()
        return loss


def ladder(skips: int, depth: int = 6) -> OperatorGraph:
    inputs = (
        InputSpec(name="features", kind="features", shape=(8,)),
        InputSpec(name="target", kind="target", shape=(8,)),
    )
    return capture_module(lambda: Ladder(skips, depth), inputs, name="ladder")


@pytest.mark.parametrize("skips", [0, 1, 2])
def test_skips_across_layers_leave_fewer_units(skips: int) -> None:
    graph = ladder(skips)
    cut = chain(graph)
    holds_together(graph, cut)
    assert len(cut.units) == {0: 6, 1: 3, 2: 3}[skips]


def test_a_network_without_cuts_is_one_unit() -> None:
    graph = ladder(0, depth=1)
    cut = chain(graph)
    assert (len(cut.units), cut.boundaries) == (1, ())
    assert set(cut.units[0].nodes) == set(range(len(graph.nodes)))


def test_recomputation_starts_from_the_boundary() -> None:
    """A unit's backward operators read forward tensors of the unit itself or the boundary before it."""
    graph = captured("gpt")
    cut = chain(graph)
    for number, unit in enumerate(cut.units):
        for index in unit.nodes:
            if graph.nodes[index].phase is Phase.BACKWARD:
                for ref in graph.nodes[index].tensor_inputs:
                    if graph.nodes[ref.node].phase is Phase.FORWARD and ref.node not in unit.nodes:
                        assert ref == cut.boundaries[number - 1].forward
