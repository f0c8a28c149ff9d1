"""Plans of one stage: operators searched one by one on every mesh of data × tensor parallelism, and simulated."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner.graph.operator_graph import OperatorGraph, Role
from planner.lowering.checked import fits_copies
from planner.prediction import Prediction, predict_plan
from planner.quantities import bytes_text
from planner.request import Pins, PlanRequest
from planner.search.candidates import NEAR_ENOUGH, ROOMY, Found, Misfit, Space, closed, explore
from planner.search.exact.elimination import TooWideError
from planner.search.problem.solution import Solution, node_rules, template_name
from planner.search.problem.unaligned import in_runs
from planner.search.recursive_programming import with_bound
from planner.sharding.placement import Placements
from planner.strategy.plan import (
    Certificate,
    LayerRules,
    NodeRules,
    Plan,
    Status,
    optimizer_sharding,
)
from simulator.errors import InputError

PROOF_TOLERANCE = 1e-6
RESCORED = 3
"""The simulator ranks at least this many of the best plans by the additive objective."""
_RETRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan, what it is predicted to do, and why it lost to the first ("" for the first)."""

    plan: Plan
    prediction: Prediction
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStage:
    """What the search of operators on data × tensor meshes found."""

    scored: tuple[Candidate, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    messages: tuple[str, ...] = ()
    simulation_s: float = 0.0
    interrupted: bool = False


def search_one_stage(
    space: Space,
    graph: OperatorGraph,
    base: Mapping[str, object],
    pins: Pins,
    request: PlanRequest,
    *,
    refusable: bool,
    incumbent_s: float = float("inf"),
) -> OneStage:
    """Search the operators of each mesh, and write plans of `graph`, whose runs may be shorter in the space.

    Parameters
    ----------
    refusable
        Whether meshes that cannot be are left to other configurations.
    incumbent_s
        The step of the best of those: meshes that cannot come near it are left out.
    """
    if not pins.one_stage:
        return OneStage()
    limit, wanted = float(space.hardware.device_memory_bytes), max(request.top, RESCORED)
    explored: list[Found | Misfit] = []
    interrupted = False
    found: list[Found] = []
    try:
        explored.extend(explore(space, limit, incumbent_s=incumbent_s, wanted=wanted))
        found = [item for item in explored if isinstance(item, Found)]
        found = closed(space, found, limit)
    except InputError:
        if not refusable:
            raise
    except KeyboardInterrupt:
        found = found or [item for item in explored if isinstance(item, Found)]
        if not found:
            raise
        interrupted = True
    searched = time.perf_counter()
    scored = _Scorer(space, graph, base).score(found, wanted)
    return OneStage(
        scored=tuple(scored),
        misfits=tuple(item for item in explored if isinstance(item, Misfit)),
        messages=tuple(dict.fromkeys(m for item in found for m in item.messages)),
        simulation_s=time.perf_counter() - searched,
        interrupted=interrupted,
    )


class _Scorer:
    """Simulates solved meshes of one request."""

    def __init__(self, space: Space, graph: OperatorGraph, base: Mapping[str, object]) -> None:
        self.space = space
        self.graph = graph
        self.base = base

    def score(self, found: list[Found], top: int) -> list[Candidate]:
        """Simulate the best by objective, with a tighter limit where the simulated peak does not fit."""
        scored: list[Candidate] = []
        for item in sorted(found, key=lambda f: f.solution.objective_s):
            if len(scored) == top:
                break
            best = min((c.prediction.step_time_s for c in scored), default=float("inf"))
            scored += self._fitting(item, retries=_RETRIES if item.solution.objective_s <= NEAR_ENOUGH * best else 0)
        return sorted(scored, key=lambda c: c.prediction.step_time_s)

    def _fitting(self, item: Found, *, retries: int) -> list[Candidate]:
        """The item's plan, solved again with less memory until its simulated peak fits; none where it never does."""
        space, limit = self.space, self.space.hardware.device_memory_bytes
        if space.search_mode != "dynamic_programming":
            item = replace(item, solution=_bounded(item, limit))
        plan, allowed = _make_plan(space, self.graph, self.base, item), float(limit)
        if not fits_copies(plan, self.graph):
            return []
        prediction = predict_plan(plan, self.graph, space.hardware)
        for _ in range(retries if item.solution.memory_bytes > ROOMY * limit else 0):
            over = prediction.peak_memory_bytes - limit
            if over <= 0:
                break
            allowed -= over + 0.01 * limit
            again = _again(space, item, allowed)
            if again is None:
                return []
            # The bound of the tighter limit does not hold for the device's own; that of the first search does.
            bound = min(item.solution.lower_bound_s, again.solution.lower_bound_s)
            again = replace(again, solution=replace(again.solution, lower_bound_s=bound))
            plan = _make_plan(space, self.graph, self.base, again)
            if not fits_copies(plan, self.graph):
                return []
            prediction = predict_plan(plan, self.graph, space.hardware)
        fits = prediction.peak_memory_bytes <= limit
        return [Candidate(plan=plan, prediction=prediction, reason="")] if fits else []


def _bounded(item: Found, limit: float) -> Solution:
    """The solution with what a price of memory proves, which is soon found; without a bound on graphs too wide."""
    try:
        return with_bound(item.problem, item.solution, limit, pairs=0)
    except TooWideError:
        return item.solution


def _again(space: Space, item: Found, allowed: float) -> Found | None:
    """The same mesh with less memory; None where nothing fits."""
    solution, messages = space.solve(item.problem, allowed)
    return None if solution is None else replace(item, solution=solution, messages=messages)


def _make_plan(space: Space, graph: OperatorGraph, base: Mapping[str, object], item: Found) -> Plan:
    rules, layers = in_runs(graph, *node_rules(item.problem, item.solution))
    data = next((a.size for a in item.mesh.axes if a.name == "data"), 1)
    status = Status.OPTIMAL if item.solution.gap <= PROOF_TOLERANCE else Status.BOUNDED
    if space.search_mode != "dynamic_programming":
        status = Status.HEURISTIC
    return Plan(
        **base,  # type: ignore[arg-type]
        micro_batch=space.global_batch // (data * item.micro_batches),
        micro_batches=item.micro_batches,
        mesh=item.mesh,
        rules=rules,
        layers=layers,
        optimizer_sharding=_sharding(space, graph, item, rules, layers),
        certificate=Certificate(
            status=status,
            objective_s=item.solution.objective_s,
            lower_bound_s=item.solution.lower_bound_s,
            elimination_width=item.solution.width,
            operators=sum(
                times for node, times in zip(graph.nodes, graph.multiplicity, strict=True) if node.role is Role.OPERATOR
            ),
            distinct_blocks=len(graph.runs),
            states=item.solution.states,
            states_left=item.solution.states_left,
            largest_table=item.solution.largest_table,
        ),
    )


def _sharding(
    space: Space, graph: OperatorGraph, item: Found, rules: Mapping[str, NodeRules], layers: tuple[LayerRules, ...]
) -> str:
    """What stored shards are called: the name that is pinned, or the one that needs no more messages."""
    found = optimizer_sharding(item.mesh, _stored(graph, rules, layers))
    return space.pins.optimizer_sharding or found if found != "none" else found


def _stored(
    graph: OperatorGraph, rules: Mapping[str, NodeRules], layers: Iterable[LayerRules]
) -> Iterator[tuple[int, Placements]]:
    """Elements and placements of the parameters; equal layers may store theirs in different ways."""
    nodes = {parameter.node for parameter in graph.parameters}
    elements = {graph.nodes[i].name: graph.nodes[i].outputs[0].elements for i in nodes}
    for run in graph.runs:
        for name in [graph.nodes[i].name for i in run.first if i in nodes]:
            elements[template_name(name, run.prefix)] = elements[name]
    parts = [(1, rules), *((part.last - part.first + 1, part.rules) for part in layers)]
    for times, part_rules in parts:
        for name in part_rules.keys() & elements.keys():
            yield times * elements[name], tuple(rule.outputs[0] for rule in part_rules[name])


def why_infeasible(space: Space, misfits: Iterable[Misfit]) -> str:
    """Which limit binds, by how much, and on how many devices it would fit."""
    limit = space.hardware.device_memory_bytes
    least = min(misfits, key=lambda m: m.memory_bytes, default=None)
    if least is None:
        return (
            f"no plan stays under the {bytes_text(limit)} of device memory once simulated; use more devices, a smaller "
            "--global-batch or a smaller pinned micro_batch"
        )
    shape = " × ".join(f"{a.name} {a.size}" for a in least.mesh.axes) or "one device"
    text = (
        f"device memory binds: the smallest plan ({shape}, {least.micro_batches} micro-batches) needs "
        f"{bytes_text(least.memory_bytes)} of {bytes_text(limit)}, {bytes_text(least.memory_bytes - limit)} too much"
    )
    free = replace(
        space.pins, dp=None, tp=None, micro_batch=None, micro_batches=None, optimizer_sharding=None, batch_only=False
    )
    for pins, condition in ((space.pins, ""), (free, " without the pins")):
        enough = _enough_devices(replace(space, pins=pins))
        if enough:
            return f"{text}; it would fit on {enough} devices{condition}"
        if pins == free:
            break
    return f"{text}; use devices with more memory, a smaller network or a shorter --seq-len"


def _enough_devices(space: Space) -> int | None:
    """The device count itself or the smallest doubling of it on which something fits, the pins kept."""
    devices = space.devices
    while devices <= space.hardware.max_devices:
        try:
            space.hardware.check_devices(devices)
            wider = replace(space, devices=devices)
            if any(isinstance(item, Found) for item in explore(wider, space.hardware.device_memory_bytes)):
                return devices
        except InputError:
            pass
        devices *= 2
    return None
