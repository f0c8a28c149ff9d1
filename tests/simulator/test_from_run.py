"""A profile corrected by a run."""

import json
from contextlib import suppress

import numpy as np
import pytest
import yaml

from simulator.calibration.calibrate import CalibrateOptions, KernelTimes, findings
from simulator.calibration.cases import all_cases
from simulator.calibration.fitting import Measured
from simulator.calibration.from_run import correct_profile, fit_factors, read_run
from simulator.calibration.machine import find_machine
from simulator.calibration.messages import SIZES as PAYLOADS
from simulator.calibration.messages import MessageTimes
from simulator.calibration.process import available_cores
from simulator.calibration.profile_data import profile_data
from simulator.calibration.slowdown import Slowdown
from simulator.calibration.timing import Paces
from simulator.errors import InputError
from simulator.kernels import kernel_time
from simulator.profiles import load_profile, write_profile
from simulator.program import Collective, Kernel

SIZES = [(2e6, 3e4), (2e7, 3e5), (3e8, 4e6)]


@pytest.fixture
def profile(tmp_path):
    """A machine that follows the model exactly."""
    rows = tuple(
        Measured(kernel=case.kernel, dtype=case.dtype, flops=case.flops, bytes_moved=case.bytes_moved,
                 seconds=2e-5 + max(case.flops / 8e10, case.bytes_moved / bandwidth), cached=cached)
        for cached, bandwidth in ((False, 2e10), (True, 8e10))
        for case in all_cases()
    )  # fmt: skip
    kernels = KernelTimes(rows=rows, mixing={}, paces=Paces(median_s=0.02, spread=0.1))
    seconds = {kind: tuple(2e-4 + size / 2e9 for size in PAYLOADS) for kind in Collective}
    messages = [MessageTimes(processes=2, seconds=seconds, overlap=1.0, resident_bytes=2**28)]
    slowdown = [(2, Slowdown(mix=1.1))]
    found = findings(find_machine("cpu", 4), kernels, messages, slowdown, CalibrateOptions(processes=2))
    path = tmp_path / "local.yaml"
    write_profile(profile_data(found, "local"), path)
    return path


def write_run(path, profile, *, fixed=1.0, rest=1.0, message=1.0, backend="gloo", processes=1):
    """What a machine would show whose kernels and messages take so many times what the profile says."""
    hardware = load_profile(str(profile))
    slowdown = hardware.compute_slowdown(processes)
    overhead = slowdown * hardware.kernels[Kernel.MATMUL].overhead_s
    work = []
    for flops, moved in SIZES:
        predicted = slowdown * kernel_time(hardware, Kernel.MATMUL, "float32", flops, moved)
        took = fixed * overhead + rest * (predicted - overhead)
        turns = max(1.0, processes / available_cores())
        work.append({"kernel": "matmul", "dtype": "float32", "flops": flops, "bytes_moved": moved, "calls": 5,
                     "predicted_s": predicted, "measured_s": took, "busy_s": took / turns})  # fmt: skip
    messages = [{"collective": "all_reduce", "group_size": 2, "payload_bytes": 1e6, "calls": 4, "predicted_s": 1e-3,
                 "measured_s": message * 0.7e-3, "waited_s": message * 0.3e-3}]  # fmt: skip
    comparison = {"network": "zoo:mlp", "hardware": str(profile), "hardware_hash": hardware.hash,
                  "processes": processes, "work": work, "messages": messages}  # fmt: skip
    document = {"backend": backend, "comparison": comparison}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(("fixed", "rest"), [(1.0, 1.0), (1.0, 2.0), (3.0, 0.7), (0.5, 1.4)])
def test_factors_are_found(fixed, rest):
    base = np.array([1e-5, 1e-5, 1e-5, 1e-5])
    more = np.array([1e-7, 1e-5, 1e-3, 1e-2])
    a, b = fit_factors(base, more, fixed * base + rest * more, np.ones(4))
    assert a == pytest.approx(fixed, rel=0.1)
    assert b == pytest.approx(rest, rel=0.1)


