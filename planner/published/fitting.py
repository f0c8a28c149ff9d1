"""Fit what devices, stacks and attention kernels make of plans, on published rows.

A plan's time is taken to grow straight with each kind of work: ``time_s + sum over kinds of (factor - 1) *
response_s``, where the response says how the planned time changes when that kind alone takes longer. Minimised is the
sum of ``weight * soft_l1(log(predicted / measured) / scale)`` with a Gaussian prior on the logarithm of every
coefficient, so that one which no row speaks for stays where it was, and one which few speak for moves little. A source
counts with the square root of its number of rows: a thousand rows of one cluster are one witness, not a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.cost.software_file import SoftwareCoefficients, SoftwareFile
from planner.cost.stacks import Stack
from planner.cost.training_run import LayeredNetwork, OptimizerSharding, RunPrediction, TrainingRun, TransformerShape
from planner.published.planned import predict_planned

FloatArray = npt.NDArray[np.float64]
STEP = 1.1
"""By how much work is made slower to see what a plan owes to it."""
_ITERATIONS = 60
_SETTLED = 2e-3  # coefficients are known to a few per cent at best
_STUCK = 1e9
_FLAT = 1e-6
_RESIDUAL_SCALE = 0.05  # relative errors beyond this count linearly instead of squared
_SHORTEST = 0.05  # part of the planned time that factors cannot go below


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
}
"""Messages within a node are timed by themselves in profiles: whole steps are hardly to contradict them."""
_HOST_PRIORS = {"launch": Prior(centre=2.5, spread=0.3)}
"""Of Ascend devices, whose hosts are Kunpeng processors: they take two to three times as long for an operator as those
of NVIDIA's systems, in tables of training and in functional tests alike."""
STACK_PRIORS = {
    "matmul": Prior(centre=1.0, spread=0.06),
    "memory": Prior(centre=1.4, spread=0.25),
    "optimizer": Prior(centre=1.3, spread=0.4),
    "launch_s": Prior(centre=2e-5, spread=0.3),
    "step_overhead_s": Prior(centre=0.01, spread=1.0),
    "micro_batch_overhead_s": Prior(centre=5e-4, spread=0.4),
    "tensor_exposed": Prior(centre=0.5, spread=0.4),
    "pipeline_exposed": Prior(centre=0.7, spread=0.4),
    "shard_apart": Prior(centre=5.0, spread=0.7),
    "context_exposed": Prior(centre=0.3, spread=0.5),
}
IMAGE_DEVICE_PRIORS = {"convolution": Prior(centre=1.0, spread=0.1), "image": Prior(centre=1.0, spread=0.05)}
IMAGE_STACK_PRIORS = {
    "convolution": Prior(centre=1.0, spread=0.2),
    "image": Prior(centre=1.0, spread=0.1),
    "copies": Prior(centre=0.1, spread=0.5),
    "single_copies": Prior(centre=4 / 3, spread=0.1),
}
"""Of networks without a sequence. Profiles say what convolutions and streams of large tensors reach.

Where images lie in planes, input and output of a convolution on tensor units are turned around: both are read and
written once more (2), but for the outputs of kernels that write planes themselves (``nhwckrsc_nchw`` of cuDNN; 4/3 if
all of two passes do). Frameworks put channels last for 16 bits alone.
"""
_PLANES_PRIORS = {"copies": Prior(centre=3.0, spread=0.5)}
"""Of PyTorch without a compiler, which leaves images in planes unless told otherwise (``memory_format``)."""
PYTORCH_PRIORS = {"launch_s": Prior(centre=4e-5, spread=0.1), "step_overhead_s": Prior(centre=0.01, spread=0.4)}
"""Of stacks that launch PyTorch operators one by one: an operator of ours is some four kernels of about 10 us.

Chosen with the published rows in view and held tight: without it the few rows of other sources decide how long the
host of small networks takes.
"""
DEEPSPEED_PRIORS = {
    "memory": Prior(centre=1.4, spread=0.15),
    "launch_s": Prior(centre=7e-5, spread=0.3),
    "step_overhead_s": Prior(centre=0.005, spread=0.4),
    "micro_batch_overhead_s": Prior(centre=2e-3, spread=0.5),
    "pipeline_exposed": Prior(centre=0.8, spread=0.1),
}
"""DeepSpeed takes about twice as long for an operator, on A100 and GH200 alike, and its pipeline engine works through
a list of instructions for each micro-batch, and waits for nearly all of what it sends, but for no more. Its kernels
bound by memory are PyTorch's, held near those of other stacks: two large sources want them 15 % slower and faster, and
neither may say alone."""
DETERMINISTIC_PRIORS = {"launch_s": Prior(centre=1e-4, spread=0.5), "step_overhead_s": Prior(centre=0.05, spread=1.0)}
"""Of functional tests: tiny networks under checks and logs, bound by the host alone."""
MINDSPORE_PRIORS = {
    "optimizer": Prior(centre=6.0, spread=0.15),
    "launch_s": Prior(centre=8e-6, spread=0.2),
    "step_overhead_s": Prior(centre=0.01, spread=0.5),
}
"""MindSpore's Adam with decay (``_update_run_op`` of ``mindspore/nn/optim/adam.py``) is some seventeen operators on
float32, which move 156 bytes a weight where one kernel moves 28. A graph that is sunk to the device leaves the
host little to do, for operators and between steps."""
_MINDSPORE_GPU_PRIORS = {"launch_s": Prior(centre=8e-5, spread=0.3)}
"""MindSpore's graphs run as operators where no device takes them whole."""
_OWN_PRIORS = {"deepspeed": DEEPSPEED_PRIORS, "mindspore": MINDSPORE_PRIORS, "mindspore_gpu": _MINDSPORE_GPU_PRIORS}
_ONE_BY_ONE = ("eager", "megatron", "transformer_engine", "mindspeed")
ATTENTION_PRIOR = Prior(centre=0.92, spread=0.06)
"""Held tight: few sources take one kernel, and none may say alone how fast it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """A kind of work whose time is made longer to see what plans owe to it.

    ``devices``, ``stacks`` and ``attention`` say whose coefficients are multiplied; ``matters`` for which runs.
    """

    name: str
    devices: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    matters: Callable[[TrainingRun], bool] = lambda run: True


def _pipelined(run: TrainingRun) -> bool:
    return run.setup.pp > 1


def _has_experts(run: TrainingRun) -> bool:
    return isinstance(run.network, TransformerShape) and run.network.experts is not None


def _of_images(run: TrainingRun) -> bool:
    return isinstance(run.network, LayeredNetwork)


def _of_words(run: TrainingRun) -> bool:
    return not _of_images(run)


def _in_half(run: TrainingRun) -> bool:
    return run.setup.precision in ("fp16", "bf16")


WORK = (
    Slowed(name="matmul", devices=("matmul",), matters=_of_words),
    Slowed(name="low_precision", devices=("low_precision",), matters=lambda run: run.setup.precision in ("fp8", "fp4")),
    Slowed(name="attention", devices=("attention",), matters=_of_words),
    Slowed(name="memory", devices=("memory",), matters=_of_words),
    Slowed(name="convolution", devices=("convolution",), matters=_of_images),
    Slowed(name="image", devices=("image",), matters=_of_images),
    Slowed(name="copies", stacks=("copies",), matters=lambda run: _of_images(run) and _in_half(run)),
    Slowed(name="single_copies", stacks=("single_copies",), matters=lambda run: _of_images(run) and not _in_half(run)),
    Slowed(name="inside", devices=("inside",), matters=lambda run: run.setup.devices > 1),
    Slowed(name="outside", devices=("outside",), matters=lambda run: run.setup.devices > 1),
    Slowed(name="launch", devices=("launch",)),
    Slowed(name="optimizer", stacks=("optimizer",), matters=_of_words),
    Slowed(name="step", stacks=("step_overhead_s",), matters=_of_words),
    Slowed(name="micro_batch", stacks=("micro_batch_overhead_s",), matters=_of_words),
    Slowed(name="pipeline_exposed", stacks=("pipeline_exposed",), matters=_pipelined),
    Slowed(name="tensor_exposed", stacks=("tensor_exposed",), matters=lambda run: run.setup.tp > 1),
    Slowed(name="context_exposed", stacks=("context_exposed",), matters=_has_experts),
    Slowed(
        name="shard_apart", stacks=("shard_apart",),
        matters=lambda run: run.setup.optimizer_sharding is OptimizerSharding.ZERO3,
    ),
)  # fmt: skip
"""Kinds of work. What a stack makes of products, memory and launches multiplies what the device makes of them."""
_WORK_OF: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*DEVICE_PRIORS, *STACK_PRIORS, *IMAGE_STACK_PRIORS)},
    "launch_s": ("launch",),
    "step_overhead_s": ("step",),
    "micro_batch_overhead_s": ("micro_batch",),
}
"""The work that a coefficient multiplies, by the coefficient's name."""
_STACK_WORK: Mapping[str, tuple[str, ...]] = {**_WORK_OF, "matmul": ("matmul", "low_precision")}


