"""Whether a distributed run and a single process train alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simulator.errors import ExecutionError

TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Largest relative difference of losses, by precision.

Sums over ranks are rounded in another order than sums in one process, and training amplifies that
step by step. fp64 leaves no room for a real error to hide. The others are a few times what single-process
runs in that precision and in fp64 differ by over twenty steps.
"""


def tolerance_for(precision: str) -> float:
    """Largest relative difference of losses that rounding explains."""
    return TOLERANCES[precision]


def relative_difference(loss: float, reference: float) -> float:
    """Difference relative to the reference; infinite where one of them is not a number.

    >>> relative_difference(1.01, 1.0) < 0.0101
    True
    """
    if not (math.isfinite(loss) and math.isfinite(reference)):
        return math.inf
    return abs(loss - reference) / max(abs(reference), 1e-30)


def compare_losses(losses: Sequence[float], reference: Sequence[float], precision: str) -> float:
    """Return the largest relative difference, or raise ExecutionError naming the first step beyond the tolerance."""
    allowed = tolerance_for(precision)
    differences = [relative_difference(*pair) for pair in zip(losses, reference, strict=True)]
    for step, difference in enumerate(differences):
        if difference > allowed:
            remedy = (
                "report the strategy file, because rounding does not explain it"
                if precision == "fp64"
                else "repeat with --precision fp64 to tell rounding from a wrong plan"
            )
            raise ExecutionError(
                f"step {step}: loss {losses[step]!r} differs from the single process's {reference[step]!r} by "
                f"{difference:.2e} relative, but {precision} allows {allowed:.0e}; {remedy}"
            )
    return max(differences, default=0.0)
