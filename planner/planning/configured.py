"""Plans of the whole space: configurations searched, written as plans, and scored by the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from planner.cost.work import Optimizer
from planner.graph.experts import experts_of
from planner.graph.host_tables import host_tables
from planner.graph.operator_graph import OperatorGraph, Role
from planner.lowering.checked import fits_copies
from planner.planning.prediction import Prediction, predict_plan, with_host
from planner.planning.rescoring import Contender, Field, Foretold, analytic_breakdown, rescore
from planner.planning.shared_tables import NetworkTables
from planner.planning.software_memory import held_by_software, host_refusal
from planner.planning.unit_ranges import chunks, offload_ranges, recompute_ranges
from planner.plans.exchange import UNASKED, Exchange
from planner.plans.pins import Pins
from planner.plans.plan import Certificate, Plan, Status, expanded_rules
from planner.search.candidates import that_can_cut
from planner.search.configurations.agenda import PROOF
from planner.search.configurations.bounds import work_bound
from planner.search.configurations.branch_and_bound import explore
from planner.search.configurations.explored import Explored, Placed, Unfit, diverse, joined
from planner.search.configurations.pin_checks import check_pins
from planner.search.configurations.space import LONG_SEQUENCE, Extent, bases, expert_cut, orders
from planner.search.configurations.step_model import Configuration, StepModel
from planner.search.configurations.storage import Held
from planner.search.exact.blocks import TooWideError
from planner.search.patience import Patience
from planner.search.problem.hints import first_not_kept
from planner.search.problem.unaligned import in_runs
from planner.search.stages.partition import partition
from planner.search.stages.task import simplified
from planner.search.stages.unit_pins import FREE, UnitPins
from planner.search.units.hinted import NO_HINTS, StageHints, StageMesh, check_possible, hinted_decisions
from planner.search.units.labels import RECOMPUTE, StageDecisions, StageTables, stage_tables
from planner.search.units.rules import rules_of
from planner.sharding.context import ALGORITHMS, Algorithm, ContextAxis
from planner.sharding.placement import Mesh
from simulator.checks import divisors
from simulator.errors import ContextError, InputError, UnsupportedError
from simulator.hardware import Hardware
from simulator.launches import known_software, launch_time

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

    ``graph`` is folded, at the request's precision and batch 1. ``base`` has the fields that all plans share, and
    ``shared`` the tables that earlier searches of the same graph made. On ``overlapped`` tokens travel to experts
    beside another micro-batch. Parameters of less than ``threshold_bytes`` stay whole. Without ``shares_sequence``
    sequence parallelism is ruled out. ``unit_pins`` fix single units, ``hints`` strategies of operators. The closed
    form is not given ``spared_bytes`` of a device's memory, by which plans missed that it held to fit.
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
    threshold_bytes: int = 0
    unit_pins: UnitPins = FREE
    hints: StageHints = NO_HINTS
    spared_bytes: float = 0.0
    overlapped: Hardware | None = None
    shares_sequence: bool = True

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
        devices = devices or self.devices
        if self.unit_pins.pieces is not None:
            virtual = self.unit_pins.virtual
            schedule = "interleaved_1f1b" if virtual > 1 else pins.schedule
            pins = replace(pins, pp=self.unit_pins.pieces // virtual, vpp=virtual, schedule=schedule)
        return Extent(
            hardware=self.hardware,
            devices=devices,
            global_batch=self.global_batch,
            pins=pins,
            units=sum(unit.count for unit in self.decisions.chain.units),
            sequence=self.sequence,
            experts=experts_of(self.graph),
            context=self._context(pins),
            gradient_bytes=float(trained_bytes(self.graph)),
            undivided=undivided(self.graph, devices),
            sample_s=work_bound(self.graph, self.hardware, self.dtype, devices),
            launch_s=self._launch_s(),
        )

    def _launch_s(self) -> float:
        """Seconds in which a host launches one micro-batch's passes at least."""
        each, units = launch_time(self.hardware), self.decisions.chain.units
        if not each:
            return 0.0
        launches = self.decisions.least_launches(chained=known_software(self.hardware))
        return each * sum(unit.count * number for unit, number in zip(units, launches, strict=True))

    def _context(self, pins: Pins) -> Mapping[str, ContextAxis] | None:
        """What the network does on a context axis by algorithm, where one is searched; None where none is."""
        named = pins.context_algorithm in ALGORITHMS
        wanted = named or (pins.cp or 1) > 1
        if not wanted and (pins.cp == 1 or pins.context_algorithm == "none" or self.sequence < LONG_SEQUENCE):
            return None
        found: dict[str, ContextAxis] = {}
        refusals: list[UnsupportedError] = []
        for algorithm in ALGORITHMS:
            try:
                found[algorithm] = self.decisions.context_axis(algorithm)
            except UnsupportedError as error:
                refusals += [error] * (pins.context_algorithm in (None, algorithm))
        if wanted and refusals and not (found and pins.context_algorithm is None):
            raise refusals[0]
        return found

    def model(self, hardware: Hardware | None = None, limit_bytes: float | None = None) -> StepModel:
        """The closed form, perhaps of other hardware or with other memory."""
        hardware = hardware or self.hardware
        return StepModel(
            hardware=hardware,
            optimizer=self.optimizer,
            dtype=self.dtype,
            limit_bytes=float(hardware.device_memory_bytes - self.spared_bytes if limit_bytes is None else limit_bytes),
            bucket_bytes=self.bucket_bytes,
            unit_pins=self.unit_pins,
            host_elements=self._host_elements(),
            parameters_away=bool(self.base.get("offload_parameters")),
            gradient_dtype=self._exchange.gradient_dtype,
            whole_sums=self._exchange.whole_sums,
            own_samples=self._exchange.cross_batch,
            software=self.software,
        )

    @cached_property
    def software(self) -> Held:
        """The memory of the plans' software, worked out from one layer on one device."""
        if not self.base.get("software"):
            return Held()
        # Hints speak of several devices.
        units = replace(self, hints=NO_HINTS).tables(Pins(), Configuration(micro_batch=1)).units
        most = max(range(len(units)), key=lambda unit: self.decisions.chain.units[unit].count)
        labels = units[most]
        each = [labels.activation_bytes[labels.recompute == mode].tolist() for mode in range(len(RECOMPUTE))]
        kept = [min(ways, default=0.0) for ways in each]
        plan = Plan(
            **self.base,  # type: ignore[arg-type]
            micro_batch=1,
            micro_batches=1,
            mesh=Mesh(()),
            rules={},
            layers=(),
            optimizer_sharding="none",
            certificate=Certificate(
                status=Status.HEURISTIC,
                objective_s=0.0,
                lower_bound_s=0.0,
                elimination_width=0,
                operators=0,
                distinct_blocks=0,
            ),
        )
        return held_by_software(plan, self.graph, self.hardware, kept, shares_sequence=self.shares_sequence)

    @property
    def _exchange(self) -> Exchange:
        """How tensors travel: as the plans say."""
        asked = self.base.get("exchange", UNASKED)
        assert isinstance(asked, Exchange)  # a field of every plan
        return asked

    def _host_elements(self) -> float:
        """Trained elements that the plans keep in the memory of the host."""
        if not self.base.get("host_embeddings"):
            return 0.0
        tables = host_tables(self.graph).parameters
        return float(sum(self.graph.multiplicity[i] * self.graph.nodes[i].outputs[0].elements for i in tables))

    def runs_on(self, expert_overlap: bool) -> Hardware:
        """The hardware as messages of tokens travel on it."""
        return self.overlapped if expert_overlap and self.overlapped is not None else self.hardware

    def tables(self, pins: Pins, configuration: Configuration, hardware: Hardware | None = None) -> StageTables:
        """Tables of a configuration's stage mesh at its micro-batch."""
        hardware = hardware or self.runs_on(configuration.expert_overlap)
        algorithm: Algorithm = "all_to_all" if configuration.context_algorithm == "all_to_all" else "ring"
        found = self._shared.tables(
            self._table_key(pins, configuration, hardware),
            lambda: stage_tables(
                self._shared.at_batch(configuration.micro_batch * configuration.expert),
                self._left(configuration, hardware),
                hardware,
                configuration.inner_mesh(),
                optimizer=self.optimizer,
                bucket_bytes=self.bucket_bytes,
                recompute=RECOMPUTE if pins.recompute is None else (pins.recompute,),
                sequence_parallel=pins.sequence_parallel,
                context_algorithm=algorithm,
                experts_stay=pins.experts_stay,
                expert_cut=expert_cut(pins, configuration),
                tensor_cut=pins.tensor_cut or "any",
                shares_states=configuration.all_replicas,
            ),
        )
        if self.hints:
            check_possible(found.decisions, found.least)
        return found

    def _table_key(self, pins: Pins, configuration: Configuration, hardware: Hardware) -> tuple[object, ...]:
        """All that tables of labels depend on beside the graph."""
        asked: tuple[object, ...] = (
            pins.recompute, pins.sequence_parallel, pins.experts_stay, expert_cut(pins, configuration), pins.tensor_cut,
        )  # fmt: skip
        if self.hints:
            asked = (*asked, self.hints, configuration.data)
        return (hardware, configuration.table_key, self.optimizer, self.bucket_bytes, *asked)

    def passes_s(self, pins: Pins, data: int, tensor: int, make: bool = False) -> tuple[float, float]:
        """Least seconds of both passes of the whole batch on a mesh whose data axis cuts the batch alone.

        And of the sums over the batch for which they wait. Both are 0 where no table was made of them, unless one is to
        be made and may be.
        """
        configuration = Configuration(data=data, tensor=tensor, micro_batch=self.global_batch // data)
        pins = replace(pins, recompute=self._modes(pins)[0])
        tables = self._shared.known(self._table_key(pins, configuration, self.hardware))
        try:
            if tables is None and make and not self.hints:
                tables = self.tables(pins, configuration)
            whole_s = 0.0 if tables is None else tables.least.whole_s
        except (InputError, TooWideError):
            return 0.0, 0.0
        if tables is None or data == 1 or not tables.decisions.sums_over_batch:
            return whole_s, 0.0
        waited = self.model().batch_sums_s(tables, configuration, least=True).sum(axis=1)
        return whole_s, float(waited @ np.array(tables.counts))

    def _left(self, configuration: Configuration, hardware: Hardware) -> StageDecisions:
        """Decisions of a configuration's stages: all of them, or what hints leave."""
        if not self.hints:
            return self.decisions
        c = configuration
        mesh = StageMesh(hardware=hardware, data=c.data, tensor=c.tensor)
        graph = self._shared.at_batch(c.micro_batch * c.data)
        return hinted_decisions(self.decisions, graph, mesh, self.optimizer, self.hints)

    def explore(
        self, pins: Pins, *, wanted: int = 1, devices: int | None = None, limit_bytes: float | None = None,
        solves: int | None = None, incumbent_s: float = np.inf, until_found: bool = False,
        patience: Patience | None = None,
    ) -> Explored:  # fmt: skip
        """Search the space that pins leave, on other devices or with other memory if so asked.

        Hints are kept on each mesh of data × tensor that can; where none cuts the batch alone along its data axis, that
        may do something else.
        """
        options = (wanted, devices, limit_bytes, solves)
        if not self.hints:
            return self._explore_spaces(pins, options, incumbent_s, until_found, patience)
        try:
            return self._explore_meshes(pins, options, incumbent_s, until_found, patience)
        except ContextError:
            if self.hints.anywhere:
                raise
        anywhere = replace(self, hints=replace(self.hints, anywhere=True))
        return anywhere._explore_meshes(pins, options, incumbent_s, until_found, patience)

    def _explore_spaces(
        self, pins: Pins, options: tuple[int, int | None, float | None, int | None], incumbent_s: float, first: bool,
        patience: Patience | None,
    ) -> Explored:  # fmt: skip
        """Search the space that pins leave, in the parts that labels of one table cannot tell apart.

        Labels are the best at prices of time, kept bytes and parameters. What gathered weights of experts cost besides
        depends on micro-batches and storages, which no price tells, so that labels with them may hide those that send
        tokens. Software that has one mode of recomputation for all layers is searched mode by mode.
        """
        spaces = [pins]
        if experts_of(self.graph) > 0 and pins.ep != 1 and not pins.experts_stay and not pins.expert_overlap:
            tokens = replace(pins, expert_messages="tokens")
            spaces = [pins, tokens] if pins.expert_messages else self._placed_experts(tokens)
        if self._may_overlap(pins):
            spaces += [replace(space, expert_overlap=True) for space in spaces if space.experts_stay]
        spaces = [
            replace(space, recompute=mode)
            for mode in self._modes(pins)
            for space in spaces
            if not (mode == "full" and space.expert_overlap and not pins.expert_overlap)
        ]
        done: list[Explored] = []
        for space in spaces:
            if done and next(bases(self.extent(space, options[1])), None) is None:
                continue
            done.append(self._explore(space, *options, incumbent_s, first, patience))
            incumbent_s = min([incumbent_s, *(placed.objective_s for placed in done[-1].found)])
            if done[-1].interrupted or (first and done[-1].found):
                break
        return joined(done) if len(done) > 1 else done[0]

    def _modes(self, pins: Pins) -> tuple[str | None, ...]:
        """The modes of recomputation to search apart: the pinned one, or each that software has for all layers.

        None stands for a free choice in every layer.
        """
        runs = pins.runs
        if pins.recompute is not None or self.unit_pins.modes or runs is None or runs.recompute_by_layer:
            return (pins.recompute,)
        return runs.recompute

    def _may_overlap(self, pins: Pins) -> bool:
        """Whether the software may have tokens travel beside another micro-batch, and no pin says whether."""
        free = pins.expert_overlap is None and pins.expert_messages != "any" and pins.ep != 1
        several = pins.micro_batches != 1 and pins.copies in (None, 1) and (pins.vpp != 1 or pins.pp == 1)
        runs = pins.runs is not None and "expert_overlap" in pins.runs.overlaps
        return runs and free and several and experts_of(self.graph) > 0

    @staticmethod
    def _placed_experts(tokens: Pins) -> list[Pins]:
        """List how experts are placed: without an expert axis, or with tokens that travel over it.

        No weights of experts are gathered, as no framework does. Tensor ranks of named software have part of the width
        of each expert (`expert_cut`), or whole ones of an expert axis.
        """
        found = [tokens] if tokens.ep else [replace(tokens, expert_messages=None, ep=1), tokens]
        if tokens.runs is not None and tokens.expert_cut is None and tokens.tp != 1 and len(tokens.runs.expert_cut) > 1:
            found.append(replace(tokens, expert_cut="whole"))
        return found

    def _explore_meshes(
        self, pins: Pins, options: tuple[int, int | None, float | None, int | None], incumbent_s: float, first: bool,
        patience: Patience | None,
    ) -> Explored:  # fmt: skip
        done: list[Explored] = []
        refused: InputError | None = None
        for fixed in self._meshes(pins, options[1] or self.devices):
            try:
                found = self._explore(fixed, *options, incumbent_s, first, patience)
            except InputError as error:
                # Another mesh may be able to.
                refused = refused or error
                continue
            done.append(found)
            incumbent_s = min([incumbent_s, *(placed.objective_s for placed in found.found)])
            if found.interrupted or (first and found.found):
                break
        if refused is not None and not done:
            raise refused
        explored = joined(done)
        if explored.refused and not explored.found and not explored.unfit:
            raise ContextError(explored.refused)
        return explored

    def _meshes(self, pins: Pins, devices: int) -> Iterator[Pins]:
        """Pins of each mesh of data × tensor that can cut as hints have it.

        Raises
        ------
        ContextError
            There is none.
        UnsupportedError
            Other axes are asked for.
        """
        beyond = [f"{name}={getattr(pins, name)}" for name in ("cp", "ep") if (getattr(pins, name) or 1) > 1]
        if beyond:
            raise UnsupportedError(
                f"pins {' '.join(beyond)} with strategies of operators: they are kept on meshes of data × tensor; "
                "leave out the pins, or the strategies"
            )
        found: list[Pins] = []
        refused: ContextError | None = None
        for stages in (n for n in divisors(devices) if pins.pp in (None, n)):
            each = devices // stages
            pairs = [(d, each // d) for d in divisors(each) if pins.dp in (None, d) and pins.tp in (None, each // d)]
            try:
                cutting = that_can_cut(pairs, self.hints.hints, each)
            except ContextError as error:
                refused = refused or error
                continue
            found += [replace(pins, pp=stages, dp=d, tp=t, cp=1, ep=1) for d, t in cutting]
        if refused is not None and not found:
            raise refused
        # Where pins leave nothing, the check of pins says why.
        yield from found or [pins]

    def _explore(
        self, pins: Pins, wanted: int, devices: int | None, limit_bytes: float | None, solves: int | None,
        incumbent_s: float, until_found: bool, patience: Patience | None,
    ) -> Explored:  # fmt: skip
        extent = self.extent(pins, devices)
        check_pins(extent)
        self.decisions.expect(self.runs_on(bool(pins.expert_overlap)), self.bucket_bytes, *_stages(extent))
        options = {} if solves is None else {"solves": solves}
        model = self.model(limit_bytes=limit_bytes)
        return explore(
            extent,
            model,
            lambda c: self.tables(pins, c),
            sample_s=extent.sample_s,
            wanted=wanted,
            incumbent_s=incumbent_s,
            until_found=until_found,
            patience=patience,
            **options,
        )

    # Plans

    def plan(self, placed: Placed, certificate: Certificate, threshold_bytes: int | None = None) -> Plan:
        """Write a solved configuration as a plan, perhaps with another threshold than the pinned one."""
        c, chosen, tables = placed.configuration, placed.partition, placed.tables
        names = tables.chain.names()
        labels = [tables.units[unit] for unit in tables.chain.positions]
        modes = [RECOMPUTE[int(unit.recompute[pick])] for unit, pick in zip(labels, chosen.labels, strict=True)]
        picked = dict.fromkeys(zip(tables.chain.positions, chosen.labels, strict=True))
        whole = c.optimizer_sharding == "none"
        threshold = 0 if whole else self.threshold_bytes if threshold_bytes is None else threshold_bytes
        rules, layers = rules_of(
            tables, chosen.labels, c.data, sharding=c.optimizer_sharding, shard_size=c.shard_size,
            threshold_bytes=threshold, uneven=not whole and self._all_in_shards(c),
        )  # fmt: skip
        if len(self._shared.graph.runs) < len(self.graph.runs):
            rules, layers = in_runs(self.graph, rules, layers)
        return Plan(
            **{  # type: ignore[arg-type]
                **self.base,
                "bucket_bytes": c.bucket_bytes or self.bucket_bytes,
                "sent_once": self.base.get("sent_once", 0) if c.expert > 1 else 0,
            },
            micro_batch=c.micro_batch,
            micro_batches=c.micro_batches,
            mesh=c.mesh() if c.mesh().axes else Mesh(()),  # as it is read back
            rules=rules,
            layers=layers,
            optimizer_sharding=c.optimizer_sharding,
            certificate=certificate,
            recompute=RECOMPUTE[max(RECOMPUTE.index(mode) for mode in modes)],
            recompute_ranges=recompute_ranges(names, modes, self.unit_pins.keeps or (False,) * len(names)),
            schedule=c.schedule,
            sequence_parallel=c.tensor > 1 and any(tables.sequence_parallel(*label) for label in picked),
            pipeline=c.pipeline,
            pipeline_stride=c.stride("pipeline") if c.pipeline > 1 else 0,
            virtual=c.virtual,
            chunks=chunks(names, placed) if c.pipeline > 1 else (),
            shard_size=c.shard_size,
            sharding_threshold_bytes=threshold,
            offload_optimizer=c.offload,
            context_algorithm=c.context_algorithm,
            offload_ranges=offload_ranges(names, self.unit_pins.swaps),
            whole_experts=c.tensor > 1 and tables.parts.setting.expert_cut == "whole",
            expert_overlap=c.expert_overlap,
        )

    def _all_in_shards(self, c: Configuration) -> bool:
        """Whether states are shared over ranks that divide no dim of most parameters, though fewer ranks would.

        They are where a pin or a framework without shard groups says so.
        """
        uneven = undivided(self.graph, self.devices)
        return (c.shard_size or c.data) in uneven and any(part not in uneven for part in divisors(c.data)[1:])

    def certificate(self, explored: Explored) -> Certificate:
        """What the search proved of the least closed form: the same for all of its plans.

        Simulation may rank another plan first, or find that the best needs less memory than the closed form allows it.
        """
        best = min(placed.objective_s for placed in explored.found)
        estimated = any(placed.tables.decisions.estimated for placed in explored.found)
        bound = min(explored.lower_bound_s, best)
        proven = Status.OPTIMAL if bound >= best * (1 - PROOF) else Status.BOUNDED
        return Certificate(
            status=Status.HEURISTIC if estimated else proven,
            objective_s=best,
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
        """The best plans by objective, each so that its simulated peak fits.

        An interruption ends it once there is a plan, and is noted in `explored`.
        """
        plans = Field(contenders=self.contenders(explored, 1 if explored.interrupted else count), usual=1.0)
        explored.interrupted |= rescore([plans], 1 if explored.interrupted else count)
        self.check_kept(explored, plans.scored)
        return plans.scored

    def contenders(self, explored: Explored, count: int) -> list[Contender[Scored]]:
        """The best plans by objective, to be simulated each so that its peak fits."""
        return [
            Contender(
                objective_s=placed.objective_s,
                foretell=partial(self._foretold, explored, placed),
                settle=partial(self._fitting, explored, placed),
            )
            for placed in self._shown(explored.found, count)
        ]

    @staticmethod
    def _shown(found: Sequence[Placed], count: int) -> list[Placed]:
        """Plans to simulate, best first: so many of each part that was searched by itself."""
        parts: dict[tuple[object, ...], list[Placed]] = {}
        for placed in found:
            pins = placed.pins
            parts.setdefault((pins.experts_stay, pins.expert_overlap, pins.recompute), []).append(placed)
        shown = (placed for part in parts.values() for placed in diverse(part, count))
        return sorted(shown, key=lambda placed: placed.objective_s)

    def check_kept(self, explored: Explored, scored: Sequence[Scored]) -> None:
        """Raise ContextError where nothing is left because hints are not kept."""
        if self.hints and explored.refused and not scored and not explored.unfit:
            raise ContextError(explored.refused)

    def _not_kept(self, plan: Plan) -> str | None:
        """Which hint a plan does not keep, and for which operator."""
        graph = self._shared.at_batch(plan.micro_batch * plan.degree("data"))
        broken = first_not_kept(graph, expanded_rules(plan), plan.mesh.axes, self.hints.hints)
        if broken is None:
            return None
        return (
            f"hint {broken[0]} is not kept for {broken[1]!r} in plans of stages: something else that is asked for, "
            "such as where parameters are stored, decides it; leave one of them out"
        )

    def _foretold(self, explored: Explored, placed: Placed) -> Foretold:
        plan = self.plan(placed, self.certificate(explored))
        if not fits_copies(plan, self.graph):
            return Foretold(plan=plan)
        if self.hints and (broken := self._not_kept(plan)) is not None:
            return Foretold(plan=plan, refused=broken)
        prediction = predict_plan(plan, self.graph, self.runs_on(plan.expert_overlap))
        analytic = with_host(analytic_breakdown(placed, self.model()), prediction)
        return Foretold(plan=plan, prediction=replace(prediction, analytic=analytic))

    def _fitting(self, explored: Explored, placed: Placed, foretold: Foretold, _best_s: float) -> Scored | None:
        limit = float(self.hardware.device_memory_bytes)
        allowed = placed.task.limit_bytes
        for again in range(TIGHTER + 1):
            if again:
                tighter = partition(simplified(replace(placed.task, limit_bytes=allowed)))
                if tighter is None:
                    break
                placed = replace(placed, partition=tighter)
                foretold = self._foretold(explored, placed)
            prediction = foretold.prediction
            if prediction is None:
                explored.refused = explored.refused or foretold.refused
                return None
            if not prediction.host_fits:
                explored.refused = explored.refused or host_refusal(
                    prediction.host_memory_bytes, prediction.host_limit_bytes
                )
                return None
            over = prediction.peak_memory_bytes - limit
            if over <= 0:
                return Scored(placed=placed, plan=foretold.plan, prediction=prediction)
            fullest = prediction.peak_rank, prediction.peak_memory_bytes
            explored.unfit.append(Unfit.known(placed.configuration, *fullest))
            allowed -= over + 0.01 * limit
        explored.missed.append(placed.task.limit_bytes - allowed)
        return None


def _stages(extent: Extent) -> list[dict[tuple[Mesh, int], None]]:
    """Stage meshes with the batch of one of their micro-batches: those in the usual order of axes, and in others."""
    batches: dict[tuple[int, ...], tuple[Configuration, dict[int, None]]] = {}
    for base in bases(extent):
        degrees = (base.pipeline, base.data, base.context, base.expert, base.tensor)
        batches.setdefault(degrees, (base, {}))[1][base.micro_batch * base.expert] = None
    groups: list[dict[tuple[Mesh, int], None]] = [{}, {}]
    for base, sizes in batches.values():
        for number, placed in enumerate(orders(extent, base)):
            mesh = placed.inner_mesh()
            groups[min(number, 1)].update(dict.fromkeys((mesh, size) for size in sizes))
    return groups


def undivided(graph: OperatorGraph, devices: int) -> frozenset[int]:
    """Divisors of the devices that divide no dim of more than half of the elements of trained parameters."""
    specs = [(graph.nodes[node].outputs[0], graph.multiplicity[node]) for node in graph.trained]
    sizes = [(spec.shape, spec.elements * times) for spec, times in specs]
    total = sum(elements for _, elements in sizes)
    return frozenset(
        part
        for part in divisors(devices)
        if 2 * sum(n for shape, n in sizes if all(dim % part for dim in shape)) > total
    )


def trained_bytes(graph: OperatorGraph) -> int:
    """Bytes of the gradients of all parameters."""
    return sum(graph.multiplicity[node] * graph.nodes[node].outputs[0].size_bytes for node in graph.trained)
