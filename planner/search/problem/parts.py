"""What each state of a variable, and each pair of states that share a tensor, takes: seconds by kind, bytes, elements.

One count for every search: the objective of a whole mesh adds the parts up one way
(`planner.search.problem.problem`), the labels of pipeline units another (`planner.search.units.labels`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import cast_bytes, stored_elements, traffic_bytes, update_traffic
from planner.graph.fusion import with_imbalance
from planner.graph.kernel_shapes import kernel_shape, local_kernel
from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.search.problem.states import Setting, States, StatesOnMesh
from planner.search.problem.variables import Decisions, Edge, Kind, Variable, masks, once_a_step
from planner.sharding.inner_messages import inner_messages, message_bytes, summing, waiting_time
from planner.sharding.placement import PARTIAL
from planner.sharding.redistribution import placement_index
from planner.sharding.rule_notation import InnerMessage
from simulator.corrections import kernel_factor
from simulator.kernels import has_shape_model, kernel_time, shaped_time
from simulator.program import SUMMED_CLASS, Kernel, Phase

FloatArray = NDArray[np.float64]
Scope = tuple[int, ...]
Messages = Sequence[tuple[int, InnerMessage]]
"""Collectives inside an operator, each with the number of the choice that sends it."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a micro-batch, arrays of one shape: all of them, and the communication among them."""

    total: FloatArray
    communication: FloatArray


