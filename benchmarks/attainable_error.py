"""What error on step times any model could reach that sees only the facts which rows state.

    python -m benchmarks.attainable_error MEASUREMENTS_DIR [--rows]

For vision networks and for Ascend, whose aims are missed: every source is predicted by a fit without it, and by the
fit on everything. Printed are the errors, what is left of them with one factor for each source, device, software or
network, found from the measurements themselves, and how far rows differ that state the same facts:

- ``same row``: every cell but names, notes and what was measured, and the release of the software;
- ``same run``: network, plan, software and cluster as they are read;
- ``same run elsewhere``: the same, among medians of sources, so that only other sources tell.

``in hindsight`` a factor is the best for the very rows that it is judged on, so that it says what no model can be
better than; ``from the others`` it comes from the other rows of its group.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from planner.cost.software_file import shipped_software
from planner.cost.stacks import family_of
from planner.cost.training_run import LayeredNetwork, TrainingRun
from planner.published.aims import ASCEND, CONVOLUTIONAL, group_of
from planner.published.attainable import Spread, spread_of, told_by_others, with_factors
from planner.published.calibrating import Folds, usable
from planner.published.estimate.predict import predict_runs
from planner.published.measurement_file import FileRow, read_rows
from planner.published.reading import MeasuredRow, measured_row
from planner.published.reading_setup import release

FloatArray = npt.NDArray[np.float64]
VISION, ASCEND_VISION, ASCEND_LANGUAGE = CONVOLUTIONAL, f"{ASCEND}: vision networks", f"{ASCEND}: language networks"
NO_FACTS = (
    "row_id", "source", "source_table", "measured_date", "notes", "hw", "outcome", "plan_complete", "step_time_s",
    "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "tflops_kind", "mfu_pct", "mem_gib_per_gpu", "mem_kind",
)  # fmt: skip
"""Columns that say where a row comes from and what was measured, and nothing of the run."""
MEASURED = re.compile(r"graph_compile=\w*")


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """A measured row, its cells, and its two predictions over the measurement."""

    cells: FileRow
    row: MeasuredRow
    left_out: float
    fitted: float

    @property
    def run(self) -> TrainingRun:
        """The run of the row."""
        assert self.row.run is not None
        return self.row.run

    @property
    def device(self) -> str:
        """The family of its device."""
        return family_of(self.run.hardware.device_name)


FACTORS: dict[str, Callable[[Known], Hashable]] = {
    "source": lambda k: k.row.source,
    "source and device": lambda k: (k.row.source, k.device),
    "source, device and software": lambda k: (k.row.source, k.device, k.run.setup.stack),
    "source, device, software and precision": lambda k: (
        k.row.source, k.device, k.run.setup.stack, k.run.setup.precision
    ),
    "source and network": lambda k: (k.row.source, k.run.network.name),
    "source, network and device": lambda k: (k.row.source, k.run.network.name, k.device),
    "source, network, device, software and precision": lambda k: (
        k.row.source, k.run.network.name, k.device, k.run.setup.stack, k.run.setup.precision
    ),
}  # fmt: skip


def same_row(known: Known) -> Hashable:
    """Every cell of a row that states a fact of its run, and the release of its software."""
    facts = ((name, MEASURED.sub("", text)) for name, text in known.cells.texts.items() if name not in NO_FACTS)
    return (*sorted(facts), release(known.cells))


def same_run(known: Known) -> Hashable:
    """A run as it is read, its network by name and size."""
    network, setup = known.run.network, known.run.setup
    if isinstance(network, LayeredNetwork):
        return (network.name, network.parameters, network.sample, repr(setup), known.run.hardware.hash)
    return (repr(network), repr(setup), known.run.hardware.hash)


def kind_of_row(row: MeasuredRow) -> str:
    """Which of the groups judged here a row belongs to; nothing where to none."""
    assert row.run is not None
    group = group_of(row.run, complete=row.complete)
    if group == ASCEND:
        return ASCEND_VISION if isinstance(row.run.network, LayeredNetwork) else ASCEND_LANGUAGE
    return group if group == VISION else ""


def predicted(measurements: Path) -> list[Known]:
    """The rows of the groups judged here, each predicted by the fit without its source, and by that on everything."""
    cells = [cell for path in sorted(measurements.glob("*.csv")) for cell in read_rows(path)]
    read = [measured_row(cell) for cell in cells]
    folds = Folds(read)
    everything = folds.everything()
    judged = [(c, row) for c, row in zip(cells, read, strict=True) if usable(row) and kind_of_row(row)]
    found = []
    for source in sorted({row.source for _, row in judged}):
        members = [(cell, row) for cell, row in judged if row.source == source]
        runs = [row.run for _, row in members if row.run is not None]
        ratios = []
        for software in (folds.without(source), everything):
            known = replace(software, intervals=shipped_software().intervals)
            seconds = np.array([p.step_time_s for p in predict_runs(runs, known)])
            ratios.append(seconds / np.array([row.measured_time_s for _, row in members]))
        found += [
            Known(cells=cell, row=row, left_out=float(left_out), fitted=float(fitted))
            for (cell, row), left_out, fitted in zip(members, *ratios, strict=True)
        ]
    return found


def elsewhere(rows: Sequence[Known]) -> tuple[Spread | None, FloatArray]:
    """How far medians of sources lie apart whose runs are the same, and how well they predict each other."""
    runs: dict[Hashable, dict[str, list[float]]] = {}
    for known in rows:
        runs.setdefault(same_run(known), {}).setdefault(known.row.source, []).append(known.row.measured_time_s)
    medians = [(run, float(np.median(times))) for run, sources in runs.items() for times in sources.values()]
    times, names = np.array([time for _, time in medians]), [run for run, _ in medians]
    return spread_of(times, names), told_by_others(times, names)


def show(name: str, rows: Sequence[Known], console: Console) -> None:
    """Print what is known of one group."""
    table = Table("factor for each", "groups", "left out: in hindsight", "from the others",
                  "fitted: in hindsight", "from the others", title=f"{name}: {len(rows)} rows")  # fmt: skip
    left_out, fitted = (np.array([getattr(known, fit) for known in rows]) for fit in ("left_out", "fitted"))
    errors = [f"{np.abs(ratios - 1).mean():.1%}" for ratios in (left_out, fitted)]
    table.add_row("none", "1", errors[0], errors[0], errors[1], errors[1])
    for kind, key in FACTORS.items():
        groups = [key(known) for known in rows]
        left, all_rows = with_factors(left_out, groups), with_factors(fitted, groups)
        shares = (left.hindsight, left.others, all_rows.hindsight, all_rows.others)
        table.add_row(kind, str(left.groups), *(f"{share:.1%}" for share in shares))
    console.print(table)
    measured = np.array([known.row.measured_time_s for known in rows])
    between, told = elsewhere(rows)
    spreads = {
        "same row": spread_of(measured, [same_row(known) for known in rows]),
        "same run": spread_of(measured, [same_run(known) for known in rows]),
        "same run elsewhere": between,
    }
    for kind, spread in spreads.items():
        words = "no two" if spread is None else f"{spread.rows} in {spread.groups}, least mean error {spread.error:.1%}"
        console.print(f"{kind}: {words}", highlight=False)
    if told.size:
        error = f"mean {told.mean():.1%}, median {np.median(told):.1%}"
        console.print(f"one source's time predicted by the others' times of the same run: {error}", highlight=False)
    console.print()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    if not any(arguments.measurements.glob("*.csv")):
        parser.error(f"{str(arguments.measurements)!r} holds no *.csv; name a folder of measurements")
    console = Console(width=150)
    found = predicted(arguments.measurements)
    for name in (VISION, ASCEND_VISION, ASCEND_LANGUAGE):
        rows = [known for known in found if kind_of_row(known.row) == name]
        if rows:
            show(name, rows, console)
    for known in sorted(found, key=lambda k: -abs(k.left_out - 1)) if arguments.rows else ():
        run = known.run
        console.print(
            f"{known.row.row_id} {run.network.name} {run.setup.stack} {run.hardware.name} {run.setup.devices} "
            f"{run.setup.precision} {run.setup.micro_batch}: {known.left_out - 1:+.1%}, {known.fitted - 1:+.1%}",
            highlight=False,
        )


if __name__ == "__main__":
    main()
