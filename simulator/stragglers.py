"""Slow ranks and slow links, and what they do to a synchronous step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.pipeline_operators import OperatorCosts, Operators
from simulator.schedules import ActionKind, Schedule

FloatArray = npt.NDArray[np.float64]


def compute_factors(
    ranks: int, *, seed: int, slow_ranks: int = 0, slowdown: float = 1.5, spread: float = 0.0
) -> FloatArray:
    """Factors (ranks,) by which the kernels of each rank take longer than those of the median rank.

    The factors are log-normal, ``exp(spread z)`` with standard normal z, and those of `slow_ranks` ranks drawn at
    random are multiplied by `slowdown`. Identical devices of one cluster differ by 8 % on average and 22 % at most,
    outliers run up to 1.5 times slower than the median (Sinha et al., SC 2022, arXiv:2208.11035).
    """
    if not 0 <= slow_ranks <= ranks:
        raise InputError(f"{slow_ranks} slow ranks of {ranks}: name at most as many as the plan has devices")
    if slowdown < 1 or spread < 0:
        raise InputError(f"slow-down {slowdown} and spread {spread}: at least 1 and 0; correct them")
    random = np.random.default_rng(seed)
    factors = np.exp(spread * random.standard_normal(ranks)) if spread else np.ones(ranks)
    factors[random.choice(ranks, slow_ranks, replace=False)] *= slowdown
    return factors


def slow_stages(schedule: Schedule, costs: OperatorCosts, factors: FloatArray) -> OperatorCosts:
    """The passes of a pipeline with the kernels of pipeline rank r taking ``factors[r]`` times as long.

    What frames the passes (prologue, epilogue, messages between ranks) stays. Stages that are alike and equally slow
    share their operators, as before.
    """
    if len(factors) != schedule.ranks or not np.all(factors > 0):
        raise InputError(f"{len(factors)} factors for {schedule.ranks} pipeline ranks: one above 0 each")
    made: dict[tuple[int, float], Operators] = {}

    def slowed(operators: Operators, factor: float) -> Operators:
        key = (id(operators), factor)
        if key not in made:
            kernels = operators.communication == 0
            made[key] = replace(operators, seconds=operators.seconds * np.where(kernels, factor, 1.0))
        return made[key]

    of_stage = np.asarray(factors)[schedule.stage_rank].tolist()

    def passes(given: Mapping[ActionKind, Sequence[Operators]]) -> dict[ActionKind, list[Operators]]:
        return {kind: [slowed(one, f) for one, f in zip(row, of_stage, strict=True)] for kind, row in given.items()}

    return replace(costs, passes=passes(costs.passes), first=passes(costs.first), last=passes(costs.last))


def slow_level(hardware: Hardware, level: str, share: float) -> Hardware:
    """The cluster with links of `level` at `share` of their bandwidth, as one slow link makes the step see it.

    A ring, a tree or an exchange moves at the speed of its slowest member, and the groups without the slow link
    wait for the one with it at the end of the step.
    """
    names = [found.name for found in hardware.levels]
    if level not in names or not 0 < share <= 1:
        raise InputError(
            f"link of {level!r} at {share} of its bandwidth: levels are {', '.join(names)}, shares in (0, 1]"
        )
    levels = tuple(
        replace(
            found,
            bandwidth_bytes_per_s=found.bandwidth_bytes_per_s * share,
            reduction_bandwidth_bytes_per_s=found.reduction_bandwidth_bytes_per_s * share,
        )
        if found.name == level
        else found
        for found in hardware.levels
    )
    return replace(hardware, levels=levels)
