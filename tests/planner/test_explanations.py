"""What memory and links are said to be worth is what planning on such a cluster saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.planning.explanations import other_choices
from planner.planning.planning import PlanRequest, SearchResult, plan_network
from planner.plans.pins import Pins
from simulator.profiles import write_profile
from tests.planner.search.problems import captured

MIB = 2**20
REQUEST = PlanRequest(network="zoo:gpt2-tiny", hardware="", devices=4, global_batch=64, top=1)
PINS = {"bucket_mb": "1", "optimizer_sharding": "none", "offload_optimizer": "false"}


def profile(path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """The A100's profile with something changed."""
    content = yaml.safe_load((resources.files("hw_profiles") / "dgx-a100.yaml").read_text(encoding="utf-8"))
    content["name"] = path.stem
    change(content)
    write_profile(content, path)
    return str(path)


def with_memory(size_bytes: int) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key, value in (("memory_bytes", size_bytes + MIB), ("reserved_memory_bytes", MIB)):
            content["device"][key] = {"value": value, "source": "assumed: for a test"}

    return change


def with_bandwidth(factor: float) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        bandwidth = content["topology"]["levels"][0]["bandwidth_bytes_per_s"]
        bandwidth["value"] = bandwidth["value"] * factor

    return change


def planned(hardware: str, pins: Mapping[str, str], *, sensitivity: bool = True) -> SearchResult:
    asked = replace(REQUEST, hardware=hardware, pins=Pins.read({**PINS, **pins}), sensitivity=sensitivity)
    return plan_network(asked, graph=captured("gpt2-tiny"))


def objective_s(result: SearchResult) -> float:
    """Of the best configuration; plans whose operators were searched one by one have another objective."""
    found = [candidate for candidate in result.candidates if not candidate.plan.certificate.of_mesh]
    return min(sum(candidate.prediction.analytic.values()) for candidate in found)


def test_memory_is_worth_what_planning_with_more_of_it_saves(tmp_path: Path) -> None:
    pins = {"pp": "2", "dp": "2", "micro_batch": "16", "schedule": "1f1b"}
    tight = planned(profile(tmp_path / "tight.yaml", with_memory(17 * MIB)), pins)
    roomy = planned(profile(tmp_path / "roomy.yaml", with_memory(17 * MIB + 2**30)), pins, sensitivity=False)
    assert tight.shadow_prices is not None
    saved = objective_s(tight) - objective_s(roomy)
    assert saved > 0, "memory binds"
    assert tight.shadow_prices.memory_gib_s == pytest.approx(saved, rel=1e-6)


@pytest.mark.parametrize(
    "pins",
    [
        {"dp": "4", "micro_batch": "16", "recompute": "selective"},
        {"pp": "4", "dp": "1", "micro_batch": "4", "schedule": "1f1b"},
    ],
)
def test_bandwidth_is_worth_what_planning_on_faster_links_saves(tmp_path: Path, pins: Mapping[str, str]) -> None:
    plain = planned(profile(tmp_path / "plain.yaml", with_bandwidth(1.0)), pins)
    faster = planned(profile(tmp_path / "faster.yaml", with_bandwidth(1.1)), pins, sensitivity=False)
    assert plain.shadow_prices is not None
    first, *others = plain.shadow_prices.links_s.values()
    assert first > 0
    assert first == pytest.approx(objective_s(plain) - objective_s(faster), rel=1e-6)
    assert others == [0.0] * len(others), "four devices are inside a node"


def test_ranks_that_share_states_are_said_where_they_do() -> None:
    asked = replace(REQUEST, hardware="dgx-a100", pins=Pins(dp=4, tp=1, pp=1), sensitivity=False)
    best = replace(plan_network(asked, graph=captured("gpt2-tiny")).candidates[0].plan, shard_size=2)
    best = replace(best, optimizer_sharding="zero1")
    assert other_choices(best, replace(best, optimizer_sharding="none", shard_size=0)) == ""
    assert other_choices(best, replace(best, shard_size=0)) == " (shard_size=4)"
