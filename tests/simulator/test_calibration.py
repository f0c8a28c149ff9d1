import dataclasses
import math
import socket
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from simulator.calibration import timing
from simulator.calibration.calibrate import SIZES as CROWD_SIZES
from simulator.calibration.calibrate import (
    CalibrateOptions,
    CrowdTimes,
    GroupTimes,
    KernelRounds,
    KernelTimes,
    calibrate,
    findings,
    measure_kernels,
    timed_kinds,
)
from simulator.calibration.cases import all_cases
from simulator.calibration.fitting import Measured, fit_kernel, predict_row, split_held_out
from simulator.calibration.machine import USUAL_CACHES, MachineUse, find_machine, processor_caches
from simulator.calibration.messages import SIZES, MessageTimes
from simulator.calibration.process import available_cores
from simulator.calibration.profile_data import Residual, profile_data
from simulator.calibration.slowdown import Rounds, Slowdown, factors_by_count
from simulator.calibration.timing import Paces, cost_among_others, measure_case, middle_mean
from simulator.collectives import collective_time
from simulator.crowding import Conditions
from simulator.errors import InputError, UnsupportedError
from simulator.hardware import Caches, describe
from simulator.kernels import kernel_time
from simulator.profiles import load_profile, write_profile
from simulator.program import Collective, Kernel
from simulator.topology import group_shape

OPTIONS = CalibrateOptions(processes=4)


def synthetic_rows(overhead=2e-6, bandwidth=4e10, rates=(("float32", 1e11), ("float64", 4e10))):
    """Times that follow the model exactly, for every case that calibration would measure."""
    rates = dict(rates)
    for case in all_cases():
        rate = rates.get(case.dtype, 3e11)
        seconds = overhead + max(case.flops / rate, case.bytes_moved / bandwidth)
        yield Measured(
            kernel=case.kernel, dtype=case.dtype, flops=case.flops, bytes_moved=case.bytes_moved, seconds=seconds
        )


def synthetic_messages(processes):
    seconds = {kind: tuple(1e-4 * processes + size / 2e9 for size in SIZES) for kind in Collective}
    workspace = {Collective.ALL_GATHER: 1 + 1 / processes}
    return MessageTimes(
        processes=processes, seconds=seconds, overlap=1.0, resident_bytes=300 * 2**20, workspace=workspace
    )


@pytest.fixture
def found():
    machine = find_machine("cpu", 4)
    messages = [synthetic_messages(2), synthetic_messages(4)]
    kernels = KernelTimes(rows=tuple(synthetic_rows()), mixing={}, paces=Paces(median_s=0.02, spread=0.1))
    slowdown = [
        (count, Slowdown(mix=factor, classes={Kernel.OPTIMIZER: factor**1.5}, paces=paces))
        for count, factor, paces in (
            (2, 1.05, Paces(median_s=0.03, spread=0.2)),
            (4, 2.1, Paces(median_s=0.07, spread=0.9)),
            (8, 4.3, None),
        )
    ]
    return findings(machine, kernels, messages, slowdown, OPTIONS)


def test_fit_recovers_the_model():
    rows = [row for row in synthetic_rows() if row.kernel is Kernel.MATMUL]
    fit = fit_kernel(rows)
    assert fit.overhead_s == pytest.approx(2e-6, rel=0.05)
    assert fit.flops_per_s["float32"] == pytest.approx(1e11, rel=0.05)
    assert fit.flops_per_s["float64"] == pytest.approx(4e10, rel=0.05)
    assert fit.error < 0.02
    for row in rows:
        assert predict_row(fit, row) == pytest.approx(row.seconds, rel=0.1)


