"""A plan becomes a program: local operators and explicit collectives, in order, with their buffers.

What is simulated and what is executed both come from here. A step is a chain of segments, one
micro-batch each: the first gathers parameters that are stored sharded, the last synchronises the
accumulated gradients in fused messages beside the backward pass and updates the stored shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from planner.graph.operator_graph import DTYPE_BYTES, Node, OperatorGraph, Role, TensorRef, TensorSpec
from planner.instructions import (
    Accumulate,
    Communicate,
    Compute,
    Instruction,
    LoweredInput,
    LoweredPlan,
    Mask,
    Slice,
    StoredParameter,
    Update,
)
from planner.sharding.placement import REPLICATE, Mesh, Placements, placement_name
from planner.sharding.redistribution import Step, redistribution
from planner.sharding.rules import Rule
from planner.strategy.plan import NodeRules
from planner.work import Optimizer, state_bytes, traffic_bytes, update_traffic
from simulator.errors import StrategyError
from simulator.program import (
    Buffer,
    BufferKind,
    Collective,
    Kernel,
    Phase,
    Program,
    ProgramAxis,
    Segment,
    Task,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringOptions:
    """What a plan says beside the strategies."""

    mesh: Mesh
    micro_batches: int
    optimizer: Optimizer
    bucket_bytes: int


def lower_graph(graph: OperatorGraph, rules: Mapping[str, NodeRules], options: LoweringOptions) -> LoweredPlan:
    """Lower an unfolded graph with the strategies of its nodes, by name.

    Every tensor is redistributed at most once to each placement, from the version at hand that is
    cheapest to start from.
    """
    source = _Source(graph, rules, options)
    count = options.micro_batches
    kinds = [(True, True, 1)] if count == 1 else [(True, False, 1), (False, False, count - 2), (False, True, 1)]
    segments, instructions = [], []
    body = _Body(source)
    for first, last, repeat in kinds:
        if repeat:
            writer = _SegmentWriter(source, body, first=first, last=last)
            tasks, made = writer.write()
            name = "step" if first and last else "first" if first else "last" if last else "middle"
            segments.append(Segment(name=name, tasks=tasks, count=repeat))
            instructions.append(made)
    program = Program(
        name=graph.network,
        devices=options.mesh.size,
        axes=tuple(
            ProgramAxis(name=a.name, size=a.size, stride=options.mesh.stride(i))
            for i, a in enumerate(options.mesh.axes)
        ),
        segments=tuple(segments),
        resident=tuple(source.resident()),
    )
    return LoweredPlan(
        graph=graph,
        mesh=options.mesh,
        program=program,
        instructions=tuple(instructions),
        parameters=tuple(
            StoredParameter(name=p.name, value=graph.nodes[p.node].name, placements=source.stored[p.node])
            for p in graph.parameters
        ),
        inputs=tuple(
            LoweredInput(name=i.name, value=graph.nodes[i.node].name, placements=source.stored[i.node])
            for i in graph.inputs
        ),
        loss=source.loss_value,
        micro_batches=count,
    )


def local_share(placements: Placements, sizes: tuple[int, ...]) -> float:
    """Part of a tensor that one rank holds."""
    return 1.0 / prod(size for p, size in zip(placements, sizes, strict=True) if p >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """Placements of a node's inputs and outputs, bytes of each local output, and the local work."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    sizes: tuple[int, ...]
    flops: float
    bytes_moved: float


