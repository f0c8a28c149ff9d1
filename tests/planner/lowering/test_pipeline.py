"""Plans with pipeline stages: the work, the memory and the time that follow from their chunks and their schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph.chain import chain
from planner.lowering import representatives
from planner.lowering.instructions import Communicate, read_values
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.stages import lower_stages
from planner.planning.prediction import predict_plan, simulate_plan, write_trace
from planner.plans.plan import Chunk, Plan
from simulator import engine, fast_engine
from simulator.errors import InputError, StrategyError
from simulator.pipeline_operators import action_variants, operator_table
from simulator.pipeline_passes import simulate_operators
from simulator.profiles import load_profile
from simulator.program import BufferKind, Collective
from simulator.schedules import ActionKind, make_schedule
from tests.planner.lowering.plans import one_stage, pipelined, recomputing
from tests.planner.search.problems import captured

HARDWARE = load_profile("dgx-a100")
LAYERS = 6
GRAPH = captured("gpt2-tiny", LAYERS)
UNITS = LAYERS + 2
SCHEDULES = [
    ("gpipe", 2, 1), ("1f1b", 2, 1), ("1f1b", 4, 1), ("zb_h1", 2, 1), ("zb_h2", 2, 1), ("interleaved_1f1b", 2, 2),
    ("zbv", 2, 2), ("dualpipe_v", 2, 2), ("dualpipe", 2, 2),
]  # fmt: skip
schedules = pytest.mark.parametrize(("schedule", "ranks", "virtual"), SCHEDULES)


def alone(plan: Plan) -> Plan:
    """The plan as a pipeline of one rank."""
    names = chain(GRAPH).names()
    return replace(plan, schedule="gradient_accumulation", chunks=(Chunk(rank=0, first=names[0], last=names[-1]),))


USUAL = [({}, "full", "zero1"), ({"data": 2, "tensor": 2}, "full", "zero3"), ({"data": 2}, "selective", "zero2")]
EVERY = [
    pytest.param(axes, mode, level, marks=() if (axes, mode, level) in USUAL else pytest.mark.slow)
    for axes in ({}, {"data": 2}, {"data": 2, "tensor": 2})
    for mode in ("none", "selective", "full")
    for level in (("zero1", "zero2", "zero3") if axes else ("zero1",))
]


@pytest.mark.parametrize(("axes", "mode", "level"), EVERY)
def test_a_plan_of_one_stage_is_a_pipeline_of_one(axes: dict[str, int], mode: str, level: str) -> None:
    storage = "sharded" if "data" in axes else "replicated"
    plan = one_stage("gpt2-tiny", LAYERS, tuple(axes.items()), storage=storage)
    plan = replace(plan, optimizer_sharding=level) if storage == "sharded" else plan
    plan = plan if mode == "none" else recomputing(plan, GRAPH, mode)
    found = predict_plan(plan, GRAPH, HARDWARE)
    assert found == predict_plan(alone(plan), GRAPH, HARDWARE)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)
    # It waits for nothing but messages.
    assert found.breakdown["bubble_s"] == pytest.approx(0.0, abs=1e-12)
    assert bool(axes) == (found.breakdown["exposed_communication_s"] > 1e-9)
    assert sum(found.memory_at_peak.values()) == found.peak_memory_bytes


@schedules
def test_ranks_share_the_work_of_one_and_the_parts_of_a_step_add_up(schedule: str, ranks: int, virtual: int) -> None:
    plan = one_stage("gpt2-tiny", LAYERS, (("data", 2), ("tensor", 2)))
    # The last message of all, which nothing hides, would count among the kernels of a pipeline.
    calm = replace(HARDWARE, overlap_compute_speed=1.0)
    plain = predict_plan(plan, GRAPH, calm)
    found = simulate_plan(pipelined(plan, GRAPH, ranks, schedule, virtual), GRAPH, calm)
    # Terms of a tied gradient are added once a step where the chunks lie apart, not every micro-batch; and each copy
    # of DualPipe starts its own accumulators.
    less = plain.breakdown["compute_s"] - found.result.compute_s.sum()
    assert 0 <= less < (0.05 if schedule == "dualpipe" else 1e-3) * plain.breakdown["compute_s"]
    assert sum(found.prediction.breakdown.values()) == pytest.approx(found.prediction.step_time_s)
    assert all(seconds >= -1e-12 for seconds in found.prediction.breakdown.values())
    assert found.prediction.step_time_s > plain.breakdown["compute_s"] / ranks
    assert found.prediction.mfu * found.prediction.step_time_s * ranks == pytest.approx(plain.mfu * plain.step_time_s)


@pytest.mark.parametrize(("level", "calls"), [("zero1", 1), ("zero3", 4)])
def test_messages_that_hide_take_their_share_from_kernels(level: str, calls: int) -> None:
    """Sums and gathers beside passes, once a step or of every micro-batch: kernels lose their share, and no more."""
    plan = replace(one_stage("gpt2-tiny", LAYERS, (("data", 2),), storage="sharded"), optimizer_sharding=level)
    plan = pipelined(plan, GRAPH, 2, "1f1b")
    calm, half = (replace(HARDWARE, overlap_compute_speed=speed) for speed in (1.0, 0.5))
    free, slowed = (simulate_plan(plan, GRAPH, hardware) for hardware in (calm, half))
    work = free.lowered.work
    counts = work.counts(free.lowered.schedule)
    messages = [i for i, task in enumerate(work.tasks) if task.collective is not None and task.axis == "data"]
    assert max(counts[messages]) >= calls
    # What is done to a gradient that a message brought runs beside as well.
    beside = [*messages, *(i for i, task in enumerate(work.tasks) if task.name.startswith("accumulate"))]
    lost = 0.5 * float(counts[beside] @ work.seconds[beside])
    more = slowed.result.compute_s.sum() - free.result.compute_s.sum()
    assert 0 < more <= lost * (1 + 1e-9)
    assert 0 < slowed.prediction.step_time_s - free.prediction.step_time_s <= more


@schedules
def test_kernels_lose_nothing_where_no_message_travels(schedule: str, ranks: int, virtual: int) -> None:
    plan = pipelined(one_stage("gpt2-tiny", LAYERS), GRAPH, ranks, schedule, virtual)
    calm, half = (replace(HARDWARE, overlap_compute_speed=speed) for speed in (1.0, 0.5))
    free, slowed = (simulate_plan(plan, GRAPH, hardware) for hardware in (calm, half))
    np.testing.assert_array_equal(slowed.result.compute_s, free.result.compute_s)


@schedules
def test_both_engines_run_the_step_to_the_same_time(schedule: str, ranks: int, virtual: int) -> None:
    plan = pipelined(one_stage("gpt2-tiny", LAYERS, (("data", 2),), storage="sharded"), GRAPH, ranks, schedule, virtual)
    lowered = lower_pipeline(plan, GRAPH, HARDWARE)
    table = operator_table(lowered.schedule, lowered.costs)
    found = simulate_operators(lowered.schedule, lowered.costs)
    for run in (fast_engine.run, engine.run):
        assert run(table)[1].max() == pytest.approx(found.length_s, rel=1e-12)
        again = simulate_plan(plan, GRAPH, HARDWARE, engine=run).result
        assert (again.step_time_s, again.length_s) == pytest.approx((found.step_time_s, found.length_s), rel=1e-9)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 5), (4, 4)])
def test_equal_stages_and_free_sends_have_the_bubble_of_the_formula(ranks: int, micro_batches: int) -> None:
    plan = pipelined(one_stage("gpt2-tiny", LAYERS, micro_batches=micro_batches), GRAPH, ranks, "1f1b")
    lowered = lower_pipeline(plan, GRAPH, HARDWARE)
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    costs = replace(
        lowered.costs,
        passes={kind: [lowered.costs.passes[kind][0]] * ranks for kind in kinds},
        first={},
        last={},
        meetings=(),
        send_s=0.0,
        epilogue_s=0.0,
    )
    forward, backward = (costs.passes[kind][0].seconds.sum() for kind in kinds)
    result = simulate_operators(lowered.schedule, costs)
    assert result.step_time_s == pytest.approx((micro_batches + ranks - 1) * (forward + backward))
    np.testing.assert_allclose(result.bubble_s, (ranks - 1) * (forward + backward))


@pytest.mark.parametrize("mode", ["none", "full"])
def test_1f1b_holds_activations_of_the_micro_batches_under_way(mode: str) -> None:
    plan = one_stage("gpt2-tiny", LAYERS, micro_batches=6)
    plan = plan if mode == "none" else recomputing(plan, GRAPH, mode)
    found = simulate_plan(pipelined(plan, GRAPH, 4, "1f1b"), GRAPH, HARDWARE)
    sizes = found.lowered.sizes
    for rank, memory in enumerate(found.memory):
        under_way = 4 - rank
        kept = under_way * sizes.activations[rank]  # type: ignore[index]
        # The peak is in a backward pass, or in a forward pass that needs more at once than it keeps.
        most = max(sizes.recomputed[rank], sizes.forward[rank])  # type: ignore[index]
        resident = sum(float(values[rank]) for values in sizes.resident.values())  # type: ignore[index]
        assert memory.peak_bytes == pytest.approx(resident + kept + most)
    peaks = [memory.peak_bytes for memory in found.memory]
    assert found.prediction.peak_memory_bytes == int(max(peaks))
    assert found.prediction.peak_rank == int(np.argmax(peaks))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_where_messages_take_memory_a_gradient_stands_beside_the_sum_it_is_added_to(micro_batches: int) -> None:
    plan = pipelined(one_stage("gpt2-tiny", LAYERS, micro_batches=micro_batches), GRAPH, 2, "gpipe")
    without = lower_pipeline(plan, GRAPH, HARDWARE).sizes
    found = lower_pipeline(plan, GRAPH, replace(HARDWARE, message_workspace={Collective.ALL_GATHER: 1.0})).sizes
    more = np.asarray(found.recomputed) - np.asarray(without.recomputed)
    largest = max(GRAPH.nodes[p.node].outputs[0].size_bytes for p in GRAPH.parameters)
    assert (more.max() == largest) if micro_batches > 1 else not more.any()
    np.testing.assert_array_equal(found.forward, without.forward)  # nothing is sent in a pass of one rank


def test_gpipe_holds_all_micro_batches_and_recomputation_only_inputs() -> None:
    plan = one_stage("gpt2-tiny", LAYERS, micro_batches=8)
    gpipe = simulate_plan(pipelined(plan, GRAPH, 2, "gpipe"), GRAPH, HARDWARE)
    again = simulate_plan(pipelined(recomputing(plan, GRAPH, "full"), GRAPH, 2, "gpipe"), GRAPH, HARDWARE)
    sizes, kept = gpipe.lowered.sizes, again.lowered.sizes
    assert gpipe.memory[1].at_peak[BufferKind.ACTIVATION] >= 8 * sizes.activations[1]  # type: ignore[index]
    boundary = GRAPH.spec(chain(GRAPH).boundaries[0].forward).size_bytes * plan.micro_batch
    # One input for each of the units: blocks and the end of the network.
    assert kept.activations[1] == pytest.approx(4 * boundary, rel=0.05)  # type: ignore[index]


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_any_cuts_keep_the_work_and_bound_the_step(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 4))
    inner = data.draw(st.lists(st.integers(1, UNITS - 1), min_size=ranks - 1, max_size=ranks - 1, unique=True))
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b", "zb_h1"]))
    plan = one_stage("gpt2-tiny", LAYERS, (("tensor", 2),))
    cut = pipelined(plan, GRAPH, ranks, schedule, cuts=[0, *sorted(inner), UNITS])
    found = simulate_plan(cut, GRAPH, HARDWARE)
    plain = predict_plan(plan, GRAPH, HARDWARE)
    assert found.result.compute_s.sum() == pytest.approx(plain.breakdown["compute_s"], rel=1e-3)
    assert found.prediction.step_time_s >= found.result.compute_s.max()
    sends = np.sum(found.lowered.costs.send_s) * 2 * plan.micro_batches
    meetings = sum(seconds for _, seconds in found.lowered.costs.meetings)
    assert found.prediction.step_time_s <= 1.1 * plain.step_time_s + sends + meetings


@pytest.mark.parametrize("mode", ["none", "full"])
def test_layers_in_a_row_are_lowered_once_and_count_as_often_as_they_are_there(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = captured("gpt2-tiny", 16)
    plan = one_stage("gpt2-tiny", 16, (("data", 2),), storage="sharded")
    plan = pipelined(plan if mode == "none" else recomputing(plan, graph, mode), graph, 2, "1f1b")
    short = simulate_plan(plan, graph, HARDWARE).prediction
    monkeypatch.setattr(representatives, "_cover", lambda edges: representatives._Kept(*[tuple(range(len(edges)))] * 2))
    whole = simulate_plan(plan, graph, HARDWARE).prediction
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)
    assert short.peak_memory_bytes == whole.peak_memory_bytes
    assert short.memory_at_peak == whole.memory_at_peak


@pytest.mark.parametrize("level", ["zero2", "zero3"])
def test_layers_alike_share_the_tasks_of_their_messages(level: str) -> None:
    def tasks(layers: int) -> int:
        graph = captured("gpt2-tiny", layers)
        plan = one_stage("gpt2-tiny", layers, (("data", 2),), storage="sharded")
        plan = replace(plan, optimizer_sharding=level, bucket_bytes=2**40)
        lowered = lower_pipeline(pipelined(plan, graph, 2, "1f1b"), graph, HARDWARE)
        calls = lowered.work.counts(lowered.schedule)
        sent = [task.collective is not None for task in lowered.work.tasks]
        assert calls[sent].sum() > len(calls[sent])
        return len(lowered.work.tasks)

    assert tasks(16) == tasks(12)


def test_ranks_that_share_a_parameter_sum_its_gradient_and_others_do_not_meet() -> None:
    plan = one_stage("gpt2-tiny", LAYERS)
    apart = lower_pipeline(pipelined(plan, GRAPH, 3, "1f1b"), GRAPH, HARDWARE)
    assert [ranks for ranks, _ in apart.costs.meetings] == [(0, 2)]
    assert apart.costs.meetings[0][1] > 0
    together = lower_pipeline(pipelined(plan, GRAPH, 2, "zbv", 2), GRAPH, HARDWARE)
    assert not together.costs.meetings
    copies = lower_pipeline(pipelined(plan, GRAPH, 2, "dualpipe", 2), GRAPH, HARDWARE)
    assert [ranks for ranks, _ in copies.costs.meetings] == [(0, 1)]
    tied = sum(float(v.sum()) for v in (apart.sizes.resident[BufferKind.PARAMETER],))  # type: ignore[union-attr]
    assert tied > sum(p.size_bytes for p in (GRAPH.nodes[p.node].outputs[0] for p in GRAPH.parameters))


def test_a_zero_bubble_schedule_waits_less_and_splits_the_backward_work() -> None:
    plan = one_stage("gpt2-tiny", LAYERS, micro_batches=8)
    whole = simulate_plan(pipelined(plan, GRAPH, 4, "1f1b"), GRAPH, HARDWARE)
    split = simulate_plan(pipelined(plan, GRAPH, 4, "zb_h1"), GRAPH, HARDWARE)
    assert split.prediction.breakdown["bubble_s"] < whole.prediction.breakdown["bubble_s"]
    backward = whole.lowered.costs.passes[ActionKind.BACKWARD][1].seconds.sum()
    parts = [split.lowered.costs.passes[kind][1].seconds.sum() for kind in list(ActionKind)[2:]]
    assert sum(parts) == pytest.approx(backward)
    assert min(parts) > 0.2 * backward


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_passes_are_written_as_the_schedule_runs_them(micro_batches: int) -> None:
    plan = pipelined(one_stage("gpt2-tiny", LAYERS, (("data", 2),), micro_batches=micro_batches), GRAPH, 2, "1f1b")
    found = simulate_plan(plan, GRAPH, HARDWARE)
    schedule, costs = found.lowered.schedule, found.lowered.costs
    run = {*zip(schedule.kind.tolist(), action_variants(schedule).tolist(), strict=True)}
    assert run <= {*found.lowered.work.passes[0]}
    # With a single micro-batch no pass adds gradients up to others, nor waits with them.
    assert (ActionKind.BACKWARD in costs.first) == (micro_batches > 1)
    alike = costs.passes[ActionKind.BACKWARD][0] is costs.last[ActionKind.BACKWARD][0]
    assert alike == (micro_batches < 3)
    ends = fast_engine.run(operator_table(schedule, costs))[1]
    assert float(ends.max()) == pytest.approx(found.result.length_s)


def test_a_schedule_from_elsewhere_orders_the_passes() -> None:
    plan = pipelined(one_stage("gpt2-tiny", LAYERS), GRAPH, 2, "1f1b")
    own, other = (make_schedule(name, 2, plan.micro_batches) for name in ("1f1b", "gpipe"))
    usual, given_own, all_forward = (
        simulate_plan(plan, GRAPH, HARDWARE, schedule).prediction for schedule in (None, own, other)
    )
    assert given_own == usual
    assert all_forward.peak_memory_bytes > usual.peak_memory_bytes
    with pytest.raises(InputError, match="has 3 micro-batches, the plan 4"):
        simulate_plan(plan, GRAPH, HARDWARE, make_schedule("1f1b", 2, 3))


def test_a_trace_has_every_rank_and_pass(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import json

    plan = pipelined(one_stage("gpt2-tiny", LAYERS), GRAPH, 2, "1f1b")
    found = simulate_plan(plan, GRAPH, HARDWARE)
    write_trace(found, plan, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = {(e["pid"], e["name"]) for e in events if e["ph"] == "X" and e["tid"] == 0}
    passes = {(r, str(a)) for r in range(2) for a in found.lowered.schedule.actions(r)}
    assert passes <= drawn
    assert {rank for rank, name in drawn if name == "update"} == {0, 1}
    ends = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert ends == pytest.approx(found.result.length_s * 1e6)
    level = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(level) == pytest.approx(found.prediction.peak_memory_bytes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_are_those_of_all_layers_and_micro_batches(ranks: int) -> None:
    plan = one_stage("gpt2-tiny", LAYERS, (("data", 2), ("tensor", 2)))
    found = simulate_plan(plan if ranks == 1 else pipelined(plan, GRAPH, ranks, "1f1b"), GRAPH, HARDWARE)
    named = {total.name: total for total in found.operators}
    layers = next(total for name, total in named.items() if name.startswith("blocks.*."))
    assert layers.calls % (LAYERS * plan.micro_batches) == 0
    assert [total.seconds for total in found.operators] == sorted((t.seconds for t in found.operators), reverse=True)
    spent = found.work_s - sum(total.seconds for total in found.collectives)
    assert spent >= sum(total.seconds for total in found.operators) > 0.5 * spent
    assert {total.axis for total in found.collectives} == {"data"}


NAMES = chain(GRAPH).names()


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([(0, 0, 3), (1, 5, UNITS - 1)], "does not follow"),
        ([(0, 0, 3), (1, 4, UNITS - 2)], "goes on to"),
        ([(1, 0, 3), (0, 4, UNITS - 1)], "chunk 0 is on pipeline rank 1"),
        ([(0, 0, UNITS - 1)], "has 1 chunks"),
    ],
)
def test_chunks_that_do_not_cover_the_network_are_refused(chunks: list[tuple[int, int, int]], words: str) -> None:
    plan = pipelined(one_stage("gpt2-tiny", LAYERS), GRAPH, 2, "1f1b")
    listed = tuple(Chunk(rank=rank, first=NAMES[a], last=NAMES[b]) for rank, a, b in chunks)
    with pytest.raises(StrategyError, match=words):
        lower_pipeline(replace(plan, chunks=listed), GRAPH, HARDWARE)


def test_units_that_the_network_has_not_are_named() -> None:
    plan = pipelined(one_stage("gpt2-tiny", LAYERS), GRAPH, 2, "1f1b")
    wrong = (replace(plan.chunks[0], last="blocks.77"), plan.chunks[1])
    with pytest.raises(StrategyError, match=r"stages\.0: 'blocks\.77' is no unit"):
        lower_pipeline(replace(plan, chunks=wrong), GRAPH, HARDWARE)
    ranges = recomputing(plan, GRAPH, "full").recompute_ranges
    with pytest.raises(StrategyError, match=r"recompute\.ranges\.0: 'nothing' is no unit"):
        lower_pipeline(replace(plan, recompute_ranges=(replace(ranges[0], last="nothing"),)), GRAPH, HARDWARE)
    with pytest.raises(StrategyError, match="is in another range as well"):
        lower_pipeline(replace(plan, recompute_ranges=(*ranges, *ranges)), GRAPH, HARDWARE)


@pytest.mark.parametrize("level", ["zero1", "zero2", "zero3"])
def test_the_first_pass_of_a_stage_waits_for_the_stage_before_whatever_parameters_it_gathers(level: str) -> None:
    sharded = one_stage("gpt2-tiny", LAYERS, (("data", 2),), storage="sharded", micro_batches=1)
    plan = replace(pipelined(sharded, GRAPH, 2, "1f1b"), optimizer_sharding=level)
    found = simulate_plan(plan, GRAPH, HARDWARE)
    costs, ends = found.lowered.costs, found.result.ends_s
    place = {
        (int(s), int(k)): n
        for n, (s, k) in enumerate(zip(found.lowered.schedule.stage, found.lowered.schedule.kind, strict=True))
    }
    kernels = [float(p.seconds[p.communication == 0].sum()) for p in costs.first[ActionKind.FORWARD]]
    one, two = (float(ends[place[stage, int(ActionKind.FORWARD)]]) for stage in (0, 1))
    assert two >= one + kernels[1] * (1 - 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_parameters_are_gathered_before_a_pass_receives_its_input(schedule: str) -> None:
    plan = replace(one_stage("gpt2-tiny", LAYERS, (("data", 2),), storage="sharded"), optimizer_sharding="zero3")
    lowered = lower_stages(pipelined(plan, GRAPH, 2, schedule), GRAPH)
    for stage in lowered.stages:
        for (kind, _), one in stage.passes.items():
            arrives = stage.arrives if kind is ActionKind.FORWARD else stage.gradient_arrives
            leading, rest = one.instructions[: one.ahead], one.instructions[one.ahead :]
            gathers = kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
            assert bool(leading) or not gathers
            assert all(isinstance(i, Communicate) and i.collective is Collective.ALL_GATHER for i in leading)
            assert arrives is None or not any(arrives.value in read_values(i) for i in leading)
            assert rest or kind is ActionKind.WEIGHT_GRADIENT
