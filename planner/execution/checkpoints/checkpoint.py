"""Checkpoints: the sharded state of a run on disk, whole or not at all, readable by any other plan.

A checkpoint is a folder ``step-00000020`` made by `torch.distributed.checkpoint`, with one file more, the record. Every
rank writes its own pieces of parameters and optimizer states under the names of the whole tensors, so that a plan that
cuts them otherwise, or has other stages, finds its pieces among those.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from planner.execution.optimizers import ElementStep, SummedStep
from planner.sharding.placement import Mesh, Placements
from simulator.calibration.launch import is_peer_failure
from simulator.errors import ExecutionError, InputError
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


METADATA = ".metadata"
Steps = Mapping[str, ElementStep | SummedStep]

SAFE_GLOBALS = {
    "torch": {"Size", "strided", *(str(dtype).removeprefix("torch.") for dtype in vars(torch).values()
                                   if isinstance(dtype, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "StorageMeta", "_MEM_FORMAT_ENCODING", "BytesStorageMetadata",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip
"""All that the index of a checkpoint is made of; a pickle that names anything else is not unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank's piece lies in a whole tensor."""

    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def place_of(shape: tuple[int, ...], mesh: Mesh, placements: Placements, coordinates: tuple[int, ...]) -> Place:
    """Find a rank's piece of a tensor; of axes that shard one dim the outer cuts first, as `own_piece` does.

    >>> from planner.sharding.placement import MeshAxis
    >>> place_of((8, 3), Mesh((MeshAxis("data", 2), MeshAxis("tensor", 2))), (0, 0), (1, 0))
    Place(whole=(8, 3), offsets=(4, 0), sizes=(2, 3))
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for axis, dim, coordinate in zip(mesh.axes, placements, coordinates, strict=True):
        if dim >= 0:
            piece = -(-sizes[dim] // axis.size)
            before = min(coordinate * piece, sizes[dim])
            offsets[dim] += before
            sizes[dim] = min(piece, sizes[dim] - before)
    return Place(whole=shape, offsets=tuple(offsets), sizes=tuple(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A local tensor and its place, in the form that `torch.distributed.checkpoint` asks of any sharded tensor."""

    local: Tensor
    place: Place

    def size(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self.place.whole)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(self.place.offsets), sizes=torch.Size(self.place.sizes))]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(
            chunk=self.__create_chunk_list__()[0],
            properties=TensorProperties.create_from_tensor(self.local),
            size=self.size(),
        )
        index = MetadataIndex(name, torch.Size(self.place.offsets))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]


def _parameter_key(name: str) -> str:
    return f"parameters/{name}"


def state_pieces(parameters: Mapping[str, Tensor], steps: Steps, places: Mapping[str, Place]) -> dict[str, Piece]:
    """All that a rank holds from step to step, by the names it has in a checkpoint."""
    found = {}
    for name, parameter in parameters.items():
        found[_parameter_key(name)] = Piece(local=parameter, place=places[name])
        for state, tensor in steps[name].state.items():
            place = places[name] if tensor.dim() or not places[name].whole else SCALAR
            found[f"optimizer/{state}/{name}"] = Piece(local=tensor, place=place)
    return found


SCALAR = Place(whole=(), offsets=(), sizes=())


# Saving


class _SavePlanner(DefaultSavePlanner):
    """Takes pieces, which are not tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        piece: Piece = self.state_dict[index.fqn]
        return piece.local.detach()


def save_checkpoint(
    folder: Path, record: CheckpointRecord, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None = None
) -> Path:
    """Save the pieces of all ranks as one checkpoint in `folder`; every rank of the job calls this.

    What is written stands beside under another name until all of it is on the disk, and is then renamed: a crash at
    any moment leaves the earlier checkpoints as they are.

    Raises
    ------
    ExecutionError
        It could not be written; on every rank, and nothing of it stays.
    """
    name = checkpoint_name(record.step)
    beside = folder / _from_first(lambda: _make_beside(folder, name), group)
    with _explained(f"checkpoint {folder / name} could not be written", "free some space or save elsewhere"):
        writer = FileSystemWriter(beside, sync_files=True, overwrite=False)
        save(dict(pieces), storage_writer=writer, planner=_SavePlanner(), process_group=group)
    _from_first(lambda: _finish(folder, beside, name, record), group)
    return folder / name


def _make_beside(folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    found = unfinished_name(name, secrets.token_hex(4))
    (folder / found).mkdir()
    return found


def _finish(folder: Path, beside: Path, name: str, record: CheckpointRecord) -> str:
    """Check that everything is there, and give it its name."""
    index = _read_index(beside / METADATA)
    files = {info.relative_path for info in (index.storage_data or {}).values()}
    missing = sorted(file for file in files if not (beside / file).is_file())
    if missing:
        raise ExecutionError(
            f"checkpoint {folder / name}: {missing[0]} was written by another rank but is not here; --save must name a "
            "folder that all hosts share"
        )
    write_record(beside / RECORD, record)
    _sync(beside)
    aside = folder / unfinished_name(name, secrets.token_hex(4))
    replaced = (folder / name).exists()
    if replaced:
        (folder / name).rename(aside)
    beside.rename(folder / name)
    _sync(folder)
    if replaced:
        shutil.rmtree(aside, ignore_errors=True)
    return name


def _sync(folder: Path) -> None:
    """Have the system write down the names in a folder."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _from_first(work: Callable[[], str], group: dist.ProcessGroup | None) -> str:
    """Do something on rank 0 alone and tell all ranks what came of it; an error is raised on all of them."""
    outcome: list[tuple[str | None, str]] = [(None, "")]
    if dist.get_rank() == 0:
        try:
            outcome = [(work(), "")]
        except ExecutionError as error:
            outcome = [(None, str(error))]
        except OSError as error:
            place = "" if error.filename is None else f" {error.filename}"
            outcome = [(None, f"checkpoint{place} could not be written: {error.strerror or error}; save elsewhere")]
    dist.broadcast_object_list(outcome, src=0, group=group)
    found, problem = outcome[0]
    if found is None:
        raise ExecutionError(problem)
    return found


