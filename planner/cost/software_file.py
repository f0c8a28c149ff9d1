"""The file of what software makes of a training step: coefficients of stacks and attention kernels, intervals.

One YAML, shipped as ``hw_profiles/software/training.yaml``; every coefficient stands with its source, as in profiles.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from planner.cost.stacks import AttentionKernel, LayeredCoefficients, LayeredParameters, Stack
from simulator.errors import ProfileError
from simulator.input_file import FileKind
from simulator.profile_file import REMEDY, validation_problems
from simulator.profile_parts import Count, NonNegative, Part, Positive, Source, Sourced
from simulator.whole_file import write_whole

SOFTWARE_FOLDER = "software"
SHIPPED = "training.yaml"
STACKS = "stacks.yaml"
STACK_COEFFICIENTS = (
    "matmul", "memory", "optimizer", "launch_s", "step_overhead_s", "micro_batch_overhead_s", "tensor_exposed",
    "pipeline_exposed", "shard_apart", "context_exposed", "convolution", "image", "copies", "single_copies",
)  # fmt: skip
"""Of a software stack: factors, seconds, and shares of messages that stay visible."""
SOFTWARE = FileKind(name="software file", remedy=REMEDY, error=ProfileError)
ANY = "*"
"""Stands for every device family, or every stack."""


def _one_of(names: Collection[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"no such name; choose one of {', '.join(names)}")
        return name

    return AfterValidator(check)


_STACKS = [f"{stack}{kind}" for stack in Stack for kind in ("", "_deterministic")] + [f"{Stack.MINDSPORE}_gpu"]
_LAYERED = [field.name for field in fields(LayeredParameters) if field.name != "host_s"]
StackName = Annotated[str, _one_of(_STACKS)]
Coefficient = Annotated[str, _one_of(STACK_COEFFICIENTS)]
AttentionName = Annotated[str, _one_of([str(kernel) for kernel in AttentionKernel])]
LayeredDevice = Annotated[str, _one_of(["balance", "planes", "reach", "untuned", "launch", *_LAYERED])]
LayeredStack = Annotated[str, Field(pattern=rf"^({'|'.join(_LAYERED)}|host_[a-z_]+_s)$")]


class IntervalPart(Part):
    """Where 90 % of the measured times of runs alike lie: from ``low`` to ``high`` times the prediction.

    ``family`` of the device, ``stack`` and ``network`` (``transformer`` or ``layered``) say which runs; ``*`` is any.
    """

    family: str
    stack: str
    network: Literal["transformer", "layered"]
    low: Positive
    high: Positive
    rows: Count


def _one_for_every_network(intervals: list[IntervalPart]) -> list[IntervalPart]:
    everywhere = {interval.network for interval in intervals if (interval.family, interval.stack) == (ANY, ANY)}
    if everywhere != {"transformer", "layered"}:
        raise ValueError(f"there must be one of family and stack '{ANY}' for transformer and one for layered networks")
    return intervals


class LayeredPart(Part):
    """Coefficients of networks described layer by layer, by device family and by stack."""

    source: Source
    devices: dict[str, dict[LayeredDevice, NonNegative]]
    stacks: dict[StackName, dict[LayeredStack, NonNegative]]


class MemoryHabits(Part):
    """How software uses device memory: fields of `planner.cost.training_run.TrainingSetup`, which says what each means.

    ``gradient_bytes`` are those of a gradient as it is kept and summed, -1 where that is as the stack has it
    (`planner.cost.memory.states.usual_gradient_bytes`), 0 where each is used up at once. ``optimizer_states`` names
    the optimizer whose states are kept, where they are not those of the one that is timed (``adamw8bit``).
    """

    gradient_bytes: Literal[-1, 0, 2, 4, 6] = -1
    reduce_bucket_elements: NonNegative = 0.0
    vocabulary_parallel_loss: bool = True
    eager_kernels: bool = False
    fixed_workspaces: bool = False
    captured_graphs: bool = False
    captured_step: bool = False
    grouped_products: bool = False
    pipelines_in_flight: NonNegative = 0
    loss_chunks: Annotated[int, Field(ge=1)] = 1
    master_weight_bytes: Literal[2, 4] = 4
    frozen_weight_bytes: NonNegative = 0.0
    recompute_activation_function: bool = False
    recompute_norms: bool = False
    expandable_segments: bool = False
    forced_balance: bool = False
    every_second_product: bool = False
    fused_loss: bool = False
    scripted_loss: bool = False
    deferred_head_batches: Annotated[int, Field(ge=0)] = 0
    micro_batch_group: Annotated[int, Field(ge=0)] = 0
    packed_attention: bool = True
    legacy_model: bool = False
    single_gate: bool = False
    overlap_parameters: bool = False
    optimizer_states: Literal["", "adamw8bit", "muon", "lamb"] = ""


def _stack(name: str) -> Stack:
    """Return the stack of this name. Pydantic cannot read the signature of an enumeration on Python 3.12 and later."""
    return Stack(name)


Samples = Literal[
    "", "image", "augmented_image", "bicubic_augmented_image", "noisy_augmented_image", "policy_image",
]  # fmt: skip
"""How the host prepares images: cropped and flipped, augmented by rules, the same with bicubic interpolation, with
erasing by noise, by a policy (AutoAugment); empty where it has no part in a step."""


class Software(Part):
    """Software that plans run on: a stack, and what its users' usual settings make of kernels and messages.

    Attributes
    ----------
    title, source
        What people call it, and where what is said here was read.
    stack
        Whose coefficients and memory habits it has.
    overlaps
        Messages travel while kernels run. Otherwise gradients are summed, and parameters gathered, when passes are
        over.
    gradient_dtype
        What gradients are summed in, empty where that is the parameters'.
    whole_sums
        Ranks that shard optimizer states alone sum gradients whole.
    single_gathers
        Sharded parameters are gathered one at a time, each when the device has done all before, and their gradients
        scattered so.
    deterministic
        Kernels are those whose sums have one order (``--deterministic-mode``), with coefficients of their own.
    fused_sums
        Products of a backward pass add to the gradients of earlier micro-batches (``gradient_accumulation_fusion`` of
        Megatron-LM).
    fusion
        What fuses operators, one of `planner.graph.fusion`.
    attention
        The fused kernel of attention by family of the device; where none is named, the profile's.
    memory
        What it holds in device memory, where that is not as its stack has it.
    samples, sample_area
        What the host does for each image while the device is at work, and how many times that of an image of the usual
        size it takes.
    """

    title: str
    source: str
    stack: Annotated[Stack, BeforeValidator(_stack)]
    overlaps: bool = True
    gradient_dtype: Literal["", "float32"] = ""
    whole_sums: bool = False
    single_gathers: bool = False
    deterministic: bool = False
    fused_sums: bool = False
    fusion: Literal["single", "batch_norms", "products", "compiler", "library"] = "single"
    attention: dict[str, Literal["flash", "flash2", "vendor"]] = Field(default_factory=dict)
    memory: MemoryHabits = Field(default_factory=MemoryHabits)
    samples: Samples = ""
    sample_area: Positive = 1.0


class Usual(Part):
    """The usual software of a family of devices, by what is trained.

    ``language`` networks, those whose states data-parallel ranks share and nothing else (``sharded``), all ``other``
    networks.
    """

    language: str
    sharded: str
    other: str


class MemoryErrorsPart(Part):
    """How far predictions of memory are from measurements.

    ``quantiles`` are of measured over predicted bytes, from the least to the largest in equal steps of probability.
    """

    quantiles: Annotated[list[Positive], Field(min_length=3, max_length=101)]
    rows: Count
    source: Source

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.quantiles != sorted(self.quantiles):
            raise ValueError("quantiles must not fall; list them from the least to the largest")
        return self


class StacksPart(Part):
    """The file of software: what there is, and what is usual on which family of devices.

    ``memory_errors`` are those of plans whose memory is that of named software, and of plans of which live tensors
    alone are known.
    """

    format: Literal["meshwright-stacks"]
    version: Literal[1]
    software: dict[str, Software]
    usual: dict[str, Usual]
    usual_source: str
    memory_errors: dict[Literal["software", "tensors"], MemoryErrorsPart]

    @model_validator(mode="after")
    def _usual_is_known(self) -> Self:
        named = {name for usual in self.usual.values() for name in (usual.language, usual.sharded, usual.other)}
        if unknown := sorted(named - set(self.software)):
            raise ValueError(f"usual: {unknown[0]!r} is not among software; add it there or name another")
        return self


class SoftwarePart(Part):
    """The whole file."""

    format: Literal["meshwright-software"]
    version: Literal[1]
    stacks: dict[StackName, dict[Coefficient, Sourced[NonNegative]]]
    attention: dict[AttentionName, Sourced[NonNegative]]
    layered: LayeredPart
    intervals: Annotated[list[IntervalPart], AfterValidator(_one_for_every_network)]
    intervals_source: Source


@dataclass(frozen=True, kw_only=True)
class SoftwareCoefficients:
    """Coefficients by stack, and factors by attention kernel; a missing one is neutral.

    ``devices``, by family, stand in for the ``training`` of profiles while a fit is being judged.
    """

    stacks: Mapping[str, Mapping[str, float]]
    attention: Mapping[str, float]
    devices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Factors of the prediction between which 90 % of the measured times lie, and the rows that say so."""

    low: float
    high: float
    rows: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SoftwareFile:
    """The file's content; intervals by kind of network, device family and stack (``*`` for any).

    ``sources`` say where the coefficients of each stack come from. Two files are never equal, so that results may be
    kept by the file they came from.
    """

    coefficients: SoftwareCoefficients
    layered: LayeredCoefficients
    intervals: Mapping[tuple[str, str, str], Interval]
    sources: Mapping[str, str] = field(default_factory=dict)

    def interval(self, network: str, family: str, stack: str) -> tuple[Interval, str]:
        """Interval and label of runs of a kind of network on a family of devices with a stack.

        ``calibrated`` where rows of its device family and stack were fitted, ``interpolated`` where both were, but not
        together, ``extrapolated`` else. The wider of the intervals that may apply is taken.
        """
        both = self.intervals.get((network, family, stack))
        if both is not None:
            return both, "calibrated"
        near = [self.intervals[key] for key in ((network, family, ANY), (network, ANY, stack)) if key in self.intervals]
        near.append(self.intervals[network, ANY, ANY])
        widest = max(near, key=lambda interval: interval.high / interval.low)
        return widest, "interpolated" if len(near) == 3 else "extrapolated"


