"""The process groups of a plan: which ranks meet on each mesh axis and in each tie between stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from planner.lowering.instructions import LoweredStages

Groups = tuple[tuple[int, ...], ...]
"""Ranks of groups side by side, each rank in one of them."""


def members(lowered: LoweredStages) -> list[Groups]:
    """Ranks of every group of each mesh axis, then of each set of tied parameters."""
    mesh = lowered.mesh
    axes = range(len(mesh.axes))
    shifts = [stage * lowered.pipeline_stride for stage in range(lowered.schedule.ranks)]
    found = [
        tuple(tuple(rank + shift for rank in ranks) for shift in shifts for ranks in mesh.groups(axis)) for axis in axes
    ]
    ties = lowered.ranks[0].ties
    return [*found, *(tuple(tuple(rank + shifts[m] for m in tie) for rank in mesh.ranks()) for tie in ties)]


def make_groups(wanted: Sequence[Groups], timeout: timedelta) -> tuple[dist.ProcessGroup | None, ...]:
    """Make groups, in one order on all ranks, and return of each row of them the one that this rank is in.

    Where an axis or a tie joins ranks as one before it does, both have the same groups: each is made once.
    """
    made: dict[Groups, dist.ProcessGroup | None] = {}
    for groups in wanted:
        if groups not in made:
            made[groups] = own_group(groups, timeout)
    return tuple(made[groups] for groups in wanted)


def own_group(groups: Iterable[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Make these groups and return the one that this rank is in."""
    rank = dist.get_rank()
    mine: dist.ProcessGroup | None = None
    for ranks in groups:
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            mine = group
    return mine
