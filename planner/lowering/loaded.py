"""What ranks of a data axis hold: how batch tensors arrive, and states sharded over a part of the axis.

Such an axis is two: replicas of shard groups, and the ranks in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from planner.graph.operator_graph import OperatorGraph
from planner.plans.exchange import DataStrategy
from planner.plans.plan import NodeRules
from planner.sharding.placement import REPLICATE, Mesh, MeshAxis, Placements
from planner.sharding.rules import Rule
from simulator.checks import near_divisors
from simulator.errors import StrategyError

REPLICAS = "data_replica"
"""The axis between ranks that hold equal shards; the data axis itself is that of one shard group."""


def with_replicas(mesh: Mesh, shard_size: int) -> Mesh:
    """Split the data axis into replicas (outer) and shard groups of `shard_size` neighbouring ranks (inner).

    >>> with_replicas(Mesh((MeshAxis("data", 8), MeshAxis("tensor", 2))), 4)
    ... # doctest: +NORMALIZE_WHITESPACE
    Mesh(axes=(MeshAxis(name='data_replica', size=2), MeshAxis(name='data', size=4), MeshAxis(name='tensor', size=2)),
         strides=(8, 2, 1))

    Raises
    ------
    StrategyError
        If the shard group does not divide the data axis.
    """
    place = data_axis(mesh)
    size = 1 if place is None else mesh.axes[place].size
    if place is None or size % shard_size:
        raise StrategyError(
            f"shard_size {shard_size} does not divide the {size} data-parallel ranks; use "
            f"{near_divisors(shard_size, size)}, or 0 for all"
        )
    axes, strides = list(mesh.axes), [mesh.stride(i) for i in range(len(mesh.axes))]
    axes[place : place + 1] = [MeshAxis(REPLICAS, size // shard_size), MeshAxis("data", shard_size)]
    strides[place : place + 1] = [strides[place] * shard_size, strides[place]]
    return Mesh(tuple(axes), tuple(strides))


def replicated_rules(graph: OperatorGraph, rules: Mapping[str, NodeRules], mesh: Mesh) -> dict[str, NodeRules]:
    """Rules on the mesh of `with_replicas`: operators follow the data axis on both axes, replicas repeat parameters."""
    place = data_axis(mesh)
    assert place is not None  # with_replicas has checked it
    stored = {graph.nodes[p.node].name for p in graph.parameters}
    made: dict[tuple[int, bool], NodeRules] = {}
    found = {}
    for name, chosen in rules.items():
        key = id(chosen), name in stored
        if key not in made:
            rule = chosen[place]
            outer = Rule((), (REPLICATE,) * len(rule.outputs), splits_work=False) if key[1] else rule
            made[key] = (*chosen[:place], outer, *chosen[place:])
        found[name] = made[key]
    return found


def data_axis(mesh: Mesh) -> int | None:
    """Number of the data axis."""
    return next((i for i, axis in enumerate(mesh.axes) if axis.name == "data"), None)


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
