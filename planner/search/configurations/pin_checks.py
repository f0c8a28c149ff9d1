"""Pins that contradict each other, the devices, the batch or the network, with the nearest values that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from math import gcd, prod
from typing import Any

from planner.graph.operator_graph import OperatorGraph
from planner.plans.pins import COUNT, PIN_VALUES, Pins
from planner.plans.plan import MOST_MICRO_BATCHES
from planner.search.configurations.schedule_shapes import ONE_STAGE, PINNED, SEARCHED
from planner.search.configurations.space import (
    MOST_CHUNKS,
    Extent,
    algorithms,
    configurations,
    context_obstacle,
    counts_tensor_ranks,
    degrees,
    experts_divide,
    micro_batch_sizes,
    schedules,
)
from planner.sharding.context import ALGORITHMS, attention_heads
from simulator.checks import divisors, near_divisors
from simulator.errors import InputError, UnsupportedError

CHUNKS = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_h2": 1, "zbv": 2, "dualpipe_v": 2}
"""Chunks a rank of the schedules that leave no choice."""


def check_pins(extent: Extent) -> None:
    """Raise InputError where the pins contradict each other, the devices, the batch or the network.

    Raises
    ------
    UnsupportedError
        A pinned schedule is not searched.
    """
    for check in CHECKS:
        check(extent)


def uneven_heads(graph: OperatorGraph, pins: Pins, devices: int) -> Iterator[str]:
    """Say of a pinned tp that it does not divide the heads of attention, and which is nearest that does."""
    for heads, copies in sorted(set(attention_heads(graph))) if (pins.tp or 1) > 1 else ():
        assert pins.tp is not None  # more than 1
        own = heads // copies
        near = _nearest(pins.tp, divisors(gcd(own, devices)))
        if heads % pins.tp:
            yield (
                f"pin tp={pins.tp} does not divide the {heads} heads of attention, which is not split by heads then; "
                f"use tp={near} to split it"
            )
        elif own % pins.tp:
            yield (
                f"pin tp={pins.tp} does not divide the {own} key/value heads: split by its {heads} heads, attention "
                f"keeps copies of them; use tp={near} for one each"
            )


def _product(extent: Extent) -> None:
    pins, devices = extent.pins, extent.devices
    given = {name: getattr(pins, name) for name in ("dp", "tp", "pp", "cp") if getattr(pins, name) is not None}
    product = prod(given.values())
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


def _experts(extent: Extent) -> None:
    pins, experts = extent.pins, extent.experts
    _tokens(extent)
    if pins.expert_cut not in (None, "any"):
        _cut_experts(extent)
    if pins.ep in (None, 1):
        return
    if not experts:
        raise InputError(f"pin ep={pins.ep}: the network has no experts to deal out; use --pin ep=1")
    if experts % pins.ep:
        nearest = near_divisors(pins.ep, experts)
        raise InputError(f"pin ep={pins.ep}: it must divide the network's {experts} experts; use ep={nearest}")
    inside = prod(value or 1 for value in (pins.tp, pins.pp, pins.cp))
    ranks = pins.dp or extent.devices // inside
    tensor = [pins.tp] if pins.tp is not None else divisors(extent.devices)
    alone = [d for d in divisors(ranks) if experts_divide(extent, d)]
    dealt = {axis * t for t in tensor for axis in alone if experts_divide(extent, axis * t)}
    possible = sorted({*alone, *(() if pins.expert_cut == "width" else dealt)})
    if pins.ep not in possible:
        near = _nearest(pins.ep, possible)
        if pins.dp is not None:
            raise InputError(
                f"pins dp={pins.dp} ep={pins.ep}: ep must divide dp, or be a divisor of dp times tp, whose ranks have "
                f"whole experts then; use ep={near}"
            )
        raise InputError(
            f"pin ep={pins.ep}: it must divide the data-parallel ranks, of which at most {ranks} are left of "
            f"{extent.devices} devices beside tp × pp × cp = {inside}, or these and the tensor ranks; use ep={near}"
        )


def _tokens(extent: Extent) -> None:
    """Pins of how tokens travel to experts."""
    pins, experts = extent.pins, extent.experts
    if pins.expert_overlap and pins.expert_messages == "any":
        raise InputError(
            "pins expert_overlap=true expert_messages=any: tokens travel beside another micro-batch, gathered weights "
            "do not; use --pin expert_messages=tokens or once_a_node, or expert_overlap=false"
        )
    if (pins.experts_stay or pins.expert_overlap) and (not experts or pins.ep == 1):
        why = "there is no expert axis to send them over" if experts else "the network has no experts to send them to"
        named = "expert_overlap=true" if pins.expert_overlap else f"expert_messages={pins.expert_messages}"
        remedy = "expert_overlap=false" if pins.expert_overlap else "expert_messages=any"
        raise InputError(f"pin {named}: {why}; use {remedy}")
    if pins.expert_overlap and pins.micro_batches == 1:
        raise InputError(
            "pins expert_overlap=true micro_batches=1: there is no other micro-batch to travel beside; use --pin "
            "micro_batches=2 or more, or expert_overlap=false"
        )
    if pins.expert_overlap and pins.copies == 2:
        raise InputError(
            "pins expert_overlap=true copies=2: both have tokens travel beside what does not wait for them; use --pin "
            "expert_overlap=false, or copies=1"
        )


def _cut_experts(extent: Extent) -> None:
    pins, experts = extent.pins, extent.experts
    named = f"expert_cut={pins.expert_cut}"
    if not experts or pins.tp == 1:
        why = "there is one tensor rank alone" if experts else "the network has no experts"
        raise InputError(f"pin {named}: {why}; use expert_cut=any")
    dealt = (pins.ep or 1) * (pins.tp or 1)
    if pins.dp is not None and counts_tensor_ranks(pins, pins.dp, pins.tp or 1):
        dealt = pins.ep or 1
    if pins.expert_cut == "whole" and experts % dealt:
        raise InputError(
            f"pin {named}: whole experts are dealt out over {dealt} ranks of the expert and tensor axes, which must "
            f"divide {experts}; use expert_cut=width"
        )


def _context(extent: Extent) -> None:
    pins = extent.pins
    if pins.context_algorithm == "none" and (pins.cp or 1) > 1:
        raise InputError(
            f"pins cp={pins.cp} context_algorithm=none: a context axis needs ring or all_to_all; use --pin cp=1 or "
            "context_algorithm=ring"
        )
    if pins.context_algorithm in ALGORITHMS and pins.cp == 1:
        raise InputError(
            f"pins cp=1 context_algorithm={pins.context_algorithm}: there is no context axis to run it on; use --pin "
            "cp=2 or more, or context_algorithm=none"
        )
    size, tensor = pins.cp or 1, pins.tp or 1
    if size == 1 or algorithms(extent, size, tensor):
        return
    named = pins.context_algorithm or ALGORITHMS[0]
    possible = [d for d in divisors(extent.devices) if d == 1 or algorithms(extent, d, tensor)]
    why = (context_obstacle(extent, named, size, tensor) or "").partition("; ")[0]
    raise InputError(f"pin cp={size}: {why}; use --pin cp={_nearest(size, possible)}")


_MICRO = ("micro_batch", "micro_batches", "copies")


def _batch(extent: Extent) -> None:
    pins, batch = extent.pins, extent.global_batch
    size = (pins.micro_batch or pins.copies or 1) * (pins.micro_batches or 1)
    possible = sorted({dp for _, dp, *_ in degrees(extent)})
    if possible and all(batch % (dp * size) for dp in possible):
        least = possible[0] * size
        named = [f"{name}={value}" for name in _MICRO if (value := getattr(pins, name))]
        what = " × ".join(["dp" if pins.dp is None else f"dp={pins.dp}", *named])
        near = max(least, round(batch / least) * least)
        fits = [d for d in divisors(batch) if batch % (possible[0] * d) == 0]
        only = named[0].partition("=")[0] if len(named) == 1 else ""
        other = f" or --pin {only}={_nearest(size, fits)}" if fits and only else ""
        if pins.dp is not None:
            ranks = {
                dp for _, dp, *_ in degrees(replace(extent, pins=replace(pins, dp=None))) if not batch % (dp * size)
            }
            other += f" or --pin dp={_nearest(pins.dp, ranks)}" if ranks else ""
        raise InputError(
            f"global batch {batch} does not divide: {what} must divide it, and the smallest possible is {least}; "
            f"use --global-batch {near}{other}, another device count or other pins"
        )


def _stages(extent: Extent) -> None:
    pins, units = extent.pins, extent.units
    if pins.pp is not None and pins.pp > units:
        raise InputError(
            f"pin pp={pins.pp}: the network has {units} units that can be a stage of their own; "
            f"use --pin pp={max(d for d in divisors(extent.devices) if d <= units)}"
        )
    if pins.pp == 1 and (pins.vpp or 1) > 1:
        raise InputError(
            f"pins pp=1 vpp={pins.vpp}: several chunks a rank need a pipeline; use --pin vpp=1, or --pin pp=2 or more"
        )
    if pins.pp is not None and pins.vpp is not None and pins.pp * pins.vpp > units:
        raise InputError(
            f"pins pp={pins.pp} vpp={pins.vpp}: {pins.pp * pins.vpp} chunks are more than the {units} units of "
            f"the network; use --pin vpp={max(1, units // pins.pp)} or a smaller pp"
        )


def _storage(extent: Extent) -> None:
    pins = extent.pins
    level = pins.optimizer_sharding
    if level == "none" and pins.shard_size is not None:
        raise InputError(
            f"pins optimizer_sharding=none shard_size={pins.shard_size}: nothing is sharded; use --pin "
            "optimizer_sharding=zero1, or leave shard_size out"
        )
    if level == "none" and pins.sharding_threshold_kb:
        raise InputError(
            f"pins optimizer_sharding=none sharding_threshold_kb={pins.sharding_threshold_kb}: nothing is sharded; use "
            "--pin optimizer_sharding=zero1, or sharding_threshold_kb=0"
        )
    wanted = next((f"{n}={v}" for n, v in pins.named().items() if n in _SHARDED and v not in ("none", "0")), None)
    if wanted is not None and pins.dp == 1 and (pins.cp or 1) == 1:
        raise InputError(
            f"pins dp=1 {wanted}: one data-parallel rank has nobody to share states with; use --pin dp=2 or more, or "
            "optimizer_sharding=none alone"
        )
    if pins.shard_size is not None and pins.dp is not None and pins.dp % pins.shard_size:
        near = near_divisors(pins.shard_size, pins.dp)
        raise InputError(
            f"pins dp={pins.dp} shard_size={pins.shard_size}: shard_size must divide dp; use --pin shard_size={near}"
        )


_SHARDED = ("optimizer_sharding", "shard_size", "sharding_threshold_kb")


def _sequence(extent: Extent) -> None:
    pins = extent.pins
    if pins.tensor_overlap and pins.tp == 1:
        raise InputError(
            "pins tensor_overlap=true tp=1: one tensor rank has no messages to hide; use --pin tp=2 or more, or "
            "tensor_overlap=false"
        )
    if pins.tensor_overlap and pins.sequence_parallel is False:
        raise InputError(
            "pins tensor_overlap=true sequence_parallel=false: gathers and scatters of a shared sequence travel beside "
            "products, sums do not; use --pin sequence_parallel=true, or tensor_overlap=false"
        )
    if pins.sequence_parallel and pins.tp == 1:
        raise InputError(
            "pins sequence_parallel=true tp=1: the sequence is sharded on the tensor axis; use --pin tp=2 or more, or "
            "sequence_parallel=false"
        )
    if pins.sequence_parallel and not extent.sequence:
        name = "tensor_overlap" if pins.tensor_overlap else "sequence_parallel"
        raise InputError(f"pin {name}=true: the network reads no token sequences; use --pin {name}=false")


def _schedule(extent: Extent) -> None:
    pins = extent.pins
    name = pins.schedule
    if name not in (None, ONE_STAGE, *SEARCHED, *PINNED):
        raise UnsupportedError(
            f"pin schedule={name} is not searched yet: it keeps two copies of the network, plans one; use "
            f"schedule=dualpipe_v, which runs the same on half the ranks without the copy, or one of "
            f"{', '.join(SEARCHED)}"
        )
    if name == ONE_STAGE and (pins.pp or 1) > 1:
        raise InputError(f"pins schedule=none pp={pins.pp}: stages need a schedule; use --pin schedule=1f1b or pp=1")
    if name not in (None, ONE_STAGE) and pins.pp == 1:
        raise InputError(f"pins schedule={name} pp=1: a schedule needs stages; use --pin pp=2 or more")
    if name in CHUNKS and pins.vpp not in (None, CHUNKS[name]):
        chunks = f"{CHUNKS[name]} chunk" + ("s" if CHUNKS[name] > 1 else "")
        raise InputError(
            f"pins schedule={name} vpp={pins.vpp}: {name} has {chunks} a rank; use --pin vpp={CHUNKS[name]} or "
            "schedule=interleaved_1f1b"
        )
    if name == "interleaved_1f1b" and pins.vpp == 1:
        raise InputError("pins schedule=interleaved_1f1b vpp=1: interleaving needs chunks; use --pin vpp=2 or more")


def _something_left(extent: Extent) -> None:
    if next(configurations(extent), None) is not None:
        return
    pins = extent.pins
    named = " ".join(f"{name}={value}" for name, value in pins.named().items())
    remedies = [remedy for name in pins.named() if (remedy := _remedy(extent, name)) is not None]
    if not named:
        advice = "use fewer devices, or another global batch"
    else:
        advice = f"use --pin {' or '.join(remedies)}" if remedies else "leave pins out"
    raise InputError(
        f"{f'pins {named} leave' if named else 'there is'} no configuration on {extent.devices} devices with global "
        f"batch {extent.global_batch}"
        f"{_why_no_schedule(extent)}; {advice}"
    )


def _why_no_schedule(extent: Extent) -> str:
    """Say which number of micro-batches a pinned schedule needs, or that there are too many."""
    pins, runs = extent.pins, extent.pins.runs
    if extent.global_batch // extent.devices > MOST_MICRO_BATCHES:
        return f": a step has at most {MOST_MICRO_BATCHES} micro-batches"
    needs: dict[str, tuple[str, Callable[[int], int]]] = {
        "interleaved_1f1b": ("at least pp" if runs is None else "a multiple of pp", lambda ranks: ranks),
        "zb_h1": ("at least 2 × pp", lambda ranks: 2 * ranks),
        "zb_h2": ("at least 2 × pp", lambda ranks: 2 * ranks),
        "zbv": ("at least 2 × pp", lambda ranks: 2 * ranks),
        "dualpipe_v": ("at least 2 × pp", lambda ranks: 2 * ranks),
    }
    if pins.schedule not in needs:
        return ""
    pairs = {
        (pipeline, extent.global_batch // (dp * size))
        for pipeline, dp, *_ in degrees(extent)
        for size in micro_batch_sizes(extent, dp)
        if pipeline > 1
    }
    if not pairs or any(True for pair in pairs for _ in schedules(extent, *pair)):
        return ""
    ranks, count = max(pairs, key=lambda pair: (pair[1] / pair[0], -pair[0]))
    rule, least = needs[pins.schedule]
    batch = extent.global_batch * least(ranks) // count
    return (
        f": {pins.schedule} needs {rule} micro-batches, and there are {count} on pp={ranks}; --global-batch {batch} "
        f"gives {least(ranks)}"
    )


def _remedy(extent: Extent, name: str) -> str | None:
    """The nearest value of one pin with which, the others kept, something is left."""
    value = getattr(extent.pins, name)
    for other in _others(extent, name, value):
        changed: dict[str, Any] = {name: other}
        pins: Pins = replace(extent.pins, **changed)
        if next(configurations(replace(extent, pins=pins)), None) is not None:
            return f"{name}={str(other).lower()}"
    return None


def _others(extent: Extent, name: str, value: object) -> Iterator[object]:
    """Other values of a pin, the nearest first."""
    values = PIN_VALUES[name]
    if isinstance(values, tuple):
        yield from (word for word in values if word != value)
    elif values is bool:
        yield not value
    elif name == "copies" and value != 1:
        yield 1
    elif values is COUNT and isinstance(value, int):
        most = extent.global_batch if name in _MICRO else extent.devices
        found = range(1, MOST_CHUNKS + 1) if name == "vpp" else divisors(most)
        yield from sorted((d for d in found if d != value), key=lambda d: (abs(d - value), d))


def _nearest(value: int, allowed: Iterable[int]) -> int:
    return min(allowed, key=lambda other: (abs(other - value), other))


CHECKS: tuple[Callable[[Extent], None], ...] = (
    _product, _experts, _context, _stages, _storage, _sequence, _schedule, _batch, _something_left,
)  # fmt: skip
"""In the order in which they are said: the narrower first."""
