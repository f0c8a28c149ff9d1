"""The operator graph: one training step of a network, forward and backward, as typed records."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import NamedTuple

from simulator.program import Kernel, Phase

_BATCHED = frozenset({"aten.bmm.default", "aten.baddbmm.default"})
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "nf4": 1,
}
"""Whole bytes of an element; two of ``nf4`` share one, as `STORED_BYTES` has it."""
STORED_BYTES = {"nf4": 0.5 + 4 / 64, "int8": 1.0}
"""Bytes of a frozen weight that is stored narrower than products take it: 4 bits, 64 of which share a float32 scale
(NF4; Dettmers et al., QLoRA, arXiv:2305.14314, section 3), and 8 bits with a scale for each row (LLM.int8)."""


class TensorRef(NamedTuple):
    """Output number `output` of node number `node`; a tuple, as it is a key of most tables."""

    node: int
    output: int = 0


@dataclass(frozen=True, slots=True)
class BatchSize:
    """An integer argument that is `multiple` times the batch size."""

    multiple: int


Argument = TensorRef | BatchSize | int | float | bool | str | None | tuple["Argument", ...]
"""What an operator is called with; dtypes are strings such as ``"torch.float32"``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype of a tensor; `batch_dims` flags the dims that grow with the batch."""

    shape: tuple[int, ...]
    dtype: str
    batch_dims: tuple[bool, ...]
    _bytes: int | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        # A search asks tens of thousands of times.
        if self._bytes is None:
            each = STORED_BYTES.get(self.dtype) or DTYPE_BYTES[self.dtype]
            object.__setattr__(self, "_bytes", round(self.elements * each))
        assert self._bytes is not None  # worked out above
        return self._bytes


RECURRENCE = "meshwright.linear_recurrence.default"
"""A linear recurrence of a matrix state (`planner.graph.recurrence`)."""
RECURRENCE_BACKWARD = "meshwright.linear_recurrence_backward.default"
"""Gradients of query, key, value, decay and rate."""
PLACES = "meshwright.expert_places.default"
"""Places of tokens in the buffers of experts (`planner.graph.custom_operators`)."""
WRITTEN = "meshwright.written.default"
"""A tensor whose numbers are written out in a module's code (`planner.graph.custom_operators`)."""
CTC = "meshwright.ctc_loss.default"
"""Losses ``(batch,)`` for log probabilities ``(batch, frames, classes)``, text ``(batch, length)`` and blank."""
CTC_BACKWARD = "meshwright.ctc_loss_backward.default"
"""Gradient of `CTC` for that of the losses, and what `CTC` was given."""
DROPOUT = "meshwright.dropout.default"
"""Dropout ``(x, p)``: whoever runs it draws the mask. Its gradient is the same operator, with the same mask."""


