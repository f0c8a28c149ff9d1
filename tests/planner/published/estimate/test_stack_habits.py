"""What single stacks do otherwise than Megatron: in memory and in time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost.memory.device import training_memory
from planner.cost.memory_traits import SCRIPTED_LOSS_BYTES, traits_of
from planner.cost.stacks import Stack
from planner.cost.training_run import OptimizerSharding, Recompute, TrainingRun
from planner.published.estimate.step import Coefficients, StageTimes, stage_times
from planner.published.estimate.work import Message, work_of
from tests.planner.published.estimate.transformers import GPT, LLAMA, run

PLAIN = Coefficients()


def message_s(wanted: TrainingRun, message: Message) -> float:
    work = work_of([wanted])
    return float(work.inside[message][0] + work.outside[message][0])


def staged(wanted: TrainingRun) -> StageTimes:
    return stage_times(work_of([wanted]), PLAIN)


def test_all_reduce_in_float32_costs_four_scatters_of_16_bits() -> None:
    """An all-reduce moves what a reduce-scatter and a gather move, and float32 is twice as wide."""
    scattered = run(dp=64, optimizer_sharding=OptimizerSharding.ZERO1, gradient_bytes=2)
    whole = replace(scattered, setup=replace(scattered.setup, scattered_gradients=False, sent_gradient_bytes=4))
    few, many = (message_s(each, Message.GRADIENT_REDUCE) for each in (scattered, whole))
    assert 2 < many / few < 4.5
    assert message_s(whole, Message.PARAMETER_GATHER) == message_s(scattered, Message.PARAMETER_GATHER)


def test_gradients_are_reduced_once_whatever_the_sharding() -> None:
    for sharding in OptimizerSharding:
        for scattered in (True, False):
            wanted = run(dp=8, optimizer_sharding=sharding, scattered_gradients=scattered)
            assert (message_s(wanted, Message.GRADIENT_REDUCE) > 0) != (sharding is OptimizerSharding.ZERO3)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gate_apart_sends_its_input_gradient(sequence_parallel: bool) -> None:
    common: dict[str, Any] = {"tp": 4, "sequence_parallel": sequence_parallel}
    together, apart = (staged(run(LLAMA, **common, separate_gate=separate)) for separate in (False, True))
    more = float((apart.layer_backward - together.layer_backward)[0])
    assert float((apart.layer_forward - together.layer_forward)[0]) == 0
    one = message_s(run(LLAMA, **common), Message.TENSOR)
    assert more == pytest.approx(0 if sequence_parallel else one, rel=0.05)


def test_without_a_gate_or_tensor_ranks_nothing_is_sent_apart() -> None:
    for shape, tp in ((GPT, 4), (LLAMA, 1)):
        together, apart = (staged(run(shape, tp=tp, separate_gate=separate)) for separate in (False, True))
        assert float(apart.layer_backward[0]) == float(together.layer_backward[0])


def test_the_loss_of_whole_logits_does_not_shrink_with_tensor_ranks() -> None:
    def last(tp: int, *, cut: bool) -> float:
        stage = staged(run(LLAMA, tp=tp, vocabulary_parallel_loss=cut))
        return float((stage.last_forward + stage.last_backward)[0])

    assert last(1, cut=False) == last(1, cut=True)
    assert last(8, cut=False) > last(8, cut=True)
    assert message_s(run(LLAMA, tp=8), Message.LOGITS) == 0
    assert message_s(run(LLAMA, tp=8, vocabulary_parallel_loss=False), Message.LOGITS) > 0


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


@pytest.mark.parametrize(("width", "more"), [(7680, 0.0), (8192, 1 / 3)])
def test_deepspeed_gathers_attention_of_wide_layers_once_more(width: int, more: float) -> None:
    """Between recomputing attention and its gradient it uses 16 squares of the width: 0.94 and 1.07 times 1e9."""
    shape = replace(GPT, hidden=width, heads=64, head_size=width // 64, feed_forward=4 * width, key_value_heads=64)
    sharded: dict[str, Any] = {"dp": 64, "optimizer_sharding": OptimizerSharding.ZERO3, "recompute": Recompute.FULL}
    megatron, deepspeed = (
        staged(run(shape, **sharded, stack=stack, overlap_parameters=False))
        for stack in (Stack.MEGATRON, Stack.DEEPSPEED)
    )
    gather = message_s(run(shape, **sharded), Message.SHARD_GATHER)
    # Exposed in full, where nothing overlaps.
    longer = float((deepspeed.layer_backward - megatron.layer_backward)[0])
    assert longer == pytest.approx(more * gather, rel=0.01, abs=0.01 * gather)
