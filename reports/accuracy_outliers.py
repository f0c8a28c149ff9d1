"""Rows that the predictions do not explain: of step times by likely cause, of memory by what their rows leave open."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from planner.published.metrics import ScoredRow
from planner.published.predictions import FUNCTIONAL
from reports import page
from reports.page import Cell, Html

SHORT_STEP_S = 0.1
FEW_ROWS = 4
_UNEXPLAINED = math.log(4.0)
"""Beyond, no property of hardware or software that rows share is left to explain it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a row is probably off: ``kind`` is the same for rows of like causes, ``words`` are the row's own."""

    kind: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A row, its relative error, and the likely cause."""

    row: ScoredRow
    error: float
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kin:
    """Signed log errors of a source and of each of its workloads."""

    source: np.ndarray
    workloads: dict[str, list[float]]


def outliers(rows: Sequence[ScoredRow], *, least: float = 0.25) -> list[Outlier]:
    """The rows whose time is off by more than `least` in either direction, worst first, ties by name.

    Errors count as logarithms, so that half and double are equally far off.
    """
    timed = [(row, _log_error(row)) for row in rows]
    found = [(row, error) for row, error in timed if abs(error) > math.log1p(least)]
    found.sort(key=lambda item: (-abs(item[1]), item[0].file, item[0].row_id))
    kin = _kin(rows)
    return [Outlier(row=row, error=math.expm1(error), cause=likely_cause(row, kin[row.source])) for row, error in found]


def likely_cause(row: ScoredRow, kin: _Kin) -> Cause:
    """A guess from the rows of the same source and of the same workload, and from what was assumed."""
    error = _log_error(row)
    sign = math.copysign(1.0, error)
    others = [other for other in kin.workloads.get(row.workload, []) if other != error] if row.workload else []
    if row.likely_cause:
        return Cause(kind="as the comparison says", words=row.likely_cause)
    if len(others) >= FEW_ROWS and abs(float(np.median(others))) < abs(error) / 3:
        return Cause(
            kind="other plans of its workload are predicted",
            words=f"the other {len(others)} plans of this workload are off by {_percent(float(np.median(others)))} in "
            "the median: this plan does something that is not modelled, or its run was disturbed",
        )
    if row.group == FUNCTIONAL:
        return Cause(
            kind="a functional test",
            words="a functional test of a small network: checks, logs and the host set its pace, which differs from "
            "machine to machine and from one software version to the next",
        )
    same = float(np.mean(np.sign(kin.source) == sign)) if kin.source.size else 0.0
    middle = float(np.median(kin.source)) if kin.source.size else 0.0
    if kin.source.size >= FEW_ROWS and same > 0.8 and abs(middle) > 0.1:
        return Cause(
            kind="its source is off as a whole",
            words=f"{100 * same:.0f} % of the {kin.source.size} rows of this source are off in the same direction "
            f"(median {_percent(middle)}): something its rows share, unstated or unknown to the fit",
        )
    if row.measured_step_time_s and row.measured_step_time_s < SHORT_STEP_S:
        return Cause(
            kind="a short step", words="a short step: the host, not the device, sets the pace, and hosts differ"
        )
    assumed = f"assumed: {row.reason}" if row.reason else ""
    if abs(error) > _UNEXPLAINED:
        doubt = "more than four times off: a time, a batch or a count of devices is probably not what its column says"
        return Cause(kind="more than four times off", words="; ".join(filter(None, (doubt, assumed))))
    if assumed:
        return Cause(kind="something had to be assumed", words=assumed)
    if row.label == "extrapolated":
        return Cause(kind="outside of what was fitted", words="outside of what was fitted")
    return Cause(kind="unexplained", words="unexplained")


def _kin(rows: Iterable[ScoredRow]) -> dict[str, _Kin]:
    errors: dict[str, list[float]] = {}
    workloads: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        errors.setdefault(row.source, [])
        if row.time_error is not None:
            errors[row.source].append(_log_error(row))
            workloads.setdefault(row.source, {}).setdefault(row.workload, []).append(_log_error(row))
    return {
        source: _Kin(source=np.array(found), workloads=workloads.get(source, {})) for source, found in errors.items()
    }


def _log_error(row: ScoredRow) -> float:
    error = row.time_error
    return 0.0 if error is None else math.log1p(max(error, -1 + 1e-12))


def _percent(log_error: float) -> str:
    return f"{100 * math.expm1(log_error):+.0f} %".replace("-", "−")


T = TypeVar("T")
MAX_GROUPS = 25
NAMED = 3
_HYPHENED = re.compile(r"[^\s,]+-[^\s,]+")
_WHOLE = r'<span class="whole">\g<0></span>'
_PER_CENT = "\N{NO-BREAK SPACE}%"
FAR_OFF = 0.1
"""Relative error of a peak of memory from which on a row is listed."""


def time_outliers(rows: Sequence[ScoredRow]) -> list[Html]:
    """All rows whose time is far off by likely cause, and the worst, those of one source, device and cause together."""
    found = outliers(rows)
    if not found:
        return [page.paragraph("No row is off by more than a quarter.")]
    # Functional tests are no surprise one by one: they would fill the list.
    single = [one for one in found if one.row.group != FUNCTIONAL]
    groups = list(_grouped(single, lambda one: (one.row.source, one.row.device, one.cause.words)))[:MAX_GROUPS]
    lines: list[list[Cell]] = [
        [
            _ids([one.row for one in ones]),
            wrapped(ones[0].row.source, narrow=True),
            wrapped(_devices(ones), narrow=True),
            _range([one.error for one in ones]),
            wrapped(ones[0].cause.words),
        ]
        for ones in groups
    ]
    shown = sum(len(ones) for ones in groups)
    worst = page.table(
        ["rows", "source", "devices", "error", "likely cause"],
        lines,
        caption=f"{shown:,} of them, those with the worst first, functional tests left aside; rows that have source, "
        "device and cause in common stand together",
        numbers=(3,),
    )
    return [_by_cause(found), worst]


def _by_cause(found: Sequence[Outlier]) -> Html:
    kinds = sorted(_grouped(found, lambda one: one.cause.kind), key=lambda ones: (-len(ones), ones[0].cause.kind))
    lines: list[list[Cell]] = [
        [wrapped(ones[0].cause.kind), f"{len(ones):,}", wrapped(some([one.row.source for one in ones], NAMED))]
        for ones in kinds
    ]
    return page.table(
        ["likely cause", "rows", "from"],
        lines,
        caption=f"The {len(found):,} rows whose time is off by more than a quarter, by likely cause",
        numbers=(1,),
    )


def memory_outliers(rows: Sequence[ScoredRow]) -> Html:
    """Rows whose memory is off by more than a tenth, by source and doubt, the largest part of the mean error first."""
    measured = [row for row in rows if row.memory_error is not None]
    far = [row for row in measured if abs(_memory_error(row)) > FAR_OFF]
    if not far:
        return page.paragraph("No row's memory is off by more than a tenth.")
    far.sort(key=lambda row: (-abs(_memory_error(row)), row.file, row.row_id))
    groups = sorted(
        _grouped(far, lambda row: (row.source, row.memory_doubt)),
        key=lambda ones: -sum(abs(_memory_error(row)) for row in ones),
    )
    lines: list[list[Cell]] = [
        [
            _ids(ones),
            wrapped(ones[0].source, narrow=True),
            _range([_memory_error(row) for row in ones]),
            f"{100 * sum(abs(_memory_error(row)) for row in ones) / len(measured):.2f}",
            wrapped(_memory_cause(ones[0])),
        ]
        for ones in groups
    ]
    return page.table(
        ["rows", "source", "error", "points of the mean", "likely cause"],
        lines,
        caption=f"The {len(far):,} rows whose memory is off by more than a tenth, worst first in each line",
        numbers=(2, 3),
    )


def _memory_cause(row: ScoredRow) -> str:
    """What its row leaves open; of a functional test, which states its shape and plan, what others do not see."""
    if row.memory_doubt:
        return row.memory_doubt
    if row.group == FUNCTIONAL:
        return "described in full; a functional test: versions, and flags of its script that its row leaves out"
    return "described in full: unexplained"


def _memory_error(row: ScoredRow) -> float:
    assert row.memory_error is not None
    return row.memory_error


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> Iterable[list[T]]:
    """Items of the same key together, in the order in which keys first come."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups.values()


