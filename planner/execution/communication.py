"""Process groups, collectives among local tensors (pack, send, unpack), messages inside operators, copies to hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from planner.lowering.instructions import Communicate, Instruction, LoweredStages
from planner.sharding.local_call import Moment, Parts
from simulator.errors import UnsupportedError
from simulator.program import Collective

Groups = tuple[tuple[int, ...], ...]
"""Ranks of groups side by side, each rank in one of them."""


def members(lowered: LoweredStages) -> list[Groups]:
    """Ranks of every group of each mesh axis, then of each set of tied parameters."""
    mesh = lowered.mesh
    axes = range(len(mesh.axes))
    shifts = [stage * lowered.pipeline_stride for stage in range(lowered.schedule.ranks)]
    found = [
        tuple(tuple(rank + shift for rank in ranks) for shift in shifts for ranks in mesh.groups(axis)) for axis in axes
    ]
    ties = lowered.ranks[0].ties
    return [*found, *(tuple(tuple(rank + shifts[m] for m in tie) for rank in mesh.ranks()) for tie in ties)]


def make_groups(wanted: Sequence[Groups], timeout: timedelta) -> tuple[dist.ProcessGroup | None, ...]:
    """Make groups, in one order on all ranks, and return of each row of them the one that this rank is in.

    Where an axis or a tie joins ranks as one before it does, both have the same groups: each is made once.
    """
    made: dict[Groups, dist.ProcessGroup | None] = {}
    for groups in wanted:
        if groups not in made:
            made[groups] = own_group(groups, timeout)
    return tuple(made[groups] for groups in wanted)


def own_group(groups: Iterable[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Make these groups and return the one that this rank is in."""
    rank = dist.get_rank()
    mine: dist.ProcessGroup | None = None
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine


Slots = list[Tensor | None]
Pack = Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]
"""Makes the message to send and the buffer to receive into; they may be one and the same."""
Unpack = Callable[[Tensor, Sequence[torch.Size]], list[Tensor]]
"""Cuts the targets out of the received buffer, given the shapes of the sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCollective:
    """One collective, in two halves: `start` sends, `finish` waits and stores the results.

    `arrived` says whether `finish` would not have to wait.
    """

    start: Callable[[], None]
    finish: Callable[[], None]
    arrived: Callable[[], bool]


def make_message(
    instruction: Communicate,
    slots: Slots,
    sources: tuple[int, ...],
    targets: tuple[int, ...],
    group: dist.ProcessGroup,
) -> PreparedCollective:
    """Prepare a collective that reads and writes numbered slots."""
    pack, unpack, send = _parts(instruction, group)
    wide = getattr(torch, instruction.dtype) if instruction.dtype else None
    pending: list[tuple[dist.Work | None, Tensor, list[torch.Size], list[torch.dtype]]] = []

    def start() -> None:
        tensors: list[Tensor] = [slots[source] for source in sources]  # type: ignore[misc]
        message, received = pack(tensors if wide is None else [tensor.to(wide) for tensor in tensors])
        work = send(message, received)
        pending.append((work, received, [tensor.shape for tensor in tensors], [tensor.dtype for tensor in tensors]))

    def finish() -> None:
        work, received, shapes, dtypes = pending.pop()
        if work is not None:
            work.wait()
        for target, value, dtype in zip(targets, unpack(received, shapes), dtypes, strict=True):
            if target < 0:
                continue
            kept = slots[target] if instruction.collective is Collective.BROADCAST else None
            if kept is None:
                slots[target] = value.to(dtype)
            else:
                kept.copy_(value)  # a parameter, which its update knows by its memory

    def arrived() -> bool:
        work = pending[-1][0]
        return work is None or work.is_completed()

    return PreparedCollective(start=start, finish=finish, arrived=arrived)


def settled_early(message: PreparedCollective) -> tuple[PreparedCollective, Callable[[], None]]:
    """A message that may be finished as soon as it has arrived, and what does so: nothing, where it has not.

    What is sent and received stands in memory until a message is finished. Finished at the first use of its results,
    all gradients of a step would stand packed beside themselves until the update.
    """
    under_way = False

    def start() -> None:
        nonlocal under_way
        message.start()
        under_way = True

    def finish() -> None:
        nonlocal under_way
        if under_way:
            under_way = False
            message.finish()

    def settle() -> None:
        if under_way and message.arrived():
            finish()

    return PreparedCollective(start=start, finish=finish, arrived=message.arrived), settle


def _parts(
    instruction: Communicate, group: dist.ProcessGroup
) -> tuple[Pack, Unpack, Callable[[Tensor, Tensor], dist.Work | None]]:
    size = group.size()
    if instruction.collective is Collective.ALL_REDUCE:
        return _pack_copy, _unpack_flat, lambda _, out: dist.all_reduce(out, group=group, async_op=True)
    if instruction.collective is Collective.BROADCAST:
        first = dist.get_global_rank(group, 0)
        return _pack_copy, _unpack_flat, lambda _, out: dist.broadcast(out, first, group=group, async_op=True)
    if instruction.collective is Collective.ALL_GATHER:
        return (
            lambda tensors: _pack_gather(tensors, size),
            lambda out, shapes: _unpack_chunks(out, shapes, size, instruction.gather_dims),
            lambda message, out: dist.all_gather_into_tensor(out, message, group=group, async_op=True),
        )
    if instruction.collective is Collective.REDUCE_SCATTER:
        return (
            lambda tensors: _pack_chunks(tensors, size, instruction.split_dims, received=1),
            lambda out, shapes: _unpack_flat(out, _cut(shapes, size, instruction.split_dims)),
            lambda message, out: dist.reduce_scatter_tensor(out, message, group=group, async_op=True),
        )
    if instruction.collective is Collective.ALL_TO_ALL:
        return (
            lambda tensors: _pack_chunks(tensors, size, instruction.split_dims, received=size),
            lambda out, shapes: _unpack_chunks(
                out, _cut(shapes, size, instruction.split_dims), size, instruction.gather_dims
            ),
            lambda message, out: dist.all_to_all_single(out, message, group=group, async_op=True),
        )
    raise UnsupportedError(
        f"collective {instruction.collective.value!r} cannot be executed yet; "
        "execution knows all_reduce, all_gather, reduce_scatter, all_to_all and broadcast"
    )


def _pack_copy(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Copy, because the reduction is in place and a source may share memory with a value still needed."""
    if len(tensors) == 1:
        flat = tensors[0].clone(memory_format=torch.contiguous_format).reshape(-1)
    else:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return flat, flat


