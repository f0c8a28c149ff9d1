"""Tasks and instructions being written, and how a tensor gets from one placement to another."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from planner.cost.work import packing_bytes, state_bytes
from planner.graph.operator_graph import DTYPE_BYTES, Role, TensorRef
from planner.lowering.instructions import Communicate, HostCopy, Instruction, Mask, Slice
from planner.lowering.placed import PlacedGraph, placements_text
from planner.sharding.placement import Placements
from planner.sharding.redistribution import Step
from planner.sharding.sequence import SequenceCut
from simulator.program import DISK, HOST, Buffer, BufferKind, Collective, Kernel, Phase, Task

HOST_STREAM = "host"
"""Stream of copies that run beside computation."""


def host_copy(
    size_bytes: float, name: str = "optimizer states in host memory", phase: Phase = Phase.UPDATE, copies: int = 1
) -> Task:
    """A task that moves bytes between a device and its host, in so many copies."""
    return Task(name=name, phase=phase, kernel=Kernel.COPY, axis=HOST, bytes_moved=size_bytes, copies=copies)


def disk_transfer(size_bytes: float, name: str, phase: Phase = Phase.UPDATE) -> Task:
    """A task that moves bytes between a host and its disks."""
    return Task(name=name, phase=phase, kernel=Kernel.COPY, axis=DISK, bytes_moved=size_bytes)


def offloading(source: PlacedGraph, parameters: Iterable[tuple[int, int]]) -> Iterator[Task]:
    """What an update of parameters costs beside its work where their states are not on the device.

    Gradients go to the host and parameters come back, unless they live there; what is on a disk is read and written.

    Parameters
    ----------
    parameters
        Nodes, each with how many parameters like it there are.
    """
    moved = states = 0.0
    copies, stays = 0, source.options.offload_parameters
    ways = 1 if stays else 2
    for index, times in parameters:
        spec = source.graph.nodes[index].outputs[0]
        size = times * source.local_bytes(spec, source.stored[index])
        moved += ways * size
        copies += ways * times
        states += 2.0 * size * state_bytes(source.options.optimizer, spec.dtype) / DTYPE_BYTES[spec.dtype]
        states += 2.0 * size if stays else 0.0
    yield host_copy(moved, copies=copies)
    if source.options.offload_to == "disk" and states:
        yield disk_transfer(states, "parameters and states on disk" if stays else "optimizer states on disk")


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


def local_move(moved: Moved, cut: SequenceCut | None = None) -> Slice | Mask:
    """The instruction of a step that needs no message; `cut` says how a context axis shares the dim of a slice."""
    _, source, target, step = moved
    if step.operation == "slice":
        return Slice(source=source, target=target, axis=step.axis, dim=step.split_dim, cut=cut)
    return Mask(source=source, target=target, axis=step.axis)


def moving_message(moved: Sequence[Moved], asynchronous: bool, dtype: str = "") -> Communicate:
    """The one message that takes a step of several tensors along the same axis."""
    step = moved[0][3]
    assert isinstance(step.operation, Collective)
    return Communicate(
        collective=step.operation,
        axis=step.axis,
        sources=tuple([source for _, source, _, _ in moved]),
        targets=tuple([target for _, _, target, _ in moved]),
        gather_dims=tuple([one.gather_dim for *_, one in moved]),
        split_dims=tuple([one.split_dim for *_, one in moved]),
        asynchronous=asynchronous,
        dtype=dtype,
    )


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

    def _move(self, ref: TensorRef, value: str, step: Step, phase: Phase) -> str:
        """One move along one axis; returns the name of what it makes."""
        target = self._value_name(ref, step.after)
        if target in self.moved:  # units that compute again move it once more while an earlier copy may stand
            target = f"{target} again in {self.source.units.names[self.unit]}"
        self.moved.add(target)
        source, spec = self.source, self.graph.spec(ref)
        on_host = source.host.holds(ref) and ref not in self.renamed  # not while the device has a copy of it
        size = source.local_bytes(spec, step.after)
        made = Buffer(name=target, size_bytes=0 if on_host else size, kind=self._moved_kind(ref))
        moved, name = (ref, value, target, step), f"{step.operation} {value}"
        if isinstance(step.operation, Collective):
            payload = spec.size_bytes / prod(source.sizes[a] for a in step.sharded_axes)
            message = moving_message([moved], asynchronous=False)
            self._message(name, phase, message, payload, writes=(made,), dtype=spec.dtype, on_host=on_host)
            return target
        task = Task(
            name=name,
            phase=phase,
            kernel=Kernel.COPY,
            bytes_moved=2.0 * size,
            dtype=spec.dtype,
            on_host=on_host,
            launched_with=self._pass(phase),
        )
        cut = source.cut(ref, step.axis, step.split_dim) if step.operation == "slice" else None
        self._add(task, local_move(moved, cut), (value,), (made,))
        return target

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
        marks = {"on_host": on_host, "launched_with": self._pass(phase)}
        task = packed_task(self.source, message, name, phase, payload, dtype, **marks)
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


def message_task(
    name: str, phase: Phase, collective: Collective, axis: str, payload: float, dtype: str, **marks: Any
) -> Task:
    """Fields that time a message of some bytes on an axis; `marks` are further fields of the task."""
    return Task(
        name=name,
        phase=phase,
        stream=f"communication:{axis}",
        dtype=dtype,
        collective=collective,
        axis=axis,
        payload_bytes=float(payload),
        **marks,
    )


def packed_task(
    source: PlacedGraph, message: Communicate, name: str, phase: Phase, payload: float, dtype: str, **marks: Any
) -> Task:
    """Fields that time a message, with the bytes that are copied around it."""
    axis = source.options.mesh.axes[message.axis].name
    copied = copied_bytes(message, payload, source.sizes[message.axis])
    marks |= {"copied_bytes": copied, "sharded": source.of_shards(message)}
    return message_task(name, phase, message.collective, axis, payload, dtype, **marks)


def copied_bytes(message: Communicate, payload_bytes: float, members: int) -> float:
    """Bytes that one rank reads and writes around a message, as `planner.execution.communication` does.

    A tensor alone that is gathered, or cut, along its first dim lies in the message as it lies in memory; all others
    are laid together first, and the parts of each put together behind. All-reduces and broadcasts copy whatever they
    send, which is part of their own time.

    Parameters
    ----------
    payload_bytes
        As `simulator.program.Collective` counts them.
    members
        Ranks of the group.
    """
    if not message.sources:  # sent inside an operator
        return 0.0
    several = len(message.sources) > 1
    laid = several or (message.collective is not Collective.ALL_GATHER and message.split_dims[0] != 0)
    cut = several or message.gather_dims[0] != 0
    return float(packing_bytes(message.collective, payload_bytes, members, laid=laid, cut=cut))
