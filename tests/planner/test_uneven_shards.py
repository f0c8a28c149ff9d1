"""Parameters that the ranks do not divide: in uneven shards where all ranks are asked for, and said where fewer are."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.planning.loading import lower_to_run, strategy_graph
from planner.planning.planning import SearchResult, plan_network
from planner.plans.file import read_plan, write_plan
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest
from simulator.errors import StrategyError

NETWORK = "zoo:gpt2"
"""Of 768 = 2⁸ · 3 numbers a token: 40 ranks divide no dim of its matrices, 32 and 48 do."""


def planned(devices: int, **pins: str) -> SearchResult:
    fixed = {"tp": "1", "pp": "1", "dp": str(devices), "optimizer_sharding": "zero3", "recompute": "none"}
    return plan_network(
        PlanRequest(
            network=NETWORK, hardware="dgx-a100", devices=devices, global_batch=2 * devices, top=1, sensitivity=False,
            pins=Pins.read({**fixed, "micro_batch": "2", "sharding_threshold_kb": "0", **pins}),
        )
    )  # fmt: skip


def peak_bytes(result: SearchResult) -> float:
    return result.candidates[0].prediction.peak_memory_bytes


def test_states_over_ranks_that_divide_nothing_take_the_memory_between_their_neighbours() -> None:
    """Every parameter was whole on each of the 40 ranks."""
    fewer, uneven, more = (planned(n, shard_size=str(n)) for n in (32, 40, 48))
    assert peak_bytes(more) < peak_bytes(uneven) < peak_bytes(fewer)


def test_uneven_shards_are_read_back_and_not_executed(tmp_path: Path) -> None:
    plan = planned(40, shard_size="40").candidates[0].plan
    path = write_plan(plan, tmp_path / "strategy.json")
    with strategy_graph(read_plan(path), path):
        pass
    with pytest.raises(StrategyError, match=r"uneven shards.*simulated only; .*--pin shard_size"):
        lower_to_run(read_plan(path), path)


def test_ranks_that_share_no_states_are_said() -> None:
    result = planned(40)
    assert 1 < result.candidates[0].plan.shard_size < 40
    assert any("of 40 data-parallel ranks share one copy" in message for message in result.messages)
    assert not any("data-parallel ranks share one copy" in message for message in planned(32).messages)
