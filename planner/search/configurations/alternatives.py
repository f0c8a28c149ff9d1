"""Which of many solved configurations are shown: the best, and others that differ from it in what matters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from planner.search.configurations.step_model import Configuration

if TYPE_CHECKING:
    from planner.search.configurations.explored import Placed

PER_SHAPE = 2
"""Most plans with the same data, tensor and pipeline degrees, while there are enough others."""


def shape_of(configuration: Configuration) -> tuple[int, int, int]:
    """Data-parallel, tensor and pipeline degrees."""
    return configuration.data_parallel, configuration.tensor, configuration.pipeline


def diverse(found: Iterable[Placed], count: int) -> list[Placed]:
    """Up to `count` plans, best first, none that behaves like another.

    First come those of other degrees, of the same degrees at most `PER_SHAPE` that differ in schedule, storage or
    recomputation; where these are too few, others that differ in one of those; and last what differs in anything.
    """
    ranked = sorted(found, key=lambda p: p.objective_s)
    chosen: dict[tuple[object, ...], Placed] = {}
    for wanted in (_kinds, _manners, _all):
        for placed in wanted(ranked, list(chosen.values())):
            if len(chosen) < count:
                chosen.setdefault(_behaviour(placed), placed)
    return sorted(chosen.values(), key=lambda p: p.objective_s)


def different(found: Iterable[Placed]) -> int:
    """How many plans there are of which no more than `PER_SHAPE` share their degrees."""
    return sum(1 for _ in _kinds(sorted(found, key=lambda p: p.objective_s), []))


def _kinds(ranked: list[Placed], _: list[Placed]) -> Iterator[Placed]:
    shapes: Counter[tuple[int, int, int]] = Counter()
    seen: set[tuple[object, ...]] = set()
    for placed in ranked:
        shape, manner = shape_of(placed.configuration), _manner(placed)
        if shapes[shape] < PER_SHAPE and manner not in seen:
            shapes[shape] += 1
            seen.add(manner)
            yield placed


def _manners(ranked: list[Placed], chosen: list[Placed]) -> Iterator[Placed]:
    seen = {_manner(placed) for placed in chosen}
    for placed in ranked:
        if (manner := _manner(placed)) not in seen:
            seen.add(manner)
            yield placed


def _all(ranked: list[Placed], _: list[Placed]) -> Iterator[Placed]:
    return iter(ranked)


def _manner(placed: Placed) -> tuple[object, ...]:
    """What a user would call another plan."""
    c = placed.configuration
    units = placed.tables.units
    picked = set(zip(placed.tables.chain.positions, placed.partition.labels, strict=True))
    modes = {int(units[unit].recompute[pick]) for unit, pick in picked}
    storage = c.optimizer_sharding if c.data > 1 else "none"
    return (*c.degrees.values(), c.context_algorithm, _schedule(c), storage, frozenset(modes))


def _schedule(c: Configuration) -> str:
    """Of one micro-batch, schedules with one chunk a rank are the same."""
    return "1f1b" if c.micro_batches == 1 and c.virtual == 1 and c.pipeline > 1 else c.schedule


def _behaviour(placed: Placed) -> tuple[object, ...]:
    c = placed.configuration
    storage = (c.optimizer_sharding, c.shard_size, c.offload) if c.data > 1 else (c.offload,)
    return (
        c.mesh(), c.pipeline, c.stride("pipeline"), c.virtual, _schedule(c), c.micro_batch, c.context_algorithm,
        storage, placed.partition.ends, placed.partition.labels,
    )  # fmt: skip
