"""The page, the table and the document of the runs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from planner.execution.run import CHANGED_SPEED
from reports import page
from reports.execution.figures import OVERHEAD_AIM, OWN_CORES, Figure, choice_regrets, figures, network_taus
from reports.execution.running import Result, error_of
from reports.page import PALETTE, SYMBOLS, Cell, Html
from simulator.crowding import MOST_OTHERS, MOST_STOLEN
from simulator.quantities import bytes_text, interval_text, seconds_text

COLUMNS = (
    "network",
    "processes",
    "plan",
    "error",
    "steps",
    "predicted_step_time_s",
    "measured_step_time_s",
    "measured_p10_s",
    "measured_p90_s",
    "time_error",
    "machine_speed",
    "time_error_at_this_speed",
    "others_share",
    "stolen_share",
    "first_time_error",
    "predicted_peak_memory_bytes",
    "measured_peak_memory_bytes",
    "memory_error",
    "by_hand",
    "by_hand_error",
    "beside_by_hand_step_time_s",
    "by_hand_step_time_s",
    "overhead",
    "overhead_lowest",
    "overhead_highest",
    "by_hand_loss_difference",
)
LEAST_SHARE = 0.005


def runs_csv(results: Iterable[Result]) -> str:
    """One row a plan."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        values = (getattr(result, name) for name in COLUMNS)
        writer.writerow(["" if value is None else value for value in values])
    return stream.getvalue()


def document(results: Sequence[Result], machine: str) -> dict[str, Any]:
    """Figures, their aims and all results."""
    return {
        "machine": machine,
        "figures": {one.key: {**asdict(one), "met": one.met} for one in figures(results)},
        "kendall_tau": network_taus(results),
        "regret": choice_regrets(results),
        "plans": [
            asdict(r)
            | {"time_error": r.time_error, "time_error_at_this_speed": r.time_error_at_this_speed}
            | {"memory_error": r.memory_error, "overhead": r.overhead}
            for r in results
        ],
    }


def to_json(found: dict[str, Any]) -> str:
    """The document as text."""
    return json.dumps(found, indent=1) + "\n"


def execution_page(results: Sequence[Result], planned: int, machine: str, warnings: Sequence[str] = ()) -> str:
    """The page as text; `planned` plans should have been run, `warnings` are the calibrations', "" for a quiet one."""
    found = figures(results)
    ran = [result for result in results if not result.error]
    lead = (
        f"{len(ran)} plans of {len({r.network for r in ran})} networks, planned for this machine and run: {machine}. "
        "Every step is timed on its slowest rank; predictions were made before the runs, on a profile measured before "
        "every round of them."
    )
    parts = [page.paragraph(lead, lead=True), page.cards([_card(one) for one in found])]
    parts += [page.paragraph(text) for text in _conditions(ran, warnings)]
    if len(results) < planned:
        parts.append(page.paragraph(f"{planned - len(results)} of {planned} plans have not been run yet."))
    if ran:
        parts += [
            page.heading("Predicted beside measured"),
            page.grid(_scatter(ran), _error_chart(ran)),
            page.grid(*(_overhead_chart(ran) if any(r.overhead is not None for r in ran) else ())),
        ]
    parts.append(_table(results))
    if any(len(r.attempts) > 1 for r in ran):
        parts.append(_all_runs(ran))
    parts += [page.heading("Why predictions were off"), _reasons(ran)]
    parts += [_list("Kendall tau by network", network_taus(ran), ""), _list("Regret", choice_regrets(ran), "%")]
    return page.page("Plans executed", parts, footer="Written by python -m reports.execution.")


def _conditions(ran: Sequence[Result], warnings: Sequence[str]) -> Iterator[str]:
    """What the machine was like beside the calibrations and the runs."""
    for number, warning in enumerate(warnings, 1):
        if warning:
            yield f"Calibration {number} of {len(warnings)} warned: {warning}."
    shares = [(r.others_share or 0.0, r.stolen_share or 0.0) for r in ran]
    busy = [pair for pair in shares if pair[0] > MOST_OTHERS or pair[1] > MOST_STOLEN]
    if busy:
        yield (
            f"Beside {len(busy)} of {len(ran)} plans the machine was not idle: other programs took up to "
            f"{max(others for others, _ in shares):.0%} of the cores' time, its host up to "
            f"{max(stolen for _, stolen in shares):.0%}."
        )
    speeds = [r.machine_speed for r in ran if r.machine_speed is not None]
    changed = [speed for speed in speeds if abs(speed - 1) >= CHANGED_SPEED]
    if changed:
        yield (
            f"Beside {len(changed)} of {len(ran)} plans the machine had another speed than when it was calibrated: "
            f"typical kernels, run by all processes together between the steps, ran at {min(changed):.0%} to "
            f"{max(changed):.0%} of it. Errors are of the predictions as they were made; scaled ones stand beside them "
            "under their own name."
        )
    twice = [r for r in ran if len(r.attempts) > 1]
    if twice:
        yield (
            f"{len(twice)} of {len(ran)} plans ran {max(len(r.attempts) for r in twice)} times, in rounds forwards and "
            "backwards, each after a calibration of its own, so that a drift of the machine's speed meets all alike. "
            "The mean of the runs counts, beside the mean of what was predicted before each; errors of the first "
            "calibration and its runs stand under their own name, and a table has all."
        )


