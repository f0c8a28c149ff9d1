"""From a request to plans: capture, search, simulate, rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from planner.cost.software import USUAL, fusion_of, norms_of, software_named, usual_software
from planner.graph.operator_graph import OperatorGraph
from planner.networks import load_network
from planner.planning.configured import Configured
from planner.planning.explanations import (
    SIMULATED,
    PinCost,
    ShadowPrices,
    other_choices,
    pin_messages,
    reason,
)
from planner.planning.found_configurations import FoundConfigurations, search_tighter, told
from planner.planning.hosted import as_simulated, simulated_costs
from planner.planning.infeasible import why_infeasible
from planner.planning.one_stage import Candidate, OneStage, OneStagePlans, search_one_stage
from planner.planning.one_stage import pin_costs as one_stage_pin_costs
from planner.planning.one_stage import why_infeasible as why_one_stage_does_not_fit
from planner.planning.plan_messages import (
    better_batches,
    costs_left_out,
    idle_axes,
    interrupted,
    other_messages_of_experts,
    proven,
    refuse_meaningless,
    unsharded,
    without_rules,
)
from planner.planning.prediction import Prediction, hardware_notes
from planner.planning.refining import refined
from planner.planning.rescoring import RESCORED, Field, rescore, said_of
from planner.planning.setting import SearchSetting, setting_of
from planner.planning.shared_tables import SharedTables
from planner.plans.pins import Pins
from planner.plans.plan import Status
from planner.plans.request import PlanRequest
from planner.search.candidates import NOTHING_KNOWN
from planner.search.configurations.pin_checks import check_pins, uneven_heads
from planner.search.patience import Patience
from simulator.errors import UnsupportedError
from simulator.hardware import Hardware
from simulator.profiles import load_profile

__all__ = [
    "Candidate",
    "PlanRequest",
    "Prediction",
    "SearchResult",
    "capture_for",
    "plan_network",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Plans, best first by simulated step time; none when nothing fits, and then `infeasible` says why.

    ``elapsed_s`` is everything but the capture; ``simulation_s`` the part of it that lowers and simulates;
    ``timings`` are the seconds of each phase. ``shadow_prices`` are those of the closed form, where configurations
    were searched; so are ``pin_costs`` (pin, seconds that it costs, configuration without it), which elsewhere are
    those of the search of operators.
    """

    status: Status
    candidates: tuple[Candidate, ...]
    elapsed_s: float
    capture_s: float
    messages: tuple[str, ...]
    infeasible: str = ""
    simulation_s: float = 0.0
    timings: Mapping[str, float] = field(default_factory=dict)
    shadow_prices: ShadowPrices | None = None
    pin_costs: tuple[PinCost, ...] = ()
    interrupted: bool = False


def capture_for(request: PlanRequest) -> OperatorGraph:
    """Capture the network of a request at batch 1; the same graph serves any devices and batch."""
    return load_network(
        request.network, sequence_length=request.sequence_length, attention=request.attention,
        norms=norms_of(request.software, request.norms), fusion=fusion_of(request.software),
    ).capture()  # fmt: skip


def capture_key(request: PlanRequest) -> tuple[object, ...]:
    """Return a key that is equal for requests with the same graph."""
    return (
        request.network,
        request.sequence_length,
        request.attention,
        norms_of(request.software, request.norms),
        fusion_of(request.software),
    )


def with_usual_software(request: PlanRequest) -> PlanRequest:
    """The request for the software that is usual for its network on its devices, where it names none.

    Plans that it cannot run are searched as well, as nobody asked for what it can run. ``usual`` stays without a name:
    the median of what networks are trained with.
    """
    if request.software == USUAL:
        return replace(request, software="")
    if request.software:
        return request
    family = load_network(request.network, sequence_length=request.sequence_length).family
    pins = request.pins
    alone = pins.tp == pins.pp == 1 and pins.cp in (None, 1) and pins.ep in (None, 1)
    sharded = alone and pins.optimizer_sharding == "zero3"
    usual = usual_software(load_profile(request.hardware), family, sharded=sharded)
    return replace(request, software=usual, any_plan=True)


