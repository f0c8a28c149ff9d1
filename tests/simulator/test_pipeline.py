"""Pipelines: bubbles and memory of the papers, both engines, sends and pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import engine, fast_engine
from simulator.errors import InputError, ProgramError
from simulator.pipeline_passes import step_of_passes
from simulator.schedules import SCHEDULES, Schedule, make_schedule, parse_schedule_csv
from tests.oracles.passes import (
    PipelineCosts,
    PipelineResult,
    peak_activation_bytes,
    pipeline_table,
    simulate_pipeline,
)
from tests.simulator.schedule_formulas import FORMULAS, ScheduleSize
from tests.simulator.test_schedules import EVERY, shapes

TIMES = [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 1.5, 1.25), (1.0, 2.0, 0.75)]


def simulated(name: str, shape: ScheduleSize) -> PipelineResult:
    schedule = make_schedule(name, shape.ranks, shape.micro_batches, shape.chunks)
    costs = PipelineCosts(
        forward_s=shape.forward_s,
        backward_s=shape.backward_s,
        input_gradient_s=shape.input_gradient_s,
        weight_gradient_s=shape.weight_gradient_s,
        activation_bytes=1.0,
        weight_activation_bytes=shape.weight_share,
    )
    return simulate_pipeline(schedule, costs)


def applicable(name: str) -> list[ScheduleSize]:
    """Shapes for which a paper's formula of a schedule holds; chunks are stages of a rank."""
    chunks = {"interleaved_1f1b": (1, 2, 4), "zbv": (2,), "dualpipe": (2,), "dualpipe_v": (2,)}.get(name, (1,))
    ranks = (1,) if name == "gradient_accumulation" else (2, 4, 6)
    found = [
        ScheduleSize(
            ranks=p,
            micro_batches=m * p,
            chunks=v,
            forward_s=f,
            input_gradient_s=i,
            weight_gradient_s=w,
            overlapped_s=2 * f if name == "multi_copy" else f + i + w,
            overlapped_backward_s=2 * (i + w),
            weight_share=share,
        )
        for p in ranks
        for m in (2, 4)
        for v in chunks
        for f, i, w in TIMES
        for share in (1.0, 0.25)
    ]
    return [shape for shape in found if FORMULAS[name].applies(shape)]


@EVERY
def test_bubble_and_memory_are_those_of_the_paper(name: str) -> None:
    formulas, cases = FORMULAS[name], applicable(name)
    assert len(cases) >= 8
    for shape in cases:
        result = simulated(name, shape)
        assert result.bubble_s.max() == pytest.approx(formulas.bubble_s(shape), abs=1e-9), shape
        peak = formulas.peak(shape)
        if len(peak) == shape.ranks:
            np.testing.assert_allclose(result.peak_activation_bytes, peak)
        else:
            assert result.peak_activation_bytes.max() == pytest.approx(peak[0])


def test_formulas_are_those_printed_in_the_papers() -> None:
    """Figures of the papers by hand: p = 8, m = 32; F = 1, I = 1, W = 0.5."""
    shape = ScheduleSize(
        ranks=8, micro_batches=32, forward_s=1, input_gradient_s=1, weight_gradient_s=0.5, overlapped_s=2.5
    )
    assert FORMULAS["1f1b"].bubble_s(shape) == 7 * 2.5
    assert FORMULAS["zb_h1"].bubble_s(shape) == 7 * (1 + 1.5 - 2 * 0.5)
    assert FORMULAS["dualpipe"].bubble_s(shape) == 3 * (2.5 + 1.5 - 3 * 0.5)
    assert FORMULAS["dualpipe"].peak(shape)[0] == 9
    chunked = ScheduleSize(ranks=8, micro_batches=32, chunks=4)
    assert FORMULAS["interleaved_1f1b"].peak(chunked)[0] == 8 * 4 * (1 + 7 / (8 * 4))
    ratio = FORMULAS["gpipe"].bubble_s(shape) / (32 * 2.5 + FORMULAS["gpipe"].bubble_s(shape))
    assert ratio == pytest.approx((8 - 1) / (32 + 8 - 1))


def test_interleaving_divides_the_bubble_of_the_same_network() -> None:
    whole, halves = ScheduleSize(ranks=4, micro_batches=8), ScheduleSize(
        ranks=4, micro_batches=8, chunks=2, forward_s=0.5, input_gradient_s=0.5, weight_gradient_s=0.5
    )  # fmt: skip
    assert simulated("interleaved_1f1b", halves).bubble_s.max() == simulated("1f1b", whole).bubble_s.max() / 2


