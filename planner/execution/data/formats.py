"""Readers of the public file formats of MNIST (idx) and CIFAR-10 (binary version)."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulator.errors import InputError
from simulator.input_file import FileKind

IDX_UNSIGNED_BYTE = 8
MAX_BYTES = 1 << 28
IMAGES = FileKind(name="data file", remedy="copy the file again", max_bytes=MAX_BYTES)
LABELS_START = 8
"""Bytes before the first label: the magic number and one dim."""
PIECE_BYTES = 2**16
CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD = 1 + 3 * 32 * 32
CLASSES = 10

Bytes = NDArray[np.uint8]


def read_mnist(folder: Path) -> tuple[Bytes, Bytes]:
    """Read the MNIST training set from a folder: images (N, 28, 28) and labels (N,).

    The files are those of the original distribution, ``train-images-idx3-ubyte`` and
    ``train-labels-idx1-ubyte``, each with or without ``.gz``.
    """
    pixels = _idx_in(folder, "train-images-idx3-ubyte", "train-images.idx3-ubyte")
    numbers = _idx_in(folder, "train-labels-idx1-ubyte", "train-labels.idx1-ubyte")
    images, labels = read_idx(pixels), read_idx(numbers)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise InputError(
            f"{folder}: images of shape {images.shape} and labels of shape {labels.shape} do not belong together; "
            "put the two training files of one data set there"
        )
    if not images.size:
        raise InputError(f"{pixels} has dims {images.shape} at byte 4, which hold nothing; copy the file again")
    wrong = np.flatnonzero(labels >= CLASSES)
    if len(wrong):
        raise InputError(
            f"{numbers} has label {labels[wrong[0]]} at byte {LABELS_START + wrong[0]} of what it holds, but labels "
            "are 0 to 9; copy the file again"
        )
    return images, labels


def _idx_in(folder: Path, *names: str) -> Path:
    candidates = [folder / (name + ending) for name in names for ending in ("", ".gz")]
    for path in candidates:
        if path.is_file():
            return path
    raise InputError(f"{folder} holds no {names[0]} (or {names[0]}.gz); give the folder with the MNIST files")


def read_idx(path: Path) -> Bytes:
    """Read one idx file of unsigned bytes, gzipped or not.

    The format is two zero bytes, a type code, the number of dims, each dim as a big-endian 32-bit
    integer, then the data.
    """
    data = _contents(path)
    if len(data) < 4:
        raise InputError(f"{path} ends at byte {len(data)} within its 4-byte magic number; copy the file again")
    if data[:2] != b"\0\0" or data[2] != IDX_UNSIGNED_BYTE or not 1 <= data[3] <= 4:
        raise InputError(f"{path} begins with {data[:4].hex()} at byte 0, not with 000008 and a number of dims; "
                         "give an idx file of unsigned bytes")  # fmt: skip
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise InputError(f"{path} ends at byte {len(data)} within its header of {start} bytes; copy the file again")
    shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3]))
    expected = start + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        raise InputError(
            f"{path} has {len(data)} bytes, but dims {shape} from byte 4 need {expected}; the file is "
            f"{'truncated' if len(data) < expected else 'too long'}, copy it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _contents(path: Path) -> bytes:
    with IMAGES.open(path) as file:
        if path.suffix != ".gz":
            return file.read()
        found = io.BytesIO()
        try:
            with gzip.open(file) as unpacked:
                while piece := unpacked.read1(PIECE_BYTES):
                    found.write(piece)
                    if found.tell() > MAX_BYTES:
                        raise EOFError(f"more than {MAX_BYTES} bytes are packed in it")
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{path} cannot be read ({error}) within its {os.fstat(file.fileno()).st_size} bytes, behind byte "
                f"{found.tell()} of what it holds; copy the file again"
            ) from None
    return found.getvalue()


def read_cifar10(folder: Path) -> tuple[Bytes, Bytes]:
    """Read the CIFAR-10 training set in its binary version: images (N, 3, 32, 32) and labels (N,).

    ``data_batch_1.bin`` … hold records of one label byte and 3,072 pixel bytes. The version made of
    Python pickles is not read, because unpickling runs whatever the file says.
    """
    paths = sorted(folder.glob("data_batch_*.bin"))
    if not paths:
        pickles = any(folder.glob("data_batch_[0-9]"))
        reason = "it holds the Python version, which is not read" if pickles else "there are none"
        raise InputError(f"{folder} should hold data_batch_1.bin …, but {reason}; get CIFAR-10's binary version")
    records = np.concatenate([_cifar_records(path) for path in paths])
    return records[:, 1:].reshape(-1, *CIFAR_SHAPE), records[:, 0]


def _cifar_records(path: Path) -> Bytes:
    data = np.frombuffer(_contents(path), np.uint8)
    whole = len(data) // CIFAR_RECORD * CIFAR_RECORD
    if len(data) == 0 or whole != len(data):
        raise InputError(
            f"{path} has {len(data)} bytes: its last record begins at byte {whole} and should be {CIFAR_RECORD} bytes "
            "long; the file is truncated, copy it again"
        )
    records = data.reshape(-1, CIFAR_RECORD)
    wrong = np.flatnonzero(records[:, 0] >= CLASSES)
    if len(wrong):
        raise InputError(
            f"{path} has label {records[wrong[0], 0]} at byte {wrong[0] * CIFAR_RECORD}, but labels are 0 to 9; "
            "copy the file again"
        )
    return records
