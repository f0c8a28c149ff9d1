"""A plan beside the best under a pin: which seconds and bytes differ, and what would let the other one win."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.cost.software import run_for
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.checked import checked_graph
from planner.planning.one_stage import Candidate
from planner.planning.planning import capture_for, plan_network
from planner.planning.prediction import predict_plan, simulate_plan
from planner.planning.shared_tables import SharedTables
from planner.plans.pins import FREE, Pins
from planner.plans.plan import Plan
from planner.plans.request import PlanRequest
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from simulator.program import Task
from simulator.topology import level_of_axis

FASTER = (1.25, 1.5, 2.0, 4.0)
"""Times as fast as it is, a level of links is tried."""
MORE = (2.0, 4.0)
"""Times as many samples of a step are tried: each takes two searches."""
SMALL = 1e-3
"""Differences below this part of a step, or of the memory in use, are left out."""

STEP = "step"
"""Where a part of the step is: these differences add up to that of the step times, but for the small ones."""

Key = tuple[str, str]
"""What takes time or memory, and where: on the device, in its memory, on a level of links, on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much more of something the other plan has; negative where it has less."""

    what: str
    where: str
    seconds: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change at which the best plan under the pin is no slower, with the step times of both."""

    what: str
    factor: float
    step_time_s: float
    chosen_step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A plan, the best one under a pin, and how they differ.

    ``instead`` is None where no plan fits under the pin, for the reason in ``infeasible``.
    """

    chosen: Candidate
    instead: Candidate | None
    infeasible: str = ""
    differences: tuple[Difference, ...] = ()
    would_win_if: tuple[Change, ...] = ()


def request_of(plan: Plan) -> PlanRequest:
    """Return the request of a plan, without the plan's choices."""
    return PlanRequest(
        network=plan.network,
        hardware=plan.hardware,
        devices=plan.devices,
        global_batch=plan.global_batch,
        sequence_length=plan.sequence_length,
        precision=plan.precision,
        optimizer=plan.optimizer,
        top=1,
        sensitivity=False,
        exchange=plan.exchange,
        software=plan.software,
        attention=plan.attention,
        norms=plan.norms,
        expert_imbalance=plan.expert_imbalance,
    )


def why_not(
    plan: Plan,
    pins: Pins,
    *,
    request: PlanRequest | None = None,
    graph: OperatorGraph | None = None,
    changes: bool = True,
) -> Compared:
    """Compare a plan with the best plan under pins.

    Parameters
    ----------
    request
        The request that the plan answers; its pins stay. Without it, the request is read off the plan.
    graph
        The network, captured already.
    changes
        Whether to search for changes at which the other plan would win.

    Seconds are those of a device in one step, the mean of all pipeline ranks: of each kind of task whether hidden or
    not, and of the parts that add up to the step.

    Raises
    ------
    InputError
        A pin is unknown, or contradicts another.
    """
    request = request_of(plan) if request is None else replace(request, top=1, sensitivity=False)
    pins = pins.over(request.pins)
    shared = SharedTables(capture_for(request) if graph is None else graph)
    hardware = run_for(plan, load_profile(plan.hardware))
    checked = checked_graph(plan, shared.graph)
    chosen = Candidate(plan=plan, prediction=predict_plan(plan, checked, hardware), reason="")
    found = plan_network(replace(request, pins=pins), shared=shared)
    instead = found.candidates[0] if found.candidates else None
    return Compared(
        chosen=chosen,
        instead=instead,
        infeasible=found.infeasible,
        differences=() if instead is None else tuple(_differences(chosen, instead, shared.graph, hardware)),
        would_win_if=tuple(_changes(chosen, instead, pins, shared, hardware)) if changes else (),
    )


