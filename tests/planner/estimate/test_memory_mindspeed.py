"""Device memory of what MindSpeed does its own way: products with their messages, and Megatron's legacy network."""

from __future__ import annotations

from typing import Any

import pytest

from planner.estimate.memory import training_memory
from planner.estimate.training_run import Stack
from tests.planner.estimate.test_memory import LLAMA_7B, MIXTRAL, run

TOKENS = LLAMA_7B.sequence_length


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 2),
        ({"overlap_tensor": False}, 0),
        ({"sequence_parallel": False}, 0),
        ({"tp": 1}, 0),
        ({"stack": Stack.MEGATRON}, 0),
    ],
)
def test_products_with_their_messages_keep_what_they_gather(changes: dict[str, Any], kept: int) -> None:
    """Two products of a layer gather their inputs; of a layer with experts only the one before attention."""
    plan = {"stack": Stack.MINDSPEED, "tp": 4, "sequence_parallel": True, "overlap_tensor": True, **changes}
    for shape, gathered in ((LLAMA_7B, kept), (MIXTRAL, kept / 2)):
        beside, apart = (
            training_memory(run(shape, **{**plan, "overlap_tensor": overlapped})).fullest
            for overlapped in (plan["overlap_tensor"], False)
        )
        whole = 2 * TOKENS * shape.hidden
        assert beside.activations - apart.activations == pytest.approx(shape.layers * gathered * whole)


def test_the_legacy_network_has_gates_of_single_operators_and_logits_less_their_maximum_apart() -> None:
    plan: dict[str, Any] = {"stack": Stack.MINDSPEED, "tp": 2}
    now, legacy = (training_memory(run(LLAMA_7B, **plan, legacy_model=legacy)).fullest for legacy in (False, True))
    gates = LLAMA_7B.layers * 2 * TOKENS * LLAMA_7B.feed_forward / 2
    assert legacy.activations - now.activations == pytest.approx(gates)
    assert legacy.working - now.working == pytest.approx(4 * TOKENS * LLAMA_7B.vocabulary / 2)


def test_layers_that_learn_locally_keep_nothing_for_a_backward_pass() -> None:
    """The first 12 of 32 layers: all of them lie on the first of two stages."""
    plan: dict[str, Any] = {"stack": Stack.MINDSPEED, "trained_fraction": 0.005}
    for pp, kept in ((1, (20 / 32,)), (2, (4 / 16, 1)), (4, (0, 0.5, 1, 1))):
        split = {**plan, "pp": pp, "micro_batches": 4}
        plain, local = (training_memory(run(LLAMA_7B, **split, local_share=share)).stages for share in (0.0, 12 / 32))
        ends = training_memory(run(LLAMA_7B, **split, local_share=1.0)).stages
        for whole, part, none, share in zip(plain, local, ends, kept, strict=True):
            layers = whole.activations - none.activations
            assert part.activations - none.activations == pytest.approx(share * layers)