class _Source:
    """The graph with its strategies, and what follows from them for every segment."""

    def __init__(self, graph: OperatorGraph, rules: Mapping[str, NodeRules], options: LoweringOptions) -> None:
        self.graph = graph
        self.options = options
        self.sizes = options.mesh.sizes
        axes = len(self.sizes)
        self.replicated: Placements = (REPLICATE,) * axes
        self._recipes: dict[tuple[int, int, str], _Recipe] = {}
        self.gradient_of = {p.gradient: p.node for p in graph.parameters if p.gradient is not None}
        self.rules: list[NodeRules] = []
        for node in graph.nodes:
            if node.role is Role.CONSTANT:
                everywhere = Rule(
                    (REPLICATE,) * len(node.tensor_inputs), (REPLICATE,) * len(node.outputs), splits_work=False
                )
                self.rules.append((everywhere,) * axes)
            else:
                self.rules.append(rules[node.name])
        self.stored: dict[int, Placements] = {
            i: self.output_placements(TensorRef(i))
            for i, node in enumerate(graph.nodes)
            if node.role in (Role.PARAMETER, Role.INPUT)
        }
        self.read = {*graph.consumers, graph.loss, *(p.gradient for p in graph.parameters if p.gradient)}
        self.loss_value = self.value_name(graph.loss, self.replicated)

    def recipe(self, index: int) -> _Recipe:
        """Local work of a node; equal blocks with equal strategies share it."""
        node, rules = self.graph.nodes[index], self.rules[index]
        key = (id(node.outputs), id(rules), node.op)
        if key not in self._recipes:
            inputs = tuple(
                tuple(rule.inputs[position] for rule in rules) for position in range(len(node.tensor_inputs))
            )
            outputs = tuple(tuple(rule.outputs[o] for rule in rules) for o in range(len(node.outputs)))
            shares = [local_share(placements, self.sizes) for placements in (*inputs, *outputs)]
            split = prod(size for rule, size in zip(rules, self.sizes, strict=True) if rule.splits_work)
            self._recipes[key] = _Recipe(
                inputs=inputs,
                outputs=outputs,
                sizes=tuple(self.local_bytes(spec, p) for spec, p in zip(node.outputs, outputs, strict=True)),
                flops=node.flops / split,
                bytes_moved=traffic_bytes(self.graph, node, shares),
            )
        return self._recipes[key]

    def output_placements(self, ref: TensorRef) -> Placements:
        return self.recipe(ref.node).outputs[ref.output]

    def local_bytes(self, spec: TensorSpec, placements: Placements) -> int:
        return int(spec.size_bytes * local_share(placements, self.sizes))

    def written_name(self, ref: TensorRef) -> str:
        """Name of a tensor in the placement its node writes."""
        node = self.graph.nodes[ref.node]
        return node.name if len(node.outputs) == 1 else f"{node.name}:{ref.output}"

    def value_name(self, ref: TensorRef, placements: Placements) -> str:
        """Name of a tensor in one placement; as written, it is called like its node."""
        name = self.written_name(ref)
        if placements == self.output_placements(ref):
            return name
        return f"{name}@{','.join(map(placement_name, placements))}"

    def gathered(self, node: int) -> list[Placements]:
        """Placements other than the stored one in which a parameter is read and that need a message."""
        ref = TensorRef(node)
        wanted: dict[Placements, None] = {}
        for user in self.graph.consumers.get(ref, ()):
            for placements, used in zip(self.recipe(user).inputs, self.graph.nodes[user].tensor_inputs, strict=True):
                if used == ref:
                    wanted[placements] = None
        return [w for w in wanted if any(isinstance(s.operation, Collective) for s in self.path(self.stored[node], w))]

    def path(self, source: Placements, target: Placements) -> tuple[Step, ...]:
        steps = redistribution(source, target)
        if steps is None:
            names = (",".join(map(placement_name, placements)) for placements in (source, target))
            raise StrategyError(
                f"a tensor that is written as {next(names)} is read as {next(names)}, and nothing sharded can become "
                "partial; plan the network again"
            )
        return steps

    def volume(self, steps: tuple[Step, ...]) -> float:
        """Share of a tensor that a path puts on the wire."""
        return sum(
            (2.0 if s.operation is Collective.ALL_REDUCE else 1.0) / prod(self.sizes[a] for a in s.sharded_axes)
            for s in steps
            if isinstance(s.operation, Collective)
        )

    def resident(self) -> list[Buffer]:
        """Parameters, optimizer states and the batch."""
        buffers = []
        for index, placements in self.stored.items():
            node = self.graph.nodes[index]
            spec = node.outputs[0]
            size = self.local_bytes(spec, placements)
            kind = BufferKind.PARAMETER if node.role is Role.PARAMETER else BufferKind.ACTIVATION
            buffers.append(Buffer(name=node.name, size_bytes=size, kind=kind))
            states = state_bytes(self.options.optimizer, spec.dtype) * size // DTYPE_BYTES[spec.dtype]
            if node.role is Role.PARAMETER and states:
                name = f"{node.name}.states"
                buffers.append(Buffer(name=name, size_bytes=states, kind=BufferKind.OPTIMIZER_STATE))
        return buffers


@dataclass(slots=True)
class _Draft:
    """A task being written: its values are resolved to dependencies and releases at the end."""

    task: Task
    instruction: Instruction
    reads: tuple[str, ...]
    writes: tuple[Buffer, ...]
    owners: dict[str, str] = field(default_factory=dict)
    completes: tuple[str, ...] = ()
    """Values that are ready only after this task although an earlier one writes them."""


