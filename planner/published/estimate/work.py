"""Seconds of everything a training step does, class by class, before software has its say.

`work_of` times the operators of `transformer_work` with the kernel models of each run's hardware and its messages with
the collective models. What is in a step is decided here; how it overlaps, in `step`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.cost.memory_traits import LOW_PRECISION_BYTES
from planner.cost.stacks import AttentionKernel, family_of
from planner.cost.training_run import TrainingRun
from planner.cost.work import OPTIMIZERS, update_bytes
from planner.published.estimate.columns import Columns, FloatArray, columns_of
from planner.published.estimate.transformer_work import (
    FusedAttention,
    MatrixProduct,
    Operator,
    Part,
    Pointwise,
    local_key_value_heads,
    once_a_node,
    operators,
    routed_tokens,
    sent_copies,
    tensor_messages,
)
from simulator.collectives import ALGORITHMS, algorithm_costs
from simulator.hardware import Hardware
from simulator.kernels import attention_time, grouped_matmul_time, kernel_time, matmul_time
from simulator.kernels.attention import AttentionKind
from simulator.program import Collective, Kernel
from simulator.topology import group_shape

_DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "bfloat16", "fp16": "float16"}
_EIGHT_BITS = "float8_e4m3fn"
_FUSED: dict[AttentionKernel, AttentionKind] = {AttentionKernel.FLASH: "flash", AttentionKernel.FLASH2: "flash2"}
_ALIGNMENT = 32  # what tiles take of the depth at a time; chosen with the published rows in view
_TENSOR_CORE_ALIGNMENT = 8  # elements of 16 bits; below, products fall back to slower kernels (NVIDIA's GEMM guide)
_WITHOUT_TENSOR_CORES = 3.0  # assumed: between the vector rate, an eighth, and padded tensor-core kernels
_TF32_SLOWDOWN = 2.0  # TF32 tensor cores run at half the 16-bit rate (NVIDIA Ampere whitepaper)
_ZERO3 = 3.0  # place of ``zero3`` in the column ``sharding``
_WIDEST_SUM = 4.0  # bytes of an element that gradients are added up in
_ALGORITHMS = max(len(algorithms) for algorithms in ALGORITHMS.values())
_FP4_SPEED = 2.0  # dense FP4 runs at twice the FP8 rate (NVIDIA Blackwell datasheet)


class Phase(StrEnum):
    """A pass over a micro-batch; the backward pass in its two halves."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


class WorkClass(StrEnum):
    """Kernels that share a correction."""

    MATMUL = "matmul"
    MISALIGNED = "misaligned"
    """Products with a side that is no multiple of 32 elements, which tensor cores take in poorer tiles (Anthony et
    al., "The Case for Co-Designing Model Architectures with Hardware", arXiv:2401.14489)."""
    LOW_PRECISION = "low_precision"
    ATTENTION = "attention"
    MEMORY = "memory"
    GRADIENT_SUM = "gradient_sum"
    """Adding the gradients of a micro-batch to those before it: plain sums, as fast as memory is."""


class Message(StrEnum):
    """Communication, by what it serves. Seconds are per layer and micro-batch, or per step for whole gradients."""

    TENSOR = "tensor"
    """One all-reduce, or a gather and a reduce-scatter with sequence parallelism: around every network of a layer."""
    CONTEXT = "context"
    EXPERT = "expert"
    """Tokens to experts, or back."""
    EXPERT_TENSOR = "expert_tensor"
    """The gather and the reduce-scatter around experts that are cut."""
    PIPELINE = "pipeline"
    """One send of one micro-batch across one stage boundary."""
    GRADIENT_REDUCE = "gradient_reduce"
    PARAMETER_GATHER = "parameter_gather"
    SHARD_GATHER = "shard_gather"
    """ZeRO-3: the parameters of one layer, and its part of those of embedding and head."""
    SHARD_REDUCE = "shard_reduce"
    LOGITS = "logits"
    """The gather of the logits of one micro-batch where the loss takes the whole vocabulary."""


Key = tuple[Part, Phase, WorkClass]