def test_no_formula_is_missing() -> None:
    assert set(FORMULAS) == set(SCHEDULES)
    assert all("arXiv" in FORMULAS[name].source for name in ("gpipe", "1f1b", "zb_h1", "zbv", "dualpipe"))


def random_costs(ranks: int, stages: int, seed: int, *, overlap: bool) -> PipelineCosts:
    random = np.random.default_rng(seed)
    return PipelineCosts(
        forward_s=random.uniform(1, 2, stages),
        backward_s=random.uniform(2, 4, stages),
        input_gradient_s=random.uniform(1, 2, stages),
        forward_communication_s=random.uniform(0, 1, stages),
        backward_communication_s=random.uniform(0, 1, stages),
        send_s=random.uniform(0, 0.5, stages),
        parameter_gather_s=random.uniform(0, 2, stages),
        gradient_reduce_s=random.uniform(0, 2, stages),
        activation_bytes=random.uniform(1, 9, stages),
        prologue_s=random.uniform(0, 1, ranks),
        epilogue_s=random.uniform(0, 1, ranks),
        overlap_sends=overlap,
    )


def drawn(name: str, data: st.DataObject) -> tuple[Schedule, PipelineCosts]:
    """A schedule of any shape, and random costs of its passes."""
    schedule = make_schedule(name, *shapes(name, data))
    costs = random_costs(
        schedule.ranks, schedule.stages, data.draw(st.integers(0, 99)), overlap=data.draw(st.booleans())
    )
    return schedule, costs


@EVERY
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_engines_agree_and_order_holds(name: str, data: st.DataObject) -> None:
    schedule, costs = drawn(name, data)
    table = pipeline_table(schedule, costs)
    (starts, ends), reference = fast_engine.run(table), engine.run(table)
    np.testing.assert_allclose(starts, reference[0], rtol=1e-12)
    np.testing.assert_allclose(ends, reference[1], rtol=1e-12)
    result = simulate_pipeline(schedule, costs)
    assert result.length_s == ends.max()
    assert (result.bubble_s >= -1e-9).all()
    assert (result.stall_s >= -1e-9).all()
    needed = np.flatnonzero(schedule.source >= 0)
    sends = np.zeros(len(needed))
    senders = schedule.source[needed]
    crosses = schedule.action_rank[senders] != schedule.action_rank[needed]
    away = schedule.kind[senders] > 0
    sends[crosses] = np.asarray(costs.send_s)[schedule.stage[senders] - away][crosses]
    assert (result.starts_s[needed] >= result.ends_s[senders] + sends - 1e-9).all()


@EVERY
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_passes_alone_take_what_the_engine_gives(name: str, data: st.DataObject) -> None:
    schedule = make_schedule(name, *shapes(name, data))
    forward, backward = np.random.default_rng(data.draw(st.integers(0, 99))).random((2, schedule.stages))
    costs = PipelineCosts(forward_s=forward, backward_s=backward)
    found = simulate_pipeline(schedule, costs)
    assert step_of_passes(schedule, forward, backward) == found.step_time_s
    assert step_of_passes(schedule, forward, backward, together=True) == found.length_s


def test_sends_delay_and_block() -> None:
    """Two stages, one micro-batch: F0, send, F1, B1, send, B0; with more of them a blocking sender falls behind."""
    costs = {"forward_s": 1.0, "backward_s": 2.0, "send_s": 0.5}
    assert simulate_pipeline(make_schedule("1f1b", 2, 1), PipelineCosts(**costs)).step_time_s == 7.0
    schedule = make_schedule("gpipe", 2, 4)
    beside = simulate_pipeline(schedule, PipelineCosts(**costs))
    blocking = simulate_pipeline(schedule, PipelineCosts(**costs, overlap_sends=False))
    assert beside.starts_s[:4].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert blocking.starts_s[:4].tolist() == [0.0, 1.5, 3.0, 4.5]
    assert blocking.step_time_s > beside.step_time_s


def test_prologue_and_epilogue_frame_the_step() -> None:
    schedule = make_schedule("1f1b", 4, 8)
    plain = simulate_pipeline(schedule, PipelineCosts(forward_s=1.0, backward_s=2.0))
    framed = simulate_pipeline(
        schedule, PipelineCosts(forward_s=1.0, backward_s=2.0, prologue_s=3.0, epilogue_s=np.array([5.0, 0, 0, 0]))
    )
    assert framed.step_time_s == plain.step_time_s + 8.0
    np.testing.assert_allclose(framed.starts_s, plain.starts_s + 3.0)
    np.testing.assert_allclose(framed.stall_s, plain.stall_s)