def software_note(software: str) -> str:
    """What a plan is predicted for where nobody said so, and how to say so."""
    if not software:
        return "predicted for the usual software in general; --software names one (meshwright software lists them)"
    title = software_named(software).title
    return f"predicted for {title} ({software}), usual here; --software names another (meshwright software)"


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Keep the cycle collector from walking the many small records that planning makes; they have no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collection_paused()
def plan_network(
    request: PlanRequest,
    *,
    graph: OperatorGraph | None = None,
    shared: SharedTables | None = None,
    patience: Patience | None = None,
    cores: int = 1,
    changes: bool = True,
) -> SearchResult:
    """Search the best plans of a request.

    `graph` is its network, captured already; `shared` the same with what earlier requests have made of it.

    On each mesh of data × tensor parallelism the strategies of all operators are searched exactly, at the largest
    micro-batch that fits and at the next smaller one; meshes that cannot come near the best are left out
    (`planner.search.candidates.explore`). Pipelines, micro-batches, recomputation, shardings of optimizer states and
    orders of the axes are searched with the closed form of `planner.search.configurations.step_model`
    (`planner.search.configurations.branch_and_bound`). The best of both are lowered, simulated and ranked by
    simulated step time. With two `cores` plans of the second search are simulated by a fork of this process while the
    first goes on (`planner.planning.beside`); the result is the same.

    A KeyboardInterrupt during the search ends it with the best plan so far, and is raised where there is none;
    a `patience` that listens lets the search find one.

    Without `changes` `SearchResult.infeasible` says which limit binds, not with which changes a plan is found, as each
    change is a search of its own.
    """
    patience = patience or Patience()
    if shared is None:
        shared = SharedTables(partial(capture_for, request) if graph is None else graph)
    setting = setting_of(request, shared, patience)
    pins, hardware, graph = setting.pins, setting.search.hardware, setting.search.graph
    request = setting.request
    refuse_meaningless(graph)
    searched = _searched(setting, patience, cores)
    one, found = searched.one or OneStage(), searched.found
    began = time.perf_counter()
    ranked = _ranked(searched.scored)[: max(request.top, 1)]
    ranked, stopped = _refined(setting.search, pins, ranked, found, searched.interrupted, patience)
    if not ranked:
        patience.give_up()
    refining = time.perf_counter() - began
    candidates = proven(graph, _certified(_with_reasons(ranked, found, hardware), found))
    timings = {
        "capture": setting.captured - setting.started,
        "rules": setting.ruled - setting.captured,
        **searched.timings,
        "refining": refining,
    }
    batches = better_batches(setting.search.global_batch, request.devices) if pins.dp is None else ()
    notes = (*without_rules(graph), *graph.notes, *batches, *hardware_notes(hardware, setting.dtype))
    notes += tuple(unsharded(candidates[0].plan, graph)) if candidates else ()
    if candidates and request.sensitivity:
        notes += tuple(other_messages_of_experts(candidates[0].plan, graph, pins))
    notes += (*costs_left_out(candidates), *idle_axes(ranked), *uneven_heads(graph, pins, request.devices))
    infeasible = ""
    if not ranked and found is None:
        infeasible = why_one_stage_does_not_fit(setting.space, one.misfits)
    elif not ranked and found is not None:
        infeasible = why_infeasible(found.search, found.pins, found.explored, changes=changes)
    return SearchResult(
        status=candidates[0].plan.certificate.status if candidates else Status.INFEASIBLE,
        candidates=candidates,
        elapsed_s=time.perf_counter() - setting.captured,
        capture_s=setting.captured - setting.started,
        messages=(
            *notes,
            *one.messages,
            *pin_messages(searched.pin_costs),
            *(interrupted(candidates, found.explored.gap if found is not None else None) if stopped else ()),
            *_beyond(request, found),
            *(told(found.search) if found is not None else ()),
            *((found.explored.dense,) if found is not None and found.explored.dense else ()),
        ),
        simulation_s=searched.timings["rescoring"] + refining,
        infeasible=infeasible,
        timings=timings,
        shadow_prices=found.prices if found else None,
        pin_costs=searched.pin_costs,
        interrupted=stopped,
    )


def _searched(setting: SearchSetting, patience: Patience, cores: int) -> _Searches:
    search, request, pins = _Searches(setting, patience, cores), setting.request, setting.pins
    with search.opened:
        wide = _searches_configurations(request, pins, setting.search)
        refusable = wide or _falls_back(request, pins)
        if wide:
            search.explore()
        if search.found is None or search.found.leaves_operators:
            search.search_operators(refusable=refusable)
        search.rescore()
        search.explore_tighter()
        if not search.scored and (patience.found or not search.ended_early):
            # What was found does not fit once it is simulated.
            patience.found = False
            if search.found is None and _falls_back(request, pins):
                search.explore()
                search.rescore()
                search.explore_tighter()
            elif search.one is None:
                search.search_operators(refusable=refusable)
                search.rescore()
        if search.ended_early and not search.scored:
            raise KeyboardInterrupt
        if request.sensitivity and not search.interrupted:
            with search.timed("sensitivity"):
                search.tell_sensitivity()
    return search


