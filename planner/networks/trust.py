"""Whether files whose loading may run code are trusted: said once on the command line, known to every process of it."""

from __future__ import annotations

import os

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
