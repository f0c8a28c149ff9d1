"""What runs in a micro-batch, for which units, and parameters that are gathered ahead of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from planner.lowering.blueprint import SAME, Block, Blueprint, Gathered, Shared
from planner.lowering.copies import NOBODY
from planner.lowering.ways import Travelling, Way, moves_together
from planner.lowering.writer import Moved, Writer
from simulator.program import Phase
from simulator.task_table import IntArray


class RunWriter(Writer):
    """Writes drafts into a blueprint, and notes what runs of it.

    ``order`` holds drafts of the blueprint in threes: the first, the one behind the last, the unit they are run for.
    ``first`` says whether the micro-batch is the first of a step.
    """

    def __init__(self, blueprint: Blueprint, *, first: bool) -> None:
        super().__init__(blueprint.source)
        self.blueprint = blueprint
        self.first = first
        self.order = array("q")
        self.persistent = array("q")
        """Values that outlive a micro-batch, beside parameters, the batch and the loss, and their units, in twos."""
        self.made: dict[object, Block] = {}
        """What is run for other units again."""
        self.ways: dict[int, Way] = {}

    def _run(self, key: object, unit: int, home: int, write: Callable[..., None], *given: object) -> None:
        """Run for a unit the drafts that `write` makes the first time, of what it is given."""
        self.order.extend((*self._block(key, home, write, *given), unit))

    def _block(self, key: object, home: int, write: Callable[..., None], *given: object) -> Block:
        """The drafts that `write` makes the first time."""
        made = self.made.get(key)
        if made is None:
            before = len(self.blueprint.tasks)
            write(*given)
            for draft in self.drafts:
                self.blueprint.add(draft, home)
            self.drafts = []
            made = self.made[key] = Block(before, len(self.blueprint.tasks))
        return made

    def _run_each(self, kinds: IntArray, units: IntArray, made: Callable[[int], Block]) -> None:
        """Run for each of `units` (n,) the drafts of its kind; `made` is asked with the place of the first."""
        _, first, of = np.unique(kinds, return_index=True, return_inverse=True)
        blocks = np.zeros((len(first), 2), dtype=np.int64)
        for kind in np.argsort(first).tolist():
            blocks[kind] = made(int(first[kind]))
        self.order.frombytes(np.column_stack((blocks[of], units)).tobytes())

    def _run_once(self, unit: int, home: int, reads: Shared, writes: Shared) -> None:
        """Run the one draft just written, whose values are of several units."""
        number = self._add_shared(unit, home, reads, writes)
        self.order.extend((number, number + 1, unit))

    def _add_shared(self, unit: int, home: int, reads: Shared, writes: Shared) -> int:
        """Add the one draft just written; its values are of units that lie so from `unit` wherever else it is run."""
        return self.blueprint.add(self.drafts.pop(), home, reads, writes, SAME - unit)

    # Parameters

    def _gather_parameters(self) -> None:
        """Fetch stored shards once a step, in fused messages ahead of their use."""
        gathered = self.blueprint.gathered
        self.persistent.frombytes(np.stack((gathered.values, gathered.units), axis=1).tobytes())
        if self.first:
            self._gather_fused(gathered)

    def _gather_fused(self, gathered: Gathered) -> None:
        """Fetch parameters of all units in messages that are full at the size of a bucket."""
        limit = self.source.gather_limit(of_unit=False)
        for travelling in moves_together(self.source, gathered.wanted, gathered.which, limit, self.ways):
            own = gathered.units[travelling.numbers]
            if travelling.alone:
                self._run_each(travelling.kinds, own, partial(self._gather_alone, travelling, own))
                continue
            first = int(own[0])
            key = travelling.kinds.tobytes(), (own - first).tobytes()
            self._run(key, first, NOBODY, self._gather_together, travelling.distinct, travelling.kinds, own)

    def _gather_alone(self, travelling: Travelling, own: IntArray, place: int) -> Block:
        kind, key = travelling.kinds[place : place + 1], ("alone", int(travelling.kinds[place]))
        return self._block(key, NOBODY, self._gather_together, travelling.distinct, kind, own[place : place + 1])

    def _gather_together(self, known: Sequence[Moved], kinds: IntArray, own: IntArray) -> None:
        """Write the message of parameters of several units, or what takes its place."""
        place = {kind: number for number, kind in enumerate(dict.fromkeys(kinds.tolist()))}
        order, moves = [place[kind] for kind in kinds.tolist()], [known[kind] for kind in place]
        self._step(moves, Phase.FORWARD, asynchronous=True, order=order)
        homes = [self.blueprint.owners[ref.node] for ref, *_ in moves]
        before = [self.blueprint.value(name, home) for (_, name, _, _), home in zip(moves, homes, strict=True)]
        behind = [self.blueprint.value(name, home) for (_, _, name, _), home in zip(moves, homes, strict=True)]
        reads, made = (Shared(np.array(values)[order], own) for values in (before, behind))
        self._add_shared(int(own[0]), homes[0], reads, made)
