"""Plans of one stage: operators searched one by one on every mesh of data × tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from planner.graph.operator_graph import OperatorGraph, Role
from planner.lowering.checked import fits_copies
from planner.planning.prediction import Prediction, predict_plan, with_host, without_rounding
from planner.planning.rescoring import Contender, Foretold
from planner.plans.plan import (
    Certificate,
    LayerRules,
    NodeRules,
    Plan,
    Status,
    optimizer_sharding,
    stored_parameters,
)
from planner.search.candidates import ALTERNATIVE, NOTHING_KNOWN, ROOMY, Found, Known, Misfit, Space, closed, explore
from planner.search.configurations.buckets import USUAL
from planner.search.exact.blocks import TooWideError
from planner.search.patience import Patience
from planner.search.problem.problem import Solution, node_rules, parts_of
from planner.search.problem.unaligned import in_runs
from planner.search.recursive_programming import with_bound
from simulator.errors import InputError
from simulator.quantities import bytes_text

PROOF_TOLERANCE = 1e-6
_RETRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan, what it is predicted to do, and why it lost to the first ("" for the first)."""

    plan: Plan
    prediction: Prediction
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStage:
    """What the search of operators on data × tensor meshes found, best first by its objective.

    ``unseen`` says that the user ended it before all meshes were looked into.
    """

    found: tuple[Found, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    messages: tuple[str, ...] = ()
    interrupted: bool = False
    unseen: bool = False


def search_one_stage(
    space: Space, *, wanted: int, refusable: bool, known: Known = NOTHING_KNOWN, patience: Patience | None = None
) -> OneStage:
    """Search the operators of each mesh.

    Parameters
    ----------
    wanted
        Plans to find.
    refusable
        Whether meshes that cannot be are left to other configurations.
    known
        What is known of those: meshes that cannot come near the best are left out.
    patience
        Asked between meshes whether the user wants an end.
    """
    if not space.pins.one_stage:
        return OneStage()
    limit = float(space.hardware.device_memory_bytes)
    explored: list[Found | Misfit] = []
    interrupted = unseen = False
    found: list[Found] = []
    patience = patience or Patience()
    items = explore(space, limit, known=known, wanted=wanted)
    try:
        while True:
            with patience.breaking():
                item = next(items, None)
            if item is None:
                break
            explored.append(item)
            patience.found |= isinstance(item, Found)
        found = _found(explored)
        with patience.breaking():
            found = closed(space, found, limit)
    except InputError:
        if not refusable:
            raise
    except KeyboardInterrupt:
        interrupted, unseen = True, not found
        found = found or _found(explored)
    return OneStage(
        found=tuple(sorted(found, key=lambda item: item.solution.objective_s)),
        misfits=tuple(item for item in explored if isinstance(item, Misfit)),
        messages=tuple(dict.fromkeys(m for item in found for m in item.messages)),
        interrupted=interrupted,
        unseen=unseen,
    )


def _found(explored: Iterable[Found | Misfit]) -> list[Found]:
    return [item for item in explored if isinstance(item, Found)]


def pin_costs(space: Space, one: OneStage, asked: Iterable[str]) -> Iterator[tuple[str, float, str]]:
    """For each pin that was `asked` for: its text, the seconds it costs among plans of one stage, the best without it.

    Both by the objective of the search of operators; meshes that cannot come near the best are left out.

    Raises
    ------
    KeyboardInterrupt
        The user stopped one of these searches.
    """
    if not one.found:
        return
    best, named = one.found[0], space.pins.named()
    for name in asked:
        left: dict[str, Any] = {name: None}
        free = replace(space, pins=replace(space.pins, **left))
        free = replace(free, bucket_bytes=USUAL) if name == "bucket_mb" else free
        known = Known(steps_s=(best.solution.objective_s,))
        again = search_one_stage(free, wanted=1, refusable=True, known=known)
        if again.interrupted:
            raise KeyboardInterrupt
        other = min((best, *again.found), key=lambda item: item.solution.objective_s)
        data, tensor = (next((a.size for a in other.mesh.axes if a.name == n), 1) for n in ("data", "tensor"))
        samples = space.global_batch // (data * other.micro_batches)
        saved = best.solution.objective_s - other.solution.objective_s
        yield f"{name}={named[name]}", saved, f"dp={data} tp={tensor} micro_batch={samples}"


@dataclass(frozen=True, kw_only=True)
class OneStagePlans:
    """Writes solved meshes of one request as plans of `graph`, whose runs may be shorter in the space; simulates them.

    ``base`` are the fields of every plan.
    """

    space: Space
    graph: OperatorGraph
    base: Mapping[str, object]

    def contenders(self, one: OneStage, count: int) -> list[Contender[Candidate]]:
        """The first plans, each so that its simulated peak fits."""
        return [
            Contender(
                objective_s=item.solution.objective_s,
                foretell=partial(self._proven, item, one.unseen),
                settle=partial(self._fitting, item),
            )
            for item in one.found[:count]
        ]

    def _proven(self, item: Found, unseen: bool) -> Foretold:
        """What a solved mesh does, with what is proven of it."""
        if unseen:
            item = replace(item, solution=replace(item.solution, lower_bound_s=0.0))
        elif self.space.search_mode != "dynamic_programming":
            item = replace(item, solution=_bounded(item, self.space.hardware.device_memory_bytes))
        return self._foretold(item)

    def _fitting(self, item: Found, foretold: Foretold, best_s: float) -> Candidate | None:
        """The item's plan, solved again with less memory until its simulated peak fits; None where it never does."""
        space, limit = self.space, self.space.hardware.device_memory_bytes
        retries = _RETRIES if item.solution.objective_s <= ALTERNATIVE * best_s else 0
        bound = foretold.plan.certificate.lower_bound_s
        allowed = float(limit)
        for _ in range(retries if item.solution.memory_bytes > ROOMY * limit else 0):
            over = 0 if foretold.prediction is None else foretold.prediction.peak_memory_bytes - limit
            if over <= 0:
                break
            allowed -= over + 0.01 * limit
            again = _again(space, item, allowed)
            if again is None:
                return None
            # The bound of the tighter limit does not hold for the device's own; that of the first search does.
            least = min(bound, again.solution.lower_bound_s)
            foretold = self._foretold(replace(again, solution=replace(again.solution, lower_bound_s=least)))
        if foretold.prediction is None or not foretold.prediction.fits:
            return None
        return Candidate(plan=foretold.plan, prediction=foretold.prediction, reason="")

    def _foretold(self, item: Found) -> Foretold:
        """What a solved mesh does, unless its copies cannot be cut so."""
        plan = _make_plan(self.space, self.graph, self.base, item)
        if not fits_copies(plan, self.graph):
            return Foretold(plan=plan)
        found = predict_plan(plan, self.graph, self.space.hardware)
        parts = without_rounding(parts_of(item.problem, item.solution), item.solution.objective_s)
        analytic = with_host(parts, found)
        return Foretold(plan=plan, prediction=replace(found, analytic=analytic))


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
        **{**base, "sent_once": 0},  # type: ignore[arg-type]
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
    found = optimizer_sharding(item.mesh, stored_parameters(graph, rules, layers, trained=True))
    return space.pins.optimizer_sharding or found if found != "none" else found


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
