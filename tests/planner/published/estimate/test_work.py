"""Work of runs: many at once as each alone, nothing for what a run does not have, messages among the right ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import OptimizerSharding, Recompute, TrainingSetup, TransformerShape
from planner.published.estimate.transformer_work import Part
from planner.published.estimate.work import LAYOUT_BYTES, Message, Phase, Work, WorkClass, collective_seconds, work_of
from simulator.collectives import collective_time
from simulator.errors import InputError
from simulator.program import Collective
from simulator.topology import group_shape
from tests.planner.published.estimate.transformers import DEEPSEEK, GPT, LLAMA, MIXTRAL, RUNS, T5, profile, run


def numbers(work: Work, row: int) -> dict[str, float]:
    """Every number of a row that is not zero."""
    found: dict[str, Any] = {"optimizer": work.optimizer_s, "layout": work.layout_s, "element": work.element_bytes}
    for name in ("seconds", "core_seconds", "kernels", "inside", "outside"):
        found |= {f"{name} {key}": values for key, values in getattr(work, name).items()}
    return {name: float(values[row]) for name, values in found.items() if values[row] != 0}


@pytest.mark.parametrize("seed", [1, 2])
def test_many_runs_are_timed_as_each_alone(seed: int) -> None:
    order = list(RUNS)
    random.Random(seed).shuffle(order)
    together = work_of(order)
    for row, each in enumerate(order):
        assert numbers(together, row) == pytest.approx(numbers(work_of([each]), 0)), each.network.name


def test_no_runs_have_no_work() -> None:
    work = work_of([])
    assert work.optimizer_s.shape == (0,)


def test_what_a_run_lacks_costs_nothing_and_launches_nothing() -> None:
    work = work_of([run(GPT), run(MIXTRAL, dp=8, ep=8), run(T5)])
    assert (work.seconds[Part.EXPERTS, Phase.FORWARD, WorkClass.MATMUL] > 0).tolist() == [False, True, False]
    for part, only in ((Part.EXPERTS, 1), (Part.ENCODER, 2), (Part.CROSS_ATTENTION, 2)):
        for phase in Phase:
            assert (work.kernels[part, phase] > 0).tolist() == [row == only for row in range(3)]
    rotary, plain = (work_of([run(replace(GPT, rotary=rotary))]) for rotary in (True, False))
    key = (Part.ATTENTION_BLOCK, Phase.FORWARD)
    assert rotary.kernels[key] - plain.kernels[key] == 2


def message(wanted: Message, **setup: Any) -> tuple[float, float]:
    shape = setup.pop("shape", GPT)
    work = work_of([run(shape, **setup)])
    return float(work.inside[wanted][0]), float(work.outside[wanted][0])


def expected(kind: Collective, payload: float, size: int, stride: int) -> float:
    hardware = profile("dgx-a100")
    return float(collective_time(hardware, kind, payload, group_shape(hardware, size, stride)))


HIDDEN = GPT.sequence_length * GPT.hidden * 2.0


def test_tensor_ranks_add_up_activations() -> None:
    assert message(Message.TENSOR, tp=8) == (pytest.approx(expected(Collective.ALL_REDUCE, HIDDEN, 8, 1)), 0)
    pair = expected(Collective.ALL_GATHER, HIDDEN, 8, 1) + expected(Collective.REDUCE_SCATTER, HIDDEN, 8, 1)
    assert message(Message.TENSOR, tp=8, sequence_parallel=True)[0] == pytest.approx(pair)
    assert message(Message.TENSOR, dp=8) == (0, 0)


def test_data_ranks_reduce_gradients_across_tensor_and_context_ranks() -> None:
    setup = {"tp": 4, "dp": 4, "cp": 2}
    parameters = float(work_of([run(GPT, **setup)]).columns.dense_parameters[0])
    whole = expected(Collective.ALL_REDUCE, 4 * parameters, 8, 4)
    assert message(Message.GRADIENT_REDUCE, **setup)[1] == pytest.approx(whole)
    sharded = message(Message.GRADIENT_REDUCE, optimizer_sharding="zero1", **setup)[1]
    assert sharded == pytest.approx(expected(Collective.REDUCE_SCATTER, 4 * parameters, 8, 4))
    gathered = message(Message.PARAMETER_GATHER, optimizer_sharding="zero1", **setup)[1]
    assert gathered == pytest.approx(expected(Collective.ALL_GATHER, 2 * parameters, 8, 4))


def test_sharded_parameters_are_gathered_whole_in_every_layer() -> None:
    work = work_of([run(LLAMA, dp=8, optimizer_sharding="zero3", stack="eager")])
    layer = float(work.columns.dense_parameters[0]) / LLAMA.layers
    assert layer * LLAMA.layers == pytest.approx(8.03e9, rel=0.01)
    assert work.inside[Message.SHARD_GATHER][0] == pytest.approx(expected(Collective.ALL_GATHER, 2 * layer, 8, 1))
    assert work.inside[Message.SHARD_REDUCE][0] == pytest.approx(expected(Collective.REDUCE_SCATTER, 4 * layer, 8, 1))
    assert work.inside[Message.GRADIENT_REDUCE][0] == 0


def test_shards_within_nodes_leave_them_for_their_part_of_the_gradients_alone() -> None:
    setup = {"dp": 16, "optimizer_sharding": "zero3", "shard_group": 8, "stack": "eager"}
    layer = float(work_of([run(GPT, **setup)]).columns.dense_parameters[0]) / GPT.layers
    assert message(Message.SHARD_GATHER, **setup)[1] == 0
    assert message(Message.SHARD_REDUCE, **setup)[1] == pytest.approx(
        expected(Collective.ALL_REDUCE, 4 * layer / 8, 2, 8)
    )


@pytest.mark.parametrize(
    ("shape", "width"), [(LLAMA, 2 * 8 * 128), (DEEPSEEK, 128 * (192 + 128))], ids=["grouped", "latent"]
)
def test_context_ranks_see_the_keys_and_values_of_all(shape: TransformerShape, width: int) -> None:
    seen = expected(Collective.ALL_GATHER, 2.0 * shape.sequence_length * width, 4, 1)
    assert message(Message.CONTEXT, shape=shape, cp=4)[0] == pytest.approx(seen)
    halved = expected(Collective.ALL_GATHER, shape.sequence_length * width, 4, 2)
    assert message(Message.CONTEXT, shape=shape, cp=4, tp=2)[0] == pytest.approx(halved)


def test_tokens_travel_to_experts_once_for_each_that_they_visit() -> None:
    copies = MIXTRAL.sequence_length * MIXTRAL.hidden * 2.0 * 2
    sent = message(Message.EXPERT, shape=MIXTRAL, dp=8, ep=8)
    assert sent[0] == pytest.approx(expected(Collective.ALL_TO_ALL, copies, 8, 1))
    halved = message(Message.EXPERT, shape=MIXTRAL, dp=4, tp=2, ep=8, sequence_parallel=True)
    assert halved[0] == pytest.approx(expected(Collective.ALL_TO_ALL, copies / 2, 8, 1))
    cut = {"shape": MIXTRAL, "dp": 4, "tp": 4, "ep": 4, "expert_tp": 2, "sequence_parallel": True}
    assert sum(message(Message.EXPERT, **cut)) == pytest.approx(expected(Collective.ALL_TO_ALL, copies / 4, 4, 2))
    pair = [expected(kind, copies / 2, 2, 1) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)]
    assert message(Message.EXPERT_TENSOR, **cut)[0] == pytest.approx(sum(pair))


def test_states_of_experts_are_shared_among_their_copies_only() -> None:
    stage = {"dp": 64, "ep": 64, "optimizer_sharding": "zero2"}
    alone, shared = work_of([run(DEEPSEEK, **stage), run(DEEPSEEK, **{**stage, "ep": 32})]).optimizer_s
    # Two copies of twice as many experts share their states: every rank has as much to update.
    assert alone == pytest.approx(shared, rel=0.01)


def test_collectives_beside_the_engine() -> None:
    hardware = profile("dgx-a100")
    payload, size, stride = np.array([0.0, 1e6, 1e8, 1e8]), np.array([8.0, 8, 1, 16]), np.array([1.0, 1, 1, 8])
    inside, outside = collective_seconds(hardware, Collective.ALL_REDUCE, payload, size, stride)
    assert inside.tolist() == [0, pytest.approx(expected(Collective.ALL_REDUCE, 1e6, 8, 1)), 0, 0]
    assert outside.tolist() == [0, 0, 0, pytest.approx(expected(Collective.ALL_REDUCE, 1e8, 16, 8))]


def products_s(hardware: str, precision: str) -> float:
    work = work_of([run(replace(GPT, hidden=4096, feed_forward=16384), hardware, precision=precision, micro_batch=8)])
    key = (Part.DENSE, Phase.FORWARD)
    return sum(float(work.seconds.get((*key, kind), np.zeros(1))[0]) for kind in WorkClass if kind != WorkClass.MEMORY)


def test_devices_compute_in_the_next_wider_precision_they_have() -> None:
    for hardware, wanted, instead in (
        ("dgx-a100", "fp8", "bf16"), ("dgx-h100", "fp4", "fp8"), ("dgx1-v100", "tf32", "fp32"),
    ):  # fmt: skip
        assert products_s(hardware, wanted) == pytest.approx(products_s(hardware, instead)), hardware
    assert products_s("dgx-a100", "tf32") == pytest.approx(2 * products_s("dgx-a100", "bf16"), rel=0.01)
    assert products_s("dgx-h100", "fp8") < 0.7 * products_s("dgx-h100", "bf16")
    assert products_s("dgx-b200", "fp4") == pytest.approx(products_s("dgx-b200", "fp8") / 2)
    assert (
        work_of([run(precision="fp8")])
        .seconds.keys()
        .isdisjoint({(part, phase, WorkClass.LOW_PRECISION) for part in Part for phase in Phase})
    )


shapes = st.builds(
    replace,
    st.sampled_from([GPT, LLAMA, MIXTRAL, DEEPSEEK, T5]),
    layers=st.sampled_from([3, 7]),
    heads=st.sampled_from([1, 3, 64]),
    hidden=st.sampled_from([1, 100, 4096]),
    feed_forward=st.sampled_from([0, 257, 16384]),
    vocabulary=st.sampled_from([1, 50257]),
    sequence_length=st.sampled_from([1, 7, 2048]),
    attention_window=st.sampled_from([0, 5, 99999]),
    causal=st.booleans(),
    dropout=st.booleans(),
)
degree = st.sampled_from([1, 2, 3, 16])
setups = st.fixed_dictionaries(
    {
        "dp": degree, "tp": degree, "pp": degree, "cp": st.sampled_from([1, 2]), "vpp": st.sampled_from([1, 2]),
        "ep": st.sampled_from([1, 2, 512]), "expert_tp": st.sampled_from([1, 2]),
        "shard_group": st.sampled_from([0, 5]),
        "precision": st.sampled_from(["fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]),
        "attention": st.sampled_from(AttentionKernel), "stack": st.sampled_from(Stack),
        "recompute": st.sampled_from(Recompute), "optimizer_sharding": st.sampled_from(OptimizerSharding),
        "sequence_parallel": st.booleans(), "trained_fraction": st.sampled_from([0.0, 0.01, 1.0]),
        "schedule": st.sampled_from(["1f1b", "zbv", "dualpipe"]),
    }
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(shape=shapes, setup=setups, name=st.sampled_from(["dgx-a100", "dgx1-v100", "ascend910-atlas800", "dgx-b200"]))
def test_odd_runs_have_finite_times(shape: TransformerShape, setup: dict[str, Any], name: str) -> None:
    found = numbers(work_of([run(shape, name, **setup)]), 0)
    assert all(np.isfinite(value) and value > 0 for value in found.values())


@pytest.mark.parametrize(
    ("change", "told"),
    [({"tp": 0}, "tp is 0"), ({"micro_batches": 0}, "micro_batches is 0"), ({"precision": "bfloat16"}, "'bfloat16'")],
)
def test_impossible_setups_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        TrainingSetup(devices=1, **change)


@pytest.mark.parametrize(
    ("change", "told"),
    [({"hidden": 0}, "hidden is 0"), ({"layers": 0}, "layers is 0"), ({"encoder_layers": 2}, "encoder_sequence")],
)
def test_impossible_shapes_are_refused(change: dict[str, int], told: str) -> None:
    with pytest.raises(InputError, match=told):
        replace(GPT, **change)
    assert MIXTRAL.experts is not None
    with pytest.raises(InputError, match="99 dense layers"):
        replace(MIXTRAL, experts=replace(MIXTRAL.experts, dense_layers=99))


def sums_s(**setup: Any) -> float:
    work = work_of([run(GPT, **setup)])
    kinds = [key for key in work.seconds if key[2] is WorkClass.GRADIENT_SUM]
    return sum(float(work.seconds[key][0]) for key in kinds)


def test_gradients_of_later_micro_batches_are_added_up() -> None:
    eager = {"stack": "eager", "gradient_bytes": 2}
    assert sums_s(**eager) == 0
    assert 0 < sums_s(micro_batches=2, **eager) < sums_s(micro_batches=16, **eager)
    # Kept wider than they are computed, those of the first are added as well.
    assert sums_s(stack="eager", gradient_bytes=4) > sums_s(micro_batches=16, **eager)
    assert sums_s(micro_batches=16, stack="megatron", gradient_bytes=2) == 0
    assert sums_s(micro_batches=16, dp=8, optimizer_sharding="zero3", **eager) == 0


def test_trained_weights_are_turned_to_the_layout_of_an_ascend_910_once_a_step() -> None:
    first, later = profile("ascend910-atlas800"), "ascend910b-atlas800t-a2"
    whole, halved, frozen, on_later = work_of([
        run(hardware=first.name), run(hardware=first.name, tp=2), run(hardware=first.name, trained_fraction=0.0),
        run(hardware=later),
    ]).layout_s  # fmt: skip
    weights = 12 * 24 * 2048**2 + 51200 * 2048
    assert whole == pytest.approx(weights * LAYOUT_BYTES["ascend910"] / first.memory_bandwidth, rel=0.01)
    assert halved == pytest.approx(whole / 2, rel=0.01)
    assert frozen == on_later == 0


def test_a_dispatcher_that_sends_tokens_once_sends_fewer_copies() -> None:
    copies = {
        once: message(Message.EXPERT, shape=DEEPSEEK, dp=32, ep=32, tokens_sent_once=once) for once in (False, True)
    }
    # Eight experts on four nodes: 3.6 nodes on average instead of eight copies.
    assert copies[True][1] / copies[False][1] == pytest.approx(4 * (1 - 0.75**8) / 8, rel=0.05)
    alone = [
        sum(message(Message.EXPERT, shape=replace(MIXTRAL, experts=replace(MIXTRAL.experts, per_token=1)), dp=8, ep=8,
                    tokens_sent_once=once))
        for once in (False, True)
    ]  # fmt: skip
    assert alone[0] == pytest.approx(alone[1])
