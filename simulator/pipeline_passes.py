"""Pipelines of operators, pass by pass: the times of `operator_table` in an engine without writing it out.

From the moments at which the streams of a rank are free and the inputs of a pass are there, every later moment is
``max_i(moment_i + delay_i)``: a linear map in max-plus algebra (Baccelli et al., "Synchronization and Linearity",
1992). A pass is one small matrix, the same for every micro-batch, and a step costs as much as its passes, not as its
operators.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from simulator import fast_engine
from simulator.pipeline_operators import STREAMS, OperatorCosts, OperatorGroup, OperatorPlan, per_rank, plan_operators
from simulator.schedules import Schedule
from simulator.task_table import FloatArray, IntArray, TaskTable

Run = Callable[[TaskTable], tuple[FloatArray, FloatArray]]


def following(table: TaskTable, last: IntArray, steps: int) -> TaskTable:
    """Several steps one after the other; task t of step s has number ``s * tasks + t``.

    Parameters
    ----------
    table : one step; nothing crosses links
    last : (ranks,) the task that ends the step of each rank: on all streams of a rank the next one waits for it
    """
    size, number = table.size, np.arange(steps)[:, None]
    first = np.full(len(table.stream_rank), size, dtype=np.int64)
    np.minimum.at(first, table.stream, np.arange(size))
    first = np.sort(first[first < size])
    counts = np.tile(np.diff(table.dependency_offsets), (steps, 1))
    counts[1:, first] += 1
    offsets = np.concatenate(([0], np.cumsum(counts)))
    dependencies = np.empty(offsets[-1], dtype=np.int64)
    rows = np.repeat(np.arange(size), np.diff(table.dependency_offsets))
    place = np.arange(len(rows)) - table.dependency_offsets[rows]
    dependencies[offsets[rows + size * number] + place] = table.dependencies + size * number
    awaited = last[table.stream_rank[table.stream[first]]]
    dependencies[offsets[first + size * number[1:] + 1] - 1] = awaited + size * number[:-1]
    met = max(int(table.meeting.max(initial=-1)) + 1, len(table.meeting_size))
    sizes = np.pad(table.meeting_size, (0, met - len(table.meeting_size)))
    return replace(
        table,
        stream=np.tile(table.stream, steps),
        work=np.tile(table.work, steps),
        latency_s=np.tile(table.latency_s, steps),
        rate_bytes_per_s=np.tile(table.rate_bytes_per_s, steps),
        meeting=np.where(table.meeting < 0, -1, table.meeting + met * number).ravel(),
        meeting_size=np.tile(sizes, steps),
        dependency_offsets=offsets,
        dependencies=dependencies,
        link_offsets=np.zeros(steps * size + 1, dtype=np.int64),
        label=np.tile(table.label, steps),
    )


def period_s(table: TaskTable, last: IntArray, begins: IntArray, ends: FloatArray, run: Run = fast_engine.run) -> float:
    """Seconds after which the next step follows: from the end of one to that of the next where that takes longest.

    With A the map of max-plus algebra from the moments at which ranks and links are free to those of a step later,
    every ``max_r((A x)_r - x_r)`` is a period at which steps can follow one another, and none is less than the least
    one, the eigenvalue of A (Baccelli et al., "Synchronization and Linearity", 1992, 3.2). Here x is how the first step
    leaves them. A rank that begins first and ends last has no gap to fill: the step then takes its whole.

    Parameters
    ----------
    table, last : as in `following`
    begins : (n,) ranks that begin without waiting for another
    ends : (T,) of the tasks of one step
    run : runs a table
    """
    length = float(ends.max())
    if ends[last[begins]].max() >= length:
        return length
    found = run(following(table, last, 2))[1].reshape(2, table.size)
    moments = np.zeros((2, len(table.stream_rank)))
    np.maximum.at(moments, (np.arange(2)[:, None], table.stream), found)
    moments = np.maximum(moments, found[:, last[table.stream_rank]])
    return float((moments[1] - moments[0]).max())


COMPUTE, COMMUNICATION, BESIDE, FIRST_INPUT = range(STREAMS + 1)
"""Moments that decide all later ones: all streams free, then the inputs of the one or two actions there."""
MOMENTS = FIRST_INPUT + 2
COMPILED_GROUPS = 150_000
"""Groups from which loading compiled code, about 0.5 s once in a process, is worth it; loaded, it runs fewer too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorResult:
    """Times of one step.

    Attributes
    ----------
    step_time_s : after which the next step follows (`simulator.pipeline_passes`)
    length_s : from the start of the first rank to the end of the last
    ends_s : (A,) when the output of each action is there
    bubble_s : (ranks,) time of a step in which no kernel runs and no send blocks the rank
    compute_s, stall_s : (ranks,) kernels of all passes, and time in which they wait for messages of their own pass
    computed_s, drained_s, ready_s : (ranks,) when the last action has computed, when its messages have arrived, and
        when the epilogue begins
    """

    step_time_s: float
    length_s: float
    ends_s: FloatArray
    bubble_s: FloatArray
    compute_s: FloatArray
    stall_s: FloatArray
    computed_s: FloatArray
    drained_s: FloatArray
    ready_s: FloatArray


