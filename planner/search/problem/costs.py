"""Seconds of redistributing tensors on one mesh, messages and copies, as tables over all placements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import packing_bytes
from planner.sharding.placement import PARTIAL, REPLICATE, Mesh
from planner.sharding.redistribution import placements_of_rank, step_table
from simulator.corrections import kernel_factor, message_time
from simulator.hardware import Hardware
from simulator.kernels import kernel_time
from simulator.launches import message_launches
from simulator.program import Collective, Kernel
from simulator.timing import copy_time
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
        self._shares_of_rank: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._unmasked: dict[tuple[int, int, bool], NDArray[np.float64]] = {}
        self._seconds: dict[tuple[int, int, bool], NDArray[np.float64]] = {}

    def message_time(
        self, collective: Collective, axis: int, payload_bytes: NDArray[np.float64], fused: bool = False
    ) -> NDArray[np.float64]:
        """Seconds of one collective of each payload on mesh axis `axis`, arrays of shape (n,).

        Fused messages are of several tensors, which are packed; what a tensor alone needs depends on the dim that it is
        cut along, and is left out.
        """
        return self._message_times(collective, axis, payload_bytes, 0 if fused else len(payload_bytes))

    def _message_times(
        self, collective: Collective, axis: int, payload_bytes: NDArray[np.float64], alone: int
    ) -> NDArray[np.float64]:
        """`message_time` of payloads of which so many, the first, are sent alone, and the others fused."""
        sent = np.array(payload_bytes)
        fused = sent[alone:]
        np.maximum(fused, self.bucket_bytes, out=fused)
        seconds = message_time(self.hardware, collective, sent, self._groups[axis], axis=self.mesh.axes[axis].name)
        if len(fused):
            if self.hardware.copies_apart:
                copied = packing_bytes(collective, fused, self.mesh.axes[axis].size)
                seconds[alone:] += copy_time(self.hardware, copied, self.mesh.size)
            seconds[alone:] *= payload_bytes[alone:] / fused
        return seconds

    def launches(self, collective: Collective, axis: int) -> float:
        """Launches that a message on a mesh axis takes (`simulator.launches`)."""
        return message_launches(self.hardware, self._groups[axis], collective, self.mesh.axes[axis].name)

    def copy_time(self, moved_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of slices and masks, which read and write `moved_bytes`, arrays of one shape."""
        seconds = kernel_time(self.hardware, Kernel.COPY, "", np.zeros_like(moved_bytes), moved_bytes)
        return np.asarray(seconds * kernel_factor(self.hardware, Kernel.COPY, "", self.mesh.size))

    def prepare(self, keys: Iterable[tuple[int, int, bool]]) -> None:
        """Fill the tables of tensors ``(rank, bytes, fused)`` in a few vectorised calls."""
        axes = len(self.mesh.axes)
        sizes: dict[tuple[int, bool], list[int]] = {}
        for rank, size, fused in (key for key in dict.fromkeys(keys) if key not in self._tables):
            sizes.setdefault((rank, fused), []).append(size)
        seconds: dict[tuple[int, bool], NDArray[np.float64]] = {}
        wanted: dict[tuple[Collective, int], list[tuple[NDArray[np.float64], list[int], NDArray[np.float64]]]]
        wanted, alone = {}, dict[tuple[Collective, int], int]()
        for (rank, fused), missing in sorted(sizes.items(), key=lambda item: item[0][1]):
            kinds = step_table(rank, axes).kinds
            times = seconds[rank, fused] = np.zeros((len(missing), len(kinds) + 1))
            sent = np.maximum(np.array(missing, dtype=np.float64)[:, None] * self._shares(rank)[0], 1.0)
            columns: dict[tuple[Collective, int], list[int]] = {}
            for column, (collective, axis, _) in enumerate(kinds):
                columns.setdefault((collective, axis), []).append(column)
            for (collective, axis), few in columns.items():
                part = sent[:, few]
                wanted.setdefault((collective, axis), []).append((times, few, part))
                alone[collective, axis] = alone.get((collective, axis), 0) + (0 if fused else part.size)
        for (collective, axis), parts in wanted.items():
            payloads = np.concatenate([sent.ravel() for _, _, sent in parts])
            found = self._message_times(collective, axis, payloads, alone[collective, axis])
            place = 0
            for times, few, sent in parts:
                times[:, few] = found[place : place + sent.size].reshape(sent.shape)
                place += sent.size
        for (rank, fused), missing in sizes.items():
            self._tabulate(rank, fused, missing, seconds[rank, fused])

    def _tabulate(self, rank: int, fused: bool, sizes: Sequence[int], seconds: NDArray[np.float64]) -> None:
        """Fill the tables of tensors of some sizes; `seconds` of their messages have shape (sizes, kinds and none)."""
        table = step_table(rank, len(self.mesh.axes))
        share = self._shares(rank)[1]
        copies = np.zeros((len(sizes), len(share) + 1))
        copies[:, :-1] = self.copy_time(2.0 * np.array(sizes, dtype=np.float64)[:, None] * share)
        matrices = seconds[:, table.steps].sum(axis=-1) + copies[:, table.copies].sum(axis=-1)
        matrices[:, ~table.possible] = np.inf
        for size, times, matrix in zip(sizes, seconds, matrices, strict=True):
            self._tables[rank, size, fused] = matrix
            self._seconds[rank, size, fused] = times

    def _shares(self, rank: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What one rank has of a tensor that is sent by each kind of message, and of each piece that is copied."""
        if rank not in self._shares_of_rank:
            table, sizes = step_table(rank, len(self.mesh.axes)), self.mesh.sizes
            both = ([cut for _, _, cut in table.kinds], table.pieces)
            sent, copied = (np.array([1.0 / prod([sizes[axis] for axis in cut]) for cut in cuts]) for cuts in both)
            self._shares_of_rank[rank] = sent, copied
        return self._shares_of_rank[rank]

    def redistribution(self, rank: int, size_bytes: int, *, fused: bool, masks: bool) -> NDArray[np.float64]:
        """Seconds from each placement to each other of a tensor, shape (placements, placements).

        ``masks`` allows a replicated tensor to become partial.
        """
        key = (rank, size_bytes, fused)
        if key not in self._tables:
            self.prepare([key])
        if masks:
            return self._tables[key]
        if key not in self._unmasked:
            self._unmasked[key] = np.where(needs_mask(rank, len(self.mesh.axes)), np.inf, self._tables[key])
        return self._unmasked[key]

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
