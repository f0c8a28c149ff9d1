"""How far predictions of memory are from measurements: ``memory_errors`` of ``hw_profiles/software/stacks.yaml``.

    python -m benchmarks.memory_errors MEASUREMENTS_DIR

Prints quantiles of measured over predicted bytes of all rows that state memory, by their pinned plans.
Sources of five rows and more count alike, whatever the number of their rows.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from planner.published.planned import predict_planned
from planner.published.predictions import score
from planner.published.reading import read_measurements

LEAST_ROWS = 5
STEPS = 21


def quantiles(ratios: dict[str, list[float]], steps: int) -> list[float]:
    """Quantiles of the ratios of all sources in equal steps of probability, each source with the same weight."""
    known = {name: found for name, found in ratios.items() if len(found) >= LEAST_ROWS}
    values = np.array([ratio for found in known.values() for ratio in found])
    weights = np.array([1 / len(found) for found in known.values() for _ in found])
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) - weights[order] / 2
    shares = np.linspace(0, 1, steps) * weights.sum()
    return [round(float(value), 3) for value in np.interp(shares, reached, values[order])]


def main(folder: Path) -> None:
    """Print the number of rows, the quantiles of the ratios, and the median of how far they are from 1."""
    rows = [row for path in sorted(folder.glob("*.csv")) for row in read_measurements(path)]
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in score(rows, predict_planned([row.run for row in rows if row.run is not None])):
        if row.measured_memory_bytes and row.predicted_memory_bytes:
            ratios[row.source].append(row.measured_memory_bytes / row.predicted_memory_bytes)
    used = sum(len(found) for found in ratios.values() if len(found) >= LEAST_ROWS)
    errors = {name: [abs(ratio - 1) for ratio in found] for name, found in ratios.items()}
    _, median, _ = quantiles(errors, 3)
    print(f"{used} rows: {quantiles(ratios, STEPS)}, median error {median:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
