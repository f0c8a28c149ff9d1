"""What a search over configurations has yet to open, which node it opens next, and how far it goes."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from planner.search.configurations.bounds import weight
from planner.search.configurations.explored import PER_SHAPE, Explored, Placed, shape_of
from planner.search.configurations.step_model import Configuration
from planner.search.patience import Patience
from planner.search.stages.fragments import WIDTH, FloatArray
from planner.search.stages.task import PartitionTask, simplified
from planner.search.stages.turn_search import SHORT
from planner.search.units.labels import StageTables

# How far a search goes is counted, not timed, so that every machine finds the same.

SOLVES = 96
"""Most partitions of one search."""
TABLES = 96
"""Most tables of one search, as `weight` and `TABLE_AGAIN` count them."""
LABELLED = 48
"""Most tables whose labels are made once a plan is found, each counted as the first one with its axes."""
PROOFS = 64
"""Tables whose labels are made beside those for the sake of the proof, the least bounds first, counted likewise."""
DIVE = 6
"""After so many tables each, the search goes for a plan before it makes more."""
TABLE_AGAIN = 0.05
"""How much others with the same axes count: they are made together with the first."""
NODES = 40_000
"""Most nodes that are opened in one search."""
WORK = {"bounds": 1500, "partition": 450}
"""Memory bounds, and kinds of units in partitions, that one search may count: one that has found a plan ends behind
those bounds, and behind those partitions what is left is bounded alone. Counts, so that every machine finds the same.
"""
IDEALISED = 4
"""How many times as much a bound counts that partitions units which cannot be divided."""
NEAR = 1.3
"""Alternatives are looked for up to so many times the best objective."""
ALIKE = 1.01
"""Storages of one configuration whose bounds lie that near one another are timed together."""
OTHERS = 500
"""Nodes that are opened for them at most where enough plans are there that differ less."""
NAMED = 32
"""Configurations of which it is said by how much they do not fit where none does."""
LOOSE = 4
"""After so many partitions with several chunks a rank, it counts how far they lie from their bounds."""
PROOF = 1e-9
"""Relative distance to the bound up to which a plan counts as proven to be the best."""


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


class Agenda:
    """Nodes that wait, in the order in which they are opened, and the counts on which that depends.

    ``heap`` holds what may beat the best plan, ``deep`` the same with what is nearest to a plan first, ``later`` what
    may be an alternative, ``spare`` those of degrees that have enough plans, and ``held`` what waits for a table when
    there are to be no more of them.
    """

    def __init__(self, wanted: int, solves: int) -> None:
        self.wanted, self.solves = wanted, solves
        self.result = Explored()
        self.best, self.until_found = np.inf, False
        self.patience = Patience()
        self.heap: list[tuple[float, int, float, SearchNode]] = []
        self.deep: list[tuple[int, float, int, float, SearchNode]] = []
        self.later: list[tuple[float, int, float, SearchNode]] = []
        self.spare: list[tuple[float, int, float, SearchNode]] = []
        self.held: list[tuple[float, int, SearchNode]] = []
        self.serial = 0
        self.number = TableNumbers()
        self.made: dict[int, StageTables | None] = {}
        self.labelled: dict[int, int] = {}
        self.proven: dict[int, int] = {}
        self.shapes: Counter[tuple[int, int, int]] = Counter()
        self.table_work, self.dives, self.others = 0.0, 0, 0
        self.work = dict.fromkeys(WORK, 0)
        self.apart: list[float] = []
        self.unproven: list[float] = []

    def waiting(self) -> Iterator[float]:
        """Bounds of all that waits."""
        yield from (bound for bound, *_ in self.held)
        yield from (bound for _, _, bound, node in self.heap if node.waits)
        yield from (bound for _, _, bound, _ in (*self.later, *self.spare))

    def push(self, bound: float, node: SearchNode, hoped_s: float | None = None) -> None:
        """Let a node wait; ``hoped_s`` puts it in order, its bound if not given."""
        self.serial += 1
        hoped_s = (bound if hoped_s is None else hoped_s) * OPTIMISM[node.stage]
        if node.stage is Depth.BOUNDED and node.configuration.virtual > 1:
            hoped_s = max(hoped_s, bound * self.nearest())
        node.waits, node.key = True, self.number.of(node.configuration)
        heapq.heappush(self.heap, (hoped_s, self.serial, bound, node))
        if node.stage >= Depth.EVEN:
            heapq.heappush(self.deep, (-node.stage, hoped_s, self.serial, bound, node))

    def following(self) -> tuple[float, SearchNode] | None:
        """What is opened next: all that may beat the best, then alternatives that come near while there are too few."""
        if self.until_found and self.result.found:
            return None
        hurried = self.patience.asked or self.result.tables >= DIVE * (self.dives + 1)
        if hurried and not self._bounds_spent() and (deepest := self._deepest()) is not None:
            return deepest
        while self.heap or self._proves():
            _, serial, bound, node = heapq.heappop(self.heap)
            if not node.waits:
                continue
            node.waits = False
            if self._bounds_spent() and (node.stage >= Depth.STORAGE or bound >= min(self.unproven, default=np.inf)):
                # Others may still raise the bound over the space, as long as it is not what this one leaves open.
                self.unproven.append(bound)
            elif self._needs_table(node):
                heapq.heappush(self.held, (bound, serial, node))
            elif bound < self.best * (1 - PROOF):
                return bound, node
            else:
                heapq.heappush(self.later, (bound, serial, bound, node))
        if self.late() or self._bounds_spent():
            return None
        while self.later and self.later[0][0] <= self.best * NEAR and not self._enough():
            key, serial, bound, node = heapq.heappop(self.later)
            self.others += node.stage > Depth.STORAGE
            if self._needs_table(node):
                heapq.heappush(self.held, (bound, serial, node))
            elif self.shapes[shape_of(node.configuration)] >= PER_SHAPE:
                heapq.heappush(self.spare, (key, serial, bound, node))
            else:
                return bound, node
        return self._further()

    def spent(self) -> bool:
        """Whether the search has come as far as its limits let it."""
        result, share = self.result, self.solves / SOLVES
        return (
            result.solved >= self.solves
            or self.table_work >= TABLES * max(share, 0.4)
            or result.opened >= NODES * share
        )

    def _bounds_spent(self) -> bool:
        """Whether a plan is found and nothing is bounded any more with its states in one storage."""
        return bool(self.result.found) and self.work["bounds"] >= WORK["bounds"]

    def late(self) -> bool:
        """Whether a plan is found and what is left is bounded alone."""
        return bool(self.result.found) and self.work["partition"] >= WORK["partition"]

    def nearest(self) -> float:
        """How far partitions with several chunks a rank have lain from their bounds at least, times the bound."""
        return min(self.apart) if len(self.apart) >= LOOSE else 1.0

    def _further(self) -> tuple[float, SearchNode] | None:
        """While there are fewer plans than wanted: more of the same degrees, then what is farther from the best."""
        while len(self.result.found) < self.wanted and (self.spare or self.later) and np.isfinite(self.best):
            _, serial, bound, node = heapq.heappop(self.spare or self.later)
            if not self._needs_table(node):
                return bound, node
            heapq.heappush(self.held, (bound, serial, node))
        return None

    def _proves(self) -> bool:
        """Where nothing else may be the best, let the node with the least bound have labels, for a better proof."""
        if not self.held or self.held[0][0] >= self.best * (1 - PROOF) or not self.wanted:
            return False
        bound, _, node = self.held[0]
        if node.stage is not Depth.WHOLE:
            return False
        if node.key not in self.labelled and node.key not in self.proven:
            if sum(self.proven.values()) >= PROOFS:
                return False
            self.proven[node.key] = weight(node.configuration)
        heapq.heappop(self.held)
        self.push(bound, node)
        return True

    def _deepest(self) -> tuple[float, SearchNode] | None:
        """The node nearest to a plan, so that a good one is known before all tables are made."""
        while self.deep:
            *_, bound, node = heapq.heappop(self.deep)
            if node.waits and bound < self.best * (1 - PROOF) and not self._needs_table(node):
                node.waits = False
                self.dives += node.stage is Depth.BOUNDED
                return bound, node
        self.dives = self.result.tables // DIVE
        return None

    def _needs_table(self, node: SearchNode) -> bool:
        """Whether a node waits for a table when there are to be no more of them."""
        share, key = max(self.solves / SOLVES, 0.4), node.key
        made = node.stage > Depth.ORDER or key in self.made
        if node.stage is Depth.WHOLE and key not in self.labelled and key not in self.proven:
            return bool(self.result.found) and sum(self.labelled.values()) >= LABELLED
        return not made and self.table_work >= TABLES * share

    def _enough(self) -> bool:
        if len(self.result.found) < self.wanted:
            return False
        return self.others >= OTHERS or self.result.different_below(self.best * NEAR) >= self.wanted
