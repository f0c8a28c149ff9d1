"""Layers of a run as variables of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.search.exact.blocks import BlockVariables, Layout, Table, Variables
from planner.search.exact.folded import Layers
from planner.search.exact.model import Mask, Model

EVERY = 1 << 30


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A model with layers of runs written out, and what became of each variable.

    ``origin[w]`` is the variable that variable w of the new model stands for. ``layers[r][i]`` says for layer i + 1 of
    run r, where it is written out, which new variable stands for each of the block's.
    """

    model: Model
    origin: tuple[int, ...]
    layers: tuple[tuple[Mapping[int, int], ...], ...]

    def folded(self, keep: Sequence[Mask]) -> list[Mask]:
        """States of the variables of the model before that some copy keeps."""
        masks = [np.zeros(0, dtype=np.bool_)] * (max(self.origin, default=-1) + 1)
        for v, mask in zip(self.origin, keep, strict=True):
            masks[v] = mask if masks[v].size == 0 else masks[v] | mask
        return masks

    def plan(self, states: Mapping[int, int]) -> tuple[dict[int, int], Layers]:
        """States of the model before; every layer must be written out."""
        layers = tuple(tuple({v: states[w] for v, w in copy.items()} for copy in copies) for copies in self.layers)
        # Entrances stand for the first layer's, what else a block has for the last layer's: both kept their numbers.
        assignment = {v: states[v] for v in range(max(self.origin, default=-1) + 1)}
        return assignment, layers


def unrolled(model: Model, front: int = EVERY, back: int = 0) -> Unrolled:
    """Write out the first `front` and the last `back` layers of every run (behind the very first, which is out)."""
    origin = list(range(len(model.states)))
    time, memory = dict(model.time), dict(model.memory)
    outside = list(model.layout.outside)
    blocks: list[BlockVariables] = []
    in_block: list[tuple[Variables, ...]] = []
    layers = []
    for block, scopes in zip(model.layout.blocks, model.layout.in_block, strict=True):
        ahead = min(front, block.count)
        behind = min(back, block.count - ahead)
        middle = block.count - ahead - behind
        # The last block keeps its variables, as what follows the run reads them.
        total = ahead + behind + (1 if middle else 0)
        rows: list[dict[int, int]] = []
        before = dict(zip(block.entrance, block.entrance, strict=True))
        for number in range(total):
            own = {v: v for v in (*block.inside, *block.exit)}
            if number < total - 1:
                own = {v: len(origin) + i for i, v in enumerate(own)}
                origin.extend(own.keys())
            rows.append({**before, **own})
            before = {e: own[x] for e, x in zip(block.entrance, block.exit, strict=True)}
        for number, row in enumerate(rows):
            named = [tuple(row.get(v, v) for v in scope) for scope in scopes]
            for old, new in zip(scopes, named, strict=True):
                time[new] = model.time[old]
                if old in model.memory:
                    memory[new] = model.memory[old]
            if middle and number == ahead:
                blocks.append(
                    replace(
                        block,
                        entrance=tuple(row[v] for v in block.entrance),
                        exit=tuple(row[v] for v in block.exit),
                        inside=tuple(row[v] for v in block.inside),
                        count=middle,
                    )
                )
                in_block.append(tuple(named))
            else:
                outside.extend(named)
        layers.append(tuple(rows))
    used = {*outside, *(scope for scopes in in_block for scope in scopes)}
    parts = Layout(tuple(blocks), tuple(outside), tuple(in_block))
    states = tuple(model.states[v] for v in origin)
    result = Model(parts, states, _only(time, used), _only(memory, used))
    return Unrolled(result, tuple(origin), tuple(layers))


def _only(tables: Mapping[Variables, Table], used: set[Variables]) -> dict[Variables, Table]:
    return {scope: table for scope, table in tables.items() if scope in used}
