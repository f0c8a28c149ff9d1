"""What the fields of a strategy file say about each other."""

from __future__ import annotations

from math import prod

from planner.graph.recompute import MODES
from planner.plans.plan import MOST_MICRO_BATCHES, MOST_PASSES
from planner.plans.schema import StageModel, StrategyModel
from planner.sharding.placement import Mesh
from simulator.errors import StrategyError
from simulator.schedules.generators import TWO_CHUNKS

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
    names = [axis.name for axis in mesh.axes]
    if len(set(names)) < len(names):
        raise StrategyError(f"{source}: mesh: axis names {names} repeat; give each axis a name of its own")
    if model.data_sharding != data_sharding(mesh):
        raise StrategyError(
            f"{source}: data_sharding: {model.data_sharding} is not {data_sharding(mesh)}, "
            "which this mesh asks for; correct it"
        )
    _check_stages(model, mesh, source)
    _check_ranks(model, mesh, source)
    _check_recompute(model, source)
    _check_storage(model, mesh, source)
    _check_host(model, source)
    _check_passes(model, source)
    shards = prod(axis.size for axis in mesh.axes if axis.name in ("data", "expert"))
    batch = model.batch
    if batch.global_ != batch.micro * batch.micro_batches * shards:
        raise StrategyError(
            f"{source}: batch.global: {batch.global_} is not micro {batch.micro} × micro_batches {batch.micro_batches} "
            f"× data-parallel size {shards}; make the product equal"
        )
    _check_copies(model, source)
    if model.prediction is not None:
        low, high = model.prediction.interval_s
        if not low <= model.prediction.step_time_s <= high:
            raise StrategyError(
                f"{source}: prediction.interval_s: {[low, high]} does not hold step_time_s "
                f"{model.prediction.step_time_s}; correct it or plan again with `meshwright plan`"
            )
    taken: dict[str, int] = {}
    for index, run in enumerate(model.layers):
        if run.first > run.last or run.first < taken.get(run.prefix, 0):
            raise StrategyError(
                f"{source}: layers.{index}: layers {run.first} to {run.last} of {run.prefix!r} must follow "
                "the ranges before them; write ranges in order and without overlap"
            )
        taken[run.prefix] = run.last + 1


