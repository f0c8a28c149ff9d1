"""From a request to plans: capture, search, simulate, rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.scaling import at_batch, at_precision
from planner.lowering import lower_graph, lowering_options
from planner.lowering.checked import lower, precision_dtype
from planner.networks import Network, load_network
from planner.prediction import Prediction, precision_notes, predict
from planner.quantities import bytes_text
from planner.request import PRECISIONS, PlanRequest, read_pins
from planner.search.candidates import ROOMY, Found, Misfit, Space, explore
from planner.search.solution import node_rules, template_name
from planner.search.variables import decisions
from planner.sharding.placement import Placements
from planner.sharding.rules import has_rule
from planner.shortening import shallow_versions
from planner.strategy.plan import (
    Certificate,
    LayerRules,
    NodeRules,
    Plan,
    Status,
    expanded_rules,
    optimizer_sharding,
)
from planner.work import optimizer
from simulator.errors import InputError
from simulator.hardware import Hardware, load_profile

__all__ = [
    "Candidate",
    "PlanRequest",
    "PlanResult",
    "Prediction",
    "capture_for",
    "lower",
    "plan_network",
    "predict",
]

BUCKET_BYTES = 25 * 2**20
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
class PlanResult:
    """Plans, best first by simulated step time; none when nothing fits, and then `infeasible` says why.

    ``elapsed_s`` is everything but the capture; ``simulation_s`` the part of it that lowers and simulates.
    """

    status: Status
    candidates: tuple[Candidate, ...]
    elapsed_s: float
    capture_s: float
    messages: tuple[str, ...]
    infeasible: str = ""
    simulation_s: float = 0.0


def capture_for(request: PlanRequest) -> OperatorGraph:
    """Capture the network of a request at batch 1; the same graph serves any devices and batch."""
    return load_network(request.network, sequence_length=request.sequence_length).capture()


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
def plan_network(request: PlanRequest, *, graph: OperatorGraph | None = None) -> PlanResult:
    """Search the best plans of a request.

    On each mesh of data × tensor parallelism the strategies of all operators are searched exactly, at the
    largest micro-batch that fits and at the next smaller one; meshes that cannot come near the best are left
    out (`planner.search.candidates.explore`). The best by the additive objective are lowered, simulated and
    ranked by simulated step time.
    """
    pins = read_pins(request)
    hardware = load_profile(request.hardware)
    hardware.check_devices(request.devices)
    network = load_network(request.network, sequence_length=request.sequence_length)
    precision = request.precision or {v: k for k, v in PRECISIONS.items()}[hardware.default_precision]
    dtype = precision_dtype(precision)
    update = optimizer(request.optimizer or network.default_optimizer)
    batch = network.default_global_batch if request.global_batch is None else request.global_batch
    if batch < 1:
        raise InputError(f"global batch {batch} is not positive; use --global-batch with a whole number of samples")
    started = time.perf_counter()
    graph = network.capture() if graph is None else graph
    captured = time.perf_counter()
    graph = at_precision(graph, dtype)
    space = Space(
        graph=graph,
        decisions=decisions(graph),
        hardware=hardware,
        devices=request.devices,
        global_batch=batch,
        optimizer=update,
        pins=pins,
        bucket_bytes=BUCKET_BYTES,
        search_mode=request.search_mode,
        hints=request.hints,
    )
    base = _base_plan(request, network, graph, hardware, precision, update.name, batch)
    explored = list(explore(space, hardware.device_memory_bytes))
    found = [item for item in explored if isinstance(item, Found)]
    misfits = [item for item in explored if isinstance(item, Misfit)]
    searched = time.perf_counter()
    scored = _Scorer(space, base).score(found, max(request.top, RESCORED))[: max(request.top, 1)]
    simulation = time.perf_counter() - searched
    notes = (*graph.notes, *_without_rules(graph), *precision_notes(hardware, dtype))
    elapsed = time.perf_counter() - captured
    return PlanResult(
        status=scored[0].plan.certificate.status if scored else Status.INFEASIBLE,
        candidates=_with_reasons(scored),
        elapsed_s=elapsed,
        capture_s=captured - started,
        messages=(*notes, *_idle_axes(scored), *dict.fromkeys(m for item in found for m in item.messages)),
        simulation_s=simulation,
        infeasible="" if scored else _why_infeasible(space, misfits),
    )


def _base_plan(
    request: PlanRequest,
    network: Network,
    graph: OperatorGraph,
    hardware: Hardware,
    precision: str,
    update: str,
    batch: int,
) -> dict[str, object]:
    return {
        "network": network.spec,
        "fingerprint": graph.fingerprint,
        "sequence_length": network.sequence_length,
        "hardware": request.hardware,
        "hardware_hash": hardware.hash,
        "precision": precision,
        "optimizer": update,
        "global_batch": batch,
        "bucket_bytes": BUCKET_BYTES,
        "parallel_mode": request.parallel_mode,
        "search_mode": request.search_mode,
    }


# Scoring


class _Scorer:
    """Simulates solved meshes of one request; graphs at the same batch are unfolded once."""

    def __init__(self, space: Space, base: Mapping[str, object]) -> None:
        self.space = space
        self.base = base
        self.unfolded: dict[int, OperatorGraph] = {}

    def score(self, found: list[Found], top: int) -> list[Candidate]:
        """Simulate the best by objective, with a tighter limit where the simulated peak does not fit."""
        scored: list[Candidate] = []
        for item in sorted(found, key=lambda f: f.solution.objective_s):
            if len(scored) == top:
                break
            plan = self._fitting(item)
            prediction = plan and self._whole(plan)
            if plan and prediction and prediction.peak_memory_bytes <= self.space.hardware.device_memory_bytes:
                scored.append(Candidate(plan=plan, prediction=prediction, reason=""))
        return sorted(scored, key=lambda c: c.prediction.step_time_s)

    def _fitting(self, item: Found) -> Plan | None:
        """The item's plan, solved again with less memory until its simulated peak fits; None where it never does."""
        space = self.space
        limit = space.hardware.device_memory_bytes
        plan, allowed = _make_plan(space, self.base, item), float(limit)
        for _ in range(_RETRIES if item.solution.memory_bytes > ROOMY * limit else 0):
            over = quick_peak(plan, space.graph, space.hardware) - limit
            if over <= 0:
                break
            allowed -= over + 0.01 * limit
            again = _again(space, item, allowed)
            if again is None:
                return None
            # The bound of the tighter limit does not hold for the device's own; that of the first search does.
            bound = min(item.solution.lower_bound_s, again.solution.lower_bound_s)
            again = replace(again, solution=replace(again.solution, lower_bound_s=bound))
            plan = _make_plan(space, self.base, again)
        return plan

    def _whole(self, plan: Plan) -> Prediction:
        """Predict the whole network; the strategies come from the rule table and need no second check."""
        batch = plan.micro_batch * plan.degree("data")
        if batch not in self.unfolded:
            self.unfolded[batch] = unfold(at_batch(self.space.graph, batch))
        graph = self.unfolded[batch]
        lowered = lower_graph(graph, expanded_rules(plan), lowering_options(plan, graph))
        return predict(plan, lowered, self.space.hardware)[0]


