"""Which coefficients a run takes: those of its hardware, its software stack and its attention kernel.

A coefficient belongs to a device, a stack or a kernel, never to a network. Devices keep theirs in their profile
(`Hardware.training`), software in ``hw_profiles/software/training.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from planner.cost.software_file import SoftwareCoefficients
from planner.cost.stacks import Stack, family_of
from planner.cost.training_run import TrainingRun, TransformerShape
from planner.published.estimate.columns import FloatArray
from planner.published.estimate.step import Coefficients

DEVICE_COEFFICIENTS = ("matmul", "low_precision", "attention", "memory", "inside", "outside", "launch", "jitter")
"""Of a device: factors on kernels, messages and the host's time for a launch; the delay for each doubling of nodes."""
NEUTRAL = Coefficients()
_FACTORS = frozenset({"matmul", "low_precision", "attention", "memory", "inside", "outside"})
"""What device and stack both have their say in."""


def stack_key(run: TrainingRun) -> str:
    """Name under which the coefficients of a run's stack stand.

    Deterministic kernels have their own, and so has MindSpore away from the devices it is made for.
    """
    stack = run.setup.stack
    if stack is Stack.MINDSPORE and not family_of(run.hardware.device_name).startswith("ascend"):
        return f"{stack}_gpu"
    return f"{stack}_deterministic" if run.setup.deterministic else str(stack)


def interval_key(run: TrainingRun) -> tuple[str, str, str]:
    """What intervals of runs are told apart by: kind of network, family of the device, stack."""
    kind = "transformer" if isinstance(run.network, TransformerShape) else "layered"
    return kind, family_of(run.hardware.device_name), stack_key(run)


def gather(software: SoftwareCoefficients, runs: Sequence[TrainingRun]) -> Coefficients:
    """Coefficients (N,) of runs."""
    return combine(
        [software.devices.get(family_of(run.hardware.device_name), run.hardware.training) for run in runs],
        [software.stacks.get(stack_key(run), {}) for run in runs],
        [software.attention.get(run.setup.attention, 1.0) for run in runs],
    )


def combine(
    devices: Sequence[Mapping[str, float]], stacks: Sequence[Mapping[str, float]], attention: Sequence[float]
) -> Coefficients:
    """Coefficients (N,): factors multiply, everything else is the stack's."""
    found: dict[str, FloatArray] = {}
    for coefficient in fields(Coefficients):
        name, neutral = coefficient.name, float(getattr(NEUTRAL, coefficient.name))
        if name == "jitter":
            values = np.array([device.get(name, neutral) for device in devices])
        elif name in _FACTORS:
            values = np.array(
                [device.get(name, 1.0) * stack.get(name, 1.0) for device, stack in zip(devices, stacks, strict=True)]
            )
        else:
            values = np.array([stack.get(name, neutral) for stack in stacks])
        found[name] = values
    found["attention"] = found["attention"] * np.asarray(attention)
    found["launch_s"] = found["launch_s"] * np.array([device.get("launch", 1.0) for device in devices])
    return replace(NEUTRAL, **found)
