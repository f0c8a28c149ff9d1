"""Device memory of runs under DeepSpeed: its pipeline engine, and what it offloads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.cost.memory.device import training_memory
from planner.cost.memory_traits import PLAIN_LOSS_BYTES, SUB_GROUP_ELEMENTS, traits_of
from planner.cost.stacks import Stack
from planner.cost.training_run import OptimizerSharding, TrainingRun, TrainingSetup
from tests.planner.cost.test_memory import A100, gpt, run


@pytest.mark.parametrize(
    ("changes", "bytes_a_logit"),
    [
        ({}, 4),
        ({"micro_batches": 1}, 0),
        ({"optimizer_sharding": OptimizerSharding.ZERO3}, 0),
        ({"stack": Stack.MEGATRON}, 0),
    ],
)
def test_pipelines_of_deepspeed_keep_the_logits_of_the_micro_batch_before(
    changes: dict[str, Any], bytes_a_logit: int
) -> None:
    setup = {"dp": 4, "micro_batch": 2, "stack": Stack.DEEPSPEED, "micro_batches": 4, **changes}
    kept, dropped = (
        training_memory(run(gpt(2, 1024, 16, vocabulary=51200), **setup, vocabulary_parallel_loss=parallel)).fullest
        for parallel in (True, False)
    )
    own = traits_of(setup["stack"]).loss_bytes
    tokens = 2 * 2048
    whole = PLAIN_LOSS_BYTES  # on the whole vocabulary
    assert dropped.working - kept.working == pytest.approx((whole - own - bytes_a_logit) * tokens * 51200)


@pytest.mark.parametrize("sharding", [OptimizerSharding.ZERO2, OptimizerSharding.ZERO3])
def test_offloaded_shards_wait_in_the_memory_of_the_host(sharding: OptimizerSharding) -> None:
    setup = TrainingSetup(devices=8, dp=8, optimizer_sharding=sharding, stack=Stack.DEEPSPEED)

    def stage(**changes: Any) -> Any:
        run = TrainingRun(network=gpt(24, 2048, 16), setup=replace(setup, **changes), hardware=A100)
        return training_memory(run).stages[0]

    here, states = stage(), stage(offload_optimizer=True)
    assert min(here.gradients, here.master_weights, here.moments) > 0
    assert (states.gradients, states.master_weights, states.moments) == (0, 0, 0)
    assert states.parameters == here.parameters
    everything = stage(offload_optimizer=True, offload_parameters=True)
    # Whole copies of what is only sharded in its states stay where they are.
    assert everything.parameters == (0 if sharding is OptimizerSharding.ZERO3 else here.parameters)


def test_gradients_that_every_rank_keeps_whole_stay_on_the_device() -> None:
    setup = TrainingSetup(devices=8, dp=8, optimizer_sharding=OptimizerSharding.ZERO1, offload_optimizer=True)
    run = TrainingRun(network=gpt(24, 2048, 16), setup=setup, hardware=A100)
    assert training_memory(run).stages[0].gradients > 0


@pytest.mark.parametrize(("dp", "bytes_each"), [(1, 6), (2, 8), (4, 8)])
def test_gradients_are_cloned_for_the_update_where_replicas_share_them_out(dp: int, bytes_each: int) -> None:
    """Flat gradients and their copies in float32, and the clones: most of all where samples are short."""
    sharded = {"optimizer_sharding": OptimizerSharding.ZERO1, "reduce_bucket_elements": 5e8, "gradient_bytes": 2}
    network = gpt(24, 4096, 32, sequence_length=32, learned_positions=32)
    stage = training_memory(run(network, dp=dp, tp=8, stack=Stack.DEEPSPEED, **sharded)).fullest
    assert stage.working == pytest.approx(bytes_each * stage.moments / 8)


def test_the_norm_after_the_embedding_keeps_its_input() -> None:
    """One tensor of the stream for every micro-batch in flight, on the first stage alone."""
    plan: dict[str, Any] = {"stack": Stack.DEEPSPEED, "pp": 4, "micro_batches": 8, "micro_batch": 2}
    plain, normed = (
        training_memory(run(gpt(8, 1024, 16, embedding_norm=norm), **plan)).stages for norm in (False, True)
    )
    kept = [more.activations - fewer.activations for more, fewer in zip(normed, plain, strict=True)]
    assert kept == pytest.approx([4 * 2 * 2048 * 1024 * 2, 0, 0, 0])


def test_gradients_that_are_made_anew_leave_holes_that_tools_show() -> None:
    """With float32 sums apart the 16-bit gradients go after every micro-batch, and activations take their blocks."""
    plan: dict[str, Any] = {
        "stack": Stack.DEEPSPEED, "pp": 4, "micro_batches": 8, "optimizer_sharding": OptimizerSharding.ZERO1
    }  # fmt: skip
    held, anew = (training_memory(run(gpt(8, 1024, 16), **plan, gradient_bytes=size)).stages[0] for size in (4, 6))
    assert held.headroom == pytest.approx(traits_of(Stack.DEEPSPEED).in_flight_share * held.activations)
    assert anew.headroom == 0
    assert anew.allocator_slack >= held.headroom


def test_zero3_updates_one_group_of_parameters_after_the_other() -> None:
    """``sub_group_size`` bounds the copies of gradients; ZeRO-2 makes those of its whole shard at once."""
    network = gpt(24, 6144, 48, sequence_length=32, learned_positions=32)
    sharded = {"dp": 4, "gradient_bytes": 2, "reduce_bucket_elements": 5e8, "stack": Stack.DEEPSPEED}
    working = {}
    for sharding in (OptimizerSharding.ZERO2, OptimizerSharding.ZERO3):
        stage = training_memory(run(network, **sharded, optimizer_sharding=sharding)).fullest
        assert stage.moments / 8 > SUB_GROUP_ELEMENTS
        working[sharding] = stage.working
        assert working[OptimizerSharding.ZERO2] == pytest.approx(8 * stage.moments / 8)
    assert working[OptimizerSharding.ZERO3] <= 8 * SUB_GROUP_ELEMENTS < working[OptimizerSharding.ZERO2]
