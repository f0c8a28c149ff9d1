"""How batch tensors arrive at a rank: what each mesh axis cuts of them, where a context says it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from planner.lowering.replicas import REPLICAS
from planner.plans.exchange import DataStrategy
from planner.sharding.placement import REPLICATE, MeshAxis, Placements
from simulator.errors import StrategyError

BATCH_AXES = ("data", REPLICAS, "expert")
"""Axes along which ranks have samples of their own."""


def loaded_placements(
    data: DataStrategy, number: int, shape: tuple[int, ...], axes: Sequence[MeshAxis], own: Placements
) -> Placements:
    """Placements of batch tensor `number` of this shape; `own` are those that the plan has for it.

    >>> axes = (MeshAxis("data", 4), MeshAxis("tensor", 2))
    >>> loaded_placements("full_batch", 0, (8, 16), axes, (0, -1))
    (-1, -1)
    >>> loaded_placements(((4, 2), (8, 1)), 0, (8, 16), axes, (0, -1))
    (0, 1)
    >>> loaded_placements(((4, 2), (8, 1)), 1, (8, 16), axes, (0, -1))
    (0, 0)

    Raises
    ------
    StrategyError
        There is no such tensor, its dims are others or do not divide, or no axes cut a dim in so many parts.
    """
    if not data:
        return own
    if data == "full_batch":
        return (REPLICATE,) * len(axes)
    if data == "data_parallel":
        return tuple(0 if axis.name in BATCH_AXES else p for axis, p in zip(axes, own, strict=True))
    cuts = data[number] if number < len(data) else ()
    if len(cuts) != len(shape) or any(n % c for n, c in zip(shape, cuts, strict=True)):
        raise StrategyError(
            f"dataset_strategy={data}: input {number} of shape {shape} has no such cuts; give every input a tuple with "
            f"one number for each dim, which divides it"
        )
    fitting = [p for p in product(range(REPLICATE, len(shape)), repeat=len(axes)) if _cut(p, axes, cuts)]
    if not fitting:
        sizes = " × ".join(f"{axis.name} {axis.size}" for axis in axes) or "one device"
        raise StrategyError(
            f"dataset_strategy={data}: no axes of the mesh {sizes} cut input {number} in {cuts} parts; plan with the "
            f"number of parts of the batch as --pin dp, or use dataset_strategy='full_batch'"
        )
    return max(fitting, key=lambda p: [a.name in BATCH_AXES and at == 0 for a, at in zip(axes, p, strict=True)])


def _cut(placements: Placements, axes: Sequence[MeshAxis], cuts: Sequence[int]) -> bool:
    """Whether placements cut each dim in so many parts."""
    parts = zip(placements, axes, strict=True)
    found = list(parts)
    return all(prod(axis.size for p, axis in found if p == dim) == cut for dim, cut in enumerate(cuts))
