"""Nodes of the search over configurations, and how promising their bounds are."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from planner.search.configurations.explored import Placed
from planner.search.configurations.step_model import Configuration
from planner.search.stages.exact_turns import SHORT
from planner.search.stages.fragments import WIDTH, FloatArray
from planner.search.stages.task import PartitionTask, simplified

BY_TURNS = 1e-3
"""By how much the bound of one more base of a stage mesh counts as higher when bases are opened."""
VERY_SHORT = 4
"""Units of a chain up to which all ways are tried at once."""
WIDEST = WIDTH * 8
"""Most ways of a fragment where fewer do not prove a partition."""


class Depth(IntEnum):
    """How far a configuration is looked into."""

    BASE = 0
    ANY_ORDER = 1
    ORDERS = 2
    ORDER = 3
    EVEN = 4
    STATES = 5
    CHAINED = 6
    WHOLE = 7
    STORAGE = 8
    TIMED = 9
    BOUNDED = 10
    SOLVED = 11


OPTIMISM = {
    Depth.BASE: 1.1,
    Depth.ANY_ORDER: 1.08,
    Depth.ORDERS: 1.08,
    Depth.ORDER: 1.08,
    Depth.EVEN: 1.05,
    Depth.STATES: 1.05,
    Depth.CHAINED: 1.05,
    Depth.WHOLE: 1.05,
    Depth.STORAGE: 1.0,
    Depth.TIMED: 1.0,
    Depth.BOUNDED: 1.0,
    Depth.SOLVED: 1.0,
}
"""How far bounds of each stage usually lie below the objective: whose bound times this is least is opened first."""


@dataclass(slots=True)
class SearchNode:
    """A configuration, or several orders of its axes, that wait to be opened; ``key`` numbers its table of labels.

    ``least_s`` bounds it in each of its `LeastStates`. With ``gain_s`` it stands for the same with states on the host
    as well, which may take so much less. ``siblings`` are it and those that are stored in other ways, with their
    bounds: they are timed together, ``chain_s`` as a chain.
    """

    stage: Depth
    configuration: Configuration
    task: PartitionTask | None = None
    placed: Placed | None = None
    width: int = WIDTH
    others: tuple[Configuration, ...] = ()
    least_s: FloatArray | None = None
    gain_s: float = 0.0
    chain_s: float | None = None
    siblings: list[tuple[float, SearchNode]] = field(default_factory=list)
    waits: bool = False
    key: int = -1


class TableNumbers:
    """Numbers of the tables of labels that configurations have, the same for equal `Configuration.table_key`."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    def of(self, configuration: Configuration) -> int:
        """Number of the table of a configuration."""
        c = configuration
        degrees = (c.pipeline, c.data, c.context, c.expert, c.tensor)
        ways = (*degrees, c.order, c.micro_batch, c.context_algorithm, c.all_replicas)
        if ways not in self._numbers:
            self._numbers[ways] = self._numbers.setdefault(c.table_key, len(self._numbers))
        return self._numbers[ways]


def worth_widening(task: PartitionTask, width: int) -> bool:
    """Whether more ways of a fragment, or of a unit in a short chain, may prove what fewer did not."""
    if task.pieces == 1:
        return False
    few = simplified(task) is not task
    if task.chunks > 1:
        return few and task.units <= SHORT and width == WIDTH
    return width < WIDEST and (task.units <= SHORT or not few)
