"""How many micro-batches a pipeline stage holds between their forward and backward passes."""

from __future__ import annotations

from simulator.errors import InputError

_WEIGHT_SHARE = 32 / 34
"""Of a layer's activations, what the weight gradients need: 32 of 34 s b h (Qi et al., arXiv:2401.10241, table 1)."""


def micro_batches_in_flight(schedule: str, stage: int, pp: int, vpp: int, micro_batches: int) -> float:
    """Largest number of micro-batches whose activations of this stage stand at one time.

    ``gpipe`` (Huang et al., arXiv:1811.06965): all ``m``. ``1f1b`` (Narayanan et al., arXiv:2006.09503): ``p - i``.
    Interleaved (arXiv:2104.04473): ``2 (p - i - 1) + (v - 1) p + 1`` chunks of a ``v``-th of the stage. Zero bubble
    (arXiv:2401.10241): ``zb-h1`` puts off ``i`` weight gradients, ``zb-h2`` holds ``2 (p - i) - 1`` and puts off
    ``2 i``; ``zbv`` (arXiv:2405.15362) ``p`` on every stage. ``dualpipe`` (arXiv:2412.19437): ``p + 1``.

    Raises
    ------
    InputError
        For a schedule without a formula.
    """
    m = float(micro_batches)
    if schedule == "gpipe":
        return m
    if schedule in ("1f1b", "interleaved", "interleaved_1f1b", "1f1b-interleaved"):
        if vpp == 1:
            return min(pp - stage, m)
        return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, m * vpp) / vpp
    if schedule in ("zb-h1", "zbh1", "zb-1p"):
        return min(pp - stage + _WEIGHT_SHARE * stage, m)
    if schedule in ("zb-h2", "zbh2", "zb-2p"):
        return min(2 * (pp - stage) - 1 + _WEIGHT_SHARE * 2 * stage, m)
    if schedule in ("zbv", "zb-v"):
        return min(float(pp), m)
    if schedule == "dualpipe":
        return min(pp + 1.0, m)
    if schedule in ("accumulation", "none", ""):
        return 1.0
    raise InputError(
        f"schedule {schedule!r} has no formula for the micro-batches in flight; "
        "choose one of 1f1b, gpipe, interleaved, zb-h1, zb-h2, zbv, dualpipe"
    )
