"""All units of a network on one stage mesh: their boundary states, and the exact minimum of any weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.graph.chain import Chain, chain
from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.search.problem.context_choices import context_choices
from planner.search.problem.costs import MeshCosts
from planner.search.problem.parts import CONTEXT, Parts, has_partial, saved_tensors
from planner.search.problem.variables import Choice, Decisions, decisions
from planner.search.units.elimination import Elimination, Minima, elimination, minima
from planner.search.units.factors import PARTS, Part, UnitFactors, UnitModel, unit_factors
from planner.search.units.records import BoundaryStates, Minimum, Weights
from planner.sharding.context import Algorithm, ContextAxis, context_axis
from planner.sharding.placement import Mesh, Placements
from planner.sharding.sequence import sequence_dims
from simulator.errors import InputError, UnsupportedError
from simulator.hardware import Hardware
from simulator.program import Phase

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
ENTRY, EXIT = -1, -2
"""Variables of a unit that stand for the boundary states at its ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Codes of the recompute modes that are allowed, and what is asked of the sequence."""

    modes: tuple[int, ...]
    sequence_parallel: bool | None


class StageDecisions:
    """The chain of a graph and its decisions, with what no mesh or micro-batch changes."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.chain: Chain = chain(graph)
        _check_runs(graph, self.chain)
        self.decisions: Decisions = decisions(graph, self.chain.boundaries)
        self._costs: dict[tuple[int, Mesh, int], MeshCosts] = {}
        self._contexts: dict[Algorithm, ContextAxis] = {}

    @cached_property
    def models(self) -> tuple[UnitModel, ...]:
        """Variables and edges of each unit."""
        saved = saved_tensors(self.graph, self.decisions)
        return tuple(
            UnitModel(self.graph, self.decisions, self.chain, number, saved) for number in range(len(self.chain.units))
        )

    @cached_property
    def sequences(self) -> Mapping[TensorRef, tuple[int, ...]]:
        """Dims of tensors that grow with the sequence."""
        return sequence_dims(self.graph)

    @cached_property
    def twins(self) -> Mapping[int, Mapping[int, int]]:
        """For the number of a unit that equals the next: the variable of the next that stands for each of its own."""
        found = {}
        for number, (one, other) in enumerate(zip(self.models, self.models[1:], strict=False)):
            units = self.chain.units
            if units[number].run is not None and units[number].run == units[number + 1].run:
                same = _twins(self.decisions, one, other)
                if same is not None:
                    found[number] = same
        return found

    def context_axis(self, algorithm: Algorithm) -> ContextAxis:
        """What the network does on a context axis; raises UnsupportedError where an operator forbids one."""
        if algorithm not in self._contexts:
            self._contexts[algorithm] = context_axis(self.graph, algorithm)
        return self._contexts[algorithm]

    def context(self, mesh: Mesh, algorithm: Algorithm) -> tuple[Choice, ...]:
        """Each variable's choice on the context axis of a mesh; none without such an axis.

        Raises
        ------
        InputError
            The axis does not divide the sequence or the heads.
        UnsupportedError
            An operator cannot work on part of the sequence.
        """
        sizes = {axis.name: axis.size for axis in mesh.axes}
        if CONTEXT not in sizes:
            return ()
        axis = self.context_axis(algorithm)
        obstacle = axis.obstacle(sizes[CONTEXT], sizes.get("tensor", 1))
        if obstacle is not None:
            raise InputError(obstacle)
        return context_choices(self.decisions, axis)

    def costs(self, hardware: Hardware, mesh: Mesh, bucket_bytes: int) -> MeshCosts:
        """Times of messages on a mesh, made once."""
        key = (id(hardware), mesh, bucket_bytes)
        if key not in self._costs:
            self._costs[key] = MeshCosts(hardware, mesh, bucket_bytes)
        return self._costs[key]


def stage_decisions(graph: OperatorGraph) -> StageDecisions:
    """Prepare a folded graph for `stage_tables` at every micro-batch and on every mesh.

    Raises
    ------
    UnsupportedError
        A run's blocks cannot be cut from each other; unfold the graph.
    """
    return StageDecisions(graph)


