"""The schema of a profile file: its values, each with its source, and its parts, with the models made from them."""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from simulator.crowding import Conditions
from simulator.hardware import AttentionModel, AttentionPasses, FabricGraph, Level, MatmulModel, NodeGraph
from simulator.program import Collective, Kernel


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


class LevelPart(Part):
    """One level of the topology."""

    name: Name
    size: Sourced[Count]
    bandwidth_bytes_per_s: Sourced[Positive]
    latency_s: Sourced[NonNegative]
    reduction_bandwidth_bytes_per_s: Sourced[Positive] | None = None


class NodePart(Part):
    """What joins the devices of a node, and which of them share a NIC."""

    kind: Sourced[
        Literal[
            "nvswitch", "hybrid-cube-mesh", "ring", "full-mesh", "hccs-quads", "nvlink-islands",
            "pcie-tree", "supernode", "torus",
        ]
    ]  # fmt: skip
    nics: Sourced[Count]
    group: Sourced[Count] | None = None
    shape: Sourced[Annotated[list[Count], Field(min_length=1, max_length=3)]] | None = None
    host_bandwidth_bytes_per_s: Sourced[Positive] | None = None
    host_latency_s: Sourced[NonNegative] | None = None


class FabricPart(Part):
    """What joins the nodes."""

    kind: Sourced[Literal["fat-tree", "rail-optimised"]]
    nodes_per_leaf: Sourced[Count] | None = None
    oversubscription: Sourced[Annotated[float, Field(ge=1, lt=1e6)]] | None = None


class TopologyPart(Part):
    """Which device counts exist and what joins them, innermost level first."""

    max_devices: Sourced[Count]
    devices_per_node: Sourced[Count]
    node_device_counts: Sourced[Annotated[list[Count], Field(min_length=1)]]
    collective_overhead_s: Sourced[NonNegative] | None = None
    host_memory_bytes: Sourced[Positive] | None = None
    host_memory_bandwidth_bytes_per_s: Sourced[Positive] | None = None
    disk_bandwidth_bytes_per_s: Sourced[Positive] | None = None
    collective_algorithms: (
        Sourced[list[Literal["tree", "hierarchical", "switch", "halving-doubling", "mesh", "ring-halving"]]] | None
    ) = None
    pinned_algorithms: Sourced[dict[Collective, Annotated[str, Field(max_length=100)]]] | None = None
    levels: Annotated[list[LevelPart], Field(min_length=1, max_length=8)]
    node: NodePart | None = None
    fabric: FabricPart | None = None

    @model_validator(mode="after")
    def _sizes_agree(self) -> TopologyPart:
        sizes = [level.size.value for level in self.levels]
        if any(inner >= outer for inner, outer in itertools.pairwise(sizes)):
            raise ValueError(f"level sizes must grow from the innermost level outwards, got {sizes}")
        if sizes[-1] != self.max_devices.value:
            raise ValueError(
                f"the outermost level holds {sizes[-1]} devices, max_devices says {self.max_devices.value}"
            )
        if self.devices_per_node.value > self.max_devices.value:
            raise ValueError("devices_per_node must not exceed max_devices")
        _check_whole_units(sizes, self.devices_per_node.value)
        counts = self.node_device_counts.value
        if counts != sorted(set(counts)) or counts[-1] > self.devices_per_node.value:
            raise ValueError("node_device_counts must ascend and not exceed devices_per_node")
        if len({level.name for level in self.levels}) != len(self.levels):
            raise ValueError("level names must differ")
        return self

    @model_validator(mode="after")
    def _graphs_agree(self) -> TopologyPart:
        if self.fabric is not None and self.node is None:
            raise ValueError("fabric needs node: say what joins the devices of a node and how many NICs it has")
        if self.node is not None and self.devices_per_node.value % self.node.nics.value:
            raise ValueError(
                f"node.nics {self.node.nics.value} does not divide devices_per_node {self.devices_per_node.value}; "
                f"equal runs of devices share a NIC"
            )
        if self.fabric is not None and (self.fabric.nodes_per_leaf is None) != (self.fabric.oversubscription is None):
            raise ValueError("fabric.nodes_per_leaf and fabric.oversubscription belong together; give both or neither")
        if self.fabric is not None and self.fabric.nodes_per_leaf is not None:
            _check_leaf([level.size.value for level in self.levels], self._leaf(self.fabric.nodes_per_leaf.value))
        return self

    @model_validator(mode="after")
    def _pinned_exist(self) -> TopologyPart:
        from simulator.collectives import ALGORITHMS

        for collective, name in self.pinned_algorithms.value.items() if self.pinned_algorithms else ():
            if name not in ALGORITHMS[collective]:
                known = ", ".join(ALGORITHMS[collective])
                raise ValueError(f"pinned_algorithms: {collective.value} has no algorithm {name!r}; use one of {known}")
        return self

    def _leaf(self, nodes: int) -> int:
        return nodes * self.devices_per_node.value

    def hardware_levels(self) -> tuple[Level, ...]:
        """Levels; an oversubscribed fabric makes two of the outermost, its leaves and its spine."""
        levels = tuple(map(_level, self.levels))
        fabric = self.fabric
        if fabric is None or fabric.oversubscription is None or fabric.nodes_per_leaf is None:
            return levels
        outer = levels[-1]
        size = self._leaf(fabric.nodes_per_leaf.value)
        leaf = Level(
            name=f"{outer.name} leaf",
            size=size,
            bandwidth_bytes_per_s=outer.bandwidth_bytes_per_s,
            latency_s=outer.latency_s,
        )
        bandwidth = outer.bandwidth_bytes_per_s / fabric.oversubscription.value
        spine = Level(name=outer.name, size=outer.size, bandwidth_bytes_per_s=bandwidth, latency_s=outer.latency_s)
        return (*levels[:-1], leaf, spine)

    def graphs(self) -> dict[str, Any]:
        """Graphs of the node and of the fabric, and pinned algorithms, as fields of `Hardware`."""
        graphs: dict[str, Any] = {}
        if self.pinned_algorithms is not None:
            graphs["pinned_algorithms"] = self.pinned_algorithms.value
        if self.node is not None:
            graphs["node"] = NodeGraph(**_values(self.node))
        if self.fabric is not None:
            graphs["fabric"] = FabricGraph(kind=self.fabric.kind.value)
        return graphs


