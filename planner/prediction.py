"""What a plan is predicted to do on a cluster, from the simulation of its program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph.operator_graph import OperatorGraph, Role
from planner.instructions import LoweredPlan
from planner.request import PRECISIONS
from planner.strategy.plan import Plan
from simulator import fast_engine
from simulator.hardware import Hardware
from simulator.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time, throughput and memory of one optimizer step.

    ``mfu`` is the share of the devices' peak that the network's own floating point operations reach;
    ``breakdown`` adds up to the step time; ``memory_at_peak`` to the peak.
    """

    step_time_s: float
    interval_s: tuple[float, float]
    label: str
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float
    peak_memory_bytes: int
    device_memory_bytes: int
    memory_at_peak: Mapping[str, int]
    breakdown: Mapping[str, float]


def precision_notes(hardware: Hardware, dtype: str) -> tuple[str, ...]:
    """Say that matrix products in `dtype` are timed as wider ones; empty where they are not."""
    used = hardware.peak_dtype(dtype)
    if used == dtype:
        return ()
    usual = next(name for name, known in PRECISIONS.items() if known == hardware.default_precision)
    return (f"{hardware.device_name} has no {dtype} peak: timed as {used}; plan with --precision {usual}",)


def predict(plan: Plan, lowered: LoweredPlan, hardware: Hardware) -> tuple[Prediction, Timeline]:
    """Simulate a lowered plan and read the figures off."""
    timeline = fast_engine.simulate(lowered.program, hardware)
    return prediction_of(plan, lowered.graph, hardware, timeline), timeline


def prediction_of(plan: Plan, graph: OperatorGraph, hardware: Hardware, timeline: Timeline) -> Prediction:
    """Figures of a simulated step; `graph` is the unfolded graph of one micro-batch."""
    seconds = timeline.step_time_s
    flops = sum(node.flops for node in graph.nodes if node.role is Role.OPERATOR) * plan.micro_batches
    dtype = next((n.outputs[0].dtype for n in graph.nodes if n.role is Role.PARAMETER), "float32")
    peak = hardware.peak(dtype) * plan.mesh.size
    samples = plan.global_batch / seconds
    uncertainty = hardware.uncertainty
    return Prediction(
        step_time_s=seconds,
        interval_s=(seconds * (1 - uncertainty.low), seconds * (1 + uncertainty.high)),
        label=uncertainty.label,
        samples_per_s=samples,
        tokens_per_s=None if plan.sequence_length is None else samples * plan.sequence_length,
        mfu=flops / (seconds * peak),
        peak_memory_bytes=int(timeline.peak_memory_bytes),
        device_memory_bytes=int(hardware.device_memory_bytes),
        memory_at_peak={str(kind): int(size) for kind, size in timeline.memory_at_peak.items()},
        breakdown=dict(timeline.breakdown),
    )
