"""What a sweep has planned so far, kept in a file beside its report until that is written.

Each line is one point: a JSON object with a key, a check and the point. The key is a digest of everything
the result depends on: the network's fingerprint, the numbers of the profile, the request and the code. A line is
written by one appending write, so that an interruption leaves whole lines and at most a part of a last one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.graph.cache import code_digest
from planner.what_if.rows import WhatIfRow, row_of
from simulator.errors import InputError
from simulator.input_file import FileKind
from simulator.profiles import load_profile

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from planner.graph.operator_graph import OperatorGraph
    from planner.planning.planning import PlanRequest, SearchResult

SUFFIX = ".partial.jsonl"
JOURNAL = FileKind(name="journal of a sweep", remedy="remove it or choose another --out", max_bytes=1 << 28)
Write = Callable[["PlanRequest", "OperatorGraph", WhatIfRow], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Rows by number of the sweep, and what to tell of them and of lines that are of no use."""

    rows: dict[int, WhatIfRow] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def journal_of(report: Path) -> Path | None:
    """The journal of a report; None for a report that is a pipe or a device."""
    if report.exists() and not report.is_file():
        return None
    target = report.resolve()
    return target.with_name(target.name + SUFFIX)


def discard(journal: Path) -> None:
    """Remove the journal; it may be gone already."""
    with _explained(journal):
        journal.unlink(missing_ok=True)


def read(journal: Path, requests: Sequence[PlanRequest], graphs: Sequence[OperatorGraph]) -> Kept:
    """Find the points of a sweep in a journal, each with its network; the last line of a point counts."""
    with _explained(journal):
        if not journal.exists():
            return Kept()
    lines = JOURNAL.read(journal).splitlines()
    points = enumerate(zip(requests, graphs, strict=True))
    numbers = {point_key(request, graph): number for number, (request, graph) in points}
    rows: dict[int, WhatIfRow] = {}
    damaged = other = 0
    for line in filter(None, lines):
        try:
            key, point = _parse(line)
            if key not in numbers:
                other += 1
                continue
            number = numbers[key]
            result = _results().validate_json(json.dumps(point["result"]), strict=False)
            rows[number] = row_of(requests[number], result, refused=point["refused"] is True)
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged += 1
    return Kept(rows=rows, notes=tuple(_notes(journal, len(rows), len(requests), damaged, other)))


def _notes(journal: Path, kept: int, points: int, damaged: int, other: int) -> Iterator[str]:
    if kept:
        yield f"{kept} of {points} points from the interrupted run (--fresh plans them anew)"
    for count, what in ((damaged, "damaged"), (other, "of another sweep, profile or version")):
        if count:
            yield f"{journal}: {'1 line is' if count == 1 else f'{count} lines are'} {what} and ignored"


@contextmanager
def writer(journal: Path | None) -> Iterator[Write]:
    """Append points to a journal; without one the function given does nothing."""
    if journal is None:
        yield lambda request, graph, row: None
        return
    with _explained(journal):
        number = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        if not _ends_a_line(number):
            os.write(number, b"\n")

        def write(request: PlanRequest, graph: OperatorGraph, row: WhatIfRow) -> None:
            with _explained(journal):
                line = _line(point_key(request, graph), row)
                if os.write(number, line) < len(line):
                    raise OSError("the disk is full")

        yield write
    finally:
        os.close(number)


def _ends_a_line(number: int) -> bool:
    size = os.fstat(number).st_size
    return size == 0 or os.pread(number, 1, size - 1) == b"\n"


def point_key(request: PlanRequest, graph: OperatorGraph) -> str:
    """Digest of everything that the result of a point depends on."""
    facts = {
        "request": asdict(request),
        "network": graph.fingerprint,
        "profile": load_profile(request.hardware).hash,
        "code": code_digest(),
    }
    return _digest(json.dumps(facts, sort_keys=True))


def _line(key: str, row: WhatIfRow) -> bytes:
    point = {
        "hardware": row.hardware,
        "devices": row.devices,
        "refused": row.refused,
        "result": _results().dump_python(row.result, mode="json"),
    }
    line = {"key": key, "check": _digest(json.dumps(point)), "point": point}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _parse(line: bytes) -> tuple[str, dict[str, Any]]:
    """Key and point of a line; ValueError, KeyError or TypeError where it is not whole."""
    document = json.loads(line)
    key, check, point = document["key"], document["check"], document["point"]
    if not isinstance(key, str) or not isinstance(point, dict) or check != _digest(json.dumps(point)):
        raise ValueError("a damaged line")
    return key, point


@lru_cache(maxsize=1)
def _results() -> TypeAdapter[SearchResult]:
    from pydantic import TypeAdapter

    from planner.planning.planning import SearchResult

    return TypeAdapter(SearchResult)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _explained(journal: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot use {str(journal)!r}, which keeps the points of the sweep until the report is written: "
            f"{error.strerror or error}; choose another --out"
        ) from error