def _check_passes(model: StrategyModel, source: str) -> None:
    count, chunks = model.batch.micro_batches, model.pipeline.ranks * model.pipeline.virtual
    most = min(MOST_MICRO_BATCHES, MOST_PASSES // chunks)
    if count > most:
        raise StrategyError(
            f"{source}: batch.micro_batches: {count} is more than the {most} that are simulated"
            f"{f' through {chunks} chunks' if chunks > 1 else ''}; plan a smaller batch"
        )


def _check_stages(model: StrategyModel, mesh: Mesh, source: str) -> None:
    pipeline, stages = model.pipeline, model.stages
    count = pipeline.ranks * pipeline.virtual
    if (count == 1) != (model.schedule == "none"):
        raise StrategyError(
            f"{source}: schedule: {model.schedule!r} does not go with {count} chunks; "
            "a pipeline has a schedule, one stage has none"
        )
    if len(stages) != count:
        raise StrategyError(
            f"{source}: stages: {len(stages)} are listed, but pipeline.ranks × pipeline.virtual is {count}; "
            "list every chunk once"
        )
    if pipeline.ranks == 1 and pipeline.virtual > 1:
        raise StrategyError(f"{source}: pipeline.virtual: {pipeline.virtual} chunks need more than one rank; use 1")
    needed = 2 if model.schedule in TWO_CHUNKS else None if model.schedule == "interleaved_1f1b" else 1
    if needed is not None and pipeline.virtual != needed:
        raise StrategyError(
            f"{source}: pipeline.virtual: schedule {model.schedule} runs {needed} chunks a rank, not "
            f"{pipeline.virtual}; correct one of them"
        )
    for number, stage in enumerate(stages):
        _check_stage(stage, number, model, mesh, source)


def _check_stage(stage: StageModel, number: int, model: StrategyModel, mesh: Mesh, source: str) -> None:
    where = f"{source}: stages.{number}"
    if stage.stage != number:
        raise StrategyError(f"{where}.stage: {stage.stage} is not {number}; list stages in model order from 0")
    if stage.devices != mesh.size:
        raise StrategyError(f"{where}.devices: {stage.devices} is not the mesh's {mesh.size}; correct it")
    if not 0 <= stage.rank < model.pipeline.ranks:
        raise StrategyError(
            f"{where}.rank: {stage.rank} is not one of the {model.pipeline.ranks} pipeline ranks; use 0 to "
            f"{model.pipeline.ranks - 1}"
        )
    named = stage.first is not None, stage.last is not None
    if len(model.stages) == 1 and (any(named) or stage.layers is None):
        raise StrategyError(f'{where}: a single stage holds all layers; write "layers": "all" and no units')
    if len(model.stages) > 1 and (not all(named) or stage.layers is not None):
        raise StrategyError(f"{where}: a chunk names its first and last unit, and no layers; correct it")


def _check_copies(model: StrategyModel, source: str) -> None:
    if batch_obstacle := model.batch.micro % model.copies:
        raise StrategyError(
            f"{source}: copies: a micro-batch of {model.batch.micro} cannot be divided into {model.copies} copies, "
            f"{batch_obstacle} would be left; use copies 1, or a batch.micro that divides"
        )


def _check_ranks(model: StrategyModel, mesh: Mesh, source: str) -> None:
    """Axes and pipeline number every device once: sorted, each stride is the product of the sizes before it."""
    if any(axis.stride is not None for axis in model.mesh) and not all(a.stride is not None for a in model.mesh):
        raise StrategyError(f"{source}: mesh: some axes have a stride and others none; give all or none")
    steps = [(mesh.stride(i), axis.size, f"mesh.{i}.stride") for i, axis in enumerate(mesh.axes)]
    pipeline = model.pipeline
    if pipeline.ranks > 1:
        steps.append((pipeline.stride, pipeline.ranks, "pipeline.stride"))
    elif pipeline.stride:
        raise StrategyError(f"{source}: pipeline.stride: {pipeline.stride} with one pipeline rank; use 0")
    expected = 1
    for stride, size, field in sorted(steps):
        if stride != expected:
            raise StrategyError(
                f"{source}: {field}: neighbours {stride} ranks apart do not number every device once; "
                f"{expected} would follow from the axes inside"
            )
        expected *= size


def _check_recompute(model: StrategyModel, source: str) -> None:
    found = max((part.mode for part in model.recompute.ranges), key=MODES.index, default="none")
    if model.recompute.mode != found:
        raise StrategyError(
            f"{source}: recompute.mode: {model.recompute.mode!r} is not the strongest of its ranges, {found!r}; "
            "correct it"
        )


def _check_host(model: StrategyModel, source: str) -> None:
    if model.offload_to != "host" and not model.offload_optimizer:
        raise StrategyError(
            f"{source}: offload_to: {model.offload_to!r} with offload_optimizer false: states that stay on the device "
            "go nowhere; use offload_optimizer true, or leave offload_to out"
        )
    if model.offload_parameters and not model.offload_optimizer:
        raise StrategyError(
            f"{source}: offload_parameters: true with offload_optimizer false: the host updates what it holds; use "
            "offload_optimizer true, or leave offload_parameters out"
        )


def _check_storage(model: StrategyModel, mesh: Mesh, source: str) -> None:
    data = next((axis.size for axis in mesh.axes if axis.name == "data"), 1)
    if model.shard_size and (model.optimizer_sharding == "none" or data % model.shard_size):
        raise StrategyError(
            f"{source}: shard_size: {model.shard_size} with optimizer_sharding {model.optimizer_sharding!r} and {data} "
            "data-parallel ranks; states are sharded over a divisor of them, or use 0"
        )
    if model.optimizer_sharding == "none" and model.sharding_threshold_bytes:
        raise StrategyError(
            f"{source}: sharding_threshold_bytes: {model.sharding_threshold_bytes}, but nothing is sharded; use 0"
        )
    context = any(axis.name == "context" for axis in mesh.axes)
    if context != (model.context_algorithm != "none"):
        raise StrategyError(
            f"{source}: context_algorithm: {model.context_algorithm!r} {'with' if context else 'without'} a context "
            "axis; name how attention sees the whole sequence where there is one, else none"
        )
