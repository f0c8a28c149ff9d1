"""Plans of the whole space: configurations searched, written as plans, and scored by the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from planner.analytic import analytic_breakdown
from planner.graph.operator_graph import OperatorGraph, Role
from planner.prediction import Prediction, predict_plan
from planner.request import Pins
from planner.search.configurations.bounds import work_bound
from planner.search.configurations.branch_and_bound import PROOF, Explored, Placed, diverse, explore
from planner.search.configurations.space import LONG_SEQUENCE, Extent, check_pins
from planner.search.configurations.step_model import Configuration, StepModel
from planner.search.stages.partition import partition
from planner.search.stages.segments import simplified
from planner.search.units.labels import RECOMPUTE, StageDecisions, StageTables, rules_of, stage_tables
from planner.sharding.context import Algorithm, ContextAxis
from planner.shared_tables import NetworkTables
from planner.strategy.plan import Certificate, Chunk, Plan, RecomputeRange, Status
from planner.work import Optimizer
from simulator.errors import UnsupportedError
from simulator.hardware import Hardware
from simulator.program import Kernel

TIGHTER = 2
"""How often a plan whose simulated peak does not fit is partitioned again with less memory."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A plan with its prediction, and the configuration that it comes from."""

    placed: Placed
    plan: Plan
    prediction: Prediction


@dataclass(kw_only=True)
class Configured:
    """The searches of one request: tables are made once for all of them.

    ``graph`` is folded, at the request's precision and batch 1; ``base`` are the fields of every plan; ``shared`` is
    what searches of the same graph have made before.
    """

    graph: OperatorGraph
    hardware: Hardware
    devices: int
    global_batch: int
    optimizer: Optimizer
    dtype: str
    bucket_bytes: int
    sequence: int
    base: Mapping[str, object]
    shared: NetworkTables | None = None

    def __post_init__(self) -> None:
        if self.shared is None:
            self.shared = NetworkTables(self.graph)

    @property
    def decisions(self) -> StageDecisions:
        """The chain of the network and its decisions."""
        return self._shared.decisions

    @property
    def _shared(self) -> NetworkTables:
        assert self.shared is not None  # made when this was
        return self.shared

    def extent(self, pins: Pins, devices: int | None = None) -> Extent:
        """The space that pins leave; raises UnsupportedError for a pinned context axis that the network forbids."""
        context = self._context(pins)
        return Extent(
            hardware=self.hardware,
            devices=devices or self.devices,
            global_batch=self.global_batch,
            pins=pins,
            units=sum(unit.count for unit in self.decisions.chain.units),
            sequence=self.sequence if context or pins.cp else 0,
            context=context,
            experts=experts_of(self.graph),
        )

    def _context(self, pins: Pins) -> ContextAxis | None:
        """What the network does on a context axis, where one is searched and possible."""
        if pins.cp == 1 or (pins.cp is None and self.sequence < LONG_SEQUENCE):
            return None
        try:
            return self.decisions.context_axis(_algorithm(pins))
        except UnsupportedError:
            if pins.cp is None:
                return None
            raise

    def model(self, hardware: Hardware | None = None, limit_bytes: float | None = None) -> StepModel:
        """The closed form, perhaps of other hardware or with other memory."""
        hardware = hardware or self.hardware
        return StepModel(
            hardware=hardware,
            optimizer=self.optimizer,
            dtype=self.dtype,
            limit_bytes=float(hardware.device_memory_bytes if limit_bytes is None else limit_bytes),
            bucket_bytes=self.bucket_bytes,
        )

    def tables(self, pins: Pins, configuration: Configuration, hardware: Hardware | None = None) -> StageTables:
        """Tables of a configuration's stage mesh at its micro-batch."""
        hardware = hardware or self.hardware
        asked = (pins.recompute, pins.sequence_parallel, _algorithm(pins))
        return self._shared.tables(
            (hardware, configuration.table_key, self.optimizer, self.bucket_bytes, *asked),
            lambda: stage_tables(
                self._shared.at_batch(configuration.micro_batch * configuration.expert),
                self.decisions,
                hardware,
                configuration.inner_mesh(),
                optimizer=self.optimizer,
                bucket_bytes=self.bucket_bytes,
                recompute=RECOMPUTE if pins.recompute is None else (pins.recompute,),
                sequence_parallel=pins.sequence_parallel,
                context_algorithm=_algorithm(pins),
            ),
        )

    def explore(
        self, pins: Pins, *, wanted: int = 1, devices: int | None = None, limit_bytes: float | None = None,
        solves: int | None = None, incumbent_s: float = np.inf, until_found: bool = False,
    ) -> Explored:  # fmt: skip
        """Search the space that pins leave, on other devices or with other memory if so asked."""
        extent = self.extent(pins, devices)
        check_pins(extent)
        sample_s = work_bound(self.graph, self.hardware, self.dtype, extent.devices)
        options = {} if solves is None else {"solves": solves}
        model = self.model(limit_bytes=limit_bytes)
        return explore(
            extent,
            model,
            lambda c: self.tables(pins, c),
            sample_s=sample_s,
            wanted=wanted,
            incumbent_s=incumbent_s,
            until_found=until_found,
            **options,
        )

    # Plans

    def plan(self, placed: Placed, certificate: Certificate) -> Plan:
        """Write a solved configuration as a plan."""
        c, chosen, tables = placed.configuration, placed.partition, placed.tables
        names = tables.chain.names()
        labels = [tables.units[unit] for unit in tables.chain.positions]
        modes = [RECOMPUTE[int(unit.recompute[pick])] for unit, pick in zip(labels, chosen.labels, strict=True)]
        sharded = any(bool(unit.sequence_parallel[pick]) for unit, pick in zip(labels, chosen.labels, strict=True))
        rules, layers = rules_of(
            tables, chosen.labels, c.data, sharded=c.optimizer_sharding != "none", shard_size=c.shard_size
        )
        return Plan(
            **self.base,  # type: ignore[arg-type]
            micro_batch=c.micro_batch,
            micro_batches=c.micro_batches,
            mesh=c.mesh(),
            rules=rules,
            layers=layers,
            optimizer_sharding=c.optimizer_sharding,
            certificate=certificate,
            recompute=RECOMPUTE[max(RECOMPUTE.index(mode) for mode in modes)],
            recompute_ranges=_ranges(names, modes),
            schedule=c.schedule,
            sequence_parallel=sharded and c.tensor > 1,
            pipeline=c.pipeline,
            pipeline_stride=c.stride("pipeline") if c.pipeline > 1 else 0,
            virtual=c.virtual,
            chunks=_chunks(names, placed) if c.pipeline > 1 else (),
            shard_size=c.shard_size,
            offload_optimizer=c.offload,
            context_algorithm=tables.context_algorithm if c.context > 1 else "none",
        )

    def certificate(self, explored: Explored, placed: Placed) -> Certificate:
        """What the search proved of one of its plans."""
        bound = min(explored.lower_bound_s, placed.objective_s)
        proven = bound >= placed.objective_s * (1 - PROOF)
        return Certificate(
            status=Status.OPTIMAL if proven else Status.BOUNDED,
            objective_s=placed.objective_s,
            lower_bound_s=bound,
            elimination_width=0,
            operators=sum(
                times
                for node, times in zip(self.graph.nodes, self.graph.multiplicity, strict=True)
                if node.role is Role.OPERATOR
            ),
            distinct_blocks=len(self.graph.runs),
            configurations=explored.opened,
            partitions=explored.solved,
        )

    def scored(self, explored: Explored, count: int) -> list[Scored]:
        """The best plans by objective, each so that its simulated peak fits."""
        found = []
        for placed in diverse(explored.found, count):
            item = self._fitting(explored, placed)
            if item is not None:
                found.append(item)
        return found

    def _fitting(self, explored: Explored, placed: Placed) -> Scored | None:
        limit = float(self.hardware.device_memory_bytes)
        allowed = placed.task.limit_bytes
        for _ in range(TIGHTER + 1):
            plan = self.plan(placed, self.certificate(explored, placed))
            prediction = predict_plan(plan, self.graph, self.hardware)
            over = prediction.peak_memory_bytes - limit
            if over <= 0:
                prediction = replace(prediction, analytic=analytic_breakdown(placed, prediction))
                return Scored(placed=placed, plan=plan, prediction=prediction)
            allowed -= over + 0.01 * limit
            again = partition(simplified(replace(placed.task, limit_bytes=allowed)))
            if again is None:
                return None
            placed = replace(placed, partition=again)
        return None