def _finished(task: Task, after: tuple[int, ...], allocates: tuple[Buffer, ...], releases: tuple[str, ...]) -> Task:
    """Complete a draft's task; written out because `dataclasses.replace` is several times slower."""
    return Task(
        name=task.name,
        phase=task.phase,
        stream=task.stream,
        after=after,
        kernel=task.kernel,
        dtype=task.dtype,
        flops=task.flops,
        bytes_moved=task.bytes_moved,
        collective=task.collective,
        axis=task.axis,
        payload_bytes=task.payload_bytes,
        allocates=allocates,
        releases=releases,
    )


@dataclass(slots=True)
class _Pending:
    """Gradients waiting to travel together."""

    entries: list[tuple[int, str, tuple[Step, ...]]] = field(default_factory=list)
    size_bytes: int = 0


class _Writer:
    """Writes tasks and instructions, and knows every tensor's versions so far."""

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.graph = source.graph
        self.drafts: list[_Draft] = []
        self.versions: dict[TensorRef, dict[Placements, str]] = {
            TensorRef(index): {placements: self.graph.nodes[index].name} for index, placements in source.stored.items()
        }

    def _fetch(self, ref: TensorRef, wanted: Placements, phase: Phase) -> str:
        versions = self.versions[ref]
        if wanted not in versions:
            ways = [steps for p in versions if (steps := redistribution(p, wanted)) is not None]
            ways = ways or [self.source.path(next(iter(versions)), wanted)]
            for step in min(ways, key=self.source.volume):
                if step.after not in versions:
                    versions[step.after] = self._move(ref, versions[step.before], step, phase)
        return versions[wanted]

    def _move(self, ref: TensorRef, value: str, step: Step, phase: Phase, *, asynchronous: bool = False) -> str:
        target = self.source.value_name(ref, step.after)
        self._step([(ref, value, target)], step, phase, asynchronous)
        return target

    def _step(self, items: list[tuple[TensorRef, str, str]], step: Step, phase: Phase, asynchronous: bool) -> None:
        """One move of one or several tensors along one axis."""
        source = self.source
        specs = [self.graph.spec(ref) for ref, _, _ in items]
        sizes = [source.local_bytes(spec, step.after) for spec in specs]
        kinds = [self._moved_kind(ref) for ref, _, _ in items]
        writes = tuple(
            Buffer(name=t, size_bytes=size, kind=kind)
            for (_, _, t), size, kind in zip(items, sizes, kinds, strict=True)
        )
        if not isinstance(step.operation, Collective):
            (_, value, target), size = items[0], sizes[0]
            kernel = {"kernel": Kernel.COPY, "bytes_moved": 2.0 * size, "dtype": specs[0].dtype}
            task = Task(name=f"{step.operation} {value}", phase=phase, **kernel)  # type: ignore[arg-type]
            instruction: Instruction = (
                Slice(source=value, target=target, axis=step.axis, dim=step.split_dim)
                if step.operation == "slice"
                else Mask(source=value, target=target, axis=step.axis)
            )
            self._add(task, instruction, (value,), writes)
            return
        payload = sum(spec.size_bytes for spec in specs) / prod(source.sizes[a] for a in step.sharded_axes)
        message = Communicate(
            collective=step.operation,
            axis=step.axis,
            sources=tuple(value for _, value, _ in items),
            targets=tuple(target for _, _, target in items),
            gather_dims=(step.gather_dim,) * len(items),
            split_dims=(step.split_dim,) * len(items),
            asynchronous=asynchronous,
        )
        what = items[0][1] if len(items) == 1 else f"{len(items)} tensors from {items[0][1]}"
        self._message(f"{step.operation} {what}", phase, message, payload, writes=writes, dtype=specs[0].dtype)

    def _moved_kind(self, ref: TensorRef) -> BufferKind:
        role = self.graph.nodes[ref.node].role
        if role is Role.PARAMETER:
            return BufferKind.PARAMETER
        return BufferKind.GRADIENT if ref in self.source.gradient_of else BufferKind.COMMUNICATION

    def _message(
        self,
        name: str,
        phase: Phase,
        message: Communicate,
        payload: float,
        *,
        writes: tuple[Buffer, ...] = (),
        dtype: str = "float32",
        completes: tuple[str, ...] = (),
    ) -> None:
        axis = self.source.options.mesh.axes[message.axis].name
        task = Task(
            name=name,
            phase=phase,
            stream=f"communication:{axis}",
            dtype=dtype,
            collective=message.collective,
            axis=axis,
            payload_bytes=payload,
        )
        self._add(task, message, message.sources, writes)
        self.drafts[-1].completes = completes

    def _add(
        self,
        task: Task,
        instruction: Instruction,
        reads: tuple[str, ...],
        writes: tuple[Buffer, ...],
        owners: dict[str, str] | None = None,
    ) -> None:
        self.drafts.append(_Draft(task, instruction, reads, writes, owners or {}))


