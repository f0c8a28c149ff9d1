"""All units of a network on one stage mesh: their boundary states, and the exact minimum of any weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import TensorRef
from planner.search.problem.amounts import MeshCase
from planner.search.problem.parts import Parts
from planner.search.problem.variables import Kind
from planner.search.units.elimination import Minima
from planner.search.units.family import family_of
from planner.search.units.records import BoundaryStates, Least, Minimum, UnitFactors, UnitWeights, rows_of
from planner.search.units.stage_decisions import StageDecisions
from planner.search.units.stage_shape import ENTRY, EXIT, StageOptions, UnitShape
from planner.search.units.unit_model import UnitModel
from planner.sharding.placement import Placements

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
TOGETHER = 2**16
"""Placements of all tied parameters that are tried together, at most."""
KEPT_PRICES = (5.0, 20.0, 80.0)
"""What a byte costs that is kept, in bytes that the device could move meanwhile: between those of a kernel that is run
again for it and of a product."""


@dataclass(frozen=True, slots=True, eq=False)
class Tabled:
    """One unit's tables with the boundary states at its ends, ready to be minimised."""

    model: UnitModel
    factors: UnitFactors
    shape: UnitShape

    @property
    def kept(self) -> tuple[int, ...]:
        """The shared stations and the ends there are."""
        return self.shape.kept

    @property
    def sizes(self) -> Mapping[int, int]:
        """States of each variable and end."""
        return self.shape.sizes

    def minima(self, rows: FloatArray) -> Minima:
        """Minimise for each row of weights, shape (weightings, PARTS)."""
        return self.shape.minima(self.factors.weighted(rows), self.factors.layout.starts)

    def lowest(self, rows: FloatArray) -> FloatArray:
        """The least sums alone."""
        return self.shape.lowest(self.factors.weighted(rows), self.factors.layout.starts)

    def spread(self, table: FloatArray, shared: Sequence[int]) -> FloatArray:
        """Bring a table to shape (weightings, states of all shared stations, entries, exits)."""
        return self.shape.spread(table, shared)