def _differences(
    chosen: Candidate, instead: Candidate, graph: OperatorGraph, hardware: Hardware
) -> Iterator[Difference]:
    """The parts of the step, then kinds of tasks and of memory, the largest first."""
    before, after = chosen.prediction, instead.prediction
    for part, seconds in after.breakdown.items():
        more = seconds - before.breakdown.get(part, 0.0)
        if abs(more) > SMALL * before.step_time_s:
            yield Difference(what=part.removesuffix("_s").replace("_", " "), where=STEP, seconds=more)
    own, other = task_totals(chosen.plan, graph, hardware), task_totals(instead.plan, graph, hardware)
    tasks = [
        Difference(what=what, where=where, seconds=seconds, bytes=size)
        for what, where in {**own, **other}
        for seconds, size in [tuple(b - a for a, b in zip(own[what, where], other[what, where], strict=True))]
        if abs(seconds) > SMALL * before.step_time_s
    ]
    yield from sorted(tasks, key=lambda one: -abs(one.seconds))
    kinds = {**before.memory_at_peak, **after.memory_at_peak}
    memory = [
        Difference(what=str(kind).replace("_", " "), where="memory at the peak", bytes=more)
        for kind in kinds
        if abs(more := after.memory_at_peak.get(kind, 0) - before.memory_at_peak.get(kind, 0))
        > SMALL * before.peak_memory_bytes
    ]
    yield from sorted(memory, key=lambda one: -abs(one.bytes))


def task_totals(plan: Plan, graph: OperatorGraph, hardware: Hardware) -> Mapping[Key, tuple[float, float]]:
    """Seconds of a device in a step, and bytes that it sends, of each kind of task; the mean of all pipeline ranks."""
    found: dict[Key, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    lowered = simulate_plan(plan, checked_graph(plan, graph), hardware).lowered
    counts = lowered.work.counts(lowered.schedule) / lowered.schedule.ranks
    for task, seconds, times in zip(lowered.work.tasks, lowered.work.seconds, counts, strict=True):
        key = _kind(task, plan, hardware)
        before, sent = found[key]
        found[key] = before + float(seconds * times), sent + float(task.payload_bytes * times)
    return found


def _kind(task: Task, plan: Plan, hardware: Hardware) -> Key:
    if task.collective is not None:
        axes = [axis.name for axis in plan.mesh.axes]
        place = axes.index(task.axis) if task.axis in axes else None
        level = "" if place is None else level_of_axis(hardware, plan.mesh.axes[place].size, plan.mesh.stride(place))
        return f"{task.collective} of {task.axis} ranks".replace("_", "-"), level or "links"
    return f"{task.kernel}, {task.phase}".replace("_", " "), "host" if task.on_host else "device"


def _changes(
    chosen: Candidate, instead: Candidate | None, pins: Pins, shared: SharedTables, hardware: Hardware
) -> Iterator[Change]:
    """The least change of each kind tried at which the best plan under the pins is no slower than the best of all."""
    if instead is not None:
        for number, level in enumerate(hardware.levels):
            if number and hardware.levels[number - 1].size >= chosen.plan.devices:
                continue

            def faster(factor: float, number: int = number) -> tuple[float, float]:
                return _with_bandwidth(chosen.plan, instead.plan, shared.graph, hardware, number, factor)

            yield from _least(f"bandwidth of {level.name}", FASTER, faster)
    request = request_of(chosen.plan)

    def searched(asked: PlanRequest) -> tuple[float, float]:
        times = []
        for pinned in (pins, FREE):
            best = plan_network(replace(asked, pins=pinned), shared=shared).candidates
            times.append(best[0].prediction.step_time_s if best else float("inf"))
        return times[0], times[1]

    def with_samples(factor: float) -> tuple[float, float]:
        return searched(replace(request, global_batch=int(chosen.plan.global_batch * factor)))

    yield from _least("samples of a step", MORE, with_samples)


def _least(what: str, factors: Sequence[float], times: Callable[[float], tuple[float, float]]) -> Iterator[Change]:
    for factor in factors:
        other, own = times(factor)
        if other <= own * (1 + SMALL) and other != float("inf"):
            yield Change(what=what, factor=factor, step_time_s=other, chosen_step_time_s=own)
            return


def _with_bandwidth(
    chosen: Plan, instead: Plan, graph: OperatorGraph, hardware: Hardware, number: int, factor: float
) -> tuple[float, float]:
    """Step times of the other plan and of the chosen one where one level of links is so many times as fast."""
    level = hardware.levels[number]
    levels = list(hardware.levels)
    levels[number] = replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * factor)
    faster = replace(
        hardware, levels=tuple(levels), collective_tables=(), hash=f"{hardware.hash} {level.name} × {factor}"
    )
    other, own = (predict_plan(plan, checked_graph(plan, graph), faster) for plan in (instead, chosen))
    return other.step_time_s, own.step_time_s
