"""What a plan is predicted to do on a cluster, from the simulation of its program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.scaling import at_batch
from planner.lowering.instructions import LoweredPlan
from planner.lowering.step import lowered_step
from planner.plans.plan import Plan
from planner.plans.request import PRECISIONS
from simulator import fast_engine
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.timeline import Timeline

ROUNDING = 1e-12
"""Part of a step by which equal sums may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time, throughput and memory of one optimizer step.

    ``mfu`` is the share of the devices' peak that the network's own floating point operations reach;
    ``breakdown`` adds up to the step time (the mean of all pipeline ranks); ``memory_at_peak`` to the peak, which is
    that of pipeline rank ``peak_rank``. ``analytic`` are the parts of the closed form that the search minimised, where
    it did. ``start_s`` passes once, before the first step.
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
    peak_rank: int = 0
    analytic: Mapping[str, float] = field(default_factory=dict)
    start_s: float = 0.0


def check_products(hardware: Hardware, dtype: str) -> None:
    """Raise InputError where matrix products are to be in 8 or 4 bits and the device has none.

    Tensors are wider than that: timing products as wider ones would plan casts for nothing.
    """
    for bits, kind, other in (("8", "float8", "dgx-h100"), ("4", "float4", "dgx-b200")):
        if dtype.startswith(kind) and not hardware.peak_dtype(dtype).startswith(kind):
            raise InputError(
                f"precision fp{bits}: {hardware.device_name} (profile {hardware.name}) has no {kind} peak, and "
                f"fp{bits} needs matrix products in {bits} bits; use --precision bf16, or a device that has them, such "
                f"as --hw {other}"
            )


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
    """Figures of a simulated step; `graph` is that of one micro-batch or copy, folded or not."""
    found = figures(
        plan,
        hardware,
        step_time_s=timeline.step_time_s,
        flops=sum(
            node.flops * times * plan.copies
            for node, times in zip(graph.nodes, graph.multiplicity, strict=True)
            if node.role is Role.OPERATOR
        ),
        dtype=computed_dtype(graph),
        memory={str(kind): float(size) for kind, size in timeline.memory_at_peak.items()},
        breakdown=timeline.breakdown,
    )
    return _with_start(found, plan, graph, hardware)


def _with_start(found: Prediction, plan: Plan, graph: OperatorGraph, hardware: Hardware) -> Prediction:
    """The prediction with what is sent once, before the first step; the network is folded or not."""
    if not plan.exchange.broadcast:
        return found
    from planner.planning.start_time import start_s

    return replace(found, start_s=start_s(plan, graph, hardware))


def trained_dtype(graph: OperatorGraph) -> str:
    """Type of the parameters' numbers."""
    return next((n.outputs[0].dtype for n in graph.nodes if n.role is Role.PARAMETER), "float32")


def computed_dtype(graph: OperatorGraph) -> str:
    """Type that matrix products compute in: the narrowest of any."""
    return next((n.product_dtype for n in graph.nodes if n.product_dtype), trained_dtype(graph))


def without_rounding(parts: Mapping[str, float], step_time_s: float) -> dict[str, float]:
    """Parts of a step, in seconds, that are nothing where sums in another order leave them below zero.

    What lies further below is an error, which shows.
    """
    return {name: 0.0 if -ROUNDING * step_time_s < seconds < 0 else seconds for name, seconds in parts.items()}


def figures(
    plan: Plan,
    hardware: Hardware,
    *,
    step_time_s: float,
    flops: float,
    dtype: str,
    memory: Mapping[str, float],
    breakdown: Mapping[str, float],
    peak_rank: int = 0,
) -> Prediction:
    """A prediction from what was simulated; `flops` are those of one micro-batch on all data-parallel ranks."""
    uncertainty = hardware.uncertainty
    samples = plan.global_batch / step_time_s
    return Prediction(
        step_time_s=step_time_s,
        interval_s=(step_time_s * (1 - uncertainty.low), step_time_s * (1 + uncertainty.high)),
        label=uncertainty.label,
        samples_per_s=samples,
        tokens_per_s=None if plan.sequence_length is None else samples * plan.sequence_length,
        mfu=flops * plan.micro_batches / (step_time_s * hardware.peak(dtype) * plan.devices),
        peak_memory_bytes=int(sum(memory.values())),
        device_memory_bytes=int(hardware.device_memory_bytes),
        memory_at_peak={kind: int(size) for kind, size in memory.items()},
        breakdown=dict(breakdown),
        peak_rank=peak_rank,
    )


def predict_plan(plan: Plan, graph: OperatorGraph, hardware: Hardware) -> Prediction:
    """Predict any plan.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded, at the plan's precision and any batch.

    Raises
    ------
    StrategyError
        The plan says something its network or schedule makes impossible.
    """
    if plan.pipeline * plan.virtual > 1:
        from planner.planning.pipeline_prediction import predict_pipeline

        return _with_start(predict_pipeline(plan, graph, hardware).prediction, plan, graph, hardware)
    timeline = fast_engine.simulate(lowered_step(plan, graph), hardware)
    return prediction_of(plan, at_batch(graph, plan.samples), hardware, timeline)
