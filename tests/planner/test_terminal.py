"""What goes where: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
from io import BytesIO, StringIO, TextIOWrapper

import pytest

from planner.cli.terminal import Terminal, write_plainly
from simulator.errors import InputError


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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_an_encoding_lacks_become_plain(encoding: str) -> None:
    stream = TextIOWrapper(BytesIO(), encoding=encoding)
    write_plainly(stream)
    stream.write("2 × 3 → 6 α \udcff")
    stream.flush()
    written = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    plain = {"ascii": "2 x 3 -> 6 \\u03b1 ", "latin-1": "2 × 3 -> 6 \\u03b1 ", "utf-8": "2 × 3 → 6 α "}
    assert written == plain[encoding] + "\\udcff"


def test_documents_keep_their_text_in_any_encoding() -> None:
    stream = TextIOWrapper(BytesIO(), encoding="ascii")
    Terminal(json=True, quiet=False, out=stream, err=StringIO()).document({"name": "2 × 3"})
    stream.flush()
    assert json.loads(stream.buffer.getvalue()) == {"name": "2 × 3"}  # type: ignore[attr-defined]


def test_long_messages_keep_their_start_and_their_remedy() -> None:
    message = str(InputError("value " + "x" * 100_000 + "; use another"))
    assert len(message) <= 4000
    assert message.startswith("value x")
    assert message.endswith("; use another")
    assert str(InputError("short")) == "short"