@dataclass(frozen=True, kw_only=True, eq=False)
class Responses:
    """Planned runs (N,), their seconds by some coefficients, and how these change with each kind of `WORK` (N, W)."""

    runs: tuple[TrainingRun, ...]
    software: SoftwareFile
    time_s: FloatArray
    response_s: FloatArray

    def of(self, rows: npt.NDArray[np.bool_]) -> Responses:
        """Those of some rows."""
        runs = tuple(run for run, counts in zip(self.runs, rows, strict=True) if counts)
        return replace(self, runs=runs, time_s=self.time_s[rows], response_s=self.response_s[rows])


def responses(
    runs: Sequence[TrainingRun], software: SoftwareFile, advance: Callable[[int], None] | None = None
) -> Responses:
    """Plan every run, as it is and with each kind of work made slower; NaN where a run has no plan.

    ``software`` has the coefficients; those of devices that it lacks are the profiles'.
    """
    devices = {run.family: _own(run) for run in reversed(runs)} | dict(software.coefficients.devices)
    software = replace(software, coefficients=replace(software.coefficients, devices=devices))
    wanted, files, places = list(runs), [software] * len(runs), [(index, -1) for index in range(len(runs))]
    for kind, work in enumerate(WORK):
        slower = _slower(software, work)
        for index, run in enumerate(runs):
            if work.matters(run):
                wanted.append(run)
                files.append(slower)
                places.append((index, kind))
    times = np.full((len(runs), 1 + len(WORK)), np.nan)
    times[:, 1:] = np.inf
    for (index, kind), told in zip(places, predict_planned(wanted, advance, software=files), strict=True):
        times[index, kind + 1] = told.step_time_s if isinstance(told, RunPrediction) else np.nan
    base = times[:, 0]
    grown = np.where(np.isinf(times[:, 1:]), base[:, None], times[:, 1:]) - base[:, None]
    return Responses(runs=tuple(runs), software=software, time_s=base, response_s=grown / (STEP - 1))