def _check_runs(graph: OperatorGraph, cut: Chain) -> None:
    units = [u.run for u in cut.units]
    for number, run in enumerate(graph.runs):
        if units.count(number) != 2:
            raise UnsupportedError(
                f"more than one tensor goes from one block of {run.prefix!r} to the next, so that they cannot be "
                "planned one by one; unfold the graph"
            )


def _twins(made: Decisions, one: UnitModel, other: UnitModel) -> dict[int, int] | None:
    """Align the variables of two equal units; None where they offer different choices."""
    run = one.graph.runs[one.chain.units[one.number].run or 0]
    place = dict(zip(run.first, run.second, strict=True))
    stations = {v.tensor: n for n, v in enumerate(made.variables) if v.tensor is not None}
    found: dict[int, int] = {}
    for number in one.variables:
        variable = made.variables[number]
        if variable.tensor is not None:
            twin = stations.get(TensorRef(place[variable.tensor.node], variable.tensor.output), -1)
        else:
            twin = made.of_node[place.get(variable.nodes[0], variable.nodes[0])]
        found[number] = twin
    for here, there in ((one.entry, other.entry), (one.exit, other.exit)):
        if (here is None) != (there is None):
            return None
        if here is not None and there is not None:
            found[here] = there
    covers = set(found.values()) >= set(other.variables) and one.shared == other.shared
    same = (_offers(made, n, n == one.exit) == _offers(made, t, n == one.exit) for n, t in found.items() if t >= 0)
    return found if covers and min(found.values()) >= 0 and all(same) else None


def _offers(made: Decisions, number: int, leaves: bool) -> list[tuple[object, ...]]:
    """Choices of a variable without what its nodes are called; of the station a unit leaves by, what it hands on."""
    return [
        tuple(c.writes.values()) if leaves else (c.rules, tuple(c.reads.values()), tuple(c.writes.values()))
        for c in made.variables[number].choices
    ]


@dataclass(frozen=True, eq=False)
class Tabled:
    """One unit's tables with the boundary states at its ends, ready to be minimised.

    ``kept`` are the shared stations and the ends there are.
    """

    model: UnitModel
    factors: UnitFactors
    plan: Elimination
    kept: tuple[int, ...]
    sizes: Mapping[int, int]
    ends: tuple[NDArray[np.float64], ...]

    def minima(self, rows: FloatArray) -> Minima:
        """Minimise for each row of weights, shape (weightings, PARTS)."""
        tables = self.factors.weighted(rows)
        tables += [np.broadcast_to(table, (len(rows), *table.shape)) for table in self.ends]
        return minima(self.plan, tables, tuple(self.sizes[v] for v in self.kept))

    def spread(self, table: FloatArray, shared: Sequence[int]) -> FloatArray:
        """Bring a table to shape (weightings, states of all shared stations, entries, exits)."""
        shape = [table.shape[0]]
        shape += [self.sizes[v] if v in self.kept else 1 for v in (*shared, ENTRY, EXIT)]
        return table.reshape(shape)


