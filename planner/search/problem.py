"""The search problem: minimise a sum of times over the strategies of every operator, under a memory limit.

The objective is additive. For one optimizer step with M micro-batches it adds up, per device:

* M × kernel time of every operator on its local tensors, forward and backward;
* M × the collectives inside operators (synchronised batch norm);
* M × the redistribution of every tensor between the placement it is written in and those it is read in;
* once, the redistribution of parameters before use and of gradients after (in fused messages);
* once, the optimizer's update of the stored shard.

On the data axis an operator may take any strategy; on the tensor axis it shards anything but the batch,
so that the degrees mean what they say. Nothing is overlapped; the simulator, which re-scores the best
plans, knows overlap, and what messages of two axes cost each other on links that they share: its step may
be longer than the objective. Memory adds up the stored parameters with their optimizer states, gathered
copies, gradient accumulators and what the forward pass saves for the backward one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import DTYPE_BYTES, Node, OperatorGraph, Role, TensorRef
from planner.request import ParameterStorage
from planner.search.costs import MeshCosts
from planner.search.variables import Choice, Decisions, Edge, Kind, Variable, masks
from planner.sharding.placement import REPLICATE
from planner.sharding.redistribution import placement_index
from planner.work import Optimizer, product_shape, state_bytes, traffic_bytes, update_traffic
from simulator.corrections import kernel_factor
from simulator.kernels import kernel_time, matmul_time
from simulator.program import Collective, Kernel, Phase

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is fixed for one search: mesh times, micro-batches, optimizer and restrictions.

    ``storage`` says how parameters lie along the data axis between steps; ``batch_only`` allows nothing
    but batch dims to be sharded, and shards those wherever it can (pure data parallelism).
    """

    costs: MeshCosts
    micro_batches: int
    optimizer: Optimizer
    storage: ParameterStorage = "free"
    batch_only: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds and bytes of each state, arrays of one shape."""

    time: FloatArray
    memory: FloatArray


@dataclass(frozen=True, slots=True)
class States:
    """The states of a variable: ``choice[a, s]`` is the choice along mesh axis a in state s."""

    variable: Variable
    choice: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.choice.shape[1])

    def placements(self, tensor: TensorRef, *, reads: bool) -> NDArray[np.int64]:
        """Placements of a tensor in every state, shape (axes, states)."""
        codes = np.array([(c.reads if reads else c.writes)[tensor] for c in self.variable.choices], dtype=np.int64)
        return codes[self.choice]


class Problem:
    """Cost tables of every variable and every pair of variables that share a tensor."""

    def __init__(self, graph: OperatorGraph, decisions: Decisions, setting: Setting) -> None:
        self.graph = graph
        self.decisions = decisions
        self.setting = setting
        self.sizes = setting.costs.mesh.sizes
        self.states = tuple(self._states(v) for v in decisions.variables)
        self._prepare_messages()
        self.unary = tuple(self._unary(s) for s in self.states)
        self.pairs = self._pairs()
        self._add_saved()

    # States

    def _states(self, variable: Variable) -> States:
        axes = len(self.sizes)
        count = len(variable.choices)
        choice = np.indices((count,) * axes).reshape(axes, -1) if axes else np.zeros((0, 1), dtype=np.int64)
        states = States(variable, choice)
        keep = np.ones(choice.shape[1], dtype=np.bool_)
        first = variable.choices[0]
        for reads, ports in ((True, first.reads), (False, first.writes)):
            for tensor in ports:
                keep &= self._divides(tensor, states.placements(tensor, reads=reads))
        wanted = keep & self._allowed(states)
        return States(variable, choice[:, wanted if wanted.any() else keep])

    def _divides(self, tensor: TensorRef, placements: NDArray[np.int64]) -> NDArray[np.bool_]:
        spec = self.graph.spec(tensor)
        keep = np.ones(placements.shape[1], dtype=np.bool_)
        for dim, (size, batch) in enumerate(zip(spec.shape, spec.batch_dims, strict=True)):
            ways = np.ones(placements.shape[1], dtype=np.int64)
            for axis, row in enumerate(placements):
                sharded = row == dim
                ways = np.where(sharded, ways * self.sizes[axis], ways)
                if batch and self.setting.costs.mesh.axes[axis].name == "tensor":
                    keep &= ~sharded
            keep &= size % ways == 0
            if self.setting.batch_only and not batch:
                keep &= ways == 1
        return keep

    def _allowed(self, states: States) -> NDArray[np.bool_]:
        keep = np.ones(states.choice.shape[1], dtype=np.bool_)
        kind = states.variable.kind
        names = [a.name for a in self.setting.costs.mesh.axes]
        if kind is Kind.INPUT:
            placed = states.placements(TensorRef(states.variable.nodes[0]), reads=False)
            for name, row in zip(names, placed, strict=True):
                keep &= row == (0 if name == "data" else REPLICATE)
        if self.setting.batch_only and "data" in names:
            keep &= self._splits_batch(states, names.index("data"))
        if kind is Kind.PARAMETER and self.setting.storage != "free" and "data" in names:
            placed = states.placements(TensorRef(states.variable.nodes[0]), reads=False)
            sharded = placed[names.index("data")] != REPLICATE
            keep &= ~sharded if self.setting.storage == "replicated" else sharded
        return keep

    def _splits_batch(self, states: States, axis: int) -> NDArray[np.bool_]:
        """Whether every tensor with a batch dim is sharded there on mesh axis `axis`, in each state."""
        keep = np.ones(len(states), dtype=np.bool_)
        first = states.variable.choices[0]
        for reads, ports in ((True, first.reads), (False, first.writes)):
            for tensor in ports:
                batch = [dim for dim, grows in enumerate(self.graph.spec(tensor).batch_dims) if grows]
                if batch:
                    keep &= np.isin(states.placements(tensor, reads=reads)[axis], batch)
        return keep

    # Time

    def _fused(self, edge: Edge) -> bool:
        ends = (self.decisions.variables[edge.source], self.decisions.variables[edge.target])
        return any(v.kind is Kind.PARAMETER for v in ends)

    def _prepare_messages(self) -> None:
        keys = []
        for edge in self.decisions.edges:
            spec = self.graph.spec(edge.tensor)
            keys.append((len(spec.shape), spec.size_bytes, self._fused(edge)))
        self.setting.costs.prepare(keys)

    def _shares(self, states: States, placements: Sequence[int]) -> FloatArray:
        """Part of a tensor that is local in each state; `placements` are those of each choice."""
        codes = np.array(placements, dtype=np.int64)
        share = np.ones(len(states))
        for axis, size in enumerate(self.sizes):
            share = np.where(codes[states.choice[axis]] >= 0, share / size, share)
        return share

    def _unary(self, states: States) -> Cost:
        time = np.zeros(len(states))
        memory = np.zeros(len(states))
        variable = states.variable
        if variable.kind is Kind.PARAMETER:
            return self._parameter_cost(states)
        if variable.kind is not Kind.INPUT:
            for position, index in enumerate(variable.nodes):
                time = time + self._node_time(states, position, self.graph.nodes[index])
        if variable.kind is Kind.STATION:
            time = time + self._station_time(states)
        return Cost(time * self.setting.micro_batches, memory)

    def _parameter_cost(self, states: States) -> Cost:
        ref = TensorRef(states.variable.nodes[0])
        spec = self.graph.spec(ref)
        held = self._shares(states, [c.writes[ref] for c in states.variable.choices]) * spec.elements
        update = self.setting.optimizer
        time = kernel_time(
            self.setting.costs.hardware,
            Kernel.OPTIMIZER,
            spec.dtype,
            held * update.flops,
            held * update_traffic(update, spec.dtype),
        )
        factor = self._factor(Kernel.OPTIMIZER, spec.dtype)
        return Cost(time * factor, held * (DTYPE_BYTES[spec.dtype] + state_bytes(update, spec.dtype)))

    def _node_time(self, states: States, position: int, node: Node) -> FloatArray:
        """Seconds of one node in each state, with the collectives inside it."""
        hardware, choices = self.setting.costs.hardware, states.variable.choices
        work = np.ones(len(states))
        inside = np.zeros(len(states))
        splits = np.array([c.rules[position].splits_work for c in choices])
        reduced = np.array([c.rules[position].reduced_elements for c in choices], dtype=np.float64)
        for axis, size in enumerate(self.sizes):
            work = np.where(splits[states.choice[axis]], work / size, work)
            if reduced.any():
                payload = reduced[states.choice[axis]] * DTYPE_BYTES[node.outputs[0].dtype]
                message = self.setting.costs.message_time(Collective.ALL_REDUCE, axis, np.maximum(payload, 1.0))
                inside += np.where(payload > 0, message, 0.0)
        ports = [[c.rules[position].inputs[i] for c in choices] for i in range(len(node.tensor_inputs))]
        ports += [[c.rules[position].outputs[i] for c in choices] for i in range(len(node.outputs))]
        shares = [self._shares(states, codes) for codes in ports]
        moved = traffic_bytes(self.graph, node, shares)
        dtype = node.outputs[0].dtype
        product = product_shape(self.graph, node, shares, work) if hardware.matmul_models else None
        if product is None:
            time = kernel_time(hardware, node.kernel, dtype, node.flops * work, moved)
        else:
            batch, m, n, k = product
            time = matmul_time(hardware, dtype, m, n, k, batch)
        return time * self._factor(node.kernel, dtype) + inside

    def _factor(self, kernel: Kernel, dtype: str) -> float:
        return kernel_factor(self.setting.costs.hardware, kernel, dtype, self.setting.costs.mesh.size)

    def _station_time(self, states: States) -> FloatArray:
        """Seconds of turning the summed gradient into the placement it is handed back in."""
        tensor = states.variable.tensor
        gradient = next((r for r in states.variable.choices[0].writes if r != tensor), None)
        if gradient is None:
            return np.zeros(len(states))
        summed = [c.rules[-1].outputs[0] if c.rules else c.reads[gradient] for c in states.variable.choices]
        codes = np.array(summed, dtype=np.int64)[states.choice]
        return self._moves(gradient, codes, states.placements(gradient, reads=False))

    def _moves(self, tensor: TensorRef, before: NDArray[np.int64], after: NDArray[np.int64]) -> FloatArray:
        spec = self.graph.spec(tensor)
        rank = len(spec.shape)
        table = self.setting.costs.redistribution(rank, spec.size_bytes, fused=False, masks=False)
        return table[placement_index(before, rank), placement_index(after, rank)]

    def _pairs(self) -> dict[tuple[int, int], Cost]:
        pairs: dict[tuple[int, int], Cost] = {}
        for edge in self.decisions.edges:
            cost = self._edge_cost(edge)
            key = (min(edge.source, edge.target), max(edge.source, edge.target))
            if edge.source > edge.target:
                cost = Cost(cost.time.T, cost.memory.T)
            if key in pairs:
                cost = Cost(pairs[key].time + cost.time, pairs[key].memory + cost.memory)
            pairs[key] = cost
        return pairs

    def _edge_cost(self, edge: Edge) -> Cost:
        spec = self.graph.spec(edge.tensor)
        rank = len(spec.shape)
        source, target = self.states[edge.source], self.states[edge.target]
        written = source.placements(edge.tensor, reads=False)
        read = target.placements(edge.tensor, reads=True)
        fused = self._fused(edge)
        table = self.setting.costs.redistribution(
            rank, spec.size_bytes, fused=fused, masks=masks(self.decisions.variables, edge)
        )
        rows, columns = placement_index(written, rank), placement_index(read, rank)
        time = table[rows[:, None], columns[None, :]]
        if not fused:
            return Cost(time * self.setting.micro_batches, np.zeros_like(time))
        memory = np.zeros_like(time)
        if source.variable.kind is Kind.PARAMETER:
            moved = rows[:, None] != columns[None, :]
            memory += moved * self._local_bytes(edge.tensor, read)[None, :]
        elif self.setting.micro_batches > 1:
            memory += self._local_bytes(edge.tensor, written)[:, None]
        return Cost(time, memory)

    def _local_bytes(self, tensor: TensorRef, placements: NDArray[np.int64]) -> FloatArray:
        share = np.full(placements.shape[1], float(self.graph.spec(tensor).size_bytes))
        for row, size in zip(placements, self.sizes, strict=True):
            share = np.where(row >= 0, share / size, share)
        return share

    # Memory saved for the backward pass

    def _add_saved(self) -> None:
        """Charge each saved tensor once per placement it is kept in."""
        unary = [c.memory.copy() for c in self.unary]
        stations = {v.tensor: i for i, v in enumerate(self.decisions.variables) if v.kind is Kind.STATION}
        for tensor, readers in self._saved.items():
            owner = self.decisions.of_node[tensor.node]
            keeper = owner if owner in readers else stations.get(tensor)
            if keeper is not None:
                kept = self.states[keeper].placements(tensor, reads=False)
                unary[keeper] += self._local_bytes(tensor, kept)
            for reader in readers - {keeper, owner}:
                read = self.states[reader].placements(tensor, reads=True)
                size = self._local_bytes(tensor, read)
                if keeper is None:
                    unary[reader] += size
                else:
                    self._charge_copy(tensor, keeper, reader, size)
        self.unary = tuple(Cost(c.time, m) for c, m in zip(self.unary, unary, strict=True))

    def _charge_copy(self, tensor: TensorRef, keeper: int, reader: int, size: FloatArray) -> None:
        rank = len(self.graph.spec(tensor).shape)
        kept = placement_index(self.states[keeper].placements(tensor, reads=False), rank)
        read = placement_index(self.states[reader].placements(tensor, reads=True), rank)
        extra = (kept[:, None] != read[None, :]) * size[None, :]
        key = (min(keeper, reader), max(keeper, reader))
        if key in self.pairs:
            pair = self.pairs[key]
            self.pairs[key] = Cost(pair.time, pair.memory + (extra if keeper < reader else extra.T))

    @cached_property
    def _saved(self) -> Mapping[TensorRef, set[int]]:
        """Forward tensors that backward operators read, with the variables of those; views count as their base."""
        nodes = self.graph.nodes
        found: dict[TensorRef, set[int]] = {}
        for ref, users in self.graph.consumers.items():
            kept = nodes[ref.node].role is Role.OPERATOR and nodes[ref.node].phase is Phase.FORWARD
            readers = {self.decisions.of_node[u] for u in users if nodes[u].phase is Phase.BACKWARD} - {-1}
            if kept and readers:
                found[ref] = readers
        return {ref: readers for ref, readers in found.items() if not self._is_view_of(ref, found)}

    def _is_view_of(self, ref: TensorRef, saved: Mapping[TensorRef, set[int]]) -> bool:
        """Whether `ref` only views a tensor that is kept anyway: another saved one, a parameter or an input."""
        while self.graph.nodes[ref.node].kernel is Kernel.VIEW and self.graph.nodes[ref.node].role is Role.OPERATOR:
            ref = self.graph.nodes[ref.node].tensor_inputs[0]
            if ref in saved or self.graph.nodes[ref.node].role is not Role.OPERATOR:
                return True
        return False


def choices_of(problem: Problem, variable: int, state: int) -> tuple[Choice, ...]:
    """The choice along each mesh axis in one state of one variable."""
    states = problem.states[variable]
    return tuple(states.variable.choices[i] for i in states.choice[:, state])
