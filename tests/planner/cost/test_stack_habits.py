"""What single stacks do otherwise than Megatron: in memory and in time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.cost.memory.device import training_memory
from planner.cost.memory_traits import SCRIPTED_LOSS_BYTES, traits_of
from planner.cost.stacks import Stack
from planner.cost.training_run import Recompute
from tests.planner.cost.transformers import GPT, LLAMA, run


def test_a_compiled_loss_holds_the_logits_once_more() -> None:
    plain, fused = (training_memory(run(tp=2, stack=Stack.MEGATRON, fused_loss=fused)) for fused in (False, True))
    logits = GPT.sequence_length * GPT.vocabulary / 2
    assert fused.allocated_bytes - plain.allocated_bytes == pytest.approx(4 * logits)
    scripted = training_memory(run(tp=2, stack=Stack.MEGATRON, fused_loss=True, scripted_loss=True))
    more = SCRIPTED_LOSS_BYTES - traits_of(Stack.MEGATRON).compiled_loss_bytes
    assert scripted.allocated_bytes - fused.allocated_bytes == pytest.approx(more * logits)


@pytest.mark.parametrize(("micro_batches", "waiting"), [(8, 2), (1, 1)])
def test_head_gradients_that_wait_are_kept(micro_batches: int, waiting: int) -> None:
    at_once, later = (
        training_memory(run(tp=2, pp=2, micro_batches=micro_batches, deferred_head_batches=deferred))
        for deferred in (0, 2)
    )
    each = 2 * GPT.sequence_length * (GPT.vocabulary / 2 + GPT.hidden)
    assert later.stages[-1].activations - at_once.stages[-1].activations == pytest.approx(waiting * each)
    assert later.stages[0] == at_once.stages[0]


def test_checkpointing_by_operator_keeps_queries_values_attention_gate_and_output() -> None:
    wanted = run(LLAMA, stack=Stack.COMPILED, recompute=Recompute.FULL, every_second_product=True)
    kept = training_memory(wanted).stages[0].activations
    ends = training_memory(run(LLAMA, stack=Stack.COMPILED, recompute=Recompute.FULL)).stages[0].activations
    ends -= LLAMA.layers * LLAMA.sequence_length * LLAMA.hidden * 2
    elements = 4 * LLAMA.hidden + LLAMA.key_value_heads * LLAMA.head_size + LLAMA.feed_forward
    assert kept - ends == pytest.approx(LLAMA.layers * LLAMA.sequence_length * elements * 2)


def test_checkpointing_by_operator_lies_between_all_and_nothing() -> None:
    def kept(**setup: Any) -> float:
        return training_memory(run(LLAMA, stack=Stack.EAGER, micro_batch=4, **setup)).stages[0].activations

    by_operator = kept(recompute=Recompute.FULL, every_second_product=True)
    assert kept(recompute=Recompute.FULL) < by_operator < kept()
    assert np.isfinite(by_operator)
