"""The decisions of a search: one variable an operator, parameter, input or shared tensor.

A backward operator follows its forward operator, so one variable decides both. Where a tensor has
several users a *station* is a variable of its own: it fixes the placement in which the tensor is
handed on, in which its gradients are summed, and in which the sum is handed back. Everything here is
for one mesh axis and holds for every mesh; N axes take N independent choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.graph.chain import Boundary
from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.graph.recompute import KeptByGraph
from planner.search.problem.gradients import GradientFlow, alike, gradient_flows, owner_of
from planner.sharding.placement import PARTIAL, REPLICATE, Placement
from planner.sharding.rules import Rule, rules_for
from simulator.program import Phase


class Kind(StrEnum):
    """What a variable decides."""

    OPERATOR = "operator"
    PARAMETER = "parameter"
    INPUT = "input"
    STATION = "station"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One strategy along one mesh axis: a rule for every node, and the placements it reads and writes."""

    rules: tuple[Rule, ...]
    reads: Mapping[TensorRef, Placement]
    writes: Mapping[TensorRef, Placement]


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A decision; ``nodes`` follow it, ``tensor`` is what a station hands on."""

    kind: Kind
    nodes: tuple[int, ...]
    choices: tuple[Choice, ...]
    tensor: TensorRef | None = None

    @cached_property
    def read(self) -> Mapping[TensorRef, NDArray[np.int64]]:
        """Tensors that the variable reads, and their placement in each choice, shape (choices,)."""
        return {t: np.array([c.reads[t] for c in self.choices], dtype=np.int64) for t in self.choices[0].reads}

    @cached_property
    def written(self) -> Mapping[TensorRef, NDArray[np.int64]]:
        """Tensors that the variable writes, as ``read``."""
        return {t: np.array([c.writes[t] for c in self.choices], dtype=np.int64) for t in self.choices[0].writes}

    @cached_property
    def places(self) -> tuple[Mapping[TensorRef, int], Mapping[TensorRef, int]]:
        """The place of each tensor among those that the variable writes, and among those that it reads."""
        first = self.choices[0]
        written, read = ({tensor: place for place, tensor in enumerate(given)} for given in (first.writes, first.reads))
        return written, read


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor that variable ``source`` writes and ``target`` reads."""

    source: int
    target: int
    tensor: TensorRef


