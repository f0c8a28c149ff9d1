"""What a checkpoint says about its run, and how checkpoints are found in a folder; without torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from simulator.errors import InputError
from simulator.input_file import FileKind
from simulator.whole_file import write_whole

RECORD = "checkpoint.json"
CHECKPOINT = FileKind(name="checkpoint", remedy="resume from another checkpoint", max_bytes=1 << 28)
FINISHED = re.compile(r"step-(\d{8,})")
UNFINISHED = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}\.tmp")


class CheckpointRecord(BaseModel):
    """What has been trained until a checkpoint: ``step`` steps on ``samples`` samples of the data set.

    In float16 the next step's loss is scaled by ``loss_scale``, which has stood for ``good_steps`` steps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal["meshwright-checkpoint"] = "meshwright-checkpoint"
    version: Literal[1] = 1
    step: int = Field(ge=0)
    samples: int = Field(ge=0)
    network: str
    fingerprint: str
    optimizer: str
    learning_rate: float = Field(gt=0)
    precision: str
    global_batch: int = Field(ge=1)
    data: str | None
    seed: int = Field(ge=0)
    devices: int = Field(ge=1)
    loss_scale: float | None = Field(default=None, ge=1)
    good_steps: int = Field(default=0, ge=0)


def checkpoint_name(step: int) -> str:
    """Name of the folder of a checkpoint.

    >>> checkpoint_name(20)
    'step-00000020'
    """
    return f"step-{step:08d}"


def unfinished_name(name: str, token: str) -> str:
    """Name of a checkpoint while it is written, or of one that is about to be deleted."""
    return f".{name}.{token}.tmp"


def write_record(path: Path, record: CheckpointRecord) -> None:
    """Write the record of a checkpoint."""
    write_whole(path, record.model_dump_json(indent=2) + "\n")


def find_checkpoint(path: Path) -> Path:
    """Find the checkpoint that a path means: itself, or the newest whole one in it.

    Raises
    ------
    InputError
        There is none.
    """
    if (path / RECORD).is_file():
        return path
    found = finished_checkpoints(path)
    if not found:
        reason = "holds no whole checkpoint" if path.is_dir() else "is no folder"
        raise InputError(f"--resume {path}: {reason}; give a folder that --save wrote")
    return found[-1]


def finished_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints in a folder, oldest first; those that a crash left half written are not among them."""
    if not folder.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := FINISHED.fullmatch(path.name))]
    return [path for _, path in sorted(numbered) if (path / RECORD).is_file()]


def read_record(path: Path) -> CheckpointRecord:
    """Read what a checkpoint says about its run.

    Raises
    ------
    InputError
        The record cannot be read, or is not one.
    """
    file = path / RECORD
    try:
        return CheckpointRecord.model_validate_json(CHECKPOINT.read(file))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{file}: {place or 'the file'}: {first['msg']}; resume from another checkpoint") from None


def remove_unfinished(folder: Path) -> None:
    """Delete what a crash left of checkpoints that were being written."""
    if folder.is_dir():
        for path in folder.iterdir():
            if UNFINISHED.fullmatch(path.name) and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
