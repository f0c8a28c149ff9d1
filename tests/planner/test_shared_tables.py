"""Points of a sweep that share tables find what each finds alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner.planning.configured
from planner.planning.planning import PlanRequest, SearchResult, plan_network
from planner.planning.shared_tables import NetworkTables, SharedTables
from planner.search.units.labels import StageTables
from simulator.errors import InputError
from tests.planner.search.problems import captured

planner_tables = planner.planning.configured.stage_tables
GRAPH = captured("mlp")
REQUEST = PlanRequest(network="zoo:mlp", hardware="dgx-a100", devices=4, global_batch=32, top=1)


def found(result: SearchResult) -> tuple[object, ...]:
    """All of a result but how long it took."""
    return result.candidates, result.status, result.messages, result.infeasible, result.shadow_prices


def test_plans_do_not_depend_on_what_was_planned_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(
        "planner.planning.configured.stage_tables", lambda *a, f=planner_tables, **k: made.append(a[3]) or f(*a, **k)
    )
    points = [
        REQUEST,
        replace(REQUEST, hardware="dgx-h100"),
        replace(REQUEST, devices=8, optimizer="momentum"),
        replace(REQUEST, devices=8),
    ]
    alone = [found(plan_network(point, graph=GRAPH)) for point in points]
    separately = len(made)
    shared = SharedTables(GRAPH)
    together = [found(plan_network(point, shared=shared)) for point in points]
    assert together == alone
    assert len(made) - separately < separately  # 8 devices use again what 4 have made


def test_what_memory_and_links_are_worth_may_be_left_out() -> None:
    result, short = (plan_network(replace(REQUEST, sensitivity=wanted), graph=GRAPH) for wanted in (True, False))
    assert short.candidates == result.candidates
    assert result.shadow_prices is not None
    assert (short.shadow_prices, short.pin_costs) == (None, ())


def test_tables_are_made_once_and_the_oldest_go() -> None:
    kept = NetworkTables(GRAPH, most=2)
    made: list[str] = []

    def table(name: str) -> StageTables:
        return kept.tables((name,), lambda: made.append(name) or name)  # type: ignore[return-value, func-returns-value]

    for name in ("a", "b", "a", "c", "a", "b"):
        assert table(name) == name
    assert made == ["a", "b", "c", "b"]
    assert len(kept) == 2
    with pytest.raises(InputError):
        kept.tables(("d",), refused)
    assert len(kept) == 2


def refused() -> StageTables:
    raise InputError("no such mesh")


def test_precisions_and_batches_are_made_once() -> None:
    shared = SharedTables(GRAPH)
    assert shared.at("bfloat16") is shared.at("bfloat16")
    assert shared.at("bfloat16") is not shared.at("float32")
    tables = shared.at("float32")
    assert tables.at_batch(4) is tables.at_batch(4)
    assert tables.at_batch(4).batch_size == 4