LAYOUT_BYTES = {"ascend910": 170.0}
"""Bytes that take as long to move as a weight takes to the fractal layout of an Ascend 910's matrix units, and its
gradient back: what dense layers of vision networks take (``layout_bytes`` of
`planner.published.estimate.layered_work` over the share of the bandwidth that is reached)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Work of (N,) runs: seconds by part, phase and class, of one layer and one micro-batch each.

    ``core_seconds`` is the part of the forward seconds that selective recompute repeats; ``kernels`` counts launches.
    Messages are seconds, split into those ``inside`` the innermost level and those that leave it. ``layout_s`` are of
    a step's conversions of weights. What no run does is left out of ``seconds`` and ``kernels``.
    """

    columns: Columns
    seconds: dict[Key, FloatArray]
    core_seconds: dict[WorkClass, FloatArray]
    kernels: dict[tuple[Part, Phase], FloatArray]
    inside: dict[Message, FloatArray]
    outside: dict[Message, FloatArray]
    optimizer_s: FloatArray
    layout_s: FloatArray
    element_bytes: FloatArray = field(default_factory=lambda: np.zeros(0))


def work_of(runs: Sequence[TrainingRun]) -> Work:
    """Time the operators and messages of runs of transformers."""
    columns = columns_of(runs)
    groups: dict[tuple[Hardware, str, AttentionKernel], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.hardware, run.setup.precision, run.setup.attention), []).append(index)
    count = len(runs)
    seconds: dict[Key, FloatArray] = defaultdict(lambda: np.zeros(count))
    kernels: dict[tuple[Part, Phase], FloatArray] = defaultdict(lambda: np.zeros(count))
    core = {w: np.zeros(count) for w in WorkClass}
    inside, outside = ({message: np.zeros(count) for message in Message} for _ in range(2))
    optimizer, layout, element_bytes = np.zeros(count), np.zeros(count), np.zeros(count)
    for (hardware, precision, attention), members in groups.items():
        rows = np.array(members)
        part_columns = columns.take(rows)
        element = float(LOW_PRECISION_BYTES[precision])
        element_bytes[rows] = element
        timer = _Timer(hardware, precision, attention)
        for operator in operators(part_columns, element):
            times = timer.times(operator, part_columns)
            kind = timer.kind(operator)
            poor = _misaligned(operator) if kind is WorkClass.MATMUL else None
            for phase, values in zip(Phase, times, strict=True):
                if values is None:
                    continue
                kernels[operator.part, phase][rows] += _launches(operator, phase) * (values > 0)
                if poor is None:
                    seconds[operator.part, phase, kind][rows] += values
                    continue
                seconds[operator.part, phase, kind][rows] += np.where(poor[0], 0.0, values)
                seconds[operator.part, phase, WorkClass.MISALIGNED][rows] += np.where(poor[0], values * poor[1], 0.0)
            if isinstance(operator, MatrixProduct) and operator.weight:
                summed = timer.gradient_sum(operator, part_columns, element)
                seconds[operator.part, Phase.WEIGHT_GRADIENT, WorkClass.GRADIENT_SUM][rows] += summed
            if not isinstance(operator, FusedAttention) and operator.core:
                core[kind][rows] += times[0]
        for message, (here, there) in _messages(hardware, part_columns, element).items():
            inside[message][rows] += here
            outside[message][rows] += there
        optimizer[rows] = _optimizer_seconds(hardware, part_columns, element)
        layout[rows] = _layout_seconds(hardware, part_columns)
    return Work(
        columns=columns, seconds=dict(seconds), core_seconds=core, kernels=dict(kernels),
        inside=inside, outside=outside, optimizer_s=optimizer, layout_s=layout, element_bytes=element_bytes,
    )  # fmt: skip


def _misaligned(operator: Operator) -> tuple[npt.NDArray[np.bool_], FloatArray] | None:
    """Where a product has a side of awkward size, and by what its time grows where tensor cores hardly help."""
    if not isinstance(operator, MatrixProduct) or operator.name == "router":
        return None
    sides = np.stack(np.broadcast_arrays(np.rint(operator.n), np.rint(operator.k)))
    slower = np.where(np.any(sides % _TENSOR_CORE_ALIGNMENT != 0, axis=0), _WITHOUT_TENSOR_CORES, 1.0)
    return np.any(sides % _ALIGNMENT != 0, axis=0), slower


def _launches(operator: Operator, phase: Phase) -> FloatArray | float:
    if isinstance(operator, Pointwise):
        return operator.kernels
    if not isinstance(operator, MatrixProduct):
        return 1.0
    # Both gradients of a product of two activations count as input gradients.
    both = 2.0 if not operator.weight and phase is Phase.INPUT_GRADIENT else 1.0
    # A grouped product is one call, which launches a kernel for each expert (TransformerEngine's GroupedLinear).
    return both * (1.0 + np.maximum(operator.groups, 1.0)) if operator.grouped else both


