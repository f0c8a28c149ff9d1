"""Tables of one rank: few streams that slow each other, and of which at most two share links.

The events are those of `simulator.fast_fluid`, and so are the times, to the bit where links cannot be overloaded. Each
stream runs one task at a time: no heap orders their events, and a change of pace concerns them alone.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from simulator.fast_fluid import CROWDED, SAME_LEVEL
from simulator.task_groups import TaskGroups, tasks_by_stream
from simulator.task_table import FloatArray

Times = tuple[FloatArray, FloatArray]
NEVER = float("inf")
UNKNOWN = float("nan")
MOST_STREAMS = 8
"""Streams of a rank beyond which a heap finds the next event sooner."""
MOST_SHARING = 2
"""Streams of which one link's loads are the same sum in any order."""
AMPLE = 1 + 1e-12


def runs_alone(groups: TaskGroups) -> bool:
    """Whether a table is of one rank without meetings, at most `MOST_SHARING` streams of which cross links."""
    table = groups.table
    if len(table.stream_rank) > MOST_STREAMS or len(set(table.stream_rank.tolist())) != 1:
        return False
    crossing = np.unique(table.stream[np.diff(table.link_offsets) > 0])
    return bool((table.meeting < 0).all()) and len(crossing) <= MOST_SHARING


def _uses(groups: TaskGroups) -> tuple[list[dict[int, float]], set[int]]:
    """(T,) bytes on each link for each of a task's amount, and tasks that overload one alone.

    Nothing where no link can be overloaded: tasks of one stream never run together, so a link carries at most the sum
    over streams of the largest load of each.
    """
    table, links = groups.table, len(groups.table.link_capacity)
    task = np.repeat(np.arange(table.size), np.diff(table.link_offsets))
    uses, place = np.unique(task * links + table.links, return_inverse=True)
    weights = np.bincount(place, groups.use_weights)
    task, link = uses // max(links, 1), uses % max(links, 1)
    most = np.zeros((len(table.stream_rank), links))
    np.maximum.at(most, (table.stream[task], link), weights * groups.pace[task])
    if (most.sum(axis=0) <= table.link_capacity * AMPLE).all():
        return [], set()
    none: dict[int, float] = {}
    found = [none] * table.size
    for number, crossed, weight in zip(task.tolist(), link.tolist(), weights.tolist(), strict=True):
        if weight > 0.0:
            if not found[number]:
                found[number] = {}
            found[number][crossed] = weight
    tight = weights * groups.pace[task] > table.link_capacity[link] * CROWDED
    return found, set(task[tight].tolist())


def run_beside(groups: TaskGroups) -> Times:
    """Seconds (T,) at which tasks start and end; those of a deadlock keep an end that is not a number."""
    table = groups.table
    offsets, order = tasks_by_stream(table.stream, len(table.stream_rank))
    dependencies = table.dependencies.tolist()
    uses, tight = _uses(groups) if table.links.size else ([], set())
    rank = _RankStreams(
        queues=[order[begin:end].tolist() for begin, end in pairwise(offsets.tolist())],
        after=[dependencies[begin:end] for begin, end in pairwise(table.dependency_offsets.tolist())],
        latency_s=groups.latency_s.tolist(),
        amount=groups.amount.tolist(),
        pace=groups.pace.tolist(),
        role=groups.role.tolist(),
        speed=(1.0, table.compute_speed, table.transfer_speed),
        uses=uses,
        tight=tight,
        capacity=table.link_capacity.tolist(),
    )
    rank.run()
    return np.array(rank.starts, dtype=np.float64), np.array(rank.ends, dtype=np.float64)


