"""Activations that wait on the host: every value is there when it is read, on fewer bytes, beside computation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph.chain import chain
from planner.graph.scaling import at_batch
from planner.lowering.instructions import HostCopy, PassInstructions, read_values, written_values
from planner.lowering.options import lowering_options
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.stages import lower_stages
from planner.networks.marks import Swap
from planner.planning.planning import PlanRequest, plan_network
from planner.planning.prediction import predict_plan
from planner.plans.pins import Pins
from planner.plans.plan import OffloadRange, Plan
from simulator.errors import StrategyError
from simulator.profiles import load_profile
from simulator.program import HOST, Phase
from simulator.schedules import ActionKind
from tests.planner.execution.made import make_plan
from tests.planner.execution.small import place
from tests.planner.lowering.plans import MEGATRON, one_stage, pipelined, recomputing
from tests.planner.lowering.steps import Rank, lowered_of, passes, steps
from tests.planner.search.problems import captured

HARDWARE = load_profile("dgx-a100")
LAYERS = 3
GRAPH = captured("gpt2-tiny", LAYERS)
NAMES = chain(GRAPH).names()


def offloaded(swap: Swap | None, mode: str = "none", axes: tuple[tuple[str, int], ...] = (), **shape: Any) -> Plan:
    hints = MEGATRON if dict(axes).get("tensor", 1) > 1 else ()
    plan = one_stage("gpt2-tiny", LAYERS, axes, hints=hints, **{"micro_batches": 2, **shape})
    plan = plan if mode == "none" else recomputing(plan, GRAPH, mode)
    ranges = () if swap is None else (OffloadRange(first="blocks.0", last=f"blocks.{LAYERS - 1}", swap=swap),)
    return replace(plan, offload_ranges=ranges)


SWAPS = st.sampled_from([Swap(), Swap(prefetch=1), Swap(prefetch=4), Swap(operators=(".expand/addmm", ".gelu"))])


@settings(max_examples=4, deadline=None)
@given(swap=SWAPS, mode=st.sampled_from(["none", "selective", "full"]), first=st.integers(0, LAYERS + 1))
def test_every_value_is_there_when_it_is_read(swap: Swap, mode: str, first: int) -> None:
    plan = offloaded(None, mode, (("tensor", 2),))
    ranges = (OffloadRange(first=NAMES[first], last=NAMES[-1], swap=swap),)
    Rank(lowered_of(replace(plan, offload_ranges=ranges), GRAPH)).step()


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"recompute": "selective"}, {"host_embeddings": "true"}])
def test_constants_and_rows_from_the_host_leave_once_they_are_made(pins: dict[str, str]) -> None:
    """Constants inside a layer are of no unit; what a lookup on the host leaves there has a name of its own."""
    lowered = lowered_of(make_plan(place("mixtral"), 2, batch=8, dp=2, tp=1, pp=1, offload_activations="true", **pins))
    there = {entry.value for entry in (*lowered.ranks[0].parameters, *lowered.inputs)}
    for _, one in passes(lowered):
        for task, instruction, released in zip(one.tasks, one.instructions, one.releases, strict=True):
            assert there.issuperset(read_values(instruction)), task.name
            there.update(written_values(instruction))
            there.difference_update(released)
        there.difference_update(one.drops)


def test_what_leaves_comes_back_and_less_memory_is_used() -> None:
    plans = [offloaded(swap) for swap in (None, Swap(), Swap(prefetch=1))]
    copies = [(task, one) for task, one in steps(lowered_of(plans[1], GRAPH)) if isinstance(one, HostCopy)]
    out = Counter({task.phase: 0 for task, _ in copies})
    for task, one in copies:
        assert task.axis == HOST
        assert one.to_host is (task.phase is Phase.FORWARD)
        out[task.phase] += int(task.bytes_moved)
    assert out[Phase.FORWARD] == out[Phase.BACKWARD] > 0
    peaks = [predict_plan(plan, GRAPH, HARDWARE).peak_memory_bytes for plan in plans]
    # A layer ahead, two layers' activations stand at once; an operator ahead, little of one layer's.
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[0] - peaks[1] < out[Phase.FORWARD] / 2


def test_copies_hide_behind_passes_where_the_link_is_fast_enough() -> None:
    slow = replace(HARDWARE, reliability=replace(HARDWARE.reliability, snapshot_bandwidth_bytes_per_s=2e7))
    plain, away = offloaded(None), offloaded(Swap())
    moved = sum(task.bytes_moved for task, one in steps(lowered_of(away, GRAPH)) if isinstance(one, HostCopy))
    fast_s, slow_s, none_s = (
        predict_plan(plan, GRAPH, profile).step_time_s
        for plan, profile in ((away, HARDWARE), (away, slow), (plain, HARDWARE))
    )
    assert fast_s == pytest.approx(none_s, rel=0.02)
    assert slow_s > moved / 2e7


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("swap", [Swap(), pytest.param(Swap(prefetch=2), marks=pytest.mark.slow)])
def test_stages_keep_less_and_run_what_is_timed(schedule: str, swap: Swap) -> None:
    plain, away = (pipelined(offloaded(one, micro_batches=4), GRAPH, 2, schedule) for one in (None, swap))
    before, after = (predict_plan(plan, GRAPH, HARDWARE).peak_memory_bytes for plan in (plain, away))
    # What the second part of a split backward pass reads stays on the device from the first one on.
    assert after < before or schedule == "zb_h1"
    timed, run = lower_pipeline(away, GRAPH, HARDWARE), lower_stages(away, at_batch(GRAPH, away.samples))
    assert (timed.sizes.activations < lower_pipeline(plain, GRAPH, HARDWARE).sizes.activations).all()
    for stage, instructions in enumerate(run.stages):
        _follow(instructions.passes, {p.value for p in run.ranks[stage].parameters} | instructions.lasting)
        for key, one in instructions.passes.items():
            tasks = [timed.work.tasks[number] for number in timed.work.passes[stage][key].numbers]
            copies = [task.bytes_moved for task in tasks if task.axis == HOST]
            assert copies == [task.bytes_moved for task in one.tasks if task.axis == HOST]


def _follow(passes: Any, there: set[str]) -> None:
    """What has come back has gone before, and is read behind."""
    kinds = {kind for kind, _ in passes}
    known = set(there)
    for kind in [kind for kind in ActionKind if kind in kinds]:
        one: PassInstructions = passes[kind, 0]
        for instruction in one.instructions:
            if isinstance(instruction, HostCopy) and not instruction.to_host:
                assert instruction.source in known
            for name in read_values(instruction):
                assert " back in " not in name or name in known
            known.update(written_values(instruction))


def test_layers_that_differ_are_simulated_apart() -> None:
    plan = offloaded(None)
    peaks = []
    for last in (0, 1, 2):
        ranges = (OffloadRange(first="blocks.0", last=f"blocks.{last}", swap=Swap(prefetch=2)),)
        peaks.append(predict_plan(replace(plan, offload_ranges=ranges), GRAPH, HARDWARE).peak_memory_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def test_ranges_name_units() -> None:
    wrong = replace(offloaded(None), offload_ranges=(OffloadRange(first="blocks.0", last="blocks.9", swap=Swap()),))
    with pytest.raises(StrategyError, match=r"offload_activations.0: 'blocks.9' is no unit"):
        lowering_options(wrong, GRAPH)


@pytest.mark.slow
def test_what_does_not_fit_does_with_activations_on_the_host() -> None:
    pins = {"recompute": "none", "micro_batches": "1", "offload_optimizer": "false"}
    request = PlanRequest(
        network="zoo:gpt2",
        hardware="dgx-a100",
        devices=1,
        global_batch=160,
        pins=Pins.read(pins),
        top=1,
        sensitivity=False,
    )
    assert not plan_network(request).candidates
    found = plan_network(replace(request, pins=Pins.read({**pins, "offload_activations": "true"}))).candidates[0]
    assert found.plan.offload_ranges == (OffloadRange(first="blocks.0", last="blocks.11", swap=Swap()),)
    assert found.prediction.peak_memory_bytes < HARDWARE.device_memory_bytes
