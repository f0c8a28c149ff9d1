"""The fit of layered networks: it finds the coefficients that made the times, in spite of wrong rows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from planner.cost.stacks import LayeredCoefficients, Stack, family_of
from planner.cost.training_run import LayeredNetwork, TrainingRun, TrainingSetup
from planner.published.fitting_layered import DEVICE_PRIORS, HOST_PRIORS, STACK_OWN_PRIORS, Steps, fit_layered, priors
from planner.published.layered import lookup
from planner.published.layered.prediction import parameters_of, predict_layered
from planner.published.reading import MeasuredRow
from simulator.profiles import load_profile
from simulator.program import Kernel

TRUE = LayeredCoefficients(
    devices={"ampere": {"products": 0.45, "memory": 0.8, "grouped": 0.1, "kernel_s": 6e-6}},
    stacks={
        "eager": {
            "unfused": 0.6,
            "launch_s": 1e-5,
            "casts": 0.1,
            "step_overhead_s": 2e-3,
            "host_image_s": 2e-4,
            "host_augmented_image_s": 1.5e-3,
        }
    },
)
NAMES = ("resnet18", "resnet50", "resnet152", "vgg16", "mobilenet_v2_100", "efficientnet_b0", "densenet121")


def made_row(name: str, batch: int, source: str, factor: float = 1.0) -> MeasuredRow:
    network = lookup(name)
    assert isinstance(network, LayeredNetwork)
    setup = TrainingSetup(devices=1, micro_batch=batch, precision="fp16", stack=Stack.EAGER)
    run = TrainingRun(network=network, setup=setup, hardware=load_profile("dgx-a100"))
    seconds = predict_layered(run, parameters_of(TRUE, run)).step_time_s
    return MeasuredRow(row_id=name, source=source, file="made.csv", line=1, run=run, measured_time_s=seconds * factor)


def made_rows() -> list[MeasuredRow]:
    return [made_row(name, batch, source) for name in NAMES for batch, source in ((32, "one"), (128, "two"))]


def test_runs_of_one_device_and_stack_keep_what_tells_them_apart() -> None:
    known = LayeredCoefficients(stacks={"tensorflow": {"unfused": 0.4, "casts": 0.1}, "eager": {"casts": 3.0}})
    hardware = load_profile("dgx1-v100")
    setup = TrainingSetup(devices=1, micro_batch=16, precision="fp16", stack=Stack.TENSORFLOW)
    runs = [
        TrainingRun(network=network, setup=replace(setup, plain_graph=plain), hardware=hardware)
        for network in (lookup("resnet50"), lookup("vnet"))
        for plain in (False, True)
        if network
    ]
    alone = [math.log(predict_layered(run, parameters_of(known, run)).step_time_s) for run in runs]
    assert Steps(runs).predicted(known).tolist() == pytest.approx(alone)


def test_a_fit_finds_the_times_in_spite_of_a_wrong_row() -> None:
    rows = [*made_rows(), made_row("resnet34", 64, "one", factor=10.0)]
    residuals = fit_layered(rows).residuals
    assert np.abs(residuals[:-1]).mean() < 0.05
    assert residuals[-1] < -2


def test_sources_left_out_are_predicted_by_the_others() -> None:
    known = fit_layered([row for row in made_rows() if row.source == "one"]).coefficients
    others = [row for row in made_rows() if row.source == "two"]
    predicted = Steps([row.run for row in others if row.run]).predicted(known)
    errors = np.expm1(predicted - np.log([row.measured_time_s for row in others]))
    assert np.abs(errors).mean() < 0.1


def test_coefficients_belong_to_families_and_stacks_only() -> None:
    coefficients = fit_layered(made_rows()).coefficients
    assert set(coefficients.devices) <= {"volta", "ampere", "hopper", "blackwell", "ascend910", "ascend910b"}
    assert set(coefficients.stacks) <= {*(str(stack) for stack in Stack), "mindspore_gpu"}
    parts = {part for part, _, _ in priors()}
    assert parts == {"everywhere", "common", "devices", "stacks"}


def test_a_source_has_one_host_however_many_rows() -> None:
    # Steps that wait for the host: the host of one source takes twice as long as that of the other, with six times as
    # many rows; what strangers are expected to have lies nearer to the middle than to its own.
    names = ("efficientnet_b0", "mobilenet_v3_large_100", "pit_ti", "pvt_tiny", "rexnet_10", "ghostnet_100")
    many = [made_row(name, batch, "many", factor=2.0) for name in names for batch in (64, 128, 256)]
    few = [made_row(name, 128, "few") for name in names[:3]]
    fit = fit_layered([*many, *few])
    host = fit.coefficients.stacks["eager"]["host_augmented_image_s"]
    true = TRUE.stacks["eager"]["host_augmented_image_s"]
    assert true < host < 2 * true * 0.9
    assert fit.values["sources", "many", "host"] > 1.1 > 0.9 > fit.values["sources", "few", "host"]


def test_a_device_without_rows_is_as_its_kin() -> None:
    devices = fit_layered(made_rows()).coefficients.devices
    assert devices["hopper"]["balance"] == devices["ampere"]["balance"]
    # What rows of one device say goes for others of its maker in part, and not for those of another maker.
    expected = {name: prior.centre for name, prior in DEVICE_PRIORS.items()}
    for name in ("kernel_s", "columns_half"):
        own, kin = (math.log(devices[family][name] / expected[name]) for family in ("ampere", "hopper"))
        assert own * kin > 0
        assert abs(kin) < abs(own)
    assert devices["ascend910"]["columns_half"] == pytest.approx(expected["columns_half"], rel=1e-3)


def test_stacks_and_samples_without_rows_take_what_is_expected_of_them() -> None:
    stacks = fit_layered(made_rows()).coefficients.stacks
    assert stacks["mxnet"]["unfused"] == pytest.approx(STACK_OWN_PRIORS["mxnet"]["unfused"].centre, rel=1e-3)
    assert stacks["eager"]["host_volume_s"] == pytest.approx(HOST_PRIORS["volume"].centre, rel=1e-3)


def test_slopes_are_those_of_every_coefficient_by_itself() -> None:
    runs = [row.run for row in made_rows()[:4] if row.run]
    steps, keys = Steps(runs), list(priors())
    theta = np.log([prior.centre for prior in priors().values()])
    slopes = steps.slopes(keys, theta, steps.places(keys))
    base = steps.logarithms(keys, theta)
    for number in (keys.index(("devices", "ampere", "memory")), keys.index(("common", "nvidia", "products"))):
        moved = theta.copy()
        moved[number] -= 1e-3
        assert slopes[:, number] == pytest.approx((base - steps.logarithms(keys, moved)) / 1e-3, abs=1e-9)
    assert not slopes[:, keys.index(("devices", "volta", "memory"))].any()


@pytest.mark.parametrize(("flag", "name"), [("plain_graph", "unfused"), ("graph_engine", "gates_s")])
def test_each_run_has_the_parameters_of_its_own_graphs(flag: str, name: str) -> None:
    first = made_row("efficientnet_b0", 64, "one").run
    assert first is not None
    ascend = flag == "graph_engine"
    stack = Stack.MINDSPORE_TOOLKIT if ascend else Stack.TENSORFLOW
    hardware = load_profile("ascend910-atlas800") if ascend else first.hardware
    runs = [
        replace(first, hardware=hardware, setup=replace(first.setup, stack=stack, **{flag: value}))  # type: ignore[arg-type]
        for value in (True, False)
    ]
    steps, keys = Steps(runs), list(priors())
    theta = np.log([prior.centre for prior in priors().values()])
    slopes = steps.slopes(keys, theta, steps.places(keys))[:, keys.index(("stacks", str(stack), name))]
    asked = 1  # the second says false: no engine, or XLA
    assert slopes[asked] > 0
    assert slopes[1 - asked] == 0


@pytest.mark.parametrize("profile", ["dgx1-v100", "dgx-a100", "dgx-h100", "dgx-b200"])
def test_memory_is_expected_as_streams_were_timed(profile: str) -> None:
    hardware = load_profile(profile)
    expected = priors()["devices", family_of(hardware.device_name), "memory"].centre
    assert expected == pytest.approx(hardware.kernels[Kernel.ELEMENTWISE].bandwidth_efficiency, rel=0.005)