def _devices(ones: Sequence[Outlier]) -> str:
    counts = sorted({one.row.devices for one in ones})
    return f"{ones[0].row.device or '?'} × {', '.join(f'{count:,}' for count in counts)}"


def _range(errors: Sequence[float]) -> str:
    """Errors from the lowest to the highest, one where they are the same."""
    low, high = (f"{100 * error:+.0f}".replace("-", "−") for error in (min(errors), max(errors)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def some(names: Sequence[str], limit: int) -> str:
    """The first of some names, and how many more there are.

    >>> some(["a", "b", "a", "c"], 2)
    'a, b and 1 more'
    """
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - limit} more" if len(distinct) > limit else ""
    return ", ".join(distinct[:limit]) + more


def _ids(rows: Sequence[ScoredRow]) -> Html:
    """The first rows by name; a name is not broken at its hyphen."""
    text = page.escape(some([row.row_id for row in rows], NAMED))
    return Html(f'<span class="wrap narrow">{_HYPHENED.sub(_WHOLE, text)}</span>')


def wrapped(text: str, *, narrow: bool = False) -> Html:
    """A cell whose text takes several lines, `narrow` ones where others need the room."""
    return Html(f'<span class="wrap{" narrow" if narrow else ""}">{page.escape(text).replace(" %", _PER_CENT)}</span>')
