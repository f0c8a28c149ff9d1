"""The forward and backward operators of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from planner.cost.work import cast_bytes
from planner.graph.operator_graph import DROPOUT, Node, Role, TensorRef
from planner.lowering.instructions import NOTHING, Communicate, Compute
from planner.lowering.placed import PlacedGraph
from planner.lowering.units import NOWHERE
from planner.lowering.writer import Draft, Writer, disk_transfer
from planner.sharding.context import copies_among
from planner.sharding.inner_messages import EXCHANGES, inner_messages, local_class, message_bytes, message_count
from planner.sharding.placement import PARTIAL, Placements, local_shape
from planner.sharding.redistribution import Step
from planner.sharding.rules import InnerMessage
from planner.sharding.sequence import SequenceCut
from simulator.program import Buffer, BufferKind, Collective, Kernel, Phase, Task


@dataclass(frozen=True, slots=True)
class Gather:
    """Where a unit's parameters have to be there: ``values`` are (parameter, placements, name they get)."""

    unit: int
    phase: Phase
    values: tuple[tuple[TensorRef, Placements, str], ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copies that bring back what a unit has on the host, begun with the backward pass of the unit behind it."""

    unit: int
    drafts: tuple[Draft, ...]


Item = Draft | TensorRef | Gather | Fetch
"""What a body is made of: drafts, complete gradients of parameters, where a pass needs parameters or activations."""


class Body(Writer):
    """The forward and backward operators of one micro-batch, the same in every segment.

    Parameters
    ----------
    source : PlacedGraph
    nodes : iterable of int, optional
        Those to run; everything by default.
    given : sequence of TensorRef, optional
        Tensors that other nodes have computed, there in the placement that these write.
    gradients : mapping of TensorRef to int, optional
        Gradients and the parameters they belong to; those of the graph by default.
    """

    def __init__(
        self,
        source: PlacedGraph,
        nodes: Iterable[int] | None = None,
        given: Sequence[TensorRef] = (),
        gradients: Mapping[TensorRef, int] | None = None,
    ) -> None:
        self.nodes = range(len(source.graph.nodes)) if nodes is None else sorted(nodes)
        read = {ref.node for index in self.nodes for ref in source.graph.nodes[index].tensor_inputs}.union(self.nodes)
        super().__init__(source, read)
        self.items: list[Item] = []
        self.exchanged: dict[int | None, tuple[str, ...]] = {}
        """What each attention has exchanged, by its node."""
        self.sent: dict[TensorRef, dict[Placements, str]] = {}
        """What messages of the forward pass have brought, by tensor."""
        self.tables: dict[TensorRef, dict[Placements, str]] = {}
        """Versions on the host of tables that the device has copies of."""
        self.gone_back: set[int] = set()
        self.gone_forward: set[int] = set()
        self.gradients = source.gradient_of if gradients is None else gradients
        self.told = {self.graph.loss.node, *(ref.node for ref in self.gradients)}
        """Nodes that yield the loss or gradients of parameters."""
        for ref in given:
            self.versions[ref] = {source.output_placements(ref): source.written_name(ref)}
        for parameter in self.graph.parameters:
            if parameter.node in read and parameter.node not in source.by_unit:
                ref = TensorRef(parameter.node)
                for wanted in source.gathered(parameter.node):
                    self.versions[ref][wanted] = source.value_name(ref, wanted)
        self.reporting = False
        """Whether what is written tells the ranks the loss."""
        self.reached: list[int] = []
        """How many items there are once each of ``nodes`` has run."""
        for index in self.nodes:
            self._node(index, self.graph.nodes[index])
            self.reached.append(len(self.items) + len(self.drafts))
        self._collect()

    @cached_property
    def readers(self) -> list[list[int]]:
        """Nodes of each unit."""
        units = self.source.units
        found: list[list[int]] = [[] for _ in units.names]
        for index in self.nodes:
            if units.of_node[index] != NOWHERE:
                found[units.of_node[index]].append(index)
        return found

    def _pass(self, phase: Phase) -> int:
        # Nothing waits for the sum of the loss, so that it gives the host no time to catch up.
        return -1 if self.reporting else 2 * self.unit + (phase is Phase.BACKWARD)

    def _node(self, index: int, node: Node) -> None:
        if node.role in (Role.PARAMETER, Role.INPUT):
            return
        self._enter(index, node)
        leaving: list[TensorRef] = []
        if self.source.host.parameters:
            made = map(partial(TensorRef, index), range(len(node.outputs)))
            leaving = [ref for ref in made if self._leaves_device(ref)]
        for ref in leaving:
            self.renamed[ref] = f"{self.source.written_name(ref)} on the device"
        self._compute(index, node, node.phase)
        for ref in leaving:
            self._term_to_host(ref, self.renamed.pop(ref), node.phase)
        for output in range(len(node.outputs) if index in self.told else 0):
            ref = TensorRef(index, output)
            if ref == self.graph.loss:
                self.reporting = True
                self._fetch(ref, self.source.replicated, Phase.FORWARD)
                self.reporting = False
            if ref in self.gradients:
                self._collect()
                self.items.append(ref)

    def _leaves_device(self, ref: TensorRef) -> bool:
        """Whether a device makes a gradient of a table that is on the host."""
        hosted = self.gradients.get(ref, NOWHERE) in self.source.host.parameters
        return hosted and not self.source.host.runs(ref.node)

    def _term_to_host(self, ref: TensorRef, name: str, phase: Phase) -> None:
        """Copy a gradient of a table to the host, where it has its usual name."""
        placements = self.source.output_placements(ref)
        there = Buffer(name=self.source.written_name(ref), size_bytes=0, kind=BufferKind.GRADIENT)
        size = self.source.local_bytes(self.graph.spec(ref), placements)
        self._host_copy(name, there, size, phase, to_host=True)
        self.versions[ref] = {placements: there.name}

    def _enter(self, index: int, node: Node) -> None:
        """Before the first operator of a unit in a pass: its parameters, and on the way back what runs again."""
        unit = self.source.units.of_node[index]
        if unit == NOWHERE:
            return
        self.unit = unit
        if node.phase is Phase.FORWARD and unit not in self.gone_forward:
            self.gone_forward.add(unit)
            self._gather(unit, Phase.FORWARD)
            self._bring(unit, Phase.FORWARD)
        elif node.phase is Phase.BACKWARD and unit not in self.gone_back:
            self.gone_back.add(unit)
            self._gather(unit, Phase.BACKWARD)
            self._bring(unit, Phase.BACKWARD)
            self._run_again(unit)

    def _gather(self, unit: int, phase: Phase) -> None:
        source = self.source
        if not source.by_unit:
            return
        again = self._again(unit) if phase is Phase.BACKWARD else ()
        users = [i for i in self.readers[unit] if self.graph.nodes[i].phase is phase]
        place = source.units.names[unit]
        values: dict[tuple[TensorRef, Placements], str] = {}
        for index in (*again, *users):
            for ref, wanted in zip(self.graph.nodes[index].tensor_inputs, source.recipe(index).inputs, strict=True):
                if ref.node in source.by_unit and wanted in source.gathered(ref.node):
                    name = f"{source.value_name(ref, wanted)} {'in' if phase is Phase.FORWARD else 'back in'} {place}"
                    values[ref, wanted] = name
        for ref, _ in values:
            self.versions[ref] = {source.stored[ref.node]: self.graph.nodes[ref.node].name}
        for (ref, wanted), name in values.items():
            self.versions[ref][wanted] = name
        if values:
            self._collect()
            self.items.append(Gather(unit, phase, tuple((ref, wanted, n) for (ref, wanted), n in values.items())))

    def _bring(self, unit: int, phase: Phase) -> None:
        """Copy the parameters that a pass of a unit reads from the host."""
        source = self.source
        if not source.away:
            return
        again = self._again(unit) if phase is Phase.BACKWARD else ()
        users = [*again, *(i for i in self.readers[unit] if self.graph.nodes[i].phase is phase)]
        users = [index for index in users if not source.host.runs(index)]
        read = dict.fromkeys(ref for index in users for ref in self.graph.nodes[index].tensor_inputs)
        for ref in (one for one in read if one.node in source.away):
            placements, stored = source.stored[ref.node], self.graph.nodes[ref.node].name
            place = f"{'in' if phase is Phase.FORWARD else 'back in'} {source.units.names[unit]}"
            self.renamed[ref] = f"{stored} {place}"
            size = source.local_bytes(self.graph.spec(ref), placements)
            made = Buffer(name=self.renamed[ref], size_bytes=size, kind=BufferKind.GATHERED_PARAMETER)
            if ref.node in source.disk:
                self._add(disk_transfer(size, f"read {stored}", phase), NOTHING, (stored,), ())
            self._host_copy(stored, made, size, phase, to_host=False)
            self.versions[ref] = {placements: made.name}

    def _again(self, unit: int) -> Sequence[int]:
        """Operators of a unit that run again, in order: less where it keeps what messages have brought.

        They are then those that backward operators, or others that run again, read otherwise than messages of the
        forward pass have brought it. Operators with messages inside keep their results.
        """
        units, source = self.source.units, self.source
        if units.names[unit] not in source.options.keeps_messages:
            return units.again[unit]
        readers = (i for i in self.readers[unit] if self.graph.nodes[i].phase is Phase.BACKWARD)
        wanted = {read for index in readers for read in self._reads(index)}
        found: list[int] = []
        for index in reversed(units.again[unit]):
            outputs = {TensorRef(index, output) for output in range(len(self.graph.nodes[index].outputs))}
            _, has_inner = source.messages_inside(index)
            if not has_inner and any(ref in outputs and not self._brought(ref, p) for ref, p in wanted):
                found.insert(0, index)
                wanted.update(self._reads(index))
        return found

    def _reads(self, index: int) -> Iterator[tuple[TensorRef, Placements]]:
        """What an operator reads, but for what an attention has exchanged before."""
        node = self.graph.nodes[index]
        kept = len(self.exchanged.get(node.forward, ())) if node.phase is Phase.BACKWARD else 0
        wanted = zip(node.tensor_inputs, self.source.recipe(index).inputs, strict=True)
        yield from (read for place, read in enumerate(wanted) if not 1 <= place <= kept)

    def _brought(self, ref: TensorRef, wanted: Placements) -> bool:
        """Whether messages of the forward pass have brought a tensor, up to a slice of one's own."""
        ways = (self.source.way(placements, wanted) for placements in self.sent.get(ref, ()))
        return any(way is not None and not self.source.volume(way) for way in ways)

    def _move(self, ref: TensorRef, value: str, step: Step, phase: Phase) -> str:
        target = super()._move(ref, value, step, phase)
        if phase is Phase.FORWARD and isinstance(step.operation, Collective) and ref.node not in self.source.stored:
            self.sent.setdefault(ref, {})[step.after] = target
        return target

    def _run_again(self, unit: int) -> None:
        again = self._again(unit)
        if not self.source.units.again[unit]:
            return
        keeps = self.source.units.names[unit] in self.source.options.keeps_messages
        sent = self.sent if keeps else {}
        rerun = set(again)
        if self.source.units.mode[unit] != "none":
            for index in (*again, *self.readers[unit]):
                for ref in self.graph.nodes[index].tensor_inputs:
                    if ref.node not in rerun and ref.node not in self.source.stored and ref in self.versions:
                        self.versions[ref] = {**sent.get(ref, {}), **self._kept(ref)}
        for index in again:
            node = self.graph.nodes[index]
            for output in range(len(node.outputs)):
                ref = TensorRef(index, output)
                self.renamed[ref] = f"{self.source.written_name(ref)} again"
            self._compute(index, node, Phase.BACKWARD)
            for output in range(len(node.outputs)):
                ref = TensorRef(index, output)
                if ref in sent:  # what nothing reads has no versions
                    self.versions[ref] |= sent[ref]

    def _kept(self, ref: TensorRef) -> dict[Placements, str]:
        """The version of a forward tensor that waits for the backward pass: as written, or once summed up."""
        versions = self.versions[ref]
        if self.graph.nodes[ref.node].phase is not Phase.FORWARD:
            return versions
        written = self.source.output_placements(ref)
        whole = {p: name for p, name in versions.items() if PARTIAL not in p}
        if written in whole:
            return {written: whole[written]}
        return whole or versions

    def _collect(self) -> None:
        self.items += self.drafts
        self.drafts = []

    def _compute(self, index: int, node: Node, phase: Phase) -> None:
        source, recipe = self.source, self.source.recipe(index)
        if source.host.runs(index):
            self._on_host(index, node, phase)
            return
        names = self._read(index, node, phase)
        outputs, writes, owners = [], [], {}
        view = node.kernel is Kernel.VIEW and bool(names)
        for output, placements in enumerate(recipe.outputs):
            ref = TensorRef(index, output)
            name = self._value_name(ref, placements) if ref in source.read else ""
            outputs.append(name)
            if name:
                writes.append(Buffer(name=name, size_bytes=0 if view else recipe.sizes[output], kind=self._kind(ref)))
                self.versions[ref] = {placements: name}
                if view:
                    owners[name] = names[0]
        rules = source.rules[index]
        sends, inside = source.messages_inside(index)
        for kept in self._exchanged(index, node) if sends else ():
            outputs.append(kept.name)
            writes.append(kept)
        name = node.name if phase is node.phase else f"recompute {node.name}"
        beside = self._messages_beside(index, node, phase, names) if sends else ()
        part = beside[0] if beside else 1.0
        cast = self._cast_factors(index, node, name, phase, names) if node.product_dtype else ()
        # Gradients of several uses of a parameter are added apart from any pass in pipelines.
        sums_uses = node.role is Role.GRADIENT_SUM and TensorRef(index) in self.gradients
        task = Task(
            name=name,
            phase=phase,
            kernel=local_class(node, rules),
            dtype=node.kernel_dtype,
            flops=recipe.flops * part,
            bytes_moved=recipe.bytes_moved * part,
            shape=recipe.shape_of(part),
            launched_with=-1 if sums_uses else self._pass(phase),
        )
        instruction = Compute(node=index, inputs=names, outputs=tuple(outputs), rules=rules, cut=self._cut(index, node))
        self._add(task, instruction, (*names, *beside[1:], *cast), tuple(writes), owners)
        if inside:
            self._messages_behind(index, node, phase, tuple(name for name in outputs if name))

    def _on_host(self, index: int, node: Node, phase: Phase) -> None:
        """An operator on a table in the memory of the host: what it reads goes there, rows come to the device."""
        source, recipe, ref = self.source, self.source.recipe(index), TensorRef(index)
        made = self._value_name(ref, recipe.outputs[0])
        inputs = []
        names = self._read_on_host(index, node, phase)
        for name, read, placements in zip(names, node.tensor_inputs, recipe.inputs, strict=True):
            inputs.append(name)
            if not source.host.holds(read):
                inputs[-1] = f"{name} on the host for {made}"
                there = Buffer(name=inputs[-1], size_bytes=0, kind=BufferKind.COMMUNICATION)
                size = source.local_bytes(self.graph.spec(read), placements)
                self._host_copy(name, there, size, phase, to_host=True)
        stays = source.host.holds(ref)
        result = Buffer(name=made if stays else f"{made} on the host", size_bytes=0, kind=self._kind(ref))
        task = Task(
            name=node.name if phase is node.phase else f"recompute {node.name}",
            phase=phase,
            kernel=node.timed_as,
            dtype=node.kernel_dtype,
            flops=recipe.flops,
            bytes_moved=recipe.bytes_moved,
            on_host=True,
        )
        instruction = Compute(
            node=index, inputs=tuple(inputs), outputs=(result.name,), rules=source.rules[index], on_host=True
        )
        self._add(task, instruction, tuple(inputs), (result,))
        if not stays:
            rows = Buffer(name=made, size_bytes=recipe.sizes[0], kind=self._kind(ref))
            self._host_copy(result.name, rows, recipe.sizes[0], phase, to_host=False)
        self.versions[ref] = {recipe.outputs[0]: made}

    def _read_on_host(self, index: int, node: Node, phase: Phase) -> tuple[str, ...]:
        """Values that an operator on the host reads: of a table that the device has a copy of, the table itself."""
        copies = {
            read: (self.renamed.pop(read), self.versions[read])
            for read in node.tensor_inputs
            if read in self.renamed and read.node in self.source.host.parameters
        }
        for read in copies:
            stored = {self.source.stored[read.node]: self.graph.nodes[read.node].name}
            self.versions[read] = self.tables.setdefault(read, stored)
        names = self._read(index, node, phase)
        for read, (name, versions) in copies.items():
            self.renamed[read], self.versions[read] = name, versions
        return names

    def _read(self, index: int, node: Node, phase: Phase) -> tuple[str, ...]:
        """Values an operator reads; the gradient of an exchanging attention those that were exchanged."""
        wanted = list(zip(node.tensor_inputs, self.source.recipe(index).inputs, strict=True))
        back = bool(self.exchanged) and node.phase is Phase.BACKWARD and self._exchanges(index)
        kept = self.exchanged.get(node.forward, ()) if back else ()
        if not kept:
            known = [self.versions[ref].get(placements) for ref, placements in wanted]
            if None not in known:
                return tuple([name for name in known if name is not None])
            return tuple([self._fetch(ref, placements, phase) for ref, placements in wanted])
        first, last = (self._fetch(*wanted[place], phase) for place in (0, 1 + len(kept)))
        return (first, *kept, last, *(self._fetch(*more, phase) for more in wanted[2 + len(kept) :]))

    def _cut(self, index: int, node: Node) -> SequenceCut | None:
        """How a dropout, which must know the places of its elements, is shared along a context axis."""
        if node.op != DROPOUT:
            return None
        places = enumerate(self.source.recipe(index).outputs[0])
        cuts = (self.source.cut(TensorRef(index), axis, dim) for axis, dim in places if dim >= 0)
        return next((cut for cut in cuts if cut is not None), None)

    def _exchanges(self, index: int) -> bool:
        messages = (message for rule in self.source.rules[index] for message in rule.messages)
        return any(message.collective in EXCHANGES for message in messages)

    def _exchanged(self, index: int, node: Node) -> list[Buffer]:
        """Query, key, value and output of an attention over whole sequences by this rank's heads, for the gradient."""
        if node.phase is Phase.BACKWARD or not self._exchanges(index):
            return []
        recipe, shares = self.source.recipe(index), self.source.shares(index)
        base = self._value_name(TensorRef(index), recipe.outputs[0])
        kind = BufferKind.RECOMPUTED if TensorRef(index) in self.renamed else BufferKind.ACTIVATION
        messages = [replace(message, elements=0, gathered=1) for _, message in self._inner(index)]
        alone = [replace(m, tensors=(place,)) for m in messages for place in m.tensors]
        sizes = [message_bytes(self.graph, node, one, shares) for one in alone]
        made = [
            Buffer(name=f"exchanged {what} of {base}", size_bytes=int(size), kind=kind)
            for what, size in zip(("query", "key", "value", "output"), sizes, strict=True)
        ]
        self.exchanged[index] = tuple(buffer.name for buffer in made)
        return made

    def _cast_factors(
        self, index: int, node: Node, name: str, phase: Phase, inputs: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Time the casts of a product's factors in one kernel; returns what the product waits for.

        What is cast lives for one product: its bytes are left out.
        """
        task = Task(
            name=f"cast the factors of {name}",
            phase=phase,
            kernel=Kernel.ELEMENTWISE,
            dtype=node.outputs[0].dtype,
            bytes_moved=cast_bytes(self.graph, node, self.source.shares(index)),
            launched_with=self._pass(phase),
        )
        made = Buffer(name=f"{node.product_dtype} factors of {name}", size_bytes=0, kind=BufferKind.COMMUNICATION)
        nothing = Compute(node=index, inputs=inputs[-2:], outputs=(), rules=())
        self._add(task, nothing, inputs[-2:], (made,))
        return (made.name,)

    def _kind(self, ref: TensorRef) -> BufferKind:
        if ref in self.gradients:
            return BufferKind.GRADIENT
        return BufferKind.RECOMPUTED if ref in self.renamed else BufferKind.ACTIVATION

    def _messages_behind(self, index: int, node: Node, phase: Phase, outputs: tuple[str, ...]) -> None:
        """Time the collectives inside an operator right after it; the operator's instruction runs them."""
        for axis, message in self._inner(index):
            if not message.overlapped:
                self._inner_message(index, node, phase, axis, message, completes=outputs)

    def _messages_beside(
        self, index: int, node: Node, phase: Phase, inputs: tuple[str, ...]
    ) -> tuple[float, str] | tuple[()]:
        """Time the messages that travel while an operator works on the pieces it has.

        All but the last piece of the work runs beside them. Returns the part of the work that is left for the last
        piece and the value it waits for; nothing where no message is overlapped.
        """
        found = [(axis, message) for axis, message in self._inner(index) if message.overlapped]
        if not found:
            return ()
        recipe = self.source.recipe(index)
        pieces = max(message_count(message, self.source.sizes[axis]) for axis, message in found) + 1
        task = Task(
            name=f"{node.name}, all but the last piece",
            phase=phase,
            kernel=node.timed_as,
            dtype=node.outputs[0].dtype,
            flops=recipe.flops * (1 - 1 / pieces),
            bytes_moved=recipe.bytes_moved * (1 - 1 / pieces),
            shape=recipe.shape_of(1 - 1 / pieces),
            launched_with=self._pass(phase),
        )
        nothing = Communicate(collective=found[0][1].collective, axis=found[0][0])
        self._add(task, nothing, inputs, ())
        arrived = f"pieces of {self._value_name(TensorRef(index), recipe.outputs[0])}"
        for axis, message in found:
            self._inner_message(index, node, phase, axis, message, waits_for=inputs)
        last = self.drafts[-1]
        last.writes = (Buffer(name=arrived, size_bytes=0, kind=BufferKind.COMMUNICATION),)
        return 1 / pieces, arrived

    def _inner(self, index: int) -> list[tuple[int, InnerMessage]]:
        return [
            (axis, self._local(index, m))
            for axis, rule in enumerate(self.source.rules[index])
            for m in inner_messages(rule)
        ]

    def _local(self, index: int, message: InnerMessage) -> InnerMessage:
        """A message with as many copies of a head as lie on one rank."""
        if message.divisor == 1 or message.uncut:
            return message
        recipe, node = self.source.recipe(index), self.graph.nodes[index]
        shape = local_shape(self.graph.spec(node.tensor_inputs[0]).shape, recipe.inputs[0], self.source.sizes)
        return replace(message, divisor=copies_among(message.divisor, shape[1]))

    def _inner_message(
        self,
        index: int,
        node: Node,
        phase: Phase,
        axis: int,
        message: InnerMessage,
        *,
        completes: tuple[str, ...] = (),
        waits_for: tuple[str, ...] = (),
    ) -> None:
        payload = message_bytes(self.graph, node, message, self.source.shares(index), self.source.sizes[axis])
        inner = Communicate(collective=message.collective, axis=axis)
        for _ in range(message_count(message, self.source.sizes[axis])):
            name = f"{message.collective} inside {node.name}"
            base = self._value_name(TensorRef(index), self.source.recipe(index).outputs[0])
            came = f"gathered by message {len(self.drafts)} for {base}"
            whole = Buffer(name=came, size_bytes=int(payload), kind=BufferKind.COMMUNICATION)
            writes = (whole,) if message.gathered > 1 else ()
            dtype = "float32" if message.elements or message.uncut else node.outputs[0].dtype
            self._message(name, phase, inner, payload, completes=completes, writes=writes, dtype=dtype)
            self.drafts[-1].reads = waits_for
