"""Collectives among local tensors, prepared once: pack, send, unpack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from planner.lowering.instructions import Communicate
from simulator.errors import UnsupportedError
from simulator.program import Collective

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
