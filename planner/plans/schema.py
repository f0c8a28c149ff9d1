"""The fields of a strategy file and what each may hold."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planner.graph.experts import MOST_IMBALANCE
from planner.graph.recompute import MODES
from planner.plans.pins import ContextAlgorithm, OffloadTo, OptimizerSharding, Recompute, RecomputeModule, Schedule
from planner.plans.plan import MOST_MICRO_BATCHES, MOST_PASSES
from planner.plans.request import OptimizerName, ParallelMode, Precision, SearchMode
from planner.sharding.placement import Mesh
from simulator.errors import StrategyError
from simulator.schedules.generators import TWO_CHUNKS

FORMAT = "meshwright-strategy"
VERSION = 2

Text = Annotated[str, Field(min_length=1, max_length=4096)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, lt=2**53)]
Seconds = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0)]
CHOICES = {
    "axis", "mode", "precision", "optimizer", "parallel_mode", "search_mode", "optimizer_sharding", "context_algorithm",
    "schedule",
}  # fmt: skip
"""Fields whose allowed values are what is supported today."""

RuleTexts = dict[Text, list[Annotated[str, Field(max_length=65536)]]]


class _StrictModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


class NetworkModel(_StrictModel):
    """Which network, as it was captured."""

    spec: Text
    fingerprint: Text
    sequence_length: Positive | None


class HardwareModel(_StrictModel):
    """Which profile the plan was made for."""

    profile: Text
    hash: Text


class AxisModel(_StrictModel):
    """A mesh axis; an axis of one device is left out. Without strides the last axis has neighbouring ranks."""

    axis: Literal["data", "context", "expert", "tensor"]
    size: Annotated[int, Field(ge=2, le=2**20)]
    stride: Annotated[int, Field(ge=1, le=2**20)] | None = None


class PipelineModel(_StrictModel):
    """Pipeline ranks, how far apart neighbours are (0 with one), and chunks a rank."""

    ranks: Annotated[int, Field(ge=1, le=2**20)]
    stride: Annotated[int, Field(ge=0, le=2**20)]
    virtual: Annotated[int, Field(ge=1, le=2**20)]


class BatchModel(_StrictModel):
    """Samples of a step, of a micro-batch on one data-parallel rank, and how many micro-batches."""

    global_: Positive = Field(alias="global")
    micro: Positive
    micro_batches: Positive


class StageModel(_StrictModel):
    """A chunk of the network on a pipeline rank: all layers, or the units from first to last."""

    stage: Count
    rank: Count
    devices: Positive
    layers: Literal["all"] | None = None
    first: Text | None = None
    last: Text | None = None


class RecomputeRangeModel(_StrictModel):
    """Units, from first to last, that compute again in the backward pass."""

    first: Text
    last: Text
    mode: Literal["selective", "full"]
    messages: bool = True


class RecomputeModel(_StrictModel):
    """What is computed again in the backward pass."""

    mode: Recompute
    ranges: list[RecomputeRangeModel]


class OffloadRangeModel(_StrictModel):
    """Units, from first to last, that have activations on the host from the forward to the backward pass."""

    first: Text
    last: Text
    prefetch: Annotated[int, Field(ge=0, le=2**20)] = 0
    operators: list[Text] = Field(default_factory=list)


class FusionModel(_StrictModel):
    """How many bytes of gradients travel as one message."""

    bucket_bytes: Count


class ExchangeModel(_StrictModel):
    """What a context says of how tensors travel; `planner.plans.exchange.Exchange` has the meaning of the fields."""

    gradient_dtype: Literal["", "float32"] = ""
    whole_sums: bool = False
    all_to_all: bool = True
    all_reduce_bytes: Count | None = None
    all_gather_bytes: Count | None = None
    reduce_scatter_bytes: Count | None = None
    fusion_places: list[Positive] = Field(default_factory=list)
    fusion_groups: dict[Text, Count] = Field(default_factory=dict)
    group_power: Literal[-1, 0, 1] = 0
    repeated_loss: bool = False
    cross_batch: bool = False
    broadcast: bool = False
    layerwise: list[Text] = Field(default_factory=list)
    data: Literal["", "data_parallel", "full_batch"] | list[list[Positive]] = ""


class CertificateModel(_StrictModel):
    """What the search proved about the plan."""

    status: Literal["optimal", "bounded", "heuristic"]
    objective_s: Seconds
    lower_bound_s: Seconds
    elimination_width: Count
    operators: Count
    distinct_blocks: Count
    states: Count = 0
    states_left: Count = 0
    largest_table: Count = 0
    configurations: Count = 0
    partitions: Count = 0


class PredictionModel(_StrictModel):
    """The prediction made when the plan was written, in the order of the file."""

    step_time_s: Seconds
    objective_s: Seconds | None = None
    differing_term: Text | None = None
    analytic_breakdown: dict[Text, Seconds] = Field(default_factory=dict)
    start_s: Seconds = 0.0
    interval_s: Annotated[list[Seconds], Field(min_length=2, max_length=2)]
    label: Literal["calibrated", "interpolated", "extrapolated"]
    samples_per_s: Fraction
    tokens_per_s: Fraction | None
    mfu: Fraction
    peak_memory_bytes: Count
    device_memory_bytes: Count
    p_fits: Annotated[float, Field(ge=0, le=1)] | None = None
    host_memory_bytes: Count | None = None
    software: Text | None = None
    memory_figures: dict[Text, Count] | None = None
    memory_at_peak: dict[Text, Count]
    breakdown: dict[Text, Seconds]


class PlacementsModel(_StrictModel):
    """Rules by node name, one line for each mesh axis."""

    parameters_and_inputs: RuleTexts
    operators: RuleTexts


class LayersModel(_StrictModel):
    """Rules of the layers first to last (inclusive) of a run of equal blocks; block indices are written ``*``."""

    prefix: Annotated[str, Field(max_length=4096)]
    first: Count
    last: Count
    placements: PlacementsModel


class StrategyModel(_StrictModel):
    """A whole strategy file."""

    format: Literal["meshwright-strategy"]
    version: Literal[2]
    network: NetworkModel
    hardware: HardwareModel
    precision: Precision
    optimizer: OptimizerName
    mesh: Annotated[list[AxisModel], Field(max_length=8)]
    pipeline: PipelineModel
    batch: BatchModel
    data_sharding: dict[Text, Text]
    stages: Annotated[list[StageModel], Field(min_length=1)]
    parallel_mode: ParallelMode
    search_mode: SearchMode
    recompute: RecomputeModel
    optimizer_sharding: OptimizerSharding
    shard_size: Annotated[int, Field(ge=0, le=2**20)]
    sharding_threshold_bytes: Count
    offload_optimizer: bool
    offload_to: OffloadTo = "host"
    offload_parameters: bool = False
    host_embeddings: bool = False
    offload_activations: list[OffloadRangeModel] = Field(default_factory=list)
    context_algorithm: ContextAlgorithm
    sequence_parallel: bool
    schedule: Schedule
    fusion: FusionModel
    exchange: ExchangeModel = Field(default_factory=ExchangeModel)
    copies: Literal[1, 2] = 1
    software: Annotated[str, Field(max_length=64)] = ""
    attention: Literal["", "unfused", "fused_softmax", "flash", "flash2", "vendor"] = ""
    norms: Literal["", "fused", "unfused"] = ""
    expert_imbalance: Annotated[float, Field(ge=1, le=MOST_IMBALANCE, allow_inf_nan=False)] = 1.0
    tensor_overlap: bool = False
    expert_overlap: bool = False
    sent_once: Annotated[int, Field(ge=0)] = 0
    whole_experts: bool = False
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(strict=False, max_length=16)] = ()
    certificate: CertificateModel
    prediction: PredictionModel | None
    placements: PlacementsModel
    layers: list[LayersModel]


def validate(document: object, source: str) -> StrategyModel:
    """Check a parsed document field by field.

    Raises
    ------
    StrategyError
        Names `source`, the first wrong field, its value and the rule.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StrategyError(
            f'{source}: not a strategy file: it must be a JSON object with "format": "{FORMAT}"; '
            "write one with `meshwright plan`"
        )
    document = _upgraded(document)
    version = document.get("version")
    if version != VERSION or isinstance(version, bool):
        raise StrategyError(
            f"{source}: version {version!r} is not {VERSION}, the one this Meshwright reads; "
            "write the file again with `meshwright plan`, or use the Meshwright that wrote it"
        )
    try:
        return StrategyModel.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        more = error.error_count() - 1
        others = f" (and {more} more)" if more else ""
        allowed = str(first.get("ctx", {}).get("expected", ""))
        text = _describe(first["loc"], first["msg"], first["input"], first["type"], allowed)
        raise StrategyError(f"{source}: {text}{others}") from error