class _RankStreams:
    """The streams of a rank: what each runs, and when that next begins its work or ends (``moments``)."""

    def __init__(
        self,
        *,
        queues: list[list[int]],
        after: list[list[int]],
        latency_s: list[float],
        amount: list[float],
        pace: list[float],
        role: list[int],
        speed: tuple[float, float, float],
        uses: list[dict[int, float]],
        tight: set[int],
        capacity: list[float],
    ) -> None:
        self.uses, self.tight, self.capacity = uses, tight, capacity
        self.queues, self.after, self.latency_s = [[*queue, -1] for queue in queues], after, latency_s
        self.amount, self.pace, self.role, self.speed = amount, pace, role, speed
        self.starts, self.ends = [UNKNOWN] * len(after), [UNKNOWN] * len(after)
        streams = len(queues)
        self.open = list(range(streams))
        """Streams that may go on."""
        self.place = [0] * streams
        self.task = [queue[0] for queue in self.queues]
        """The next or running task of each stream, -1 behind the last."""
        self.waiting = [-1] * streams
        """The task that the next one of each stream waits for."""
        self.works = [False] * streams
        self.left, self.since, self.rate = [0.0] * streams, [0.0] * streams, [0.0] * streams
        self.moments = [NEVER] * streams
        self.beside = [0, 0, 0]
        """Tasks that run, by role."""

    def run(self) -> None:
        """Follow the events in the order of time; what happens at one moment happens before paces are found anew."""
        now, moments = 0.0, self.moments
        while True:
            while self.open:
                self._start(self.open.pop(), now)
            if min(moments) != now:
                self._settle(now)
                own = moments.index(min(moments))
                if sum(self.beside) == 1:
                    self._go_on_alone(own)
                elif self.works[own]:
                    self._go_on(own)
                now = min(moments)
                if now == NEVER:
                    return
            own = moments.index(now)
            if self.works[own]:
                self._end(own, now)
            else:
                self._begin(own, now)

    def _start(self, own: int, now: float) -> None:
        task, ends = self.task[own], self.ends
        if task < 0:
            return
        for needed in self.after[task]:
            if ends[needed] != ends[needed]:
                self.waiting[own] = needed
                return
        self.starts[task] = now
        latency_s = self.latency_s[task]
        if latency_s > 0.0:
            self.beside[self.role[task]] += 1
            self.moments[own] = now + latency_s
            return
        self.beside[self.role[task]] += self.amount[task] > 0.0
        self._begin(own, now)

    def _slowed(self) -> tuple[float, float, float]:
        """Paces by role, of those alone, beside what runs."""
        _, computes, transfers = self.beside
        return 1.0, self.speed[1] if transfers else 1.0, self.speed[2] if computes else 1.0

    def _go_on(self, own: int) -> None:
        """Let a stream run one task after the other while nothing else happens and no pace changes.

        The task at which it stops runs: what follows that is an event like others.
        """
        ends, starts, queue, place = self.ends, self.starts, self.queues[own], self.place[own]
        amounts, latencies, roles, after, uses = self.amount, self.latency_s, self.role, self.after, self.uses
        task, moment, waiting, pace = self.task[own], self.moments[own], self.waiting, self.pace
        role, works, begun, rate = roles[task], True, self.since[own], self.rate[own]
        left, slowed = self.left[own], self._slowed()[role]
        limit = min([other for stream, other in enumerate(self.moments) if stream != own], default=NEVER)
        while works and moment < limit and task not in waiting and not (uses and uses[task]):
            following = queue[place + 1]
            if following < 0 or roles[following] != role or amounts[following] <= 0.0 or (uses and uses[following]):
                break
            for needed in after[following]:
                if needed != task and ends[needed] != ends[needed]:
                    break
            else:
                ends[task] = starts[following] = moment
                task, place = following, place + 1
                if (latency_s := latencies[task]) > 0.0:
                    moment += latency_s
                works = moment < limit
                if works:
                    left, begun, rate = amounts[task], moment, pace[task] * slowed
                    moment += left / rate
                continue
            break
        self.left[own], self.since[own], self.rate[own] = left, begun, rate
        self.task[own], self.place[own], self.works[own], self.moments[own] = task, place, works, moment

    def _go_on_alone(self, own: int) -> None:
        """Let one task run after the other, of whatever stream, while only one does: nothing slows it.

        The task at which it stops runs: what follows that is an event like others.
        """
        starts, ends, tasks, queues, place = self.starts, self.ends, self.task, self.queues, self.place
        amounts, latencies, pace = self.amount, self.latency_s, self.pace
        task, moment, works = tasks[own], self.moments[own], self.works[own]
        left, since, rate = self.left[own], self.since[own], self.rate[own]
        self.beside[self.role[task]] -= 1
        self.works[own], self.moments[own] = False, NEVER
        while works or amounts[task] <= 0.0 or task not in self.tight:
            if not works and amounts[task] > 0.0:
                left, since, rate = amounts[task], moment, pace[task]
                moment, works = moment + left / rate, True
            ends[task] = moment
            begins = self._begins_alone(own, task)
            if begins < 0:
                break
            place[own] += 1
            tasks[own] = queues[own][place[own]]
            own, works, task = begins, False, tasks[begins]
            self.waiting[own] = -1
            starts[task] = moment
            if latencies[task] > 0.0:
                moment += latencies[task]
        self.beside[self.role[task]] += 1
        self.left[own], self.since[own], self.rate[own] = left, since, rate
        self.works[own], self.moments[own] = works, moment

    def _begins_alone(self, own: int, ended: int) -> int:
        """The one stream that begins a task when that of `own` has ended; -1 where none or several do.

        Also where a task ends as it begins. What other streams wait for next is noted.
        """
        ends, waiting, after = self.ends, self.waiting, self.after
        task = self.queues[own][self.place[own] + 1]
        begins = held = -1
        if task >= 0:
            for held in after[task]:
                if ends[held] != ends[held]:
                    break
            else:
                begins, held = own, -1
        if ended in waiting:
            for stream, needed in enumerate(waiting):
                if needed != ended:
                    continue
                waits = self.task[stream]
                for other in after[waits]:
                    if ends[other] != ends[other]:
                        waiting[stream] = other
                        break
                else:
                    if begins >= 0:
                        return -1
                    begins, task = stream, waits
        if begins < 0 or (self.latency_s[task] <= 0.0 and self.amount[task] <= 0.0):
            return -1
        waiting[own] = held
        return begins

    def _begin(self, own: int, now: float) -> None:
        """Let the task of a stream begin its work, or end where it has none."""
        amount = self.amount[self.task[own]]
        if amount <= 0.0:
            self._end(own, now)
            return
        self.works[own] = True
        self.left[own], self.since[own], self.rate[own] = amount, now, 0.0
        self.moments[own] = NEVER

    def _end(self, own: int, now: float) -> None:
        task, waiting = self.task[own], self.waiting
        if self.works[own] or self.latency_s[task] > 0.0:
            self.beside[self.role[task]] -= 1
        self.ends[task] = now
        self.works[own] = False
        self.moments[own] = NEVER
        self.place[own] += 1
        self.task[own] = self.queues[own][self.place[own]]
        self.open.append(own)
        if task in waiting:
            for other, needed in enumerate(waiting):
                if needed == task:
                    waiting[other] = -1
                    self.open.append(other)

    def _settle(self, now: float) -> None:
        """Give what works its pace, and find when it ends by it."""
        slowed = self._slowed()
        rates: dict[int, float] = {}
        for own, works in enumerate(self.works):
            if works:
                task = self.task[own]
                rates[own] = self.pace[task] * slowed[self.role[task]]
        if self.uses:
            self._share(rates)
        for own, rate in rates.items():
            if rate != self.rate[own]:
                left = max(0.0, self.left[own] - self.rate[own] * (now - self.since[own]))
                self.left[own], self.since[own], self.rate[own] = left, now, rate
                self.moments[own] = now + left / rate

    def _share(self, rates: dict[int, float]) -> None:
        """Max-min fair rates of what crosses links, none faster than it is alone, as `simulator.fast_fluid.share`."""
        flows = {own: found for own in rates if (found := self.uses[self.task[own]])}
        demand: dict[int, float] = {}
        for own, uses in flows.items():
            for link, weight in uses.items():
                demand[link] = demand.get(link, 0.0) + weight * rates[own]
        slack = {link: self.capacity[link] for link, asked in demand.items() if asked > self.capacity[link] * CROWDED}
        if not slack:
            return
        rising, level = list(flows), 0.0

        def weights_on(link: int) -> float:
            return sum(flows[own][link] for own in rising if link in flows[own])

        while rising:
            weights = {link: weight for link in slack if (weight := weights_on(link)) > 0.0}
            lowest = max(level, min((slack[link] / weight for link, weight in weights.items()), default=NEVER))
            stopped = [own for own in rising if rates[own] <= lowest]
            if not stopped:
                # Those that rise no further go at the pace of a link that is full.
                level = lowest
                full = {link for link, weight in weights.items() if slack[link] <= level * SAME_LEVEL * weight}
                stopped = [own for own in rising if not full.isdisjoint(flows[own])]
                rates.update(dict.fromkeys(stopped, level))
            for own in stopped:
                for link, weight in flows[own].items():
                    if link in slack:
                        slack[link] = max(0.0, slack[link] - rates[own] * weight)
            rising = [own for own in rising if own not in stopped]
