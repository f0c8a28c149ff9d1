"""States sharded over a part of the data axis: the axis as two, replicas of shard groups and the ranks in one."""

from __future__ import annotations

from collections.abc import Mapping

from planner.graph.operator_graph import OperatorGraph
from planner.plans.plan import NodeRules
from planner.sharding.placement import REPLICATE, Mesh, MeshAxis
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