def test_fit_tells_the_speed_in_the_caches_from_that_beyond():
    beyond = [row for row in synthetic_rows() if row.kernel is Kernel.ELEMENTWISE]
    cached = [
        dataclasses.replace(row, seconds=2e-6 + row.bytes_moved / 1.6e11, cached=True)
        for row in beyond
        if row.bytes_moved < 8e6
    ]
    fit = fit_kernel([*beyond, *cached])
    assert fit.bytes_per_s == pytest.approx(4e10, rel=0.05)
    assert fit.cached_bytes_per_s == pytest.approx(1.6e11, rel=0.05)
    for row in (*beyond, *cached):
        assert predict_row(fit, row) == pytest.approx(row.seconds, rel=0.1)
    assert fit_kernel(beyond).cached_bytes_per_s == 0.0
    # Noise that makes kernels slower in the caches than beyond them leaves them as fast.
    slower = [dataclasses.replace(row, seconds=2 * row.seconds) for row in cached]
    odd = fit_kernel([*beyond, *slower])
    assert odd.cached_bytes_per_s >= odd.bytes_per_s


def test_caches_are_read_from_what_the_system_says(tmp_path):
    for number, (level, kind, size, cores) in enumerate(
        ((1, "Data", "32K", "0"), (1, "Instruction", "32K", "0"), (2, "Unified", "1024K", "0"),
         (3, "Unified", "32768K", "0-1"))
    ):  # fmt: skip
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", cores)):
            (folder / name).write_text(f"{text}\n")
    assert processor_caches(tmp_path) == Caches(own_bytes=1 << 20, shared_bytes=32 << 20)
    assert processor_caches(tmp_path / "none") == USUAL_CACHES


def test_fit_is_the_same_every_time():
    rows = [row for row in synthetic_rows() if row.kernel is Kernel.REDUCTION]
    assert fit_kernel(rows) == fit_kernel(rows)


def test_rows_are_either_fitted_or_held_back():
    rows = list(synthetic_rows())
    fitted, held = split_held_out(rows)
    assert len(fitted) + len(held) == len(rows)
    assert len(held) == len(rows) // 4


def test_every_kernel_class_has_cases():
    assert {case.kernel for case in all_cases()} == set(Kernel) - {Kernel.GROUPED_MATMUL}
    assert len(all_cases(accelerator=True)) > len(all_cases())


@pytest.mark.parametrize("case", all_cases()[::5], ids=lambda case: f"{case.name} {case.dtype}")
def test_cases_run(case):
    seconds = measure_case(case, torch.device("cpu"), budget_s=1e-4)
    assert 0 < seconds < 1


def test_fit_finds_work_that_does_not_overlap():
    rows = [row for row in synthetic_rows() if row.kernel is Kernel.CONVOLUTION]
    rates = {"float32": 1e11, "float64": 4e10}
    rows = [
        dataclasses.replace(row, seconds=2e-6 + row.flops / rates[row.dtype] + row.bytes_moved / 2e9) for row in rows
    ]
    fit = fit_kernel(rows)
    assert fit.serial_share == 1.0
    for row in rows:
        assert predict_row(fit, row) == pytest.approx(row.seconds, rel=0.1)
    assert fit_kernel([row for row in synthetic_rows() if row.kernel is Kernel.CONVOLUTION]).serial_share == 0.0


def test_profile_predicts_what_was_measured(found, tmp_path):
    path = tmp_path / "here.yaml"
    write_profile(profile_data(found, path.stem), path)
    hardware = load_profile(str(path))
    assert hardware.name == "here"
    assert hardware.default_precision == "float32"
    assert not hardware.overlaps_communication
    assert hardware.compute_slowdown(4) == pytest.approx(2.1)
    assert hardware.compute_slowdown(4, Kernel.MATMUL) == pytest.approx(2.1)
    assert hardware.compute_slowdown(4, Kernel.OPTIMIZER) == pytest.approx(2.1**1.5, rel=1e-3)
    assert hardware.message_workspace == {Collective.ALL_GATHER: 1.5}
    assert hardware.copies_apart
    # Where processes share cores, their turns and not the machine's speed make the spread.
    spread = {1: 0.1, 2: 0.2, 3: 0.2}.get(available_cores(), 0.9)
    assert hardware.conditions == Conditions(paces=((1, 0.02), (2, 0.03), (4, 0.07)), pace_spread=spread)
    for row in synthetic_rows():
        if row.kernel in (Kernel.MATMUL, Kernel.ELEMENTWISE, Kernel.NORMALIZATION):
            predicted = kernel_time(hardware, row.kernel, row.dtype, row.flops, row.bytes_moved)
            assert predicted == pytest.approx(row.seconds, rel=0.15)
    group = group_shape(hardware, 4, 1)
    for size in SIZES:
        predicted = collective_time(hardware, Collective.ALL_REDUCE, size, group)
        assert predicted == pytest.approx(4e-4 + size / 2e9, rel=1e-3)


