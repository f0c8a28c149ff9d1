"""Rows of amounts that are worked out together: kernels, messages, and pieces of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.graph.kernel_shapes import KernelShape, local_kernel
from planner.search.problem.costs import MeshCosts
from planner.sharding.inner_messages import waiting_time
from planner.sharding.rule_notation import InnerMessage
from simulator.corrections import kernel_factor
from simulator.kernels import has_shape_model, kernel_time, shaped_time
from simulator.program import Collective, Kernel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Scaled:
    """Numbers that grow with the batch and are shared out over axes.

    Number i of a case is ``whole[i] * ratio ** growth[i] * share[axes[i]]``, with the case's batch over that of the
    graph, and what is left of a tensor that the axes of a mask cut.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, IntArray]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, whole: float, growth: int, axes: IntArray) -> None:
        """Add numbers that differ in their masks alone, shape (n,)."""
        self._rows.append((whole, growth, axes))
        self._count += len(axes)

    def close(self) -> None:
        """Join what was added."""
        lengths = np.array([len(axes) for _, _, axes in self._rows], dtype=np.int64)
        self.whole = np.repeat(np.array([whole for whole, _, _ in self._rows], dtype=np.float64), lengths)
        self.growth = np.repeat(np.array([growth for _, growth, _ in self._rows], dtype=np.int64), lengths)
        self.axes = np.concatenate([np.zeros(0, dtype=np.int64), *(axes for _, _, axes in self._rows)])
        self._rows = []

    def values(self, ratio: FloatArray, share: FloatArray) -> FloatArray:
        """All numbers, shape (cases, n); `ratio` has shape (cases,), `share` (cases, masks)."""
        return np.asarray(scaled(self.whole, self.growth, ratio) * share[:, self.axes])


def scaled(whole: FloatArray, growth: IntArray, ratio: FloatArray) -> FloatArray:
    """Numbers at other batches, shape (cases, n)."""
    powers = ratio[:, None] ** np.arange(int(growth.max(initial=0)) + 1)
    return np.asarray(whole * powers[:, growth])


@dataclass(slots=True)
class _KernelRows:
    """Kernels of one class and dtype: rows, operations and their share, and for each port bytes and their share."""

    rows: list[IntArray] = field(default_factory=list)
    work: Scaled = field(default_factory=Scaled)
    ports: list[Scaled] = field(default_factory=list)
    sizes: list[Scaled] = field(default_factory=list)


class Kernels:
    """Kernels of operators, a row for each state of each operator."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Kernel, str, tuple[int, int, int] | None, int], _KernelRows] = {}
        self.before: list[tuple[IntArray, IntArray]] = []
        """Kernels, and those whose time they take as well, both of shape (n,)."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(
        self,
        kind: tuple[Kernel, str],
        flops: tuple[float, int],
        work: IntArray,
        moved: Sequence[tuple[float, int]],
        ports: Sequence[IntArray],
        shape: KernelShape | None,
    ) -> IntArray:
        """Add an operator and return its rows, shape (states,).

        Parameters
        ----------
        flops : tuple
            Operations of the whole operator, and whether they grow with the batch.
        work : array, shape (states,)
            Masks of the axes that share the work.
        moved : sequence of tuple
            Bytes of each port with their growth.
        ports : sequence of array, shape (states,)
            Masks of the axes that cut each port.
        shape : KernelShape, optional
            Where the time depends on it.
        """
        rows = np.arange(self._count, self._count + len(work))
        self._count += len(work)
        group = self._groups.setdefault((*kind, shape.ports if shape else None, len(moved)), _KernelRows())
        group.rows.append(rows)
        group.work.add(*flops, work)
        if not group.ports:
            group.ports = [Scaled() for _ in moved]
            group.sizes = [Scaled() for _ in shape.sizes] if shape else []
        for port, (size, growth), axes in zip(group.ports, moved, ports, strict=False):
            port.add(size, growth, axes)
        if shape:
            for dim, size, growth in zip(group.sizes, shape.sizes, shape.growth, strict=True):
                dim.add(size, growth, work)
        return rows

    def close(self) -> None:
        """Join what was added."""
        for group in self._groups.values():
            group.rows = [np.concatenate(group.rows)]
            for numbers in (group.work, *group.ports, *group.sizes):
                numbers.close()

    def seconds(self, costs: Sequence[MeshCosts], ratio: FloatArray, share: FloatArray) -> FloatArray:
        """Seconds of every kernel alone, shape (cases, kernels)."""
        found = np.zeros((len(costs), self._count))
        hardware = costs[0].hardware
        devices, of_case = np.unique([cost.mesh.size for cost in costs], return_inverse=True)
        for (kernel, dtype, ports, _), group in self._groups.items():
            flops = group.work.values(ratio, share)
            moved = np.zeros_like(flops)
            for port in group.ports:
                moved = moved + port.values(ratio, share)
            if ports and has_shape_model(hardware, kernel):
                first, second, result = (share[:, group.ports[port].axes] for port in ports)
                sizes = [scaled(dim.whole, dim.growth, ratio) for dim in group.sizes]
                shape = local_kernel(kernel, sizes, (first, second, result), share[:, group.work.axes])
                time = shaped_time(hardware, kernel, dtype, shape, flops, moved)
            else:
                time = kernel_time(hardware, kernel, dtype, flops, moved)
            factors = np.array([kernel_factor(hardware, kernel, dtype, count) for count in devices.tolist()])
            found[:, group.rows[0]] = time * factors[of_case, None]
        for rows, before in self.before:
            found[:, rows] += found[:, before]
        return found