class Role(StrEnum):
    """Why a node is in the graph."""

    OPERATOR = "operator"
    PARAMETER = "parameter"
    INPUT = "input"
    CONSTANT = "constant"
    GRADIENT_SUM = "gradient_sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator, parameter, input or constant.

    ``op`` is the overload (``"aten.mm.default"``); parameters and inputs have the role's name there.
    ``forward`` is the index of the forward operator a backward one belongs to. A *constant* depends
    neither on parameters nor on the batch: computed by its ``op``, or a buffer of the module, named by
    its path, with ``"constant"`` there. A *gradient sum* adds the gradients that several uses of one
    tensor send back. ``flops`` counts a multiply and an add as two; work element by element is left out.
    ``product_dtype`` is what a matrix product casts its factors to, where that is not what they are.
    ``moved`` is the share of each tensor input, then of each output, that its kernel reads or writes; empty for all.
    """

    name: str
    op: str
    role: Role
    phase: Phase
    kernel: Kernel
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[TensorSpec, ...]
    forward: int | None = None
    module: str = ""
    source: str = ""
    flops: float = 0.0
    product_dtype: str = ""
    moved: tuple[float, ...] = ()
    _tensors: tuple[TensorRef, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def timed_as(self) -> Kernel:
        """Class of the kernel that runs: that of views, which costs nothing, where a fused kernel does all of it.

        Products of several experts at once are grouped.
        """
        if self.moved and not any(self.moved):
            return Kernel.VIEW
        grouped = self.kernel is Kernel.MATMUL and self.op in _BATCHED and "expert" in self.module
        return Kernel.GROUPED_MATMUL if grouped else self.kernel

    @property
    def kernel_dtype(self) -> str:
        """Type of the numbers that the kernel computes with."""
        return self.product_dtype or self.outputs[0].dtype

    @property
    def tensor_inputs(self) -> tuple[TensorRef, ...]:
        """Tensor arguments in order, lists flattened, then keyword arguments."""
        if self._tensors is None:
            found: list[TensorRef] = []
            _collect(self.args, found)
            for _, value in self.kwargs:
                _collect((value,), found)
            object.__setattr__(self, "_tensors", tuple(found))  # asked for again and again
        assert self._tensors is not None  # found above
        return self._tensors

    def sized(self, outputs: tuple[TensorSpec, ...], flops: float) -> Node:
        """The same with tensors of other sizes; graphs are scaled by many of these."""
        made = Node(
            name=self.name, op=self.op, role=self.role, phase=self.phase, kernel=self.kernel, args=self.args,
            kwargs=self.kwargs, outputs=outputs, forward=self.forward, module=self.module, source=self.source,
            flops=flops, product_dtype=self.product_dtype, moved=self.moved,
        )  # fmt: skip
        object.__setattr__(made, "_tensors", self._tensors)
        return made


def _collect(arguments: tuple[Argument, ...], found: list[TensorRef]) -> None:
    for argument in arguments:
        if isinstance(argument, TensorRef):
            found.append(argument)
        elif isinstance(argument, tuple):
            _collect(argument, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A trained tensor: its node, its gradient and every name it goes by (tied parameters have several)."""

    name: str
    node: int
    gradient: TensorRef | None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInput:
    """A batch tensor.

    ``kind`` is ``"image"``, ``"features"``, ``"categories"``, ``"tokens"``, ``"label"``, ``"target"`` or
    ``"next_tokens"``; ``high`` bounds integer inputs (vocabulary or number of classes).
    """

    name: str
    node: int
    kind: str
    high: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` equal blocks in a row, of which two are in the graph.

    ``first`` and ``second`` are the aligned node indices of block 0 and block 1, forward and
    backward. Names carry the block's index after ``prefix``: ``blocks.0.…``, ``blocks.1.…``.
    """

    prefix: str
    count: int
    first: tuple[int, ...]
    second: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OperatorGraph:
    """Nodes in the order they execute, with the folded runs of equal blocks.

    ``batch_size`` is that of one micro-batch over the whole mesh, ``fusion`` what fuses operators, one of
    `planner.graph.fusion`, ``selective`` the parts of layers that selective recomputation computes again
    (`planner.graph.layer_parts`), none for all that is cheap.
    """

    network: str
    fingerprint: str
    batch_size: int
    nodes: tuple[Node, ...]
    parameters: tuple[Parameter, ...]
    inputs: tuple[NetworkInput, ...]
    loss: TensorRef
    runs: tuple[Run, ...] = ()
    notes: tuple[str, ...] = field(default=())
    fusion: str = ""
    selective: tuple[str, ...] = ()

    def spec(self, ref: TensorRef) -> TensorSpec:
        """Shape and dtype of a tensor."""
        return self.nodes[ref.node].outputs[ref.output]

    @cached_property
    def consumers(self) -> dict[TensorRef, tuple[int, ...]]:
        """Nodes that read each tensor, in order, without repetition."""
        found: dict[TensorRef, dict[int, None]] = {}
        for index, node in enumerate(self.nodes):
            for ref in node.tensor_inputs:
                found.setdefault(ref, {})[index] = None
        return {ref: tuple(users) for ref, users in found.items()}

    @cached_property
    def multiplicity(self) -> tuple[int, ...]:
        """How many nodes of the unfolded graph each node stands for."""
        times = [1] * len(self.nodes)
        for run in self.runs:
            for index in run.second:
                times[index] = run.count - 1
        return tuple(times)

    @cached_property
    def trained(self) -> frozenset[int]:
        """Nodes of the parameters that have a gradient; frozen ones have none."""
        return frozenset(parameter.node for parameter in self.parameters if parameter.gradient is not None)

    @property
    def parameter_count(self) -> int:
        """Numbers of all parameters of the unfolded network, tied ones once."""
        return sum(self.multiplicity[p.node] * self.nodes[p.node].outputs[0].elements for p in self.parameters)

    def flops(self, phase: Phase | None = None) -> float:
        """Floating point operations of one micro-batch of the unfolded network."""
        return sum(
            times * node.flops
            for node, times in zip(self.nodes, self.multiplicity, strict=True)
            if phase is None or node.phase == phase
        )
