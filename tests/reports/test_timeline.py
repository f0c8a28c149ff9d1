"""The picture of a step."""

from __future__ import annotations

import re
from pathlib import Path

from reports.timeline import picture_svg, step_picture, write_picture
from simulator.engine import replay
from simulator.program import Phase, Program
from simulator.timeline import Timeline
from tests.simulator.programs import buffer, communication, program, segment, task


def step() -> tuple[Timeline, Program]:
    """Three micro-batches of two kernels and a collective, then an update."""
    import numpy as np

    made = program(
        segment(
            task("forward", allocates=(buffer("a", 2**20),)),
            communication("reduce", after=(0,)),
            task("backward", phase=Phase.BACKWARD, after=(0,), releases=("a",)),
            count=3,
        ),
        segment(task("update", phase=Phase.UPDATE)),
        resident=(buffer("weights", 2**21),),
    )
    return replay(made, [np.array([1.0, 0.5, 2.0]), np.array([0.25])]), made


def test_the_picture_is_the_same_every_time_and_names_its_lanes() -> None:
    timeline, made = step()
    text = picture_svg(step_picture(timeline, made, title="one step"))
    assert text == picture_svg(step_picture(timeline, made, title="one step"))
    assert text.startswith("<svg")
    assert text.rstrip().endswith("</svg>")
    for words in ("one step", "compute", "communication:data", "forward", "backward", "update", "memory, MiB"):
        assert words in text
    assert not re.search(r"\d{4}-\d{2}-\d{2}", text), "no date"


def test_pictures_are_written_by_their_ending(tmp_path: Path) -> None:
    timeline, made = step()
    svg = write_picture(step_picture(timeline, made, title="one step"), tmp_path / "step.svg")
    png = write_picture(step_picture(timeline, made, title="one step"), tmp_path / "step.png")
    assert svg.read_text().startswith("<svg")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_drawn_memory_keeps_its_peak() -> None:
    from reports.timeline import _memory

    timeline, _ = step()
    times, sizes = _memory(timeline)
    assert sizes.max() == timeline.peak_memory_bytes
    assert (times[0], times[-1]) == (0.0, timeline.step_time_s)
