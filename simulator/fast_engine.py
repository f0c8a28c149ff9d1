"""The fast engine: the same times as `simulator.engine`, on arrays.

Where nothing is shared and tasks wait for earlier ones only, times are a recurrence; elsewhere events in the order of
time. Small tables run as Python: loading compiled code takes longer than they do. Both give the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from simulator import fast_fluid
from simulator.fast_fluid import Fluid, Reals
from simulator.task_table import FloatArray, TaskGroups, TaskTable, check_table, deadlock, group_tasks, tasks_by_stream

Times = tuple[FloatArray, FloatArray]

# Smaller tables run as Python always.
SMALLEST_COMPILED = 2_000
# Loading compiled code takes a process about 0.5 s, and 10 s once for an installation. It is loaded when Python would
# have run as many tasks in 0.5 s, so a process never waits for more than twice the best.
WORTH_COMPILING = {"run_in_order": 500_000, "run_events": 60_000}
_tasks_run: Counter[str] = Counter()


def run(table: TaskTable) -> Times:
    """Seconds (T,) at which the tasks of a table start and end, from the start of the table.

    Raises
    ------
    ProgramError
        When the table is malformed or cannot run to its end: the message names the ranks and the tasks.
    """
    check_table(table)
    groups = group_tasks(table)
    alone = not table.links.size and not groups.overlap_slows and (table.meeting < 0).all()
    tasks = np.repeat(np.arange(table.size), np.diff(table.dependency_offsets))
    in_order = alone and bool((table.dependencies < tasks).all())
    times = _run_in_order(groups) if in_order else _run_events(groups)
    if np.isnan(times[1]).any():
        raise deadlock(groups, times[1])
    return times


def _run_in_order(groups: TaskGroups) -> Times:
    table = groups.table
    seconds = np.divide(groups.amount, groups.pace, out=np.zeros(table.size), where=groups.amount > 0)
    free = np.zeros(len(table.stream_rank))
    given = (table.stream, table.dependency_offsets, table.dependencies, table.latency_s, seconds, free)
    starts, ends = np.empty(table.size), np.empty(table.size)
    if _worth_compiling("run_in_order", table.size):
        _compiled(run_in_order)(*given, starts, ends)
        return starts, ends
    listed: list[Any] = [values.tolist() for values in (*given, starts, ends)]
    run_in_order(*listed)
    return np.array(listed[-2], dtype=np.float64), np.array(listed[-1], dtype=np.float64)


def run_in_order(
    stream: Sequence[int],
    dependency_offsets: Sequence[int],
    dependencies: Sequence[int],
    latency_s: Sequence[float],
    seconds: Sequence[float],
    free: Reals,
    starts: Reals,
    ends: Reals,
) -> None:
    """Fill `starts` and `ends` (T,) where no task waits for a later one and none meets another.

    ::

        start_i = max(end_previous(i), max over j in after_i of end_j),  end_i = start_i + latency_i + seconds_i
    """
    use = 0
    for task in range(len(stream)):
        own = stream[task]
        start = free[own]
        last = dependency_offsets[task + 1]
        while use < last:
            end = ends[dependencies[use]]
            if end > start:
                start = end
            use += 1
        starts[task] = start
        ends[task] = free[own] = (start + latency_s[task]) + seconds[task]


def _run_events(groups: TaskGroups) -> Times:
    """Run the events of a table compiled on arrays, or as Python on lists, which are faster there."""
    table, streams, links = groups.table, len(groups.table.stream_rank), len(groups.table.link_capacity)
    offsets, tasks = tasks_by_stream(table.stream, streams)
    ranks, stream_rank = np.unique(table.stream_rank, return_inverse=True)
    rank_offsets, rank_streams = tasks_by_stream(stream_rank, len(ranks))
    values: dict[str, Any] = {
        "stream": table.stream,
        "stream_offsets": offsets,
        "stream_tasks": tasks,
        "dependency_offsets": table.dependency_offsets,
        "dependencies": table.dependencies,
        "owner": groups.owner,
        "size": groups.size,
        "next_member": groups.next_member,
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
        "starts": np.full(table.size, np.nan),
        "ends": np.full(table.size, np.nan),
        "head": offsets[:-1].copy(),
        "pointer": table.dependency_offsets[np.append(tasks, 0)[offsets[:-1]]],
    }
    for size, reals, integers in (
        (
            table.size,
            ("key", "left", "since", "rate", "cap"),
            ("arrived", "works", "changed", "is_changed", "flow_found"),
        ),
        (streams, (), ("next_waiter", "stack", "heap", "flows")),
        (len(table.links), (), ("on_link", "slot", "loosened")),
        (links, ("demand", "slack", "rising"), ("loads", "tight", "crossed", "link_found", "risers", "full")),
        (3 * len(ranks), (), ("beside",)),
        (fast_fluid.COUNTS, (), ("counts",)),
    ):
        values |= {name: np.zeros(size) for name in reals} | {name: np.zeros(size, np.int64) for name in integers}
    values |= {name: np.full(table.size, -1, dtype=np.int64) for name in ("first_waiter", "place")}
    if _worth_compiling("run_events", table.size):
        done: Any = Fluid(**values)
        _compiled(fast_fluid.run_events)(done)
    else:
        done = Fluid(**{name: np.asarray(array).tolist() for name, array in values.items()})
        fast_fluid.run_events(done)
    return np.asarray(done.starts, dtype=np.float64), np.asarray(done.ends, dtype=np.float64)


def _worth_compiling(name: str, tasks: int) -> bool:
    if tasks < SMALLEST_COMPILED:
        return False
    _tasks_run[name] += tasks
    return _tasks_run[name] >= WORTH_COMPILING[name]


@cache
def _compiled(entry: Callable[..., None]) -> Callable[..., None]:
    """A function of numbers and sequences compiled to machine code, kept on disk for later processes."""
    from numba import njit
    from numba.extending import register_jitable

    # The state is a tuple of many arrays: without inlining every call copies them, and with numba's runtime (nrt)
    # every use counts references. Nothing is allocated, so neither is needed: 10 times as fast.
    options: dict[str, Any] = {"_nrt": False, "forceinline": True, "error_model": "numpy"}
    for helper in vars(fast_fluid).values() if entry is fast_fluid.run_events else ():
        if isinstance(helper, FunctionType) and helper is not entry:
            register_jitable(**options)(helper)
    compiled: Callable[..., None] = njit(cache=True, nogil=True, **options)(entry)
    return compiled
