"""Feeds mutated inputs to a parser and says which break the promise.

The promise: reading an input succeeds or raises an `InputError`, in less than `SECONDS`, with less than `MEMORY_BYTES`
more memory, and its message is no longer than `MeshwrightError.max_length`.
"""

from __future__ import annotations

import hashlib
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from simulator.errors import InputError, MeshwrightError
from tests.fuzzing.mutations import mutated
from tests.fuzzing.parsers import PARSERS, Parser

SECONDS = 5.0
MEMORY_BYTES = 500 << 20
CORPUS = Path(__file__).with_name("corpus")


class TooSlow(BaseException):
    """No handler of the product catches it."""


@dataclass(kw_only=True)
class Outcome:
    """Inputs tried and accepted, and those that broke the promise, one of each kind."""

    tried: int = 0
    accepted: int = 0
    broken: dict[str, bytes] = field(default_factory=dict)


def corpus(name: str) -> list[bytes]:
    """Inputs that once broke the promise."""
    return [path.read_bytes() for path in sorted((CORPUS / name.replace(" ", "-")).glob("*"))]


def keep(name: str, content: bytes) -> Path:
    """Put an input into the corpus."""
    folder = CORPUS / name.replace(" ", "-")
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / hashlib.sha256(content).hexdigest()[:16]
    path.write_bytes(content)
    return path


def fuzz(name: str, inputs: int, *, seed: int = 0, seconds: float = float("inf")) -> Outcome:
    """Try so many inputs of a parser, or as many as `seconds` of processor time are enough for."""
    parser, outcome, random = PARSERS[name], Outcome(), Random(f"{name} {seed}")
    good = parser.seeds()
    seeds = good + corpus(name)
    end = time.process_time() + seconds
    with TemporaryDirectory() as folder:
        for content in good:
            (Path(folder) / parser.file).write_bytes(content)
            parser.read(Path(folder) / parser.file)
        while outcome.tried < inputs and time.process_time() < end:
            content = mutated(random, seeds)
            kind = tried(parser, Path(folder), content, outcome)
            if kind is not None:
                outcome.broken.setdefault(kind, content)
    return outcome


def tried(parser: Parser, folder: Path, content: bytes, outcome: Outcome) -> str | None:
    """Read one input; what was broken, or None."""
    path = folder / parser.file
    path.write_bytes(content)
    before, began = _memory(), time.process_time()
    outcome.tried += 1
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parser.read(path)
        outcome.accepted += 1
    except InputError as error:
        if len(str(error)) > MeshwrightError.max_length:
            return f"a message of {len(str(error))} characters"
    except TooSlow:
        return f"over {SECONDS} s at {_place(_trace())}"
    except (Exception, SystemExit) as error:  # noqa: BLE001 this is what is looked for
        return f"{type(error).__name__} at {_place(traceback.extract_tb(error.__traceback__))}: {str(error)[:100]}"
    if _memory() - before > MEMORY_BYTES:
        return f"over {MEMORY_BYTES} bytes of memory"
    return f"over {SECONDS} s" if time.process_time() - began > SECONDS else None


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _trace() -> Any:
    import sys

    return traceback.extract_tb(sys.exc_info()[2])


def _place(frames: Any) -> str:
    """Innermost line of the product, which tells kinds of errors apart."""
    own = [f for f in frames if any(part in f.filename for part in ("/planner/", "/simulator/"))]
    last = (own or list(frames))[-1]
    return f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
