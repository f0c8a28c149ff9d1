"""How many plans a second are estimated, on one core: `make bench`.

Goal: 20,000 plans of one network on one cluster a second in closed form, without their memory.
"""

from __future__ import annotations

import itertools

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from planner.cost.software_file import SoftwareFile, shipped_software
from planner.cost.training_run import (
    OptimizerSharding,
    Recompute,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)
from planner.published.estimate.coefficients import gather
from planner.published.estimate.predict import predict_runs
from planner.published.estimate.step import step_times
from planner.published.estimate.work import work_of
from simulator.profiles import load_profile

GPT3 = TransformerShape(
    name="gpt3-175b", layers=96, hidden=12288, heads=96, key_value_heads=96, head_size=128, feed_forward=49152,
    vocabulary=50257, sequence_length=2048, learned_positions=2048,
)  # fmt: skip
DEVICES, BATCH = 1024, 1536


@pytest.fixture(scope="module")
def plans() -> list[TrainingRun]:
    """Every cut of GPT-3 175B over 1,024 devices with every way to keep activations and states."""
    hardware = load_profile("dgx-a100")
    found = []
    for tp, pp, vpp, micro_batch in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 3, 6), (1, 2, 4, 8)):
        dp = DEVICES // (tp * pp)
        if BATCH % (dp * micro_batch) or GPT3.layers % (pp * vpp) or (pp == 1 and vpp > 1):
            continue
        for recompute, sharding, sequence_parallel in itertools.product(
            Recompute, OptimizerSharding, (False, True) if tp > 1 else (False,)
        ):
            setup = TrainingSetup(
                devices=DEVICES, dp=dp, tp=tp, pp=pp, vpp=vpp, micro_batch=micro_batch,
                micro_batches=BATCH // (dp * micro_batch), recompute=recompute, optimizer_sharding=sharding,
                sequence_parallel=sequence_parallel, overlap_gradients=True,
            )  # fmt: skip
            found.append(TrainingRun(network=GPT3, setup=setup, hardware=hardware))
    return found


@pytest.fixture(scope="module")
def software() -> SoftwareFile:
    return shipped_software()


def _rate(benchmark: BenchmarkFixture, plans: int) -> None:
    benchmark.extra_info["plans"] = plans
    benchmark.extra_info["plans_per_s"] = round(plans / benchmark.stats.stats.median)


def test_closed_form(benchmark: BenchmarkFixture, plans: list[TrainingRun], software: SoftwareFile) -> None:
    """Columns, work, coefficients and step times."""

    def estimate() -> int:
        return int(step_times(work_of(plans), gather(software.coefficients, plans)).step_time_s.size)

    assert benchmark(estimate) == len(plans) >= 5000
    _rate(benchmark, len(plans))


def test_predictions(benchmark: BenchmarkFixture, plans: list[TrainingRun], software: SoftwareFile) -> None:
    """The same with intervals and memory, schedules not simulated."""
    found = benchmark(predict_runs, plans, software, simulate=False)
    assert any(prediction.fits for prediction in found)
    _rate(benchmark, len(plans))


def test_simulated_predictions(benchmark: BenchmarkFixture, plans: list[TrainingRun], software: SoftwareFile) -> None:
    """The same with every pipeline simulated, of every twentieth plan."""
    some = plans[::20]
    assert len(benchmark.pedantic(predict_runs, (some, software), rounds=1, warmup_rounds=1)) == len(some)
    _rate(benchmark, len(some))
