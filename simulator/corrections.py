"""What whole training steps put on kernels and messages: factors on the times that these take alone.

A profile has them from measured steps (``training``); one that it lacks is 1. Kernels of a device that several
processes share are slowed as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from simulator.collectives import FloatArray, collective_time
from simulator.hardware import Hardware
from simulator.program import Collective, Kernel
from simulator.topology import GroupShape

FACTORS: Mapping[Kernel, str] = {
    Kernel.MATMUL: "matmul",
    Kernel.ATTENTION: "attention",
    **dict.fromkeys(
        (
            Kernel.ELEMENTWISE,
            Kernel.ACTIVATION,
            Kernel.SOFTMAX,
            Kernel.NORMALIZATION,
            Kernel.REDUCTION,
            Kernel.EMBEDDING,
            Kernel.COPY,
        ),
        "memory",
    ),
}
"""Keys of ``Hardware.training`` by kernel; steps say nothing about the others."""


def kernel_factor(hardware: Hardware, kernel: Kernel, dtype: str, devices: int) -> float:
    """Factor on the time of `kernel` in a job of `devices` devices; products below 16 bits have one of their own."""
    name = FACTORS.get(kernel, "")
    if kernel is Kernel.MATMUL and hardware.training and hardware.peak_dtype(dtype).startswith("float8"):
        name = "low_precision"
    return hardware.compute_slowdown(devices) * hardware.training.get(name, 1.0)


def message_time(hardware: Hardware, collective: Collective, payload: FloatArray, group: GroupShape) -> FloatArray:
    """Seconds (n,) of collectives of `payload` bytes, inside the innermost level or beyond it."""
    factor = hardware.training.get("outside" if group.outermost else "inside", 1.0)
    return collective_time(hardware, collective, payload, group) * factor
