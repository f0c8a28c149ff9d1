"""What stands for software that a plan does not name: the median of the stacks that most networks are trained with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

USUAL_STACKS = ("eager", "compiled", "megatron", "deepspeed", "transformer_engine")
"""Stacks whose median stands for software that a plan does not name."""
Stacks = Mapping[str, Mapping[str, float]]


def usual_factors(stacks: Stacks) -> dict[str, float]:
    """Factors on kernels of planned steps that the usual software has."""
    known = [stacks[stack] for stack in USUAL_STACKS if stack in stacks]
    names = {name for stack in known for name in stack}
    return factors_of({name: float(np.median([stack.get(name, 1.0) for stack in known])) for name in names})


def factors_of(stack: Mapping[str, float]) -> dict[str, float]:
    """Factors on kernels of planned steps by a stack's coefficients; kernels bound by memory are below 32 bits."""
    return {
        "matmul": stack.get("matmul", 1.0),
        "memory": stack.get("memory", 1.0) * stack.get("memory_half", 1.0),
        "optimizer": stack.get("optimizer", 1.0),
    }


def usual_launch_s(stacks: Stacks) -> float:
    """Seconds that the host takes to launch an operator with software that a plan does not name."""
    return float(
        np.median([stacks[stack]["launch_s"] for stack in USUAL_STACKS if "launch_s" in stacks.get(stack, {})])
    )
