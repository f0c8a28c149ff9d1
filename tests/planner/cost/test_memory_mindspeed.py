"""Device memory of what MindSpeed does its own way: Megatron's legacy network, gates, layers that learn locally."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.memory.device import training_memory
from planner.cost.stacks import AttentionKernel, Stack
from tests.planner.cost.test_memory import LLAMA_7B, run

TOKENS = LLAMA_7B.sequence_length


def test_the_legacy_network_has_a_mask_a_layer_and_logits_less_their_maximum_apart() -> None:
    plan: dict[str, Any] = {"stack": Stack.MINDSPEED, "tp": 2, "attention": AttentionKernel.VENDOR}
    now, legacy = (training_memory(run(LLAMA_7B, **plan, legacy_model=legacy)).fullest for legacy in (False, True))
    assert legacy.workspace - now.workspace == pytest.approx(LLAMA_7B.layers * TOKENS**2)
    assert legacy.working - now.working == pytest.approx(4 * TOKENS * LLAMA_7B.vocabulary / 2)
    assert legacy.activations == now.activations


def test_a_gate_without_a_kernel_keeps_its_output() -> None:
    fused, single = (
        training_memory(run(LLAMA_7B, stack=Stack.MINDSPEED, single_gate=single)).fullest for single in (False, True)
    )
    gates = LLAMA_7B.layers * 2 * TOKENS * LLAMA_7B.feed_forward
    assert single.activations - fused.activations == pytest.approx(gates)


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
