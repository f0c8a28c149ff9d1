"""Lower bounds of a configuration: cheap enough to leave most of the space unsolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from planner.cost.work import traffic_bytes
from planner.graph.operator_graph import Node, OperatorGraph
from planner.graph.recompute import KeptByGraph
from planner.search.configurations.least_states import LeastStates, payloads_s
from planner.search.configurations.schedule_shapes import SPLIT
from planner.search.configurations.space import Extent
from planner.search.configurations.step_model import AXES, Configuration, StepModel
from planner.search.configurations.storage import Storages
from planner.search.stages.block_bounds import chunk_times, least_busiest, least_ranks, least_turns, longer
from planner.search.stages.chain_bound import LONG, chain_bound, chain_bounds, unlike, values_bounds
from planner.search.stages.fragments import (
    BACKLOG,
    COLUMNS,
    FILL,
    QUEUE,
    RESIDENT,
    STEADY,
    FloatArray,
    Fragments,
    IntArray,
)
from planner.search.stages.task import PartitionTask
from planner.search.units.labels import StageTables
from simulator.corrections import kernel_factor
from simulator.hardware import Hardware
from simulator.kernels import best_rate
from simulator.program import SUMMED_CLASS, Collective, Kernel

_STREAMING = frozenset(
    (
        *(
            Kernel.ELEMENTWISE,
            Kernel.ACTIVATION,
            Kernel.TRANSCENDENTAL,
            Kernel.SOFTMAX,
            Kernel.REDUCTION,
            Kernel.POOLING,
        ),
        *(Kernel.NORMALIZATION, Kernel.BATCH_NORMALIZATION),
    )
)

_ROUNDING = 1e-9
TABLE_AXIS = 3
"""How many times as much a table counts for each further axis of its stage mesh."""
_INSIDE = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
_BEHIND = COLUMNS
"""Column of `_least_of_kinds` behind those of `Fragments.values`."""


def work_bound(graph: OperatorGraph, hardware: Hardware, dtype: str, devices: int) -> float:
    """Seconds that one sample takes on one device at best, however the work is split.

    `graph` is at batch 1. Every kernel takes at least what its operations and the bytes of tensors that grow with the
    batch take at the profile's highest efficiency, without overhead; messages cost nothing. It is worked out once.
    """
    made, key = _SAMPLES.of(graph), (hardware, dtype, devices)
    if key not in made:
        seconds = 0.0
        for node, times in zip(graph.nodes, graph.multiplicity, strict=True):
            if node.kernel is not Kernel.VIEW and node.kernel is not Kernel.OPTIMIZER:
                used = node.product_dtype or dtype
                factor = kernel_factor(hardware, node.kernel, used, devices)
                seconds += times * factor * _least(graph, node, hardware, used)
        made[key] = seconds
    return made[key]


_SAMPLES = KeptByGraph[tuple[Hardware, str, int], float]()


def _least(graph: OperatorGraph, node: Node, hardware: Hardware, dtype: str) -> float:
    if node.kernel in {Kernel.MATMUL, Kernel.ATTENTION}:
        return node.flops / best_rate(hardware, node.kernel, dtype)
    if node.kernel not in _STREAMING:
        return 0.0
    shares = [float(any(graph.spec(ref).batch_dims)) for ref in node.tensor_inputs]
    shares += [float(any(spec.batch_dims)) for spec in node.outputs]
    moved = traffic_bytes(graph, node, shares) if shares else 0.0
    classes = {node.kernel, SUMMED_CLASS.get(node.kernel, node.kernel)}
    return moved / max(hardware.bandwidth(kernel) for kernel in classes)


def even_bound(configuration: Configuration, passes_s: float, ahead: float = 0.0) -> float:
    """Bound by the least time of all passes of one micro-batch, shared out evenly over the ranks.

    At most a part `ahead` of a unit's passes is computed again while its rank waits.
    """
    ranks, fill = configuration.pipeline, _filled(configuration, ahead) * passes_s
    return configuration.micro_batches * passes_s / ranks + fill * (1 - 1 / ranks)


def whole_bound(
    extent: Extent, model: StepModel, tables: StageTables, configuration: Configuration, *, other: bool = False
) -> float:
    """Bound by the least passes of the whole network and the sums over the batch for which they wait.

    In another order of the axes than that of `tables` passes may be faster, and do not count.
    """
    least_s = _passes_s(model, tables, configuration, 0.0 if other else tables.least.whole_s)
    return even_bound(configuration, max(least_s, extent.launch_s), computed_ahead(extent, configuration))


def states_bounds(
    extent: Extent,
    model: StepModel,
    tables: StageTables,
    configuration: Configuration,
    states: LeastStates,
    passes: float = 0.0,
) -> FloatArray:
    """(storages,) `whole_bound` with what states take in each of several storages, and what passes keep beside them.

    ``passes`` is another bound, but for what the last message of gradients takes.
    """
    c, ahead = configuration, computed_ahead(extent, configuration)
    summed = c.data > 1 and tables.decisions.sums_over_batch
    shared, even = [way.shard_size if summed else 0 for way in states.ways], dict[int, float]()
    for size in dict.fromkeys(shared):
        each = replace(c, shard_size=size) if summed else c
        even[size] = even_bound(c, _passes_s(model, tables, each, tables.least.whole_s, least=False), ahead)
    passes_s = np.array([even[size] for size in shared]) + states.again_s(model, tables, c)
    stored = np.maximum(passes_s, even_bound(c, extent.launch_s, ahead)) + states.whole_s / c.pipeline
    return np.maximum(stored, passes) + states.last_s(model, c)


def _passes_s(model: StepModel, tables: StageTables, c: Configuration, least_s: float, *, least: bool = True) -> float:
    """Seconds of passes with the sums over the batch for which they wait, the ``least`` of any storage's."""
    return least_s + model.whole_batch_sums_s(tables, c, least=least)


