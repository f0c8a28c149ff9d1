"""The search problem: minimise a sum of times over the strategies of every operator, under a memory limit.

The objective is additive. For one optimizer step with M micro-batches it adds up, per device:

* M × kernel time of every operator on its local tensors, forward and backward;
* M × the collectives inside operators (synchronised batch norm);
* M × the redistribution of every tensor between the placement it is written in and those it is read in;
* once, the redistribution of parameters before use and of gradients after (in fused messages); where gradients are
  accumulated in shards, M × the part of their way that scatters them;
* once, the optimizer's update of the stored shard.

On the data axis an operator may take any strategy; on the tensor axis it shards anything but the batch,
so that the degrees mean what they say. Nothing is overlapped; the simulator, which re-scores the best
plans, knows overlap, and what messages of two axes cost each other on links that they share: its step may
be longer than the objective. Memory adds up the stored parameters with their optimizer states, gathered
copies, gradient accumulators and what the forward pass saves for the backward one.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import state_bytes, trained_dtype
from planner.graph.folding import block_index, template_name
from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph, Run, TensorRef
from planner.plans.plan import LayerRules, NodeRules
from planner.search.problem.amounts import AmountLedger, MeshCase
from planner.search.problem.parts import Parts
from planner.search.problem.states import Setting, States
from planner.search.problem.variables import Choice, Decisions, Edge, Kind
from planner.sharding.redistribution import placement_index

__all__ = ["Cost", "Problem", "Setting", "States", "choices_of"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds and bytes of each state, arrays of one shape."""

    time: FloatArray
    memory: FloatArray


class Work(NamedTuple):
    """Seconds (states,) of operators in a micro-batch, or of an update; ``kernels`` are those without messages."""

    time: FloatArray
    kernels: FloatArray