class _Timer:
    """Kernel models of one hardware at one precision."""

    def __init__(self, hardware: Hardware, precision: str, attention: AttentionKernel) -> None:
        self.hardware = hardware
        # A device that lacks a precision computes in the next wider one.
        tf32 = precision == "tf32" and hardware.peak_dtype("bfloat16") == "bfloat16"
        self.dtype = "float32" if precision == "tf32" and not tf32 else _DTYPES.get(precision, "bfloat16")
        self.low = precision in ("fp8", "fp4") and hardware.peak_dtype(_EIGHT_BITS) == _EIGHT_BITS
        self.slowdown = _TF32_SLOWDOWN if tf32 else 1.0
        four = precision == "fp4" and family_of(hardware.device_name) == "blackwell"
        self.low_speed = _FP4_SPEED if four else 1.0
        self.attention = attention

    def kind(self, operator: Operator) -> WorkClass:
        """Class of an operator."""
        if isinstance(operator, FusedAttention):
            return WorkClass.ATTENTION
        if isinstance(operator, Pointwise):
            return WorkClass.ATTENTION if operator.core else WorkClass.MEMORY
        return WorkClass.LOW_PRECISION if self.low and operator.low_precision else WorkClass.MATMUL

    def times(self, operator: Operator, c: Columns) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """Seconds forward, of the input gradient and of the weight gradient, where there is one; 0 without work."""
        if isinstance(operator, Pointwise):
            return self._pass(operator.forward_bytes), self._pass(operator.backward_bytes), None
        if isinstance(operator, FusedAttention):
            return self._attention(operator, False), self._attention(operator, True), None
        forward = self._product(operator, operator.m, operator.n, operator.k)
        by_input = self._product(operator, operator.m, operator.k, operator.n)
        by_weight = self._product(operator, operator.k, operator.n, operator.m, by_weight=True)
        if not operator.weight:
            return forward, by_input + by_weight, None
        # Frozen weights need no gradient; what trains beside them (LoRA) is small.
        return forward, by_input, by_weight * c.trained_fraction

    def gradient_sum(self, product: MatrixProduct, c: Columns, element: float) -> FloatArray:
        """Seconds of adding the gradients of a product's weights to those of earlier micro-batches.

        The sum is read and written; the new gradients still lie in the cache. Those of the first micro-batch stay
        where they are unless they are kept wider than they are computed; sharded ones are added up as shards, and
        fused products add within themselves.
        """
        later = (c.micro_batches - (c.gradient_bytes <= element)) / c.micro_batches
        apart = (product.m > 0) * (1 - c.fused_sums) * (c.sharding < _ZERO3) * later
        weights = product.n * product.k * np.maximum(product.groups, 1.0) * c.trained_fraction
        kept = np.minimum(c.gradient_bytes, _WIDEST_SUM)
        return self._pass(apart * weights * 2 * kept)

    def _pass(self, moved: FloatArray) -> FloatArray:
        seconds = kernel_time(self.hardware, Kernel.ELEMENTWISE, self.dtype, np.zeros(1), moved)
        return np.where(moved > 0, seconds, 0.0)

    def _product(
        self, product: MatrixProduct, m: FloatArray, n: FloatArray, k: FloatArray, *, by_weight: bool = False
    ) -> FloatArray:
        low = self.low and product.low_precision
        dtype = _EIGHT_BITS if low else self.dtype
        runs = np.asarray((product.m > 0) & (product.n > 0) & (product.k > 0) & (np.asarray(product.batch) > 0))
        rows, columns, depth = np.maximum(m, 1.0), np.maximum(n, 1.0), np.maximum(k, 1.0)
        if product.grouped:
            groups = np.maximum(product.groups, 1.0)
            # The tokens of all experts together are rows forward and depth in the gradient of the weights.
            rows, depth = (rows, depth / groups) if by_weight else (rows / groups, depth)
            seconds = grouped_matmul_time(self.hardware, dtype, groups, rows, columns, depth)
        else:
            seconds = matmul_time(self.hardware, dtype, rows, columns, depth, np.maximum(product.batch, 1.0))
        return np.where(runs, seconds, 0.0) * self.slowdown / (self.low_speed if low else 1.0)

    def _attention(self, a: FusedAttention, backward: bool) -> FloatArray:
        kind: AttentionKind = _FUSED.get(self.attention, "vendor")
        seconds = np.zeros_like(a.queries)
        for causal in (False, True):
            if np.any(a.causal == causal):
                found = attention_time(
                    self.hardware, self.dtype, batch=np.maximum(a.batch, 1.0), heads=a.heads,
                    key_value_heads=a.key_value_heads, queries=a.queries, keys=a.keys, head_size=a.head_size,
                    causal=causal, backward=backward, kind=kind,
                )  # fmt: skip
                seconds = np.where(a.causal == causal, found, seconds)
        return np.where((a.batch > 0) & (a.queries > 0) & (a.heads > 0), seconds, 0.0) * self.slowdown


