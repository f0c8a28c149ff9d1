"""Nothing fits: which limit binds on which stage, by how much, and the nearest changes with which a plan was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from planner.planning.configured import Configured, Scored
from planner.planning.explanations import FEW_SOLVES, describe, without
from planner.plans.pins import Pins
from planner.search.configurations.explored import Explored, Unfit
from simulator.checks import divisors
from simulator.errors import InputError
from simulator.quantities import bytes_text

SIMULATED = 5
"""Plans of a change that are simulated where the first does not fit."""
TRIES = 12
"""After so many device counts were planned, none is that doubling and halving pass over."""
CHANGES = 2
"""Changes that are named."""
SOFTER = ("recompute", "optimizer_sharding", "micro_batch", "offload_optimizer", "sharding_threshold_kb")
"""Pins that may be what memory suffers from."""


def why_infeasible(search: Configured, pins: Pins, explored: Explored, *, changes: bool = True) -> str:
    """Which limit binds on which stage, by how much, and the nearest changes with which a plan was found.

    Without `changes` none is searched.
    """
    limit = search.hardware.device_memory_bytes
    if not explored.unfit:
        return (
            explored.refused
            or explored.dense
            or "no configuration of the space can be planned; leave out pins or use other devices"
        )
    over = [unfit for unfit in explored.unfit if unfit.needed_bytes > limit]
    least = min(over or explored.unfit, key=lambda unfit: unfit.needed_bytes)
    text = f"device memory binds{_where(least)}: {describe(least.configuration)} needs " + (
        f"{bytes_text(least.needed_bytes)} of {bytes_text(limit)}, {bytes_text(least.needed_bytes - limit)} too much"
        if over
        else f"more than the {bytes_text(limit)} of a device, however its stages are cut"
    )
    if not changes:
        return text
    nearest = [change for change, _ in zip(_changes(search, pins), range(CHANGES), strict=False)]
    if not nearest:
        return f"{text}; use devices with more memory, a smaller network or a shorter --seq-len"
    return f"{text}; it would fit {', or '.join(nearest)}"


def _where(unfit: Unfit) -> str:
    pipeline = unfit.configuration.pipeline
    return f" on stage {unfit.rank + 1} of {pipeline}" if pipeline > 1 else ""


def _changes(search: Configured, pins: Pins) -> Iterator[str]:
    """Changes, the nearest first, with which a plan is found."""
    named = pins.named()
    softened = False
    for name in SOFTER:
        if name in named and (found := fitting(search, without(pins, name))) is not None:
            softened = True
            value = getattr(found.plan, name, None)
            yield f"without the pin {name}" + (f", with {name}={value}" if isinstance(value, str) else "")
    free = Pins(batch_only=pins.batch_only)
    if named and not softened and fitting(search, free) is not None:
        softened = True
        yield "without the pins"
    for wanted, words in ((pins, ""), (free, " without the pins")):
        if (least := least_devices(search, wanted)) is not None:
            devices, proven = least
            surely = "" if proven else ", if not on fewer: not all counts below were tried"
            yield f"on {devices} devices{words}{surely}"
            break
        if wanted == free or softened:
            break
    for batch in reversed(divisors(search.global_batch)[:-1]):
        if fitting(replace(search, global_batch=batch), pins) is not None:
            yield f"with --global-batch {batch}"


def least_devices(search: Configured, pins: Pins) -> tuple[int, bool] | None:
    """The least device count above the search's on which a plan is found, if there is one, and whether that is proven.

    Counts are doubled until one fits, then the gap to the last that does not is halved, as if whatever fits on some
    devices fitted on more. Counts that this passes over are tried last, the smallest first, as far as `TRIES` go.
    """
    counts = [n for n in range(search.devices + 1, search.hardware.max_devices + 1) if search.hardware.holds(n)]
    tried: dict[int, bool] = {}

    def fits(place: int) -> bool:
        devices = counts[place]
        if devices not in tried:
            tried[devices] = fitting(search, pins, devices) is not None
        return tried[devices]

    low, high = -1, _doubled(search, counts, fits)
    if high is None:
        return None
    low = max((place for place in range(high) if counts[place] in tried), default=-1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    for place in range(high):
        if len(tried) >= TRIES and counts[place] not in tried:
            return counts[high], False
        if fits(place):
            return counts[place], True
    return counts[high], True


def _doubled(search: Configured, counts: list[int], fits: Callable[[int], bool]) -> int | None:
    """Place of the first doubling of the devices that fits, the largest count among them."""
    devices = 2 * search.devices
    while counts and devices < 2 * counts[-1]:
        place = max((n for n, count in enumerate(counts) if count <= devices), default=0)
        if fits(place):
            return place
        devices *= 2
    return None


def fitting(search: Configured, pins: Pins, devices: int | None = None) -> Scored | None:
    """A plan that fits once it is simulated, too; the first that is found."""
    try:
        explored = search.explore(pins, devices=devices, solves=FEW_SOLVES, until_found=True)
        if explored.interrupted:
            raise KeyboardInterrupt
        found = search.scored(explored, 1)
        if explored.found and not found:
            explored = search.explore(pins, devices=devices, wanted=SIMULATED, solves=2 * FEW_SOLVES)
            found = search.scored(explored, SIMULATED)
    except InputError:
        return None
    return found[0] if found else None