def _upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """A file of version 1 as version 2 writes it.

    Version 1 had one stage, no recomputation, and one way to shard states, which it called zero2 though gradients were
    accumulated whole.
    """
    version, recompute, stages = (document.get(key) for key in ("version", "recompute", "stages"))
    if version != 1 or isinstance(version, bool):
        return document
    found = {**document, "version": VERSION, "pipeline": {"ranks": 1, "stride": 0, "virtual": 1}}
    found |= {"shard_size": 0, "sharding_threshold_bytes": 0, "offload_optimizer": False, "context_algorithm": "none"}
    if isinstance(recompute, dict) and recompute.get("operators") == []:
        found["recompute"] = {"ranges": [], **{k: v for k, v in recompute.items() if k != "operators"}}
    if isinstance(stages, list):
        found["stages"] = [{"rank": 0, **stage} if isinstance(stage, dict) else stage for stage in stages]
    if document.get("optimizer_sharding") == "zero2":
        found["optimizer_sharding"] = "zero1"
    return found


def _describe(location: tuple[int | str, ...], message: str, value: object, kind: str, allowed: str) -> str:
    field = ".".join(str(part) for part in location)
    if kind == "missing":
        return f"{field} is missing; add it or write the file again with `meshwright plan`"
    if kind == "extra_forbidden":
        return f"{field} is not a field of a strategy file; remove it"
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "…"
    if kind == "literal_error" and location[-1] in CHOICES:
        return f"{field}: {shown} is not supported yet, only {allowed}; plan again with `meshwright plan`"
    return f"{field}: {shown} is wrong: {message[:1].lower()}{message[1:]}; correct it"


