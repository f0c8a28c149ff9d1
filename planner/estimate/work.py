"""Seconds of everything a training step does, class by class, before software has its say.

`work_of` times the operators of `transformer_work` with the kernel models of each run's hardware and its messages with
the collective models. What is in a step is decided here; how it overlaps, in `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.estimate.columns import Columns, FloatArray, columns_of
from planner.estimate.parameters import Sizes, sizes_of
from planner.estimate.training_run import AttentionKernel, TrainingRun
from planner.estimate.transformer_work import FusedAttention, MatrixProduct, Operator, Part, Pointwise, operators
from simulator.collectives import algorithm_costs
from simulator.hardware import Hardware
from simulator.kernels import attention_time, grouped_matmul_time, kernel_time, matmul_time
from simulator.kernels.attention import AttentionKind
from simulator.program import Collective, Kernel
from simulator.topology import group_shape

ELEMENT_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0}
"""Bytes of an activation element; 2 for every lower precision, which multiplies only."""
_DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "bfloat16", "fp16": "float16"}
_FUSED: dict[AttentionKernel, AttentionKind] = {AttentionKernel.FLASH: "flash", AttentionKernel.FLASH2: "flash2"}
_ALIGNMENT = 64
_TF32_SLOWDOWN = 2.0  # TF32 tensor cores run at half the 16-bit rate (NVIDIA Ampere whitepaper)
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
    """Products with a side that is no multiple of 64 elements, which tensor cores take in poorer tiles (Anthony et
    al., "The Case for Co-Designing Model Architectures with Hardware", arXiv:2401.14489)."""
    LOW_PRECISION = "low_precision"
    ATTENTION = "attention"
    MEMORY = "memory"


class Message(StrEnum):
    """Communication, by what it serves. Seconds are per layer and micro-batch, or per step for whole gradients."""

    TENSOR = "tensor"
    """Two pairs a layer and pass: all-reduces, or gathers and reduce-scatters with sequence parallelism."""
    TENSOR_ENDS = "tensor_ends"
    """Of embedding and head, per micro-batch."""
    CONTEXT = "context"
    EXPERT = "expert"
    PIPELINE = "pipeline"
    """One send of one micro-batch across one stage boundary."""
    GRADIENT_REDUCE = "gradient_reduce"
    PARAMETER_GATHER = "parameter_gather"
    SHARD_GATHER = "shard_gather"
    """ZeRO-3: the parameters of one layer."""
    SHARD_REDUCE = "shard_reduce"


Key = tuple[Part, Phase, WorkClass]


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Work of (N,) runs: seconds by part, phase and class, of one layer and one micro-batch each.

    ``core_seconds`` is the part of the forward seconds that selective recompute repeats; ``kernels`` counts launches.
    ``messages`` are seconds, split into those inside the innermost level and those that leave it.
    """

    columns: Columns
    sizes: Sizes
    seconds: dict[Key, FloatArray]
    core_seconds: dict[WorkClass, FloatArray]
    kernels: dict[tuple[Part, Phase], float]
    inside: dict[Message, FloatArray]
    outside: dict[Message, FloatArray]
    optimizer_s: FloatArray
    element_bytes: FloatArray = field(default_factory=lambda: np.zeros(0))


def work_of(runs: Sequence[TrainingRun]) -> Work:
    """Time the operators and messages of runs of transformers."""
    columns = columns_of(runs)
    groups: dict[tuple[Hardware, str, AttentionKernel], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.hardware, run.setup.precision, run.setup.attention), []).append(index)
    count = len(runs)
    seconds = {(p, f, w): np.zeros(count) for p in Part for f in Phase for w in WorkClass}
    core = {w: np.zeros(count) for w in WorkClass}
    kernels: dict[tuple[Part, Phase], float] = {}
    inside, outside = ({message: np.zeros(count) for message in Message} for _ in range(2))
    optimizer, element_bytes = np.zeros(count), np.zeros(count)
    for (hardware, precision, attention), members in groups.items():
        rows = np.array(members)
        part_columns = columns.take(rows)
        element = ELEMENT_BYTES.get(precision, 2.0)
        element_bytes[rows] = element
        timer = _Timer(hardware, precision, attention)
        for operator in operators(part_columns, element):
            times = timer.times(operator, part_columns)
            kind = timer.kind(operator)
            poor = _misaligned(operator) if kind is WorkClass.MATMUL else None
            for phase, values in zip(Phase, times, strict=True):
                if poor is None:
                    seconds[operator.part, phase, kind][rows] += values
                    continue
                seconds[operator.part, phase, kind][rows] += np.where(poor, 0.0, values)
                seconds[operator.part, phase, WorkClass.MISALIGNED][rows] += np.where(poor, values, 0.0)
            if not isinstance(operator, FusedAttention) and operator.core:
                core[kind][rows] += times[0]
        sizes = sizes_of(part_columns)
        for message, (here, there) in _messages(hardware, part_columns, sizes, element).items():
            inside[message][rows] += here
            outside[message][rows] += there
        optimizer[rows] = _optimizer_seconds(hardware, part_columns, sizes, element)
    for operator in operators(columns.take(np.arange(min(1, count))), 2.0):
        for phase in Phase:
            key = (operator.part, phase)
            kernels[key] = kernels.get(key, 0.0) + _launches(operator, phase)
    return Work(
        columns=columns, sizes=sizes_of(columns), seconds=seconds, core_seconds=core, kernels=kernels,
        inside=inside, outside=outside, optimizer_s=optimizer, element_bytes=element_bytes,
    )  # fmt: skip


