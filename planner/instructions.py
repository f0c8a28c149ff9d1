"""What one rank does in a step, in order: the executor runs these, the simulator times their tasks.

Lowering makes one instruction for each task of a `simulator.program.Program` segment, at the same
position. Values are local tensors, by name. Everything is the same on every rank; what differs
(which chunk a rank keeps) follows from its mesh coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.operator_graph import OperatorGraph
from planner.sharding.placement import Mesh, Placements
from planner.sharding.rules import Rule
from simulator.program import Collective, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run node `node` of the unfolded graph on local tensors, with one rule for each mesh axis.

    ``inputs`` are aligned with ``Node.tensor_inputs`` and ``outputs`` with ``Node.outputs`` ("" where
    nothing reads an output). Rules that reduce inside the operator (synchronised batch norm) do so
    here, over the axes whose rule says so.
    """

    node: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Keep one's own chunk of `source` along dim `dim`: replicated to sharded on mesh axis `axis`."""

    source: str
    target: str
    axis: int
    dim: int


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
    unused. ``asynchronous``: nothing needs the result soon, so it may run beside computation.
    """

    collective: Collective
    axis: int
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    gather_dims: tuple[int, ...]
    split_dims: tuple[int, ...]
    asynchronous: bool = False


NOTHING = Communicate(collective=Collective.SEND, axis=0, sources=(), targets=(), gather_dims=(), split_dims=())
"""Runs nothing: of tasks whose work another instruction does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Add `source` into `accumulator`; the first micro-batch of a step starts it."""

    source: str
    accumulator: str
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginUpdate:
    """Take the gradient of one parameter's stored shard, divided by `divisor`, into the optimizer's states.

    ``target`` becomes what the update needs of the whole parameter, as far as this shard has it: ranks add it up.
    """

    parameter: str
    gradient: str
    divisor: int
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Apply the optimizer to one parameter's stored shard.

    The gradient is divided by `divisor`; with ``sums``, those of `BeginUpdate` over all shards, it is taken already.
    """

    parameter: str
    gradient: str
    divisor: int
    sums: str = ""


Instruction = Compute | Slice | Mask | Communicate | Accumulate | BeginUpdate | Update


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """A parameter as a rank holds it between steps: the value's name and its placements."""

    name: str
    value: str
    placements: Placements


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredInput:
    """A batch tensor as a rank receives it for each micro-batch."""

    name: str
    value: str
    placements: Placements


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredPlan:
    """A plan ready to be simulated and executed.

    ``instructions[s][t]`` belongs to ``program.segments[s].tasks[t]``, which also says which values
    to free after it. ``loss`` is a replicated scalar at the end of each micro-batch.
    """

    graph: OperatorGraph
    mesh: Mesh
    program: Program
    instructions: tuple[tuple[Instruction, ...], ...]
    parameters: tuple[StoredParameter, ...]
    inputs: tuple[LoweredInput, ...]
    loss: str
    micro_batches: int
