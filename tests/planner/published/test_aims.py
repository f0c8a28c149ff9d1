"""Every run falls under one aim, by its network, device and how much its source states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cost.training_run import (
    Experts,
    LayeredNetwork,
    OptimizerSharding,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)
from planner.published.metrics import Metrics
from planner.published.predictions import (
    ADAPTERS,
    ASCEND,
    CONVOLUTIONAL,
    ELSEWHERE,
    EXPERTS,
    FSDP,
    IN_PART,
    LOW_PRECISION,
    TRANSFORMERS,
    group_of,
)
from reports.accuracy_aims import AIMS
from simulator.profiles import load_profile

SHAPE = TransformerShape(
    name="any", layers=2, hidden=64, heads=2, key_value_heads=2, head_size=32, feed_forward=256, vocabulary=100,
    sequence_length=32,
)  # fmt: skip


MIXTURE = Experts(count=4, per_token=2, feed_forward=64)


def run(profile: str, *, layered: bool = False, sharding: OptimizerSharding = OptimizerSharding.NONE) -> TrainingRun:
    return TrainingRun(
        network=LayeredNetwork(name="any", layers=(), parameters=1.0) if layered else SHAPE,
        setup=TrainingSetup(devices=1, optimizer_sharding=sharding),
        hardware=load_profile(profile),
    )


@pytest.mark.parametrize(
    ("made", "complete", "group"),
    [
        (run("dgx-a100"), True, TRANSFORMERS),
        (run("dgx-h100"), False, IN_PART),
        (run("dgx1-v100"), True, ELSEWHERE),
        (run("ascend910b-atlas800t-a2", layered=True), True, ASCEND),
        (run("dgx1-v100", layered=True), False, CONVOLUTIONAL),
        (run("dgx-a100", sharding=OptimizerSharding.ZERO3), True, FSDP),
        (replace(run("dgx-h100"), setup=TrainingSetup(devices=1, precision="fp8")), True, LOW_PRECISION),
        (replace(run("dgx-h100"), setup=TrainingSetup(devices=1, trained_fraction=0.01)), True, ADAPTERS),
        (replace(run("dgx-b200"), network=replace(SHAPE, experts=MIXTURE)), False, EXPERTS),
    ],
)
def test_groups(made: TrainingRun, complete: bool, group: str) -> None:
    assert group_of(made, complete=complete) == group


def test_an_aim_is_met_inside_its_limits_only() -> None:
    metrics = Metrics(rows=20, predicted=19, time_mean=0.06, inside_interval=0.96)
    judged = {aim.name: aim.met(metrics) for aim in AIMS if aim.figure in ("inside_interval", "coverage", "regret")}
    assert list(judged.values()) == [False, None, True]
    first = AIMS[0]
    assert first.met(metrics) is True
    assert first.met(replace(metrics, time_mean=0.0601)) is False
