"""Coefficients of whole training steps from published rows, the folds that judge them, and intervals.

Everything is fitted twice: on all rows, and once for every source without that source. The intervals come from the
residuals of both: the one says how well runs like the fitted ones are predicted, the other runs of strangers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from planner.cost.software_file import (
    ANY,
    SHIPPED,
    SOFTWARE_FOLDER,
    Interval,
    SoftwareCoefficients,
    SoftwareFile,
    shipped_software,
    write_software,
)
from planner.cost.stacks import LayeredCoefficients, family_of
from planner.cost.training_run import LayeredNetwork, TrainingRun, TransformerShape
from planner.published.fitting import Fit, FloatArray, Responses, StepFit, responses
from planner.published.fitting_layered import LayeredFit, fit_layered
from planner.published.layered.prediction import parameters_of, predict_layered
from planner.published.pinned import NotPinnedError, pinned_run
from planner.published.reading import MeasuredRow
from simulator.calibration.fit_profiles import with_fields
from simulator.errors import InputError
from simulator.hardware import PROFILE_SUFFIX
from simulator.profiles import check_profile
from simulator.whole_file import write_whole

INSIDE = 0.9
MOST_ROWS, MOST_ROWS_OF_STACK = 20, 10
"""Rows of a source that are planned for a fit; of networks without a sequence, of a source and a stack."""
_ROWS_FOR_INTERVAL = 12
_QUANTILES = ((1 - INSIDE) / 2, (1 + INSIDE) / 2)
_WIDEST_ERROR = math.log(8)  # beyond, a row describes something else than it says
_TRIMMED = 0.4  # rows whose time is missed by more than half are listed, not learned from


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
    """Fits on all rows and on those of all sources but one.

    Parameters
    ----------
    rows, planned
        Rows with a plan, and how their plans respond to each kind of work, in the same order.
    layered
        Rows of networks described layer by layer, those with a plan among them.
    """

    def __init__(self, rows: Sequence[MeasuredRow], planned: Responses, layered: Sequence[MeasuredRow] = ()) -> None:
        known = np.isfinite(planned.time_s) & np.isfinite(planned.response_s).all(axis=1)
        self._planned = [row for row, counts in zip(rows, known, strict=True) if counts]
        self._layered = list(layered)
        self._by_layers = [row for row in layered if not _has_plan(row)]
        self.rows = (*self._planned, *self._by_layers)
        self._before = planned.software
        self._steps: StepFit | None = None
        self._all: Fit | None = None
        if self._planned:
            measured = np.array([row.measured_time_s for row in self._planned])
            steps = StepFit(planned.of(known), measured, [row.source for row in self._planned])
            self._sane = np.abs(np.log(steps.planned.time_s / measured)) < _WIDEST_ERROR
            first = steps.fit(rows=self._sane)
            self._sane &= (np.abs(first.residuals) < _TRIMMED) | (steps.trust < 1)
            self._steps, self._all = steps, steps.fit(rows=self._sane, start=first.theta)
        self._all_layered = fit_layered(self._layered) if self._layered else None

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources with rows that can teach, sorted."""
        return tuple(sorted({row.source for row in self.rows}))

    def everything(self) -> SoftwareFile:
        """Coefficients fitted on all rows."""
        return self._software(self._all, _coefficients(self._all_layered))

    def without(self, source: str) -> SoftwareFile:
        """Coefficients fitted on the rows of all other sources."""
        return self._software(self._steps_without(source), self._layered_without(source))

    def residuals(self) -> FloatArray:
        """Logarithms of predicted over measured of `rows`, by the fit on all."""
        layered = _layered_logarithms(self._by_layers, _coefficients(self._all_layered))
        return np.concatenate([np.empty(0) if self._all is None else self._all.residuals, layered])

    def held_out(self) -> FloatArray:
        """The same by the fit without the row's source."""
        found = np.full(len(self.rows), np.nan)
        for source in self.sources:
            own = np.array([row.source == source for row in self.rows])
            steps = self._steps_without(source)
            layered = [row for row in self._by_layers if row.source == source]
            found[own] = np.concatenate(
                [
                    np.empty(0) if steps is None else steps.residuals[own[: len(self._planned)]],
                    _layered_logarithms(layered, self._layered_without(source)),
                ]
            )
        return found

    def _steps_without(self, source: str) -> Fit | None:
        if self._steps is None or self._all is None or source not in self._steps.sources:
            return self._all
        return self._steps.fit(rows=self._sane & (self._steps.sources != source), start=self._all.theta)

    def _layered_without(self, source: str) -> LayeredCoefficients:
        others = [row for row in self._layered if row.source != source]
        if len(others) == len(self._layered):
            return _coefficients(self._all_layered)
        return fit_layered(others, near=self._all_layered).coefficients

    def _software(self, steps: Fit | None, layered: LayeredCoefficients) -> SoftwareFile:
        known = self._before.coefficients
        if steps is not None:
            # What no row speaks for stays as it is.
            known = SoftwareCoefficients(
                devices=_merged(known.devices, steps.software.devices),
                stacks=_merged(known.stacks, steps.software.stacks),
                attention={**known.attention, **steps.software.attention},
            )
        return replace(self._before, coefficients=known, layered=layered if self._layered else self._before.layered)


