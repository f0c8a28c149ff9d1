"""Calibration: folds know nothing of their source, intervals hold what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.software_file import ANY
from planner.cost.training_run import TrainingRun, TrainingSetup
from planner.published.calibrating import Calibration, Folds, calibrate_steps, held_out_predictions, intervals, usable
from planner.published.estimate.layered import lookup
from planner.published.estimate.predict import predict_runs
from planner.published.fitting import DEVICE_PRIORS, STACK_PRIORS
from planner.published.reading import MeasuredRow
from tests.planner.published.estimate.transformers import SOFTWARE, profile
from tests.planner.published.made_steps import made_rows

ROWS = made_rows(noise=0.05)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate_steps(ROWS)


def test_rows_that_did_not_run_teach_nothing() -> None:
    row = ROWS[0]
    assert usable(row)
    for other in (
        replace(row, outcome="oom"), replace(row, measured_time_s=float("nan")), replace(row, run=None),
    ):  # fmt: skip
        assert not usable(other)
    assert len(Folds([*ROWS, replace(row, outcome="oom")]).rows) == len(ROWS)


def test_a_fold_does_not_see_its_source() -> None:
    plain = Folds(ROWS).without("two").coefficients
    slower = [replace(row, measured_time_s=1.3 * row.measured_time_s) if row.source == "two" else row for row in ROWS]
    changed = Folds(slower).without("two").coefficients
    for owner, values in plain.stacks.items():
        assert changed.stacks[owner] == pytest.approx(dict(values), rel=0.02), owner
    for owner, values in plain.devices.items():
        assert changed.devices[owner] == pytest.approx(dict(values), rel=0.02), owner


def test_what_only_the_source_knows_goes_back_to_the_prior() -> None:
    rows = [row for row in ROWS if row.source in ("one", "two")]
    rows += [replace(row, source="alone") for row in ROWS if row.source == "four"]
    folds = Folds(rows)
    everything, without = folds.everything().coefficients, folds.without("alone").coefficients
    priors = {"memory": STACK_PRIORS["memory"].centre, "experts": STACK_PRIORS["experts"].centre}
    for name, prior in priors.items():
        assert without.stacks["eager"][name] == pytest.approx(prior, rel=0.01)
    assert everything.stacks["eager"]["memory"] > 1.2 * priors["memory"]
    lonely = Folds([row for row in ROWS if row.source == "one"]).without("one").coefficients
    assert lonely.devices["ampere"]["inside"] == pytest.approx(DEVICE_PRIORS["inside"].centre, rel=0.01)


def test_residuals_are_those_of_the_software(calibration: Calibration) -> None:
    runs = [row.run for row in calibration.rows if row.run is not None]
    software = replace(calibration.software, intervals=SOFTWARE.intervals)
    seconds = np.array([found.step_time_s for found in predict_runs(runs, software)])
    measured = np.array([row.measured_time_s for row in calibration.rows])
    assert np.log(seconds / measured) == pytest.approx(calibration.residuals)
    assert np.abs(calibration.residuals).mean() < 0.06
    assert np.abs(calibration.held_out).mean() > np.abs(calibration.residuals).mean()


def test_held_out_predictions_are_those_of_the_folds(calibration: Calibration) -> None:
    found = {run: prediction.step_time_s for run, prediction in held_out_predictions(ROWS, calibration.software)}
    for row, residual in zip(calibration.rows, calibration.held_out, strict=True):
        assert row.run is not None
        assert np.log(found[row.run] / row.measured_time_s) == pytest.approx(residual, abs=1e-6)


def test_intervals_hold_nine_of_ten() -> None:
    rows = ROWS * 20
    random = np.random.default_rng(1)
    residuals, held_out = 0.1 * random.standard_normal((2, len(rows))) + 0.05
    found = intervals(rows, residuals, held_out)
    assert set(found) == {
        ("transformer", family, stack)
        for family in ("ampere", "hopper", ANY)
        for stack in ("megatron", "eager", ANY)
    }  # fmt: skip
    fresh = np.exp(-(0.1 * random.standard_normal(100_000) + 0.05))  # measured over predicted
    for interval in found.values():
        inside = np.mean((interval.low <= fresh) & (fresh <= interval.high))
        assert inside == pytest.approx(0.9, abs=0.03)


def test_few_rows_have_no_interval_of_their_own() -> None:
    found = intervals(ROWS[:5], np.full(5, 0.1), np.full(5, np.nan))
    assert set(found) == {("transformer", ANY, ANY)}
    # A prediction that is always too long still lies in its interval.
    assert found["transformer", ANY, ANY].high == 1.0


def test_networks_of_layers_alone_can_be_calibrated() -> None:
    network = lookup("resnet50")
    assert network is not None
    rows = [
        MeasuredRow(
            row_id=str(batch), source=source, file="made.csv", line=1, measured_time_s=0.002 * batch,
            run=TrainingRun(
                network=network, hardware=profile("dgx-a100"),
                setup=TrainingSetup(devices=1, micro_batch=batch, precision="fp16", stack="eager"),
            ),
        )
        for batch, source in ((32, "one"), (64, "one"), (128, "two"))
    ]  # fmt: skip
    found = calibrate_steps(rows)
    assert np.isfinite(found.residuals).all()
    assert found.software.coefficients.stacks == {}