def _misaligned(operator: Operator) -> npt.NDArray[np.bool_] | None:
    if not isinstance(operator, MatrixProduct) or not operator.weight or operator.name == "router":
        return None
    return np.asarray((np.rint(operator.n) % _ALIGNMENT != 0) | (np.rint(operator.k) % _ALIGNMENT != 0))


def _launches(operator: Operator, phase: Phase) -> float:
    if isinstance(operator, Pointwise):
        return 0.0 if phase is Phase.WEIGHT_GRADIENT else operator.kernels
    if isinstance(operator, FusedAttention):
        return 0.0 if phase is Phase.WEIGHT_GRADIENT else 1.0
    return 1.0


class _Timer:
    """Kernel models of one hardware at one precision."""

    def __init__(self, hardware: Hardware, precision: str, attention: AttentionKernel) -> None:
        self.hardware = hardware
        self.dtype = _DTYPES.get(precision, "bfloat16")
        self.low = precision in ("fp8", "fp4")
        self.slowdown = _TF32_SLOWDOWN if precision == "tf32" else 1.0
        self.low_speed = _FP4_SPEED if precision == "fp4" else 1.0
        self.attention = attention

    def kind(self, operator: Operator) -> WorkClass:
        """Class of an operator."""
        if isinstance(operator, FusedAttention):
            return WorkClass.ATTENTION
        if isinstance(operator, Pointwise):
            return WorkClass.ATTENTION if operator.core else WorkClass.MEMORY
        return WorkClass.LOW_PRECISION if self.low and operator.low_precision else WorkClass.MATMUL

    def times(self, operator: Operator, c: Columns) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Seconds forward, of the input gradient and of the weight gradient."""
        if isinstance(operator, Pointwise):
            forward = kernel_time(self.hardware, Kernel.ELEMENTWISE, self.dtype, np.zeros(1), operator.forward_bytes)
            backward = kernel_time(self.hardware, Kernel.ELEMENTWISE, self.dtype, np.zeros(1), operator.backward_bytes)
            return forward, backward, np.zeros(1)
        if isinstance(operator, FusedAttention):
            return self._attention(operator, False), self._attention(operator, True), np.zeros(1)
        forward = self._product(operator, operator.m, operator.n, operator.k)
        by_input = self._product(operator, operator.m, operator.k, operator.n)
        by_weight = self._product(operator, operator.k, operator.n, operator.m, by_weight=True)
        if not operator.weight:
            return forward, by_input + by_weight, np.zeros(1)
        # Frozen weights need no gradient; what trains beside them (LoRA) is small.
        return forward, by_input, by_weight * c.trained_fraction

    def _product(
        self, product: MatrixProduct, m: FloatArray, n: FloatArray, k: FloatArray, *, by_weight: bool = False
    ) -> FloatArray:
        low = self.low and product.low_precision
        dtype = "float8_e4m3fn" if low else self.dtype
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
        return np.where(a.batch > 0, seconds, 0.0) * self.slowdown


@lru_cache(maxsize=65536)
def _lines(hardware: Hardware, collective: Collective, size: int, stride: int) -> tuple[bool, tuple[float, ...]]:
    """Whether a group leaves the innermost level, and latency and seconds per byte of three algorithms."""
    size = min(size, max(1, (hardware.max_devices - 1) // max(stride, 1) + 1))
    group = group_shape(hardware, size, stride)
    costs = list(algorithm_costs(hardware, collective, group).values())
    padded = [*costs, *[costs[0]] * 8][:8]
    return group.outermost > 0, tuple(value for cost in padded for value in cost)


def collective_seconds(
    hardware: Hardware, collective: Collective, payload: FloatArray, size: FloatArray, stride: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds of one collective in each run: inside the innermost level, and beyond it (the other is zero)."""
    found = [
        _lines(hardware, collective, int(n), int(d)) if n > 1 else (False, (0.0,) * 16)
        for n, d in zip(np.rint(size), np.rint(stride), strict=True)
    ]
    outer = np.array([crosses for crosses, _ in found])
    lines = np.array([line for _, line in found]).reshape(len(found), 8, 2)
    root = np.sqrt(lines[:, :, 0]) + np.sqrt(np.maximum(payload, 0.0)[:, None] * lines[:, :, 1])
    seconds = np.where(size > 1, hardware.collective_overhead_s + np.min(root * root, axis=1), 0.0)
    seconds = np.where(payload > 0, seconds, 0.0)
    return np.where(outer, 0.0, seconds), np.where(outer, seconds, 0.0)


