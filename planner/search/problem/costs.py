"""Seconds of redistributing tensors on one mesh, messages and copies, as tables over all placements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.sharding.placement import PARTIAL, REPLICATE, Mesh
from planner.sharding.redistribution import placements_of_rank, step_table
from simulator.corrections import kernel_factor, message_time
from simulator.hardware import Hardware
from simulator.kernels import kernel_time
from simulator.program import Collective, Kernel
from simulator.topology import group_shape


class MeshCosts:
    """Times of messages on one mesh of one cluster.

    ``bucket_bytes`` is the size of the messages that small gradients and parameters are fused into:
    their latency is shared out by size.
    """

    def __init__(self, hardware: Hardware, mesh: Mesh, bucket_bytes: int) -> None:
        self.hardware = hardware
        self.mesh = mesh
        self.bucket_bytes = bucket_bytes
        self._groups = [group_shape(hardware, a.size, mesh.stride(i)) for i, a in enumerate(mesh.axes)]
        self._tables: dict[tuple[int, int, bool], NDArray[np.float64]] = {}
        self._seconds: dict[tuple[int, int, bool], NDArray[np.float64]] = {}

    def message_time(
        self, collective: Collective, axis: int, payload_bytes: NDArray[np.float64], fused: bool = False
    ) -> NDArray[np.float64]:
        """Seconds of one collective of each payload on mesh axis `axis`, arrays of shape (n,)."""
        sent = np.maximum(payload_bytes, self.bucket_bytes) if fused else payload_bytes
        seconds = message_time(self.hardware, collective, sent, self._groups[axis])
        return seconds * (payload_bytes / sent) if fused else seconds

    def copy_time(self, moved_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of slices and masks, which read and write `moved_bytes`, arrays of one shape."""
        seconds = kernel_time(self.hardware, Kernel.COPY, "", np.zeros_like(moved_bytes), moved_bytes)
        return np.asarray(seconds * kernel_factor(self.hardware, Kernel.COPY, "", self.mesh.size))

    def prepare(self, keys: Iterable[tuple[int, int, bool]]) -> None:
        """Fill the tables of tensors ``(rank, bytes, fused)`` in a few vectorised calls."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._tables]
        wanted: dict[tuple[Collective, int, bool], list[tuple[int, int, float]]] = {}
        axes = len(self.mesh.axes)
        seconds = [np.zeros(len(step_table(rank, axes).kinds) + 1) for rank, _, _ in missing]
        for row, (rank, size, fused) in enumerate(missing):
            for column, (collective, axis, sharded) in enumerate(step_table(rank, axes).kinds):
                wanted.setdefault((collective, axis, fused), []).append((row, column, size * self._share(sharded)))
        for (collective, axis, fused), items in wanted.items():
            times = self.message_time(collective, axis, np.array([max(p, 1.0) for _, _, p in items]), fused)
            for (row, column, _), time in zip(items, times, strict=True):
                seconds[row][column] = time
        for key, times in zip(missing, seconds, strict=True):
            table = step_table(key[0], axes)
            copied = np.array([2.0 * key[1] * self._share(cut) for cut in table.pieces])
            copies = np.append(self.copy_time(copied), 0.0)
            matrix = times[table.steps].sum(axis=-1) + copies[table.copies].sum(axis=-1)
            matrix[~table.possible] = np.inf
            self._tables[key] = matrix
            self._seconds[key] = times

    def _share(self, cut: Sequence[int]) -> float:
        """What the axes that cut a tensor leave of it on one rank."""
        return 1.0 / prod(self.mesh.sizes[axis] for axis in cut)

    def redistribution(self, rank: int, size_bytes: int, *, fused: bool, masks: bool) -> NDArray[np.float64]:
        """Seconds from each placement to each other of a tensor, shape (placements, placements).

        ``masks`` allows a replicated tensor to become partial.
        """
        key = (rank, size_bytes, fused)
        if key not in self._tables:
            self.prepare([key])
        matrix = self._tables[key]
        return matrix if masks else np.where(needs_mask(rank, len(self.mesh.axes)), np.inf, matrix)

    def scattering(self, rank: int, size_bytes: int) -> NDArray[np.float64]:
        """Seconds of the part of each way of a gradient that ends with its last reduce-scatter, 0 where there is none.

        Shape (placements, placements), as `redistribution` of a fused tensor. Where gradients are accumulated in
        shards, this part is sent every micro-batch.
        """
        key = (rank, size_bytes, True)
        self.prepare([key])
        table = step_table(rank, len(self.mesh.axes))
        scatters = np.array([*(kind[0] is Collective.REDUCE_SCATTER for kind in table.kinds), False])[table.steps]
        before = np.flip(np.logical_or.accumulate(np.flip(scatters, -1), axis=-1), -1)
        return np.asarray((self._seconds[key][table.steps] * before).sum(axis=-1))


_MASKS: dict[tuple[int, int], NDArray[np.bool_]] = {}


def needs_mask(rank: int, axes: int) -> NDArray[np.bool_]:
    """Between which placements a replicated tensor becomes partial along some axis, shape (placements, placements)."""
    if (rank, axes) not in _MASKS:
        states = np.array(placements_of_rank(rank, axes), dtype=np.int64).reshape((rank + 2) ** axes, axes)
        masked = (states[:, None, :] == REPLICATE) & (states[None, :, :] == PARTIAL)
        _MASKS[rank, axes] = masked.any(axis=-1)
    return _MASKS[rank, axes]
