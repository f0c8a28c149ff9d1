"""Training data: the same global batches for any number of processes, each rank loading its own rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planner.execution.data.formats import Tokens, read_cifar10, read_mnist, read_tokens, token_offset
from simulator.errors import InputError
from simulator.input_file import FileKind

LANGUAGE_KINDS = {"tokens", "next_tokens"}
LANGUAGE_DATA = ("text", "tokens")
TEXT = FileKind(name="text file", remedy="give another with --data text:FILE", max_bytes=1 << 28)
SYNTHETIC_SAMPLES = 4096
PIECE = 1 << 24
"""Tokens that are looked through at a time."""

Rows = NDArray[np.int64]
Sample = Callable[["BatchInput", Rows], Tensor]
"""Makes the rows of one input; the first dim of the result is the number of rows."""
Check = Callable[[tuple["BatchInput", ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part `shard_id` of `num_shards` equal parts of every batch."""

    num_shards: int = 1
    shard_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where in the stream of samples a run begins: with ``step`` comes ``sample``."""

    step: int = 0
    sample: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """What a network asks of one input: its kind, whole shape, dtype and bound (vocabulary or classes)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    high: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Samples by number, from a source described in a few words; ``check`` looks through all of them."""

    description: str
    samples: int
    sample: Sample
    check: Check = lambda specs: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The batches of a run, defined by data set, seed and position alone.

    Position k of the endless sample stream is sample ``order_e[k mod n]`` of epoch e = k div n, where
    ``order_e`` is a permutation seeded by (seed, e). How many processes share the work does not enter.
    """

    dataset: Dataset
    seed: int

    def load(self, spec: BatchInput, start: int, shard: Shard = Shard()) -> Tensor:
        """Load one shard of the batch whose first sample is at position `start`.

        Returns a tensor of shape ``(spec.shape[0] / num_shards, *spec.shape[1:])``.
        """
        size = spec.shape[0] // shard.num_shards
        first = start + shard.shard_id * size
        return self.dataset.sample(spec, self._rows(first, size)).to(spec.dtype)

    def _rows(self, first: int, size: int) -> Rows:
        positions = np.arange(first, first + size)
        epochs, offsets = positions // self.dataset.samples, positions % self.dataset.samples
        rows = np.empty(size, np.int64)
        for epoch in np.unique(epochs):
            order = _order(self.seed, int(epoch), self.dataset.samples)
            rows[epochs == epoch] = order[offsets[epochs == epoch]]
        return rows


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, samples: int) -> Rows:
    """The order of an epoch; a batch may lie in two."""
    return np.random.default_rng((seed, epoch)).permutation(samples)


def open_dataset(name: str | None, specs: tuple[BatchInput, ...], seed: int) -> Dataset:
    """Open a data set that can feed every input of a network.

    Parameters
    ----------
    name : str or None
        ``digits``, ``text``, ``text:FILE``, ``tokens:FILE``, ``mnist:FOLDER``, ``cifar10:FOLDER`` or ``synthetic``;
        None takes text for tokens, and for images and features digits, or synthetic where scikit-learn is missing.
    specs : tuple of InputSpec
        The inputs of the network.
    seed : int
        Seeds synthetic data.
    """
    language = any(spec.kind in LANGUAGE_KINDS for spec in specs)
    if not name:
        name = "text" if language else "digits" if _scikit_learn() else "synthetic"
    kind, _, place = name.partition(":")
    if kind == "synthetic":
        return _synthetic(seed)
    if kind in ("digits", "mnist", "cifar10", *LANGUAGE_DATA) and language != (kind in LANGUAGE_DATA):
        wanted = "text, text:FILE or tokens:FILE" if language else "digits, mnist:FOLDER or cifar10:FOLDER"
        raise InputError(f"data set {name!r} cannot feed inputs {[s.kind for s in specs]}; choose {wanted}")
    if kind == "text":
        return _text(place, specs)
    if kind == "tokens" and place:
        path = Path(place)
        return _windows(read_tokens(path), f"token file {path}", f"tokens of {path}", specs)
    if kind == "digits":
        table = _digits_table()
        pixels = (table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
        return _images("scikit-learn digits", pixels, table[:, 64].astype(np.uint8))
    if kind in ("mnist", "cifar10") and place:
        return _images(f"{kind} in {place}", *(read_mnist if kind == "mnist" else read_cifar10)(Path(place)))
    raise InputError(
        f"data set {name!r} is not one of digits, text, text:FILE, tokens:FILE, mnist:FOLDER, cifar10:FOLDER, "
        "synthetic; choose one of them"
    )


def check_dataset(dataset: Dataset, specs: tuple[BatchInput, ...]) -> None:
    """Take one sample for every input and look through all; InputError where they are not what the network asks."""
    for spec in specs:
        one = replace(spec, shape=(1, *spec.shape[1:]))
        found = tuple(dataset.sample(one, np.zeros(1, np.int64)).shape)
        if found != one.shape:
            raise InputError(
                f"{dataset.description} gives input {spec.name!r} ({spec.kind}) samples of shape {found[1:]}, "
                f"the network wants {one.shape[1:]}; choose other data or --data synthetic"
            )
    dataset.check(specs)


def _digits_table() -> NDArray[np.float64]:
    """Rows of 64 pixels of 0 to 16 and a label, (1797, 65); importing scikit-learn is slow and avoided."""
    place = _scikit_learn()
    if place is None:
        raise InputError(
            "data set 'digits' needs scikit-learn, which is not installed; run pip install 'meshwright[data]' "
            "or choose another with --data"
        )
    path = place / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])


