"""What one rank does in a step, in order: the executor runs these, the simulator times their tasks.

Every instruction of a pass has a task that the simulator times. Values are local tensors, by name. Everything is the
same on every rank of a stage; what differs (which chunk a rank keeps) follows from its mesh coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.graph.operator_graph import OperatorGraph
from planner.sharding.placement import Mesh, Placements
from planner.sharding.rules import Rule
from planner.sharding.sequence import SequenceCut
from simulator.program import Collective, Task
from simulator.schedules import ActionKind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run node `node` of the unfolded graph on local tensors, with one rule for each mesh axis.

    ``inputs`` are aligned with ``Node.tensor_inputs`` and ``outputs`` with ``Node.outputs`` ("" where
    nothing reads an output). Rules that send messages inside the operator (synchronised batch norm, attention on a
    context axis) do so here, over the axes whose rule says so. Attention that exchanges heads for the sequence has
    the exchanged query, key, value and output behind its outputs; its gradient reads those in place of the others.
    ``cut`` is how a context axis shares the sequence, where the operator has to know. ``on_host``: the host runs it, on
    tensors in its memory.
    """

    node: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rules: tuple[Rule, ...]
    cut: SequenceCut | None = None
    on_host: bool = False
    copy: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """Copy `source` to the memory of the host, or from there to the device; ``asynchronous``: beside computation."""

    source: str
    target: str
    to_host: bool
    asynchronous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Keep one's own chunk of `source` along dim `dim`: replicated to sharded on mesh axis `axis`.

    ``cut`` says how a context axis shares the dim.
    """

    source: str
    target: str
    axis: int
    dim: int
    cut: SequenceCut | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Keep `source` where one's coordinate on mesh axis `axis` is 0, zeros elsewhere: replicated to partial."""

    source: str
    target: str
    axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicate:
    """One collective on mesh axis `axis`; several tensors travel as one message.

    An all-gather concatenates along ``gather_dims[i]``; a reduce-scatter splits along
    ``split_dims[i]``; an all-to-all splits along the one and concatenates along the other; −1 where
    unused. ``asynchronous``: nothing needs the result soon, so it may run beside computation. ``dtype`` is the type in
    which they travel, "" for their own; what arrives is of theirs.
    """

    collective: Collective
    axis: int
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    gather_dims: tuple[int, ...] = ()
    split_dims: tuple[int, ...] = ()
    asynchronous: bool = False
    dtype: str = ""


def whole_message(
    axis: int,
    sources: Sequence[str],
    targets: Sequence[str],
    dtype: str = "",
    collective: Collective = Collective.ALL_REDUCE,
) -> Communicate:
    """Sum whole values over an axis, or send them as another collective does, all in one message."""
    nowhere = (-1,) * len(sources)
    return Communicate(
        collective=collective,
        axis=axis,
        sources=tuple(sources),
        targets=tuple(targets),
        gather_dims=nowhere,
        split_dims=nowhere,
        dtype=dtype,
    )


NOTHING = Communicate(collective=Collective.SEND, axis=0)
"""Runs nothing: of tasks whose work another instruction does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Add `source` into `accumulator`; the first micro-batch of a step starts it."""

    source: str
    accumulator: str
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckGradients:
    """Look whether gradients are numbers: `target` becomes 0 if all are, else 1, which ranks add up."""

    gradients: tuple[str, ...]
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleScale:
    """Leave the updates that follow out where `source` is not 0, and set the scale of the next step's loss."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginUpdate:
    """Take the gradient of one parameter's stored shard, divided by `divisor`, into the optimizer's states.

    ``target`` becomes what the update needs of the whole parameter, as far as this shard has it: ranks add it up.
    """

    parameter: str
    gradient: str
    divisor: float
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Apply the optimizer to one parameter's stored shard.

    The gradient is divided by `divisor`; with ``sums``, those of `BeginUpdate` over all shards, it is taken already.
    """

    parameter: str
    gradient: str
    divisor: float
    sums: str = ""


def value_of_copy(name: str, copy: int) -> str:
    """What a value of the first copy of a micro-batch is called in another.

    >>> value_of_copy("blocks.0.norm", 0), value_of_copy("blocks.0.norm", 1)
    ('blocks.0.norm', 'blocks.0.norm of copy 2')
    """
    return f"{name} of copy {copy + 1}" if name and copy else name


