"""How a tensor gets from one placement to another: the one path that is costed, simulated and executed."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.sharding.placement import PARTIAL, REPLICATE, Placement, Placements
from simulator.program import Collective

_NOMINAL_SIZE = 8.0
_STEP_COST = 1e-3


@dataclass(frozen=True, slots=True)
class Step:
    """One move along one mesh axis.

    ``operation`` is a collective, ``"slice"`` (replicated to sharded: keep one's own chunk) or
    ``"mask"`` (replicated to partial: zero on every rank but the first). ``sharded_axes`` are the
    mesh axes that divide the larger of the tensor before and after the move, which is the payload.
    """

    operation: Collective | Literal["slice", "mask"]
    axis: int
    before: Placements
    after: Placements
    sharded_axes: tuple[int, ...]

    @property
    def gather_dim(self) -> int:
        """Dim along which chunks are concatenated, −1 where none is."""
        return max(self.before[self.axis], REPLICATE)

    @property
    def split_dim(self) -> int:
        """Dim along which chunks are cut, −1 where none is."""
        return max(self.after[self.axis], REPLICATE)


def _operation(source: Placement, target: Placement, all_to_all: bool) -> Collective | Literal["slice", "mask"] | None:
    if source == PARTIAL:
        return Collective.ALL_REDUCE if target == REPLICATE else Collective.REDUCE_SCATTER
    if source == REPLICATE:
        return "mask" if target == PARTIAL else "slice"
    if target == REPLICATE:
        return Collective.ALL_GATHER
    return Collective.ALL_TO_ALL if all_to_all and target != PARTIAL else None


def _keeps_nesting(state: Placements, axis: int, target: Placement) -> bool:
    """Whether chunks stay nested outer axis first: no inner axis may shard a dim that the move touches."""
    touched = {p for p in (state[axis], target) if p >= 0}
    return not any(placement in touched for placement in state[axis + 1 :])


@cache
def _step(state: Placements, axis: int, target: Placement, all_to_all: bool) -> tuple[Step, float] | None:
    """A step and what `_volume` says of it; None where there is none."""
    operation = _operation(state[axis], target, all_to_all)
    if operation is None or not _keeps_nesting(state, axis, target):
        return None
    after = (*state[:axis], target, *state[axis + 1 :])
    divided = state if operation is Collective.ALL_TO_ALL else (*state[:axis], REPLICATE, *state[axis + 1 :])
    sharded = tuple(i for i, placement in enumerate(divided) if placement >= 0)
    step = Step(operation, axis, state, after, sharded)
    return step, _volume(step)


def _divides(state: Placements, source: Placements, target: Placements) -> bool:
    """Whether every dim is cut along some of the axes that cut it in `source`, or some of those in `target`."""
    unlike_source = {here for here, before in zip(state, source, strict=True) if here != before and here >= 0}
    return not unlike_source or unlike_source.isdisjoint(
        [here for here, after in zip(state, target, strict=True) if here != after and here >= 0]
    )


def _volume(step: Step) -> float:
    """Rank the paths: bytes on the wire as a share of the tensor, on axes of a nominal size."""
    if step.operation in ("slice", "mask"):
        return _STEP_COST
    passes = 2.0 if step.operation is Collective.ALL_REDUCE else 1.0
    return _STEP_COST + float(passes * _NOMINAL_SIZE ** -len(step.sharded_axes))


@cache
def redistribution(source: Placements, target: Placements, all_to_all: bool = True) -> tuple[Step, ...] | None:
    """Find the steps that move least, or None where there is no way.

    A step changes one axis, to its target or to replicated, and no dim is ever cut along other axes
    than in source or in target, so every tensor in between divides where those two do. Nothing sharded
    becomes partial; a replicated tensor may, masked to one rank. Without `all_to_all` a tensor that is to be cut along
    another dim is gathered, and every rank keeps its chunk.

    >>> [str(step.operation) for step in redistribution((0, 0), (-1, 0))]
    ['all_gather', 'all_gather', 'slice']
    >>> [str(step.operation) for step in redistribution((-2,), (1,))]
    ['reduce_scatter']
    >>> [str(step.operation) for step in redistribution((0,), (1,), all_to_all=False)]
    ['all_gather', 'slice']
    """
    goals = [(goal,) if goal in (PARTIAL, REPLICATE) else (goal, REPLICATE) for goal in target]
    queue: list[tuple[float, int, Placements, tuple[Step, ...]]] = [(0.0, 0, source, ())]
    done: set[Placements] = set()
    serial = 0
    while queue:
        cost, _, state, path = heapq.heappop(queue)
        if state == target:
            return path
        if state in done:
            continue
        done.add(state)
        for axis, wanted in enumerate(goals):
            for goal in wanted:
                found = None if goal == state[axis] else _step(state, axis, goal, all_to_all)
                if found is not None and _divides(found[0].after, source, target):
                    step, volume = found
                    serial += 1
                    heapq.heappush(queue, (cost + volume, serial, step.after, (*path, step)))
    return None


@cache
def placements_of_rank(rank: int, axes: int) -> tuple[Placements, ...]:
    """Every placement of a tensor with `rank` dims on a mesh with `axes` axes, in `placement_index` order."""
    return tuple(product(range(PARTIAL, rank), repeat=axes))


def placement_index(placements: NDArray[np.int64], rank: int) -> NDArray[np.int64]:
    """Position of placements in `placements_of_rank`.

    Parameters
    ----------
    placements : array, shape (axes, states)
    rank : int
        Number of tensor dims.

    Returns
    -------
    array, shape (states,)
    """
    index = np.zeros(placements.shape[1], dtype=np.int64)
    for row in placements:
        index = index * (rank + 2) + (row - PARTIAL)
    return index


@dataclass(frozen=True, slots=True)
class StepTable:
    """The steps between all placements of one tensor rank, as arrays.

    ``kinds[k]`` are the distinct ``(collective, axis, sharded_axes)`` of all messages; ``steps[p, q, i]`` indexes them,
    with ``len(kinds)`` for no step. ``pieces[k]`` are the distinct axes that cut what a slice or a mask writes, and
    ``copies[p, q, i]`` indexes those alike. ``possible[p, q]`` says whether there is a way from placement p to q.
    """

    kinds: tuple[tuple[Collective, int, tuple[int, ...]], ...]
    steps: NDArray[np.int64]
    pieces: tuple[tuple[int, ...], ...]
    copies: NDArray[np.int64]
    possible: NDArray[np.bool_]


@cache
def step_table(rank: int, axes: int) -> StepTable:
    """Tabulate `redistribution` for tensors with `rank` dims: messages, and the slices and masks between them."""
    states = np.array(placements_of_rank(rank, axes), dtype=np.int64).reshape((rank + 2) ** axes, axes)
    count = len(states)
    pairs = np.hstack((np.repeat(states, count, axis=0), np.tile(states, (count, 1))))
    patterns, which = _patterns(pairs)
    kinds: dict[tuple[Collective, int, tuple[int, ...]], int] = {}
    pieces: dict[tuple[int, ...], int] = {}
    messages: list[list[int]] = []
    copies: list[list[int]] = []
    ways = [redistribution(pattern[:axes], pattern[axes:]) for pattern in patterns]
    for way in ways:
        moves = [(s.operation, s.axis, s.sharded_axes) for s in way or () if isinstance(s.operation, Collective)]
        local = [step.after for step in way or () if not isinstance(step.operation, Collective)]
        cuts = [tuple(axis for axis, placement in enumerate(after) if placement >= 0) for after in local]
        messages.append([kinds.setdefault(move, len(kinds)) for move in moves])
        copies.append([pieces.setdefault(cut, len(pieces)) for cut in cuts])
    possible = np.array([way is not None for way in ways])
    return StepTable(
        kinds=tuple(kinds),
        steps=_padded(messages, len(kinds))[which].reshape(count, count, -1),
        pieces=tuple(pieces),
        copies=_padded(copies, len(pieces))[which].reshape(count, count, -1),
        possible=possible[which].reshape(count, count),
    )


def _padded(rows: Sequence[Sequence[int]], nothing: int) -> NDArray[np.int64]:
    """Rows of unequal length as an array that `nothing` fills up, at least one column wide."""
    width = max(1, *map(len, rows))
    return np.array([[*row, *[nothing] * (width - len(row))] for row in rows], dtype=np.int64)


def _patterns(pairs: NDArray[np.int64]) -> tuple[list[Placements], NDArray[np.intp]]:
    """Pairs of placements that differ in the names of dims alone: one of each, and which each pair is like.

    The way from one placement to another only asks which axes cut the same dim. A pattern names a dim by the first
    place at which it stands; `pairs` has shape ``(pairs, places)``.
    """
    named = pairs.copy()
    for place in range(pairs.shape[1] - 1, -1, -1):
        same = (pairs == pairs[:, place : place + 1]) & (pairs >= 0)
        named[same] = place
    code = np.zeros(len(named), dtype=np.int64)
    for column in named.T:
        code = code * (pairs.shape[1] + 2) + (column - PARTIAL)
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return [tuple(pattern) for pattern in named[first].tolist()], which
