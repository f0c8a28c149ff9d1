"""Plans on a context axis come back from their file, and what attention sends travels beside its work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from planner.graph.folding import template_name
from planner.graph.operator_graph import Role
from planner.graph.scaling import at_batch
from planner.lowering.checked import check_rules
from planner.planning.prediction import predict_plan
from planner.plans.file import plan_from_text, plan_to_text
from planner.plans.plan import LayerRules, Plan
from planner.sharding.context import Algorithm, context_rules
from planner.sharding.inner_messages import inner_messages
from planner.sharding.placement import Mesh, MeshAxis
from simulator.errors import StrategyError
from simulator.profiles import load_profile
from tests.planner.lowering.plans import one_stage, pipelined
from tests.planner.lowering.steps import lowered_of, passes
from tests.planner.search.problems import captured

RANKS = 4
GRAPH = captured("gpt2-tiny")
HARDWARE = load_profile("dgx-a100")


def on_context(algorithm: Algorithm) -> Plan:
    """The whole network on a context axis."""
    rules = context_rules(GRAPH, algorithm)
    run = GRAPH.runs[0]
    inside = {*run.first, *run.second}
    names = {i: node.name for i, node in enumerate(GRAPH.nodes) if node.role is not Role.CONSTANT}
    return replace(
        one_stage(),
        mesh=Mesh((MeshAxis("context", RANKS),)),
        rules={name: (rules[i],) for i, name in names.items() if i not in inside},
        layers=(
            LayerRules(
                prefix=run.prefix,
                first=0,
                last=run.count - 1,
                rules={template_name(names[i], run.prefix): (rules[i],) for i in run.first if i in names},
            ),
        ),
        context_algorithm=algorithm,
    )


@pytest.mark.parametrize("algorithm", ["ring", "all_to_all"])
def test_a_plan_with_messages_inside_attention_is_read_as_written(algorithm: Algorithm) -> None:
    plan = on_context(algorithm)
    read = plan_from_text(plan_to_text(plan)).plan
    assert read == plan
    graph = at_batch(GRAPH, plan.micro_batch)
    check_rules(read, graph)
    with pytest.raises(StrategyError, match="the strategy is not one that"):
        check_rules(replace(read, mesh=Mesh((MeshAxis("tensor", RANKS),))), graph)


def test_pieces_that_go_round_travel_beside_all_but_the_last_piece_of_the_work() -> None:
    lowered = lowered_of(on_context("ring"), GRAPH)
    (_, forward), (_, backward), *_ = passes(lowered)
    names = Counter(task.name for task in (*forward.tasks, *backward.tasks))
    attention = [i for i, node in enumerate(lowered.graph.nodes) if "attention_for_cpu" in node.op]
    for index in attention:
        node = lowered.graph.nodes[index]
        rule = context_rules(GRAPH)[next(i for i, n in enumerate(GRAPH.nodes) if n.op == node.op)]
        sent = sum(RANKS - 1 if message.circulating else 1 for message in inner_messages(rule))
        assert sent >= RANKS - 1
        assert names[f"{node.name}, all but the last piece"] == 1
        assert sum(times for name, times in names.items() if name.endswith(f"inside {node.name}")) == sent
    assert predict_plan(on_context("ring"), GRAPH, HARDWARE).breakdown["exposed_communication_s"] > 0


def test_a_context_axis_goes_with_a_pipeline() -> None:
    plan = on_context("ring")
    calm = replace(HARDWARE, overlap_compute_speed=1.0)
    plain = predict_plan(plan, GRAPH, calm)
    found = predict_plan(pipelined(plan, GRAPH, 2, "1f1b"), GRAPH, calm)
    assert 2 * found.breakdown["compute_s"] == pytest.approx(plain.breakdown["compute_s"], rel=1e-3)
