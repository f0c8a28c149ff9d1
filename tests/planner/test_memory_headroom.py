"""Plans leave the part of a device's memory free that the user asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from planner.cli.app import app
from planner.planning.planning import plan_network
from planner.plans.request import PlanRequest
from simulator.errors import InputError
from simulator.profiles import load_profile

A100 = load_profile("dgx-a100")


@given(st.floats(0, 1, exclude_max=True))
def test_the_limit_is_the_rest_of_the_usable_memory(fraction: float) -> None:
    assert A100.with_headroom(fraction).device_memory_bytes == int(A100.device_memory_bytes * (1 - fraction))


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2.0, float("nan"), float("inf")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(InputError, match="memory headroom"):
        A100.with_headroom(fraction)


def test_a_plan_stays_below_the_limit_and_is_never_faster_for_it() -> None:
    request = PlanRequest(network="zoo:gpt2", hardware="dgx-a100", devices=8, global_batch=64, top=1, sensitivity=False)
    free = plan_network(request).candidates[0].prediction
    headroom = 1 - 0.8 * free.peak_memory_bytes / A100.device_memory_bytes
    held = plan_network(replace(request, memory_headroom=headroom)).candidates[0].prediction
    assert held.peak_memory_bytes <= 0.8 * free.peak_memory_bytes
    assert held.step_time_s >= free.step_time_s


def test_the_command_line_takes_it() -> None:
    given = ["plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "8", "--memory-headroom", "1.5"]
    result = CliRunner().invoke(app, given, prog_name="meshwright")
    assert result.exit_code == 2
