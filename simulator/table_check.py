"""What is wrong with a task table, and why a run of it stopped: errors that name ranks and tasks."""

from __future__ import annotations

import numpy as np

from simulator.errors import ProgramError
from simulator.task_groups import TaskGroups, tasks_by_stream
from simulator.task_table import BoolArray, FloatArray, IntArray, StreamKind, TaskTable

_TASKS_SHOWN = 6
_PER_TASK = ("stream", "work", "latency_s", "rate_bytes_per_s", "meeting")


def check_table(table: TaskTable) -> None:
    """Raise ProgramError where a table holds what no run can mean.

    Stream, task and link numbers that are not there; times, bytes and rates that are negative or no numbers;
    links of tasks that transfer nothing; meetings of another size than ``meeting_size`` says.
    """
    _check_shapes(table)
    _check_numbers(table)
    _check_references(table)
    _check_meetings(table)


def task_name(table: TaskTable, task: int) -> str:
    """What messages call a task: its number, its label and its rank."""
    label = f" {table.labels[table.label[task]]!r}" if len(table.label) and len(table.labels) else ""
    stream = int(table.stream[task])
    rank = "" if table.stream_names or not 0 <= stream < len(table.stream_rank) else _rank_of(table, stream)
    return f"task {task}{label}{rank}"


def _rank_of(table: TaskTable, stream: int) -> str:
    return f" of rank {table.stream_rank[stream]}"


def _stream_name(table: TaskTable, stream: int) -> str:
    if table.stream_names:
        return f"stream {table.stream_names[stream]!r}"
    return f"{StreamKind(int(table.stream_kind[stream])).name.lower()} stream {stream}"


def _check_shapes(table: TaskTable) -> None:
    size = table.size
    sizes = dict.fromkeys(_PER_TASK, size)
    sizes |= {"dependency_offsets": size + 1, "link_offsets": size + 1, "link_weights": len(table.links)}
    sizes |= {"stream_kind": len(table.stream_rank)}
    if len(table.label):
        sizes["label"] = size
    for name, expected in sizes.items():
        found = getattr(table, name).shape
        if found != (expected,):
            raise ProgramError(f"{table.name} has {name} of shape {found}; {size} tasks need ({expected},)")
    for name, values in (("dependency", table.dependencies), ("link", table.links)):
        offsets = getattr(table, f"{name}_offsets")
        if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
            raise ProgramError(
                f"{table.name} has {name}_offsets that do not rise from 0 to {len(values)}; count the rows anew"
            )


def _check_numbers(table: TaskTable) -> None:
    for name, unit in (("work", " of work"), ("latency_s", " s of latency"), ("rate_bytes_per_s", " bytes/s")):
        values: FloatArray = getattr(table, name)
        # A value that is no number fails both comparisons.
        if values.size and not (values.min() >= 0 and values.max() < np.inf):
            task = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
            raise ProgramError(
                f"{task_name(table, task)} of {table.name} has {values[task]}{unit}; it must be finite and not "
                "negative: check the sizes and rates that it was made from"
            )
    for name in ("compute_speed", "transfer_speed"):
        speed = getattr(table, name)
        if not 0 < speed <= 1:
            raise ProgramError(f"{table.name} has {name} {speed}; a factor of an overlap is above 0 and at most 1")
    wrong = np.flatnonzero(~(table.link_capacity > 0))
    if wrong.size:
        raise ProgramError(
            f"link {wrong[0]} of {table.name} has a capacity of {table.link_capacity[wrong[0]]} bytes/s; "
            "what crosses it would never end: give it a capacity above 0"
        )


def _check_references(table: TaskTable) -> None:
    streams, size = len(table.stream_rank), table.size
    _check_range(table, table.stream, streams, None, "runs on stream", "streams")
    _check_range(table, table.dependencies, size, table.dependency_offsets, "waits for task", "tasks")
    _check_range(table, table.links, len(table.link_capacity), table.link_offsets, "crosses link", "links")
    if len(table.label):
        _check_range(table, table.label, len(table.labels), None, "has label", "labels")
    kinds = np.flatnonzero(~np.isin(table.stream_kind, list(StreamKind)))
    if kinds.size:
        raise ProgramError(
            f"stream {kinds[0]} of {table.name} is of kind {table.stream_kind[kinds[0]]}; "
            f"kinds are {', '.join(f'{kind.value} ({kind.name})' for kind in StreamKind)}"
        )
    if table.links.size:
        idle = np.flatnonzero((np.diff(table.link_offsets) > 0) & (table.rate_bytes_per_s <= 0))
        if idle.size:
            raise ProgramError(
                f"{task_name(table, int(idle[0]))} of {table.name} crosses links and has no rate; "
                "give a transfer the rate that it reaches alone"
            )
        bad = ~((table.link_weights >= 0) & (table.link_weights < np.inf))
        if bad.any():
            use = int(np.flatnonzero(bad)[0])
            task = int(np.searchsorted(table.link_offsets, use, side="right")) - 1
            raise ProgramError(
                f"{task_name(table, task)} of {table.name} loads link {table.links[use]} with "
                f"{table.link_weights[use]} bytes per byte; it must be finite and not negative"
            )