def test_the_new_profile_predicts_what_was_measured(profile, tmp_path):
    run = write_run(tmp_path / "run.json", profile, fixed=1.5, rest=1.8, message=2.0)
    old, out = load_profile(str(profile)), tmp_path / "new.yaml"
    found = correct_profile([run], None, out)
    matmul = next(one for one in found.corrections if one.name == "matmul")
    assert matmul.after < 0.1 < matmul.before
    new = load_profile(str(out))
    for row in read_run(run).comparison.work:
        predicted = kernel_time(new, Kernel.MATMUL, "float32", row.flops, row.bytes_moved)
        assert predicted == pytest.approx(row.measured_s, rel=0.15)
    cached = "cached_bandwidth_bytes_per_s"
    speeds = [yaml.safe_load(path.read_text())["kernels"]["matmul"][cached]["value"] for path in (profile, out)]
    assert speeds[1] == pytest.approx(speeds[0] / matmul.rest, rel=1e-3)
    before, after = (
        next(t["seconds"] for t in yaml.safe_load(path.read_text())["collectives"] if t["collective"] == "all_reduce")
        for path in (profile, out)
    )
    assert after == pytest.approx([2.0 * seconds for seconds in before], rel=1e-2)
    assert "corrected by" in yaml.safe_load(out.read_text())["kernels"]["matmul"]["overhead_s"]["source"]
    assert load_profile(str(profile)).hash == old.hash


def test_a_run_as_predicted_changes_hardly_anything(profile, tmp_path):
    run = write_run(tmp_path / "run.json", profile)
    found = correct_profile([run], None, tmp_path / "new.yaml")
    assert [one.name for one in found.corrections if one.fixed is not None] == []
    assert all(one.rest == pytest.approx(1.0, rel=0.02) for one in found.corrections)


def test_several_runs_are_fitted_together(profile, tmp_path):
    """One and a half and four times as long: neither alone decides."""
    runs = [write_run(tmp_path / f"{rest}.json", profile, rest=rest, message=rest) for rest in (1.5, 4.0)]
    found = correct_profile(runs, None, tmp_path / "new.yaml")
    matmul = next(one for one in found.corrections if one.name == "matmul")
    assert 1.6 < matmul.rest < 3.9
    assert matmul.rows == 2 * len(SIZES)
    message = next(one for one in found.corrections if one.name.startswith("all_reduce"))
    assert message.rows == 2


def test_runs_that_contradict_each_other_correct_no_kernel(profile, tmp_path):
    runs = [write_run(tmp_path / f"{rest}.json", profile, rest=rest) for rest in (0.5, 1.0, 2.0)]
    found = correct_profile(runs, None, tmp_path / "new.yaml")
    matmul = [one for one in found.corrections if one.name == "matmul"]
    assert all(one.after < one.before for one in matmul)


def test_a_shipped_profile_is_corrected_by_its_name(tmp_path):
    out = tmp_path / "better.yaml"
    found = correct_profile([write_run(tmp_path / "run.json", "dgx-a100", rest=1.5, message=2.0)], None, out)
    assert next(one for one in found.corrections if one.name == "matmul").rest == pytest.approx(1.5, rel=0.1)
    assert load_profile(str(out)).hash == found.hardware.hash != load_profile("dgx-a100").hash


def test_sources_do_not_grow(profile, tmp_path):
    first = tmp_path / "first.yaml"
    correct_profile([write_run(tmp_path / "run.json", profile, rest=2.0)], None, first)
    second = tmp_path / "second.yaml"
    correct_profile([write_run(tmp_path / "again.json", first, rest=2.0)], None, second)
    source = yaml.safe_load(second.read_text())["kernels"]["matmul"]["overhead_s"]["source"]
    assert source.count("corrected by") == 1


def test_what_does_not_fit_is_refused(profile, tmp_path):
    run = write_run(tmp_path / "run.json", profile)
    with pytest.raises(InputError, match="is not the profile"):
        correct_profile([run], "dgx-a100", tmp_path / "new.yaml")
    (tmp_path / "plain.json").write_text('{"backend": "gloo", "comparison": null}')
    with pytest.raises(InputError, match="--measure"):
        read_run(tmp_path / "plain.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InputError, match="is not valid JSON"):
        read_run(tmp_path / "broken.json")
    document = json.loads(run.read_text())
    document["comparison"]["work"][0]["busy_s"] = -1
    run.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"comparison\.work\.0\.busy_s"):
        read_run(run)


@pytest.mark.parametrize("tiny", [0.0, 5e-324, 1e-300])
@pytest.mark.parametrize(
    "fields", [("measured_s", "waited_s"), ("predicted_s",), ("busy_s",), ("payload_bytes",), ("flops", "bytes_moved")]
)
@pytest.mark.filterwarnings("error")
def test_times_and_sizes_of_nothing_correct_nothing(profile, tmp_path, fields, tiny):
    path = write_run(tmp_path / "run.json", profile, fixed=1.5)
    document = json.loads(path.read_text())
    for row in (*document["comparison"]["work"], *document["comparison"]["messages"]):
        row.update({name: tiny for name in fields if name in row})
    path.write_text(json.dumps(document))
    with suppress(InputError):  # nothing is left to correct
        correct_profile([path], None, tmp_path / "new.yaml")