def passes_bound(
    extent: Extent,
    model: StepModel,
    tables: StageTables,
    configuration: Configuration,
    once_s: FloatArray | None = None,
) -> float:
    """Bound by the least time of each unit's passes of one micro-batch, units shared out whole.

    What a rank's own passes add to the fill they take from its busy time, so that the least fill of all units counts.
    Turns may even out, so that the chunks of a rank count together. ``once_s`` (units,) is what the states
    of each unit take in a step at least (`LeastStates`).
    """
    c, share = configuration, _filled(configuration, computed_ahead(extent, configuration))
    # What is least of every kind is least with the least passes.
    passes_s = np.maximum(
        _least_between_s(tables) + model.batch_sums_s(tables, c, least=True).sum(axis=1), tables.launches_s
    )
    least = np.zeros((len(passes_s), COLUMNS + 1))
    least[:, FILL] = share * passes_s
    least[:, STEADY] = least[:, _BEHIND] = (c.micro_batches - share) * passes_s
    if once_s is not None:
        least[:, [STEADY, _BEHIND]] += once_s[:, None]
    return _bound_of(model.unlimited_task(tables, c, (), tables.counts), least)


def chained_bound(
    extent: Extent, model: StepModel, tables: StageTables, configuration: Configuration, states: LeastStates
) -> FloatArray:
    """(storages,) `passes_bound` of a chain of unlike units, with passes between boundary states.

    With several chunks a rank, whose cuts are listed one by one, storages share the bound of the least of all.
    """
    once_s, numbers = states.anywhere_s
    if configuration.virtual > 1:
        once_s, numbers = once_s.min(axis=0, keepdims=True), np.zeros_like(numbers)
    c, ways, share = configuration, least_ways(tables), _filled(configuration, computed_ahead(extent, configuration))
    sums_s = model.batch_sums_s(tables, c, least=True).sum(axis=1)
    passes_s = np.maximum(ways.seconds + sums_s[ways.units], tables.launches_s[ways.units])
    values = np.zeros((len(once_s), len(passes_s), COLUMNS))
    values[:, :, FILL] = share * passes_s
    values[:, :, STEADY] = (c.micro_batches - share) * passes_s + once_s[:, ways.units]
    return values_bounds(model.unlimited_task(tables, c, ways.kinds, tables.counts), values)[numbers]


@lru_cache(maxsize=256)
def _least_between_s(tables: StageTables) -> FloatArray:
    """(units,) least steady seconds of one micro-batch between any boundary states."""
    return np.array([seconds.min() for seconds in tables.least.between_s])


