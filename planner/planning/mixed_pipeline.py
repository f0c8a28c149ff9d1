"""Pipelines on clusters of several device types: every stage at the pace of the devices that hold it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.graph.operator_graph import OperatorGraph
from planner.lowering.pipeline import LoweredPipeline, lower_pipeline
from planner.plans.plan import Plan
from simulator.errors import ProfileError
from simulator.hardware import Hardware
from simulator.mixed_cluster import MixedCluster, slowest_links, with_links
from simulator.pipeline_operators import OperatorCosts, Operators, per_rank
from simulator.schedules import ActionKind, Schedule
from simulator.task_table import FloatArray

Nodes = frozenset[int]


def lower_mixed(
    plan: Plan, graph: OperatorGraph, cluster: MixedCluster, hardware: Hardware, schedule: Schedule | None = None
) -> LoweredPipeline:
    """Lower a plan with pipeline stages for the nodes that its devices lie on.

    Kernels of a stage take the time of the slowest type among its nodes, its collectives the slowest links of those.
    What crosses stages (tensors sent, gradients of tied parameters) takes the slowest links of all.

    Parameters
    ----------
    hardware : Hardware
        The profile of a job whose devices all do the same (`simulator.mixed_cluster.pacing_hardware`).

    Raises
    ------
    ProfileError
        The plan needs more devices than the cluster has.
    """
    if plan.devices > cluster.devices:
        raise ProfileError(
            f"the plan needs {plan.devices} devices, cluster {cluster.name} has {cluster.devices}; add nodes"
        )
    stages = _Stages(plan, graph, cluster, schedule)
    paced = lower_pipeline(plan, graph, replace(hardware, overlaps_communication=stages.overlaps), schedule)
    held = nodes_of_ranks(plan, cluster)
    costs = [stages.costs(held[rank]) for rank in paced.schedule.stage_rank]
    made: dict[tuple[int, ...], Operators] = {}

    def slowest(types: Sequence[Operators]) -> Operators:
        """Each operator as long as on the slowest type; equal passes stay one object."""
        key = tuple(id(one) for one in types)
        if key not in made:
            seconds = np.maximum.reduce([one.seconds for one in types])
            made[key] = types[0] if len(types) == 1 else replace(types[0], seconds=seconds)
        return made[key]

    def passes(name: str) -> dict[ActionKind, list[Operators]]:
        kinds: Mapping[ActionKind, Sequence[Operators]] = getattr(paced.costs, name)
        return {
            kind: [slowest([getattr(one, name)[kind][stage] for one in types]) for stage, types in enumerate(costs)]
            for kind in kinds
        }

    def longest(name: str) -> FloatArray:
        """(ranks,) the most seconds on any type of each rank."""
        types = [[per_rank(paced.schedule, getattr(one, name)) for one in stages.costs(nodes)] for nodes in held]
        return np.array([max(float(one[rank]) for one in given) for rank, given in enumerate(types)])

    mixed = replace(
        paced.costs,
        passes=passes("passes"),
        first=passes("first"),
        last=passes("last"),
        prologue_s=longest("prologue_s"),
        epilogue_s=longest("epilogue_s"),
    )
    return replace(paced, costs=mixed)


def nodes_of_ranks(plan: Plan, cluster: MixedCluster) -> list[Nodes]:
    """Nodes that hold the devices of each pipeline rank."""
    found: list[set[int]] = [set() for _ in range(plan.pipeline)]
    for device in range(plan.devices):
        found[device // max(plan.pipeline_stride, 1) % plan.pipeline].add(cluster.node_of(device))
    return [frozenset(nodes) for nodes in found]


class _Stages:
    """Costs of the plan on each type of a set of nodes, joined by the slowest links of the set."""

    def __init__(self, plan: Plan, graph: OperatorGraph, cluster: MixedCluster, schedule: Schedule | None) -> None:
        self.plan, self.graph, self.cluster, self.schedule = plan, graph, cluster, schedule
        # Where one type does not compute while it communicates, the others wait for it.
        self.overlaps = all(hardware.overlaps_communication for hardware in cluster.nodes)
        self._of_hardware: dict[str, OperatorCosts] = {}
        self._of_nodes: dict[Nodes, list[OperatorCosts]] = {}

    def costs(self, nodes: Nodes) -> list[OperatorCosts]:
        if nodes not in self._of_nodes:
            links = slowest_links(self.cluster, sorted(nodes))
            types = dict.fromkeys(self.cluster.nodes[node] for node in sorted(nodes))
            self._of_nodes[nodes] = [self._on(with_links(hardware, links)) for hardware in types]
        return self._of_nodes[nodes]

    def _on(self, hardware: Hardware) -> OperatorCosts:
        if hardware.hash not in self._of_hardware:
            alike = replace(hardware, overlaps_communication=self.overlaps)
            lowered = lower_pipeline(self.plan, self.graph, alike, self.schedule)
            self._of_hardware[hardware.hash] = lowered.costs
        return self._of_hardware[hardware.hash]
