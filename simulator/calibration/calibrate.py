"""Measuring a machine from kernels to collectives, and writing what was found as a hardware profile."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist

from simulator.calibration import messages
from simulator.calibration.cases import KernelCase, all_cases
from simulator.calibration.fitting import KernelFit, Measured, fit_kernel, predict_row, split_held_out
from simulator.calibration.launch import run_workers
from simulator.calibration.machine import (
    CalibratedDevices,
    Disturbance,
    MachineUse,
    disturbance,
    find_machine,
    machine_use,
    processor_caches,
    used_since,
)
from simulator.calibration.messages import (
    TIMEOUT,
    BehindComputation,
    MessageTimes,
    calls_of,
    gathered_calls,
    measure_messages,
    own_device,
)
from simulator.calibration.process import available_cores, return_free_memory
from simulator.calibration.profile_data import Findings, Residual, profile_data
from simulator.calibration.slowdown import Slowdown, SlowdownTimer, core_turns, factors_by_count
from simulator.calibration.timing import Pace, Paces, cost_among_others, measure_case, middle_mean, paces_of
from simulator.crowding import Conditions, Crowding
from simulator.errors import InputError
from simulator.profiles import write_profile
from simulator.program import WIDER_CLASS, Collective, Kernel
from simulator.timing import ALL_BELOW
from simulator.whole_file import check_writable

SIZES = (1 << 10, 1 << 17, 1 << 22)
"""Payloads in bytes, of those that groups alone are timed with: from what takes a turn to what takes many."""
CALLS = 24
LARGEST_STRETCH = 50.0
TRIED = 200
"""Delays and factors that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdTimes:
    """Seconds of sums of `SIZES` in groups of a size while all groups of so many processes compute and send."""

    group_size: int
    processes: int
    seconds: tuple[float, ...]


def measure_crowds(device: torch.device, sizes: Sequence[int]) -> tuple[CrowdTimes, ...]:
    """Time sums in groups of some sizes, as one rank of all; every group goes on for itself."""
    return tuple(_crowd(device, size) for size in sizes if size < dist.get_world_size())