def test_every_number_has_a_source_without_a_host(found, tmp_path):
    path = tmp_path / "here.yaml"
    rows = describe(write_profile(profile_data(found, "here"), path))
    assert all(row.source.split(":")[0] in ("measured", "fitted", "assumed") for row in rows)
    assert any("meshwright calibrate --device cpu --processes 4" in row.source for row in rows)
    assert socket.gethostname() not in path.read_text() or socket.gethostname() == "localhost"


def test_interval_covers_what_was_held_back(found):
    wide = [Residual(ratio=ratio, weight=1.0) for ratio in (0.5, 0.9, 1.0, 1.1, 1.8)] * 20
    data = profile_data(dataclasses.replace(found, residuals=tuple(wide), messages=()), "here")
    assert data["uncertainty"]["low"] == pytest.approx(0.5)
    assert data["uncertainty"]["high"] == pytest.approx(0.8)
    assert data["uncertainty"]["label"] == "calibrated"


def test_odd_file_names_become_profile_names(found):
    assert profile_data(found, "_my profile!")["name"] == "my-profile-"


@pytest.mark.parametrize("processes", [0, 1, 65])
def test_impossible_numbers_of_processes(processes):
    with pytest.raises(InputError, match=f"--processes {processes}"):
        calibrate(CalibrateOptions(processes=processes))


def test_devices_that_are_not_there():
    with pytest.raises(InputError, match="'tpu' is not one of"):
        calibrate(CalibrateOptions(device="tpu"))
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="--device cpu"):
            calibrate(CalibrateOptions(device="cuda"))
    with pytest.raises(UnsupportedError, match="npu"):
        calibrate(CalibrateOptions(device="npu"))


def test_middle_mean_follows_how_often_two_modes_come_and_no_outlier():
    soon, late = [0.4] * 20, [1.2] * 20
    assert middle_mean([3.0]) == 3.0
    assert middle_mean([*soon, *late]) == pytest.approx(0.8)
    assert middle_mean([*soon, 50.0, 60.0]) == pytest.approx(0.4)


def rounds(ranks, factor, speeds, skews=1.0):
    """Rounds of a machine whose speed changes from each to the next."""
    seconds = 0.01 / np.asarray(speeds)
    return Rounds(alone=seconds, together=factor * seconds * np.broadcast_to(skews, (ranks, 1)))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_slowdown_is_the_same_however_the_speed_of_the_machine_changes(ranks):
    generator = np.random.default_rng(0)
    steady, changing = (rounds(ranks, 1.3, speeds) for speeds in (np.ones(16), generator.uniform(0.4, 2.0, 16)))
    drifting = rounds(ranks, 1.3, np.linspace(1.0, 3.0, 16))
    for found in (steady, changing, drifting):
        assert found.factor == pytest.approx(1.3)
        assert found.skew == pytest.approx(1.0)
        assert found.agree


def test_rounds_that_were_disturbed_for_a_while_are_run_again():
    calm, disturbed = rounds(2, 1.1, np.ones(16)), rounds(2, 1.1, np.ones(16))
    disturbed.together[:, 8:] *= 1.9
    assert calm.agree
    assert not disturbed.agree


def test_the_slowest_rank_counts_for_all():
    assert rounds(2, 1.0, np.ones(16), [[1.0], [1.5]]).skew == pytest.approx(1.2)


def test_more_processes_never_slow_each_other_less():
    found = [
        (count, Slowdown(mix=mix, classes={Kernel.MATMUL: product}))
        for count, mix, product in ((2, 1.2, 0.97), (4, 1.15, 2.0))
    ]
    factors = factors_by_count(found)
    assert factors[None] == ((1, 1.0), (2, 1.2), (4, 1.2))
    assert factors[Kernel.MATMUL] == ((1, 1.0), (2, 1.0), (4, 2.0))
    assert factors_by_count([]) == {}


