"""Search problems of small networks on small meshes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from planner.cost.work import optimizer
from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.networks import load_network
from planner.plans.pins import ParameterStorage
from planner.search.problem.costs import MeshCosts
from planner.search.problem.problem import Problem, Setting
from planner.search.problem.variables import decisions
from planner.sharding.placement import Mesh, MeshAxis
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from tests.planner.graph.conftest import small_network

BUCKET_BYTES = 2**18


@cache
def captured(name: str, layers: int | None = None, attention: str = "") -> OperatorGraph:
    """A built-in network's graph at batch 1, with another number of layers, and kind of attention, if given."""
    graph = load_network(f"zoo:{name}", attention=attention).capture()
    return graph if layers is None else deepened(graph, layers)


@cache
def captured_small(name: str, layers: int) -> OperatorGraph:
    """The graph of a small network of a built-in family, such as ``"bert"``."""
    return deepened(small_network(name).capture(), layers)


def deepened(graph: OperatorGraph, layers: int) -> OperatorGraph:
    """The graph with another number of equal blocks."""
    return replace(graph, runs=tuple(replace(run, count=layers) for run in graph.runs))


def make_mesh(**sizes: int) -> Mesh:
    """A mesh of the named axes, outermost first."""
    return Mesh(tuple(MeshAxis(name, size) for name, size in sizes.items()))


def make_problem(
    graph: OperatorGraph,
    mesh: Mesh,
    *,
    batch: int = 8,
    micro_batches: int = 1,
    hardware: str | Hardware = "dgx-a100",
    storage: ParameterStorage = "free",
    unfolded: bool = False,
) -> Problem:
    """The search problem of a captured graph with `batch` samples a micro-batch."""
    graph = at_batch(graph, batch)
    if unfolded:
        graph = unfold(graph)
    setting = Setting(
        costs=MeshCosts(load_profile(hardware) if isinstance(hardware, str) else hardware, mesh, BUCKET_BYTES),
        micro_batches=micro_batches,
        optimizer=optimizer("adamw"),
        storage=storage,
    )
    return Problem(graph, decisions(graph), setting)
