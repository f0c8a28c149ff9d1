"""Why plans lost, what pins cost, and what memory and links are worth."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from planner.planning.configured import Configured, Scored
from planner.planning.prediction import Prediction
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from planner.search.configurations.explored import Explored, Placed
from planner.search.configurations.step_model import Configuration
from planner.search.stages.fragments import FILL, STEADY, FloatArray
from planner.search.stages.partition import partition
from planner.search.stages.task import simplified
from planner.search.units.stage_decisions import links_of
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.quantities import GIB, seconds_text
from simulator.topology import level_of_axis

MORE_BANDWIDTH = 1.1
FEW_SOLVES = 12
"""Partitions of a search that answers a question beside the plan."""
SIMULATED = frozenset(
    {
        "sharding_threshold_kb",
        "host_embeddings",
        "offload_to",
        "offload_parameters",
        "copies",
        "recompute_messages",
        "recompute_modules",
        "offload_activations",
        "stage_layers",
        "recompute_layers",
    }
)
"""Pins whose cost only simulation tells: the closed form does not tell parameters apart, nor where on the host
something is, nor what copies of a micro-batch hide, nor what units that compute again keep of messages; what computes
again in selective recomputation is one choice for a whole search."""
CARRIERS = ("offload_optimizer", "offload_to", "offload_parameters")
"""Pins each of which has optimizer states on the host."""
PinCost = tuple[str, float, str]
"""A pin, the seconds of a step that it costs, and what the plan without it is."""
CONSIDERED = 3
"""Plans that are partitioned again with more memory, at most: the best, and those near it."""
CLOSE = 1e-3
"""Where memory binds, the last thousandth of a step takes longest to prove, and prices ask for no proof."""
FARTHEST = 4
"""Plans behind the best by more than so many times what more memory saves it are not near it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPrices:
    """Seconds of step time that more of a resource saves: one GiB of device memory, 10 % of each level's bandwidth."""

    memory_gib_s: float = 0.0
    links_s: Mapping[str, float] = field(default_factory=dict)


def describe(configuration: Configuration) -> str:
    """A configuration in a few words."""
    c = configuration
    parts = [f"dp={c.data_parallel} tp={c.tensor} pp={c.pipeline}"]
    parts += [f"{name}={size}" for name, size in (("vpp", c.virtual), ("cp", c.context), ("ep", c.expert)) if size > 1]
    parts += [f"micro_batch={c.micro_batch}"]
    parts += [c.schedule] if c.pipeline > 1 else []
    parts += [c.optimizer_sharding] if c.optimizer_sharding != "none" else []
    return " ".join(parts)


# Why plans lost


def reason(best: Prediction, other: Prediction, best_of: Scored | None, of: Scored | None, hardware: Hardware) -> str:
    """The part of the step that made a plan lose, with the links where it is communication."""
    more = {part: seconds - best.breakdown.get(part, 0.0) for part, seconds in other.breakdown.items()}
    part = max(more, key=lambda p: more[p])
    text = f"{seconds_text(more[part])} more {part.removesuffix('_s').replace('_', ' ')}"
    if part == "exposed_communication_s" and of is not None:
        mine, theirs = exposures(of.placed, hardware), exposures(best_of.placed, hardware) if best_of else {}
        place = max(mine, key=lambda key: mine[key] - theirs.get(key, 0.0), default=None)
        if place is not None and mine[place] > theirs.get(place, 0.0):
            text += f", most of it {place[0]} over {place[1]}"
    return text


def other_choices(best: Plan, other: Plan) -> str:
    """What a plan chose otherwise than the best beside degrees and sharding, which are shown; empty where nothing."""
    found = [
        f"{name}={value}"
        for name, value, before in (
            ("schedule", other.schedule, best.schedule if best.pipeline > 1 else other.schedule),
            ("vpp", other.virtual, best.virtual),
            ("recompute", other.recomputation, best.recomputation),
            ("context_algorithm", other.context_algorithm, best.context_algorithm),
            ("expert_overlap", str(other.expert_overlap).lower(), str(best.expert_overlap).lower()),
            ("offload_optimizer", str(other.offload_optimizer).lower(), str(best.offload_optimizer).lower()),
            ("shard_size", _shards(other, best), "none"),
        )
        if value != before and value != "none"
    ]
    return f" ({', '.join(found)})" if found else ""


