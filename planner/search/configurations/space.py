"""The space of configurations: what is searched for given devices, batch and pins.

Axes are the pipeline, data, context, expert and tensor degrees with the product of the devices. Context and expert
axes are searched where they are pinned, or the network reads `LONG_SEQUENCE` tokens or has experts; attention on a
context axis runs by every algorithm that the network allows. The tensor axis spans at most `WIDEST_TENSOR` nodes.
Micro-batches about double from one sample on, as far as they divide the batch. Of all orders of the axes over the
topology those are searched that place some axis on other links. Messages of gradients have the size that
`planner.search.configurations.buckets` chooses. Optimizer states move to the host where memory binds (`offloaded`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product

from planner.plans.pins import AXES_BY_PIN, Pins
from planner.plans.plan import MOST_MICRO_BATCHES, MOST_PASSES
from planner.search.configurations.buckets import MIB, DataAxis, bucket_bytes
from planner.search.configurations.schedule_shapes import ONE_STAGE, SEARCHED, fits_schedule
from planner.search.configurations.step_model import AXES, Configuration
from planner.sharding.context import ALGORITHMS, ContextAxis
from simulator.checks import divisors
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.schedules.generators import TWO_CHUNKS
from simulator.timing import host_time
from simulator.topology import group_shape

LONG_SEQUENCE = 32_768
WIDEST_TENSOR = 4
MOST_CHUNKS = 12
WIDER = 4
SHARDINGS = ("none", "zero1", "zero2", "zero3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What bounds the space: cluster, batch, pins and what the network offers.

    ``units`` is the number of pieces the network may be cut into, ``sequence`` the tokens of a sample (0: none),
    ``experts`` those of the largest layer; ``context`` says by algorithm which context axes are possible, None where
    that is not known. ``gradient_bytes`` are those of all trained parameters, most of which stay whole on so many ranks
    as ``undivided`` names: these divide none of their dims. ``sample_s`` are the device seconds of one sample and
    ``launch_s`` the host's for the launches of one micro-batch's passes, both at least; 0 where they are not known.
    """

    hardware: Hardware
    devices: int
    global_batch: int
    pins: Pins
    units: int
    sequence: int = 0
    experts: int = 0
    context: Mapping[str, ContextAxis] | None = None
    gradient_bytes: float = 0.0
    undivided: frozenset[int] = frozenset()
    sample_s: float = 0.0
    launch_s: float = 0.0


def bases(extent: Extent) -> Iterator[Configuration]:
    """Degrees, micro-batches and schedules; none where pins leave nothing (`check_pins` says why)."""
    for pipeline, data_parallel, context, expert, tensor in degrees(extent):
        for micro_batch in micro_batch_sizes(extent, data_parallel):
            count = extent.global_batch // (data_parallel * micro_batch)
            if extent.pins.expert_overlap and count == 1:
                continue  # there is no other micro-batch to travel beside
            for (schedule, virtual), algorithm, all_replicas in product(
                schedules(extent, pipeline, count),
                algorithms(extent, context, tensor),
                _sharing(extent, pipeline, context * expert),
            ):
                yield Configuration(
                    pipeline=pipeline,
                    virtual=virtual,
                    schedule=schedule,
                    data=data_parallel // expert,
                    context=context,
                    expert=expert,
                    tensor=tensor,
                    micro_batch=micro_batch,
                    micro_batches=count,
                    context_algorithm=algorithm,
                    all_replicas=all_replicas,
                    expert_overlap=bool(extent.pins.expert_overlap),
                )


def _sharing(extent: Extent, pipeline: int, inner: int) -> list[bool]:
    """Whether states are shared over the replicas of the context and expert axes too: with every level of ZeRO.

    ``inner`` are the ranks of both axes.
    """
    if inner == 1:
        return [False]
    pins = extent.pins
    levels: tuple[str, ...] = SHARDINGS if pins.runs is None else tuple(pins.runs.shardings(pipeline))
    if pins.optimizer_sharding is not None:
        levels = (pins.optimizer_sharding,)
    whole = pins.shard_size is None and not pins.sharding_threshold_kb and "none" in levels
    return [False] * whole + [True] * any(level != "none" for level in levels)


def orders(extent: Extent, base: Configuration) -> list[Configuration]:
    """The same degrees in every order of axes that pins allow and that places one of them on other links."""
    degrees, pinned = tuple(base.degrees.items()), tuple(AXES_BY_PIN[name] for name in extent.pins.order or ())
    return [replace(base, order=order) for order in _distinct_orders(extent.hardware, degrees, pinned)]


