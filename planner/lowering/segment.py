"""One micro-batch: parameters gathered before, gradients accumulated, synchronised and applied after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod

from planner.graph.operator_graph import TensorRef
from planner.instructions import (
    Accumulate,
    Communicate,
    Instruction,
    Update,
)
from planner.lowering.body import Body, Gather
from planner.lowering.placed import PlacedGraph, local_share
from planner.lowering.together import together
from planner.lowering.writer import Moved, Writer, finished
from planner.sharding.placement import Placements, placement_name
from planner.sharding.redistribution import Step
from planner.work import update_traffic
from simulator.program import (
    COMPUTE_STREAM,
    HOST,
    Buffer,
    BufferKind,
    Collective,
    Kernel,
    Phase,
    Task,
)

Then = Callable[[int, str], None]
"""Takes a parameter and the value that its gradient has become."""


@dataclass(slots=True)
class _Pending:
    """Gradients waiting to travel together."""

    entries: list[tuple[int, str, tuple[Step, ...], Then]] = field(default_factory=list)
    size_bytes: int = 0


def host_copy(size_bytes: float) -> Task:
    """A task that moves bytes between a device and its host."""
    return Task(
        name="optimizer states in host memory",
        phase=Phase.UPDATE,
        kernel=Kernel.COPY,
        axis=HOST,
        bytes_moved=size_bytes,
    )


class SegmentWriter(Writer):
    """Writes the tasks and instructions of one micro-batch."""

    def __init__(self, source: PlacedGraph, body: Body, *, first: bool, last: bool) -> None:
        super().__init__(source)
        self.body = body
        self.first = first
        self.last = last
        self.pending: dict[tuple[Collective, int, str], _Pending] = {}
        self.synchronised: list[tuple[int, str]] = []
        self.persistent = {self.graph.nodes[i].name for i in source.stored} | {source.loss_value}

    def write(self) -> tuple[tuple[Task, ...], tuple[Instruction, ...]]:
        """Return the segment's tasks, with dependencies and releases, and their instructions."""
        self._gather_parameters()
        gathers = [item for item in self.body.items if isinstance(item, Gather)]
        passed = 0
        for item in self.body.items:
            if isinstance(item, TensorRef):
                self._gradient(item, self.source.gradient_of[item])
            elif isinstance(item, Gather):
                self._gather_units(gathers, passed)
                passed += 1
            else:
                self.drafts.append(item)
        while self.pending:
            self._flush(next(iter(self.pending)))
        if self.last:
            self._update()
        return self._resolve()

    # Parameters and gradients

    def _gather_parameters(self) -> None:
        """Fetch stored shards once a step, in fused messages ahead of their use."""
        values = []
        for parameter in self.graph.parameters:
            if parameter.node in self.source.by_unit:
                continue
            ref = TensorRef(parameter.node)
            for wanted in self.source.gathered(parameter.node):
                name = self.source.value_name(ref, wanted)
                self.persistent.add(name)
                if self.first:
                    values.append((ref, wanted, name))
                else:
                    self.versions[ref][wanted] = name
        self._gather(values, Phase.FORWARD, self.source.options.bucket_bytes)

    def _gather(
        self, values: Sequence[tuple[TensorRef, Placements, str]], phase: Phase, limit_bytes: float = inf
    ) -> None:
        """Fetch the given parameters in messages that are full at `limit_bytes`."""
        specs = [self.graph.spec(ref) for ref, *_ in values]
        ways = [self.source.path(self.source.stored[ref.node], wanted) for ref, wanted, _ in values]
        names = [self.graph.nodes[ref.node].name for ref, *_ in values]
        done = [0] * len(values)

        def size_bytes(number: int, step: Step) -> float:
            return self.source.local_bytes(specs[number], step.after)

        for moves in together(ways, [spec.dtype for spec in specs], size_bytes, limit_bytes):
            items: list[Moved] = []
            for number, step in moves:
                ref, _, goal = values[number]
                done[number] += 1
                target = goal if done[number] == len(ways[number]) else f"{goal}.step{done[number]}"
                items.append((ref, names[number], target, step))
                names[number] = target
            self._step(items, phase, asynchronous=True)
        for ref, wanted, goal in values:
            self.versions[ref][wanted] = goal

    def _gather_units(self, gathers: Sequence[Gather], position: int) -> None:
        """At the first operator of a unit, gather what the next one needs, and its own where none was before.

        A unit's parameters travel in one message, and so do the gradients of the unit before.
        """
        self._flush_units()
        here = gathers[position]
        starts = position == 0 or gathers[position - 1].phase is not here.phase
        wanted = [here] if starts else []
        if position + 1 < len(gathers) and gathers[position + 1].phase is here.phase:
            wanted.append(gathers[position + 1])
        for gather in wanted:
            before = len(self.drafts)
            self.unit = gather.unit
            self._gather(gather.values, gather.phase)
            for draft in self.drafts[before:]:
                draft.beside = True

    # Gradients

    def _gradient(self, ref: TensorRef, parameter: int) -> None:
        """Hand a complete gradient on: to its accumulator, or first to the rank that accumulates its part."""
        value = self.source.value_name(ref, self.source.output_placements(ref))
        ahead, _ = self.source.gradient_path(parameter)
        self._synchronise(parameter, value, ahead, self._accumulate)

    def _accumulate(self, parameter: int, value: str) -> None:
        source = self.source
        ahead, behind = source.gradient_path(parameter)
        ref = source.gradient_ref(parameter)
        spec = self.graph.spec(ref)
        placements = ahead[-1].after if ahead else source.output_placements(ref)
        if source.options.micro_batches > 1:
            accumulator = f"{self.graph.nodes[parameter].name}.accumulated"
            self.persistent.add(accumulator)
            size = source.local_bytes(spec, placements)
            moved = 0.0 if self.first else 3.0 * size
            task = Task(
                name=f"accumulate {self.graph.nodes[parameter].name}",
                phase=Phase.BACKWARD,
                stream=self.came.get(value, COMPUTE_STREAM),
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
            self._synchronise(parameter, value, behind, self._synchronised)

    def _synchronised(self, parameter: int, value: str) -> None:
        self.synchronised.append((parameter, value))

    def _synchronise(self, parameter: int, value: str, steps: tuple[Step, ...], then: Then) -> None:
        """Queue a gradient's next message; full buckets travel at once, and `then` takes what arrives."""
        if not steps:
            then(parameter, value)
            return
        step = steps[0]
        ref = self.source.gradient_ref(parameter)
        if not isinstance(step.operation, Collective):
            target = self._synchronised_name(parameter, step)
            self._step([(ref, value, target, step)], Phase.BACKWARD, asynchronous=False)
            self._synchronise(parameter, target, steps[1:], then)
            return
        spec = self.graph.spec(ref)
        key = (step.operation, step.axis, spec.dtype)
        bucket = self.pending.setdefault(key, _Pending())
        bucket.entries.append((parameter, value, steps, then))
        bucket.size_bytes += int(spec.size_bytes / prod(self.source.sizes[a] for a in step.sharded_axes))
        if bucket.size_bytes >= self.source.options.bucket_bytes and not self._by_unit(key[0]):
            self._flush(key)

    def _by_unit(self, collective: Collective) -> bool:
        """Whether gradients travel unit by unit, as the parameters do."""
        return bool(self.source.by_unit) and collective is Collective.REDUCE_SCATTER

    def _flush_units(self) -> None:
        for key in [key for key in self.pending if self._by_unit(key[0])]:
            self._flush(key)

    def _synchronised_name(self, parameter: int, step: Step) -> str:
        return f"{self.graph.nodes[parameter].name}.gradient@{','.join(map(placement_name, step.after))}"

    def _flush(self, key: tuple[Collective, int, str]) -> None:
        bucket = self.pending.pop(key)
        items, dims, payload, writes, after = [], [], 0.0, [], []
        for parameter, value, steps, then in bucket.entries:
            step, ref = steps[0], self.source.gradient_ref(parameter)
            target = self._synchronised_name(parameter, step)
            spec = self.graph.spec(ref)
            items.append((value, target))
            dims.append((step.gather_dim, step.split_dim))
            payload += spec.size_bytes / prod(self.source.sizes[a] for a in step.sharded_axes)
            size = self.source.local_bytes(spec, step.after)
            writes.append(Buffer(name=target, size_bytes=size, kind=BufferKind.GRADIENT))
            after.append((parameter, target, steps[1:], then))
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
        for parameter, target, steps, then in after:
            self._synchronise(parameter, target, steps, then)

    def _update(self) -> None:
        update = self.source.options.optimizer
        if self.source.options.offload_optimizer:
            self._through_host()
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

    def _through_host(self) -> None:
        """Gradients go to the host, whose memory holds the states, and parameters come back, before any update."""
        source = self.source
        sizes = [source.local_bytes(self.graph.nodes[p].outputs[0], source.stored[p]) for p, _ in self.synchronised]
        nothing = Communicate(collective=Collective.SEND, axis=0, sources=(), targets=(), gather_dims=(), split_dims=())
        self._add(host_copy(2.0 * sum(sizes)), nothing, tuple(value for _, value in self.synchronised), ())

    def _resolve(self) -> tuple[tuple[Task, ...], tuple[Instruction, ...]]:
        """Turn values into dependencies and releases: a value goes when its last reader, or that of a view, is done."""
        producer: dict[str, int] = {}
        last_use: dict[str, int] = {}
        owners: dict[str, str] = {}
        after: list[tuple[int, ...]] = []
        streams = [draft.task.stream for draft in self.drafts]
        computed = -1
        for index, draft in enumerate(self.drafts):
            stream = streams[index]
            needs = {n for v in draft.reads if (n := producer.get(v)) is not None and streams[n] != stream}
            if draft.beside and computed >= 0:
                needs.add(computed)
            if stream == COMPUTE_STREAM:
                computed = index
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
            finished(d.task, after=a, allocates=self._new(d.writes), releases=tuple(releases.get(i, ())))
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
