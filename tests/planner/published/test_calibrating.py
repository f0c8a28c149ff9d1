"""Calibration: folds know nothing of their source, intervals hold what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.software_file import ANY, shipped_software
from planner.cost.training_run import TrainingRun, TrainingSetup
from planner.published.calibrating import Calibration, calibrate_steps, intervals, left_out_files, planned_folds, usable
from planner.published.fitting import DEVICE_PRIORS, STACK_PRIORS
from planner.published.layered import lookup
from planner.published.reading import MeasuredRow
from tests.planner.cost.transformers import profile
from tests.planner.published.made_steps import made_folds, made_rows

ROWS = made_rows(noise=0.05)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate_steps(made_folds(ROWS))


def test_rows_that_did_not_run_teach_nothing() -> None:
    row = ROWS[0]
    assert usable(row)
    for other in (
        replace(row, outcome="oom"), replace(row, measured_time_s=float("nan")), replace(row, run=None),
    ):  # fmt: skip
        assert not usable(other)


def test_a_fold_does_not_see_its_source() -> None:
    plain = made_folds(ROWS).without("two").coefficients
    slower = [replace(row, measured_time_s=1.3 * row.measured_time_s) if row.source == "two" else row for row in ROWS]
    changed = made_folds(slower).without("two").coefficients
    for owner, values in plain.stacks.items():
        assert changed.stacks[owner] == pytest.approx(dict(values), rel=0.02), owner
    for owner, values in plain.devices.items():
        assert changed.devices[owner] == pytest.approx(dict(values), rel=0.02), owner


def test_what_only_the_source_knows_goes_back_to_the_prior() -> None:
    rows = [row for row in ROWS if row.source in ("one", "two")]
    rows += [replace(row, source="alone") for row in ROWS if row.source == "four"]
    folds = made_folds(rows)
    everything, without = folds.everything().coefficients, folds.without("alone").coefficients
    priors = {"memory": STACK_PRIORS["memory"].centre, "shard_apart": STACK_PRIORS["shard_apart"].centre}
    for name, prior in priors.items():
        assert without.stacks["eager"][name] == pytest.approx(prior, rel=0.01)
    assert everything.stacks["eager"]["memory"] > 1.05 * priors["memory"]
    lonely = made_folds([row for row in ROWS if row.source == "one"]).without("one").coefficients
    assert lonely.devices["ampere"]["inside"] == pytest.approx(DEVICE_PRIORS["inside"].centre, rel=0.01)


def test_strangers_are_predicted_worse_than_what_was_fitted(calibration: Calibration) -> None:
    assert np.abs(calibration.residuals).mean() < 0.06
    assert np.abs(calibration.held_out).mean() > np.abs(calibration.residuals).mean()


def test_every_row_gets_the_coefficients_of_the_others() -> None:
    folds = made_folds(ROWS)
    found = left_out_files(ROWS, folds)
    for source in folds.sources:
        (file,) = {file for row, file in zip(ROWS, found, strict=True) if row.source == source}
        assert file.coefficients == folds.without(source).coefficients


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


def of_layers(name: str, speed: float) -> list[MeasuredRow]:
    network = lookup(name)
    assert network is not None
    return [
        MeasuredRow(
            row_id=str(batch), source=source, file="made.csv", line=1, measured_time_s=speed * batch,
            run=TrainingRun(
                network=network, hardware=profile("dgx-a100"),
                setup=TrainingSetup(devices=1, micro_batch=batch, precision="fp16", stack="eager"),
            ),
        )
        for batch, source in ((32, "one"), (64, "one"), (128, "two"))
    ]  # fmt: skip


def test_networks_of_layers_alone_can_be_calibrated() -> None:
    found = calibrate_steps(planned_folds(of_layers("ssd", 0.002)))
    assert np.isfinite(found.residuals).all()
    # What no row speaks for stays as it was.
    assert found.software.coefficients == shipped_software().coefficients


def test_images_teach_what_images_take_and_nothing_else() -> None:
    shipped = shipped_software().coefficients
    slow, fast = (planned_folds(of_layers("resnet50", speed)).everything().coefficients for speed in (8e-4, 6e-4))
    of_images = {"convolution", "image", "copies", "single_copies"}
    assert slow.stacks["eager"]["convolution"] > 1.05 * fast.stacks["eager"]["convolution"]
    assert {**slow.stacks, "eager": {}} == {**shipped.stacks, "eager": {}}
    assert slow.attention == shipped.attention
    for name, value in shipped.stacks["eager"].items():
        assert name in of_images or slow.stacks["eager"][name] == value
    assert set(slow.devices["ampere"]) >= {"convolution", "image"}
