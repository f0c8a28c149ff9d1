"""Pipelines operator by operator: what each pass of a stage runs on the two streams of a rank, as a task table.

The same pass of the same stage runs for every micro-batch, so its operators are described once.
`simulator.pipeline_passes` gives the same times without writing them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simulator.errors import InputError
from simulator.pipeline import Numbers, exchanges, per_rank, plain_table, send_links, send_times
from simulator.schedules import ActionKind, Schedule
from simulator.task_table import FloatArray, IntArray, StreamKind, TaskTable

LABELS = ("computation", "communication", "send", "prologue", "epilogue")
SEND, PROLOGUE, EPILOGUE = range(2, len(LABELS))


@dataclass(frozen=True, kw_only=True, eq=False)
class Operators:
    """Operators (n,) of one pass through a stage, in the order in which its rank issues them.

    Attributes
    ----------
    seconds : (n,)
    communication : (n,) runs on the stream of collectives, not on that of kernels
    dependency_offsets, dependencies : (n + 1,), (D,) operator i waits for earlier ones; without any for the input

    The last operator yields the output.
    """

    seconds: FloatArray
    communication: IntArray
    dependency_offsets: IntArray
    dependencies: IntArray

    def __post_init__(self) -> None:
        count = len(self.seconds)
        if not count or not (np.isfinite(self.seconds) & (self.seconds >= 0)).all():
            raise InputError("A pass needs operators, all with a finite time of at least 0: correct their seconds")
        if len(self.communication) != count or not np.isin(self.communication, (0, 1)).all():
            raise InputError(f"Of {count} operators each is communication (1) or not (0), not {self.communication}")
        rows = np.repeat(np.arange(count), np.diff(self.dependency_offsets))
        wrong = np.flatnonzero((self.dependencies >= rows) | (self.dependencies < 0))
        if len(wrong):
            raise InputError(
                f"Operator {rows[wrong[0]]} waits for operator {self.dependencies[wrong[0]]}, which is not before it: "
                "list operators in an order in which they can run"
            )

    @staticmethod
    def chain(seconds: FloatArray, communication: IntArray) -> Operators:
        """Operators that wait for one another in their order."""
        count = len(seconds)
        offsets = np.maximum(np.arange(count + 1) - 1, 0)
        return Operators(
            seconds=seconds,
            communication=communication,
            dependency_offsets=offsets,
            dependencies=np.arange(count - 1),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorCosts:
    """What every pass of every stage runs, and what frames it, as in `PipelineCosts`.

    ``passes`` holds for each kind of action of the schedule one `Operators` a stage; stages that are alike share one.
    """

    passes: Mapping[ActionKind, Sequence[Operators]]
    send_s: Numbers = 0.0
    prologue_s: Numbers = 0.0
    epilogue_s: Numbers = 0.0
    overlap_sends: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorGroup:
    """What runs together: the operators of an action, or of two, alternating in proportion to their work.

    ``entries[i]`` and ``outputs[i]``: operators that wait for the input of action i, and the one that yields its
    output.
    """

    operators: Operators
    entries: tuple[IntArray, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorPlan:
    """A schedule with its groups in an order in which they can run.

    Attributes
    ----------
    groups : distinct ones
    which : (G,) place in ``groups``
    first, second : (G,) actions of each group in that order, -1 for no second
    sender, link, link_rank, send_s : (X,), (X,), (links,), (X,) actions that send
    """

    groups: list[OperatorGroup]
    which: IntArray
    first: IntArray
    second: IntArray
    sender: IntArray
    link: IntArray
    link_rank: IntArray
    send_s: FloatArray


def operator_table(schedule: Schedule, costs: OperatorCosts) -> TaskTable:
    """One step with every operator of every pass as a task, numbered so that none waits for a later one.

    A rank has a stream of kernels and one of collectives; its epilogue waits for both.
    """
    plan = plan_operators(schedule, costs)
    tasks = _number_tasks(schedule, plan)
    ranks, size = schedule.ranks, tasks.size
    work, count = np.zeros(size), np.zeros(size, dtype=np.int64)
    stream, label = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    prologue, epilogue = np.arange(ranks), np.arange(size - ranks, size)
    work[prologue], work[epilogue] = per_rank(schedule, costs.prologue_s), per_rank(schedule, costs.epilogue_s)
    label[prologue], label[epilogue], stream[prologue], stream[epilogue] = PROLOGUE, EPILOGUE, prologue, prologue
    work[tasks.send], label[tasks.send], count[tasks.send] = plan.send_s, SEND, 1
    stream[tasks.send] = 2 * ranks + plan.link if costs.overlap_sends else schedule.action_rank[plan.sender]
    members = [np.flatnonzero(plan.which == number) for number in range(len(plan.groups))]
    for group, chosen in zip(plan.groups, members, strict=True):
        own = tasks.begin[chosen][:, None] + np.arange(len(group.operators.seconds))
        work[own], label[own] = group.operators.seconds, group.operators.communication
        stream[own] = schedule.action_rank[plan.first[chosen]][:, None] + ranks * group.operators.communication
        count[own] = np.diff(group.operators.dependency_offsets)
        for entry, action in zip(group.entries, (plan.first, plan.second), strict=False):
            count[own[:, entry]] = (tasks.awaited[action[chosen]] >= 0)[:, None]
    count[epilogue] = tasks.last_message >= 0
    offsets = np.concatenate(([0], np.cumsum(count)))
    dependencies = np.empty(offsets[-1], dtype=np.int64)
    dependencies[offsets[tasks.send]] = tasks.output[plan.sender]
    dependencies[offsets[epilogue[tasks.last_message >= 0]]] = tasks.last_message[tasks.last_message >= 0]
    for group, chosen in zip(plan.groups, members, strict=True):
        _write_dependencies(dependencies, offsets, plan, tasks, group, chosen)
    return plain_table(
        stream=stream,
        stream_rank=np.concatenate([prologue, prologue, plan.link_rank]),
        stream_kind=np.repeat([StreamKind.COMPUTE, StreamKind.COMMUNICATION], [ranks, ranks + len(plan.link_rank)]),
        dependency_offsets=offsets,
        dependencies=dependencies,
        work=work,
        label=label,
        labels=LABELS,
        name=f"the operators of schedule {schedule.name}",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tasks:
    """Numbers of tasks: prologues, groups with their sends in an order in which they can run, epilogues.

    Attributes
    ----------
    begin : (G,) first operator of a group
    send : (X,)
    output, awaited : (A,) operator that yields an action's output; task that brings its input, -1 for none
    last_message : (ranks,) last operator on the stream of collectives, -1 for none
    """

    size: int
    begin: IntArray
    send: IntArray
    output: IntArray
    awaited: IntArray
    last_message: IntArray


def _number_tasks(schedule: Schedule, plan: OperatorPlan) -> _Tasks:
    paired = np.flatnonzero(plan.second >= 0)
    group_of = np.zeros(schedule.size, dtype=np.int64)
    group_of[plan.first] = np.arange(len(plan.first))
    group_of[plan.second[paired]] = paired
    sending = group_of[plan.sender]
    sizes = np.array([len(group.operators.seconds) for group in plan.groups])[plan.which]
    taken = sizes + np.bincount(sending, minlength=len(sizes))
    begin = schedule.ranks + np.cumsum(taken) - taken
    # Both actions of a pair may send: senders come in the order of actions, the two of a pair next to each other.
    send = begin[sending] + sizes[sending] + np.concatenate(([False], sending[1:] == sending[:-1]))[: len(sending)]
    output = np.zeros(schedule.size, dtype=np.int64)
    output[plan.first] = begin + np.array([group.outputs[0] for group in plan.groups])[plan.which]
    output[plan.second[paired]] = begin[paired] + np.array([g.outputs[-1] for g in plan.groups])[plan.which[paired]]
    ready = output.copy()
    ready[plan.sender] = send
    local = schedule.action_rank[schedule.source] == schedule.action_rank
    awaited = np.where(local, output[schedule.source], ready[schedule.source])
    messages = [np.flatnonzero(group.operators.communication) for group in plan.groups]
    last = np.array([found[-1] if len(found) else -1 for found in messages])[plan.which]
    last_message = np.full(schedule.ranks, -1, dtype=np.int64)
    talks = np.flatnonzero(last >= 0)
    np.maximum.at(last_message, schedule.action_rank[plan.first[talks]], begin[talks] + last[talks])
    return _Tasks(
        size=int(begin[-1] + taken[-1]) + schedule.ranks,
        begin=begin,
        send=send,
        output=output,
        awaited=np.where(schedule.source >= 0, awaited, -1),
        last_message=last_message,
    )


def _write_dependencies(
    dependencies: IntArray,
    offsets: IntArray,
    plan: OperatorPlan,
    tasks: _Tasks,
    group: OperatorGroup,
    chosen: IntArray,
) -> None:
    """Fill in those of all copies of a group; an operator without any of its own waits for the input."""
    begin, given = tasks.begin[chosen], group.operators
    row = np.repeat(np.arange(len(given.seconds)), np.diff(given.dependency_offsets))
    place = np.arange(len(row)) - given.dependency_offsets[row]
    dependencies[offsets[begin[:, None] + row] + place] = begin[:, None] + given.dependencies
    for entry, action in zip(group.entries, (plan.first, plan.second), strict=False):
        awaited = tasks.awaited[action[chosen]]
        waits = awaited >= 0
        dependencies[offsets[begin[waits][:, None] + entry]] = awaited[waits][:, None]


def plan_operators(schedule: Schedule, costs: OperatorCosts) -> OperatorPlan:
    """Which operators each group of the schedule runs, and what it sends."""
    order = schedule.execution_order
    first = schedule.leaders[order]
    second = np.where(schedule.paired[first], first + 1, -1)
    ids: dict[int, int] = {}
    distinct: list[Operators] = []
    of_action = np.zeros((len(ActionKind), schedule.stages), dtype=np.int64)
    for kind in sorted(set(schedule.kind.tolist())):
        given = costs.passes.get(ActionKind(kind), ())
        if len(given) != schedule.stages:
            raise InputError(
                f"{schedule.name} has {schedule.stages} stages, but there are {len(given)} lists of operators of kind "
                f"{ActionKind(kind).name.lower()}: give one for each stage"
            )
        for stage, operators in enumerate(given):
            if id(operators) not in ids:
                ids[id(operators)] = len(distinct)
                distinct.append(operators)
            of_action[kind, stage] = ids[id(operators)]
    passes = np.append(of_action[schedule.kind, schedule.stage], -1)
    pairs, which = np.unique((len(distinct) + 1) * passes[first] + passes[second] + 1, return_inverse=True)
    groups = [_grouped(distinct, *divmod(int(pair), len(distinct) + 1)) for pair in pairs]
    sender = exchanges(schedule)[0] if np.any(costs.send_s) else np.zeros(0, dtype=np.int64)
    link, link_rank = send_links(schedule, sender)
    return OperatorPlan(
        groups=groups,
        which=which,
        first=first,
        second=second,
        sender=sender,
        link=link,
        link_rank=link_rank,
        send_s=send_times(schedule, sender, costs.send_s),
    )


def _grouped(distinct: list[Operators], first: int, second: int) -> OperatorGroup:
    members = [distinct[first]] + ([distinct[second - 1]] if second else [])
    progress = [(np.cumsum(one.seconds) - one.seconds / 2) / max(one.seconds.sum(), 1e-300) for one in members]
    order = np.argsort(np.concatenate(progress), kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    shifts = np.cumsum([0, *(len(one.seconds) for one in members)])
    rows = np.concatenate([
        place[shift + np.repeat(np.arange(len(one.seconds)), np.diff(one.dependency_offsets))]
        for shift, one in zip(shifts, members, strict=False)
    ])  # fmt: skip
    values = np.concatenate([place[shift + one.dependencies] for shift, one in zip(shifts, members, strict=False)])
    sorted_rows = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=len(order))
    merged = Operators(
        seconds=np.concatenate([one.seconds for one in members])[order],
        communication=np.concatenate([one.communication for one in members])[order].astype(np.int64),
        dependency_offsets=np.concatenate(([0], np.cumsum(counts))),
        dependencies=values[sorted_rows],
    )
    entries = tuple(
        np.sort(place[shift + np.flatnonzero(np.diff(one.dependency_offsets) == 0)])
        for shift, one in zip(shifts, members, strict=False)
    )
    outputs = tuple(int(place[shift + len(one.seconds) - 1]) for shift, one in zip(shifts, members, strict=False))
    return OperatorGroup(operators=merged, entries=entries, outputs=outputs)