class LeastWays(NamedTuple):
    """The fastest passes of one micro-batch of each unit between any two boundary states, one unit behind the other.

    ``seconds`` and ``units`` (ways,) are those of both passes, and whose they are.
    """

    kinds: tuple[Fragments, ...]
    seconds: FloatArray
    units: IntArray


@lru_cache(maxsize=256)
def least_ways(tables: StageTables) -> LeastWays:
    """Ways of the units of some tables, whose values are those of a step with one pass."""
    found, fastest, last = [], list[FloatArray](), len(tables.counts) - 1
    for number, seconds in enumerate(tables.least.between_s):
        entry, leave = np.nonzero(np.isfinite(seconds))
        fastest.append(seconds[entry, leave])
        values = np.zeros((len(entry), COLUMNS))
        values[:, STEADY] = fastest[-1]
        begins, ends = np.full_like(entry, -1), np.full_like(leave, -1)
        found.append(
            Fragments(
                values,
                entry if number else begins,
                leave if number < last else ends,
                np.arange(len(entry))[:, None],
            )
        )
    units = np.repeat(np.arange(len(found)), [len(ways) for ways in found])
    return LeastWays(tuple(found), np.concatenate(fastest), units)


def computed_ahead(extent: Extent, configuration: Configuration) -> float:
    """Most of a unit's passes that a rank may compute again while it waits for the fill, as a part of them.

    Passes that compute nothing again are never longer than what others take besides; where there are none, units
    compute at most half of their passes again, which counts at the ends of chunks.
    """
    if extent.pins.recompute in (None, "none"):
        return 0.0
    return 0.5 * min(1.0, configuration.pipeline * configuration.virtual / extent.units)


def _filled(configuration: Configuration, ahead: float) -> float:
    """Least part of a unit's passes that the fill pays: of both, what is not computed ahead.

    In ZB-H1, with both parts I and W of a backward pass, it is at least the longer of F + I - W and (I + W) / 2, and
    so a fifth of F + I + W. The others that put weight gradients off may leave no gap at all.
    """
    share = 0.0 if configuration.pipeline == 1 else 1.0 / configuration.virtual
    if configuration.schedule in SPLIT:
        return share / 5 if configuration.schedule == "zb_h1" else 0.0
    return share * (1 - ahead)


def standing_bytes(model: StepModel, tables: StageTables, ways: Sequence[Configuration]) -> list[float]:
    """Least bytes that stand through a step on the ranks of one pipeline together, in each way to store states."""
    storages = Storages.of(ways)
    if tables.tied or not all(map(len, tables.units)):
        units = [model.resident_bytes(labels, storages).min(axis=1, initial=np.inf) for labels in tables.units]
        least = np.stack(units, axis=1)
    else:
        joined = model.joined(tables, storages.placed)
        held = model.resident_bytes(joined.labels, storages)
        least = np.minimum.reduceat(held, np.append(0, joined.ends), axis=1)
    return [
        sum(count * bytes_held for count, bytes_held in zip(tables.counts, row, strict=True)) for row in least.tolist()
    ]


def never_faster(
    hardware: Hardware, usual: Configuration, other: Configuration, axes: tuple[str, ...] = AXES[2:]
) -> bool:
    """Whether no message along some axes, those inside a stage, is faster in another order of them, at any payload."""
    return _never_faster(hardware, tuple(usual.degrees.values()), usual.order, other.order, axes)


@lru_cache(maxsize=4096)
def _never_faster(
    hardware: Hardware,
    sizes: tuple[int, ...],
    usual_order: tuple[str, ...],
    other_order: tuple[str, ...],
    axes: tuple[str, ...],
) -> bool:
    degrees = dict(zip(AXES, sizes, strict=True))
    usual, other = (Configuration(**degrees, order=order) for order in (usual_order, other_order))  # type: ignore[arg-type]
    for axis in axes:
        size = degrees[axis]
        if size == 1 or usual.stride(axis) == other.stride(axis):
            continue
        for collective, sharded in product(_INSIDE, (False, True) if axis == "data" else (False,)):
            here, there = (
                payloads_s(hardware, collective, size, c.stride(axis), sharded=sharded, axis=axis)
                for c in (usual, other)
            )
            if np.any(there < here * (1 - _ROUNDING)):
                return False
    return True