class _Body(_Writer):
    """The forward and backward operators of one micro-batch, the same in every segment.

    ``items`` are drafts, and the gradients of parameters where they are complete.
    """

    def __init__(self, source: _Source) -> None:
        super().__init__(source)
        self.items: list[_Draft | TensorRef] = []
        for parameter in self.graph.parameters:
            ref = TensorRef(parameter.node)
            for wanted in source.gathered(parameter.node):
                self.versions[ref][wanted] = source.value_name(ref, wanted)
        for index, node in enumerate(self.graph.nodes):
            if node.role in (Role.PARAMETER, Role.INPUT):
                continue
            self._compute(index, node)
            for output in range(len(node.outputs)):
                ref = TensorRef(index, output)
                if ref == self.graph.loss:
                    self._fetch(ref, source.replicated, Phase.FORWARD)
                if ref in source.gradient_of:
                    self._collect()
                    self.items.append(ref)
        self._collect()

    def _collect(self) -> None:
        self.items += self.drafts
        self.drafts = []

    def _compute(self, index: int, node: Node) -> None:
        source, recipe = self.source, self.source.recipe(index)
        names = tuple(
            self._fetch(ref, wanted, node.phase) for ref, wanted in zip(node.tensor_inputs, recipe.inputs, strict=True)
        )
        outputs, writes, owners = [], [], {}
        view = node.kernel is Kernel.VIEW and bool(names)
        for output, placements in enumerate(recipe.outputs):
            ref = TensorRef(index, output)
            name = source.written_name(ref) if ref in source.read else ""
            outputs.append(name)
            if name:
                kind = BufferKind.GRADIENT if ref in source.gradient_of else BufferKind.ACTIVATION
                writes.append(Buffer(name=name, size_bytes=0 if view else recipe.sizes[output], kind=kind))
                self.versions[ref] = {placements: name}
                if view:
                    owners[name] = names[0]
        task = Task(
            name=node.name,
            phase=node.phase,
            kernel=node.kernel,
            dtype=node.outputs[0].dtype,
            flops=recipe.flops,
            bytes_moved=recipe.bytes_moved,
        )
        rules = source.rules[index]
        instruction = Compute(node=index, inputs=names, outputs=tuple(outputs), rules=rules)
        self._add(task, instruction, names, tuple(writes), owners)
        if any(rule.reduced_elements for rule in rules):
            self._inner_reductions(node, rules, tuple(name for name in outputs if name))

    def _inner_reductions(self, node: Node, rules: NodeRules, outputs: tuple[str, ...]) -> None:
        """Time the collectives inside an operator right after it; the operator's instruction runs them."""
        for axis, rule in enumerate(rules):
            if rule.reduced_elements:
                payload = rule.reduced_elements * DTYPE_BYTES[node.outputs[0].dtype]
                inner = Communicate(
                    collective=Collective.ALL_REDUCE, axis=axis, sources=(), targets=(), gather_dims=(), split_dims=()
                )
                self._message(f"all_reduce inside {node.name}", node.phase, inner, payload, completes=outputs)