def _shards(other: Plan, best: Plan) -> int | str:
    """Ranks that share one copy of a plan's states, where it shares them and with others than the best."""
    if other.optimizer_sharding == "none" or other.shard_size == best.shard_size:
        return "none"
    return other.shard_size or other.degree("data")


def exposures(placed: Placed, hardware: Hardware) -> dict[tuple[str, str], float]:
    """Seconds of communication of the mean rank by what it is and the topology level that it crosses."""
    c, chosen, tables = placed.configuration, placed.partition, placed.tables
    labels = [tables.units[unit] for unit in tables.chain.positions]
    picked = list(zip(labels, chosen.labels, strict=True))
    inside = sum(float(u.forward_communication_s[i] + u.backward_communication_s[i]) for u, i in picked)
    rows = _rows(placed)
    queues = _queues(placed, rows)
    found: dict[tuple[str, str], float] = {}
    for axis in ("tensor", "context", "expert"):
        if getattr(c, axis) > 1:
            found["collectives inside stages", _level(hardware, c, axis)] = inside * c.micro_batches / c.pipeline
            break
    if c.data > 1:
        found["sums of gradients", _level(hardware, c, "data")] = queues / c.pipeline
    if c.optimizer_sharding == "zero3" and c.data > 1:
        passes = sum(float(u.forward_s[i] + u.backward_s[i]) for u, i in picked) * c.micro_batches
        longer = max(0.0, float(rows[:, [FILL, STEADY]].sum()) - passes) / c.pipeline
        found["gathers of parameters", _level(hardware, c, "data")] = longer
    if c.pipeline > 1:
        sends = float(placed.task.sends_s[[end - 1 for end in chosen.ends[:-1]]].min(axis=1).sum())
        wide = (level.name for level in hardware.levels if 2 * c.stride("pipeline") <= level.size)
        level = next(wide, hardware.levels[-1].name)
        found["messages between stages", level] = sends * (
            placed.task.fill_sends + placed.task.steady_sends / c.pipeline
        )
    return found


def _rows(placed: Placed) -> FloatArray:
    """(units, 7) values of the way of every unit."""
    kinds = [kind for kind, count in zip(placed.task.kinds, placed.task.counts, strict=True) for _ in range(count)]
    return np.array(
        [
            kind.values[int(np.flatnonzero(kind.labels[:, 0] == label)[0])]
            for kind, label in zip(kinds, placed.partition.labels, strict=True)
        ]
    )


def _queues(placed: Placed, rows: FloatArray) -> float:
    begin, total = 0, 0.0
    for end, busy in zip(placed.partition.ends, placed.partition.busy_s.tolist(), strict=True):
        total += max(0.0, busy - float(rows[begin:end, STEADY].sum()))
        begin = end
    return total


def _level(hardware: Hardware, c: Configuration, axis: str) -> str:
    return level_of_axis(hardware, getattr(c, axis), c.stride(axis))


# What pins cost


def pin_costs(search: Configured, pins: Pins, best: Placed, asked: Collection[str]) -> Iterator[PinCost]:
    """For each pin that was `asked` for: its text, the seconds it costs by the closed form, the configuration without.

    The best plan is one without the pin as well: only what beats it is looked for. Of what only simulation tells
    nothing is said.
    """
    for name, text in pins.named().items():
        if name not in asked or name in SIMULATED:
            continue
        if name == "offload_optimizer" and (pins.offload_to or pins.offload_parameters):
            yield f"{name}={text}", 0.0, ""  # those go with states on the host
            continue
        other = _freed(search, without(pins, name), best)
        if other is not None:
            yield f"{name}={text}", best.objective_s - other.objective_s, describe(other.configuration)


def brought_along(search: Configured, pins: Pins, best: Placed, name: str, asked: Collection[str]) -> PinCost | None:
    """What a pin costs by what else it fixes: stages of plans in copies, states of what is not on the devices.

    None where it fixes nothing else.
    """
    left = without(pins, name)
    if name == "copies" and "pp" not in asked:
        left = replace(left, pp=None)
    elif name in CARRIERS and not any(other in asked for other in CARRIERS if other != name):
        left = replace(left, offload_optimizer=None)
        search = replace(search, base={**search.base, "offload_to": "host", "offload_parameters": False})
    else:
        return None
    other = _freed(search, left, best)
    if other is None or other is best:
        return None
    return f"{name}={pins.named()[name]}", best.objective_s - other.objective_s, describe(other.configuration)


