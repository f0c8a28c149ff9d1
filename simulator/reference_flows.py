"""Work whose pace changes: transfers that share links, and tasks slowed by what runs beside them on their rank."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from typing import Any

import numpy as np
import simpy

from simulator.flows import max_min_rates
from simulator.task_groups import COMPUTES, TRANSFERS, TaskGroups

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
        return list(found) if len(found) == 1 else sorted(found, key=_sort_key)

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


def _sort_key(flow: Flow) -> tuple[int, float, int]:
    return flow.uses_number, flow.cap, flow.whole
