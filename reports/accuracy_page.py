"""The accuracy report: predictions beside measurements, each figure by two fits, and what each figure aims at."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from planner.published.metrics import Accuracy, AccuracyResult, Metrics, ScoredRow, metrics_of_rows
from planner.published.predictions import (
    ADAPTERS,
    ASCEND,
    BY_LAYERS_ALONE,
    CONVOLUTIONAL,
    DOUBTS,
    ELSEWHERE,
    EXPERTS,
    FSDP,
    IN_PART,
    LOW_PRECISION,
    TRANSFORMERS,
    prediction_lines,
)
from reports import accuracy_plots, page
from reports.accuracy_aims import AIMS, ROOFLINE, UTILISATION, Aim, baseline_errors, metrics_of
from reports.accuracy_outliers import memory_outliers, some, time_outliers, wrapped
from reports.page import Cell, Html
from simulator.quantities import percent_text
from simulator.whole_file import write_whole

LEFT_OUT, FITTED = "each source left out of the fit", "fitted on everything"
SHORT = {LEFT_OUT: "left out", FITTED: "on everything"}
GROUPS = (
    TRANSFORMERS,
    IN_PART,
    EXPERTS,
    LOW_PRECISION,
    ADAPTERS,
    ASCEND,
    CONVOLUTIONAL,
    BY_LAYERS_ALONE,
    FSDP,
    ELSEWHERE,
)
COUNTS = ("timed", "memory_rows", "oom_rows", "workloads")
NAMES = r"'[^']*'|(?<=no hardware profile for ).*|^.{1,80}?(?= has .* not modelled)"  # what makes a reason a row's own
LABELS = ("calibrated", "interpolated", "extrapolated")
MAX_REASONS = 40
HEADINGS = (
    ("", ("source", "predicted")),
    (
        "step time: errors, bias, share inside the interval",
        ("n", "mean", "median", "p90", "max", "bias", "inside"),
    ),
    ("memory error", ("n", "mean", "median")),
    ("out of memory", ("n", "recall", "precision")),
    ("choosing a plan", ("n", "τ", "regret")),
)


def write_accuracy_report(folder: str | Path, result: AccuracyResult, *, command: str, date: str) -> Path:
    """Write ``index.html`` into `folder`, the same figures as ``metrics.json``, and ``predictions.csv``.

    None of them holds a measured value of a row; pictures and figures of groups are what remains of them.

    Parameters
    ----------
    folder
        Made where it does not exist.
    result
        The same rows predicted by both fits.
    command, date
        What made the report, and when; nothing else depends on the time.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    document = json.dumps(accuracy_document(result, command=command, date=date), indent=2, ensure_ascii=False)
    write_whole(target / "metrics.json", document + "\n")
    write_whole(target / "predictions.csv", "".join(prediction_lines([_anywhere(row) for row in result.fitted.rows])))
    return write_whole(target / "index.html", accuracy_page(result, command=command, date=date))


def _anywhere(row: ScoredRow) -> ScoredRow:
    """The row for a report, which is read on other machines: its reason names the file without its folder."""
    return replace(row, reason=re.sub(rf"\S*/(?={re.escape(row.file)})", "", row.reason)) if row.file else row


def accuracy_document(result: AccuracyResult, *, command: str, date: str) -> dict[str, object]:
    """The figures of the report for other programs."""
    fits = {"fitted_on_everything": result.fitted, "leave_one_source_out": result.left_out}
    return {
        "command": command,
        "date": date,
        **{
            name: None if accuracy is None else _accuracy_document(accuracy, left_out=accuracy is result.left_out)
            for name, accuracy in fits.items()
        },
    }


def _accuracy_document(accuracy: Accuracy, *, left_out: bool) -> dict[str, object]:
    def figures(metrics: Metrics) -> dict[str, object]:
        return {"coverage": metrics.coverage, **asdict(metrics)}

    return {
        "overall": figures(accuracy.overall),
        "transformers": figures(accuracy.transformers),
        "by_group": {name: figures(metrics) for name, metrics in accuracy.by_group.items()},
        "by_source": {name: figures(metrics) for name, metrics in accuracy.by_source.items()},
        "baselines": baseline_errors(accuracy.rows, left_out=left_out),
    }


