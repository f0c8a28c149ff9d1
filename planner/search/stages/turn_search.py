"""Several chunks a rank: exactly on a short chain, among listed cuts of unlike units, by rule of thumb on a long one.

*Long chains.* How much turns of unequal length cost, or save, no recurrence over cuts tells. Of the cuts whose turns
take about the least the best is therefore found among few: one with long turns first and one with long turns last, in
both of which chunks are as equal as that leaves them. Chunks of a rank share its memory: some of its equal units run in
a fast way, others in one that keeps less. As few of them keep less as let the others be fast: first those with the most
micro-batches in flight, of these the first ones, so that turns in which ranks compute again come together. Which two
ways are mixed, and whether the other units are fast or keep least, is told by the turns.

*Short chains.* What one chunk may take depends on what the other chunks of its rank have taken, so that the state of
the recurrence holds the memory of every rank. That is affordable for few units alone (`exact_turns`).

*Unlike units.* Every cut is listed with the least that its chunks take (`planner.search.stages.chain_bound`). For those
that take least the ways of the units follow by dynamic programming over their boundary states: weights of the ranks,
which grow where a rank is busier than others, price its seconds, and where memory binds a byte has a price as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.chain_bound import cheapest_rows, listed_cuts, listed_s
from planner.search.stages.cutting import cut_turns
from planner.search.stages.fragments import (
    ACTIVATION,
    BACKLOG,
    FILL,
    QUEUE,
    RESIDENT,
    STEADY,
    TRANSIENT,
    FloatArray,
    Fragments,
    IntArray,
    dominated,
)
from planner.search.stages.segments import ROUNDING, BoolArray, Picks, Segments, made, objective_s, unlimited_s
from planner.search.stages.task import Partition, PartitionTask, memory_bytes, step_s

_WAYS = 6
"""Most ways of the most frequent unit that are mixed."""
_LESS = 0.95
"""How much less than the one before each of them keeps."""


class Share(NamedTuple):
    """Bytes (chunks,) that may stand in each chunk, and those that may stand besides while a unit goes backward."""

    standing: FloatArray
    transient: float


def shares(task: PartitionTask, ends: Sequence[int]) -> Iterator[Share]:
    """What chunks may take where they have these ``ends``, mixtures whose turns take least first.

    Where units fit in no mixture, chunks share what there is in proportion to what they keep at least.
    """
    units = _SharedUnits(task, ends)
    ways = _usual(task.kinds[units.most].values)
    pairs = np.array(list(combinations(ways, 2)) or [(ways[0], ways[0])])
    mixtures = [_Mixtures(units, pairs, fastest) for fastest in (True, False)]
    turns_s, fits = (np.concatenate([getattr(m, name) for m in mixtures]) for name in ("turns_s", "fits"))
    for number in np.argsort(np.where(fits, turns_s, np.inf), kind="stable")[: int(fits.sum())].tolist():
        yield mixtures[number // len(pairs)].share(number % len(pairs))
    if not fits.any():
        least = [float(kind.values[:, TRANSIENT].min()) for kind in task.kinds]
        yield units.filled(units.of_chunks(units.values_of(fastest=False)[0]), max(least))


def _usual(block: FloatArray) -> list[FloatArray]:
    """Ways (values) of the most frequent unit: the fastest, some that keep less, and the one that keeps least."""
    order = np.lexsort((block[:, ACTIVATION], block[:, STEADY]))
    lowest = np.minimum.accumulate(block[order, ACTIVATION])
    front = order[np.concatenate(([True], lowest[1:] < _LESS * lowest[:-1]))][: _WAYS - 1].tolist()
    return [block[way] for way in dict.fromkeys([*front, int(order[block[order, ACTIVATION].argmin()])])]


class _SharedUnits:
    """All units in given chunks, of which those of the most frequent kind are mixed."""

    def __init__(self, task: PartitionTask, ends: Sequence[int]) -> None:
        self.task, self.most = task, int(np.argmax(task.counts))
        self.chunk: IntArray = np.repeat(np.arange(task.pieces), np.diff([0, *ends]))
        self.rank, self.flight = task.rank_of[self.chunk], task.in_flight[self.chunk]
        self.kind: IntArray = np.repeat(np.arange(len(task.kinds)), task.counts)
        self.mixed: IntArray = np.flatnonzero(self.kind == self.most)

    def values_of(self, *, fastest: bool) -> tuple[FloatArray, FloatArray, float]:
        """Bytes and seconds (units,) of each in its fastest way or in that which keeps least; transient bytes.

        The latter are those of the units that are not mixed.
        """
        kept, seconds, once = np.zeros(self.task.units), np.zeros(self.task.units), 0.0
        for number, ways in enumerate(self.task.kinds):
            inside, v = self.kind == number, ways.values
            needed = self.flight[inside, None] * v[:, ACTIVATION] + v[:, RESIDENT]
            busy = v[:, [FILL, STEADY]].sum(axis=1)
            picks = np.full(len(needed), busy.argmin()) if fastest else needed.argmin(axis=1)
            kept[inside], seconds[inside] = needed[np.arange(len(needed)), picks], busy[picks]
            if number != self.most:
                once = max(once, float(v[picks, TRANSIENT].max()))
        return kept, seconds, once

    def of_chunks(self, kept: FloatArray) -> FloatArray:
        """(chunks,) sums of bytes (units,)."""
        sums: FloatArray = np.bincount(self.chunk, kept, self.task.pieces).astype(np.float64)
        return sums

    def filled(self, standing: FloatArray, transient: float) -> Share:
        """Shares in proportion to bytes (chunks,) that fill every rank."""
        task = self.task
        whole = np.bincount(task.rank_of, standing, task.ranks)
        room = max(task.limit_bytes - transient, 0.0)
        shared: FloatArray = standing * (room / np.maximum(whole, 1e-30))[task.rank_of]
        return Share(shared, transient)


class _Mixtures:
    """Mixtures of pairs of ways (pairs, 2, 7) with the others in their fastest ways, or in those that keep least.

    Attributes
    ----------
    kept : (pairs, units) bytes
    turns_s : (pairs,) sum over turns of the longest chunk's time
    fits : (pairs,) whether all ranks have room
    """

    def __init__(self, units: _SharedUnits, pairs: FloatArray, fastest: bool) -> None:
        self.units, task, mixed = units, units.task, units.mixed
        kept, seconds, once = units.values_of(fastest=fastest)
        fast, slow = pairs.transpose(1, 0, 2)
        self.transient = np.maximum(pairs[:, :, TRANSIENT].max(axis=1), once)
        room = task.limit_bytes - self.transient[:, None]
        flight, rank = units.flight[mixed], units.rank[mixed]
        self.fast = units.values_of(fastest=True)[0]
        self.kept = np.tile(kept, (len(pairs), 1))
        self.kept[:, mixed] = flight * fast[:, [ACTIVATION]] + fast[:, [RESIDENT]]
        saved = self.kept[:, mixed] - flight * slow[:, [ACTIVATION]] - slow[:, [RESIDENT]]
        of_ranks = units.rank[:, None] == np.arange(task.ranks)
        order = np.lexsort((-flight, rank))
        before = np.cumsum(saved[:, order], axis=1) - saved[:, order]
        first = np.searchsorted(rank[order], rank[order])
        late = np.zeros_like(saved)
        late[:, order] = before - before[:, first] < (self.kept @ of_ranks - room)[:, rank[order]]
        self.kept[:, mixed] -= late * saved
        self.fits = np.all(self.kept @ of_ranks <= room, axis=1)
        busy = np.tile(seconds, (len(pairs), 1))
        fast_s, slow_s = (way[:, [FILL, STEADY]].sum(axis=1)[:, None] for way in (fast, slow))
        busy[:, mixed] = fast_s + late * (slow_s - fast_s)
        chunks = busy @ (units.chunk[:, None] == np.arange(task.pieces))
        self.turns_s = chunks.reshape(len(pairs), task.chunks, task.ranks).max(axis=2).sum(axis=1)

    def share(self, pair: int) -> Share:
        """What chunks may take, so that ranks are full: units of which least are in flight are fast first."""
        units, task = self.units, self.units.task
        standing, most = units.of_chunks(self.kept[pair]), units.of_chunks(self.fast)
        spare = task.limit_bytes - self.transient[pair] - np.bincount(task.rank_of, standing, task.ranks)
        for chunk in np.lexsort((-np.arange(task.pieces), task.in_flight)).tolist():
            rank = task.rank_of[chunk]
            given = min(float(spare[rank]), max(float(most[chunk] - standing[chunk]), 0.0))
            standing[chunk] += given
            spare[rank] -= given
        return units.filled(standing, float(self.transient[pair]))


class Manner(NamedTuple):
    """What a cut is to cost: so much of the longest chunk of each turn, and the rest of the mean of its chunks.

    ``equal`` is what the squares of their times count besides, and the last turn counts by ``tilt`` more.
    """

    longest: float
    equal: float
    tilt: float


MANNERS = (Manner(1.0, 0.03, 0.01), Manner(0.2, 0.1, -0.05))
LIMITS = 40
"""About the most limits on a turn that are told apart."""


def search_turns(segments: Segments) -> Partition | None:
    """The best partition found without a memory limit, with a bound on all, whatever turns of unequal length cost."""
    found = _picks(segments, Share(np.full(segments.task.pieces, np.inf), np.inf), MANNERS)
    if not found:
        return None
    best = min(found, key=lambda picks: objective_s(segments, picks))
    return made(segments, best, unlimited_s(segments))


def search_limited(segments: Segments, ends: Sequence[int]) -> Partition | None:
    """A partition within the memory limit, which chunks share as ones with these ``ends`` would; bounded likewise."""
    for share in shares(segments.task, ends):
        for picks in _picks(segments, share, MANNERS[:1]):
            return made(segments, picks, unlimited_s(segments))
    return None


def _picks(segments: Segments, share: Share, manners: Sequence[Manner]) -> list[Picks]:
    """Rows that cost least in each manner, each chunk with its share of the memory; none where there are none."""
    task, busy = segments.task, segments.busy
    allowed, which = segments.allowed_of(share.standing, share.transient)
    limits = _limits(segments, np.logical_or.reduce(allowed, axis=0))
    if not len(limits):
        return []
    longest, equal, tilt = np.array(manners).T[:, :, None]
    costs = segments.fill + ((1 - longest) + equal * busy / (segments.share_s / task.chunks)) * busy / task.ranks
    within = busy <= limits[:, None] * (1 + ROUNDING)
    tables = np.where(allowed[:, None, None] & within, costs[:, None], np.inf)
    later = 1 + tilt * np.arange(task.chunks)[:, None, None] / task.chunks
    return cut_turns(segments, tables, which, longest * later * limits) or []


def _limits(segments: Segments, usable: BoolArray) -> FloatArray:
    """Limits on the longest chunk of a turn: the least time of every group, and others between."""
    busy = np.where(usable, segments.busy, np.inf)
    least = np.minimum.reduceat(busy, segments.offsets)
    rest = np.unique(busy[np.isfinite(busy)])
    limits: FloatArray = np.unique(np.concatenate([least[np.isfinite(least)], rest[:: 1 + len(rest) // LIMITS]]))
    return limits


SHORT = 12
"""Most units of a chain that is partitioned exactly."""
MOST = 3_000
"""Most partial partitions between the same states."""


@dataclass(frozen=True, slots=True, eq=False)
class _Partial:
    """Partitions of the first units.

    Attributes
    ----------
    values : (n, 2 + 2 ranks) seconds but for the turn under way, seconds of its longest chunk, bytes that stand on
        every rank, bytes that stand there while a unit goes backward
    picks : (n, chunks) rows picked so far
    """

    values: FloatArray
    picks: NDArray[np.int64]


def exact_turns(segments: Segments) -> tuple[list[int] | None, bool]:
    """Rows of the table for every chunk with the least fill and turns, None where none fits; and whether that is sure.

    It is not where too many partial partitions do not beat one another.
    """
    task = segments.task
    start = np.zeros((1, 2 + 2 * task.ranks))
    found = {(0, 0): _Partial(start, np.zeros((1, 0), dtype=np.int64))}
    for chunk in range(task.pieces):
        reached: dict[tuple[int, int], list[_Partial]] = {}
        for group in segments.groups:
            for unit in group.starts:
                before = found.get((unit, group.entry))
                if before is not None:
                    after = _extended(segments, chunk, before, np.arange(group.first, group.last))
                    reached.setdefault((unit + group.length, group.exit), []).append(after)
        found = {}
        for place, parts in reached.items():
            values = np.concatenate([part.values for part in parts])
            if len(values) > MOST:
                return None, False
            order = np.lexsort(values.T[::-1])
            order = order[~dominated(values[order])]
            found[place] = _Partial(values[order], np.concatenate([part.picks for part in parts])[order])
    whole = found.get((task.units, 0))
    if whole is None or not len(whole.values):
        return None, True
    return [int(row) for row in whole.picks[int(np.argmin(whole.values[:, 0]))]], True


def _extended(segments: Segments, chunk: int, before: _Partial, rows: NDArray[np.int64]) -> _Partial:
    """Every partition with every row behind it, as far as the chunk's rank has the memory."""
    task, table = segments.task, segments.values
    rank = int(task.rank_of[chunk])
    which, row = np.repeat(np.arange(len(before.values)), len(rows)), np.tile(rows, len(before.values))
    values = before.values[which].copy()
    values[:, 0] += segments.fill[row]
    values[:, 1] = np.maximum(values[:, 1], segments.busy[row])
    if (chunk + 1) % task.ranks == 0:
        values[:, 0] += values[:, 1]
        values[:, 1] = 0.0
    standing, transient = 2 + rank, 2 + task.ranks + rank
    values[:, standing] += task.in_flight[chunk] * table[row, ACTIVATION] + table[row, RESIDENT]
    values[:, transient] = np.maximum(values[:, transient], table[row, TRANSIENT])
    fits = values[:, standing] + values[:, transient] <= task.limit_bytes * (1 + ROUNDING)
    picks = np.concatenate([before.picks[which[fits]], row[fits, None]], axis=1)
    return _Partial(values[fits], picks)


