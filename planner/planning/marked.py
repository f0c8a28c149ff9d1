"""Marks on modules and the semi-automatic mode applied to a request: what they add to its pins, hints and messages."""

from __future__ import annotations

from dataclasses import replace

from planner.graph.chain import Chain
from planner.graph.operator_graph import OperatorGraph
from planner.networks import Network
from planner.networks.marks import Marks
from planner.planning.placing import PlacedMarks, with_stages
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest
from simulator.errors import InputError

SEMI_AUTOMATIC = "semi_auto_parallel"


def marked(
    request: PlanRequest, network: Network, graph: OperatorGraph, units: Chain, pins: Pins
) -> tuple[Pins, PlacedMarks | None]:
    """Marks of modules on the units of the network, those of the request over those of its code, and pins with them.

    Raises
    ------
    InputError
        Marks name no module, contradict each other or the pins.
    """
    own = network.marks or Marks()
    marks = request.marks.over(own) if request.marks else own
    if not marks:
        return pins, None
    placed = PlacedMarks(marks, graph, units)
    stages = placed.stage_count()
    if stages is not None:
        pins = with_stages(pins, stages, marks.virtual)
    if marks.recompute and pins.recompute is not None:
        raise InputError(
            f"pin recompute={pins.recompute} and recompute() of {next(iter(marks.recompute))!r} both say what is "
            "computed again; leave one of them out"
        )
    return replace(pins, by_unit=bool(marks.stages or marks.recompute or marks.offload)), placed


def with_groups(request: PlanRequest, placed: PlacedMarks) -> PlanRequest:
    """The request with the groups that gradients travel in.

    Raises
    ------
    InputError
        All-reduces are fused by places as well.
    """
    groups = placed.fusion()
    if not groups:
        return request
    if request.exchange.fusion_places:
        raise InputError(
            f"comm_fusion of {next(iter(groups))!r} and all-reduces fused by the places "
            f"{list(request.exchange.fusion_places)} both say which gradients travel together; leave one of them out"
        )
    exchange = replace(request.exchange, fusion_groups=tuple(groups.items()))
    return replace(request, exchange=exchange)


def semi_automatic(request: PlanRequest, pins: Pins) -> Pins:
    """Pins with which nothing but the batch is sharded, where no operator is configured in semi-automatic mode.

    There are as many pipeline stages as are asked for.
    """
    if request.parallel_mode != SEMI_AUTOMATIC:
        return pins
    pins = replace(pins, pp=pins.pp or 1)
    return pins if request.hints else replace(pins, tp=pins.tp or 1, cp=pins.cp or 1, ep=pins.ep or 1)
