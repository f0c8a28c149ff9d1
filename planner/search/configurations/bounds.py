"""Lower bounds of a configuration: cheap enough to leave most of the space unsolved."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.graph.operator_graph import DTYPE_BYTES, Node, OperatorGraph
from planner.search.configurations.schedule_shapes import SPLIT, ScheduleShape
from planner.search.configurations.space import Extent
from planner.search.configurations.step_model import AXES, Configuration, StepModel
from planner.search.configurations.whole_units import chunk_times, least_ranks, least_turns, longer
from planner.search.stages.chain_bound import chain_bound, cuts_bound, row_sums, unlike
from planner.search.stages.fragments import BACKLOG, COLUMNS, FILL, QUEUE, RESIDENT, STEADY, FloatArray
from planner.search.stages.rank_memory import least_busiest
from planner.search.stages.segments import PartitionTask
from planner.search.units.labels import StageTables
from planner.work import traffic_bytes
from simulator.corrections import kernel_factor, message_time
from simulator.hardware import Hardware
from simulator.kernels import best_rate
from simulator.program import Collective, Kernel
from simulator.topology import group_shape

_STREAMING = frozenset(
    (
        *(Kernel.ELEMENTWISE, Kernel.ACTIVATION, Kernel.TRANSCENDENTAL, Kernel.SOFTMAX, Kernel.REDUCTION),
        *(Kernel.NORMALIZATION, Kernel.BATCH_NORMALIZATION),
    )
)

_ROUNDING = 1e-9
TABLE_AXIS = 3
"""How many times as much a table counts for each further axis of its stage mesh."""
_PAYLOADS: FloatArray = np.exp2(np.arange(41, dtype=np.float64))
_INSIDE = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
_BEHIND = COLUMNS
"""Column of `_least_of_kinds` behind those of `Fragments.values`."""


def work_bound(graph: OperatorGraph, hardware: Hardware, dtype: str, devices: int) -> float:
    """Seconds that one sample takes on one device at best, however the work is split.

    `graph` is at batch 1. Every kernel takes at least what its operations and the bytes of tensors that grow with the
    batch take at the profile's highest efficiency, without overhead; messages cost nothing.
    """
    seconds = 0.0
    for node, times in zip(graph.nodes, graph.multiplicity, strict=True):
        if node.kernel is not Kernel.VIEW and node.kernel is not Kernel.OPTIMIZER:
            used = node.product_dtype or dtype
            factor = kernel_factor(hardware, node.kernel, used, devices)
            seconds += times * factor * _least(graph, node, hardware, used)
    return seconds


def _least(graph: OperatorGraph, node: Node, hardware: Hardware, dtype: str) -> float:
    if node.kernel in {Kernel.MATMUL, Kernel.ATTENTION}:
        return node.flops / best_rate(hardware, node.kernel, dtype)
    if node.kernel not in _STREAMING:
        return 0.0
    shares = [float(any(graph.spec(ref).batch_dims)) for ref in node.tensor_inputs]
    shares += [float(any(spec.batch_dims)) for spec in node.outputs]
    moved = traffic_bytes(graph, node, shares) if shares else 0.0
    return moved / hardware.bandwidth(node.kernel)


def even_bound(configuration: Configuration, passes_s: float, ahead: float = 0.0) -> float:
    """Bound by the least time of all passes of one micro-batch, shared out evenly over the ranks.

    At most a part `ahead` of a unit's passes is computed again while its rank waits.
    """
    ranks, fill = configuration.pipeline, _filled(configuration, ahead) * passes_s
    return configuration.micro_batches * passes_s / ranks + fill * (1 - 1 / ranks)


def passes_bound(
    configuration: Configuration, passes_s: FloatArray, counts: list[int], shape: ScheduleShape, sends_s: FloatArray,
    ahead: float = 0.0,
) -> float:  # fmt: skip
    """Bound by the least time of each unit's passes of one micro-batch, units shared out whole.

    What a rank's own passes add to the fill they take from its busy time, so that the least fill of all units counts.
    Turns may even out, so that the chunks of a rank count together.
    ``sends_s`` are the least seconds of the messages over the cut behind each unit; `ahead` is as in `even_bound`.
    """
    c, share = configuration, _filled(configuration, ahead)
    if unlike(counts, c.pipeline * c.virtual):
        passes, cuts = np.repeat(passes_s, counts), np.append(0.0, sends_s)
        own = row_sums((c.micro_batches - share) * passes)
        waits = np.maximum(0.0, shape.steady_sends * cuts[:, None] - shape.hidden_share * own)
        fill = share * float(passes.sum())
        return fill + cuts_bound(own + waits, shape.fill_sends * cuts, shape.rank_of)
    sends_s = np.sort(sends_s)
    least = float(sends_s[0]) if len(sends_s) else 0.0
    times = chunk_times(
        ((c.micro_batches - share) * passes_s).tolist(),
        counts,
        sends_s=c.virtual * shape.steady_sends * least,
        hidden=shape.hidden_share,
    )
    fill = share * float(passes_s @ np.array(counts))
    fill += shape.fill_sends * float(sends_s[: c.pipeline * c.virtual - 1].sum())
    if c.pipeline == 1:
        return fill + least_turns(times, 1, 1)
    return fill + least_ranks(times, c.pipeline, together=bool(shape.rank_of[0] == shape.rank_of[-1]))


def computed_ahead(extent: Extent, configuration: Configuration) -> float:
    """Most of a unit's passes that a rank may compute again while it waits for the fill, as a part of them.

    Passes that compute nothing again are never longer than what others take besides; where there are none, units
    compute at most half of their passes again, which counts at the ends of chunks.
    """
    if extent.pins.recompute in (None, "none"):
        return 0.0
    return 0.5 * min(1.0, configuration.pipeline * configuration.virtual / extent.units)


def _filled(configuration: Configuration, ahead: float) -> float:
    """Least part of a unit's passes that the fill pays.

    Where that is the longer of a forward and half a backward pass, it is at least a third of both passes; else it is
    both passes without what is computed ahead.
    """
    share = 0.0 if configuration.pipeline == 1 else 1.0 / configuration.virtual
    return share / 3 if configuration.schedule in SPLIT else share * (1 - ahead)


def lost_to_messages(model: StepModel, tables: StageTables, configuration: Configuration) -> float:
    """Least seconds that messages over the data axis take from kernels in a step, shared out evenly over the ranks.

    `even_bound` may grow by them. Every byte travels at the best rate of any message.
    """
    c, lost = configuration, model.hardware.lost_to_messages
    if not lost or c.data == 1:
        return 0.0
    shards, stride, size = model.shards(c), c.stride("data"), DTYPE_BYTES[model.dtype]
    elements, first = least_elements(tables)

    def rate(collective: Collective, ranks: int, apart: int) -> float:
        return size * least_byte_s(model.hardware, collective, ranks, apart)

    gather, scatter = (rate(one, shards, stride) for one in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER))
    sums = elements / shards * rate(Collective.ALL_REDUCE, c.data // shards, stride * shards)
    if c.optimizer_sharding == "zero3":
        # Gathered forward and backward; what begins the network is read forward only.
        sums += c.micro_batches * (elements * (gather + scatter) + (elements - first) * gather)
    else:
        times = c.micro_batches if c.optimizer_sharding == "zero2" else 1
        sums += elements * (gather + times * scatter)
    return lost * sums / c.pipeline


@lru_cache(maxsize=256)
def least_elements(tables: StageTables) -> tuple[float, float]:
    """Least trained elements that the ranks of one pipeline hold together, and those of the first unit."""
    least = [float((u.parameter_elements + u.expert_elements).min(initial=np.inf)) for u in tables.units]
    counts = [unit.count for unit in tables.chain.units]
    return sum(count * elements for count, elements in zip(counts, least, strict=True)), least[0]


@lru_cache(maxsize=4096)
def least_byte_s(hardware: Hardware, collective: Collective, size: int, stride: int) -> float:
    """Least seconds of a byte in a message of any size of `_PAYLOADS`, in groups of `size` ranks, `stride` apart."""
    if size == 1:
        return 0.0
    seconds = message_time(hardware, collective, _PAYLOADS, group_shape(hardware, size, stride))
    return float((seconds / _PAYLOADS).min())


def standing_bytes(model: StepModel, tables: StageTables, configuration: Configuration) -> float:
    """Least bytes that stand through a step on the ranks of one pipeline together."""
    return sum(
        unit.count * float(model.resident_bytes(labels, configuration).min(initial=np.inf))
        for unit, labels in zip(tables.chain.units, tables.units, strict=True)
    )


def never_faster(hardware: Hardware, usual: Configuration, other: Configuration) -> bool:
    """Whether no message inside a stage is faster in another order of the same axes, at any payload of `_PAYLOADS`."""
    return _never_faster(hardware, tuple(usual.degrees.values()), usual.order, other.order)


@lru_cache(maxsize=4096)
def _never_faster(
    hardware: Hardware, sizes: tuple[int, ...], usual_order: tuple[str, ...], other_order: tuple[str, ...]
) -> bool:
    degrees = dict(zip(AXES, sizes, strict=True))
    usual, other = (Configuration(**degrees, order=order) for order in (usual_order, other_order))  # type: ignore[arg-type]
    for axis in AXES[2:]:
        size = degrees[axis]
        if size == 1 or usual.stride(axis) == other.stride(axis):
            continue
        groups = [group_shape(hardware, size, c.stride(axis)) for c in (usual, other)]
        for collective in _INSIDE:
            here, there = (message_time(hardware, collective, _PAYLOADS, group) for group in groups)
            if np.any(there < here * (1 - _ROUNDING)):
                return False
    return True


def task_bound(task: PartitionTask) -> float:
    """Bound of a partition task, its memory limit aside: units shared out whole, each at its fastest.

    What synchronisation leaves to do is at least what it leaves of the first unit of a chunk, and at least what
    messages take longer than the passes that hide them. Where turns may even out, a rank's chunks count together.
    """
    least = _least_of_kinds(task)
    sends = np.sort(task.sends_s.min(axis=1)) if task.units > 1 else np.zeros(0)
    together = task.chunks if task.uneven_s is not None else 1
    least_s = together * task.steady_sends * float(sends[0]) if len(sends) else 0.0
    options = {"sends_s": least_s, "hidden": task.hidden_share}
    tail = together * max(0.0, float(least[:, QUEUE].min()))
    alone = chunk_times(least[:, STEADY].tolist(), task.counts, tail_s=tail, **options)
    times = longer(alone, chunk_times(least[:, _BEHIND].tolist(), task.counts, **options))
    if task.uneven_s is None:
        busiest = least_turns(times, task.ranks, task.chunks)
    else:
        busiest = least_ranks(times, task.ranks, together=bool(task.rank_of[0] == task.rank_of[-1]))
    counts = np.array(task.counts, dtype=np.float64)
    even = max(float(np.ascontiguousarray(least[:, column]) @ counts) / task.ranks for column in (STEADY, _BEHIND))
    return _least_fill(task, least) + max(even, busiest)


def time_bound(task: PartitionTask) -> float:
    """Bound a partition by time: chains of unlike units in their boundary states, others by `task_bound`."""
    return chain_bound(task) if unlike(task.counts, task.pieces) else task_bound(task)


def _least_of_kinds(task: PartitionTask) -> FloatArray:
    """Least values of the ways of each kind of unit, (kinds, columns), and of steady seconds with what falls behind."""
    values = np.concatenate([kind.values for kind in task.kinds])
    starts = np.cumsum([0, *(len(kind) for kind in task.kinds[:-1])])
    behind = values[:, STEADY] + values[:, BACKLOG]
    return np.minimum.reduceat(np.column_stack([values, behind]), starts, axis=0)


def _least_fill(task: PartitionTask, least: FloatArray) -> float:
    """Least seconds of the fill: all units' and the cheapest messages'."""
    fills = np.ascontiguousarray(least[:, FILL])
    sends = np.sort(task.sends_s.min(axis=1))[: task.pieces - 1].sum() if task.units > 1 else 0.0
    return float(fills @ np.array(task.counts)) + task.fill_sends * float(sends)


def memory_bound(task: PartitionTask) -> float:
    """Bound of a partition task with its memory limit; infinite where what is tabled proves that none fits."""
    least = _least_of_kinds(task)
    resident = sum(count * held for held, count in zip(least[:, RESIDENT].tolist(), task.counts, strict=True))
    if resident > task.ranks * task.limit_bytes:
        return np.inf
    return _least_fill(task, least) + least_busiest(task)


def least_memory(task: PartitionTask) -> tuple[int, float]:
    """The rank that cannot do with less than the most memory, and the bytes it needs; units shared out evenly."""
    flight = np.full(task.ranks, np.inf)
    np.minimum.at(flight, task.rank_of, task.in_flight)
    units = np.repeat(np.arange(len(task.counts)), task.counts)
    needed = np.zeros(task.ranks)
    for rank, part in enumerate(np.array_split(units, task.ranks)):
        for kind in part.tolist():
            ways = task.kinds[kind]
            needed[rank] += float((flight[rank] * ways.values[:, 4] + ways.values[:, 5]).min())
        needed[rank] += max((float(task.kinds[k].values[:, 6].min()) for k in part.tolist()), default=0.0)
    fullest = int(np.argmax(needed))
    return fullest, float(needed[fullest])


def weight(configuration: Configuration) -> int:
    """How many times as much a table counts as one with a single axis."""
    return int(TABLE_AXIS ** max(0, len(configuration.inner_mesh().axes) - 1))
