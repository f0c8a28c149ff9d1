"""What of a stage its axes' sizes decide: the states of its variables and boundaries, and the order of elimination."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.search.exact.blocks import TooWideError
from planner.search.problem.parts import Parts, has_partial
from planner.search.problem.states import Setting, States
from planner.search.problem.variables import Variable
from planner.search.units.elimination import Elimination, Minima, elimination, lowest, minima
from planner.search.units.records import Scope
from planner.search.units.stage_decisions import StageDecisions
from planner.search.units.transient import FlightSizes
from planner.sharding.placement import Placements
from simulator.errors import InputError
from simulator.program import Phase

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
WIDEST = 2**19
"""Entries of the largest table that orders the variables of a unit, and placements of all tied parameters together."""
ENTRY, EXIT = -1, -2
"""Variables of a unit that stand for the boundary states at its ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Codes of the recompute modes that are allowed, and what is asked of the sequence."""

    modes: tuple[int, ...]
    sequence_parallel: bool | None


class KeptParts(Parts):
    """Parts of a mesh on which some states of a wider one are possible; ``kept`` are those of each kind of variable."""

    def __init__(self, wider: Parts, graph: OperatorGraph, setting: Setting, kept: Mapping[int, IntArray]) -> None:
        super().__init__(graph, wider.decisions, setting)
        self.wider, self.kept = wider, kept
        self._made: dict[int, States] = {}
        self._of_kind: dict[int, States] = {}

    def states(self, number: int) -> States:
        """States of one variable, numbered as on any mesh of these sizes."""
        if number not in self._made:
            whole = self.wider.states(number)
            if whole.kind not in self._of_kind:
                self._of_kind[whole.kind] = States(whole.variable, whole.choice[:, self.kept[whole.kind]], whole.kind)
            first = self._of_kind[whole.kind]
            self._made[number] = States(whole.variable, first.choice, first.kind, first.known)
        return self._made[number]


@dataclass(frozen=True, slots=True, eq=False)
class UnitShape:
    """How one unit is minimised: its variables' states, those it keeps, and what ties stations to boundary states.

    ``alone`` says that there is but one assignment. What has the same ``form`` is the same but for the numbers of
    variables, whose order it keeps.
    """

    plan: Elimination
    kept: tuple[int, ...]
    sizes: Mapping[int, int]
    ends: tuple[FloatArray, ...]
    alone: bool
    form: tuple[object, ...]
    _spread: dict[int, list[FloatArray]] = field(default_factory=dict)

    def minima(self, sums: FloatArray, starts: Sequence[int]) -> Minima:
        """Minimise sums of tables that lie behind each other and begin at `starts`, shape (entries, weightings)."""
        if self.alone:
            return Minima(self._only(sums), (), self.plan.single)
        return minima(self.plan, self._tables(sums, starts), self._left)

    def lowest(self, sums: FloatArray, starts: Sequence[int]) -> FloatArray:
        """The least sums alone, shape (weightings, states of what is kept …)."""
        return self._only(sums) if self.alone else lowest(self.plan, self._tables(sums, starts), self._left)

    def _only(self, sums: FloatArray) -> FloatArray:
        """The sums of the only assignment, added up one after the other as in any elimination."""
        return np.asarray(sums.cumsum(axis=0)[-1].reshape(-1, *(1 for _ in self.kept)))

    @property
    def _left(self) -> tuple[int, ...]:
        return tuple(self.sizes[v] for v in self.kept)

    def _tables(self, sums: FloatArray, starts: Sequence[int]) -> list[FloatArray]:
        count = sums.shape[-1]
        if count not in self._spread:
            self._spread[count] = [np.broadcast_to(end.reshape(-1, 1), (end.size, count)) for end in self.ends]
        tables = [sums[start:end] for start, end in zip(starts, (*starts[1:], len(sums)), strict=True)]
        return [*tables, *self._spread[count]]

    def spread(self, table: FloatArray, shared: Iterable[int]) -> FloatArray:
        """Bring a table to shape (weightings, states of all shared stations, entries, exits)."""
        shape = [self.sizes[v] if v in self.kept else 1 for v in (*shared, ENTRY, EXIT)]
        return table.reshape(len(table), *shape)


class StageShape:
    """States of the variables and boundaries of a stage.

    Parameters
    ----------
    parts : Parts
        Gives the states; its graph the shapes that must divide.
    """

    def __init__(self, source: StageDecisions, parts: Parts, options: StageOptions) -> None:
        self.source, self.parts, self.options = source, parts, options
        self.chain = source.chain
        self.stations = tuple(parts.station_of[b.forward] for b in self.chain.boundaries)
        self._barred: dict[int, BoolArray] = {}
        self._units: dict[int, UnitShape] = {}
        self._flights: dict[int, FlightSizes] = {}
        self.classes = self._classes()

    def unit(self, number: int, scopes: Iterable[Scope], sizes: Mapping[int, int]) -> UnitShape:
        """Order the variables of a unit whose tables are given."""
        if number not in self._units:
            self._units[number] = self._unit(number, [*scopes], dict(sizes))
        return self._units[number]

    def _unit(self, number: int, scopes: list[Scope], sizes: dict[int, int]) -> UnitShape:
        model = self.source.models[number]
        ends, kept = [], list(model.shared)
        for station, end, boundary in ((model.entry, ENTRY, number - 1), (model.exit, EXIT, number)):
            if station is None:
                continue
            numbers = self.classes[boundary][1]
            sizes[end] = len(self.classes[boundary][0])
            match = numbers[:, None] == np.arange(sizes[end])[None, :]
            scopes.append((station, end))
            ends.append(np.where(match, 0.0, np.inf))
            kept.append(end)
        plan = elimination(scopes, sizes, tuple(kept))
        if plan.largest > WIDEST:
            raise TooWideError(
                f"{self.chain.units[number].name!r} is too densely connected to be tabled where "
                f"{' and '.join(self.parts.names)} axes cut it: there pipelines, recomputation and sharded states are "
                "bounded, not searched; --pin tp=1 leaves all of them"
            )
        alone = max(sizes.values()) == 1 and not any(end.any() for end in ends)
        form = (plan.pattern, *kept, *(end.tobytes() for end in ends))
        return UnitShape(plan, tuple(kept), sizes, tuple(ends), alone, form)

    def parts_at(self, graph: OperatorGraph, setting: Setting) -> Parts:
        """Parts of a stage of this shape."""
        if not isinstance(self.parts, KeptParts):
            return Parts(graph, self.parts.decisions, setting)
        return KeptParts(self.parts.wider, graph, setting, self.parts.kept)

    def flight(self, number: int) -> FlightSizes:
        """What stands while a unit goes backward."""
        if number not in self._flights:
            self._flights[number] = FlightSizes(self.source.flight(number), self.parts)
        return self._flights[number]

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
            (tuple(f), tuple(b)) if ok and want else None
            for f, b, ok, want in zip(forward.T.tolist(), back.T.tolist(), possible, wanted, strict=True)
        ]

    def _sequence_wanted(self, tensor: TensorRef, placed: IntArray) -> BoolArray:
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
        graph = self.parts.graph
        shape = graph.spec(self.chain.boundaries[boundary].forward).shape
        return InputError(
            f"a boundary tensor of shape {shape} (for {graph.batch_size} samples) cannot be sharded along the sequence "
            f"over {self.parts.sizes[self._tensor_axis or 0]} ranks; choose a tensor degree that divides the sequence, "
            "or leave sequence parallelism free"
        )

    # Sequence parallelism

    def shards_sequence(self, assignment: Mapping[int, int]) -> bool:
        """Whether states of variables shard a forward activation along the sequence on the tensor axis."""
        axis = self._tensor_axis
        if axis is None or not self.source.sequences:
            return False
        for number, state in assignment.items():
            states = self.parts.states(number)
            choice = states.choice[axis, state]
            if any(placed[choice] in dims for placed, dims in self._along_sequence(states.variable)):
                return True
        return False

    def sequence_sharded(self, number: int) -> BoolArray:
        """States of a variable in which a forward activation is sharded along the sequence on the tensor axis."""
        states, axis = self.parts.states(number), self._tensor_axis
        found = np.zeros(len(states), dtype=np.bool_)
        if axis is None or not self.source.sequences:
            return found
        for placed, dims in self._along_sequence(states.variable):
            found |= np.isin(placed, dims)[states.choice[axis]]
        return found

    def _along_sequence(self, variable: Variable) -> Iterator[tuple[IntArray, tuple[int, ...]]]:
        """Placements, by choice, of forward activations that a variable reads or writes, and dims with the sequence."""
        for ports in (variable.read, variable.written):
            for ref, placed in ports.items():
                node = self.source.graph.nodes[ref.node]
                dims = self.source.sequences.get(ref, ())
                if dims and node.phase is Phase.FORWARD and node.role is Role.OPERATOR:
                    yield placed, dims

    @property
    def bars(self) -> bool:
        """Whether there are states that are not to be taken."""
        return self.options.sequence_parallel is False

    def barred(self, number: int) -> BoolArray:
        """States of a variable that are not to be taken, unless that leaves none."""
        if number not in self._barred:
            states = self.sequence_sharded(number) if self.bars else np.zeros(len(self.parts.states(number)), np.bool_)
            self._barred[number] = states & ~states.all()
        return self._barred[number]

    def crosses(self) -> dict[int, BoolArray]:
        """States of the stations of boundaries that may cross these."""
        return {v: c[1] < len(c[0]) for v, c in zip(self.stations, self.classes, strict=True)}


def divisibility(parts: Parts, kinds: Mapping[int, int]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """What must divide in each state of a wide mesh: place of the state, extent, its growth, and mask of the axes.

    ``kinds`` give for one variable of each kind the place of its first state. Arrays have shape (conditions,).
    """
    placed, first, specs = [], [], []
    for number, start in kinds.items():
        states = parts.states(number)
        choice = states.variable.choices[0]
        for reads, ports in ((True, choice.reads), (False, choice.writes)):
            for ref in ports:
                placed.append(states.placements(ref, reads=reads))
                first.append(start)
                specs.append(parts.graph.spec(ref))
    rank = max((len(spec.shape) for spec in specs), default=0)
    shapes = np.array([(*spec.shape, *(1,) * (rank - len(spec.shape))) for spec in specs], dtype=np.int64)
    growing = np.array([(*spec.batch_dims, *(False,) * (rank - len(spec.shape))) for spec in specs], dtype=np.int64)
    lengths = np.array([each.shape[1] for each in placed], dtype=np.int64)
    tensor = np.repeat(np.arange(len(specs)), lengths)
    begins = np.array(first, dtype=np.int64) - (lengths.cumsum() - lengths)
    place = np.arange(len(tensor), dtype=np.int64) + begins.take(tensor)
    every = np.concatenate([np.zeros((len(parts.sizes), 0), dtype=np.int64), *placed], axis=1)
    axis, column = (every >= 0).nonzero()
    dims, tensor = every[axis, column], tensor[column]
    masks = (1 << np.arange(len(every), dtype=np.int64)) @ (every[:, column] == dims)
    return np.asarray(place[column], dtype=np.int64), shapes[tensor, dims], growing[tensor, dims], masks


def ways_of_masks(sizes: tuple[int, ...]) -> IntArray:
    """In how many pieces the axes of each mask cut a dim."""
    masks = range(1 << len(sizes))
    return np.array([prod(s for a, s in enumerate(sizes) if mask >> a & 1) for mask in masks], dtype=np.int64)
