"""The search restricted to measured plans: what the plan it would choose costs over the best that was measured.

    python -m benchmarks.chosen_plans MEASUREMENTS_DIR [--file N] [--simulated K] [--limit S] [--workloads W] [--rows]

Workloads are networks that one source trained with one batch on the same devices and with one release of its software
under several plans; every measured plan is pinned whole (degrees, micro-batch, schedule, recomputation, optimizer
sharding, order of the axes), with the kinds of attention and norms that it ran with.
As in a search, all are ranked by the closed form, and the best ``--simulated`` of them by the simulation. Memory limits
are lifted: the plans ran. A prediction that takes longer than ``--limit`` seconds of computation is left out and
counted.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from benchmarks.predicted_runs import LIMIT_S, Predictor, measured_run
from planner.planning.rescoring import RESCORED
from planner.published.metrics import choice_of
from planner.published.pinned import NotPinnedError, PinnedRun
from planner.published.reading import read_measurements
from simulator.errors import MeshwrightError

FILES = ("C", "D", "H", "I", "J", "M", "N")


@dataclass
class Reasons:
    """How many rows of each file were left out for which reason."""

    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, file: str, error: Exception, rows: int = 1) -> None:
        """Count `rows` of a file for the first part of an error's message."""
        key = (file, str(error).split(";")[0])
        self.counts[key] = self.counts.get(key, 0) + rows


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Measured seconds of every plan of one workload."""

    file: str
    name: str
    plans: Mapping[PinnedRun, float]


def workloads(measurements: Path, files: Sequence[str], reasons: Reasons) -> list[Workload]:
    """Workloads with several measured plans."""
    found: dict[tuple[str, str], dict[PinnedRun, list[float]]] = {}
    for path in sorted(measurements.glob("*.csv")):
        name = path.name.split("_")[0]
        for row in read_measurements(path) if name in files else ():
            try:
                run = measured_run(row)
            except NotPinnedError as error:
                reasons.add(name, error)
                continue
            found.setdefault((name, row.workload), {}).setdefault(run, []).append(row.measured_time_s)
    return [
        Workload(
            file=file,
            name=name,
            plans={run: float(np.median(times)) for run, times in plans.items()},
        )
        for (file, name), plans in found.items()
        if len({run.pins for run in plans}) > 1
    ]


def ranked(workload: Workload, predictor: Predictor, simulated: int, reasons: Reasons) -> pd.DataFrame:
    """Plans of a workload as a search ranks them: predicted and measured seconds, and whether they were simulated."""
    lines = []
    for run, measured in workload.plans.items():
        try:
            lines.append({"run": run, "predicted": predictor.closed_form_s(run), "measured": measured})
        except (NotPinnedError, MeshwrightError) as error:
            reasons.add(workload.file, error)
    table = pd.DataFrame(lines, columns=["run", "predicted", "measured"])
    table = table.sort_values("predicted", kind="stable").reset_index(drop=True).assign(step=np.inf)
    for place in range(min(simulated, len(table))):
        try:
            table.loc[place, "step"] = predictor.simulated_s(table.run[place])
        except (NotPinnedError, MeshwrightError) as error:
            reasons.add(workload.file, error)
    return table.sort_values(["step", "predicted"], kind="stable")


def regret(workload: Workload, table: pd.DataFrame) -> dict[str, object] | None:
    """Plans, Kendall's tau and regret, as `meshwright validate` has them; None where the closed form knows one plan.

    What was simulated ranks before all else.
    """
    choice = choice_of(zip(table.predicted, table.measured, strict=True))
    if choice is None:
        return None
    tau, closed_form = choice
    best = table.groupby("predicted").measured.median().min()
    return {
        "file": workload.file, "workload": workload.name, "plans": len(table),
        "tau": tau,
        "regret": table.measured.iloc[0] / best - 1 if np.isfinite(table.step).any() else closed_form,
        "closed form": closed_form,
        "random": table.measured.mean() / best - 1,
        "chosen": _said(table.run.iloc[0]),
        "best": _said(table.run[table.measured.idxmin()]),
    }  # fmt: skip


def _said(run: PinnedRun) -> str:
    norms = f"norms {run.norms}" if run.norms else ""
    return " ".join(
        filter(None, [*(f"{name}={value}" for name, value in run.pins.named().items()), run.attention, norms])
    )


def show(found: pd.DataFrame, console: Console) -> None:
    """Print means by file."""
    table = Table("file", "workloads", "plans", "Kendall tau", "regret", "worst", "closed form alone", "plan at random")
    for name, part in [*found.groupby("file"), ("all", found)]:
        numbers = (part.tau, part.regret, part["closed form"], part.random)
        tau, cost, closed, chance = (column.mean() for column in numbers)
        shares = (f"{n:.1%}" for n in (cost, part.regret.max(), closed, chance))
        table.add_row(str(name), str(len(part)), str(part.plans.sum()), f"{tau:.2f}", *shares)
    console.print(table)


def main() -> None:
    """Print the regret by file, and with ``--rows`` by workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--file", action="append", choices=FILES, help="only these files")
    parser.add_argument("--simulated", type=int, default=RESCORED, help="so many plans of a workload are simulated")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of computation for one prediction")
    parser.add_argument("--workloads", type=int, help="draw so many workloads of a file, with a fixed seed")
    parser.add_argument("--rows", action="store_true", help="print every workload")
    arguments = parser.parse_args()
    reasons, lines = Reasons(), []
    drawn = _drawn(workloads(arguments.measurements, arguments.file or FILES, reasons), arguments.workloads)
    if not drawn:
        parser.error(f"{str(arguments.measurements)!r} holds no measured plans; name a folder of *.csv")
    with tempfile.TemporaryDirectory() as folder:
        predictor = Predictor(Path(folder), arguments.limit)
        for workload in drawn:
            table = ranked(workload, predictor, arguments.simulated, reasons)
            if found := regret(workload, table):
                lines.append(found)
    console, regrets = Console(width=180), pd.DataFrame(lines)
    if regrets.empty:
        parser.error("no workload has two plans with a prediction; raise --limit")
    if arguments.rows:
        console.print(regrets.to_string(index=False, float_format="{:.3f}".format), highlight=False, soft_wrap=True)
    show(regrets, console)
    for (file, why), count in sorted(reasons.counts.items()):
        console.print(f"left out of {file}: {count} rows, {why}", highlight=False, style="dim")


def _drawn(found: list[Workload], most: int | None) -> list[Workload]:
    shuffled = found if most is None else random.Random(0).sample(found, len(found))
    count: dict[str, int] = {}
    kept = []
    for workload in shuffled:
        count[workload.file] = count.get(workload.file, 0) + 1
        if most is None or count[workload.file] <= most:
            kept.append(workload)
    return kept


if __name__ == "__main__":
    main()
