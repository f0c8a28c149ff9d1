"""Measurement files: CSV with one training run a row, every number checked where it stands."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from simulator.errors import InputError
from simulator.input_file import FileKind

_CONFIGURATION = (
    "row_id", "source", "model", "arch", "n_layers", "hidden", "n_heads", "n_kv_heads", "ffn_hidden", "vocab",
    "seq_len", "image_size", "n_experts", "moe_topk", "params_b", "hw", "accelerator", "accel_mem_gb",
    "accels_per_node", "intra_node_link", "inter_node_link", "n_accels", "precision", "global_batch", "micro_batch",
    "per_accel_batch", "grad_accum", "tp", "pp", "vpp", "dp", "cp", "ep", "sp", "zero_fsdp", "recompute",
    "attention_impl", "framework", "other_flags",
)  # fmt: skip
_SPEED = ("step_time_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu_pct")
_COUNTS = (1, 1e7)
_BATCH = (1, 1e9)
_RANGES: Mapping[str, tuple[float, float]] = {
    "n_layers": (1, 1e5), "hidden": (1, 1e6), "n_heads": (1, 1e5), "n_kv_heads": (1, 1e5), "ffn_hidden": (1, 1e7),
    "vocab": (1, 1e8), "seq_len": (1, 1e8), "image_size": (1, 1e5), "n_experts": (0, 1e5), "moe_topk": (0, 1e5),
    "n_accels": _COUNTS, "accels_per_node": _COUNTS, "tp": _COUNTS, "pp": _COUNTS, "vpp": _COUNTS, "dp": _COUNTS,
    "cp": _COUNTS, "ep": _COUNTS, "etp": _COUNTS, "global_batch": _BATCH, "micro_batch": _BATCH,
    "per_accel_batch": _BATCH, "grad_accum": _BATCH,
}  # fmt: skip
"""Whole numbers and the values they may have."""
_REAL_RANGES: Mapping[str, tuple[float, float]] = {
    "params_b": (0, 1e6), "accel_mem_gb": (1, 1e4), "step_time_s": (1e-7, 1e7), "tokens_per_s_per_gpu": (0, 1e10),
    "samples_per_s": (0, 1e12), "tflops_per_gpu": (0, 1e5), "mfu_pct": (0, 150), "mem_gib_per_gpu": (0, 1e4),
}  # fmt: skip
_RESULTS = (
    "row_id", "step_time_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu_pct", "mem_gib_per_gpu",
    "outcome", "notes",
)  # fmt: skip
"""Columns that are no facts of a run that are known before it."""
MEASUREMENTS = FileKind(name="measurements", remedy="name a CSV file (docs/measurements.md)", max_bytes=64 << 20)
MOST_ROWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """One row: its texts by column, its numbers where they are stated, and what is wrong with it."""

    file: str
    line: int
    texts: Mapping[str, str]
    numbers: Mapping[str, float]
    fault: str = ""

    def text(self, column: str) -> str:
        """The stated text, or nothing."""
        return self.texts.get(column, "")

    def says(self, pattern: str, *columns: str) -> re.Match[str] | None:
        """Where `pattern` is found in the texts of the columns, one behind the other and in lower case."""
        return re.search(pattern, " ".join(map(self.text, columns)).lower())

    def number(self, column: str) -> float | None:
        """The stated number, or None."""
        return self.numbers.get(column)

    def whole(self, column: str) -> int | None:
        """The stated whole number, or None."""
        value = self.numbers.get(column)
        return None if value is None else int(value)

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Column and text of all that the row states of its run, and not of how it went."""
        return tuple(sorted((name, text) for name, text in self.texts.items() if text and name not in _RESULTS))


def read_rows(path: Path) -> list[FileRow]:
    """Read a file; InputError where it is no such file, a `FileRow.fault` where one row is wrong.

    Columns beyond the schema are ignored; a file whose rows state no speeds at all may be predicted as well.
    """
    reader = csv.reader(io.StringIO(MEASUREMENTS.text(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if not header:
            raise InputError(f"{path}: line 1 is empty; begin with the names of the columns (docs/measurements.md)")
        _check_header(path, header)
        filled = (cells for cells in reader if any(cell.strip() for cell in cells))
        rows = [_row(path, reader.line_num, header, cells) for cells in islice(filled, MOST_ROWS + 1)]
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not a CSV row ({error}); correct it") from error
    if len(rows) > MOST_ROWS:
        raise InputError(f"{path}: more than {MOST_ROWS} rows, which are as many as are read; split the file")
    if not rows:
        raise InputError(f"{path}: no row below the header; name a file that holds measurements")
    return rows


def _check_header(path: Path, header: list[str]) -> None:
    repeated = sorted(name for name, times in Counter(header).items() if name and times > 1)
    if repeated:
        raise InputError(f"{path}, line 1: column {repeated[0]!r} is there twice; keep one")
    missing = [name for name in _CONFIGURATION if name not in header]
    speeds = [name for name in _SPEED if name not in header]
    if len(speeds) < len(_SPEED):
        missing += speeds
    if missing:
        named = ", ".join(repr(name) for name in missing)
        what = f"column {named} is" if len(missing) == 1 else f"columns {named} are"
        raise InputError(
            f"{path}, line 1: {what} missing; add what is missing and leave unknown cells empty "
            "(docs/measurements.md lists the columns)"
        )


def _row(path: Path, line: int, header: list[str], cells: list[str]) -> FileRow:
    texts = {name: cell.strip() for name, cell in zip(header, cells, strict=False) if name}
    numbers: dict[str, float] = {}
    fault = ""
    if len(cells) != len(header):
        fault = f"{path}, line {line}: {len(cells)} cells, but the header names {len(header)} columns; correct the row"
    elif not texts["row_id"]:
        fault = f"{path}, line {line}, column row_id: is empty; every row needs a name"
    else:
        for column in (*_RANGES, *_REAL_RANGES):
            if texts.get(column):
                try:
                    numbers[column] = _number(column, texts[column])
                except ValueError as error:
                    fault = fault or f"{path}, line {line}, column {column}: {texts[column]!r} {error}"
    return FileRow(file=path.name, line=line, texts=texts, numbers=numbers, fault=fault)


def _number(column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number; write digits, or nothing where it is unknown") from None
    if not math.isfinite(value):
        raise ValueError("is not finite; leave the cell empty where it is unknown")
    whole = column in _RANGES
    low, high = _RANGES[column] if whole else _REAL_RANGES[column]
    if whole and value != int(value):
        raise ValueError("is not a whole number; correct it")
    if not low <= value <= high:
        raise ValueError(f"is out of range: {column} lies between {low:g} and {high:g}; correct the value or its unit")
    return value
