"""A plan for a network under a context, found or read from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.exchange.mindspore.context import AutoParallelContext
from planner.exchange.mindspore.requests import request_of
from planner.networks.given import source_of
from simulator.errors import ContextError, InfeasibleError

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.networks.network import Network
    from planner.planning.planning import SearchResult
    from planner.planning.prediction import Prediction
    from planner.plans.pins import Pins
    from planner.plans.plan import Plan
    from planner.plans.request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan and what it is predicted to do.

    ``result`` is what the search found, None where the plan was read; ``written`` the strategy file, if any.
    """

    plan: Plan
    prediction: Prediction
    result: SearchResult | None
    written: Path | None


def plan_under(
    context: AutoParallelContext,
    network: str | Network | Callable[[], object],
    hardware: str,
    *,
    pins: Mapping[str, object] | Pins | None = None,
    **options: Any,
) -> Planned:
    """Plan a network under a context; parameters and errors as `planner.plan`."""
    from planner.planning.planning import capture_for, plan_network
    from planner.plans.file import write_plan

    source_network = network if not callable(network) else source_of(network)
    request = request_of(context, source_network, hardware, pins=pins, **options)
    source, target = (_file(context, name) for name in ("strategy_ckpt_load_file", "strategy_ckpt_save_file"))
    if target:
        from simulator.whole_file import check_writable

        check_writable(target)
    graph = capture_for(request)
    result = None
    if source:
        found, prediction = read_stored(request, graph, source)
    else:
        result = plan_network(request, graph=graph)
        if not result.candidates:
            raise InfeasibleError(result.infeasible)
        found, prediction = result.candidates[0].plan, result.candidates[0].prediction
    written = None
    if target:
        from planner.planning.documents import prediction_document

        written = write_plan(found, target, prediction_document(prediction))
    return Planned(plan=found, prediction=prediction, result=result, written=written)


def _file(context: AutoParallelContext, key: str) -> str:
    return str(context.get(key)) if context.counts(key) else ""


def read_stored(request: PlanRequest, graph: OperatorGraph, source: str) -> tuple[Plan, Prediction]:
    """A plan from a strategy file for a request, with what is predicted of it.

    Raises
    ------
    ContextError
        The file is of another network or another number of devices, or the request asks for something else.
    StrategyError
        The file is wrong.
    """
    from planner.cost.software import run_for
    from planner.lowering.checked import checked_graph
    from planner.planning.loading import naming
    from planner.planning.prediction import predict_plan
    from planner.plans.file import read_plan
    from simulator.profiles import load_profile

    found = read_plan(source)
    where = f"strategy_ckpt_load_file={source!r}"
    if found.fingerprint != graph.fingerprint:
        raise ContextError(
            f"{where} is of another network: its fingerprint is {found.fingerprint[:12]}…, that of {request.network} "
            f"is {graph.fingerprint[:12]}…; plan {request.network} again, or give the file of this network"
        )
    if found.devices != request.devices:
        raise ContextError(
            f"{where} is for {found.devices} devices, device_num={request.devices}; set device_num={found.devices}, or "
            f"plan again"
        )
    hardware = run_for(found, load_profile(request.hardware))
    _check_agrees(request, found, where)
    with naming(source):
        checked = checked_graph(found, graph)
        prediction = predict_plan(found, checked, hardware)
    _check_marks(request, found, checked, where)
    return found, prediction


def _check_marks(request: PlanRequest, found: Plan, graph: OperatorGraph, where: str) -> None:
    """Raise ContextError where modules are marked with something else than the plan that was read."""
    from planner.graph.chain import chain
    from planner.networks import load_network
    from planner.networks.marks import Marks
    from planner.planning.placing import PlacedMarks

    own = load_network(request.network, sequence_length=request.sequence_length).marks or Marks()
    marks = request.marks.over(own) if request.marks else own
    if marks:
        PlacedMarks(marks, graph, chain(graph)).check(found, graph, where)


def _check_agrees(request: PlanRequest, found: Plan, where: str) -> None:
    """Raise ContextError where the request asks for something else than the plan that was read."""
    from planner.planning.documents import plan_document
    from simulator.profiles import load_profile

    said = plan_document(found, load_profile(request.hardware))
    said |= {
        "bucket_mb": said["bucket_bytes"] / 2**20,
        "sharding_threshold_kb": said["sharding_threshold_bytes"] / 2**10,
    }
    if not found.shard_size and found.optimizer_sharding != "none":
        said["shard_size"] = said["dp"]
    asked: dict[str, object] = dict(request.pins.named())
    for name in ("global_batch", "precision", "optimizer", "software", "attention", "norms"):
        if getattr(request, name):
            asked[name] = getattr(request, name)
    for name, value in asked.items():
        text = f"{said[name]:g}" if isinstance(said[name], float) else str(said[name]).lower()
        if text != str(value).lower():
            raise ContextError(
                f"{where} has {name}={text}, and {name}={value} is asked for; plan again without the file, or ask for "
                f"what it has"
            )
    for name, value in request.exchange.named().items():
        if name != "layerwise" and getattr(found.exchange, name) != value:
            raise ContextError(
                f"{where} has {name}={getattr(found.exchange, name)!r}, and the context asks for {value!r}; plan again "
                f"without the file, or leave out the key that asks for it"
            )
