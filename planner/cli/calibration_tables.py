"""What `meshwright calibrate` prints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.cli.tables import (
    facts,
    plain_table,
)
from simulator.quantities import bytes_text, percent_text, rate_text

if TYPE_CHECKING:
    from simulator.calibration.fit_profiles import ProfileFit
    from simulator.calibration.from_run import Corrected
    from simulator.hardware import Hardware


def calibration_report(hardware: Hardware, path: str) -> Iterable[RenderableType]:
    """What `meshwright calibrate` measured, in short."""
    yield Text(f"{hardware.name}: {hardware.description}", style="bold")
    peaks = ", ".join(
        f"{dtype} {rate_text(flops, '').removesuffix(' /s')}FLOP/s"
        for dtype, flops in sorted(hardware.peak_flops.items(), reverse=True)
    )
    spread = hardware.uncertainty
    yield facts(
        [
            ("peak", peaks),
            ("memory", f"{bytes_text(hardware.device_memory_bytes)} at {bytes_text(hardware.memory_bandwidth)}/s"),
            (
                "collectives",
                ", ".join(f"{table.collective} × {table.group_size}" for table in hardware.collective_tables),
            ),
            (
                "slow-down",
                ", ".join(f"{n} process{'es' * (n > 1)} {factor:.2f}" for n, factor in hardware.slowdown_table),
            ),
            ("interval", f"−{percent_text(spread.low)} to +{percent_text(spread.high)} ({spread.label})"),
            ("warning", hardware.conditions.warning if hardware.conditions else ""),
            ("written", path),
        ]
    )


def fitted_report(fit: ProfileFit, path: str) -> Iterable[RenderableType]:
    """What `meshwright calibrate --from-measurements` fitted for one profile."""
    yield Text(f"{fit.profile}: {len(fit.fields)} numbers written to {path}", style="bold")
    table = plain_table(
        ("fit", "text"), ("rows", "number"), ("median error", "number"), ("p90", "number"), ("before", "number")
    )
    for part in fit.fits:
        before = " / ".join(percent_text(error) for error in part.errors_before or ())
        median, tail = part.errors
        table.add_row(part.name, str(len(part.ratios)), percent_text(median), percent_text(tail), before)
    yield table


def correction_report(found: Corrected) -> Iterable[RenderableType]:
    """Everything `meshwright calibrate --from-run` prints."""
    yield Text(f"corrected by {' and '.join(found.runs)}", style="bold")
    names = ("", "sizes", "fixed cost", "the rest", "error before", "after")
    table = plain_table(*((name, "number" if name else "text") for name in names))
    for one in found.corrections:
        table.add_row(
            one.name,
            str(one.rows),
            "" if one.fixed is None else f"× {one.fixed:.2f}",
            f"× {one.rest:.2f}",
            percent_text(one.before),
            percent_text(one.after),
        )
    yield Padding(table, (1, 0, 1, 0))
    yield facts([("written", str(found.path))])
