"""Readers of files of tokens, which stay on the disk: only what is asked for is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from simulator.errors import InputError
from simulator.input_file import FileKind

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
