"""What calibration found, as the plain data of a profile file: every number with its source."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.calibration.fitting import KernelFit
from simulator.calibration.machine import CalibratedDevices
from simulator.calibration.messages import SIZES, MessageTimes
from simulator.crowding import Conditions, Crowding
from simulator.program import Collective, Kernel

OVERLAPS_BELOW = 0.9
NARROWEST_INTERVAL = 0.05
WIDEST_LOW = 0.9
DIGITS = 4

Data = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Measured over predicted time of something held back from the fit, weighted by its time as a step does."""

    ratio: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that calibration measured and fitted.

    ``slowdown``, ``waiting``, which is a part of it, and ``class_slowdown`` pair process counts with factors;
    ``mixing``, seconds that calls cost more among others, is already in the overheads of the fits.
    """

    machine: CalibratedDevices
    fits: Mapping[Kernel, KernelFit]
    mixing: Mapping[Kernel, float]
    conditions: Conditions
    crowding: tuple[Crowding, ...] = ()
    best_flops_per_s: Mapping[str, float]
    messages: tuple[MessageTimes, ...]
    slowdown: tuple[tuple[int, float], ...]
    waiting: tuple[tuple[int, float], ...] = ()
    residuals: tuple[Residual, ...]
    origin: str
    class_slowdown: Mapping[Kernel, tuple[tuple[int, float], ...]] = field(default_factory=dict)


def profile_data(found: Findings, name: str) -> Data:
    """Arrange findings as `simulator.profiles.write_profile` takes them."""
    machine, measured = found.machine, f"measured: {found.origin}"
    most_reserved = machine.memory_bytes // 2
    bandwidth = max(fit.bytes_per_s for kernel, fit in found.fits.items() if kernel is not Kernel.VIEW)
    data: Data = {
        "format": "meshwright-profile",
        "version": 1,
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:100] or "local",
        "description": f"This machine: up to {machine.devices} devices, each {machine.device_name}.",
        "default_precision": {
            "value": "bfloat16" if machine.is_accelerator else "float32",
            "source": "assumed: what networks are usually trained in on such a device",
        },
        "overlaps_communication": _overlaps(found, measured),
        "device": {
            "name": machine.device_name[:100],
            "memory_bytes": {
                "value": machine.memory_bytes,
                "source": measured + ("" if machine.is_accelerator else "; an equal share of the available memory"),
            },
            "reserved_memory_bytes": {
                "value": min(max((group.resident_bytes for group in found.messages), default=0), most_reserved),
                "source": f"{measured}; resident memory of a worker with its libraries, before any tensor",
            },
            "memory_bandwidth_bytes_per_s": {
                "value": _rounded(bandwidth),
                "source": f"{measured}; the fastest of the fitted kernel classes",
            },
            "peak_flops": {
                dtype: {"value": _rounded(rate), "source": f"{measured}; the fastest matrix product"}
                for dtype, rate in sorted(found.best_flops_per_s.items())
            },
            **_caches(machine, measured),
        },
        "kernels": {kernel.value: _kernel(kernel, fit, bandwidth, found) for kernel, fit in found.fits.items()},
        "topology": _topology(found, measured, bandwidth),
        "uncertainty": _uncertainty(found),
        "collectives": _collectives(found.messages, measured),
        "conditions": _conditions(found.conditions, measured),
    }
    if found.slowdown:
        data["compute_slowdown"] = {
            "processes": [count for count, _ in found.slowdown],
            "factor": [_rounded(factor) for _, factor in found.slowdown],
            "by_kernel": {
                kernel.value: [_rounded(factor) for _, factor in factors]
                for kernel, factors in found.class_slowdown.items()
            },
            "waiting": [_rounded(factor) for _, factor in found.waiting],
            "source": measured,
        }
    if found.crowding:
        data["message_crowding"] = [
            {
                "group_size": one.group_size,
                "processes": one.processes,
                "delay_s": _rounded(one.delay_s),
                "stretch": _rounded(one.stretch),
                "source": f"{measured}; sums in groups while all compute and send",
            }
            for one in found.crowding
        ]
    workspace = {
        collective.value: _rounded(max(group.workspace.get(collective, 0.0) for group in found.messages))
        for group in found.messages[:1]
        for collective in group.workspace
    }
    if workspace:
        data["message_workspace"] = {"value": workspace, "source": f"{measured}; of several tensors in one message"}
    if found.messages:
        data["message_copies_apart"] = {"value": True, "source": f"{measured}; of tensors that need no packing"}
    return data


def _conditions(found: Conditions, measured: str) -> Data:
    return {
        "processes": [count for count, _ in found.paces],
        "pace_s": [_rounded(seconds) for _, seconds in found.paces],
        "pace_spread": _rounded(found.pace_spread),
        "others_share": _rounded(found.others_share),
        "stolen_share": _rounded(found.stolen_share),
        "source": f"{measured}; typical kernels, by so many processes together",
    }


def _caches(machine: CalibratedDevices, measured: str) -> Data:
    if machine.caches is None:
        return {}
    source = f"{measured}; as the processor says of itself"
    return {
        "own_cache_bytes": {"value": machine.caches.own_bytes, "source": source},
        "shared_cache_bytes": {"value": machine.caches.shared_bytes, "source": source},
    }


def _kernel(kernel: Kernel, fit: KernelFit, bandwidth: float, found: Findings) -> Data:
    source = f"fitted: {found.origin}; {fit.rows} rows, median error {fit.error:.0%}"
    part: Data = {
        "compute_efficiency": {"value": 1.0, "source": f"{source}; peak_flops holds the rates that are reached"},
        "bandwidth_efficiency": {"value": _rounded(min(1.0, max(1e-6, fit.bytes_per_s / bandwidth))), "source": source},
        "overhead_s": {
            "value": _rounded(fit.overhead_s),
            "source": f"{source}; {1e6 * found.mixing.get(kernel, 0.0):.2g} us more than in its own loop, as measured "
            "among others",
        },
    }
    if fit.serial_share:
        part["serial_share"] = {"value": fit.serial_share, "source": source}
    if fit.cached_bytes_per_s:
        part["cached_bandwidth_bytes_per_s"] = {"value": _rounded(fit.cached_bytes_per_s), "source": source}
    if fit.flops_per_s:
        part["peak_flops"] = {
            dtype: {"value": _rounded(rate), "source": source} for dtype, rate in fit.flops_per_s.items()
        }
    return part


def _topology(found: Findings, measured: str, bandwidth: float) -> Data:
    devices = found.machine.devices
    if found.messages:
        small, large = (found.messages[0].seconds[Collective.SEND][index] for index in (0, -1))
        rate, latency, source = SIZES[-1] / large, small, f"{measured}; sends between two devices"
    else:
        rate, latency, source = bandwidth, 0.0, "assumed: one device, nothing to join"
    counted = "measured: devices found" if found.machine.is_accelerator else "assumed: the most processes worth running"
    counted += f"; {found.origin}"
    return {
        "max_devices": {"value": devices, "source": counted},
        "devices_per_node": {"value": devices, "source": counted},
        "node_device_counts": {"value": list(range(1, devices + 1)), "source": counted},
        "levels": [
            {
                "name": "this machine",
                "size": {"value": devices, "source": counted},
                "bandwidth_bytes_per_s": {"value": _rounded(rate), "source": source},
                "latency_s": {"value": _rounded(latency), "source": source},
            }
        ],
    }


def _collectives(messages: Sequence[MessageTimes], measured: str) -> list[Data]:
    return [
        {
            "collective": collective.value,
            "group_size": group.processes,
            "payload_bytes": [float(size) for size in SIZES],
            "seconds": [_rounded(value) for value in group.seconds[collective]],
            "source": measured,
        }
        for group in messages
        for collective in Collective
    ]


def _uncertainty(found: Findings) -> Data:
    """Interval from the middle 80 % of what was held back, each row weighted by its time."""
    residuals = [*found.residuals, *_interpolation_residuals(found.messages)]
    ratios = np.array([residual.ratio for residual in residuals])
    weights = np.array([residual.weight for residual in residuals])
    order = np.argsort(ratios)
    reached = np.cumsum(weights[order]) / weights.sum()
    low, high = (float(ratios[order][np.searchsorted(reached, share)]) for share in (0.1, 0.9))
    return {
        "low": _rounded(min(WIDEST_LOW, max(NARROWEST_INTERVAL, 1 - low))),
        "high": _rounded(min(10.0, max(NARROWEST_INTERVAL, high - 1))),
        "label": "calibrated",
        "source": (
            f"fitted: {found.origin}; {len(residuals)} rows held back from the fits, "
            "their time-weighted 10 % and 90 % quantiles of error"
        ),
    }


def _interpolation_residuals(messages: Sequence[MessageTimes]) -> list[Residual]:
    """Predict every inner size of a collective from its neighbours, as a profile does between sizes."""
    found = []
    for group in messages:
        for seconds in group.seconds.values():
            points = list(zip(SIZES, seconds, strict=True))
            for before, (size, here), after in zip(points, points[1:], points[2:], strict=False):
                share = math.log(size / before[0]) / math.log(after[0] / before[0])
                between = before[1] ** (1 - share) * after[1] ** share
                found.append(Residual(ratio=here / between, weight=here))
    return found


def _overlaps(found: Findings, measured: str) -> Data:
    if not found.messages:
        return {"value": True, "source": "assumed: one device, so nothing could be measured"}
    share = float(np.median([group.overlap for group in found.messages]))
    text = f"{measured}; side by side they take {share:.2f} of one after the other"
    return {"value": share < OVERLAPS_BELOW, "source": text}


def _rounded(value: float) -> float:
    """Four significant digits: more would pretend."""
    return float(f"{value:.{DIGITS - 1}e}")
