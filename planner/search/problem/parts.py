"""What each state of a variable, and each pair of states that share a tensor, takes: seconds by kind, bytes, elements.

One count for every search: the objective of a whole mesh adds the parts up one way
(`planner.search.problem.problem`), the labels of pipeline units another (`planner.search.units.labels`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import stored_elements, update_traffic
from planner.graph.fusion import with_imbalance
from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.search.problem.states import Setting, States, StatesOnMesh
from planner.search.problem.variables import Decisions, Edge, Kind, Variable, once_a_step
from planner.sharding.placement import PARTIAL
from simulator.corrections import kernel_factor
from simulator.kernels import kernel_time
from simulator.program import Kernel, Phase

FloatArray = NDArray[np.float64]
Scope = tuple[int, ...]


class Parts(StatesOnMesh):
    """States and cost parts of the variables of a graph on one mesh."""

    def __init__(self, graph: OperatorGraph, decisions: Decisions, setting: Setting) -> None:
        super().__init__(graph, decisions, setting)
        self._prepared: bool | None = None
        self._worked = with_imbalance(graph, setting.expert_load).nodes

    def node(self, states: States, position: int) -> Node:
        """The `position`-th node of a variable, with what the rank does that has most to do."""
        return self._worked[states.variable.nodes[position]]

    def prepare(self, *, moves: bool) -> None:
        """Time the messages that `handing_back` sends, of all stations at once; with `moves` those of all edges too."""
        if self._prepared in (True, moves):
            return
        self._prepared = moves
        gradients = (_gradient_of(variable) for variable in self.decisions.variables if variable.kind is Kind.STATION)
        tensors = [(gradient, False) for gradient in gradients if gradient is not None]
        tensors += [(edge.tensor, self.fused(edge)) for edge in self.decisions.edges if moves]
        specs = [(self.graph.spec(tensor), fused) for tensor, fused in tensors]
        self.setting.costs.prepare([(len(spec.shape), spec.size_bytes, fused) for spec, fused in specs])

    def fused(self, edge: Edge) -> bool:
        """Whether a tensor moves once a step, in messages of many: parameters and their gradients."""
        return once_a_step(self.decisions.variables, edge)

    def handed_back(self, states: States) -> tuple[TensorRef, NDArray[np.int64], NDArray[np.int64]] | None:
        """The gradient that a station hands back, if any, with its placements as it is summed and as it is handed back.

        Both have shape (axes, states).
        """
        gradient = _gradient_of(states.variable)
        if gradient is None:
            return None
        summed = [c.rules[-1].outputs[0] if c.rules else c.reads[gradient] for c in states.variable.choices]
        return gradient, np.array(summed, dtype=np.int64)[states.choice], states.placements(gradient, reads=False)

    def elements(self, states: States) -> FloatArray:
        """Local elements of a parameter in each state, as many as its bytes make where it is stored narrower."""
        ref = TensorRef(states.variable.nodes[0])
        return self._local(1.0, states.placements(ref, reads=False)) * stored_elements(self.graph, ref)

    def update_seconds(self, states: States) -> FloatArray:
        """Seconds of the optimizer's update of the stored shard of a parameter; frozen ones have none."""
        node, hardware = states.variable.nodes[0], self.setting.costs.hardware
        if node not in self.graph.trained:
            return np.zeros(len(states))
        held, update = self.elements(states), self.setting.optimizer
        dtype = self.graph.spec(TensorRef(node)).dtype
        traffic = held * update_traffic(update, dtype)
        time = kernel_time(hardware, Kernel.OPTIMIZER, dtype, held * update.flops, traffic)
        return time * kernel_factor(hardware, Kernel.OPTIMIZER, dtype, self.setting.costs.mesh.size)

    def scatter_seconds(self, edge: Edge) -> FloatArray:
        """Seconds of a gradient's way to its shards up to its last reduce-scatter, by states of both ends."""
        spec = self.graph.spec(edge.tensor)
        rows, columns = self.ends(edge)
        return self.setting.costs.scattering(len(spec.shape), spec.size_bytes)[rows[:, None], columns[None, :]]

    def ends(self, edge: Edge) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers of the placements in which an edge's tensor is written and read, by state."""
        rank = len(self.graph.spec(edge.tensor).shape)
        return (
            self.states(edge.source).numbers(edge.tensor, rank, reads=False),
            self.states(edge.target).numbers(edge.tensor, rank, reads=True),
        )

    # Bytes

    def local_bytes(self, tensor: TensorRef, placements: NDArray[np.int64]) -> FloatArray:
        """Bytes of one rank's piece of a tensor; `placements` have shape (axes, states)."""
        return self._local(float(self.graph.spec(tensor).size_bytes), placements)

    def _local(self, whole: float, placements: NDArray[np.int64]) -> FloatArray:
        """What one rank has of a whole, by state."""
        share = np.full(placements.shape[1], whole)
        for row, size in zip(placements, self.sizes, strict=True):
            share = np.where(row >= 0, share / size, share)
        return share

    def read_bytes(self, tensor: TensorRef, number: int) -> FloatArray:
        """Bytes of a tensor as a variable reads it, by state."""
        return self.local_bytes(tensor, self.states(number).placements(tensor, reads=True))

    def written_bytes(self, tensor: TensorRef, number: int) -> FloatArray:
        """Bytes of a tensor as a variable writes it, by state."""
        return self.local_bytes(tensor, self.states(number).placements(tensor, reads=False))

    @cached_property
    def station_of(self) -> Mapping[TensorRef, int]:
        """Variables that are stations, by their tensor."""
        return stations_of(self.decisions)

    def saved_charges(
        self, tensor: TensorRef, readers: Collection[int], owner: int | None
    ) -> Iterator[tuple[Scope, FloatArray]]:
        """Bytes of keeping a tensor for the variables whose backward operators read it, as `saved_pieces` says."""
        for scope, placements, differs in self.saved_pieces(tensor, readers, owner):
            size = self.local_bytes(tensor, placements)
            yield scope, size if differs is None else differs * size[None, :]

    def saved_pieces(
        self, tensor: TensorRef, readers: Collection[int], owner: int | None
    ) -> Iterator[tuple[Scope, NDArray[np.int64], NDArray[np.bool_] | None]]:
        """Placements in which a tensor is kept for the variables whose backward operators read it.

        Charged once per placement it is kept in: to its writer `owner` where that reads it itself, else to its
        station, else to its reader; a reader in another placement than the keeper's has a copy of its own.

        Yields
        ------
        scope : tuple of int
            The variable that is charged, or the keeper and the reader.
        placements : array, shape (axes, states)
            By state of the last variable of the scope.
        differs : array, shape (states of the keeper, states of the reader), optional
            Where there is a copy.
        """
        keeper = owner if owner in readers else self.station_of.get(tensor)
        if keeper is not None:
            yield (keeper,), self.states(keeper).placements(tensor, reads=False), None
        for reader in sorted(set(readers) - {keeper, owner}):
            placements = self.states(reader).placements(tensor, reads=True)
            if keeper is None:
                yield (reader,), placements, None
            else:
                rank = len(self.graph.spec(tensor).shape)
                kept = self.states(keeper).numbers(tensor, rank, reads=False)
                read = self.states(reader).numbers(tensor, rank, reads=True)
                yield (keeper, reader), placements, kept[:, None] != read[None, :]

    @cached_property
    def saved(self) -> Mapping[TensorRef, set[int]]:
        """Forward tensors that backward operators read, with the variables of those."""
        return saved_tensors(self.graph, self.decisions)


