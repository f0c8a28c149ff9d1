"""What norms compute of a row stays in float32 in half the width; nothing else does, and no other precision changes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from planner.graph.operator_graph import OperatorGraph, TensorRef
from planner.graph.rewriting import wide_nodes
from planner.graph.scaling import at_precision
from planner.networks.zoo.llama import RootMeanSquareNorm
from planner.sharding.local_operator import prepare
from simulator.program import Phase
from tests.planner.sharding.alone import Alone

Full = Callable[[str], OperatorGraph]


def test_only_what_leads_to_the_root_and_back_is_wide(full_graph: Full) -> None:
    graph = at_precision(full_graph("llama"), "float16")
    wide = [node for node in graph.nodes if "float32" in {spec.dtype for spec in node.outputs}]
    assert {node.module.rpartition(".")[2] for node in wide} == {"attention_norm", "feed_forward_norm", "norm"}
    of_one = [node.name.removeprefix("norm/") for node in wide if node.module == "norm"]
    assert of_one[:4] == ["pow", "mean", "add", "rsqrt"]
    assert all(name.startswith("backward/") for name in of_one[4:])
    forward = [index for index, node in enumerate(graph.nodes) if node in wide and node.phase is Phase.FORWARD]
    kept = {graph.nodes[index].op for index in forward if _is_read_backward(graph, index)}
    assert kept == {"aten.rsqrt.default"}, "tensors of a layer's size are not kept in float32"


def _is_read_backward(graph: OperatorGraph, index: int) -> bool:
    return any(graph.nodes[user].phase is Phase.BACKWARD for user in graph.consumers.get(TensorRef(index), ()))


def test_gradients_have_the_types_of_what_they_are_gradients_of(full_graph: Full) -> None:
    graph = at_precision(full_graph("llama"), "bfloat16")
    for parameter in graph.parameters:
        assert parameter.gradient is not None
        assert graph.spec(parameter.gradient) == graph.nodes[parameter.node].outputs[0]


def test_wider_precisions_and_other_networks_are_as_they_were(full_graph: Full) -> None:
    assert not wide_nodes(full_graph("gpt"))
    doubled = at_precision(full_graph("llama"), "float64")
    assert "float32" not in {spec.dtype for node in doubled.nodes for spec in node.outputs}


def test_operators_of_both_widths_compute_in_the_wider(full_graph: Full) -> None:
    """300² is beyond float16, the mean of squares of 1e-4 rounds to zero in it."""
    graph = at_precision(full_graph("llama"), "float16")
    square = next(node for node in graph.nodes if node.name == "norm/pow")
    run = prepare(graph, square, (), (), ())
    (made,) = run([torch.tensor([300.0, 1e-4]).half()], Alone())
    assert made.dtype == torch.float32
    assert made[0] == 90_000
    assert made[1] > 0
    product = next(node for node in graph.nodes if node.name == "norm/mul")
    (scaled,) = prepare(graph, product, (), (), ())([torch.tensor([2.0]).half(), torch.tensor([1e-3])], Alone())
    assert scaled.dtype == torch.float16


def test_the_module_computes_them_so_too() -> None:
    norm = RootMeanSquareNorm(4, 1e-6).half()
    for size in (1e-4, 300.0):
        x = torch.full((4,), size).half().requires_grad_()
        made = norm(x)
        made.sum().backward()
        assert made.dtype == torch.float16
        assert torch.isfinite(made).all()
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
    assert norm.double()(torch.ones(4).double()).dtype == torch.float64
