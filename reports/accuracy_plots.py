"""Pictures of predictions beside measurements, as SVG that takes the page's colours."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullFormatter

from planner.published.metrics import Accuracy, ScoredRow
from reports.page import PALETTE
from simulator.quantities import GIB, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FloatArray = npt.NDArray[np.float64]

# Stand-ins of the page's colours; each is replaced by its variable, which follows light and dark.
INK, SOFT, RULE, ACCENT = "#010101", "#020202", "#030303", "#040404"
_VARIABLES = {INK: "var(--ink)", SOFT: "var(--soft)", RULE: "var(--rule)", ACCENT: "var(--accent)"}
FAMILIES = (
    ("A100", ("A100", "A800")),
    ("H100, H200", ("H100", "H200", "H800", "H20", "GH200")),
    ("B200, GB200", ("B200", "B300", "B100", "GB300")),
    ("V100", ("V100",)),
    ("Ascend", ("Ascend", "910")),
)
OTHER_FAMILY = "others"
MARKERS = ("o", "s", "D", "^", "v", "P")
MAX_RATIO = 2.0
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": RULE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.labelcolor": SOFT,
}


def family(device: str) -> str:
    """Family of devices that share a colour.

    >>> family("NVIDIA A100-SXM4-80GB"), family("TPU v4")
    ('A100', 'others')
    """
    return next((name for name, parts in FAMILIES if any(part in device for part in parts)), OTHER_FAMILY)


def time_scatter(accuracy: Accuracy, identity: str) -> str:
    """Predicted over measured step times, both logarithmic, with the typical interval around equality."""
    rows = [row for row in accuracy.rows if row.time_error is not None]
    measured = _values([row.measured_step_time_s for row in rows])
    predicted = _values([row.predicted_step_time_s for row in rows])
    with mpl.rc_context(STYLE):
        figure, axes = _axes(5.4, 4.7)
        _diagonal(axes, np.concatenate([measured, predicted]))
        _shade_intervals(axes, rows)
        _points(axes, rows, measured, predicted)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("measured")
        axes.set_ylabel("predicted")
        return _svg(figure, identity)


def memory_scatter(accuracy: Accuracy, identity: str) -> str:
    """Predicted over measured peak memory."""
    rows = [row for row in accuracy.rows if row.memory_error is not None]
    measured = _values([row.measured_memory_bytes for row in rows]) / GIB
    predicted = _values([row.predicted_memory_bytes for row in rows]) / GIB
    with mpl.rc_context(STYLE):
        figure, axes = _axes(5.4, 4.7)
        _diagonal(axes, np.concatenate([measured, predicted]))
        _points(axes, rows, measured, predicted)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} GiB"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("measured peak")
        axes.set_ylabel("predicted peak")
        return _svg(figure, identity)


def error_histogram(fits: Sequence[tuple[str, Accuracy]], identity: str) -> str:
    """How often which error occurs; what lies outside of the picture is counted at its edge."""
    edges = np.arange(-62.5, 63, 5.0)
    with mpl.rc_context(STYLE):
        figure, axes = _axes(5.4, 3.9)
        axes.axvspan(-10, 10, color=ACCENT, alpha=0.08, lw=0)
        for index, (name, accuracy) in enumerate(fits):
            errors = 100 * _errors(accuracy.rows)
            share = np.histogram(np.clip(errors, -60, 60), edges)[0] / max(1, len(errors)) * 100
            color = PALETTE[index]
            axes.stairs(share, edges, fill=index == 0, color=color, alpha=0.35 if index == 0 else 1.0)
            axes.stairs(share, edges, color=color, lw=1.6, ls="-" if index == 0 else "--", label=name)
        axes.axvline(0, color=SOFT, lw=1)
        axes.xaxis.set_major_locator(MultipleLocator(20))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _edge_text(value)))
        axes.grid(visible=False, axis="x")
        axes.set_xlim(-62.5, 62.5)
        axes.set_xlabel("error of the predicted time, per cent")
        axes.set_ylabel("per cent of the rows")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, handlelength=1.6)
        return _svg(figure, identity)


def devices_scatter(accuracy: Accuracy, identity: str) -> str:
    """Predicted over measured time by the number of devices."""
    rows = [row for row in accuracy.rows if row.time_error is not None and row.devices]
    devices = _values([float(row.devices) for row in rows])
    ratio = np.clip(1 + _errors(rows), 1 / MAX_RATIO, MAX_RATIO)
    # Counts are few: a fixed spread keeps rows of one count apart.
    spread = 2 ** (0.5 * (np.arange(len(rows)) * 0.618034 % 1 - 0.5))
    with mpl.rc_context(STYLE):
        figure, axes = _axes(5.4, 3.9)
        axes.axhspan(1 / 1.1, 1.1, color=ACCENT, alpha=0.08, lw=0)
        axes.axhline(1, color=SOFT, lw=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        _points(axes, rows, devices * spread, ratio)
        axes.set_ylim(0.96 / MAX_RATIO, 1.04 * MAX_RATIO)
        _ratio_axis(axes.yaxis)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xlabel("devices")
        axes.set_ylabel("predicted / measured")
        return _svg(figure, identity)


def source_boxes(fits: Sequence[tuple[str, Accuracy]], identity: str) -> str:
    """Spread of predicted over measured time by source: median, middle half and middle eight tenths."""
    first = fits[0][1]
    names = [name for name in first.by_source if _errors(_of(first, name)).size]
    names.sort(key=lambda name: (float(np.median(np.abs(_errors(_of(first, name))))), name), reverse=True)
    with mpl.rc_context({**STYLE, "font.size": 9.5, "legend.fontsize": 9.5}):
        figure, axes = _axes(11.0, 0.9 + 0.36 * max(1, len(names)))
        axes.axvspan(1 / 1.1, 1.1, color=ACCENT, alpha=0.08, lw=0)
        axes.axvline(1, color=SOFT, lw=1)
        for index, (label, accuracy) in enumerate(fits):
            offset = 0.0 if len(fits) == 1 else 0.17 - 0.34 * index
            _boxes(axes, accuracy, names, offset, PALETTE[index], label)
        axes.set_xscale("log", base=2)
        axes.set_xlim(0.98 / MAX_RATIO, 1.02 * MAX_RATIO)
        _ratio_axis(axes.xaxis)
        axes.set_yticks(range(len(names)), [f"{_short(name)} ({len(_errors(_of(first, name))):,})" for name in names])
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("predicted / measured")
        if names:
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, handlelength=1.2)
        return _svg(figure, identity)


def _boxes(axes: Axes, accuracy: Accuracy, names: Sequence[str], offset: float, color: str, label: str) -> None:
    for place, name in enumerate(names):
        ratio = 1 + _errors(_of(accuracy, name))
        if not ratio.size:
            continue
        low, first, middle, third, high = np.clip(
            np.quantile(ratio, (0.1, 0.25, 0.5, 0.75, 0.9)), 1 / MAX_RATIO, MAX_RATIO
        )
        height = place + offset
        axes.plot([low, high], [height, height], color=color, lw=1.2)
        axes.plot([first, third], [height, height], color=color, lw=6, alpha=0.55, solid_capstyle="butt")
        axes.plot([middle], [height], "|", color=color, ms=10, mew=2, label=label if place == 0 else None)


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def _points(axes: Axes, rows: Sequence[ScoredRow], x: FloatArray, y: FloatArray) -> None:
    families = np.array([family(row.device) for row in rows], dtype=object)
    for index, name in enumerate((*(name for name, _ in FAMILIES), OTHER_FAMILY)):
        chosen = families == name
        if chosen.any():
            axes.plot(
                x[chosen],
                y[chosen],
                MARKERS[index],
                color=PALETTE[index],
                ms=3.2,
                mew=0,
                alpha=0.55,
                label=f"{name} ({int(chosen.sum()):,})",
            )
    if len(rows):
        legend = axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=3, handletextpad=0.2, columnspacing=1.2)
        for handle in legend.legend_handles:
            if handle is not None:
                handle.set_alpha(1)


def _diagonal(axes: Axes, values: FloatArray) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    if values.size:
        low, high = float(values.min()) / 1.3, float(values.max()) * 1.3
        axes.plot([low, high], [low, high], color=SOFT, lw=1)
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)


def _shade_intervals(axes: Axes, rows: Sequence[ScoredRow]) -> None:
    """Where a measurement may lie for a prediction: medians of the relative intervals of rows of like time."""
    known = [row for row in rows if row.interval_s is not None and row.predicted_step_time_s]
    if len(known) < 2:
        return
    predicted = _values([row.predicted_step_time_s for row in known])
    ends = np.array([row.interval_s for row in known], dtype=np.float64) / predicted[:, None]
    edges = np.quantile(predicted, np.linspace(0, 1, min(12, len(known)) + 1))
    bins = np.clip(np.searchsorted(edges, predicted, side="right") - 1, 0, len(edges) - 2)
    levels, low, high = [], [], []
    for index in np.unique(bins):
        inside = bins == index
        levels.append(float(np.median(predicted[inside])))
        low.append(float(np.median(ends[inside, 0])))
        high.append(float(np.median(ends[inside, 1])))
    heights = np.array([edges[0], *levels, edges[-1]])
    left, right = np.array([low[0], *low, low[-1]]), np.array([high[0], *high, high[-1]])
    axes.fill_betweenx(heights, heights * left, heights * right, color=ACCENT, alpha=0.13, lw=0)
    for edge in (left, right):  # over the marks, which hide the shading where they are dense
        axes.plot(heights * edge, heights, color=ACCENT, lw=0.9, zorder=5)


def _ratio_axis(axis: mpl.axis.Axis) -> None:
    ticks = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
    axis.set_ticks(ticks, [{0.5: "≤ 0.5", 2.0: "≥ 2"}.get(tick, f"{tick:g}") for tick in ticks])
    axis.set_minor_formatter(NullFormatter())
    axis.set_tick_params(which="minor", length=0)


def _of(accuracy: Accuracy, source: str) -> list[ScoredRow]:
    return [row for row in accuracy.rows if row.source == source]


def _errors(rows: Sequence[ScoredRow]) -> FloatArray:
    return np.array([row.time_error for row in rows if row.time_error is not None], dtype=np.float64)


def _values(values: Sequence[float | None]) -> FloatArray:
    return np.array(values, dtype=np.float64)


def _tick(value: float) -> str:
    text = seconds_text(value)
    number, unit = text.split(" ")
    return f"{float(number):,g} {unit}"


def _edge_text(value: float) -> str:
    edge = "≤ " if value <= -60 else "≥ " if value >= 60 else ""
    sign = "−" if value < 0 else "+" if value > 0 else ""
    return f"{edge}{sign}{abs(value):g}"


def _short(name: str) -> str:
    return textwrap.shorten(name, 44, placeholder=" …")


def _svg(figure: Figure, identity: str) -> str:
    """SVG markup with the page's colours, without the names that several pictures of a page would share."""
    target = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": identity, "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg xmlns:xlink="[^"]*" width="[^"]*" height="[^"]*"', '<svg class="plot"', text, count=1)
    text = re.sub(r'(?<=[\s",(-])(\d+\.\d\d)\d+', r"\1", text)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = text.replace("xlink:href", "href").replace(' xmlns="http://www.w3.org/2000/svg"', "")
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", text)
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, variable)
    return text