# Loading


class _IndexUnpickler(pickle._Unpickler):  # the one in C takes 64 GB for a pickle that numbers an object by 2³²
    def find_class(self, module: str, name: str) -> Any:
        if name in SAFE_GLOBALS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _read_index(path: Path) -> Metadata:
    """Read the index of a checkpoint, which is a pickle, without letting it run anything."""
    content = CHECKPOINT.read(path)
    try:
        found = _IndexUnpickler(io.BytesIO(content)).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        for info in (found.storage_data or {}).values():
            name, *numbers = info.relative_path, info.offset, info.length
            if Path(name).name != name or "\0" in name:
                raise pickle.UnpicklingError(f"it names a file outside: {name}")
            if not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
                raise pickle.UnpicklingError(f"{name} has a piece at {numbers[0]!r} of length {numbers[1]!r}")
    except Exception as error:  # noqa: BLE001 a damaged pickle raises whatever it likes
        raise InputError(f"{path} is not the index of a checkpoint: {error}; resume from another") from None
    return found


def check_undamaged(path: Path) -> None:
    """Look whether the record and the index of a checkpoint can be read and its files are as long as they must be.

    Raises
    ------
    InputError
        Something is missing, cut off or unreadable.
    """
    read_record(path)
    needed: dict[str, int] = {}
    for info in (_read_index(path / METADATA).storage_data or {}).values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for file, size in sorted(needed.items()):
        try:
            found = (path / file).stat().st_size
        except OSError as error:
            raise InputError(
                f"{path / file} cannot be read: {error.strerror}; resume from another checkpoint"
            ) from None
        if found < size:
            raise InputError(f"{path / file} has {found} of {size} bytes; resume from another checkpoint")


def find_undamaged(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Find the checkpoint that a path means: itself, or the newest in it that is not damaged.

    Returns
    -------
    tuple of Path and tuple of str
        With what is wrong with newer ones, a message each.

    Raises
    ------
    InputError
        There is none.
    """
    newest = find_checkpoint(path)
    if newest == path:
        check_undamaged(path)
        return path, ()
    damaged: list[str] = []
    for found in reversed(finished_checkpoints(path)):
        try:
            check_undamaged(found)
        except InputError as error:
            damaged.append(str(error).rpartition(";")[0])
        else:
            return found, tuple(f"{message}; resumed from {found.name} instead" for message in damaged)
    raise InputError(f"--resume {path}: every checkpoint there is damaged ({damaged[0]}); resume from another folder")


class _IndexedReader(FileSystemReader):
    """Reads with the index that was checked."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = _read_index(Path(self.path) / METADATA)
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _LoadPlanner(DefaultLoadPlanner):
    """Fills pieces, which are not tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        piece: Piece = self.state_dict[index.fqn]
        return piece.local


def load_checkpoint(
    path: Path,
    parameters: Mapping[str, Tensor],
    steps: Steps,
    places: Mapping[str, Place],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill this rank's parameters, and the states of their updates, from a checkpoint; every rank calls this.

    Raises
    ------
    InputError
        The checkpoint is of another network, or damaged.
    """
    index = _read_index(path / METADATA).state_dict_metadata
    for name, parameter in parameters.items():
        _check_whole(path, index, _parameter_key(name), places[name])
        for key, entry in index.items():
            if key.startswith("optimizer/") and key.split("/", 2)[2] == name:
                state = key.split("/", 2)[1]
                assert isinstance(entry, TensorStorageMetadata)
                steps[name].state[state] = _room(entry, parameter, places[name])
    pieces = state_pieces(parameters, steps, places)
    with _explained(f"checkpoint {path} cannot be read", "resume from another checkpoint"):
        load(dict(pieces), storage_reader=_IndexedReader(path), planner=_LoadPlanner(), process_group=group)


def _room(entry: TensorStorageMetadata, parameter: Tensor, place: Place) -> Tensor:
    whole = tuple(entry.size) == place.whole
    # A count lives where its update wants it: only the fused kernels keep theirs on the device.
    device = parameter.device if whole or parameter.device.type == "cuda" else torch.device("cpu")
    return torch.empty(place.sizes if whole else tuple(entry.size), dtype=entry.properties.dtype, device=device)


def _check_whole(path: Path, index: Mapping[str, Any], key: str, place: Place) -> None:
    entry = index.get(key)
    if not isinstance(entry, TensorStorageMetadata) or tuple(entry.size) != place.whole:
        found = "none" if entry is None else f"one of shape {tuple(entry.size)}"
        raise InputError(
            f"checkpoint {path}: the network has {key.partition('/')[2]!r} of shape {place.whole}, the checkpoint "
            f"{found}; resume from a checkpoint of this network"
        )


@contextmanager
def _explained(what: str, remedy: str) -> Any:
    """Say in one line what failed on which rank."""
    try:
        yield
    except CheckpointException as error:
        raise ExecutionError(f"{what}: {_failures(error)}; {remedy}") from None
    except (OSError, RuntimeError) as error:
        if is_peer_failure(error):
            raise  # another rank is gone, which has reasons of its own
        raise ExecutionError(f"{what}: {error}; {remedy}") from error


def _failures(error: CheckpointException) -> str:
    found: Iterable[tuple[int, Any]] = sorted(error.failures.items())
    return ", ".join(f"rank {rank}: {' '.join(str(failure[0]).split())[:300]}" for rank, failure in list(found)[:3])