def _scikit_learn() -> Path | None:
    """The folder of scikit-learn; None where it is not installed."""
    found = importlib.util.find_spec("sklearn")
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def _images(description: str, pixels: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Dataset:
    """Serve images (N, H, W) or (N, C, H, W) at any size, as images, flat features, labels or targets."""
    with_channels = pixels[:, None] if pixels.ndim == 3 else pixels
    classes = int(labels.max()) + 1

    def sample(spec: BatchInput, rows: Rows) -> Tensor:
        if spec.kind == "label":
            if spec.high is not None and spec.high < classes:
                raise InputError(f"{description} has {classes} classes, the network {spec.high}; "
                                 "choose other data or --data synthetic")  # fmt: skip
            return torch.from_numpy(labels[rows].astype(np.int64))
        if spec.kind == "target":
            values = torch.from_numpy(labels[rows].astype(np.float64)).to(spec.dtype)
            return values.reshape(-1, *[1] * (len(spec.shape) - 1)).expand(-1, *spec.shape[1:]).contiguous()
        return _resized(torch.from_numpy(with_channels[rows]), spec)

    return Dataset(description=description, samples=len(labels), sample=sample)


def _resized(pixels: Tensor, spec: BatchInput) -> Tensor:
    """Scale pixels (n, C, H, W) of 0 to 255 to [-1, 1], and to the image or feature shape of `spec`."""
    if spec.kind == "image" and len(spec.shape) == 4:
        channels, height, width = spec.shape[1:]
    else:
        height = width = round(spec.shape[-1] ** 0.5)
        channels = 1
        if len(spec.shape) != 2 or height * width != spec.shape[1]:
            raise InputError(
                f"input {spec.name!r} of shape {spec.shape} is neither an image (N, C, H, W) nor a flattened square; "
                "use --data synthetic"
            )
    values = pixels.double() / 127.5 - 1
    if values.shape[1] != channels:
        values = values.mean(1, keepdim=True).expand(-1, channels, -1, -1)
    sized = torch.nn.functional.interpolate(values, (height, width), mode="bilinear", align_corners=False)
    return sized.reshape(len(pixels), *spec.shape[1:]).to(spec.dtype)


def _text(place: str, specs: tuple[BatchInput, ...]) -> Dataset:
    path = Path(place) if place else _bundled_text()
    content = np.frombuffer(TEXT.read(path), np.uint8)
    return _windows(content, f"text file {path}", f"bytes of {place or path.name}", specs)


def _windows(content: Tokens, source: str, description: str, specs: tuple[BatchInput, ...]) -> Dataset:
    """Serve windows of consecutive tokens, one behind the other; the next tokens are those one place later."""
    language = [spec for spec in specs if spec.kind in LANGUAGE_KINDS]
    for spec in language:
        if len(spec.shape) != 2:
            raise InputError(
                f"text cannot feed input {spec.name!r} of shape {spec.shape}, only (samples, tokens); "
                "use --data synthetic"
            )
    length = max(spec.shape[1] for spec in language)
    windows = (len(content) - 1) // length
    if windows < 1:
        unit = "bytes" if content.dtype == np.uint8 else "tokens"
        raise InputError(f"{source} has {len(content)} {unit}, a sample needs {length + 1}; give a longer one")

    def sample(spec: BatchInput, rows: Rows) -> Tensor:
        if spec.kind not in LANGUAGE_KINDS:
            raise InputError(f"text cannot feed input {spec.name!r} of kind {spec.kind!r}; use --data synthetic")
        starts = rows * length + (1 if spec.kind == "next_tokens" else 0)
        places = starts[:, None] + np.arange(spec.shape[1])
        tokens = content[places].astype(np.int64)
        if spec.high is not None and tokens.size:
            _check_vocabulary(content, places, tokens, spec.high, source)
        return torch.from_numpy(tokens)

    def check(specs: tuple[BatchInput, ...]) -> None:
        bounds = [spec.high for spec in specs if spec.kind in LANGUAGE_KINDS and spec.high is not None]
        if not bounds or np.iinfo(content.dtype).max < min(bounds):
            return
        for first in range(0, len(content), PIECE):  # better known now than in the middle of training
            tokens = np.asarray(content[first : first + PIECE])
            if tokens.min() < 0 or tokens.max() >= min(bounds):
                places = np.arange(first, first + len(tokens))
                _check_vocabulary(content, places, tokens.astype(np.int64), min(bounds), source)

    return Dataset(description=description, samples=windows, sample=sample, check=check)


def _check_vocabulary(content: Tokens, places: Rows, tokens: Rows, high: int, source: str) -> None:
    wrong = np.flatnonzero((tokens < 0) | (tokens >= high))
    if len(wrong):
        place = int(places.reshape(-1)[wrong[0]])
        raise InputError(
            f"{source} has token {int(tokens.reshape(-1)[wrong[0]])} at byte {token_offset(content, place)}, the "
            f"network's vocabulary {high} tokens; use a network with more or --data synthetic"
        )


def _bundled_text() -> Path:
    """Find the English text that comes with every Python: the help topics of its documentation."""
    found = importlib.util.find_spec("pydoc_data.topics")
    if found is None or found.origin is None:
        raise InputError("this Python comes without its help topics; name a text file with --data text:FILE")
    return Path(found.origin)


def _synthetic(seed: int) -> Dataset:
    def one(spec: BatchInput, row: int) -> NDArray[np.float64]:
        generator = np.random.default_rng((seed, row, *spec.name.encode()))
        if spec.dtype.is_floating_point:
            return generator.standard_normal(spec.shape[1:])
        return generator.integers(0, spec.high or 2, spec.shape[1:]).astype(np.float64)

    def sample(spec: BatchInput, rows: Rows) -> Tensor:
        return torch.from_numpy(np.stack([one(spec, int(row)) for row in rows])).to(spec.dtype)

    return Dataset(description="synthetic", samples=SYNTHETIC_SAMPLES, sample=sample)
