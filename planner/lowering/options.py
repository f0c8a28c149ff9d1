"""What a plan says beside the strategies, as lowering wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from planner.cost.work import optimizer
from planner.graph.chain import chain
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.loaded import data_axis, replicated_rules, with_replicas
from planner.lowering.placed import LoweringOptions
from planner.networks.marks import Swap
from planner.plans.plan import NodeRules, Plan
from simulator.errors import StrategyError

T = TypeVar("T")


def lowering_options(plan: Plan, graph: OperatorGraph) -> LoweringOptions:
    """Options of a plan for its network, folded or not.

    Raises
    ------
    StrategyError
        A recompute range names units that the network has not, or ranges overlap.
    """
    names = chain(graph).names() if plan.recompute_ranges or plan.offload_ranges else ()
    return LoweringOptions(
        mesh=plan.mesh,
        micro_batches=plan.micro_batches,
        optimizer=optimizer(plan.optimizer),
        bucket_bytes=plan.bucket_bytes,
        optimizer_sharding=plan.optimizer_sharding,
        recompute=recompute_modes(plan, names),
        keeps_messages=keeps_messages(plan, names),
        offload=swaps(plan, names),
        shard_size=plan.shard_size,
        offload_optimizer=plan.offload_optimizer,
        offload_to=plan.offload_to,
        offload_parameters=plan.offload_parameters,
        host_embeddings=plan.host_embeddings,
        exchange=plan.exchange,
        copies=plan.copies,
    )


def spread(
    graph: OperatorGraph, rules: Mapping[str, NodeRules], options: LoweringOptions
) -> tuple[LoweringOptions, Mapping[str, NodeRules]]:
    """Split the data axis in options and rules where only a part of it shares shards."""
    place = data_axis(options.mesh)
    if not options.shard_size or (place is not None and options.mesh.axes[place].size == options.shard_size):
        return options, rules
    mesh = with_replicas(options.mesh, options.shard_size)
    return replace(options, mesh=mesh, shard_size=0), replicated_rules(graph, rules, options.mesh)


def recompute_modes(plan: Plan, names: Sequence[str]) -> dict[str, str]:
    """Mode of each unit that computes again, by name, given the names of all units in model order."""
    ranges = [(part.first, part.last, part.mode) for part in plan.recompute_ranges]
    return _by_unit(plan, "recompute.ranges", ranges, names)


def swaps(plan: Plan, names: Sequence[str]) -> dict[str, Swap]:
    """What each unit, by name, has on the host, given the names of all units in model order."""
    ranges = [(part.first, part.last, part.swap) for part in plan.offload_ranges]
    return _by_unit(plan, "offload_activations", ranges, names)


def _by_unit(plan: Plan, field: str, ranges: Sequence[tuple[str, str, T]], names: Sequence[str]) -> dict[str, T]:
    """What ranges of units say of each of them."""
    place = {name: i for i, name in enumerate(names)}
    found: dict[str, T] = {}
    for number, (first, last, said) in enumerate(ranges):
        for name in (first, last):
            if name not in place:
                raise StrategyError(
                    f"{field}.{number}: {name!r} is no unit of {plan.network}; its units are {shortened(names)}"
                )
        members = names[place[first] : place[last] + 1]
        if not members:
            raise StrategyError(f"{field}.{number}: {first!r} comes after {last!r}; swap them")
        twice = next((name for name in members if name in found), None)
        if twice is not None:
            raise StrategyError(f"{field}.{number}: unit {twice!r} is in another range as well; keep one")
        found.update(dict.fromkeys(members, said))
    return found


def keeps_messages(plan: Plan, names: Sequence[str]) -> frozenset[str]:
    """Units that compute again and keep what messages bring, given the names of all units in model order."""
    without = replace(plan, recompute_ranges=tuple(part for part in plan.recompute_ranges if not part.messages))
    return frozenset(recompute_modes(without, names))


def shortened(names: Sequence[str]) -> str:
    """Some names for a message."""
    shown = names if len(names) <= 8 else (*names[:4], "…", *names[-3:])
    return ", ".join(shown)
