"""Step time of data-parallel training of networks that are described layer by layer.

`planner.published.layered.table` times the steps; here is what they depend on, and which run takes which
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from planner.cost.memory.device import peak_memory
from planner.cost.software_file import SoftwareFile
from planner.cost.stacks import USUAL_BALANCE, USUAL_REACH, LayeredCoefficients, LayeredParameters, Stack
from planner.cost.training_run import LayeredNetwork, RunPrediction, TrainingRun
from planner.published.layered.table import (
    FloatArray,
    LayeredTable,
    bytes_per_cycle,
    data_parallel_network,
    flops_per_element,
    keeps_planes,
    layer_arrays,
    layered_times,
    product_kind,
)
from simulator.hardware import Hardware

BY_LAYERS = "predicted by the layers of the network, for no plan expresses the run"
_MOSAIC = "mosaic image"
_ON_AI_CPU = "ascend910"
"""What leaves sorting and picking in the loss of a detector to its AI CPU, and later devices do not: inferred from
published steps, which take as much longer for a mosaic whatever the network, on this device alone."""

_NEUTRAL = LayeredParameters()
FUSED_IN_HALF = (Stack.MXNET, Stack.PADDLE)
"""Software that fuses norms with what follows them where channels are last, which NVIDIA's examples have in half
precision only (``MxNet/Classification/RN50v1.5/runner``, ``PaddlePaddle/Classification/RN50v1.5/scripts/training``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredEstimate:
    """Seconds of a step; ``breakdown`` adds up to them."""

    step_time_s: float
    breakdown: dict[str, float]


def parameters_of(coefficients: LayeredCoefficients, run: TrainingRun) -> LayeredParameters:
    """Parameters of `run`; what nobody fitted is neutral."""
    device = dict(coefficients.devices.get(run.family, {}))
    stack = dict(coefficients.stacks.get(run.stack_key, {}))
    for name in ("products", "memory", "grouped", "kernel_s"):
        device[name] = device.get(name, getattr(_NEUTRAL, name)) * stack.pop(name, 1.0)
    device["products"] *= (USUAL_BALANCE / flops_per_element(run)) ** device.pop("balance", 0.0)
    untuned = device.pop("untuned", 1.0)
    device["products"] = min(device["products"], 1.0) * (untuned if run.setup.untuned_convolutions else 1.0)
    reach = device.pop("reach", 0.0)
    if not run.family.startswith("ascend"):
        device["memory"] *= (USUAL_REACH / bytes_per_cycle(run.hardware)) ** reach
    planes = device.pop("planes", _NEUTRAL.casts)
    if product_kind(run) == "tf32":
        stack["casts"] = planes
    elif keeps_planes(run):
        stack["casts"] = coefficients.stacks.get(Stack.EAGER, {}).get("casts", _NEUTRAL.casts)
    if product_kind(run) != "half" and run.setup.stack in FUSED_IN_HALF:
        stack["unfused"] = _NEUTRAL.unfused
    if run.setup.plain_graph:
        stack["unfused"] = 1.0
    stack["launch_s"] = stack.get("launch_s", _NEUTRAL.launch_s) * device.pop("launch", 1.0)
    if run.family != _ON_AI_CPU:
        stack.pop("boxes_s", None)
    if run.family != _ON_AI_CPU or run.setup.graph_engine:
        stack.pop("gates_s", None)
    host = {}
    for name in [name for name in stack if name.startswith("host_")]:
        kind = name[5:-2].replace("_", " ")
        host[kind] = stack.pop(name)
    return LayeredParameters(host_s=host, **device, **stack)


_COLUMNS = tuple(column.name for column in fields(LayeredParameters) if column.name != "host_s")


def parameter_columns(table: LayeredTable, parameters: Sequence[LayeredParameters]) -> dict[str, FloatArray]:
    """One set of parameters for each run of `table` as columns (N,); ``host_s`` is of the run's kind of sample."""
    columns = {name: np.array([getattr(one, name) for one in parameters]) for name in _COLUMNS}
    kinds = [data_parallel_network(run).sample for run in table.runs]
    columns["host_s"] = np.array([one.host_s.get(kind, 0.0) for one, kind in zip(parameters, kinds, strict=True)])
    columns["boxes_s"] *= [kind == _MOSAIC for kind in kinds]
    return columns


def predict_layered(run: TrainingRun, parameters: LayeredParameters) -> LayeredEstimate:
    """Time of one step of `run`, whose network is a `LayeredNetwork`; its parts follow one another."""
    table = LayeredTable([run])
    parts = layered_times(table, parameter_columns(table, [parameters]))
    breakdown = {part: float(seconds[0]) for part, seconds in parts.items()}
    return LayeredEstimate(step_time_s=sum(breakdown.values()), breakdown=breakdown)


def predict_by_layers(run: TrainingRun, software: SoftwareFile) -> RunPrediction:
    """Time and memory of a run that no plan expresses, by the layers of its network."""
    told, memory = predict_layered(run, parameters_of(software.layered, run)), peak_memory(run)
    interval, label = software.interval(*run.interval_key)
    return RunPrediction(
        step_time_s=told.step_time_s,
        interval_s=(told.step_time_s * interval.low, told.step_time_s * interval.high),
        label=label,
        peak_memory_bytes=memory.reserved_bytes,
        fits=memory.fits,
        breakdown=told.breakdown,
        memory=memory.fullest.components(),
        memory_figures={str(kind): value for kind, value in memory.figures().items()},
        notes=(BY_LAYERS,),
    )


def typical_batch(network: LayeredNetwork, hardware: Hardware, precision: str) -> int:
    """Samples a device where a published run states none.

    A power of two, at most 256 images in half precision, else 128: the largest whose kept activations fill at most
    three quarters of the memory.
    """
    half = precision in ("fp16", "bf16")
    room = 0.75 * hardware.device_memory_bytes - 16 * network.parameters
    largest = room / ((2 if half else 4) * max(layer_arrays(network).saved, 1.0))
    most = 256 if half and network.sample.endswith("image") else 128
    return int(2 ** np.clip(np.floor(np.log2(max(largest, 1.0))), 0, np.log2(most)))
