"""The search restricted to measured plans: what the plan it would choose costs over the best that was measured.

    python -m benchmarks.chosen_plans MEASUREMENTS_DIR [--file N] [--rows]

Workloads are networks that one source trained with one batch on the same devices under several plans; every
measured plan is pinned whole (degrees, micro-batch, schedule, recomputation, optimizer sharding) and predicted as
`plan` predicts. Memory limits are lifted: the plans ran.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from benchmarks.published_runs import NotCoveredError, read_run
from benchmarks.whole_steps import Predictor
from planner.validation.reading import read_measurements
from simulator.errors import MeshwrightError

FILES = ("C", "D", "H", "J", "M", "N")


def predicted_plans(measurements: Path, files: tuple[str, ...]) -> tuple[pd.DataFrame, dict[tuple[str, str], int]]:
    """One line for each measured plan of a workload, and how many rows were left out for which reason."""
    lines, skipped = [], dict[tuple[str, str], int]()
    with tempfile.TemporaryDirectory() as folder:
        predictor = Predictor(Path(folder))
        for path in sorted(measurements.glob("*.csv")):
            name = path.name.split("_")[0]
            for row in read_measurements(path) if name in files else ():
                try:
                    run = read_run(row, stages=True, any_attention=True)
                    seconds = predictor.seconds(run)
                except (NotCoveredError, MeshwrightError) as error:
                    key = (name, str(error).split(";")[0])
                    skipped[key] = skipped.get(key, 0) + 1
                    continue
                lines.append({"file": name, "workload": row.workload, "row": row.row_id, "run": run,
                              "plan": " ".join(f"{k}={v}" for k, v in run.pins),
                              "predicted": seconds, "measured": row.measured_time_s})  # fmt: skip
    return pd.DataFrame(lines), skipped


def regrets(plans: pd.DataFrame) -> pd.DataFrame:
    """Plans, Kendall's tau and regret of each workload: measured time of the plan chosen over the best, less one."""
    lines = []
    for workload, part in plans.groupby("workload", sort=False):
        medians = part.groupby("plan")[["predicted", "measured"]].median()
        if len(medians) > 1:
            chosen = medians.measured[medians.predicted.idxmin()]
            tau = medians.predicted.corr(medians.measured, method="kendall")
            lines.append({"file": part.file.iloc[0], "workload": workload, "plans": len(medians), "tau": tau,
                          "regret": chosen / medians.measured.min() - 1,
                          "random": medians.measured.mean() / medians.measured.min() - 1})  # fmt: skip
    return pd.DataFrame(lines)


def main() -> None:
    """Print the regret by file, and with ``--rows`` by workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--file", action="append", choices=FILES, help="only these files")
    parser.add_argument("--rows", action="store_true", help="print every workload")
    arguments = parser.parse_args()
    plans, skipped = predicted_plans(arguments.measurements, tuple(arguments.file or FILES))
    if plans.empty:
        parser.error(f"{str(arguments.measurements)!r} holds no measured plans; name a folder of *.csv")
    console, found = Console(width=180), regrets(plans)
    if arguments.rows:
        console.print(found.to_string(index=False, float_format="{:.3f}".format))
    table = Table("file", "workloads", "plans", "Kendall tau", "regret", "of a plan at random")
    for name, part in [*found.groupby("file"), ("all", found)]:
        numbers = (part.tau.mean(), part.regret.mean(), part.random.mean())
        table.add_row(str(name), str(len(part)), str(part.plans.sum()), *(f"{n:.3f}" for n in numbers))
    console.print(table)
    for (file, why), count in sorted(skipped.items()):
        console.print(f"left out of {file}: {count} rows, {why}", highlight=False, style="dim")


if __name__ == "__main__":
    main()