def _crowd(device: torch.device, size: int) -> CrowdTimes:
    world, rank = dist.get_world_size(), dist.get_rank()
    members = [range(first, first + size) for first in range(0, world, size)]
    groups = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in members]
    mine = groups[rank // size]
    assert isinstance(mine, dist.ProcessGroup)
    behind, found = BehindComputation(device), list[float]()
    for payload in SIZES:
        call = calls_of(payload, device, mine)[Collective.ALL_REDUCE]
        call(0)
        behind.begin()
        calls = gathered_calls([behind.call(partial(call, number)) for number in range(CALLS)], device)
        found.append(fmean(calls.of(ranks).direct_seconds() for ranks in members))
    return CrowdTimes(group_size=size, processes=world, seconds=tuple(found))


def crowding(crowds: Sequence[CrowdTimes], alone: Sequence[MessageTimes]) -> tuple[Crowding, ...]:
    """What messages cost more in crowds than among as many processes alone, where these were timed."""
    known = {group.processes: group.seconds[Collective.ALL_REDUCE] for group in alone}
    places = [messages.SIZES.index(size) for size in SIZES]
    found = []
    for crowd in crowds:
        if crowd.group_size in known:
            delay, stretch = fit_crowding([known[crowd.group_size][place] for place in places], crowd.seconds)
            found.append(
                Crowding(group_size=crowd.group_size, processes=crowd.processes, delay_s=delay, stretch=stretch)
            )
    return tuple(found)


def fit_crowding(alone: Sequence[float], among: Sequence[float]) -> tuple[float, float]:
    """Delay and factor that bring times of messages alone nearest to those among others, by the mean of logarithms.

    Neither makes a message shorter.
    """
    times, seen = np.array(alone), np.array(among)
    stretches = np.geomspace(1.0, LARGEST_STRETCH, TRIED)
    delays = np.concatenate([[0.0], np.geomspace(1e-6, max(float(seen.max()), 2e-6), TRIED)])
    found = delays[:, None, None] + stretches[:, None] * times
    error = np.abs(np.log(found / seen)).mean(axis=2)
    delay, stretch = np.unravel_index(int(error.argmin()), error.shape)
    return float(delays[delay]), float(stretches[stretch])


MOST_ROUNDS = 3
AGREEMENT = 1.1
"""Longest over shortest time of a kernel above which it is measured again."""
KERNELS_S = 20.0
"""After so many seconds no further round of kernels begins."""
PACED = 20
"""Kernels between two times of the pace, which is to be that of their time."""
SMALLEST_OF_CLASS = 2
"""Kernels of each class, those of the fewest bytes, that tell what a call costs more among others."""
FEWEST_ROWS_TO_HOLD_BACK = 8
SLOWDOWN_COUNTS = (2, 4, 8)
CROWDS = (2, 4)
"""Sizes of groups whose messages are timed beside other groups."""
LARGEST_GROUP = 64

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What to measure: a kind of device, collectives in groups of up to `processes`, and where to write."""

    device: str = "cpu"
    processes: int = 4
    out: str | Path | None = None


def calibrate(options: CalibrateOptions, progress: Progress = lambda share, text: None) -> dict[str, object]:
    """Measure this machine and return its profile as plain data; write it where `options.out` says.

    Parameters
    ----------
    options : CalibrateOptions
        What to measure.
    progress : callable
        Told the share done, from 0 to 1, and what comes next.

    Raises
    ------
    UnsupportedError
        There is no device of this kind.
    InputError
        `options.out` cannot be written; found before anything is measured.
    """
    if not 2 <= options.processes <= LARGEST_GROUP:
        raise InputError(
            f"--processes {options.processes} is outside 2 to {LARGEST_GROUP}; collectives are measured in groups of "
            "2, 4, … up to this number"
        )
    if options.out is not None:
        check_writable(options.out)
    machine = find_machine(options.device, options.processes)
    groups = [size for size in (2, 4, 8, 16, 32, 64) if size <= min(options.processes, machine.devices)]
    shared = () if machine.is_accelerator else SLOWDOWN_COUNTS
    counts = sorted({*groups, *shared})
    parts = 3.0 + len(counts)
    progress(0.0, "kernels")
    rounds = [run_workers(measure_kernels, (machine.device_type,), 1)[0]]
    done, found, disturbances = 1.5, list[GroupTimes](), list[Disturbance | None]()
    for count in counts:
        progress(done / parts, f"{count} processes: collectives, and sharing the cores")
        orders = (machine.device_type, machine.backend, count in groups, count in shared)
        ranks = run_workers(measure_group, orders, count)
        found.append(ranks[0])
        disturbances.append(disturbance([rank.use for rank in ranks]))
        done += 1
    progress(done / parts, "kernels again")
    rounds += run_workers(measure_kernels, (machine.device_type,), 1)
    disturbances += [disturbance([one.use]) for one in rounds]
    kernels = kernel_times(machine.device_type, rounds)
    messages = [group.messages for group in found if group.messages is not None]
    slowdown = [(count, group.slowdown) for count, group in zip(counts, found, strict=True) if group.slowdown]
    measured = findings(machine, kernels, messages, slowdown, options, disturbances)
    crowds = [crowd for group in found for crowd in group.crowds]
    data = profile_data(replace(measured, crowding=crowding(crowds, messages)), Path(options.out or "local").stem)
    if options.out is not None:
        write_profile(data, options.out)
    progress(1.0, "done")
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """What a group of processes measured, None of what it was not asked for, and what this one's cores did."""

    messages: MessageTimes | None
    slowdown: Slowdown | None
    crowds: tuple[CrowdTimes, ...] = ()
    use: MachineUse | None = None


def measure_group(device_type: str, backend: str, messages: bool, slowdown: bool) -> GroupTimes:
    """Measure collectives and, before and after them, how processes slow each other down, as one rank of a group."""
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        device = own_device(device_type)
        before = machine_use()
        timer = SlowdownTimer(device) if slowdown else None
        if timer is not None:
            timer.time()
            return_free_memory()  # which messages would count as theirs
        calls = measure_messages(device) if messages else None
        crowds = measure_crowds(device, CROWDS) if slowdown else ()
        if timer is not None:
            timer.time()
        shared = timer.finish() if timer is not None else None
        waits = shared.waits if shared is not None else core_turns(device)
        return GroupTimes(
            messages=calls.times(waits) if calls is not None else None,
            slowdown=shared,
            crowds=crowds,
            use=used_since(before),
        )
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRounds:
    """Some rounds of kernels: seconds of each of `timed_kinds`, and the pace.

    ``mixing`` is how many seconds a call of each class takes longer among others, ``use`` what the cores did meanwhile.
    """

    seconds: tuple[tuple[float, ...], ...]
    mixing: Mapping[Kernel, float]
    paces: tuple[float, ...]
    use: MachineUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Every kernel measured, what a call of each class costs more among others, and the machine's pace meanwhile."""

    rows: tuple[Measured, ...]
    mixing: Mapping[Kernel, float]
    paces: Paces


def timed_kinds(device_type: str) -> list[tuple[KernelCase, bool]]:
    """Every kernel case, and again, marked, what fits into the caches of a processor."""
    cases = all_cases(accelerator=device_type != "cpu")
    most = 0.0 if device_type != "cpu" else ALL_BELOW * sum(astuple(processor_caches()))
    return [(case, False) for case in cases] + [(case, True) for case in cases if 0 < case.bytes_moved <= most]


def measure_kernels(device_type: str) -> KernelRounds:
    """Measure every kernel, what its calls cost more among others, and the pace.

    On a processor, what fits into its caches is measured in them as well. While there is time there are more rounds;
    kernels whose rounds agree are measured no more, so that there is time for the others.
    """
    device = torch.device(device_type, 0) if device_type != "cpu" else torch.device("cpu")
    begin, before = time.perf_counter(), machine_use()
    kinds = timed_kinds(device_type)
    times: list[list[float]] = [[] for _ in kinds]
    pace, paces = Pace(device), list[float]()
    rounds = 0
    while rounds < 1 or (rounds < MOST_ROUNDS and time.perf_counter() - begin < KERNELS_S):
        timed = 0
        for (case, cached), found in zip(kinds, times, strict=True):
            if len(found) < 2 or max(found) > AGREEMENT * min(found):
                found.append(measure_case(case, device, turn_bytes=0 if cached else None))
                if timed % PACED == 0:
                    paces.append(pace.seconds())
                timed += 1
        rounds += 1
    return KernelRounds(
        seconds=tuple(map(tuple, times)),
        mixing=_mixing([case for case, cached in kinds if not cached], device) if device_type == "cpu" else {},
        paces=tuple(paces),
        use=used_since(before),
    )


def _mixing(cases: Sequence[KernelCase], device: torch.device) -> dict[Kernel, float]:
    """Seconds that a call of each class takes longer among others, of its smallest kernels."""
    small: dict[Kernel, list[KernelCase]] = {}
    for case in sorted(cases, key=lambda case: case.bytes_moved):
        of_class = small.setdefault(case.kernel, [])
        if case.dtype == "float32" and len(of_class) < SMALLEST_OF_CLASS:
            of_class.append(case)
    more = iter(cost_among_others([case for of_class in small.values() for case in of_class], device))
    return {kernel: fmean(next(more) for _ in of_class) for kernel, of_class in small.items() if of_class}


def kernel_times(device_type: str, rounds: Sequence[KernelRounds]) -> KernelTimes:
    """What rounds at several times tell together: a machine that was faster for a while counts as long as it was."""
    rows = [
        replace(_measured(case, fmean(middle_mean(one.seconds[place]) for one in rounds)), cached=cached)
        for place, (case, cached) in enumerate(timed_kinds(device_type))
    ]
    return KernelTimes(
        rows=tuple(rows),
        mixing={kernel: fmean(one.mixing[kernel] for one in rounds) for kernel in rounds[0].mixing},
        paces=paces_of([[seconds for one in rounds for seconds in one.paces]]),
    )


def _measured(case: KernelCase, seconds: float) -> Measured:
    return Measured(
        kernel=case.kernel, dtype=case.dtype, flops=case.flops, bytes_moved=case.bytes_moved, seconds=seconds
    )


def findings(
    machine: CalibratedDevices,
    kernels: KernelTimes,
    messages: Sequence[MessageTimes],
    slowdown: Sequence[tuple[int, Slowdown]],
    options: CalibrateOptions,
    disturbances: Sequence[Disturbance | None] = (),
) -> Findings:
    """Fit what was measured, and check the fits on rows held back.

    What calls cost more among others is added to the overheads of a kernel's own loop: so they are in a step.
    """
    rows, mixing = kernels.rows, kernels.mixing
    fits: dict[Kernel, KernelFit] = {}
    residuals: list[Residual] = []
    for kernel in Kernel:
        of_kernel = [row for row in rows if row.kernel is kernel]
        if not of_kernel and kernel in WIDER_CLASS:
            continue  # as fast as the wider class
        fitted, held = split_held_out(of_kernel)
        if len(of_kernel) < FEWEST_ROWS_TO_HOLD_BACK:
            fitted, held = of_kernel, []
        fit = fit_kernel(fitted)
        residuals += [Residual(ratio=row.seconds / predict_row(fit, row), weight=row.seconds) for row in held]
        fits[kernel] = replace(fit, overhead_s=fit.overhead_s + mixing.get(kernel, 0.0))
    best: dict[str, float] = {}
    for row in rows:
        if row.kernel is Kernel.MATMUL:
            best[row.dtype] = max(best.get(row.dtype, 0.0), row.flops / row.seconds)
    command = f"`meshwright calibrate --device {options.device} --processes {options.processes}`"
    factors = factors_by_count(slowdown)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return Findings(
        machine=machine,
        fits=fits,
        mixing=mixing,
        conditions=_conditions(kernels, slowdown, [d for d in disturbances if d is not None]),
        best_flops_per_s=best,
        messages=tuple(messages),
        slowdown=factors.get(None, ()),
        waiting=((1, 1.0), *((count, found.skew) for count, found in slowdown)),
        class_slowdown={kernel: pairs for kernel, pairs in factors.items() if kernel is not None},
        residuals=tuple(residuals),
        origin=f"{command} on {today}, {machine.device_name}, torch {torch.__version__}",
    )


def _conditions(
    kernels: KernelTimes, slowdown: Sequence[tuple[int, Slowdown]], disturbances: Sequence[Disturbance]
) -> Conditions:
    """How fast and how quiet the machine was: what disturbed the most disturbed part of calibration counts."""
    paces = [(1, kernels.paces), *((count, found.paces) for count, found in slowdown if found.paces is not None)]
    return Conditions(
        paces=tuple((count, found.median_s) for count, found in paces),
        pace_spread=max(found.spread for count, found in paces if count <= available_cores()),
        others_share=max((found.others_share for found in disturbances), default=0.0),
        stolen_share=max((found.stolen_share for found in disturbances), default=0.0),
    )
