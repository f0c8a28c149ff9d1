"""Robust fits: the smallest mean of ``|ln(predicted / measured)|``, which outliers move little."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from simulator.errors import InputError

FloatArray = NDArray[np.float64]
COMMAND = "meshwright calibrate --from-measurements"


@dataclass(frozen=True, kw_only=True)
class FittedValues:
    """Fitted values and how well they meet their rows.

    ``what`` says which rows; ``ratios`` are ``ln(predicted / measured)``, ``before`` those of the model that the
    fit replaces.
    """

    name: str
    what: str
    numbers: Mapping[str, float]
    ratios: FloatArray
    before: FloatArray | None = None

    @property
    def errors(self) -> tuple[float, float]:
        """Median and 90th percentile of the relative error ``exp(|ratio|) - 1``."""
        return _errors(self.ratios)

    @property
    def errors_before(self) -> tuple[float, float] | None:
        """The same of the model that the fit replaces, if that is known."""
        return None if self.before is None else _errors(self.before)

    def source(self, note: str = "") -> str:
        """The source that a profile quotes."""
        median, tail = self.errors
        text = f"fitted: {COMMAND}, {self.name}: {len(self.ratios)} rows of {self.what}, median error {median:.1%}, "
        return text + f"90th percentile {tail:.1%}" + (f"; {note}" if note else "")

    def __str__(self) -> str:
        median, tail = self.errors
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.numbers.items())
        bias = np.exp(np.median(self.ratios)) - 1
        text = f"{self.name}: {values}; {len(self.ratios)} rows, median error {median:.1%}, p90 {tail:.1%}"
        if self.errors_before:
            text += ", before {:.1%} and {:.1%}".format(*self.errors_before)
        return f"{text}, bias {bias:+.1%}"


def minimise(loss: Callable[[FloatArray], float], start: Sequence[float], upper: Sequence[float]) -> FloatArray:
    """Compass search in the logarithm: step up and down along each number, halve the step when nothing helps."""
    point, limit = np.log(np.asarray(start)), np.log(np.asarray(upper))
    best, step = loss(np.exp(point)), 0.5
    while step > 1e-3:
        improved = False
        for index in range(len(point)):
            for sign in (step, -step):
                trial = point.copy()
                trial[index] = min(trial[index] + sign, limit[index])
                value = loss(np.exp(trial))
                if value < best - 1e-9:
                    point, best, improved = trial, value, True
        step = step if improved else step / 2
    return np.asarray(np.exp(point))


def rounded(value: float, least: float = 0.0) -> float:
    """`value` to four significant digits; 0 below `least`, which no row can tell from nothing."""
    return float(f"{value:.4g}") if value >= least else 0.0


def _errors(ratios: FloatArray) -> tuple[float, float]:
    errors = np.exp(np.abs(ratios)) - 1
    return float(np.median(errors)), float(np.quantile(errors, 0.9))


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
