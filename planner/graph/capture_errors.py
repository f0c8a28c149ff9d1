"""Why a network could not be captured: the operator and the user's source line."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from simulator.errors import MeshwrightError, NetworkError

_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_ROOT = Path(__file__).resolve().parents[2]
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_REMEDIES = (
    (
        ("DataDependent", "GuardOnDataDependent", "_local_scalar_dense", "nonzero", "Could not guard"),
        "a value or shape depends on data; choose with torch.where and keep shapes static",
    ),
    (
        ("shape", "size", "view", "expand", "broadcast"),
        "the module may fix its batch size; take it from the input's shape, with the batch as dim 0",
    ),
)


def short_path(file: str) -> str:
    """Path of a source file without the machine: relative to here or to the package, else its last two parts.

    >>> short_path("/some/where/models/net.py")
    'models/net.py'
    """
    path = Path(file)
    for base in (_ROOT, Path.cwd()):
        if path.is_relative_to(base) and "site-packages" not in path.parts:
            return path.relative_to(base).as_posix()
    return "/".join(path.parts[-2:])


def user_source(stack: str) -> str:
    """Innermost ``file:line`` of a printed stack that is not a library's; "" if there is none.

    >>> user_source('File "/some/where/models/net.py", line 7, in forward')
    'models/net.py:7'
    """
    frames = [(match["file"], match["line"]) for match in _FRAME.finditer(stack)]
    file, line = next(((f, n) for f, n in reversed(frames) if not is_library(f)), ("", ""))
    return f"{short_path(file)}:{line}" if file else ""


def is_library(file: str) -> bool:
    """Whether a source file belongs to Python or an installed package."""
    return file.startswith("<") or "site-packages" in file or file.startswith(_LIBRARIES)


def capture_error(network: str, error: Exception) -> MeshwrightError:
    """Say which operator on which line cannot be captured, and what to do about it."""
    if isinstance(error, MeshwrightError):
        return error
    chain = list(_chain(error))
    text = " ".join(f"{type(e).__name__} {e}" for e in chain)
    source = next(filter(None, (_failing_line(e) for e in chain)), "") or user_source(str(error))
    operator = _operator(chain)
    first_line = (str(chain[-1]).strip() or type(chain[-1]).__name__).splitlines()[0].split(" (unhinted")[0]
    remedy = next(
        (r for words, r in _REMEDIES if any(w in text for w in words)), "write that line with traceable torch operators"
    )
    place = f" at {source}" if source else ""
    return NetworkError(f"network {network!r} cannot be captured: {operator}{place}: {first_line}; {remedy}")


def _chain(error: BaseException) -> Iterable[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _failing_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = str(_ROOT / "planner" / "graph")
    for frame in reversed(frames):
        if not is_library(frame.filename) and not frame.filename.startswith(own):
            return f"{short_path(frame.filename)}:{frame.lineno} ({frame.line})"
    return ""


def _operator(chain: list[BaseException]) -> str:
    """Name the operator that was being run, from the error or from torch's frames, else the kind of error."""
    for error in chain:
        found = getattr(error, "func", None) or _running(error.__traceback__)
        if found is not None:
            return str(found)
    kind = type(chain[-1]).__name__
    return "aten.item.default" if kind == "GuardOnDataDependentSymNode" else kind


def _running(trace: TracebackType | None) -> object:
    from torch._ops import OpOverload  # where an operator ran torch is there; who names places alone needs none

    found = None
    for frame, _ in traceback.walk_tb(trace):
        candidate = frame.f_locals.get("func")
        found = candidate if isinstance(candidate, OpOverload) else found
    return found
