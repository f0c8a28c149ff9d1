"""What a search over configurations finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner.search.configurations.alternatives import different
from planner.search.configurations.configuration import Configuration
from planner.search.stages.partition import Partition
from planner.search.stages.segments import PartitionTask
from planner.search.units.labels import StageTables


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A solved configuration."""

    configuration: Configuration
    tables: StageTables
    task: PartitionTask
    partition: Partition

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
