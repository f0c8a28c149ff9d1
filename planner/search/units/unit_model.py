"""What of a graph's decisions belongs to one unit of its chain: the same for every mesh and micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from planner.cost.work import in_halves
from planner.graph.chain import Chain
from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.graph.recompute import MODES, recomputed
from planner.search.problem.parts import stations_of
from planner.search.problem.variables import Decisions, Edge, Move
from simulator.launches import launches_of
from simulator.program import Kernel, Phase


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
        self.late = self._late(before.gradient if before else None)
        backward = (i for i in self.nodes - self.late if graph.nodes[i].phase is Phase.BACKWARD)
        self.halved = frozenset(i for i in backward if in_halves(graph.nodes[i]))
        """Backward operators of whose halves schedules may put one off."""
        self.again = {mode: self._again(mode) for mode in MODES}
        self.saved = self._saved(saved)
        behind_readers = saved.get(self.exit_tensor, ()) if self.exit_tensor else ()
        self.read_behind = bool(set(behind_readers) - {*self.variables, self.entry, *self.shared})

    @cached_property
    def launches(self) -> tuple[int, tuple[int, ...]]:
        """Launches of the host forward, and backward in each mode of `MODES`."""
        return self._launches(chained=False)

    @cached_property
    def chained_launches(self) -> tuple[int, tuple[int, ...]]:
        """`launches` where chains of kernels are launched once."""
        return self._launches(chained=True)

    def _launches(self, *, chained: bool) -> tuple[int, tuple[int, ...]]:
        both = (Phase.FORWARD, Phase.BACKWARD)
        passes = ([i for i in sorted(self.nodes) if self.graph.nodes[i].phase is phase] for phase in both)
        forward, backward = (launches_of(self._kernels(nodes), chained=chained) for nodes in passes)
        again = (launches_of(self._kernels(sorted(self.again[mode].nodes)), chained=chained) for mode in MODES)
        return forward, tuple(backward + more for more in again)

    def _kernels(self, nodes: Iterable[int]) -> Iterator[Kernel]:
        """Kernels of nodes: one, and one more for the casts of a product's factors."""
        for index in nodes:
            node = self.graph.nodes[index]
            if node.role in (Role.OPERATOR, Role.GRADIENT_SUM):
                yield from (Kernel.ELEMENTWISE, node.timed_as) if node.product_dtype else (node.timed_as,)

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

    def _edges(self) -> tuple[tuple[Edge, Move], ...]:
        """Edges of the unit, each with what its tensor's way is on any mesh (`Decisions.moves`)."""
        members = {*self.variables, self.entry, self.exit, *self.shared} - {None}
        inner = set(self.variables)
        found = []
        for edge, move in zip(self.decisions.edges, self.decisions.moves, strict=True):
            one, other = edge.source, edge.target
            inside = one in inner or other in inner or {one, other} == {self.entry, self.exit}
            if inside and one in members and other in members:
                found.append((edge, move))
        return tuple(found)

    def _late(self, sent_back: TensorRef | None) -> frozenset[int]:
        """Backward operators that do not lead to the gradient sent back: schedules may put them off."""
        needed = {sent_back.node} if sent_back else set()
        late = set()
        for index in sorted(self.nodes, reverse=True):
            node = self.graph.nodes[index]
            if node.phase is Phase.BACKWARD and node.role in (Role.OPERATOR, Role.GRADIENT_SUM):
                if index in needed:
                    needed.update(ref.node for ref in node.tensor_inputs)
                else:
                    late.add(index)
        return frozenset(late)

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
                    self.copies.extend(
                        (base, ref, self.stations.get(ref, self.decisions.of_node[ref.node]), number)
                        for ref, number in path
                    )

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

    def kept(self, mode: str) -> Iterator[TensorRef]:
        """Forward tensors that wait for the backward pass where the unit computes again."""
        again = self.again[mode]
        for ref in again.readers:
            node = self.graph.nodes[ref.node]
            made_here = ref.node in self.nodes and node.role is Role.OPERATOR and node.kernel is not Kernel.VIEW
            if ref == self.entry_tensor or (made_here and ref.node not in again.nodes):
                yield ref
