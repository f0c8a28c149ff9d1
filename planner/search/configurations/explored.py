"""What a search over configurations finds, and which of it is shown: the best, and others that differ from it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner.plans.pins import Pins
from planner.search.configurations.configuration import Configuration
from planner.search.stages.partition import Partition
from planner.search.stages.task import PartitionTask
from planner.search.units.labels import StageTables

PER_SHAPE = 2
"""Most plans with the same data, tensor and pipeline degrees, while there are enough others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A solved configuration; ``pins`` are those of the part of the space that it was found in."""

    configuration: Configuration
    tables: StageTables
    task: PartitionTask
    partition: Partition
    pins: Pins

    @property
    def objective_s(self) -> float:
        """Seconds of a step by the closed form."""
        return self.partition.objective_s


@dataclass(frozen=True, kw_only=True)
class Unfit:
    """A configuration that does not fit; ``found`` finds its fullest rank and the least bytes of that, when asked."""

    configuration: Configuration
    found: Callable[[], tuple[int, float]]

    @classmethod
    def known(cls, configuration: Configuration, rank: int, needed_bytes: float) -> Unfit:
        """Of which both are known."""
        return cls(configuration=configuration, found=lambda: (rank, needed_bytes))

    @cached_property
    def _fullest(self) -> tuple[int, float]:
        return self.found()

    @property
    def rank(self) -> int:
        """Its fullest rank."""
        return self._fullest[0]

    @property
    def needed_bytes(self) -> float:
        """The least bytes of that rank."""
        return self._fullest[1]


@dataclass(kw_only=True)
class Explored:
    """What a search found: plans, best first, a bound over the whole space, and how it went.

    ``dense`` says why meshes were not searched whose tables would be too large; the bound holds for them, too.
    ``interrupted`` says that the user stopped it; the bound holds all the same. ``missed`` are bytes by which a limit
    would have to be lower for the closed form not to hold plans to fit that did not once they were simulated.
    """

    found: list[Placed] = field(default_factory=list)
    unfit: list[Unfit] = field(default_factory=list)
    missed: list[float] = field(default_factory=list)
    lower_bound_s: float = np.inf
    opened: int = 0
    solved: int = 0
    tables: int = 0
    refused: str = ""
    dense: str = ""
    interrupted: bool = False
    timings: dict[str, float] = field(default_factory=lambda: {"cost_tables": 0.0, "bounds": 0.0, "partition": 0.0})

    _different: tuple[tuple[int, float], int] = field(default=((-1, 0.0), 0), init=False, repr=False)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of what is done inside to those of a phase."""
        began = time.perf_counter()
        yield
        self.timings[phase] += time.perf_counter() - began

    def different_below(self, limit_s: float) -> int:
        """How many plans below a limit differ, as `different` has it; the same until another one is solved."""
        key = (self.solved, limit_s)
        if self._different[0] != key:
            self._different = key, different(p for p in self.found if p.objective_s <= limit_s)
        return self._different[1]

    @property
    def gap(self) -> float:
        """Relative distance of the best plan to the bound."""
        if not self.found or self.found[0].objective_s <= 0:
            return 0.0
        return max(0.0, 1.0 - self.lower_bound_s / self.found[0].objective_s)


def joined(each: Sequence[Explored]) -> Explored:
    """What searches of parts of a space found together."""
    if len(each) == 1:
        return each[0]
    return Explored(
        found=sorted((p for one in each for p in one.found), key=lambda placed: placed.objective_s),
        unfit=[unfit for one in each for unfit in one.unfit],
        lower_bound_s=min((one.lower_bound_s for one in each), default=np.inf),
        opened=sum(one.opened for one in each),
        solved=sum(one.solved for one in each),
        tables=sum(one.tables for one in each),
        refused=next((one.refused for one in each if one.refused), ""),
        dense=next((one.dense for one in each if one.dense), ""),
        interrupted=any(one.interrupted for one in each),
        timings={phase: sum(one.timings[phase] for one in each) for phase in (each[0] if each else Explored()).timings},
    )


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
    for wanted in (_kinds, _manners, lambda ranked, _: iter(ranked)):
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


def _manner(placed: Placed) -> tuple[object, ...]:
    """What a user would call another plan."""
    c = placed.configuration
    units = placed.tables.units
    picked = set(zip(placed.tables.chain.positions, placed.partition.labels, strict=True))
    modes = {int(units[unit].recompute[pick]) for unit, pick in picked}
    storage = c.optimizer_sharding if c.data > 1 or c.all_replicas else "none"
    return (*c.degrees.values(), c.context_algorithm, _schedule(c), storage, frozenset(modes))


def _schedule(c: Configuration) -> str:
    """Of one micro-batch, schedules with one chunk a rank are the same."""
    return "1f1b" if c.micro_batches == 1 and c.virtual == 1 and c.pipeline > 1 else c.schedule


def _behaviour(placed: Placed) -> tuple[object, ...]:
    c = placed.configuration
    storage = (c.optimizer_sharding, c.shard_size, c.offload) if c.data > 1 or c.all_replicas else (c.offload,)
    return (
        c.mesh(), c.pipeline, c.stride("pipeline"), c.virtual, _schedule(c), c.micro_batch, c.context_algorithm,
        storage, placed.partition.ends, placed.partition.labels,
    )  # fmt: skip
