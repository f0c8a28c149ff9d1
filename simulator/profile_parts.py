"""Values of a profile's schema: numbers in range, each with its source."""

from __future__ import annotations

import re
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _check_source(text: str) -> str:
    kind, _, detail = text.partition(":")
    if kind not in {"datasheet", "measured", "fitted", "assumed"} or len(detail.strip()) < 8:
        raise ValueError("a source reads 'datasheet: ...', 'measured: ...', 'fitted: ...' or 'assumed: ...'")
    if kind == "measured" and not re.search(r"\d{4}-\d{2}-\d{2}", detail):
        raise ValueError("a measured source names command, machine and date (YYYY-MM-DD)")
    if kind == "fitted" and not ("row" in detail and "error" in detail):
        raise ValueError("a fitted source names the rows ('... 240 rows') and the error ('... error 8 %')")
    return text


def _check_positive(value: float) -> float:
    if value < SMALLEST:  # products and ratios of such numbers leave the range of floats
        raise ValueError(f"a positive number of a profile is at least {SMALLEST:g}")
    return value


SMALLEST = 1e-30
Source = Annotated[str, Field(max_length=1000), AfterValidator(_check_source)]
Positive = Annotated[float, Field(gt=0, lt=1e30), AfterValidator(_check_positive)]
NonNegative = Annotated[float, Field(ge=0, lt=1e30)]
Fraction = Annotated[float, Field(gt=0, le=1), AfterValidator(_check_positive)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Dtype = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+$")]
ValueType = TypeVar("ValueType")


class Part(BaseModel):
    """A mapping of the file: no unknown keys, no conversions, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Sourced(Part, Generic[ValueType]):
    """A value and where it comes from."""

    value: ValueType
    source: Source
