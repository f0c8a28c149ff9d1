"""What a rank loads of each micro-batch, ahead of time where that helps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.execution.data.samples import Batches, BatchInput, Position
from planner.execution.job import batch_shard, own_piece
from planner.sharding.placement import Mesh, Placements
from planner.sharding.sequence import SequenceCut


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedShare:
    """What a rank gets of one input: the input as all ranks together have it, and how it is cut among them.

    ``placements`` hold, for each mesh axis, the dim that it cuts, or −1; ``cut`` is how a context axis cuts sequences.
    """

    spec: BatchInput
    placements: Placements
    cut: SequenceCut | None = None


class Loader:
    """Loads this rank's share of every input of a micro-batch.

    Batches follow from data set, seed and position alone, so that a run which begins in the middle, or on other
    ranks, goes on with the samples that an unbroken one would have had. Only the rows that this rank needs are read.

    Parameters
    ----------
    batches : Batches
        The stream of samples.
    shares : sequence of Share
        What this rank gets of each input.
    mesh, coordinates : Mesh, tuple of int
        Where this rank stands.
    micro_batches : int
        Micro-batches of a step.
    ahead : int
        Micro-batches that are prepared in a thread while others are trained on; 0 for none.
    """

    def __init__(
        self,
        batches: Batches,
        shares: Sequence[LoadedShare],
        mesh: Mesh,
        coordinates: tuple[int, ...],
        *,
        micro_batches: int,
        position: Position,
        device: torch.device,
        ahead: int = 0,
    ) -> None:
        self._batches, self._shares, self._mesh, self._coordinates = batches, tuple(shares), mesh, coordinates
        self._micro_batches, self._position, self._device = micro_batches, position, device
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader") if ahead else None
        self._coming: dict[int, Future[list[Tensor]]] = {}

    def __call__(self, step: int, micro_batch: int) -> list[Tensor]:
        """Give this rank's piece of every input of a micro-batch."""
        number = (step - self._position.step) * self._micro_batches + micro_batch
        if self._pool is None:
            pieces = self._load(number)
        else:
            self._coming = {n: one for n, one in self._coming.items() if n >= number or one.cancel()}
            for later in range(number, number + self._ahead + 1):
                if later not in self._coming:
                    self._coming[later] = self._pool.submit(self._load, later)
            pieces = self._coming.pop(number).result()
        return [piece.to(self._device, non_blocking=True) for piece in pieces]

    def close(self) -> None:
        """Stop preparing."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _load(self, number: int) -> list[Tensor]:
        pieces = []
        for share in self._shares:
            start = self._position.sample + number * share.spec.shape[0]
            rows = self._batches.load(share.spec, start, batch_shard(self._mesh, share.placements, self._coordinates))
            others = tuple(placement if placement > 0 else -1 for placement in share.placements)
            piece = own_piece(rows, self._mesh, others, self._coordinates, share.cut).contiguous()
            # Only a copy out of memory that stays in its place goes on beside computation.
            pieces.append(piece if self._device.type == "cpu" else piece.pin_memory())
        return pieces
