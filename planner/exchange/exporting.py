"""A plan written for another framework, with what that framework cannot run of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

from planner.cost.software import software_named
from planner.exchange.formats import ExchangeFormat, Written, rounded, roundings
from planner.exchange.pinned import pinned
from planner.exchange.training_config import TrainingConfig, config_of
from planner.graph.operator_graph import OperatorGraph
from planner.planning.comparing import request_of
from planner.planning.planning import plan_network
from planner.plans.capability import Capability
from planner.plans.pins import AXES_BY_PIN, FREE, Pins
from planner.plans.plan import Plan
from simulator.errors import InputError, MeshwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class CannotSay:
    """A choice that a format cannot express, its rounded value, and the prediction for the rounded plan, if any."""

    what: str
    rounded_to: str
    step_time_s: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The written file, its configuration, and the choices that were rounded."""

    config: TrainingConfig
    written: Written
    cannot_say: tuple[CannotSay, ...]

    def __repr__(self) -> str:
        variables = [f"{name}={value}" for name, value in self.written.environment.items()]
        rounded = [f"rounded: {one.what} to {one.rounded_to}" for one in self.cannot_say]
        return "\n".join([self.written.text.rstrip(), *variables, *rounded])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """Something of a plan that a file does not say: as a configuration without it, or as other pins."""

    what: str
    to: str
    config: TrainingConfig | None = None
    pins: Pins = FREE


def export_plan(plan: Plan, graph: OperatorGraph, form: ExchangeFormat, *, rounds: bool = False) -> Exported:
    """Write a plan in a format.

    Parameters
    ----------
    graph
        The plan's network at any batch, folded or not.
    rounds
        Whether what the framework cannot run becomes the nearest that it can; each change is simulated.

    Raises
    ------
    InputError
        The framework cannot run the plan, and it is not to be rounded; or not even the nearest plan is legal.
    """
    config, losses = _losses(plan, graph, form.table, rounds=rounds)
    nearest = rounded(config, form.table)
    if broken := form.violations(nearest):
        raise InputError(f"{form.table.framework} {form.version} does not take this plan: {broken[0]}")
    return Exported(
        config=nearest,
        written=form.stating(form.write(nearest), plan.software),
        cannot_say=tuple(_simulated(loss, plan, config, graph) for loss in losses),
    )


def nearest_plan(
    plan: Plan, graph: OperatorGraph, table: Capability, *, rounds: bool = False
) -> tuple[Plan, tuple[CannotSay, ...]]:
    """The plan itself, or the nearest that a framework can run, with the choices that differ.

    Raises
    ------
    InputError
        The framework cannot run the plan, and it is not to be rounded; or the nearest does not fit.
    """
    config, losses = _losses(plan, graph, table, rounds=rounds)
    if not losses:
        return plan, ()
    asked = pinned(rounded(config, table), request_of(plan), graph).request
    others = reduce(Pins.over, (loss.pins for loss in losses))
    found = plan_network(replace(asked, pins=others.over(asked.pins)), graph=graph)
    if not found.candidates:
        raise InputError(
            f"the nearest plan that {table.framework} {table.version} can run does not fit: {found.infeasible}"
        )
    return found.candidates[0].plan, tuple(_simulated(loss, plan, config, graph) for loss in losses)


def _losses(plan: Plan, graph: OperatorGraph, table: Capability, *, rounds: bool) -> tuple[TrainingConfig, list[_Loss]]:
    """Return a plan's configuration and the choices a framework cannot run; InputError unless those are rounded."""
    overlaps = software_named(plan.software).overlaps if plan.software else True
    config = config_of(plan, graph, overlaps=overlaps)
    unable = (_Loss(what=one.what, to=one.to, config=one.config) for one in roundings(config, table))
    losses = [*unable, *_beyond(plan)]
    if losses and not rounds:
        listed = "; ".join(f"{loss.what} (nearest: {loss.to})" for loss in losses)
        again = f", or plan with --software {table.software[0]}" if table.software else ""
        raise InputError(
            f"{table.framework} {table.version} cannot run all of this plan: {listed}; add --round to write the "
            f"nearest{again}"
        )
    return config, losses


def _beyond(plan: Plan) -> Iterable[_Loss]:
    """List the choices of a plan that no exchange format can express."""
    if plan.copies > 1:
        yield _Loss(what=f"copies={plan.copies}", to="copies=1", pins=Pins(copies=1))
    if plan.host_embeddings:
        yield _Loss(what="host_embeddings=true", to="host_embeddings=false", pins=Pins(host_embeddings=False))
    if plan.sharding_threshold_bytes:
        whole = f"sharding_threshold_kb={plan.sharding_threshold_bytes // 1024}"
        yield _Loss(what=whole, to="sharding_threshold_kb=0", pins=Pins(sharding_threshold_kb=0))
    names = {"data": "dp", "context": "cp", "expert": "ep", "tensor": "tp"}
    strides = {names[axis.name]: plan.mesh.stride(place) for place, axis in enumerate(plan.mesh.axes)}
    if plan.pipeline > 1:
        strides["pp"] = plan.pipeline_stride
    # Axes of more than one rank, from the one whose ranks lie farthest apart.
    order = tuple(sorted(strides, key=strides.__getitem__, reverse=True))
    usual = tuple(name for name in AXES_BY_PIN if name in order)
    if order != usual:
        yield _Loss(what=f"order={'-'.join(order)}", to=f"order={'-'.join(usual)}", pins=Pins(order=usual))


def _simulated(loss: _Loss, plan: Plan, config: TrainingConfig, graph: OperatorGraph) -> CannotSay:
    """The plan with one thing changed, as it is predicted."""
    said = CannotSay(what=loss.what, rounded_to=loss.to)
    try:
        asked = pinned(loss.config or config, request_of(plan), graph).request
        found = plan_network(replace(asked, pins=loss.pins.over(asked.pins)), graph=graph)
    except MeshwrightError:
        return said
    if not found.candidates:
        return said
    best = found.candidates[0].prediction
    return replace(said, step_time_s=best.step_time_s, peak_memory_bytes=best.peak_memory_bytes)
