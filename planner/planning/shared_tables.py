"""What plans of one network have in common: rules, decisions, and tables of its units on stage meshes.

A table depends on network, precision, micro-batch, stage mesh, profile and optimizer, not on how many devices there
are: a sweep over device counts makes each once. Decisions and rules depend on network and precision alone, so several
profiles share them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property

from planner.graph.layer_parts import with_selective
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch, at_precision
from planner.search.problem.unaligned import aligned, apart
from planner.search.problem.variables import Decisions
from planner.search.units.labels import StageDecisions, StageTables

MOST_TABLES = 512
"""Tables kept; those that were not used for longest go first."""


class NetworkTables:
    """A network at one precision, with what was made of it so far.

    Parameters
    ----------
    graph : OperatorGraph
        Folded, at its precision and batch 1.
    most : int
        Tables to keep.
    """

    def __init__(self, graph: OperatorGraph, most: int = MOST_TABLES) -> None:
        self.graph = graph
        self.most = most
        self._tables: OrderedDict[tuple[object, ...], StageTables] = OrderedDict()

    @cached_property
    def aligned(self) -> tuple[OperatorGraph, Decisions]:
        """The graph whose operators are searched one by one, and its decisions."""
        return aligned(self.graph)

    @cached_property
    def decisions(self) -> StageDecisions:
        """The chain of the network and its decisions."""
        return StageDecisions(self.graph)

    def at_batch(self, batch: int) -> OperatorGraph:
        """The graph at another batch."""
        return at_batch(self.graph, batch)

    def known(self, key: tuple[object, ...]) -> StageTables | None:
        """The tables of `key`, where they were made."""
        return self._tables.get(key)

    def tables(self, key: tuple[object, ...], make: Callable[[], StageTables]) -> StageTables:
        """The tables of `key`, which names everything that they depend on beside the graph; made where there are none.

        What `make` raises is raised, and nothing is kept.
        """
        if key not in self._tables:
            self._tables[key] = make()
            while len(self._tables) > self.most:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]

    def __len__(self) -> int:
        return len(self._tables)


class SharedTables:
    """One captured network at the precisions of several requests.

    Parameters
    ----------
    graph : OperatorGraph, or a function that captures it
        Folded, as captured.
    """

    def __init__(self, graph: OperatorGraph | Callable[[], OperatorGraph]) -> None:
        self._given = graph
        self._precisions: dict[str, NetworkTables] = {}
        self._selective: dict[tuple[str, ...], SharedTables] = {}
        self._apart: dict[tuple[str, tuple[int, ...]], NetworkTables] = {}

    @cached_property
    def graph(self) -> OperatorGraph:
        """The network; captured when it is first asked for."""
        return self._given if isinstance(self._given, OperatorGraph) else self._given()

    def selective(self, modules: tuple[str, ...]) -> SharedTables:
        """The same network, of which selective recomputation computes these parts of layers again."""
        if modules == self.graph.selective:
            return self
        if modules not in self._selective:
            self._selective[modules] = SharedTables(with_selective(self.graph, modules))
        return self._selective[modules]

    def at(self, dtype: str) -> NetworkTables:
        """The network at a precision."""
        if dtype not in self._precisions:
            self._precisions[dtype] = NetworkTables(at_precision(self.graph, dtype))
        return self._precisions[dtype]

    def apart(self, dtype: str, runs: tuple[int, ...]) -> NetworkTables:
        """The network at a precision with some of its runs, by number, written out: their layers may differ."""
        if not runs:
            return self.at(dtype)
        if (dtype, runs) not in self._apart:
            self._apart[dtype, runs] = NetworkTables(apart(self.at(dtype).graph, runs))
        return self._apart[dtype, runs]
