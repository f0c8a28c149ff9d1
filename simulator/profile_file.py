"""Reading, checking and writing the YAML file of a hardware profile.

The schema makes every number carry its source: ``{value: 312.0e12, source: "datasheet: ..."}``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from simulator.crowding import Crowding
from simulator.errors import ProfileError
from simulator.hardware import (
    DISK_BANDWIDTH,
    HOST_MEMORY_BANDWIDTH,
    Caches,
    CollectiveTable,
    Hardware,
    KernelModel,
    ProfileRow,
    Reliability,
    Uncertainty,
    format_number,
)
from simulator.input_file import FileKind
from simulator.profile_parts import (
    ConditionsPart,
    Count,
    CrowdingPart,
    Dtype,
    Fraction,
    Name,
    NonNegative,
    OperatorsPart,
    OverlapPart,
    Part,
    Positive,
    Share,
    SlowdownPart,
    Source,
    Sourced,
    TopologyPart,
    operator_models,
)
from simulator.program import WIDER_CLASS, Collective, Kernel, described_class
from simulator.shipped_profiles import with_base
from simulator.topology import check_graph
from simulator.whole_file import write_whole

VERSION = 1
MAX_ERRORS_SHOWN = 5
REMEDY = "see docs/profiles.md for the format"
PROFILE = FileKind(
    name="profile", remedy="give a profile's name or a YAML file in the format of docs/profiles.md", error=ProfileError
)


class DevicePart(Part):
    """One accelerator (or one process of a CPU machine)."""

    name: Name
    memory_bytes: Sourced[Annotated[int, Field(gt=0, lt=10**18)]]
    reserved_memory_bytes: Sourced[Annotated[int, Field(ge=0, lt=10**18)]]
    memory_bandwidth_bytes_per_s: Sourced[Positive]
    peak_flops: Annotated[dict[Dtype, Sourced[Positive]], Field(min_length=1)]
    multiprocessors: Sourced[Count] | None = None
    board_power_w: Sourced[Positive] | None = None
    own_cache_bytes: Sourced[Annotated[int, Field(ge=0, lt=10**15)]] | None = None
    shared_cache_bytes: Sourced[Annotated[int, Field(ge=0, lt=10**15)]] | None = None
    pace_s: Sourced[Positive] | None = None  # of profiles that know no conditions; nothing reads it

    @model_validator(mode="after")
    def _some_memory_is_left(self) -> DevicePart:
        if self.reserved_memory_bytes.value >= self.memory_bytes.value:
            raise ValueError("reserved_memory_bytes must be smaller than memory_bytes")
        return self


class KernelPart(Part):
    """Speed of one class of kernels."""

    compute_efficiency: Sourced[Fraction]
    bandwidth_efficiency: Sourced[Fraction]
    overhead_s: Sourced[NonNegative]
    peak_flops: dict[Dtype, Sourced[Positive]] = Field(default_factory=dict)
    serial_share: Sourced[Share] | None = None
    cached_bandwidth_bytes_per_s: Sourced[Positive] | None = None


class CollectivePart(Part):
    """Measured times of one collective in one group size."""

    collective: Collective
    group_size: Annotated[int, Field(ge=2, le=1_000_000)]
    payload_bytes: Annotated[list[Positive], Field(min_length=1, max_length=200)]
    seconds: Annotated[list[Positive], Field(min_length=1, max_length=200)]
    source: Source

    @model_validator(mode="after")
    def _lists_agree(self) -> CollectivePart:
        if len(self.payload_bytes) != len(self.seconds):
            raise ValueError(f"{len(self.payload_bytes)} payload_bytes but {len(self.seconds)} seconds")
        if any(low >= high for low, high in itertools.pairwise(self.payload_bytes)):
            raise ValueError("payload_bytes must ascend")
        return self


class UncertaintyPart(Part):
    """Relative half-widths of the interval of a predicted time, and what they rest on."""

    low: Annotated[float, Field(ge=0, lt=1)]
    high: Annotated[float, Field(ge=0, le=10)]
    label: Literal["calibrated", "interpolated", "extrapolated"]
    source: Source


class ReliabilityPart(Part):
    """How devices fail, and what a restart and a checkpoint meet."""

    device_mtbf_s: Sourced[Positive] | None = None
    restart_s: Sourced[NonNegative] | None = None
    storage_bandwidth_bytes_per_s: Sourced[Positive] | None = None
    snapshot_bandwidth_bytes_per_s: Sourced[Positive] | None = None
    compute_spread: Sourced[Annotated[float, Field(ge=0, lt=1)]] | None = None


class TrainingPart(Part):
    """Corrections of whole training steps: what kernels and messages take there over what they take alone.

    Those called ``planned`` hold what software adds as well, and count in plans and simulations.
    """

    matmul: Sourced[Positive] | None = None
    low_precision: Sourced[Positive] | None = None
    attention: Sourced[Positive] | None = None
    memory: Sourced[Positive] | None = None
    convolution: Sourced[Positive] | None = None
    image: Sourced[Positive] | None = None
    inside: Sourced[Positive] | None = None
    outside: Sourced[Positive] | None = None
    launch: Sourced[Positive] | None = None
    planned_matmul: Sourced[Positive] | None = None
    planned_attention: Sourced[Positive] | None = None
    planned_convolution: Sourced[Positive] | None = None
    planned_memory: Sourced[Positive] | None = None
    planned_optimizer: Sourced[Positive] | None = None
    planned_inside: Sourced[Positive] | None = None
    planned_outside: Sourced[Positive] | None = None
    planned_launch_s: Sourced[Positive] | None = None


class ProfilePart(Part):
    """The whole file."""

    format: Literal["meshwright-profile"]
    version: Annotated[int, Field(ge=VERSION, le=VERSION)]
    name: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: Annotated[str, Field(max_length=2000)]
    default_precision: Sourced[Literal["bfloat16", "float16", "float32", "float64"]]
    device: DevicePart
    kernels: dict[Kernel, KernelPart]
    topology: TopologyPart
    overlaps_communication: Sourced[bool]
    uncertainty: UncertaintyPart
    collectives: list[CollectivePart] = Field(default_factory=list)
    compute_slowdown: SlowdownPart | None = None
    message_crowding: list[CrowdingPart] | None = None
    conditions: ConditionsPart | None = None
    message_workspace: Sourced[dict[Collective, NonNegative]] | None = None
    message_copies_apart: Sourced[bool] | None = None
    reliability: ReliabilityPart = ReliabilityPart()
    operators: OperatorsPart | None = None
    overlap: OverlapPart | None = None
    training: TrainingPart | None = None

    @model_validator(mode="after")
    def _every_kernel_is_there(self) -> ProfilePart:
        needed = (kernel for kernel in Kernel if kernel is not Kernel.VIEW and kernel not in WIDER_CLASS)
        missing = [kernel.value for kernel in needed if kernel not in self.kernels]
        if missing:
            raise ValueError(f"kernels lacks {', '.join(missing)}")
        if self.default_precision.value not in self.device.peak_flops:
            raise ValueError(f"default_precision {self.default_precision.value} has no entry in device.peak_flops")
        tables = [(table.collective, table.group_size) for table in self.collectives]
        if len(set(tables)) != len(tables):
            raise ValueError("collectives has two tables for one collective and group size")
        if self.operators and not self.device.multiprocessors:
            raise ValueError("operators needs device.multiprocessors")
        return self


@lru_cache(maxsize=32)
def parse_profile(content: bytes, file: str) -> Hardware:
    """Hardware from the bytes of a profile; ProfileError names `file` and the field that is wrong."""
    data = PROFILE.yaml(content, file)
    if not isinstance(data, dict):
        raise ProfileError(f"profile {file} is empty or no mapping; {REMEDY}")
    hardware = _hardware(_validate(with_base(data, file), file))
    try:
        check_graph(hardware)
    except ProfileError as error:
        raise ProfileError(f"profile {file}: topology.node: {error}") from None
    return hardware


def check_content(content: Mapping[str, object], file: str) -> tuple[str, Hardware]:
    """YAML text and hardware of `content`; ProfileError names `file` and the field that is wrong."""
    _validate(with_base(content, file), file)
    plain = json.loads(json.dumps(dict(content)))  # no object twice: the dumper would write aliases
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
    return text, parse_profile(text.encode(), file)


def write_content(content: Mapping[str, object], path: Path) -> Hardware:
    """Validate `content` and write it as YAML, whole or not at all."""
    text, hardware = check_content(content, str(path))
    write_whole(path, text)
    return hardware


def _validate(data: dict[str, Any], file: str) -> ProfilePart:
    try:
        return ProfilePart.model_validate_json(json.dumps(data))
    except ValidationError as error:
        found = validation_problems(error)
    except (TypeError, ValueError) as error:
        found = f"holds a value that is no text, number, list or mapping ({error})"
    raise ProfileError(f"profile {file}: {found}; {REMEDY}")


def validation_problems(error: ValidationError) -> str:
    """The first few problems of a file, each with its field."""
    problems = [_problem(detail) for detail in error.errors(include_url=False)]
    more = [f"and {len(problems) - MAX_ERRORS_SHOWN} more"] if len(problems) > MAX_ERRORS_SHOWN else []
    return "; ".join([*problems[:MAX_ERRORS_SHOWN], *more])


def _problem(detail: Any) -> str:
    place = ".".join(str(part) for part in detail["loc"] if part != "[key]")
    message = str(detail["msg"]).removeprefix("Value error, ")
    given = detail.get("input")
    got = f" (got {given!r:.60})" if isinstance(given, (str, int, float, bool)) else ""
    return f"{place}: {message}{got}" if place else f"{message}{got}"


def _hardware(profile: ProfilePart) -> Hardware:
    device, topology = profile.device, profile.topology
    slowdown = profile.compute_slowdown
    overhead, algorithms = topology.collective_overhead_s, topology.collective_algorithms
    memory, disk = topology.host_memory_bandwidth_bytes_per_s, topology.disk_bandwidth_bytes_per_s
    known = profile.kernels
    kernels = {kernel: _kernel(known.get(described_class(kernel, known))) for kernel in Kernel}
    return Hardware(
        name=profile.name,
        hash=_digest(profile),
        description=profile.description,
        device_name=device.name,
        device_memory_bytes=device.memory_bytes.value - device.reserved_memory_bytes.value,
        board_power_w=float(device.board_power_w.value) if device.board_power_w else None,
        memory_bandwidth=device.memory_bandwidth_bytes_per_s.value,
        peak_flops=_values(device.peak_flops),
        default_precision=profile.default_precision.value,
        kernels=kernels,
        levels=topology.hardware_levels(),
        **topology.graphs(),
        max_devices=topology.max_devices.value,
        devices_per_node=topology.devices_per_node.value,
        node_device_counts=tuple(topology.node_device_counts.value),
        uncertainty=Uncertainty(**profile.uncertainty.model_dump()),
        overlaps_communication=profile.overlaps_communication.value,
        collective_overhead_s=overhead.value if overhead else 0.0,
        host_memory_bytes=float(topology.host_memory_bytes.value) if topology.host_memory_bytes else math.inf,
        host_memory_bandwidth=memory.value if memory else HOST_MEMORY_BANDWIDTH,
        disk_bandwidth=disk.value if disk else DISK_BANDWIDTH,
        collective_algorithms=tuple(algorithms.value) if algorithms else ("tree", "hierarchical", "switch"),
        collective_tables=tuple(_table(table) for table in profile.collectives),
        slowdown_table=tuple(zip(slowdown.processes, slowdown.factor, strict=True)) if slowdown else ((1, 1.0),),
        kernel_slowdowns=slowdown.of_kernels() if slowdown else {},
        waiting_table=tuple(zip(slowdown.processes, slowdown.waiting or (), strict=False)) if slowdown else (),
        message_workspace=profile.message_workspace.value if profile.message_workspace else {},
        copies_apart=bool(profile.message_copies_apart and profile.message_copies_apart.value),
        caches=_caches(device),
        crowding=tuple(Crowding(**part.model_dump(exclude={"source"})) for part in profile.message_crowding or ()),
        conditions=profile.conditions.conditions() if profile.conditions else None,
        multiprocessors=device.multiprocessors.value if device.multiprocessors else 1,
        **operator_models(profile.operators),
        overlap_compute_speed=profile.overlap.compute_speed.value if profile.overlap else 1.0,
        overlap_transfer_speed=profile.overlap.transfer_speed.value if profile.overlap else 1.0,
        reliability=Reliability(**{name: part.value for name, part in profile.reliability if part is not None}),
        training={name: part.value for name, part in profile.training or () if part is not None},
        rows=tuple(_rows(profile.model_dump(mode="json", exclude_unset=True), "")),
    )


def _caches(device: DevicePart) -> Caches | None:
    own, shared = (part.value if part else 0 for part in (device.own_cache_bytes, device.shared_cache_bytes))
    return Caches(own_bytes=own, shared_bytes=shared) if own + shared else None


def _kernel(part: KernelPart | None) -> KernelModel:
    if part is None:
        return KernelModel(compute_efficiency=1.0, bandwidth_efficiency=1.0, overhead_s=0.0)
    return KernelModel(
        compute_efficiency=part.compute_efficiency.value,
        bandwidth_efficiency=part.bandwidth_efficiency.value,
        overhead_s=part.overhead_s.value,
        peak_flops=_values(part.peak_flops),
        serial_share=part.serial_share.value if part.serial_share else 0.0,
        cached_bandwidth=part.cached_bandwidth_bytes_per_s.value if part.cached_bandwidth_bytes_per_s else 0.0,
    )


def _table(part: CollectivePart) -> CollectiveTable:
    seconds: list[float] = []
    for value in part.seconds:  # noise must not make a larger message cheaper
        seconds.append(max(value, seconds[-1]) if seconds else value)
    return CollectiveTable(
        collective=part.collective,
        group_size=part.group_size,
        payload_bytes=tuple(part.payload_bytes),
        seconds=tuple(seconds),
    )


def _values(entries: Mapping[Any, Sourced[float]]) -> dict[str, float]:
    return {str(key): entry.value for key, entry in entries.items()}


_OPTIONAL = (
    *("node", "fabric", "pinned_algorithms", "host_memory_bandwidth_bytes_per_s", "host_memory_bytes"),
    "disk_bandwidth_bytes_per_s",
)
"""Parts of a topology that need not be there."""
_OPTIONAL_OF_DEVICE = ("multiprocessors", "own_cache_bytes", "shared_cache_bytes")
_OPTIONAL_OF_KERNEL = ("serial_share", "cached_bandwidth_bytes_per_s")


def _digest(profile: ProfilePart) -> str:
    # Parts that are not there do not count, so that new ones leave the hash of old profiles as it was; nor does
    # how often devices fail or ranks wait, on which neither a plan nor its time depends.
    optional = ("operators", "overlap", "training", "message_workspace", "message_copies_apart", "message_crowding")
    absent = {name for name in optional if getattr(profile, name) is None} | {"conditions", "reliability"}
    device = {"pace_s"} | {name for name in _OPTIONAL_OF_DEVICE if getattr(profile.device, name) is None}
    topology = {name for name in _OPTIONAL if getattr(profile.topology, name) is None}
    left_out: dict[str, Any] = {**dict.fromkeys(absent, True), "device": device, "topology": topology}
    left_out["kernels"] = {
        name: {field for field in _OPTIONAL_OF_KERNEL if getattr(part, field) is None}
        for name, part in profile.kernels.items()
    }
    if profile.compute_slowdown is not None:
        left_out["compute_slowdown"] = {"waiting", *(() if profile.compute_slowdown.by_kernel else ("by_kernel",))}
    if profile.training is not None:
        left_out["training"] = {n for n, part in profile.training if part is None and n.startswith("planned_")}
    numbers = _without_text(profile.model_dump(mode="json", exclude=left_out))
    return hashlib.sha256(json.dumps(numbers, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _without_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_text(item) for key, item in value.items() if key not in {"source", "description"}}
    return [_without_text(item) for item in value] if isinstance(value, list) else value


def _rows(value: Any, place: str) -> Iterator[ProfileRow]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            part = item.get("name", index) if isinstance(item, dict) else index
            yield from _rows(item, f"{place}.{part}")
    elif isinstance(value, dict) and "source" in value:
        content = {key: item for key, item in value.items() if key != "source"}
        text = _text(content["value"]) if set(content) == {"value"} else _pairs(content)
        yield ProfileRow(field=place, value=text, source=value["source"])
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _rows(item, f"{place}.{key}" if place else key)


def _pairs(content: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_text(item)}" for key, item in content.items())


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_text(item) for item in value)
    return format_number(value) if isinstance(value, (int, float)) else str(value)
