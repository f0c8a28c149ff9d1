"""Plans on clusters of several device types: devices in step, uneven stages, or one type alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

from planner.cost.software import cluster_as_run
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.checked import checked_graph
from planner.planning import planning
from planner.planning.mixed_pipeline import nodes_of_ranks
from planner.planning.one_stage import Candidate
from planner.planning.planning import SearchResult, capture_for, with_usual_software
from planner.planning.prediction import SimulatedPlan, simulate_plan
from planner.planning.shared_tables import SharedTables
from planner.plans.plan import Plan, Status
from planner.plans.request import PlanRequest
from planner.search.patience import Patience
from planner.search.stages.unit_pins import layers_of
from planner.search.units.labels import StageDecisions
from simulator.errors import InputError
from simulator.mixed_cluster import MixedCluster, matrix_rate
from simulator.profiles import cluster_at
from simulator.quantities import seconds_text
from simulator.topology import unit_spec

BALANCING = 2
"""Divisions of the layers that are tried: by the devices' rates, then by the simulated seconds of the stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """A search, the request that it answers, and what its devices are in words."""

    result: SearchResult
    request: PlanRequest
    words: str

    @property
    def step_s(self) -> float:
        """Step time of the best plan; infinite without one."""
        found = self.result.candidates
        return found[0].prediction.step_time_s if found else float("inf")


def plan_on_cluster(
    request: PlanRequest,
    *,
    graph: OperatorGraph | None = None,
    shared: SharedTables | None = None,
    patience: Patience | None = None,
    cores: int = 1,
) -> tuple[SearchResult, PlanRequest]:
    """Search the best plans of a request, on a cluster of several device types also those that use them unevenly.

    On such a cluster three kinds of plans compete by simulated step time: all devices in step at the pace of the
    slowest, pipelines with more layers on faster devices, and each type alone. A message compares them.

    Returns
    -------
    tuple of SearchResult and PlanRequest
        The plans, and the request that they answer: that of one type alone where it is faster than all.
    """
    whole = planning.plan_network(request, graph=graph, shared=shared, patience=patience, cores=cores)
    cluster = cluster_at(request.hardware)
    parts = _parts(cluster, request.devices) if cluster is not None else {}
    if cluster is None or len(parts) < 2 or whole.interrupted:
        return whole, request
    tables = shared or SharedTables(graph if graph is not None else capture_for(request))
    in_step = _simulated(whole, cluster, tables.graph)
    answers = [_Answer(result=in_step, request=request, words=f"all {request.devices} devices in step")]
    answers += _uneven(request, cluster, parts, tables, patience or Patience())
    for profile, count in parts.items():
        if answers[-1].result.interrupted:
            break
        answers += _alone(request, profile, count, patience)
    best = min(answers, key=lambda answer: answer.step_s)
    if not best.result.candidates:
        return whole, request
    message = _compared(best, answers)
    return replace(best.result, messages=(message, *best.result.messages)), best.request


def _parts(cluster: MixedCluster, devices: int) -> dict[str, int]:
    """Devices of each profile among the first `devices` of a cluster."""
    found: dict[str, int] = {}
    left = devices
    for profile, hardware in zip(cluster.profiles, cluster.nodes, strict=True):
        taken = min(left, unit_spec(hardware).devices)
        if taken:
            found[profile] = found.get(profile, 0) + taken
        left -= taken
    return found


def _simulated(result: SearchResult, cluster: MixedCluster, graph: OperatorGraph) -> SearchResult:
    """The plans of a search with every stage at the pace of its own devices, ranked anew."""
    found = [replace(one, prediction=_simulate(one.plan, cluster, graph).prediction) for one in result.candidates]
    ranked = sorted(found, key=lambda one: one.prediction.step_time_s)
    first = ranked[0].prediction.step_time_s if ranked else 0.0
    said = [replace(one, reason=_slower(one, first) if rank else "") for rank, one in enumerate(ranked)]
    return replace(result, candidates=tuple(said))


