"""Which published rows speak for which shipped profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from simulator.errors import InputError

TILES: Mapping[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    "nvidia": (
        ((256, 128), (128, 256), (128, 128)),
        ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64)),
    ),
    "ascend": (((256, 128), (128, 256), (128, 128)),),
}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which published rows speak for one profile: what their columns accelerator and inter_node_link hold.

    ``like`` are the profiles, nearest first, whose numbers count where this one's device has no rows.
    ``training_attention`` is the accelerator of the rows of attention kernels forward and backward and of grouped
    products, ``attention`` that of inference kernels; ``sustained`` says that the former are of this device under
    lasting load. ``node_link`` and ``link`` are the datasheet rates of a device inside a node and of its network
    port (no ``fabric``: multi-node rows stand for another network), ``peak_flops`` is the 16-bit peak and
    ``measured_multiprocessors`` the cores of the measured device where that is another one than the profile's.
    """

    profile: str
    multiprocessors: int
    multiprocessors_source: str
    like: tuple[str, ...] = ()
    gemm: str = ""
    attention: str = ""
    training_attention: str = ""
    stream: tuple[str, ...] = ()
    layers: str = ""
    node: tuple[str, ...] = ()
    node_sizes: tuple[int, ...] = (2, 4, 8)
    node_link: float = 1e13
    fabric: str = ""
    fabric_links: str = ""
    link: float = 0.0
    fixed_link: bool = False
    peak_flops: float = 0.0
    measured_multiprocessors: int = 0
    images: str = ""
    sustained: bool = False
    tiles: str = "nvidia"


@lru_cache(maxsize=1)
def fit_rows() -> tuple[Rows, ...]:
    """The rows of every profile, as ``fit_rows.yaml`` has them."""
    text = (resources.files(__package__) / "fit_rows.yaml").read_text(encoding="utf-8")
    items: list[dict[str, Any]] = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
        for item in yaml.safe_load(text)
    ]
    return tuple(Rows(**item) for item in items)


def rows_of(profile: str) -> Rows:
    """Rows for a shipped profile; InputError for one that no rows speak for."""
    for rows in fit_rows():
        if rows.profile == profile:
            return rows
    known = ", ".join(rows.profile for rows in fit_rows())
    raise InputError(f"no published measurements are known for profile {profile!r}; choose among {known}")
