"""A folder for each rank with all it said, as launch scripts of accelerator clusters make them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simulator.errors import ExecutionError, InputError

TOLD = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "SLURM_", "MS_", "DEVICE_", "GLOO_", "NCCL_", "HCCL_", "TORCH", "OMP_")
TOLD_TOO = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Variables that say how a rank was started; others may be secret."""


def rank_folder(logs: Path, rank: int) -> Path:
    """The folder of a rank, with ``env.log`` and ``train.log``."""
    return logs / f"device{rank}"


@contextmanager
def rank_log(logs: Path | None, rank: int) -> Iterator[None]:
    """Send all that this process writes, libraries included, to its rank's ``train.log``; None leaves it where it goes.

    Raises
    ------
    InputError
        The folder cannot be made.
    """
    if logs is None:
        yield
        return
    folder = rank_folder(logs, rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        told = {name: value for name, value in os.environ.items() if name.startswith(TOLD) or name in TOLD_TOO}
        (folder / "env.log").write_text("".join(f"{name}={told[name]}\n" for name in sorted(told)))
        number = os.open(folder / "train.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as error:
        raise InputError(f"logs cannot be written to {folder}: {error.strerror}; choose another --log-dir") from None
    _flush()
    before = [os.dup(stream) for stream in (1, 2)]
    for stream in (1, 2):
        os.dup2(number, stream)
    os.close(number)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        _flush()
        for stream, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, stream)
            os.close(kept)


@contextmanager
def kept_on_failure(logs: Path | None) -> Iterator[Path]:
    """Give the folder of logs; where the user named none it is a temporary one, kept when the run fails."""
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--log-dir {logs} cannot be made: {error.strerror}; choose another") from None
        yield logs
        return
    folder = Path(tempfile.mkdtemp(prefix="meshwright-"))
    try:
        yield folder
    except ExecutionError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
