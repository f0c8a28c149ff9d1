"""Tasks and instructions being written, and how a tensor gets from one placement to another."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from planner.graph.operator_graph import Role, TensorRef
from planner.lowering.host import host_copy
from planner.lowering.instructions import (
    Communicate,
    HostCopy,
    Instruction,
    Mask,
    Slice,
)
from planner.lowering.packing import copied_bytes
from planner.lowering.placed import PlacedGraph, placements_text
from planner.sharding.placement import Placements
from planner.sharding.redistribution import Step
from simulator.program import (
    COMPUTE_STREAM,
    Buffer,
    BufferKind,
    Collective,
    Kernel,
    Phase,
    Task,
)

Moved = tuple[TensorRef, str, str, Step]
"""A tensor on the move: the value that it is, the name it gets, and the step."""


@dataclass(slots=True)
class Draft:
    """A task being written: its values are resolved to dependencies and releases at the end."""

    task: Task
    instruction: Instruction
    reads: tuple[str, ...]
    writes: tuple[Buffer, ...]
    owners: dict[str, str] = field(default_factory=dict)
    completes: tuple[str, ...] = ()
    """Values that are ready only after this task although an earlier one writes them."""
    beside: bool = False
    """Not before the computation that comes earlier in the order has ended: for messages that wait for no value."""
    unit: int = 0
    """The unit whose pass this is in."""


def local_move(placed: PlacedGraph, moved: Moved) -> Slice | Mask:
    """The instruction of a step that needs no message."""
    ref, source, target, step = moved
    if step.operation == "slice":
        cut = placed.cut(ref, step.axis, step.split_dim)
        return Slice(source=source, target=target, axis=step.axis, dim=step.split_dim, cut=cut)
    return Mask(source=source, target=target, axis=step.axis)


def moving_message(
    moved: Sequence[Moved], asynchronous: bool, dtype: str = "", order: Sequence[int] | None = None
) -> Communicate:
    """The one message that takes a step of several tensors along the same axis.

    Where `order` is given, these are those of `moved` with its numbers.
    """
    step, order = moved[0][3], range(len(moved)) if order is None else order
    assert isinstance(step.operation, Collective)
    said = [(source, target, one.gather_dim, one.split_dim) for _, source, target, one in moved]
    sources, targets, gathered, cut = in_order(said, order)
    return Communicate(
        collective=step.operation,
        axis=step.axis,
        sources=sources,
        targets=targets,
        gather_dims=gathered,
        split_dims=cut,
        asynchronous=asynchronous,
        dtype=dtype,
    )


def in_order(rows: Iterable[tuple[Any, ...]], order: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Columns of rows, each with the values of the rows in an order.

    >>> [*in_order([("a", 1), ("b", 2)], [0, 1, 0])]
    [('a', 'b', 'a'), (1, 2, 1)]
    """
    return (tuple([column[row] for row in order]) for column in zip(*rows, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one tensor is of a move: its bytes behind the step, those that it adds to the message, and what is made."""

    step: Step
    size_bytes: int
    payload: float
    made: Buffer


class Writer:
    """Writes tasks and instructions, and knows every tensor's versions so far.

    Parameters
    ----------
    source : PlacedGraph
    read : container of int, optional
        Nodes of the stored tensors that may be read; all by default.
    """

    def __init__(self, source: PlacedGraph, read: Container[int] | None = None) -> None:
        self.source = source
        self.graph = source.graph
        self.drafts: list[Draft] = []
        self.versions: dict[TensorRef, dict[Placements, str]] = {
            TensorRef(index): {placements: self.graph.nodes[index].name}
            for index, placements in source.stored.items()
            if read is None or index in read
        }
        self.renamed: dict[TensorRef, str] = {}
        """Names of tensors that are computed again."""
        self.unit = 0
        self.moved: set[str] = set()
        """Values that moves have made."""
        self.came: dict[str, str] = {}
        """Streams of the messages beside the passes that bring values: local work on these follows there."""
        self._parts: dict[str, _Part] = {}

    def _value_name(self, ref: TensorRef, placements: Placements) -> str:
        """Name of a tensor in one placement, as it stands now."""
        name = self.renamed.get(ref)
        if name is None:
            return self.source.value_name(ref, placements)
        if placements == self.source.output_placements(ref):
            return name
        return f"{name}@{placements_text(placements)}"

    def _fetch(self, ref: TensorRef, wanted: Placements, phase: Phase) -> str:
        versions = self.versions[ref]
        if wanted not in versions:
            ways = [steps for p in versions if (steps := self.source.way(p, wanted)) is not None]
            ways = ways or [self.source.path(next(iter(versions)), wanted)]
            for step in min(ways, key=self.source.volume):
                if step.after not in versions:
                    versions[step.after] = self._move(ref, versions[step.before], step, phase)
        return versions[wanted]

    def _move(self, ref: TensorRef, value: str, step: Step, phase: Phase, *, asynchronous: bool = False) -> str:
        target = self._value_name(ref, step.after)
        if target in self.moved:  # units that compute again move it once more while an earlier copy may stand
            target = f"{target} again in {self.source.units.names[self.unit]}"
        self.moved.add(target)
        self._step([(ref, value, target, step)], phase, asynchronous)
        return target

    def _step(
        self, items: Sequence[Moved], phase: Phase, asynchronous: bool, order: Sequence[int] | None = None
    ) -> None:
        """One move along one axis, of several tensors in one message if it is a collective; all on the host or none.

        Copies of layers that are written once move the same: where `order` is given, items go with these numbers.
        """
        source, step, order = self.source, items[0][3], range(len(items)) if order is None else order
        dtype = self.graph.spec(items[0][0]).dtype
        on_host = self._lies_on_host(items[0][0])
        parts = [self._part(item) for item in items]
        writes = tuple([parts[number].made for number in order])
        if not isinstance(step.operation, Collective):
            (_, value, target, _), size = items[0], parts[0].size_bytes
            task = Task(
                name=f"{step.operation} {value}",
                phase=phase,
                stream=self.came.get(value, COMPUTE_STREAM),
                kernel=Kernel.COPY,
                bytes_moved=2.0 * size,
                dtype=dtype,
                on_host=on_host,
                launched_with=self._pass(phase),
            )
            if value in self.came:
                self.came[target] = self.came[value]
            self._add(task, local_move(source, items[0]), (value,), writes)
            return
        payload = sum([parts[number].payload for number in order])
        message = moving_message(items, asynchronous, order=order)
        what = items[0][1] if len(order) == 1 else f"{len(order)} tensors from {items[0][1]}"
        self._message(
            f"{step.operation} {what}", phase, message, payload,
            writes=writes, dtype=dtype, on_host=on_host,
        )  # fmt: skip

    def _lies_on_host(self, ref: TensorRef) -> bool:
        """Whether a tensor is in the memory of the host now: not while the device has a copy of it."""
        return self.source.host.holds(ref) and ref not in self.renamed

    def _part(self, moved: Moved) -> _Part:
        """One tensor's part of a move; layers that are written once move the same ones again and again."""
        ref, _, target, step = moved
        part = self._parts.get(target)
        if part is None or part.step is not step:
            spec, source = self.graph.spec(ref), self.source
            size = source.local_bytes(spec, step.after)
            stays = 0 if self._lies_on_host(ref) else size
            part = self._parts[target] = _Part(
                step=step,
                size_bytes=size,
                payload=spec.size_bytes / prod(source.sizes[a] for a in step.sharded_axes),
                made=Buffer(name=target, size_bytes=stays, kind=self._moved_kind(ref)),
            )
        return part

    def _host_copy(self, source: str, made: Buffer, size_bytes: float, phase: Phase, *, to_host: bool) -> None:
        """Copy a value to the memory of the host or from there."""
        task = host_copy(size_bytes, f"copy {source}", phase)
        self._add(task, HostCopy(source=source, target=made.name, to_host=to_host), (source,), (made,))

    def _pass(self, phase: Phase) -> int:
        """Number of the pass in which the host launches what is written now; -1 where it is in none."""
        return -1

    def _moved_kind(self, ref: TensorRef) -> BufferKind:
        role = self.graph.nodes[ref.node].role
        if role is Role.PARAMETER:
            return BufferKind.GATHERED_PARAMETER
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
        on_host: bool = False,
    ) -> None:
        axis = self.source.options.mesh.axes[message.axis].name
        stream = f"communication:{axis}"
        if message.asynchronous:
            self.came.update(dict.fromkeys(message.targets, stream))
        task = Task(
            name=name,
            phase=phase,
            stream=stream,
            dtype=dtype,
            collective=message.collective,
            axis=axis,
            payload_bytes=payload,
            copied_bytes=copied_bytes(message, payload, self.source.sizes[message.axis]),
            sharded=self.source.of_shards(message),
            on_host=on_host,
            launched_with=-1 if message.asynchronous else self._pass(phase),
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
        self.drafts.append(Draft(task, instruction, reads, writes, owners or {}, unit=self.unit))