_SPLIT = {"data": "S(0)", "expert": "S(0)", "context": "S(1)"}


def data_sharding(mesh: Mesh) -> dict[str, str]:
    """How batch tensors lie on each mesh axis: split by sample, on ``context`` along the sequence, else whole.

    >>> from planner.sharding.placement import MeshAxis
    >>> data_sharding(Mesh((MeshAxis("data", 4), MeshAxis("tensor", 2))))
    {'data': 'S(0)', 'tensor': 'R'}
    """
    return {axis.name: _SPLIT.get(axis.name, "R") for axis in mesh.axes}


def check_consistent(model: StrategyModel, mesh: Mesh, source: str) -> None:
    """Raise StrategyError, naming `source` and the field, where two fields contradict each other."""
    for part in (_mesh_faults, _stage_faults, _state_faults, _batch_faults, _layer_faults):
        for fault in part(model, mesh):
            raise StrategyError(f"{source}: {fault}")


def _mesh_faults(model: StrategyModel, mesh: Mesh) -> Iterator[str]:
    names = [axis.name for axis in mesh.axes]
    if len(set(names)) < len(names):
        yield f"mesh: axis names {names} repeat; give each axis a name of its own"
    if model.data_sharding != (asked := data_sharding(mesh)):
        yield f"data_sharding: {model.data_sharding} is not {asked}, which this mesh asks for; correct it"


def _stage_faults(model: StrategyModel, mesh: Mesh) -> Iterator[str]:
    pipeline, stages, schedule = model.pipeline, model.stages, model.schedule
    count = pipeline.ranks * pipeline.virtual
    if (count == 1) != (schedule == "none"):
        yield (f"schedule: {schedule!r} does not go with {count} chunks; a pipeline has a schedule, one stage has none")
    if len(stages) != count:
        yield (
            f"stages: {len(stages)} are listed, but pipeline.ranks × pipeline.virtual is {count}; list every chunk once"
        )
    if pipeline.ranks == 1 and pipeline.virtual > 1:
        yield f"pipeline.virtual: {pipeline.virtual} chunks need more than one rank; use 1"
    needed = 2 if schedule in TWO_CHUNKS else pipeline.virtual if schedule == "interleaved_1f1b" else 1
    if pipeline.virtual != needed:
        yield (
            f"pipeline.virtual: schedule {schedule} runs {needed} chunks a rank, not {pipeline.virtual}; "
            "correct one of them"
        )
    for number, stage in enumerate(stages):
        where = f"stages.{number}"
        if stage.stage != number:
            yield f"{where}.stage: {stage.stage} is not {number}; list stages in model order from 0"
        if stage.devices != mesh.size:
            yield f"{where}.devices: {stage.devices} is not the mesh's {mesh.size}; correct it"
        if stage.rank >= (ranks := pipeline.ranks):
            yield f"{where}.rank: {stage.rank} is not one of the {ranks} pipeline ranks; use 0 to {ranks - 1}"
        named = stage.first is not None, stage.last is not None
        if count == 1 and (any(named) or stage.layers is None):
            yield f'{where}: a single stage holds all layers; write "layers": "all" and no units'
        if count > 1 and (not all(named) or stage.layers is not None):
            yield f"{where}: a chunk names its first and last unit, and no layers; correct it"
    yield from _rank_faults(model, mesh)