def accuracy_page(result: AccuracyResult, *, command: str, date: str) -> str:
    """The page as text."""
    fits = _fits(result)
    judged = fits[0][1]
    timed = judged.overall.timed
    both = (
        f"Every figure is given twice: with {LEFT_OUT} (large; the source is predicted by a fit that never saw it) and "
        f"{FITTED} (small)."
        if len(fits) > 1
        else f"One fit only: {fits[0][0]}."
    )
    lead = (
        f"{judged.overall.rows:,} published training runs from {len(judged.by_source)} sources, predicted from their "
        f"configuration alone; {timed:,} of them with a measured step time. {both}"
    )
    parts = [
        page.paragraph(lead, lead=True),
        page.cards(_cards(fits), four=True),
        page.heading("Against the aims"),
        _aims(fits),
        _baselines(*fits[0]),
        page.heading("Step time"),
        *_time_pictures(fits),
        page.heading("Memory, and what the labels are worth"),
        page.grid(*_other_pictures(judged)),
        page.heading("By source"),
        _sources(fits, by_group=False),
        page.heading("By kind of run"),
        _sources(fits, by_group=True),
        page.heading("What the predictions do not explain"),
        *time_outliers(judged.rows),
        memory_outliers(judged.rows),
        page.heading("Rows without a prediction"),
        _skipped(judged),
        page.heading("How this page was made"),
        page.code(command),
        page.paragraph(
            f"On {date}. The measurements themselves are not part of this page: figures of groups, relative errors "
            "and pictures are. Beside it, metrics.json holds the figures for other programs and predictions.csv what "
            "`meshwright validate --out` writes: what the shipped coefficients predict for each row."
        ),
    ]
    return page.page(
        "Accuracy: predicted beside measured",
        parts,
        footer="Made by Meshwright. Errors are predicted / measured − 1; bias is their mean, so that + means predicted "
        "too slow.",
        interactive=False,
    )


def _fits(result: AccuracyResult) -> list[tuple[str, Accuracy]]:
    """The fits by name, the one that counts first."""
    fitted = [(FITTED, result.fitted)]
    return fitted if result.left_out is None else [(LEFT_OUT, result.left_out), *fitted]


def _cards(fits: Sequence[tuple[str, Accuracy]]) -> list[tuple[str, str, str]]:
    metrics = [accuracy.overall for _, accuracy in fits]
    names = (
        ("Time, mean error", "time_mean"),
        ("Time, median error", "time_median"),
        ("Time, bias", "time_bias"),
        ("Inside the 90 % interval", "inside_interval"),
        ("Memory, mean error", "memory_mean"),
        ("Out of memory, recall", "oom_recall"),
        ("Regret of the plan ranked first", "regret"),
        ("Rows with a prediction", "coverage"),
    )
    entries = []
    for name, figure in names:
        first, *others = (_figure(one, figure) for one in metrics)
        entries.append((name, first or "–", f"{others[0] or '–'} {FITTED}" if others else FITTED))
    return entries


def _aims(fits: Sequence[tuple[str, Accuracy]]) -> Html:
    lines: list[list[Cell]] = []
    for aim in AIMS:
        found = [metrics_of(accuracy, aim.group) for _, accuracy in fits]
        values: list[Cell] = [_figure(metrics, aim.figure) if metrics else "" for metrics in found]
        lines.append([aim.name, aim.group, _aim_text(aim), _verdict(aim.met(found[0]) if found[0] else None), *values])
    columns = ["figure", "rows", "aim", "", *(SHORT[name] for name, _ in fits)]
    numbers = (2, *range(4, 4 + len(fits)))
    return page.table(columns, lines, caption=f"Judged: {fits[0][0]}", numbers=numbers)


def _baselines(name: str, judged: Accuracy) -> Html:
    """Errors of the naive baselines on the same rows."""
    naive = baseline_errors(judged.rows, left_out=name == LEFT_OUT)
    lines: list[list[Cell]] = []
    for title, group in (("all rows", ""), *((one, one) for one in GROUPS)):
        metrics = judged.by_group.get(group) if group else judged.overall
        if metrics is not None and metrics.time_mean is not None and group in naive[ROOFLINE]:
            others = (percent_text(naive[baseline][group]) for baseline in (UTILISATION, ROOFLINE))
            lines.append([title, f"{metrics.timed:,}", percent_text(metrics.time_mean), *others])
    columns = ["rows", "n", "plans", UTILISATION, ROOFLINE]
    caption = f"Mean error of step times beside naive baselines: {name}"
    return page.table(columns, lines, caption=caption, numbers=(1, 2, 3, 4))


def _verdict(met: bool | None) -> Html:
    if met is None:
        return Html('<span class="soft">no row tells</span>')
    return Html('<span class="good">✓ met</span>' if met else '<span class="bad">✗ missed</span>')


def _aim_text(aim: Aim) -> str:
    def text(value: float) -> str:
        return f"{100 * value:g} %"

    if aim.low is not None and aim.high is not None:
        return f"±{text(aim.high)}" if aim.low == -aim.high else f"{text(aim.low)} to {text(aim.high)}"
    return f"at most {text(aim.high)}" if aim.high is not None else f"at least {text(aim.low or 0.0)}"