class _SegmentWriter(_Writer):
    """Writes the tasks and instructions of one micro-batch."""

    def __init__(self, source: _Source, body: _Body, *, first: bool, last: bool) -> None:
        super().__init__(source)
        self.body = body
        self.first = first
        self.last = last
        self.pending: dict[tuple[Collective, int, str], _Pending] = {}
        self.synchronised: list[tuple[int, str]] = []
        self.persistent = {self.graph.nodes[i].name for i in source.stored} | {source.loss_value}

    def write(self) -> tuple[tuple[Task, ...], tuple[Instruction, ...]]:
        self._gather_parameters()
        for item in self.body.items:
            if isinstance(item, TensorRef):
                self._gradient(item, self.source.gradient_of[item])
            else:
                self.drafts.append(item)
        if self.last:
            self._finish()
        return self._resolve()

    # Parameters and gradients

    def _gather_parameters(self) -> None:
        """Fetch stored shards once a step, in fused messages ahead of their use."""
        pending: dict[tuple[str, int, Placements, Placements, str], list[tuple[TensorRef, str, str]]] = {}
        size: dict[object, int] = {}
        for parameter in self.graph.parameters:
            ref = TensorRef(parameter.node)
            for wanted in self.source.gathered(parameter.node):
                steps = self.source.path(self.source.stored[parameter.node], wanted)
                self.persistent.add(self.source.value_name(ref, wanted))
                if not self.first:
                    self.versions[ref][wanted] = self.source.value_name(ref, wanted)
                elif len(steps) > 1:
                    self._gather_in_steps(ref, wanted, steps)
                else:
                    step = steps[0]
                    target = self.source.value_name(ref, wanted)
                    self.versions[ref][wanted] = target
                    spec = self.graph.spec(ref)
                    place = (str(step.operation), step.axis, step.before, step.after, spec.dtype)
                    pending.setdefault(place, []).append((ref, self.graph.nodes[ref.node].name, target))
                    size[place] = size.get(place, 0) + self.source.local_bytes(spec, step.after)
                    if size[place] >= self.source.options.bucket_bytes:
                        self._step(pending.pop(place), step, Phase.FORWARD, asynchronous=True)
                        size[place] = 0
        for key, items in pending.items():
            step = self.source.path(key[2], key[3])[0]
            self._step(items, step, Phase.FORWARD, asynchronous=True)

    def _gather_in_steps(self, ref: TensorRef, wanted: Placements, steps: tuple[Step, ...]) -> None:
        value, goal = self.graph.nodes[ref.node].name, self.source.value_name(ref, wanted)
        for number, step in enumerate(steps, 1):
            target = goal if number == len(steps) else f"{goal}.step{number}"
            self._step([(ref, value, target)], step, Phase.FORWARD, asynchronous=True)
            value = target
        self.versions[ref][wanted] = goal

    def _gradient(self, ref: TensorRef, parameter: int) -> None:
        placements = self.source.output_placements(ref)
        value = self.source.value_name(ref, placements)
        spec = self.graph.spec(ref)
        if self.source.options.micro_batches > 1:
            accumulator = f"{self.graph.nodes[parameter].name}.accumulated"
            self.persistent.add(accumulator)
            size = self.source.local_bytes(spec, placements)
            moved = 0.0 if self.first else 3.0 * size
            task = Task(
                name=f"accumulate {self.graph.nodes[parameter].name}",
                phase=Phase.BACKWARD,
                kernel=Kernel.VIEW if self.first else Kernel.ELEMENTWISE,
                dtype=spec.dtype,
                bytes_moved=moved,
            )
            writes = (Buffer(name=accumulator, size_bytes=size, kind=BufferKind.GRADIENT),) if self.first else ()
            instruction = Accumulate(source=value, accumulator=accumulator, first=self.first)
            self._add(task, instruction, (value,) if self.first else (value, accumulator), writes)
            self.drafts[-1].completes = (accumulator,)
            value = accumulator
        if self.last:
            self._synchronise(parameter, value, self.source.path(placements, self.source.stored[parameter]))

    def _synchronise(self, parameter: int, value: str, steps: tuple[Step, ...]) -> None:
        """Queue a gradient's next message; full buckets travel at once."""
        if not steps:
            self.synchronised.append((parameter, value))
            return
        step = steps[0]
        ref = next(p.gradient for p in self.graph.parameters if p.node == parameter and p.gradient)
        if not isinstance(step.operation, Collective):
            target = self._synchronised_name(parameter, step)
            self._step([(ref, value, target)], step, Phase.BACKWARD, asynchronous=False)
            self._synchronise(parameter, target, steps[1:])
            return
        spec = self.graph.spec(ref)
        key = (step.operation, step.axis, spec.dtype)
        bucket = self.pending.setdefault(key, _Pending())
        bucket.entries.append((parameter, value, steps))
        bucket.size_bytes += int(spec.size_bytes / prod(self.source.sizes[a] for a in step.sharded_axes))
        if bucket.size_bytes >= self.source.options.bucket_bytes:
            self._flush(key)

    def _synchronised_name(self, parameter: int, step: Step) -> str:
        return f"{self.graph.nodes[parameter].name}.gradient@{','.join(map(placement_name, step.after))}"

    def _flush(self, key: tuple[Collective, int, str]) -> None:
        bucket = self.pending.pop(key)
        gradients = {p.node: p.gradient for p in self.graph.parameters}
        items, dims, payload, writes, after = [], [], 0.0, [], []
        for parameter, value, steps in bucket.entries:
            step, ref = steps[0], gradients[parameter]
            assert ref is not None  # only parameters with a gradient are queued
            target = self._synchronised_name(parameter, step)
            spec = self.graph.spec(ref)
            items.append((value, target))
            dims.append((step.gather_dim, step.split_dim))
            payload += spec.size_bytes / prod(self.source.sizes[a] for a in step.sharded_axes)
            size = self.source.local_bytes(spec, step.after)
            writes.append(Buffer(name=target, size_bytes=size, kind=BufferKind.GRADIENT))
            after.append((parameter, target, steps[1:]))
        message = Communicate(
            collective=key[0],
            axis=key[1],
            sources=tuple(value for value, _ in items),
            targets=tuple(target for _, target in items),
            gather_dims=tuple(gather for gather, _ in dims),
            split_dims=tuple(split for _, split in dims),
            asynchronous=True,
        )
        name = f"{key[0]} gradients of {self.graph.nodes[bucket.entries[0][0]].name}"
        if len(items) > 1:
            name += f" and {len(items) - 1} more"
        self._message(name, Phase.BACKWARD, message, payload, writes=tuple(writes), dtype=key[2])
        for parameter, target, steps in after:
            self._synchronise(parameter, target, steps)

    def _finish(self) -> None:
        """Send what still waits, then update every parameter."""
        while self.pending:
            self._flush(next(iter(self.pending)))
        update = self.source.options.optimizer
        for parameter, value in self.synchronised:
            node = self.graph.nodes[parameter]
            spec = node.outputs[0]
            elements = spec.elements * local_share(self.source.stored[parameter], self.source.sizes)
            task = Task(
                name=f"update {node.name}",
                phase=Phase.UPDATE,
                kernel=Kernel.OPTIMIZER,
                dtype=spec.dtype,
                flops=elements * update.flops,
                bytes_moved=elements * update_traffic(update, spec.dtype),
            )
            instruction = Update(parameter=node.name, gradient=value, divisor=self.source.options.micro_batches)
            self._add(task, instruction, (node.name, value), ())

    def _resolve(self) -> tuple[tuple[Task, ...], tuple[Instruction, ...]]:
        """Turn values into dependencies and releases: a value goes when its last reader, or that of a view, is done."""
        producer: dict[str, int] = {}
        last_use: dict[str, int] = {}
        owners: dict[str, str] = {}
        after: list[tuple[int, ...]] = []
        streams = [draft.task.stream for draft in self.drafts]
        for index, draft in enumerate(self.drafts):
            stream = streams[index]
            needs = {n for v in draft.reads if (n := producer.get(v)) is not None and streams[n] != stream}
            if draft.completes:
                if draft.task.collective is not None:
                    needs.add(index - 1)
                producer.update(dict.fromkeys(draft.completes, index))
            after.append(tuple(sorted(needs)) if needs else ())
            for buffer in draft.writes:
                producer[buffer.name] = last_use[buffer.name] = index
            if draft.owners:
                owners.update(draft.owners)
            for value in draft.reads:
                last_use[value] = index
                while value in owners:
                    value = owners[value]
                    last_use[value] = index
        keep = self._kept()
        releases: dict[int, list[str]] = {}
        for value, index in last_use.items():
            if value not in keep and (value in producer or self._dropped_here(value)):
                releases.setdefault(index, []).append(value)
        tasks = tuple(
            _finished(d.task, after=a, allocates=self._new(d.writes), releases=tuple(releases.get(i, ())))
            for i, (d, a) in enumerate(zip(self.drafts, after, strict=True))
        )
        return tasks, tuple(d.instruction for d in self.drafts)

    def _new(self, writes: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        """Buffers that are not there yet: the loss stays from one micro-batch to the next."""
        return writes if self.first else tuple(b for b in writes if b.name != self.source.loss_value)

    def _kept(self) -> set[str]:
        """Values that outlive the segment: parameters, the batch, the loss, and what a later micro-batch needs."""
        stored = {self.graph.nodes[i].name for i in self.source.stored} | {self.source.loss_value}
        return stored if self.last else stored | self.persistent

    def _dropped_here(self, value: str) -> bool:
        """Whether a value of an earlier segment ends its life in this one."""
        return self.last and value in self.persistent
