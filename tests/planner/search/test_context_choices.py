"""Along a context axis neighbours agree on every tensor; gradients of parameters alone are summed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.graph.operator_graph import OperatorGraph
from planner.networks import load_network
from planner.planning.planning import plan_network
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest
from planner.search.problem.variables import Kind, decisions
from planner.search.units.stage_decisions import context_choices
from planner.sharding.context import ALGORITHMS, Algorithm, context_axis
from planner.sharding.placement import PARTIAL, REPLICATE
from simulator.errors import UnsupportedError


def network(name: str) -> OperatorGraph:
    return load_network(f"zoo:{name}", sequence_length=32).capture()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-70b"])
def test_nothing_is_redistributed_but_gradients(name: str, algorithm: Algorithm) -> None:
    graph = network(name)
    made = decisions(graph)
    choices = context_choices(made, context_axis(graph, algorithm))
    summed = set()
    for edge in made.edges:
        written, read = choices[edge.source].writes[edge.tensor], choices[edge.target].reads[edge.tensor]
        if made.variables[edge.target].kind is Kind.PARAMETER:
            assert read == REPLICATE
            summed |= {edge.tensor} if written == PARTIAL else set()
        else:
            assert written == read
    assert summed == {parameter.gradient for parameter in graph.parameters}


def test_choices_are_those_of_the_variable_where_it_has_them() -> None:
    """Only views that keep the local order, attention and the tokens have a choice that no other axis offers."""
    graph = network("gpt2-tiny")
    made = decisions(graph)
    choices = context_choices(made, context_axis(graph))
    for variable, choice in zip(made.variables, choices, strict=True):
        first = variable.choices[0]
        assert len(choice.rules) == len(first.rules)
        assert (choice.reads.keys(), choice.writes.keys()) == (first.reads.keys(), first.writes.keys())
        if choice not in variable.choices:
            kinds = {graph.nodes[node].kernel for node in variable.nodes}
            assert variable.kind is Kind.INPUT or kinds & {"view", "attention"}, variable


def test_experts_are_planned_on_a_context_axis(tmp_path: Path) -> None:
    """Also beside attention with sinks, and with ranks that have experts of their own."""
    config = {
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "vocab_size": 512, "sliding_window": 128, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for spec, pins in ((f"hf:{tmp_path}", {}), ("py:tests.planner.execution.small:mixtral", {"ep": "2", "dp": "2"})):
        request = PlanRequest(
            network=spec, hardware="dgx-h100", devices=4, global_batch=4, pins=Pins.read({"cp": "2", **pins}), top=1,
            sensitivity=False,
        )  # fmt: skip
        (best,) = plan_network(request).candidates
        assert best.plan.degree("context") == 2


def test_a_window_is_cut_by_all_to_all_where_a_ring_cannot(tmp_path: Path) -> None:
    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
        "sliding_window": 128, "max_position_embeddings": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    def request(**pins: str) -> PlanRequest:
        return PlanRequest(
            network=f"hf:{tmp_path}", hardware="dgx-h100", devices=4, global_batch=4, sequence_length=1024,
            pins=Pins.read({"cp": "2", **pins}), top=1, sensitivity=False,
        )  # fmt: skip

    (best,) = plan_network(request()).candidates
    assert best.plan.context_algorithm == "all_to_all"
    with pytest.raises(UnsupportedError, match="window"):
        plan_network(request(context_algorithm="ring"))
