"""Input files: whatever stands in one, reading it ends soon, in data or in the product's own error."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cli.config import PlanSettings, with_config
from planner.execution.checkpoints.checkpoint import RECORD, read_record
from planner.execution.data.formats import read_idx, read_tokens
from planner.networks import load_network
from planner.plans.file import read_strategy
from planner.plans.hints import load_hints
from planner.published.measurement_file import read_rows
from simulator.calibration.from_run import read_run
from simulator.calibration.measurement_files import read_measurements
from simulator.cluster_files import read_rank_table
from simulator.errors import InputError
from simulator.input_file import MAX_DEPTH, MAX_NODES, FileKind
from simulator.profiles import load_cluster, load_profile
from simulator.schedules import parse_schedule_csv

KIND = FileKind(name="note", remedy="write another", max_bytes=1000)


def record(path: Path) -> object:
    (path.parent / RECORD).symlink_to(path)
    return read_record(path.parent)


READERS: dict[str, Callable[[Path], object]] = {
    "profile": lambda path: load_profile(f"{path.parent}/{path.name}"),
    "matrix": lambda path: load_profile(f"dgx-a100@{path}"),
    "cluster": lambda path: load_cluster(str(path)),
    "rank table": lambda path: read_rank_table(str(path)),
    "config": lambda path: with_config(PlanSettings(), path),
    "hints": load_hints,
    "network": lambda path: load_network(f"hf:{path}"),
    "strategy": read_strategy,
    "schedule": parse_schedule_csv,
    "measurements": read_rows,
    "table": lambda path: read_measurements(path, ["m"]),
    "run": read_run,
    "record": record,
    "tokens": read_tokens,
    "images": read_idx,
}


@pytest.mark.parametrize("name", READERS)
def test_pipes_devices_folders_and_gigabytes_are_refused_at_once(name: str, tmp_path: Path) -> None:
    def pipe(path: Path) -> None:
        os.mkfifo(path)

    def device(path: Path) -> None:
        path.symlink_to("/dev/zero")

    def gigabyte(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(1 << 30)

    for make in (pipe, device, Path.mkdir, gigabyte):
        if make is gigabyte and name == "tokens":
            continue  # mapped, not read
        folder = tmp_path / make.__name__
        folder.mkdir()
        path = folder / "file.yaml"
        make(path)
        if make is Path.mkdir and name == "network":
            continue  # a folder with a config is what it takes
        began = time.process_time()
        with pytest.raises(InputError, match="file.yaml|checkpoint.json|not a regular file|are read"):
            READERS[name](path)
        assert time.process_time() - began < 2


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000, "\ud800", "~nobody-of-that-name/a", "/proc/self/mem"])
def test_paths_that_no_file_can_have(path: str) -> None:
    with pytest.raises(InputError, match=r"note .*; write another"):
        KIND.read(path)


def test_limit_and_remedy_are_stated(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 1000)
    assert len(KIND.read(path)) == 1000
    path.write_bytes(b"x" * 1001)
    with pytest.raises(InputError, match="has 1001 bytes, and at most 1000 are read; write another"):
        KIND.read(path)


def test_text_is_utf8_with_or_without_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes("\ufeff×".encode())
    assert KIND.text(path) == "×"
    path.write_bytes(b"ok\xff")
    with pytest.raises(InputError, match="byte 2 is not UTF-8"):
        KIND.text(path)


def bomb(layers: int) -> str:
    """Lists that name the one before nine times each."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, layers)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bomb(12), f"more than {MAX_NODES} values"),
        ("a: &a [*a]", "stands inside what it names"),
        ("[" * 30 + "]" * 30, f"deeper than {MAX_DEPTH}"),
        ("a: &a " + "[" * 15 + "]" * 15 + "\nb: " + "[" * 10 + "*a" + "]" * 10, f"deeper than {MAX_DEPTH}"),
        ("- a\n" * (MAX_NODES + 1), f"more than {MAX_NODES} values"),
        ("a: 0x" + "f" * 5000, "more than 40 digits"),
        ("a: " + "1:" * 2000 + "1", "more than 40 digits"),
        *((f"a: !!{tag}", "type of its tag") for tag in ('int ""', 'float ""', "bool x", "timestamp x")),
        ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ],
)
def test_hostile_yaml_is_refused(text: str, words: str) -> None:
    began = time.process_time()
    with pytest.raises(InputError, match=words):
        KIND.yaml(text, "it", strict=False)
    assert time.process_time() - began < 5


def test_aliases_stand_for_what_they_name_where_they_may() -> None:
    text = "base: &base {a: 1}\nother: {<<: *base, b: 2}\nthird: *base"
    assert KIND.yaml(text, "it", strict=False)["other"] == {"a": 1, "b": 2}
    with pytest.raises(InputError, match="line 2: aliases"):
        KIND.yaml(text, "it")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested deeper"),
        ("[" * 50 + "]" * 50, "nested deeper"),
        ('{"a": 1, "a": 2}', "'a' stands 2 times"),
        ("[1, 2,]", "line 1, column 6: a comma before a closing bracket"),
        ('{"a": 1 , }', "line 1, column 9: a comma before a closing bracket"),
        ("[1,, 2]", "line 1, column 4: Expecting value"),
        ("NaN", "NaN is no number"),
        ("1" * 41, "more than 40 digits"),
        ('"\\ud800"', "surrogates not allowed"),
    ],
)
def test_hostile_json_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        KIND.json(text, "it")


PLAIN = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.recursive(
        PLAIN | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_json_is_what_json_says(value: object) -> None:
    assert KIND.json(json.dumps(value), "it") == value
