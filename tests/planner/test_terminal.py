"""What goes where: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
from io import StringIO

import pytest

from planner.cli.terminal import Terminal


class Screen(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(err: StringIO, *, quiet: bool = False) -> Terminal:
    """A terminal with a captured stdout."""
    return Terminal(json=False, quiet=quiet, out=StringIO(), err=err, width=80)


def test_progress_is_shown_on_terminals_only() -> None:
    for err, shown in ((StringIO(), False), (Screen(), True)):
        found = terminal(err)
        with found.counting("planning", 2) as advance:
            advance()
        with found.filling("measuring") as fill:
            fill(0.5, "kernels")
        assert ("planning" in err.getvalue()) is shown
        assert ("measuring" in err.getvalue()) is shown
        assert found.out.getvalue() == ""  # type: ignore[attr-defined]


def test_quiet_says_nothing() -> None:
    err = Screen()
    found = terminal(err, quiet=True)
    found.note("something")
    with found.working("planning") as say:
        say("lowering")
    assert err.getvalue() == ""


def test_without_a_terminal_what_begins_is_a_line() -> None:
    err = StringIO()
    with terminal(err).working("running") as say:
        say("lowering")
    assert err.getvalue() == "lowering\n"


def test_a_document_is_strict_json() -> None:
    found = terminal(StringIO())
    found.document({"name": "µ", "values": [1, 2.5, None]})
    assert json.loads(found.out.getvalue()) == {"name": "µ", "values": [1, 2.5, None]}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="not JSON compliant"):
        found.document({"value": float("nan")})
