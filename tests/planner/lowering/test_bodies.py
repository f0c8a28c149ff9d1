"""What passes run is lowered once for all sizes of messages, each of which finds what it would alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.lowering import unit_work
from planner.lowering.representatives import Representatives, representatives
from planner.planning.prediction import predict_plan
from planner.plans.plan import Plan
from simulator.profiles import load_profile
from tests.planner.lowering.plans import one_stage, pipelined
from tests.planner.search.problems import captured

HARDWARE = load_profile("dgx-a100")
LAYERS = 3
GRAPH = captured("gpt2-tiny", LAYERS)
SIZES = (2**14, 2**25, 2**14)


def sized(level: str) -> list[Plan]:
    plan = one_stage("gpt2-tiny", LAYERS, (("data", 2), ("tensor", 2)), storage="sharded")
    plan = replace(plan, optimizer_sharding=level, micro_batches=2, global_batch=plan.global_batch // 2)
    return [replace(plan, bucket_bytes=size) for size in SIZES]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans whose passes are lowered in a test."""
    found: list[Plan] = []

    def counted(plan: Plan, *rest: object) -> Representatives:
        found.append(plan)
        return representatives(plan, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(unit_work, "representatives", counted)
    forget()
    return found


def forget() -> None:
    unit_work._unit_bodies.cache_clear()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("level", ["zero1", "zero2"])
def test_messages_of_any_size_are_of_the_same_passes(level: str, ranks: int, lowered: list[Plan]) -> None:
    plans = [plan if ranks == 1 else pipelined(plan, GRAPH, ranks, "1f1b") for plan in sized(level)]
    together = [predict_plan(plan, GRAPH, HARDWARE) for plan in plans]
    assert len(lowered) == 1
    for plan, found in zip(plans, together, strict=True):
        forget()
        assert found == predict_plan(plan, GRAPH, HARDWARE)
    assert together[0] != together[1]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda plan: replace(plan, optimizer_sharding="zero2"), id="storage"),
        pytest.param(lambda plan: replace(plan, layers=()), id="layers"),
    ],
)
def test_other_plans_have_passes_of_their_own(change: Callable[[Plan], Plan]) -> None:
    plan = sized("zero1")[0]
    assert unit_work._Asked(plan, GRAPH) == unit_work._Asked(replace(plan, bucket_bytes=1), GRAPH)
    assert unit_work._Asked(plan, GRAPH) != unit_work._Asked(change(plan), GRAPH)
    assert unit_work._Asked(plan, GRAPH) != unit_work._Asked(plan, replace(GRAPH))