def _again(space: Space, item: Found, allowed: float) -> Found | None:
    data = next((a.size for a in item.mesh.axes if a.name == "data"), 1)
    tensor = item.mesh.size // data
    explored = explore(space, allowed, only=(data, tensor, item.micro_batches))
    return next((other for other in explored if isinstance(other, Found)), None)


def quick_peak(plan: Plan, graph: OperatorGraph, hardware: Hardware) -> int:
    """Peak memory of a plan in bytes, at a cost that does not grow with depth.

    Where many equal layers have equal strategies, two or more shallow networks are simulated, and the
    line through their peaks is continued; elsewhere the whole network is.
    """
    versions = shallow_versions(graph, plan)
    if not versions:
        return predict(plan, lower(plan, graph), hardware)[0].peak_memory_bytes
    base, *others = (predict(v.plan, lower(v.plan, v.graph), hardware)[0].peak_memory_bytes for v in versions)
    steps = (v.steps for v in versions[1:])
    return round(base + sum(step * (base - other) for other, step in zip(others, steps, strict=True)))


def _make_plan(space: Space, base: Mapping[str, object], item: Found) -> Plan:
    rules, layers = node_rules(item.problem, item.solution)
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
        optimizer_sharding=_sharding(space, item, rules, layers),
        certificate=Certificate(
            status=status,
            objective_s=item.solution.objective_s,
            lower_bound_s=item.solution.lower_bound_s,
            elimination_width=item.solution.width,
            operators=sum(
                times
                for node, times in zip(space.graph.nodes, space.graph.multiplicity, strict=True)
                if node.role is Role.OPERATOR
            ),
            distinct_blocks=len(space.graph.runs),
        ),
    )


def _sharding(space: Space, item: Found, rules: Mapping[str, NodeRules], layers: tuple[LayerRules, ...]) -> str:
    """What stored shards are called: the name that is pinned, or the one that needs no more messages."""
    found = optimizer_sharding(item.mesh, _stored(space.graph, rules, layers))
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


def _with_reasons(scored: list[Candidate]) -> tuple[Candidate, ...]:
    """Say of every plan but the first which part of the step made it lose."""
    if not scored:
        return ()
    best = scored[0].prediction
    result = [scored[0]]
    for candidate in scored[1:]:
        more = {
            part: seconds - best.breakdown.get(part, 0.0) for part, seconds in candidate.prediction.breakdown.items()
        }
        part = max(more, key=lambda p: more[p])
        what = part.removesuffix("_s").replace("_", " ")
        result.append(replace(candidate, reason=f"{_seconds(more[part])} more {what}"))
    return tuple(result)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


# Messages


def _without_rules(graph: OperatorGraph) -> tuple[str, ...]:
    """One message for each kind of operator that has no sharding rule."""
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.role is Role.OPERATOR and not has_rule(node.op):
            found.setdefault(node.op, []).append(node.name)
    return tuple(
        f"operator {op} has no sharding rule and is replicated ({len(names)} times, first at {names[0]})"
        for op, names in sorted(found.items())
    )


def _idle_axes(candidates: list[Candidate]) -> tuple[str, ...]:
    """A message for each mesh axis of the best plan along which no operator's work is split."""
    if not candidates:
        return ()
    plan = candidates[0].plan
    everything = [rules for part in (plan.rules, *(p.rules for p in plan.layers)) for rules in part.values()]
    return tuple(
        f"the best plan splits no work along the {axis.name} axis: its {axis.size} ranks all do the same, because "
        "messages would cost more than they save"
        for i, axis in enumerate(plan.mesh.axes)
        if not any(rules[i].splits_work for rules in everything)
    )


def _why_infeasible(space: Space, misfits: Iterable[Misfit]) -> str:
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
    free = replace(space.pins, dp=None, tp=None, micro_batch=None, optimizer_sharding=None, batch_only=False)
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
