"""Rows of training steps that were made with known coefficients."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.cost.training_run import TrainingRun
from planner.published.calibrating import Folds
from planner.published.fitting import DEVICE_PRIORS, IMAGE_STACK_PRIORS, STACK_PRIORS, WORK, Responses, StepFit
from planner.published.reading import MeasuredRow
from tests.planner.cost.transformers import GPT, LLAMA, SOFTWARE, run

SHAPES = (GPT, replace(GPT, name="small", layers=12, hidden=768, heads=12, head_size=64, feed_forward=3072), LLAMA)
TRUE = {
    "ampere": {"matmul": 1.3, "memory": 1.4, "inside": 1.3},
    "hopper": {"matmul": 0.95, "memory": 1.0, "inside": 0.9},
    "megatron": {"memory": 1.9, "step_overhead_s": 0.03},
    "eager": {"memory": 2.4, "launch_s": 5e-5, "step_overhead_s": 0.005},
}
"""What differs from where the fit expects it."""
STACKS = {stack: {name: prior.centre for name, prior in STACK_PRIORS.items()} for stack in ("megatron", "eager")}
DEVICES = {family: {name: prior.centre for name, prior in DEVICE_PRIORS.items()} for family in ("ampere", "hopper")}


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


def facts(one: TrainingRun) -> tuple[object, ...]:
    """What made runs differ in."""
    setup = one.setup
    return str(setup.stack), setup.tp, setup.dp, setup.pp, setup.ep, setup.micro_batch, setup.micro_batches


def made_responses(runs: list[TrainingRun]) -> Responses:
    """Plans of half a second to five, made of the kinds of work that matter; equal runs have equal plans."""
    drawn = [
        np.random.default_rng(zlib.crc32(repr((each.network.name, *facts(each), each.hardware.name)).encode()))
        for each in runs
    ]
    matters = np.array([[work.matters(each) for work in WORK] for each in runs]).reshape(len(runs), len(WORK))
    of_words = [work.name not in IMAGE_STACK_PRIORS for work in WORK]
    weights = {"matmul": 8.0, "memory": 4.0} | dict.fromkeys(IMAGE_STACK_PRIORS, 0.0)
    usual = np.array([weights.get(work.name, 0.5) for work in WORK] + [1.0])
    usual = usual[usual > 0]
    seconds = np.array([random.uniform(0.5, 5.0) for random in drawn])
    parts = np.zeros((len(runs), len(WORK)))
    parts[:, of_words] = np.array([random.dirichlet(usual)[:-1] for random in drawn]).reshape(len(runs), -1)
    known = replace(SOFTWARE.coefficients, stacks=STACKS, devices=DEVICES)
    return Responses(
        runs=tuple(runs), software=replace(SOFTWARE, coefficients=known), time_s=seconds,
        response_s=seconds[:, None] * parts * matters,
    )  # fmt: skip


def step_fit(runs: list[tuple[TrainingRun, str]], measured: npt.NDArray[np.float64] | None = None) -> StepFit:
    """The fit of runs, whose times are one second each unless they were measured."""
    seconds = np.ones(len(runs)) if measured is None else measured
    return StepFit(made_responses([each for each, _ in runs]), seconds, [source for _, source in runs])


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
    seconds = fit.predicted_s(true_theta(fit))
    seconds = seconds * np.exp(noise * np.random.default_rng(seed).standard_normal(len(runs)))
    return [
        MeasuredRow(
            row_id=str(index), source=source, file="made.csv", line=index, run=each, measured_time_s=float(time)
        )
        for index, ((each, source), time) in enumerate(zip(runs, seconds, strict=True))
    ]


def made_folds(rows: list[MeasuredRow]) -> Folds:
    """The folds of rows of `made_rows`, each with the plan that its time was made of."""
    planned = made_responses([each for each, _ in made_runs()])
    places = [int(row.row_id) for row in rows]
    return Folds(
        rows,
        replace(
            planned, runs=tuple(planned.runs[place] for place in places), time_s=planned.time_s[places],
            response_s=planned.response_s[places],
        ),
    )  # fmt: skip
