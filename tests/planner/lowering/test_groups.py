"""Gradients of pipeline stages travel in the groups that a context names, in the passes that are timed and that run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.graph.folding import unfold
from planner.lowering.checked import checked_graph
from planner.lowering.groups import trained_names
from planner.lowering.instructions import Communicate
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.stages import lower_stages
from planner.plans.exchange import Exchange
from planner.plans.plan import Plan
from simulator.pipeline_operators import LAST
from simulator.profiles import load_profile
from simulator.schedules import ActionKind
from tests.planner.lowering.plans import one_stage, pipelined
from tests.planner.search.problems import captured

HARDWARE = load_profile("dgx-a100")
NAMES = tuple(trained_names(captured("gpt2-tiny")))
SHARDINGS = ("none", "zero1", "zero2", "zero3")


def staged(
    exchange: Exchange, schedule: str = "1f1b", sharding: str = "none", axes: Any = (("data", 2),), **shape: Any
) -> Plan:
    storage = "replicated" if sharding == "none" else "sharded"
    plan = one_stage(axes=axes, micro_batches=4, micro_batch=1, storage=storage)
    plan = replace(plan, optimizer_sharding=sharding, exchange=exchange)
    return pipelined(plan, captured("gpt2-tiny"), 2, schedule, **shape)


def is_of_gradients(one: object) -> bool:
    return isinstance(one, Communicate) and ".gradient@" in " ".join(one.targets)


def timed(plan: Plan) -> list[dict[Any, list[tuple[str, str, str]]]]:
    """Collective, axis and name of the messages of gradients in every pass of every chunk."""
    found = lower_pipeline(plan, checked_graph(plan, captured("gpt2-tiny")), HARDWARE)
    return [
        {
            key: [
                (str(task.collective), task.axis, task.name)
                for task in (found.work.tasks[number] for number in ran.numbers)
                if task.collective is not None and task.name.endswith(" gradients")
            ]
            for key, ran in passes.items()
        }
        for passes in found.work.passes
    ]


def executed(plan: Plan) -> list[dict[Any, list[tuple[str, str, str]]]]:
    found = lower_stages(plan, checked_graph(plan, captured("gpt2-tiny")))
    return [
        {
            key: [
                (
                    str(one.collective),
                    found.mesh.axes[one.axis].name,
                    f"{one.collective} of {len(one.sources)} gradients",
                )
                for one in entry.instructions
                if isinstance(one, Communicate) and is_of_gradients(one)
            ]
            for key, entry in stage.passes.items()
        }
        for stage in found.stages
    ]


def sent(plan: Plan) -> Iterator[list[set[str]]]:
    """Parameters of each message of gradients of the last micro-batch, for each chunk."""
    for stage in lower_stages(plan, checked_graph(plan, captured("gpt2-tiny"))).stages:
        key = ActionKind.BACKWARD if (ActionKind.BACKWARD, LAST) in stage.passes else ActionKind.WEIGHT_GRADIENT
        yield [
            {target.split(".gradient@")[0] for target in one.targets}
            for one in stage.passes[key, LAST].instructions
            if isinstance(one, Communicate) and is_of_gradients(one)
        ]


def test_names_are_those_of_the_whole_network() -> None:
    whole = unfold(captured("gpt2-tiny"))
    assert tuple(p.name for p in whole.parameters if p.gradient is not None) == NAMES


@settings(max_examples=8, deadline=None)
@given(
    groups=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3), min_size=1),
    sharding=st.sampled_from(SHARDINGS),
    schedule=st.sampled_from([("1f1b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2)]),
)
def test_the_messages_that_run_are_those_that_are_timed(
    groups: dict[str, int], sharding: str, schedule: tuple[str, int]
) -> None:
    """On the shallow network that stands for the whole, and on the whole."""
    shape = {"virtual": schedule[1]} if schedule[1] > 1 else {}
    plan = staged(Exchange(fusion_groups=tuple(groups.items())), schedule[0], sharding, **shape)
    assert timed(plan) == executed(plan)


@pytest.mark.parametrize(("schedule", "shape"), [("1f1b", {}), ("zb_h1", {}), ("interleaved_1f1b", {"virtual": 2})])
def test_a_group_is_one_message_of_each_chunk(schedule: str, shape: dict[str, Any]) -> None:
    groups = {name: int(name.split(".")[1]) // 3 + 1 for name in NAMES if name.startswith("blocks.")}
    groups |= {"blocks.0.expand.weight": 0, "blocks.3.expand.weight": 0}
    plan = staged(Exchange(fusion_groups=tuple(groups.items())), schedule, **shape)
    for messages in sent(plan):
        held = set().union(*messages)
        for number in (1, 2):
            together = {name for name in held if groups.get(name) == number}
            assert not together or together in messages
        for name in held:
            assert groups.get(name) != 0 or {name} in messages


@pytest.mark.parametrize("places", [(4,), (1, 20, 200), (30, 40)])
def test_places_count_the_parameters_of_the_whole_network(places: tuple[int, ...]) -> None:
    plan = staged(Exchange(fusion_places=places))
    bounds = [0, *(place for place in places if place < len(NAMES)), len(NAMES)]
    wanted = [set(NAMES[first:last]) for first, last in pairwise(bounds)]
    for messages in sent(plan):
        held = set().union(*messages)
        assert sorted(map(sorted, messages)) == sorted(sorted(held & part) for part in wanted if held & part)
    assert timed(plan) == executed(plan)


def test_gradients_that_wait_for_their_group_take_room() -> None:
    """With gradients scattered every micro-batch, whole ones stand until the last of their group is there."""
    everything = Exchange(fusion_groups=tuple(dict.fromkeys(NAMES, 1).items()))
    alone = Exchange(fusion_groups=tuple(dict.fromkeys(NAMES, 0).items()))
    graph = captured("gpt2-tiny")
    most, least = (
        np.max(lower_pipeline(plan, checked_graph(plan, graph), HARDWARE).sizes.recomputed)
        for plan in (staged(asked, sharding="zero2") for asked in (everything, alone))
    )
    assert most > least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "schedule", "shape"), [("none", "interleaved_1f1b", {"virtual": 2}), ("zero2", "zb_h1", {})]
)
def test_groups_of_stages_are_executed(sharding: str, schedule: str, shape: dict[str, Any]) -> None:
    groups = {name: number % 3 for number, name in enumerate(NAMES) if number % 4}
    plan = staged(Exchange(fusion_groups=tuple(groups.items())), schedule, sharding, **shape)
    report = execute_plan(plan, ExecuteOptions(strategy="unused", steps=2, verify=True, precision="fp64"))
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10