def storages(extent: Extent, placed: Configuration) -> list[Configuration]:
    """The same with every way to store parameters and optimizer states on the devices, or on the host if so pinned."""
    offload = _offload(extent)
    return [
        replace(
            placed, optimizer_sharding=way, shard_size=size, offload=offload,
            bucket_bytes=_bucket_bytes(extent, placed, way, size),
        )
        for way, size in _shardings(extent, placed)
    ]  # fmt: skip


def offloaded(extent: Extent, stored: Configuration) -> Configuration | None:
    """The same with optimizer states on the host, where that is free and possible.

    It takes less memory, and is slower but where there is hardly anything to update.
    """
    free = extent.pins.offload_optimizer is None and not stored.offload
    return replace(stored, offload=True) if free and host_time(extent.hardware, 1.0) else None


def configurations(extent: Extent) -> Iterator[Configuration]:
    """The whole space."""
    for base in bases(extent):
        for placed in orders(extent, base):
            for stored in storages(extent, placed):
                yield stored
                if (other := offloaded(extent, stored)) is not None:
                    yield other


def degrees(extent: Extent) -> Iterator[tuple[int, int, int, int, int]]:
    """Pipeline, data-parallel, context, expert and tensor degrees with the right product.

    The tensor axis is wider than `WIDEST_TENSOR` nodes where the batch does not divide by what is left of the devices.
    """
    found = [*_degrees(extent, WIDEST_TENSOR * extent.hardware.devices_per_node)]
    if extent.pins.experts_stay and extent.pins.ep is None:
        # Tokens travel over an expert axis: without one there is nothing to ask of them.
        found = [each for each in found if each[3] > 1] or found
    if any(extent.global_batch % data_parallel == 0 for _, data_parallel, *_ in found):
        yield from found
    else:
        yield from _degrees(extent, extent.devices)


def _degrees(extent: Extent, widest: int) -> Iterator[tuple[int, int, int, int, int]]:
    pins, devices = extent.pins, extent.devices
    widest, longest = _widest_run(pins, widest, devices)
    for tensor in _pinned(pins.tp, [t for t in divisors(devices) if t <= widest]):
        for pipeline in _pinned(pins.pp, [p for p in divisors(devices) if p <= longest]):
            for context in _pinned(pins.cp, _contexts(extent)):
                inner = tensor * pipeline * context
                if tensor == 1 and (pins.sequence_parallel or pins.expert_cut not in (None, "any")):
                    continue
                if devices % inner or pipeline > extent.units or not algorithms(extent, context, tensor):
                    continue
                data_parallel = devices // inner
                if pins.dp not in (None, data_parallel):
                    continue
                for expert in _expert_axes(extent, data_parallel, tensor):
                    whole = pins.expert_cut == "whole" or counts_tensor_ranks(pins, data_parallel, tensor)
                    if experts_divide(extent, expert * (tensor if whole else 1)):
                        yield pipeline, data_parallel, context, expert, tensor


