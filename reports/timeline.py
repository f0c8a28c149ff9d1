"""A picture of one simulated step: what runs on each stream, and memory beneath it.

``python -m reports.timeline strategy.json step.svg`` draws the step of a strategy file.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from planner.quantities import GIB, seconds_text
from simulator.program import COMPUTE_STREAM, Phase, Program, Task
from simulator.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from simulator.timeline import Timeline

FloatArray = npt.NDArray[np.float64]

COLORS = {
    Phase.FORWARD.value: "#5b8def",
    Phase.BACKWARD.value: "#2f4f9e",
    Phase.UPDATE.value: "#1f9d77",
    "communication": "#d9822b",
}
MAX_BARS = 20_000
MERGE_FRACTION = 1 / 1500
MEMORY_POINTS = 1500


def timeline_svg(timeline: Timeline, program: Program, *, title: str) -> str:
    """Draw a step as SVG text; equal input gives equal text."""
    figure = _draw(timeline, program, title)
    target = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "meshwright", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    text = target.getvalue()
    return text[text.index("<svg") :]


def write_timeline_picture(timeline: Timeline, program: Program, path: str | Path, *, title: str) -> Path:
    """Write the picture as SVG or PNG, by the ending of `path`."""
    if Path(path).suffix.lower() == ".svg":
        return write_whole(path, timeline_svg(timeline, program, title=title))
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    target = io.BytesIO()
    FigureCanvasAgg(_draw(timeline, program, title)).print_png(  # type: ignore[no-untyped-call]
        target, metadata={"Software": None}
    )
    return write_whole(path, target.getvalue())


def _draw(timeline: Timeline, program: Program, title: str) -> Figure:
    used = (task.stream for segment in program.segments for task in segment.tasks)
    streams = list(dict.fromkeys((COMPUTE_STREAM, *used)))
    figure = Figure(figsize=(11, 1.9 + 0.55 * len(streams)), layout="constrained", dpi=150)
    lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=[max(1.0, 0.55 * len(streams)), 1.0])
    unit, scale = _time_unit(timeline.step_time_s)
    _draw_lanes(lanes, timeline, program, streams, scale)
    _draw_memory(memory, timeline, scale)
    lanes.set_title(title, loc="left", fontsize=11)
    memory.set_xlabel(f"{unit} from the start of the step")
    for axes in (lanes, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, timeline.step_time_s * scale or 1)
    return figure


def _time_unit(seconds: float) -> tuple[str, float]:
    return next(
        ((name, factor) for limit, name, factor in ((1.0, "s", 1.0), (1e-3, "ms", 1e3)) if seconds >= limit),
        ("µs", 1e6),
    )


def _draw_lanes(axes: Axes, timeline: Timeline, program: Program, streams: list[str], scale: float) -> None:
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    shortest = timeline.step_time_s * MERGE_FRACTION
    for stream, kind, start, end in _bars(timeline, program):
        lane = bars.setdefault((streams.index(stream), kind), [])
        if lane and start - sum(lane[-1]) < shortest:
            lane[-1] = (lane[-1][0], end - lane[-1][0])
        else:
            lane.append((start, max(end - start, shortest)))
    for (lane_number, kind), spans in sorted(bars.items()):
        scaled = [(start * scale, length * scale) for start, length in spans]
        axes.broken_barh(scaled, (lane_number - 0.38, 0.76), facecolors=COLORS[kind], linewidth=0)
    axes.set_yticks(range(len(streams)), streams)
    axes.set_ylim(len(streams) - 0.4, -0.6)
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    axes.legend(handles=handles, ncols=4, fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))


def _bars(timeline: Timeline, program: Program) -> Iterator[tuple[str, str, float, float]]:
    """Stream, kind, start and end of every task, in order; long repetitions are drawn once."""
    for segment, times in zip(program.segments, timeline.segments, strict=True):
        starts, ends = times.starts_s.tolist(), times.ends_s.tolist()
        repeats = max(1, min(segment.count, MAX_BARS // max(1, len(segment.tasks))))
        for repeat in range(repeats):
            offset = times.offset_s + repeat * times.duration_s
            for index in np.argsort(times.starts_s, kind="stable").tolist():
                task = segment.tasks[index]
                if ends[index] > starts[index]:
                    yield task.stream, _kind(task), offset + starts[index], offset + ends[index]


def _kind(task: Task) -> str:
    return "communication" if task.collective is not None else task.phase.value


def _draw_memory(axes: Axes, timeline: Timeline, scale: float) -> None:
    times, sizes = _memory(timeline)
    unit, size = ("GiB", GIB) if timeline.peak_memory_bytes >= GIB else ("MiB", 2**20)
    axes.fill_between(times * scale, sizes / size, step="post", color="#b9c6e4", linewidth=0)
    axes.plot(times * scale, sizes / size, drawstyle="steps-post", color="#2f4f9e", linewidth=0.8)
    axes.set_ylabel(f"memory, {unit}")
    axes.set_ylim(bottom=0)


def _memory(timeline: Timeline) -> tuple[FloatArray, FloatArray]:
    """Seconds (points,) from the start of the step and bytes in use from then on, the most of each short while."""
    memory = timeline.memory
    times, sizes = [np.zeros(1)], [np.array([float(memory.resident_bytes)])]
    for segment, first, later in zip(timeline.segments, memory.first, memory.later, strict=True):
        changes = max(1, later.times_s.size)
        for repeat in range(max(1, min(segment.count, MAX_BARS // changes))):
            curve = later if repeat else first
            times.append(curve.times_s + (segment.offset_s + repeat * segment.duration_s))
            sizes.append(curve.total_bytes.astype(np.float64))
    moments, levels = np.concatenate(times), np.concatenate(sizes)
    bins = np.minimum((moments / (timeline.step_time_s or 1.0) * MEMORY_POINTS).astype(np.int64), MEMORY_POINTS - 1)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    peaks = np.maximum.reduceat(levels, starts)
    return np.append(moments[starts], timeline.step_time_s), np.append(peaks, levels[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the step of a strategy file."""
    from planner.planning import lower, predict
    from planner.strategy.file import read_plan
    from simulator.hardware import load_profile

    parser = argparse.ArgumentParser(prog="python -m reports.timeline", description=main.__doc__)
    parser.add_argument("strategy", type=Path, help="a strategy file")
    parser.add_argument("picture", type=Path, help="the picture to write, .svg or .png")
    given = parser.parse_args(arguments)
    plan = read_plan(given.strategy)
    lowered = lower(plan)
    prediction, timeline = predict(plan, lowered, load_profile(plan.hardware))
    title = f"{plan.network} on {plan.mesh.size} × {plan.hardware}: {seconds_text(prediction.step_time_s)}"
    write_timeline_picture(timeline, lowered.program, given.picture, title=title)


if __name__ == "__main__":
    main()