def test_collectives_of_stages_run_beside_the_pipeline() -> None:
    """Two stages: gathers delay the first passes; the reduction of stage 1 hides behind the last pass of stage 0.

    What is left of it and the update of its rank hide behind the first pass of stage 0 in the next step.
    """
    schedule, times = make_schedule("1f1b", 2, 2), {"forward_s": 1.0, "backward_s": 2.0}
    plain = simulate_pipeline(schedule, PipelineCosts(**times))
    late = simulate_pipeline(schedule, PipelineCosts(**times, parameter_gather_s=np.array([0.5, 1.25])))
    assert late.starts_s[[0, 4]].tolist() == [0.5, 1.5]
    assert late.step_time_s == plain.step_time_s + 0.5
    hidden = simulate_pipeline(schedule, PipelineCosts(**times, gradient_reduce_s=np.array([0.0, 2.0])))
    assert hidden.step_time_s == plain.step_time_s
    shown = simulate_pipeline(schedule, PipelineCosts(**times, gradient_reduce_s=np.array([0.0, 3.0]), epilogue_s=1.0))
    assert (shown.length_s, shown.step_time_s) == (plain.step_time_s + 1.0 + 1.0, plain.step_time_s + 1.0)
    np.testing.assert_allclose(shown.stall_s, plain.stall_s)
    chunks = make_schedule("interleaved_1f1b", 1, 4, 2)
    both = simulate_pipeline(chunks, PipelineCosts(**times, gradient_reduce_s=1.5))
    assert both.step_time_s == simulate_pipeline(chunks, PipelineCosts(**times)).step_time_s + 1.5


def test_pairs_hide_communication() -> None:
    """Two copies of 1 s, 0.25 s of it communication: 1.5 s together, the computation of both."""
    costs = PipelineCosts(forward_s=1.0, backward_s=2.0, forward_communication_s=0.25, backward_communication_s=1.25)
    copies = simulate_pipeline(make_schedule("multi_copy", 1, 4), costs)
    assert copies.step_time_s == 2 * (1.5 + 2.5)
    assert simulate_pipeline(make_schedule("gradient_accumulation", 1, 4), costs).step_time_s == 4 * 3.0
    pairs = simulate_pipeline(make_schedule("dualpipe", 4, 16), costs)
    alone = simulate_pipeline(make_schedule("dualpipe", 4, 16), PipelineCosts(forward_s=1.0, backward_s=2.0))
    assert pairs.step_time_s < alone.step_time_s


def test_imported_schedules_are_simulated(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,,0B0,0B1\n1F0,1I0,1F1,1W0,1B1\n")
    schedule = parse_schedule_csv(path)
    result = simulate_pipeline(schedule, PipelineCosts(forward_s=1.0, backward_s=2.0, activation_bytes=1.0))
    assert result.ends_s.tolist() == [1.0, 2.0, 5.0, 9.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    assert result.step_time_s == 9.0
    assert result.peak_activation_bytes.tolist() == [2.0, 2.0]


def test_memory_of_pairs_and_uneven_stages() -> None:
    schedule = make_schedule("dualpipe_v", 2, 4)
    kept = np.array([1.0, 10.0, 100.0, 1000.0])
    peak = peak_activation_bytes(schedule, PipelineCosts(forward_s=1.0, backward_s=1.0, activation_bytes=kept))
    level = np.zeros(2)
    highest = np.zeros(2)
    for rank in (0, 1):
        for index in range(schedule.offsets[rank], schedule.offsets[rank + 1]):
            stage = schedule.stage[index]
            if schedule.kind[index] == 0:
                level[rank] += kept[stage]
                highest[rank] = max(highest[rank], level[rank])
            elif schedule.kind[index] in (1, 3):
                level[rank] -= kept[stage]
    assert peak.tolist() == highest.tolist()
    assert level.tolist() == [0.0, 0.0]


def test_costs_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(InputError, match=r"shape \(3,\) do not fit 4 stages"):
        simulate_pipeline(make_schedule("1f1b", 4, 8), PipelineCosts(forward_s=np.ones(3), backward_s=1.0))
    with pytest.raises(ProgramError, match="-1.0"):
        simulate_pipeline(make_schedule("1f1b", 4, 8), PipelineCosts(forward_s=-1.0, backward_s=1.0))
