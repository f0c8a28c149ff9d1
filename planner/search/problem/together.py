"""Several meshes of the same devices at once: what operators take there differs in how they are cut alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import Node
from planner.search.problem.parts import FloatArray, Messages, Parts, Seconds
from planner.search.problem.states import States
from planner.search.problem.variables import Kind


def time_together(meshes: Sequence[Parts]) -> None:
    """Time the operators and updates of the same graph and decisions on several meshes, each kind of kernel once.

    What the parts of each mesh are asked for later is known then.
    """
    for parts in meshes:
        # Most of them will be asked for their messages, in few calls.
        parts.prepare(moves=True)
    kinds = dict.fromkeys(states.kind for states in map(meshes[0].states, range(len(meshes[0].decisions.variables))))
    for number in kinds:
        _Abreast(meshes, number).time()


class _Abreast(Parts):
    """The states of one variable on several meshes behind each other."""

    def __init__(self, meshes: Sequence[Parts], number: int) -> None:
        first = meshes[0]
        super().__init__(first.graph, first.decisions, first.setting)
        self.meshes = meshes
        self.each = [parts.states(number) for parts in meshes]
        self.slices = [slice(*ends) for ends in pairwise(np.cumsum([0, *map(len, self.each)]).tolist())]
        self.names = tuple(dict.fromkeys(name for parts in meshes for name in parts.names))
        rows = [self._row(name) for name in self.names]
        self.whole = States(self.each[0].variable, np.array([choice for choice, _ in rows]), number)
        self.sizes_of_states = [size for _, size in rows]

    def _row(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Choices along one axis, and its size, by state; an axis that a mesh does not have has one rank there."""
        choices, sizes = [], []
        for parts, states in zip(self.meshes, self.each, strict=True):
            there = name in parts.names
            place = parts.names.index(name) if there else 0
            choices.append(states.choice[place] if there else np.zeros(len(states), dtype=np.int64))
            sizes.append(parts.sizes[place] if there else 1)
        return np.concatenate(choices), np.repeat(sizes, list(map(len, self.each)))

    def time(self) -> None:
        """Work out what is asked of the variable, and note it for each mesh."""
        variable = self.whole.variable
        if variable.kind is Kind.PARAMETER:
            self._note(("update",), self.update_seconds(self.whole))
        elif variable.kind is not Kind.INPUT:
            for position in range(len(variable.nodes)):
                found = self.node_seconds(self.whole, position)
                self._note(("seconds", position), found.total, found.communication)

    def _note(self, key: tuple[str | int, ...], total: FloatArray, communication: FloatArray | None = None) -> None:
        for states, own in zip(self.each, self.slices, strict=True):
            states.known[key] = total[own] if communication is None else Seconds(total[own], communication[own])

    def _axes(self) -> Sequence[int | NDArray[np.int64]]:
        return self.sizes_of_states

    def _inside(
        self, states: States, messages: Messages, node: Node, shares: Sequence[FloatArray], work_s: FloatArray
    ) -> FloatArray:
        """Messages are those of each mesh."""
        found = [
            parts._inside(mine, messages, node, [share[own] for share in shares], work_s[own])
            for parts, mine, own in zip(self.meshes, self.each, self.slices, strict=True)
        ]
        return np.concatenate(found)