def planned_folds(rows: Sequence[MeasuredRow]) -> Folds:
    """Plan at most `MOST_ROWS` transformers of each source, and other networks of each source and stack, and fit them.

    Rows are evenly chosen, and each is planned up to a dozen times.
    """
    taught = [row for row in rows if usable(row)]
    by_source: dict[tuple[str, str], list[MeasuredRow]] = {}
    for row in taught:
        if isinstance(_run(row).network, TransformerShape):
            by_source.setdefault((row.source, ""), []).append(row)
        elif _has_plan(row):
            by_source.setdefault((row.source, _run(row).stack_key), []).append(row)
    chosen = [
        row
        for (_, stack), own in by_source.items()
        for row in own[:: max(1, -(-len(own) // (MOST_ROWS_OF_STACK if stack else MOST_ROWS)))]
    ]
    planned = responses([_run(row) for row in chosen], shipped_software())
    return Folds(chosen, planned, [row for row in taught if isinstance(_run(row).network, LayeredNetwork)])


def calibrate_steps(folds: Folds) -> Calibration:
    """Coefficients and intervals of all rows.

    Raises
    ------
    InputError
        No row states both a configuration and a time.
    """
    if not folds.rows:
        raise InputError("no row states both a configuration and a time; give measurements of whole training steps")
    residuals, held_out = folds.residuals(), folds.held_out()
    software = replace(folds.everything(), intervals=_EVERYWHERE | intervals(folds.rows, residuals, held_out))
    return Calibration(software=software, rows=folds.rows, residuals=residuals, held_out=held_out)


def left_out_files(rows: Sequence[MeasuredRow], folds: Folds) -> list[SoftwareFile]:
    """For each row the coefficients that the rows of all other sources give, with the intervals as they were."""
    everything = folds.everything()
    found = {source: folds.without(source) for source in folds.sources}
    return [found.get(row.source, everything) for row in rows]


def intervals(
    rows: Sequence[MeasuredRow], residuals: FloatArray, held_out: FloatArray
) -> dict[tuple[str, str, str], Interval]:
    """Quantiles of measured over predicted by kind of network, device family and stack, of both kinds of residuals."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for index, row in enumerate(rows):
        run = _run(row)
        kind, family, stack = run.interval_key
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


def _residuals_by(calibration: Calibration, name: Callable[[TrainingRun], str]) -> Mapping[str, FloatArray]:
    """Residuals of the rows whose runs have a name in common."""
    groups: dict[str, list[float]] = {}
    for row, residual in zip(calibration.rows, calibration.residuals.tolist(), strict=True):
        groups.setdefault(name(_run(row)), []).append(residual)
    return {key: np.array(values) for key, values in groups.items()}


def _layered_logarithms(rows: Sequence[MeasuredRow], coefficients: LayeredCoefficients) -> FloatArray:
    """Logarithms of predicted over measured of networks described layer by layer."""
    runs = [_run(row) for row in rows]
    told = [predict_layered(run, parameters_of(coefficients, run)).step_time_s for run in runs]
    return np.log(np.array(told) / np.array([row.measured_time_s for row in rows])) if rows else np.empty(0)


def _merged(
    known: Mapping[str, Mapping[str, float]], found: Mapping[str, Mapping[str, float]]
) -> dict[str, Mapping[str, float]]:
    return {**known, **{owner: {**known.get(owner, {}), **values} for owner, values in found.items()}}


def _has_plan(row: MeasuredRow) -> bool:
    try:
        pinned_run(_run(row))
    except NotPinnedError:
        return False
    return True


def _coefficients(fit: LayeredFit | None) -> LayeredCoefficients:
    return LayeredCoefficients() if fit is None else fit.coefficients


def _run(row: MeasuredRow) -> TrainingRun:
    assert row.run is not None
    return row.run


# Where no row tells: from half to twice the prediction.
_EVERYWHERE = {(kind, ANY, ANY): Interval(low=0.5, high=2.0, rows=1) for kind in ("transformer", "layered")}


COMMAND = "meshwright calibrate --from-measurements"
_DIGITS = 4


def write_calibration(calibration: Calibration, folder: Path) -> list[Path]:
    """Write ``software/training.yaml`` in `folder`, and the section ``training`` of the profiles there."""
    (folder / SOFTWARE_FOLDER).mkdir(exist_ok=True)
    software = folder / SOFTWARE_FOLDER / SHIPPED
    write_software(software_content(calibration), software)
    by_device = _residuals_by(calibration, lambda run: run.family)
    written = [software]
    for path in sorted(folder.glob(f"*{PROFILE_SUFFIX}")):
        family = family_of(check_profile(str(path)).device_name)
        values = calibration.software.coefficients.devices.get(family)
        if values is None:
            continue
        source = _source(by_device[family], f"on devices of the {family} family")
        fields = {f"training.{name}": {"value": _rounded(values[name]), "source": source} for name in values}
        write_whole(path, with_fields(path.read_text(encoding="utf-8"), fields))
        written.append(path)
    return written


def software_content(calibration: Calibration) -> dict[str, object]:
    """The software file as plain data."""
    found = calibration.software
    by_stack, every = _residuals_by(calibration, lambda run: run.stack_key), calibration.residuals

    def sourced(values: Mapping[str, float], source: str) -> dict[str, object]:
        return {name: {"value": _rounded(value), "source": source} for name, value in values.items()}

    attention = _source(every, "of all transformers, by attention kernel")
    return {
        "format": "meshwright-software",
        "version": 1,
        "stacks": {
            stack: sourced(values, _source(by_stack[stack], f"with the stack {stack}"))
            if stack in by_stack
            else sourced(values, found.sources[stack])
            for stack, values in sorted(found.coefficients.stacks.items())
        },
        "attention": sourced(found.coefficients.attention, attention),
        "layered": {"source": _source(every, "of networks described layer by layer"), **_layered(found.layered)},
        "intervals": [
            {
                "network": network, "family": family, "stack": stack, "low": _rounded(interval.low),
                "high": _rounded(interval.high), "rows": interval.rows,
            }
            for (network, family, stack), interval in found.intervals.items()
        ],
        "intervals_source": (
            f"fitted: quantiles that hold {INSIDE:.0%} of {len(every)} rows' residuals, of the fit on all sources "
            f"(median error {_median_error(every)}) and of fits without the row's source "
            f"({_median_error(calibration.held_out)}), {COMMAND}"
        ),
    }  # fmt: skip


def _layered(coefficients: LayeredCoefficients) -> dict[str, object]:
    return {
        part: {group: {name: _rounded(value) for name, value in values.items()} for group, values in groups.items()}
        for part, groups in (("devices", coefficients.devices), ("stacks", coefficients.stacks))
    }


def _source(residuals: FloatArray, which: str) -> str:
    error = np.abs(np.expm1(residuals))
    return (
        f"fitted: {COMMAND}, {len(residuals)} rows of whole training steps {which}, median error "
        f"{np.median(error):.0%}, 90th percentile {np.quantile(error, 0.9):.0%}"
    )


def _median_error(residuals: FloatArray) -> str:
    return f"{np.nanmedian(np.abs(np.expm1(residuals))):.0%}"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