class Stage:
    """The units of a network on one mesh."""

    def __init__(self, source: StageDecisions, parts: Parts, options: StageOptions) -> None:
        self.source, self.parts, self.options = source, parts, options
        self._sequence_sharded: dict[int, NDArray[np.bool_]] = {}
        self.chain = source.chain
        stations = [parts.station_of[b.forward] for b in self.chain.boundaries]
        self.stations = tuple(stations)
        self.shared = tuple(sorted({v for model in source.models for v in model.shared}))
        self.classes = self._classes()
        self.boundaries = tuple(self._boundary(b) for b in range(len(stations)))
        self.barred = self._barred()
        self._units: dict[int, Tabled] = {}

    def unit(self, number: int) -> Tabled:
        """Tables of a unit; the first block of a run has the second's where they are equal."""
        number = number + 1 if number in self.source.twins else number
        if number not in self._units:
            self._units[number] = self._tabled(number)
        return self._units[number]

    def _tabled(self, number: int) -> Tabled:
        model = self.source.models[number]
        factors = unit_factors(model, self.parts, self.barred)
        sizes = dict(factors.sizes)
        scopes, ends, kept = list(factors.scopes), [], list(model.shared)
        for station, end, boundary in ((model.entry, ENTRY, number - 1), (model.exit, EXIT, number)):
            if station is None:
                continue
            numbers = self.classes[boundary][1]
            sizes[end] = len(self.classes[boundary][0])
            match = numbers[:, None] == np.arange(sizes[end])[None, :]
            scopes.append((station, end))
            ends.append(np.where(match, 0.0, np.inf))
            kept.append(end)
        plan = elimination(tuple(scopes), tuple(sorted(sizes.items())), tuple(kept))
        return Tabled(model, factors, plan, tuple(kept), sizes, tuple(ends))

    # Boundary states

    def _classes(self) -> list[tuple[list[tuple[Placements, Placements]], IntArray]]:
        """Placements in which each boundary tensor and its gradient may cross, and the number of those by state.

        Nothing crosses as partial sums. The boundaries of a run of equal blocks have the same states.
        """
        keys = [self._crossings(b) for b in range(len(self.stations))]
        allowed = [list(dict.fromkeys(k for k in row if k is not None)) for row in keys]
        units = self.chain.units
        for _ in range(len(self.source.graph.runs) + 1):
            for number, unit in enumerate(units[:-1]):
                if unit.run is not None and unit.run == units[number + 1].run:
                    around = [b for b in (number - 1, number, number + 1) if 0 <= b < len(allowed)]
                    common = [k for k in allowed[number] if all(k in allowed[b] for b in around)]
                    for b in around:
                        allowed[b] = common
        for boundary, states in enumerate(allowed):
            if not states:
                raise self._no_states(boundary)
        return [
            (states, np.array([states.index(k) if k in states else len(states) for k in row], dtype=np.int64))
            for states, row in zip(allowed, keys, strict=True)
        ]

    def _crossings(self, boundary: int) -> list[tuple[Placements, Placements] | None]:
        tensor = self.chain.boundaries[boundary].forward
        states = self.parts.states(self.stations[boundary])
        forward = states.placements(tensor, reads=False)
        back_ref = next((r for r in states.variable.choices[0].writes if r != tensor), None)
        back = forward if back_ref is None else states.placements(back_ref, reads=False)
        possible = ~(has_partial(forward) | has_partial(back))
        wanted = self._sequence_wanted(tensor, forward)
        return [
            (tuple(map(int, f)), tuple(map(int, b))) if ok and want else None
            for f, b, ok, want in zip(forward.T, back.T, possible, wanted, strict=True)
        ]

    def _sequence_wanted(self, tensor: TensorRef, placed: IntArray) -> NDArray[np.bool_]:
        everything = np.ones(placed.shape[1], dtype=np.bool_)
        axis = self._tensor_axis
        dims = self.source.sequences.get(tensor, ())
        if self.options.sequence_parallel is not True or axis is None or not dims:
            return everything
        return np.asarray(np.isin(placed[axis], dims))

    @property
    def _tensor_axis(self) -> int | None:
        names, sizes = self.parts.names, self.parts.sizes
        return next((i for i, n in enumerate(names) if n == "tensor" and sizes[i] > 1), None)

    def _no_states(self, boundary: int) -> InputError:
        shape = self.parts.graph.spec(self.chain.boundaries[boundary].forward).shape
        return InputError(
            f"a boundary tensor of shape {shape} cannot be sharded along the sequence over "
            f"{self.parts.sizes[self._tensor_axis or 0]} ranks; choose a tensor degree that divides the sequence, or "
            "leave sequence parallelism free"
        )

    def _boundary(self, number: int) -> BoundaryStates:
        crossing = self.chain.boundaries[number]
        forward = tuple(f for f, _ in self.classes[number][0])
        backward = tuple(b for _, b in self.classes[number][0])

        def sent(ref: TensorRef, placed: Sequence[Placements]) -> FloatArray:
            return self.parts.local_bytes(
                ref, np.array(placed, dtype=np.int64).T.reshape(len(self.parts.sizes), len(placed))
            )

        nothing = np.zeros(len(forward))
        back = sent(crossing.gradient, backward) if crossing.gradient and backward else nothing
        return BoundaryStates(
            forward=forward, backward=backward, forward_bytes=sent(crossing.forward, forward), backward_bytes=back
        )

    # Sequence parallelism

    def sequence_sharded(self, number: int) -> NDArray[np.bool_]:
        """States of a variable in which a forward activation is sharded along the sequence on the tensor axis."""
        if number not in self._sequence_sharded:
            self._sequence_sharded[number] = self._find_sequence_sharded(number)
        return self._sequence_sharded[number]

    def _find_sequence_sharded(self, number: int) -> NDArray[np.bool_]:
        states = self.parts.states(number)
        found = np.zeros(len(states), dtype=np.bool_)
        axis = self._tensor_axis
        if axis is None:
            return found
        first = states.variable.choices[0]
        for reads, ports in ((True, first.reads), (False, first.writes)):
            for ref in ports:
                node = self.source.graph.nodes[ref.node]
                dims = self.source.sequences.get(ref, ())
                if dims and node.phase is Phase.FORWARD and node.role is Role.OPERATOR:
                    found |= np.isin(states.placements(ref, reads=reads)[axis], dims)
        return found

    def _barred(self) -> dict[int, NDArray[np.bool_]]:
        if self.options.sequence_parallel is not False:
            return {}
        return {v: self.sequence_sharded(v) for v in range(len(self.source.decisions.variables))}

    # Minima

    def rows(self, weights: Weights) -> FloatArray:
        """Weights of all parts, a row for each allowed recompute mode."""
        rows = np.zeros((len(self.options.modes), PARTS))
        for row, mode in zip(rows, self.options.modes, strict=True):
            row[Part.FORWARD] = weights.forward
            row[[Part.BACKWARD, Part.AGAIN + mode]] = weights.backward
            row[Part.STEP] = weights.step
            row[Part.ELEMENTS] = weights.parameter_element
            row[Part.EXPERT_ELEMENTS] = weights.expert_element
            row[Part.KEPT + mode] = weights.activation_byte
        return rows

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

    def matrices(self, weights: Weights, mode: int | None, shared: Mapping[int, int] | None) -> tuple[FloatArray, ...]:
        """Least weighted sum of each unit (entries, exits); tied parameters in the given state, or in any."""
        rows = self.rows(weights)
        if mode is not None:
            rows = rows[[self.options.modes.index(mode)]]
        result = []
        for table in self.tables(rows)[0]:
            least = table.min(axis=0)
            for station in self.shared:
                place = 0 if shared is None or least.shape[0] == 1 else shared[station]
                least = least.min(axis=0) if shared is None else least[place]
            result.append(least)
        return tuple(result)

    def minimum(self, weights: Weights) -> Minimum:
        """Minimise over the whole chain, by min-plus products with the way back."""
        rows = self.rows(weights)
        tables, found = self.tables(rows)
        shape = tuple(len(self.parts.states(v)) for v in self.shared)
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
        shared = dict(zip(self.shared, np.unravel_index(common, shape), strict=True)) if shape else {}
        chosen = [int(modes[n][common, e, x]) for n, e, x in zip(self.chain.positions, entries, exits, strict=True)]
        made: dict[tuple[int, int, int, int], Mapping[int, int]] = {}
        states = {v: int(s) for v, s in shared.items()}
        keys = list(zip(self.chain.positions, chosen, entries, exits, strict=True))
        for key in keys:
            if key not in made:
                made[key] = self._assignment(key, found, states)
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
        twins = self.source.twins.get(number)
        if twins is None:
            return states
        return {
            **{mine: states[other] for mine, other in twins.items()},
            **{v: states[v] for v in self.shared if v in states},
        }

    def best_shared(self) -> Mapping[int, int]:
        """States of the stations of tied parameters that serve a plain training step best."""
        if not self.shared:
            return {}
        best = self.minimum(Weights(step=1 / 32)).assignments
        found: dict[int, int] = {}
        for states in best:
            found.update({v: states[v] for v in self.shared if v in states})
        return found

    def tied_elements(self, station: int, shared: Mapping[int, int]) -> float:
        """Local elements of a tied parameter as its station hands it on."""
        states = self.parts.states(station)
        tensor = states.variable.tensor
        assert tensor is not None  # a station of a parameter
        size = self.parts.written_bytes(tensor, station)[shared[station]]
        spec = self.parts.graph.spec(tensor)
        return float(size / spec.size_bytes * spec.elements)
