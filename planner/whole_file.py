"""Files are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from simulator.errors import InputError


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write beside `path`, then rename; a reader never sees half a file.

    Parameters
    ----------
    path
        Where to write. Missing folders are made. A device or pipe is written to directly.
    content
        Text (UTF-8) or bytes.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    InputError
        The path cannot be written; nothing was changed.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(Path(folder) / "new" / "a.txt", "done").read_text()
    'done'
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    beside: Path | None = None
    try:
        if target.exists():
            target = target.resolve()
            if not target.is_file():
                target.write_bytes(data)
                return target
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        beside.write_bytes(data)
        beside.replace(target)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot write {str(path)!r}: {reason}; choose a file in a folder you may write to") from error
    finally:
        if beside is not None:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    return target


def check_writable(path: str | Path) -> None:
    """Fail now, before long work, if `path` cannot be written later.

    Raises
    ------
    InputError
        The path is a folder, or the nearest folder above it that exists may not be written to.
    """
    target = Path(path)
    if target.is_dir():
        raise InputError(f"cannot write {str(path)!r}: it is a folder; name a file")
    folder = target.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"cannot write {str(path)!r}: {str(folder)!r} is not a folder; choose another place")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise InputError(f"cannot write {str(path)!r}: permission denied; choose a file in a folder you may write to")
