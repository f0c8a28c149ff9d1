"""The file of what software makes of a training step: coefficients of stacks and attention kernels, intervals.

One YAML, shipped as ``hw_profiles/software/training.yaml``; every coefficient stands with its source, as in profiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from planner.estimate.coefficients import SoftwareCoefficients
from simulator.errors import ProfileError
from simulator.profile_parts import Count, NonNegative, Part, Sourced
from simulator.whole_file import write_whole

SHIPPED = "training.yaml"


class IntervalPart(Part):
    """Where 90 % of the measured times of runs alike lie: from ``1 - low`` to ``1 + high`` of the prediction."""

    family: str
    stack: str
    low: float = Field(ge=0, lt=1)
    high: float = Field(ge=0, lt=20)
    rows: Count


class SoftwarePart(Part):
    """The whole file."""

    format: Literal["meshwright-software"]
    version: Literal[1]
    stacks: dict[str, dict[str, Sourced[NonNegative]]]
    attention: dict[str, Sourced[NonNegative]]
    layered: dict[str, dict[str, Sourced[NonNegative]]] = Field(default_factory=dict)
    intervals: list[IntervalPart] = Field(default_factory=list)
    intervals_source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A prediction interval, relative to the prediction, and the number of rows it rests on."""

    low: float
    high: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class Software:
    """The file's content: coefficients, and intervals by device family and stack (``*`` for any)."""

    coefficients: SoftwareCoefficients
    layered: Mapping[str, Mapping[str, float]]
    intervals: Mapping[tuple[str, str], Interval]

    def interval(self, family: str, stack: str) -> tuple[Interval, str]:
        """Interval and label of a run: of its own family and stack, of one of the two, or of everything."""
        both = self.intervals.get((family, stack))
        if both is not None:
            return both, "calibrated"
        near = [self.intervals[key] for key in ((family, "*"), ("*", stack)) if key in self.intervals]
        if near:
            widest = max(near, key=lambda interval: interval.low + interval.high)
            return widest, "interpolated" if len(near) == 2 else "extrapolated"
        return self.intervals.get(("*", "*"), Interval(low=0.3, high=0.5, rows=1)), "extrapolated"


def parse_software(text: str, name: str) -> Software:
    """Validate the text of a software file; ProfileError names file and field."""
    try:
        part = SoftwarePart.model_validate(yaml.safe_load(text))
    except (ValidationError, yaml.YAMLError) as error:
        raise ProfileError(f"software file {name}: {error}; see docs/profiles.md for the format") from error
    return Software(
        coefficients=SoftwareCoefficients(
            stacks={stack: _values(entries) for stack, entries in part.stacks.items()},
            attention=_values(part.attention),
        ),
        layered={stack: _values(entries) for stack, entries in part.layered.items()},
        intervals={
            (entry.family, entry.stack): Interval(low=entry.low, high=entry.high, rows=entry.rows)
            for entry in part.intervals
        },
    )


def _values(entries: Mapping[str, Sourced[float]]) -> dict[str, float]:
    return {name: entry.value for name, entry in entries.items()}


@lru_cache(maxsize=1)
def shipped_software() -> Software:
    """The software file that comes with the package."""
    resource = resources.files("hw_profiles") / "software" / SHIPPED
    return parse_software(resource.read_text(encoding="utf-8"), f"hw_profiles/software/{SHIPPED}")


def write_software(content: Mapping[str, Any], path: Path) -> Software:
    """Validate `content` and write it to `path`, whole or not at all."""
    text = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=120)
    software = parse_software(text, str(path))
    write_whole(path, text)
    return software
