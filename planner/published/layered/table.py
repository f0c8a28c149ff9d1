"""Networks described layer by layer as columns: the layers of many runs at once, and the time of their steps.

A device computes ``sum over kernels of kernel_s + max(flops / (peak * efficiency * shape), bytes / bandwidth)``, the
roofline of `simulator.kernels` with an efficiency that falls with narrow shapes; the host prepares launches and
samples at the same time; gradients are all-reduced while the backward pass runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.cost.stacks import Stack, family_of
from planner.cost.training_run import NOVOGRAD, LayeredNetwork, LayerWork, TrainingRun
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
_SPLIT_NORM = (8, 18)
"""Passes over a tensor, forward and backward, of a batch norm of single operators. Forward the mean (a read), the mean
square of the difference (a read, a write, a read), product and sum (two each); backward the gradients of product, sum,
difference and means (four, one, six and four), which are added up (three)."""
_LARGEST_WORKSPACE = 2.0**32
"""Bytes that TensorFlow and XLA let a convolution of cuDNN have beside its tensors (``TF_CUDNN_WORKSPACE_LIMIT_IN_MB``
and ``GetMemoryLimitInBytes`` of XLA's scratch allocators: ``1LL << 32``, "4GB by default")."""
_SMALL_WINDOW = 9.0
_WINOGRAD_WINDOW = (6.0, 9.5)
"""Operations for each input element and output channel over two, of 3 x 3 windows that move by one: 9, and somewhat
fewer where the border is not padded."""
_FFT_WINDOW = (9.5, 26.0)
"""The same of windows that float32 takes by Fourier transforms: 5 x 5, and 11 to 25 in a row, but not 3 x 3 x 3."""
_WINOGRAD_CHANNELS = 16
_LANES, _FASTEST_CLOCK = 64, 3e9
_NOVOGRAD_UPDATES = 20 / 6
"""Operators for each tensor over those of other optimizers: 12, and 8 for the average of weights that goes with it
(``SpeechRecognition/Jasper/common/optimizers.py`` and ``train.py`` of NVIDIA's examples)."""
_SMOOTH = 5.0
"""Exponent of the smooth maximum of what runs at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerArrays:
    """Distinct layers of a network, each ``(layers,)``: work of one sample, and how often it occurs.

    ``saved`` elements are kept for the backward pass; ``tensors`` of weights are trained, one of a product and two of
    a norm; ``dense`` weights are those of matrix products; ``first_flops`` and ``first_moved`` are of the first
    product, where it is trained.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    saved: float
    tensors: float
    dense: float
    first_flops: float
    first_moved: float


class LayeredTable:
    """Runs (N,) of layered networks, and their layers (L,) one after the other.

    ``device_s`` and the like of `layered_times` belong to the runs in this order.

    Raises
    ------
    InputError
        A run is of a transformer, or is cut by more than replicas.
    """

    def __init__(self, runs: Sequence[TrainingRun]) -> None:
        networks = [data_parallel_network(run) for run in runs]
        arrays = [layer_arrays(network) for network in networks]
        self.runs = tuple(runs)
        self.run = np.repeat(np.arange(len(runs)), [len(layers.columns["flops"]) for layers in arrays])
        self.starts = np.searchsorted(self.run, np.arange(len(runs)))
        self.layers = {name: np.concatenate([one.columns[name] for one in arrays]) for name in arrays[0].columns}
        self.element_bytes = np.array([element_bytes(run) for run in runs])
        self.operand_bytes = np.array([operand_bytes(run) for run in runs])
        self.batch = np.array([float(run.setup.micro_batch) for run in runs])
        self.micro_batches = np.array([float(run.setup.micro_batches) for run in runs])
        self.bandwidth = np.array([run.hardware.memory_bandwidth for run in runs])
        self.single_peak = np.array([run.hardware.peak("float32") for run in runs])
        self.convolution_peak, self.matmul_peak = np.array([peaks(run) for run in runs]).T
        self.without_tensor_units = np.array([product_kind(run) == "single" for run in runs])
        self.single_norms = np.array([keeps_single_norms(run) for run in runs])
        self.single_operators = np.array([splits_norms(run) for run in runs])
        self.limited = np.array([limits_workspaces(run) for run in runs])
        self.several = np.array([run.setup.devices > 1 for run in runs])
        sharing = [min(run.setup.devices, run.hardware.devices_per_node) for run in runs]
        self.doublings = np.log2(sharing)  # of the devices that share a host
        self.reduction_s = np.array([_all_reduce_s(run, net) for run, net in zip(runs, networks, strict=True)])
        self.parameters = np.array([network.parameters for network in networks])
        self.tensors = np.array([layers.tensors for layers in arrays])
        self.dense = np.array([layers.dense for layers in arrays])
        self.early_loss = np.array([run.setup.early_loss for run in runs])
        self.waiting = np.array([run.setup.optimizer == NOVOGRAD for run in runs])
        self.area = np.array([network.area for network in networks])
        self.gates = np.array([network.gates for network in networks])
        self.first_flops = np.array([layers.first_flops for layers in arrays])
        self.first_moved = np.array([layers.first_moved for layers in arrays])
        first = self.layers["convolution"][self.starts]
        self.first_peak = np.where(first, self.convolution_peak, self.matmul_peak)

    def total(self, seconds: FloatArray) -> FloatArray:
        """Sums (N,) over the layers of each run of ``seconds`` (L,) of one layer."""
        return np.asarray(np.add.reduceat(seconds * self.layers["count"], self.starts))


def layered_times(table: LayeredTable, columns: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """Seconds (N,) of the parts of one step of every run, which follow one another.

    Parameters
    ----------
    columns
        Parameters (N,) by the names of `planner.published.layered.prediction.LayeredParameters`; ``host_s`` is the
        time of a sample of the run's kind.
    """
    forward, backward, kernels, gradient_kernels = _passes(table, columns)
    boxes = table.batch * table.area * columns["boxes_s"]
    # A convolution has two gradients, each as much work as the forward pass.
    gates = table.batch * table.gates * columns["gates_s"] / 3
    forward, backward = (
        (seconds + extra) * table.micro_batches for seconds, extra in ((forward, boxes + gates), (backward, 2 * gates))
    )
    device = forward + backward
    contended = device * np.where(table.several, columns["contention"], 0.0)
    crowded = 1.0 + columns["crowding"] * table.doublings
    updates = table.tensors * columns["updates"]
    updates = updates * np.where(table.waiting, _NOVOGRAD_UPDATES, 1.0) * columns["launch_s"] * crowded
    launch_s = columns["launch_s"] * crowded
    launches = table.micro_batches * launch_s * kernels
    backward_launches = table.micro_batches * launch_s * gradient_kernels + np.where(table.waiting, 0.0, updates)
    rewritten = table.parameters * columns["update_bytes"] + table.dense * columns["layout_bytes"]
    update_s = rewritten / (table.bandwidth * columns["memory"])
    shared = 2.0 ** (columns["pooled"] * table.doublings)
    samples = table.batch * table.micro_batches * columns["host_s"] * table.area * shared
    together = _smooth_maximum(device + contended, launches + backward_launches)
    in_turn = _smooth_maximum(forward, launches) + _smooth_maximum(backward + contended, backward_launches)
    busy = _smooth_maximum(np.where(table.early_loss, in_turn, together), samples)
    # The gradients of the last micro-batch are reduced while it runs, but for those of its last quarter.
    hidden = busy * backward / device / table.micro_batches * (1 - 1 / 4)
    exposed = np.maximum(columns["exposed"] * table.reduction_s, table.reduction_s - hidden)
    exposed = exposed + np.where(table.several, columns["coordination_s"], 0.0)
    return {
        "forward": forward,
        "backward": backward,
        "contention": contended,
        "waiting for the host": busy - device - contended,
        "gradients": exposed,
        "optimizer": np.maximum(update_s, np.where(table.waiting, updates, 0.0)),
        "overhead": columns["step_overhead_s"] * crowded,
    }


def _passes(
    table: LayeredTable, columns: Mapping[str, FloatArray]
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Seconds of forward and backward pass of a micro-batch on one device, and the kernels of both, each (N,).

    Convolutions and matrix products have two gradients, each as much work as the forward pass, but the first
    layer needs none for its input.
    """
    layers, run = table.layers, table.run
    of_run = {name: column[run] for name, column in columns.items()}
    products = _product_s(table, of_run)
    split = layers["norm"] & table.single_operators[run]
    single = layers["single"] | (layers["norm"] & ~layers["vector"] & table.single_norms[run]) | split
    batch, size = table.batch[run], np.where(single, 4.0, table.element_bytes[run])
    moved_s = size * (batch * layers["moved"] + layers["weights"]) / (table.bandwidth[run] * of_run["memory"])
    left = np.where(layers["fusable"], of_run["unfused"], 1.0)
    # A fused norm sums up what its convolution writes: one of its three passes goes.
    passes = np.where(layers["norm"], (2.0 + of_run["unfused"]) / 3.0, left)
    passes = np.where(split, _SPLIT_NORM[0] / 3, passes)
    pointwise = moved_s * passes * np.where(layers["vector"], of_run["vector"], 1.0)
    product, kernel_s = layers["product"], of_run["kernel_s"]
    once = np.where(product, products, pointwise) + kernel_s * left
    again = np.where(
        product, 2 * products, pointwise * np.where(split, _SPLIT_NORM[1] / _SPLIT_NORM[0], layers["backward_moved"])
    )
    again += kernel_s * np.where(product, 2.0, left)
    trained = np.where(layers["frozen"], 0.0, 1.0)
    first = np.maximum(
        table.batch * table.first_flops / (table.first_peak * columns["products"]),
        table.operand_bytes * table.batch * table.first_moved / (table.bandwidth * columns["memory"]),
    )
    begun = np.where(layers["backward_only"], 0.0, 1.0)
    again += once * (1.0 - begun)
    forward = table.total(once * begun)
    backward = np.maximum(table.total(again * trained) - first, table.total(once * trained))
    launched = np.where(product, 1.0, left)
    launched_again = (np.where(product, 2.0, left) + launched * (1.0 - begun)) * trained
    return forward, backward, table.total(launched * begun), table.total(launched_again)


def _product_s(table: LayeredTable, of_run: Mapping[str, FloatArray]) -> FloatArray:
    """Seconds (L,) of the forward kernel of every layer, were it a product; ``of_run`` has parameters (L,)."""
    layers, run = table.layers, table.run
    batch, size = table.batch[run], table.operand_bytes[run]
    moved = size * (batch * layers["moved"] + layers["weights"])
    flops = batch * layers["flops"]
    # Winograd's algorithm multiplies less often; tensor units have no use for it.
    counted = np.where(layers["winograd"] & table.without_tensor_units[run], flops / of_run["winograd"], flops)
    peak = np.where(layers["convolution"], table.convolution_peak[run], table.matmul_peak[run] * of_run["matmuls"])
    columns, half = layers["columns"], of_run["columns_half"]
    outputs = batch * layers["rows"] * columns
    shape = (
        (columns / (columns + half))
        * (layers["depth"] / (layers["depth"] + of_run["depth_half"]))
        * (outputs / (outputs + of_run["outputs_half"] + half * columns))
    )
    moved_s = moved / (table.bandwidth[run] * of_run["memory"])
    seconds = np.maximum(counted / (peak * of_run["products"] * shape), moved_s)
    # Kernels of tensor units need copies with channels last, input, weights and output: without room others must do.
    cramped = layers["convolution"] & table.limited[run] & (moved > _LARGEST_WORKSPACE)
    seconds = np.where(cramped, np.maximum(flops / (table.single_peak[run] * shape), moved_s), seconds)
    # Windows wider than 3 x 3 are read again from caches: with the side of the window, by the rows of QuartzNet.
    window = np.sqrt(np.maximum(layers["depth"] / _SMALL_WINDOW, 1.0))
    narrow = np.maximum(
        moved * window / (table.bandwidth[run] * of_run["grouped"]), flops / (0.5 * table.single_peak[run])
    )
    seconds = np.where(layers["grouped"], np.minimum(seconds, narrow), seconds)
    copied = layers["convolution"] & ~table.without_tensor_units[run] & ~cramped
    dense = ~layers["convolution"] & (layers["weights"] > 0)
    copies = np.where(copied, of_run["casts"], np.where(dense, of_run["turned"], 0.0))
    return np.asarray(seconds + copies * moved_s)


def data_parallel_network(run: TrainingRun) -> LayeredNetwork:
    """The network of `run`; InputError where it is a transformer or cut by more than replicas."""
    network, setup = run.network, run.setup
    if not isinstance(network, LayeredNetwork):
        raise InputError(f"{network.name} is a transformer, not a network of layers: predict it by its shape")
    if setup.dp != setup.devices:
        raise InputError(
            f"{network.name} on {setup.devices} devices with dp {setup.dp}: only data parallel runs of layered "
            "networks are predicted; set tp, pp and cp to 1"
        )
    return network


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


def operand_bytes(run: TrainingRun) -> float:
    """Bytes of an element that a product reads or writes.

    The matrix units of Ascend 910 take half precision alone, to which float32 networks are cast around them
    (``allow_fp32_to_fp16``, the default of CANN in training); Ascend 910B keeps what the network says.
    """
    return 2.0 if family_of(run.hardware.device_name) == "ascend910" else element_bytes(run)


def keeps_planes(run: TrainingRun) -> bool:
    """Whether convolutions take their channels in planes in half precision as well, in a stack that has them last.

    So XLA has volumes: it puts channels last in half precision where images have two dimensions
    (``gpu_layout_assignment.cc`` of TensorFlow: all others "use NCHW"), and TensorFlow's own operator for volumes turns
    them around before cuDNN takes them (``conv_ops_3d.cc``).
    """
    return (
        run.setup.stack is Stack.TENSORFLOW
        and product_kind(run) == "half"
        and data_parallel_network(run).sample.endswith("volume")
    )


def limits_workspaces(run: TrainingRun) -> bool:
    """Whether a convolution that tensor units multiply is copied around, into a workspace that cannot grow."""
    return run.setup.stack is Stack.TENSORFLOW and (product_kind(run) == "tf32" or keeps_planes(run))


def splits_norms(run: TrainingRun) -> bool:
    """Whether batch norms run as single operators, whose means stay in float32 and their results with them.

    TensorFlow's fused batch norm takes images alone (``fused`` needs four dimensions in ``BatchNormalization`` of
    TensorFlow 1), means are on the list of what automatic mixed precision leaves in float32, and only XLA would fuse
    the rest again.
    """
    return run.setup.plain_graph and data_parallel_network(run).sample.endswith("volume")


def keeps_single_norms(run: TrainingRun) -> bool:
    """Whether batch norms stay in float32 while the rest is half precision.

    MindSpore's ``amp_level="O2"``, which MindCV and MindYOLO take; the networks of its models do without
    (``keep_batchnorm_fp32=False`` in ``official/cv/ResNet/train.py``).
    """
    return run.setup.stack is Stack.MINDSPORE_TOOLKIT and run.setup.precision == "fp16"


def peaks(run: TrainingRun) -> tuple[float, float]:
    """FLOP/s of convolutions and of matrix products, which stay in float32 unless TF32 is asked for."""
    hardware, kind = run.hardware, product_kind(run)
    half = hardware.peak("bfloat16" if run.setup.precision == "bf16" else "float16")
    if kind == "half":
        return half, half
    if kind == "single":
        single = hardware.peak_flops["float32"]
        return single, single
    return half / 2, half / 2 if run.setup.precision == "tf32" else hardware.peak_flops["float32"]


def flops_per_element(run: TrainingRun) -> float:
    """Operations that convolutions could take in the time in which the memory delivers one activation."""
    return peaks(run)[0] * element_bytes(run) / run.hardware.memory_bandwidth


def bytes_per_cycle(hardware: Hardware) -> float:
    """Bytes that the memory delivers to a multiprocessor in one of its cycles.

    Multiprocessors of Volta and of A100 multiply and add 64 numbers of float32 a cycle, those of later devices 128:
    their clock is what the peak leaves.
    """
    pairs = hardware.peak_flops["float32"] / hardware.multiprocessors / 2
    clock = pairs / _LANES if pairs / _LANES < _FASTEST_CLOCK else pairs / (2 * _LANES)
    return hardware.memory_bandwidth / hardware.multiprocessors / clock


def _all_reduce_s(run: TrainingRun, network: LayeredNetwork) -> float:
    if run.setup.devices == 1:
        return 0.0
    return _reduction_s(run.hardware, run.setup.devices, float(network.parameters * run.setup.gradient_bytes))


@lru_cache(maxsize=4096)
def _reduction_s(hardware: Hardware, devices: int, payload: float) -> float:
    return collective_time(hardware, Collective.ALL_REDUCE, payload, group_shape(hardware, devices, 1))


def _smooth_maximum(*values: FloatArray) -> FloatArray:
    stacked = np.stack(values)
    largest = stacked.max(axis=0)
    return np.asarray(largest * ((stacked / largest) ** _SMOOTH).sum(axis=0) ** (1 / _SMOOTH))


def layer_arrays(network: LayeredNetwork) -> LayerArrays:
    """The distinct layers of `network`."""
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
def _arrays_of(key: _Same) -> LayerArrays:
    counts: dict[tuple[object, ...], float] = {}
    for layer in key.network.layers:
        grouped = layer.kernel is Kernel.CONVOLUTION and layer.groups > 1
        columns = layer.n / layer.groups if grouped else layer.n
        batched = layer.groups if layer.kernel is Kernel.MATMUL else 1
        row = (
            layer.kernel, layer.flops, layer.elements_moved, layer.weights,
            layer.m * batched, columns, layer.k, grouped, layer.kernel in _FUSABLE and not layer.saved,
            layer.vector, layer.single, layer.frozen, _winograd(layer),
            layer.backward_only,
        )  # fmt: skip
        counts[row] = counts.get(row, 0.0) + layer.count
    rows, layers = list(counts), key.network.layers
    kernels = np.array([row[0] for row in rows], dtype=object)
    flops, moved, weights, outputs, columns, depth = np.array([row[1:7] for row in rows], dtype=np.float64).T
    marks = ("grouped", "fusable", "vector", "single", "frozen", "winograd", "backward_only")
    first = next((layer for layer in layers if layer.kernel in _PRODUCTS), None)
    return LayerArrays(
        columns={
            "flops": flops,
            "moved": moved,
            "weights": weights,
            "rows": np.maximum(outputs, 1.0),
            "columns": np.maximum(columns, 1.0),
            "depth": np.maximum(depth, 1.0),
            **dict(zip(marks, np.array([row[7:] for row in rows], dtype=bool).T, strict=True)),
            "product": np.isin(kernels, _PRODUCTS),
            "convolution": kernels == Kernel.CONVOLUTION,
            "norm": kernels == Kernel.NORMALIZATION,
            "backward_moved": np.array([_BACKWARD_MOVED.get(kernel, 1.0) for kernel in kernels]),
            "count": np.array(list(counts.values())),
        },
        saved=sum(layer.saved * layer.count for layer in layers),
        tensors=sum(_tensors(layer) for layer in layers),
        dense=sum(one.weights * one.count for one in layers if one.kernel is Kernel.MATMUL and not one.frozen),
        first_flops=first.flops if first and not first.frozen else 0.0,
        first_moved=first.elements_moved if first and not first.frozen else 0.0,
    )


def _tensors(layer: LayerWork) -> float:
    if layer.frozen:
        return 0.0
    return 2.0 if layer.kernel is Kernel.NORMALIZATION else float(layer.kernel in _PRODUCTS and layer.weights > 0)


def _winograd(layer: LayerWork) -> bool:
    """Whether a fast algorithm multiplies less often: Winograd's for 3 x 3 windows that move by one, Fourier's beyond.

    Not so the first convolution of all.
    """
    inputs = layer.elements_moved - layer.m * layer.n
    if layer.kernel is not Kernel.CONVOLUTION or layer.groups > 1 or inputs <= 0:
        return False
    window = layer.k * layer.m / inputs
    fast = any(low < window < high for low, high in (_WINOGRAD_WINDOW, _FFT_WINDOW))
    return fast and layer.k >= _SMALL_WINDOW * _WINOGRAD_CHANNELS
