"""Stacks of training software, kernels of attention, and families of devices: what coefficients are fitted to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache


class AttentionKernel(StrEnum):
    """How the attention core runs."""

    UNFUSED = "unfused"
    """Matrix products and single kernels between them, scores in memory."""
    FUSED_SOFTMAX = "fused_softmax"
    """Scale, mask and softmax in one kernel, scores in memory."""
    FLASH = "flash"
    """One kernel in each direction, no scores in memory (FlashAttention 1)."""
    FLASH2 = "flash2"
    """The same with better work partitioning (FlashAttention 2)."""
    VENDOR = "vendor"
    """The vendor's fused kernel: cuDNN on Hopper and later, FlashAttentionScore on Ascend."""


class Stack(StrEnum):
    """Software that launches the kernels; its properties are fitted once for all networks."""

    CHANNELS_LAST = "channels_last"
    """PyTorch on images as NVIDIA tunes it: channels last, input prepared on the device, fused updates."""
    MINDSPORE_TOOLKIT = "mindspore_toolkit"
    """MindCV and MindYOLO: MindSpore graph mode, images transformed by the host in Python."""
    EAGER = "eager"
    """PyTorch operators one by one, few of them fused (Hugging Face, FSDP, torchtune)."""
    COMPILED = "compiled"
    """torch.compile or XLA: chains of elementwise operators fused."""
    MEGATRON = "megatron"
    """Megatron-LM: fused bias, dropout, norm and softmax kernels, gradients accumulated in the product."""
    DEEPSPEED = "deepspeed"
    """Megatron-DeepSpeed and other pipelines of PyTorch operators with some fused kernels."""
    TRANSFORMER_ENGINE = "transformer_engine"
    """Megatron-Core on Transformer Engine: fused norms, overlapped tensor parallelism, CUDA graphs."""
    MINDSPORE = "mindspore"
    """MindSpore graph mode."""
    MINDSPEED = "mindspeed"
    """PyTorch on Ascend: torch_npu with MindSpeed's fused kernels."""
    TENSORFLOW = "tensorflow"
    """TensorFlow, with XLA unless ``plain_graph`` says otherwise; Horovod between devices."""
    PADDLE = "paddle"
    """PaddlePaddle."""
    MXNET = "mxnet"
    """MXNet."""
    ONEFLOW = "oneflow"
    """OneFlow."""


_FAMILIES = (
    (r"V100|P40|T4", "volta"),
    (r"A100|A800|A40|A30|RTX.*30|RTX A", "ampere"),
    (r"GB200|GB300|B100|B200|B300|Blackwell|Rubin", "blackwell"),
    (r"H100|H800|H200|GH200|H20|L40|RTX.*40|4090", "hopper"),
    (r"910B|910C|910_9|Ascend.?950", "ascend910b"),
    (r"Ascend.?910", "ascend910"),
    (r"MI3\d\dX", "cdna"),
    (r"TPU", "tpu"),
)


@lru_cache(maxsize=256)
def family_of(device_name: str) -> str:
    """Device family by the name of the device: the generation whose kernels and clocks behave alike.

    >>> family_of("NVIDIA A100-SXM4-80GB"), family_of("Ascend 910B")
    ('ampere', 'ascend910b')
    """
    return next((family for pattern, family in _FAMILIES if re.search(pattern, device_name)), "other")


def stack_key(stack: Stack, *, deterministic: bool, family: str) -> str:
    """Name under which a stack's coefficients stand.

    Deterministic kernels have their own, and so has MindSpore away from the devices it is made for.

    >>> stack_key(Stack.MEGATRON, deterministic=True, family="ampere")
    'megatron_deterministic'
    """
    if stack is Stack.MINDSPORE and not family.startswith("ascend"):
        return f"{stack}_gpu"
    return f"{stack}_deterministic" if deterministic else str(stack)


USUAL_STACKS = ("eager", "compiled", "megatron", "deepspeed", "transformer_engine")
"""Stacks whose median stands for software that a plan does not name."""


def factors_of(stack: Mapping[str, float]) -> dict[str, float]:
    """Factors on kernels of planned steps by a stack's coefficients."""
    return {
        "matmul": stack.get("matmul", 1.0),
        "memory": stack.get("memory", 1.0),
        "convolution": stack.get("convolution", 1.0),
        "image": stack.get("image", 1.0),
        "optimizer": stack.get("optimizer", 1.0),
    }


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
        Width and depth of a product at which its rate is half of that of a wide one. As many rows are computed
        for nothing, because tiles are computed whole.
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
