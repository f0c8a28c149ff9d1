"""Stacks of training software, kernels of attention, and families of devices: what coefficients are fitted to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache

import numpy as np


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
Stacks = Mapping[str, Mapping[str, float]]


def usual_factors(stacks: Stacks) -> dict[str, float]:
    """Factors on kernels of planned steps that the usual software has."""
    known = [stacks[stack] for stack in USUAL_STACKS if stack in stacks]
    names = {name for stack in known for name in stack}
    return factors_of({name: float(np.median([stack.get(name, 1.0) for stack in known])) for name in names})


def factors_of(stack: Mapping[str, float]) -> dict[str, float]:
    """Factors on kernels of planned steps by a stack's coefficients."""
    return {
        "matmul": stack.get("matmul", 1.0),
        "memory": stack.get("memory", 1.0),
        "convolution": stack.get("convolution", 1.0),
        "image": stack.get("image", 1.0),
        "optimizer": stack.get("optimizer", 1.0),
    }


def usual_launch_s(stacks: Stacks) -> float:
    """Seconds that the host takes to launch an operator with software that a plan does not name."""
    return float(
        np.median([stacks[stack]["launch_s"] for stack in USUAL_STACKS if "launch_s" in stacks.get(stack, {})])
    )
