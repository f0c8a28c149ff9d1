"""Gradients of a pass: added up, and on their way in the messages in which they wait for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from planner.lowering.groups import ALONE, BY_SIZE
from planner.lowering.instructions import NOTHING, Accumulate
from planner.lowering.placed import PlacedGraph, placements_text
from planner.lowering.unit_work import BESIDE, KERNELS, Mark, PassOperators, UnitWork
from planner.lowering.work import Work
from planner.lowering.writer import Moved, local_move, moving_message, packed_task
from planner.lowering.written import ACCUMULATE, Entry, GradientOnWay, Kind, Leg, PassDraft, WrittenTasks
from planner.sharding.placement import Placements
from simulator.program import Collective, Kernel, Phase, Task


@dataclass(slots=True)
class Bucket:
    """Gradients that wait to travel together."""

    entries: list[Entry] = field(default_factory=list)
    size_bytes: int = 0


class GradientWriter:
    """Writes what becomes of the gradients of a pass.

    For the parameters see `planner.lowering.chunk_passes.PassWriter`.
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
        self.source, self.work, self.units, self.parts = source, work, units, parts
        self.phase, self.first, self.last = phase, first, last
        self.written = written
        self.draft = PassDraft()
        self.pending: dict[Kind, Bucket] = {}
        self.sent: dict[Kind, None] = {}
        """Kinds of messages that have left, but for those of single gradients."""
        self.kernel = -1
        self.copies = source.options.copies
        self.limits = {kind: source.fused_bytes(kind) for kind in Collective}
        self.terms: dict[object, list[GradientOnWay]] = {}
        distinct_parts = {id(part): part for part in parts}
        self.counts = {
            key: Counter(m.parameter for o in part.operators for m in o.marks) for key, part in distinct_parts.items()
        }
        distinct = {id(unit): unit for unit in units}.values()
        holders = Counter(parameter for unit in distinct for parameter in unit.parameters)
        self.tied = {
            parameter: sum(self.counts[id(part)][parameter] for part in parts)
            for parameter, count in holders.items()
            if count > 1
        }
        """Parameters that several units of the chunk share, and how many terms their gradient has."""
        self.joined = self._joined(distinct_parts.values())
        self.grouped = self._grouped()

    def add(self, tasks: list[int], stream: int, after: list[int], ahead: bool = False) -> int:
        """Append an operator; returns its number."""
        number = self.draft.add(tasks, stream, after, ahead)
        if stream == KERNELS:
            self.kernel = number
        return number

    def message_tasks(self, moved: Sequence[Moved], *, on_host: bool = False) -> list[int]:
        """Write a step of parameters or gradients, no dim of which lies along the sequence, towards a placement."""
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
            return [self.work.add(task, local_move(moved[0]))]
        name = f"{step.operation} of {len(moved)} from {self.source.written_name(ref)}"
        return self._message(name, self.phase, moved, graph.spec(ref).dtype, on_host)

    def _message(self, name: str, phase: Phase, moved: Sequence[Moved], dtype: str, on_host: bool) -> list[int]:
        """Write one message of several tensors, with casts around it where some travel in another type than theirs."""
        source, steps = self.source, [(self.source.graph.spec(ref), step) for ref, _, _, step in moved]
        narrow = [(spec, step) for spec, step in steps if spec.dtype != dtype]
        bytes_of = source.travelling_bytes if narrow else lambda spec: spec.size_bytes
        payload = sum(bytes_of(spec) / prod(source.sizes[a] for a in step.sharded_axes) for spec, step in steps)
        message = moving_message(moved, asynchronous=True, dtype=dtype if narrow else "")
        task = packed_task(source, message, name, phase, payload, dtype, on_host=on_host)
        if not narrow:
            return [self.work.add(task, message)]
        casts = [
            Task(
                name=f"cast {len(narrow)} gradients",
                phase=phase,
                kernel=Kernel.ELEMENTWISE,
                bytes_moved=3.0 * sum(source.local_bytes(spec, place) for spec, place in places),
                on_host=on_host,
            )
            for places in ([(s, step.before) for s, step in narrow], [(s, step.after) for s, step in narrow])
        ]
        written = ((casts[0], NOTHING), (task, message), (casts[1], NOTHING))
        return [self.work.add(one, instruction) for one, instruction in written]

    # Gradients

    def _joined(self, parts: Iterable[PassOperators]) -> dict[int, Mark]:
        """Sums of gradients whose terms are written in different placements, by parameter."""
        found: dict[int, set[Placements]] = {}
        for part in parts:
            for operator in part.operators:
                for mark in operator.marks:
                    found.setdefault(mark.parameter, set()).add(self.source.output_placements(mark.gradient))
        return {p: Mark(self.source.gradient_ref(p), p) for p, placements in found.items() if len(placements) > 1}

    def _moved_term(self, value: GradientOnWay, mark: Mark) -> GradientOnWay:
        """Bring a term to the placement of the sum that it is added to."""
        target, gradient = self.source.output_placements(mark.gradient), value.mark.gradient
        for step in self.source.path(value.placements, target):
            name = f"{value.name}@{placements_text(step.after)}"
            on_host = mark.parameter in self.source.host.parameters
            tasks = self.message_tasks([(gradient, value.name, name, step)], on_host=on_host)
            if isinstance(step.operation, Collective):
                stream, waits = BESIDE, [value.operator]
            else:
                stream, waits = self._behind(value)
            value = GradientOnWay(value.mark, step.after, self.add(tasks, stream, waits), name)
        return value._replace(mark=mark)

    def gradient(self, number: int, mark: Mark, operator: int, copy: int) -> None:
        """Hand a complete gradient on, once every copy and every unit that shares its parameter has sent its term."""
        route = self.written.route(mark)
        value = GradientOnWay(mark, route.placements, operator, route.names[copy])
        if mark.parameter in self.joined:
            mark = self.joined[mark.parameter]
            value, route = self._moved_term(value, mark), self.written.route(mark)
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
            waits: list[int] = []
            if mark.parameter in self.joined:  # those that later kernels must wait for explicitly
                waits = sorted({t.operator for t in terms if self.draft.stream[t.operator] != KERNELS})
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
                value = GradientOnWay(mark, value.placements, self.add([added], KERNELS, waits), total)
        self._synchronise(value, route.ahead, ahead=True)

    def _accumulate(self, value: GradientOnWay) -> None:
        mark, source = value.mark, self.source
        if source.options.micro_batches > 1:
            stream, after = self._behind(value)
            accumulator = f"{source.graph.nodes[mark.parameter].name}.accumulated"
            number = self._accumulation(value, accumulator)
            value = GradientOnWay(mark, value.placements, self.add([number], stream, after), accumulator)
        if self.last:
            self._synchronise(value, self.written.route(mark).behind, ahead=False)

    def _arrived(self, value: GradientOnWay) -> None:
        self.draft.synchronised[value.mark.parameter] = value.name

    def _accumulation(self, value: GradientOnWay, accumulator: str) -> int:
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

    def _behind(self, value: GradientOnWay) -> tuple[int, list[int]]:
        """Stream of the local work on a gradient, and what that waits for: kernels in order wait for no message."""
        stream = KERNELS if self.draft.stream[value.operator] == KERNELS else BESIDE
        return stream, [] if self.draft.stream[value.operator] == stream else [value.operator]

    def _synchronise(self, value: GradientOnWay, legs: tuple[Leg, ...], *, ahead: bool) -> None:
        """Send a gradient on its way to its accumulator (`ahead`), or from there to where it is stored."""
        if not legs:
            (self._accumulate if ahead else self._arrived)(value)
            return
        leg = legs[0]
        if leg.kind is None:
            stream, waits = self._behind(value)
            on_host = value.mark.parameter in self.source.host.parameters
            item = value.mark.gradient, value.name, leg.target, leg.step
            at = self.add(self.message_tasks([item], on_host=on_host), stream, waits)
            self._synchronise(GradientOnWay(value.mark, leg.step.after, at, leg.target), legs[1:], ahead=ahead)
            return
        bucket = self.pending.setdefault(leg.kind, Bucket())
        bucket.entries.append((value, legs, ahead))
        bucket.size_bytes += leg.size_bytes
        if self.is_full(leg.kind, len(bucket.entries), bucket.size_bytes):
            self.flush(leg.kind)

    def is_full(self, kind: Kind, count: int, size_bytes: int) -> bool:
        """Whether a message of a kind leaves with so many gradients of so many bytes."""
        if kind[3] != BY_SIZE:
            return kind[3] == ALONE or count >= self.grouped[kind]
        if self._by_unit(kind[0]) and self.source.options.exchange.reduce_scatter_bytes is None:
            return False
        return size_bytes >= self.limits[kind[0]]

    def _grouped(self) -> Counter[Kind]:
        """How many gradients of the chunk travel in each message of a group in this pass."""
        found: Counter[Kind] = Counter()
        seen: set[int] = set()
        for part in self.parts if self.source.fusion_groups else ():
            marks = {m.parameter: self.joined.get(m.parameter, m) for o in part.operators for m in o.marks}
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

    def flush_units(self) -> None:
        """Send what travels unit by unit."""
        for kind in [kind for kind in self.pending if self._by_unit(kind[0])]:
            self.flush(kind)

    def flush(self, kind: Kind) -> None:
        """Send the gradients that wait for each other."""
        bucket = self.pending.pop(kind)
        if kind[3] != ALONE:
            self.sent[kind] = None
        waits = {v.operator for v, _, _ in bucket.entries if self.draft.stream[v.operator] != BESIDE}
        key = tuple([(value.name, legs[0]) for value, legs, _ in bucket.entries])
        if key not in self.written.messages:
            moved = [
                (value.mark.gradient, value.name, legs[0].target, legs[0].step) for value, legs, _ in bucket.entries
            ]
            name = f"{kind[0]} of {len(moved)} gradients"
            self.written.messages[key] = self._message(name, Phase.BACKWARD, moved, kind[2], kind[4])
        at = self.add(self.written.messages[key], BESIDE, sorted(waits))
        for value, legs, ahead in bucket.entries:
            self._synchronise(GradientOnWay(value.mark, legs[0].step.after, at, legs[0].target), legs[1:], ahead=ahead)