def _time_pictures(fits: Sequence[tuple[str, Accuracy]]) -> Iterator[Html]:
    scatters = [
        page.picture(
            accuracy_plots.time_scatter(accuracy, f"time-{index}"),
            title=f"Step time: {name}",
            caption="One mark a row, by device. Grey line: predicted = measured. Between the blue lines: where "
            "the measurement should lie for a prediction, nine times of ten (median interval of rows of like time).",
        )
        for index, (name, accuracy) in enumerate(fits)
    ]
    histogram = page.picture(
        accuracy_plots.error_histogram(fits, "histogram"),
        title="How often which error",
        caption="Shaded: within 10 %. Rows beyond 60 % are counted at the edge.",
    )
    yield page.grid(*scatters, *([histogram] if len(fits) == 1 else []))
    if len(fits) > 1:
        devices = accuracy_plots.devices_scatter(fits[0][1], "devices")
        yield page.grid(histogram, _devices_picture(devices))
    yield page.picture(
        accuracy_plots.source_boxes(fits, "sources"),
        title="By source",
        caption="Tick: median. Bar: middle half of the rows. Line: middle eight tenths. Beside the name: rows with a "
        "measured time. Shaded: within 10 %. Best source on top.",
        wide=True,
    )


def _devices_picture(svg: str) -> Html:
    return page.picture(
        svg,
        title="Error by the number of devices",
        caption="One mark a row; shaded: within 10 %. A slope would say that communication is misjudged.",
    )


def _other_pictures(judged: Accuracy) -> Iterator[Html]:
    memory = page.picture(
        accuracy_plots.memory_scatter(judged, "memory"),
        title="Peak memory of a device",
        caption="One mark a row whose memory was measured. Line: predicted = measured. What memory takes follows from "
        "plans and from what software keeps, so that it is the same with a source left out.",
    )
    yield Html(f"<div>{memory.text}{_labels(judged).text}</div>")
    yield Html(f"<div>{_memory_doubts(judged).text}{_outcomes(judged).text}</div>")


def _memory_doubts(judged: Accuracy) -> Html:
    """Memory with and without the rows that leave in doubt what was measured."""
    measured = [row for row in judged.rows if row.memory_error is not None]
    parts = [("all rows", measured), ("of these: described in full", [row for row in measured if not row.memory_doubt])]
    parts += [(doubt, [row for row in measured if row.memory_doubt == doubt]) for doubt in DOUBTS]
    lines: list[list[Cell]] = []
    for name, rows in parts:
        metrics = metrics_of_rows(rows)
        figures = (_figure(metrics, one) for one in ("memory_rows", "memory_mean", "memory_median", "memory_bias"))
        lines.append([wrapped(name, narrow=True), *figures])
    return page.table(
        ["rows", "n", "mean error", "median", "bias"],
        lines,
        caption="Peak memory by what the row says of it; every row counts in the figures above",
        numbers=(1, 2, 3, 4),
    )


def _outcomes(judged: Accuracy) -> Html:
    counts = {
        (measured, predicted): sum(
            row.measured_outcome == measured and row.predicted_outcome == predicted for row in judged.rows
        )
        for measured in ("oom", "ok")
        for predicted in ("oom", "ok")
    }
    names = {"oom": "ran out of memory", "ok": "fitted"}
    lines: list[list[Cell]] = [
        [names[measured], *(f"{counts[measured, predicted]:,}" for predicted in ("oom", "ok"))]
        for measured in ("oom", "ok")
    ]
    return page.table(
        ["measured", "predicted: out", "predicted: fits"],
        lines,
        caption="Does it fit? Rows whose outcome was stated and predicted",
        numbers=(1, 2),
    )


def _labels(judged: Accuracy) -> Html:
    lines: list[list[Cell]] = []
    for label in LABELS:
        metrics = metrics_of_rows([row for row in judged.rows if row.label == label])
        figures = (_figure(metrics, name) for name in ("timed", "time_mean", "time_bias", "inside_interval"))
        lines.append([label, *figures])
    return page.table(
        ["label", "n", "mean error", "bias", "inside"],
        lines,
        caption="Step times by the label of the prediction",
        numbers=(1, 2, 3, 4),
    )