def _card(one: Figure) -> tuple[str, str, str]:
    if one.value is None:
        return one.name, "–", "nothing run"
    text = f"{one.value:.2f}" if one.at_least else f"{100 * one.value:.1f} %"
    aim = f"{one.aim:.2g}" if one.at_least else f"{100 * one.aim:.0f} %"
    verdict = "met" if one.met else "missed"
    return one.name, text, f"aim {'≥' if one.at_least else '≤'} {aim}: {verdict} ({one.runs} values)"


def _label(result: Result) -> str:
    return f"{result.network}, {result.processes}: {result.plan}"


def _scatter(results: Sequence[Result]) -> Html:
    import plotly.graph_objects as go

    figure = go.Figure()
    pairs = [
        (r, r.predicted_step_time_s, r.measured_step_time_s)
        for r in results
        if r.predicted_step_time_s is not None and r.measured_step_time_s is not None
    ]
    times = [1e3 * value for _, a, b in pairs for value in (a, b)]
    ends = [min(times) * 0.8, max(times) * 1.25]
    figure.add_scatter(x=ends, y=ends, mode="lines", line={"color": "#8a93a3", "width": 1, "dash": "dot"},
                       name="equal", hoverinfo="skip")  # fmt: skip
    for index, network in enumerate(dict.fromkeys(r.network for r in results)):
        mine = [(r, a, b) for r, a, b in pairs if r.network == network]
        figure.add_scatter(
            x=[1e3 * a for _, a, _ in mine],
            y=[1e3 * b for *_, b in mine],
            mode="markers",
            name=network,
            text=[_label(r) for r, *_ in mine],
            marker={"color": PALETTE[index], "symbol": SYMBOLS[index], "size": 9},
            hovertemplate="%{text}<br>predicted %{x:.3g} ms<br>measured %{y:.3g} ms<extra></extra>",
        )
    axis = page.log_axis(ends, "{:g}".format)
    figure.update_xaxes(title="predicted, ms", **axis)
    figure.update_yaxes(title="measured, ms", **axis)
    return page.chart(figure, identity="scatter", title="Step time",
                      caption="Below the dotted line the step was faster than predicted.", height=380)  # fmt: skip


def _error_chart(results: Sequence[Result]) -> Html:
    import plotly.graph_objects as go

    figure = go.Figure()
    groups = {"a core for each process": [r for r in results if r.processes <= 2],
              "cores shared": [r for r in results if r.processes > 2]}  # fmt: skip
    for index, (name, members) in enumerate(groups.items()):
        errors = [(r, 100 * r.time_error) for r in members if r.time_error is not None]
        if errors:
            figure.add_bar(
                y=[_label(r) for r, _ in errors],
                x=[error for _, error in errors],
                orientation="h",
                name=name,
                marker={"color": PALETTE[index]},
                hovertemplate="%{y}: %{x:+.1f} %<extra></extra>",
            )
    figure.update_xaxes(title="error, %", zeroline=True, zerolinecolor="#8a93a3")
    figure.update_yaxes(autorange="reversed", tickfont={"size": 11})
    caption = "Predicted over measured step time, less one: to the left the prediction was too low."
    height = 120 + 22 * len(results)
    return page.chart(figure, identity="errors", title="Error of the step time", caption=caption, height=height)


def _overhead_chart(results: Sequence[Result]) -> tuple[Html]:
    import plotly.graph_objects as go

    rows = [(r, 100 * r.overhead) for r in results if r.overhead is not None]
    figure = go.Figure()
    figure.add_bar(
        y=[f"{_label(r)} / {r.by_hand}" for r, _ in rows],
        x=[overhead for _, overhead in rows],
        orientation="h",
        marker={"color": PALETTE[0]},
        error_x={
            "array": [100 * max(r.overhead_rounds) - overhead for r, overhead in rows],
            "arrayminus": [overhead - 100 * min(r.overhead_rounds) for r, overhead in rows],
            "color": "#8a93a3",
            "thickness": 1,
            "width": 4,
        },
        customdata=[(_seconds(r.beside_by_hand_step_time_s), _seconds(r.by_hand_step_time_s)) for r, _ in rows],
        hovertemplate="%{y}: %{x:+.1f} %<br>plan %{customdata[0]}, by hand %{customdata[1]}<extra></extra>",
        showlegend=False,
    )
    figure.add_vline(x=100 * OVERHEAD_AIM, line={"color": "#8a93a3", "width": 1, "dash": "dot"}, annotation_text="aim")
    figure.update_xaxes(title="longer than by hand, %", zeroline=True, zerolinecolor="#8a93a3")
    figure.update_yaxes(autorange="reversed", tickfont={"size": 11})
    caption = (
        "The same network, data, seed, optimizer and parallelism, in the same processes, in turns of some steps. The "
        "median round counts; whiskers reach from the lowest to the highest. Left of 0 plans win."
    )
    return (page.chart(figure, identity="overhead", title="Plans beside PyTorch written by hand", caption=caption,
                       height=140 + 30 * len(rows)),)  # fmt: skip


