"""From labels chosen for every unit to the rules of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import numpy as np

from planner.graph.folding import run_start, template_name
from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph
from planner.graph.scaling import at_batch
from planner.plans.plan import LayerRules, NodeRules
from planner.search.problem.parts import Parts
from planner.search.problem.states import Setting
from planner.search.problem.variables import Kind
from planner.search.units.labels import StageTables
from planner.search.units.records import UnitWeights
from planner.search.units.stage_decisions import StageDecisions
from planner.search.units.stage_shape import StageOptions
from planner.search.units.stage_tables import Stage
from planner.search.units.sweep import STEP_WEIGHTS
from planner.sharding.placement import REPLICATE, Mesh, MeshAxis, local_shape
from planner.sharding.rules import Rule
from simulator.errors import InputError

UnitRules = Mapping[int, NodeRules]
"""Rules of a unit's nodes, by index in the folded graph."""


def rules_of(
    tables: StageTables,
    choices: Sequence[int],
    data: int,
    *,
    sharding: str = "none",
    shard_size: int = 0,
    threshold_bytes: int = 0,
    uneven: bool = False,
) -> tuple[dict[str, NodeRules], tuple[LayerRules, ...]]:
    """Write the rules of a plan whose mesh has the data axis before those of the stage.

    Along the data axis the batch is sharded wherever a tensor has one, in the strategy that communicates least.
    A data axis of one rank is left out.

    Parameters
    ----------
    choices : sequence of int
        The label of every unit in ``tables.chain.names()``, its number in ``tables.units``.
    data : int
        Data-parallel ranks.
    sharding : str
        How the optimizer is sharded. Unless that is ``none``, trained parameters are stored sharded along the data
        axis, on the largest local dim that divides; with ``zero3`` frozen ones as well.
    shard_size : int
        Ranks that a parameter is sharded over, all of them where 0.
    threshold_bytes : int
        Parameters with fewer local bytes stay whole.
    uneven : bool
        Whether a parameter none of whose dims divides is sharded unevenly, as FSDP2 does, and does not stay whole.

    Raises
    ------
    InputError
        The number of choices is not that of the units.
    """
    positions = tables.chain.positions
    if len(choices) != len(positions):
        raise InputError(f"{len(choices)} labels were chosen for {len(positions)} units; choose one for each")
    beside = _data_axis(tables.decisions, tables.parts, data) if data > 1 else None
    ways = 1 if sharding == "none" else shard_size or data
    whole = frozenset() if sharding == "zero3" else _frozen(tables.parts.graph)
    made: dict[tuple[int, int, int], UnitRules] = {}
    units: list[UnitRules] = []
    for place, (number, choice) in enumerate(zip(positions, choices, strict=True)):
        along = beside.numbers[place] if beside else 0
        key = (number, choice, along)
        if key not in made:
            rules = _rules(tables.decisions, tables.parts, number, tables.units[number].assignments[choice])
            if beside:
                stored = _Stored(tables.parts, ways, threshold_bytes, whole, uneven)
                rules = _beside(tables, beside.rules(number, along), rules, stored)
            made[key] = rules
        units.append(made[key])
    return _by_name(tables, units)


def _rules(source: StageDecisions, parts: Parts, number: int, states: Mapping[int, int]) -> UnitRules:
    """Rules of a unit's nodes in an assignment, along each axis of the mesh of `parts`."""
    found = {}
    chosen: dict[int, list[tuple[Rule, ...]]] = {}
    for index, variable, position in source.followed[number]:
        if variable in states:
            if variable not in chosen:
                all_states = parts.states(variable)
                along = all_states.choice[:, states[variable]].tolist()
                chosen[variable] = [all_states.variable.choices[c].rules for c in along]
            found[index] = tuple([rules[position] for rules in chosen[variable]])
    return found


def _data_axis(source: StageDecisions, parts: Parts, data: int) -> _DataAxis:
    """The data axis of a plan, found once for all plans with as many ranks and samples."""
    fixed = source.along_data is not None
    source = source.along_data or source
    costs = source.costs(
        parts.setting.costs.hardware, Mesh((MeshAxis("data", data),)), parts.setting.costs.bucket_bytes
    )
    key = (id(costs), parts.graph.batch_size * data)
    if key not in source.data_axes:
        source.data_axes[key] = _DataAxis(source, parts, data, batch_only=not fixed)
    found = source.data_axes[key]
    assert isinstance(found, _DataAxis)  # made here
    return found