def task_bound(task: PartitionTask) -> float:
    """Bound of a partition task, its memory limit aside: units shared out whole, each at its fastest.

    What synchronisation leaves to do is at least what it leaves of the first unit of a chunk, and at least what
    messages take longer than the passes that hide them. Where turns may even out, a rank's chunks count together.
    """
    return _bound_of(task, _least_of_kinds(task))


def _bound_of(task: PartitionTask, least: FloatArray) -> float:
    """`task_bound` by the least values of the ways of each kind of unit, as `_least_of_kinds` has them."""
    sends = np.sort(task.sends_s.min(axis=1)) if task.units > 1 else np.zeros(0)
    together = task.chunks if task.uneven_s is not None else 1
    least_s = together * task.steady_sends * float(sends[0]) if len(sends) else 0.0
    options = {"sends_s": least_s, "hidden": task.hidden_share}
    tail = together * max(0.0, float(least[:, QUEUE].min()))
    alone, behind = least[:, STEADY].tolist(), least[:, _BEHIND].tolist()
    times = chunk_times(alone, task.counts, tail_s=tail, **options)
    if tail or alone != behind:
        times = longer(times, chunk_times(behind, task.counts, **options))
    if task.uneven_s is None:
        busiest = least_turns(times, task.ranks, task.chunks)
    else:
        busiest = least_ranks(times, task.ranks, together=bool(task.rank_of[0] == task.rank_of[-1]))
    counts = np.array(task.counts, dtype=np.float64)
    even = max(float(np.ascontiguousarray(least[:, column]) @ counts) / task.ranks for column in (STEADY, _BEHIND))
    return _least_fill(task, least, sends) + max(even, busiest)


def time_bound(task: PartitionTask) -> float:
    """Bound a partition by time: short chains as `followed` in their boundary states, others by `task_bound`."""
    return chain_bound(task) if followed(task) else task_bound(task)


def chains_s(tasks: Sequence[PartitionTask]) -> list[float | None]:
    """Bounds of tasks of one placed configuration by their chains, None of those that are not `followed`."""
    found: list[float | None] = [None] * len(tasks)
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for number, task in enumerate(tasks):
        if followed(task):
            alike.setdefault((task.counts, tuple(map(len, task.kinds))), []).append(number)
    for numbers in alike.values():
        bounds = chain_bounds([tasks[number] for number in numbers]).tolist()
        for number, least_s in zip(numbers, bounds, strict=True):
            found[number] = least_s
    return found


def followed(task: PartitionTask) -> bool:
    """Whether a task is bounded by its chain: short, and on one rank or of units most of which are not alike."""
    return unlike(task.counts, task.pieces) or (task.pieces == 1 and task.units <= LONG)


def _least_of_kinds(task: PartitionTask) -> FloatArray:
    """Least values of the ways of each kind of unit, (kinds, columns), and of steady seconds with what falls behind."""
    values = np.concatenate([kind.values for kind in task.kinds])
    starts = np.cumsum([0, *(len(kind) for kind in task.kinds[:-1])])
    behind = values[:, STEADY] + values[:, BACKLOG]
    return np.minimum.reduceat(np.column_stack([values, behind]), starts, axis=0)


def _least_fill(task: PartitionTask, least: FloatArray, sends: FloatArray) -> float:
    """Least seconds of the fill: all units' and the cheapest messages', whose seconds ascend in ``sends``."""
    fills = np.ascontiguousarray(least[:, FILL])
    sent = float(sends[: task.pieces - 1].sum()) if task.units > 1 else 0.0
    return float(fills @ np.array(task.counts)) + task.fill_sends * sent


def memory_bound(task: PartitionTask) -> float:
    """Bound of a partition task with its memory limit; infinite where what is tabled proves that none fits."""
    least = _least_of_kinds(task)
    resident = sum(count * held for held, count in zip(least[:, RESIDENT].tolist(), task.counts, strict=True))
    if resident > task.ranks * task.limit_bytes:
        return np.inf
    sends = np.sort(task.sends_s.min(axis=1)) if task.units > 1 else np.zeros(0)
    return _least_fill(task, least, sends) + least_busiest(task)


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