@dataclass(slots=True)
class _Inner:
    """Messages of one kind inside operators: rows of their kernels, and ports."""

    message: InnerMessage
    rows: list[IntArray] = field(default_factory=list)
    ports: list[Scaled] = field(default_factory=list)


class Messages:
    """Messages inside operators, and between them as *slots*, as are copies on the way: slot 0 is none."""

    def __init__(self) -> None:
        self._inner: dict[tuple[object, ...], _Inner] = {}
        self._axes: dict[tuple[object, ...], int] = {}
        self._payloads = Scaled()
        self._payloads.add(0.0, 0, np.zeros(1, dtype=np.int64))
        self._slots: dict[tuple[Collective, int, bool], list[int]] = {}
        self._copies: list[int] = []

    @property
    def count(self) -> int:
        """Number of slots."""
        return len(self._payloads)

    def add(
        self,
        message: InnerMessage,
        axis: int,
        rows: IntArray,
        sent: Sequence[tuple[float, int, IntArray]],
    ) -> None:
        """Add a message inside the kernels `rows`; `sent` are bytes, growth and masks (rows,) of what is sent."""
        key = (message.collective, axis, message.circulating, message.overlapped, message.together, len(sent))
        group = self._inner.setdefault(key, _Inner(message))
        self._axes[key] = axis
        group.rows.append(rows)
        if not group.ports:
            group.ports = [Scaled() for _ in sent]
        for port, (size, growth, axes) in zip(group.ports, sent, strict=True):
            port.add(size, growth, axes)

    def slots(
        self, kinds: Sequence[tuple[Collective, int, tuple[int, ...]]], size: float, growth: int, fused: bool
    ) -> int:
        """Add the messages of a tensor of `size` bytes, and return the number of the first."""
        first = self.count
        masks = np.array([sum(1 << axis for axis in sharded) for _, _, sharded in kinds], dtype=np.int64)
        self._payloads.add(size, growth, masks)
        for number, (collective, axis, _) in enumerate(kinds, first):
            self._slots.setdefault((collective, axis, fused), []).append(number)
        return first

    def copies(self, pieces: Sequence[tuple[int, ...]], size: float, growth: int) -> int:
        """Add the slices and masks of a tensor of `size` bytes, and return the number of the first."""
        first = self.count
        masks = np.array([sum(1 << axis for axis in cut) for cut in pieces], dtype=np.int64)
        self._payloads.add(2.0 * size, growth, masks)
        self._copies += range(first, first + len(pieces))
        return first

    def close(self) -> None:
        """Join what was added."""
        self._payloads.close()
        for group in self._inner.values():
            group.rows = [np.concatenate(group.rows)]
            for port in group.ports:
                port.close()

    def seconds(self, costs: MeshCosts, ratio: FloatArray, share: FloatArray) -> FloatArray:
        """Seconds of all slots on one mesh, shape (cases, slots)."""
        payloads = np.maximum(self._payloads.values(ratio, share), 1.0)
        found = np.zeros_like(payloads)
        for (collective, axis, fused), slots in self._slots.items():
            if axis >= len(costs.mesh.axes):
                continue
            sent = payloads[:, slots]
            found[:, slots] = costs.message_time(collective, axis, sent.ravel(), fused).reshape(sent.shape)
        found[:, self._copies] = costs.copy_time(payloads[:, self._copies])
        return found

    def calls(self, costs: MeshCosts) -> FloatArray:
        """Launches of all slots on one mesh, shape (slots,)."""
        found = np.zeros(self.count)
        for (collective, axis, _), slots in self._slots.items():
            if axis < len(costs.mesh.axes):
                found[slots] = costs.launches(collective, axis)
        return found

    def waits(
        self, costs: MeshCosts, ratio: FloatArray, share: FloatArray, work_s: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds (cases, kernels) that kernels wait for messages inside them on one mesh, and launches of these."""
        inside, calls = np.zeros_like(work_s), np.zeros_like(work_s)
        for key, group in self._inner.items():
            axis, rows = self._axes[key], group.rows[0]
            if axis >= len(costs.mesh.axes):
                continue
            payload = np.sum([port.values(ratio, share) for port in group.ports], axis=0)
            sent = costs.message_time(group.message.collective, axis, np.maximum(payload, 1.0).ravel())
            size = costs.mesh.axes[axis].size
            waits = waiting_time(group.message, size, sent.reshape(payload.shape), work_s[:, rows])
            np.add.at(inside.T, rows, np.where(payload > 0, waits, 0.0).T)
            np.add.at(calls.T, rows, np.where(payload > 0, costs.launches(group.message.collective, axis), 0.0).T)
        return inside, calls