class _DataAxis:
    """The best strategy along the data axis alone; ``numbers`` say which of its assignments each unit takes.

    Raises
    ------
    InputError
        The choices that are left do not fit each other.
    """

    def __init__(self, source: StageDecisions, parts: Parts, data: int, *, batch_only: bool) -> None:
        mesh = Mesh((MeshAxis("data", data),))
        setting = Setting(
            costs=source.costs(parts.setting.costs.hardware, mesh, parts.setting.costs.bucket_bytes),
            micro_batches=1,
            optimizer=parts.setting.optimizer,
            storage="replicated",
            batch_only=batch_only,
        )
        graph = at_batch(source.graph, parts.graph.batch_size * data)
        self.source = source
        self.parts = Parts(graph, source.decisions, setting)
        stage = Stage(source, self.parts, StageOptions(modes=(0,), sequence_parallel=None))
        # Gradients are summed once a step, not in every micro-batch, though one micro-batch takes equally long in both.
        best = stage.minimum(UnitWeights(step=STEP_WEIGHTS[0]))
        if not np.isfinite(best.value):
            raise InputError(
                f"strategies of operators do not fit each other along the data axis of {data}: what one writes another "
                "cannot read; leave one of them out"
            )
        self.assignments: list[Mapping[int, int]] = []
        self.numbers = []
        known: dict[tuple[int, int, int], int] = {}
        for place, states in enumerate(best.assignments):
            key = (source.chain.positions[place], best.entries[place], best.exits[place])
            if key not in known:
                known[key] = len(self.assignments)
                self.assignments.append(states)
            self.numbers.append(known[key])
        self._rules: dict[tuple[int, int], UnitRules] = {}

    def rules(self, number: int, assignment: int) -> UnitRules:
        if (number, assignment) not in self._rules:
            self._rules[number, assignment] = _rules(self.source, self.parts, number, self.assignments[assignment])
        return self._rules[number, assignment]


def _frozen(graph: OperatorGraph) -> frozenset[int]:
    return frozenset(parameter.node for parameter in graph.parameters) - graph.trained


@dataclass(frozen=True, slots=True)
class _Stored:
    """How parameters lie along the data axis between steps, as `rules_of` is asked; those of `whole` stay so."""

    parts: Parts
    ways: int
    threshold_bytes: int
    whole: frozenset[int]
    uneven: bool

    def dim(self, index: int, rules: NodeRules) -> int:
        """Largest dim of the local parameter that divides, ties to the first; replicated where none does.

        Dims that no other axis shards come first: of a dim that two axes shard, parts can only be gathered all at once.
        """
        spec = self.parts.graph.nodes[index].outputs[0]
        placed = tuple(rule.outputs[0] for rule in rules)
        local = local_shape(spec.shape, placed, self.parts.sizes)
        if prod(local) * DTYPE_BYTES[spec.dtype] < self.threshold_bytes:
            return REPLICATE
        fitting = [dim for dim, extent in enumerate(local) if extent % self.ways == 0]
        if not fitting and self.uneven:
            fitting = [dim for dim, extent in enumerate(local) if extent >= self.ways]
        return max(fitting, key=lambda dim: (dim not in placed, local[dim], -dim), default=REPLICATE)


def _beside(tables: StageTables, along: UnitRules, rules: UnitRules, stored: _Stored) -> UnitRules:
    """Put the rule of the data axis before the others; parameters get the placement in which they are stored."""
    decisions = tables.decisions.decisions
    found = {}
    for index, others in rules.items():
        first = along[index][0]
        parameter = decisions.variables[decisions.of_node[index]].kind is Kind.PARAMETER
        if parameter and stored.ways > 1 and index not in stored.whole:
            first = Rule((), (stored.dim(index, others),), splits_work=False)
        found[index] = (first, *others)
    return found


def _by_name(tables: StageTables, units: Sequence[UnitRules]) -> tuple[dict[str, NodeRules], tuple[LayerRules, ...]]:
    """Name the rules: those of nodes outside runs once, those of blocks by ranges of equal ones."""
    graph, chain = tables.parts.graph, tables.chain
    inside = {i for run in graph.runs for i in (*run.first, *run.second)}
    rules: dict[str, NodeRules] = {}
    blocks: list[list[dict[str, NodeRules]]] = [[] for _ in graph.runs]
    named: dict[tuple[int, int], dict[str, NodeRules]] = {}
    for number, found in zip(chain.positions, units, strict=True):
        unit, key = chain.units[number], (number, id(found))
        if key not in named:  # equal layers are named once
            for index, node_rules in found.items():
                if index not in inside:
                    rules.setdefault(graph.nodes[index].name, node_rules)
            named[key] = {}
            if unit.run is not None:
                own, prefix = (i for i in found if i in inside), graph.runs[unit.run].prefix
                named[key] = {template_name(graph.nodes[i].name, prefix): found[i] for i in own}
        if unit.run is not None:
            blocks[unit.run].append(named[key])
    layers: list[LayerRules] = []
    for run, made in zip(graph.runs, blocks, strict=True):
        first = run_start(graph, run)
        for _, one_object in groupby(made, key=id):
            members = list(one_object)
            last = first + len(members) - 1
            if layers and layers[-1].prefix == run.prefix and layers[-1].rules == members[0]:
                layers[-1] = replace(layers[-1], last=last)
            else:
                layers.append(LayerRules(prefix=run.prefix, first=first, last=last, rules=members[0]))
            first = last + 1
    return rules, tuple(layers)