class Problem:
    """Cost tables of every variable and every pair of variables that share a tensor.

    `parts` are those of the same graph, decisions and setting, where some of them are known already.
    """

    def __init__(
        self, graph: OperatorGraph, decisions: Decisions, setting: Setting, parts: Parts | None = None
    ) -> None:
        self.graph = graph
        self.decisions = decisions
        self.setting = setting
        self.parts = parts or Parts(graph, decisions, setting)
        self.parts.prepare(moves=False)
        self.sizes = self.parts.sizes
        self.states = tuple(self.parts.states(number) for number in range(len(decisions.variables)))
        alike = {s.kind: s for s in self.states}
        self._work = self._worked(alike)
        unary = {kind: self._unary(states) for kind, states in alike.items()}
        self._alone = tuple(unary[s.kind] for s in self.states)

    @property
    def least_work_s(self) -> float:
        """Seconds that no plan is faster than: each operator in its fastest state, and nothing sent between them."""
        times, variables = self.graph.multiplicity, self.decisions.variables
        return float(
            sum(
                cost.time.min() * (times[variable.nodes[0]] if variable.nodes else 1)
                for cost, variable in zip(self._alone, variables, strict=True)
            )
        )

    @property
    def least_kernels_s(self) -> float:
        """`least_work_s` without messages inside operators: updates, and kernels in the state that computes least."""
        times = self.graph.multiplicity
        return sum(
            self._step_s(states, self._work[states.kind].kernels.min())
            * (times[variable.nodes[0]] if variable.nodes else 1)
            for states, variable in zip(self.states, self.decisions.variables, strict=True)
        )

    def _step_s(self, states: States, seconds: float) -> float:
        """Seconds of a step of a variable's kernels, which run for every micro-batch, or of its update."""
        return float(seconds if states.variable.kind is Kind.PARAMETER else self.setting.micro_batches * seconds)

    def parts_s(self, assignments: Iterable[Mapping[int, int]]) -> tuple[float, float]:
        """Seconds of kernels and of updates in an objective; each of the assignments gives variables their states."""
        seconds = {True: 0.0, False: 0.0}
        known: dict[tuple[int, int], tuple[bool, float]] = {}
        for number, state in ((n, s) for given in assignments for n, s in given.items()):
            states = self.states[number]
            if states.variable.kind is Kind.PARAMETER and states.variable.nodes[0] not in self.graph.trained:
                continue
            key = states.kind, state
            if key not in known:
                known[key] = states.variable.kind is Kind.PARAMETER, float(self._work[states.kind].kernels[state])
            updates, own = known[key]
            seconds[updates] += own
        return self.setting.micro_batches * seconds[False], seconds[True]

    def _worked(self, alike: Mapping[int, States]) -> dict[int, Work]:
        """Work of the variables of each kind, whose operators are timed together."""
        ledger, coded = AmountLedger(self.parts), dict[int, list[tuple[NDArray[np.int64], NDArray[np.int64]]]]()
        for kind, states in alike.items():
            operators = () if states.variable.kind in (Kind.PARAMETER, Kind.INPUT) else states.variable.nodes
            coded[kind] = [ledger.seconds(states, position) for position in range(len(operators))]
        amounts = ledger.amounts()
        values, found = amounts.values([MeshCase(self.setting.costs, self.graph.batch_size)])[0], dict[int, Work]()
        for kind, states in alike.items():
            time, kernels = np.zeros((2, len(states)))
            if states.variable.kind is Kind.PARAMETER:
                time = kernels = self.parts.update_seconds(states)
            for all_of_it, inside in coded[kind]:
                seconds, waits = values[amounts.numbers(all_of_it)], values[amounts.numbers(inside)]
                time, kernels = time + seconds, kernels + (seconds - waits)
            found[kind] = Work(time, kernels)
        return found

    @cached_property
    def unary(self) -> tuple[Cost, ...]:
        """Costs of each variable by its own states."""
        return self._tables[0]

    @cached_property
    def pairs(self) -> dict[tuple[int, int], Cost]:
        """Costs of pairs of variables, the lower number first, by the states of both."""
        return self._tables[1]

    @cached_property
    def _tables(self) -> tuple[tuple[Cost, ...], dict[tuple[int, int], Cost]]:
        self.parts.prepare(moves=True)
        pairs = self._pairs()
        return self._with_saved(pairs), pairs

    def _unary(self, states: States) -> Cost:
        time, variable = self._work[states.kind].time, states.variable
        if variable.kind is Kind.PARAMETER:
            trained = variable.nodes[0] in self.graph.trained
            dtype = self.graph.spec(TensorRef(variable.nodes[0])).dtype if trained else trained_dtype(self.graph)
            bytes_each = DTYPE_BYTES[dtype] + (state_bytes(self.setting.optimizer, dtype) if trained else 0.0)
            return Cost(time, self.parts.elements(states) * bytes_each)
        handed = self.parts.handed_back(states) if variable.kind is Kind.STATION else None
        if handed is not None:
            gradient, before, after = handed
            spec = self.graph.spec(gradient)
            rank = len(spec.shape)
            table = self.setting.costs.redistribution(rank, spec.size_bytes, fused=False, masks=False)
            time = time + table[placement_index(before, rank), placement_index(after, rank)]
        return Cost(time * self.setting.micro_batches, np.zeros(len(states)))

    def _pairs(self) -> dict[tuple[int, int], Cost]:
        pairs: dict[tuple[int, int], Cost] = {}
        alike: dict[tuple[int | bool, ...], Cost] = {}
        for edge, move in zip(self.decisions.edges, self.decisions.moves, strict=True):
            # What is equal costs the same.
            of_edge = (self.states[edge.source].kind, self.states[edge.target].kind, *move)
            if of_edge not in alike:
                alike[of_edge] = self._edge_cost(edge, once=move[2], masked=move[3])
            cost = alike[of_edge]
            key = (min(edge.source, edge.target), max(edge.source, edge.target))
            if edge.source > edge.target:
                cost = Cost(cost.time.T, cost.memory.T)
            if key in pairs:
                cost = Cost(pairs[key].time + cost.time, pairs[key].memory + cost.memory)
            pairs[key] = cost
        return pairs

    def _edge_cost(self, edge: Edge, *, once: bool, masked: bool) -> Cost:
        """What moving a tensor costs from each state of its writer to each of its reader, perhaps once a step."""
        spec, source, target = self.graph.spec(edge.tensor), self.states[edge.source], self.states[edge.target]
        rank = len(spec.shape)
        rows = source.numbers(edge.tensor, rank, reads=False)[:, None]
        columns = target.numbers(edge.tensor, rank, reads=True)
        time = self.setting.costs.redistribution(rank, spec.size_bytes, fused=once, masks=masked)[rows, columns]
        memory = np.zeros(time.shape)
        if not once:
            return Cost(time if self.setting.micro_batches == 1 else time * self.setting.micro_batches, memory)
        if source.variable.kind is Kind.PARAMETER:
            memory += (rows != columns) * self.parts.read_bytes(edge.tensor, edge.target)
        elif self.setting.micro_batches > 1:
            memory += self.parts.written_bytes(edge.tensor, edge.source)[:, None]
            if self.setting.sharded_gradients:
                scattered = self.parts.scatter_seconds(edge)
                time = time + (self.setting.micro_batches - 1) * scattered
                memory = np.where(scattered > 0, self.parts.read_bytes(edge.tensor, edge.target)[None, :], memory)
        return Cost(time, memory)

    def _with_saved(self, pairs: dict[tuple[int, int], Cost]) -> tuple[Cost, ...]:
        """Charge each saved tensor once per placement it is kept in: to the pairs, and to the variables returned."""
        memory = [c.memory.copy() for c in self._alone]
        for tensor, readers in self.parts.saved.items():
            owner = self.decisions.of_node[tensor.node]
            for scope, size in self.parts.saved_charges(tensor, readers, owner):
                key = (min(scope), max(scope))
                if len(scope) == 1:
                    memory[scope[0]] += size
                elif key in pairs:
                    pair = pairs[key]
                    pairs[key] = Cost(pair.time, pair.memory + (size if key == scope else size.T))
        return tuple(Cost(c.time, m) for c, m in zip(self._alone, memory, strict=True))


