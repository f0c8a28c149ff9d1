"""Coefficients of whole training steps from published rows, the folds that judge them, and intervals.

Everything is fitted twice: on all rows, and once for every source without that source. The intervals come from the
residuals of both: the one says how well runs like the fitted ones are predicted, the other runs of strangers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.cost.layered_parameters import LayeredCoefficients
from planner.cost.software_file import ANY, Interval, SoftwareFile
from planner.cost.stacks import family_of
from planner.cost.training_run import LayeredNetwork, RunPrediction, TrainingRun, TransformerShape
from planner.published.estimate.coefficients import interval_key, stack_key
from planner.published.estimate.columns import FloatArray
from planner.published.estimate.predict import predict_runs
from planner.published.estimate.work import work_of
from planner.published.fitting import Fit, StepFit
from planner.published.fitting_layered import LayeredFit, fit_layered
from planner.published.predictions import predict_each
from planner.published.reading import MeasuredRow
from simulator.errors import InputError

INSIDE = 0.9
_ROWS_FOR_INTERVAL = 12
_QUANTILES = ((1 - INSIDE) / 2, (1 + INSIDE) / 2)
_WIDEST_ERROR = math.log(8)  # beyond, a row describes something else than it says
_TRIMMED = 0.4  # rows whose time is missed by more than half are listed, not learned from
Advance = Callable[[], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Coefficients fitted on all rows, with intervals, and the rows with their residuals.

    ``residuals`` (N,) are logarithms of predicted over measured of `rows`; ``held_out`` those of the fold without
    the row's source.
    """

    software: SoftwareFile
    rows: tuple[MeasuredRow, ...]
    residuals: FloatArray
    held_out: FloatArray


def usable(row: MeasuredRow) -> bool:
    """Whether a row can teach: it ran, and both its configuration and its time are known."""
    return row.run is not None and row.outcome in ("", "ok") and math.isfinite(row.measured_time_s)


