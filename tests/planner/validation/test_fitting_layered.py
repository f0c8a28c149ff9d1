"""The fit of layered networks: it finds the coefficients that made the times, in spite of wrong rows."""

from __future__ import annotations

import numpy as np
import pytest

from planner.estimate.layered import lookup
from planner.estimate.layered_work import LayeredCoefficients, predict_layered
from planner.estimate.training_run import LayeredNetwork, Stack, TrainingRun, TrainingSetup
from planner.validation.fitting_layered import fit_layered, predicted_logarithms, priors_of
from planner.validation.reading import MeasuredRow
from simulator.hardware import load_profile

TRUE = LayeredCoefficients(
    devices={"ampere": {"half": 0.45, "memory": 0.8, "grouped": 0.1, "kernel_s": 6e-6}},
    stacks={"eager": {"unfused": 0.6, "launch_s": 1e-5, "casts": 0.1, "step_overhead_s": 2e-3}},
)
NAMES = ("resnet18", "resnet50", "resnet152", "vgg16", "mobilenet_v2_100", "efficientnet_b0", "densenet121")


def made_row(name: str, batch: int, source: str, factor: float = 1.0) -> MeasuredRow:
    network = lookup(name)
    assert isinstance(network, LayeredNetwork)
    setup = TrainingSetup(devices=1, micro_batch=batch, precision="fp16", stack=Stack.EAGER)
    run = TrainingRun(network=network, setup=setup, hardware=load_profile("dgx-a100"))
    seconds = predict_layered(run, TRUE.parameters(run)).step_time_s
    return MeasuredRow(row_id=name, source=source, file="made.csv", line=1, run=run, measured_time_s=seconds * factor)


def made_rows() -> list[MeasuredRow]:
    return [made_row(name, batch, source) for name in NAMES for batch, source in ((32, "one"), (128, "two"))]


def test_a_fit_finds_the_times_in_spite_of_a_wrong_row() -> None:
    rows = [*made_rows(), made_row("resnet34", 64, "one", factor=10.0)]
    residuals = fit_layered(rows).residuals
    assert np.abs(residuals[:-1]).mean() < 0.05
    assert residuals[-1] < -2


def test_sources_left_out_are_predicted_by_the_others() -> None:
    known = fit_layered([row for row in made_rows() if row.source == "one"]).coefficients
    others = [row for row in made_rows() if row.source == "two"]
    predicted = predicted_logarithms([row.run for row in others if row.run], known)
    errors = np.expm1(predicted - np.log([row.measured_time_s for row in others]))
    assert np.abs(errors).mean() < 0.1


def test_coefficients_belong_to_families_and_stacks_only() -> None:
    runs = [row.run for row in made_rows() if row.run]
    groups = {(part, group) for part, group, _ in priors_of(runs)}
    devices = {("devices", family) for family in ("volta", "ampere", "hopper", "blackwell")}
    assert groups == {*devices, ("stacks", "eager")}


def test_devices_without_rows_are_as_expected_of_them() -> None:
    devices = fit_layered(made_rows()).coefficients.devices
    # Convolutions use the tensor units of Hopper as those of its predecessors.
    assert devices["hopper"]["half"] == pytest.approx(0.63 * 0.45, rel=1e-3)
    assert devices["volta"]["half"] == pytest.approx(0.45, rel=1e-3)
    assert devices["ampere"]["half"] != pytest.approx(0.45, rel=1e-3)
