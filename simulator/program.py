"""What a device does: tasks with their work, and buffers.

Tasks hold work (floating point operations, bytes, messages), never seconds: the same task is timed on any hardware.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import StrEnum

COMPUTE_STREAM = "compute"
HOST = "host"
"""Axis of copies between a device and its host."""
DISK = "disk"
"""Axis of copies between a host and its disks."""


class Phase(StrEnum):
    """The part of the step a task belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Kernel(StrEnum):
    """Classes of operators that share an efficiency."""

    MATMUL = "matmul"
    GROUPED_MATMUL = "grouped_matmul"
    """Products of several experts in one kernel (`simulator.kernels.grouped_matmul_time`): otherwise as `MATMUL`."""
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution_backward"
    """Both gradients of a convolution: of the speed of `CONVOLUTION` where a profile does not tell."""
    STRIDED_CONVOLUTION_BACKWARD = "strided_convolution_backward"
    """The same, that of the image among them, where a window of several pixels moves by more than one: of the speed of
    `CONVOLUTION_BACKWARD` where a profile does not tell."""
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    ACCUMULATION = "accumulation"
    """Adding to a tensor where it stands: of the speed of `ELEMENTWISE` where a profile does not tell."""
    ACTIVATION = "activation"
    TRANSCENDENTAL = "transcendental"
    """Activations with exponentials, such as GELU: of the speed of `ACTIVATION` where a profile does not tell."""
    SOFTMAX = "softmax"
    NORMALIZATION = "normalization"
    BATCH_NORMALIZATION = "batch_normalization"
    """Statistics of channels over the batch: of the speed of `NORMALIZATION` where a profile does not tell."""
    SYNCHRONIZED_BATCH_NORMALIZATION = "synchronized_batch_normalization"
    """With sums over ranks in its middle, their message apart: of the speed of `BATCH_NORMALIZATION` where a profile
    does not tell."""
    REDUCTION = "reduction"
    POOLING = "pooling"
    """Largest numbers or means of windows over images: of the speed of `REDUCTION` where a profile does not tell."""
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    COPY = "copy"
    VIEW = "view"


WIDER_CLASS = {
    Kernel.GROUPED_MATMUL: Kernel.MATMUL,
    Kernel.CONVOLUTION_BACKWARD: Kernel.CONVOLUTION,
    Kernel.STRIDED_CONVOLUTION_BACKWARD: Kernel.CONVOLUTION_BACKWARD,
    Kernel.ACCUMULATION: Kernel.ELEMENTWISE,
    Kernel.TRANSCENDENTAL: Kernel.ACTIVATION,
    Kernel.BATCH_NORMALIZATION: Kernel.NORMALIZATION,
    Kernel.SYNCHRONIZED_BATCH_NORMALIZATION: Kernel.BATCH_NORMALIZATION,
    Kernel.POOLING: Kernel.REDUCTION,
}
"""The class whose speed counts for another that a profile does not have."""
SUMMED_CLASS = {Kernel.BATCH_NORMALIZATION: Kernel.SYNCHRONIZED_BATCH_NORMALIZATION}
"""The class of operators that sum over ranks in their middle, by that of the same in one piece."""
PRODUCTS = frozenset({Kernel.MATMUL, Kernel.GROUPED_MATMUL})
CONVOLUTIONS = frozenset({Kernel.CONVOLUTION, Kernel.CONVOLUTION_BACKWARD, Kernel.STRIDED_CONVOLUTION_BACKWARD})


def described_class(kernel: Kernel, known: Container[Kernel]) -> Kernel:
    """The class whose numbers count for `kernel`: itself, or the nearest wider one that is known.

    >>> described_class(Kernel.STRIDED_CONVOLUTION_BACKWARD, {Kernel.CONVOLUTION}).value
    'convolution'
    """
    found = kernel
    while found not in known and found in WIDER_CLASS:
        found = WIDER_CLASS[found]
    return found


class Collective(StrEnum):
    """Messages among the ranks of one group.

    The payload is the larger of one rank's input and output: the whole tensor for an all-reduce,
    the gathered tensor for an all-gather, the unreduced tensor for a reduce-scatter, one rank's
    tensor for an all-to-all and a broadcast, the message for a send.
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"


class BufferKind(StrEnum):
    """What stands in memory."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    OPTIMIZER_STATE = "optimizer_states"
    ACTIVATION = "activations"
    RECOMPUTED = "recomputed"
    """Values and gradients of the layer that goes back, recomputed ones included."""
    LOSS = "loss"
    """Logits, their float32 copy and their gradient."""
    GATHERED_PARAMETER = "gathered_parameters"
    """Whole layers of sharded parameters, while they are at work."""
    COMMUNICATION = "communication"
    WORKSPACE = "workspace"
    """Scratch memory of libraries."""
    ALLOCATOR_SLACK = "allocator_slack"
    """What the framework's allocator holds besides."""
    CONTEXT = "context"
    """Driver context and communicators, outside the allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A piece of device memory, by name."""

    name: str
    size_bytes: int
    kind: BufferKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kernel or one collective of a device.

    ``copied_bytes`` are read and written to pack tensors into a message
    and to cut them out of one. ``copies`` is how many copies between a device and its host the task stands for.
    ``sharded`` messages bring the shards of a unit's parameters together before its passes, or scatter their gradients.
    ``on_host``: the host works, or hosts exchange, on tensors in their memory, while the device waits in its stream.
    ``launched_with`` numbers the pass of a unit in which the host launches it, −1 for what runs besides: kernels of a
    pass take at least as long as their launches (`simulator.launches`).

    ``shape`` is that of a kernel whose time depends on it: batch, m, n and k of a matrix product; groups, output
    positions, output channels of a group, and input channels of a group times the window's area of a convolution;
    heads of all sequences, queries, keys that a query attends to on average, and head size of fused attention.
    """

    name: str
    phase: Phase
    stream: str = COMPUTE_STREAM
    kernel: Kernel = Kernel.VIEW
    dtype: str = "float32"
    flops: float = 0.0
    bytes_moved: float = 0.0
    shape: tuple[float, float, float, float] | None = None
    collective: Collective | None = None
    axis: str = ""
    payload_bytes: float = 0.0
    copied_bytes: float = 0.0
    sharded: bool = False
    copies: int = 1
    on_host: bool = False
    launched_with: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAxis:
    """A mesh axis: groups of `size` ranks, `stride` apart."""

    name: str
    size: int
    stride: int
