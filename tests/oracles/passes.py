"""The oracle of pipelines: a schedule whose passes are one task each, with the cost of every stage.

Ranks compute one action after the other. What a stage hands to a stage of another rank is sent as soon as it is
there, in order on the link between the two, and the receiver waits for it only when it needs it; a rank whose sends
do not overlap stands still while it sends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from simulator import fast_engine
from simulator.pipeline_operators import Numbers, exchanges, per_rank, send_links, send_times, spread
from simulator.pipeline_passes import period_s
from simulator.schedules import ActionKind, Schedule
from simulator.task_table import FloatArray, IntArray, StreamKind, TaskTable, plain_table

LABELS = (
    *(kind.name.lower() for kind in ActionKind),
    "overlapped",
    "send",
    "prologue",
    "epilogue",
    "parameter_gather",
    "gradient_reduce",
)
OVERLAPPED, SEND, PROLOGUE, EPILOGUE, GATHER, REDUCE = range(len(ActionKind), len(LABELS))


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineCosts:
    """What each stage and each rank costs; a number stands for an array of equal ones.

    Attributes
    ----------
    forward_s, backward_s : (stages,) one pass of one micro-batch, recomputation and collectives included
    input_gradient_s, weight_gradient_s : (stages,) the two parts of a split backward pass; by default half of it each
    forward_communication_s, backward_communication_s : (stages,) the part of a pass that is communication; in a pair
        of actions it hides behind the computation of the other one
    send_s : (stages,) output of a stage to the next, and the gradient back to the one before
    activation_bytes : (stages,) kept from the forward to the backward pass of a micro-batch
    weight_activation_bytes : (stages,) the part of them that only the weight gradient releases; by default all
    prologue_s, epilogue_s : (ranks,) before the first and after the last action
    parameter_gather_s, gradient_reduce_s : (stages,) collectives beside the computation: what the first forward pass
        of a stage waits for, and what starts behind its last backward pass; the epilogue waits for the latter
    overlap_sends : a rank computes while it sends
    """

    forward_s: Numbers
    backward_s: Numbers
    input_gradient_s: Numbers | None = None
    weight_gradient_s: Numbers | None = None
    forward_communication_s: Numbers = 0.0
    backward_communication_s: Numbers = 0.0
    send_s: Numbers = 0.0
    activation_bytes: Numbers = 0.0
    weight_activation_bytes: Numbers | None = None
    prologue_s: Numbers = 0.0
    epilogue_s: Numbers = 0.0
    parameter_gather_s: Numbers = 0.0
    gradient_reduce_s: Numbers = 0.0
    overlap_sends: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineResult:
    """Times of one step.

    Attributes
    ----------
    step_time_s : after which the next step follows (`simulator.pipeline_passes`)
    length_s : from the start of the first rank to the end of the last
    starts_s, ends_s : (A,) in the order of the schedule's actions
    bubble_s : (ranks,) time of a step in which a rank neither computes nor is blocked by a send
    stall_s : (ranks,) time between a rank's first and last action in which it does neither
    peak_activation_bytes : (ranks,)
    """

    step_time_s: float
    length_s: float
    starts_s: FloatArray
    ends_s: FloatArray
    bubble_s: FloatArray
    stall_s: FloatArray
    peak_activation_bytes: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineLayout:
    """Numbers of tasks: what of a table depends on the schedule alone.

    A group is an action or a pair; each is one task, followed by its sends.

    Attributes
    ----------
    group_task : (G,)
    action_group : (A,)
    sender, receiver, send_task : (X,) actions that send and that receive, task of the send
    prologue, epilogue : (ranks,) tasks
    gather, reduce : (stages,) tasks
    first_use, last_use : (stages,) first and last task of a stage
    """

    group_task: IntArray
    action_group: IntArray
    sender: IntArray
    receiver: IntArray
    send_task: IntArray
    prologue: IntArray
    epilogue: IntArray
    gather: IntArray
    reduce: IntArray
    first_use: IntArray
    last_use: IntArray


def pipeline_table(schedule: Schedule, costs: PipelineCosts) -> TaskTable:
    """One step of a pipeline as tasks: one for each action or pair of actions, one for each send."""
    return _filled(schedule, costs)[1]


def simulate_pipeline(schedule: Schedule, costs: PipelineCosts) -> PipelineResult:
    """Simulate one step.

    Raises
    ------
    ProgramError
        When the schedule cannot run to its end.
    """
    layout, table = _filled(schedule, costs)
    starts, ends = fast_engine.run(table)
    step = period_s(table, layout.epilogue, schedule.beginning_ranks, ends)
    computes = table.stream < schedule.ranks
    busy = np.bincount(table.stream[computes], table.work[computes], schedule.ranks).astype(np.float64)
    first = layout.group_task[np.searchsorted(schedule.leaders, schedule.offsets[:-1])]
    inner = np.flatnonzero(computes[: layout.epilogue[0]])
    last = np.zeros(schedule.ranks, dtype=np.int64)
    last[table.stream[inner]] = inner
    outside = table.work[layout.prologue] + table.work[layout.epilogue]
    action_task = layout.group_task[layout.action_group]
    return PipelineResult(
        step_time_s=step,
        length_s=float(ends.max()),
        starts_s=starts[action_task],
        ends_s=ends[action_task],
        bubble_s=np.subtract(step, busy),
        stall_s=ends[last] - starts[first] - (busy - outside),
        peak_activation_bytes=peak_activation_bytes(schedule, costs),
    )


def peak_activation_bytes(schedule: Schedule, costs: PipelineCosts) -> FloatArray:
    """(ranks,) most bytes that stand for backward passes at once.

    Forward passes add what they keep; the input gradient releases what the weight gradient does not need, the whole
    backward pass everything. Both actions of a pair stand before either releases. The order of actions alone decides:
    a rank runs them one after the other.
    """
    kept = per_stage(schedule, costs.activation_bytes)
    weight = kept if costs.weight_activation_bytes is None else per_stage(schedule, costs.weight_activation_bytes)
    change = np.stack([kept, -kept, weight - kept, -weight])[schedule.kind, schedule.stage]
    swapped = np.flatnonzero(schedule.paired & (change < 0))
    change[swapped], change[swapped + 1] = change[swapped + 1], change[swapped]
    level = np.cumsum(change)
    before = np.concatenate(([0.0], level))[schedule.offsets[:-1]]
    highest: FloatArray = np.maximum.reduceat(level, schedule.offsets[:-1]) - before
    return highest


def per_stage(schedule: Schedule, values: Numbers) -> FloatArray:
    """(stages,) values, broadcast from one."""
    return spread(values, schedule.stages, "stages")


def action_times(schedule: Schedule, costs: PipelineCosts) -> tuple[FloatArray, FloatArray]:
    """(A,) seconds of each action alone, and (A,) seconds of communication in them."""
    backward = per_stage(schedule, costs.backward_s)
    inputs = backward / 2 if costs.input_gradient_s is None else per_stage(schedule, costs.input_gradient_s)
    weights = backward - inputs if costs.weight_gradient_s is None else per_stage(schedule, costs.weight_gradient_s)
    seconds = np.stack([per_stage(schedule, costs.forward_s), backward, inputs, weights])
    exchange = per_stage(schedule, costs.backward_communication_s)
    communication = np.stack(
        [per_stage(schedule, costs.forward_communication_s), exchange, exchange, np.zeros_like(exchange)]
    )
    return seconds[schedule.kind, schedule.stage], communication[schedule.kind, schedule.stage]


def group_times(schedule: Schedule, costs: PipelineCosts) -> FloatArray:
    """(G,) seconds of each action or pair.

    A pair takes ``max(c1 + c2, x1 + x2, c1 + x1, c2 + x2)`` of its computation c and communication x: two queues
    that are never both idle, and no action faster than alone. The bound is met when both interleave finely.
    """
    seconds, communication = action_times(schedule, costs)
    leaders = schedule.leaders
    times = seconds[leaders]
    pairs = np.flatnonzero(schedule.paired[leaders])
    if len(pairs):
        first = leaders[pairs]
        second = first + 1
        queues = np.maximum(
            seconds[first] + seconds[second] - communication[first] - communication[second],
            communication[first] + communication[second],
        )
        times[pairs] = np.maximum(queues, np.maximum(seconds[first], seconds[second]))
    return times


def compressed_rows(rows: IntArray, values: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """Offsets (size + 1,) and values (N,) of pairs in any order."""
    order = np.argsort(rows, kind="stable")
    return np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=size)))), values[order]


def _filled(schedule: Schedule, costs: PipelineCosts) -> tuple[PipelineLayout, TaskTable]:
    layout, table = _prepared(schedule, sends=bool(np.any(costs.send_s)), overlap_sends=costs.overlap_sends)
    work = np.zeros(table.size)
    work[layout.group_task] = group_times(schedule, costs)
    work[layout.prologue] = per_rank(schedule, costs.prologue_s)
    work[layout.epilogue] = per_rank(schedule, costs.epilogue_s)
    work[layout.gather] = per_stage(schedule, costs.parameter_gather_s)
    work[layout.reduce] = per_stage(schedule, costs.gradient_reduce_s)
    if len(layout.send_task):
        work[layout.send_task] = send_times(schedule, layout.sender, costs.send_s)
    return layout, replace(table, work=work)


@lru_cache(maxsize=32)
def _prepared(schedule: Schedule, *, sends: bool, overlap_sends: bool) -> tuple[PipelineLayout, TaskTable]:
    """What the schedule alone decides: numbers of tasks, and the table without its work."""
    layout = _layout(schedule, sends)
    ranks, size = schedule.ranks, int(layout.epilogue[-1]) + 1
    stream, label = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    rank = stream[layout.prologue] = stream[layout.epilogue] = np.arange(ranks)
    stream[layout.group_task] = schedule.action_rank[schedule.leaders]
    stream[layout.gather] = stream[layout.reduce] = ranks + schedule.stage_rank
    label[layout.group_task] = np.where(schedule.paired[schedule.leaders], OVERLAPPED, schedule.kind[schedule.leaders])
    for tasks, number in (
        (layout.prologue, PROLOGUE),
        (layout.epilogue, EPILOGUE),
        (layout.gather, GATHER),
        (layout.reduce, REDUCE),
        (layout.send_task, SEND),
    ):
        label[tasks] = number
    stream_rank = np.concatenate([rank, rank])
    giver = layout.group_task[layout.action_group[layout.sender]]
    waits = [(layout.group_task[layout.action_group[layout.receiver]], layout.send_task if sends else giver)]
    waits += [(layout.first_use, layout.gather), (layout.reduce, layout.last_use)]
    waits += [(layout.epilogue[schedule.stage_rank], layout.reduce)]
    if sends and overlap_sends:
        link, link_rank = send_links(schedule, layout.sender)
        stream[layout.send_task] = 2 * ranks + link
        stream_rank = np.concatenate([stream_rank, link_rank])
        waits += [(layout.send_task, giver)]
    elif sends:
        stream[layout.send_task] = schedule.action_rank[layout.sender]
    rows, values = (np.concatenate(side) for side in zip(*waits, strict=True))
    offsets, dependencies = compressed_rows(rows, values, size)
    kind = np.where(np.arange(len(stream_rank)) < ranks, int(StreamKind.COMPUTE), int(StreamKind.COMMUNICATION))
    table = plain_table(
        stream=stream,
        stream_rank=stream_rank,
        stream_kind=kind,
        dependency_offsets=offsets,
        dependencies=dependencies,
        work=np.zeros(size),
        label=label,
        labels=LABELS,
        name=f"the pipeline of schedule {schedule.name}",
    )
    return layout, table


def _layout(schedule: Schedule, sends: bool) -> PipelineLayout:
    """Number the tasks so that none waits for a later one.

    Prologues, gathers, groups each with its sends, reductions, epilogues; gathers in the order of first use on each
    rank, reductions in that of last use.
    """
    ranks, stages, groups = schedule.ranks, schedule.stages, len(schedule.leaders)
    action_group = np.cumsum(np.concatenate(([True], ~schedule.paired[:-1]))) - 1
    sender, receiver = exchanges(schedule)
    sending_group = action_group[sender] if sends else np.zeros(0, dtype=np.int64)
    count = np.bincount(sending_group, minlength=groups)
    group_task, order = np.zeros(groups, dtype=np.int64), schedule.execution_order
    group_task[order] = ranks + stages + np.arange(groups) + np.cumsum(count[order]) - count[order]
    earlier = np.cumsum(count) - count
    send_task = group_task[sending_group] + 1 + np.arange(len(sending_group)) - earlier[sending_group]
    end = ranks + stages + groups + len(send_task)
    first_use, last_use = np.full(stages, end), np.zeros(stages, dtype=np.int64)
    np.minimum.at(first_use, schedule.stage, group_task[action_group])
    np.maximum.at(last_use, schedule.stage, group_task[action_group])
    return PipelineLayout(
        group_task=group_task,
        action_group=action_group,
        sender=sender,
        receiver=receiver,
        send_task=send_task,
        prologue=np.arange(ranks),
        epilogue=np.arange(end + stages, end + stages + ranks),
        gather=ranks + np.argsort(np.argsort(first_use, kind="stable"), kind="stable"),
        reduce=end + np.argsort(np.argsort(last_use, kind="stable"), kind="stable"),
        first_use=first_use,
        last_use=last_use,
    )
