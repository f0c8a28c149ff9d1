"""What plans with tables of embeddings on the host need, and what pins cost whose price only simulation tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.configured import Configured, Scored
from planner.graph.host_tables import host_tables
from planner.graph.operator_graph import OperatorGraph
from planner.prediction import predict_plan
from planner.request import Pins
from planner.strategy.plan import Certificate, Plan, Status
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


def simulated_costs(search: Configured, scored: Scored) -> Iterator[tuple[str, float, str]]:
    """What is not on the devices, and copies: the pin, the seconds of a simulated step it costs, the plan without it.

    Nothing is said of what fits nowhere else.
    """
    plan = scored.plan
    others: tuple[tuple[bool, str, str, dict[str, Any]], ...] = (
        (plan.host_embeddings, "host_embeddings=true", "with tables on the devices", {"host_embeddings": False}),
        (plan.offload_to == "disk", "offload_to=disk", "with states in host memory", {"offload_to": "host"}),
        (
            plan.offload_parameters,
            "offload_parameters=true",
            "with parameters on the devices",
            {"offload_parameters": False},
        ),
        (
            bool(plan.offload_ranges),
            "offload_activations=true",
            "with activations on the devices",
            {"offload_ranges": ()},
        ),
        (
            not all(part.messages for part in plan.recompute_ranges),
            "recompute_messages=false",
            "with messages sent again",
            {"recompute_ranges": tuple(replace(part, messages=True) for part in plan.recompute_ranges)},
        ),
        (plan.copies > 1, f"copies={plan.copies}", "with micro-batches run whole", {"copies": 1}),
    )
    for asked, pin, where, change in others:
        if asked:
            other = predict_plan(replace(plan, **change), search.graph, search.hardware)
            if other.peak_memory_bytes <= other.device_memory_bytes:
                yield pin, max(0.0, scored.prediction.step_time_s - other.step_time_s), where