Move = tuple[int, int, bool, bool]
"""How an edge's tensor moves, whatever the mesh (`Decisions.moves`)."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """All variables of a graph, and the tensors between them.

    ``of_node[i]`` is the variable node i follows, −1 for constants. ``alike[v]`` is the first variable whose
    choices, operators and tensors are those of variable v but for their names: the two have the same states, which
    cost the same, at any batch and precision.
    """

    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    of_node: tuple[int, ...]
    alike: tuple[int, ...]

    @cached_property
    def states(self) -> dict[tuple[object, ...], Any]:
        """What states of variables there are on some meshes, as far as `planner.search.problem.parts` has asked."""
        return {}

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """How each edge's tensor moves, whatever the mesh.

        Its place among those that the source writes and among those that the target reads, whether it moves once a
        step, and whether it may be masked.
        """
        found = []
        for edge in self.edges:
            source, target = self.variables[edge.source], self.variables[edge.target]
            places = source.places[0][edge.tensor], target.places[1][edge.tensor]
            found.append((*places, once_a_step(self.variables, edge), masks(self.variables, edge)))
        return tuple(found)


def decisions(graph: OperatorGraph, boundaries: Sequence[Boundary] = ()) -> Decisions:
    """List the variables of `graph` with their choices along one mesh axis, and the edges between them.

    The tensors of `boundaries` are handed on by stations whoever reads them. Choices that some neighbour can
    never meet are dropped (arc consistency). They are listed once for each graph and set of stations.
    """
    flows = gradient_flows(graph)
    of_node = [owner_of(graph, i) for i in range(len(graph.nodes))]
    stations = _stations(graph, flows, of_node)
    for boundary in boundaries:
        crossing = GradientFlow(boundary.gradient) if boundary.gradient else None
        stations.setdefault(boundary.forward, flows.get(boundary.forward, crossing))
    return _MADE.once(graph, tuple(stations.items()), lambda: _decisions(graph, stations, of_node))


_Stations = Mapping[TensorRef, GradientFlow | None]
_MADE = KeptByGraph[tuple[tuple[TensorRef, GradientFlow | None], ...], Decisions]()


def _decisions(graph: OperatorGraph, stations: _Stations, of_node: list[int]) -> Decisions:
    for tensor, flow in stations.items():
        for index in flow.sums if flow else ():
            of_node[index] = len(graph.nodes) + tensor.node * 64 + tensor.output
    groups: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        if node.role is not Role.CONSTANT:
            groups.setdefault(of_node[index], []).append(index)
    variables: list[Variable] = []
    number: dict[int, int] = {}
    for key, nodes in groups.items():
        if key < len(graph.nodes):
            number[key] = len(variables)
            variables.append(_variable(graph, tuple(nodes)))
    station_number: dict[TensorRef, int] = {}
    for tensor, flow in stations.items():
        station_number[tensor] = number[len(graph.nodes) + tensor.node * 64 + tensor.output] = len(variables)
        if flow is not None:
            station_number[flow.gradient] = len(variables)
        shared_back = flow is not None and len({of_node[u] for u in graph.consumers.get(flow.gradient, ())}) > 1
        variables.append(_station(graph, tensor, flow, shared_back))
    numbers = tuple(
        -1 if node.role is Role.CONSTANT else number[of_node[index]] for index, node in enumerate(graph.nodes)
    )
    edges = tuple(_edges(graph, variables, numbers, station_number))
    consistent = _consistent(variables, edges)
    return Decisions(variables=consistent, edges=edges, of_node=numbers, alike=_alike(graph, consistent))


def unnamed(choice: Choice, tensors: Choice) -> tuple[object, ...]:
    """A choice without the names of its tensors, which are listed as in `tensors`."""
    reads, writes = (choice.reads[t] for t in tensors.reads), (choice.writes[t] for t in tensors.writes)
    return (choice.rules, *reads, None, *writes)


def _alike(graph: OperatorGraph, variables: Sequence[Variable]) -> tuple[int, ...]:
    seen: dict[object, int] = {}
    numbers: dict[object, int] = {}

    def number(item: object) -> int:
        # What is equal gets a number once, so that keys are made of few objects.
        return numbers.setdefault(item, len(numbers))

    specs = [tuple(number(spec) for spec in node.outputs) for node in graph.nodes]
    found = []
    for position, variable in enumerate(variables):
        first = variable.choices[0] if variable.choices else Choice(rules=(), reads={}, writes={})
        operators = []
        for index in variable.nodes:
            node = graph.nodes[index]
            read = tuple(specs[ref.node][ref.output] for ref in node.tensor_inputs)
            kind = (node.op, node.role, node.phase, node.kernel, node.product_dtype, node.moved)
            operators.append((*kind, node.flops, read, specs[index]))
        tensors = tuple(specs[ref.node][ref.output] for ref in (*first.reads, *first.writes))
        choices = tuple(number(unnamed(choice, first)) for choice in variable.choices)
        key = (variable.kind, tuple(operators), tensors, len(first.reads), choices)
        found.append(seen.setdefault(key, position))
    return tuple(found)


def _stations(
    graph: OperatorGraph, flows: Mapping[TensorRef, GradientFlow], of_node: list[int]
) -> dict[TensorRef, GradientFlow | None]:
    """Tensors that several variables read, or whose gradient several variables read."""
    found: dict[TensorRef, GradientFlow | None] = {}
    gradients = {flow.gradient for flow in flows.values()}
    for index, node in enumerate(graph.nodes):
        if node.role in (Role.CONSTANT, Role.INPUT):
            continue
        for output in range(len(node.outputs)):
            ref = TensorRef(index, output)
            flow = flows.get(ref)
            if node.phase is Phase.BACKWARD:
                if ref not in gradients and _readers(graph, ref, of_node) > 1:
                    found[ref] = None
            elif _readers(graph, ref, of_node) > 1 or (flow and _passed_on(graph, ref, flow, flows, of_node)):
                found[ref] = flow
    for ref in [*found]:
        for twin in _twins(graph, ref):
            found.setdefault(twin, flows.get(twin))
    return found


def _twins(graph: OperatorGraph, ref: TensorRef) -> Iterator[TensorRef]:
    """The same tensor of the other block of a run: both have a station, though the last may be read but once."""
    for run in graph.runs:
        for here, there in ((run.first, run.second), (run.second, run.first)):
            if ref.node in here:
                yield TensorRef(there[here.index(ref.node)], ref.output)


def _readers(graph: OperatorGraph, ref: TensorRef, of_node: list[int]) -> int:
    return len({of_node[u] for u in graph.consumers.get(ref, ())} - {of_node[ref.node]})


def _passed_on(
    graph: OperatorGraph,
    ref: TensorRef,
    flow: GradientFlow,
    flows: Mapping[TensorRef, GradientFlow],
    of_node: list[int],
) -> bool:
    """Whether `ref` is the tensor at whose operator one gradient starts to be read by several."""
    if len({of_node[u] for u in graph.consumers.get(flow.gradient, ())} - {of_node[flow.gradient.node]}) < 2:
        return False
    users = (u for u in graph.consumers.get(ref, ()) if graph.nodes[u].phase is Phase.FORWARD)
    later = (flows.get(TensorRef(u, o)) for u in users for o in range(len(graph.nodes[u].outputs)))
    return all(other is None or other.gradient != flow.gradient for other in later)


def _variable(graph: OperatorGraph, nodes: tuple[int, ...]) -> Variable:
    """The variable that some nodes follow, the same whatever stations there are."""
    return _VARIABLES.once(graph, nodes, lambda: _new_variable(graph, nodes))


_VARIABLES = KeptByGraph[tuple[int, ...], Variable]()


def _new_variable(graph: OperatorGraph, nodes: tuple[int, ...]) -> Variable:
    role = graph.nodes[nodes[0]].role
    kind = {Role.PARAMETER: Kind.PARAMETER, Role.INPUT: Kind.INPUT}.get(role, Kind.OPERATOR)
    if kind is Kind.OPERATOR:
        return Variable(kind=kind, nodes=nodes, choices=tuple(_operator_choices(graph, nodes)))
    ref = TensorRef(nodes[0])
    gradient = next((p.gradient for p in graph.parameters if p.node == nodes[0]), None)
    choices = tuple(
        Choice(
            rules=(rule,),
            reads={gradient: rule.outputs[0]} if gradient else {},
            writes={ref: rule.outputs[0]},
        )
        for rule in rules_for(graph, graph.nodes[nodes[0]])
    )
    return Variable(kind=kind, nodes=nodes, choices=choices)


def _operator_choices(graph: OperatorGraph, nodes: tuple[int, ...]) -> Iterator[Choice]:
    """Choices of an operator and its backward operators: those of the first one alike, of other tensors."""
    tensors: dict[TensorRef, int] = {}
    ports = []
    for index in nodes:
        node = graph.nodes[index]
        refs = (*node.tensor_inputs, *(TensorRef(index, o) for o in range(len(node.outputs))))
        ports.append((id(rules_for(graph, node)), *(tensors.setdefault(ref, len(tensors)) for ref in refs)))
    kinds = ((graph.nodes[r.node].role, graph.nodes[r.node].phase, graph.spec(r), r.node in nodes) for r in tensors)
    made, key = _CHOICES.of(graph), (tuple(ports), tuple(kinds))
    if key not in made:
        made[key] = tuple(tensors), tuple(_agreeing(graph, nodes))
    first, choices = made[key]
    here = dict(zip(first, tensors, strict=True))
    for choice in choices:
        reads, writes = ({here[r]: p for r, p in side.items()} for side in (choice.reads, choice.writes))
        yield Choice(rules=choice.rules, reads=reads, writes=writes)


_CHOICES = KeptByGraph[tuple[object, ...], tuple[tuple[TensorRef, ...], tuple[Choice, ...]]]()


def _agreeing(graph: OperatorGraph, nodes: tuple[int, ...]) -> Iterator[Choice]:
    """Combine the rules of an operator and its backward operators that agree on every tensor they share."""
    group = set(nodes)
    tables = [rules_for(graph, graph.nodes[i]) for i in nodes]
    constants = {
        ref for i in nodes for ref in graph.nodes[i].tensor_inputs if graph.nodes[ref.node].role is Role.CONSTANT
    }

    found: list[tuple[tuple[Rule, ...], dict[TensorRef, Placement]]] = [((), {})]
    for index, table in zip(nodes, tables, strict=True):
        found = [
            ((*rules, rule), agreed)
            for rules, placed in found
            for rule in table
            if (agreed := _agree(graph.nodes[index], index, rule, placed, constants)) is not None
        ]
    for rules, placed in found:
        if _gradients_follow(graph, placed, group):
            reads = {r: p for r, p in placed.items() if r.node not in group and r not in constants}
            writes = {r: p for r, p in placed.items() if r.node in group}
            yield Choice(rules=rules, reads=reads, writes=writes)


def _agree(
    node: Node, index: int, rule: Rule, placed: Mapping[TensorRef, Placement], constants: set[TensorRef]
) -> dict[TensorRef, Placement] | None:
    """Placements after `rule`, or None where it contradicts those before."""
    result = dict(placed)
    for ref, placement in zip(node.tensor_inputs, rule.inputs, strict=True):
        if ref in constants:
            if placement == PARTIAL:
                return None
        elif result.setdefault(ref, placement) != placement:
            return None
    result.update((TensorRef(index, o), p) for o, p in enumerate(rule.outputs))
    return result


def _gradients_follow(graph: OperatorGraph, placed: Mapping[TensorRef, Placement], group: set[int]) -> bool:
    """Whether incoming gradients lie as the outputs they belong to: S(d) with S(d), R or P with R, R with P."""
    made = ((ref, p) for ref, p in placed.items() if ref.node in group)
    outputs = {ref: p for ref, p in made if graph.nodes[ref.node].phase is Phase.FORWARD}
    for ref, placement in placed.items():
        if ref.node in group or graph.nodes[ref.node].phase is Phase.FORWARD:
            continue
        same = [p for out, p in outputs.items() if alike(graph, out, ref)]
        if same and not any(placement in gradient_placements(p) for p in same):
            return False
    return True


def gradient_placements(placement: Placement) -> tuple[Placement, ...]:
    """Placements of the gradient of a tensor placed so.

    >>> gradient_placements(1), gradient_placements(REPLICATE), gradient_placements(PARTIAL)
    ((1,), (-1, -2), (-1,))
    """
    if placement == REPLICATE:
        return (REPLICATE, PARTIAL)
    return (REPLICATE,) if placement == PARTIAL else (placement,)


def _station(graph: OperatorGraph, tensor: TensorRef, flow: GradientFlow | None, shared_back: bool) -> Variable:
    rank = len(graph.spec(tensor).shape)
    sums = flow.sums if flow else ()
    choices = []
    for placement in (REPLICATE, *range(rank), PARTIAL):
        if flow is None:
            choices.append(Choice(rules=(), reads={tensor: placement}, writes={tensor: placement}))
            continue
        for summed in gradient_placements(placement):
            handed = (PARTIAL, REPLICATE) if summed == PARTIAL and shared_back else (summed,)
            made = (_station_choice(graph, tensor, flow, (placement, summed, back)) for back in handed)
            choices.extend(choice for choice in made if choice is not None)
    return Variable(kind=Kind.STATION, nodes=sums, choices=tuple(choices), tensor=tensor)


def _station_choice(
    graph: OperatorGraph, tensor: TensorRef, flow: GradientFlow, placements: tuple[Placement, Placement, Placement]
) -> Choice | None:
    """One way to hand a tensor on, sum its gradients and hand the sum back; None without rules for it."""
    placement, summed, back = placements
    rules = []
    for index in flow.sums:
        node = graph.nodes[index]
        wanted = ((summed,) * len(node.tensor_inputs), (summed,))
        rule = next((r for r in rules_for(graph, node) if (r.inputs, r.outputs) == wanted), None)
        if rule is None:
            return None
        rules.append(rule)
    reads = {tensor: placement}
    own = {TensorRef(i) for i in flow.sums}
    for index in flow.sums:
        reads.update((t, summed) for t in graph.nodes[index].tensor_inputs if t not in own)
    if not flow.sums:
        reads[flow.gradient] = summed
    return Choice(rules=tuple(rules), reads=reads, writes={tensor: placement, flow.gradient: back})


def _edges(
    graph: OperatorGraph, variables: list[Variable], of_node: tuple[int, ...], stations: Mapping[TensorRef, int]
) -> Iterator[Edge]:
    readers: dict[TensorRef, dict[int, None]] = {}
    for number, variable in enumerate(variables):
        for ref in dict.fromkeys(r for c in variable.choices for r in c.reads):
            readers.setdefault(ref, {})[number] = None
    for ref, users in readers.items():
        source = of_node[ref.node]
        if source < 0:
            continue
        station = stations.get(ref)
        if station is not None and station != source:
            yield Edge(source=source, target=station, tensor=ref)
            source = station
        for user in users:
            if user not in (source, station):
                yield Edge(source=source, target=user, tensor=ref)


def once_a_step(variables: Sequence[Variable], edge: Edge) -> bool:
    """Whether a tensor moves once a step, in messages of many: parameters and their gradients."""
    return variables[edge.source].kind is Kind.PARAMETER or variables[edge.target].kind is Kind.PARAMETER


def masks(variables: Sequence[Variable], edge: Edge) -> bool:
    """Whether a replicated tensor may be masked to become partial on this edge: the terms of a gradient sum."""
    target = variables[edge.target]
    return target.kind is Kind.STATION and bool(target.nodes) and edge.tensor != target.tensor


def _consistent(variables: list[Variable], edges: tuple[Edge, ...]) -> tuple[Variable, ...]:
    """Drop choices that read a partial tensor which its writer can never offer."""
    choices = [list(v.choices) for v in variables]
    changed = True
    while changed:
        changed = False
        for edge in edges:
            written = {c.writes[edge.tensor] for c in choices[edge.source]}
            partial = PARTIAL in written or (REPLICATE in written and masks(variables, edge))
            kept = [c for c in choices[edge.target] if partial or c.reads[edge.tensor] != PARTIAL]
            if len(kept) < len(choices[edge.target]):
                choices[edge.target], changed = kept, True
    return tuple(
        v if len(c) == len(v.choices) else replace(v, choices=tuple(c)) for v, c in zip(variables, choices, strict=True)
    )