LISTED = 48
"""Cuts with the least bounds whose turns are looked at."""
TRIED = 6
"""Of these, cuts for which ways are chosen."""
MOVES = 8
"""How often the weights of the ranks are moved."""
WEIGHT_STEP = 2.0
"""How much more a rank counts that is busy for twice the mean."""
_PRICES = np.geomspace(1e-3, 1e2, 11)
"""Prices of all bytes of the greediest unit, in seconds of the longest, that are tried where memory binds."""


def listed_partition(task: PartitionTask) -> Partition | None:
    """A partition of a chain whose cuts are few; None where none was found that fits.

    Its bound is the least of all cuts, memory and what turns of unequal length cost aside.
    """
    busy, fill = cheapest_rows(task)
    first, last = listed_cuts(task.units, task.pieces)
    seconds = np.where(_allowed(task, last), listed_s(busy, fill, task.rank_of, task.uneven_s is None), np.inf)
    order = np.argsort(seconds, kind="stable")[:LISTED]
    order = order[np.isfinite(seconds[order])]
    hoped = []
    for cut in order.tolist():
        place = (first[:, cut], last[:, cut])
        hoped.append(max(seconds[cut], step_s(task, fill[place], busy[place], fill[place] + busy[place])))
    best: Partition | None = None
    chain = _Chain(task)
    for number in np.argsort(hoped, kind="stable")[:TRIED].tolist():
        if best is not None and hoped[number] >= best.objective_s:
            break
        for found in chain.partitions(first[:, order[number]].tolist(), float(seconds.min())):
            if best is None or found.objective_s < best.objective_s:
                best = found
    return best