Instruction = (
    Compute | HostCopy | Slice | Mask | Communicate | Accumulate | CheckGradients | SettleScale | BeginUpdate | Update
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """A parameter as a rank holds it between steps: the value's name and its placements."""

    name: str
    value: str
    placements: Placements


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredInput:
    """A batch tensor as a rank receives it for each micro-batch; ``cut`` says how a context axis shares it."""

    name: str
    value: str
    placements: Placements
    cut: SequenceCut | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A tensor that goes from stage to stage: its value's name, and its shape and type on one rank.

    Those of all copies of a micro-batch go together.
    """

    value: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassInstructions:
    """One pass of a chunk: what it runs in order, values to free after each, and those to free when it has ended.

    ``tasks[i]`` is what the simulator times for ``instructions[i]``. The first ``ahead`` of them need nothing that
    arrives for the pass.
    """

    instructions: tuple[Instruction, ...]
    releases: tuple[tuple[str, ...], ...]
    drops: tuple[str, ...]
    tasks: tuple[Task, ...] = ()
    ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInstructions:
    """What a stage runs for each micro-batch.

    Attributes
    ----------
    passes : by kind of action and whether it is the first or the last on its stage
        (`simulator.pipeline_operators.action_variants`)
    arrives, leaves : the forward tensor from the stage before and to the next
    gradient_arrives, gradient_leaves : the gradients that come and go the other way
    lasting : values that stay from one micro-batch to the next
    gradients : what the gradient of each trained parameter is called at the end of the step
    """

    passes: Mapping[tuple[ActionKind, int], PassInstructions]
    arrives: Crossing | None
    leaves: Crossing | None
    gradient_arrives: Crossing | None
    gradient_leaves: Crossing | None
    inputs: tuple[LoweredInput, ...]
    lasting: frozenset[str]
    gradients: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInstructions:
    """What all ranks of one pipeline rank hold, do once before the first step (``start``) and at the end of each.

    ``ties`` are sets of pipeline ranks that hold a parameter together; the group of number t is the mesh axis
    ``len(mesh.axes) + t`` of messages in ``update``. ``shared`` are sums of gradients that chunks of the rank add up
    together: in ``update`` they are of the first of these.
    """

    stages: tuple[int, ...]
    parameters: tuple[StoredParameter, ...]
    update: tuple[Instruction, ...]
    ties: tuple[tuple[int, ...], ...]
    start: tuple[Instruction, ...] = ()
    shared: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredStages:
    """A plan ready to be executed; ``loss`` is a replicated scalar on the last stage.

    With ``copies`` names are those of the first copy of a micro-batch, and ``micro_batches`` counts every copy.
    """

    graph: OperatorGraph
    mesh: Mesh
    schedule: Schedule
    pipeline_stride: int
    stages: tuple[StageInstructions, ...]
    ranks: tuple[RankInstructions, ...]
    inputs: tuple[LoweredInput, ...]
    loss: str
    micro_batches: int
    offload_optimizer: bool = False
    offload_to: str = "host"
    host_parameters: tuple[str, ...] = ()
    disk_parameters: tuple[str, ...] = ()
    copies: int = 1

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        return self.mesh.size * self.schedule.ranks

    def pipeline_rank(self, rank: int) -> int:
        """Pipeline rank of a rank of the job."""
        return rank // max(self.pipeline_stride, 1) % self.schedule.ranks


def read_values(instruction: Instruction) -> tuple[str, ...]:
    """Values that an instruction reads, parameters that an update changes included."""
    if isinstance(instruction, Compute):
        found: tuple[str, ...] = instruction.inputs
    elif isinstance(instruction, Communicate):
        found = instruction.sources
    elif isinstance(instruction, Accumulate):
        found = (instruction.source,) if instruction.first else (instruction.source, instruction.accumulator)
    elif isinstance(instruction, CheckGradients):
        found = instruction.gradients
    elif isinstance(instruction, BeginUpdate):
        found = (instruction.parameter, instruction.gradient)
    elif isinstance(instruction, Update):
        found = (instruction.parameter, instruction.sums or instruction.gradient)
    else:
        found = (instruction.source,)
    return tuple(name for name in found if name)


def written_values(instruction: Instruction) -> tuple[str, ...]:
    """Values that an instruction makes."""
    if isinstance(instruction, Compute):
        found: tuple[str, ...] = instruction.outputs
    elif isinstance(instruction, Communicate):
        found = instruction.targets
    elif isinstance(instruction, Accumulate):
        found = (instruction.accumulator,)
    elif isinstance(instruction, HostCopy | Slice | Mask | CheckGradients | BeginUpdate):
        found = (instruction.target,)
    else:
        found = ()
    return tuple(name for name in found if name)
