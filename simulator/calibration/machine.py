"""What machine this is, in words and numbers that name no host."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from simulator.calibration.process import available_cores, own_cores
from simulator.errors import InputError, UnsupportedError
from simulator.hardware import Caches
from simulator.machine_memory import free_memory
from simulator.timing import NONE_ABOVE


def load_npu() -> None:
    """Import torch_npu, which makes `torch.npu` and the backend hccl.

    Raises
    ------
    UnsupportedError
        It is not installed, or does not load, as without CANN's libraries.
    """
    if importlib.util.find_spec("torch_npu") is None:
        raise UnsupportedError("device 'npu' needs torch_npu, which is not installed; install it or use --device cpu")
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedError(
            f"device 'npu' needs torch_npu, which is installed but does not load ({reason[0]}); load CANN's variables "
            "(set_env.sh) and take a torch_npu that was built for this torch, or use --device cpu"
        ) from error


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


STATISTICS = Path("/proc/stat")
USER, NICE, SYSTEM, STOLEN = 0, 1, 2, 7
"""Columns of what a core did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Seconds since some moment.

    By the clock, that all programs computed on this process's cores, that the host took from these cores, and that this
    process computed.
    """

    wall_s: float
    busy_s: float
    stolen_s: float
    own_s: float

    def since(self, before: MachineUse) -> MachineUse:
        """What happened after another moment."""
        return MachineUse(
            wall_s=self.wall_s - before.wall_s,
            busy_s=self.busy_s - before.busy_s,
            stolen_s=self.stolen_s - before.stolen_s,
            own_s=self.own_s - before.own_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Parts of the time of the cores that other programs took, and that the host took."""

    others_share: float
    stolen_share: float


def machine_use(statistics: Path = STATISTICS) -> MachineUse | None:
    """Counters of this moment; None where the system has none."""
    cores = {f"cpu{number}" for number in own_cores()}
    busy = stolen = 0
    try:
        for line in statistics.read_text().splitlines():
            name, *columns = line.split()
            if name in cores:
                busy += int(columns[USER]) + int(columns[NICE]) + int(columns[SYSTEM])
                stolen += int(columns[STOLEN])
    except (OSError, ValueError, IndexError):
        return None
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    return MachineUse(wall_s=time.perf_counter(), busy_s=busy * tick, stolen_s=stolen * tick, own_s=time.process_time())


def used_since(before: MachineUse | None) -> MachineUse | None:
    """What happened since a moment; None where the system does not tell."""
    now = machine_use()
    return None if before is None or now is None else now.since(before)


def disturbance(of_ranks: Sequence[MachineUse | None]) -> Disturbance | None:
    """What disturbed the ranks of one machine, given the same span of time on each; None where it is not known."""
    known = [use for use in of_ranks if use is not None]
    if not known or len(known) < len(of_ranks) or known[0].wall_s <= 0:
        return None
    whole = known[0].wall_s * available_cores()
    others = known[0].busy_s - sum(use.own_s for use in known)
    return Disturbance(others_share=max(0.0, others) / whole, stolen_share=known[0].stolen_s / whole)
