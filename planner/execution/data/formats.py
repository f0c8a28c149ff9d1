"""Readers of the public file formats of MNIST (idx) and CIFAR-10 (binary version)."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
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


Tokens = NDArray[Any]
"""A memory map of integers, one for each token."""

NPY_MAGIC = b"\x93NUMPY"
HEADER_MAGIC = 20240520
HEADER_VERSION = 1
HEADER_BYTES = 256 * 4
RAW = np.dtype("<u2")
RAW_WIDE = np.dtype("<u4")
WIDE_ENDINGS = (".u32", ".uint32")
MAX_TOKENS = 1 << 48
REMEDY = "copy or make the file again"
TOKENS = FileKind(name="token file", remedy="give another with --data tokens:FILE", max_bytes=None)


def read_tokens(path: Path) -> Tokens:
    """Map a file of tokens into memory.

    Three formats are told apart: arrays of numpy (``.npy``, one dim of integers); files with a header of 256
    little-endian 32-bit integers, magic 20240520, version 1 and the number of tokens, then 16-bit tokens (llm.c); and
    16-bit tokens alone, little-endian (nanoGPT), 32-bit where the name ends in ``.u32`` or ``.uint32``.

    Raises
    ------
    InputError
        The file cannot be read, is cut off or is of no such format; names it and the offset.
    """
    with TOKENS.open(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(12)
    if size == 0:
        raise InputError(f"token file {path} is empty; {REMEDY}")
    if start.startswith(NPY_MAGIC):
        return _npy(path, size)
    if len(start) == 12 and int.from_bytes(start[:4], "little") == HEADER_MAGIC:
        return _with_header(path, size, start)
    dtype = RAW_WIDE if path.suffix in WIDE_ENDINGS else RAW
    if size % dtype.itemsize:
        raise InputError(
            f"token file {path} has {size} bytes: its last token begins at byte {size - size % dtype.itemsize} and "
            f"should be {dtype.itemsize} bytes long; {REMEDY}"
        )
    return np.memmap(path, dtype, mode="r")


def _with_header(path: Path, size: int, start: bytes) -> Tokens:
    version, count = int.from_bytes(start[4:8], "little"), int.from_bytes(start[8:12], "little")
    if version != HEADER_VERSION:
        raise InputError(
            f"token file {path} has version {version} at byte 4, and only version {HEADER_VERSION} is read; write it "
            "in that one"
        )
    expected = HEADER_BYTES + count * RAW.itemsize
    if size != expected:
        raise InputError(
            f"token file {path} ends at byte {size}, but {count} tokens (byte 8) need {expected}; the file is "
            f"{'truncated' if size < expected else 'too long'}, {REMEDY}"
        )
    return np.memmap(path, RAW, mode="r", offset=HEADER_BYTES, shape=(count,))


def _npy(path: Path, size: int) -> Tokens:
    try:
        with TOKENS.open(path) as file:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(file)
            offset = file.tell()
    except Exception as error:  # noqa: BLE001 numpy has Python parse the header, which raises whatever it likes
        raise InputError(f"token file {path} has no readable header at byte 0 ({error}); {REMEDY}") from None
    if len(shape) != 1 or dtype.kind not in "iu" or not 0 <= shape[0] < MAX_TOKENS:
        raise InputError(
            f"token file {path} holds {dtype} of shape {shape} (header at byte 0), not integers in one dim; flatten it "
            "to token numbers"
        )
    expected = offset + shape[0] * dtype.itemsize
    if size < expected:
        raise InputError(
            f"token file {path} ends at byte {size}, but {shape[0]} tokens from byte {offset} need {expected}; the "
            f"file is truncated, {REMEDY}"
        )
    return np.memmap(path, dtype, mode="r", offset=offset, shape=(shape[0],))


def token_offset(tokens: Tokens, position: int) -> int:
    """Byte of the file at which the token at a position begins."""
    start = int(tokens.offset) if isinstance(tokens, np.memmap) else 0
    return start + position * tokens.dtype.itemsize
