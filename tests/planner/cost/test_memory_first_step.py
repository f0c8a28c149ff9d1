"""What a first step needs besides: functions that warm up, and the largest piece of a tensor that a rank updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.cost.memory.activations import layer_activations
from planner.cost.memory.device import training_memory
from planner.cost.memory_traits import traits_of
from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import OptimizerSharding
from tests.planner.cost.test_memory import LLAMA_7B, llama, run


def test_functions_warm_up_on_whole_sequences_before_the_model_is_made() -> None:
    """Biases and GELU of single operators keep eight tensors; two calls and their input stand at one time."""
    long = llama(2, 4096, 32, 32, 11008, sequence_length=262144)
    inner = 2 * 262144 * 11008 / 2
    plan: dict[str, Any] = {"tp": 2, "cp": 8, "sequence_parallel": True}
    (ascend,) = training_memory(run(long, **plan, stack=Stack.MINDSPEED)).stages
    (fused,) = training_memory(run(long, **plan, stack=Stack.MEGATRON)).stages
    assert ascend.first_step_bytes == pytest.approx(17 * inner + ascend.workspace)
    assert fused.first_step_bytes < ascend.first_step_bytes
    assert ascend.allocated_bytes < ascend.first_step_bytes


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_rank_updates_what_its_shard_of_a_bucket_has_of_a_table(overlapped: bool) -> None:
    """Of two replicas' shards of a stage one lies in the table; of the table's own bucket each is half."""
    shape = llama(2, 4096, 32, 32, 11008, vocabulary=150_016, sequence_length=64)
    plan: dict[str, Any] = {"dp": 2, "pp": 2, "micro_batches": 2, "optimizer_sharding": OptimizerSharding.ZERO1}
    stages = training_memory(run(shape, **plan, stack=Stack.MINDSPEED, overlap_gradients=overlapped)).stages
    for first, stage in zip((True, False), stages, strict=True):
        states = stage.parameters + stage.gradients + stage.master_weights + stage.moments
        table, shard = 150_016 * 4096, stage.parameters / 2 / 2
        piece = table / 2 if overlapped and first else shard
        assert stage.first_step_bytes - states - stage.workspace == pytest.approx(4 * piece)


def test_fused_attention_of_ascend_keeps_maxima_and_sums_eight_times() -> None:
    setup = run(LLAMA_7B, stack=Stack.MINDSPEED, attention=AttentionKernel.VENDOR).setup
    traits = traits_of(Stack.MINDSPEED)
    eight, one = (
        layer_activations(LLAMA_7B, setup, replace(traits, attention_statistics=size)).saved for size in (64.0, 4.0)
    )
    assert traits.attention_statistics == 2 * 8 * 4
    assert eight - one == 60 * LLAMA_7B.heads * LLAMA_7B.sequence_length