def _slower(one: Candidate, first_s: float) -> str:
    return f"simulated {seconds_text(one.prediction.step_time_s - first_s)} longer on these devices"


def _simulate(plan: Plan, cluster: MixedCluster, graph: OperatorGraph) -> SimulatedPlan:
    from planner.cost.software import machine_of

    return simulate_plan(plan, checked_graph(plan, graph), machine_of(plan), cluster=cluster_as_run(cluster, plan))


def _uneven(
    request: PlanRequest, cluster: MixedCluster, parts: Mapping[str, int], tables: SharedTables, patience: Patience
) -> Iterator[_Answer]:
    """Pipelines whose stages lie on one type each and have layers by its speed."""
    stages = request.devices // gcd(*parts.values())
    layers = len(layers_of(StageDecisions(tables.graph).chain.names()))
    pins = request.pins
    if pins.stage_layers or pins.vpp or pins.pp not in (None, stages):
        return
    if layers < stages:
        return
    rates = [
        matrix_rate(hardware)
        for hardware in (cluster.nodes[cluster.node_of(rank * request.devices // stages)] for rank in range(stages))
    ]
    tried: set[tuple[int, ...]] = set()
    for _ in range(BALANCING):
        divided = shares(layers, rates)
        if divided in tried or patience.asked:
            return
        tried.add(divided)
        asked = replace(request, pins=replace(pins, pp=stages, stage_layers=divided))
        try:
            found = planning.plan_network(asked, shared=tables, patience=patience, changes=False)
        except InputError:
            return  # what is asked for has no such pipeline
        if not found.candidates:
            return
        found = _heuristic(_simulated(found, cluster, tables.graph))
        words = f"{stages} stages of {'-'.join(map(str, divided))} layers"
        yield _Answer(result=found, request=asked, words=words)
        best = found.candidates[0].plan
        held = nodes_of_ranks(best, cluster)
        if any(len({cluster.nodes[node].hash for node in nodes}) > 1 for nodes in held):
            return
        result = _simulate(best, cluster, tables.graph).result
        busy = result.step_time_s - result.bubble_s
        rates = [count / float(seconds) for count, seconds in zip(divided, busy, strict=True)]


def shares(layers: int, rates: Sequence[float]) -> tuple[int, ...]:
    """Divide layers among stages by their rates, each at least one; what is left goes where it adds least time.

    >>> shares(32, [2.2, 1.0]), shares(5, [1.0, 1.0, 100.0])
    ((22, 10), (1, 1, 3))
    """
    given = [1] * len(rates)
    for _ in range(layers - len(rates)):
        least = min(range(len(rates)), key=lambda stage: (given[stage] + 1) / rates[stage])
        given[least] += 1
    return tuple(given)


def _heuristic(result: SearchResult) -> SearchResult:
    """A search whose certificates speak of devices in step, and so bound nothing of uneven stages."""
    found = tuple(
        replace(one, plan=replace(one.plan, certificate=replace(one.plan.certificate, status=Status.HEURISTIC)))
        for one in result.candidates
    )
    return replace(result, candidates=found, status=Status.HEURISTIC)


def _alone(request: PlanRequest, profile: str, count: int, patience: Patience | None) -> Iterator[_Answer]:
    """Plans on the devices of one type, joined as its profile says."""
    software = "" if request.any_plan else request.software
    asked = replace(request, hardware=profile, devices=count, software=software, any_plan=False)
    try:
        asked = with_usual_software(asked)
        found = planning.plan_network(asked, patience=patience, changes=False)
    except InputError:
        return  # the batch or a pin does not divide by so few
    yield _Answer(result=found, request=asked, words=f"{count} × {profile} alone")


def _compared(best: _Answer, answers: Sequence[_Answer]) -> str:
    others = [
        f"{answer.words} {seconds_text(answer.step_s)}"
        for answer in answers
        if answer is not best and answer.result.candidates
    ]
    return f"devices of several types: {best.words} are fastest, {seconds_text(best.step_s)} a step; " + "; ".join(
        others
    )
