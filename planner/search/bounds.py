"""Lower bounds of a configuration: cheap enough to leave most of the space unsolved."""

from __future__ import annotations

import numpy as np

from planner.graph.operator_graph import Node, OperatorGraph
from planner.search.fragments import ACTIVATION, BACKLOG, FILL, RESIDENT, STEADY, TRANSIENT, FloatArray, IntArray
from planner.search.schedule_shapes import SPLIT
from planner.search.segments import PartitionTask
from planner.search.step_model import Configuration
from planner.work import traffic_bytes
from simulator.corrections import kernel_factor
from simulator.hardware import Hardware
from simulator.kernels.matmul import matmul_model
from simulator.program import Kernel

_HALVINGS = 40
_STREAMING = frozenset((Kernel.ELEMENTWISE, Kernel.ACTIVATION, Kernel.SOFTMAX, Kernel.NORMALIZATION, Kernel.REDUCTION))
_MARGIN = 1e-9


def work_bound(graph: OperatorGraph, hardware: Hardware, dtype: str, devices: int) -> float:
    """Seconds that one sample takes on one device at best, however the work is split.

    `graph` is at batch 1. Every kernel takes at least what its operations and the bytes of tensors that grow with the
    batch take at the profile's highest efficiency, without overhead; messages cost nothing.
    """
    seconds = 0.0
    for node, times in zip(graph.nodes, graph.multiplicity, strict=True):
        if node.kernel is not Kernel.VIEW and node.kernel is not Kernel.OPTIMIZER:
            factor = kernel_factor(hardware, node.kernel, dtype, devices)
            seconds += times * factor * _least(graph, node, hardware, dtype)
    return seconds


def _least(graph: OperatorGraph, node: Node, hardware: Hardware, dtype: str) -> float:
    if node.kernel is Kernel.MATMUL:
        return node.flops / (hardware.peak(dtype) * _best_efficiency(hardware, dtype))
    if node.kernel not in _STREAMING:
        return 0.0
    kernel = hardware.kernels[node.kernel]
    shares = [float(any(graph.spec(ref).batch_dims)) for ref in node.tensor_inputs]
    shares += [float(any(spec.batch_dims)) for spec in node.outputs]
    moved = traffic_bytes(graph, node, shares) if shares else 0.0
    return moved / (hardware.memory_bandwidth * kernel.bandwidth_efficiency)


def _best_efficiency(hardware: Hardware, dtype: str) -> float:
    """Largest part of the peak that `simulator.kernels.matmul_time` gives any product."""
    model = matmul_model(hardware, dtype)
    if model is None:
        return hardware.kernels[Kernel.MATMUL].compute_efficiency
    loss = min(1.0 + model.tile_loss * 64.0 * (1.0 / rows + 1.0 / columns) for rows, columns in model.tiles)
    factor = max([factor for _, factor in model.utilisation] or [1.0])
    return float(model.compute_efficiency) * hardware.sustained_matmul_speed * factor / loss


def even_bound(configuration: Configuration, passes_s: float) -> float:
    """Bound by the least time of all passes of one micro-batch, shared out evenly over the ranks.

    The objective is at least the fill of all chunks and a p-th of what all ranks do besides. Where the fill is the
    longer of a forward and half a backward pass, it is at least a third of both passes.
    """
    ranks, count = configuration.pipeline, configuration.micro_batches
    share = 0.0 if ranks == 1 else 1.0 / configuration.virtual
    fill = share * passes_s * (1 / 3 if configuration.schedule in SPLIT else 1)
    return count * passes_s / ranks + fill * (1 - 1 / ranks)


def task_bound(task: PartitionTask) -> float:
    """Bound of a partition task, infinite where no share of the most frequent unit over the ranks fits their memory.

    Two relaxations: time alone, shared out evenly; and the most frequent unit alone, in parts of any size, whose ways
    each rank mixes as its time and memory allow (a linear program with two rows a rank, whose optimum mixes two ways).
    """
    counts = np.array(task.counts, dtype=np.float64)
    # What is left of the synchronisation is at least what messages take longer than the passes that hide them.
    behind = np.array([(kind.values[:, STEADY] + kind.values[:, BACKLOG]).min() for kind in task.kinds])
    least = np.array([kind.values[:, STEADY].min() for kind in task.kinds])
    fills = np.array([kind.values[:, FILL].min() for kind in task.kinds])
    most = int(np.argmax(counts))
    together = -(-int(counts[most]) // task.ranks)
    shares = [float(least @ counts) / task.ranks, float(behind @ counts) / task.ranks]
    even = max(*shares, float(least.max()), together * float(least[most]))
    bound: float = float(fills @ counts) + max(even, _mixed(task, most))
    return bound


def _mixed(task: PartitionTask, kind: int) -> float:
    """Least time of the busiest rank so that all ranks together hold every unit of one kind."""
    values, count = task.kinds[kind].values, float(task.counts[kind])
    flight = np.full(task.ranks, np.inf)
    np.minimum.at(flight, task.rank_of, task.in_flight)
    # What differs little between ways counts as the least: only time and activations are traded.
    rows = _staircase(values[:, STEADY], values[:, ACTIVATION])
    memory = flight[:, None] * values[rows, ACTIVATION] + values[:, RESIDENT].min()
    room = task.limit_bytes - values[:, TRANSIENT].min()
    if room <= 0:
        return np.inf
    memory = np.maximum(memory, 1e-30)
    if float((room / memory.min(axis=1)).sum()) < count * (1 - _MARGIN):
        return np.inf
    time = values[rows, STEADY]
    high, count = float(time.max()) * count, count * (1 - _MARGIN)
    low = 0.0
    if _capacity(time, memory, room, float(time.min()) * count / task.ranks) >= count:
        return float(time.min()) * count / task.ranks
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _capacity(time, memory, room, middle) >= count:
            high = middle
        else:
            low = middle
    return low


def _staircase(time: FloatArray, kept: FloatArray) -> IntArray:
    """Places that none beats in both, fastest first."""
    order = np.lexsort((kept, time))
    lowest = np.minimum.accumulate(kept[order])
    return order[np.concatenate(([True], lowest[1:] < lowest[:-1]))]


def _capacity(time: FloatArray, memory: FloatArray, room: float, limit_s: float) -> float:
    """Units that all ranks hold at most, each within `limit_s` seconds and `room` bytes; memory is (ranks, ways)."""
    alone = np.minimum(limit_s / time, room / memory)
    best = alone.max(axis=1)
    a, b = memory[:, :, None], memory[:, None, :]
    fast, slow = time[None, :, None], time[None, None, :]
    determinant = fast * b - slow * a
    meets = determinant != 0
    safe = np.where(meets, determinant, 1.0)
    of_fast, of_slow = (limit_s * b - slow * room) / safe, (fast * room - limit_s * a) / safe
    mixed = np.where(meets & (of_fast >= 0) & (of_slow >= 0), of_fast + of_slow, 0.0)
    return float(np.maximum(best, mixed.max(axis=(1, 2))).sum())
