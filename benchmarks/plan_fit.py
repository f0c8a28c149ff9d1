"""Fits what plans of named software take beside the coefficients of its stack: ``plans`` of the software file.

    python -m benchmarks.plan_fit MEASUREMENTS_DIR [--rows N] [--without LETTERS] [--write]

Runs are predicted by their pinned plans, as they are and with products and kernels bound by memory slower. What each
prediction owes to both tells which factors bring a stack's runs nearest to their measured times: the most probable
ones where factors are close to 1, errors are near a normal distribution, and outliers count less (Huber). Of a source
``--rows`` rows are taken, evenly, and none of the files that begin with one of the letters ``--without``. Functional
tests of tiny networks are left out, as hosts decide about them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from planner.cost.software_file import SHIPPED, SOFTWARE_FOLDER, write_software
from planner.cost.training_run import RunPrediction, TransformerShape
from planner.published.estimate.coefficients import stack_key
from planner.published.planned import predict_planned
from planner.published.reading import MeasuredRow, read_measurements

STEP = 1.1
SLOWER = {"matmul": {"matmul": STEP, "low_precision": STEP}, "memory": {"memory": STEP}}
"""What is made slower of a profile's ``training``, by the factor that it tells about."""
SPREAD = {"matmul": 0.06, "memory": 0.25}
"""How far factors may be expected from 1: products of libraries differ little between kinds of software."""
NOISE, LARGEST = 0.07, 0.10
"""Of logarithms of predicted over measured times: what is usual, and from where on a row counts less."""
SOURCE = "fitted: python -m benchmarks.plan_fit MEASUREMENTS_DIR"
LEAST_ROWS = 8
LEAST_GAIN = 0.005
"""By which the mean error of a stack's rows must fall, or the stack keeps what it has."""


def measured(folder: Path, most: int, without: str = "") -> list[MeasuredRow]:
    """Rows of transformers that state a time, at most so many of a source, evenly, not of files ``without``."""
    found: dict[str, list[MeasuredRow]] = defaultdict(list)
    for path in sorted(folder.glob("*.csv")):
        if path.name.startswith(tuple(without)):
            continue
        for row in read_measurements(path):
            run = row.run
            if run is None or row.outcome not in ("", "ok") or not row.measured_time_s > 0:
                continue
            if isinstance(run.network, TransformerShape) and not run.setup.deterministic:
                found[row.source].append(row)
    return [row for rows in found.values() for row in rows[:: max(1, -(-len(rows) // most))]]


def times(rows: Sequence[MeasuredRow], slower: Mapping[str, float]) -> np.ndarray:
    """Predicted seconds (rows,), NaN where a row has no plan."""
    found = predict_planned([row.run for row in rows if row.run is not None], slower=slower)
    return np.array([told.step_time_s if isinstance(told, RunPrediction) else np.nan for told in found])


def fitted(errors: np.ndarray, owed: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Logarithms (factors,) that bring errors (rows,) nearest to 0, where ``owed`` (rows, factors) are their slopes."""
    prior = np.diag([1 / SPREAD[name] ** 2 for name in SLOWER])
    found = np.zeros(owed.shape[1])
    for _ in range(50):
        left = errors + owed @ found
        each = weights * np.minimum(1.0, LARGEST / np.maximum(np.abs(left), 1e-9)) / NOISE**2
        found = -np.linalg.solve(owed.T @ (owed * each[:, None]) + prior, owed.T @ (each * errors))
    return found


def mean_error(logarithms: pd.Series) -> float:
    """Mean of how far predicted times are off, as a part of the measured ones."""
    return float(np.expm1(logarithms).abs().mean())


def fit(rows: Sequence[MeasuredRow]) -> tuple[dict[str, dict[str, float]], pd.DataFrame]:
    """Factors by stack, and how far each row is off before and after."""
    base = times(rows, {})
    owed = np.stack([np.log(times(rows, slower) / base) / np.log(STEP) for slower in SLOWER.values()], axis=1)
    table = pd.DataFrame({"source": [row.source for row in rows], "row": [row.row_id for row in rows]})
    table["stack"] = [stack_key(row.run) for row in rows if row.run is not None]
    table["before"] = np.log(base / np.array([row.measured_time_s for row in rows]))
    table["after"] = table["before"]
    factors: dict[str, dict[str, float]] = {}
    for stack, part in table[np.isfinite(table["before"]) & np.isfinite(owed).all(axis=1)].groupby("stack"):
        if len(part) < LEAST_ROWS:
            continue
        weights = 1 / np.sqrt(part.groupby("source")["row"].transform("size").to_numpy())
        found = fitted(part["before"].to_numpy(), owed[part.index], weights / weights.mean())
        after = part["before"] + owed[part.index] @ found
        if mean_error(after) > mean_error(part["before"]) - LEAST_GAIN:
            continue
        table.loc[part.index, "after"] = after
        factors[str(stack)] = {name: float(np.exp(value)) for name, value in zip(SLOWER, found, strict=True)}
    return factors, table


def write(factors: Mapping[str, Mapping[str, float]], table: pd.DataFrame) -> None:
    """Multiply the shipped factors by these."""
    path = Path(str(resources.files("hw_profiles") / SOFTWARE_FOLDER / SHIPPED))
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    plans = content.setdefault("plans", {})
    for stack, found in factors.items():
        part = table[table["stack"] == stack]
        error = mean_error(part["after"])
        source = f"{SOURCE}, {len(part)} rows with the stack {stack}, mean error {error:.1%}"
        had = plans.setdefault(stack, {})
        for name, factor in found.items():
            value = float(f"{had.get(name, {}).get('value', 1.0) * factor:.4g}")
            had[name] = {"value": value, "source": source}
    write_software(content, path)


def main() -> None:
    """Print factors and errors by stack and by source; with ``--write`` the shipped file gets the factors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=20, help="rows of a source")
    parser.add_argument("--without", default="", help="letters of files whose rows judge the fit")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    factors, table = fit(measured(options.folder, options.rows, options.without))
    for stack, found in factors.items():
        print(stack, {name: round(value, 3) for name, value in found.items()})
    off = {when: np.expm1(table[when]) * 100 for when in ("before", "after")}
    shown = table[["stack", "source"]].assign(
        **{f"{when} {kind}": values if kind == "bias" else values.abs() for when, values in off.items()
           for kind in ("error", "bias")}
    )  # fmt: skip
    for by in (["stack"], ["stack", "source"]):
        grouped = shown.groupby(by)
        means = grouped[[column for column in shown if " " in str(column)]].mean().round(1)
        print(means.assign(rows=grouped.size()).to_string())
    if options.write:
        write(factors, table)


if __name__ == "__main__":
    main()