def _sources(fits: Sequence[tuple[str, Accuracy]], *, by_group: bool) -> Html:
    """Figures by source or by group, the first fit large and the second beneath it."""
    tables = [accuracy.by_group if by_group else accuracy.by_source for _, accuracy in fits]
    names = [name for name in GROUPS if name in tables[0]] if by_group else list(tables[0])
    names.sort(key=lambda name: not tables[0][name].predicted)  # nothing to see last, else as in the files
    lines = (
        []
        if by_group
        else [_line("all rows", [accuracy.overall for _, accuracy in fits], _covered, kind=' class="total"')]
    )
    # Rows without a prediction have no kind, so the share that is predicted says nothing there.
    rows = _counted if by_group else _covered
    lines += [_line(name, [table[name] for table in tables if name in table], rows) for name in names]
    groups = "".join(
        f'<th scope="colgroup" colspan="{len(columns)}"{_group_class(title)}>{page.escape(title)}</th>'
        for title, columns in HEADINGS
    )
    heads = "".join(
        f'<th scope="col"{"" if name == "source" else _number_class(index, title)}>{_first(name, by_group)}</th>'
        for title, columns in HEADINGS
        for index, name in enumerate(columns)
    )
    second = f"; small: {fits[1][0]}" if len(fits) > 1 else ""
    caption = f"{'Kinds of runs' if by_group else 'Sources'}, {fits[0][0]}{second}"
    body = "\n".join(lines)
    return Html(
        f'<div class="table tight" role="region" aria-label="{page.escape(caption)}" tabindex="0"><table>'
        f"<caption>{page.escape(caption)}</caption>\n<thead><tr>{groups}</tr><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _first(name: str, by_group: bool) -> str:
    names = {"source": "kind of run", "predicted": "rows"} if by_group else {}
    return names.get(name, name)


def _group_class(title: str) -> str:
    return ' class="group"' if title else ""


def _number_class(index: int, title: str) -> str:
    return ' class="number group"' if title and index == 0 else ' class="number"'


def _covered(metrics: Metrics) -> str:
    return f'{percent_text(metrics.coverage)}<br><span class="soft">of {metrics.rows:,}</span>'


def _counted(metrics: Metrics) -> str:
    return f"{metrics.rows:,}"


def _line(name: str, metrics: Sequence[Metrics], rows: Callable[[Metrics], str], kind: str = "") -> str:
    breakable = re.sub(r"([/_])", r"\1<wbr>", page.escape(name))
    cells = [f'<th scope="row">{breakable}</th>', f'<td class="number">{rows(metrics[0])}</td>']
    for title, figures in (
        ("t", ("timed", "time_mean", "time_median", "time_p90", "time_max", "time_bias", "inside_interval")),
        ("m", ("memory_rows", "memory_mean", "memory_median")),
        ("o", ("oom_rows", "oom_recall", "oom_precision")),
        ("c", ("workloads", "kendall_tau", "regret")),
    ):
        cells += [
            f"<td{_number_class(index, title)}>{_pair(metrics, figure)}</td>" for index, figure in enumerate(figures)
        ]
    return f"<tr{kind}>{''.join(cells)}</tr>"


def _pair(metrics: Sequence[Metrics], figure: str) -> str:
    first, *others = (_figure(one, figure) for one in metrics)
    if figure in COUNTS or not others or not others[0]:
        return page.escape(first)
    return f'{page.escape(first)}<br><span class="soft">{page.escape(others[0])}</span>'


def _figure(metrics: Metrics, figure: str) -> str:
    """A figure as text; nothing where no row tells."""
    value = getattr(metrics, figure)
    if value is None or (figure in COUNTS and not value):
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if figure == "kendall_tau":
        return f"{value:.2f}".replace("-", "−")
    if figure in ("time_bias", "memory_bias"):
        return f"{100 * value:+.1f} %".replace("-", "−")
    return percent_text(value)


def _skipped(judged: Accuracy) -> Html:
    groups: dict[str, list[ScoredRow]] = {}
    for row in judged.rows:
        if row.status != "ok":
            groups.setdefault(_plain(row.reason) or "no reason given", []).append(row)
    if not groups:
        return page.paragraph("Every row has a prediction.")
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    lines: list[list[Cell]] = [
        [wrapped(reason), f"{len(rows):,}", wrapped(_named(rows)), wrapped(some([row.file for row in rows], 3))]
        for reason, rows in ordered[:MAX_REASONS]
    ]
    rest = sum(len(rows) for _, rows in ordered[MAX_REASONS:])
    if rest:
        lines.append([f"{len(ordered) - MAX_REASONS} other reasons", f"{rest:,}", "", ""])
    columns = ["why", "rows", "which", "files"]
    return page.table(columns, lines, caption="Rows by what stopped their prediction", numbers=(1,))


def _plain(reason: str) -> str:
    """A reason without the places and names that make it one row's own."""
    text = re.sub(r"^\S+\.csv, line \d+, ", "", reason)
    return re.sub(r"\b\d[\d.,]*\b", "N", re.sub(NAMES, "…", text))[:160]


def _named(rows: Sequence[ScoredRow]) -> str:
    """The names that `_plain` takes out of the reasons."""
    return some([name.strip("'") for row in rows for name in re.findall(NAMES, row.reason)], 8)
