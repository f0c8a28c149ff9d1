"""What is sent inside operators, and how long operators wait for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.lowering.placed import local_share
from planner.sharding.inner_messages import inner_messages, message_bytes, message_count, waiting_time
from planner.sharding.rules import InnerMessage, Rule, rules_for
from simulator.program import Collective, Phase
from tests.planner.sharding.single_nodes import Given, one_node

KEYS = InnerMessage(Collective.SEND, tensors=(1, 2), circulating=True, overlapped=True)
seconds = st.floats(0.0, 10.0)


def test_reduced_elements_are_one_of_the_messages() -> None:
    exchange = InnerMessage(Collective.ALL_TO_ALL, tensors=(0,))
    reduced = InnerMessage(Collective.ALL_REDUCE, elements=16)
    assert inner_messages(Rule((0,), (0,), True)) == ()
    assert inner_messages(Rule((0,), (0,), True, 16)) == (reduced,)
    assert inner_messages(Rule((0,), (0,), True, 16, (exchange,))) == (reduced, exchange)


def test_payload_follows_what_is_local() -> None:
    heads = Given((2, 8, 16, 4), "float32")
    graph, node = one_node("aten._scaled_dot_product_flash_attention_for_cpu.default", heads, heads, heads, 0.0, True)
    whole = 2 * 8 * 16 * 4 * 4
    assert message_bytes(graph, node, KEYS, [0.5, 0.25, 0.25, 0.5, 0.5]) == 2 * whole / 4
    shared = InnerMessage(Collective.SEND, tensors=(1, 2), divisor=4)
    assert message_bytes(graph, node, shared, [1.0] * 5) == 2 * whole / 4
    states = [np.array([1.0, 0.5])] * 5
    np.testing.assert_allclose(message_bytes(graph, node, KEYS, states), [2 * whole, whole])
    rows = InnerMessage(Collective.ALL_REDUCE, tensors=(1,), divisor=4, uncut=True)
    assert message_bytes(graph, node, rows, [1.0, 1 / 6, 1.0, 1.0, 1.0], 3) == pytest.approx(whole / 2 / 4)
    narrow, pieces = one_node("aten._log_softmax.default", Given((8, 16), "bfloat16"), 1, False)
    assert message_bytes(narrow, pieces, replace(rows, tensors=(0,), divisor=16), [0.5, 0.5], 2) == 8 * 4


IMAGE, CHANNELS = Given((8, 6, 4, 4), batch=0), Given((6,))


@pytest.mark.parametrize(
    ("phase", "call"),
    [
        (Phase.FORWARD, ("aten._native_batch_norm_legit.no_stats", IMAGE, CHANNELS, CHANNELS, True, 0.1, 1e-5)),
        (Phase.BACKWARD, ("aten.native_batch_norm_backward.default", IMAGE, IMAGE, CHANNELS, None, None,
                          CHANNELS, CHANNELS, True, 1e-5, [True, True, True])),
        (Phase.BACKWARD, ("aten.native_batch_norm_backward.default", IMAGE, IMAGE, None, None, None,
                          CHANNELS, CHANNELS, True, 1e-5, [True, False, False])),
    ],
)  # fmt: skip
def test_ranks_with_some_channels_sum_over_the_batch_for_these_alone(phase: Phase, call: tuple[Any, ...]) -> None:
    graph, node = one_node(*call, batch_output=0)
    node = replace(node, phase=phase)
    rules = rules_for(graph, node)
    by_batch = next(rule for rule in rules if rule.reduced_elements)
    by_channel = next(rule for rule in rules if rule.outputs[0] == 1 and 0 in rule.inputs)
    (message,) = inner_messages(by_batch)
    for other, channels in ((by_batch, 6), (by_channel, 2)):
        placed = zip((*by_batch.inputs, *by_batch.outputs), (*other.inputs, *other.outputs), strict=True)
        shares = [local_share(placements, (1, 3)) for placements in placed]
        assert message_bytes(graph, node, message, shares, 1) == 2 * 8 * channels


def test_a_loss_that_is_cut_by_classes_may_run_in_another_precision() -> None:
    """A strategy found in one precision is one in every other, as ``execute --precision`` asks."""
    logits = (Given((8, 16), dtype) for dtype in ("bfloat16", "float16", "float32", "float64"))
    first, *others = (rules_for(*one_node("aten._log_softmax.default", given, 1, False)) for given in logits)
    assert any(rule.messages for rule in first)
    assert all(found == first for found in others)


@given(st.integers(1, 16), seconds, seconds)
def test_a_ring_takes_as_long_as_its_turns(size: int, sent: float, work: float) -> None:
    """Turn by turn: a rank works on a piece while the next one travels, and waits for whichever is later."""
    clock = 0.0
    for turn in range(size):
        travels = sent if turn < size - 1 else 0.0
        clock += max(work / size, travels)
    assert work + waiting_time(KEYS, size, sent, work) == pytest.approx(clock)
    assert message_count(KEYS, size) == size - 1


@given(st.integers(2, 16), seconds, seconds)
def test_what_is_not_overlapped_is_waited_for(size: int, sent: float, work: float) -> None:
    assert waiting_time(InnerMessage(Collective.ALL_TO_ALL, tensors=(0,)), size, sent, work) == sent
    beside = InnerMessage(Collective.ALL_TO_ALL, tensors=(0,), overlapped=True)
    assert waiting_time(beside, size, sent, work) == pytest.approx(max(sent - work, 0.0))
