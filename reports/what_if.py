"""The page of a what-if sweep: one table and pictures of time, throughput, scaling and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.what_if import WhatIfRow
from reports import page
from reports.page import DASHES, PALETTE, SYMBOLS, Html
from simulator.quantities import GIB, bytes_text, interval_text, percent_text, rate_text, seconds_text
from simulator.whole_file import write_whole

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from planner.planning.planning import Prediction
    from planner.plans.plan import Plan

PARTS = {
    "compute_s": "compute",
    "exposed_communication_s": "exposed communication",
    "bubble_s": "idle",
    "optimizer_s": "optimizer",
    "host_s": "host",
}


def write_what_if_page(rows: Sequence[WhatIfRow], *, network: str, batch_rule: str, path: str | Path) -> Path:
    """Write the page of a sweep, whole or not at all.

    Parameters
    ----------
    rows
        From `planner.what_if.what_if`.
    network
        The network's specification.
    batch_rule
        How the global batch follows the device count, in words.
    path
        Where to write the HTML.

    Returns
    -------
    Path
        The file written.
    """
    return write_whole(path, what_if_page(rows, network=network, batch_rule=batch_rule))


def what_if_page(rows: Sequence[WhatIfRow], *, network: str, batch_rule: str) -> str:
    """The page of a sweep as text."""
    found = [row for row in rows if row.best is not None]
    parts = [
        page.paragraph(f"The best plan at each device count. {batch_rule[:1].upper()}{batch_rule[1:]}.", lead=True),
        page.cards(_cards(rows)),
    ]
    if found:
        axes = _axis_charts(found)
        counts = {row.devices for row in found}
        by_count = [page.grid(*_charts(rows, found)), *_time_charts(found)] if len(counts) > 1 or not axes else []
        parts += [page.heading("Pictures"), *([page.grid(*axes)] if axes else []), *by_count]
    parts += [page.heading("Plans"), *_by_profile(_plans, rows)]
    parts += [page.heading("Time and memory"), *_by_profile(_predictions, found)]
    return page.page(
        f"What if: {network}",
        parts,
        footer="Predicted by Meshwright's simulator; intervals and labels as in the hardware profiles.",
    )


def _profiles(rows: Sequence[WhatIfRow]) -> list[str]:
    """Profiles with their settings: what a line of a chart is of."""
    return list(dict.fromkeys(row.label for row in rows))


def _cards(rows: Sequence[WhatIfRow]) -> list[tuple[str, str, str]]:
    entries = [("Plans", f"{sum(row.best is not None for row in rows)} of {len(rows)}", "clusters for which one fits")]
    for profile in _profiles(rows):
        found = [row for row in rows if row.label == profile and row.best is not None]
        if found:
            last = max(found, key=lambda row: row.devices)
            speed, what = _throughput(last)
            efficiency = "" if last.scaling_efficiency is None else percent_text(last.scaling_efficiency)
            entries.append((f"{profile} × {last.devices}", rate_text(speed, what), f"{efficiency} scaling efficiency"))
    return entries[: MOST_LINES + 1]


def _throughput(row: WhatIfRow) -> tuple[float, str]:
    assert row.best is not None
    prediction = row.best.prediction
    if prediction.tokens_per_s is not None:
        return prediction.tokens_per_s, "tokens"
    return prediction.samples_per_s, "samples"


def _lines(
    found: Sequence[WhatIfRow], value: Callable[[WhatIfRow], float], text: Callable[[WhatIfRow], str]
) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    for index, profile in enumerate(_profiles(found)):
        rows = [row for row in found if row.label == profile]
        figure.add_trace(
            go.Scatter(
                x=[row.devices for row in rows],
                y=[value(row) for row in rows],
                name=profile,
                mode="lines+markers",
                line={"color": PALETTE[index % len(PALETTE)], "dash": DASHES[index % len(DASHES)], "width": 2},
                marker={"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 8},
                text=[text(row) for row in rows],
                hovertemplate="%{x} devices: %{text}<extra>%{fullData.name}</extra>",
            )
        )
    counts = sorted({row.devices for row in found})
    figure.update_xaxes(
        type="log", title="devices", tickvals=counts, ticktext=[str(count) for count in counts], minor={"ticks": ""}
    )
    return figure


def _charts(rows: Sequence[WhatIfRow], found: Sequence[WhatIfRow]) -> list[Html]:
    what = _throughput(found[0])[1]
    time = _lines(found, lambda row: _prediction(row).step_time_s, _time_text)
    _add_intervals(time, found)
    ends = [end for row in found for end in _prediction(row).interval_s]
    time.update_yaxes(**page.log_axis(ends, seconds_text))
    speed = _lines(found, lambda row: _throughput(row)[0], lambda row: rate_text(*_throughput(row)))
    _add_ideal(speed, found)
    speeds = [_throughput(row)[0] for row in found]
    speed.update_yaxes(title=f"{what} per second", **page.log_axis(speeds, _rate_tick))
    scaling = _lines(
        found, lambda row: 100 * (row.scaling_efficiency or 0.0), lambda row: percent_text(row.scaling_efficiency or 0)
    )
    scaling.update_yaxes(title="per cent", rangemode="tozero")
    memory = _lines(found, lambda row: _prediction(row).peak_memory_bytes / GIB, _memory_text)
    _add_capacity(memory, found)
    memory.update_yaxes(title="GiB per device", rangemode="tozero")
    return [
        page.chart(time, identity="step-time", title="Step time", caption="Bars show the interval of the prediction."),
        page.chart(speed, identity="throughput", title="Throughput", caption="Thin lines: perfect scaling."),
        page.chart(
            scaling,
            identity="efficiency",
            title="Scaling efficiency",
            caption=f"Throughput per device against that of {_baselines(found)}.",
        ),
        page.chart(
            memory,
            identity="memory",
            title="Peak memory per device",
            caption="Thin lines: memory a job can use on the device.",
        ),
    ]


MOST_LINES = 8
"""Lines of one picture of an axis."""


def _axis_charts(found: Sequence[WhatIfRow]) -> list[Html]:
    """Throughput over the values of each setting, at the largest device count; a line for whatever else is the same."""
    import plotly.graph_objects as go

    devices = max(row.devices for row in found)
    charts = []
    for index, axis in enumerate(dict.fromkeys(key for row in found for key in row.settings)):
        values = list(dict.fromkeys(row.settings[axis] for row in found if axis in row.settings))
        lines: dict[str, dict[str, WhatIfRow]] = {}
        for row in found:
            if row.devices == devices:
                rest = [f"{key}={value}" for key, value in row.settings.items() if key != axis]
                lines.setdefault(", ".join([row.profile, *rest]), {})[row.settings[axis]] = row
        figure = go.Figure()
        for number, (name, rows) in enumerate([*lines.items()][:MOST_LINES]):
            at = [value for value in values if value in rows]
            figure.add_trace(
                go.Scatter(
                    x=at,
                    y=[_throughput(rows[value])[0] for value in at],
                    name=name,
                    mode="lines+markers",
                    line={"color": PALETTE[number % len(PALETTE)], "dash": DASHES[number % len(DASHES)], "width": 2},
                    marker={"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 8},
                    text=[f"{rate_text(*_throughput(rows[value]))}, {_time_text(rows[value])}" for value in at],
                    hovertemplate=f"{axis} %{{x}}: %{{text}}<extra>%{{fullData.name}}</extra>",
                )
            )
        figure.update_xaxes(type="category", title=axis, range=[-0.3, len(values) - 0.7])
        figure.update_yaxes(title=f"{_throughput(found[0])[1]} per second", rangemode="tozero")
        left = f" The first {MOST_LINES} of {len(lines)} lines." if len(lines) > MOST_LINES else ""
        caption = f"The best plan at each value, on {devices} devices.{left}"
        charts.append(page.chart(figure, identity=f"axis-{index}", title=f"Throughput by {axis}", caption=caption))
    return charts


def _baselines(found: Sequence[WhatIfRow]) -> str:
    """The cluster of each profile that scaling is measured against: the smallest with a plan."""
    least = [min(row.devices for row in found if row.label == profile) for profile in _profiles(found)]
    return ", ".join(f"{profile} × {devices}" for profile, devices in zip(_profiles(found), least, strict=True))


def _rate_tick(value: float) -> str:
    return rate_text(value, "").removesuffix(" /s").replace(".00", "").replace(".0", "")


def _prediction(row: WhatIfRow) -> Prediction:
    assert row.best is not None
    return row.best.prediction


def _time_text(row: WhatIfRow) -> str:
    low, high = _prediction(row).interval_s
    return f"{seconds_text(_prediction(row).step_time_s)} ({interval_text(low, high)})"


def _memory_text(row: WhatIfRow) -> str:
    prediction = _prediction(row)
    return f"{bytes_text(prediction.peak_memory_bytes)} of {bytes_text(prediction.device_memory_bytes)}"


def _add_intervals(figure: go.Figure, found: Sequence[WhatIfRow]) -> None:
    for trace in figure.data:
        predictions = [_prediction(row) for row in found if row.label == trace.name]
        trace.error_y = {
            "type": "data",
            "symmetric": False,
            "array": [p.interval_s[1] - p.step_time_s for p in predictions],
            "arrayminus": [p.step_time_s - p.interval_s[0] for p in predictions],
            "thickness": 1,
            "width": 3,
        }


def _add_ideal(figure: go.Figure, found: Sequence[WhatIfRow]) -> None:
    for index, profile in enumerate(_profiles(found)):
        rows = [row for row in found if row.label == profile]
        base = min(rows, key=lambda row: row.devices)
        ideal = [_throughput(base)[0] * row.devices / base.devices for row in rows]
        _thin_line(figure, [row.devices for row in rows], ideal, index)


def _add_capacity(figure: go.Figure, found: Sequence[WhatIfRow]) -> None:
    for index, profile in enumerate(_profiles(found)):
        rows = [row for row in found if row.label == profile]
        limits = [_prediction(row).device_memory_bytes / GIB for row in rows]
        _thin_line(figure, [row.devices for row in rows], limits, index)


def _thin_line(figure: go.Figure, devices: list[int], values: list[float], index: int) -> None:
    figure.add_scatter(
        x=devices,
        y=values,
        mode="lines",
        line={"color": PALETTE[index % len(PALETTE)], "dash": "dot", "width": 1},
        showlegend=False,
        hoverinfo="skip",
    )


def _time_charts(found: Sequence[WhatIfRow]) -> list[Html]:
    charts = []
    for index, profile in enumerate(_profiles(found)):
        rows = [row for row in found if row.label == profile]
        charts.append(
            page.chart(
                _time_chart(rows),
                identity=f"time-{index}",
                title=f"Where the time goes: {profile}",
                caption="Shares of the step time; communication counts where nothing is computed meanwhile.",
                height=300,
            )
        )
    return [page.grid(*charts)]


def _time_chart(rows: Sequence[WhatIfRow]) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    parts = list(dict.fromkeys(part for row in rows for part in _prediction(row).breakdown))
    for index, part in enumerate(parts):
        figure.add_trace(
            go.Bar(
                x=[str(row.devices) for row in rows],
                y=[100 * _prediction(row).breakdown.get(part, 0.0) / _prediction(row).step_time_s for row in rows],
                name=PARTS.get(part, part.removesuffix("_s")),
                marker={
                    "color": PALETTE[index % len(PALETTE)],
                    "pattern": {
                        "shape": ("", "/", ".", "x")[index % 4],
                        "fillmode": "overlay",
                        "fgcolor": "rgba(255,255,255,0.6)",
                        "size": 6,
                    },
                },
                text=[seconds_text(_prediction(row).breakdown.get(part, 0.0)) for row in rows],
                textposition="none",
                hovertemplate="%{x} devices: %{text} (%{y:.1f} %)<extra>%{fullData.name}</extra>",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_xaxes(title="devices", type="category")
    figure.update_yaxes(title="per cent", range=[0, 100])
    return figure


def _by_profile(table: Callable[[str, Sequence[WhatIfRow]], Html], rows: Sequence[WhatIfRow]) -> list[Html]:
    """One table for each profile, whatever is set."""
    names = dict.fromkeys(row.profile for row in rows)
    return [table(name, [row for row in rows if row.profile == name]) for name in names]


def _plans(profile: str, rows: Sequence[WhatIfRow]) -> Html:
    plans = [row.best.plan for row in rows if row.best is not None]
    optional = {
        name: text
        for name, (text, unused) in {
            "schedule": (_schedule, "none"),
            "recompute": (lambda plan: plan.recompute, "none"),
        }.items()
        if any(text(plan) != unused for plan in plans)
    }
    lines: list[list[page.Cell]] = []
    settings = ["with"] if any(row.setting for row in rows) else []
    for row in rows:
        line: list[page.Cell] = [str(row.devices), str(row.global_batch), *([row.setting] if settings else [])]
        if row.best is None:
            lines.append([*line, Html('<span class="bad">no plan</span>'), "", *("" for _ in optional), "", ""])
            continue
        plan = row.best.plan
        certificate = plan.certificate
        gap = "" if certificate.status == "optimal" else f", gap {percent_text(certificate.gap)}"
        lines.append(
            [
                *line,
                _mesh(plan),
                f"{plan.micro_batch} × {plan.micro_batches}",
                *(text(plan) for text in optional.values()),
                "whole" if plan.optimizer_sharding == "none" else plan.optimizer_sharding,
                f"{certificate.status}{gap}",
            ]
        )
    columns = ["devices", "global batch", *settings, "mesh", "micro-batch", *optional, "optimizer state", "certificate"]
    table = page.table(columns, lines, caption=f"{profile}: the best plan of each cluster", numbers=(0, 1))
    return Html(table.text + "".join(_reason(row) for row in rows if row.best is None))


def _reason(row: WhatIfRow) -> str:
    words = f"{row.label} × {row.devices}: {row.reason}"
    return f'<p><span class="bad">{page.escape(words)}</span></p>'


def _mesh(plan: Plan) -> str:
    stages = [f"pipeline {plan.pipeline}"] if plan.pipeline > 1 else []
    return " × ".join([*stages, *(f"{axis.name} {axis.size}" for axis in plan.mesh.axes)]) or "one device"


def _schedule(plan: Plan) -> str:
    name = plan.schedule.replace("_", " ")
    return f"{name}, {plan.virtual} chunks" if plan.virtual > 1 else name


def _breakdown_text(prediction: Prediction) -> str:
    return ", ".join(
        f"{PARTS.get(part, part)} {percent_text(seconds / prediction.step_time_s)}"
        for part, seconds in prediction.breakdown.items()
    )


def _predictions(profile: str, found: Sequence[WhatIfRow]) -> Html:
    lines: list[list[page.Cell]] = []
    settings = ["with"] if any(row.setting for row in found) else []
    for row in found:
        prediction = _prediction(row)
        lines.append(
            [
                str(row.devices),
                *([row.setting] if settings else []),
                seconds_text(prediction.step_time_s),
                interval_text(*prediction.interval_s),
                str(prediction.label),
                rate_text(*_throughput(row)),
                "" if row.scaling_efficiency is None else percent_text(row.scaling_efficiency),
                percent_text(prediction.mfu),
                _memory_text(row),
                Html(f'<span class="wrap">{page.escape(_breakdown_text(prediction))}</span>'),
            ]
        )
    columns = ["devices", *settings, "step time", "interval", "label", "throughput", "efficiency", "MFU", "peak memory"]
    return page.table(
        [*columns, "where the time goes"],
        lines,
        caption=f"{profile}: predicted time and memory of these plans",
        numbers=(0, *(number + len(settings) for number in (1, 2, 4, 5, 6, 7))),
        close=True,
    )
