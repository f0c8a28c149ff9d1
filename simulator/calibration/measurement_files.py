"""Reading published measurements: CSV files whose columns and units are checked before anything is fitted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from simulator.errors import InputError
from simulator.input_file import FileKind

TABLE = FileKind(name="measurements", remedy="give a readable CSV file", max_bytes=1 << 28)
MOST_HEADER_BYTES = 10_000
"""Bytes of a header that is read: pandas compares each name with all others."""
LIMITS: Mapping[str, tuple[float, float]] = {
    "m": (1, 1e10),
    "n": (1, 1e10),
    "k": (1, 1e10),
    "groups": (1, 1e6),
    "batch": (1, 1e6),
    "seq_len": (1, 1e8),
    "n_heads": (1, 1e5),
    "n_kv_heads": (1, 1e5),
    "head_dim": (1, 1e4),
    "time_ms": (1e-6, 1e6),
    "tflops": (1e-6, 1e5),
    "tflops_computed": (0, 1e5),
    "mem_bandwidth_GBps": (1e-6, 1e6),
    "n_nodes": (1, 1e6),
    "n_accels": (1, 1e7),
    "size_bytes": (0, 1e14),
    "time_us": (1e-3, 1e10),
    "time_us_out_of_place": (1e-3, 1e10),
    "busbw_GBps_out_of_place": (0, 1e6),
    "samples_per_s": (1e-9, 1e12),
    "step_time_s": (1e-9, 1e9),
    "global_batch": (1e-9, 1e12),
}
"""Smallest and largest value of every numeric column, in the unit of its name."""


def measurements_folder(text: str | Path) -> Path:
    """Folder of measurements; InputError unless it holds ``operators/``."""
    folder = Path(text).expanduser()
    if not (folder / "operators").is_dir():
        raise InputError(
            f"{str(folder)!r} holds no folder operators/; give the folder of measurements whose operators/*.csv are "
            "timings of kernels and collectives"
        )
    return folder


def read_measurements(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Named columns of a CSV file; numbers are checked against `LIMITS`, empty cells are NaN or ''.

    The index counts rows from 0: row `i` stands in line ``i + 2`` of a file without line breaks in cells.

    Raises
    ------
    InputError
        Names file, line and column when the file cannot be read, lacks a column or holds a value that is no
        number or outside the limits of its unit.
    """
    try:
        stamp = path.stat().st_mtime_ns
        frame = _text(path, stamp)
    except (
        OSError,
        UnicodeDecodeError,
        pd.errors.ParserError,
        pd.errors.ParserWarning,
        pd.errors.EmptyDataError,
    ) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read as CSV: {reason}; give a readable UTF-8 file") from None
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise InputError(
            f"{path} line 1: column {missing[0]} is missing; the file has {', '.join(map(str, frame.columns))}: add it"
        )
    return pd.DataFrame({name: _column(path, frame, name) for name in columns})


def need(path: Path, frame: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise InputError for the first row of `frame` that has none of `columns`."""
    empty = frame[list(columns)].isna().all(axis=1)
    if empty.any():
        line, names = int(frame.index.to_numpy()[empty.to_numpy()][0]) + 2, " or ".join(columns)
        raise InputError(f"{path} line {line}, column {names}: the row has no number there; fill it in or drop the row")


def _column(path: Path, frame: pd.DataFrame, name: str) -> pd.Series[float] | pd.Series[str]:
    if name not in LIMITS:
        return frame[name]
    text = frame[name].str.strip()
    numbers = pd.to_numeric(text.where(text != "", None), errors="coerce").astype(float)
    low, high = LIMITS[name]
    wrong = ((text != "") & ~numbers.between(low, high)).to_numpy()
    if wrong.any():
        place = int(np.argmax(wrong))
        raise InputError(
            f"{path} line {place + 2}, column {name}: {text.iloc[place]!r} is no number from {low:g} to {high:g}; "
            "correct the value or its unit"
        )
    return numbers


@lru_cache(maxsize=16)
def _text(path: Path, stamp: int) -> pd.DataFrame:
    """Content of a file as text; `stamp` makes a changed file another one."""
    del stamp
    with TABLE.open(path) as stream:
        header = stream.readline(MOST_HEADER_BYTES + 1)
        if len(header) > MOST_HEADER_BYTES or header.count(b'"') % 2:
            raise InputError(f"{path} line 1 is no row of at most {MOST_HEADER_BYTES} bytes with names; {TABLE.remedy}")
        stream.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row is longer than the header
            return pd.read_csv(stream, dtype=str, keep_default_na=False, index_col=False)
