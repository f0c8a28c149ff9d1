"""Whether files whose loading may run code are trusted: said once on the command line, known to every process of it."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from simulator.errors import InputError, NetworkError
from simulator.input_file import is_regular

TRUST = "MESHWRIGHT_TRUST_FILE"
"""Variable of the environment that is ``1`` where saved programs are trusted; processes that are started inherit it."""


def trust_files(trusted: bool) -> None:
    """Say whether saved programs are trusted from now on, here and in processes that are started from here."""
    if trusted:
        os.environ[TRUST] = "1"
    else:
        os.environ.pop(TRUST, None)


def files_are_trusted() -> bool:
    """Whether saved programs are trusted."""
    return os.environ.get(TRUST) == "1"


def check_program(file: str) -> None:
    """Refuse what is no saved program, or is not trusted, before torch is imported.

    Raises
    ------
    InputError
        Nobody said that the file is trusted: loading it may run code that it holds.
    NetworkError
        There is no such file, or it is no zip archive.
    """
    spec, path = f"pt2:{file}", Path(file)
    if not is_regular(path):
        raise NetworkError(f"network {spec!r}: there is no file {file}; name one that torch.export.save wrote")
    if not files_are_trusted():
        raise InputError(
            f"network {spec!r}: loading a saved program may run code that {path.name} holds; where you trust it, add "
            "--trust-file"
        )
    try:
        archive = zipfile.is_zipfile(path)
    except OSError as error:
        raise NetworkError(f"network {spec!r}: {path} cannot be read: {error.strerror}; name another file") from error
    if not archive:
        raise NetworkError(
            f"network {spec!r}: {path} cannot be read as a saved program: it is no zip archive; write it anew with "
            "torch.export.save"
        )
