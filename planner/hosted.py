"""What plans whose tables of embeddings live on the host need of request, network and profile, and what they cost."""

from __future__ import annotations

from dataclasses import replace

from planner.configured import Configured, Scored
from planner.graph.host_tables import host_tables
from planner.graph.operator_graph import OperatorGraph
from planner.prediction import predict_plan
from planner.request import Pins
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.timing import host_time


def with_host_tables(pins: Pins, graph: OperatorGraph, hardware: Hardware) -> Pins:
    """The pins, with one stage where tables are to live on the host.

    Raises
    ------
    InputError
        Other pins, the network or the profile forbid it.
    """
    if not pins.host_embeddings:
        return pins
    what = "pin host_embeddings=true"
    for name in ("pp", "vpp"):
        if (value := getattr(pins, name) or 1) > 1:
            raise InputError(f"{what}: tables live on the host in plans of one stage, not {name}={value}; use {name}=1")
    if pins.by_unit or pins.batch_only:
        raise InputError(
            f"{what}: not with marks of single modules or a parallel mode that cuts the batch alone; use "
            "--parallel-mode auto_parallel"
        )
    if not host_time(hardware, 1.0):
        raise InputError(
            f"{what}: profile {hardware.name} does not say how fast devices reach their host; add "
            "reliability.snapshot_bandwidth_bytes_per_s to the profile, or leave the pin out"
        )
    host_tables(graph)
    return replace(pins, pp=1, vpp=1)


def host_tables_cost_s(search: Configured, scored: Scored) -> float | None:
    """Seconds of a simulated step that tables on the host cost; None where they are not there or fit nowhere else."""
    if not scored.plan.host_embeddings:
        return None
    other = predict_plan(replace(scored.plan, host_embeddings=False), search.graph, search.hardware)
    fits = other.peak_memory_bytes <= other.device_memory_bytes
    return max(0.0, scored.prediction.step_time_s - other.step_time_s) if fits else None
