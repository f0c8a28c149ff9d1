"""A model without the variables that have one state left: their costs go to their neighbours.

After states have been left out for a limit, hardly any variable has a choice; what work is left then goes with those
that have one, not with the size of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.exact.blocks import BlockVariables, Layout, Table, Variables
from planner.search.exact.folded import Layers
from planner.search.exact.model import Mask, Model


@dataclass(frozen=True, slots=True)
class Condensed:
    """The model that is left; ``number[v]`` is the variable there of variable v of the model before, −1 without one."""

    model: Model
    number: tuple[int, ...]
    blocks: tuple[BlockVariables, ...]
    """Those of the model before."""

    def masks(self, keep: Iterable[Mask]) -> list[Mask]:
        """Which states of each variable of the model before are kept, given those of the model that is left."""
        known = [*keep, np.ones(1, dtype=np.bool_)]
        return [known[n] for n in self.number]

    def restored(self, states: Mapping[int, int], layers: Layers) -> tuple[dict[int, int], Layers]:
        """A plan of the model before."""

        def among(variables: Sequence[int], chosen: Mapping[int, int]) -> dict[int, int]:
            return {v: chosen[self.number[v]] if self.number[v] >= 0 else 0 for v in variables}

        rows = tuple(
            tuple(among((*block.entrance, *block.inside, *block.exit), one) for one in row)
            for block, row in zip(self.blocks, layers, strict=True)
        )
        return among(range(len(self.number)), states), rows


def condensed(model: Model) -> Condensed:
    """Leave out every variable of one state.

    What the tables with its neighbours say joins those of the neighbours alone, or goes to a table with a new variable
    of one state where those count more or less often.
    """
    parts = model.layout
    kept = [v for v, size in enumerate(model.sizes) if size != 1]
    number = [-1] * len(model.sizes)
    for position, v in enumerate(kept):
        number[v] = position
    home = _Home(model, kept, number)
    blocks, in_block = [], []
    for block, scopes in zip(parts.blocks, parts.in_block, strict=True):
        found, fresh = home.gathered(scopes)
        left = [tuple(number[v] for v in vs if number[v] >= 0) for vs in (block.entrance, block.exit, block.shared)]
        inside = (*(number[v] for v in block.inside if number[v] >= 0), *fresh)
        blocks.append(BlockVariables(left[0], left[1], inside, left[2], block.count))
        in_block.append(found)
    outside, _ = home.gathered(parts.outside)
    layout = Layout(tuple(blocks), outside, tuple(in_block))
    small = Model(layout, tuple(home.states), home.time, home.memory)
    return Condensed(small, tuple(number), parts.blocks)


class _Home:
    """Tables of the model that is left, collected place by place."""

    def __init__(self, model: Model, kept: Sequence[int], number: Sequence[int]) -> None:
        self.model = model
        self.number = number
        self.states = [model.states[v] for v in kept]
        self.time: dict[Variables, Table] = {}
        self.memory: dict[Variables, Table] = {}

    def gathered(self, scopes: Sequence[Variables]) -> tuple[tuple[Variables, ...], tuple[int, ...]]:
        """Scopes of what is left of the tables of one place, and the variables that are new there."""
        alone = {scope[0] for scope in scopes if len(scope) == 1}
        fresh: dict[int, int] = {}
        found: dict[Variables, None] = {}
        for scope in scopes:
            left = [v for v in scope if self.number[v] >= 0]
            named = tuple(self.number[v] for v in left)
            if not left or (len(left) == 1 and left[0] not in alone):
                key = left[0] if left else -1
                if key not in fresh:
                    fresh[key] = len(self.states)
                    self.states.append(np.zeros(1, dtype=np.intp))
                named = (*named, fresh[key])
            found[named] = None
            for source, target in ((self.model.time, self.time), (self.model.memory, self.memory)):
                if scope in source:
                    table = source[scope].reshape([len(self.states[v]) for v in named])
                    target[named] = target[named] + table if named in target else table
        return tuple(found), tuple(fresh.values())