def simulate_operators(schedule: Schedule, costs: OperatorCosts) -> OperatorResult:
    """Simulate one step, pass by pass: the times are those of `operator_table` in an engine, to rounding.

    Raises
    ------
    ProgramError
        When the schedule cannot run to its end.
    """
    plan = plan_operators(schedule, costs)
    size = schedule.size
    link, send_s = np.full(size + 1, -1, dtype=np.int64), np.zeros(size + 1)
    link[plan.sender], send_s[plan.sender] = plan.link, plan.send_s
    # Moments of all actions: outputs, arrivals of what is sent, and the start of the step.
    sent = (schedule.action_rank[schedule.source] != schedule.action_rank) & (link[schedule.source] >= 0)
    needed = np.append(np.where(schedule.source < 0, 2 * size, schedule.source + size * sent), 2 * size)
    runs_beside = np.array([(group.operators.communication == BESIDE).any() for group in plan.groups])
    matrices = np.array([matrix(group) for group in plan.groups]).reshape(-1, MOMENTS**2)
    kernels = np.array([(g.operators.seconds * (g.operators.communication == COMPUTE)).sum() for g in plan.groups])
    waits = np.maximum(matrices[:, :MOMENTS].max(axis=1) - kernels, 0.0)
    computing, stalls = (
        np.bincount(schedule.action_rank[plan.first], values[plan.which], schedule.ranks).astype(np.float64)
        for values in (kernels, waits)
    )
    given: list[Any] = [plan.which, plan.first, plan.second, schedule.action_rank[plan.first], needed, link, send_s]
    given += [matrices.ravel(), runs_beside, costs.overlap_sends, float(costs.send_stall)]
    compiled = len(plan.first) >= COMPILED_GROUPS or bool(_compiled.cache_info().currsize)
    if not compiled:
        given = [value if isinstance(value, bool | float) else value.tolist() for value in given]

    def step(begins: FloatArray, link_free: FloatArray) -> tuple[FloatArray, ...]:
        """All moments of a step and its last ones, by those at which ranks and links are free."""
        state = [begins + per_rank(schedule, costs.prologue_s), begins.copy(), begins.copy(), link_free.copy()]
        state.append(np.zeros(2 * size + 1))
        if compiled:
            _compiled()(*given, *state)
        else:
            listed = [moments.tolist() for moments in state]
            run_groups(*given, *listed)
            state = [np.array(values) for values in listed]
        compute, communication, beside, *rest = state
        ready = np.maximum(np.maximum(compute, communication), _after_meetings(costs, compute, communication, beside))
        return compute, np.maximum(np.maximum(compute, communication), beside), ready, *rest

    compute, drained, ready, link_free, moments = step(np.zeros(schedule.ranks), np.zeros(len(plan.link_rank)))
    ends = ready + per_rank(schedule, costs.epilogue_s)
    period = length = float(max(ends.max(), link_free.max(initial=0.0)))
    if ends[schedule.beginning_ranks].max() < length:
        _, _, again, links_again, _ = step(ends, link_free)
        ends_again = again + per_rank(schedule, costs.epilogue_s)
        links = np.maximum(links_again, ends_again[plan.link_rank]) - np.maximum(link_free, ends[plan.link_rank])
        period = float(max((ends_again - ends).max(), links.max(initial=0.0)))
    return OperatorResult(
        step_time_s=period,
        length_s=length,
        ends_s=moments[:size],
        bubble_s=np.subtract(period, _busy(schedule, costs, plan, computing)),
        compute_s=computing,
        stall_s=stalls,
        computed_s=compute,
        drained_s=drained,
        ready_s=ready,
    )


