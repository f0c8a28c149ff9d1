"""What broke the promise once does not again, and mutated inputs keep it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzzing.harness import Outcome, corpus, fuzz, tried
from tests.fuzzing.parsers import PARSERS


@pytest.mark.parametrize("name", PARSERS)
def test_what_broke_once_is_refused_or_read(name: str, tmp_path: Path) -> None:
    for content in [*corpus(name), b"", b"\0", b"\xff\xfe", b"{}", b"[]", b"null", b"1" * 5000]:
        assert tried(PARSERS[name], tmp_path, content, Outcome()) is None, content[:500]


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("measurements", b"0F0,"),
        ("table", b"1,"),
        ("exchange megatron", b"$(("),
        ("exchange megatron", b"${a:-"),
        ("exchange megatron", b"A=$A$A\n"),
        ("exchange torchtitan", b"--training.a=$((9*9)) "),
        ("exchange bridge", b"a."),
        ("exchange bridge", b"a=[ "),
    ],
)
def test_what_was_read_in_quadratic_time_is_read_in_time(name: str, piece: bytes, tmp_path: Path) -> None:
    for head in (b"", b"A=xx\n"):
        content = head + piece * (65536 // len(piece))
        assert tried(PARSERS[name], tmp_path, content, Outcome()) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_mutated_inputs_are_refused_or_read(name: str) -> None:
    outcome = fuzz(name, 20_000, seconds=11)
    assert not outcome.broken
    assert outcome.tried >= 300