def parse_software(text: str, name: str) -> SoftwareFile:
    """Validate the text of a software file; ProfileError names file and field."""
    try:
        part = SoftwarePart.model_validate(SOFTWARE.yaml(text, name))
    except ValidationError as error:
        raise ProfileError(f"software file {name}: {validation_problems(error)}; {REMEDY}") from None
    return SoftwareFile(
        coefficients=SoftwareCoefficients(
            stacks={stack: _values(entries) for stack, entries in part.stacks.items()},
            attention=_values(part.attention),
        ),
        layered=LayeredCoefficients(devices=part.layered.devices, stacks=part.layered.stacks),
        intervals={
            (entry.network, entry.family, entry.stack): Interval(low=entry.low, high=entry.high, rows=entry.rows)
            for entry in part.intervals
        },
        sources={
            stack: "; ".join(dict.fromkeys(entry.source for entry in entries.values()))
            for stack, entries in part.stacks.items()
        },
    )


def _values(entries: Mapping[str, Sourced[float]]) -> dict[str, float]:
    return {name: entry.value for name, entry in entries.items()}


@lru_cache(maxsize=1)
def shipped_stacks() -> StacksPart:
    """The file of software that comes with the package."""
    return StacksPart.model_validate(SOFTWARE.yaml(_shipped(STACKS), STACKS))