@lru_cache(maxsize=65536)
def _lines(hardware: Hardware, collective: Collective, size: int, stride: int) -> tuple[bool, tuple[float, ...]]:
    """Whether a group leaves the innermost level, and latency and seconds per byte of its algorithms."""
    size = min(size, max(1, (hardware.max_devices - 1) // max(stride, 1) + 1))
    if size <= 1:
        return False, (0.0,) * 2 * _ALGORITHMS
    group = group_shape(hardware, size, stride)
    costs = list(algorithm_costs(hardware, collective, group).values())
    padded = [*costs, *[costs[0]] * _ALGORITHMS][:_ALGORITHMS]
    return group.outermost > 0, tuple(value for cost in padded for value in cost)


def collective_seconds(
    hardware: Hardware, collective: Collective, payload: FloatArray, size: FloatArray, stride: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds of one collective in each run: inside the innermost level, and beyond it (the other is zero)."""
    pairs = np.rint(size) + 1j * np.rint(stride)
    distinct, place = np.unique(pairs, return_inverse=True)
    found = [_lines(hardware, collective, int(pair.real), int(pair.imag)) for pair in distinct]
    outer = np.array([crosses for crosses, _ in found], dtype=bool)[place]
    lines = np.array([line for _, line in found]).reshape(len(found), _ALGORITHMS, 2)[place]
    root = np.sqrt(lines[:, :, 0]) + np.sqrt(np.maximum(payload, 0.0)[:, None] * lines[:, :, 1])
    seconds = hardware.collective_overhead_s + np.min(root * root, axis=1)
    seconds = np.where((pairs.real > 1) & (payload > 0), seconds, 0.0)
    return np.where(outer, 0.0, seconds), np.where(outer, seconds, 0.0)


_Pair = tuple[FloatArray, FloatArray]


def _messages(hardware: Hardware, c: Columns, element: float) -> dict[Message, _Pair]:
    """Seconds of the messages of each run.

    Ranks are numbered tensor first, then context, data and pipeline; experts' tensor ranks first, then the ranks
    that share the experts out, then their copies (Megatron-Core's order ``tp-cp-ep-dp-pp``).
    """

    def time(kind: Collective, payload: FloatArray, size: FloatArray, stride: FloatArray) -> _Pair:
        return collective_seconds(hardware, kind, payload, size, stride)

    one = np.ones_like(c.tp)
    gather, reduce = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    hidden = c.tokens * c.hidden * element
    around = tensor_messages(c)[1] * c.hidden * element
    whole = time(Collective.ALL_REDUCE, around, c.tp, one)
    pair = _add(time(gather, around, c.tp, one), time(reduce, around, c.tp, one))
    width = c.head_size + np.where(c.latent > 0, c.value_head, c.head_size)
    keys = c.tokens * c.cp * local_key_value_heads(c) * width * element
    copies = sent_copies(c) * c.hidden * element
    once = once_a_node(c, hardware.devices_per_node)
    # Where every rank has all experts it gathers tokens, not a copy for each expert.
    met = routed_tokens(c) / np.where(c.ep > 1, 1.0, np.maximum(c.experts_per_token, 1.0)) * c.hidden * element
    ep, expert_tp = (np.where(c.experts > 0, ranks, 1.0) for ranks in (c.ep, c.expert_tp))
    whole_loss = np.where(c.vocabulary_parallel_loss > 0, 0.0, 1.0)
    logits = whole_loss * c.tokens * c.predicted_positions * c.vocabulary * element
    boundary = hidden / np.where(c.sequence_parallel > 0, c.tp, 1.0)
    return {
        Message.TENSOR: _choose(c.sequence_parallel > 0, pair, whole),
        Message.CONTEXT: time(gather, keys, c.cp, c.tp),
        Message.EXPERT: time(Collective.ALL_TO_ALL, copies * once, ep, expert_tp),
        Message.EXPERT_TENSOR: _add(time(gather, met, expert_tp, one), time(reduce, met, expert_tp, one)),
        Message.LOGITS: time(gather, logits, c.tp, one),
        Message.PIPELINE: time(Collective.SEND, boundary, c.pp, c.tp * c.cp * c.dp),
        **_state_messages(hardware, c, element),
    }


def _state_messages(hardware: Hardware, c: Columns, element: float) -> dict[Message, _Pair]:
    """Messages of gradients and parameters: of a stage once a step, or with ZeRO-3 of every layer.

    Experts are shared out among ranks, so fewer of them have copies than of the dense parameters.
    """
    full, apart = c.sharding == 3, c.sharding >= 1
    outer = np.maximum(c.dp / c.shard_group, 1.0)

    def among(kind: Collective, wanted: npt.NDArray[np.bool_], bytes_each: FloatArray | float, shard: bool) -> _Pair:
        """Of all dense parameters and of all experts among their copies, or of a layer's among those of a shard."""
        parts = c.fullest_layers if shard else 1.0
        fewer = outer if shard else 1.0
        dense, experts = (
            np.where(wanted, parameters * bytes_each / parts, 0.0)
            for parameters in (c.dense_parameters, c.expert_parameters)
        )
        return _add(
            collective_seconds(hardware, kind, dense, c.replicas / fewer, c.tp),
            collective_seconds(hardware, kind, experts, np.maximum(c.expert_replicas / fewer, 1.0), c.expert_ranks),
        )

    gather, reduce, everywhere = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
    gradient = c.sent_gradient_bytes * c.trained_fraction
    scattered = apart & (c.scattered_gradients > 0)
    # Copies of the shards (HSDP) add up what they reduced.
    shards = c.replicas / outer
    copies = np.where(full, (c.dense_parameters + c.expert_parameters) / c.fullest_layers * gradient / shards, 0.0)
    return {
        Message.GRADIENT_REDUCE: _add(
            among(reduce, scattered & ~full, gradient, False), among(everywhere, ~scattered & ~full, gradient, False)
        ),
        Message.PARAMETER_GATHER: among(gather, apart & ~full, element * c.trained_fraction, False),
        Message.SHARD_GATHER: among(gather, full, element, True),
        Message.SHARD_REDUCE: _add(
            among(reduce, full, gradient, True),
            collective_seconds(hardware, everywhere, copies, outer, c.tp * shards),
        ),
    }


def _add(first: _Pair, second: _Pair) -> _Pair:
    return first[0] + second[0], first[1] + second[1]


def _choose(condition: npt.NDArray[np.bool_], yes: _Pair, no: _Pair) -> _Pair:
    return np.where(condition, yes[0], no[0]), np.where(condition, yes[1], no[1])


def _optimizer_seconds(hardware: Hardware, c: Columns, element: float) -> FloatArray:
    """An update by Adam; before it the gradients are read for their norm, and written as zeros afterwards."""
    outer = np.where(c.sharding == 3, np.maximum(c.dp / c.shard_group, 1.0), 1.0)
    moved, each = np.zeros_like(c.tp), update_bytes(OPTIMIZERS["adam"], int(element), c.gradient_bytes)
    for parameters, copies in ((c.dense_parameters, c.replicas), (c.expert_parameters, c.expert_replicas)):
        share = np.where(c.sharding >= 1, np.maximum(copies / outer, 1.0), 1.0)
        moved += parameters * c.trained_fraction / share * each
        moved += parameters * c.trained_fraction / np.where(c.sharding >= 2, share, 1.0) * 8
    return kernel_time(hardware, Kernel.OPTIMIZER, "float32", np.zeros(1), moved)


def _layout_seconds(hardware: Hardware, c: Columns) -> FloatArray:
    """A step's conversions of trained weights to the layout of matrix units, and of their gradients back."""
    weights = (c.dense_parameters + c.expert_parameters) * c.trained_fraction
    turned = LAYOUT_BYTES.get(family_of(hardware.device_name), 0.0) * weights
    return np.asarray(turned / hardware.memory_bandwidth)
