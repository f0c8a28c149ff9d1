"""The passes of a chunk: its units' operators in a row, parameters gathered before, gradients synchronised behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.lowering.gradient_messages import Bucket, GradientWriter
from planner.lowering.placed import PlacedGraph
from planner.lowering.together import Wanted, moves_together
from planner.lowering.unit_work import BESIDE, KERNELS, PassOperators, UnitWork
from planner.lowering.work import Work, in_turn, is_message
from planner.lowering.written import (
    Entry,
    GradientOnWay,
    Kind,
    Left,
    Message,
    PassDraft,
    Stretch,
    Stretches,
    WrittenTasks,
)
from simulator.pipeline_operators import FIRST, LAST, PLAIN, action_variants
from simulator.program import Phase
from simulator.schedules import ActionKind, Schedule

BEGIN, END = -2, -1
"""In place of an operator: the begin and the end of a unit."""

VARIANTS = {
    ActionKind.FORWARD: (PLAIN, FIRST),
    ActionKind.BACKWARD: (PLAIN, FIRST, LAST),
    ActionKind.INPUT_GRADIENT: (PLAIN,),
    ActionKind.WEIGHT_GRADIENT: (PLAIN, FIRST, LAST),
}
"""Passes of a chunk that differ: those of other micro-batches are like the plain ones."""


@dataclass(frozen=True, slots=True)
class PassesRun:
    """Passes that a schedule has: kinds with their variants, plain and of the first and the last micro-batch.

    ``alone`` says that there is a single micro-batch, which is both.
    """

    kinds: Mapping[ActionKind, tuple[int, ...]]
    alone: bool


def passes_run(schedule: Schedule, *, every: bool = True) -> PassesRun:
    """Every pass of a schedule.

    Unless `every`, those that make gradients only as the schedule runs them: with a single micro-batch none is plain.
    """
    run = {divmod(int(one), LAST + 1) for one in np.unique((LAST + 1) * schedule.kind + action_variants(schedule))}
    found = {}
    for kind in sorted({kind for kind, _ in run}):
        variants = VARIANTS[ActionKind(kind)]
        kept = tuple([one for one in variants if every or LAST not in variants or (kind, one) in run])
        found[ActionKind(kind)] = kept
    return PassesRun(found, schedule.micro_batches // schedule.chains == 1)


def chunk_drafts(
    source: PlacedGraph, work: Work, units: Sequence[UnitWork], run: PassesRun, written: WrittenTasks
) -> dict[tuple[ActionKind, int], PassDraft]:
    """Every pass of a chunk of these units."""
    back = units[::-1]
    made: dict[tuple[ActionKind, int], PassDraft] = {}
    for kind, order, parts in (
        (ActionKind.FORWARD, units, [unit.forward for unit in units]),
        (ActionKind.BACKWARD, back, [unit.backward for unit in back]),
        (ActionKind.INPUT_GRADIENT, back, [unit.inputs for unit in back]),
        (ActionKind.WEIGHT_GRADIENT, back, [unit.weights for unit in back]),
    ):
        phase = Phase.FORWARD if kind is ActionKind.FORWARD else Phase.BACKWARD
        for variant in run.kinds.get(kind, ()):
            first, last = variant == FIRST or (variant == LAST and run.alone), variant == LAST
            writer = PassWriter(source, work, order, parts, phase, written, first=first, last=last)
            made[kind, variant] = writer.write()
    return made


class PassWriter(GradientWriter):
    """Writes one pass of a chunk.

    Parameters
    ----------
    source : PlacedGraph
    work : Work
        All tasks; those of messages and accumulations are appended.
    units : sequence of UnitWork
        In the order of the pass.
    parts : sequence of Part
        What each of them does in it.
    phase : Phase
    written : Written
        What other passes have written.
    first, last : bool
        The first micro-batch gathers parameters that stay and starts accumulators; the last synchronises gradients.
    """

    def __init__(
        self,
        source: PlacedGraph,
        work: Work,
        units: Sequence[UnitWork],
        parts: Sequence[PassOperators],
        phase: Phase,
        written: WrittenTasks,
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__(source, work, units, parts, phase, written, first=first, last=last)
        self.arrivals: list[dict[str, int]] = [{} for _ in units]
        self.shared_done: set[tuple[int, int]] = set()
        self.gathers = any(operator.gathered for part in parts for operator in part.operators)

    def write(self) -> PassDraft:
        """Return the operators of the pass."""
        ahead = self.first and self.phase is Phase.FORWARD
        if self.source.by_unit or ahead or any(part.fetches for part in self.parts):
            # Kernels wait for the input of the pass even where the first of them waits for parameters.
            self.add([], KERNELS, [])
        if ahead and not self.source.by_unit:
            self._gather_ahead()
        outputs = [self._unit_by_unit()] if self.copies == 1 else self._in_turn()
        while self.pending:
            self.flush(next(iter(self.pending)))
        if self.kernel < 0:
            self.add([], KERNELS, [])
        self.draft.output = max(outputs) if max(outputs) >= 0 else self.kernel
        return self.draft

    # Units

    def _unit_by_unit(self) -> int:
        """Write the units of a micro-batch in one piece; returns the operator that yields the output."""
        output, forward = -1, self.phase is Phase.FORWARD
        stretches: Stretches = {} if self.source.fusion_groups else self.written.stretches
        asked = forward, self.gathers, not forward and self.first, not forward and self.last
        for number, part in enumerate(self.parts):
            shared = tuple([operator.shared for operator in part.operators if operator.shared >= 0])
            if self.tied.keys().isdisjoint(self.counts[id(part)]):
                following = self.units[number + 1 : number + 2] if self.source.by_unit else ()
                fetching = [part for part in self.parts[number + 1 : number + 2] if part.fetches]
                around = number == 0, id(self.units[number]), *map(id, following), *map(id, fetching)
                done = tuple([(0, node) in self.shared_done for node in shared])
                output = self._known_unit(number, output, stretches, (id(part), *asked, *around, done))
            else:
                output = self._unit(number, output)
            self.shared_done.update((0, node) for node in shared)
        return output

    def _known_unit(self, number: int, given: int, stretches: Stretches, asked: object) -> int:
        """Write a unit, or repeat what one like it has added where the pass was in the same state.

        Of the gradients that wait, only those matter that leave in messages of the unit.
        """
        arrived = self.arrivals[number]
        around = [given, self.kernel, *arrived.values()]
        known = stretches.setdefault((asked, (*arrived,), (*self.pending,)), {})
        for kinds, found in known.items():
            outside, state = self._state(around, kinds)
            if state in found and self._keeps_others(found[state], kinds):
                return self._repeat(found[state], number, outside)
        start, before, self.sent = len(self.draft.tasks), self.draft.synchronised, {}
        pending = {kind: [*bucket.entries] for kind, bucket in self.pending.items()}
        self.draft.synchronised = {}
        output = self._unit(number, given)
        kinds = (*self.sent,)
        outside, state = self._state(around, kinds, pending)
        known.setdefault(kinds, {})[state] = self._stretch(start, number, output, outside)
        self.draft.synchronised = before | self.draft.synchronised
        return output

    def _state(
        self, around: Sequence[int], kinds: Sequence[Kind], pending: Mapping[Kind, Sequence[Entry]] | None = None
    ) -> tuple[list[int], object]:
        """Different operators that a unit meets, in order; and what it meets, whatever the numbers of operators.

        These are operators ``around`` it, and gradients that wait for messages of these kinds.
        """
        if pending is None:
            pending = {kind: self.pending[kind].entries for kind in kinds if kind in self.pending}
        waiting = [pending.get(kind, ()) for kind in kinds]
        numbers = [*around, *(value.operator for entries in waiting for value, *_ in entries)]
        outside = sorted({n for n in numbers if n >= 0})
        place = {n: i for i, n in enumerate(outside)}
        what = tuple([tuple([(id(legs[0]), value.name) for value, legs, _ in entries]) for entries in waiting])
        stream = self.draft.stream
        return outside, (tuple([place.get(n, -1) for n in numbers]), tuple([stream[n] for n in outside]), what)

    def _unit(self, number: int, given: int) -> int:
        part = self.parts[number]
        place: dict[int, int] = {}
        self._gather_units(number)
        self._fetch_units(number)
        for index in range(len(part.operators)):
            self._operator(0, number, index, place, given)
        self.flush_units()
        return place[part.output] if part.output >= 0 else -1

    def _stretch(self, start: int, number: int, output: int, outside: list[int]) -> Stretch:
        """What a unit has added to the pass from operator `start` on."""

        def own(operator: int) -> int:
            return operator - start if operator >= start else ~outside.index(operator)

        left = {}
        for kind, bucket in self.pending.items():
            entries = [(value, legs, ahead) for value, legs, ahead in bucket.entries if value.operator >= start]
            left[kind] = Left(
                behind_others=len(entries) < len(bucket.entries),
                entries=tuple(
                    (value._replace(operator=own(value.operator)), legs, ahead) for value, legs, ahead in entries
                ),
                size_bytes=sum(legs[0].size_bytes for _, legs, _ in entries),
            )
        return Stretch(
            operators=self.draft.cut(start, outside),
            kernel=own(self.kernel) if self.kernel >= start else None,
            output=own(output) if output >= 0 else None,
            arrivals={
                name: own(at)
                for each in self.arrivals[number + 1 : number + 2]
                for name, at in each.items()
                if at >= start
            },
            left=left,
        )

    def _keeps_others(self, stretch: Stretch, kinds: Sequence[Kind]) -> bool:
        """Whether no message but those of these kinds leaves with what a stretch adds to what waits now."""
        for kind, left in stretch.left.items():
            if left.entries and kind not in kinds:
                waits = self.pending.get(kind, Bucket())
                if self.is_full(kind, len(waits.entries) + len(left.entries), waits.size_bytes + left.size_bytes):
                    return False
        return True

    def _repeat(self, stretch: Stretch, number: int, outside: list[int]) -> int:
        """Append what is known of a unit; returns the operator that yields its output."""
        start = self.draft.append(stretch.operators, outside)
        if stretch.kernel is not None:
            self.kernel = start + stretch.kernel
        if stretch.arrivals:
            self.arrivals[number + 1] |= {name: start + at for name, at in stretch.arrivals.items()}
        pending = {}
        for kind, left in stretch.left.items():
            bucket = pending[kind] = self.pending[kind] if left.behind_others else Bucket()
            bucket.size_bytes += left.size_bytes
            bucket.entries += [
                (GradientOnWay(mark, placements, start + at, name), legs, ahead)
                for (mark, placements, at, name), legs, ahead in left.entries
            ]
        self.pending = pending
        if stretch.output is None:
            return -1
        return start + stretch.output if stretch.output >= 0 else outside[~stretch.output]

    # Copies

    def _in_turn(self) -> list[int]:
        """Write the copies of a micro-batch in turn; returns the operators that yield their outputs."""
        places: list[list[dict[int, int]]] = [[{} for _ in self.parts] for _ in range(self.copies)]
        outputs = [-1] * self.copies
        for copy, number, index in in_turn([self._turn(copy) for copy in range(self.copies)], self._ends_turn):
            part, place = self.parts[number], places[copy][number]
            if index == BEGIN and copy == 0:
                self._gather_units(number)
                self._fetch_units(number)
            elif index == END:
                outputs[copy] = place[part.output] if part.output >= 0 else -1
                self.shared_done.update((copy, operator.shared) for operator in part.operators)
                if copy == self.copies - 1:
                    self.flush_units()
            elif index != BEGIN:
                self._operator(copy, number, index, place, outputs[copy])
        return outputs

    def _turn(self, copy: int) -> Iterator[tuple[int, int, int]]:
        """What a copy of the micro-batch runs: itself, the unit, and the operator or `BEGIN` or `END` of the unit."""
        for number, part in enumerate(self.parts):
            yield copy, number, BEGIN
            yield from ((copy, number, index) for index in range(len(part.operators)))
            yield copy, number, END

    def _ends_turn(self, step: tuple[int, int, int]) -> bool:
        """Whether another copy goes on behind a step: while a message travels that no operator waits for inside."""
        _, number, index = step
        if index < 0 or self.parts[number].operators[index].stream == KERNELS:
            return False
        return any(is_message(self.work.instructions[task]) for task in self.parts[number].operators[index].tasks)

    def _operator(self, copy: int, number: int, index: int, place: dict[int, int], given: int) -> None:
        """Append an operator of a unit behind those in `place`; `given` yields what the unit before hands on."""
        operator = self.parts[number].operators[index]
        if operator.shared >= 0 and (copy, operator.shared) in self.shared_done:
            place[index] = self.kernel
            return
        after = {at for n in operator.after if (at := place[n]) >= 0}
        if operator.reads_input and given >= 0 and self.draft.stream[given] != operator.stream:
            after.add(given)
        if operator.gathered or operator.fetched:
            arrived = self.arrivals[number]
            after.update(arrived[name] for name in (*operator.gathered, *operator.fetched) if name in arrived)
        tasks = operator.tasks if self.copies == 1 else [self.work.in_copy(task, copy) for task in operator.tasks]
        place[index] = self.add(tasks, operator.stream, sorted(after))
        for mark in operator.marks:
            self.gradient(number, mark, place[index], copy)

    # Parameters

    def _gather_ahead(self) -> None:
        """Parameters that stay for the step, in fused messages, before the pass has its input."""
        named: list[tuple[int, Wanted]] = []
        again: list[tuple[int, int, str]] = []
        first: dict[str, int] = {}
        for number, unit in enumerate(self.units):
            for value in unit.gathers.get(Phase.FORWARD, ()):
                holder = first.setdefault(value[2], number)
                # Equal layers are one object and have parameters of their own; what other units share comes once.
                if self.units[holder] is unit:
                    named.append((number, value))
                else:
                    again.append((number, holder, value[2]))
        for (stream, tasks, _), places in self._gathering([value for _, value in named]):
            at = self.add(tasks, stream, [], ahead=True)
            for place in places:
                number, (*_, name) = named[place]
                self.arrivals[number][name] = at
        for number, holder, name in again:
            self.arrivals[number][name] = self.arrivals[holder][name]

    def _gather_units(self, number: int) -> None:
        """When a unit begins, gather what the next one needs; the first unit's own come before the pass has its input.

        Parameters depend on no pass, so that a rank gathers them while it waits or finishes the pass before.
        """
        if not self.source.by_unit or not self.gathers:
            return
        if number == 0:
            self._gather_unit(0, [], ahead=True)
        if number + 1 < len(self.units):
            self._gather_unit(number + 1, [self.kernel])

    def _fetch_units(self, number: int) -> None:
        """Begin to bring back from the host what the next unit reads; of the first before the pass has its input."""
        for place in (number, number + 1) if number == 0 else (number + 1,):
            for task, name in self.parts[place].fetches if place < len(self.parts) else ():
                waits = [self.kernel] if place else []
                self.arrivals[place][name] = self.add([task], BESIDE, waits, ahead=not place)

    def _gather_unit(self, number: int, after: list[int], *, ahead: bool = False) -> None:
        """Append messages with all parameters of a unit, a single one of each kind."""
        key = id(self.units[number]), self.phase is Phase.FORWARD
        if key not in self.written.gathers:
            values = self.units[number].gathers.get(self.phase, ())
            self.written.gathers[key] = [message for message, _ in self._gathering(values)]
        for stream, tasks, names in self.written.gathers[key]:
            at = self.add(tasks, stream, list(after), ahead)
            self.arrivals[number].update(dict.fromkeys(names, at))

    def _gathering(self, values: Sequence[Wanted]) -> Iterator[tuple[Message, list[int]]]:
        """Write messages that bring parameters, each with the places of what it brings in `values`."""
        limit = self.source.gather_limit(of_unit=bool(self.source.by_unit))
        # Layers that are written once want the same objects.
        kinds = {id(value): value for value in values}
        number = {key: n for n, key in enumerate(kinds)}
        which = np.array([number[id(value)] for value in values], dtype=np.int64)
        for travelling in moves_together(self.source, [*kinds.values()], which, limit, self.written.ways):
            places = travelling.numbers.tolist()
            for items, found in zip(
                travelling.messages(), [[n] for n in places] if travelling.alone else [places], strict=True
            ):
                names = tuple(values[place][2] for place in found)
                yield (BESIDE, self.message_tasks(items, on_host=travelling.on_host), names), found
