"""A picture of one simulated step: what runs on each pipeline rank, and memory beneath it.

``python -m reports.timeline strategy.json step.svg`` draws the step of a strategy file.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from planner.planning.prediction import HOST, OperatorRun, SimulatedPlan, operator_run
from simulator.pipeline_memory import RankMemory
from simulator.pipeline_operators import EPILOGUE, LABELS, MEETING, PROLOGUE, STREAMS
from simulator.pipeline_trace import action_times
from simulator.program import Phase
from simulator.quantities import GIB, seconds_text
from simulator.schedules import ActionKind, Schedule
from simulator.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from planner.planning.loading import SimulatedStep
    from planner.plans.plan import Plan

FloatArray = npt.NDArray[np.float64]
Bar = tuple[str, str, float, float]
"""Lane, kind, start and end in seconds."""

COLORS = {
    Phase.FORWARD.value: "#5b8def",
    Phase.BACKWARD.value: "#2f4f9e",
    Phase.UPDATE.value: "#1f9d77",
    "communication": "#d9822b",
}
MAX_LANES = 16
"""Of more ranks only so many are drawn, the first and the last among them."""
MERGE_FRACTION = 1 / 1500


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What is drawn: lanes with bars (lane, kind, start, end), and memory as curves (seconds, bytes)."""

    title: str
    step_time_s: float
    lanes: Sequence[str]
    bars: Sequence[Bar]
    curves: Sequence[tuple[FloatArray, FloatArray]]

    def __repr__(self) -> str:
        return f"picture of {self.title}; .save(path) writes SVG or PNG"

    def save(self, path: str | Path) -> Path:
        """Write the picture as SVG or PNG, by the ending of `path`."""
        return write_picture(self, path)

    def _repr_svg_(self) -> str:
        return picture_svg(self)


def step_picture(found: SimulatedPlan, *, title: str) -> Picture:
    """Picture of a step, a lane for each rank: passes, updates and the collectives that all wait for.

    A rank alone has lanes for its messages as well.
    """
    run, ranks = operator_run(found), found.lowered.schedule.ranks
    drawn = np.unique(np.linspace(0, ranks - 1, min(ranks, MAX_LANES)).round().astype(int)).tolist()
    lanes, bars = [_lane(rank) for rank in drawn], list(_bars(found.lowered.schedule, run, frozenset(drawn)))
    if ranks == 1:
        sent = list(_messages(run))
        lanes += dict.fromkeys(lane for lane, *_ in sent)
        bars += sent
    return Picture(
        title=title,
        step_time_s=found.result.length_s,
        lanes=lanes,
        bars=bars,
        curves=[_curve(run.memory[rank], found.result.length_s) for rank in drawn],
    )


def _lane(rank: int) -> str:
    return f"rank {rank}"


def _bars(schedule: Schedule, run: OperatorRun, drawn: frozenset[int]) -> Iterator[Bar]:
    """Every pass of the drawn ranks; of a pair that runs together, the forward pass first and the other behind it."""
    starts, ends = action_times(schedule, run.table, run.times, run.actions)
    for leader in schedule.leaders.tolist():
        rank = int(schedule.action_rank[leader])
        if rank in drawn:
            start, end = float(starts[leader]), float(ends[leader])
            members = [leader, leader + 1] if schedule.paired[leader] else [leader]
            width = (end - start) / len(members)
            for place, action in enumerate(members):
                forward = schedule.kind[action] == ActionKind.FORWARD
                phase = Phase.FORWARD if forward else Phase.BACKWARD
                yield _lane(rank), phase.value, start + place * width, start + (place + 1) * width
    label = run.table.label
    for kind, tasks in (
        ("communication", np.flatnonzero(label == MEETING)),
        (Phase.UPDATE.value, np.flatnonzero((label == PROLOGUE) | (label == EPILOGUE))),
    ):
        for task in tasks.tolist():
            rank = int(run.table.stream_rank[run.table.stream[task]])
            if rank in drawn and run.times[1][task] > run.times[0][task]:
                yield _lane(rank), kind, float(run.times[0][task]), float(run.times[1][task])


def _messages(run: OperatorRun) -> Iterator[Bar]:
    """Every message of the passes, in the lane of its stream; in order of time within a lane."""
    for stream in range(1, STREAMS):
        tasks = np.flatnonzero((run.table.label == stream) & (run.times[1] > run.times[0]))
        for task in tasks[np.argsort(run.times[0][tasks], kind="stable")].tolist():
            yield LABELS[stream], "communication", float(run.times[0][task]), float(run.times[1][task])


def _curve(memory: RankMemory, length_s: float) -> tuple[FloatArray, FloatArray]:
    """Bytes in use after every change, from the start of the first rank to the end of the last."""
    times = np.concatenate([[0.0], memory.times_s, [length_s]])
    sizes = np.concatenate([memory.total_bytes[:1], memory.total_bytes, memory.total_bytes[-1:]])
    return times, sizes