def _freed(search: Configured, pins: Pins, best: Placed) -> Placed | None:
    """The best with other pins, perhaps the same; None where they cannot be."""
    try:
        free = search.explore(pins, solves=FEW_SOLVES, wanted=0, incumbent_s=best.objective_s)
    except InputError:
        return None
    if free.interrupted:
        raise KeyboardInterrupt
    return min([best, *free.found], key=lambda placed: placed.objective_s)


def without(pins: Pins, name: str) -> Pins:
    """The pins but one."""
    left: dict[str, Any] = {name: None}
    return replace(pins, **left)


def pin_messages(costs: Iterable[PinCost]) -> tuple[str, ...]:
    """What pins cost, in words."""
    return tuple(
        f"pin {pin} costs {seconds_text(seconds)}: without it {other}" if seconds > 0 else f"pin {pin} costs nothing"
        for pin, seconds, other in costs
    )


# Shadow prices


def shadow_prices(search: Configured, explored: Explored, best: Placed) -> ShadowPrices:
    """Step time saved by one more GiB on every device, and by a tenth more bandwidth on each level.

    Memory: the best plan and those near it are partitioned again with more of it. Links: the best plan's tables are
    made again with faster ones, and its stages partitioned.
    """
    with_more = _roomier_s(best)
    near = sorted(explored.found, key=lambda placed: placed.objective_s)[:CONSIDERED]
    for placed in near:
        behind = placed.objective_s - best.objective_s
        if placed is not best and behind < FARTHEST * (best.objective_s - with_more):
            with_more = min(with_more, _roomier_s(placed))
    # Measured times of collectives are those of the links as they are.
    plain = search.runs_on(best.configuration.expert_overlap)
    measured = bool(plain.collective_tables)
    if measured:
        plain = replace(plain, collective_tables=(), hash=f"{plain.hash} by formulas")
    before = _objective_s(search, best, plain, plain) if measured else best.objective_s
    links, stage = {}, best.configuration.inner_mesh()
    for number, level in enumerate(plain.levels):
        if number and plain.levels[number - 1].size >= search.devices:
            links[level.name] = 0.0  # nothing leaves the level below
            continue
        faster = replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * MORE_BANDWIDTH)
        levels = (*plain.levels[:number], faster, *plain.levels[number + 1 :])
        hardware = replace(plain, levels=levels, hash=f"{plain.hash} with faster {level.name}")
        inside = links_of(hardware, stage) != links_of(plain, stage)
        after = _objective_s(search, best, hardware, hardware if inside else plain)
        links[level.name] = max(0.0, before - after) if np.isfinite(after) else 0.0
    return ShadowPrices(memory_gib_s=best.objective_s - with_more, links_s=links)


def _objective_s(search: Configured, best: Placed, hardware: Hardware, inside: Hardware) -> float:
    """Seconds of a configuration's step on other hardware, its stages cut anew; infinite where none fits.

    `inside` is what messages inside a stage run on, which may be as it was.
    """
    c = best.configuration
    tables = search.tables(best.pins, c, inside) if c.inner_mesh().axes else best.tables
    found = partition(simplified(search.model(hardware, best.task.limit_bytes).task(tables, c)), close=CLOSE)
    return np.inf if found is None else found.objective_s


def _roomier_s(placed: Placed) -> float:
    """Step time of a configuration once its stages are cut with one more GiB on every device."""
    if placed.task.roomy:
        return placed.objective_s
    found = partition(simplified(replace(placed.task, limit_bytes=placed.task.limit_bytes + GIB)), close=CLOSE)
    return placed.objective_s if found is None else min(placed.objective_s, found.objective_s)


def shadow_messages(prices: ShadowPrices) -> tuple[str, ...]:
    """Shadow prices in words."""
    found = [f"1 GiB more device memory saves {seconds_text(prices.memory_gib_s)} a step"]
    found += [f"10 % more bandwidth on {name} saves {seconds_text(s)}" for name, s in prices.links_s.items()]
    return tuple(found)