def experts_of(graph: OperatorGraph) -> int:
    """Experts of the largest grouped product; 0 where there is none."""
    found = [
        graph.spec(node.tensor_inputs[-1]).shape[0]
        for node in graph.nodes
        if node.kernel is Kernel.MATMUL
        and "expert" in node.module
        and len(graph.spec(node.tensor_inputs[-1]).shape) == 3
    ]
    return max(found, default=0)


def _algorithm(pins: Pins) -> Algorithm:
    """How attention runs on a context axis, if there is one."""
    return "all_to_all" if pins.context_algorithm == "all_to_all" else "ring"


def _chunks(names: Sequence[str], placed: Placed) -> tuple[Chunk, ...]:
    found, begin = [], 0
    for rank, end in zip(placed.task.rank_of.tolist(), placed.partition.ends, strict=True):
        found.append(Chunk(rank=int(rank), first=names[begin], last=names[end - 1]))
        begin = end
    return tuple(found)


def _ranges(names: Sequence[str], modes: Sequence[str]) -> tuple[RecomputeRange, ...]:
    """Rows of units that compute again in one mode."""
    found, begin = [], 0
    for mode, members in groupby(modes):
        end = begin + len(list(members))
        if mode != RECOMPUTE[0]:
            found.append(RecomputeRange(first=names[begin], last=names[end - 1], mode=mode))
        begin = end
    return tuple(found)
