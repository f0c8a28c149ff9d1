"""How many micro-batches a pipeline stage holds between their forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable

from planner.cost.training_run import TrainingSetup
from simulator.errors import InputError

WEIGHT_GRADIENT_SHARE = 32 / 34
"""Of a layer's activations, what the weight gradients need: 32 of 34 s b h (Qi et al., arXiv:2401.10241, table 1)."""
V_SHAPED = ("zbv", "dualpipe_v")
"""Schedules that place two chunks a rank, down the ranks and up again: the first rank has both ends."""
BOTH_DIRECTIONS = "dualpipe"
"""The schedule that keeps two copies of the network, one for each direction of the pipeline."""


def _interleaved(stage: int, pp: int, vpp: int, micro_batches: int) -> float:
    return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, micro_batches * vpp) / vpp


_Formula = Callable[[int, int, int, int], float]
_FORMULAS: dict[str, _Formula] = {
    "gpipe": lambda stage, pp, vpp, m: m,
    "gradient_accumulation": lambda stage, pp, vpp, m: 1,
    "1f1b": lambda stage, pp, vpp, m: min(pp - stage, m) if vpp == 1 else _interleaved(stage, pp, vpp, m),
    "interleaved_1f1b": _interleaved,
    "zb_h1": lambda stage, pp, vpp, m: min(pp - stage + WEIGHT_GRADIENT_SHARE * stage, m),
    "zb_h2": lambda stage, pp, vpp, m: min(2 * (pp - stage) - 1 + WEIGHT_GRADIENT_SHARE * 2 * stage, m),
    "zbv": lambda stage, pp, vpp, m: min(pp, m),
    "dualpipe": lambda stage, pp, vpp, m: min((pp + 1) / 2, m),
    "dualpipe_v": lambda stage, pp, vpp, m: min(pp + 0.5, m),
    "multi_copy": lambda stage, pp, vpp, m: min(2 * (pp - stage), m),
}


def schedule_name(schedule: str) -> str:
    """The name of a schedule as in `simulator.schedules`.

    >>> schedule_name("ZB-H1")
    'zb_h1'
    """
    return schedule.lower().replace("-", "_")


def micro_batches_in_flight(schedule: str, stage: int, pp: int, vpp: int, micro_batches: int) -> float:
    """Largest number of micro-batches whose activations of this rank's layers stand at one time.

    ``gpipe`` (Huang et al., arXiv:1811.06965): all ``m``. ``1f1b`` (Narayanan et al., arXiv:2006.09503): ``p - i``.
    Interleaved (arXiv:2104.04473): ``2 (p - i - 1) + (v - 1) p + 1`` chunks of a ``v``-th of the rank's layers. Zero
    bubble (arXiv:2401.10241): ``zb_h1`` puts off ``i`` weight gradients, ``zb_h2`` holds ``2 (p - i) - 1`` and puts
    off ``2 i``; ``zbv`` (arXiv:2405.15362) ``p`` on every rank. ``dualpipe`` (arXiv:2412.19437): ``p + 1`` of one
    copy of the stage, half as many of the two copies of a rank.

    Raises
    ------
    InputError
        For a schedule without a formula.
    """
    formula = _FORMULAS.get(schedule_name(schedule))
    if formula is None:
        raise InputError(
            f"schedule {schedule!r} has no formula for the micro-batches in flight: "
            f"choose one of {', '.join(_FORMULAS)}"
        )
    return float(formula(stage, pp, vpp, micro_batches))


def stage_residency(setup: TrainingSetup, stage: int) -> float:
    """Micro-batches in flight of rank `stage`, whose chunks need not have equally many layers.

    The result, times what all layers of the stage keep, is what stands. A rank that interleaves takes ``pp``
    micro-batches (``micro_batch_group`` where that is more) through one chunk, then as many through the next, and so
    on: the first chunks hold more of them than the last. A schedule that was searched for under a limit of memory uses
    it up (ZB-1p and ZB-2p: ``p`` and ``2 p`` micro-batches on every rank; arXiv:2401.10241, section 5).
    """
    if setup.pipelines_in_flight:
        return float(min(setup.pipelines_in_flight * setup.pp, setup.micro_batches))
    even = micro_batches_in_flight(setup.schedule, stage, setup.pp, setup.vpp, setup.micro_batches)
    interleaved = schedule_name(setup.schedule) in ("1f1b", "interleaved_1f1b") and setup.vpp > 1
    if interleaved and setup.micro_batch_group > setup.pp:
        more = (setup.vpp - 1) * (setup.micro_batch_group - setup.pp) / setup.vpp
        even = min(even + more, float(setup.micro_batches))
    layers = setup.layers_per_stage[stage :: setup.pp]
    if not interleaved or not layers:
        return even
    group = min(max(setup.pp, setup.micro_batch_group), setup.micro_batches)
    rounds, rest = divmod(even * setup.vpp, group * setup.vpp)
    held = (rounds * group + min(max(rest - chunk * group, 0.0), group) for chunk in range(setup.vpp))
    return sum(count * each for count, each in zip(layers, held, strict=True)) / max(sum(layers), 1)
