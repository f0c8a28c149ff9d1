"""What one rank runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from planner.graph.operator_graph import BatchSize, Node, OperatorGraph, TensorSpec
from planner.sharding import local_attention
from planner.sharding.local_attention import attend, attend_backward
from planner.sharding.local_operator import prepare
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.rules import Rule, rules_for
from simulator.errors import ExecutionError
from tests.planner.sharding.alone import Alone, call_operator
from tests.planner.sharding.checking import assemble, cut, rule_error
from tests.planner.sharding.single_nodes import Given, indices, one_node

R, P = REPLICATE, PARTIAL


def run(network: OperatorGraph, node: Node, rules: tuple[Rule, ...], rank: tuple[int, ...], *tensors: Tensor) -> Tensor:
    return prepare(network, node, rules, (2,) * len(rules), rank)(tensors, Alone())[0]


def test_only_the_first_rank_adds_the_bias_of_a_partial_product() -> None:
    network, node = one_node("aten.addmm.default", Given((3,)), Given((2, 4)), Given((4, 3)))
    rule = Rule((R, 1, 0), (P,), True)
    assert rule in rules_for(network, node)
    bias, left, right = torch.ones(3), torch.zeros(2, 2), torch.zeros(2, 3)
    assert run(network, node, (rule,), (0,), bias, left, right).equal(torch.ones(2, 3))
    assert run(network, node, (rule,), (1,), bias, left, right).equal(torch.zeros(2, 3))


def test_two_axes_that_cut_one_dim_cut_the_outer_first() -> None:
    network, node = one_node("aten.embedding.default", Given((8, 2)), indices(8))
    rule = Rule((0, R), (P,), False)
    words = torch.arange(8)
    for rank, rows in {(0, 0): (0, 1), (0, 1): (2, 3), (1, 0): (4, 5), (1, 1): (6, 7)}.items():
        found = run(network, node, (rule, rule), rank, torch.ones(2, 2), words)
        assert found.sum(1).nonzero().flatten().tolist() == list(rows)


def test_mean_divides_by_the_global_count() -> None:
    network, node = one_node("aten.mean.dim", Given((4, 6)), [1])
    assert run(network, node, (Rule((1,), (P,), True),), (0,), torch.ones(4, 3)).tolist() == [0.5] * 4


def test_shapes_become_local() -> None:
    network, node = one_node("aten.view.default", Given((4, 6, 2)), [24, 2])
    rules = (Rule((0,), (0,), True), Rule((2,), (1,), True))
    piece = torch.arange(24.0).view(4, 6, 1)[:2]
    assert run(network, node, rules, (0, 0), piece).shape == (12, 1)
    assert run(network, node, rules, (0, 0), piece.transpose(0, 1).contiguous().transpose(0, 1)).shape == (12, 1)


def test_batch_size_in_arguments() -> None:
    network, node = one_node("aten.div.Tensor", Given(()), 2)
    scaled = replace(node, args=(node.args[0], BatchSize(3)))
    assert call_operator(replace(network, batch_size=5), scaled, [torch.tensor(30.0)])[0].item() == 2.0


def test_dtype_arguments() -> None:
    network, node = one_node("aten._to_copy.default", Given((4,)), dtype=torch.bfloat16)
    assert node.kwargs == (("dtype", "torch.bfloat16"),)
    assert call_operator(network, node, [torch.ones(4)])[0].dtype == torch.bfloat16


def test_tensors_from_nothing_are_made_where_asked() -> None:
    network, node = one_node("aten.full.default", [4, 6], 2.0)
    part = prepare(network, node, (Rule((), (1,), True),), (2,), (1,), device=torch.device("meta"))([], Alone())[0]
    assert part.device.type == "meta"
    assert part.shape == (4, 3)


def test_outputs_that_are_not_computed_stay_out() -> None:
    rest = (None, [1], [1], [1], False, [0], 1, [False, True, False])
    given = (Given((2, 4, 6)), Given((2, 4, 6)), Given((4, 4, 3)))
    network, node = one_node("aten.convolution_backward.default", *given, *rest)
    found = call_operator(network, node, [torch.ones(s.shape) for s in given])
    assert [value is None for value in found] == [True, False, True]


def test_unknown_operator_is_named() -> None:
    network, node = one_node("aten.neg.default", Given((4,)))
    with pytest.raises(ExecutionError, match="mystery"):
        call_operator(network, replace(node, op="aten.mystery.default"), [torch.ones(4)])


def normalisation(dtype: str) -> tuple[OperatorGraph, Node, Rule]:
    channels = Given((4,), dtype)
    image = Given((8, 4, 3, 3), dtype)
    network, node = one_node("aten._native_batch_norm_legit.no_stats", image, channels, channels, True, 0.1, 1e-5)
    return network, node, next(rule for rule in rules_for(network, node) if rule.reduced_elements)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("float64", 1e-6)])
def test_synchronised_batch_norm_far_from_zero(dtype: str, tolerance: float) -> None:
    """Values around 10,000 with a spread of 1: squares summed in float32 would leave no digit of the variance."""
    network, node, rule = normalisation(dtype)
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    image = (10_000 + torch.randn(8, 4, 3, 3, generator=generator, dtype=torch.float64)).to(kind)
    weight, bias = torch.ones(4, dtype=kind), torch.zeros(4, dtype=kind)
    exact, _, deviation = torch.ops.aten._native_batch_norm_legit.no_stats(
        image.double(), weight.double(), bias.double(), True, 0.1, 1e-5
    )
    found = in_step(network, node, rule, [image, weight, bias])
    assert torch.cat([part[0] for part in found]).double().sub(exact).abs().max() < tolerance
    assert found[0][2].double().sub(deviation).abs().max() < tolerance
    assert found[0][1].dtype == kind


class Collecting(Alone):
    """Remembers what is to be added up."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def sum(self, tensor: Tensor, axis: int) -> Tensor:
        self.sent.append(tensor.clone())
        return tensor


