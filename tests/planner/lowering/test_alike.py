"""Passes of plans that store parameters otherwise are written once, and read what a plan of their own would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from planner.graph.folding import template_name
from planner.lowering import alike
from planner.lowering.alike import passes_of
from planner.lowering.body import Body
from planner.lowering.placed import PlacedGraph
from planner.lowering.representatives import representatives
from planner.plans.plan import NodeRules, Plan
from planner.sharding.placement import REPLICATE
from planner.sharding.rules import Rule
from tests.planner.lowering.plans import one_stage
from tests.planner.search.problems import captured

LAYERS = 3
GRAPH = captured("gpt2-tiny", LAYERS)
SHARDED = one_stage("gpt2-tiny", LAYERS, (("data", 2), ("tensor", 2)), storage="sharded")


def stored_whole(plan: Plan) -> Plan:
    """The plan with every parameter whole along the data axis."""
    names = {GRAPH.nodes[p.node].name for p in GRAPH.parameters}
    names |= {template_name(name, run.prefix) for name in names for run in GRAPH.runs if name.startswith(run.prefix)}
    kept = Rule((), (REPLICATE,), splits_work=False)

    def whole(rules: Mapping[str, NodeRules]) -> dict[str, NodeRules]:
        return {name: (kept, *one[1:]) if name in names else one for name, one in rules.items()}

    layers = tuple(replace(part, rules=whole(part.rules)) for part in plan.layers)
    return replace(plan, rules=whole(plan.rules), layers=layers, optimizer_sharding="none")


def placed(plan: Plan) -> PlacedGraph:
    return representatives(plan, GRAPH).source


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[PlacedGraph]:
    """Placed graphs whose passes are written in a test."""
    found: list[PlacedGraph] = []

    class Counted(Body):
        def __init__(self, source: PlacedGraph, *rest: object) -> None:
            found.append(source)
            super().__init__(source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(alike, "Body", Counted)
    alike._known.cache_clear()
    return found


def test_parameters_are_read_under_other_names() -> None:
    here, there = placed(SHARDED).reads, placed(stored_whole(SHARDED)).reads
    assert here is not None
    assert there is not None
    assert here.keys() == there.keys()
    assert here != there


@pytest.mark.parametrize("turned", [False, True], ids=["sharded first", "whole first"])
def test_written_once(turned: bool, written: list[PlacedGraph]) -> None:
    first, second = (placed(plan) for plan in [SHARDED, stored_whole(SHARDED)][:: -1 if turned else 1])
    for source in (first, second):
        assert list(passes_of(source)) == Body(source).items
    assert written == [first]


def test_other_strategies_have_passes_of_their_own(written: list[PlacedGraph]) -> None:
    other = one_stage("gpt2-tiny", LAYERS, (("data", 4), ("tensor", 1)), storage="sharded")
    sources = [
        placed(SHARDED),
        placed(other),
        placed(replace(SHARDED, exchange=replace(SHARDED.exchange, all_to_all=False))),
    ]
    for source in sources:
        assert list(passes_of(source)) == Body(source).items
    assert written == sources


def test_parameters_that_come_unit_by_unit(written: list[PlacedGraph]) -> None:
    sources = [placed(replace(SHARDED, optimizer_sharding=level)) for level in ("zero3", "zero3")]
    for source in sources:
        assert list(passes_of(source)) == Body(source).items
    assert written == sources