class Folds:
    """Fits on all rows and on those of all sources but one."""

    def __init__(self, rows: Sequence[MeasuredRow]) -> None:
        self.rows = tuple(row for row in rows if usable(row))
        self._transformers = [row for row in self.rows if isinstance(_run(row).network, TransformerShape)]
        self._layered = [row for row in self.rows if isinstance(_run(row).network, LayeredNetwork)]
        runs = [_run(row) for row in self._transformers]
        measured = np.array([row.measured_time_s for row in self._transformers])
        self._steps = StepFit(work_of(runs), runs, measured, [row.source for row in self._transformers])
        self._sane = np.abs(self._steps.predicted_logarithms(self._steps.centres) - np.log(measured)) < _WIDEST_ERROR
        first = self._steps.fit(rows=self._sane)
        # The closed form is fitted; what the simulated schedules add to it changes little from fit to fit.
        self._steps.offset = self._simulated(runs, first) - self._steps.predicted_logarithms(first.theta)
        second = self._steps.fit(rows=self._sane, start=first.theta)
        self._sane &= (np.abs(second.residuals) < _TRIMMED) | (self._steps.trust < 1)
        self._all = self._steps.fit(rows=self._sane, start=second.theta)
        self._all_layered = fit_layered(self._layered) if self._layered else None

    @staticmethod
    def _simulated(runs: Sequence[TrainingRun], fit: Fit) -> FloatArray:
        software = SoftwareFile(coefficients=fit.software, layered=LayeredCoefficients(), intervals=_EVERYWHERE)
        return np.log([prediction.step_time_s for prediction in predict_runs(runs, software)])

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources with rows that can teach, sorted."""
        return tuple(sorted({row.source for row in self.rows}))

    def everything(self) -> SoftwareFile:
        """Coefficients fitted on all rows."""
        return self._software(self._all, _coefficients(self._all_layered))

    def without(self, source: str) -> SoftwareFile:
        """Coefficients fitted on the rows of all other sources."""
        steps, layered = self._all, _coefficients(self._all_layered)
        if any(row.source == source for row in self._transformers):
            others = self._sane & np.array([row.source != source for row in self._transformers])
            steps = self._steps.fit(rows=others, start=self._all.theta)
        if any(row.source == source for row in self._layered):
            others_layered = [row for row in self._layered if row.source != source]
            layered = fit_layered(others_layered, near=self._all_layered).coefficients
        return self._software(steps, layered)

    @staticmethod
    def _software(steps: Fit, layered: LayeredCoefficients) -> SoftwareFile:
        return SoftwareFile(coefficients=steps.software, layered=layered, intervals={})


def calibrate_steps(rows: Sequence[MeasuredRow], advance: Advance | None = None) -> Calibration:
    """Fit everything on `rows`; `advance` is called after each fold."""
    folds = Folds(rows)
    if not folds.rows:
        raise InputError("no row states both a configuration and a time; give measurements of whole training steps")
    software = folds.everything()
    target = np.log([row.measured_time_s for row in folds.rows])
    residuals = _logarithms(folds.rows, software) - target
    held_out = np.full(len(folds.rows), np.nan)
    for source in folds.sources:
        members = [index for index, row in enumerate(folds.rows) if row.source == source]
        chosen = [folds.rows[index] for index in members]
        held_out[members] = _logarithms(chosen, folds.without(source)) - target[members]
        if advance is not None:
            advance()
    software = replace(software, intervals=_EVERYWHERE | intervals(folds.rows, residuals, held_out))
    return Calibration(software=software, rows=folds.rows, residuals=residuals, held_out=held_out)


def held_out_predictions(
    rows: Sequence[MeasuredRow], shipped: SoftwareFile, advance: Advance | None = None
) -> Iterator[tuple[TrainingRun, RunPrediction]]:
    """Every run of `rows`, source by source, with its prediction by the fit without that source.

    Runs that cannot be predicted are left out. The intervals are those of the shipped software.
    """
    folds = Folds(rows)
    for source in sorted({row.source for row in rows if row.run is not None}):
        software = folds.without(source) if source in folds.sources else folds.everything()
        software = replace(software, intervals=shipped.intervals)
        runs = [row.run for row in rows if row.source == source and row.run is not None]
        for run, outcome in zip(runs, predict_each(runs, partial(predict_runs, software=software)), strict=True):
            if isinstance(outcome, RunPrediction):
                yield run, outcome
        if advance is not None:
            advance()


def intervals(
    rows: Sequence[MeasuredRow], residuals: FloatArray, held_out: FloatArray
) -> dict[tuple[str, str, str], Interval]:
    """Quantiles of measured over predicted by kind of network, device family and stack, of both kinds of residuals."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, row in enumerate(rows):
        run = _run(row)
        kind, family, stack = interval_key(run)
        for key in ((kind, family, stack), (kind, family, ANY), (kind, ANY, stack), (kind, ANY, ANY)):
            groups.setdefault(key, []).append(index)
    found = {}
    for key, members in sorted(groups.items()):
        if len(members) < _ROWS_FOR_INTERVAL and key[1:] != (ANY, ANY):
            continue
        errors = np.concatenate([residuals[members], held_out[members]])
        low, high = np.quantile(np.exp(-errors[np.isfinite(errors)]), _QUANTILES)
        found[key] = Interval(low=min(float(low), 1.0), high=max(float(high), 1.0), rows=len(members))
    return found


def rows_by_device(calibration: Calibration) -> Mapping[str, FloatArray]:
    """Residuals of the rows of each device family."""
    return _grouped(calibration, lambda run: family_of(run.hardware.device_name))


def rows_by_stack(calibration: Calibration) -> Mapping[str, FloatArray]:
    """Residuals of the rows of each stack."""
    return _grouped(calibration, stack_key)


def _grouped(calibration: Calibration, name: Callable[[TrainingRun], str]) -> Mapping[str, FloatArray]:
    groups: dict[str, list[float]] = {}
    for row, residual in zip(calibration.rows, calibration.residuals.tolist(), strict=True):
        groups.setdefault(name(_run(row)), []).append(residual)
    return {key: np.array(values) for key, values in groups.items()}


def _logarithms(rows: Sequence[MeasuredRow], software: SoftwareFile) -> FloatArray:
    wide = replace(software, intervals=software.intervals or _EVERYWHERE)
    return np.log([p.step_time_s for p in predict_runs([_run(row) for row in rows], wide)])


def _coefficients(fit: LayeredFit | None) -> LayeredCoefficients:
    return LayeredCoefficients() if fit is None else fit.coefficients


def _run(row: MeasuredRow) -> TrainingRun:
    assert row.run is not None
    return row.run


# Where no row tells: from half to twice the prediction.
_EVERYWHERE = {(kind, ANY, ANY): Interval(low=0.5, high=2.0, rows=1) for kind in ("transformer", "layered")}
