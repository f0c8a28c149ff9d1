"""Hints in plans of pipeline stages: what they leave of the choices on the tensor axis, and on the data axis beside it.

Labels of units are made for the tensor axis alone, and what a plan does along its data axis is chosen after them. A
strategy that cuts tensors in parts says nothing of axes, so that it is dealt out before: the data axis takes the cut of
the batch where the strategy has it, and whatever is left is for the tensor axis. What no hint is for keeps all its
choices, or shards the batch (`planner.search.problem.hints`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import Optimizer
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.plans.hints import Hint
from planner.search.problem.hints import FREE_AXES, allowed_states, states_by_data
from planner.search.problem.parts import Parts
from planner.search.problem.states import Setting
from planner.search.units.records import Least
from planner.search.units.stage_decisions import StageDecisions
from planner.sharding.placement import Mesh, MeshAxis
from simulator.errors import ContextError
from simulator.hardware import Hardware

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHints:
    """Hints for the operators of plans with stages; with ``rest_by_data`` all other operators shard the batch.

    With ``anywhere`` the data axis may do something else for hinted operators than cut their batch: it is followed, but
    the closed form does not know what it costs.
    """

    hints: tuple[Hint, ...] = ()
    rest_by_data: bool = False
    anywhere: bool = False

    def __bool__(self) -> bool:
        return bool(self.hints)


NO_HINTS = StageHints()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMesh:
    """Data and tensor degrees of a stage on some hardware."""

    hardware: Hardware
    data: int
    tensor: int

    def parts(
        self,
        source: StageDecisions,
        graph: OperatorGraph,
        optimizer: Optimizer,
        names: tuple[str, ...],
        **options: object,
    ) -> Parts:
        """States on some of the axes of what is left of the variables of `source`, at the batch of `graph`."""
        degrees = {"data": self.data, "tensor": self.tensor}
        mesh = Mesh(tuple(MeshAxis(name, degrees[name]) for name in names if degrees[name] > 1))
        costs = source.costs(self.hardware, mesh, 0)
        setting = Setting(costs=costs, micro_batches=1, optimizer=optimizer, **options)  # type: ignore[arg-type]
        return Parts(graph, source.decisions, setting)


def hinted_decisions(
    source: StageDecisions, graph: OperatorGraph, mesh: StageMesh, optimizer: Optimizer, asked: StageHints
) -> StageDecisions:
    """What hints leave to choose in the stages of a mesh.

    Parameters
    ----------
    source
        All decisions of the network.
    graph
        The network at the samples of a micro-batch on all data-parallel ranks.

    Raises
    ------
    ContextError
        An operator cannot be cut so on this mesh.
    InputError
        Hints name nothing, or contradict each other.
    UnsupportedError
        They tell layers apart.
    """
    both = mesh.parts(source, graph, optimizer, ("data", "tensor"), free_axes=FREE_AXES)
    allowed = allowed_states(both, asked.hints)
    pairs = {number: both.states(number).choice[:, states] for number, states in allowed.items()}
    along_data: Mapping[int, tuple[int, ...]] = {}
    estimated = False
    along_tensor: dict[int, tuple[int, ...]] = {}
    if mesh.data > 1:
        usual = mesh.parts(source, graph, optimizer, ("data",), batch_only=True, storage="replicated")
        everything = {n: _choices(usual, n) for n in range(len(source.decisions.variables))}
        along_data = everything | {n: _along_data(rows, frozenset(everything[n])) for n, rows in pairs.items()}
        elsewhere = [n for n in pairs if not set(everything[n]).issuperset(along_data[n])]
        estimated = bool(elsewhere)
        if elsewhere and not asked.anywhere:
            name = graph.nodes[source.decisions.variables[elsewhere[0]].nodes[0]].name
            raise ContextError(
                f"strategy of {name!r} on {mesh.data} data-parallel ranks: it does not cut the batch in {mesh.data}"
            )
    local = at_batch(graph, graph.batch_size // mesh.data)
    wide = mesh.parts(source, local, optimizer, ("tensor",), free_axes=FREE_AXES)
    free_axes = FREE_AXES if asked.rest_by_data else frozenset[str]()
    if mesh.tensor > 1:
        for number, rows in pairs.items():
            along_tensor[number] = _along_tensor(wide, number, rows, along_data.get(number))
        narrow = mesh.parts(source, local, optimizer, ("tensor",))
        inside = {n: tuple(c for c in choices if c in _choices(narrow, n)) for n, choices in along_tensor.items()}
        # The tensor axis cuts the batch where a strategy needs it to, and nowhere else.
        free_axes = free_axes if all(inside.values()) else FREE_AXES
        along_tensor = along_tensor if free_axes else inside
    if asked.rest_by_data and mesh.tensor > 1:
        for number, states in states_by_data(wide, allowed.keys()).items():
            if not states.all():
                along_tensor[number] = tuple(wide.states(number).choice[0, states].tolist())
    data_side = source.restricted(along_data) if along_data else None
    return source.restricted(along_tensor, free_axes=free_axes, along_data=data_side, estimated=estimated)


def _choices(parts: Parts, number: int) -> tuple[int, ...]:
    """Choices of a variable on a mesh of one axis."""
    found: tuple[int, ...] = tuple(parts.states(number).choice[0].tolist())
    return found


def _along_data(pairs: IntArray, usual: frozenset[int]) -> tuple[int, ...]:
    """Choices along the data axis which leave the tensor axis the same, of those in `pairs`, shape (axes, pairs).

    Usual ones, which cut the batch, come first; then those that leave most.
    """
    if len(pairs) == 1:
        return tuple(sorted(set(pairs[0].tolist())))
    beside: dict[int, set[int]] = {}
    for data, tensor in zip(*pairs.tolist(), strict=True):
        beside.setdefault(data, set()).add(tensor)
    best = max(beside, key=lambda choice: (choice in usual, len(beside[choice]), -choice))
    alike = (c for c in beside if (c in usual) == (best in usual) and beside[c] >= beside[best])
    return tuple(sorted(alike))


def _along_tensor(wide: Parts, number: int, pairs: IntArray, data: tuple[int, ...] | None) -> tuple[int, ...]:
    """Choices along the tensor axis that go with all of those along the data axis.

    Raises
    ------
    ContextError
        A micro-batch of one data-parallel rank cannot be cut so.
    """
    found = set(pairs[-1].tolist())
    for choice in data or ():
        found &= set(pairs[1, pairs[0] == choice].tolist())
    kept = tuple(sorted(found.intersection(_choices(wide, number))))
    if not kept:
        name = wide.graph.nodes[wide.decisions.variables[number].nodes[0]].name
        raise ContextError(
            f"strategy of {name!r}: its cut of the batch does not divide a micro-batch of {wide.graph.batch_size} on "
            "each data-parallel rank; use larger micro-batches, or cut the batch in as many parts as there are "
            "data-parallel ranks"
        )
    return kept


def check_possible(decisions: StageDecisions, least: Least) -> None:
    """Raise ContextError where hints leave no way to run some unit, or units after one another."""
    for unit, seconds in zip(decisions.chain.units, least.between_s, strict=True):
        if np.isinf(seconds.min()):
            raise ContextError(
                f"strategies of operators of {unit.name!r} do not fit each other on the tensor axis: what one writes "
                "another cannot read; leave one of them out"
            )
    if np.isinf(least.whole_s):
        raise ContextError(
            "strategies of operators of units that follow each other do not fit on the tensor axis: what one hands on "
            "the next cannot take; leave one of them out"
        )
