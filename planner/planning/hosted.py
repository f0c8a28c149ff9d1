"""What plans with tables of embeddings on the host need, and what pins cost whose price only simulation tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.graph.host_tables import host_tables
from planner.graph.operator_graph import OperatorGraph
from planner.planning.prediction import Prediction, predict_plan
from planner.plans.pins import Pins
from planner.plans.plan import Certificate, Plan, Status
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.timing import host_time


def check_host_tables(pins: Pins, graph: OperatorGraph, hardware: Hardware) -> None:
    """Raise InputError where tables are to live on the host and other pins, the network or the profile forbid it."""
    if not pins.host_embeddings:
        return
    what = "pin host_embeddings=true"
    if pins.batch_only:
        raise InputError(f"{what}: not in a parallel mode that cuts the batch alone; use --parallel-mode auto_parallel")
    check_host_speed(hardware, what)
    host_tables(graph)


def check_host_speed(hardware: Hardware, what: str) -> None:
    """Raise InputError where the profile does not say how fast devices reach their host, which `what` needs."""
    if not host_time(hardware, 1.0):
        raise InputError(
            f"{what}: profile {hardware.name} does not say how fast devices reach their host; add "
            "reliability.snapshot_bandwidth_bytes_per_s to the profile, or leave it out"
        )


def left_out(plan: Plan) -> tuple[str, ...]:
    """Pins of a plan whose time the closed form leaves out, as they are written: copies to the host, and its disks."""
    told = {
        "offload_to=disk": plan.offload_to == "disk",
        "offload_parameters=true": plan.offload_parameters,
        "offload_activations=true": bool(plan.offload_ranges),
    }
    return tuple(name for name, there in told.items() if there)


def as_simulated(certificate: Certificate, plan: Plan, step_s: float) -> Certificate:
    """What is proven of a plan that simulates in `step_s` where the closed form leaves out what its pins cost.

    What is left out takes time and saves none: the bound holds for the whole step, but the least objective is no step
    that there is, and stands for none.
    """
    if not left_out(plan) or certificate.objective_s >= step_s:
        return certificate
    status = certificate.status if certificate.status is Status.HEURISTIC else Status.BOUNDED
    return replace(certificate, status=status, objective_s=step_s)


def simulated_costs(
    graph: OperatorGraph, hardware: Hardware, plan: Plan, prediction: Prediction, pins: Pins
) -> Iterator[tuple[str, float, str]]:
    """What is not on the devices, and copies: the pin, the seconds of a simulated step it costs, the plan without it.

    What the plan does without the pin as well costs nothing. Nothing is said of what fits nowhere else.
    """
    others: Mapping[str, tuple[bool, str, dict[str, Any]]] = {
        "host_embeddings": (plan.host_embeddings, "with tables on the devices", {"host_embeddings": False}),
        "offload_to": (plan.offload_to == "disk", "with states in host memory", {"offload_to": "host"}),
        "offload_parameters": (
            plan.offload_parameters,
            "with parameters on the devices",
            {"offload_parameters": False},
        ),
        "offload_activations": (bool(plan.offload_ranges), "with activations on the devices", {"offload_ranges": ()}),
        "recompute_messages": (
            not all(part.messages for part in plan.recompute_ranges),
            "with messages sent again",
            {"recompute_ranges": tuple(replace(part, messages=True) for part in plan.recompute_ranges)},
        ),
        "copies": (plan.copies > 1, "with micro-batches run whole", {"copies": 1}),
    }
    for name, text in pins.named().items():
        if name not in others:
            continue
        there, where, change = others[name]
        if not there:
            yield f"{name}={text}", 0.0, ""
            continue
        other = predict_plan(replace(plan, **change), graph, hardware)
        if other.fits:
            yield f"{name}={text}", max(0.0, prediction.step_time_s - other.step_time_s), where
