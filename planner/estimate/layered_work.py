"""Step time and memory of data-parallel training of networks that are described layer by layer.

A device computes ``sum over kernels of kernel_s + max(flops / (peak * efficiency * shape), bytes / bandwidth)``, the
roofline of `simulator.kernels` with an efficiency that falls with narrow shapes; the host prepares launches and
samples at the same time; gradients are all-reduced while the backward pass runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.estimate.device_family import family_of
from planner.estimate.training_run import LayeredNetwork, TrainingRun
from simulator.collectives import collective_time
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.program import Collective, Kernel
from simulator.topology import group_shape

FloatArray = npt.NDArray[np.float64]
_PRODUCTS = (Kernel.CONVOLUTION, Kernel.MATMUL)
_FUSABLE = (Kernel.ACTIVATION, Kernel.ELEMENTWISE)
_BACKWARD_MOVED: Mapping[Kernel, float] = {
    Kernel.NORMALIZATION: 5 / 3,
    Kernel.ACTIVATION: 3 / 2,
    Kernel.SOFTMAX: 4 / 3,
    Kernel.ELEMENTWISE: 1.0,
    Kernel.EMBEDDING: 2.0,
}
"""Elements that the backward kernel moves over those of the forward one: a norm reads two tensors, twice."""
_OPTIMIZER_BYTES = 20.0
"""Bytes a parameter of SGD with momentum in float32: gradient, weight and momentum read, the last two written."""
_WORKSPACE_SHARE = 0.25
"""Convolution workspaces and what the allocator cannot fill, over kept activations: ResNet-50 of FlagPerf on A100."""
_SINGLE_BYTES = 4.0
_SMALL_WINDOW = 9.0
_WITH_BOXES = ("annotated image", "mosaic image")
_SMOOTH = 4.0
"""Exponent of the smooth maximum of what runs at the same time."""


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
    columns_half, depth_half, rows_half
        Width, depth and rows of a product at which its rate is half of that of a wide one.
    kernel_s, launch_s
        Seconds that a kernel takes beyond its work, and that the host takes to launch it.
    unfused
        Share of the traffic of ReLUs and sums, and of a norm's first pass, that no other kernel does on its way.
    casts
        Copies that mixed precision makes around a convolution, to another layout, as a share of what it moves.
    step_overhead_s
        Seconds of a step outside kernels.
    exposed
        Share of the all-reduce that the backward pass does not hide, however long it is.
    contention
        Share by which all-reduces beside them slow the kernels of several devices.
    host_s
        Seconds that the host takes to prepare a sample for one device, by kind of sample.
    """

    products: float = 0.5
    memory: float = 0.85
    grouped: float = 0.1
    columns_half: float = 32.0
    depth_half: float = 64.0
    rows_half: float = 512.0
    kernel_s: float = 5e-6
    launch_s: float = 1e-5
    unfused: float = 0.7
    casts: float = 0.1
    step_overhead_s: float = 2e-3
    exposed: float = 0.2
    contention: float = 0.03
    host_s: Mapping[str, float] = field(default_factory=dict)


_NEUTRAL = LayeredParameters()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredEstimate:
    """Seconds of a step, whose ``breakdown`` adds up to it, and bytes of ``memory`` by kind."""

    step_time_s: float
    breakdown: dict[str, float]
    memory: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredCoefficients:
    """Fitted values by device family and by stack, as the profile of the software keeps them.

    A device has ``half``, ``tf32`` and ``single`` (the `products` of these precisions), factors ``launch`` (on the
    host's time for a launch) and ``boxes`` (on its time for images with boxes), and fields of `LayeredParameters`;
    a stack has factors on ``products``, ``memory``, ``grouped`` and ``kernel_s``, the other fields, and
    ``host_<kind>_s``.
    """

    devices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    stacks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def parameters(self, run: TrainingRun) -> LayeredParameters:
        """Parameters of `run`; what nobody fitted is neutral."""
        device = dict(self.devices.get(family_of(run.hardware.device_name), {}))
        stack = dict(self.stacks.get(run.setup.stack, {}))
        rates = {kind: device.pop(kind, 0.0) for kind in ("half", "tf32", "single")}
        device["products"] = rates[product_kind(run)] or _NEUTRAL.products
        for name in ("products", "memory", "grouped", "kernel_s"):
            device[name] = device.get(name, getattr(_NEUTRAL, name)) * stack.pop(name, 1.0)
        stack["launch_s"] = stack.get("launch_s", _NEUTRAL.launch_s) * device.pop("launch", 1.0)
        boxes = device.pop("boxes", 1.0)
        host = {}
        for name in [name for name in stack if name.startswith("host_")]:
            kind = name[5:-2].replace("_", " ")
            host[kind] = stack.pop(name) * (boxes if kind in _WITH_BOXES else 1.0)
        return LayeredParameters(host_s=host, **device, **stack)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LayerArrays:
    """Distinct layers of a network, each ``(layers,)``: work of one sample, and how often it occurs."""

    flops: FloatArray
    moved: FloatArray
    weights: FloatArray
    rows: FloatArray
    columns: FloatArray
    depth: FloatArray
    grouped: npt.NDArray[np.bool_]
    product: npt.NDArray[np.bool_]
    convolution: npt.NDArray[np.bool_]
    fusable: npt.NDArray[np.bool_]
    norm: npt.NDArray[np.bool_]
    backward_moved: FloatArray
    count: FloatArray
    saved: float
    first_flops: float
    first_moved: float