def _pack_gather(tensors: Sequence[Tensor], size: int) -> tuple[Tensor, Tensor]:
    flat = tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
    return flat, flat.new_empty(size * flat.numel())


def _pack_chunks(
    tensors: Sequence[Tensor], size: int, dims: tuple[int, ...], *, received: int
) -> tuple[Tensor, Tensor]:
    """Lay all that goes to rank 0 first, then all that goes to rank 1, and so on."""
    if len(tensors) == 1 and dims[0] == 0:
        flat = tensors[0].reshape(-1)
    else:
        chunks = [tensor.chunk(size, dim) for tensor, dim in zip(tensors, dims, strict=True)]
        flat = torch.cat([pieces[rank].reshape(-1) for rank in range(size) for pieces in chunks])
    return flat, flat.new_empty(flat.numel() * received // size)


def _unpack_flat(received: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    pieces = torch.split(received, [prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _unpack_chunks(received: Tensor, shapes: Sequence[torch.Size], size: int, dims: tuple[int, ...]) -> list[Tensor]:
    """Concatenate along `dims` the chunks of these shapes that came from each rank."""
    columns = torch.split(received.view(size, -1), [prod(shape) for shape in shapes], dim=1)
    results = []
    for column, shape, dim in zip(columns, shapes, dims, strict=True):
        whole = torch.Size((*shape[:dim], size * shape[dim], *shape[dim + 1 :]))
        results.append(column.reshape(size, *shape).movedim(0, dim).reshape(whole))
    return results


def _cut(shapes: Sequence[torch.Size], size: int, dims: tuple[int, ...]) -> list[torch.Size]:
    return [
        torch.Size((*shape[:dim], shape[dim] // size, *shape[dim + 1 :]))
        for shape, dim in zip(shapes, dims, strict=True)
    ]


Action = Callable[[], None]
RUN, START, FINISH = range(3)
"""What an action does of its instruction: all of it, or of a collective that it is started or waited for."""


class Probe(Protocol):
    """Stands between compiled steps and what they run: clocks actions, or puts others in their place."""

    def action(self, instruction: Instruction, part: int, action: Action) -> Action:
        """The action to run for a part (`RUN`, `START`, `FINISH`) of an instruction."""

    def reduction(self, axis: int, reduction: Callable[[], object]) -> None:
        """Run a message of a mesh axis inside an operator, or wait for it."""

    def crossing(self, stage: int, receive: Callable[[], object]) -> None:
        """Receive what comes from a stage."""


class AxisPeers:
    """A rank's groups, one for each mesh axis; None for those this rank is not in.

    Parameters
    ----------
    groups : sequence of ProcessGroup or None
    coordinates : sequence of int
        Place of this rank on each axis, which is its rank in the axis's group.
    moment : Moment
        Where training stands.
    watch : Probe, optional
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup | None],
        coordinates: Sequence[int],
        moment: Moment,
        watch: Probe | None = None,
    ) -> None:
        self.moment = moment
        self._groups, self._coordinates, self._watch = groups, coordinates, watch

    def sum(self, tensor: Tensor, axis: int) -> Tensor:
        """Sum a tensor over the ranks of an axis."""
        return self._all_reduced(tensor, axis, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor, axis: int) -> Tensor:
        """The largest of each element over the ranks of an axis."""
        return self._all_reduced(tensor, axis, dist.ReduceOp.MAX)

    def _all_reduced(self, tensor: Tensor, axis: int, reduction: dist.ReduceOp.RedOpType) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        self._run(axis, lambda: dist.all_reduce(total, reduction, group=self._groups[axis]))
        return total

    def pass_on(self, tensors: Parts, axis: int) -> Callable[[], Parts]:
        """Send tensors to the next rank of an axis in one message; the result waits for those of the rank before."""
        group = self._group(axis)
        size, mine = group.size(), self._coordinates[axis]
        # A copy, because what is sent must stand until it has arrived.
        sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        received = torch.empty_like(sent)
        following, before = ((dist.get_global_rank(group, (mine + step) % size)) for step in (1, -1))
        works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, sent, following, group),
            dist.P2POp(dist.irecv, received, before, group),
        ])  # fmt: skip

        def wait() -> None:
            for work in works:
                work.wait()

        def arrive() -> Parts:
            self._run(axis, wait)
            return tuple(_unpack_flat(received, [tensor.shape for tensor in tensors]))

        return arrive

    def exchange(self, tensors: Parts, axis: int, split: int, join: int, *, all_to_all: bool = True) -> Parts:
        """Cut each tensor along a dim, a piece for every rank, and join what comes along another, in one message.

        Without `all_to_all` that is an all-gather of the tensors, of which this rank keeps its pieces.
        """
        group = self._group(axis)
        size, shapes = group.size(), [tensor.shape for tensor in tensors]
        if not all_to_all:
            sent, received = _pack_gather(tensors, size)
            self._run(axis, lambda: dist.all_gather_into_tensor(received, sent, group=group))
            gathered, mine = [_unpack_flat(part, shapes) for part in received.chunk(size)], self._coordinates[axis]
            own = [[tensor.chunk(size, split)[mine] for tensor in parts] for parts in gathered]
            return tuple(torch.cat(parts, join) for parts in zip(*own, strict=True))
        cut, joined = (split,) * len(tensors), (join,) * len(tensors)
        sent, received = _pack_chunks(tensors, size, cut, received=size)
        self._run(axis, lambda: dist.all_to_all_single(received, sent, group=group))
        return tuple(_unpack_chunks(received, _cut(shapes, size, cut), size, joined))

    def _group(self, axis: int) -> dist.ProcessGroup:
        group = self._groups[axis]
        assert group is not None  # operators meet ranks of axes they are on
        return group

    def _run(self, axis: int, message: Callable[[], object]) -> None:
        if self._watch is None:
            message()
        else:
            self._watch.reduction(axis, message)


class HostCopies:
    """Copies on a stream of their own, in the order in which they are asked for; host memory is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = getattr(torch, device.type)
        self._stream = self._module.Stream(device)

    def to_host(self, value: Tensor) -> Tensor:
        """Begin to copy a tensor to the host; its memory is given back once that has ended.

        Only `bringing` may read the copy.
        """
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            there = torch.empty_like(value, device="cpu", pin_memory=True)
            there.copy_(value, non_blocking=True)
        value.record_stream(self._stream)
        return there

    def bringing(self, slots: Slots, source: int, target: int) -> PreparedCollective:
        """A copy to the device: `start` begins it behind what was computed so far, `finish` lets computation wait."""
        events: list[Any] = []

        def start() -> None:
            there = slots[source]
            assert there is not None  # it has left the device before
            self._stream.wait_stream(self._module.current_stream(self._device))
            with self._module.stream(self._stream):
                slots[target] = there.to(self._device, non_blocking=True)
                events.append(self._stream.record_event())

        def finish() -> None:
            value, current = slots[target], self._module.current_stream(self._device)
            assert value is not None  # it has been started before
            current.wait_event(events.pop(0))
            value.record_stream(current)

        return PreparedCollective(
            start=start, finish=finish, arrived=lambda: False
        )  # computation waits where it is read
