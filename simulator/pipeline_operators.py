"""Pipelines operator by operator: what each pass of a stage runs on the two streams of a rank, as a task table.

The same pass of the same stage runs for every micro-batch, so its operators are described once; the first and the last
micro-batch may run others besides. `simulator.pipeline_passes` gives the same times without writing them out.

Local work on gradients or parameters that a message brought runs behind the message, so that no kernel waits for it. A
pass is max-plus linear: what a message takes from the kernels beside it (`Hardware.lost_to_messages`) is an operator of
its own before the message, so that a rank with kernels to run loses it and one that waits does not. Messages that the
next kernel waits for have none, except in schedules of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from simulator.errors import InputError
from simulator.schedules import ActionKind, Schedule
from simulator.task_table import BoolArray, FloatArray, IntArray, StreamKind, TaskTable, plain_table

Numbers = float | FloatArray

LABELS = ("computation", "communication", "communication beside", "send", "prologue", "epilogue", "shared gradients")
SEND, PROLOGUE, EPILOGUE, MEETING = range(3, len(LABELS))
STREAMS = 3
"""Streams of a rank: kernels, collectives that passes wait for, collectives that run beside (data parallelism)."""
PLAIN, FIRST, LAST = range(3)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operators:
    """Operators (n,) of one pass through a stage, in the order in which its rank issues them.

    Attributes
    ----------
    seconds : (n,)
    communication : (n,) stream it runs on: 0 for kernels, 1 and 2 for collectives
    dependency_offsets, dependencies : (n + 1,), (D,) operator i waits for earlier ones; without any for the input
    ahead : (n,) needs no input, so that it may run before the pass begins; empty for none
    output : operator that yields the output; the last by default
    """

    seconds: FloatArray
    communication: IntArray
    dependency_offsets: IntArray
    dependencies: IntArray
    ahead: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    output: int = -1

    def __post_init__(self) -> None:
        count = len(self.seconds)
        # A time that is no number fails both comparisons.
        if not count or not (self.seconds.min() >= 0 and self.seconds.max() < np.inf):
            raise InputError("A pass needs operators, all with a finite time of at least 0: correct their seconds")
        streams = self.communication
        if len(streams) != count or streams.min() < 0 or streams.max() >= STREAMS:
            raise InputError(f"Of {count} operators each runs on stream 0, 1 or 2, not on {streams}")
        if len(self.ahead) not in (0, count):
            raise InputError(f"{len(self.ahead)} flags say which of {count} operators need no input: give one for each")
        rows = np.repeat(np.arange(count), np.diff(self.dependency_offsets))
        wrong = np.flatnonzero((self.dependencies >= rows) | (self.dependencies < 0))
        if len(wrong):
            raise InputError(
                f"Operator {rows[wrong[0]]} waits for operator {self.dependencies[wrong[0]]}, which is not before it: "
                "list operators in an order in which they can run"
            )

    @property
    def entries(self) -> IntArray:
        """Operators that wait for the input of the pass."""
        free = np.diff(self.dependency_offsets) == 0
        return np.flatnonzero(free & ~self.ahead if len(self.ahead) else free)

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
    """What every pass of every stage runs, and what frames it: one number, or one for each stage or rank.

    ``passes`` holds for each kind of action of the schedule one `Operators` a stage; stages that are alike share one.
    ``first`` and ``last`` stand in for them in the first forward pass of a stage and in the first and the last pass
    that makes gradients of its parameters (the last where both are one). ``meetings`` are messages behind the last
    action: the ranks that take part, and the seconds; a rank takes part in its meetings in their order. With
    ``overlap_sends`` messages between stages travel beside kernels, but for ``send_stall`` of their time, for which
    those of their sender stand still.
    """

    passes: Mapping[ActionKind, Sequence[Operators]]
    first: Mapping[ActionKind, Sequence[Operators]] = field(default_factory=dict)
    last: Mapping[ActionKind, Sequence[Operators]] = field(default_factory=dict)
    meetings: Sequence[tuple[tuple[int, ...], float]] = ()
    send_s: Numbers = 0.0
    prologue_s: Numbers = 0.0
    epilogue_s: Numbers = 0.0
    overlap_sends: bool = True
    send_stall: float = 0.0

    def of_action(self, kind: ActionKind, stage: int, variant: int) -> Operators:
        """What a pass of a stage runs, by whether it is the first or the last there (`action_variants`)."""
        passes = (self.passes, self.first, self.last)[variant]
        return (passes if kind in passes else self.passes)[kind][stage]

    @property
    def stalls(self) -> bool:
        """Whether kernels stand still while messages travel beside them."""
        return self.overlap_sends and self.send_stall > 0


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

    A rank has a stream of kernels and two of collectives; its epilogue waits for all.
    """
    plan = plan_operators(schedule, costs)
    tasks = _number_tasks(schedule, plan, costs)
    ranks, size = schedule.ranks, tasks.size
    work, count = np.zeros(size), np.zeros(size, dtype=np.int64)
    stream, label = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    meeting = np.full(size, -1, dtype=np.int64)
    prologue, epilogue = np.arange(ranks), np.arange(size - ranks, size)
    work[prologue], work[epilogue] = per_rank(schedule, costs.prologue_s), per_rank(schedule, costs.epilogue_s)
    label[prologue], label[epilogue], stream[prologue], stream[epilogue] = PROLOGUE, EPILOGUE, prologue, prologue
    work[tasks.send], label[tasks.send], count[tasks.send] = plan.send_s, SEND, 1
    stream[tasks.send] = STREAMS * ranks + plan.link if costs.overlap_sends else schedule.action_rank[plan.sender]
    if costs.stalls:
        work[tasks.send + 1], label[tasks.send + 1], count[tasks.send + 1] = costs.send_stall * plan.send_s, SEND, 1
        stream[tasks.send + 1] = schedule.action_rank[plan.sender]
    members = [np.flatnonzero(plan.which == number) for number in range(len(plan.groups))]
    for group, chosen in zip(plan.groups, members, strict=True):
        own = tasks.begin[chosen][:, None] + np.arange(len(group.operators.seconds))
        work[own], label[own] = group.operators.seconds, group.operators.communication
        stream[own] = schedule.action_rank[plan.first[chosen]][:, None] + ranks * group.operators.communication
        count[own] = np.diff(group.operators.dependency_offsets)
        for entry, action in zip(group.entries, (plan.first, plan.second), strict=False):
            count[own[:, entry]] = (tasks.awaited[action[chosen]] >= 0)[:, None]
    for number, (rows, (taking, seconds)) in enumerate(zip(tasks.meetings, costs.meetings, strict=True)):
        work[rows], label[rows], meeting[rows] = seconds, MEETING, number
        stream[rows], count[rows] = np.array(taking) + ranks * (STREAMS - 1), 2
    talks = tasks.last_message >= 0
    count[epilogue] = talks.sum(axis=0)
    offsets = np.concatenate(([0], np.cumsum(count)))
    dependencies = np.empty(offsets[-1], dtype=np.int64)
    for place in range(1 + costs.stalls):
        dependencies[offsets[tasks.send + place]] = tasks.output[plan.sender]
    for rank in range(ranks):
        last = tasks.last_message[:, rank]
        dependencies[offsets[epilogue[rank]] :][: talks[:, rank].sum()] = last[talks[:, rank]]
    for rows, (taking, _) in zip(tasks.meetings, costs.meetings, strict=True):
        for place in range(2):
            dependencies[offsets[rows] + place] = tasks.last_action[place, list(taking)]
    for group, chosen in zip(plan.groups, members, strict=True):
        _write_dependencies(dependencies, offsets, plan, tasks, group, chosen)
    table = plain_table(
        stream=stream,
        stream_rank=np.concatenate([np.tile(prologue, STREAMS), plan.link_rank]),
        stream_kind=np.repeat(
            [StreamKind.COMPUTE, StreamKind.COMMUNICATION], [ranks, (STREAMS - 1) * ranks + len(plan.link_rank)]
        ),
        dependency_offsets=offsets,
        dependencies=dependencies,
        work=work,
        label=label,
        labels=LABELS,
        name=f"the operators of schedule {schedule.name}",
    )
    return replace(table, meeting=meeting) if costs.meetings else table