class _Searches:
    """The searches of one request: what each found, what of it was simulated, and the seconds of each phase."""

    def __init__(self, setting: SearchSetting, patience: Patience, cores: int) -> None:
        self.setting, self.patience, self.cores = setting, patience, cores
        self.wanted = max(setting.request.top, RESCORED)
        self.found: FoundConfigurations | None = None
        self.one: OneStage | None = None
        self.operators = Field[Candidate](contenders=())
        self.stopped = False
        self.pin_costs: tuple[PinCost, ...] = ()
        self.opened = ExitStack()
        self.timings = dict.fromkeys(("operators", "rescoring"), 0.0)

    @property
    def scored(self) -> list[Candidate]:
        """All plans that were simulated, those whose operators were searched first."""
        wide = self.found.scored if self.found is not None else ()
        return [
            *self.operators.scored, *(Candidate(plan=s.plan, prediction=s.prediction, reason="") for s in wide)
        ]  # fmt: skip

    @property
    def interrupted(self) -> bool:
        """Whether the user wants no more."""
        return self.patience.asked or self.ended_early

    @property
    def ended_early(self) -> bool:
        """Whether one of them ended before it had seen everything."""
        parts = (self.one, self.found.explored if self.found is not None else None)
        return self.stopped or any(part is not None and part.interrupted for part in parts)

    def explore(self) -> None:
        """Search configurations."""
        search, pins, request = self.setting.search, self.setting.pins, self.setting.request
        explored = search.explore(pins, wanted=self.wanted, patience=self.patience)
        cores = 1 if self.patience.asked or explored.interrupted else self.cores
        with self.timed("rescoring"):
            self.found = FoundConfigurations(search, pins, explored, self.wanted, request, cores)
        self.opened.callback(self.found.close)
        self.timings |= explored.timings

    def explore_tighter(self) -> None:
        """Search configurations again with less memory where those that were found do not fit once simulated."""
        first = self.found
        if first is None or first.scored or not first.explored.missed or self.interrupted:
            return
        for search, explored in search_tighter(first.search, first.pins, first.explored, self.wanted, self.patience):
            for phase, seconds in explored.timings.items():
                self.timings[phase] += seconds
            self.found = FoundConfigurations(search, first.pins, explored, self.wanted, self.setting.request)
            self.rescore()
            if self.found.scored:
                return
        self.found = first

    def search_operators(self, *, refusable: bool) -> None:
        """Search operators one by one, on meshes that can come near the best configuration."""
        space, search = self.setting.space, self.setting.search
        known = self.found.known if self.found is not None else NOTHING_KNOWN
        try:
            with self.timed("operators"):
                self.one = search_one_stage(
                    space, wanted=self.wanted, refusable=refusable, known=known, patience=self.patience
                )
        except KeyboardInterrupt:
            # What the other search found can still be simulated.
            self.stopped = True
            return
        plans = OneStagePlans(space=space, graph=search.graph, base=search.base)
        self.operators = Field(contenders=plans.contenders(self.one, self.wanted))

    def rescore(self) -> None:
        """Simulate the best of what was found."""
        fields: list[Field[Any]] = [self.found.field] if self.found is not None else []
        wanted = 1 if self.interrupted else self.wanted
        with self.timed("rescoring"):
            self.stopped |= rescore([*fields, self.operators], wanted, self.patience)
        if self.found is not None:
            self.found.search.check_kept(self.found.explored, self.found.scored)

    def tell_sensitivity(self) -> None:
        """Find what memory, links and pins are worth; of plans of one stage alone, pins."""
        try:
            with self.patience.breaking():
                if self.found is not None:
                    self.found.tell_sensitivity()
                elif self.one is not None and self.scored and self.setting.request.pins.said():
                    self.pin_costs = tuple(self._one_stage_costs(self.one))
        except KeyboardInterrupt:
            self.stopped = True
        if self.found is not None:
            self.pin_costs = self.found.costs

    def _one_stage_costs(self, one: OneStage) -> Iterator[PinCost]:
        search, pins = self.setting.search, self.setting.pins
        asked = [name for name in self.setting.request.pins.said() if name not in SIMULATED]
        yield from one_stage_pin_costs(self.setting.space, one, asked)
        best = min(self.operators.scored, key=lambda c: c.prediction.step_time_s)
        yield from simulated_costs(search.graph, search.hardware, best.plan, best.prediction, pins)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of what is done inside to those of a phase."""
        began = time.perf_counter()
        yield
        self.timings[phase] = self.timings.get(phase, 0.0) + time.perf_counter() - began


def _searches_configurations(request: PlanRequest, pins: Pins, search: Configured) -> bool:
    """Whether pipelines, recomputation and the like are searched; UnsupportedError where they are asked for but not."""
    unusual = request.search_mode != "dynamic_programming" or bool(request.hints) or pins.batch_only
    refusal: UnsupportedError | None = None
    if unusual:
        if not pins.one_stage and not pins.batch_only:
            if not request.hints:
                check_pins(search.extent(pins))
            return True
        named = " ".join(f"{name}={value}" for name, value in pins.named().items()) or "of single modules"
        refusal = UnsupportedError(
            f"pins {named} ask for more than data and tensor parallelism, and parallel mode "
            f"{request.parallel_mode!r} shards batches in plans of one stage that keep everything; leave out the pins, "
            "or the parallel mode"
        )
    else:
        try:
            check_pins(search.extent(pins))
        except UnsupportedError as error:
            refusal = error
    if refusal is not None and not pins.one_stage:
        raise refusal
    return refusal is None


def _falls_back(request: PlanRequest, pins: Pins) -> bool:
    """Whether configurations are searched where one of the fast modes finds nothing among plans of one stage."""
    return request.search_mode != "dynamic_programming" and not request.hints and not pins.batch_only


def _beyond(request: PlanRequest, found: FoundConfigurations | None) -> tuple[str, ...]:
    """Say that a fast mode has left the search to that of configurations."""
    if found is None or not found.scored or request.search_mode == "dynamic_programming":
        return ()
    return (
        f"{request.search_mode} searches plans of one stage that keep everything, of which none is possible here: the "
        "plans are those of the search over configurations",
    )


def _ranked(scored: Iterable[Candidate]) -> list[Candidate]:
    """Plans by simulated step time; of those that say the same only the faster one, the first where they are equal."""
    ranked: dict[tuple[object, ...], Candidate] = {}
    for candidate in sorted(scored, key=lambda c: c.prediction.step_time_s):
        ranked.setdefault(said_of(candidate.plan), candidate)
    return list(ranked.values())


def _refined(
    search: Configured,
    pins: Pins,
    ranked: list[Candidate],
    found: FoundConfigurations | None,
    stopped: bool,
    patience: Patience,
) -> tuple[list[Candidate], bool]:
    """The plans with what is chosen last for the best of them, and whether the user stopped it."""
    if not ranked or stopped or pins.batch_only:
        return ranked, stopped
    source = next((s for s in found.scored if s.plan is ranked[0].plan), None) if found is not None else None
    try:
        with patience.breaking():
            best = refined(search, pins, ranked[0], source)
    except KeyboardInterrupt:
        return ranked, True
    if source is not None and found is not None:
        better = replace(source, plan=best.plan, prediction=best.prediction)
        found.field.scored = [better if s is source else s for s in found.scored]
    return [best, *ranked[1:]], False


def _with_reasons(
    ranked: list[Candidate], found: FoundConfigurations | None, hardware: Hardware
) -> tuple[Candidate, ...]:
    """Say of every plan but the first which part of the step made it lose."""
    if not ranked:
        return ()
    of = {} if found is None else {id(item.plan): item for item in found.scored}
    best, *others = ranked
    source = of.get(id(best.plan))
    return (
        best,
        *(
            replace(
                c,
                reason=reason(best.prediction, c.prediction, source, of.get(id(c.plan)), hardware)
                + other_choices(best.plan, c.plan),
            )
            for c in others
        ),
    )


def _certified(candidates: tuple[Candidate, ...], found: FoundConfigurations | None) -> tuple[Candidate, ...]:
    """The candidates with certificates that hold for what was simulated.

    The objective is the least of the plans that fit in simulation; neither it nor the bound lies above a step shown
    that they speak of.
    """
    least_s = min((c.prediction.step_time_s for c in candidates), default=0.0)
    fitting_s = min((one.placed.objective_s for one in found.scored), default=0.0) if found is not None else 0.0
    made = []
    for candidate in candidates:
        certificate = as_simulated(candidate.plan.certificate, candidate.plan, least_s)
        if certificate.of_mesh:
            certificate = certificate.below(candidate.prediction.step_time_s)
        else:
            certificate = certificate.of_fitting(fitting_s).below(least_s)
        made.append(replace(candidate, plan=replace(candidate.plan, certificate=certificate)))
    return tuple(made)
