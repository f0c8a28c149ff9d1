"""Schema of a profile's models of operators by shape, and the models made from it."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, TypedDict

from pydantic import Field, model_validator

from simulator.hardware import AttentionModel, AttentionPasses, MatmulModel
from simulator.profile_parts import Dtype, Fraction, NonNegative, Part, Positive, Source, Sourced

TileSide = Annotated[int, Field(ge=1, le=4096)]
Share = Annotated[float, Field(ge=0, le=1)]


class MatmulPart(Part):
    """Matrix products of one precision by shape."""

    tiles: Annotated[list[Annotated[list[TileSide], Field(min_length=2, max_length=2)]], Field(min_length=1)]
    compute_efficiency: Fraction
    bandwidth_efficiency: Fraction
    overhead_s: NonNegative
    fill_depth: NonNegative
    tile_loss: NonNegative
    wave_share: Share
    split_share: Share = 0.0
    log10_flops: list[Annotated[float, Field(ge=0, le=40)]] = Field(default_factory=list, max_length=50)
    utilisation: list[Positive] = Field(default_factory=list, max_length=50)
    source: Source

    @model_validator(mode="after")
    def _more_work_takes_longer(self) -> MatmulPart:
        if len(self.log10_flops) != len(self.utilisation):
            raise ValueError(f"{len(self.log10_flops)} log10_flops but {len(self.utilisation)} utilisations")
        for (low, below), (high, above) in itertools.pairwise(zip(self.log10_flops, self.utilisation, strict=True)):
            if low >= high:
                raise ValueError("log10_flops must ascend")
            if above > below * 10 ** (high - low):
                raise ValueError(f"utilisation {above:g} at 1e{high:g} FLOPs makes more work take less time")
        if self.utilisation and max(self.utilisation) * self.compute_efficiency > 1:
            raise ValueError("compute_efficiency times utilisation exceeds 1, the peak")
        return self


class AttentionDirectionPart(Part):
    """Fused attention in one direction."""

    compute_efficiency: Fraction
    bandwidth_efficiency: Fraction
    overhead_s: NonNegative
    tile_queries: TileSide
    fill_keys: NonNegative
    fill_head_size: NonNegative
    wave_share: Share
    source: Source


class AttentionPart(Part):
    """One kind of fused attention."""

    forward: AttentionDirectionPart
    backward: AttentionDirectionPart


class OperatorsPart(Part):
    """Operators timed by their shape."""

    matmul: Annotated[dict[Dtype, MatmulPart], Field(min_length=1)]
    sustained_matmul_speed: Sourced[Fraction] | None = None
    grouped_matmul_rows: Sourced[NonNegative] | None = None
    convolution_efficiency: Sourced[Fraction] | None = None
    grouped_convolution_efficiency: Sourced[Fraction] | None = None
    attention: dict[Literal["flash", "flash2", "vendor"], AttentionPart] = Field(default_factory=dict)


class OverlapPart(Part):
    """Part of their speed that kernels and messages keep while they run beside each other."""

    compute_speed: Sourced[Fraction]
    transfer_speed: Sourced[Fraction]


class OperatorModels(TypedDict):
    """The fields of `Hardware` that come from `OperatorsPart`."""

    matmul_models: dict[str, MatmulModel]
    sustained_matmul_speed: float
    grouped_matmul_rows: float
    convolution_efficiency: float | None
    grouped_convolution_efficiency: float | None
    attention_models: dict[str, AttentionPasses]


def operator_models(part: OperatorsPart | None) -> OperatorModels:
    """Models by shape; none of them for a profile that has no such part."""
    if part is None:
        return OperatorModels(
            matmul_models={},
            sustained_matmul_speed=1.0,
            grouped_matmul_rows=0.0,
            convolution_efficiency=None,
            grouped_convolution_efficiency=None,
            attention_models={},
        )
    sustained, grouped = part.sustained_matmul_speed, part.grouped_matmul_rows
    convolution, direct = part.convolution_efficiency, part.grouped_convolution_efficiency
    return OperatorModels(
        matmul_models={dtype: _matmul(model) for dtype, model in part.matmul.items()},
        sustained_matmul_speed=sustained.value if sustained else 1.0,
        grouped_matmul_rows=grouped.value if grouped else 0.0,
        convolution_efficiency=convolution.value if convolution else None,
        grouped_convolution_efficiency=direct.value if direct else None,
        attention_models={
            kind: AttentionPasses(forward=_attention(model.forward), backward=_attention(model.backward))
            for kind, model in part.attention.items()
        },
    )


def _matmul(part: MatmulPart) -> MatmulModel:
    numbers = part.model_dump(exclude={"tiles", "log10_flops", "utilisation", "source"})
    return MatmulModel(
        tiles=tuple((tile[0], tile[1]) for tile in part.tiles),
        utilisation=tuple(zip(part.log10_flops, part.utilisation, strict=True)),
        **numbers,
    )


def _attention(part: AttentionDirectionPart) -> AttentionModel:
    return AttentionModel(**part.model_dump(exclude={"source"}))
