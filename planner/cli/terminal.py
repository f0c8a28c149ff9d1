"""Where a command writes: results on stdout, everything else on stderr."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN = {
    **dict.fromkeys("−–—─━", "-"), **dict.fromkeys("│┃", "|"), **dict.fromkeys("“”", '"'), "’": "'", "×": "x", "·": ".",
    "•": "*", "µ": "u", "…": "...", "→": "->", "←": "<-", "≤": "<=", "≥": ">=", "±": "+-",
}  # fmt: skip
"""Replacements for characters that the terminal's encoding lacks; any other becomes its code."""
DEBUG_KEY = "planner.cli.debug"
LEAST_WIDTH = 80
"""Columns that every table fits. Narrower terminals wrap its lines, and nothing is cut."""
DOCUMENTS: list[str] = []
"""Documents that the running command has written, of which there is to be one."""


def write_plainly(stream: TextIO | None) -> None:
    """Let a stream write `PLAIN` characters for those that its encoding lacks, instead of failing."""
    codecs.register_error("plain", _plain)
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in lacking), error.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The streams of one command and how much it says.

    ``width`` counts columns; None takes those of the terminal, or `LEAST_WIDTH` in a pipe.
    """

    json: bool
    quiet: bool
    out: IO[str]
    err: IO[str]
    width: int | None = None
    debug: bool = False

    @classmethod
    def open(cls, *, as_json: bool, quiet: bool, debug: bool = False) -> Terminal:
        """The terminal of this process."""
        columns = os.environ.get("COLUMNS", "")
        return cls(
            json=as_json,
            quiet=quiet,
            out=sys.stdout or StringIO(),  # None where it is closed
            err=sys.stderr or StringIO(),
            width=int(columns) if columns.isdecimal() and int(columns) else None,
            debug=debug,
        )

    def console(self) -> Console:
        """A rich console on stdout."""
        from rich.console import Console

        width = self.width or (None if self.out.isatty() else LEAST_WIDTH)
        console = Console(file=self.out, width=width, highlight=False, soft_wrap=False)
        console.width = max(console.width, LEAST_WIDTH)
        return console

    def document(self, document: Mapping[str, Any]) -> None:
        """Write the one JSON document of ``--json``, in ASCII where the stream is not UTF-8."""
        utf8 = (getattr(self.out, "encoding", None) or "utf-8").lower().startswith("utf")
        text = json.dumps(document, indent=2, ensure_ascii=not utf8, allow_nan=False)
        self.out.write(text + "\n")
        DOCUMENTS.append(text)

    def show(self, *parts: RenderableType) -> None:
        """Print for people, without the blanks that rich fills lines with.

        It is written here, because rich would end with exit code 1 where nobody reads.
        """
        console = self.console()
        with console.capture() as captured:
            for part in parts:
                console.print(part)
        self.out.write("\n".join(line.rstrip() for line in captured.get().split("\n")))

    def result(
        self,
        document: Mapping[str, Any],
        line: str | None,
        report: Callable[[], Iterable[RenderableType]],
        out: Path | None = None,
    ) -> None:
        """Write a result as was asked: its document, one `line` (or none) for scripts, or the `report` for people.

        The document also goes to the file `out` where there is one.
        """
        if out is not None:
            from simulator.whole_file import write_whole

            write_whole(out, json.dumps(document, indent=2) + "\n")
        if self.json:
            self.document(document)
        elif self.quiet:
            if line is not None:
                self.line(line)
        else:
            self.show(*report())

    def line(self, text: str) -> None:
        """Write one plain line on stdout, never wrapped."""
        self.out.write(text + "\n")

    def note(self, text: str) -> None:
        """Say something beside the result, on stderr."""
        if not self.quiet:
            self.err.write(text + "\n")

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show a spinner with the elapsed time; the function given is told what begins.

        Without a terminal what begins is a line on stderr.
        """
        if self.quiet or not self.err.isatty():
            yield self.note
            return
        with self._progress(count=False) as progress:
            task = progress.add_task(what, total=None)
            yield lambda text: progress.update(task, description=f"{what}: {text}")

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a bar; the function given is to be called after each of `total` pieces."""
        if self.quiet or not self.err.isatty():
            yield lambda: None
            return
        with self._progress() as progress:
            task = progress.add_task(what, total=total)
            yield lambda: progress.advance(task)

    @contextmanager
    def filling(self, what: str) -> Iterator[Callable[[float, str], None]]:
        """Show a bar; the function given is told the share done, from 0 to 1, and what comes next."""
        if self.quiet or not self.err.isatty():
            yield lambda share, text: None
            return
        with self._progress(count=False) as progress:
            task = progress.add_task(what, total=1.0)
            yield lambda share, text: progress.update(task, completed=share, description=f"{what}: {text}")

    def _progress(self, *, count: bool = True) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        counts = (MofNCompleteColumn(),) if count else ()
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            *counts,
            TimeElapsedColumn(),
            console=Console(file=self.err),
            transient=True,
        )
