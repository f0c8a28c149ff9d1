"""What the rule table says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from planner.graph.operator_graph import Role
from planner.graph.scaling import at_batch
from planner.sharding.local_call import operator
from planner.sharding.local_operator import _SPECIAL
from planner.sharding.placement import PARTIAL, REPLICATE, placement_name
from planner.sharding.rules import TABLE, Rule, has_rule, rules_for
from tests.planner.sharding.single_nodes import Given, indices, one_node
from tests.planner.sharding.small_networks import NETWORKS, graph


def written(rule: Rule) -> str:
    return " ".join(map(placement_name, rule.inputs)) + " -> " + " ".join(map(placement_name, rule.outputs))


def sharded(op: str, *args: object, **kwargs: object) -> set[str]:
    found = rules_for(*one_node(op, *args, **kwargs))
    assert {*found[0].inputs, *found[0].outputs} <= {REPLICATE}
    assert not found[0].splits_work
    assert len(set(found)) == len(found)
    return set(map(written, found[1:]))


def test_matrix_product() -> None:
    rules = sharded("aten.mm.default", Given((4, 6)), Given((6, 8)))
    assert rules == {"S(0) R -> S(0)", "S(1) S(0) -> P", "R S(1) -> S(1)"}


def test_bias_stays_replicated_when_the_summed_dim_is_sharded() -> None:
    rules = sharded("aten.addmm.default", Given((8,)), Given((4, 6)), Given((6, 8)))
    assert rules == {"R S(0) R -> S(0)", "R S(1) S(0) -> P", "S(0) R S(1) -> S(1)"}


def test_addition_passes_partial_sums_only_of_both() -> None:
    assert sharded("aten.add.Tensor", Given((4, 6)), Given((6,))) == {"S(0) R -> S(0)", "S(1) S(0) -> S(1)", "P P -> P"}
    assert sharded("aten.add.Tensor", Given((4,)), 1.0) == {"S(0) -> S(0)"}


def test_product_passes_partial_sums_of_one_side() -> None:
    assert sharded("aten.mul.Tensor", Given((4, 6)), Given((4, 1))) == {
        "S(0) S(0) -> S(0)",
        "S(1) R -> S(1)",
        "P R -> P",
        "R P -> P",
    }
    assert "P R -> P" in sharded("aten.div.Tensor", Given((4,)), Given((4,)))
    assert "R P -> P" not in sharded("aten.div.Tensor", Given((4,)), Given((4,)))


def test_partial_sums_are_not_rounded() -> None:
    import torch

    assert "P -> P" in sharded("aten._to_copy.default", Given((4,)), dtype=torch.float64)
    assert "P -> P" not in sharded("aten._to_copy.default", Given((4,)), dtype=torch.float32)
    assert "P -> P" not in sharded("aten.neg.default", indices(4))


@pytest.mark.parametrize(
    ("before", "after", "rules"),
    [
        ((4, 6, 8), (24, 8), {"S(0) -> S(0)", "S(2) -> S(1)", "P -> P"}),
        ((24, 8), (4, 6, 8), {"S(0) -> S(0)", "S(1) -> S(2)", "P -> P"}),
        ((4, 6), (4, 2, 3), {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"}),
        ((1, 6), (6,), {"S(1) -> S(0)", "P -> P"}),
        ((6,), (1, 6, 1), {"S(0) -> S(1)", "P -> P"}),
        ((4, 6), (6, 4), {"S(0) -> S(0)", "P -> P"}),
        ((2, 3, 5), (30,), {"S(0) -> S(0)", "P -> P"}),
    ],
)
def test_view_shards_the_leftmost_dim_of_each_group(
    before: tuple[int, ...], after: tuple[int, ...], rules: set[str]
) -> None:
    assert sharded("aten.view.default", Given(before), list(after)) == rules


def test_view_tells_the_batch_from_a_dim_of_one() -> None:
    node_graph, node = one_node("aten.view.default", Given((1, 6, 4), batch=0), [6, 4], batch_output=0)
    assert "S(0) -> S(0)" in map(written, rules_for(node_graph, node))
    assert "S(1) -> S(0)" not in map(written, rules_for(node_graph, node))


def test_sum_over_a_sharded_dim_is_partial() -> None:
    assert sharded("aten.sum.dim_IntList", Given((4, 6)), [0], True) == {"S(0) -> P", "S(1) -> S(1)", "P -> P"}
    assert sharded("aten.mean.dim", Given((4, 6)), [1]) == {"S(0) -> S(0)", "S(1) -> P", "P -> P"}
    assert sharded("aten.amax.default", Given((4, 6)), [1]) == {"S(0) -> S(0)"}


def test_softmax_keeps_its_dim_whole() -> None:
    assert sharded("aten._softmax.default", Given((4, 6)), -1, False) == {"S(0) -> S(0)"}


def test_embedding_by_vocabulary_is_a_masked_partial_lookup() -> None:
    rules = rules_for(*one_node("aten.embedding.default", Given((8, 6)), indices(4, 2)))
    by_word = next(rule for rule in rules if rule.inputs == (0, REPLICATE))
    assert by_word.outputs == (PARTIAL,)
    assert not by_word.splits_work
    assert {written(rule) for rule in rules[1:]} == {
        "S(0) R -> P",
        "S(1) R -> S(2)",
        "R S(0) -> S(0)",
        "R S(1) -> S(1)",
    }


def test_batch_norm_by_batch_reduces_two_numbers_a_channel() -> None:
    shape = Given((4, 6, 2, 2))
    rules = rules_for(
        *one_node("aten._native_batch_norm_legit.no_stats", shape, Given((6,)), Given((6,)), True, 0.1, 1e-5)
    )
    assert {(written(r), r.reduced_elements) for r in rules[1:]} == {
        ("S(1) S(0) S(0) -> S(1) S(0) S(0)", 0),
        ("S(0) R R -> S(0) R R", 12),
    }


def test_convolution_by_batch_and_channels() -> None:
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0])
    image, bias = Given((4, 6, 5, 5)), Given((8,))
    assert sharded("aten.convolution.default", image, Given((8, 6, 3, 3)), bias, *rest, 1) == {
        "S(0) R R -> S(0)",
        "S(1) S(1) R -> P",
        "R S(0) S(0) -> S(1)",
    }
    depthwise = sharded("aten.convolution.default", image, Given((6, 1, 3, 3)), None, *rest, 6)
    assert depthwise == {"S(0) R -> S(0)", "S(1) S(0) -> S(1)"}
    assert sharded("aten.convolution.default", image, Given((8, 3, 3, 3)), None, *rest, 2) == {"S(0) R -> S(0)"}


def test_layer_norm_backward_leaves_parameter_gradients_partial() -> None:
    x, statistic, weight = Given((4, 6)), Given((4, 1)), Given((6,))
    rules = sharded(
        "aten.native_layer_norm_backward.default", x, x, [6], statistic, statistic, weight, weight, [True, True, True]
    )
    assert rules == {"S(0) S(0) S(0) S(0) R R -> S(0) P P", "P R R R R R -> P P P"}


def test_unknown_operator_is_replicated() -> None:
    op = "aten.linalg_inv_ex.default"
    assert not has_rule(op)
    assert sharded(op, Given((4, 4))) == set()


@pytest.mark.parametrize("name", NETWORKS)
def test_rules_fit_every_node(name: str) -> None:
    network = graph(name)
    for node in network.nodes:
        assert has_rule(node.op), node.op
        for rule in rules_for(network, node):
            assert len(rule.inputs) == len(node.tensor_inputs)
            assert len(rule.outputs) == len(node.outputs)
            shapes = [network.spec(ref).shape for ref in node.tensor_inputs] + [spec.shape for spec in node.outputs]
            for placement, shape in zip((*rule.inputs, *rule.outputs), shapes, strict=True):
                assert PARTIAL <= placement < len(shape)


@pytest.mark.parametrize("name", NETWORKS)
def test_rules_do_not_depend_on_the_batch_size(name: str) -> None:
    network, other = graph(name), at_batch(graph(name), 1)
    for node, scaled in zip(network.nodes, other.nodes, strict=True):
        assert rules_for(network, node) == rules_for(other, scaled)


def test_how_parameters_inputs_and_constants_are_held() -> None:
    network = graph("gpt")
    for node in network.nodes:
        placements = [rule.outputs[0] for rule in rules_for(network, node)]
        if node.role is Role.PARAMETER:
            assert placements == [REPLICATE, *range(len(node.outputs[0].shape))]
        elif node.role is Role.INPUT:
            assert placements == [REPLICATE, 0]
        elif node.role is Role.CONSTANT:
            assert placements == [REPLICATE]


def test_table_holds_operators_that_exist() -> None:
    for op in TABLE:
        assert op in _SPECIAL or operator(op)


def test_rules_need_no_torch() -> None:
    code = "import sys, planner.sharding.rules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
