"""The picture of a step."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from planner.planning.prediction import SimulatedPlan, simulate_plan
from planner.plans.plan import Plan
from reports.timeline import picture_svg, step_picture, write_picture
from simulator.profiles import load_profile
from tests.planner.lowering.plans import one_stage, pipelined
from tests.planner.search.problems import captured

GRAPH = captured("gpt2-tiny")


@pytest.fixture(scope="module", params=[1, 2], ids=["one stage", "two stages"])
def step(request: pytest.FixtureRequest) -> SimulatedPlan:
    plan: Plan = one_stage(axes=(("data", 2), ("tensor", 2)), storage="sharded")
    if request.param > 1:
        plan = pipelined(plan, GRAPH, request.param, "1f1b")
    return simulate_plan(plan, GRAPH, load_profile("dgx-a100"))


def test_the_picture_is_the_same_every_time_and_names_its_lanes(step: SimulatedPlan) -> None:
    text = picture_svg(step_picture(step, title="one step"))
    assert text == picture_svg(step_picture(step, title="one step"))
    assert text.startswith("<svg")
    assert text.rstrip().endswith("</svg>")
    for words in ("one step", "rank 0", "forward", "backward", "update", "communication", "memory, MiB"):
        assert words in text
    assert not re.search(r"\d{4}-\d{2}-\d{2}", text), "no date"


def test_pictures_are_written_by_their_ending(step: SimulatedPlan, tmp_path: Path) -> None:
    svg = write_picture(step_picture(step, title="one step"), tmp_path / "step.svg")
    png = write_picture(step_picture(step, title="one step"), tmp_path / "step.png")
    assert svg.read_text().startswith("<svg")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_drawn_memory_keeps_its_peak(step: SimulatedPlan) -> None:
    curves = step_picture(step, title="one step").curves
    assert int(max(sizes.max() for _, sizes in curves)) == step.prediction.peak_memory_bytes
    assert all(times[0] == 0.0 and np.all(np.diff(times) >= 0) for times, _ in curves)
