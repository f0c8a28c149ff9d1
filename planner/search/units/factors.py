"""The cost parts of one unit as tables over its variables: seconds, bytes and elements by kind and recompute mode."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.graph.chain import Chain
from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.graph.recompute import MODES, recomputed
from planner.search.problem.parts import Parts, States, has_partial, stations_of
from planner.search.problem.variables import Decisions, Edge, Kind
from planner.sharding.placement import REPLICATE
from planner.sharding.redistribution import placement_index
from simulator.program import Kernel, Phase

FloatArray = NDArray[np.float64]
Scope = tuple[int, ...]


class Part(IntEnum):
    """What the tables count; of recomputation and memory there is one part for each mode of `MODES`."""

    FORWARD = 0
    BACKWARD = 1
    FORWARD_COMMUNICATION = 2
    BACKWARD_COMMUNICATION = 3
    STEP = 4
    ELEMENTS = 5
    EXPERT_ELEMENTS = 6
    AGAIN = 7
    AGAIN_COMMUNICATION = 10
    KEPT = 13
    TRANSIENT = 16


PARTS = 19


@dataclass(frozen=True, eq=False)
class UnitFactors:
    """Tables of one unit, one behind the other.

    ``parts`` has shape (PARTS, entries of all tables) and ``forbidden`` (entries of all tables,). Table s has a dim
    for each variable of ``scopes[s]`` and begins at ``starts[s]``.
    """

    sizes: Mapping[int, int]
    scopes: tuple[Scope, ...]
    starts: tuple[int, ...]
    parts: FloatArray
    forbidden: NDArray[np.bool_]

    def weighted(self, weights: FloatArray) -> list[FloatArray]:
        """Each table's weighted sums, shapes (weightings, states …); `weights` has shape (weightings, PARTS)."""
        total = weights @ self.parts
        total[:, self.forbidden] = np.inf
        ends = (*self.starts[1:], total.shape[1])
        return [
            total[:, start:end].reshape(-1, *(self.sizes[v] for v in scope))
            for scope, start, end in zip(self.scopes, self.starts, ends, strict=True)
        ]

    def evaluate(self, states: Mapping[int, NDArray[np.int64]]) -> FloatArray:
        """Add up the parts of many assignments; each variable has an array of states of shape (n,).

        Returns an array of shape (PARTS, n).
        """
        places = []
        for scope, start in zip(self.scopes, self.starts, strict=True):
            index = np.zeros_like(states[scope[0]])
            for v in scope:
                index = index * self.sizes[v] + states[v]
            places.append(index + start)
        return np.asarray(self.parts[:, np.array(places)].sum(axis=1), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Again:
    """What runs again in one mode: ``nodes``, and the variables that do or whose backward operators wait for it."""

    nodes: frozenset[int]
    readers: Mapping[TensorRef, frozenset[int]] = field(default_factory=dict)


class UnitModel:
    """What of a graph's decisions belongs to one unit; the same for every mesh and micro-batch.

    ``entry`` and ``exit`` are the stations of the boundaries, None at the ends of the network; ``shared`` those of
    parameters that other units read, too.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        decisions: Decisions,
        chain: Chain,
        number: int,
        saved: Mapping[TensorRef, Collection[int]],
    ) -> None:
        self.graph, self.decisions = graph, decisions
        self.chain, self.number = chain, number
        self.nodes = frozenset(chain.units[number].nodes)
        self.stations = stations = stations_of(decisions)
        self.copies: list[tuple[TensorRef, TensorRef, int, int]] = []
        before = chain.boundaries[number - 1] if number else None
        behind = chain.boundaries[number] if number < len(chain.boundaries) else None
        self.entry_tensor = before.forward if before else None
        self.exit_tensor = behind.forward if behind else None
        self.entry = stations[before.forward] if before else None
        self.exit = stations[behind.forward] if behind else None
        self.shared = self._shared(stations)
        self.variables = self._variables()
        self.edges = self._edges()
        self.again = {mode: self._again(mode) for mode in MODES}
        self.saved = self._saved(saved)
        behind_readers = saved.get(self.exit_tensor, ()) if self.exit_tensor else ()
        self.read_behind = bool(set(behind_readers) - {*self.variables, self.entry, *self.shared})

    def _owners(self, node: int) -> int:
        return sum(node in unit.nodes for unit in self.chain.units)

    def _shared(self, stations: Mapping[TensorRef, int]) -> tuple[int, ...]:
        tied = (i for i in sorted(self.nodes) if self.graph.nodes[i].role is Role.PARAMETER and self._owners(i) > 1)
        return tuple(stations[TensorRef(i)] for i in tied if TensorRef(i) in stations)

    @cached_property
    def first(self) -> frozenset[int]:
        """Shared stations whose parameter counts in this unit, the first that reads it."""
        earlier = {i for unit in self.chain.units[: self.number] for i in unit.nodes}
        refs = {v: self.decisions.variables[v].tensor for v in self.shared}
        return frozenset(v for v, ref in refs.items() if ref is not None and ref.node not in earlier)

    def _variables(self) -> tuple[int, ...]:
        """Variables of the unit, without the stations of its boundaries and those of shared parameters."""
        ends = {self.entry, self.exit, *self.shared}
        counted = {self.decisions.variables[v].tensor for v in self.first}
        found = set()
        for number, variable in enumerate(self.decisions.variables):
            if number in ends:
                continue
            node = variable.nodes[0] if variable.tensor is None else variable.tensor.node
            tied = TensorRef(node) in {self.decisions.variables[v].tensor for v in self.shared}
            if node in self.nodes and (not tied or TensorRef(node) in counted):
                found.add(number)
        return tuple(sorted(found))

    def _edges(self) -> tuple[Edge, ...]:
        members = {*self.variables, self.entry, self.exit, *self.shared} - {None}
        inner = set(self.variables)
        found = []
        for edge in self.decisions.edges:
            ends = {edge.source, edge.target}
            if ends <= members and (ends & inner or ends == {self.entry, self.exit}):
                found.append(edge)
        return tuple(found)

    def _again(self, mode: str) -> Again:
        nodes = frozenset(recomputed(self.graph, self.nodes, mode))
        readers: dict[TensorRef, set[int]] = {}
        for index in sorted(self.nodes):
            node = self.graph.nodes[index]
            if index in nodes or (node.phase is Phase.BACKWARD and node.role is Role.OPERATOR):
                for ref in node.tensor_inputs:
                    if self.graph.nodes[ref.node].phase is Phase.FORWARD:
                        readers.setdefault(ref, set()).add(self.decisions.of_node[index])
        return Again(nodes, {ref: frozenset(found - {-1}) for ref, found in readers.items()})

    def _saved(self, saved: Mapping[TensorRef, Collection[int]]) -> Mapping[TensorRef, frozenset[int]]:
        """Tensors that this unit keeps for its own backward operators, with the variables of those."""
        own = {*self.variables, *self.shared, *(() if self.entry is None else (self.entry,))}
        found = {}
        for ref, readers in saved.items():
            mine = frozenset(own.intersection(readers))
            if mine and (ref == self.entry_tensor or ref.node in self.nodes):
                found[ref] = mine
        found = self._shared_bases(found)
        self._copies_of_views(found)
        return found

    def _shared_bases(self, saved: dict[TensorRef, frozenset[int]]) -> dict[TensorRef, frozenset[int]]:
        """Let several views of one tensor be kept as that tensor."""
        views: dict[TensorRef, list[TensorRef]] = {}
        for ref in saved:
            base, hops = self._viewed(ref, saved)
            if hops and base not in saved and base in self.stations:
                views.setdefault(base, []).append(ref)
        dropped = {ref for refs in views.values() if len(refs) > 1 for ref in refs}
        found = {ref: readers for ref, readers in saved.items() if ref not in dropped}
        found.update({base: frozenset() for base, refs in views.items() if len(refs) > 1})
        return found

    def _copies_of_views(self, saved: Mapping[TensorRef, frozenset[int]]) -> None:
        """List where views of kept tensors that backward operators read may be moved to another placement."""
        for index in sorted(self.nodes):
            node = self.graph.nodes[index]
            if node.kernel is not Kernel.VIEW or node.phase is Phase.BACKWARD or TensorRef(index) in saved:
                continue
            users = (u for u in self.graph.consumers.get(TensorRef(index), ()) if u in self.nodes)
            readers = {self.decisions.of_node[u] for u in users if self.graph.nodes[u].phase is Phase.BACKWARD}
            base, hops = self._viewed(TensorRef(index), saved)
            if base in saved and hops:
                for reader in sorted(readers - {-1}):
                    path = (*hops, (TensorRef(index), reader))
                    self.copies.extend((base, ref, self._writer(ref), number) for ref, number in path)

    def _viewed(
        self, ref: TensorRef, saved: Mapping[TensorRef, object]
    ) -> tuple[TensorRef, list[tuple[TensorRef, int]]]:
        """What a view is of, back to a kept tensor, and the tensors on the way with the views that read them."""
        hops: list[tuple[TensorRef, int]] = []
        while ref.node in self.nodes and self.graph.nodes[ref.node].kernel is Kernel.VIEW:
            source = self.graph.nodes[ref.node]
            if source.role is not Role.OPERATOR or not source.tensor_inputs:
                break
            hops.insert(0, (source.tensor_inputs[0], self.decisions.of_node[ref.node]))
            ref = source.tensor_inputs[0]
            if ref in saved:
                break
        return ref, hops

    def _writer(self, ref: TensorRef) -> int:
        return self.stations.get(ref, self.decisions.of_node[ref.node])

    def kept(self, mode: str) -> Iterator[TensorRef]:
        """Forward tensors that wait for the backward pass where the unit computes again."""
        again = self.again[mode]
        for ref in again.readers:
            node = self.graph.nodes[ref.node]
            made_here = ref.node in self.nodes and node.role is Role.OPERATOR and node.kernel is not Kernel.VIEW
            if ref == self.entry_tensor or (made_here and ref.node not in again.nodes):
                yield ref


def unit_factors(model: UnitModel, parts: Parts, barred: Mapping[int, NDArray[np.bool_]] | None = None) -> UnitFactors:
    """Count the parts of one unit on one mesh; ``barred`` marks states of variables that are not to be taken."""
    builder = _Builder(model, parts)
    for number, states in (barred or {}).items():
        builder.bar(number, states)
    return builder.build()


class _Builder:
    def __init__(self, model: UnitModel, parts: Parts) -> None:
        self.model, self.parts = model, parts
        self.tables: dict[Scope, FloatArray] = {}
        self.forbidden: dict[Scope, NDArray[np.bool_]] = {}
        ends = [v for v in (model.entry, model.exit) if v is not None]
        self.members = (*model.variables, *ends, *model.shared)
        self.sizes = {v: len(parts.states(v)) for v in self.members}

    def build(self) -> UnitFactors:
        model = self.model
        self.parts.prepare(model.edges)
        for number in self.members:
            self._table((number,))
        for number in (*model.variables, *sorted(model.first)):
            self._variable(number)
        if model.entry is not None:
            self._variable(model.entry)
        for edge in model.edges:
            self._edge(edge)
        self._keep_all()
        for mode in (1, 2):
            self._keep_some(mode)
        flat = [table.reshape(PARTS, -1) for table in self.tables.values()]
        starts = np.cumsum([0, *(table.shape[1] for table in flat)])
        forbidden = np.zeros(starts[-1], dtype=np.bool_)
        for scope, start in zip(self.tables, starts, strict=False):
            if scope in self.forbidden:
                forbidden[start : start + self.forbidden[scope].size] = self.forbidden[scope].ravel()
        return UnitFactors(
            sizes=self.sizes,
            scopes=tuple(self.tables),
            starts=tuple(int(start) for start in starts[:-1]),
            parts=np.concatenate(flat, axis=1),
            forbidden=forbidden,
        )

    def _table(self, scope: Scope) -> FloatArray:
        if scope not in self.tables:
            self.tables[scope] = np.zeros((PARTS, *(self.sizes[v] for v in scope)))
        return self.tables[scope]

    def _charge(self, part: int, scope: Scope, amount: FloatArray) -> None:
        """Add to one part; pairs are stored with the lower variable first, and none is made up of unread states."""
        if len(scope) == 2 and scope[0] > scope[1]:
            scope, amount = scope[::-1], amount.T
        if len(scope) == 1 or scope in self.tables:
            self._table(scope)[part] += amount

    def _variable(self, number: int) -> None:
        states = self.parts.states(number)
        variable, table = states.variable, self._table((number,))
        if variable.kind is Kind.INPUT:
            return
        if variable.kind is Kind.PARAMETER:
            part = self._elements_part(states)
            table[Part.ELEMENTS] += np.where(part, 0.0, self.parts.elements(states))
            table[Part.EXPERT_ELEMENTS] += np.where(part, self.parts.elements(states), 0.0)
            return
        for position, index in enumerate(variable.nodes):
            seconds = self.parts.node_seconds(states, position)
            forward = self.model.graph.nodes[index].phase is Phase.FORWARD
            table[Part.FORWARD if forward else Part.BACKWARD] += seconds.total
            table[Part.FORWARD_COMMUNICATION if forward else Part.BACKWARD_COMMUNICATION] += seconds.communication
            for mode, name in enumerate(MODES):
                if index in self.model.again[name].nodes:
                    table[Part.AGAIN + mode] += seconds.total
                    table[Part.AGAIN_COMMUNICATION + mode] += seconds.communication
        if variable.kind is Kind.STATION:
            back = self.parts.handing_back(states)
            self._forbid((number,), ~np.isfinite(back))
            back = np.where(np.isfinite(back), back, 0.0)
            table[Part.BACKWARD] += back
            table[Part.BACKWARD_COMMUNICATION] += back

    def _elements_part(self, states: States) -> NDArray[np.bool_]:
        """States in which the expert axis shards a parameter."""
        placed = states.placements(TensorRef(states.variable.nodes[0]), reads=False)
        found = np.zeros(len(states), dtype=np.bool_)
        for name, row in zip(self.parts.names, placed, strict=True):
            found |= (row != REPLICATE) & (name == "expert")
        return found

    def _forbid(self, scope: Scope, where: NDArray[np.bool_]) -> None:
        if where.any():
            before = self.forbidden.get(scope)
            self.forbidden[scope] = where if before is None else before | where

    def bar(self, number: int, states: NDArray[np.bool_]) -> None:
        """Forbid states of a variable, unless that leaves none."""
        if number in self.sizes and not states.all():
            self._forbid((number,), states)

    def _edge(self, edge: Edge) -> None:
        seconds = self.parts.move_seconds(edge)
        scope = (edge.source, edge.target)
        turned = scope if scope[0] < scope[1] else scope[::-1]
        impossible = ~np.isfinite(seconds)
        self._table(turned)
        self._forbid(turned, impossible if turned == scope else impossible.T)
        seconds = np.where(impossible, 0.0, seconds)
        if self.parts.fused(edge):
            self._charge(Part.STEP, scope, seconds)
            return
        node = self.model.graph.nodes[edge.tensor.node]
        if node.phase is Phase.BACKWARD:
            self._charge(Part.BACKWARD, scope, seconds)
            self._charge(Part.BACKWARD_COMMUNICATION, scope, seconds)
            return
        self._charge(Part.FORWARD, scope, seconds)
        self._charge(Part.FORWARD_COMMUNICATION, scope, seconds)
        for mode in (1, 2):
            again = self._moved_again(edge, mode)
            if again is not None:
                self._charge(Part.AGAIN + mode, scope, seconds * again)
                self._charge(Part.AGAIN_COMMUNICATION + mode, scope, seconds * again)

    def _moved_again(self, edge: Edge, mode: int) -> FloatArray | None:
        """Where a forward tensor is moved again: a column over the writer's states, None where it never is.

        What is kept waits as its operator wrote it, partial sums once they are added up.
        """
        again = self.model.again[MODES[mode]]
        readers = again.readers.get(edge.tensor, frozenset[int]())
        if self.model.graph.nodes[edge.tensor.node].role is not Role.OPERATOR:
            return None
        to_station = self.parts.station_of.get(edge.tensor) == edge.target
        if not (readers if to_station else edge.target in readers):
            return None
        whole = np.ones((self.sizes[edge.source], 1))
        from_station = self.parts.station_of.get(edge.tensor) == edge.source
        if edge.tensor.node in again.nodes or from_station:
            return whole
        written = self.parts.states(edge.source).placements(edge.tensor, reads=False)
        return whole * ~has_partial(written)[:, None]

    def _keep_all(self) -> None:
        """Charge what is kept without recomputation; what another mode computes again stands for a while there."""
        model = self.model
        for ref, readers in model.saved.items():
            owner = model.decisions.of_node[ref.node] if ref != model.entry_tensor else None
            owner = owner if owner in self.sizes else None
            charges = list(self.parts.saved_charges(ref, readers, owner))
            if ref == model.exit_tensor and model.read_behind and model.exit is not None and owner is not None:
                # The next unit keeps it too: it counts here where that keeps it in another placement.
                there, here = self._numbers(ref, model.exit), self._numbers(ref, owner)
                size = self.parts.written_bytes(ref, owner)
                charges = [((owner, model.exit), (here[:, None] != there[None, :]) * size[:, None])]
            for scope, size in charges:
                self._keep(ref, scope, size)
        for base, ref, writer, reader in dict.fromkeys(model.copies):
            if writer not in self.sizes or reader not in self.sizes or writer == reader:
                continue
            # A view that is moved again after it was taken stands beside what it views.
            here, there = self._numbers(ref, writer), self._numbers(ref, reader, reads=True)
            size = (here[:, None] != there[None, :]) * self.parts.read_bytes(ref, reader)[None, :]
            self._keep(base, (writer, reader), size)

    def _keep(self, ref: TensorRef, scope: Scope, size: FloatArray) -> None:
        """Charge bytes of a tensor that is kept, and that stands for a while where it is computed again instead."""
        self._charge(Part.KEPT, scope, size)
        for mode in (1, 2):
            if ref.node in self.model.again[MODES[mode]].nodes and ref != self.model.entry_tensor:
                self._charge(Part.TRANSIENT + mode, scope, size)

    def _numbers(self, ref: TensorRef, number: int, *, reads: bool = False) -> NDArray[np.int64]:
        placed = self.parts.states(number).placements(ref, reads=reads)
        return placement_index(placed, len(self.model.graph.spec(ref).shape))

    def _keep_some(self, mode: int) -> None:
        """Charge what waits for the backward pass in a mode that computes again."""
        model, stations = self.model, self.parts.station_of
        for ref in model.kept(MODES[mode]):
            station = stations.get(ref)
            if ref == model.entry_tensor:
                assert station is not None  # every boundary has one
                self._charge(Part.KEPT + mode, (station,), self.parts.written_bytes(ref, station))
                continue
            owner = model.decisions.of_node[ref.node]
            readers = sorted(model.again[MODES[mode]].readers[ref])
            written = self.parts.written_bytes(ref, owner)
            if owner in readers or not readers or (station is None and len(readers) > 1):
                self._charge(Part.KEPT + mode, (owner,), written)
                continue
            reader = readers[0] if station is None else station
            read = self.parts.read_bytes(ref, reader)
            partial = has_partial(self.parts.states(owner).placements(ref, reads=False))
            self._charge(Part.KEPT + mode, (owner, reader), np.where(partial[:, None], read[None, :], written[:, None]))
