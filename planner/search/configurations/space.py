"""The space of configurations: what is searched for given devices, batch and pins, and why pins do not go together.

Axes are the pipeline, data, context, expert and tensor degrees with the product of the devices. Context and expert
axes are searched where they are pinned, or the network reads `LONG_SEQUENCE` tokens or has experts. The tensor axis
spans at most `WIDEST_TENSOR` nodes. Micro-batches about double from one sample on, as far as they divide the batch.
Of all orders of the axes over the topology those are searched that place some axis on other links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations

from planner.request import Pins
from planner.search.configurations.schedule_shapes import ONE_STAGE, SEARCHED, fits_schedule
from planner.search.configurations.step_model import AXES, Configuration, host_bandwidth
from planner.sharding.context import ContextAxis
from simulator.errors import InputError, UnsupportedError
from simulator.hardware import Hardware
from simulator.topology import group_shape

LONG_SEQUENCE = 32_768
WIDEST_TENSOR = 4
MOST_CHUNKS = 12
SHARDINGS = ("none", "zero1", "zero2", "zero3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What bounds the space: cluster, batch, pins and what the network offers.

    ``units`` is the number of pieces the network may be cut into, ``sequence`` the tokens of a sample (0: none),
    ``experts`` those of the largest layer; ``context`` says which context axes are possible, where it is known.
    """

    hardware: Hardware
    devices: int
    global_batch: int
    pins: Pins
    units: int
    sequence: int = 0
    experts: int = 0
    context: ContextAxis | None = None


def bases(extent: Extent) -> Iterator[Configuration]:
    """Degrees, micro-batches and schedules; none where pins leave nothing (`check_pins` says why)."""
    for pipeline, data_parallel, context, expert, tensor in _degrees(extent):
        for micro_batch in _micro_batches(extent, data_parallel):
            count = extent.global_batch // (data_parallel * micro_batch)
            for schedule, virtual in _schedules(extent, pipeline, count):
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
                )


def orders(extent: Extent, base: Configuration) -> list[Configuration]:
    """The same degrees in every order of axes that places one of them on other links."""
    degrees = tuple(base.degrees.items())
    return [replace(base, order=order) for order in _distinct_orders(extent.hardware, degrees)]


def storages(extent: Extent, placed: Configuration) -> list[Configuration]:
    """The same with every way to store parameters and optimizer states."""
    return [
        replace(placed, optimizer_sharding=sharding, shard_size=size, offload=_offload(extent))
        for sharding, size in _shardings(extent, placed)
    ]


def configurations(extent: Extent) -> Iterator[Configuration]:
    """The whole space."""
    for base in bases(extent):
        for placed in orders(extent, base):
            yield from storages(extent, placed)


def _degrees(extent: Extent) -> Iterator[tuple[int, int, int, int, int]]:
    """Pipeline, data-parallel, context, expert and tensor degrees with the right product."""
    pins, devices = extent.pins, extent.devices
    widest = WIDEST_TENSOR * extent.hardware.devices_per_node
    for tensor in _pinned(pins.tp, [t for t in divisors(devices) if t <= widest]):
        for pipeline in _pinned(pins.pp, divisors(devices)):
            for context in _pinned(pins.cp, _contexts(extent)):
                inner = tensor * pipeline * context
                if devices % inner or pipeline > extent.units or _context_obstacle(extent, context, tensor):
                    continue
                data_parallel = devices // inner
                if pins.dp not in (None, data_parallel):
                    continue
                for expert in _pinned(pins.ep, [e for e in divisors(data_parallel) if e <= max(extent.experts, 1)]):
                    if data_parallel % expert == 0 and (expert == 1 or extent.experts % expert == 0):
                        yield pipeline, data_parallel, context, expert, tensor


def _context_obstacle(extent: Extent, size: int, tensor: int) -> str | None:
    """Why a context axis is impossible beside a tensor axis, or None."""
    if size == 1:
        return None
    if extent.context is not None:
        return extent.context.obstacle(size, tensor)
    return f"it must divide the {extent.sequence} tokens of a sequence" if extent.sequence % size else None


def _contexts(extent: Extent) -> list[int]:
    long = extent.sequence >= LONG_SEQUENCE
    return [c for c in divisors(extent.devices) if c == 1 or (long and c <= extent.hardware.devices_per_node)]


def _pinned(value: int | None, free: Iterable[int]) -> list[int]:
    return [*free] if value is None else [value]


def _micro_batches(extent: Extent, data_parallel: int) -> list[int]:
    if extent.global_batch % data_parallel:
        return []
    each = extent.global_batch // data_parallel
    if extent.pins.micro_batch is not None:
        return [extent.pins.micro_batch] if each % extent.pins.micro_batch == 0 else []
    found = [1]
    for size in divisors(each):
        if size >= 2 * found[-1] or (size == each and size > found[-1]):
            found.append(size)
    return found


