"""The picture of a pipeline's step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from planner.plans.file import write_plan
from planner.plans.plan import Plan
from reports.timeline import main, plan_picture
from tests.planner.lowering.plans import one_stage, pipelined, recomputing
from tests.planner.search.problems import captured

GRAPH = captured("gpt2-tiny")


def plan_of(schedule: str, virtual: int = 1) -> Plan:
    plan = recomputing(one_stage(axes=(("data", 2), ("tensor", 2)), storage="sharded"), GRAPH, "full")
    return pipelined(plan, GRAPH, 2, schedule, virtual)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("zb_h1", 1), ("dualpipe", 2)])
def test_passes_of_a_rank_follow_each_other_within_the_step(schedule: str, virtual: int, tmp_path: Path) -> None:
    plan = plan_of(schedule, virtual)
    drawn = plan_picture(plan, write_plan(plan, tmp_path / "plan.json"))
    assert list(drawn.lanes) == ["rank 0", "rank 1"]
    for lane in drawn.lanes:
        bars = sorted((start, end, kind) for name, kind, start, end in drawn.bars if name == lane)
        assert {kind for _, _, kind in bars} >= {"forward", "backward", "update"}
        passes = [bar for bar in bars if bar[2] in ("forward", "backward")]
        assert all(after[0] >= before[1] - 1e-12 for before, after in pairwise(passes))
        assert bars[-1][1] <= drawn.step_time_s * (1 + 1e-9)
    for times, sizes in drawn.curves:
        assert (times[0], times[-1]) == (0.0, drawn.step_time_s)
        assert sizes.min() > 0


def test_a_strategy_file_of_a_pipeline_is_drawn(tmp_path: Path) -> None:
    source = write_plan(plan_of("1f1b"), tmp_path / "plan.json")
    main([str(source), str(tmp_path / "step.svg")])
    text = (tmp_path / "step.svg").read_text()
    for words in ("zoo:gpt2-tiny on 8 ×", "rank 0", "rank 1", "forward", "memory"):
        assert words in text


def test_what_cannot_be_drawn_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of("1f1b")
    source = write_plan(replace(plan, hardware="no-such-profile"), tmp_path / "plan.json")
    with pytest.raises(SystemExit) as ended:
        main([str(source), str(tmp_path / "step.svg")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m reports.timeline: ")
    assert "no-such-profile" in said
    assert "Traceback" not in said
