"""Predicted against published step times of whole training runs, for the shipped hardware profiles.

    python -m benchmarks.whole_steps MEASUREMENTS_DIR [--runs N] [--simulated] [--rows] [--fit [--write]]

Taken are the runs that plans cover: dense networks, fused attention, any pipeline, recomputation and sharding of
optimizer states. The plan is the row's. What a source leaves out, or the space has not, is approximated:

- what a row does not state is what `planner.published` takes for it;
- the optimizer is AdamW (momentum for ResNet-50); memory limits are lifted, so that only time is compared;
- runs that differ only in framework or repetition count once, with their median;
- of a source with more than ``--runs`` runs so many are drawn, with a fixed seed, from all its workloads in turn.

Predictions are those of the closed form that the search minimises, or with ``--simulated`` of the simulation. ``--fit``
fits the factors on kernels and messages (``training.planned_*`` of the profiles) and the intervals, both also without
the source of each run; ``--write`` writes them into the profiles.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from rich.console import Console
from rich.table import Table

from benchmarks.predicted_runs import LIMIT_S, Predictor, as_usual, measured_run
from benchmarks.step_corrections import corrections, responses, write_corrections
from planner.published.pinned import NotPinnedError, PinnedRun
from planner.published.reading import MeasuredRow, read_measurements
from simulator.errors import MeshwrightError
from simulator.profiles import load_profile

LEFT_OUT = ("L",)
"""Tiny deterministic tests, bound by the host."""
RUNS = 40


@dataclass(frozen=True, kw_only=True)
class Published:
    """A run and the rows that measured it."""

    file: str
    run: PinnedRun
    rows: tuple[MeasuredRow, ...]

    @property
    def measured_s(self) -> float:
        """Median of the measured step times."""
        return float(np.median([row.measured_time_s for row in self.rows]))


def published(measurements: Path, most: int) -> tuple[list[Published], dict[tuple[str, str], int]]:
    """Covered runs, at most so many of a source, and how many rows of each file were left out for which reason."""
    sources: dict[str, dict[PinnedRun, list[tuple[str, MeasuredRow]]]] = {}
    skipped = dict[tuple[str, str], int]()
    for path in sorted(measurements.glob("*.csv")):
        name = path.name.split("_")[0]
        for row in read_measurements(path) if name not in LEFT_OUT else ():
            try:
                run = as_usual(measured_run(row))
            except NotPinnedError as error:
                skipped[name, str(error)] = skipped.get((name, str(error)), 0) + 1
                continue
            sources.setdefault(row.source, {}).setdefault(run, []).append((name, row))
    found = []
    for runs in sources.values():
        items = [Published(file=rows[0][0], run=run, rows=tuple(row for _, row in rows)) for run, rows in runs.items()]
        found += _drawn(items, most)
    return found, skipped


def _drawn(items: list[Published], most: int) -> list[Published]:
    random.Random(0).shuffle(items)
    workloads: dict[object, list[Published]] = {}
    for item in items:
        workloads.setdefault(item.rows[0].workload, []).append(item)
    turns = zip_longest(*workloads.values())
    return [item for turn in turns for item in turn if item is not None][:most]


def compare(
    runs: Sequence[Published], predictor: Predictor, *, simulated: bool, with_responses: bool
) -> tuple[pd.DataFrame, dict[tuple[str, str], int]]:
    """One line for each run that has a prediction, and the reasons of the others."""
    lines, skipped = [], dict[tuple[str, str], int]()
    for item in runs:
        try:
            predicted = predictor.simulated_s(item.run) if simulated else predictor.closed_form_s(item.run)
            grows = responses(predictor, item.run) if with_responses else {}
        except (NotPinnedError, MeshwrightError) as error:
            key = (item.file, str(error).split(";")[0])
            skipped[key] = skipped.get(key, 0) + len(item.rows)
            continue
        row, run = item.rows[0], item.run
        assert row.run is not None
        lines.append({
            "profile": run.hardware, "file": item.file, "source": row.source, "row": row.row_id, "rows": len(item.rows),
            "model": row.run.network.name, "by": str(row.run.setup.stack), "devices": run.devices,
            "pins": " ".join(f"{k}={v}" for k, v in run.pins.named().items()), "precision": run.precision,
            "predicted": predicted, "measured": item.measured_s, "ratio": predicted / item.measured_s, **grows,
        })  # fmt: skip
    return pd.DataFrame(lines), skipped


def compare_apart(
    runs: Sequence[Published], limit_s: float, jobs: int, *, simulated: bool, with_responses: bool
) -> tuple[pd.DataFrame, dict[tuple[str, str], int]]:
    """What `compare` gives, from several processes; runs of one network share their tables."""
    networks: dict[tuple[str, int | None], list[Published]] = {}
    for item in runs:
        networks.setdefault((item.run.network, item.run.sequence_length), []).append(item)
    work = sorted(networks.values(), key=len, reverse=True)
    options = {"simulated": simulated, "with_responses": with_responses}
    found = Parallel(n_jobs=jobs)(delayed(_compare_in_folder)(part, limit_s, **options) for part in work)
    skipped: dict[tuple[str, str], int] = {}
    for _, reasons in found:
        for key, count in reasons.items():
            skipped[key] = skipped.get(key, 0) + count
    return pd.concat([table for table, _ in found], ignore_index=True), skipped


def _compare_in_folder(
    runs: Sequence[Published], limit_s: float, *, simulated: bool, with_responses: bool
) -> tuple[pd.DataFrame, dict[tuple[str, str], int]]:
    with tempfile.TemporaryDirectory() as folder:
        return compare(runs, Predictor(Path(folder), limit_s), simulated=simulated, with_responses=with_responses)


def summary(name: str, table: pd.DataFrame) -> tuple[str, ...]:
    """One line of the table: errors of one profile, and the interval that 90 % of its runs lie in."""
    known, ratio = load_profile(name).uncertainty, table.ratio
    inside = float((1 / ratio).between(1 - known.low, 1 + known.high).mean())
    low, high = np.quantile(1 / ratio, (0.05, 0.95))
    errors = (ratio.median(), (ratio - 1).abs().mean(), *np.quantile(ratio, (0.1, 0.9)))
    numbers = (*errors, inside, max(1 - low, 0.0), max(high - 1, 0.0))
    return (name, str(len(ratio)), str(table["rows"].sum()), *(f"{n:.2f}" for n in numbers))


def show(table: pd.DataFrame, console: Console) -> None:
    """Print the errors of each profile."""
    shown = Table(
        "profile", "runs", "rows", "median", "mean |error|", "10 %", "90 %", "inside", "low", "high",
        title="predicted / measured; low and high would hold 90 % of the runs",
    )  # fmt: skip
    for name, part in table.groupby("profile"):
        shown.add_row(*summary(str(name), part))
    console.print(shown)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--runs", type=int, default=RUNS, help="at most so many runs of one source")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of computation for one run")
    parser.add_argument("--jobs", type=int, default=2, help="processes; runs of one network stay together")
    parser.add_argument("--rows", action="store_true", help="print every run")
    parser.add_argument("--simulated", action="store_true", help="simulate the plans")
    parser.add_argument("--fit", action="store_true", help="fit factors and intervals")
    parser.add_argument("--write", action="store_true", help="with --fit: write them into the profiles")
    arguments = parser.parse_args()
    if not any(arguments.measurements.glob("*.csv")):
        parser.error(f"{str(arguments.measurements)!r} holds no *.csv; name a folder of measurements")
    console = Console(width=180)
    runs, unread = published(arguments.measurements, arguments.runs)
    table, skipped = compare_apart(
        runs, arguments.limit, arguments.jobs, simulated=arguments.simulated, with_responses=arguments.fit
    )
    if table.empty:
        parser.error(f"{str(arguments.measurements)!r} holds no whole steps that can be planned")
    if arguments.rows:
        lines = table.sort_values(["profile", "ratio"])
        console.print(lines.to_string(index=False, float_format="{:.3f}".format), highlight=False)
    show(table, console)
    if arguments.fit:
        found = corrections(table)
        found.show(console)
        for path in write_corrections(found) if arguments.write else ():
            console.print(f"wrote {path}", highlight=False)
    for (file, why), count in sorted({**unread, **skipped}.items()):
        console.print(f"left out of {file}: {count} rows, {why}", highlight=False, style="dim")


if __name__ == "__main__":
    main()
