"""Batch sizes and precisions are pure changes of a captured graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.graph.scaling import at_batch, at_precision
from simulator.errors import InputError
from simulator.program import Phase

Full = Callable[[str], OperatorGraph]


@settings(max_examples=20, deadline=None)
@given(first=st.integers(1, 4096), second=st.integers(1, 4096))
def test_batch_sizes_compose(first: int, second: int, full_graph: Full) -> None:
    graph = full_graph("gpt")
    assert at_batch(at_batch(graph, first), second).nodes == at_batch(graph, second).nodes or (
        at_batch(at_batch(graph, first), second).flops() == pytest.approx(at_batch(graph, second).flops(), rel=1e-12)
    )
    assert at_batch(at_batch(graph, first), 1).nodes[-1].outputs == graph.nodes[-1].outputs


def test_work_grows_with_the_batch_and_parameters_do_not(full_graph: Full) -> None:
    for name in ("mlp", "gpt", "resnet50"):
        graph = full_graph(name)
        larger = at_batch(graph, 8)
        assert larger.flops() == pytest.approx(8 * graph.flops(), rel=1e-12)
        assert larger.parameter_count == graph.parameter_count
        assert larger.nodes[larger.inputs[0].node].outputs[0].shape[0] == 8
        assert at_batch(larger, 1) == graph


def test_gradients_have_the_shape_of_their_parameters(full_graph: Full) -> None:
    graph = at_batch(full_graph("resnet50"), 4)
    for parameter in graph.parameters:
        assert parameter.gradient is not None
        assert graph.spec(parameter.gradient) == graph.nodes[parameter.node].outputs[0]


def test_precision_changes_floats_and_dtype_arguments_only(full_graph: Full) -> None:
    graph = at_precision(full_graph("gpt"), "bfloat16")
    assert {spec.dtype for node in graph.nodes for spec in node.outputs} == {"bfloat16", "int64"}
    assert "torch.float32" not in repr(graph.nodes)
    assert graph.flops(Phase.FORWARD) == full_graph("gpt").flops(Phase.FORWARD)
    assert at_precision(full_graph("gpt"), "float32") is full_graph("gpt")


def test_rotary_tables_are_rounded_only_at_the_end(full_graph: Full) -> None:
    graph = at_precision(full_graph("llama"), "bfloat16")
    cosine = next(i for i, node in enumerate(graph.nodes) if node.op == "aten.cos.default")
    (reader,) = graph.consumers[TensorRef(cosine)]
    assert graph.nodes[cosine].outputs[0].dtype == "float64"
    assert graph.nodes[reader].outputs[0].dtype == "bfloat16"
    assert graph.nodes[reader].role is Role.CONSTANT


@pytest.mark.parametrize("batch", [0, -3])
def test_a_batch_must_be_positive(batch: int, full_graph: Full) -> None:
    with pytest.raises(InputError, match=f"{batch}"):
        at_batch(full_graph("mlp"), batch)


def test_an_unknown_precision_is_refused(full_graph: Full) -> None:
    with pytest.raises(InputError, match="'int7'"):
        at_precision(full_graph("mlp"), "int7")
