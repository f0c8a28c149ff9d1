"""What is made of a graph once and kept as long as the graph is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import finalize

from planner.graph.operator_graph import OperatorGraph

Key = TypeVar("Key")
Made = TypeVar("Made")


class KeptByGraph(Generic[Key, Made]):
    """What was made of each graph, by keys; graphs are told apart by identity, being too large to compare."""

    def __init__(self) -> None:
        self._made: dict[int, dict[Key, Made]] = {}

    def of(self, graph: OperatorGraph) -> dict[Key, Made]:
        """What was made of one graph so far, to be read and added to."""
        key = id(graph)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = {}
            finalize(graph, self._made.pop, key, None)
        return made

    def once(self, graph: OperatorGraph, key: Key, make: Callable[[], Made]) -> Made:
        """What was made of one graph by this key, made now if it was not yet."""
        made = self.of(graph)
        if key not in made:
            made[key] = make()
        return made[key]