def _after_meetings(
    costs: OperatorCosts, compute: FloatArray, communication: FloatArray, beside: FloatArray
) -> FloatArray:
    """(ranks,) moments at which what runs beside is done, the meetings included."""
    free = beside.copy()
    for ranks, seconds in costs.meetings:
        taking = list(ranks)
        free[taking] = max(free[taking].max(), compute[taking].max(), communication[taking].max()) + seconds
    return free


def run_groups(  # noqa: C901 - calls cost more than what they would tidy
    which: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    rank: Sequence[int],
    needed: Sequence[int],
    link: Sequence[int],
    send_s: Sequence[float],
    matrices: Sequence[float],
    runs_beside: Sequence[bool],
    overlap_sends: bool,
    send_stall: float,
    compute: MutableSequence[float],
    communication: MutableSequence[float],
    beside: MutableSequence[float],
    link_free: MutableSequence[float],
    moments: MutableSequence[float],
) -> None:
    """Fill ``moments`` (2A + 1,) of outputs and arrivals; Python runs it on lists, numba compiles it for arrays."""
    for group in range(len(which)):
        here, at, one, two = rank[group], 25 * which[group], first[group], second[group]
        kernels, messages, others = compute[here], communication[here], beside[here]
        input_one, input_two = moments[needed[one]], moments[needed[two]]
        for row in range(4 if two < 0 else 5):
            if row == 2 and not runs_beside[which[group]]:
                at += 5
                continue
            # Comparisons in place of max(): most of the time goes here, and calls take three times as long.
            moment = kernels + matrices[at]
            other = messages + matrices[at + 1]
            if other > moment:
                moment = other
            other = others + matrices[at + 2]
            if other > moment:
                moment = other
            other = input_one + matrices[at + 3]
            if other > moment:
                moment = other
            other = input_two + matrices[at + 4]
            if other > moment:
                moment = other
            at += 5
            if row == 0:
                compute[here] = moment
            elif row == 1:
                communication[here] = moment
            elif row == 2:
                beside[here] = moment
            elif row == 3:
                moments[one] = moment
            else:
                moments[two] = moment
        for sender in (one, two):
            lane = link[sender]
            if lane < 0:
                continue
            output = moments[sender]
            if overlap_sends:
                arrival = max(link_free[lane], output) + send_s[sender]
                link_free[lane] = arrival
                if send_stall > 0.0:
                    compute[here] = max(compute[here], output) + send_stall * send_s[sender]
            else:
                arrival = max(compute[here], output) + send_s[sender]
                compute[here] = arrival
            moments[len(link) - 1 + sender] = arrival


@cache
def _compiled() -> Any:
    from numba import njit

    return njit(cache=True, nogil=True)(run_groups)


def _busy(schedule: Schedule, costs: OperatorCosts, plan: OperatorPlan, computing: FloatArray) -> FloatArray:
    busy = computing + per_rank(schedule, costs.prologue_s) + per_rank(schedule, costs.epilogue_s)
    still = costs.send_stall if costs.overlap_sends else 1.0
    if still:
        busy = busy + still * np.bincount(schedule.action_rank[plan.sender], plan.send_s, schedule.ranks)
    return busy