def _allowed(task: PartitionTask, last: IntArray) -> NDArray[np.bool_]:
    """(cuts,) those that pins leave."""
    allowed = np.ones(last.shape[1], dtype=np.bool_)
    for cut, places in enumerate(task.cuts):
        allowed &= (last[cut] + 1 >= places.start) & (last[cut] + 1 < places.stop)
    return allowed


class _Chain:
    """Units one by one, and ways to run them for given cuts."""

    def __init__(self, task: PartitionTask) -> None:
        self.task = task
        states = np.unique(np.concatenate([[-1], *(side for k in task.kinds for side in (k.entry, k.exit))]))
        self.width = len(states)
        self.kinds: list[Fragments] = [k for k, n in zip(task.kinds, task.counts, strict=True) for _ in range(n)]
        places = {id(k): (np.searchsorted(states, k.entry), np.searchsorted(states, k.exit)) for k in task.kinds}
        self.places = [places[id(kind)] for kind in self.kinds]
        seconds = max(float(np.ptp(kind.values[:, [FILL, STEADY]].sum(axis=1))) for kind in task.kinds)
        held = max(float(np.ptp(kind.values[:, ACTIVATION])) for kind in task.kinds)
        self.price = seconds / held if held > 0 else 0.0

    def partitions(self, begins: Sequence[int], bound_s: float) -> Iterator[Partition]:
        """Partitions that fit with chunks that begin at those units."""
        task = self.task
        for price in (0.0, *(self.price * _PRICES)):
            weights, any_fits = np.full(task.ranks, 1.0 / task.ranks), False
            for _ in range(MOVES):
                ways = self._ways(begins, weights, price)
                if ways is None:
                    return
                values = self._values(begins, ways)
                if np.all(memory_bytes(task, values) <= task.limit_bytes * (1 + ROUNDING)):
                    any_fits = True
                    yield self._made(begins, ways, values, bound_s)
                busy = np.bincount(task.rank_of, _busy(values), task.ranks)
                weights = weights * (busy / max(float(busy.mean()), 1e-30)) ** WEIGHT_STEP
                weights /= max(float(weights.sum()), 1e-30)
            if any_fits or (not price and not self.price):
                return

    def _ways(self, begins: Sequence[int], weights: FloatArray, price: float) -> list[int] | None:
        """Way of every unit with the least weighted seconds and priced bytes."""
        task = self.task
        reached, picks = np.full(self.width, np.inf), []
        reached[0] = 0.0
        chunk = -1
        for unit, (kind, (entry, leave)) in enumerate(zip(self.kinds, self.places, strict=True)):
            begin = chunk + 1 < len(begins) and begins[chunk + 1] == unit
            chunk += begin
            weight, flight = float(weights[task.rank_of[chunk]]), float(task.in_flight[chunk])
            v = kind.values
            cost = v[:, FILL] + weight * v[:, STEADY] + price * (flight * v[:, ACTIVATION] + v[:, RESIDENT])
            if begin:
                cost = cost + weight * np.maximum(v[:, QUEUE], 0.0)
                if unit:
                    sent = task.sends_s[unit - 1][kind.entry]
                    cost = cost + task.fill_sends * sent
                    cost = cost + weight * task.waits_s(sent, v[:, STEADY])
            total = reached[entry] + cost
            order = np.lexsort((total, leave))
            states, where = np.unique(leave[order], return_index=True)
            reached, pick = np.full(self.width, np.inf), np.full(self.width, -1, dtype=np.int64)
            reached[states], pick[states] = total[order[where]], order[where]
            picks.append(pick)
        state, ways = 0, []
        if not np.isfinite(reached[state]):
            return None
        for pick, (entry, _) in zip(reversed(picks), reversed(self.places), strict=True):
            ways.append(int(pick[state]))
            state = int(entry[ways[-1]])
        return ways[::-1]

    def _values(self, begins: Sequence[int], ways: Sequence[int]) -> FloatArray:
        """(chunks, 7) values of the chunks, the messages at their begin included."""
        task, found = self.task, []
        for begin, end in zip(begins, [*begins[1:], task.units], strict=True):
            units = np.array([self.kinds[unit].values[ways[unit]] for unit in range(begin, end)])
            values = units.sum(axis=0)
            behind = np.concatenate([[0.0], np.cumsum(units[:-1, BACKLOG])])
            values[QUEUE] = float((behind + units[:, QUEUE]).max())
            values[TRANSIENT] = float(units[:, TRANSIENT].max())
            if begin:
                sent = float(task.sends_s[begin - 1][self.kinds[begin].entry[ways[begin]]])
                values[FILL] += task.fill_sends * sent
                values[STEADY] += task.waits_s(sent, values[STEADY])
            found.append(values)
        return np.array(found)

    def _made(self, begins: Sequence[int], ways: Sequence[int], values: FloatArray, bound_s: float) -> Partition:
        task, busy = self.task, _busy(values)
        objective = step_s(task, values[:, FILL], busy, values[:, [FILL, STEADY]].sum(axis=1))
        return Partition(
            ends=(*begins[1:], task.units),
            labels=tuple(int(kind.labels[way, 0]) for kind, way in zip(self.kinds, ways, strict=True)),
            objective_s=objective,
            lower_bound_s=min(bound_s, objective),
            fill_s=values[:, FILL],
            busy_s=busy,
            memory_bytes=memory_bytes(task, values),
        )


def _busy(values: FloatArray) -> FloatArray:
    busy: FloatArray = values[:, STEADY] + np.maximum(values[:, QUEUE], 0.0)
    return busy
