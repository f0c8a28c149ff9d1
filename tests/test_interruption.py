"""Commands that are interrupted keep what `tests.interruption` says; its whole table takes an hour."""

from __future__ import annotations

import sys

import pytest

from tests.interruption import SIGNALS, Bench, Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc"),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("interruption"))


@pytest.mark.parametrize(("name", "target"), [(name, "command") for name in SIGNALS] + [("KILL", "other")])
def test_a_run_that_is_interrupted_ends(name: str, target: str, bench: Bench) -> None:
    assert bench.try_case(Case(command="execute", moment=0.4, signal=name, target=target)) == []