def _values(part: NodePart) -> dict[str, Any]:
    given = {name: entry.value for name, entry in part if entry is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _level(part: LevelPart) -> Level:
    reduction = part.reduction_bandwidth_bytes_per_s
    return Level(
        name=part.name,
        size=part.size.value,
        bandwidth_bytes_per_s=part.bandwidth_bytes_per_s.value,
        latency_s=part.latency_s.value,
        reduction_bandwidth_bytes_per_s=reduction.value if reduction else 0.0,
    )


def _check_leaf(sizes: list[int], leaf: int) -> None:
    inside = sizes[-2] if len(sizes) > 1 else 1
    if not inside < leaf < sizes[-1] or sizes[-1] % leaf or leaf % inside:
        raise ValueError(
            f"fabric.nodes_per_leaf makes leaves of {leaf} devices; a leaf holds several units of {inside} and divides "
            f"the outermost level of {sizes[-1]}: change nodes_per_leaf or max_devices"
        )


def _check_whole_units(sizes: list[int], node: int) -> None:
    """A level holds whole units of the one inside it, and a node is such a unit or lies inside the innermost."""
    for place, (inner, outer) in enumerate(itertools.pairwise(sizes)):
        if outer % inner:
            near = -(-outer // inner) * inner
            raise ValueError(
                f"levels.{place}.size {inner} does not divide levels.{place + 1}.size {outer}; a level holds whole "
                f"units of the one inside it: make {outer} a multiple of {inner}, for example {near}"
            )
    if node not in sizes and sizes[0] % node:
        known = ", ".join(map(str, sizes))
        raise ValueError(
            f"devices_per_node {node} is not the size of a level ({known}) and does not divide levels.0.size "
            f"{sizes[0]}; a node is a unit of a level or lies inside the innermost: use {known} or a divisor of "
            f"{sizes[0]}"
        )


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


_NUMBERS = {
    "sustained_matmul_speed": 1.0,
    "grouped_matmul_rows": 0.0,
    "convolution_efficiency": None,
    "grouped_convolution_efficiency": None,
}
"""Optional numbers of `OperatorsPart`, as they are where a profile does not say them."""


def operator_models(part: OperatorsPart | None) -> dict[str, Any]:
    """Models by shape as fields of `Hardware`; none of them for a profile that has no such part."""
    if part is None:
        return {}
    given = {name: getattr(part, name) for name in _NUMBERS}
    return {
        **{name: default if given[name] is None else given[name].value for name, default in _NUMBERS.items()},
        "matmul_models": {dtype: _matmul(model) for dtype, model in part.matmul.items()},
        "attention_models": {
            kind: AttentionPasses(forward=_attention(model.forward), backward=_attention(model.backward))
            for kind, model in part.attention.items()
        },
    }


def _matmul(part: MatmulPart) -> MatmulModel:
    numbers = part.model_dump(exclude={"tiles", "log10_flops", "utilisation", "source"})
    return MatmulModel(
        tiles=tuple((tile[0], tile[1]) for tile in part.tiles),
        utilisation=tuple(zip(part.log10_flops, part.utilisation, strict=True)),
        **numbers,
    )


def _attention(part: AttentionDirectionPart) -> AttentionModel:
    return AttentionModel(**part.model_dump(exclude={"source"}))


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
