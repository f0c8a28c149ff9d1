"""With ``--software`` only that is searched which the software can run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.graph.chain import chain
from planner.lowering.checked import captured
from planner.lowering.options import recompute_modes
from planner.planning.one_stage import Candidate
from planner.planning.planning import plan_network
from planner.plans.capability import capabilities, capability_of
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from planner.plans.request import PlanRequest

REQUEST = PlanRequest(
    network="zoo:gpt2", hardware="dgx-a100", devices=16, global_batch=128, top=20, sensitivity=False
)  # fmt: skip


def modes_of_layers(plan: Plan) -> set[str]:
    """Modes of recomputation that the layers of a plan have."""
    units = chain(captured(plan))
    modes = recompute_modes(plan, units.names())
    return {modes.get(name, "none") for unit in units.units if unit.run is not None for name in units.unrolled(unit)}


OFTEN, SELDOM = ("megatron_core", "deepspeed"), ("torchtitan", "fsdp")


@pytest.mark.parametrize("software", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in SELDOM)])
def test_plans_are_of_what_the_software_can_run(software: str) -> None:
    table = capability_of(software)
    assert table is not None
    request = replace(REQUEST, software=software, pins=Pins.read({"pp": "4"} if table.pipeline else {}))
    result = plan_network(request)
    assert result.candidates
    for candidate in result.candidates:
        plan = candidate.plan
        assert plan.schedule in table.schedules
        assert plan.optimizer_sharding in table.shardings(plan.pipeline)
        assert not plan.shard_size or plan.optimizer_sharding in table.shard_groups
        assert plan.sharding_threshold_bytes == 0
        assert table.pipeline or plan.pipeline == 1
        assert table.sequence_parallel != "never" or not plan.sequence_parallel
        assert "offload_optimizer" in table.offload or not plan.offload_optimizer
        if not table.recompute_by_layer:
            assert modes_of_layers(plan) <= {*table.recompute}
            assert len(modes_of_layers(plan)) == 1


def test_1f1b_of_few_micro_batches_is_searched_where_the_software_runs_it() -> None:
    """Of two micro-batches on four stages torch has GPipe alone, Megatron-Core 1F1B."""
    asked = replace(REQUEST, global_batch=2, devices=4, pins=Pins.read({"pp": "4", "micro_batch": "1", "vpp": "1"}))
    found = {
        software: {c.plan.schedule for c in plan_network(replace(asked, software=software)).candidates}
        for software in ("torchtitan", "megatron_core")
    }
    assert "1f1b" in found["megatron_core"]
    assert found["torchtitan"] == {"gpipe"}


def test_pins_come_before_what_the_software_can_run() -> None:
    pins = {"pp": "4", "schedule": "zb_h1"}
    result = plan_network(replace(REQUEST, software="megatron_core", pins=Pins.read(pins), top=1))
    assert result.candidates[0].plan.schedule == "zb_h1"


def test_every_name_of_software_has_one_table() -> None:
    names = [name for table in capabilities().values() for name in table.software]
    assert len(names) == len(set(names))


def test_tokens_travel_to_experts_in_the_best_way_that_the_software_has() -> None:
    def planned(software: str, **pins: str) -> Candidate:
        request = replace(
            REQUEST, network="zoo:mixtral-8x7b", hardware="dgx-h100", devices=64, global_batch=256, top=1,
            software=software, sensitivity=False,
            pins=Pins.read({"tp": "1", "pp": "1", "micro_batch": "1", "recompute": "none", **pins}),
        )  # fmt: skip
        return plan_network(request).candidates[0]

    free = planned("megatron_core:captured_graphs=true")
    assert (free.plan.sent_once, free.plan.expert_overlap) == (2, True)
    for pins in ({"expert_messages": "tokens"}, {"expert_overlap": "false"}, {"expert_messages": "once_a_node"}):
        other = planned("megatron_core:captured_graphs=true", **pins)
        assert other.prediction.step_time_s >= free.prediction.step_time_s
    without = planned("torchtitan")
    assert (without.plan.sent_once, without.plan.expert_overlap) == (0, False)
