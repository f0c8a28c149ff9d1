"""Whether a distributed run and a single process train alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simulator.errors import ExecutionError

TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Relative difference of losses that needs no further look, by precision.

Sums over ranks are rounded in another order than sums in one process, and training amplifies that
step by step. fp64 leaves no room for a real error to hide. The others are at least five times what
single-process runs of zoo:mlp and zoo:gpt2-tiny in that precision and in fp64 differ by over twenty steps
(fp32 4e-7, bf16 1e-2, fp16 1e-3).
"""

ROUNDING_FACTORS = {"fp64": 100.0, "fp32": 10.0, "bf16": 10.0, "fp16": 10.0}
"""How much more than one process's own rounding error the order of sums may make.

In fp64 that error is taken from a run whose parameters start `PERTURBATION` away; it stands for the
rounding of every sum of the network, so the factor is larger.
"""

PERTURBATION = 1e-15
"""Relative change of the parameters, a few units in the last place of fp64."""

CHAOS = 1e-6
"""In fp64 no sensitivity excuses more than this: a wrong plan differs by far more."""


def tolerances(precision: str, reference: Sequence[float], exact: Sequence[float] = ()) -> list[float]:
    """Allowed relative difference at each step.

    With other losses of one process (`exact`: in fp64, or in fp64 from parameters changed in the last
    places) given, a network that is more sensitive than others may differ by a multiple of its own
    rounding error up to that step.
    """
    allowed, largest = [], 0.0
    for step, loss in enumerate(reference):
        if exact:
            largest = max(largest, relative_difference(loss, exact[step]))
        own = ROUNDING_FACTORS[precision] * largest if math.isfinite(largest) else 0.0
        allowed.append(max(TOLERANCES[precision], min(own, CHAOS) if precision == "fp64" else own))
    return allowed


def relative_difference(loss: float, reference: float) -> float:
    """Difference relative to the reference; infinite where one of them is not a number.

    >>> relative_difference(1.01, 1.0) < 0.0101
    True
    """
    if not (math.isfinite(loss) and math.isfinite(reference)):
        return math.inf
    return abs(loss - reference) / max(abs(reference), 1e-30)


def first_beyond(losses: Sequence[float], reference: Sequence[float], allowed: Sequence[float]) -> int | None:
    """First step whose losses differ by more than allowed."""
    triples = enumerate(zip(losses, reference, allowed, strict=True))
    return next((step for step, (loss, wanted, most) in triples if relative_difference(loss, wanted) > most), None)


def check_finite(losses: Sequence[float], what: str = "training") -> None:
    """Raise ExecutionError naming the first step whose loss is no number or infinite."""
    step = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if step is not None:
        raise ExecutionError(f"{what} diverged at step {step}: loss {losses[step]}; lower --learning-rate")


def compare_losses(
    losses: Sequence[float], reference: Sequence[float], precision: str, exact: Sequence[float] = ()
) -> float:
    """Return the largest relative difference, or raise ExecutionError naming the first step beyond the tolerance."""
    check_finite(losses)
    check_finite(reference, "training in one process")
    allowed = tolerances(precision, reference, exact)
    step = first_beyond(losses, reference, allowed)
    differences = [relative_difference(*pair) for pair in zip(losses, reference, strict=True)]
    if step is not None:
        remedy = (
            "report the strategy file, because rounding does not explain it"
            if precision == "fp64"
            else "repeat with --precision fp64 to tell rounding from a wrong plan"
        )
        raise ExecutionError(
            f"step {step}: loss {losses[step]!r} differs from the single process's {reference[step]!r} by "
            f"{differences[step]:.2e} relative, but {precision} allows {allowed[step]:.0e}; {remedy}"
        )
    return max(differences, default=0.0)
