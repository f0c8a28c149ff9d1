"""The passes of a chunk: its units' operators in a row, parameters gathered before, gradients synchronised behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from planner.instructions import NOTHING, Accumulate
from planner.lowering.adding import ACCUMULATE
from planner.lowering.groups import ALONE, BY_SIZE
from planner.lowering.packing import copied_bytes
from planner.lowering.placed import PlacedGraph
from planner.lowering.turns import in_turn, is_message
from planner.lowering.unit_work import BESIDE, KERNELS, Mark, Part, UnitWork
from planner.lowering.ways import Wanted, moves_together
from planner.lowering.work import Work
from planner.lowering.writer import Moved, local_move, moving_message
from planner.lowering.written import Kind, Leg, Message, Then, Value, Written
from simulator.pipeline_operators import FIRST, LAST, PLAIN, action_variants
from simulator.program import Collective, Kernel, Phase, Task
from simulator.schedules import ActionKind, Schedule


@dataclass(slots=True)
class Draft:
    """Operators of a pass being written, their times still to come: ``tasks[i]`` are the numbers of operator i.

    ``synchronised`` is what the gradient of each parameter is called in the end, by its node; only in the last
    micro-batch.
    """

    tasks: list[list[int]] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    ahead: list[bool] = field(default_factory=list)
    output: int = -1
    synchronised: dict[int, str] = field(default_factory=dict)

    @property
    def leading(self) -> int:
        """Tasks at the beginning that wait for no input of the pass."""
        count = 0
        for tasks, ahead in zip(self.tasks, self.ahead, strict=True):
            if tasks and not ahead:
                break
            count += len(tasks)
        return count


BEGIN, END = -2, -1
"""In place of an operator: the begin and the end of a unit."""


@dataclass(slots=True)
class _Bucket:
    entries: list[tuple[Value, tuple[Leg, ...], Then]] = field(default_factory=list)
    size_bytes: int = 0


def chunk_drafts(
    source: PlacedGraph,
    work: Work,
    units: Sequence[UnitWork],
    schedule: Schedule,
    written: Written,
    *,
    every: bool = True,
) -> dict[tuple[ActionKind, int], Draft]:
    """Every pass of a chunk of these units that a schedule has, plain and of the first and the last micro-batch.

    Unless `every`, those that make gradients only as the schedule runs them: with a single micro-batch none is plain.
    """
    kinds = {ActionKind(int(kind)) for kind in np.unique(schedule.kind)}
    run = set(zip(schedule.kind.tolist(), action_variants(schedule).tolist(), strict=True))
    alone = schedule.micro_batches // schedule.chains == 1
    back = units[::-1]
    made: dict[tuple[ActionKind, int], Draft] = {}
    for kind, order, parts, variants in (
        (ActionKind.FORWARD, units, [unit.forward for unit in units], (PLAIN, FIRST)),
        (ActionKind.BACKWARD, back, [unit.backward for unit in back], (PLAIN, FIRST, LAST)),
        (ActionKind.INPUT_GRADIENT, back, [unit.inputs for unit in back], (PLAIN,)),
        (ActionKind.WEIGHT_GRADIENT, back, [unit.weights for unit in back], (PLAIN, FIRST, LAST)),
    ):
        phase = Phase.FORWARD if kind is ActionKind.FORWARD else Phase.BACKWARD
        for variant in variants if kind in kinds else ():
            if not every and LAST in variants and (kind, variant) not in run:
                continue
            first, last = variant == FIRST or (variant == LAST and alone), variant == LAST
            writer = PassWriter(source, work, order, parts, phase, written, first=first, last=last)
            made[kind, variant] = writer.write()
    return made


class PassWriter:
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
        parts: Sequence[Part],
        phase: Phase,
        written: Written,
        *,
        first: bool,
        last: bool,
    ) -> None:
        self.source, self.work, self.units, self.parts = source, work, units, parts
        self.phase, self.first, self.last = phase, first, last
        self.written = written
        self.draft = Draft()
        self.arrivals: list[dict[str, int]] = [{} for _ in units]
        self.pending: dict[Kind, _Bucket] = {}
        self.kernel = -1
        self.copies = source.options.copies
        self.shared_done: set[tuple[int, int]] = set()
        self.terms: dict[object, list[Value]] = {}
        self.counts = {id(part): Counter(m.parameter for o in part.operators for m in o.marks) for part in parts}
        distinct = {id(unit): unit for unit in units}.values()
        holders = Counter(parameter for unit in distinct for parameter in unit.parameters)
        self.tied = {
            parameter: sum(self.counts[id(part)][parameter] for part in parts)
            for parameter, count in holders.items()
            if count > 1
        }
        """Parameters that several units of the chunk share, and how many terms their gradient has."""
        self.grouped = self._grouped()

    def write(self) -> Draft:
        """Return the operators of the pass."""
        ahead = self.first and self.phase is Phase.FORWARD
        if self.source.by_unit or ahead or any(part.fetches for part in self.parts):
            # Kernels wait for the input of the pass even where the first of them waits for parameters.
            self._add([], KERNELS, [])
        if ahead and not self.source.by_unit:
            self._gather_ahead()
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
                    self._flush_units()
            elif index != BEGIN:
                self._operator(copy, number, index, place, outputs[copy])
        while self.pending:
            self._flush(next(iter(self.pending)))
        if self.kernel < 0:
            self._add([], KERNELS, [])
        self.draft.output = max(outputs) if max(outputs) >= 0 else self.kernel
        return self.draft

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

    def _add(self, tasks: list[int], stream: int, after: list[int], ahead: bool = False) -> int:
        self.draft.tasks.append(tasks)
        self.draft.stream.append(stream)
        self.draft.after.append(after)
        self.draft.ahead.append(ahead)
        number = len(self.draft.tasks) - 1
        if stream == KERNELS:
            self.kernel = number
        return number

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
        place[index] = self._add(tasks, operator.stream, sorted(after))
        for mark in operator.marks:
            self._gradient(number, mark, place[index], copy)

    # Parameters

    def _gather_ahead(self) -> None:
        """Parameters that stay for the step, in fused messages, before the pass has its input."""
        named = [(n, value) for n, unit in enumerate(self.units) for value in unit.gathers.get(Phase.FORWARD, ())]
        for (stream, tasks, _), places in self._gathering([value for _, value in named]):
            at = self._add(tasks, stream, [], ahead=True)
            for place in places:
                number, (*_, name) = named[place]
                self.arrivals[number][name] = at

    def _gather_units(self, number: int) -> None:
        """When a unit begins, gather what the next one needs; the first unit's own come before the pass has its input.

        Parameters depend on no pass, so that a rank gathers them while it waits or finishes the pass before.
        """
        if not self.source.by_unit or not self._gathers():
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
                self.arrivals[place][name] = self._add([task], BESIDE, waits, ahead=not place)

    def _gather_unit(self, number: int, after: list[int], *, ahead: bool = False) -> None:
        """Append messages with all parameters of a unit, a single one of each kind."""
        key = id(self.units[number]), self.phase is Phase.FORWARD
        if key not in self.written.gathers:
            values = self.units[number].gathers.get(self.phase, ())
            self.written.gathers[key] = [message for message, _ in self._gathering(values)]
        for stream, tasks, names in self.written.gathers[key]:
            at = self._add(tasks, stream, list(after), ahead)
            self.arrivals[number].update(dict.fromkeys(names, at))

    def _gathers(self) -> bool:
        return any(operator.gathered for part in self.parts for operator in part.operators)

    def _gathering(self, values: Sequence[Wanted]) -> Iterator[tuple[Message, list[int]]]:
        """Write messages that bring parameters, each with the places of what it brings in `values`."""
        limit = self.source.gather_limit(of_unit=bool(self.source.by_unit))
        for on_host in (False, True):
            places = [n for n, (ref, *_) in enumerate(values) if self.source.host.holds(ref) is on_host]
            for items, numbers in moves_together(self.source, [values[place] for place in places], limit):
                found = [places[number] for number in numbers]
                names = tuple(values[place][2] for place in found)
                yield (BESIDE, self._message_tasks(items, on_host=on_host), names), found

    def _message_tasks(self, moved: Sequence[Moved], *, on_host: bool = False) -> list[int]:
        """Write a step of tensors on the way to a placement."""
        (ref, *_, step), graph = moved[0], self.source.graph
        if not isinstance(step.operation, Collective):
            task = Task(
                name=f"{step.operation} {self.source.written_name(ref)}",
                phase=self.phase,
                kernel=Kernel.COPY,
                dtype=graph.spec(ref).dtype,
                bytes_moved=2.0 * self.source.local_bytes(graph.spec(ref), step.after),
                on_host=on_host,
            )
            return [self.work.add(task, local_move(self.source, moved[0]))]
        name = f"{step.operation} of {len(moved)} from {self.source.written_name(ref)}"
        return [self._collective(name, self.phase, moved, on_host)]

    def _collective(self, name: str, phase: Phase, moved: Sequence[Moved], on_host: bool) -> int:
        """Write one message of several tensors; returns the number of its task."""
        (ref, *_, step), graph, sizes = moved[0], self.source.graph, self.source.sizes
        assert isinstance(step.operation, Collective)
        axis = self.source.options.mesh.axes[step.axis].name
        message = moving_message(moved, asynchronous=True)
        payload = sum(graph.spec(one).size_bytes / prod(sizes[a] for a in way.sharded_axes) for one, _, _, way in moved)
        task = Task(
            name=name,
            phase=phase,
            stream=f"communication:{axis}",
            dtype=graph.spec(ref).dtype,
            collective=message.collective,
            axis=axis,
            payload_bytes=payload,
            copied_bytes=copied_bytes(message, payload, sizes[step.axis]),
            sharded=self.source.of_shards(message),
            on_host=on_host,
        )
        return self.work.add(task, message)

    # Gradients

    def _gradient(self, number: int, mark: Mark, operator: int, copy: int) -> None:
        """Hand a complete gradient on, once every copy and every unit that shares its parameter has sent its term."""
        route = self.written.route(mark)
        value = Value(mark, route.placements, operator, route.names[copy])
        tied = mark.parameter in self.tied
        expected = self.tied[mark.parameter] if tied else self.counts[id(self.parts[number])][mark.parameter]
        expected *= self.copies
        if expected > 1:
            terms = self.terms.setdefault(mark.parameter if tied else (number, mark.parameter), [])
            terms.append(value)
            if len(terms) < expected:
                return
            size = self.source.local_bytes(self.source.graph.spec(mark.gradient), value.placements)
            total = terms[0].name
            for term in terms[1:]:
                task = Task(
                    name=f"add gradients of {self.source.graph.nodes[mark.parameter].name}",
                    phase=Phase.BACKWARD,
                    kernel=Kernel.ACCUMULATION,
                    dtype=self.source.graph.spec(mark.gradient).dtype,
                    bytes_moved=3.0 * size,
                    on_host=mark.parameter in self.source.host.parameters,
                )
                instruction = Accumulate(source=term.name, accumulator=total, first=False)
                added = self.work.add(task, instruction, waiting=size)
                value = Value(mark, value.placements, self._add([added], KERNELS, []), total)
        self._synchronise(value, route.ahead, self._accumulate)

    def _accumulate(self, value: Value) -> None:
        mark, source = value.mark, self.source
        if source.options.micro_batches > 1:
            stream, after = self._behind(value)
            accumulator = f"{source.graph.nodes[mark.parameter].name}.accumulated"
            number = self._accumulation(value, accumulator)
            value = Value(mark, value.placements, self._add([number], stream, after), accumulator)
        if self.last:
            self._synchronise(value, self.written.route(mark).behind, self._arrived)

    def _arrived(self, value: Value) -> None:
        self.draft.synchronised[value.mark.parameter] = value.name

    def _accumulation(self, value: Value, accumulator: str) -> int:
        """The task that adds a gradient to its accumulator; every layer like this one has the same."""
        key = value.mark, self.first
        if key not in self.written.accumulations:
            spec = self.source.graph.spec(value.mark.gradient)
            size = self.source.local_bytes(spec, value.placements)
            task = Task(
                name=f"{ACCUMULATE}{self.source.graph.nodes[value.mark.parameter].name}",
                phase=Phase.BACKWARD,
                kernel=Kernel.VIEW if self.first else Kernel.ACCUMULATION,
                dtype=spec.dtype,
                bytes_moved=0.0 if self.first else 3.0 * size,
                on_host=value.mark.parameter in self.source.host.parameters,
            )
            instruction = Accumulate(source=value.name, accumulator=accumulator, first=self.first)
            self.written.accumulations[key] = self.work.add(task, instruction)
        return self.written.accumulations[key]

    def _behind(self, value: Value) -> tuple[int, list[int]]:
        """Stream of the local work on a gradient, and what that waits for: kernels in order wait for no message."""
        stream = KERNELS if self.draft.stream[value.operator] == KERNELS else BESIDE
        return stream, [] if self.draft.stream[value.operator] == stream else [value.operator]

    def _synchronise(self, value: Value, legs: tuple[Leg, ...], then: Then) -> None:
        if not legs:
            then(value)
            return
        leg = legs[0]
        if leg.kind is None:
            stream, waits = self._behind(value)
            on_host = value.mark.parameter in self.source.host.parameters
            item = value.mark.gradient, value.name, leg.target, leg.step
            at = self._add(self._message_tasks([item], on_host=on_host), stream, waits)
            self._synchronise(Value(value.mark, leg.step.after, at, leg.target), legs[1:], then)
            return
        bucket = self.pending.setdefault(leg.kind, _Bucket())
        bucket.entries.append((value, legs, then))
        bucket.size_bytes += leg.size_bytes
        if self._is_full(leg.kind, bucket):
            self._flush(leg.kind)

    def _is_full(self, kind: Kind, bucket: _Bucket) -> bool:
        if kind[3] != BY_SIZE:
            return kind[3] == ALONE or len(bucket.entries) == self.grouped[kind]
        if self._by_unit(kind[0]) and self.source.options.exchange.reduce_scatter_bytes is None:
            return False
        return bucket.size_bytes >= self.source.fused_bytes(kind[0])

    def _grouped(self) -> Counter[Kind]:
        """How many gradients of the chunk travel in each message of a group in this pass."""
        found: Counter[Kind] = Counter()
        seen: set[int] = set()
        for part in self.parts if self.source.fusion_groups else ():
            marks = {mark.parameter: mark for operator in part.operators for mark in operator.marks}
            for parameter, mark in marks.items():
                if parameter in self.tied and parameter in seen:
                    continue
                seen.add(parameter)
                route = self.written.route(mark)
                legs = (*route.ahead, *route.behind) if self.last else route.ahead
                found.update(leg.kind for leg in legs if leg.kind is not None)
        return found

    def _by_unit(self, collective: Collective) -> bool:
        """Whether gradients travel unit by unit, as the parameters do."""
        return bool(self.source.by_unit) and collective is Collective.REDUCE_SCATTER

    def _flush_units(self) -> None:
        for key in [key for key in self.pending if self._by_unit(key[0])]:
            self._flush(key)

    def _flush(self, kind: Kind) -> None:
        bucket = self.pending.pop(kind)
        waits = {v.operator for v, _, _ in bucket.entries if self.draft.stream[v.operator] != BESIDE}
        key = tuple([(value.name, legs[0]) for value, legs, _ in bucket.entries])
        if key not in self.written.messages:
            moved = [
                (value.mark.gradient, value.name, legs[0].target, legs[0].step) for value, legs, _ in bucket.entries
            ]
            self.written.messages[key] = self._gradients_message(moved, kind[2], kind[4])
        at = self._add(self.written.messages[key], BESIDE, sorted(waits))
        for value, legs, then in bucket.entries:
            self._synchronise(Value(value.mark, legs[0].step.after, at, legs[0].target), legs[1:], then)

    def _gradients_message(self, moved: Sequence[Moved], dtype: str, on_host: bool) -> list[int]:
        """Tasks of one message of gradients, with casts around it where some travel in another type."""
        source, specs = self.source, [self.source.graph.spec(ref) for ref, *_ in moved]
        steps = [step for *_, step in moved]
        name = f"{steps[0].operation} of {len(moved)} gradients"
        narrow = [(spec, step) for spec, step in zip(specs, steps, strict=True) if spec.dtype != dtype]
        if not narrow:
            return [self._collective(name, Phase.BACKWARD, moved, on_host)]
        payload = sum(
            source.travelling_bytes(spec) / prod(source.sizes[a] for a in step.sharded_axes)
            for spec, step in zip(specs, steps, strict=True)
        )
        message = moving_message(moved, asynchronous=True, dtype=dtype)
        axis = source.options.mesh.axes[message.axis].name
        task = Task(
            name=name,
            phase=Phase.BACKWARD,
            stream=f"communication:{axis}",
            dtype=dtype,
            collective=message.collective,
            axis=axis,
            payload_bytes=payload,
            copied_bytes=copied_bytes(message, payload, source.sizes[message.axis]),
            sharded=source.of_shards(message),
            on_host=on_host,
        )
        casts = [
            Task(
                name=f"cast {len(narrow)} gradients",
                phase=Phase.BACKWARD,
                kernel=Kernel.ELEMENTWISE,
                bytes_moved=3.0 * sum(source.local_bytes(spec, place) for spec, place in places),
                on_host=on_host,
            )
            for places in ([(s, step.before) for s, step in narrow], [(s, step.after) for s, step in narrow])
        ]
        return [
            self.work.add(one, instruction)
            for one, instruction in ((casts[0], NOTHING), (task, message), (casts[1], NOTHING))
        ]