def predict_layered(run: TrainingRun, parameters: LayeredParameters) -> LayeredEstimate:
    """Time and memory of one step of `run`, whose network is a `LayeredNetwork`."""
    breakdown = layered_breakdown(run, parameters)
    memory = layered_memory(run, _data_parallel_network(run))
    return LayeredEstimate(step_time_s=sum(breakdown.values()), breakdown=breakdown, memory=memory)


def layered_breakdown(run: TrainingRun, parameters: LayeredParameters) -> dict[str, float]:
    """Seconds of the parts of one step, which follow one another."""
    network, setup = _data_parallel_network(run), run.setup
    forward, backward, kernels = layered_step_times(network, setup.micro_batch, run, parameters)
    device = (forward + backward) * setup.micro_batches
    contended = device * parameters.contention if setup.devices > 1 else 0.0
    device += contended
    launches = kernels * parameters.launch_s * setup.micro_batches
    samples = setup.micro_batch * setup.micro_batches * parameters.host_s.get(network.sample, 0.0) * network.area
    busy = _smooth_maximum(device, launches, samples)
    reduction = _all_reduce_s(run, network)
    hidden = device * backward / (forward + backward) / setup.micro_batches * (1 - 1 / 4)
    exposed = max(parameters.exposed * reduction, reduction - hidden)
    update = network.parameters * _OPTIMIZER_BYTES / (run.hardware.memory_bandwidth * parameters.memory)
    return {
        "forward": forward * setup.micro_batches,
        "backward": backward * setup.micro_batches,
        "contention": contended,
        "waiting for the host": busy - device,
        "gradients": exposed,
        "optimizer": update,
        "overhead": parameters.step_overhead_s,
    }


def _data_parallel_network(run: TrainingRun) -> LayeredNetwork:
    network, setup = run.network, run.setup
    if not isinstance(network, LayeredNetwork):
        raise InputError(f"{network.name} is a transformer, not a network of layers: predict it by its shape")
    if setup.dp != setup.devices:
        raise InputError(
            f"{network.name} on {setup.devices} devices with dp {setup.dp}: only data parallel runs of layered "
            "networks are predicted; set tp, pp and cp to 1"
        )
    return network


def layered_step_times(
    network: LayeredNetwork, batch: int, run: TrainingRun, parameters: LayeredParameters
) -> tuple[float, float, float]:
    """Seconds of forward and backward of `batch` samples on one device, and the number of kernels.

    Convolutions and matrix products have two gradients, each as much work as the forward pass, but the first
    layer needs none for its input.
    """
    layers = _arrays(network)
    hardware, size = run.hardware, element_bytes(run)
    moved = size * (batch * layers.moved + layers.weights)
    flops = batch * layers.flops
    rate = np.where(layers.convolution, *_peaks(run)) * parameters.products
    shape = (
        (layers.columns / (layers.columns + parameters.columns_half))
        * (layers.depth / (layers.depth + parameters.depth_half))
        * (batch * layers.rows / (batch * layers.rows + parameters.rows_half))
    )
    bandwidth = hardware.memory_bandwidth * parameters.memory
    compute = flops / (rate * np.where(layers.product, shape, 1.0))
    # Windows wider than 3 x 3 are read again from caches: with the side of the window, by the rows of QuartzNet.
    window = np.sqrt(np.maximum(layers.depth / _SMALL_WINDOW, 1.0))
    narrow = np.maximum(
        moved * window / (hardware.memory_bandwidth * parameters.grouped), flops / (0.5 * hardware.peak("float32"))
    )
    products = np.maximum(compute, moved / bandwidth)
    products = np.where(layers.grouped, np.minimum(products, narrow), products)
    if size < _SINGLE_BYTES:
        products += np.where(layers.convolution, parameters.casts * moved / bandwidth, 0.0)
    left = np.where(layers.fusable, parameters.unfused, 1.0)
    # A fused norm sums up what its convolution writes: one of its three passes goes.
    passes = np.where(layers.norm, (2.0 + parameters.unfused) / 3.0, left)
    pointwise = moved / bandwidth * passes
    once = np.where(layers.product, products, pointwise) + parameters.kernel_s * left
    again = np.where(layers.product, 2 * products, pointwise * layers.backward_moved)
    again += parameters.kernel_s * np.where(layers.product, 2.0, left)
    first = max(batch * layers.first_flops / float(rate[0]), size * batch * layers.first_moved / bandwidth)
    forward = float(layers.count @ once)
    backward = max(float(layers.count @ again) - first, forward)
    kernels = float(layers.count @ np.where(layers.product, 3.0, 2 * left))
    return forward, backward, kernels


