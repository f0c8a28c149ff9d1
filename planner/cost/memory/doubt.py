"""How probable it is that a plan fits, by how far predictions of memory were from measurements."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np

from planner.cost.software_file import shipped_stacks

Basis = Literal["software", "tensors"]


def probability_to_fit(predicted_bytes: float, limit_bytes: float, basis: Basis) -> float:
    """Probability that a run takes no more than `limit_bytes`, from 0 to 1.

    It is the share of earlier predictions whose measurement was at most ``limit_bytes / predicted_bytes`` times the
    prediction. Between the quantiles that ``hw_profiles/software/stacks.yaml`` lists it is interpolated linearly, as if
    one prediction more had been below the least and one above the greatest.

    Parameters
    ----------
    basis
        What the prediction counts: all that named software holds, or live tensors alone.
    """
    if predicted_bytes <= 0:
        return 1.0
    quantiles, rows = _quantiles(basis)
    share = np.linspace(1.0, rows, len(quantiles)) / (rows + 1.0)
    room = limit_bytes / predicted_bytes
    return float(np.interp(room, quantiles, share, left=0.0, right=1.0))


@lru_cache(maxsize=2)
def _quantiles(basis: Basis) -> tuple[tuple[float, ...], int]:
    errors = shipped_stacks().memory_errors[basis]
    return tuple(errors.quantiles), errors.rows