class Total(Alone):
    """Knows the sum already."""

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def sum(self, tensor: Tensor, axis: int) -> Tensor:
        return self.total


def in_step(network: OperatorGraph, node: Node, rule: Rule, tensors: list[Tensor]) -> list[tuple[Tensor, ...]]:
    """Run two ranks of an operator with one reduction: first to learn what each sends, then with the sum."""
    pieces = [cut(tensor, (placement,), (2,)) for tensor, placement in zip(tensors, rule.inputs, strict=True)]
    collecting = Collecting()
    parts = [prepare(network, node, (rule,), (2,), (rank,)) for rank in range(2)]
    for rank, part in enumerate(parts):
        part([piece[rank,] for piece in pieces], collecting)
    assert [tensor.numel() for tensor in collecting.sent] == [rule.reduced_elements] * 2
    total = Total(collecting.sent[0] + collecting.sent[1])
    return [part([piece[rank,] for piece in pieces], total) for rank, part in enumerate(parts)]


def test_batch_norm_over_two_axes() -> None:
    network, node, rule = normalisation("float64")
    by_channel = Rule((1, 0, 0), (1, 0, 0), True)
    assert rule_error(network, node, (rule, rule), (2, 4)) < 1e-10
    assert rule_error(network, node, (rule, by_channel), (2, 2)) < 1e-10
    assert rule_error(network, node, (by_channel, rule), (2, 2)) < 1e-10


@pytest.mark.parametrize("placements", [(0, 0), (0, 1), (1, R), (P, 0), (0, P), (P, P)])
def test_cut_and_assemble_are_inverse(placements: tuple[int, int]) -> None:
    whole = torch.arange(32.0, dtype=torch.float64).view(8, 4)
    pieces = cut(whole, placements, (2, 2))
    found, spread = assemble(pieces, placements, (2, 2))
    assert spread == 0
    assert found.sub(whole).abs().max() < 1e-13


def test_copies_that_differ_are_found_out() -> None:
    assert assemble({(0,): torch.zeros(2), (1,): torch.ones(2)}, (R,), (2,))[1] == 1.0


def test_low_precision_runs() -> None:
    network, node, rule = normalisation("bfloat16")
    specs: list[TensorSpec] = [network.spec(ref) for ref in node.tensor_inputs]
    tensors = [torch.randn(spec.shape).bfloat16() for spec in specs]
    found = in_step(network, node, rule, tensors)
    whole = call_operator(network, node, tensors)
    assert torch.cat([part[0] for part in found]).sub(whole[0]).abs().max() < 0.1
    assert [t.dtype for t in found[0]] == [t.dtype for t in whole]


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("kind", ["causal", "masked", "added", "plain"])
def test_attention_without_the_fused_kernel(heads: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, gradient = torch.randn(2, 2, 4, 6, 3, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, heads, 6, 3, generator=generator, dtype=torch.float64)
    mask = {
        "masked": torch.ones(2, 1, 6, 6, dtype=torch.bool).tril(),
        "added": torch.randn(2, 1, 6, 6, generator=generator, dtype=torch.float64),
    }.get(kind)
    settings = {"causal": kind == "causal", "mask": mask, "scale": None}
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=mask, is_causal=kind == "causal", enable_gqa=heads != 4
    )
    expected.backward(gradient)
    output, normaliser = attend(query, key, value, **settings)
    assert output.sub(expected).abs().max() < 1e-12
    found = attend_backward(gradient, query, key, value, output, normaliser, **settings)
    for gradients, leaf in zip(found, leaves, strict=True):
        assert gradients.sub(leaf.grad).abs().max() < 1e-12


def test_attention_saves_what_the_fused_kernel_saves() -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 3, dtype=torch.float64)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    for ours, theirs in zip(attend(query, key, value, causal=True, mask=None, scale=None), fused, strict=True):
        assert ours.shape == theirs.shape
        assert ours.sub(theirs).abs().max() < 1e-12


@pytest.mark.parametrize("heads", [4, 2])
def test_fused_attention_of_gpus_is_called_as_it_wants_to_be(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, shapes and types alone; pieces of a ring have keys of another length than queries."""
    monkeypatch.setattr(local_attention, "_has_flash", lambda query: query.dtype is torch.bfloat16)
    query, gradient = torch.empty(2, 2, 4, 16, 8, dtype=torch.bfloat16, device="meta")
    key, value = torch.empty(2, 2, heads, 32, 8, dtype=torch.bfloat16, device="meta")
    settings = {"causal": False, "mask": None, "scale": 0.5}
    output, normaliser = attend(query, key, value, **settings)
    assert (output.shape, normaliser.shape, normaliser.dtype) == (query.shape, query.shape[:-1], torch.float32)
    found = attend_backward(gradient, query, key, value, output, normaliser, **settings)
    assert [one.shape for one in found] == [query.shape, key.shape, value.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_of_gpus_is_attention(heads: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    query, gradient = torch.randn(2, 2, 4, 32, 8, generator=generator, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, heads, 32, 8, generator=generator, device="cuda", dtype=torch.bfloat16)
    settings = {"causal": causal, "mask": None, "scale": None}

    def both() -> list[Tensor]:
        output, normaliser = attend(query, key, value, **settings)
        return [output, normaliser, *attend_backward(gradient, query, key, value, output, normaliser, **settings)]

    fused = both()
    monkeypatch.setattr(local_attention, "_has_flash", lambda _: False)
    for one, other in zip(fused, both(), strict=True):
        assert one.float().sub(other.float()).abs().max() < 2**-5 * other.float().abs().max()