def matrix(group: OperatorGroup) -> list[tuple[float, ...]]:
    """(5, 5) least delays from the deciding moments to all streams free again and the outputs there.

    ``-inf`` where something does not wait for a moment.
    """
    given = group.operators
    none = -np.inf
    streams = [tuple([0.0 if moment == stream else none for moment in range(MOMENTS)]) for stream in range(STREAMS)]
    waits = [set(entry.tolist()) for entry in group.entries]
    first, second = (*waits, set[int]())[:2]
    offsets, dependencies = given.dependency_offsets.tolist(), given.dependencies.tolist()
    ends: list[tuple[float, ...]] = []
    # Written out for the five moments: loops over them take three times as long.
    for index, (seconds, stream) in enumerate(zip(given.seconds.tolist(), given.communication.tolist(), strict=True)):
        kernels, messages, others, one, two = streams[stream]
        for before in dependencies[offsets[index] : offsets[index + 1]]:
            end = ends[before]
            if end[0] > kernels:
                kernels = end[0]
            if end[1] > messages:
                messages = end[1]
            if end[2] > others:
                others = end[2]
            if end[3] > one:
                one = end[3]
            if end[4] > two:
                two = end[4]
        if index in first and one < 0.0:
            one = 0.0
        if index in second and two < 0.0:
            two = 0.0
        streams[stream] = kernels + seconds, messages + seconds, others + seconds, one + seconds, two + seconds
        ends.append(streams[stream])
    outputs = [ends[output] for output in group.outputs]
    return [*streams, *outputs, *[(none,) * MOMENTS] * (MOMENTS - STREAMS - len(outputs))]


def step_of_passes(
    schedule: Schedule, forward_s: FloatArray, backward_s: FloatArray, *, together: bool = False
) -> float:
    """Seconds of one step in which ranks only run passes, (stages,) each; its length where ranks end ``together``.

    Each part of a split backward pass takes half of it, and both actions of a pair one after the other.
    """
    order, *columns = _passes_in_order(schedule)
    half = backward_s / 2
    actions = np.stack([forward_s, backward_s, half, backward_s - half])[schedule.kind, schedule.stage]
    seconds = np.add.reduceat(actions, schedule.leaders)[order].tolist()
    ends = _ends_of_passes([0.0] * schedule.ranks, columns, seconds)
    if together or max(ends[rank] for rank in schedule.beginning_ranks.tolist()) >= max(ends):
        return max(ends)
    following = _ends_of_passes(ends, columns, seconds)
    return max(there - here for here, there in zip(ends, following, strict=True))


def _ends_of_passes(begins: list[float], columns: Sequence[list[int]], seconds: list[float]) -> list[float]:
    """(ranks,) ends of a step by the moments at which its ranks begin."""
    free = list(begins)
    ends = [0.0] * (len(seconds) + 1)  # at last the end of what nothing comes before
    for group, rank, needed, other, takes in zip(*columns, seconds, strict=True):
        start = free[rank]
        if ends[needed] > start:
            start = ends[needed]
        if ends[other] > start:
            start = ends[other]
        ends[group] = free[rank] = start + takes
    return free


@lru_cache(maxsize=256)
def _passes_in_order(schedule: Schedule) -> tuple[IntArray, list[int], list[int], list[int], list[int]]:
    """Groups in an order in which they can be timed; again as a list, their ranks, and what both actions need or -1."""
    groups = np.cumsum(np.concatenate(([True], ~schedule.paired[:-1]))) - 1
    needs, leaders, order = np.append(groups, -1)[schedule.previous], schedule.leaders, schedule.execution_order
    other = np.where(schedule.paired[leaders], np.append(needs, -1)[leaders + 1], -1)
    ranks = schedule.action_rank[leaders]
    return order, order.tolist(), ranks[order].tolist(), needs[leaders][order].tolist(), other[order].tolist()
