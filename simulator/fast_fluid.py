"""Tables whose transfers share links or are slowed by computation: events in the order of time, on arrays.

Plain functions of numbers and sequences: Python runs them on lists, numba compiles them for arrays.

A change of what crosses a link touches only flows that are joined to it by *crowded* links: those that all their
flows together could overload at their caps. Others never bind.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import NamedTuple

Integers = MutableSequence[int]
Reals = MutableSequence[float]

# Demands are sums kept up to date: a link counts as crowded a little before it is.
CROWDED = 1 - 1e-9
SAME_LEVEL = 1 + 1e-12
# Places in ``Fluid.counts``: sizes of heap, stack and lists, and the number of the last search.
HEAP, STACK, CHANGED, LOOSENED, FLOWS, LINKS, SEARCH = range(7)
COUNTS = 7


class Fluid(NamedTuple):
    """A table of tasks, and its state at one time.

    Streams and waiting are as in `simulator.fast_recurrence.Recurrence`. Of wholes (T,) at their owner: ``key`` is the
    time of the next event and ``place`` where it stands in the ``heap``, -1 for nowhere; ``works`` is 1 from the end of
    the latency to the end; ``left`` is the amount left at time ``since``, draining at ``rate``. Of links (L):
    ``on_link`` holds the uses that load each link now from ``slot_offsets``, ``loads`` how many, ``demand`` what they
    would load it with at their caps, ``tight`` whether the last shares took it for crowded. Of ranks (R): tasks that
    compute and transfer, ``beside`` at ``3 * rank + role``.
    """

    stream: Integers
    stream_offsets: Integers
    stream_tasks: Integers
    dependency_offsets: Integers
    dependencies: Integers
    owner: Integers
    size: Integers
    next_member: Integers
    latency_s: Reals
    amount: Reals
    pace: Reals
    role: Integers
    stream_rank: Integers
    rank_offsets: Integers
    rank_streams: Integers
    link_offsets: Integers
    links: Integers
    use_weights: Reals
    use_owner: Integers
    slot_offsets: Integers
    capacity: Reals
    speed: Reals
    starts: Reals
    ends: Reals
    head: Integers
    pointer: Integers
    first_waiter: Integers
    next_waiter: Integers
    stack: Integers
    arrived: Integers
    key: Reals
    heap: Integers
    place: Integers
    works: Integers
    left: Reals
    since: Reals
    rate: Reals
    cap: Reals
    on_link: Integers
    slot: Integers
    loads: Integers
    demand: Reals
    tight: Integers
    beside: Integers
    changed: Integers
    is_changed: Integers
    loosened: Integers
    flows: Integers
    flow_found: Integers
    crossed: Integers
    link_found: Integers
    slack: Reals
    rising: Reals
    risers: Integers
    full: Integers
    counts: Integers


def run_events(state: Fluid) -> None:
    """Fill ``starts`` and ``ends``; tasks of a deadlock keep an end that is not a number."""
    s = state
    streams = len(s.head)
    for i in range(streams):
        s.stack[i] = streams - 1 - i
    s.counts[STACK] = streams
    now = 0.0
    while True:
        advance(s, now)
        if s.counts[HEAP] > 0 and s.key[s.heap[0]] == now:
            whole = s.heap[0]
            heap_pop(s)
            if s.works[whole] == 1:
                end_whole(s, whole, now)
            else:
                begin_work(s, whole, now)
            continue
        settle(s, now)
        if s.counts[HEAP] == 0:
            break
        now = s.key[s.heap[0]]


def advance(state: Fluid, now: float) -> None:
    """Start what can start on the streams of the stack."""
    s = state
    while s.counts[STACK] > 0:
        s.counts[STACK] -= 1
        own = s.stack[s.counts[STACK]]
        if s.head[own] == s.stream_offsets[own + 1]:
            continue
        task = s.stream_tasks[s.head[own]]
        use = s.pointer[own]
        last = s.dependency_offsets[task + 1]
        while use < last and s.ends[s.dependencies[use]] == s.ends[s.dependencies[use]]:
            use += 1
        s.pointer[own] = use
        if use < last:
            blocking = s.dependencies[use]
            s.next_waiter[own] = s.first_waiter[blocking]
            s.first_waiter[blocking] = own
            continue
        whole = s.owner[task]
        s.arrived[whole] += 1
        if s.arrived[whole] == s.size[whole]:
            task = whole
            while task >= 0:
                s.starts[task] = now
                count_beside(s, task, whole, 1)
                task = s.next_member[task]
            if s.latency_s[whole] > 0.0:
                set_key(s, whole, now + s.latency_s[whole])
            else:
                begin_work(s, whole, now)


def begin_work(state: Fluid, whole: int, now: float) -> None:
    """Let a whole begin its work, or end it where it has none."""
    s = state
    if s.amount[whole] <= 0.0:
        end_whole(s, whole, now)
        return
    s.works[whole] = 1
    s.left[whole] = s.amount[whole]
    s.since[whole] = now
    cap = cap_of(s, whole)
    s.cap[whole] = cap
    loads = False
    task = whole
    while task >= 0:
        for use in range(s.link_offsets[task], s.link_offsets[task + 1]):
            if s.use_weights[use] > 0.0:
                link = s.links[use]
                s.slot[use] = s.loads[link]
                s.on_link[s.slot_offsets[link] + s.loads[link]] = use
                s.loads[link] += 1
                s.demand[link] += s.use_weights[use] * cap
                loads = True
        task = s.next_member[task]
    if loads:
        mark_changed(s, whole)
    else:
        set_rate(s, whole, cap, now)


def end_whole(state: Fluid, whole: int, now: float) -> None:
    """End a whole and put the streams that waited for it on the stack."""
    s = state
    if s.works[whole] == 1:
        s.works[whole] = 2
        leave_links(s, whole)
    task = whole
    while task >= 0:
        count_beside(s, task, whole, -1)
        s.ends[task] = now
        own = s.stream[task]
        s.head[own] += 1
        if s.head[own] < s.stream_offsets[own + 1]:
            s.pointer[own] = s.dependency_offsets[s.stream_tasks[s.head[own]]]
        s.stack[s.counts[STACK]] = own
        s.counts[STACK] += 1
        waiter = s.first_waiter[task]
        while waiter >= 0:
            s.stack[s.counts[STACK]] = waiter
            s.counts[STACK] += 1
            waiter = s.next_waiter[waiter]
        task = s.next_member[task]


def leave_links(state: Fluid, whole: int) -> None:
    """Take the uses of a whole off its links."""
    s = state
    task = whole
    while task >= 0:
        for use in range(s.link_offsets[task], s.link_offsets[task + 1]):
            if s.use_weights[use] > 0.0:
                link = s.links[use]
                s.loads[link] -= 1
                last = s.on_link[s.slot_offsets[link] + s.loads[link]]
                s.on_link[s.slot_offsets[link] + s.slot[use]] = last
                s.slot[last] = s.slot[use]
                s.demand[link] -= s.use_weights[use] * s.cap[whole]
                if s.loads[link] == 0:
                    s.demand[link] = 0.0
                    s.tight[link] = 0
                elif s.tight[link] == 1:
                    # Marked twice it is looked at twice, which does no harm; the list has a place for each use.
                    s.loosened[s.counts[LOOSENED]] = link
                    s.counts[LOOSENED] += 1
        task = s.next_member[task]


def count_beside(state: Fluid, task: int, whole: int, change: int) -> None:
    """Count a task that starts (1) or ends (-1); with the first or last of its role the other role changes."""
    s = state
    role = s.role[task]
    if role > 0 and (s.latency_s[whole] > 0.0 or s.amount[whole] > 0.0):
        rank = s.stream_rank[s.stream[task]]
        s.beside[3 * rank + role] += change
        edge = 1 if change > 0 else 0
        if s.beside[3 * rank + role] == edge and s.beside[3 * rank + 3 - role] > 0:
            mark_rank(s, rank, 3 - role)


def mark_rank(state: Fluid, rank: int, role: int) -> None:
    """Mark what works on a rank in a role as changed."""
    s = state
    for i in range(s.rank_offsets[rank], s.rank_offsets[rank + 1]):
        own = s.rank_streams[i]
        if s.head[own] < s.stream_offsets[own + 1]:
            task = s.stream_tasks[s.head[own]]
            if s.works[s.owner[task]] == 1 and s.role[task] == role:
                mark_changed(s, s.owner[task])


def mark_changed(state: Fluid, whole: int) -> None:
    """Have the next settlement look at a whole."""
    s = state
    if s.is_changed[whole] == 0:
        s.is_changed[whole] = 1
        s.changed[s.counts[CHANGED]] = whole
        s.counts[CHANGED] += 1


def cap_of(state: Fluid, whole: int) -> float:
    """The pace of the slowest member of a whole, slowed by what runs beside it."""
    s = state
    cap = s.pace[whole]
    task = whole
    while task >= 0:
        pace = s.pace[task]
        role = s.role[task]
        if role > 0 and s.beside[3 * s.stream_rank[s.stream[task]] + 3 - role] > 0:
            pace *= s.speed[role]
        if pace < cap:
            cap = pace
        task = s.next_member[task]
    return cap


def settle(state: Fluid, now: float) -> None:
    """Give every flow that a change touches its rate."""
    s = state
    if s.counts[CHANGED] == 0 and s.counts[LOOSENED] == 0:
        return
    s.counts[SEARCH] += 1
    for i in range(s.counts[CHANGED]):
        if s.works[s.changed[i]] == 1:
            renew_cap(s, s.changed[i])
    for i in range(s.counts[CHANGED]):
        whole = s.changed[i]
        s.is_changed[whole] = 0
        if s.works[whole] == 1 and s.flow_found[whole] != s.counts[SEARCH]:
            find_joined(s, whole)
            share(s, now)
    for i in range(s.counts[LOOSENED]):
        link = s.loosened[i]
        if s.loads[link] > 0:
            whole = s.use_owner[s.on_link[s.slot_offsets[link]]]
            if s.flow_found[whole] != s.counts[SEARCH]:
                find_joined(s, whole)
                share(s, now)
    s.counts[CHANGED] = 0
    s.counts[LOOSENED] = 0


def renew_cap(state: Fluid, whole: int) -> None:
    """Bring the cap of a whole and the demand on its links up to date."""
    s = state
    cap = cap_of(s, whole)
    growth = cap - s.cap[whole]
    if growth != 0.0:
        s.cap[whole] = cap
        task = whole
        while task >= 0:
            for use in range(s.link_offsets[task], s.link_offsets[task + 1]):
                s.demand[s.links[use]] += s.use_weights[use] * growth
            task = s.next_member[task]


def find_joined(state: Fluid, whole: int) -> None:
    """List the flows joined to `whole` by links that are or were crowded, and these links."""
    s = state
    search = s.counts[SEARCH]
    s.flows[0] = whole
    s.flow_found[whole] = search
    flows = 1
    links = 0
    i = 0
    while i < flows:
        task = s.flows[i]
        i += 1
        while task >= 0:
            for use in range(s.link_offsets[task], s.link_offsets[task + 1]):
                link = s.links[use]
                if s.link_found[link] == search or s.use_weights[use] <= 0.0:
                    continue
                crowded = s.demand[link] > s.capacity[link] * CROWDED
                if not crowded and s.tight[link] == 0:
                    continue
                s.link_found[link] = search
                s.tight[link] = 1 if crowded else 0
                s.crossed[links] = link
                links += 1
                for k in range(s.slot_offsets[link], s.slot_offsets[link] + s.loads[link]):
                    other = s.use_owner[s.on_link[k]]
                    if s.flow_found[other] != search:
                        s.flow_found[other] = search
                        s.flows[flows] = other
                        flows += 1
            task = s.next_member[task]
    s.counts[FLOWS] = flows
    s.counts[LINKS] = links


def share(state: Fluid, now: float) -> None:
    """Max-min fair rates of the listed flows by progressive filling, see `simulator.engine.max_min_rates`."""
    s = state
    search = s.counts[SEARCH]
    for k in range(s.counts[LINKS]):
        link = s.crossed[k]
        s.slack[link] = s.capacity[link]
        s.rising[link] = 0.0
        s.risers[link] = s.loads[link]
        s.full[link] = 0
        for i in range(s.slot_offsets[link], s.slot_offsets[link] + s.loads[link]):
            s.rising[link] += s.use_weights[s.on_link[i]]
    rising = s.counts[FLOWS]
    level = 0.0
    while rising > 0:
        lowest = lowest_full(s, level)
        kept = 0
        for i in range(rising):
            whole = s.flows[i]
            if s.cap[whole] <= lowest:
                stop(s, whole, s.cap[whole], search)
                set_rate(s, whole, s.cap[whole], now)
            else:
                s.flows[kept] = whole
                kept += 1
        if kept < rising:
            # Flows stopped below the level of the links leave more to the others.
            rising = kept
            continue
        level = lowest
        for k in range(s.counts[LINKS]):
            link = s.crossed[k]
            if s.risers[link] > 0 and s.slack[link] <= level * SAME_LEVEL * s.rising[link]:
                s.full[link] = 1
        kept = 0
        for i in range(rising):
            whole = s.flows[i]
            if crosses_full(s, whole, search):
                stop(s, whole, level, search)
                set_rate(s, whole, level, now)
            else:
                s.flows[kept] = whole
                kept += 1
        rising = kept


def lowest_full(state: Fluid, level: float) -> float:
    """The rate, at least `level`, at which the first of the listed links is full."""
    s = state
    lowest = 1e308
    for k in range(s.counts[LINKS]):
        link = s.crossed[k]
        if s.risers[link] > 0 and s.slack[link] < lowest * s.rising[link]:
            lowest = s.slack[link] / s.rising[link]
    return max(lowest, level)


def stop(state: Fluid, whole: int, rate: float, search: int) -> None:
    """Keep a flow at `rate` while the others rise on."""
    s = state
    task = whole
    while task >= 0:
        for use in range(s.link_offsets[task], s.link_offsets[task + 1]):
            link = s.links[use]
            if s.link_found[link] == search and s.use_weights[use] > 0.0:
                s.slack[link] = max(0.0, s.slack[link] - rate * s.use_weights[use])
                s.rising[link] -= s.use_weights[use]
                s.risers[link] -= 1
        task = s.next_member[task]


def crosses_full(state: Fluid, whole: int, search: int) -> bool:
    """Whether a flow crosses a link that is full."""
    s = state
    task = whole
    while task >= 0:
        for use in range(s.link_offsets[task], s.link_offsets[task + 1]):
            link = s.links[use]
            if s.link_found[link] == search and s.full[link] == 1 and s.use_weights[use] > 0.0:
                return True
        task = s.next_member[task]
    return False


def set_rate(state: Fluid, whole: int, rate: float, now: float) -> None:
    """Let a whole go on at another rate, and set the time of its end by it."""
    s = state
    if rate != s.rate[whole]:
        left = max(0.0, s.left[whole] - s.rate[whole] * (now - s.since[whole]))
        s.left[whole] = left
        s.since[whole] = now
        s.rate[whole] = rate
        set_key(s, whole, now + left / rate)


def set_key(state: Fluid, whole: int, time: float) -> None:
    """Put a whole into the heap, or move it there; at equal times the lower number comes first."""
    s = state
    s.key[whole] = time
    place = s.place[whole]
    if place < 0:
        place = s.counts[HEAP]
        s.counts[HEAP] += 1
    while place > 0:
        parent = (place - 1) >> 1
        above = s.heap[parent]
        if s.key[above] < time or (s.key[above] == time and above < whole):
            break
        s.heap[place] = above
        s.place[above] = place
        place = parent
    sink(s, whole, place)


def heap_pop(state: Fluid) -> None:
    """Take the first whole out of the heap."""
    s = state
    s.place[s.heap[0]] = -1
    s.counts[HEAP] -= 1
    if s.counts[HEAP] > 0:
        sink(s, s.heap[s.counts[HEAP]], 0)


def sink(state: Fluid, whole: int, place: int) -> None:
    """Put a whole at a place of the heap or as far below it as it belongs."""
    s = state
    size = s.counts[HEAP]
    time = s.key[whole]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        below = s.heap[child]
        if child + 1 < size:
            right = s.heap[child + 1]
            if s.key[right] < s.key[below] or (s.key[right] == s.key[below] and right < below):
                child += 1
                below = right
        if time < s.key[below] or (time == s.key[below] and whole < below):
            break
        s.heap[place] = below
        s.place[below] = place
        place = child
    s.heap[place] = whole
    s.place[whole] = place
