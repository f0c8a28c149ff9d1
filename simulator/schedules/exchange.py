"""Schedules as PyTorch writes them: a CSV file with a row for each rank and an action in each cell.

Cells are ``2F0`` (stage, kind, micro-batch), empty for a pause, or ``(2F1;0B0)OVERLAP_F_B``. Files of format
``compute_comms`` also hold sends, receives and, since torch 2.15, waits for sends, which must match and be able to run
in their order, and the messages of sharded parameters, which are left out.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from simulator.errors import InputError, ProgramError
from simulator.input_file import FileKind
from simulator.schedules.schedule import ActionKind, Schedule, check_schedule
from simulator.torch_versions import NEWEST_TRIED, written

_CELL = re.compile(r"([0-9]{1,18})([A-Z](?:[A-Z_]*[A-Z])?)([0-9]{0,18})")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_COMPUTED = {kind.letter: kind for kind in ActionKind}
_EXCHANGED = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B"}
_LEFT_OUT = {"UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"}
Key = tuple[str, int, int]
SCHEDULE = FileKind(name="schedule", remedy="give a CSV file in PyTorch's format", max_bytes=16 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """Actions that run together, or one send or receive."""

    keys: tuple[Key, ...]
    line: int
    column: int

    def __str__(self) -> str:
        return ";".join(f"{stage}{name}{micro_batch}" for name, stage, micro_batch in self.keys)


def parse_schedule_csv(path: Path) -> Schedule:
    """Read a schedule from a file in either of PyTorch's formats.

    Raises
    ------
    InputError
        When a cell is no action; with file, line and column.
    ProgramError
        When actions are missing, twice or on two ranks, or the schedule deadlocks; with ranks and actions.
    """
    rows = _rows(path, SCHEDULE.text(path))
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise InputError(f"{path} holds no action: write one row for each rank, with cells such as 0F0")
    schedule = _schedule(path, rows)
    check_schedule(schedule)
    if any(cell.keys[0][0] in _EXCHANGED for row in rows for cell in row):
        _check_exchanges(path, rows, schedule)
    return schedule


def format_schedule_csv(schedule: Schedule) -> str:
    """The text of a schedule in PyTorch's format ``compute_only``.

    The format has pairs of a forward and a backward pass only; other pairs are written one after the other.

    >>> from simulator.schedules import make_schedule
    >>> print(format_schedule_csv(make_schedule("1f1b", 2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    if schedule.chains > 1:
        raise InputError(
            f"{schedule.name} runs {schedule.chains} copies of the network, which PyTorch's format cannot say: "
            "use a schedule with one, such as dualpipe_v"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for begin, end in pairwise(schedule.offsets.tolist()):
        cells, index = [], begin
        while index < end:
            pair = schedule.paired[index] and schedule.kind[index : index + 2].tolist() == [0, 1]
            together = [schedule.action(index + place) for place in range(1 + pair)]
            cells.append(f"({together[0]};{together[1]})OVERLAP_F_B" if pair else str(together[0]))
            index += len(together)
        writer.writerow(cells)
    return text.getvalue()


def _rows(path: Path, text: str) -> list[list[_Cell]]:
    reader = csv.reader(io.StringIO(text))
    found = []
    try:
        for row in reader:
            cells = [_cell(path, cell.strip(), reader.line_num, column) for column, cell in enumerate(row, 1)]
            found.append([cell for cell in cells if cell is not None])
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from error
    return found


def _cell(path: Path, text: str, line: int, column: int) -> _Cell | None:
    pair = _PAIR.fullmatch(text)
    parts = pair.group(1).split(";") if pair else [text] if text else []
    matches = [_CELL.fullmatch(part.strip()) for part in parts]
    keys = []
    for match in matches:
        if match is None:
            break
        stage, name, micro_batch = match.groups()
        if name in _COMPUTED or name in _EXCHANGED:
            if not micro_batch or (pair and name not in _COMPUTED):
                break
            keys.append((name, int(stage), int(micro_batch)))
        elif name not in _LEFT_OUT:
            break
    else:
        if pair and len(keys) != 2:
            raise InputError(f"{path}, line {line}, column {column}: '{text}' does not hold two actions to overlap")
        return _Cell(keys=tuple(keys), line=line, column=column) if keys else None
    raise InputError(
        f"{path}, line {line}, column {column}: '{text}' is not an action that torch up to {written(NEWEST_TRIED)} "
        "writes: write stage, F, B, I or W, and micro-batch, such as 2F0, or (2F1;0B0)OVERLAP_F_B"
    )


def _schedule(path: Path, rows: list[list[_Cell]]) -> Schedule:
    computed = [[cell for cell in row if cell.keys[0][0] in _COMPUTED] for row in rows]
    empty = next((rank for rank, row in enumerate(computed) if not row), None)
    if empty is not None:
        raise InputError(f"{path}: rank {empty} computes nothing: give it actions or leave out its row")
    flat = [
        (rank, _COMPUTED[name], stage, micro_batch, place + 1 < len(cell.keys))
        for rank, row in enumerate(computed)
        for cell in row
        for place, (name, stage, micro_batch) in enumerate(cell.keys)
    ]
    rank, kind, stage, micro_batch, paired = (np.array(values) for values in zip(*flat, strict=True))
    _check_dense(path, "stage", stage.tolist())
    _check_dense(path, "micro-batch", micro_batch.tolist())
    stage_rank = np.zeros(stage.max() + 1, dtype=np.int32)
    stage_rank[stage[::-1]] = rank[::-1]
    return Schedule(
        name=path.name,
        ranks=len(computed),
        micro_batches=int(micro_batch.max()) + 1,
        stage_rank=stage_rank,
        offsets=np.searchsorted(rank, np.arange(len(computed) + 1)),
        kind=kind.astype(np.int32),
        stage=stage.astype(np.int32),
        micro_batch=micro_batch.astype(np.int32),
        paired=paired,
    )


def _check_dense(path: Path, what: str, numbers: list[int]) -> None:
    """Refuse gaps before arrays of that size are made: a slip such as 1F10000000 must not fill the memory."""
    present = set(numbers)
    gap = next((number for number in range(len(present)) if number not in present), None)
    if gap is not None:
        raise InputError(f"{path}: {what} {gap} is missing, but {what} {max(present)} is there: number them from 0")


def _check_exchanges(path: Path, rows: list[list[_Cell]], schedule: Schedule) -> None:
    """Run sends, receives and actions in rounds; a receive needs its send, a pass from elsewhere its receive."""
    rank_of = schedule.stage_rank.tolist()
    done: set[Key] = set()
    place = [0] * len(rows)
    advanced = True
    while advanced:
        advanced = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row) and not _missing(row[place[rank]], done, rank_of):
                done.update((("B", *key[1:]) if key[0] == "I" else key) for key in row[place[rank]].keys)
                place[rank] += 1
                advanced = True
    waits = [
        f"rank {rank} at {cell} (line {cell.line}, column {cell.column}) waits for "
        + " and ".join(_written(key) for key in _missing(cell, done, rank_of))
        for rank, row in enumerate(rows)
        for cell in row[place[rank] : place[rank] + 1]
    ]
    if waits:
        raise ProgramError(f"Deadlock in {path}: {'; '.join(waits[:8])}. Add the missing ones, or reorder")
    for name, stage, micro_batch in sorted(done):
        receive = (f"RECV_{name[-1]}", stage + (-1 if name[-1] == "B" else 1), micro_batch)
        if name.startswith("SEND") and receive not in done:
            raise ProgramError(
                f"{path}: rank {rank_of[stage]} runs {stage}{name}{micro_batch}, but no rank runs "
                f"{_written(receive)}: add it"
            )


def _written(key: Key) -> str:
    return f"{key[1]}{key[0]}{key[2]}"


def _missing(cell: _Cell, done: set[Key], rank_of: list[int]) -> list[Key]:
    needs: list[Key] = []
    for name, stage, micro_batch in cell.keys:
        if name.startswith("SEND"):
            needs.append((name[-1], stage, micro_batch))
        elif name.startswith("WAIT"):  # a send ends when the other side receives
            needs.append((f"RECV_{name[-1]}", stage + (-1 if name[-1] == "B" else 1), micro_batch))
        elif name.startswith("RECV"):
            needs.append((f"SEND_{name[-1]}", stage + (1 if name[-1] == "B" else -1), micro_batch))
        elif name != "W":
            source, received = (stage - 1, "RECV_F") if name == "F" else (stage + 1, "RECV_B")
            if 0 <= source < len(rank_of) and rank_of[source] != rank_of[stage]:
                needs.append((received, stage, micro_batch))
    return [key for key in needs if key not in done]
