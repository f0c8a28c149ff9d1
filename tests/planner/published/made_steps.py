"""Rows of training steps that were made with known coefficients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.cost.training_run import TrainingRun
from planner.published.estimate.work import work_of
from planner.published.fitting import StepFit
from planner.published.reading import MeasuredRow
from tests.planner.published.estimate.transformers import GPT, LLAMA, run

SHAPES = (GPT, replace(GPT, name="small", layers=12, hidden=768, heads=12, head_size=64, feed_forward=3072), LLAMA)
TRUE = {
    "ampere": {"matmul": 1.3, "memory": 1.4, "inside": 1.3},
    "hopper": {"matmul": 0.95, "memory": 1.0, "inside": 0.9},
    "megatron": {"memory": 1.6, "step_overhead_s": 0.03},
    "eager": {"memory": 2.2, "launch_s": 5e-5, "step_overhead_s": 0.005},
}
"""What differs from where the fit expects it."""


def made_runs() -> list[tuple[TrainingRun, str]]:
    """Runs, each with the name of its source."""
    sources = (
        ("one", "megatron", "dgx-a100"), ("two", "megatron", "dgx-h100"), ("three", "eager", "dgx-h100"),
        ("four", "eager", "dgx-a100"),
    )  # fmt: skip
    return [
        (run(shape, hardware, stack=stack, optimizer_sharding="zero1", **plan), source)
        for source, stack, hardware in sources
        for shape in SHAPES
        for plan in ({"tp": 2}, {"tp": 8}, {"dp": 8}, {"dp": 2, "micro_batches": 4}, {"micro_batch": 4})
    ]


def step_fit(runs: list[tuple[TrainingRun, str]], measured: npt.NDArray[np.float64] | None = None) -> StepFit:
    """The fit of runs, whose times are one second each unless they were measured."""
    only = [each for each, _ in runs]
    seconds = np.ones(len(runs)) if measured is None else measured
    return StepFit(work_of(only), only, seconds, [source for _, source in runs])


def true_theta(fit: StepFit) -> npt.NDArray[np.float64]:
    """`TRUE`, and the centres of the priors of everything else."""
    theta = fit.centres.copy()
    for owner, values in TRUE.items():
        for name, value in values.items():
            theta[fit.names.index((owner, name))] = np.log(value)
    return theta


def made_rows(noise: float = 0.0, seed: int = 0) -> list[MeasuredRow]:
    """Measured rows with a relative error of the size of `noise`."""
    runs = made_runs()
    fit = step_fit(runs)
    seconds = np.exp(fit.predicted_logarithms(true_theta(fit)))
    seconds = seconds * np.exp(noise * np.random.default_rng(seed).standard_normal(len(runs)))
    return [
        MeasuredRow(
            row_id=str(index), source=source, file="made.csv", line=index, run=each, measured_time_s=float(time)
        )
        for index, ((each, source), time) in enumerate(zip(runs, seconds, strict=True))
    ]
