"""What plans that move states off the devices hold in the memory of a node's host."""

from __future__ import annotations

from planner.cost.work import optimizer, state_bytes
from planner.graph.host_tables import host_tables
from planner.graph.operator_graph import OperatorGraph
from planner.plans.plan import Plan
from simulator.quantities import bytes_text

_GRADIENT_BYTES = 4
"""Gradients of states on the host wait there in float32, as its optimizer takes them (ZeRO-Offload,
arXiv:2101.06840)."""


def host_memory_bytes(plan: Plan, graph: OperatorGraph, devices_per_node: int) -> int:
    """Bytes that the host of one node holds of parameters, gradients and optimizer states; 0 with all on the devices.

    States are shared out over the ranks that shard them; a node has those of its own devices. What lies on disk does
    not count.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded or not.
    """
    moved = plan.offload_optimizer or plan.offload_parameters
    if (not moved or plan.offload_to != "host") and not plan.host_embeddings:
        return 0
    update, on_host = optimizer(plan.optimizer), host_tables(graph).parameters if plan.host_embeddings else ()
    ranks = plan.devices // sharing(plan)
    total = 0.0
    for parameter in graph.parameters:
        node, trained = parameter.node, parameter.gradient is not None
        spec = graph.nodes[node].outputs[0]
        elements = graph.multiplicity[node] * spec.elements
        there = node in on_host
        if trained and (there or (plan.offload_optimizer and plan.offload_to == "host")):
            total += elements * (state_bytes(update, spec.dtype) + _GRADIENT_BYTES)
        if there or (plan.offload_parameters and plan.offload_to == "host"):
            total += graph.multiplicity[node] * spec.size_bytes
    nodes = max(1, plan.devices // devices_per_node)
    return round(total * ranks / nodes)


def host_refusal(held_bytes: int, limit_bytes: float) -> str:
    """Why a plan does not fit the host, and what to do."""
    return (
        f"host memory binds: a node's host would hold {bytes_text(held_bytes)} of parameters, gradients and optimizer "
        f"states, of {bytes_text(limit_bytes)}; use more nodes, --pin offload_to=disk, or --pin offload_optimizer=false"
    )


def sharing(plan: Plan) -> int:
    """Devices that together hold one copy of the states: all but those of replicas that share none."""
    if plan.optimizer_sharding == "none":
        return plan.devices // (plan.degree("data") * plan.degree("context"))
    replicas = plan.degree("data") // plan.shard_size if plan.shard_size else 1
    return plan.devices // max(1, replicas)
