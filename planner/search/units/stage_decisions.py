"""What no mesh or micro-batch changes: the chain of a graph, its decisions and its units, and what was made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from planner.cost.work import traffic_sizes
from planner.graph.chain import Chain, chain, uncut_run
from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.search.problem.amounts import MeshCase
from planner.search.problem.costs import MeshCosts
from planner.search.problem.parts import Parts, saved_tensors
from planner.search.problem.states import CONTEXT, Setting
from planner.search.problem.variables import Choice, Decisions, Kind, Variable, decisions
from planner.search.units.transient import Flight, flight_of
from planner.search.units.unit_model import UnitModel
from planner.sharding.context import Algorithm, ContextAxis, context_axis
from planner.sharding.inner_messages import bytes_of_sums
from planner.sharding.placement import REPLICATE, Mesh, MeshAxis, Placement
from planner.sharding.rules import rules_for
from planner.sharding.sequence import sequence_dims
from simulator.collectives import ALGORITHMS, algorithm_costs
from simulator.errors import InputError, UnsupportedError
from simulator.hardware import Hardware
from simulator.program import Kernel, Phase
from simulator.topology import group_shape

TENSOR = ("tensor",)
"""Axes of the stages that searches have most of."""


SummedWork = tuple[tuple[tuple[tuple[Kernel, str, float, float], ...], ...], ...]


class StageDecisions:
    """The chain of a folded graph and its decisions, with what no mesh or micro-batch changes.

    Parameters
    ----------
    made
        The chain and its decisions, where they are known.

    Raises
    ------
    UnsupportedError
        A run's blocks cannot be cut from each other; unfold the graph.
    """

    def __init__(self, graph: OperatorGraph, made: tuple[Chain, Decisions] | None = None) -> None:
        self.graph = graph
        self.chain: Chain = made[0] if made else chain(graph)
        _check_runs(graph, self.chain)
        self.decisions: Decisions = made[1] if made else decisions(graph, self.chain.boundaries)
        self.free_axes: frozenset[str] = frozenset()
        """Axes that may shard the batch even where they are named ``tensor``."""
        self.along_data: StageDecisions | None = None
        """What is left to choose along the data axis, where some of it is fixed."""
        self.estimated = False
        """Whether operators do more along the data axis than the tables of units know."""
        self._costs: dict[tuple[int, Mesh, int], MeshCosts] = {}
        self._costs_of_links: dict[tuple[object, ...], MeshCosts] = {}
        self._contexts: dict[Algorithm, ContextAxis] = {}
        self._choices: dict[Algorithm, tuple[Choice, ...]] = {}
        self._flights: dict[int, Flight] = {}
        self.data_axes: dict[tuple[int, int], object] = {}
        self.families: dict[tuple[object, ...], object] = {}
        """Filled by `planner.search.units.family.family_of`."""
        self._restricted: dict[tuple[object, ...], StageDecisions] = {}
        self._expected: dict[tuple[str, ...], list[dict[tuple[int, int], MeshCase]]] = {}

    def restricted(
        self,
        kept: Mapping[int, Sequence[int]],
        *,
        free_axes: frozenset[str] = frozenset(),
        along_data: StageDecisions | None = None,
        estimated: bool = False,
    ) -> StageDecisions:
        """The same where only some choices of some variables are left, made once; times of messages are shared."""
        key = (tuple(sorted((n, tuple(choices)) for n, choices in kept.items())), free_axes, id(along_data))
        if key not in self._restricted:
            found = self._restrict(kept)
            found.free_axes, found.along_data, found.estimated = free_axes, along_data, estimated
            self._restricted[key] = found
        return self._restricted[key]

    def _restrict(self, kept: Mapping[int, Sequence[int]]) -> StageDecisions:
        made = self.decisions
        names: dict[object, int] = {}
        alike = tuple(
            names.setdefault((first, tuple(kept[n]) if n in kept else None), n) for n, first in enumerate(made.alike)
        )
        variables = tuple(
            replace(v, choices=tuple(v.choices[c] for c in kept[n])) if n in kept else v
            for n, v in enumerate(made.variables)
        )
        found = StageDecisions(self.graph, (self.chain, replace(made, variables=variables, alike=alike)))
        found._costs, found._costs_of_links = self._costs, self._costs_of_links
        return found

    @cached_property
    def models(self) -> tuple[UnitModel, ...]:
        """Variables and edges of each unit."""
        saved = saved_tensors(self.graph, self.decisions)
        return tuple(
            UnitModel(self.graph, self.decisions, self.chain, number, saved) for number in range(len(self.chain.units))
        )

    @cached_property
    def followed(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For each node of each unit, but constants, the variable that it follows and its place among those that do."""
        made = self.decisions
        place = {index: n for variable in made.variables for n, index in enumerate(variable.nodes)}
        return tuple(
            tuple((index, made.of_node[index], place[index]) for index in unit.nodes if made.of_node[index] >= 0)
            for unit in self.chain.units
        )

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """Stations of parameters that several units read."""
        return tuple(sorted({v for model in self.models for v in model.shared}))

    def least_launches(self, *, chained: bool) -> tuple[int, ...]:
        """Least launches of both passes of each unit; those of chains of kernels once where they are ``chained``."""
        counts = (model.chained_launches if chained else model.launches for model in self.models)
        return tuple(forward + min(backward) for forward, backward in counts)

    def tabled(self, number: int) -> int:
        """The unit whose tables a unit has: of a run's first block the second where they are equal."""
        return number + 1 if number in self.twins else number

    @cached_property
    def sequences(self) -> Mapping[TensorRef, tuple[int, ...]]:
        """Dims of tensors that grow with the sequence."""
        return sequence_dims(self.graph)

    def flight(self, number: int) -> Flight:
        """Gradients on their way in a unit's backward pass."""
        if number not in self._flights:
            self._flights[number] = flight_of(self.models[number])
        return self._flights[number]

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

    @cached_property
    def batch_sums(self) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
        """Bytes of each message with which operators of each unit sum over the batch, forward and backward.

        Statistics of a normalisation over the batch are such sums; the loss is not among them.
        """
        return tuple(
            (self._batch_sums(unit.nodes, Phase.FORWARD), self._batch_sums(unit.nodes, Phase.BACKWARD))
            for unit in self.chain.units
        )

    @cached_property
    def summed_work(self) -> SummedWork:
        """Class, dtype and bytes moved of the operators of each unit that sum over the batch, forward and backward.

        The bytes are those of whole operators: those that stay, and those that grow with the batch, at the graph's.
        """
        both = (Phase.FORWARD, Phase.BACKWARD)
        return tuple(
            tuple(tuple(self._summed_work(node) for node, _ in self._summing(unit.nodes, phase)) for phase in both)
            for unit in self.chain.units
        )

    def _summed_work(self, node: Node) -> tuple[Kernel, str, float, float]:
        specs = (*(self.graph.spec(ref) for ref in node.tensor_inputs), *node.outputs)
        fixed, grown = 0.0, 0.0
        for spec, size in zip(specs, traffic_sizes(self.graph, node), strict=True):
            grows = any(spec.batch_dims)
            fixed, grown = fixed + size * (not grows), grown + size * grows
        return node.timed_as, node.kernel_dtype, fixed, grown

    @cached_property
    def sums_over_batch(self) -> bool:
        """Whether any operator sums over the batch."""
        return any(map(any, self.batch_sums))

    def _batch_sums(self, nodes: Iterable[int], phase: Phase) -> tuple[float, ...]:
        return tuple(bytes_of_sums(node, elements) for node, elements in self._summing(nodes, phase))

    def _summing(self, nodes: Iterable[int], phase: Phase) -> list[tuple[Node, int]]:
        """Operators of a pass that sum over the batch, each with the numbers that it sums."""
        found = []
        for node in (self.graph.nodes[index] for index in nodes):
            if node.role is not Role.OPERATOR or node.phase is not phase:
                continue
            rules = rules_for(self.graph, node)
            summed = next((r for r in rules if r.reduced_elements and r.splits_work and r.inputs[:1] == (0,)), None)
            if summed is not None:
                found.append((node, summed.reduced_elements))
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
        if algorithm not in self._choices:
            self._choices[algorithm] = context_choices(self.decisions, axis)
        return self._choices[algorithm]

    def costs(self, hardware: Hardware, mesh: Mesh, bucket_bytes: int) -> MeshCosts:
        """Times of messages on a mesh, made once for all meshes on which they are the same.

        A small network fills no bucket: its messages bring all that it trains at most.
        """
        key = (id(hardware), mesh, bucket_bytes)
        if key not in self._costs:
            bucket_bytes = max(1, min(bucket_bytes, self.trained_bytes))
            links = (id(hardware), bucket_bytes, mesh.axes, links_of(hardware, mesh))
            if links not in self._costs_of_links:
                self._costs_of_links[links] = MeshCosts(hardware, mesh, bucket_bytes)
            self._costs[key] = self._costs_of_links[links]
        return self._costs[key]

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes of all trained parameters."""
        graph = self.graph
        trained = (p.node for p in graph.parameters if p.gradient is not None)
        return sum(graph.multiplicity[node] * graph.nodes[node].outputs[0].size_bytes for node in trained)

    def expect(self, hardware: Hardware, bucket_bytes: int, *groups: Iterable[tuple[Mesh, int]]) -> None:
        """Announce groups of stage meshes with the batches of their graphs: when one is bounded, so is its group.

        What was announced before no longer counts.
        """
        self._expected.clear()
        for stages in groups:
            named: dict[tuple[str, ...], dict[tuple[int, int], MeshCase]] = {}
            for mesh, batch in stages:
                case = MeshCase(self.costs(hardware, mesh, bucket_bytes), batch)
                named.setdefault(axis_names(mesh), {})[case.key] = case
            for names, cases in named.items():
                self._expected.setdefault(names, []).append(cases)

    def expected(self, case: MeshCase) -> Iterator[MeshCase]:
        """Announced stages of the same cluster with the same axes, of the first group that the stage is in."""
        groups = self._expected.get(axis_names(case.costs.mesh), ())
        for other in next((group for group in groups if case.key in group), {}).values():
            if other.costs.hardware is case.costs.hardware:
                yield other

    def expects(self, names: tuple[str, ...]) -> bool:
        """Whether stages with these axes are announced."""
        return names in self._expected

    def widest(self, setting: Setting, names: tuple[str, ...]) -> Parts:
        """States of a mesh with some axes, which divide everything."""
        mesh = Mesh(tuple(MeshAxis(name, 1) for name in names))
        costs = self.costs(setting.costs.hardware, mesh, setting.costs.bucket_bytes)
        return Parts(self.graph, self.decisions, replace(setting, costs=costs))


def _check_runs(graph: OperatorGraph, cut: Chain) -> None:
    if (number := uncut_run(graph, cut)) is not None:
        raise UnsupportedError(
            f"more than one tensor goes from one block of {graph.runs[number].prefix!r} to the next, so that they "
            "cannot be planned one by one; unfold the graph"
        )


def axis_names(mesh: Mesh) -> tuple[str, ...]:
    """Names of the axes, in order."""
    return tuple(axis.name for axis in mesh.axes)


def links_of(hardware: Hardware, mesh: Mesh) -> tuple[object, ...]:
    """All that times of messages along each axis depend on; equal where faster links of a level make none faster."""
    found: list[object] = []
    for place, axis in enumerate(mesh.axes):
        group = group_shape(hardware, axis.size, mesh.stride(place))
        costs = [tuple(algorithm_costs(hardware, c, group).items()) for c in ALGORITHMS] if axis.size > 1 else []
        # Measured tables are scaled from groups with the same stride.
        found.append((group if hardware.collective_tables else group.members, *costs))
    return tuple(found)


def _twins(made: Decisions, one: UnitModel, other: UnitModel) -> dict[int, int] | None:
    """Align the variables of two equal units; None where they offer different choices."""
    run = one.graph.runs[one.chain.units[one.number].run or 0]
    place = dict(zip(run.first, run.second, strict=True))
    stations = {v.tensor: n for n, v in enumerate(made.variables) if v.tensor is not None}
    found: dict[int, int] = {}
    for number in one.variables:
        variable = made.variables[number]
        if variable.tensor is not None:
            node = variable.tensor.node
            twin = stations.get(TensorRef(place.get(node, node), variable.tensor.output), -1)
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


def context_choices(decisions: Decisions, axis: ContextAxis) -> tuple[Choice, ...]:
    """Give each variable's choice along a context axis, aligned with ``decisions.variables``.

    What one variable writes the others read as it is, so nothing is redistributed along the axis but the
    parameters' gradients: partial, and read whole, they are summed once a step.
    """
    placed: dict[TensorRef, Placement] = {
        TensorRef(node, output): placement
        for node, rule in enumerate(axis.rules)
        for output, placement in enumerate(rule.outputs)
    }
    return tuple(_choice(variable, axis, placed) for variable in decisions.variables)


def _choice(variable: Variable, axis: ContextAxis, placed: dict[TensorRef, Placement]) -> Choice:
    first = variable.choices[0]
    whole = variable.kind is Kind.PARAMETER
    return Choice(
        rules=tuple(axis.rules[node] for node in variable.nodes),
        reads={tensor: REPLICATE if whole else placed[tensor] for tensor in first.reads},
        writes={tensor: placed[tensor] for tensor in first.writes},
    )
