"""Whether a distributed run and a single process train alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from simulator.errors import ExecutionError

TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Relative difference of losses that needs no further look, by precision.

Sums over ranks are rounded in another order than sums in one process, and training amplifies that
step by step. fp64 leaves no room for a real error to hide. The others are at least five times what
single-process runs of zoo:mlp and zoo:gpt2-tiny in that precision and in fp64 differ by over twenty steps
(fp32 4e-7, bf16 1e-2, fp16 1e-3).
"""

ROUNDING = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Unit roundoff: the largest relative error of rounding a number once, to nearest."""

NUDGE = 4.0
"""Standard deviation, in unit roundoffs, of the relative change of every parameter before every step of a nudged run.

What the order of sums does to a network is what a change of its parameters by some roundoffs does (backward error
analysis: Higham, *Accuracy and Stability of Numerical Algorithms*, chapter 3), and the spread of runs so changed shows
it (Parker, *Monte Carlo Arithmetic*, 1997). So nudged runs also take other turns where rounding decides one: whether a
rectifier lets a value through that is zero but for rounding.
"""

NUDGED_RUNS = 4

ROUNDING_FACTORS = {"fp64": 100.0, "fp32": 10.0, "bf16": 10.0, "fp16": 10.0}
"""How much further than other runs of one process a distributed one may be from one process.

In fp64 those are nudged runs alone, which stand for the rounding of every sum of the network, so the factor is larger.
"""

CHAOS = 1e-6
"""In fp64 no sensitivity excuses more than this: a wrong plan differs by far more."""


def verified(
    losses: Sequence[float], reference: Sequence[float], precision: str, others: Iterable[Sequence[float]] = ()
) -> list[float]:
    """Return what each step's loss may differ by, relative to one process's, or raise where one differs by more.

    Parameters
    ----------
    others : iterable
        Losses of one process that only rounding sets apart from `reference`; each is asked for only while the losses
        differ by more than those before allow.

    Raises
    ------
    ExecutionError
        Rounding does not explain a difference: names the first such step.
    """
    check_finite(losses)
    check_finite(reference, "training in one process")
    known: list[Sequence[float]] = []
    allowed = tolerances(precision, reference)
    for other in others if first_beyond(losses, reference, allowed) is not None else ():
        known.append(other)
        allowed = tolerances(precision, reference, known)
        if first_beyond(losses, reference, allowed) is None:
            break
    _refuse(losses, reference, allowed, precision)
    return allowed


def tolerances(precision: str, reference: Sequence[float], others: Sequence[Sequence[float]] = ()) -> list[float]:
    """Allowed relative difference at each step.

    With other runs of one process given, a network that is more sensitive than others may differ by a multiple of how
    far rounding has taken them from the reference up to that step.
    """
    allowed, largest = [], 0.0
    for step, loss in enumerate(reference):
        largest = max([largest, *(relative_difference(loss, other[step]) for other in others)])
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


def _refuse(losses: Sequence[float], reference: Sequence[float], allowed: Sequence[float], precision: str) -> None:
    """Raise where a step's losses differ by more than allowed."""
    step = first_beyond(losses, reference, allowed)
    if step is None:
        return
    remedy = (
        "report the strategy file, because rounding does not explain it"
        if precision == "fp64"
        else "repeat with --precision fp64 to tell rounding from a wrong plan"
    )
    raise ExecutionError(
        f"step {step}: loss {losses[step]!r} differs from the single process's {reference[step]!r} by "
        f"{relative_difference(losses[step], reference[step]):.2e} relative, but {precision} allows "
        f"{allowed[step]:.0e}; {remedy}"
    )