def picture_svg(picture: Picture) -> str:
    """Draw a step as SVG text; equal input gives equal text."""
    figure = _draw(picture)
    target = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "meshwright", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    text = target.getvalue()
    return text[text.index("<svg") :]


def write_picture(picture: Picture, path: str | Path) -> Path:
    """Write the picture as SVG or PNG, by the ending of `path`."""
    if Path(path).suffix.lower() == ".svg":
        return write_whole(path, picture_svg(picture))
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    target = io.BytesIO()
    FigureCanvasAgg(_draw(picture)).print_png(target, metadata={"Software": None})  # type: ignore[no-untyped-call]
    return write_whole(path, target.getvalue())


def _draw(picture: Picture) -> Figure:
    lanes = picture.lanes
    figure = Figure(figsize=(11, 1.9 + 0.55 * len(lanes)), layout="constrained", dpi=150)
    upper, memory = figure.subplots(2, 1, sharex=True, height_ratios=[max(1.0, 0.55 * len(lanes)), 1.0])
    unit, scale = _time_unit(picture.step_time_s)
    _draw_lanes(upper, picture, scale)
    _draw_memory(memory, picture.curves, scale)
    upper.set_title(picture.title, loc="left", fontsize=11)
    memory.set_xlabel(f"{unit} from the start of the step")
    for axes in (upper, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, picture.step_time_s * scale or 1)
    return figure


def _time_unit(seconds: float) -> tuple[str, float]:
    return next(
        ((name, factor) for limit, name, factor in ((1.0, "s", 1.0), (1e-3, "ms", 1e3)) if seconds >= limit),
        ("µs", 1e6),
    )


def _draw_lanes(axes: Axes, picture: Picture, scale: float) -> None:
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    shortest = picture.step_time_s * MERGE_FRACTION
    numbers = {name: number for number, name in enumerate(picture.lanes)}
    for name, kind, start, end in picture.bars:
        lane = bars.setdefault((numbers[name], kind), [])
        if lane and start - sum(lane[-1]) < shortest:
            lane[-1] = (lane[-1][0], end - lane[-1][0])
        else:
            lane.append((start, max(end - start, shortest)))
    for (lane_number, kind), spans in sorted(bars.items()):
        scaled = [(start * scale, length * scale) for start, length in spans]
        axes.broken_barh(scaled, (lane_number - 0.38, 0.76), facecolors=COLORS[kind], linewidth=0)
    axes.set_yticks(range(len(numbers)), picture.lanes)
    axes.set_ylim(len(numbers) - 0.4, -0.6)
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    axes.legend(handles=handles, ncols=4, fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))


def _draw_memory(axes: Axes, curves: Sequence[tuple[FloatArray, FloatArray]], scale: float) -> None:
    unit, size = ("GiB", GIB) if max(sizes.max() for _, sizes in curves) >= GIB else ("MiB", 2**20)
    for times, sizes in curves:
        axes.fill_between(times * scale, sizes / size, step="post", color="#b9c6e4", linewidth=0, alpha=1 / len(curves))
        axes.plot(times * scale, sizes / size, drawstyle="steps-post", color="#2f4f9e", linewidth=0.8)
    axes.set_ylabel(f"memory, {unit}")
    axes.set_ylim(bottom=0)


def drawn_step(step: SimulatedStep) -> Picture:
    """Picture of a simulated step."""
    plan = step.plan
    title = f"{plan.network} on {plan.devices} × {plan.hardware}: {seconds_text(step.prediction.step_time_s)}"
    host_s = step.prediction.breakdown.get(HOST, 0.0)
    if host_s:  # devices wait for it, before, between or behind what is drawn
        title += f" (host {seconds_text(host_s)})"
    return step_picture(step.found, title=title)


def plan_picture(plan: Plan, source: Path) -> Picture:
    """Picture of the simulated step of the plan in the strategy file `source`."""
    from planner.cost.software import machine_of
    from planner.planning.loading import simulated_step

    return drawn_step(simulated_step(plan, machine_of(plan), source=str(source)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the step of a strategy file."""
    from planner.plans.file import read_plan
    from simulator.errors import MeshwrightError

    parser = argparse.ArgumentParser(prog="python -m reports.timeline", description=main.__doc__)
    parser.add_argument("strategy", type=Path, help="a strategy file")
    parser.add_argument("picture", type=Path, help="the picture to write, .svg or .png")
    given = parser.parse_args(arguments)
    try:
        write_picture(plan_picture(read_plan(given.strategy), given.strategy), given.picture)
    except MeshwrightError as error:
        sys.stderr.write(f"python -m reports.timeline: {error}\n")
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main()