def _schedules(extent: Extent, pipeline: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Schedules with their chunks a rank."""
    pins = extent.pins
    names = [ONE_STAGE, *SEARCHED] if pins.schedule is None else [pins.schedule]
    for name in names:
        chunks = [2] if name == "zbv" else [1]
        if name == "interleaved_1f1b":
            chunks = [*range(2, MOST_CHUNKS + 1)] if pins.vpp is None else [pins.vpp]
        for virtual in chunks:
            wanted = pins.vpp in (None, virtual) and pipeline * virtual <= extent.units
            if wanted and fits_schedule(name, pipeline, virtual, micro_batches):
                yield name, virtual


def _shardings(extent: Extent, base: Configuration) -> Iterator[tuple[str, int]]:
    """ZeRO levels with the ranks that share one copy of the states, 0 for all."""
    pins = extent.pins
    for level in SHARDINGS if pins.optimizer_sharding is None else (pins.optimizer_sharding,):
        if level == "none":
            if pins.shard_size is None:
                yield level, 0
        elif base.data > 1 and (level != "zero2" or base.micro_batches > 1 or pins.optimizer_sharding == "zero2"):
            if pins.shard_size is not None:
                if base.data % pins.shard_size == 0:
                    yield level, 0 if pins.shard_size == base.data else pins.shard_size
                continue
            yield level, 0
            for size in _inside_levels(extent.hardware, base.data, base.stride("data")):
                yield level, size
        elif pins.optimizer_sharding is not None and base.data == 1 and pins.dp == 1:
            yield "none", 0


def _inside_levels(hardware: Hardware, size: int, stride: int) -> list[int]:
    """Parts of an axis that stay inside one unit of a topology level."""
    group = group_shape(hardware, size, stride)
    inside = {group.within(level) for level in range(len(group.members))}
    return sorted(n for n in inside if 1 < n < size)


def _offload(extent: Extent) -> bool:
    wanted = bool(extent.pins.offload)
    if wanted and not host_bandwidth(extent.hardware):
        raise InputError(
            f"pin offload=true: profile {extent.hardware.name} does not say how fast devices reach their host; add "
            "reliability.snapshot_bandwidth_bytes_per_s to the profile, or leave the pin out"
        )
    return wanted


@lru_cache(maxsize=4096)
def _distinct_orders(hardware: Hardware, degrees: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], ...]:
    """Orders of the axes that put some axis on other links; the usual one first."""
    sizes = dict(degrees)
    wide = [axis for axis in AXES if sizes[axis] > 1]
    thin = [axis for axis in AXES if sizes[axis] == 1]
    found: dict[tuple[object, ...], tuple[str, ...]] = {}
    for order in permutations(wide):
        inner = 1
        links = {}
        for axis in reversed(order):
            # Pipeline neighbours meet two by two; which link the farthest pair uses is what counts.
            links[axis] = group_shape(hardware, sizes[axis], inner).members
            inner *= sizes[axis]
        found.setdefault(tuple(sorted(links.items())), (*thin, *order))
    usual = (*thin, *wide)
    return tuple(sorted(found.values(), key=lambda order: order != usual))


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return tuple(dict.fromkeys([*small, *(number // part for part in reversed(small))]))


# Pins that contradict each other


def check_pins(extent: Extent) -> None:
    """Raise InputError where the pins contradict each other, the devices, the batch or the network."""
    pins = extent.pins
    _check_product(extent)
    _check_batch(extent)
    if pins.pp is not None and pins.pp > extent.units:
        raise InputError(
            f"pin pp={pins.pp}: the network has {extent.units} units that can be a stage of their own; "
            f"use --pin pp={max(d for d in divisors(extent.devices) if d <= extent.units)}"
        )
    if pins.pp is not None and pins.vpp is not None and pins.pp * pins.vpp > extent.units:
        raise InputError(
            f"pins pp={pins.pp} vpp={pins.vpp}: {pins.pp * pins.vpp} chunks are more than the {extent.units} units of "
            f"the network; use --pin vpp={max(1, extent.units // pins.pp)} or a smaller pp"
        )
    if pins.ep is not None and pins.ep > 1 and (not extent.experts or extent.experts % pins.ep):
        near = _nearest(pins.ep, [d for d in divisors(extent.experts or 1) if d > 0])
        raise InputError(f"pin ep={pins.ep}: it must divide the network's {extent.experts} experts; use ep={near}")
    if pins.cp is not None and pins.cp > 1 and (not extent.sequence or extent.sequence % pins.cp):
        near = _nearest(pins.cp, divisors(extent.sequence) if extent.sequence else [1])
        raise InputError(f"pin cp={pins.cp}: it must divide the {extent.sequence} tokens of a sequence; use cp={near}")
    obstacle = _context_obstacle(extent, pins.cp or 1, pins.tp or 1)
    if obstacle is not None:
        raise InputError(f"pin cp={pins.cp}: {obstacle}")
    _check_schedule(extent)


def _check_product(extent: Extent) -> None:
    pins, devices = extent.pins, extent.devices
    given = {name: getattr(pins, name) for name in ("dp", "tp", "pp", "cp") if getattr(pins, name) is not None}
    product = 1
    for value in given.values():
        product *= value
    asked = " ".join(f"{name}={value}" for name, value in given.items())
    whole = len(given) == 4
    if devices % product or (whole and product != devices):
        name = max(given, key=lambda n: given[n])
        others = product // given[name]
        allowed = [d for d in divisors(devices) if devices % (others * d) == 0 and (not whole or others * d == devices)]
        near = f"{name}={_nearest(given[name], allowed)}" if allowed else "fewer pins"
        raise InputError(
            f"pins {asked}: dp × tp × pp × cp = {product} must {'be' if whole else 'divide'} the device count, "
            f"{devices}; use {near} or --devices {product * max(1, round(devices / product))}"
        )
    if pins.ep is not None and pins.dp is not None and pins.dp % pins.ep:
        divides = _nearest(pins.ep, divisors(pins.dp))
        raise InputError(f"pins dp={pins.dp} ep={pins.ep}: ep must divide dp; use ep={divides}")


def _check_batch(extent: Extent) -> None:
    pins, batch = extent.pins, extent.global_batch
    size = pins.micro_batch or 1
    degrees = sorted({dp for _, dp, *_ in _degrees(extent)})
    if degrees and all(batch % (dp * size) for dp in degrees):
        least = degrees[0] * size
        what = f"dp × micro_batch={pins.micro_batch}" if pins.micro_batch else "dp"
        near = max(least, round(batch / least) * least)
        fits = [d for d in divisors(batch) if batch % (degrees[0] * d) == 0]
        other = f" or --pin micro_batch={_nearest(size, fits)}" if fits and pins.micro_batch else ""
        raise InputError(
            f"global batch {batch} does not divide: {what} must divide it, and the smallest possible is {least}; "
            f"use --global-batch {near}{other}, another device count or other pins"
        )


def _check_schedule(extent: Extent) -> None:
    pins = extent.pins
    if pins.schedule in ("dualpipe", "dualpipe_v"):
        raise UnsupportedError(f"pin schedule={pins.schedule} is not searched yet; use one of {', '.join(SEARCHED)}")
    if pins.schedule == ONE_STAGE and (pins.pp or 1) > 1:
        raise InputError(f"pins schedule=none pp={pins.pp}: stages need a schedule; use --pin schedule=1f1b or pp=1")
    if pins.schedule not in (None, ONE_STAGE) and pins.pp == 1:
        raise InputError(f"pins schedule={pins.schedule} pp=1: a schedule needs stages; use --pin pp=2 or more")
    if pins.schedule in ("gpipe", "1f1b", "zb_h1") and (pins.vpp or 1) > 1:
        raise InputError(
            f"pins schedule={pins.schedule} vpp={pins.vpp}: {pins.schedule} has one chunk a rank; use --pin vpp=1 or "
            "schedule=interleaved_1f1b"
        )
    if pins.schedule == "interleaved_1f1b" and pins.vpp == 1:
        raise InputError("pins schedule=interleaved_1f1b vpp=1: interleaving needs chunks; use --pin vpp=2 or more")
    if pins.schedule == "zbv" and pins.vpp not in (None, 2):
        raise InputError(f"pins schedule=zbv vpp={pins.vpp}: zbv has two chunks a rank; use --pin vpp=2")
    chunks = pins.vpp or (2 if pins.schedule in ("interleaved_1f1b", "zbv") else 1)
    if next(configurations(extent), None) is not None:
        return
    pairs = {
        (degrees[0], extent.global_batch // (degrees[1] * size))
        for degrees in _degrees(extent)
        for size in _micro_batches(extent, degrees[1])
    }
    if pins.schedule is not None and pairs:
        ranks, count = min(pairs, key=lambda pair: pair[1] % pair[0])
        rule = "micro_batches % pp == 0" if pins.schedule == "interleaved_1f1b" else "micro_batches ≥ 2 × pp"
        near = _nearest(ranks, [d for d in divisors(extent.devices) if d > 1 and count % d == 0] or [2])
        raise InputError(
            f"pin schedule={pins.schedule}: it needs {rule}, but there are {count} micro-batches on pp={ranks} with "
            f"{chunks} chunks; use pp={near}, a --global-batch that gives {ranks * 2} micro-batches or schedule=1f1b"
        )
    named = " ".join(f"{name}={value}" for name, value in pins.named().items())
    raise InputError(
        f"pins {named} leave no configuration on {extent.devices} devices with global batch {extent.global_batch}; "
        "leave one of them out"
    )


def _nearest(value: int, allowed: Iterable[int]) -> int:
    return min(allowed, key=lambda other: (abs(other - value), other))
