"""Parts of a profile file on what processes of one machine do to each other, and on what it was like meanwhile."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from simulator.conditions import Conditions
from simulator.profile_parts import Count, NonNegative, Part, Positive, Source
from simulator.program import Kernel

Factors = Annotated[list[Annotated[float, Field(ge=1, lt=1e6)]], Field(min_length=1, max_length=100)]


class SlowdownPart(Part):
    """How processes that share this machine's cores slow each other.

    ``waiting`` is the part of these factors in which ranks wait, between two messages, for the slowest of them.
    """

    processes: Annotated[list[Count], Field(min_length=1, max_length=100)]
    factor: Factors
    by_kernel: dict[Kernel, Factors] = Field(default_factory=dict)
    waiting: Factors | None = None
    source: Source

    def of_kernels(self) -> dict[Kernel, tuple[tuple[int, float], ...]]:
        """Counts and factors of the classes that have their own."""
        found = self.by_kernel.items()
        return {kernel: tuple(zip(self.processes, factors, strict=True)) for kernel, factors in found}

    @model_validator(mode="after")
    def _lists_agree(self) -> SlowdownPart:
        for factors in (self.factor, *self.by_kernel.values(), *([self.waiting] if self.waiting else [])):
            if len(self.processes) != len(factors):
                raise ValueError(f"{len(self.processes)} processes but {len(factors)} factors")
        if self.processes != sorted(set(self.processes)) or self.processes[0] != 1:
            raise ValueError("processes must ascend from 1")
        return self


class CrowdingPart(Part):
    """What messages of a group cost more while others compute on the same cores."""

    group_size: Annotated[int, Field(ge=2)]
    processes: Annotated[int, Field(ge=3)]
    delay_s: NonNegative
    stretch: Annotated[float, Field(ge=1, lt=1e6)]
    source: Source

    @model_validator(mode="after")
    def _others_are_there(self) -> CrowdingPart:
        if self.processes <= self.group_size:
            raise ValueError(f"{self.processes} processes leave none beside a group of {self.group_size}")
        return self


class ConditionsPart(Part):
    """How fast and how quiet the machine was: seconds of typical kernels on so many processes, and what disturbed."""

    processes: Annotated[list[Count], Field(min_length=1, max_length=100)]
    pace_s: Annotated[list[Positive], Field(min_length=1, max_length=100)]
    pace_spread: NonNegative
    others_share: NonNegative
    stolen_share: NonNegative
    source: Source

    @model_validator(mode="after")
    def _lists_agree(self) -> ConditionsPart:
        if len(self.processes) != len(self.pace_s):
            raise ValueError(f"{len(self.processes)} processes but {len(self.pace_s)} times")
        if self.processes != sorted(set(self.processes)) or self.processes[0] != 1:
            raise ValueError("processes must ascend from 1")
        return self

    def conditions(self) -> Conditions:
        """The same for the simulator."""
        return Conditions(
            paces=tuple(zip(self.processes, self.pace_s, strict=True)),
            pace_spread=self.pace_spread,
            others_share=self.others_share,
            stolen_share=self.stolen_share,
        )