_Pair = tuple[FloatArray, FloatArray]


def _messages(hardware: Hardware, c: Columns, sizes: Sizes, element: float) -> dict[Message, _Pair]:
    def time(kind: Collective, payload: FloatArray, size: FloatArray, stride: FloatArray) -> _Pair:
        return collective_seconds(hardware, kind, payload, size, stride)

    one = np.ones_like(c.tp)
    hidden = c.tokens * c.hidden * element
    gather, reduce = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    whole = time(Collective.ALL_REDUCE, hidden, c.tp, one)
    pair = _add(time(gather, hidden, c.tp, one), time(reduce, hidden, c.tp, one))
    tensor = _choose(c.sequence_parallel > 0, pair, whole)
    keys = 2 * c.tokens * c.cp * np.maximum(c.key_value_heads / c.tp, 1.0) * c.head_size * element
    copies = c.norm_tokens * np.where((c.sequence_parallel == 0) & (c.tp > 1), 1 / c.tp, 1.0) * c.experts_per_token
    boundary = hidden / np.where(c.sequence_parallel > 0, c.tp, 1.0)
    replicas, shards = c.dp * c.cp, c.shard_group * c.cp
    dense = sizes.dense_stage * c.trained_fraction
    experts, expert_replicas = (
        sizes.expert_stage * c.trained_fraction,
        np.maximum(replicas * c.tp / sizes.expert_ranks, 1),
    )
    expert_stride = sizes.expert_ranks
    stated = c.sharding >= 1
    gradients, expert_gradients = dense * c.gradient_bytes, experts * c.gradient_bytes
    reduced = _choose(
        stated,
        _add(time(reduce, gradients, replicas, c.tp), time(reduce, expert_gradients, expert_replicas, expert_stride)),
        _add(
            time(Collective.ALL_REDUCE, gradients, replicas, c.tp),
            time(Collective.ALL_REDUCE, expert_gradients, expert_replicas, expert_stride),
        ),
    )
    gathered = _add(
        time(gather, dense * element * stated, replicas, c.tp),
        time(gather, experts * element * stated, expert_replicas, expert_stride),
    )
    full = (c.sharding == 3).astype(float)
    layer = sizes.layer * full
    outer_groups = np.maximum(replicas / shards, 1.0)
    layer_reduce = time(reduce, layer * c.gradient_bytes, shards, c.tp)
    layer_reduce = _add(
        layer_reduce, time(Collective.ALL_REDUCE, layer * c.gradient_bytes / shards, outer_groups, c.tp * shards)
    )
    return {
        Message.TENSOR: tensor,
        Message.TENSOR_ENDS: _times(1.5, tensor),
        Message.CONTEXT: time(gather, keys, c.cp, c.tp),
        Message.EXPERT: time(Collective.ALL_TO_ALL, copies * c.hidden * element, np.where(c.experts > 0, c.ep, 1), one),
        Message.PIPELINE: time(Collective.SEND, boundary, c.pp, c.tp * c.cp * c.dp),
        Message.GRADIENT_REDUCE: _times(1 - full, reduced),
        Message.PARAMETER_GATHER: _times(1 - full, gathered),
        Message.SHARD_GATHER: time(gather, layer * element, shards, c.tp),
        Message.SHARD_REDUCE: layer_reduce,
    }


def _add(first: _Pair, second: _Pair) -> _Pair:
    return first[0] + second[0], first[1] + second[1]


def _times(factor: FloatArray | float, pair: _Pair) -> _Pair:
    return factor * pair[0], factor * pair[1]


def _choose(condition: npt.NDArray[np.bool_], yes: _Pair, no: _Pair) -> _Pair:
    return np.where(condition, yes[0], no[0]), np.where(condition, yes[1], no[1])


def _optimizer_seconds(hardware: Hardware, c: Columns, sizes: Sizes, element: float) -> FloatArray:
    """Adam in mixed precision: reads gradient, master weight and moments, writes the last three and the parameter.

    Before it the gradients are read for their norm and written as zeros afterwards.
    """
    share = np.where(c.sharding >= 1, np.where(c.sharding == 3, c.shard_group * c.cp, c.dp * c.cp), 1.0)
    stage = (sizes.dense_stage + sizes.expert_stage) * c.trained_fraction
    moved = stage / share * (c.gradient_bytes + 24 + element) + stage / np.where(c.sharding >= 2, share, 1.0) * 8
    return kernel_time(hardware, Kernel.OPTIMIZER, "float32", np.zeros(1), moved)
