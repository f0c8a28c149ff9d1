"""`meshwright explain --why-not`: a plan beside the best under a pin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.app import app
from planner.planning.comparing import Compared, why_not
from planner.planning.planning import plan_network
from planner.plans.file import write_plan
from planner.plans.pins import Pins, read_pins
from planner.plans.plan import Plan
from planner.plans.request import PlanRequest


def planned(network: str, hardware: str, devices: int, batch: int, *pins: str, length: int | None = None) -> Plan:
    """The best plan with these pins."""
    request = PlanRequest(
        network=network, hardware=hardware, devices=devices, global_batch=batch, sequence_length=length, top=1,
        sensitivity=False, pins=read_pins(pins),
    )  # fmt: skip
    return plan_network(request).candidates[0].plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    """GPT-2 on one node."""
    return planned("zoo:gpt2", "dgx-a100", 8, 64)


@pytest.fixture(scope="module")
def compared(plan: Plan) -> Compared:
    """The same with eight tensor ranks."""
    return why_not(plan, Pins(tp=8))


def test_parts_of_the_step_add_up_to_the_difference(compared: Compared) -> None:
    assert compared.instead is not None
    before, after = compared.chosen.prediction, compared.instead.prediction
    parts = [one.seconds for one in compared.differences if one.where == "step"]
    assert sum(parts) == pytest.approx(after.step_time_s - before.step_time_s, abs=4e-3 * before.step_time_s)
    assert after.step_time_s > before.step_time_s


def test_memory_adds_up_to_the_difference(compared: Compared) -> None:
    assert compared.instead is not None
    before, after = compared.chosen.prediction, compared.instead.prediction
    parts = [one.bytes for one in compared.differences if one.where == "memory at the peak"]
    assert sum(parts) == pytest.approx(
        after.peak_memory_bytes - before.peak_memory_bytes, abs=1e-2 * before.peak_memory_bytes
    )


def test_messages_of_tensor_ranks_are_on_their_links(compared: Compared) -> None:
    found = [one for one in compared.differences if "of tensor ranks" in one.what]
    assert found
    assert {one.where for one in found} == {"NVSwitch"}
    assert all(one.seconds > 0 and one.bytes > 0 for one in found)


def test_what_would_let_it_win_does(compared: Compared) -> None:
    for change in compared.would_win_if:
        assert change.factor > 1
        assert change.step_time_s <= change.chosen_step_time_s * 1.001


def test_a_pin_under_which_nothing_fits(tmp_path: Path) -> None:
    plan = planned("zoo:llama2-7b", "dgx-a100", 8, 8, "micro_batch=1", length=512)
    strategy = write_plan(plan, tmp_path / "strategy.json")
    pins = ("tp=1", "pp=1", "optimizer_sharding=none", "offload_optimizer=false", "micro_batch=1")
    options = [*(word for pin in pins for word in ("--why-not", pin)), "--json", "--quiet"]
    done = CliRunner().invoke(app, ["explain", str(strategy), *options])
    assert done.exit_code == 3, done.output
    said = json.loads(done.stdout)
    assert said["instead"] is None
    assert said["differences"] == []
    assert "memory" in said["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "least", "most"),
    [(("tp=8", "pp=4"), 1.05, 1.6), (("tp=4", "pp=8"), 1.0, 1.3)],
    ids=["twice the tensor ranks", "half the data-parallel ranks"],
)
def test_trade_offs_of_a_llama_of_70b(changed: tuple[str, ...], least: float, most: float) -> None:
    """Both slow a step down; the published losses of throughput are 28 % and 6 %."""
    pins = ("sequence_parallel=true", "micro_batch=1", "recompute=none", "optimizer_sharding=zero1")
    plan = planned("zoo:llama3-70b", "dgx-h100", 64, 128, "tp=4", "pp=4", *pins, length=4096)
    found = why_not(plan, read_pins((*changed, *pins)))
    assert found.instead is not None
    ratio = found.instead.prediction.step_time_s / found.chosen.prediction.step_time_s
    assert least < ratio < most
