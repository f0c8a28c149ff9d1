"""The problem of cutting units into pipeline stages, simpler forms of it, and its solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from planner.search.stages.fragments import (
    ACTIVATION,
    RESIDENT,
    TRANSIENT,
    Criteria,
    FloatArray,
    Fragments,
    IntArray,
    pruned,
    thinned,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionTask:
    """Units to cut into pipeline stages.

    Attributes
    ----------
    kinds, counts : ways to run a unit of each kind, and how many of them stand in a row, in the order of the network
    sends_s : (units - 1, states) seconds of the messages over a cut behind each unit in each boundary state, both
        directions, one micro-batch
    fill_sends, steady_sends : how often the fill and the rank behind the cut pay for them
    still_sends : how many of the latter stop its kernels, so that nothing hides them
    hidden_share : part of a rank's own time behind which the other messages of later micro-batches hide
    ranks, chunks : pipeline ranks, and chunks of each
    rank_of : (ranks * chunks,) rank of each chunk in the order of the network
    in_flight : (ranks * chunks,) micro-batches whose activations a chunk keeps at most
    limit_bytes : memory of one rank
    uneven_s : what turns of unequal length add to the step, from the seconds (ranks * chunks,) of all passes of each
        chunk; None where a rank has one chunk
    cuts : for each cut between chunks the numbers of units that may lie before it; empty where cuts are free
    apart_s : seconds of the step of a partition, never less than its objective, where the schedule does all forward
        passes before the backward passes and each of the two may have its slowest rank, or ranks stand still while
        they send over links of their own; None elsewhere
    """

    kinds: tuple[Fragments, ...]
    counts: tuple[int, ...]
    sends_s: FloatArray
    fill_sends: float
    steady_sends: float
    ranks: int
    chunks: int
    rank_of: IntArray
    in_flight: FloatArray
    limit_bytes: float
    hidden_share: float = 0.0
    still_sends: float = 0.0
    uneven_s: Callable[[FloatArray], float] | None = None
    cuts: tuple[range, ...] = ()
    apart_s: Callable[[Partition], float] | None = None

    @property
    def units(self) -> int:
        """Units of the whole network."""
        return sum(self.counts)

    @property
    def pieces(self) -> int:
        """Chunks of all ranks."""
        return self.ranks * self.chunks

    @property
    def roomy(self) -> bool:
        """Whether one rank could hold the whole network however it runs: then no limit on memory binds."""
        if np.isinf(self.limit_bytes):
            return True
        flight = float(self.in_flight.max())
        held = [float((flight * k.values[:, ACTIVATION] + k.values[:, RESIDENT]).max()) for k in self.kinds]
        once = max(float(kind.values[:, TRANSIENT].max()) for kind in self.kinds)
        return once + sum(n * size for n, size in zip(self.counts, held, strict=True)) <= self.limit_bytes

    def waits_s(self, sent_s: FloatArray | float, own_s: FloatArray | float) -> FloatArray:
        """Seconds by which messages over the cut before a chunk make the `own_s` of its rank longer."""
        hides = (self.steady_sends - self.still_sends) * sent_s - self.hidden_share * own_s
        return np.asarray(self.still_sends * sent_s + np.maximum(hides, 0.0))

    @property
    def criteria(self) -> Criteria:
        """By what ways of consecutive units compete."""
        return Criteria(hidden_share=self.hidden_share, memory=not self.roomy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Cuts and labels.

    Attributes
    ----------
    ends : (chunks,) number of units up to the end of each chunk
    labels : (units,) label of every unit
    objective_s, lower_bound_s : seconds; the bound holds for every partition of the task
    fill_s, busy_s : (chunks,) both terms of the objective
    memory_bytes : (ranks,)
    exact : whether no way of a fragment was left out: then more of them find nothing else
    """

    ends: tuple[int, ...]
    labels: tuple[int, ...]
    objective_s: float
    lower_bound_s: float
    fill_s: FloatArray
    busy_s: FloatArray
    memory_bytes: FloatArray
    exact: bool = False


MANY = 16
"""Ways of a unit up to which all of them are tried."""
FEW = 5
"""Ways between two boundary states that are tried otherwise."""


