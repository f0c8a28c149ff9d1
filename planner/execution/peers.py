"""The other ranks of a mesh axis as operators meet them: sums, pieces that go round, exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from planner.sharding.local_call import Moment, Parts


class InnerWatch(Protocol):
    """Sees what an operator does among ranks."""

    def reduction(self, axis: int, reduction: Callable[[], object]) -> None:
        """Run a message of a mesh axis inside an operator, or wait for it."""


class AxisPeers:
    """A rank's groups, one for each mesh axis; None for those this rank is not in.

    Parameters
    ----------
    groups : sequence of ProcessGroup or None
    coordinates : sequence of int
        Place of this rank on each axis, which is its rank in the axis's group.
    moment : Moment
        Where training stands.
    watch : InnerWatch, optional
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup | None],
        coordinates: Sequence[int],
        moment: Moment,
        watch: InnerWatch | None = None,
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
        sent = _packed(tensors)
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
            return _unpacked(received, [tensor.shape for tensor in tensors])

        return arrive

    def exchange(self, tensors: Parts, axis: int, split: int, join: int, *, all_to_all: bool = True) -> Parts:
        """Cut each tensor along a dim, a piece for every rank, and join what comes along another, in one message.

        Without `all_to_all` that is an all-gather of the tensors, of which this rank keeps its pieces.
        """
        group = self._group(axis)
        size = group.size()
        if not all_to_all:
            sent = _packed(tensors)
            received = sent.new_empty(size * sent.numel())
            self._run(axis, lambda: dist.all_gather_into_tensor(received, sent, group=group))
            mine, whole = self._coordinates[axis], [tensor.shape for tensor in tensors]
            gathered = [_unpacked(part, whole) for part in received.chunk(size)]
            own = [[tensor.chunk(size, split)[mine] for tensor in parts] for parts in gathered]
            return tuple(torch.cat(parts, join) for parts in zip(*own, strict=True))
        pieces = [tensor.chunk(size, split) for tensor in tensors]
        sent = torch.cat([one[rank].reshape(-1) for rank in range(size) for one in pieces])
        received = torch.empty_like(sent)
        self._run(axis, lambda: dist.all_to_all_single(received, sent, group=group))
        shapes = [one[0].shape for one in pieces]
        arrived = [_unpacked(part, shapes) for part in received.chunk(size)]
        return tuple(torch.cat(parts, join) for parts in zip(*arrived, strict=True))

    def _group(self, axis: int) -> dist.ProcessGroup:
        group = self._groups[axis]
        assert group is not None  # operators meet ranks of axes they are on
        return group

    def _run(self, axis: int, message: Callable[[], object]) -> None:
        if self._watch is None:
            message()
        else:
            self._watch.reduction(axis, message)


def _packed(tensors: Parts) -> Tensor:
    """Copy, because what is sent must stand until it has arrived."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpacked(flat: Tensor, shapes: Sequence[torch.Size]) -> Parts:
    pieces = torch.split(flat, [prod(shape) for shape in shapes])
    return tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
