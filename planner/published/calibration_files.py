"""What a calibration of whole steps writes: the software file, and the corrections in every profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from planner.cost.layered_parameters import LayeredCoefficients
from planner.cost.software_file import SHIPPED, SOFTWARE_FOLDER, write_software
from planner.cost.stacks import family_of
from planner.published.calibrating import INSIDE, Calibration, rows_by_device, rows_by_stack
from planner.published.fitting import FloatArray
from simulator.calibration.profile_text import with_fields
from simulator.hardware import PROFILE_SUFFIX
from simulator.profiles import check_profile
from simulator.whole_file import write_whole

COMMAND = "meshwright calibrate --from-measurements"
_DIGITS = 4


def write_calibration(calibration: Calibration, folder: Path) -> list[Path]:
    """Write ``software/training.yaml`` in `folder`, and the section ``training`` of the profiles there."""
    (folder / SOFTWARE_FOLDER).mkdir(exist_ok=True)
    software = folder / SOFTWARE_FOLDER / SHIPPED
    write_software(software_content(calibration), software)
    by_device = rows_by_device(calibration)
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
    by_stack, every = rows_by_stack(calibration), calibration.residuals

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