def _check_range(
    table: TaskTable, values: IntArray, count: int, offsets: IntArray | None, verb: str, what: str
) -> None:
    """Numbers of what tasks refer to, one for each task or in rows of `offsets`, are below `count`."""
    if not values.size or (values.min() >= 0 and values.max() < count):
        return
    place = int(np.flatnonzero((values < 0) | (values >= count))[0])
    task = place if offsets is None else int(np.searchsorted(offsets, place, side="right")) - 1
    known = f"{what} 0 to {count - 1}" if count else f"no {what}"
    name = f"task {task}" if verb == "has label" else task_name(table, task)
    raise ProgramError(f"{name} of {table.name} {verb} {values[place]}; there are {known}: correct the number")


def _check_meetings(table: TaskTable) -> None:
    if not table.size:
        return
    low, high = int(table.meeting.min()), int(table.meeting.max())
    limit = max(4 * table.size, 1000) if not len(table.meeting_size) else len(table.meeting_size)
    if low < -1 or high >= limit:
        task = int(np.flatnonzero((table.meeting < -1) | (table.meeting >= limit))[0])
        raise ProgramError(
            f"{task_name(table, task)} of {table.name} is in meeting {table.meeting[task]}; "
            f"meetings have numbers from 0 to {limit - 1}, -1 is none: number them from 0"
        )
    if not len(table.meeting_size):
        return
    found = np.bincount(table.meeting[table.meeting >= 0], minlength=len(table.meeting_size))
    wrong = np.flatnonzero((found != table.meeting_size) & (table.meeting_size > 0))
    if wrong.size:
        tasks = np.flatnonzero(table.meeting == wrong[0])
        shown = ", ".join(task_name(table, int(task)) for task in tasks[:_TASKS_SHOWN]) or "no task"
        meeting = int(wrong[0])
        raise ProgramError(
            f"meeting {meeting} of {table.name} has {found[meeting]} of {table.meeting_size[meeting]} tasks: {shown}. "
            "A send needs its receive, a collective every rank of its group: add the tasks that are missing"
        )


def deadlock(groups: TaskGroups, ends: FloatArray) -> ProgramError:
    """The error that names a cycle of tasks waiting for each other, given the ends of the tasks that did end."""
    table = groups.table
    stuck, previous = np.isnan(ends), _previous(table)
    task = int(np.flatnonzero(stuck)[0])
    path: dict[int, int] = {}
    reasons: list[str] = []
    while task not in path:
        path[task] = len(reasons)
        member, before, depends = _obstacle(groups, stuck, previous, task)
        if member != task:
            reasons.append(f"{task_name(table, task)} meets {task_name(table, member)}")
        link = "waits for" if depends else f"comes behind ({_stream_name(table, int(table.stream[member]))})"
        reasons.append(f"{task_name(table, member)} {link} {task_name(table, before)}")
        task = before
    cycle = reasons[path[task] :]
    shown = "; ".join(cycle[:_TASKS_SHOWN]) + (f"; … {len(cycle)} tasks in all" if len(cycle) > _TASKS_SHOWN else "")
    return ProgramError(
        f"{table.name} never ends: {shown}. A task may wait only for tasks that can end before it: "
        "drop one of these dependencies or move a task to another stream"
    )


def _previous(table: TaskTable) -> IntArray:
    """(T,) the task before each on its stream, -1 for the first."""
    offsets, tasks = tasks_by_stream(table.stream, len(table.stream_rank))
    previous = np.full(table.size, -1, dtype=np.int64)
    previous[tasks[1:]] = tasks[:-1]
    previous[tasks[offsets[:-1][np.diff(offsets) > 0]]] = -1
    return previous


def _obstacle(groups: TaskGroups, stuck: BoolArray, previous: IntArray, task: int) -> tuple[int, int, bool]:
    """What keeps `task` from starting: a member of its meeting, what that waits for, whether it depends on it."""
    table = groups.table
    members = [task]
    following = int(groups.owner[task])
    while following >= 0:
        members.append(following)
        following = int(groups.next_member[following])
    for member in members:
        row = table.dependencies[table.dependency_offsets[member] : table.dependency_offsets[member + 1]]
        unmet = row[stuck[row]]
        if unmet.size:
            return member, int(unmet[0]), True
        if previous[member] >= 0 and stuck[previous[member]]:
            return member, int(previous[member]), False
    raise AssertionError(f"{task_name(table, task)} could start and did not")
