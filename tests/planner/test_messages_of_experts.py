"""What is said of other ways for tokens to travel: each is a plan, and as much faster as is said."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.planning.planning import PlanRequest, SearchResult, capture_for, plan_network
from planner.planning.shared_tables import SharedTables
from planner.plans.pins import Pins, read_pins

REQUEST = PlanRequest(
    network="zoo:mixtral-8x7b", hardware="dgx-h100", devices=16, global_batch=64, top=1, software="megatron_core",
    any_plan=True,
    pins=Pins.read({"dp": 16, "ep": 8, "tp": 1, "pp": 1, "micro_batch": 1, "optimizer_sharding": "zero1"}),
)  # fmt: skip


def test_other_ways_for_tokens_are_named_with_what_they_save() -> None:
    shared = SharedTables(capture_for(REQUEST))

    def planned(pins: str = "", software: str = REQUEST.software) -> SearchResult:
        asked = read_pins(re.findall(r"--pin (\S+)", pins)).over(REQUEST.pins)
        return plan_network(replace(REQUEST, pins=asked, software=software), shared=shared)

    def said(result: SearchResult) -> list[str]:
        return [message for message in result.messages if message.startswith("tokens that travel")]

    found = planned()
    now = found.candidates[0].prediction.step_time_s
    assert any("expert_overlap=true" in message for message in said(found))
    for message in said(found):
        saved = re.search(r"a step (\S+) % shorter", message)
        assert saved
        other = planned(message)
        assert other.candidates[0].prediction.step_time_s / now - 1 <= -0.01 * float(saved[1]) + 1e-3
        assert not said(other)
    assert not said(planned(software="deepspeed"))
