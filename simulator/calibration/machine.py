"""What machine this is, in words and numbers that name no host."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from simulator.calibration.npu import load_npu
from simulator.calibration.process import available_cores
from simulator.errors import InputError, UnsupportedError
from simulator.hardware import Caches
from simulator.machine_memory import free_memory
from simulator.timing import NONE_ABOVE

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
SMALLEST_CPU_MAXIMUM = 8
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHES = Caches(own_bytes=1 << 20, shared_bytes=31 << 20)
"""Of a processor that does not say."""
MOST_BEYOND_CACHES = 1 << 29
UNKNOWN_MEMORY = 4 << 30
"""Bytes that count as free where the system does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedDevices:
    """The devices to calibrate; ``memory_bytes`` is one device's share."""

    device_type: str
    backend: str
    device_name: str
    devices: int
    memory_bytes: int
    caches: Caches | None = None

    @property
    def is_accelerator(self) -> bool:
        """Whether devices are accelerators rather than processes that share a CPU."""
        return self.device_type != "cpu"


def find_machine(device_type: str, processes: int) -> CalibratedDevices:
    """Describe the machine's devices of one type, or say why there are none."""
    if device_type == "cpu":
        devices = max(SMALLEST_CPU_MAXIMUM, available_cores(), processes)
        return CalibratedDevices(
            device_type="cpu",
            backend=BACKENDS["cpu"],
            device_name=f"one process on {available_cores()} cores of {_cpu_model()}",
            devices=devices,
            memory_bytes=(free_memory() or UNKNOWN_MEMORY) // devices,
            caches=processor_caches(),
        )
    devices = count_devices(device_type)
    properties = getattr(torch, device_type).get_device_properties(0)
    return CalibratedDevices(
        device_type=device_type,
        backend=BACKENDS[device_type],
        device_name=str(properties.name),
        devices=devices,
        memory_bytes=int(properties.total_memory),
    )


def count_devices(device_type: str) -> int:
    """Count this machine's accelerators of one type without starting them, or say why there are none."""
    if device_type not in BACKENDS:
        raise InputError(f"device {device_type!r} is not one of {', '.join(BACKENDS)}; choose one of them")
    if device_type == "npu":
        load_npu()
    backend = getattr(torch, device_type)
    if not backend.is_available() or not backend.device_count():
        raise UnsupportedError(f"device {device_type!r} is not available to this torch ({torch.__version__}) on this "
                               "machine; use --device cpu")  # fmt: skip
    return int(backend.device_count())


@cache
def processor_caches(folder: Path = CACHES) -> Caches:
    """Last cache of one core of this machine's processor, and that of all its cores."""
    found: dict[int, tuple[int, bool]] = {}
    try:
        for entry in folder.glob("index*"):
            kind, level, size, cores = (
                (entry / name).read_text().strip() for name in ("type", "level", "size", "shared_cpu_list")
            )
            if kind != "Instruction":
                found[int(level)] = (int(size.removesuffix("K")) << 10, not cores.isdecimal())
    except (OSError, ValueError):
        return USUAL_CACHES
    own = [size for _, (size, shared) in sorted(found.items()) if not shared]
    common = [size for _, (size, shared) in sorted(found.items()) if shared]
    return Caches(own_bytes=own[-1] if own else 0, shared_bytes=common[-1] if common else 0) if found else USUAL_CACHES


def beyond_caches() -> int:
    """Bytes of which little lies in the caches when they are used in turn."""
    caches = processor_caches()
    return min(MOST_BEYOND_CACHES, int(NONE_ABOVE * (caches.own_bytes + caches.shared_bytes)))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine() or "an unknown CPU")