def choices_of(problem: Problem, variable: int, state: int) -> tuple[Choice, ...]:
    """The choice along each mesh axis in one state of one variable."""
    states = problem.states[variable]
    return tuple(states.variable.choices[i] for i in states.choice[:, state])


Assignment = Mapping[int, int]
"""State of each variable, by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """States that minimise the objective under the memory limit.

    ``assignment`` holds every variable once; ``layers[r][i]`` are the states of run r's second block
    in layer i + 1, for the variables that belong to it. ``states`` counts those of all variables, ``states_left``
    those after reductions; ``width`` neighbours and ``largest_table`` entries are the most of one elimination step.
    """

    assignment: Assignment
    layers: tuple[tuple[Assignment, ...], ...]
    objective_s: float
    memory_bytes: float
    lower_bound_s: float
    width: int
    states: int = 0
    states_left: int = 0
    largest_table: int = 0

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return 0.0 if self.objective_s <= 0 else max(0.0, 1.0 - self.lower_bound_s / self.objective_s)


def parts_of(problem: Problem, solution: Solution) -> dict[str, float]:
    """Seconds of the objective by what devices do, named as parts of a simulated step; nothing in it overlaps."""
    inner = {variable for layers in solution.layers for states in layers for variable in states}
    once = {variable: state for variable, state in solution.assignment.items() if variable not in inner}
    compute, update = problem.parts_s([once, *(states for layers in solution.layers for states in layers)])
    return {
        "compute_s": compute,
        "exposed_communication_s": solution.objective_s - compute - update,
        "bubble_s": 0.0,
        "optimizer_s": update,
    }


def node_rules(problem: Problem, solution: Solution) -> tuple[dict[str, NodeRules], tuple[LayerRules, ...]]:
    """Strategies by node name: those outside runs of equal blocks, and those of each range of layers."""
    graph = problem.graph
    inside = {i for run in graph.runs for i in (*run.first, *run.second)}
    outside = [i for i in range(len(graph.nodes)) if i not in inside]
    layers: list[LayerRules] = []
    for run, states in zip(graph.runs, solution.layers, strict=True):
        offset = block_index(graph.nodes[run.first[0]].name, run.prefix)
        rules = [_rules(problem, run.first, solution.assignment, run)]
        for place, state in enumerate(states):
            alike = place > 0 and state == states[place - 1]
            # What several blocks share stands outside the layers.
            every = ChainMap(dict(state), dict(solution.assignment))
            rules.append(rules[-1] if alike else _rules(problem, run.second, every, run))
        for same, members in groupby(enumerate(rules), key=lambda item: item[1]):
            numbers = [i for i, _ in members]
            layers.append(
                LayerRules(prefix=run.prefix, first=offset + numbers[0], last=offset + numbers[-1], rules=same)
            )
    return _rules(problem, outside, solution.assignment), tuple(layers)


def _rules(
    problem: Problem, nodes: list[int] | tuple[int, ...], assignment: Assignment, run: Run | None = None
) -> dict[str, NodeRules]:
    found = {}
    for index in nodes:
        variable = problem.decisions.of_node[index]
        if variable < 0:
            continue
        position = problem.decisions.variables[variable].nodes.index(index)
        chosen = choices_of(problem, variable, assignment[variable])
        name = problem.graph.nodes[index].name
        found[template_name(name, run.prefix) if run else name] = tuple(c.rules[position] for c in chosen)
    return found
