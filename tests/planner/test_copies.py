"""Micro-batches in copies whose operators are issued in turn: what is lowered, what it costs, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.graph.scaling import at_batch, at_precision
from planner.lowering.checked import fits_copies
from planner.lowering.instructions import Accumulate, Communicate, Compute, read_values, value_of_copy, written_values
from planner.lowering.stages import lower_stages
from planner.lowering.work import is_message
from planner.planning.planning import PlanRequest, plan_network
from planner.planning.prediction import predict_plan
from planner.plans.file import plan_from_text, plan_to_text
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from simulator.errors import InputError, StrategyError
from simulator.pipeline_operators import FIRST
from simulator.profiles import load_profile
from simulator.schedules import ActionKind
from tests.planner.lowering.plans import one_stage
from tests.planner.lowering.steps import lowered_of, passes
from tests.planner.search.problems import captured

HARDWARE = load_profile("dgx-a100")


@cache
def cut() -> Plan:
    """A plan whose layers send messages along a tensor axis."""
    pins = {"tp": "2", "micro_batch": "4", "sequence_parallel": "true", "copies": "2"}
    request = PlanRequest(
        network="zoo:gpt2-tiny", hardware="dgx-a100", devices=2, global_batch=16, pins=Pins.read(pins), top=1
    )
    return plan_network(request).candidates[0].plan


def planned(**pins: str) -> Plan:
    request = PlanRequest(
        network="zoo:mlp", hardware="dgx-a100", devices=2, global_batch=16, pins=Pins.read(pins), top=1
    )
    return plan_network(request).candidates[0].plan


def test_messages_of_one_copy_travel_while_the_other_computes() -> None:
    """Work that grows with the samples takes as long in two parts, and all but a little of the messages is hidden."""
    graph = captured("gpt2", 4)
    whole = replace(one_stage("gpt2", 4, (("tensor", 8),), micro_batch=32, micro_batches=1), precision="fp32")
    one, two = (predict_plan(replace(whole, copies=copies), graph, HARDWARE) for copies in (1, 2))
    exposed = [found.breakdown["exposed_communication_s"] for found in (one, two)]
    assert exposed[1] < 0.5 * exposed[0]
    assert two.step_time_s < one.step_time_s
    assert two.mfu * two.step_time_s == pytest.approx(one.mfu * one.step_time_s)
    assert two.peak_memory_bytes < 1.1 * one.peak_memory_bytes


def test_turns_end_with_messages_and_every_gradient_is_the_sum_of_both() -> None:
    plan = cut()
    lowered = lowered_of(plan)
    assert lowered.micro_batches == 2 * plan.micro_batches
    assert lowered.graph.batch_size * 2 == plan.micro_batch
    first, alone = (
        [i for _, one in list(passes(found))[:2] for i in one.instructions]
        for found in (lowered, lowered_of(replace(plan, copies=1)))
    )
    order = [one.copy for one in first if isinstance(one, Compute)]
    messages = sum(isinstance(one, Communicate) and bool(one.sources) and not one.asynchronous for one in alone)
    assert messages > 5
    assert order.count(0) == order.count(1) == sum(isinstance(one, Compute) for one in alone)
    sums, tied = (
        sum(isinstance(one, Accumulate) and not one.accumulator.endswith(".accumulated") for one in ran)
        for ran in (first, alone)
    )
    trained = sum(p.gradient is not None for p in lowered.graph.parameters)
    # Twice as many terms, of which one for each parameter is not added to another.
    assert sums == 2 * (tied + trained) - trained


def test_the_pin_gives_plans_whose_micro_batches_divide() -> None:
    for plan in (cut(), planned(copies="2", dp="2")):
        assert (plan.copies, plan.pipeline, plan.micro_batch % 2) == (2, 1, 0)
    assert planned(tp="2").copies == planned(copies="1", tp="2").copies == 1


def test_what_copies_cost_is_simulated() -> None:
    pins = {"tp": "1", "dp": "2", "micro_batch": "8", "optimizer_sharding": "none", "copies": "2"}
    graph = captured("mlp")
    request = PlanRequest(
        network="zoo:mlp", hardware="dgx-a100", devices=2, global_batch=16, pins=Pins.read(pins), top=1
    )
    found = plan_network(request, graph=graph)
    best, costs = found.candidates[0], {pin: seconds for pin, seconds, _ in found.pin_costs}
    whole = predict_plan(replace(best.plan, copies=1), at_precision(graph, "bfloat16"), HARDWARE)
    # Small kernels cost most of their time twice.
    assert costs["copies=2"] == pytest.approx(best.prediction.step_time_s - whole.step_time_s)
    assert costs["copies=2"] > 0.1 * whole.step_time_s


def test_strategies_that_cut_the_samples_must_fit_a_copy() -> None:
    graph = captured("gpt2-tiny")
    plan = one_stage(axes=(("data", 2),), micro_batch=2)
    assert fits_copies(replace(plan, copies=2), graph)
    # The samples of a micro-batch are cut along the tensor axis as well.
    narrow = replace(one_stage(axes=(("data", 2),), micro_batch=1), mesh=cut().mesh, micro_batch=2)
    assert fits_copies(narrow, graph)
    assert not fits_copies(replace(narrow, copies=2), graph)


# In pipeline stages


@cache
def staged(schedule: str = "1f1b") -> Plan:
    """Two stages of two devices that send messages along a tensor axis, a micro-batch of four samples in copies."""
    pins = {"pp": "2", "tp": "2", "dp": "1", "micro_batch": "4", "sequence_parallel": "true", "copies": "2"}
    pins |= {"schedule": schedule, "recompute": "none"}
    request = PlanRequest(
        network="zoo:gpt2-tiny",
        hardware="dgx-a100",
        devices=4,
        global_batch=16,
        pins=Pins.read(pins),
        top=1,
        sensitivity=False,
    )
    return plan_network(request, graph=captured("gpt2-tiny")).candidates[0].plan


@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_of_stages_run_both_copies_in_turn(ranks: int) -> None:
    plan = staged() if ranks == 2 else cut()
    assert (plan.copies, plan.pipeline) == (2, ranks)
    lowered = lower_stages(plan, at_batch(captured("gpt2-tiny"), plan.samples))
    alone = lower_stages(replace(plan, copies=1), at_batch(captured("gpt2-tiny"), plan.micro_batch))
    assert (lowered.micro_batches, alone.micro_batches) == (2 * plan.micro_batches, plan.micro_batches)
    for stage, whole in zip(lowered.stages, alone.stages, strict=True):
        for key, one in stage.passes.items():
            order = [i.copy for i in one.instructions if isinstance(i, Compute)]
            single = [i for i in whole.passes[key].instructions if isinstance(i, Compute)]
            assert order.count(0) == order.count(1) == len(single)
            sent = [i for i in whole.passes[key].instructions if isinstance(i, Communicate) and i.sources]
            waited = sum(not message.asynchronous for message in sent)
            assert waited
            assert waited // 2 < sum(a != b for a, b in pairwise(order)) <= 2 * waited + 1
            assert all(i.asynchronous for i in one.instructions if isinstance(i, Communicate) and i.sources)


def test_messages_inside_operators_end_no_turn() -> None:
    """An operator waits for what it sends: the other copy goes on behind messages that stand by themselves."""
    pins = {"pp": "2", "cp": "2", "dp": "1", "tp": "1", "micro_batch": "4", "copies": "2", "context_algorithm": "ring"}
    pins |= {"schedule": "1f1b", "recompute": "none"}
    request = PlanRequest(
        network="zoo:gpt2-tiny",
        hardware="dgx-a100",
        devices=4,
        global_batch=16,
        pins=Pins.read(pins),
        top=1,
        sensitivity=False,
    )
    plan = plan_network(request, graph=captured("gpt2-tiny")).candidates[0].plan
    lowered = lower_stages(plan, at_batch(captured("gpt2-tiny"), plan.samples))
    for stage in lowered.stages:
        for one in stage.passes.values():
            inside = [i for i in one.instructions if isinstance(i, Communicate) and not i.sources]
            assert inside
            order = [i.copy for i in one.instructions if isinstance(i, Compute)]
            turns = 2 * sum(map(is_message, one.instructions)) + 1
            assert sum(a != b for a, b in pairwise(order)) <= turns


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_value_of_a_pass_is_there_when_it_is_read(ranks: int) -> None:
    """The message that brings it may still travel."""
    plan = staged() if ranks == 2 else cut()
    lowered = lower_stages(plan, at_batch(captured("gpt2-tiny"), plan.samples))
    for number, stage in enumerate(lowered.stages):
        stored = {p.value for rank in lowered.ranks for p in rank.parameters if number in rank.stages}
        crossing = [one.value for one in (stage.arrives, stage.gradient_arrives) if one is not None]
        known = stored | {value_of_copy(name, copy) for name in crossing for copy in range(2)}
        known |= {value_of_copy(entry.value, copy) for entry in stage.inputs for copy in range(2)}
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            for instruction in stage.passes[kind, FIRST].instructions:
                sums = isinstance(instruction, Accumulate) and instruction.first
                assert sums or known.issuperset(read_values(instruction)), instruction
                known.update(written_values(instruction))


def test_copies_hide_the_messages_of_stages() -> None:
    """Work that grows with the samples takes as long in two parts; of the messages inside stages little is left."""
    graph = captured("gpt2", 4)
    pins = {
        "pp": "2",
        "tp": "8",
        "dp": "1",
        "micro_batch": "32",
        "recompute": "none",
        "schedule": "1f1b",
        "copies": "2",
    }
    request = PlanRequest(
        network="zoo:gpt2",
        hardware="dgx-a100",
        devices=16,
        global_batch=128,
        pins=Pins.read(pins),
        top=1,
        sensitivity=False,
    )
    plan = plan_network(request, graph=graph).candidates[0].plan
    one, two = (predict_plan(replace(plan, copies=copies), graph, HARDWARE) for copies in (1, 2))
    assert two.breakdown["exposed_communication_s"] < 0.6 * one.breakdown["exposed_communication_s"]
    assert two.mfu * two.step_time_s == pytest.approx(one.mfu * one.step_time_s)
    assert 0.9 * one.peak_memory_bytes < two.peak_memory_bytes < 1.1 * one.peak_memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_copies_in_stages_train_as_one_process_does(schedule: str) -> None:
    options = ExecuteOptions(strategy="unused", steps=2, verify=True, precision="fp64")
    report = execute_plan(replace(staged(schedule), precision="fp32"), options)
    assert report.verified
    assert report.max_loss_difference is not None
    assert report.max_loss_difference <= 1e-10


@pytest.mark.parametrize(
    ("pins", "error", "message"),
    [
        ({"copies": "2", "micro_batch": "1"}, InputError, "a micro-batch of 1 cannot be divided into 2 copies"),
        ({"copies": "2", "micro_batch": "3"}, InputError, r"use --pin micro_batch=4 or copies=1"),
        ({"copies": "3"}, InputError, "'3' is not a whole number from 1 to 2"),
        ({"copies": "two"}, InputError, "'two' is not a whole number from 1 to 2"),
        ({"copies": "2", "micro_batches": "16"}, InputError, "global batch 16 does not divide"),
        ({"copies": "2", "micro_batches": "8", "dp": "2"}, InputError, "global batch 16 does not divide"),
    ],
)
def test_what_cannot_be_divided_is_refused(pins: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        planned(**pins)


def test_a_strategy_file_holds_them() -> None:
    plan = replace(planned(tp="2", micro_batch="4"), copies=2)
    text = plan_to_text(plan)
    assert plan_from_text(text).plan == plan
    alone: dict[str, Any] = json.loads(plan_to_text(replace(plan, copies=1)))
    assert "copies" not in alone
    for copies, micro, message in ((2, 1, "a micro-batch of 1 cannot be divided into 2 copies"), (3, 4, "copies")):
        document = alone | {"copies": copies}
        document["batch"] = {"global": 16, "micro": micro, "micro_batches": 16 // micro}
        with pytest.raises(StrategyError, match=message):
            plan_from_text(json.dumps(document))
