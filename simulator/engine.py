"""The reference engine: one SimPy process for each stream, transfers as flows.

SimPy runs events in the order (time, priority, serial number), so the same table gives the same event order always.
Shares are found anew behind all other events of a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from itertools import pairwise
from math import inf, nan
from typing import Any

import numpy as np
import simpy

from simulator.errors import ProfileError
from simulator.task_table import (
    COMPUTES,
    TRANSFERS,
    FloatArray,
    IntArray,
    TaskGroups,
    TaskTable,
    check_table,
    deadlock,
    group_tasks,
    tasks_by_stream,
)


def run(table: TaskTable) -> tuple[FloatArray, FloatArray]:
    """Seconds (T,) at which the tasks of a table start and end, from the start of the table.

    Raises
    ------
    ProgramError
        When the table is malformed or cannot run to its end: the message names the ranks and the tasks.
    """
    check_table(table)
    return _run_checked(table)


def _run_checked(table: TaskTable) -> tuple[FloatArray, FloatArray]:
    groups = group_tasks(table)
    state = _TableRun(groups)
    offsets, tasks = tasks_by_stream(table.stream, len(table.stream_rank))
    order, bounds = tasks.tolist(), offsets.tolist()
    for first, last in pairwise(bounds):
        if first < last:
            state.environment.process(state.stream(order[first:last]))
    state.environment.run()
    ends = np.array(state.ends)
    if state.unfinished:
        raise deadlock(groups, ends)
    return np.array(state.starts), ends


class _TableRun:
    """A table in a SimPy environment; an end that is not a number has not come yet."""

    def __init__(self, groups: TaskGroups) -> None:
        table = groups.table
        self.environment = simpy.Environment()
        self.starts = [nan] * table.size
        self.ends = [nan] * table.size
        self.unfinished = table.size
        self._flows = Flows(self.environment, groups)
        self._owner, self._size = groups.owner.tolist(), groups.size.tolist()
        self._latency, self._amount = groups.latency_s.tolist(), groups.amount.tolist()
        offsets, dependencies = table.dependency_offsets.tolist(), table.dependencies.tolist()
        self._dependencies = [dependencies[a:b] for a, b in pairwise(offsets)]
        self._awaited: dict[int, simpy.Event] = {}
        self._meetings: dict[int, _Meeting] = {}

    def stream(self, tasks: Sequence[int]) -> Generator[simpy.Event, Any, None]:
        """Run tasks one after the other, each when what it waits for has ended.

        Most dependencies have ended when they are asked for: only those that have not get an event.
        """
        environment, starts, ends, awaited = self.environment, self.starts, self.ends, self._awaited
        dependencies, size, latency, amount = self._dependencies, self._size, self._latency, self._amount
        flows, is_flow = self._flows, self._flows.is_flow
        for task in tasks:
            for before in dependencies[task]:
                if ends[before] != ends[before]:
                    event = awaited.get(before)
                    if event is None:
                        event = awaited[before] = environment.event()
                    yield event
            if size[task] != 1:
                yield from self._meet(task)
            else:
                starts[task] = environment.now
                flows.start(task)
                if latency[task] > 0.0:
                    yield environment.timeout(latency[task])
                if is_flow[task]:
                    yield flows.begin(task)
                elif amount[task] > 0.0:
                    yield environment.timeout(amount[task])
                flows.stop(task)
                ends[task] = environment.now
            self.unfinished -= 1
            if task in awaited:
                awaited.pop(task).succeed()

    def _meet(self, task: int) -> Generator[simpy.Event, Any, None]:
        """Wait for the other members; the last to come runs the whole."""
        owner = self._owner[task]
        meeting = self._meetings.get(owner)
        if meeting is None:
            meeting = self._meetings[owner] = _Meeting(self.environment.event())
        meeting.members.append(task)
        if len(meeting.members) < self._size[owner]:
            yield meeting.ended
            return
        for member in meeting.members:
            self.starts[member] = self.environment.now
        self._flows.start(owner)
        if self._latency[owner] > 0.0:
            yield self.environment.timeout(self._latency[owner])
        if self._flows.is_flow[owner]:
            yield self._flows.begin(owner)
        elif self._amount[owner] > 0.0:
            yield self.environment.timeout(self._amount[owner])
        self._flows.stop(owner)
        for member in meeting.members:
            self.ends[member] = self.environment.now
        meeting.ended.succeed()


class _Meeting:
    """Members that have come, and the end of all."""

    def __init__(self, ended: simpy.Event) -> None:
        self.members: list[int] = []
        self.ended = ended


_LAST_OF_ITS_TIME = simpy.events.EventPriority(2)
_RATES_KEPT = 50_000


class Flow:
    """A whole that works."""

    __slots__ = ("cap", "ended", "left", "members", "rate", "serial", "since", "uses", "uses_number", "whole")

    def __init__(self, whole: int, ended: simpy.Event, left: float) -> None:
        self.whole = whole
        self.ended = ended
        self.left = left
        self.rate = 0.0
        self.since = 0.0
        self.serial = 0
        self.cap = inf
        self.members = [whole]
        self.uses: tuple[tuple[int, float], ...] = ()
        self.uses_number = 0


class Flows:
    """The wholes that are under way and whose rates may change.

    When one begins or ends, `max_min_rates` finds the rates of all flows anew that share links with it, directly or
    through others. It is called once for each set of equal flows.
    """

    def __init__(self, environment: simpy.Environment, groups: TaskGroups) -> None:
        table = groups.table
        self._environment = environment
        self._amount = groups.amount.tolist()
        self._lasts = ((groups.amount > 0) | (groups.latency_s > 0)).tolist()
        self._pace: list[float] = groups.pace.tolist()
        self._slows = groups.overlap_slows
        self._next_member = groups.next_member.tolist()
        self._rank = table.stream_rank[table.stream].tolist() if table.size else []
        self._role = groups.role.tolist() if table.size else []
        self._speeds = {COMPUTES: table.compute_speed, TRANSFERS: table.transfer_speed}
        self._offsets, self._links = table.link_offsets.tolist(), table.links.tolist()
        self._weights, self._capacities = groups.use_weights.tolist(), table.link_capacity
        moves = np.bincount(groups.owner, table.rate_bytes_per_s > 0, minlength=table.size) > 0
        self.is_flow = ((moves | self._slows) & (groups.amount > 0)).tolist()
        self._on_link: dict[int, dict[Flow, None]] = defaultdict(dict)
        self._beside: dict[int, dict[int, int]] = {role: defaultdict(int) for role in self._speeds}
        self._at_work: dict[int, dict[int, dict[int, Flow]]] = {role: defaultdict(dict) for role in self._speeds}
        self._changed: dict[Flow, None] = {}
        self._settling = False
        self._uses_numbers: dict[tuple[tuple[int, float], ...], int] = {}
        self._known: dict[tuple[tuple[int, float], ...], list[float]] = {}

    def start(self, whole: int) -> None:
        """Let a whole start: what runs in the other role on the ranks of its members is slowed from now on."""
        if self._slows:
            self._count(whole, 1)

    def stop(self, whole: int) -> None:
        """Let a whole end, whether it worked or only took its latency."""
        if self._slows:
            self._count(whole, -1)

    def begin(self, whole: int) -> simpy.Event:
        """Let a whole begin its work; the event is its end."""
        flow = Flow(whole, self._environment.event(), self._amount[whole])
        flow.members = self._members(whole)
        for member in flow.members:
            for use in range(self._offsets[member], self._offsets[member + 1]):
                if self._weights[use] > 0.0:
                    flow.uses += ((self._links[use], self._weights[use]),)
                    self._on_link[self._links[use]][flow] = None
            if self._slows and self._role[member] in self._speeds:
                self._at_work[self._role[member]][self._rank[member]][member] = flow
        flow.cap = self._cap(flow)
        if flow.uses:
            flow.uses_number = self._uses_numbers.setdefault(flow.uses, len(self._uses_numbers))
            self._change(flow)
        else:
            self._set_rate(flow, flow.cap)
        return flow.ended

    def _end(self, timer: simpy.Event) -> None:
        value: Any = timer.value
        flow: Flow = value[0]
        if value[1] != flow.serial:
            return
        for link, _ in flow.uses:
            on_link = self._on_link[link]
            on_link.pop(flow, None)
            for other in on_link:
                self._change(other)
        for member in flow.members if self._slows else ():
            if self._role[member] in self._speeds:
                del self._at_work[self._role[member]][self._rank[member]][member]
        self._changed.pop(flow, None)
        flow.ended.succeed()

    def _members(self, whole: int) -> list[int]:
        members = [whole]
        while (following := self._next_member[members[-1]]) >= 0:
            members.append(following)
        return members

    def _count(self, whole: int, change: int) -> None:
        """Count the members of a whole that starts (1) or ends (-1), if it takes any time.

        What computes on a rank is slowed by whether something transfers there, and the other way round.
        """
        if not self._lasts[whole]:
            return
        for member in self._members(whole):
            rank, role = self._rank[member], self._role[member]
            if role not in self._speeds:
                continue
            self._beside[role][rank] += change
            if self._beside[role][rank] == (change > 0):
                for other in self._at_work[COMPUTES + TRANSFERS - role][rank].values():
                    self._change(other)

    def _change(self, flow: Flow) -> None:
        self._changed[flow] = None
        if not self._settling:
            self._settling = True
            settle = simpy.Event(self._environment)
            settle.callbacks = [self._settle]
            settle._ok, settle._value = True, None
            self._environment.schedule(settle, _LAST_OF_ITS_TIME)

    def _settle(self, _: simpy.Event) -> None:
        """Give every flow that is touched by a change its rate."""
        self._settling = False
        changed, self._changed = self._changed, {}
        if self._slows:
            for flow in changed:
                flow.cap = self._cap(flow)
        seen: set[Flow] = set()
        for flow in changed:
            if flow in seen:
                continue
            if not flow.uses:
                self._set_rate(flow, flow.cap)
                continue
            connected = self._connected(flow)
            seen.update(connected)
            for one, rate in zip(connected, self._rates(connected), strict=True):
                self._set_rate(one, rate)

    def _cap(self, flow: Flow) -> float:
        """The pace of the slowest member."""
        if not self._slows:
            return min([self._pace[member] for member in flow.members])
        cap = inf
        for member in flow.members:
            role, pace = self._role[member], self._pace[member]
            if role in self._speeds and self._beside[COMPUTES + TRANSFERS - role][self._rank[member]]:
                pace *= self._speeds[role]
            cap = min(cap, pace)
        return cap

    def _connected(self, flow: Flow) -> list[Flow]:
        """Flows that share links with `flow`, directly or through others; equal sets in equal order."""
        found, links = dict.fromkeys([flow]), set[int]()
        pending = [flow]
        while pending:
            for link, _ in pending.pop().uses:
                if link not in links:
                    links.add(link)
                    for other in self._on_link[link]:
                        if other not in found:
                            found[other] = None
                            pending.append(other)
        return list(found) if len(found) == 1 else sorted(found, key=lambda one: (one.uses_number, one.cap, one.whole))

    def _rates(self, flows: list[Flow]) -> list[float]:
        key = tuple([(flow.uses_number, flow.cap) for flow in flows])
        rates = self._known.get(key)
        if rates is None:
            counts = [len(flow.uses) for flow in flows]
            uses = [use for flow in flows for use in flow.uses]
            if len(self._known) >= _RATES_KEPT:
                self._known.clear()
            numbers, links = np.unique(np.array([link for link, _ in uses]), return_inverse=True)
            rates = self._known[key] = max_min_rates(
                np.array([flow.cap for flow in flows]),
                np.concatenate(([0], np.cumsum(counts))),
                links,
                np.array([weight for _, weight in uses]),
                self._capacities[numbers],
            ).tolist()
        return rates

    def _set_rate(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        now = self._environment.now
        flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
        flow.since, flow.rate = now, rate
        flow.serial += 1
        timer = self._environment.timeout(flow.left / rate, (flow, flow.serial))
        assert timer.callbacks is not None
        timer.callbacks.append(self._end)


# Links that fill within rounding of each other fill together.
SAME_LEVEL = 1 + 1e-12


def max_min_rates(
    caps: FloatArray, link_offsets: IntArray, links: IntArray, weights: FloatArray, capacities: FloatArray
) -> FloatArray:
    """Max-min fair rates (F,) of F flows: none can grow without taking from a flow that has no more.

    Progressive filling (Bertsekas and Gallager, "Data Networks", 2nd ed., 1992, section 6.5.2): all rates rise
    together; a flow stops at its own cap or when a link that it crosses is full.

    At rate ``r`` flow ``f`` loads link ``links[u]`` with ``r * weights[u]`` for every ``u`` in
    ``link_offsets[f]:link_offsets[f + 1]``.

    Parameters
    ----------
    caps
        (F,) highest rate of each flow, infinity for none; then the flow must cross a link.
    link_offsets, links, weights
        (F + 1,), (U,), (U,) links of each flow in compressed rows, weights above zero.
    capacities
        (L,) what a link carries; a link of capacity 0 stops its flows.
    """
    rates = np.zeros(len(caps))
    rising = np.ones(len(caps), dtype=bool)
    flow_of_use = np.repeat(np.arange(len(caps)), np.diff(link_offsets))
    left = np.array(capacities, dtype=np.float64)
    while rising.any():
        using = rising[flow_of_use]
        growth = np.bincount(links[using], weights[using], minlength=len(left))
        full_at = np.divide(left, growth, out=np.full(len(left), np.inf), where=growth > 0)
        level = min(caps[rising].min(), full_at.min(initial=np.inf))
        if not np.isfinite(level):
            flow = int(np.flatnonzero(rising)[0])
            raise ProfileError(f"flow {flow} has no cap and crosses no link; give it a finite cap or a link")
        full = full_at <= level * SAME_LEVEL
        stopped = caps <= level
        stopped[flow_of_use[using & full[links]]] = True
        stopped &= rising
        rates[stopped] = np.minimum(level, caps[stopped])
        settled = stopped[flow_of_use]
        taken = np.bincount(links[settled], (weights * rates[flow_of_use])[settled], minlength=len(left))
        left = np.maximum(left - taken, 0.0)
        rising &= ~stopped
    return rates
