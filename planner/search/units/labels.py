"""Every way that can pay to run each unit of a network on one pipeline stage.

A *label* is one Pareto-optimal strategy of one unit between two placements of its boundary tensors. Labels do
not depend on the data and pipeline degrees: one table serves all plans with the same stage mesh and micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import Optimizer
from planner.graph.operator_graph import OperatorGraph
from planner.search.problem.parts import Parts
from planner.search.problem.problem import Problem
from planner.search.problem.states import Setting
from planner.search.units.records import (
    RECOMPUTE,
    BoundaryStates,
    Minimum,
    TiedParameter,
    UnitLabels,
    UnitWeights,
)
from planner.search.units.stage_decisions import StageDecisions
from planner.search.units.stage_shape import StageOptions
from planner.search.units.stage_tables import Stage
from planner.search.units.sweep import all_labels
from planner.sharding.context import Algorithm
from planner.sharding.placement import Mesh
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.launches import known_software, launch_time

__all__ = [
    "RECOMPUTE",
    "BoundaryStates",
    "Minimum",
    "StageDecisions",
    "StageTables",
    "TiedParameter",
    "UnitLabels",
    "UnitWeights",
    "stage_tables",
]

FloatArray = NDArray[np.float64]


class StageTables(Stage):
    """Labels of every unit of a folded graph on one stage mesh at one micro-batch size.

    ``units[u]`` are the labels of ``chain.units[u]``; ``boundaries[b]`` the states with their bytes. ``tied`` are the
    parameters that several units read, in the one placement that all labels share. ``context_algorithm`` is how
    attention runs on the context axis, ``none`` without one.
    """

    def __init__(
        self, decisions: StageDecisions, parts: Parts, options: StageOptions, context_algorithm: str = "none"
    ) -> None:
        super().__init__(decisions, parts, options)
        self.context_algorithm = context_algorithm

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many units each unit of the folded chain stands for."""
        return tuple(unit.count for unit in self.chain.units)

    @cached_property
    def launches_s(self) -> FloatArray:
        """(units,) least seconds in which the host launches both passes of each unit."""
        hardware = self.parts.setting.costs.hardware
        launches = self.decisions.least_launches(chained=known_software(hardware))
        return launch_time(hardware) * np.array(launches, dtype=np.float64)

    @cached_property
    def saved_bytes(self) -> float:
        """Bytes of all tensors that wait for the backward pass, whole."""
        spec, models = self.parts.graph.spec, self.decisions.models
        saved = [sum(spec(ref).size_bytes for ref in model.saved) for model in models]
        return float(np.array(saved) @ np.array(self.counts))

    @property
    def modes(self) -> tuple[int, ...]:
        """Codes of the modes of recomputation that labels may have."""
        return self.options.modes

    @cached_property
    def tied(self) -> tuple[TiedParameter, ...]:
        """Parameters that several units read, in the placement of all labels."""
        return tuple(self._tied())

    @cached_property
    def problem(self) -> Problem:
        """The whole graph on the stage mesh: its states are those that assignments number."""
        return Problem(self.parts.graph, self.parts.decisions, self.parts.setting)

    @cached_property
    def units(self) -> tuple[UnitLabels, ...]:
        """Labels of each unit."""
        return all_labels(self, self.least.shared if self.shared else {})

    def sequence_parallel(self, unit: int, label: int) -> bool:
        """Whether a label of a unit shards an activation along the sequence on the tensor axis."""
        return self.shape.shards_sequence(self.units[unit].assignments[label])

    def _tied(self) -> Iterator[TiedParameter]:
        for station in self.shared:
            tensor = self.decisions.decisions.variables[station].tensor
            assert tensor is not None  # a station of a parameter
            owners = tuple(n for n, m in enumerate(self.decisions.models) if station in m.shared)
            whole = self.tied_elements(station, self.least.shared)
            stored = min(whole, self._stored_elements(tensor.node, owners[0]))
            trained = tensor.node in self.parts.graph.trained
            yield TiedParameter(node=tensor.node, units=owners, elements=stored, whole_elements=whole, trained=trained)

    def _stored_elements(self, parameter: int, owner: int) -> float:
        """Local elements of a tied parameter as the fastest way to run the unit that it counts in stores it."""
        unit = self.units[owner]
        fastest = int(np.argmin(unit.forward_s + unit.backward_s + unit.step_s))
        number = self.decisions.decisions.of_node[parameter]
        return float(self.parts.elements(self.parts.states(number))[unit.assignments[fastest][number]])


def stage_tables(
    graph: OperatorGraph,
    decisions: StageDecisions,
    hardware: Hardware,
    mesh: Mesh,
    *,
    optimizer: Optimizer,
    bucket_bytes: int,
    recompute: Sequence[str] = RECOMPUTE,
    sequence_parallel: bool | None = None,
    context_algorithm: Algorithm = "ring",
    experts_stay: bool = False,
    expert_cut: str = "any",
    tensor_cut: str = "any",
    shares_states: bool = False,
) -> StageTables:
    """Tabulate the ways to run each unit on one pipeline stage.

    Parameters
    ----------
    graph : OperatorGraph
        Folded, its batch the micro-batch of one data-parallel rank; on an expert axis the batch is sharded.
    decisions : StageDecisions
        Those of the same graph at any batch.
    mesh : Mesh
        The stage's axes other than data.
    recompute : sequence of str
        Modes that are allowed.
    sequence_parallel : bool, optional
        True: boundary tensors are sharded along the sequence on the tensor axis; False: no activation is.
    context_algorithm : str
        How attention runs on a context axis, ``ring`` or ``all_to_all``.
    experts_stay : bool
        Ranks of an expert axis work with their own experts alone: tokens travel, not weights.
    expert_cut : str
        What tensor ranks have of experts: part of the ``width`` of each, ``whole`` ones, or ``any`` of both.
    tensor_cut : str
        ``width``: tensor ranks cut the matrix of every product; ``any``: they may each have it whole.
    shares_states : bool
        Ranks of the context and expert axes that hold copies of a matrix store a shard of it each.

    Raises
    ------
    InputError
        The mesh has a data axis, a mode is unknown, or the sequence cannot be sharded as asked.
    UnsupportedError
        The mesh has a context axis and an operator cannot work on part of the sequence.
    """
    if any(axis.name == "data" for axis in mesh.axes):
        raise InputError("a stage mesh has no data axis: a table serves every data degree; leave it out")
    unknown = [mode for mode in recompute if mode not in RECOMPUTE]
    if unknown or not recompute:
        raise InputError(f"recompute modes {list(recompute)} are not some of {', '.join(RECOMPUTE)}; correct them")
    costs = decisions.costs(hardware, mesh, bucket_bytes)
    context = decisions.context(mesh, context_algorithm)
    setting = Setting(
        costs=costs,
        micro_batches=1,
        optimizer=optimizer,
        context=context,
        free_axes=decisions.free_axes,
        experts_stay=experts_stay,
        expert_cut=expert_cut,
        tensor_cut=tensor_cut,
        shares_states=shares_states,
    )
    options = StageOptions(
        modes=tuple(sorted({RECOMPUTE.index(mode) for mode in recompute})), sequence_parallel=sequence_parallel
    )
    algorithm = context_algorithm if context else "none"
    return StageTables(decisions, Parts(graph, decisions.decisions, setting), options, algorithm)
