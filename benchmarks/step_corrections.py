"""What whole steps put on kernels and messages of plans: responses, the fit, and what profiles keep of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from benchmarks.predicted_runs import PROFILES, Predictor
from benchmarks.step_factors import (
    NAMES,
    PlannedSteps,
    StepFactors,
    centres,
    fit_factors,
    left_out_s,
)
from planner.cost.software_file import shipped_software
from planner.cost.stacks import USUAL_STACKS, family_of
from planner.published.fitting import FloatArray
from planner.published.pinned import PinnedRun
from simulator.calibration.fit_profiles import with_fields
from simulator.hardware import PROFILE_SUFFIX, Hardware
from simulator.launches import LAUNCH
from simulator.profiles import load_profile
from simulator.whole_file import write_whole

COMMAND = "python -m benchmarks.whole_steps MEASUREMENTS_DIR --fit --write"
RAISED = 1.3
"""Responses are differences between a factor of this and one of 1."""
ENOUGH = 8
"""Runs from which a profile has an interval of its own; fewer take that of their family, then that of all."""
INSIDE = 0.9


def responses(predictor: Predictor, run: PinnedRun) -> dict[str, float]:
    """Seconds of a run without corrections, and how they grow with the factor of each kind of work."""
    neutral = predictor.closed_form_s(run, _with({}))
    grown = {name: predictor.closed_form_s(run, _with({f"planned_{name}": RAISED})) for name in NAMES}
    return {"neutral": neutral, **{name: (seconds - neutral) / (RAISED - 1) for name, seconds in grown.items()}}


def _with(training: Mapping[str, float]) -> Callable[[Hardware], Hardware]:
    name = ",".join(training)
    return lambda hardware: replace(
        hardware, training={**_launches(hardware), **training}, hash=f"{hardware.hash} {name}"
    )


def _launches(hardware: Hardware) -> dict[str, float]:
    """The host's time for a launch as profiles state it: that of the usual software on the device's hosts.

    Ascend devices get whole graphs to run, kernel by kernel, from themselves.
    """
    if family_of(hardware.device_name).startswith("ascend"):
        return {}
    stacks = shipped_software().coefficients.stacks
    usual = np.median([stacks[stack]["launch_s"] for stack in USUAL_STACKS if "launch_s" in stacks.get(stack, {})])
    return {LAUNCH: float(usual) * hardware.training.get("launch", 1.0)}


def _launch_source(hardware: Hardware) -> str:
    own = next(row.source for row in hardware.rows if row.field == "training.launch")
    return (
        f"{own}; times the median of PyTorch's stacks for an operator (launch_s of hw_profiles/software/training.yaml)"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Corrections:
    """Runs with their predictions by the fit (``fitted``) and by fits without their source (``left_out``), seconds."""

    table: pd.DataFrame
    factors: StepFactors
    centres: Mapping[str, FloatArray]

    def of_family(self, family: str) -> FloatArray:
        """Factors (7,) of a family, with runs or without."""
        return self.factors.families.get(family, self.centres[family] * self.factors.common)

    def interval(self, profile: str, family: str) -> tuple[float, float, pd.DataFrame, str]:
        """Parts below and above the prediction that hold 90 % of the runs whose source was left out, and those runs."""
        table = self.table
        nearest = (
            (table[table.profile == profile], "of this profile"),
            (table[table.family == family], f"on devices of the {family} family"),
        )
        part, which = next((found for found in nearest if len(found[0]) >= ENOUGH), (table, "on all devices"))
        away = part.measured / part.left_out
        # The quantiles of few runs are taken outward, so that so many of them do lie inside.
        low = np.quantile(away, (1 - INSIDE) / 2, method="lower")
        high = np.quantile(away, (1 + INSIDE) / 2, method="higher")
        return max(1 - float(low), 0.01), max(float(high) - 1, 0.01), part, which

    def show(self, console: Console) -> None:
        """Print factors by family, and errors by profile and by source."""
        shown = Table("family", *NAMES, title="factors on the time of kernels and messages")
        for family in self.centres:
            shown.add_row(family, *(f"{value:.3f}" for value in self.of_family(family)))
        console.print(shown)
        for key in ("profile", "source"):
            table = Table(key, "runs", "before", "fitted", "left out", "error", "left out", "inside")
            for name, part in self.table.groupby(key):
                fitted, left = part.fitted / part.measured, part.left_out / part.measured
                medians = (part.ratio.median(), fitted.median(), left.median())
                errors = ((fitted - 1).abs().mean(), (left - 1).abs().mean(), self._inside(part))
                table.add_row(str(name), str(len(part)), *(f"{n:.2f}" for n in (*medians, *errors)))
            console.print(table)

    def _inside(self, part: pd.DataFrame) -> float:
        inside = []
        for (profile, family), group in part.groupby(["profile", "family"]):
            low, high, _, _ = self.interval(str(profile), str(family))
            inside.append((group.measured / group.left_out).between(1 - low, 1 + high))
        return float(pd.concat(inside).mean())


def corrections(table: pd.DataFrame) -> Corrections:
    """Fit the lines of `benchmarks.whole_steps.compare`."""
    hardware = [load_profile(path.stem) for path in sorted(PROFILES.glob(f"*{PROFILE_SUFFIX}"))]
    devices = {family_of(h.device_name): h.training for h in hardware}
    known = centres(devices, shipped_software().coefficients.stacks)
    families = {h.name: family_of(h.device_name) for h in hardware}
    table = table.assign(family=[families[name] for name in table.profile])
    steps = PlannedSteps(
        families=table.family.tolist(), sources=table.source.tolist(), measured_s=table.measured.to_numpy(),
        neutral_s=table.neutral.to_numpy(), response_s=table[list(NAMES)].to_numpy(),
    )  # fmt: skip
    factors = fit_factors(steps, known)
    table = table.assign(fitted=factors.predicted_s(steps, known), left_out=left_out_s(steps, known))
    return Corrections(table=table, factors=factors, centres=known)


def write_corrections(found: Corrections) -> list[Path]:
    """Write factors and intervals into every shipped profile."""
    written = []
    for path in sorted(PROFILES.glob(f"*{PROFILE_SUFFIX}")):
        hardware = load_profile(path.stem)
        family = family_of(hardware.device_name)
        source = _factor_source(found, family)
        fields: dict[str, object] = {
            f"training.planned_{name}": {"value": float(f"{value:.4g}"), "source": source}
            for name, value in zip(NAMES, found.of_family(family), strict=True)
        }
        for name, seconds in _launches(hardware).items():
            fields[f"training.{name}"] = {"value": float(f"{seconds:.4g}"), "source": _launch_source(hardware)}
        low, high, part, which = found.interval(hardware.name, family)
        fields["uncertainty.low"], fields["uncertainty.high"] = float(f"{low:.2f}"), float(f"{high:.2f}")
        fields["uncertainty.source"] = _interval_source(part, which)
        write_whole(path, with_fields(path.read_text(encoding="utf-8"), fields))
        written.append(path)
    return written


def _factor_source(found: Corrections, family: str) -> str:
    part = found.table[found.table.family == family]
    if part.empty:
        return (
            f"assumed: the {family} family's own corrections and the usual software's, changed as on other families "
            f"by {COMMAND}; no whole steps of this family"
        )
    return (
        f"fitted: {COMMAND}, {len(part)} runs ({part['rows'].sum()} rows) of whole training steps of "
        f"{part.source.nunique()} sources on devices of the {family} family, predicted/measured median "
        f"{(part.fitted / part.measured).median():.2f}, mean error {_error(part.fitted, part.measured)}; without the "
        f"run's source {(part.left_out / part.measured).median():.2f}, {_error(part.left_out, part.measured)}"
    )


def _interval_source(part: pd.DataFrame, which: str) -> str:
    files = ", ".join(sorted(part.file.unique()))
    return (
        f"fitted: {COMMAND}, {len(part)} published whole steps ({part['rows'].sum()} rows of {files}) {which}, each "
        f"predicted by a fit without its source: median predicted/measured "
        f"{(part.left_out / part.measured).median():.2f}, mean error {_error(part.left_out, part.measured)}; "
        f"{INSIDE:.0%} of them lie inside"
    )


def _error(predicted: pd.Series, measured: pd.Series) -> str:
    return f"{(predicted / measured - 1).abs().mean():.0%}"
