"""What the clocks of a run show, laid beside the prediction."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from planner.cli.execution_tables import comparison_report, reasons
from planner.execution.communication import FINISH, RUN, START
from planner.execution.measuring.clocks import RankClocks, RankRecord, catalogue
from planner.execution.measuring.comparing import BETWEEN, MESSAGES, OPERATORS, WAITING, ErrorRow, compare
from planner.execution.measuring.recorded import rank_entries, rank_times
from planner.execution.measuring.run_trace import MEASURED
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.execution.virtual.script import predicted_times
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import Communicate
from planner.lowering.pipeline import lower_pipeline
from planner.planning.loading import lower_to_run
from planner.planning.planning import PlanRequest, plan_network
from planner.planning.prediction import simulate_plan
from planner.plans.pins import Pins
from simulator.hardware import Caches
from simulator.profiles import load_profile

HARDWARE = "dgx-a100"
MS = 1_000_000


def make_plan(devices, **pins):
    request = PlanRequest(
        network="zoo:mlp",
        hardware=HARDWARE,
        devices=devices,
        global_batch=16,
        precision="fp32",
        pins=Pins.read(pins),
        top=1,
    )
    return plan_network(request).candidates[0].plan


@pytest.fixture(scope="module")
def lowered_plan():
    plan = make_plan(2, dp=2, micro_batch=8, optimizer_sharding="none")
    return plan, lower_to_run(plan, "unused")


def recorded(lowered, rank, *, late_ms=0):
    """Every instruction lasts 1 ms, one after the other; this rank begins `late_ms` later."""
    now, events = late_ms * MS, []
    for number, instruction in enumerate(catalogue(lowered, rank)):
        parts = (START, FINISH) if isinstance(instruction, Communicate) else (RUN,)
        for part in parts:
            events.append((number, part, now, now + MS, MS // 2))
            now += MS
    return RankRecord(steps=np.array([[0, now + MS]]), events=np.array(events), machine="same")


def simulation(plan):
    return simulate_plan(plan, checked_graph(plan), load_profile(HARDWARE))


def test_every_rank_numbers_instructions_alike(lowered_plan):
    plan, lowered = lowered_plan
    assert len(catalogue(lowered, 0)) == len(rank_entries(plan, lowered, 0))
    kinds = [type(one) for one in catalogue(lowered, 0)]
    assert kinds == [type(one) for one in catalogue(lowered, 1)]
    assert Communicate in kinds


def test_errors_add_up_to_both_steps(lowered_plan):
    plan, lowered = lowered_plan
    records = [recorded(lowered, rank) for rank in (0, 1)]
    simulated = simulation(plan)
    found = compare(plan, lowered, records, load_profile(HARDWARE), simulated)
    assert sum(row.predicted_s for row in found.errors) == pytest.approx(simulated.result.length_s)
    whole = np.mean([(r.steps[0, 1] - r.steps[0, 0]) / 1e9 for r in records])
    assert sum(row.measured_s for row in found.errors) == pytest.approx(whole)
    between = next(row for row in found.errors if row.name == BETWEEN)
    assert between.measured_s == pytest.approx(1e-3)
    assert {row.kind for row in found.errors} >= {OPERATORS, MESSAGES}
    matmul = next(row for row in found.errors if row.name == "matmul")
    assert matmul.measured_s == pytest.approx(matmul.calls * 1e-3)
    assert matmul.without_core_s == pytest.approx(matmul.calls * 0.5e-3)
    assert all(row.measured_s == pytest.approx(1e-3) and row.busy_s == pytest.approx(0.5e-3) for row in found.work)


def test_a_late_rank_keeps_the_other_waiting(lowered_plan):
    """Rank 1 sends half a millisecond after rank 0 has begun to wait: that half is no time of the message."""
    plan, lowered = lowered_plan
    first, second = recorded(lowered, 0), recorded(lowered, 1)
    shifted = second.events.copy()
    shifted[:, 2:4] += MS // 2
    late = replace(second, events=shifted, steps=second.steps + np.array([0, MS // 2]))
    ranks = rank_times(plan, lowered, [first, late])
    messages = int(np.sum(first.events[:, 1] == FINISH))
    assert messages
    assert ranks[0].waited_s.sum() == pytest.approx(messages * 0.5e-3)
    assert ranks[1].waited_s.sum() == 0
    found = compare(plan, lowered, [first, late], load_profile(HARDWARE), simulation(plan))
    waiting = next(row for row in found.errors if row.name == WAITING)
    assert waiting.measured_s == pytest.approx(messages * 0.5e-3 / 2)
    assert all(row.waited_s == pytest.approx(0.25e-3) for row in found.messages)


def test_waiting_that_the_profile_knows_of_is_predicted_as_such(lowered_plan):
    plan, lowered = lowered_plan
    records = [recorded(lowered, rank) for rank in (0, 1)]
    plain, simulated = load_profile(HARDWARE), simulation(plan)
    known, unknown = (
        {row.name: row.predicted_s for row in compare(plan, lowered, records, hardware, simulated).errors}
        for hardware in (replace(plain, waiting_table=((1, 1.0), (2, 1.25))), plain)
    )
    assert unknown[WAITING] == 0
    assert known["matmul"] == pytest.approx(unknown["matmul"] / 1.25)
    kernels = {row.name for row in compare(plan, lowered, records, plain, simulated).errors if row.kind == OPERATORS}
    assert known[WAITING] == pytest.approx(0.2 * sum(unknown[name] for name in kernels))
    assert sum(known.values()) == pytest.approx(simulated.result.length_s)


def test_ranks_with_clocks_of_their_own_are_laid_over_each_other(lowered_plan):
    plan, lowered = lowered_plan
    first, second = recorded(lowered, 0), recorded(lowered, 1)
    events = second.events.copy()
    events[:, 2:4] += 10**15
    foreign = RankRecord(steps=second.steps + 10**15, events=events, machine="other")
    ranks = rank_times(plan, lowered, [first, foreign])
    assert np.allclose(ranks[0].begin_s, ranks[1].begin_s)
    assert ranks[0].waited_s.sum() == ranks[1].waited_s.sum() == 0


def test_a_recorder_that_is_off_records_nothing(lowered_plan):
    _, lowered = lowered_plan
    recorder = RankClocks(lowered, 0, torch.device("cpu"))
    ran = []
    action = recorder.action(catalogue(lowered, 0)[3], RUN, lambda: ran.append(1))
    action()
    recorder.begin_step()
    action()
    recorder.end_step()
    action()
    record = recorder.record()
    assert len(ran) == 3
    assert record.events[:, :2].tolist() == [[3, RUN]]
    assert record.steps[0, 0] <= record.events[0, 2] <= record.events[0, 3] <= record.steps[0, 1]


def test_reasons_name_what_weighs_most():
    def row(name, predicted, measured):
        return ErrorRow(kind=OPERATORS, name=name, calls=1, predicted_s=predicted, measured_s=measured)

    text = reasons([row("matmul", 0.010, 0.018), row("view", 0.001, 0.0012), row("copy", 0.004, 0.001)], 0.0202)
    assert text.startswith("matmul took 8")
    assert "longer" in text.split(";")[0]
    assert "copy took 3" in text
    assert "less" in text
    assert "view" not in text
    assert "within 1 %" in reasons([row("matmul", 0.010, 0.0100001)], 0.0100001)


@pytest.mark.parametrize("slowdown", [((1, 1.0),), ((1, 1.0), (2, 1.5), (4, 4.0))])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tasks_are_predicted_as_they_are_simulated(ranks, slowdown):
    """What a rank holds at its peak says what lies in the caches, for single tasks as for the whole step."""
    plan = make_plan(2, pp=ranks, dp=2 // ranks, micro_batch=4)
    hardware = replace(
        load_profile(HARDWARE), slowdown_table=slowdown, caches=Caches(own_bytes=1 << 20, shared_bytes=0)
    )
    lowered = lower_to_run(plan, "unused")
    simulated = lower_pipeline(plan, checked_graph(plan), hardware)
    # Four micro-batches on two stages: a fifth of the time each rank has nothing to compute.
    computing = 2 * 4 / 5 if ranks == 2 else 2
    assert simulated.computing == pytest.approx(computing)
    assert hardware.compute_slowdown(computing) == pytest.approx(1 + (computing - 1) * (slowdown[-1][1] > 1) * 0.5)
    found = predicted_times(plan, lowered, simulated.work.tasks, hardware)
    np.testing.assert_allclose(found, simulated.work.seconds)


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"dp": 2, "micro_batch": 4}, {"pp": 2, "micro_batch": 8}])
def test_a_run_is_drawn_beside_its_prediction(pins, tmp_path):
    plan = make_plan(2, **pins)
    trace = tmp_path / "run.trace.json"
    report = execute_plan(plan, ExecuteOptions(strategy="unused", steps=3, trace=trace))
    document = json.loads(trace.read_text())
    names = {e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    assert {"rank 0 measured", "rank 1 measured"} <= names
    assert any(name.endswith("predicted") for name in names)
    measured = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] >= MEASURED]
    assert {e["pid"] for e in measured} == {MEASURED, MEASURED + 1}
    assert all(e["dur"] >= 0 for e in measured)
    found = report.comparison
    # Recorded steps begin on all ranks together: their length, of which the period is the most.
    predicted_s = sum(row.predicted_s for row in found.errors)
    assert report.predicted_step_time_s <= predicted_s * (1 + 1e-9) <= 1.05 * report.predicted_step_time_s
    assert len(report.losses) == 3
    assert list(comparison_report(found, trace))


def test_messages_among_stages_that_share_a_parameter_are_predicted():
    request = PlanRequest(
        network="zoo:gpt2-tiny",
        hardware=HARDWARE,
        devices=2,
        global_batch=4,
        precision="fp32",
        sequence_length=16,
        pins=Pins(pp=2, dp=1, tp=1, micro_batch=2, optimizer_sharding="none"),
        top=1,
    )
    plan = plan_network(request).candidates[0].plan
    lowered = lower_to_run(plan, plan.network)
    records = [recorded(lowered, rank, late_ms=rank) for rank in range(2)]
    found = compare(plan, lowered, records, load_profile(HARDWARE), simulation(plan))
    shared = [row for row in found.messages if row.axis == "stages 0, 1"]
    table = next(node for node in lowered.graph.nodes if "token_embedding" in node.name)
    assert max(row.payload_bytes for row in shared) == table.outputs[0].size_bytes
    assert all(row.group_size == 2 and row.predicted_s > 0 for row in shared)
    assert any(row.name == "all_reduce on stages 0, 1" and row.predicted_s > 0 for row in found.errors)
