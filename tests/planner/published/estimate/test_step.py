"""The closed form of a step: it adds up, answers to sizes as it must, and agrees with simulated schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.training_run import TrainingRun, TransformerShape
from planner.published.estimate.predict import transformer_times
from planner.published.estimate.step import Coefficients, StageTimes, Step, stage_times, step_times
from planner.published.estimate.transformer_work import Part
from planner.published.estimate.work import work_of
from tests.planner.published.estimate.transformers import DEEPSEEK, GPT, LLAMA, MIXTRAL, RUNS, SOFTWARE, T5, run

SLOW = Coefficients(
    matmul=1.2, misaligned=1.3, memory=1.4, launch_s=2e-5, step_overhead_s=0.01, micro_batch_overhead_s=1e-3,
    jitter=0.02,
)  # fmt: skip


def timed(*runs: TrainingRun, k: Coefficients = SLOW) -> Step:
    return step_times(work_of(runs), k)


def staged(wanted: TrainingRun) -> StageTimes:
    return stage_times(work_of([wanted]), SLOW)


def seconds(wanted: TrainingRun) -> float:
    return float(timed(wanted).step_time_s[0])


def test_parts_add_up() -> None:
    step = timed(*RUNS)
    parts = (
        step.compute_s + step.exposed_communication_s + step.bubble_s + step.optimizer_s + step.overhead_s
    )  # fmt: skip
    assert parts == pytest.approx(step.step_time_s)
    for part in (step.compute_s, step.exposed_communication_s, step.bubble_s, step.optimizer_s, step.overhead_s):
        assert (part >= -1e-12).all()


def test_many_runs_take_as_long_as_each_alone() -> None:
    together = timed(*RUNS).step_time_s
    assert together == pytest.approx(np.array([seconds(each) for each in RUNS]))


SCHEDULES = [
    ("1f1b", {}), ("gpipe", {}), ("interleaved_1f1b", {"vpp": 2}), ("interleaved_1f1b", {"vpp": 3}), ("zb_h1", {}),
    ("multi_copy", {}),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 8), (4, 16), (8, 16), (8, 64)])
def test_the_closed_form_is_near_the_simulated_schedule(
    schedule: str, chunks: dict[str, int], pp: int, micro_batches: int
) -> None:
    wanted = run(
        replace(GPT, layers=48), tp=8, pp=pp, micro_batches=micro_batches, schedule=schedule, sequence_parallel=True,
        **chunks,
    )  # fmt: skip
    closed, simulated = (
        transformer_times([wanted], SOFTWARE, simulate=simulate)[0].step_time_s for simulate in (False, True)
    )
    # The closed form hides messages of paired passes in the ramps as well, where passes have no partner.
    assert closed == pytest.approx(simulated, rel=0.08 if schedule == "multi_copy" else 0.03)


@pytest.mark.parametrize(("schedule", "vpp"), [("zbv", 2), ("dualpipe", 1), ("dualpipe_v", 2)])
def test_schedules_without_a_formula_are_near_as_well(schedule: str, vpp: int) -> None:
    wanted = run(replace(GPT, layers=48), pp=4, micro_batches=32, schedule=schedule, vpp=vpp)
    closed, simulated = (
        transformer_times([wanted], SOFTWARE, simulate=simulate)[0].step_time_s for simulate in (False, True)
    )
    assert closed == pytest.approx(simulated, rel=0.05)


def test_without_stages_there_is_nothing_to_simulate() -> None:
    for wanted in (each for each in RUNS if each.setup.pp == 1):
        closed, simulated = (transformer_times([wanted], SOFTWARE, simulate=simulate)[0] for simulate in (False, True))
        assert closed == simulated
        assert closed.breakdown["bubble_s"] == 0


shapes = st.sampled_from([GPT, replace(LLAMA, sequence_length=2048), MIXTRAL, replace(T5, layers=6)])
plans = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 4]), "pp": st.sampled_from([1, 2, 4]), "dp": st.sampled_from([1, 4]),
        "micro_batches": st.sampled_from([4, 8]), "recompute": st.sampled_from(["none", "selective", "full"]),
        "optimizer_sharding": st.sampled_from(["none", "zero1", "zero3"]), "sequence_parallel": st.booleans(),
        "attention": st.sampled_from(["unfused", "flash2"]), "overlap_gradients": st.booleans(),
    }
)  # fmt: skip


@settings(deadline=None, max_examples=25)
@given(shape=shapes, plan=plans)
def test_more_work_never_takes_less_time(shape: TransformerShape, plan: dict[str, Any]) -> None:
    before = seconds(run(shape, **plan))
    longer = replace(shape, sequence_length=2 * shape.sequence_length)
    deeper = replace(shape, layers=shape.layers + plan["pp"])
    for more in (
        run(shape, **{**plan, "micro_batches": plan["micro_batches"] + 1}), run(shape, **{**plan, "micro_batch": 2}),
        run(longer, **plan), run(deeper, **plan), run(replace(shape, vocabulary=2 * shape.vocabulary), **plan),
    ):  # fmt: skip
        assert seconds(more) >= before


@settings(deadline=None, max_examples=15)
@given(shape=shapes, plan=plans)
def test_recomputing_costs_a_forward_pass_at_most(shape: TransformerShape, plan: dict[str, Any]) -> None:
    plans_by_kind = {kind: run(shape, **{**plan, "recompute": kind}) for kind in ("none", "selective", "full")}
    none, selective, full = (float(staged(each).layer_backward[0]) for each in plans_by_kind.values())
    again = float(staged(plans_by_kind["none"]).layer_forward[0])
    assert none <= selective <= none + again
    assert none <= full <= none + again
    times = [seconds(each) for each in plans_by_kind.values()]
    assert times[0] <= min(times[1:])


@settings(deadline=None, max_examples=15)
@given(shape=shapes, plan=plans)
def test_sharding_the_optimizer_changes_no_computation(shape: TransformerShape, plan: dict[str, Any]) -> None:
    none, zero1 = (timed(run(shape, **{**plan, "optimizer_sharding": kind})) for kind in ("none", "zero1"))
    assert none.compute_s == pytest.approx(zero1.compute_s)
    assert none.bubble_s == pytest.approx(zero1.bubble_s)
    assert zero1.optimizer_s <= none.optimizer_s


def test_only_some_layers_are_recomputed() -> None:
    times = [seconds(run(GPT, pp=2, recompute="full", recompute_layers=count)) for count in (3, 6, 12, 99, 0)]
    assert times == sorted(times)
    assert times[2:] == [times[2]] * 3


def test_overlap_hides_what_fits_behind_computation() -> None:
    plain, hidden = (timed(run(GPT, dp=8, micro_batch=8, overlap_gradients=overlap)) for overlap in (False, True))
    assert hidden.exposed_communication_s < plain.exposed_communication_s
    # However little there is to hide behind, hiding never costs.
    little, beside = (timed(run(GPT, dp=256, overlap_gradients=overlap)) for overlap in (False, True))
    assert beside.step_time_s <= little.step_time_s


def test_the_host_is_a_limit_where_kernels_are_short() -> None:
    tiny = replace(GPT, hidden=64, feed_forward=256, head_size=4, sequence_length=16)
    slow, slower = (timed(run(tiny), k=Coefficients(launch_s=launch)).step_time_s for launch in (1e-3, 2e-3))
    assert slower == pytest.approx(2 * slow, rel=0.05)


def test_coefficients_touch_what_they_name() -> None:
    wanted = run(MIXTRAL, dp=8, ep=8, micro_batches=4)
    plain = timed(wanted, k=Coefficients(launch_s=0.0))
    for name in ("matmul", "attention", "memory", "experts", "optimizer", "inside"):
        slower = timed(wanted, k=Coefficients(launch_s=0.0, **{name: 2.0}))
        assert plain.step_time_s < slower.step_time_s < 2 * plain.step_time_s
    assert timed(wanted, k=Coefficients(launch_s=0.0, outside=2.0)).step_time_s == plain.step_time_s


def test_a_step_ends_with_turning_weights_to_the_layout_of_the_device() -> None:
    wanted = run(GPT, hardware="ascend910-atlas800")
    turned = float(work_of([wanted]).layout_s[0])
    assert staged(wanted).optimizer[0] - SLOW.optimizer * work_of([wanted]).optimizer_s[0] == pytest.approx(turned)
    assert turned > 0


def test_a_stage_that_is_fuller_decides() -> None:
    shape = replace(GPT, vocabulary=1024)
    even, uneven = (
        run(shape, pp=4, micro_batches=64, layers_per_stage=layers) for layers in ((6, 6, 6, 6), (3, 12, 6, 3))
    )
    assert 1.8 < seconds(uneven) / seconds(even) < 2


def test_paired_passes_hide_messages() -> None:
    setup = {"dp": 16, "pp": 4, "ep": 16, "micro_batches": 16}
    alone, paired = (timed(run(MIXTRAL, "dgx-h100", schedule=schedule, **setup)) for schedule in ("1f1b", "dualpipe"))
    assert paired.exposed_communication_s < 0.5 * alone.exposed_communication_s


def test_messages_of_experts_hide_behind_other_micro_batches() -> None:
    alone, beside = (timed(run(MIXTRAL, "dgx-h100", dp=16, ep=16, overlap_experts=beside)) for beside in (False, True))
    assert beside.exposed_communication_s < alone.exposed_communication_s
    assert beside.step_time_s < alone.step_time_s


def test_the_published_step_of_deepseek_is_near() -> None:
    # DeepSeek-V3 (arXiv:2412.19437, section 3.1 and table 1): 14.8e12 tokens in 2.664e6 hours of H800, batches of
    # 15,360 sequences of 4,096 tokens on 2,048 devices, in FP8 with DualPipe.
    wanted = run(
        DEEPSEEK, "dgx-h800", dp=128, pp=16, ep=64, micro_batches=120, schedule="dualpipe", precision="fp8",
        optimizer_sharding="zero1", stack="transformer_engine",
    )  # fmt: skip
    expected = transformer_times([wanted], SOFTWARE, simulate=True)[0].step_time_s
    published = 2.664e6 * 3600 / 2048 / (14.8e12 / (15360 * 4096))
    assert expected == pytest.approx(published, rel=0.25)


def test_where_the_host_sets_the_pace_more_tensor_ranks_wait_longer_for_the_last() -> None:
    host = Coefficients(launch_s=1e-3)

    def layer(tp: int) -> float:
        return float(
            stage_times(work_of([run(replace(GPT, heads=32, key_value_heads=32), tp=tp)]), host).layer_forward[0]
        )

    # Two messages a layer and pass: a launch for each, and two more where two processors launch it.
    assert layer(2) - layer(1) == pytest.approx(2e-3, rel=0.05)
    assert layer(4) == pytest.approx(layer(2), rel=0.01)
    assert layer(8) - layer(1) == pytest.approx(6e-3, rel=0.05)
    assert layer(16) - layer(1) == pytest.approx(10e-3, rel=0.05)


@pytest.mark.parametrize("simulate", [True, False])
def test_fixed_costs_of_micro_batches_fall_to_the_last_stage_alone(simulate: bool) -> None:
    # Stages that have no loss have no such costs: filling the pipeline does not become slower by them.
    wanted = run(replace(GPT, vocabulary=1024), pp=4, micro_batches=2, layers_per_stage=(9, 9, 5, 1))

    def with_overhead(overhead: float) -> float:
        stacks = {str(wanted.setup.stack): {"micro_batch_overhead_s": overhead}}
        software = replace(SOFTWARE, coefficients=replace(SOFTWARE.coefficients, stacks=stacks))
        return transformer_times([wanted], software, simulate=simulate)[0].step_time_s

    assert 0.2 < with_overhead(0.2) - with_overhead(0.0) < 2 * 0.2 * 1.01


def test_grouped_products_launch_a_kernel_for_each_expert_of_the_rank() -> None:
    def experts(ep: int) -> float:
        work = work_of([run(MIXTRAL, dp=8, ep=ep)])
        return sum(float(kernels[0]) for (part, _), kernels in work.kernels.items() if part is Part.EXPERTS)

    # Two products forward, and two gradients of each backward.
    assert experts(1) - experts(8) == pytest.approx(6 * (8 - 1))


def test_host_and_device_of_equal_pace_wait_for_each_other() -> None:
    work = work_of([run(GPT)])
    device = float(stage_times(work, Coefficients(launch_s=0.0)).layer_forward[0])
    launch = device / (float(stage_times(work, Coefficients(launch_s=1.0)).layer_forward[0]))
    both = float(stage_times(work, Coefficients(launch_s=launch)).layer_forward[0])
    assert 1.1 * device < both < 1.4 * device
    # Far apart, the slower one alone counts.
    assert float(stage_times(work, Coefficients(launch_s=5 * launch)).layer_forward[0]) == pytest.approx(
        5 * device, rel=0.01
    )