def _shipped(file: str) -> str:
    """The text of a file of the package; ProfileError where that lacks it."""
    try:
        return (resources.files("hw_profiles") / SOFTWARE_FOLDER / file).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ProfileError(
            f"software file hw_profiles/{SOFTWARE_FOLDER}/{file} is missing, and without its coefficients no step can "
            "be predicted; install the package again"
        ) from error


@lru_cache(maxsize=1)
def shipped_software() -> SoftwareFile:
    """The software file that comes with the package.

    Raises
    ------
    ProfileError
        When the package lacks it.
    """
    return parse_software(_shipped(SHIPPED), f"hw_profiles/{SOFTWARE_FOLDER}/{SHIPPED}")


_TRIAL: ContextVar[SoftwareFile | None] = ContextVar("software file on trial", default=None)


@contextmanager
def software_on_trial(software: SoftwareFile | None) -> Iterator[None]:
    """Predict with other coefficients than the shipped ones inside a ``with`` block; with None, with the shipped ones.

    A fit judges its coefficients so. The block holds for one thread and no other process.
    """
    before = _TRIAL.set(software)
    try:
        yield
    finally:
        _TRIAL.reset(before)


def software_in_use() -> SoftwareFile:
    """The file whose coefficients predictions take: the one on trial, else the shipped one."""
    return _TRIAL.get() or shipped_software()


def write_software(content: Mapping[str, Any], path: Path) -> SoftwareFile:
    """Validate `content` and write it to `path`, whole or not at all."""
    plain = json.loads(json.dumps(dict(content)))  # no object twice: the dumper would write aliases
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)
    software = parse_software(text, str(path))
    write_whole(path, text)
    return software
