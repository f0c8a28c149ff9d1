"""Tensors in files that are mapped into memory: what does not fit the memory of the host stays on its disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from simulator.errors import ExecutionError


class MappedStates:
    """States of one optimizer, each of more than one number in a file of its own.

    Files are made where the system keeps temporary ones (``TMPDIR``) and have no name once they are mapped: nothing is
    left of them when the process ends, however it ends.
    """

    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}

    def settle(self, state: dict[str, Tensor]) -> None:
        """Move states that are new, or were put in another's place, to files.

        Raises
        ------
        ExecutionError
            The disk is full, or its folder cannot be written.
        """
        for name, value in state.items():
            if value.dim() and self._mapped.get(name) is not value:
                self._mapped[name] = state[name] = mapped(value, "optimizer states")


def mapped(value: Tensor, what: str) -> Tensor:
    """A copy of a tensor in a file; ExecutionError, which says `what` it is, where the disk does not take it."""
    folder = tempfile.gettempdir()
    try:
        handle, path = tempfile.mkstemp(prefix="meshwright-states-", dir=folder)
        try:
            # Space is taken now: a mapped file that outgrows its disk would end the process without a word.
            take = getattr(os, "posix_fallocate", lambda file, start, size: os.truncate(file, size))
            take(handle, 0, max(value.nbytes, 1))
            made = torch.from_file(path, shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
        finally:
            os.close(handle)
            Path(path).unlink()
    except OSError as error:
        raise ExecutionError(
            f"{what} of {value.nbytes} bytes cannot be put on the disk of {folder}: "
            f"{error.strerror or error}; set TMPDIR to a folder with room, or plan with --pin offload_to=host"
        ) from error
    made.copy_(value)
    return made
