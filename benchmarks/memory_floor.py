"""How much of the error of predicted memory no estimate from the stated facts could take away.

    python -m benchmarks.memory_floor MEASUREMENTS_DIR [--rows N]

Two floors, both with hindsight. *Twins* are rows of one source that state the same in every column and differ in what
was measured: one value has to serve them all, and the best is the median of their measurements, each weighed by one
over itself. *Refitted* is the error that is left where a factor, and a factor and an offset, are fitted to each source
on its own rows: what the estimate gets wrong in what tells the rows of a source apart. ``--rows`` lists the rows that
contribute most.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from scipy.optimize import linprog

from planner.cost.memory.device import training_memory
from planner.published.measurement_file import FileRow, read_rows
from planner.published.reading import measured_row
from planner.published.reading_memory import figure_of

FloatArray = npt.NDArray[np.float64]
_GIB = 2**30
_FEWEST = 5
"""Rows of a source below which two coefficients would fit noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A row whose memory was measured and is predicted, in GiB; `facts` is all that it states."""

    row_id: str
    source: str
    measured: float
    predicted: float
    facts: tuple[tuple[str, str], ...]

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def known_rows(measurements: Path) -> list[Known]:
    """Every row of a folder whose memory was measured in a run that did not fail."""
    rows = (row for path in sorted(measurements.glob("*.csv")) for row in read_rows(path))
    found = (_known(row) for row in rows if row.number("mem_gib_per_gpu"))
    return [row for row in found if row is not None]


def _known(row: FileRow) -> Known | None:
    read = measured_row(row)
    if read.run is None or math.isnan(read.memory_gib) or read.outcome not in ("", "ok"):
        return None
    return Known(
        row_id=read.row_id,
        source=read.source,
        measured=read.memory_gib,
        predicted=training_memory(read.run).figures()[figure_of(read.memory_kind)] / _GIB,
        facts=row.facts(),
    )


def twins(rows: Sequence[Known]) -> dict[tuple[tuple[str, str], ...], list[Known]]:
    """Rows that state the same facts, where there are several."""
    groups: dict[tuple[tuple[str, str], ...], list[Known]] = {}
    for row in rows:
        groups.setdefault((*row.facts, ("source", row.source)), []).append(row)
    return {facts: group for facts, group in groups.items() if len(group) > 1}


def best_single(measured: FloatArray) -> float:
    """The value whose relative errors against `measured` add up to the least: the median weighed by 1 / measured."""
    ordered = np.sort(measured)
    below = np.cumsum(1 / ordered)
    return float(ordered[np.searchsorted(below, below[-1] / 2)])


def refitted(measured: FloatArray, predicted: FloatArray, *, offset: bool) -> FloatArray:
    """Relative errors after the factor, and the ``offset`` in GiB, that make their absolute sum least.

    Least absolute deviations as a linear programme; factor and offset are not negative.
    """
    count = measured.size
    columns = [predicted / measured, 1 / measured] if offset else [predicted / measured]
    design = np.stack(columns, axis=1)
    unit = np.eye(count)
    solved = linprog(
        c=np.concatenate([np.zeros(design.shape[1]), np.ones(count)]),
        A_ub=np.block([[design, -unit], [-design, -unit]]),
        b_ub=np.concatenate([np.ones(count), -np.ones(count)]),
        bounds=[(0, None)] * (design.shape[1] + count),
    )
    return np.asarray(design @ solved.x[: design.shape[1]] - 1, dtype=np.float64)


def report(rows: Sequence[Known], console: Console, listed: int = 0) -> None:
    """Print both floors, by source and in all."""
    table = Table("source", "rows", "error", "factor fitted", "factor and offset fitted", "points of the mean")
    totals = np.zeros(3)
    for source in sorted({row.source for row in rows}):
        part = [row for row in rows if row.source == source]
        measured, predicted = _columns(part)
        errors = [predicted / measured - 1, refitted(measured, predicted, offset=False)]
        errors.append(refitted(measured, predicted, offset=True) if len(part) >= _FEWEST else errors[-1])
        sums = np.array([np.abs(error).sum() for error in errors])
        totals += sums
        table.add_row(
            source, str(len(part)), *(f"{value / len(part):.1%}" for value in sums), f"{sums[0] / len(rows):.2%}"
        )
    table.add_row("all", str(len(rows)), *(f"{value / len(rows):.1%}" for value in totals), "", end_section=True)
    console.print(table)
    groups = twins(rows)
    apart = [group for group in groups.values() if np.ptp([row.measured for row in group]) > 0.01 * group[0].measured]
    least = sum(_least(group) for group in groups.values())
    now = sum(abs(row.error) for group in groups.values() for row in group)
    members = sum(len(group) for group in groups.values())
    console.print(
        f"{members} rows have twins, in {len(groups)} groups, {len(apart)} of them measured more than 1 % apart: "
        f"{least / len(rows):.2%} of the mean cannot be predicted ({now / len(rows):.2%} as predicted)"
    )
    for row in sorted(rows, key=lambda row: -abs(row.error))[:listed]:
        console.print(
            f"{row.row_id}  measured {row.measured:.2f} GiB, predicted {row.predicted:.2f} ({row.error:+.1%})"
        )


def _columns(rows: Sequence[Known]) -> tuple[FloatArray, FloatArray]:
    return np.array([row.measured for row in rows]), np.array([row.predicted for row in rows])


def _least(group: Sequence[Known]) -> float:
    measured, _ = _columns(group)
    return float(np.abs(best_single(measured) / measured - 1).sum())


def main() -> None:
    """Read the arguments and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--rows", type=int, default=0, help="how many of the worst rows to list")
    arguments = parser.parse_args()
    report(known_rows(arguments.measurements), Console(width=140), arguments.rows)


if __name__ == "__main__":
    main()