class Stage:
    """The units of a network on one mesh, at the batch of the graph of `parts`."""

    def __init__(self, decisions: StageDecisions, parts: Parts, options: StageOptions) -> None:
        self.decisions, self.options = decisions, options
        self.chain = decisions.chain
        self.case = MeshCase(parts.setting.costs, parts.graph.batch_size)
        self.family = family_of(decisions, parts, options)
        self.shape = self.family.known_shape(self.case)
        self.parts = self.shape.parts_at(parts.graph, parts.setting)
        self.shared = decisions.shared
        self._units: dict[int, Tabled] = {}

    @cached_property
    def boundaries(self) -> tuple[BoundaryStates, ...]:
        """States of the boundary tensors, with their bytes."""
        return tuple(self._boundary(b) for b in range(len(self.chain.boundaries)))

    @cached_property
    def least(self) -> Least:
        """Least seconds of both passes between boundary states, and of the whole network, all strategies considered.

        Tied parameters lie as is best for a plain step.
        """
        return self.family.least(self.case)

    def unit(self, number: int) -> Tabled:
        """Tables of a unit; the first block of a run has the second's where they are equal."""
        number = self.decisions.tabled(number)
        if number not in self._units:
            factors = self.family.tables(self.case)[number]
            shape = self.shape.unit(number, factors.layout.scopes, factors.layout.sizes)
            self._units[number] = Tabled(self.decisions.models[number], factors, shape)
        return self._units[number]

    def _boundary(self, number: int) -> BoundaryStates:
        crossing = self.chain.boundaries[number]
        forward = tuple(f for f, _ in self.shape.classes[number][0])
        backward = tuple(b for _, b in self.shape.classes[number][0])

        def sent(ref: TensorRef, placed: Sequence[Placements]) -> FloatArray:
            return self.parts.local_bytes(
                ref, np.array(placed, dtype=np.int64).T.reshape(len(self.parts.sizes), len(placed))
            )

        nothing = np.zeros(len(forward))
        back = sent(crossing.gradient, backward) if crossing.gradient and backward else nothing
        return BoundaryStates(
            forward=forward, backward=backward, forward_bytes=sent(crossing.forward, forward), backward_bytes=back
        )

    # Minima

    @property
    def least_elements(self) -> FloatArray:
        """(units,) least elements of trained parameters that one rank holds of each unit."""
        least: FloatArray = self._least_held[0]
        return least

    @property
    def least_frozen(self) -> FloatArray:
        """(units,) the same of parameters without a gradient."""
        least: FloatArray = self._least_held[1]
        return least

    @property
    def _least_held(self) -> FloatArray:
        known = self.family.elements
        if id(self.shape) not in known:
            least = np.zeros((2, len(self.decisions.models)))
            for number, model in enumerate(self.decisions.models):
                for v in model.variables:
                    variable = self.decisions.decisions.variables[v]
                    if variable.kind is Kind.PARAMETER:
                        frozen = int(variable.nodes[0] not in self.parts.graph.trained)
                        least[frozen, number] += self.parts.elements(self.parts.states(v)).min()
            known[id(self.shape)] = least
        return known[id(self.shape)]

    @property
    def priced(self) -> tuple[FloatArray, FloatArray]:
        """Prices (n,) of a kept byte, and the least seconds (n,) of passes and price of what they keep, whole network.

        Passes that keep no more than some bytes take at least the latter without the price of those. Tied parameters
        lie as in `least`.
        """
        known = self.family.priced
        if self.case.key not in known:
            prices = np.array(KEPT_PRICES) / self.case.costs.hardware.memory_bandwidth
            weights = [UnitWeights(activation_byte=price) for price in prices.tolist()]
            known[self.case.key] = prices, self._lowest(weights, self.least.shared)
        return known[self.case.key]

    def _lowest(self, weights: Sequence[UnitWeights], shared: Mapping[int, int]) -> FloatArray:
        """(weightings,) least sums of the whole network in any mode, tied parameters in the given states."""
        rows = np.concatenate([rows_of(each, self.options.modes) for each in weights])
        tables: dict[int, FloatArray] = {}
        for number in {self.decisions.tabled(n) for n in range(len(self.chain.units))}:
            unit = self.unit(number)
            least = unit.spread(unit.lowest(rows), self.shared)
            for station in self.shared:
                least = least[:, 0 if least.shape[1] == 1 else shared[station]]
            tables[number] = least.reshape(len(weights), -1, *least.shape[1:]).min(axis=1)
        value = np.zeros((len(weights), 1))
        for number in self.chain.positions:
            value = (value[:, :, None] + tables[self.decisions.tabled(number)]).min(axis=1)
        return value[:, 0]

    def tables(self, rows: FloatArray) -> tuple[list[FloatArray], dict[int, Minima]]:
        """Least sums of every unit for each row of weights: (rows, shared states …, entries, exits)."""
        found: dict[int, Minima] = {}
        tables = []
        for number in range(len(self.chain.units)):
            unit = self.unit(number)
            key = unit.model.number
            if key not in found:
                found[key] = unit.minima(rows)
            tables.append(unit.spread(found[key].table, self.shared))
        return tables, found

    def minimum(self, weights: UnitWeights) -> Minimum:
        """Minimise the weighted sum over the whole network: no plan with this stage mesh and micro-batch is cheaper.

        Exact over all strategies, recompute modes, boundary states and placements of tied parameters, whose elements
        count once: by min-plus products with the way back. Where tied parameters have more than `TOGETHER` placements,
        each lies as is best for the units that read it, whatever the others do.
        """
        rows = rows_of(weights, self.options.modes)
        tables, found = self.tables(rows)
        shape = tuple(len(self.parts.states(v)) for v in self.shared)
        lie: dict[int, int] = {}
        if prod(shape) > TOGETHER:
            for axis, (station, size) in enumerate(zip(self.shared, shape, strict=True), 1):
                least = np.zeros(size)
                for table in tables:
                    least += np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1).min(axis=1)
                lie[station] = int(least.argmin())
                tables = [t.take([lie[station] if t.shape[axis] > 1 else 0], axis=axis) for t in tables]
            shape = (1,) * len(shape)
        flat, modes = [], []
        for table in tables:
            full = np.broadcast_to(table, (len(rows), *shape, *table.shape[-2:]))
            full = full.reshape(len(rows), prod(shape), *table.shape[-2:])
            best = full.argmin(axis=0)
            modes.append(best)
            flat.append(np.take_along_axis(full, best[None], axis=0)[0])
        value: FloatArray = np.zeros((prod(shape), 1))
        back: list[IntArray] = []
        for number in self.chain.positions:
            if value.shape[1] == 1:
                value = value + flat[number][:, 0, :]
                back.append(np.zeros(value.shape, dtype=np.int64))
                continue
            total = value[:, :, None] + flat[number]
            back.append(total.argmin(axis=1))
            value = total.min(axis=1)
        common = int(value[:, 0].argmin())
        state, entries, exits = 0, [], []
        for step in reversed(back):
            exits.append(state)
            state = int(step[common, state])
            entries.append(state)
        entries.reverse()
        exits.reverse()
        if shape and not lie:
            lie = dict(zip(self.shared, map(int, np.unravel_index(common, shape)), strict=True))
        chosen = [int(modes[n][common, e, x]) for n, e, x in zip(self.chain.positions, entries, exits, strict=True)]
        made: dict[tuple[int, int, int, int], Mapping[int, int]] = {}
        keys = list(zip(self.chain.positions, chosen, entries, exits, strict=True))
        for key in keys:
            if key not in made:
                made[key] = self._assignment(key, found, lie)
        return Minimum(
            value=float(value[common, 0]),
            entries=tuple(entries),
            exits=tuple(exits),
            recompute=tuple(self.options.modes[row] for row in chosen),
            assignments=tuple(made[key] for key in keys),
        )

    def _assignment(
        self, key: tuple[int, int, int, int], found: Mapping[int, Minima], shared: Mapping[int, int]
    ) -> Mapping[int, int]:
        """States of a unit's variables, for its number, the row of weights, its entry and its exit."""
        number, row, entry, leave = key
        unit = self.unit(number)
        kept = {v: np.array([{ENTRY: entry, EXIT: leave, **shared}[v]]) for v in unit.kept}
        states = found[unit.model.number].assignments(np.array([row]), kept)
        return self.named(number, {v: int(s[0]) for v, s in states.items() if v >= 0})

    def named(self, number: int, states: Mapping[int, int]) -> Mapping[int, int]:
        """Turn the states of the tables of a unit into those of its own variables."""
        twins = self.decisions.twins.get(number)
        if twins is None:
            return states
        return {
            **{mine: states[other] for mine, other in twins.items()},
            **{v: states[v] for v in self.shared if v in states},
        }

    def tied_elements(self, station: int, shared: Mapping[int, int]) -> float:
        """Local elements of a tied parameter as its station hands it on."""
        states = self.parts.states(station)
        tensor = states.variable.tensor
        assert tensor is not None  # a station of a parameter
        size = self.parts.written_bytes(tensor, station)[shared[station]]
        spec = self.parts.graph.spec(tensor)
        return float(size / spec.size_bytes * spec.elements)
