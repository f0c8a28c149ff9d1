"""Files are written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from simulator.errors import InputError

_STANDARD_STREAMS = (1, 2)
_REMEDIES = {
    errno.EISDIR: "name a file in it",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some space or choose another place"),
}
_REMEDY = "choose a file in a folder you may write to"


def write_whole(path: str | Path, content: str | bytes | Iterable[str]) -> Path:
    """Write beside `path`, then rename; a reader never sees half a file.

    Parameters
    ----------
    path
        Where to write, in a folder that exists. Links are followed. What is not a regular file (a device,
        a pipe) or is this process's output is written to directly.
    content
        Text (UTF-8), bytes, or the text in pieces.

    Returns
    -------
    Path
        The path given.

    Raises
    ------
    InputError
        The path cannot be written; a regular file is what it was before.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "a.txt", "done").read_text()
    'done'
    """
    given = Path(path)
    with _explained(given):
        direct = _open_direct(given)
        if direct is not None:
            with direct:
                direct.writelines(_encoded(content))
            return given
        target = _target(given)
        beside, stream = _open_beside(target)
        try:
            with stream:
                stream.writelines(_encoded(content))
            beside.replace(target)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    return given


def check_writable(path: str | Path) -> None:
    """Fail now, before long work, if `path` cannot be written later.

    Raises
    ------
    InputError
        The path is a folder, its folder does not exist, or either may not be written to.
    """
    given = Path(path)
    with _explained(given):
        if _is_direct(given):
            if not os.access(given, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        # Permissions alone do not tell: the superuser has them in folders that hold no files.
        beside, stream = _open_beside(_target(given))
        stream.close()
        beside.unlink()


def _is_direct(path: Path) -> bool:
    status = _status(path)
    return status is not None and (not stat.S_ISREG(status.st_mode) or _standard_stream(status) is not None)


def _open_direct(path: Path) -> BinaryIO | None:
    """Open a device, pipe or output of this process for writing; None for a file that can be replaced."""
    if not _is_direct(path):
        return None
    status = _status(path)
    number = None if status is None else _standard_stream(status)
    if number is None:
        return path.open("wb")
    for text in (sys.stdout, sys.stderr):
        if text is not None:
            text.flush()
    # The stream itself keeps its place in a file; a second opening would write from the start.
    return os.fdopen(os.dup(number), "wb")


def _target(path: Path) -> Path:
    """The file that `path` leads to, there or not, in a folder that exists."""
    target = path.resolve()
    if not target.parent.exists():
        folder = str(path.parent if target.name == path.name else target.parent)
        raise InputError(
            f"cannot write {str(path)!r}: the folder {folder!r} does not exist; create it or choose another"
        )
    return target


def _open_beside(target: Path) -> tuple[Path, BinaryIO]:
    """A new file in the folder of `target`, with the permissions that `target` has or will have."""
    status = _status(target)
    if status is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    beside = target.with_name(f".{secrets.token_hex(8)}.tmp")
    number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    if status is not None:
        with suppress(OSError):
            os.fchmod(number, stat.S_IMODE(status.st_mode))
    return beside, os.fdopen(number, "wb")


def _status(path: Path) -> os.stat_result | None:
    """What is at `path`, links followed; None where nothing is."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    except ValueError as error:  # a zero byte
        raise OSError(errno.EINVAL, str(error)) from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    return status


def _standard_stream(status: os.stat_result) -> int | None:
    """Number of the output stream of this process that leads to this file."""
    for number in _STANDARD_STREAMS:
        with suppress(OSError):
            if os.path.samestat(status, os.fstat(number)):
                return number
    return None


def _encoded(content: str | bytes | Iterable[str]) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
    else:
        for piece in [content] if isinstance(content, str) else content:
            yield piece.encode()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, _REMEDY)
        raise InputError(f"cannot write {str(path)!r}: {error.strerror or error}; {remedy}") from error