def test_calls_among_others_take_no_less(monkeypatch):
    monkeypatch.setattr(timing, "INTERLEAVED_ROUNDS", (2, 2))
    cases = [case for case in all_cases() if case.name in ("add 256", "view 2")]
    more = cost_among_others(cases, torch.device("cpu"))
    assert len(more) == len(cases)
    assert all(seconds >= 0 for seconds in more)


def test_what_calls_cost_among_others_is_added_once_to_each_class():
    kernels = KernelTimes(rows=tuple(synthetic_rows()), mixing={}, paces=Paces(median_s=0.02, spread=0.1))
    mixed = dataclasses.replace(kernels, mixing={Kernel.MATMUL: 3e-6})
    plain, more = (findings(find_machine("cpu", 4), of, [], [], OPTIONS).fits for of in (kernels, mixed))
    assert more[Kernel.MATMUL].overhead_s == pytest.approx(plain[Kernel.MATMUL].overhead_s + 3e-6)
    assert more[Kernel.ELEMENTWISE] == plain[Kernel.ELEMENTWISE]


@pytest.mark.slow
def test_this_machine(tmp_path):
    shares = []
    path = tmp_path / "local.yaml"
    calibrate(CalibrateOptions(processes=2, out=path), lambda share, _: shares.append(share))
    hardware = load_profile(str(path))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert 1e8 < hardware.peak_flops["float32"] < 1e14
    assert 1e8 < hardware.memory_bandwidth < 1e13
    assert {table.group_size for table in hardware.collective_tables} == {2}
    assert all(math.isfinite(model.overhead_s) for model in hardware.kernels.values())


def test_what_workers_measured_stands_in_the_profile(tmp_path, monkeypatch):
    """Workers that measured at once: other programs took a quarter of the cores from the four, and a hundredth else."""
    asked = []
    exact = {(case.name, case.dtype): row for case, row in zip(all_cases(), synthetic_rows(), strict=True)}

    def run(function, arguments, processes):
        asked.append((function.__name__, processes))
        others = 0.25 if processes == 4 else 0.01
        cores = available_cores()
        own = 10.0 * cores * (1 - others) / processes
        use = MachineUse(wall_s=10.0, busy_s=10.0 * cores, stolen_s=0.0, own_s=own)
        paces = Paces(median_s=0.02 * processes, spread=0.1)
        if function is measure_kernels:
            share = 4 / 3 if asked.count(("measure_kernels", 1)) == 1 else 2 / 3  # the machine has become faster
            kept = tuple((share * exact[case.name, case.dtype].seconds,) for case, _ in timed_kinds("cpu"))
            return [KernelRounds(seconds=kept, mixing={}, paces=(0.02 * share, 0.02 * share), use=use)]
        with_messages, with_slowdown = arguments[2:]
        among = tuple(1e-3 + 2 * (2e-4 + size / 2e9) for size in CROWD_SIZES)
        found = GroupTimes(
            messages=synthetic_messages(processes) if with_messages else None,
            slowdown=Slowdown(mix=0.6 * processes, skew=1 + 0.01 * processes, paces=paces) if with_slowdown else None,
            crowds=(CrowdTimes(group_size=2, processes=processes, seconds=among),) if processes > 2 else (),
            use=use,
        )
        return [found] * processes

    monkeypatch.setattr("simulator.calibration.calibrate.run_workers", run)
    calibrate(CalibrateOptions(processes=4, out=tmp_path / "local.yaml"))
    hardware = load_profile(str(tmp_path / "local.yaml"))
    groups = [("measure_group", count) for count in (2, 4, 8)]
    assert asked == [("measure_kernels", 1), *groups, ("measure_kernels", 1)]
    row = exact["mm 512x512x512", "float32"]
    found = kernel_time(hardware, row.kernel, row.dtype, row.flops, row.bytes_moved)
    assert found == pytest.approx(row.seconds, rel=0.1)
    assert {table.group_size for table in hardware.collective_tables} == {2, 4}
    assert hardware.slowdown_table == ((1, 1.0), (2, 1.2), (4, 2.4), (8, 4.8))
    assert hardware.waiting_table == ((1, 1.0), (2, 1.02), (4, 1.04), (8, 1.08))
    assert [(one.group_size, one.processes) for one in hardware.crowding] == [(2, 4), (2, 8)]
    assert hardware.crowding[0].delay_s == pytest.approx(1e-3, rel=0.1)
    assert hardware.conditions is not None
    assert hardware.conditions.paces == ((1, 0.02), (2, 0.04), (4, 0.08), (8, 0.16))
    assert hardware.conditions.others_share == pytest.approx(0.25)
    assert "other programs took 25% of the cores' time" in hardware.conditions.warning


