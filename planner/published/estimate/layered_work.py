"""Step time and memory of data-parallel training of networks that are described layer by layer.

`planner.published.estimate.layered_table` times the steps; here is what they depend on, and which run takes which
value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from planner.published.estimate.coefficients import stack_key
from planner.published.estimate.device_family import family_of
from planner.published.estimate.layered_table import (
    FloatArray,
    LayeredTable,
    bytes_per_cycle,
    data_parallel_network,
    element_bytes,
    flops_per_element,
    keeps_planes,
    layer_arrays,
    layered_times,
    product_kind,
)
from planner.published.estimate.training_run import LayeredNetwork, Stack, TrainingRun
from simulator.hardware import Hardware

_WORKSPACE_SHARE = 0.25
"""Convolution workspaces and what the allocator cannot fill, over kept activations: ResNet-50 of FlagPerf on A100."""
_MOSAIC = "mosaic image"
_ON_AI_CPU = "ascend910"
"""What leaves sorting and picking in the loss of a detector to its AI CPU, and later devices do not: inferred from
published steps, which take as much longer for a mosaic whatever the network, on this device alone."""
USUAL_BALANCE = 300.0
"""Operations for each element that the memory delivers at which ``products`` of a device hold: about an A100's."""

USUAL_REACH = 13.0
"""Bytes that the memory delivers in a cycle of a multiprocessor at which ``memory`` of a device holds: an A100's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredParameters:
    """Properties of a device and a software stack that decide the speed of layered networks.

    The defaults are what fits of several devices and stacks lie around: they stand in where nobody fitted.

    Attributes
    ----------
    products
        Share of the peak that wide convolutions and matrix products reach.
    memory, grouped
        Share of the memory bandwidth that pointwise kernels and grouped convolutions reach.
    columns_half, depth_half
        Width and depth of a product at which its rate is half of that of a wide one. So many rows are also begun in
        vain: tiles are computed whole.
    outputs_half
        Outputs of a product that keep half of the device at work: fewer do not fill all its multiprocessors with tiles.
    kernel_s, launch_s
        Seconds that a kernel takes beyond its work, and that the host takes to launch it.
    unfused
        Share of the traffic of ReLUs and sums, and of a norm's first pass, that no other kernel does on its way.
    casts
        Copies around a convolution on tensor units, to the layout that these take, as a share of what it moves.
    turned
        Copies of what a dense layer reads and writes, to the fractal layout of matrix units and back, as a share of
        what it moves. Scores of attention stay in that layout, and so do images.
    matmuls
        Rate of matrix products over that of convolutions.
    winograd
        Operations of a 3 x 3 convolution over those that Winograd's algorithm needs, where no tensor unit multiplies.
    vector
        Time of softmax, of norms over channels and of GELU over that in which the memory moves what they touch.
    update_bytes
        Bytes that a step moves for each weight outside of products. SGD with momentum in one kernel reads gradient,
        weight and momentum in float32 and writes the last two: 20.
    layout_bytes
        Bytes that take as long to move as a weight of a dense layer takes in a step to that layout, and its gradient
        back; weights of convolutions stay in it.
    updates
        Kernels for each tensor of weights outside of the network's operators: its update, casts, clipping.
    coordination_s
        Seconds until processes have agreed that a gradient is there everywhere, for the last one of a step.
    step_overhead_s
        Seconds of a step outside kernels.
    crowding
        Share by which launches and what is outside kernels take longer for each doubling of the devices of a host.
    pooled
        Power of the number of devices of a host with which its time for a sample grows: 1 where all share its cores, 0
        where each has some of its own.
    exposed
        Share of the all-reduce that the backward pass does not hide, however long it is.
    contention
        Share by which all-reduces beside them slow the kernels of several devices.
    boxes_s
        Seconds of a mosaic on the AI CPU, which matches its boxes with the cells of a detector.
    gates_s
        Seconds of a channel of a sample that convolutions of a single pixel read or write, forward and backward.
    host_s
        Seconds that the host takes to prepare a sample for one device, by kind of sample.
    """

    products: float = 0.4
    memory: float = 0.85
    grouped: float = 0.1
    columns_half: float = 32.0
    depth_half: float = 64.0
    outputs_half: float = 1.5e5
    kernel_s: float = 5e-6
    launch_s: float = 1e-5
    unfused: float = 0.7
    casts: float = 0.1
    turned: float = 0.0
    matmuls: float = 1.0
    winograd: float = 1.5
    vector: float = 1.0
    update_bytes: float = 20.0
    layout_bytes: float = 0.0
    updates: float = 1.0
    coordination_s: float = 0.0
    step_overhead_s: float = 2e-3
    crowding: float = 0.1
    pooled: float = 0.0
    exposed: float = 0.2
    contention: float = 0.03
    boxes_s: float = 0.0
    gates_s: float = 0.0
    host_s: Mapping[str, float] = field(default_factory=dict)


_NEUTRAL = LayeredParameters()
_FUSED_IN_HALF = (Stack.MXNET, Stack.PADDLE)
"""What fuses norms with what follows them where channels are last, which NVIDIA's examples have in half precision only
(``MxNet/Classification/RN50v1.5/runner``, ``PaddlePaddle/Classification/RN50v1.5/scripts/training``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredEstimate:
    """Seconds of a step, whose ``breakdown`` adds up to it, and bytes of ``memory`` by kind."""

    step_time_s: float
    breakdown: dict[str, float]
    memory: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredCoefficients:
    """Fitted values by device family and by stack, as the profile of the software keeps them.

    A device has fields of `LayeredParameters`, a factor ``launch`` (on the host's time for a launch), ``balance``,
    ``reach``, ``planes`` and ``untuned``. Its ``products`` are those of a device with `USUAL_BALANCE`: with more
    operations for each element that the memory delivers, fewer of them are reached, in all precisions alike, with the
    power ``balance`` of their ratio, and never more than the peak. Its ``memory`` is that of a device with
    `USUAL_REACH`: the more bytes a multiprocessor is to take in a cycle, the smaller the share that it takes, with the
    power ``reach`` of their ratio. ``planes`` are the ``casts`` of TF32: tensor units take images with channels last,
    and frameworks put them so for half precision alone. ``untuned`` is the factor on ``products`` of convolutions whose
    kernels nobody has tried out. A stack has factors on ``products``, ``memory``, ``grouped`` and ``kernel_s``, the
    other fields, and ``host_<kind>_s``.
    """

    devices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    stacks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def parameters(self, run: TrainingRun) -> LayeredParameters:
        """Parameters of `run`; what nobody fitted is neutral."""
        device = dict(self.devices.get(family_of(run.hardware.device_name), {}))
        stack = dict(self.stacks.get(stack_key(run), {}))
        for name in ("products", "memory", "grouped", "kernel_s"):
            device[name] = device.get(name, getattr(_NEUTRAL, name)) * stack.pop(name, 1.0)
        device["products"] *= (USUAL_BALANCE / flops_per_element(run)) ** device.pop("balance", 0.0)
        untuned = device.pop("untuned", 1.0)
        device["products"] = min(device["products"], 1.0) * (untuned if run.setup.untuned_convolutions else 1.0)
        reach = device.pop("reach", 0.0)
        if not family_of(run.hardware.device_name).startswith("ascend"):
            device["memory"] *= (USUAL_REACH / bytes_per_cycle(run.hardware)) ** reach
        planes = device.pop("planes", _NEUTRAL.casts)
        if product_kind(run) == "tf32":
            stack["casts"] = planes
        elif keeps_planes(run):
            stack["casts"] = self.stacks.get(Stack.EAGER, {}).get("casts", _NEUTRAL.casts)
        if product_kind(run) != "half" and run.setup.stack in _FUSED_IN_HALF:
            stack["unfused"] = _NEUTRAL.unfused
        if run.setup.plain_graph:
            stack["unfused"] = 1.0
        stack["launch_s"] = stack.get("launch_s", _NEUTRAL.launch_s) * device.pop("launch", 1.0)
        if family_of(run.hardware.device_name) != _ON_AI_CPU:
            stack.pop("boxes_s", None)
        if family_of(run.hardware.device_name) != _ON_AI_CPU or run.setup.graph_engine:
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
    """Time and memory of one step of `run`, whose network is a `LayeredNetwork`; its parts follow one another."""
    table = LayeredTable([run])
    parts = layered_times(table, parameter_columns(table, [parameters]))
    breakdown = {part: float(seconds[0]) for part, seconds in parts.items()}
    memory = layered_memory(run, data_parallel_network(run))
    return LayeredEstimate(step_time_s=sum(breakdown.values()), breakdown=breakdown, memory=memory)


def layered_memory(run: TrainingRun, network: LayeredNetwork) -> dict[str, float]:
    """Bytes of weights, gradients, optimizer state, kept activations and workspace; mixed precision copies weights."""
    layers, size = layer_arrays(network), element_bytes(run)
    mixed = 2.0 if size < 4 else 0.0
    widest = float(np.max(layers.moved)) if layers.moved.size else 0.0
    activations = size * run.setup.micro_batch * (layers.saved + widest)
    return {
        "parameters": network.parameters * (4.0 + mixed),
        "gradients": network.parameters * 4.0,
        "optimizer_states": network.parameters * (8.0 if "adam" in run.setup.optimizer else 4.0),
        "activations": activations,
        "workspace": _WORKSPACE_SHARE * activations,
    }


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
