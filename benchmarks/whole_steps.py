"""Predicted against published step times of whole training runs, for the shipped hardware profiles.

    python -m benchmarks.whole_steps MEASUREMENTS_DIR [--rows]

Taken are the runs that the search space covers: data and tensor parallelism, nothing recomputed, dense
networks. The plan is the row's. What a source leaves out, or the space has not, is approximated:

- ``zero1``, ``zero2`` and ``zero3`` are one sharded storage, gathered once a step;
- what a row does not state is what `planner.validation` takes for it;
- the optimizer is AdamW (momentum for ResNet-50); memory limits are lifted, so that only time is compared;
- runs that differ only in framework or repetition count once, with their median; ``rows inside`` counts each.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.published_runs import NotCoveredError, Run, read_run, require
from planner.graph.operator_graph import OperatorGraph
from planner.planning import PlanRequest, capture_for, plan_network
from planner.validation.reading import read_measurements
from simulator.errors import MeshwrightError
from simulator.hardware import load_profile

PROFILES = Path(__file__).parents[1] / "hw_profiles"
LEFT_OUT = ("L",)
"""Tiny deterministic tests, bound by the host."""


class Predictor:
    """Predicts runs in a temporary folder; equal runs and equal networks once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graphs: dict[tuple[str, int | None], OperatorGraph] = {}
        self.known: dict[Run, float] = {}

    def seconds(self, run: Run) -> float:
        """Step time of a run, whatever memory it takes."""
        if run not in self.known:
            request = PlanRequest(
                network=self._spec(run.network), hardware=self._profile(run.hardware), devices=run.devices,
                global_batch=run.global_batch, sequence_length=run.sequence_length, precision=run.precision,
                pins=dict(run.pins), top=1,
            )  # fmt: skip
            key = (request.network, run.sequence_length)
            if key not in self.graphs:
                self.graphs[key] = capture_for(request)
            result = plan_network(request, graph=self.graphs[key])
            require(result.candidates, "no plan")
            self.known[run] = result.candidates[0].prediction.step_time_s
        return self.known[run]

    def _spec(self, network: str) -> str:
        if not network.startswith("{"):
            return network
        path = self.folder / f"{abs(hash(network))}.json"
        path.write_text(network, encoding="utf-8")
        return f"hf:{path}"

    def _profile(self, name: str) -> str:
        path = self.folder / f"{name}.yaml"
        if not path.exists():
            content = yaml.safe_load((PROFILES / path.name).read_text(encoding="utf-8"))
            content["device"]["memory_bytes"]["value"] = 10**14
            path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return str(path)


def compare(measurements: Path) -> tuple[pd.DataFrame, dict[tuple[str, str], int]]:
    """One line for each covered row, and how many rows of each file were left out for which reason."""
    lines, skipped = [], dict[tuple[str, str], int]()
    with tempfile.TemporaryDirectory() as folder:
        predictor = Predictor(Path(folder))
        for path in sorted(measurements.glob("*.csv")):
            name = path.name.split("_")[0]
            for row in read_measurements(path) if name not in LEFT_OUT else ():
                try:
                    run = read_run(row)
                    predicted = predictor.seconds(run)
                except (NotCoveredError, MeshwrightError) as error:
                    key = (name, str(error).split(";")[0])
                    skipped[key] = skipped.get(key, 0) + 1
                    continue
                assert row.run is not None
                lines.append({"profile": run.hardware, "file": name, "row": row.row_id, "model": row.run.network.name,
                              "by": str(row.run.setup.stack), "devices": run.devices, "pins": " ".join(
                                  f"{k}={v}" for k, v in run.pins), "precision": run.precision,
                              "predicted": predicted, "measured": row.measured_time_s, "run": run})  # fmt: skip
    table = pd.DataFrame(lines)
    return table.assign(ratio=table.predicted / table.measured), skipped


def _distinct(table: pd.DataFrame) -> pd.DataFrame:
    """One line for each run, with the median of its measured times."""
    groups = table.groupby("run", sort=False)
    medians = groups.first().assign(measured=groups["measured"].median())
    return medians.assign(ratio=medians.predicted / medians.measured)


def summary(name: str, table: pd.DataFrame) -> tuple[str, ...]:
    """One line of the table: errors of one profile, and the interval that 90 % of its runs lie in."""
    known, ratio = load_profile(name).uncertainty, _distinct(table).ratio

    def inside(ratios: pd.Series) -> float:
        return float((1 / ratios).between(1 - known.low, 1 + known.high).mean())

    low, high = np.quantile(1 / ratio, (0.05, 0.95))
    errors = (ratio.median(), (ratio - 1).abs().mean(), *np.quantile(ratio, (0.1, 0.9)))
    numbers = (*errors, inside(ratio), inside(table.ratio), max(1 - low, 0.0), max(high - 1, 0.0))
    return (name, str(len(ratio)), str(len(table)), *(f"{n:.2f}" for n in numbers))


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every run")
    arguments = parser.parse_args()
    if not any(arguments.measurements.glob("*.csv")):
        parser.error(f"{str(arguments.measurements)!r} holds no *.csv; name a folder of measurements")
    console = Console(width=180)
    table, skipped = compare(arguments.measurements)
    if table.empty:
        parser.error(
            f"{str(arguments.measurements)!r} holds no whole steps that can be planned; name a folder of *.csv"
        )
    if arguments.rows:
        console.print(
            table.drop(columns="run")
            .sort_values(["profile", "ratio"])
            .to_string(index=False, float_format="{:.3f}".format)
        )
    columns = (
        "profile",
        "runs",
        "rows",
        "median",
        "mean |error|",
        "10 %",
        "90 %",
        "inside",
        "rows inside",
        "low",
        "high",
    )
    shown = Table(*columns, title="predicted / measured; low and high would hold 90 % of the runs")
    for name, part in table.groupby("profile"):
        shown.add_row(*summary(str(name), part))
    console.print(shown)
    for (file, why), count in sorted(skipped.items()):
        console.print(f"left out of {file}: {count} rows, {why}", highlight=False, style="dim")


if __name__ == "__main__":
    main()