@pytest.mark.parametrize("place", ["missing/local.yaml", "folder", "/proc/local.yaml"])
def test_a_place_that_cannot_be_written_is_refused_before_measuring(place, tmp_path, monkeypatch):
    def measured(*_):
        raise AssertionError("measured first")

    monkeypatch.setattr("simulator.calibration.calibrate.run_workers", measured)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        calibrate(CalibrateOptions(out=tmp_path / place))


def test_results_of_kernels_taken_in_turn_stand_until_their_next_turn():
    """Else all of them would be written to one block of memory, which stays in the caches as no gradient does."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most: list[int] = []

    def twice(values):
        result = values + values
        alive.append(weakref.ref(result))
        most.append(sum(one() is not None for one in alive))
        return result

    case = next(case for case in all_cases() if case.name == "relu 4096")
    case = dataclasses.replace(case, operator=twice)
    measure_case(case, torch.device("cpu"), budget_s=1e-4, turn_bytes=int(5 * case.bytes_moved))
    assert max(most) == 5 + 1  # the new one before the old one goes
    alive.clear(), most.clear()
    measure_case(case, torch.device("cpu"), budget_s=1e-4, turn_bytes=0)
    assert max(most) == 1


def counted_case():
    """A kernel that notes which of its inputs it was called with."""
    seen: list[int] = []

    def noted(values):
        seen.append(values.data_ptr())
        return values + values

    case = next(case for case in all_cases() if case.name == "relu 4096")
    return dataclasses.replace(case, operator=noted), seen


def test_every_call_takes_the_inputs_whose_turn_it_is():
    """Else a kernel that is called twice at a time would find the first two in the caches, however much memory lies."""
    case, seen = counted_case()
    run = timing.repeated_case(case, torch.device("cpu"), turn_bytes=int(6 * case.bytes_moved))
    order = seen[:]
    assert len(set(order)) == len(order) == 6
    seen.clear()
    for count in (1, 2, 2, 2, 2, 2, 1):
        run(count)
    assert seen == [*order, *order]


@pytest.mark.parametrize(("once", "called"), [(0.004, 8), (0.001, 13), (0.0001, 100)])
def test_only_inputs_that_have_a_turn_are_called_before_a_kernel_is_timed(once, called, monkeypatch):
    case, seen = counted_case()
    clock = lambda: once * len(seen)  # noqa: E731
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock, process_time=clock))
    turn_bytes = int(100 * case.bytes_moved)
    run = timing.repeated_case(case, torch.device("cpu"), turn_bytes=turn_bytes, budget_s=0.0101)
    primed = set(seen)
    assert len(primed) == len(seen) == called
    timing.repeated_seconds(run, torch.device("cpu"), 0.0101)
    assert set(seen) == primed


@pytest.mark.parametrize("name", ["adam 65536", "sgd 65536", "add in place 65536", "add 65536"])
def test_inputs_taken_in_turn_fill_the_memory_that_they_are_taken_from(name):
    """What a kernel reads and writes in place lies there once, though it counts twice as moved."""
    case = next(case for case in all_cases() if case.name == name and case.dtype == "float32")
    wanted = 8 << 20
    sets = timing._input_sets(case, torch.device("cpu"), wanted)
    results = 4 * 65536 if name == "add 65536" else 0
    held = sum(sum(tensor.nbytes for tensor in inputs) + results for inputs in sets)
    assert 0.8 * wanted < held <= wanted
