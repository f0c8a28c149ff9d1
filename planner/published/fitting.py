"""Fit the coefficients of whole steps: properties of devices, stacks and attention kernels, on published rows.

Minimised is the sum of ``weight * soft_l1(log(predicted / measured) / scale)`` with a Gaussian prior on the logarithm
of every coefficient, so that one which no row speaks for stays where it was, and one which few speak for moves
little. A source counts with the square root of its number of rows: a thousand rows of one cluster are one witness,
not a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.cost.software_file import SoftwareCoefficients
from planner.cost.stacks import family_of
from planner.cost.training_run import OptimizerSharding, TrainingRun
from planner.published.estimate.coefficients import stack_key
from planner.published.estimate.columns import FloatArray
from planner.published.estimate.step import Coefficients, step_times
from planner.published.estimate.work import Work

_DIFFERENCE = 1e-4
_ITERATIONS = 60
_SETTLED = 2e-3  # coefficients are known to a few per cent at best
_STUCK = 1e9
_FLAT = 1e-6
_RESIDUAL_SCALE = 0.05  # relative errors beyond this count linearly instead of squared


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Where a coefficient is expected, and by what factor it may differ (one standard deviation of its logarithm)."""

    centre: float
    spread: float


DEVICE_PRIORS = {
    "matmul": Prior(centre=1.1, spread=0.12),
    "low_precision": Prior(centre=1.2, spread=0.2),
    "attention": Prior(centre=1.0, spread=0.15),
    "memory": Prior(centre=1.1, spread=0.15),
    "inside": Prior(centre=1.0, spread=0.1),
    "outside": Prior(centre=1.2, spread=0.3),
    "launch": Prior(centre=1.0, spread=0.1),
    "jitter": Prior(centre=0.004, spread=0.3),
}
"""Messages within a node are timed by themselves in profiles: whole steps are hardly to contradict them."""
_HOST_PRIORS = {"launch": Prior(centre=2.5, spread=0.3)}
"""Of Ascend devices, whose hosts are Kunpeng processors: they take two to three times as long for an operator as those
of NVIDIA's systems, in tables of training and in functional tests alike."""
STACK_PRIORS = {
    "matmul": Prior(centre=1.0, spread=0.04),
    "misaligned": Prior(centre=1.2, spread=0.1),
    "memory": Prior(centre=1.3, spread=0.25),
    "memory_half": Prior(centre=1.1, spread=0.08),
    "experts": Prior(centre=1.2, spread=0.3),
    "recompute": Prior(centre=0.95, spread=0.05),
    "optimizer": Prior(centre=1.3, spread=0.4),
    "launch_s": Prior(centre=2e-5, spread=0.3),
    "step_overhead_s": Prior(centre=0.01, spread=1.0),
    "micro_batch_overhead_s": Prior(centre=5e-4, spread=0.4),
    "tensor_exposed": Prior(centre=0.5, spread=0.4),
    "pipeline_exposed": Prior(centre=0.7, spread=0.4),
    "gradient_exposed": Prior(centre=0.2, spread=0.5),
    "shard_exposed": Prior(centre=0.15, spread=0.4),
    "shard_apart": Prior(centre=5.0, spread=0.7),
    "context_exposed": Prior(centre=0.3, spread=0.5),
}
PYTORCH_PRIORS = {
    "launch_s": Prior(centre=4e-5, spread=0.1),
    "step_overhead_s": Prior(centre=0.01, spread=0.4),
}
"""Of stacks that launch PyTorch operators one by one: an operator of ours is some four kernels of about 10 us.

Chosen with the published rows in view and held tight: without it the few rows of other sources decide how long the
host of small networks takes.
"""
DEEPSPEED_PRIORS = {
    "memory": Prior(centre=1.3, spread=0.15),
    "launch_s": Prior(centre=7e-5, spread=0.3),
    "step_overhead_s": Prior(centre=0.005, spread=0.4),
    "micro_batch_overhead_s": Prior(centre=2e-3, spread=0.5),
    "pipeline_exposed": Prior(centre=0.8, spread=0.1),
}
"""DeepSpeed takes about twice as long for an operator, on A100 and GH200 alike, and its pipeline engine works through
a list of instructions for each micro-batch, and waits for nearly all of what it sends, but for no more. Its kernels
bound by memory are PyTorch's, held near those of other stacks: two large sources want them 15 % slower and faster, and
neither may say alone."""
DETERMINISTIC_PRIORS = {
    "launch_s": Prior(centre=1e-4, spread=0.5),
    "step_overhead_s": Prior(centre=0.05, spread=1.0),
}
"""Of functional tests: tiny networks under checks and logs, bound by the host alone."""
MINDSPORE_PRIORS = {
    "optimizer": Prior(centre=6.0, spread=0.15),
    "launch_s": Prior(centre=8e-6, spread=0.2),
    "step_overhead_s": Prior(centre=0.01, spread=0.5),
}
"""MindSpore's Adam with decay (``_update_run_op`` of ``mindspore/nn/optim/adam.py``) is some seventeen operators on
float32, which move 156 bytes a weight where one kernel moves 28. A graph that is sunk to the device leaves the
host little to do, for operators and between steps."""
_OWN_PRIORS = {"deepspeed": DEEPSPEED_PRIORS, "mindspore": MINDSPORE_PRIORS}
_ONE_BY_ONE = ("eager", "megatron", "transformer_engine", "mindspeed")
ATTENTION_PRIOR = Prior(centre=0.92, spread=0.06)
"""Held tight, like `memory_half`: few sources take one kernel, and none may say alone how fast it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """Fitted coefficients, and the logarithm of predicted over measured of all rows."""

    software: SoftwareCoefficients
    theta: FloatArray
    residuals: FloatArray


class StepFit:
    """The rows of a fit: (N,) runs whose `work` is timed, their measured seconds and their sources.

    ``offset`` (N,) is what simulation adds to the logarithm of the closed form, zero until it is set. ``names`` says
    of every coefficient whose it is and which.
    """

    def __init__(self, work: Work, runs: Sequence[TrainingRun], measured_s: FloatArray, sources: Sequence[str]) -> None:
        self.work, self.target = work, np.log(measured_s)
        self.offset = np.zeros(len(self.target))
        self.sources = np.array(sources)
        # Functional tests train tiny networks: their times say little of anything else.
        # Where parameters are gathered apart the network between nodes decides, which differs from day to day.
        doubtful = [run.setup.deterministic or _gathers_apart(run) for run in runs]
        self.trust = np.where(doubtful, 0.3, 1.0)
        self.families, self.family = _codes([family_of(run.hardware.device_name) for run in runs])
        self.stacks, self.stack = _codes([stack_key(run) for run in runs])
        self.kernels, self.kernel = _codes([str(run.setup.attention) for run in runs])
        entries = [(family, name, prior) for family in self.families for name, prior in _device_priors(family).items()]
        entries += [(stack, name, _stack_prior(stack, name)) for stack in self.stacks for name in STACK_PRIORS]
        entries += [(kernel, "attention", ATTENTION_PRIOR) for kernel in self.kernels]
        self.names = [(owner, name) for owner, name, _ in entries]
        self.centres: FloatArray = np.log([prior.centre for _, _, prior in entries])
        self.spreads: FloatArray = np.array([prior.spread for _, _, prior in entries])

    def coefficients(self, theta: FloatArray) -> Coefficients:
        """Coefficients (N,) of the rows."""
        devices, stacks, attention = self._blocks(np.exp(theta))
        by_device = {name: devices[self.family, i] for i, name in enumerate(DEVICE_PRIORS)}
        by_stack = {name: stacks[self.stack, i] for i, name in enumerate(STACK_PRIORS)}
        launch = by_device.pop("launch")
        values = {**by_device, **by_stack}
        for name in by_device.keys() & by_stack.keys():
            values[name] = by_device[name] * by_stack[name]
        values["attention"] = values["attention"] * attention[self.kernel]
        values["launch_s"] = values["launch_s"] * launch
        return Coefficients(**values)

    def predicted_logarithms(self, theta: FloatArray) -> FloatArray:
        """Logarithms of the predicted seconds, (N,): the closed form, moved by `offset`."""
        return np.asarray(np.log(step_times(self.work, self.coefficients(theta)).step_time_s) + self.offset)

    def fit(self, rows: npt.NDArray[np.bool_] | None = None, start: FloatArray | None = None) -> Fit:
        """Fit on all rows, or on those of a mask; `start` is where the search begins."""
        used = np.ones(len(self.target), dtype=bool) if rows is None else rows
        names, code = _codes(self.sources[used].tolist())
        weights = np.bincount(code, minlength=len(names))[code] ** -0.25 * self.trust[used]

        def residuals(theta: FloatArray) -> tuple[FloatArray, FloatArray]:
            """Residuals whose squares are the soft_l1 loss, and their slopes by the predicted logarithm."""
            error = (self.predicted_logarithms(theta) - self.target)[used] / _RESIDUAL_SCALE
            bend = np.sqrt(1 + error**2)
            robust: FloatArray = np.sqrt(2 * (bend - 1))
            slope: FloatArray = np.where(robust > _FLAT, np.abs(error) / (bend * np.maximum(robust, _FLAT)), 1.0)
            return weights * np.sign(error) * robust, weights * slope / _RESIDUAL_SCALE

        def slopes(theta: FloatArray) -> FloatArray:
            return self.derivatives(theta)[used]

        theta = _minimise(residuals, slopes, self.centres if start is None else start, self.centres, self.spreads)
        devices, stacks, attention = self._blocks(np.exp(theta))
        return Fit(
            software=SoftwareCoefficients(
                devices={
                    f: dict(zip(DEVICE_PRIORS, devices[i].tolist(), strict=True)) for i, f in enumerate(self.families)
                },
                stacks={s: dict(zip(STACK_PRIORS, stacks[i].tolist(), strict=True)) for i, s in enumerate(self.stacks)},
                attention=dict(zip(self.kernels, attention.tolist(), strict=True)),
            ),
            theta=theta,
            residuals=self.predicted_logarithms(theta) - self.target,
        )

    def derivatives(self, theta: FloatArray) -> FloatArray:
        """Derivatives of the predicted logarithms, (N, coefficients), by differences.

        A row depends on one device, one stack and one kernel, so coefficients of the same name are moved together:
        one evaluation for each name.
        """
        base = self.predicted_logarithms(theta)
        found = np.zeros((len(base), len(theta)))
        every = np.arange(len(base))
        place = 0
        for owners, code, width in (
            (self.families, self.family, len(DEVICE_PRIORS)), (self.stacks, self.stack, len(STACK_PRIORS)),
            (self.kernels, self.kernel, 1),
        ):  # fmt: skip
            for name in range(width):
                moved = theta.copy()
                moved[place + name : place + len(owners) * width : width] += _DIFFERENCE
                found[every, place + code * width + name] = (self.predicted_logarithms(moved) - base) / _DIFFERENCE
            place += len(owners) * width
        return found

    def _blocks(self, values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        first = len(self.families) * len(DEVICE_PRIORS)
        second = first + len(self.stacks) * len(STACK_PRIORS)
        devices = values[:first].reshape(len(self.families), len(DEVICE_PRIORS))
        return devices, values[first:second].reshape(len(self.stacks), len(STACK_PRIORS)), values[second:]


def _gathers_apart(run: TrainingRun) -> bool:
    return run.setup.optimizer_sharding is OptimizerSharding.ZERO3 and not run.setup.overlap_parameters


def _device_priors(family: str) -> dict[str, Prior]:
    return DEVICE_PRIORS | (_HOST_PRIORS if family.startswith("ascend") else {})


def _stack_prior(stack: str, name: str) -> Prior:
    usual = DETERMINISTIC_PRIORS if stack.endswith("_deterministic") else PYTORCH_PRIORS if stack in _ONE_BY_ONE else {}
    return _OWN_PRIORS.get(stack, usual).get(name, STACK_PRIORS[name])


def _minimise(
    residuals: Callable[[FloatArray], tuple[FloatArray, FloatArray]],
    slopes: Callable[[FloatArray], FloatArray],
    theta: FloatArray,
    centres: FloatArray,
    spreads: FloatArray,
) -> FloatArray:
    """Levenberg and Marquardt's method on normal equations, which are small here: rows are many, coefficients few.

    ``residuals`` gives (N,) weighted residuals and what they change by a change of the predicted logarithm,
    ``slopes`` (N, coefficients) of that logarithm; the prior adds ``((theta - centres) / spreads) ** 2``.
    """

    def cost(found: FloatArray, at: FloatArray) -> float:
        return float(found @ found + np.sum(((at - centres) / spreads) ** 2))

    damping = 1e-3
    found, bend = residuals(theta)
    for _ in range(_ITERATIONS):
        matrix = bend[:, None] * slopes(theta)
        normal = matrix.T @ matrix + np.diag(spreads**-2)
        gradient = matrix.T @ found + (theta - centres) / spreads**2
        while True:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            trial, trial_bend = residuals(theta + step)
            if cost(trial, theta + step) <= cost(found, theta) or damping > _STUCK:
                break
            damping *= 8
        if damping > _STUCK:
            break
        theta, found, bend, damping = theta + step, trial, trial_bend, damping / 4
        if np.abs(step).max(initial=0.0) < _SETTLED:
            break
    return theta


def _codes(values: Sequence[str]) -> tuple[list[str], npt.NDArray[np.intp]]:
    names = sorted(set(values))
    place = {name: index for index, name in enumerate(names)}
    return names, np.array([place[value] for value in values], dtype=np.intp)
