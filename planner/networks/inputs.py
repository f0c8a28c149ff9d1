"""The batch tensors that a network takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """A batch tensor of a network; ``shape`` leaves the batch out, ``kind`` and ``high`` are `NetworkInput`'s."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int | None = None
