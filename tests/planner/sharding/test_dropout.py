"""Dropout draws one mask however it is sharded, and again in the backward pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from planner.graph.operator_graph import DROPOUT
from planner.sharding.context import positions_of
from planner.sharding.local_call import Moment
from planner.sharding.local_operator import dropped, prepare
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.rules import Rule, rules_for
from planner.sharding.sequence import SequenceCut
from tests.planner.sharding.alone import Alone
from tests.planner.sharding.checking import assemble, cut
from tests.planner.sharding.single_nodes import Given, one_node

SHAPE = (4, 8, 6)
NETWORK, NODE = one_node(DROPOUT, Given(SHAPE), 0.3)


def masked(rules: tuple[Rule, ...], sizes: tuple[int, ...], whole: Tensor, shared: SequenceCut | None = None) -> Tensor:
    """The whole result of ranks with these rules."""
    before = tuple(rule.inputs[0] for rule in rules)
    pieces = cut(whole, before, sizes)
    found = {
        rank: prepare(NETWORK, NODE, rules, sizes, rank, cut=shared)([piece], Alone())[0]
        for rank, piece in pieces.items()
    }
    total, spread = assemble(found, tuple(rule.outputs[0] for rule in rules), sizes)
    assert spread == 0
    return total


def test_every_sharding_has_the_same_mask() -> None:
    known = rules_for(NETWORK, NODE)
    assert {rule.outputs[0] for rule in known} == {0, 1, 2, REPLICATE, PARTIAL}
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = masked((), (), whole)
    assert 0.15 < float((expected == 0).double().mean()) < 0.45
    torch.testing.assert_close(expected[expected != 0], whole[expected != 0] / 0.7)
    for rules in (*((rule,) for rule in known), *product(known, known)):
        torch.testing.assert_close(masked(rules, (2,) * len(rules), whole), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_context_axis_has_the_same_mask(chunks: int) -> None:
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = [p for rank in range(2) for p in positions_of(8, rank, 2, causal=chunks > 1)]
    found = masked(
        (Rule((1,), (1,), True),), (2,), whole[:, order], SequenceCut(axis=0, length=8, stride=1, chunks=chunks)
    )
    torch.testing.assert_close(found, masked((), (), whole)[:, order], rtol=0, atol=0)


def test_steps_micro_batches_seeds_and_operators_differ() -> None:
    ones, places = torch.ones(10_000), torch.arange(10_000)
    start = Moment()
    moments = [start, *(replace(start, **{name: 1}) for name in ("seed", "step", "micro_batch"))]
    masks = [dropped(ones, 0.5, 7, places, 10_000, moment) > 0 for moment in moments]
    masks.append(dropped(ones, 0.5, 8, places, 10_000, start) > 0)
    for number, mask in enumerate(masks):
        assert abs(float(mask.double().mean()) - 0.5) < 0.02
        for other in masks[:number]:
            assert abs(float((mask == other).double().mean()) - 0.5) < 0.02
    assert dropped(ones, 0.5, 7, places, 10_000, Moment()).equal(dropped(ones, 0.5, 7, places, 10_000, start))
    assert not dropped(ones, 1.0, 7, places, 10_000, start).any()


def test_neighbours_are_independent() -> None:
    """Lag correlations of the kept elements stay within five standard errors."""
    count = 100_000
    kept = (dropped(torch.ones(count), 0.5, 3, torch.arange(count), count, Moment()) > 0).double() - 0.5
    for lag in (1, 2, 3, 16, 64, 768):
        correlation = float((kept[lag:] * kept[:-lag]).mean() * 4)
        assert abs(correlation) < 5 / count**0.5, lag