def _expert_axes(extent: Extent, data_parallel: int, tensor: int) -> list[int]:
    """Sizes of the expert axis beside data-parallel and tensor ranks."""
    pins = extent.pins
    if pins.ep is None:
        most = max(extent.experts, 1) if pins.runs is None or pins.runs.expert_cut else 1
        return [e for e in divisors(data_parallel) if e <= most]
    if counts_tensor_ranks(pins, data_parallel, tensor):
        return [pins.ep // tensor]
    return [pins.ep] if data_parallel % pins.ep == 0 else []


def counts_tensor_ranks(pins: Pins, data_parallel: int, tensor: int) -> bool:
    """Whether a pinned ``ep`` counts tensor ranks as well, which have whole experts then.

    It does where it does not divide the data-parallel ranks, as they alone cannot deal out experts so.
    """
    if pins.ep is None or data_parallel % pins.ep == 0 or pins.expert_cut == "width" or tensor == 1:
        return False
    return pins.ep % tensor == 0 and data_parallel % (pins.ep // tensor) == 0


def expert_cut(pins: Pins, configuration: Configuration) -> str:
    """How the tensor ranks of a configuration share experts: ``any``, ``width`` or ``whole``."""
    c = configuration
    if pins.ep == c.expert * c.tensor and counts_tensor_ranks(pins, c.data_parallel, c.tensor):
        return "whole"
    if pins.runs is not None and pins.expert_cut is None and pins.expert_messages != "any" and c.tensor > 1:
        return "width" if c.expert == 1 or "width" in pins.runs.expert_cut else "whole"
    return pins.expert_cut or "any"


def _widest_run(pins: Pins, widest: int, devices: int) -> tuple[int, int]:
    """Most tensor and pipeline ranks where they are not pinned."""
    if pins.runs is None:
        return widest, devices
    return widest if pins.runs.tensor else 1, devices if pins.runs.pipeline else 1


def algorithms(extent: Extent, size: int, tensor: int) -> list[str]:
    """How attention may run on a context axis beside a tensor axis: not at all where the axis is impossible."""
    pinned = extent.pins.context_algorithm
    if size == 1:
        return ["none"] if pinned in (None, "none") else []
    known = ALGORITHMS if extent.pins.runs is None or pinned is not None else extent.pins.runs.context
    return [name for name in known if pinned in (None, name) and not context_obstacle(extent, name, size, tensor)]


def context_obstacle(extent: Extent, algorithm: str, size: int, tensor: int) -> str | None:
    """Why a context axis is impossible beside a tensor axis, or None."""
    if extent.context is not None:
        found = extent.context.get(algorithm)
        return f"the network has no {algorithm} along its sequence" if found is None else found.obstacle(size, tensor)
    if not extent.sequence or extent.sequence % size:
        return f"it must divide the {extent.sequence} tokens of a sequence"
    return None


def _contexts(extent: Extent) -> list[int]:
    long = extent.sequence >= LONG_SEQUENCE or extent.pins.context_algorithm in ALGORITHMS
    return [c for c in divisors(extent.devices) if c == 1 or (long and c <= extent.hardware.devices_per_node)]


def _pinned(value: int | None, free: Iterable[int]) -> list[int]:
    return [*free] if value is None else [value]


def micro_batch_sizes(extent: Extent, data_parallel: int) -> list[int]:
    """Samples of a micro-batch on one data-parallel rank, which its copies share; none for too many micro-batches."""
    each = extent.global_batch // data_parallel
    return [size for size in _sizes(extent, data_parallel) if each // size <= MOST_MICRO_BATCHES]


def _sizes(extent: Extent, data_parallel: int) -> list[int]:
    copies = extent.pins.copies or 1
    if extent.global_batch % (data_parallel * copies):
        return []
    each = extent.global_batch // data_parallel
    pinned, count = extent.pins.micro_batch, extent.pins.micro_batches
    if count is not None:
        return [each // count] if each % (count * copies) == 0 and pinned in (None, each // count) else []
    if pinned is not None:
        return [pinned] if each % pinned == 0 and pinned % copies == 0 else []
    found = [copies]
    for size in divisors(each):
        if size % copies == 0 and (size >= 2 * found[-1] or (size == each and size > found[-1])):
            found.append(size)
    return found


def schedules(extent: Extent, pipeline: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Schedules with their chunks a rank that exist for so many ranks and micro-batches.

    Of one micro-batch 1F1B and GPipe are the same. No pipeline has more than `MOST_PASSES`: millions take minutes to
    put in order.
    """
    pins = extent.pins
    # Frameworks hide tokens beside another micro-batch where a rank has several chunks, or all.
    overlaps = bool(pins.expert_overlap and pins.runs is not None) and pipeline > 1 and pins.vpp is None
    fewest = 2 if overlaps else 1
    searched = [name for name in SEARCHED if name != "gpipe" or micro_batches > 1]
    names = [ONE_STAGE, *searched] if pins.schedule is None else [pins.schedule]
    if pins.schedule is None and pins.runs is not None:
        names = [name for name in names if name in pins.runs.schedules]
        if not pins.runs.runs_1f1b(pipeline, micro_batches):
            names = [name for name in names if name != "1f1b"]
    for name in names:
        chunks = [2] if name in TWO_CHUNKS else [1]
        if name == "interleaved_1f1b":
            deepest = extent.units // pipeline
            chunks = [pins.vpp] if pins.vpp else sorted({*range(2, MOST_CHUNKS + 1), max(deepest, 2)})
        for virtual in chunks:
            wanted = pins.vpp in (None, virtual) and fewest * pipeline <= pipeline * virtual <= extent.units
            wanted = wanted and pipeline * virtual * micro_batches <= MOST_PASSES
            if name == "interleaved_1f1b" and micro_batches % pipeline:
                # Few frameworks run remainders, so they are planned where the schedule is pinned.
                runs = pins.runs is None or pins.micro_batches or pins.runs.interleaves(pipeline, micro_batches)
                wanted = wanted and pins.schedule is not None and bool(runs)
            if wanted and fits_schedule(name, pipeline, virtual, micro_batches):
                yield name, virtual


def _shardings(extent: Extent, base: Configuration) -> Iterator[tuple[str, int]]:
    """ZeRO levels with the ranks that share one copy of the states, 0 for all."""
    pins = extent.pins
    runs, inner = pins.runs, base.context * base.expert > 1
    levels = SHARDINGS if runs is None else runs.shardings(base.pipeline)
    for level in levels if pins.optimizer_sharding is None else (pins.optimizer_sharding,):
        if inner and (level != "none") != base.all_replicas:
            continue
        if level == "none":
            if pins.shard_size is None and not pins.sharding_threshold_kb:
                yield level, 0
        elif level == "zero2" and base.micro_batches == 1 and pins.optimizer_sharding != "zero2":
            continue  # as ZeRO-1
        elif base.data == 1:
            if base.all_replicas and not pins.shard_size:
                yield level, 0
        else:
            if pins.shard_size is not None:
                if base.data % pins.shard_size == 0:
                    yield level, 0 if pins.shard_size == base.data else pins.shard_size
                continue
            for size in _shards(extent, base) if runs is None or level in runs.shard_groups else (0,):
                yield level, size


def _shards(extent: Extent, base: Configuration) -> list[int]:
    """Ranks that share one copy of the states, 0 for all: of those that divide a dim of most parameters, if any.

    Where all ranks do not, the most that do are among them.
    """
    sizes = [n for n in _shard_sizes(extent.hardware, base.data, base.stride("data")) if n not in extent.undivided]
    if base.data not in extent.undivided:
        return [0, *sizes]
    most = max((n for n in divisors(base.data) if n not in extent.undivided), default=1)
    return sorted({*sizes, most} - {1}) or [0]


def _shard_sizes(hardware: Hardware, size: int, stride: int) -> list[int]:
    """Parts of an axis that stay inside a unit of a topology level, and wider ones, each about `WIDER` times the last.

    Wider ones take less memory than those of a node, and shorter messages than the whole axis.
    """
    group = group_shape(hardware, size, stride)
    found = {group.within(level) for level in range(len(group.members))}
    last = group.within(0)
    for part in divisors(size):
        if part >= WIDER * last:
            last = part
            found.add(part)
    return sorted(n for n in found if 1 < n < size)


def _offload(extent: Extent) -> bool:
    wanted = bool(extent.pins.offload_optimizer)
    if wanted and not host_time(extent.hardware, 1.0):
        raise InputError(
            f"pin offload_optimizer=true: profile {extent.hardware.name} does not say how fast devices reach their "
            "host; add reliability.snapshot_bandwidth_bytes_per_s to the profile, or leave the pin out"
        )
    return wanted


def _bucket_bytes(extent: Extent, placed: Configuration, way: str, shard_size: int) -> int:
    if extent.pins.bucket_mb is not None:
        return extent.pins.bucket_mb * MIB
    c = placed
    ranks = c.tensor * c.context * c.pipeline
    share = extent.gradient_bytes / (c.tensor * c.pipeline * c.expert)
    axis = DataAxis(way, shard_size, c.data, c.stride("data"), c.micro_batches)
    return bucket_bytes(extent.hardware, axis, share, extent.sample_s * c.micro_batch / ranks)


@lru_cache(maxsize=4096)
def _distinct_orders(
    hardware: Hardware, degrees: tuple[tuple[str, int], ...], pinned: tuple[str, ...]
) -> tuple[tuple[str, ...], ...]:
    """Orders of the axes, those pinned in theirs, that put some axis on other links; the usual one first."""
    sizes = dict(degrees)
    wide = [axis for axis in AXES if sizes[axis] > 1]
    thin = [axis for axis in AXES if sizes[axis] == 1]
    found: dict[tuple[object, ...], tuple[str, ...]] = {}
    kept = [axis for axis in pinned if sizes[axis] > 1]
    for order in permutations(wide):
        if [axis for axis in order if axis in kept] != kept:
            continue
        inner = 1
        links = {}
        for axis in reversed(order):
            # Pipeline neighbours meet two by two; which link the farthest pair uses is what counts.
            links[axis] = group_shape(hardware, sizes[axis], inner).members
            inner *= sizes[axis]
        found.setdefault(tuple(sorted(links.items())), (*thin, *order))
    usual = (*thin, *wide)
    return tuple(sorted(found.values(), key=lambda order: order != usual))


def experts_divide(extent: Extent, expert: int) -> bool:
    """Whether an expert axis deals out whole experts."""
    return expert == 1 or (extent.experts > 0 and extent.experts % expert == 0)