@lru_cache(maxsize=4)
def simplified(task: PartitionTask) -> PartitionTask:
    """The same with few ways of each unit, in the boundary states that serve the most frequent unit best.

    These are the state in which it is fastest and the one in which it keeps least from forward to backward. One rank
    takes all ways (`planner.search.stages.one_rank`).
    """
    if task.pieces == 1 or max(len(kind) for kind in task.kinds) <= MANY:
        return task
    task, most = undominated(task), int(np.argmax(task.counts))
    if max(len(kind) for kind in task.kinds) <= MANY:
        return task
    block = task.kinds[most]
    same = np.flatnonzero(block.entry == block.exit) if task.counts[most] > 1 else np.arange(len(block))
    time, kept = block.busy[same], block.values[same, ACTIVATION]
    first = [same[np.lexsort(keys)[0]] for keys in ((kept, time), (time, kept)) if len(same)]
    states = {int(block.exit[way]) for way in first} or set(block.exit.tolist())
    kinds = tuple(thinned(kind, frozenset(states), FEW) for kind in task.kinds)
    return replace(task, kinds=kinds) if all(len(kind) for kind in kinds) else task


@lru_cache(maxsize=4)
def undominated(task: PartitionTask) -> PartitionTask:
    """The same without ways that another one beats in everything; the task itself where there are none."""
    if task.pieces == 1:
        return task
    kinds = _pruned_kinds(task)
    fewer = any(len(kept) < len(kind) for kept, kind in zip(kinds, task.kinds, strict=True))
    return replace(task, kinds=kinds) if fewer else task


def unlimited(task: PartitionTask) -> PartitionTask:
    """The same without a memory limit, and without ways that another one beats in time."""
    free = replace(task, limit_bytes=np.inf)
    return free if task.roomy else replace(free, kinds=_pruned_kinds(free))


def _pruned_kinds(task: PartitionTask) -> tuple[Fragments, ...]:
    criteria = task.criteria
    return tuple(pruned(kind, len(kind), criteria) for kind in task.kinds)


def idealised(task: PartitionTask) -> PartitionTask:
    """The same with one way of each unit between any two states, as good in everything as any: a relaxation."""
    kinds = []
    for kind in task.kinds:
        pairs = dict.fromkeys(zip(kind.entry.tolist(), kind.exit.tolist(), strict=True))
        rows = [kind.values[(kind.entry == entry) & (kind.exit == leave)].min(axis=0) for entry, leave in pairs]
        entries, exits = np.array(list(pairs), dtype=np.int64).T
        kinds.append(Fragments(np.array(rows), entries, exits, np.arange(len(rows))[:, None]))
    return replace(task, kinds=tuple(kinds), apart_s=None)


def turns_s(task: PartitionTask, fill_s: FloatArray, busy_s: FloatArray) -> float:
    """Fill and the longest chunk of each turn, from both terms (chunks,) of the objective."""
    return float(fill_s.sum() + busy_s.reshape(task.chunks, task.ranks).max(axis=1).sum())


def step_s(task: PartitionTask, fill_s: FloatArray, busy_s: FloatArray, passes_s: FloatArray) -> float:
    """Seconds of the step; turns may even out, but no rank takes less than all of its chunks.

    Parameters
    ----------
    passes_s : (chunks,) seconds of all passes of each chunk
    """
    if task.uneven_s is None:
        return turns_s(task, fill_s, busy_s)
    ranks = np.bincount(task.rank_of, busy_s, task.ranks)
    return max(turns_s(task, fill_s, busy_s) + task.uneven_s(passes_s), float(fill_s.sum() + ranks.max()))


def memory_bytes(task: PartitionTask, values: FloatArray) -> FloatArray:
    """(ranks,) bytes at the peak, from values (chunks, 7) as in `Fragments.values`."""
    standing = np.bincount(task.rank_of, task.in_flight * values[:, ACTIVATION] + values[:, RESIDENT], task.ranks)
    transient = np.zeros(task.ranks)
    np.maximum.at(transient, task.rank_of, values[:, TRANSIENT])
    memory: FloatArray = standing + transient
    return memory