def _gradient_of(station: Variable) -> TensorRef | None:
    """The gradient that a station hands back, if any."""
    return next((ref for ref in station.choices[0].writes if ref != station.tensor), None)


def stations_of(decisions: Decisions) -> dict[TensorRef, int]:
    """Variables that are stations, by their tensor."""
    return {v.tensor: i for i, v in enumerate(decisions.variables) if v.tensor is not None}


def has_partial(placements: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a tensor is partial along some axis; `placements` have shape (axes, states)."""
    found: NDArray[np.bool_] = (placements == PARTIAL).any(axis=0)
    return found


def saved_tensors(graph: OperatorGraph, decisions: Decisions) -> dict[TensorRef, set[int]]:
    """Forward tensors that backward operators read, with the variables of those; views count as their base."""
    nodes = graph.nodes
    found: dict[TensorRef, set[int]] = {}
    for ref, users in graph.consumers.items():
        kept = nodes[ref.node].role is Role.OPERATOR and nodes[ref.node].phase is Phase.FORWARD
        readers = {decisions.of_node[u] for u in users if nodes[u].phase is Phase.BACKWARD} - {-1}
        if kept and readers:
            found[ref] = readers
    return {ref: readers for ref, readers in found.items() if not _is_view_of(graph, ref, found)}


def _is_view_of(graph: OperatorGraph, ref: TensorRef, saved: Mapping[TensorRef, set[int]]) -> bool:
    """Whether `ref` only views a tensor that is kept anyway: another saved one, a parameter or an input."""
    while graph.nodes[ref.node].kernel is Kernel.VIEW and graph.nodes[ref.node].role is Role.OPERATOR:
        ref = graph.nodes[ref.node].tensor_inputs[0]
        if ref in saved or graph.nodes[ref.node].role is not Role.OPERATOR:
            return True
    return False