def pass_table(one: Operators) -> TaskTable:
    """A pass alone on its rank, as tasks that begin when its input is there."""
    return plain_table(
        stream=one.communication,
        stream_rank=np.zeros(STREAMS, dtype=np.int64),
        stream_kind=np.array([StreamKind.COMPUTE] + [StreamKind.COMMUNICATION] * (STREAMS - 1)),
        dependency_offsets=one.dependency_offsets,
        dependencies=one.dependencies,
        work=one.seconds,
        label=one.communication,
        labels=LABELS,
        name="a pass",
    )


def task_actions(schedule: Schedule, costs: OperatorCosts) -> IntArray:
    """(T,) action that each task of `operator_table` belongs to, the first one of a pair; -1 for none."""
    plan = plan_operators(schedule, costs)
    tasks = _number_tasks(schedule, plan, costs)
    sizes = np.array([len(group.operators.seconds) for group in plan.groups])[plan.which]
    found = np.full(tasks.size, -1, dtype=np.int64)
    ends = np.cumsum(sizes)
    found[np.repeat(tasks.begin - (ends - sizes), sizes) + np.arange(ends[-1])] = np.repeat(plan.first, sizes)
    for place in range(1 + costs.stalls):
        found[tasks.send + place] = plan.sender
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tasks:
    """Numbers of tasks: prologues, groups with their sends in an order in which they can run, meetings, epilogues.

    Attributes
    ----------
    begin : (G,) first operator of a group
    send : (X,), each followed by what stands still for it, if anything does
    output, awaited : (A,) operator that yields an action's output; task that brings its input, -1 for none
    meetings : tasks of each meeting, one a rank that takes part
    last_message : (STREAMS - 1, ranks) last task on each stream of collectives, -1 for none
    last_action : (2, ranks) last kernel, and last collective of the passes, or again the kernel where there is none
    """

    size: int
    begin: IntArray
    send: IntArray
    output: IntArray
    awaited: IntArray
    meetings: list[IntArray]
    last_message: IntArray
    last_action: IntArray


