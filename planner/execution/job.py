"""What every rank is told: one value, the same for all."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from planner.execution import optimizers
from planner.execution.checkpoints.options import Checkpoints
from planner.execution.data.samples import BatchInput, Shard
from planner.execution.optimizers import Hyperparameters
from planner.lowering.instructions import LoweredStages
from planner.sharding.local_context import own_part
from planner.sharding.placement import Mesh, Placements
from planner.sharding.sequence import SequenceCut
from simulator.errors import InputError, UnsupportedError

PRECISIONS = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training run: the lowered plan, where parameters and data come from, and for how long.

    ``device_type`` is ``"cpu"``, ``"cuda"`` or ``"npu"``; ``timeout_s`` bounds every collective and ``join_timeout_s``
    the meeting of the processes, all of which must have been given the same ``digest``. ``steps`` count from the
    beginning of training, before that of this run if it resumes another. ``logs`` gets a folder for each rank. Behind
    the steps come ``recorded_steps`` whose instructions are clocked one by one. ``first_scale`` is the scale of the
    loss that training begins with where it has one. ``times_pace`` asks for typical kernels between the steps.
    """

    lowered: LoweredStages
    network: str
    sequence_length: int | None
    optimizer: str
    constants: Hyperparameters
    data: str | None
    seed: int
    steps: int
    warm_up_steps: int
    device_type: str
    timeout_s: float
    recorded_steps: int = 0
    join_timeout_s: float = 300.0
    digest: str = ""
    logs: Path | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    first_scale: float = field(default_factory=lambda: optimizers.FIRST_SCALE)
    times_pace: bool = False

    @property
    def inputs(self) -> tuple[BatchInput, ...]:
        """What the network asks of each batch tensor, in the order of the plan's inputs."""
        return input_specs(self.lowered)


def input_specs(lowered: LoweredStages) -> tuple[BatchInput, ...]:
    """Describe the inputs of one micro-batch over the whole mesh, in the order of ``lowered.inputs``."""
    graph = lowered.graph
    by_name = {entry.name: entry for entry in graph.inputs}
    found = []
    for lowered_input in lowered.inputs:
        entry = by_name[lowered_input.name]
        spec = graph.nodes[entry.node].outputs[0]
        found.append(
            BatchInput(
                name=entry.name,
                kind=entry.kind,
                shape=spec.shape,
                dtype=getattr(torch, spec.dtype),
                high=entry.high,
            )
        )
    return tuple(found)


def batch_shard(mesh: Mesh, placements: Placements, coordinates: tuple[int, ...]) -> Shard:
    """Tell which rows of a batch a rank loads: the axes that shard dim 0, outermost first.

    >>> from planner.sharding.placement import MeshAxis
    >>> batch_shard(Mesh((MeshAxis("data", 4), MeshAxis("tensor", 2))), (0, -1), (3, 1))
    Shard(num_shards=4, shard_id=3)
    """
    shards, mine = 1, 0
    for axis, placement, coordinate in zip(mesh.axes, placements, coordinates, strict=True):
        if placement == 0:
            shards, mine = shards * axis.size, mine * axis.size + coordinate
    return Shard(num_shards=shards, shard_id=mine)


def own_piece(
    tensor: torch.Tensor,
    mesh: Mesh,
    placements: Placements,
    coordinates: tuple[int, ...],
    cut: SequenceCut | None = None,
) -> torch.Tensor:
    """Cut out a rank's piece of a whole tensor; of axes that shard one dim the outer cuts first.

    ``cut`` is how a context axis shares the sequence.
    """
    for number, (axis, placement, coordinate) in enumerate(zip(mesh.axes, placements, coordinates, strict=True)):
        if placement >= 0 and cut is not None and number == cut.axis:
            tensor = own_part(tensor, placement, cut, coordinate, axis.size)
        elif placement >= 0:
            tensor = tensor.chunk(axis.size, placement)[coordinate]
    return tensor


def check_precision(precision: str) -> str:
    """Return the dtype's name for a precision that can be executed."""
    if precision in ("fp8", "fp4"):
        raise UnsupportedError(f"precision {precision!r} cannot be executed yet; use --precision bf16")
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}; choose one of them")
    return PRECISIONS[precision]
