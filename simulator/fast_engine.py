"""The fast engine: the same times as `simulator.engine`, on arrays.

Where nothing shares a link and nothing is slowed by overlap, times are a recurrence; elsewhere events in the order of
time. Small tables run as Python: loading compiled code takes longer than they do. Both give the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

from simulator import fast_fluid, fast_recurrence
from simulator.fast_fluid import Fluid
from simulator.fast_recurrence import Recurrence
from simulator.task_chains import chains
from simulator.task_table import (
    FloatArray,
    IntArray,
    TaskGroups,
    TaskTable,
    check_table,
    deadlock,
    group_tasks,
    tasks_by_stream,
)

Times = tuple[FloatArray, FloatArray]
State = TypeVar("State", Recurrence, Fluid)

# Smaller tables run task by task.
SMALLEST_JOINED = 500
# Smaller tables run as Python always.
SMALLEST_COMPILED = 2_000
# Loading compiled code takes a process about 0.5 s, and 10 s once for an installation. It is loaded when Python would
# have run as many tasks in 0.5 s, so a process never waits for more than twice the best.
WORTH_COMPILING = {
    "run_in_order": 500_000, "time_alone": 300_000, "run_streams": 200_000, "run_events": 60_000,
}  # fmt: skip
_tasks_run: Counter[str] = Counter()


def run(table: TaskTable) -> Times:
    """Seconds (T,) at which the tasks of a table start and end, from the start of the table.

    Raises
    ------
    ProgramError
        When the table is malformed or cannot run to its end: the message names the ranks and the tasks.
    """
    check_table(table)
    return _run_checked(table)


def _run_checked(table: TaskTable) -> Times:
    groups = group_tasks(table)
    alone = not table.links.size and not groups.overlap_slows and (table.meeting < 0).all()
    if alone and _waits_for_earlier_only(table):
        times = _run_in_order(groups)
    else:
        joined = chains(groups) if table.size >= SMALLEST_JOINED else None
        times = _run_joined(groups) if joined is None else joined.apart(_run_joined(group_tasks(joined.table)))
    if np.isnan(times[1]).any():
        raise deadlock(groups, times[1])
    return times


def _run_joined(groups: TaskGroups) -> Times:
    seconds = None if groups.overlap_slows else _seconds_alone(groups)
    if seconds is not None:
        values = _queues(groups) | {"latency_s": groups.latency_s, "seconds": seconds}
        values |= {"free": np.zeros(len(groups.table.stream_rank)), "ready": np.zeros(groups.table.size)}
        compiled = _worth_compiling("run_streams", groups.table.size)
        return _drive(fast_recurrence, "run_streams", Recurrence(**values), compiled=compiled)
    return _run_events(groups, compiled=_worth_compiling("run_events", groups.table.size))


def _waits_for_earlier_only(table: TaskTable) -> bool:
    tasks = np.repeat(np.arange(table.size), np.diff(table.dependency_offsets))
    return bool((table.dependencies < tasks).all())


def _run_in_order(groups: TaskGroups) -> Times:
    table = groups.table
    seconds = np.divide(groups.amount, groups.pace, out=np.zeros(table.size), where=groups.amount > 0)
    free = np.zeros(len(table.stream_rank))
    given = (table.stream, table.dependency_offsets, table.dependencies, table.latency_s, seconds, free)
    starts, ends = np.empty(table.size), np.empty(table.size)
    if _worth_compiling("run_in_order", table.size):
        _compiled(fast_recurrence, "run_in_order")(*given, starts, ends)
        return starts, ends
    listed: list[Any] = [values.tolist() for values in (*given, starts, ends)]
    fast_recurrence.run_in_order(*listed)
    return np.array(listed[-2], dtype=np.float64), np.array(listed[-1], dtype=np.float64)


def _seconds_alone(groups: TaskGroups) -> FloatArray | None:
    """Seconds (T,) that wholes work, at their owner, if no link can ever be asked for more than it carries."""
    table = groups.table
    _, order = tasks_by_stream(table.stream, len(table.stream_rank))
    links = len(table.link_capacity)
    seconds, peak, total = np.zeros(table.size), np.zeros(links), np.zeros(links)
    given: list[Any] = [order, table.stream, groups.owner, groups.next_member, table.link_offsets, table.links]
    given += [groups.use_weights, groups.amount, groups.pace, table.link_capacity]
    given += [np.zeros(links), np.full(links, -1, dtype=np.int64), seconds, peak, total]
    if _worth_compiling("time_alone", table.size):
        _compiled(fast_recurrence, "time_alone")(*given)
    else:
        listed = [values.tolist() for values in given]
        fast_recurrence.time_alone(*listed)
        seconds, peak, total = (np.array(values, dtype=np.float64) for values in listed[-3:])
    ample = peak + total <= table.link_capacity * (1 + 1e-12)
    return seconds if ample.all() else None


def _queues(groups: TaskGroups) -> dict[str, Any]:
    """What the states of both ways to run a table have in common: streams, dependencies, meetings and waiting."""
    table, streams = groups.table, len(groups.table.stream_rank)
    offsets, tasks = tasks_by_stream(table.stream, streams)
    first = np.append(tasks, 0)[offsets[:-1]]
    return {
        "stream": table.stream,
        "stream_offsets": offsets,
        "stream_tasks": tasks,
        "dependency_offsets": table.dependency_offsets,
        "dependencies": table.dependencies,
        "owner": groups.owner,
        "size": groups.size,
        "next_member": groups.next_member,
        "starts": np.full(table.size, np.nan),
        "ends": np.full(table.size, np.nan),
        "head": offsets[:-1].copy(),
        "pointer": table.dependency_offsets[first],
        "first_waiter": np.full(table.size, -1, dtype=np.int64),
        "next_waiter": _integers(streams),
        "stack": _integers(streams),
        "arrived": _integers(table.size),
    }


def _run_events(groups: TaskGroups, *, compiled: bool) -> Times:
    table = groups.table
    links = len(table.link_capacity)
    ranks, stream_rank = np.unique(table.stream_rank, return_inverse=True)
    rank_offsets, rank_streams = tasks_by_stream(stream_rank, len(ranks))
    values = _queues(groups) | {
        "latency_s": groups.latency_s,
        "amount": groups.amount,
        "pace": groups.pace,
        "role": groups.role,
        "stream_rank": stream_rank,
        "rank_offsets": rank_offsets,
        "rank_streams": rank_streams,
        "link_offsets": table.link_offsets,
        "links": table.links,
        "use_weights": groups.use_weights,
        "use_owner": np.repeat(groups.owner, np.diff(table.link_offsets)),
        "slot_offsets": np.concatenate(([0], np.cumsum(np.bincount(table.links, minlength=links)))),
        "capacity": table.link_capacity,
        "speed": np.array([1.0, table.compute_speed, table.transfer_speed]),
        "place": np.full(table.size, -1, dtype=np.int64),
        "beside": _integers(3 * len(ranks)),
        "counts": _integers(fast_fluid.COUNTS),
    }
    values |= {name: np.zeros(table.size) for name in ("key", "left", "since", "rate", "cap")}
    values |= {name: _integers(table.size) for name in ("works", "changed", "is_changed", "flow_found")}
    values |= {name: _integers(len(table.stream_rank)) for name in ("heap", "flows")}
    values |= {name: _integers(len(table.links)) for name in ("on_link", "slot", "loosened")}
    values |= {name: np.zeros(links) for name in ("demand", "slack", "rising")}
    values |= {name: _integers(links) for name in ("loads", "tight", "crossed", "link_found", "risers", "full")}
    return _drive(fast_fluid, "run_events", Fluid(**values), compiled=compiled)


def _integers(size: int) -> IntArray:
    return np.zeros(size, dtype=np.int64)


def _drive(module: ModuleType, name: str, state: State, *, compiled: bool) -> Times:
    """Run a table compiled on arrays, or as Python on lists, which are faster there."""
    if compiled:
        _compiled(module, name)(state)
        done: Any = state
    else:
        done = type(state)(*[np.asarray(values).tolist() for values in state])
        getattr(module, name)(done)
    return np.asarray(done.starts, dtype=np.float64), np.asarray(done.ends, dtype=np.float64)


def _worth_compiling(name: str, tasks: int) -> bool:
    if tasks < SMALLEST_COMPILED:
        return False
    _tasks_run[name] += tasks
    return _tasks_run[name] >= WORTH_COMPILING[name]


@cache
def _compiled(module: ModuleType, name: str) -> Callable[..., Any]:
    """A function of `module` compiled to machine code, kept on disk for later processes."""
    from numba import njit
    from numba.extending import register_jitable

    # The states are tuples of many arrays: without inlining every call copies them, and with numba's runtime (nrt)
    # every use counts references. Nothing is allocated, so neither is needed: 10 times as fast.
    options: dict[str, Any] = {"_nrt": False, "forceinline": True, "error_model": "numpy"}
    entry = getattr(module, name)
    for helper in vars(module).values():
        if isinstance(helper, FunctionType) and helper.__module__ == module.__name__ and helper is not entry:
            register_jitable(**options)(helper)
    compiled: Callable[..., Any] = njit(cache=True, nogil=True, **options)(entry)
    return compiled