def _number_tasks(schedule: Schedule, plan: OperatorPlan, costs: OperatorCosts) -> _Tasks:
    paired = np.flatnonzero(plan.second >= 0)
    group_of = np.zeros(schedule.size, dtype=np.int64)
    group_of[plan.first] = np.arange(len(plan.first))
    group_of[plan.second[paired]] = paired
    sending = group_of[plan.sender]
    sizes = np.array([len(group.operators.seconds) for group in plan.groups])[plan.which]
    each = 1 + costs.stalls
    taken = sizes + each * np.bincount(sending, minlength=len(sizes))
    begin = schedule.ranks + np.cumsum(taken) - taken
    # Both actions of a pair may send: senders come in the order of actions, the two of a pair next to each other.
    behind = np.concatenate(([False], sending[1:] == sending[:-1]))[: len(sending)]
    send = begin[sending] + sizes[sending] + each * behind
    output = np.zeros(schedule.size, dtype=np.int64)
    output[plan.first] = begin + np.array([group.outputs[0] for group in plan.groups])[plan.which]
    output[plan.second[paired]] = begin[paired] + np.array([g.outputs[-1] for g in plan.groups])[plan.which[paired]]
    ready = output.copy()
    ready[plan.sender] = send
    local = schedule.action_rank[schedule.source] == schedule.action_rank
    awaited = np.where(local, output[schedule.source], ready[schedule.source])
    last = np.full((STREAMS, schedule.ranks), -1, dtype=np.int64)
    last[0] = np.arange(schedule.ranks)
    rank = schedule.action_rank[plan.first]
    for stream in range(STREAMS):
        found = [np.flatnonzero(group.operators.communication == stream) for group in plan.groups]
        place = np.array([used[-1] if len(used) else -1 for used in found])[plan.which]
        talks = np.flatnonzero(place >= 0)
        np.maximum.at(last[stream], rank[talks], begin[talks] + place[talks])
    if costs.stalls or not costs.overlap_sends:
        np.maximum.at(last[0], schedule.action_rank[plan.sender], send + costs.stalls)
    last_action = np.stack([last[0], np.where(last[1] >= 0, last[1], last[0])])
    end = int(begin[-1] + taken[-1])
    meetings = []
    for taking, _ in costs.meetings:
        meetings.append(np.arange(end, end + len(taking)))
        last[STREAMS - 1, list(taking)] = meetings[-1]
        end += len(taking)
    return _Tasks(
        size=end + schedule.ranks,
        begin=begin,
        send=send,
        output=output,
        awaited=np.where(schedule.source >= 0, awaited, -1),
        meetings=meetings,
        last_message=last[1:],
        last_action=last_action,
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
    distinct: dict[int, tuple[int, Operators]] = {}
    of_action = np.zeros((LAST + 1, len(ActionKind), schedule.stages), dtype=np.int64)
    for kind in sorted(set(schedule.kind.tolist())):
        for variant, passes in enumerate((costs.passes, costs.first, costs.last)):
            given = passes.get(ActionKind(kind), ())
            if not given and variant != PLAIN:
                of_action[variant, kind] = of_action[PLAIN, kind]
                continue
            if len(given) != schedule.stages:
                raise InputError(
                    f"{schedule.name} has {schedule.stages} stages, but there are {len(given)} lists of operators of "
                    f"kind {ActionKind(kind).name.lower()}: give one for each stage"
                )
            for stage, operators in enumerate(given):
                of_action[variant, kind, stage] = distinct.setdefault(id(operators), (len(distinct), operators))[0]
    listed = [operators for _, operators in distinct.values()]
    passes_of = np.append(of_action[action_variants(schedule), schedule.kind, schedule.stage], -1)
    pairs, which = np.unique((len(listed) + 1) * passes_of[first] + passes_of[second] + 1, return_inverse=True)
    groups = [_grouped(listed, *divmod(int(pair), len(listed) + 1)) for pair in pairs]
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


def action_variants(schedule: Schedule) -> IntArray:
    """(A,) whether an action is the first or the last of its kind on its stage: forward, or making gradients."""
    variant = np.full(schedule.size, PLAIN, dtype=np.int64)
    forward = np.flatnonzero(schedule.kind == ActionKind.FORWARD)
    variant[forward[np.unique(schedule.stage[forward], return_index=True)[1]]] = FIRST
    trains = (schedule.kind == ActionKind.BACKWARD) | (schedule.kind == ActionKind.WEIGHT_GRADIENT)
    gradient = np.flatnonzero(trains)
    variant[gradient[np.unique(schedule.stage[gradient], return_index=True)[1]]] = FIRST
    backwards = gradient[::-1]
    variant[backwards[np.unique(schedule.stage[backwards], return_index=True)[1]]] = LAST
    return variant


def in_one_stream(schedule: Schedule, costs: OperatorCosts) -> OperatorCosts:
    """The same on hardware that does not compute while it communicates.

    What travels beside passes once a step (parameters ahead of the first of a stage, gradients behind the last) then
    comes before and after all passes of its rank, so that no other rank waits for it; what travels beside every pass
    comes in its turn.
    """
    made: dict[tuple[int, bool], Operators] = {}
    before, after = per_rank(schedule, costs.prologue_s).copy(), per_rank(schedule, costs.epilogue_s).copy()

    def beside_s(one: Operators) -> float:
        return float(one.seconds[one.communication == STREAMS - 1].sum())

    def always(kind: ActionKind, stage: int) -> bool:
        # The sum of a loss comes in every forward pass, whatever is gathered before the first.
        if kind is ActionKind.FORWARD:
            plain, first = (given[kind][stage] for given in (costs.passes, costs.first or costs.passes))
            return beside_s(plain) == beside_s(first)
        return any(beside_s(row[stage]) > 0 for one, row in costs.passes.items() if one is not ActionKind.FORWARD)

    def alone(one: Operators, once: bool) -> Operators:
        if (id(one), once) not in made:
            beside = once & (one.communication == STREAMS - 1)
            seconds = np.where(beside, 0.0, one.seconds)
            made[id(one), once] = replace(one, seconds=seconds, communication=np.zeros_like(one.communication))
        return made[id(one), once]

    def passes(given: Mapping[ActionKind, Sequence[Operators]]) -> dict[ActionKind, list[Operators]]:
        return {
            kind: [alone(one, not always(kind, stage)) for stage, one in enumerate(row)] for kind, row in given.items()
        }

    for moments, variants, kinds in (
        (before, costs.first, (ActionKind.FORWARD,)),
        (after, costs.last, (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT)),
    ):
        for kind, stage, one in ((k, stage, one) for k in kinds for stage, one in enumerate(variants.get(k, ()))):
            if not always(kind, stage):
                moments[schedule.stage_rank[stage]] += one.seconds[one.communication == STREAMS - 1].sum()
    return replace(
        costs,
        passes={kind: [alone(one, once=False) for one in row] for kind, row in costs.passes.items()},
        first=passes(costs.first),
        last=passes(costs.last),
        prologue_s=before,
        epilogue_s=after,
        overlap_sends=False,
    )


def _grouped(distinct: list[Operators], first: int, second: int) -> OperatorGroup:
    if not second:
        alone = distinct[first]
        return OperatorGroup(operators=alone, entries=(alone.entries,), outputs=(alone.output % len(alone.seconds),))
    members = [distinct[first], distinct[second - 1]]
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
    entries = tuple(np.sort(place[shift + one.entries]) for shift, one in zip(shifts, members, strict=False))
    outputs = tuple(
        int(place[shift + one.output % len(one.seconds)]) for shift, one in zip(shifts, members, strict=False)
    )
    return OperatorGroup(operators=merged, entries=entries, outputs=outputs)


def exchanges(schedule: Schedule) -> tuple[IntArray, IntArray]:
    """(X,) actions whose output goes to another rank, in order, and the actions that take it."""
    receiver = np.flatnonzero(schedule.previous >= 0)
    sender = schedule.previous[receiver]
    crosses = schedule.action_rank[sender] != schedule.action_rank[receiver]
    sender, receiver = sender[crosses], receiver[crosses]
    order = np.argsort(sender, kind="stable")
    return sender[order], receiver[order]


def send_links(schedule: Schedule, sender: IntArray) -> tuple[IntArray, IntArray]:
    """Links from a stage to a neighbour: (X,) link of each send, (links,) rank that sends on it."""
    away = schedule.kind[sender] != ActionKind.FORWARD
    _, first, link = np.unique(2 * schedule.stage[sender] + away, return_index=True, return_inverse=True)
    return link, schedule.action_rank[sender[first]].astype(np.int64)


def send_times(schedule: Schedule, sender: IntArray, send_s: Numbers) -> FloatArray:
    """(X,) seconds of each send: a gradient takes as long as the activation that came the other way."""
    forward = schedule.kind[sender] == ActionKind.FORWARD
    seconds: FloatArray = spread(send_s, schedule.stages, "stages")[schedule.stage[sender] - ~forward]
    return seconds


def per_rank(schedule: Schedule, values: Numbers) -> FloatArray:
    """(ranks,) values, broadcast from one."""
    return spread(values, schedule.ranks, "ranks")


def spread(values: Numbers, size: int, what: str) -> FloatArray:
    """(size,) values, one for each of ``what``, broadcast from one."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape not in ((), (1,), (size,)):
        raise InputError(f"Costs of shape {array.shape} do not fit {size} {what}: give one number, or one for each")
    return np.broadcast_to(array, (size,))