def _rank_faults(model: StrategyModel, mesh: Mesh) -> Iterator[str]:
    """Axes and pipeline number every device once: sorted, each stride is the product of the sizes before it."""
    if len({axis.stride is None for axis in model.mesh}) > 1:
        yield "mesh: some axes have a stride and others none; give all or none"
    steps = [(mesh.stride(i), axis.size, f"mesh.{i}.stride") for i, axis in enumerate(mesh.axes)]
    pipeline, expected = model.pipeline, 1
    if pipeline.ranks > 1:
        steps.append((pipeline.stride, pipeline.ranks, "pipeline.stride"))
    elif pipeline.stride:
        yield f"pipeline.stride: {pipeline.stride} with one pipeline rank; use 0"
    for stride, size, field in sorted(steps):
        if stride != expected:
            yield (
                f"{field}: neighbours {stride} ranks apart do not number every device once; "
                f"{expected} would follow from the axes inside"
            )
        expected *= size


def _state_faults(model: StrategyModel, mesh: Mesh) -> Iterator[str]:
    strongest = max((part.mode for part in model.recompute.ranges), key=MODES.index, default="none")
    if (mode := model.recompute.mode) != strongest:
        yield f"recompute.mode: {mode!r} is not the strongest of its ranges, {strongest!r}; correct it"
    sharding, data = model.optimizer_sharding, next((axis.size for axis in mesh.axes if axis.name == "data"), 1)
    if model.shard_size and (sharding == "none" or data % model.shard_size):
        yield (
            f"shard_size: {model.shard_size} with optimizer_sharding {sharding!r} and {data} data-parallel ranks; "
            "states are sharded over a divisor of them, or use 0"
        )
    if sharding == "none" and model.sharding_threshold_bytes:
        yield f"sharding_threshold_bytes: {model.sharding_threshold_bytes}, but nothing is sharded; use 0"
    context = any(axis.name == "context" for axis in mesh.axes)
    if context != (model.context_algorithm != "none"):
        yield (
            f"context_algorithm: {model.context_algorithm!r} {'with' if context else 'without'} a context axis; name "
            "how attention sees the whole sequence where there is one, else none"
        )
    if model.offload_to != "host" and not model.offload_optimizer:
        yield (
            f"offload_to: {model.offload_to!r} with offload_optimizer false: states that stay on the device go "
            "nowhere; use offload_optimizer true, or leave offload_to out"
        )
    if model.offload_parameters and not model.offload_optimizer:
        yield (
            "offload_parameters: true with offload_optimizer false: the host updates what it holds; use "
            "offload_optimizer true, or leave offload_parameters out"
        )


def _batch_faults(model: StrategyModel, mesh: Mesh) -> Iterator[str]:
    batch, chunks = model.batch, model.pipeline.ranks * model.pipeline.virtual
    if batch.micro_batches > (most := min(MOST_MICRO_BATCHES, MOST_PASSES // chunks)):
        through = f" through {chunks} chunks" if chunks > 1 else ""
        yield (
            f"batch.micro_batches: {batch.micro_batches} is more than the {most} that are simulated{through}; "
            "plan a smaller batch"
        )
    shards = prod(axis.size for axis in mesh.axes if axis.name in ("data", "expert"))
    if batch.global_ != batch.micro * batch.micro_batches * shards:
        yield (
            f"batch.global: {batch.global_} is not micro {batch.micro} × micro_batches {batch.micro_batches} "
            f"× data-parallel size {shards}; make the product equal"
        )
    if left := batch.micro % model.copies:
        yield (
            f"copies: a micro-batch of {batch.micro} cannot be divided into {model.copies} copies, {left} would be "
            "left; use copies 1, or a batch.micro that divides"
        )


def _layer_faults(model: StrategyModel, mesh: Mesh) -> Iterator[str]:
    if told := model.prediction:
        low, high = told.interval_s
        if not low <= told.step_time_s <= high:
            yield (
                f"prediction.interval_s: {[low, high]} does not hold step_time_s {told.step_time_s}; correct it or "
                "plan again with `meshwright plan`"
            )
    taken: dict[str, int] = {}
    for index, run in enumerate(model.layers):
        if run.first > run.last or run.first < taken.get(run.prefix, 0):
            yield (
                f"layers.{index}: layers {run.first} to {run.last} of {run.prefix!r} must follow the ranges before "
                "them; write ranges in order and without overlap"
            )
        taken[run.prefix] = run.last + 1
