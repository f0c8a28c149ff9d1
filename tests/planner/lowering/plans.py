"""Plans made by hand: operators as the search places them on one mesh, everything around them as asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

from planner.graph.chain import chain
from planner.graph.operator_graph import OperatorGraph
from planner.networks import load_network
from planner.plans.hints import Hint, hint
from planner.plans.pins import ParameterStorage
from planner.plans.plan import Certificate, Chunk, NodeRules, Plan, RecomputeRange, Status
from planner.search.dynamic_programming import fastest
from planner.search.problem.hints import constrained
from planner.search.problem.problem import Problem, node_rules
from planner.sharding.placement import Mesh
from simulator.profiles import load_profile
from simulator.schedules import make_schedule
from tests.planner.search.problems import captured, make_mesh, make_problem

CERTIFICATE = Certificate(
    status=Status.HEURISTIC, objective_s=1.0, lower_bound_s=0.0, elimination_width=1, operators=1, distinct_blocks=1
)
HARDWARE = "dgx-a100"
MEGATRON = (
    *(hint(f"blocks.*.attention.{name}", "tensor", outputs=["S(1)"]) for name in ("query", "key", "value")),
    hint("blocks.*.attention.output", "tensor", outputs=["P"]),
    hint("blocks.*.expand", "tensor", outputs=["S(1)"]),
    hint("blocks.*.contract", "tensor", outputs=["P"]),
)
"""Strategies with which every layer sends messages."""


@cache
def one_stage(
    network: str = "gpt2-tiny",
    layers: int | None = None,
    axes: tuple[tuple[str, int], ...] = (),
    *,
    micro_batches: int = 4,
    micro_batch: int = 2,
    storage: ParameterStorage = "replicated",
    hints: tuple[Hint, ...] = (),
) -> Plan:
    """The fastest strategies of a network on one stage, those that keep hints."""
    graph = captured(network, layers)
    data = dict(axes).get("data", 1)
    problem = make_problem(
        graph, make_mesh(**dict(axes)), batch=micro_batch * data, micro_batches=micro_batches, storage=storage
    )
    loaded = load_network(f"zoo:{network}")
    return fastest_plan(
        constrained(problem, hints) if hints else problem,
        network=loaded.spec,
        fingerprint=graph.fingerprint,
        sequence_length=loaded.sequence_length,
    )


def fastest_plan(problem: Problem, **fields: Any) -> Plan:
    """The fastest strategies of a problem as a plan on one stage."""
    rules, layers = node_rules(problem, fastest(problem))
    setting, samples = problem.setting, problem.graph.batch_size
    mesh = setting.costs.mesh
    data = next((axis.size for axis in mesh.axes if axis.name == "data"), 1)
    given: dict[str, Any] = {
        "layers": layers,
        "global_batch": samples * setting.micro_batches,
        "micro_batch": samples // data,
        "micro_batches": setting.micro_batches,
        "optimizer_sharding": "none" if setting.storage == "replicated" else "zero1",
    }
    return plan_of(rules, mesh, **given | fields)


def plan_of(rules: Mapping[str, NodeRules], mesh: Mesh, **fields: Any) -> Plan:
    """A plan on one stage with these strategies of operators; one sample and micro-batch where nothing else is said."""
    given: dict[str, Any] = {
        "network": "zoo:gpt2-tiny",
        "fingerprint": "",
        "sequence_length": None,
        "hardware": HARDWARE,
        "hardware_hash": load_profile(HARDWARE).hash,
        "precision": "fp32",
        "optimizer": "adamw",
        "global_batch": 1,
        "micro_batch": 1,
        "micro_batches": 1,
        "layers": (),
        "optimizer_sharding": "none",
        "bucket_bytes": 25 * 2**20,
        "certificate": CERTIFICATE,
    }
    return Plan(**given | fields, rules=rules, mesh=mesh)


def pipelined(
    plan: Plan, graph: OperatorGraph, ranks: int, schedule: str, virtual: int = 1, cuts: Sequence[int] | None = None
) -> Plan:
    """The plan on `ranks` pipeline ranks; `cuts` are the first units of chunks, and the one behind the last."""
    names = chain(graph).names()
    shape = make_schedule(schedule, ranks, plan.micro_batches, virtual)
    count = shape.chain_stages
    bounds = cuts or [round(i * len(names) / count) for i in range(count + 1)]
    once = list(pairwise(bounds)) * shape.chains
    chunks = tuple(
        Chunk(rank=int(rank), first=names[first], last=names[last - 1])
        for rank, (first, last) in zip(shape.stage_rank, once, strict=True)
    )
    return replace(
        plan, pipeline=ranks, virtual=virtual, schedule=schedule, chunks=chunks, pipeline_stride=plan.mesh.size
    )


def recomputing(plan: Plan, graph: OperatorGraph, mode: str, **changes: Any) -> Plan:
    """The plan with every unit computing again."""
    names = chain(graph).names()
    ranges = (RecomputeRange(first=names[0], last=names[-1], mode=mode),)
    return replace(plan, recompute=mode, recompute_ranges=ranges, **changes)