class Parts:
    """States and cost parts of the variables of a graph on one mesh."""

    def __init__(self, graph: OperatorGraph, decisions: Decisions, setting: Setting) -> None:
        self.graph = graph
        self.decisions = decisions
        self.setting = setting
        self._states = StatesOnMesh(graph, decisions, setting)
        self.sizes, self.names = self._states.sizes, self._states.names
        self._prepared: bool | None = None
        self._worked = with_imbalance(graph, setting.expert_load).nodes

    def node(self, states: States, position: int) -> Node:
        """The `position`-th node of a variable, with what the rank does that has most to do."""
        return self._worked[states.variable.nodes[position]]

    def states(self, number: int) -> States:
        """States of one variable: a choice along each axis, as far as every dim divides."""
        return self._states.of(number)

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

    def shares(self, states: States, placements: Sequence[int]) -> FloatArray:
        """Part of a tensor that is local in each state; `placements` are those of each choice.

        Most operators of a variable read and write tensors that are cut alike.
        """
        key: tuple[str | bool | int, ...] = ("local", *placements)
        if key not in states.known:
            cut = np.array(placements, dtype=np.int64) >= 0
            share = np.ones(len(states))
            for row, size in zip(states.choice, self._axes(), strict=True):
                share = np.where(cut[row], share / size, share)
            share.setflags(write=False)
            states.known[key] = share
        found: FloatArray = states.known[key]
        return found

    def _axes(self) -> Sequence[int | NDArray[np.int64]]:
        """Ranks along each axis; of several meshes at once by state."""
        return self.sizes

    def node_seconds(self, states: States, position: int) -> Seconds:
        """Seconds of the `position`-th node of a variable in each state, with the collectives inside it."""
        key = ("seconds", position)
        if key not in states.known:
            states.known[key] = self._node_seconds(states, position)
        found: Seconds = states.known[key]
        return found

    def _node_seconds(self, states: States, position: int) -> Seconds:
        node = self.node(states, position)
        hardware, choices = self.setting.costs.hardware, states.variable.choices
        work = np.ones(len(states))
        splits = np.array([c.rules[position].splits_work for c in choices])
        for row, size in zip(states.choice, self._axes(), strict=True):
            work = np.where(splits[row], work / size, work)
        ports = [[c.rules[position].inputs[i] for c in choices] for i in range(len(node.tensor_inputs))]
        ports += [[c.rules[position].outputs[i] for c in choices] for i in range(len(node.outputs))]
        shares = [self.shares(states, codes) for codes in ports]
        dtype = node.kernel_dtype
        moved, flops = traffic_bytes(self.graph, node, shares), node.flops * work
        ran = node.timed_as
        shape = kernel_shape(self.graph, node) if has_shape_model(hardware, ran) else None
        if shape is None:
            time = kernel_time(hardware, ran, dtype, flops, moved)
        else:
            first, second, result = (shares[port] for port in shape.ports)
            local = local_kernel(ran, shape.sizes, (first, second, result), work)
            time = shaped_time(hardware, ran, dtype, local, flops, moved)
        time = time * self._factor(ran, dtype)
        if ran in SUMMED_CLASS:
            kernel, summed = SUMMED_CLASS[ran], summing([c.rules[position] for c in choices])
            others = kernel_time(hardware, kernel, dtype, flops, moved) * self._factor(kernel, dtype)
            time = np.where(summed[states.choice].any(axis=0), others, time)
        if node.product_dtype:
            narrow = cast_bytes(self.graph, node, shares)
            wide = node.outputs[0].dtype
            cast_s = kernel_time(hardware, Kernel.ELEMENTWISE, wide, np.zeros_like(narrow), narrow)
            time = time + cast_s * self._factor(Kernel.ELEMENTWISE, wide)
        messages = [(n, m) for n, c in enumerate(choices) for m in inner_messages(c.rules[position])]
        inside = self._inside(states, messages, node, shares, time) if messages else np.zeros(len(states))
        return Seconds(time + inside, inside)

    def _inside(
        self, states: States, messages: Messages, node: Node, shares: Sequence[FloatArray], work_s: FloatArray
    ) -> FloatArray:
        """Seconds an operator waits for its inner collectives."""
        inside = np.zeros(len(states))
        for number, message in messages:
            for axis, size in enumerate(self.sizes):
                payload = message_bytes(self.graph, node, message, shares, size)
                sent = self.setting.costs.message_time(message.collective, axis, np.maximum(payload, 1.0))
                chosen = (states.choice[axis] == number) & (payload > 0)
                inside += np.where(chosen, waiting_time(message, size, sent, work_s), 0.0)
        return inside

    def _factor(self, kernel: Kernel, dtype: str) -> float:
        return kernel_factor(self.setting.costs.hardware, kernel, dtype, self.setting.costs.mesh.size)

    def handing_back(self, states: States) -> FloatArray:
        """Seconds in which a station turns the summed gradient into the placement it is handed back in."""
        gradient = _gradient_of(states.variable)
        if gradient is None:
            return np.zeros(len(states))
        summed = [c.rules[-1].outputs[0] if c.rules else c.reads[gradient] for c in states.variable.choices]
        before = np.array(summed, dtype=np.int64)[states.choice]
        spec = self.graph.spec(gradient)
        rank = len(spec.shape)
        table = self.setting.costs.redistribution(rank, spec.size_bytes, fused=False, masks=False)
        after = states.placements(gradient, reads=False)
        return table[placement_index(before, rank), placement_index(after, rank)]

    def elements(self, states: States) -> FloatArray:
        """Local elements of a parameter in each state, as many as its bytes make where it is stored narrower."""
        ref = TensorRef(states.variable.nodes[0])
        held = stored_elements(self.graph, ref)
        return self.shares(states, [c.writes[ref] for c in states.variable.choices]) * held

    def update_seconds(self, states: States) -> FloatArray:
        """Seconds of the optimizer's update of the stored shard of a parameter; frozen ones have none."""
        if states.variable.nodes[0] not in self.graph.trained:
            return np.zeros(len(states))
        if ("update",) not in states.known:
            states.known["update",] = self._update_seconds(states)
        found: FloatArray = states.known["update",]
        return found

    def _update_seconds(self, states: States) -> FloatArray:
        held, update = self.elements(states), self.setting.optimizer
        dtype = self.graph.spec(TensorRef(states.variable.nodes[0])).dtype
        time = kernel_time(
            self.setting.costs.hardware,
            Kernel.OPTIMIZER,
            dtype,
            held * update.flops,
            held * update_traffic(update, dtype),
        )
        return time * self._factor(Kernel.OPTIMIZER, dtype)

    def move_seconds(self, edge: Edge) -> FloatArray:
        """Seconds of moving a tensor from each state of its writer to each of its reader, infinite where impossible."""
        spec = self.graph.spec(edge.tensor)
        masked = masks(self.decisions.variables, edge)
        table = self.setting.costs.redistribution(
            len(spec.shape), spec.size_bytes, fused=self.fused(edge), masks=masked
        )
        rows, columns = self.ends(edge)
        return table[rows[:, None], columns[None, :]]

    def scatter_seconds(self, edge: Edge) -> FloatArray:
        """Seconds of a gradient's way to its shards up to its last reduce-scatter, by states as `move_seconds`."""
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
        share = np.full(placements.shape[1], float(self.graph.spec(tensor).size_bytes))
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