def _table(results: Sequence[Result]) -> Html:
    columns = ["network", "processes", "plan", "predicted", "measured", "error", "machine's speed", "scaled error",
               "memory", "measured",
               "error", "in turns", "by hand", "overhead"]  # fmt: skip
    caption = (
        "All plans; in brackets the middle 80 % of the steps, and of overheads the lowest and highest round. In turns "
        "with the same by hand a plan takes another time than when it runs alone."
    )
    return page.table(columns, [_row(result) for result in results], caption=caption, numbers=(1, *range(3, 14)),
                      close=True)  # fmt: skip


def _row(result: Result) -> list[Cell]:
    if result.error:
        failed = Html(f'<span class="wrap bad">{page.escape(result.error)}</span>')
        return [result.network, str(result.processes), result.plan, failed, *[""] * 10]
    measured = seconds_text(result.measured_step_time_s or 0.0)
    return [
        result.network,
        str(result.processes),
        result.plan,
        _seconds(result.predicted_step_time_s),
        f"{measured} ({interval_text(result.measured_p10_s or 0.0, result.measured_p90_s or 0.0)})",
        _percent(result.time_error),
        "" if result.machine_speed is None else f"{result.machine_speed:.2f}",
        _percent(result.time_error_at_this_speed),
        _bytes(result.predicted_peak_memory_bytes),
        _bytes(result.measured_peak_memory_bytes),
        _percent(result.memory_error),
        *_beside_by_hand(result),
    ]


def _beside_by_hand(result: Result) -> tuple[Cell, Cell, Cell]:
    """Plan and by hand in turns, and the overhead with its lowest and highest round."""
    if result.by_hand_error:
        return "", Html(f'<span class="wrap bad">{page.escape(result.by_hand_error)}</span>'), ""
    if result.overhead is None:
        return "", "", ""
    low, high = (f"{100 * rounds:+.0f}" for rounds in (min(result.overhead_rounds), max(result.overhead_rounds)))
    return (
        _seconds(result.beside_by_hand_step_time_s),
        _seconds(result.by_hand_step_time_s),
        f"{_percent(result.overhead)} ({low} to {high})",
    )


def _all_runs(results: Sequence[Result]) -> Html:
    """Every run of the plans that ran more than once, in their order."""
    rows: list[list[Cell]] = []
    for result in results:
        for number, run in enumerate(result.attempts if len(result.attempts) > 1 else (), 1):
            measured, predicted = run["measured_step_time_s"], run["predicted_step_time_s"]
            rows.append(
                [
                    _label(result),
                    str(number),
                    _seconds(predicted),
                    _seconds(measured),
                    _percent(error_of(predicted, measured)),
                    *("" if run[name] is None else f"{run[name]:.2f}" for name in ("machine_speed", "others_share")),
                ]
            )
    return page.table(["plan", "run", "predicted", "measured", "error", "machine's speed", "other programs"], rows,
                      caption="All runs of plans that ran more than once; their means count",
                      numbers=range(1, 7), close=True)  # fmt: skip


def _reasons(results: Sequence[Result]) -> Html:
    """For every class of work the share of all steps' time by which it was off, by network."""
    networks = list(dict.fromkeys(r.network for r in results))
    sums: dict[tuple[str, str], dict[str, list[float]]] = {}
    for result in results:
        whole = sum(row["measured_s"] for row in result.errors)
        for row in result.errors:
            name = str(row["name"]).split(" on ")[0]
            # Where each process should have a core, other programs took what it had to wait for one.
            taken = row["without_core_s"] if result.processes <= OWN_CORES else 0.0
            off = row["measured_s"] - row["predicted_s"] - taken
            for key, seconds in (((str(row["kind"]), name), off), (("rest", "without a core: other programs"), taken)):
                sums.setdefault(key, {}).setdefault(result.network, []).append(seconds / whole if whole else 0.0)
    counts = {network: sum(bool(r.errors) for r in results if r.network == network) for network in networks}
    rows: list[list[Cell]] = []
    for (kind, name), by_network in sums.items():
        shares = [sum(by_network.get(network, ())) / max(counts[network], 1) for network in networks]
        if max(map(abs, shares), default=0.0) >= LEAST_SHARE:
            rows.append([name, kind, *(f"{100 * share:+.1f} %" for share in shares)])
    return page.table(["class of work", "", *networks], rows, numbers=range(2, 2 + len(networks)),
                      caption="Measured less predicted, in parts of the measured step: the mean over a network's "
                      "plans")  # fmt: skip


def _list(title: str, values: dict[str, float], unit: str) -> Html:
    rows: list[list[Cell]] = [
        [name, f"{100 * value:.1f} %" if unit else f"{value:.2f}"] for name, value in values.items()
    ]
    return page.table(["plans of", ""], rows, caption=title, numbers=(1,))


def _seconds(value: float | None) -> str:
    return "" if value is None else seconds_text(value)


def _bytes(value: int | None) -> str:
    return "" if value is None else bytes_text(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"