def _own(run: TrainingRun) -> dict[str, float]:
    return {name: run.hardware.training.get(name, 1.0) for name in DEVICE_PRIORS | IMAGE_DEVICE_PRIORS}


def _slower(software: SoftwareFile, work: Slowed) -> SoftwareFile:
    found = software.coefficients
    changed = replace(
        found,
        devices={family: _times(values, work.devices) for family, values in found.devices.items()},
        stacks={stack: _times(values, work.stacks) for stack, values in found.stacks.items()},
    )
    return replace(software, coefficients=changed)


def _times(values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: value * (STEP if name in names else 1.0) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """Fitted coefficients, and the logarithm of predicted over measured of all rows."""

    software: SoftwareCoefficients
    theta: FloatArray
    residuals: FloatArray


class StepFit:
    """The rows of a fit: (N,) planned runs, their measured seconds and their sources.

    ``names`` says of every coefficient whose it is and which.
    """

    def __init__(self, planned: Responses, measured_s: FloatArray, sources: Sequence[str]) -> None:
        runs, known = planned.runs, planned.software.coefficients
        self.planned, self.target = planned, np.log(measured_s)
        self.sources = np.array(sources)
        # Functional tests train tiny networks: their times say little of anything else.
        # Where parameters are gathered apart the network between nodes decides, which differs from day to day.
        # What dispatches the tokens of experts, and over which network, few rows say.
        doubtful = [run.setup.deterministic or _gathers_apart(run) or _has_experts(run) for run in runs]
        self.trust = np.where(doubtful, 0.3, 1.0)
        self.families, self.family = _codes([run.family for run in runs])
        self.stacks, self.stack = _codes([run.stack_key for run in runs])
        self.kernels, self.kernel = _codes([str(run.setup.attention) if _of_words(run) else "" for run in runs])
        entries = [
            (family, name, prior, known.devices.get(family, {}).get(name, 1.0))
            for family in self.families
            for name, prior in _device_priors(family, [run for run in runs if run.family == family]).items()
        ]
        entries += [
            (stack, name, prior, known.stacks.get(stack, {}).get(name, 0.0))
            for stack in self.stacks
            for name, prior in _stack_priors(stack, [run for run in runs if run.stack_key == stack]).items()
        ]
        entries += [
            (kernel, "attention", ATTENTION_PRIOR, known.attention.get(kernel, 1.0))
            for kernel in self.kernels
            if kernel
        ]
        self.names = [(owner, name) for owner, name, _, _ in entries]
        self.centres: FloatArray = np.log([prior.centre for _, _, prior, _ in entries])
        self.spreads: FloatArray = np.array([prior.spread for _, _, prior, _ in entries])
        # What was planned by a coefficient of zero, or by none, tells nothing about it: it stays as expected.
        self.start: FloatArray = np.log([value or prior.centre for _, _, prior, value in entries])
        self._shares = self._by_coefficient()

    def _by_coefficient(self) -> npt.NDArray[np.bool_]:
        """Which kinds of work (coefficients, N, W) of a run a coefficient multiplies."""
        place = {work.name: index for index, work in enumerate(WORK)}
        found = np.zeros((len(self.names), len(self.target), len(WORK)), dtype=bool)
        owners = ((self.families, self.family), (self.stacks, self.stack), (self.kernels, self.kernel))
        rows_of = {owner: code == index for names, code in owners for index, owner in enumerate(names)}
        for index, (owner, name) in enumerate(self.names):
            for kind in (_STACK_WORK if owner in self.stacks else _WORK_OF)[name]:
                found[index, rows_of[owner], place[kind]] = True
        return found

    def _factors(self, theta: FloatArray) -> FloatArray:
        """Factors (N, W) by which coefficients change the planned time of each kind of work."""
        return np.asarray(np.exp(np.einsum("c,cnw->nw", theta - self.start, self._shares)))

    def predicted_s(self, theta: FloatArray) -> FloatArray:
        """Predicted seconds, (N,)."""
        base = self.planned.time_s
        grown = base + ((self._factors(theta) - 1.0) * self.planned.response_s).sum(axis=1)
        return np.asarray(np.maximum(grown, _SHORTEST * base))

    def fit(self, rows: npt.NDArray[np.bool_] | None = None, start: FloatArray | None = None) -> Fit:
        """Fit on all rows, or on those of a mask; `start` is where the search begins."""
        used = np.ones(len(self.target), dtype=bool) if rows is None else rows
        names, code = _codes(self.sources[used].tolist())
        weights = np.bincount(code, minlength=len(names))[code] ** -0.25 * self.trust[used]

        def residuals(theta: FloatArray) -> tuple[FloatArray, FloatArray]:
            """Residuals whose squares are the soft_l1 loss, and their slopes by the predicted logarithm."""
            error = (np.log(self.predicted_s(theta)) - self.target)[used] / _RESIDUAL_SCALE
            bend = np.sqrt(1 + error**2)
            robust: FloatArray = np.sqrt(2 * (bend - 1))
            slope: FloatArray = np.where(robust > _FLAT, np.abs(error) / (bend * np.maximum(robust, _FLAT)), 1.0)
            return weights * np.sign(error) * robust, weights * slope / _RESIDUAL_SCALE

        def slopes(theta: FloatArray) -> FloatArray:
            return self.derivatives(theta)[used]

        theta = _minimise(residuals, slopes, self.start if start is None else start, self.centres, self.spreads)
        return Fit(
            software=self._coefficients(np.exp(theta)),
            theta=theta,
            residuals=np.log(self.predicted_s(theta)) - self.target,
        )

    def derivatives(self, theta: FloatArray) -> FloatArray:
        """Derivatives of the predicted logarithms, (N, coefficients)."""
        moved = self._factors(theta) * self.planned.response_s / self.predicted_s(theta)[:, None]
        return np.asarray(np.einsum("nw,cnw->nc", moved, self._shares))

    def _coefficients(self, values: FloatArray) -> SoftwareCoefficients:
        found: dict[str, dict[str, float]] = {}
        for (owner, name), value in zip(self.names, values.tolist(), strict=True):
            found.setdefault(owner, {})[name] = value
        return SoftwareCoefficients(
            devices={family: found[family] for family in self.families},
            stacks={stack: found[stack] for stack in self.stacks},
            attention={kernel: found[kernel]["attention"] for kernel in self.kernels if kernel},
        )


def _gathers_apart(run: TrainingRun) -> bool:
    return run.setup.optimizer_sharding is OptimizerSharding.ZERO3 and not run.setup.overlap_parameters


def _device_priors(family: str, runs: Sequence[TrainingRun]) -> dict[str, Prior]:
    """Of the coefficients that some of the runs on a family of devices speak for."""
    words = DEVICE_PRIORS | (_HOST_PRIORS if family.startswith("ascend") else {})
    return (words if any(map(_of_words, runs)) else {}) | (IMAGE_DEVICE_PRIORS if any(map(_of_images, runs)) else {})


def _stack_priors(stack: str, runs: Sequence[TrainingRun]) -> dict[str, Prior]:
    """Of the coefficients that some of the runs with a stack speak for."""
    usual = DETERMINISTIC_PRIORS if stack.endswith("_deterministic") else PYTORCH_PRIORS if stack in _ONE_BY_ONE else {}
    words = STACK_PRIORS | _OWN_PRIORS.get(stack, usual)
    images = IMAGE_STACK_PRIORS | (_PLANES_PRIORS if stack == Stack.EAGER else {})
    return (words if any(map(_of_words, runs)) else {}) | (images if any(map(_of_images, runs)) else {})


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