def layered_memory(run: TrainingRun, network: LayeredNetwork) -> dict[str, float]:
    """Bytes of weights, gradients, optimizer state, kept activations and workspace; mixed precision copies weights."""
    layers, size = _arrays(network), element_bytes(run)
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
    largest = room / ((2 if half else 4) * max(_arrays(network).saved, 1.0))
    most = 256 if half and network.sample.endswith("image") else 128
    return int(2 ** np.clip(np.floor(np.log2(max(largest, 1.0))), 0, np.log2(most)))


def product_kind(run: TrainingRun) -> str:
    """``half``, ``tf32`` or ``single``: what convolutions are multiplied in.

    Ascend's cube units multiply half precision only; from Ampere on float32 convolutions run as TF32.
    """
    family, precision = family_of(run.hardware.device_name), run.setup.precision
    if precision in ("fp16", "bf16", "fp8", "fp4") or family.startswith("ascend"):
        return "half"
    return "single" if family == "volta" else "tf32"


def element_bytes(run: TrainingRun) -> float:
    """Bytes of an activation."""
    return 4.0 if run.setup.precision in ("fp32", "tf32") else 2.0


def _peaks(run: TrainingRun) -> tuple[float, float]:
    """FLOP/s of convolutions and of matrix products, which stay in float32 unless TF32 is asked for."""
    hardware, kind = run.hardware, product_kind(run)
    half = hardware.peak("bfloat16" if run.setup.precision == "bf16" else "float16")
    if kind == "half":
        return half, half
    if kind == "single":
        single = hardware.peak_flops["float32"]
        return single, single
    return half / 2, half / 2 if run.setup.precision == "tf32" else hardware.peak_flops["float32"]


def _all_reduce_s(run: TrainingRun, network: LayeredNetwork) -> float:
    if run.setup.devices == 1:
        return 0.0
    return _reduction_s(run.hardware, run.setup.devices, float(network.parameters * run.setup.gradient_bytes))


@lru_cache(maxsize=4096)
def _reduction_s(hardware: Hardware, devices: int, payload: float) -> float:
    return collective_time(hardware, Collective.ALL_REDUCE, payload, group_shape(hardware, devices, 1))


def _smooth_maximum(*values: float) -> float:
    largest = max(values)
    return float(largest * sum((value / largest) ** _SMOOTH for value in values) ** (1 / _SMOOTH))


def _arrays(network: LayeredNetwork) -> _LayerArrays:
    return _arrays_of(_Same(network))


class _Same:
    """A network as a key by identity: equal ones need not be compared layer by layer."""

    def __init__(self, network: LayeredNetwork) -> None:
        self.network = network

    def __hash__(self) -> int:
        return id(self.network)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.network is other.network


@lru_cache(maxsize=1024)
def _arrays_of(key: _Same) -> _LayerArrays:
    counts: dict[tuple[object, ...], float] = {}
    for layer in key.network.layers:
        grouped = layer.kernel is Kernel.CONVOLUTION and layer.groups > 1
        columns = layer.n / layer.groups if grouped else layer.n
        batched = layer.groups if layer.kernel is Kernel.MATMUL else 1
        row = (
            layer.kernel, layer.flops, layer.elements_moved, layer.weights,
            layer.m * batched, columns, layer.k, grouped, layer.kernel in _FUSABLE and not layer.saved,
        )  # fmt: skip
        counts[row] = counts.get(row, 0.0) + layer.count
    rows = list(counts)
    kernels = [row[0] for row in rows]
    values = np.array([row[1:7] for row in rows], dtype=np.float64).T
    first = next((layer for layer in key.network.layers if layer.kernel in _PRODUCTS), None)
    return _LayerArrays(
        flops=values[0],
        moved=values[1],
        weights=values[2],
        rows=np.maximum(values[3], 1.0),
        columns=np.maximum(values[4], 1.0),
        depth=np.maximum(values[5], 1.0),
        grouped=np.array([bool(row[7]) for row in rows]),
        product=np.array([kernel in _PRODUCTS for kernel in kernels]),
        convolution=np.array([kernel is Kernel.CONVOLUTION for kernel in kernels]),
        fusable=np.array([bool(row[8]) for row in rows]),
        norm=np.array([kernel is Kernel.NORMALIZATION for kernel in kernels]),
        backward_moved=np.array([_BACKWARD_MOVED.get(kernel, 1.0) for kernel in kernels]),  # type: ignore[call-overload]
        count=np.array([counts[row] for row in rows]),
        saved=sum(layer.saved * layer.count for layer in key.network.layers),
        first_flops=first.flops if first else 0.0,
        first_moved=first.elements_moved if first else 0.0,
    )
