"""One rank's view of an operator call: local shapes, ranges and resolved arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.graph.attention import MASKED, MASKED_BACKWARD
from planner.graph.custom_operators import (
    alignment_loss_operator,
    dropout_operator,
    expert_places_operator,
    written_operator,
)
from planner.graph.masked_attention import masked_attention_operator
from planner.graph.operator_graph import (
    CTC,
    CTC_BACKWARD,
    DROPOUT,
    PLACES,
    RECURRENCE,
    RECURRENCE_BACKWARD,
    WRITTEN,
    Argument,
    BatchSize,
    Node,
    OperatorGraph,
    TensorRef,
    TensorSpec,
)
from planner.graph.recurrence import recurrence_operator
from planner.sharding.placement import PARTIAL, REPLICATE, Placements, local_shape
from planner.sharding.rule_notation import NARROW, Rule
from simulator.errors import ExecutionError

Parts = tuple[Tensor, ...]


@dataclass(slots=True, kw_only=True)
class Moment:
    """Where training stands: masks of dropout follow from it and from the seed."""

    seed: int = 0
    step: int = 0
    micro_batch: int = 0


class Peers(Protocol):
    """The other ranks of each mesh axis as operators meet them; tensors given together travel in one message.

    ``moment`` is where training stands, the same for all.
    """

    moment: Moment

    def sum(self, tensor: Tensor, axis: int) -> Tensor:
        """Sum a tensor over the ranks."""
        ...

    def largest(self, tensor: Tensor, axis: int) -> Tensor:
        """The largest of each element over the ranks."""
        ...

    def pass_on(self, tensors: Parts, axis: int) -> Callable[[], Parts]:
        """Send tensors to the next rank; what is returned waits for those of the rank before."""
        ...

    def exchange(self, tensors: Parts, axis: int, split: int, join: int, *, all_to_all: bool = True) -> Parts:
        """Cut tensors along dim `split`, a piece for every rank, and join what comes along `join`, in rank order.

        Without `all_to_all` every rank gathers all tensors whole and keeps its pieces.
        """
        ...


LocalOperator = Callable[[Sequence[Tensor], Peers], tuple[Tensor, ...]]
"""Runs one rank's part of an operator on its local tensors, aligned with ``Node.tensor_inputs``."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where tensor number `position` goes in the arguments."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """What one rank calls: ``arguments`` and ``keywords`` hold slots for tensors and global numbers else."""

    op: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    rules: tuple[Rule, ...]
    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]

    def input_placements(self, position: int) -> Placements:
        """Placements of an input along every axis."""
        return tuple(rule.inputs[position] for rule in self.rules)

    def output_placements(self, position: int) -> Placements:
        """Placements of an output along every axis."""
        return tuple(rule.outputs[position] for rule in self.rules)

    def input_shape(self, position: int) -> tuple[int, ...]:
        """Shape of this rank's piece of an input."""
        return local_shape(self.inputs[position].shape, self.input_placements(position), self.sizes)

    def output_shape(self, position: int = 0) -> tuple[int, ...]:
        """Shape of this rank's piece of an output."""
        return local_shape(self.outputs[position].shape, self.output_placements(position), self.sizes)

    def span(self, placements: Placements, dim: int, extent: int) -> tuple[int, int]:
        """First element and number of elements of this rank along a dim; outer axes cut first."""
        start, length = 0, extent
        for placement, size, coordinate in zip(placements, self.sizes, self.coordinates, strict=True):
            if placement == dim:
                length //= size
                start += coordinate * length
        return start, length

    def adds_bias(self, bias: int) -> bool:
        """Whether this rank adds a replicated bias to a partial output: coordinate 0 of every such axis does."""
        axes = zip(self.input_placements(bias), self.output_placements(0), self.coordinates, strict=True)
        return not any(held == REPLICATE and result == PARTIAL and place for held, result, place in axes)

    def with_argument(self, position: int, value: object) -> tuple[Any, ...]:
        """Arguments with one of them replaced."""
        return (*self.arguments[:position], value, *self.arguments[position + 1 :])


def local_call(
    graph: OperatorGraph,
    node: Node,
    rules: tuple[Rule, ...],
    sizes: tuple[int, ...],
    coordinates: tuple[int, ...],
    device: torch.device | None,
) -> LocalCall:
    """Resolve numbers and dtypes of a node's arguments; number its tensors."""
    count = 0

    def resolve(argument: Argument) -> Any:
        nonlocal count
        if isinstance(argument, TensorRef):
            count += 1
            return Slot(count - 1)
        if isinstance(argument, tuple):
            return [resolve(item) for item in argument]
        if isinstance(argument, BatchSize):
            return argument.multiple * graph.batch_size
        if isinstance(argument, str) and argument.startswith("torch."):
            return getattr(torch, argument.removeprefix("torch."))
        return argument

    arguments = tuple(resolve(argument) for argument in node.args)
    keywords = {name: resolve(argument) for name, argument in node.kwargs}
    if device is not None and count == 0 and any(a.name == "device" for a in operator(node.op)._schema.arguments):
        keywords["device"] = device
    return LocalCall(
        op=node.op,
        arguments=arguments,
        keywords=keywords,
        inputs=tuple(graph.spec(ref) for ref in node.tensor_inputs),
        outputs=node.outputs,
        rules=rules,
        sizes=sizes,
        coordinates=coordinates,
    )


@cache
def operator(op: str) -> torch._ops.OpOverload:
    """Find the torch operator of an overload name."""
    if op == DROPOUT:
        return dropout_operator()
    if op in (MASKED, MASKED_BACKWARD):
        masked_attention_operator()
    if op == PLACES:
        expert_places_operator()
    if op == WRITTEN:
        written_operator()
    if op in (CTC, CTC_BACKWARD):
        alignment_loss_operator()
    if op in (RECURRENCE, RECURRENCE_BACKWARD):
        recurrence_operator()
    found: Any = torch.ops
    try:
        for part in op.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        message = f"operator {op!r} is not in torch {torch.__version__}; run with the torch it was captured with"
        raise ExecutionError(message) from error
    assert isinstance(found, torch._ops.OpOverload)
    return found


def invoke(call: LocalCall, arguments: tuple[Any, ...] | None = None) -> LocalOperator:
    """Call the operator itself on the local tensors, with the arguments given or the global ones."""
    run = filled(operator(call.op), call.arguments if arguments is None else arguments, call.keywords)
    if len(call.outputs) == 1:
        return lambda tensors, peers: (made,) if isinstance(made := run(tensors), Tensor) else tuple(made)
    return lambda tensors, peers: tuple(run(tensors))


def widened(call: LocalCall, run: LocalOperator) -> LocalOperator:
    """Compute in float32 where some of an operator's tensors are in it and others in half the width."""
    found = {spec.dtype for spec in (*call.inputs, *call.outputs)}
    if "float32" not in found or not found & NARROW:
        return run
    narrow = [position for position, spec in enumerate(call.inputs) if spec.dtype in NARROW]
    dtypes = [getattr(torch, spec.dtype) for spec in call.outputs]

    def run_wide(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        given = list(tensors)
        for position in narrow:
            given[position] = given[position].float()
        return tuple(made.to(dtype) for made, dtype in zip(run(given, peers), dtypes, strict=True))

    return run_wide


def filled(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Callable[[Sequence[Tensor]], Any]:
    """Put tensors into their slots; without a search at run time where all of them come first."""
    leading = 0
    while leading < len(arguments) and arguments[leading] == Slot(leading):
        leading += 1
    rest = arguments[leading:]
    if not any(map(_holds_slot, (*rest, *keywords.values()))):
        return lambda tensors: function(*tensors, *rest, **keywords)
    return lambda tensors: function(
        *[_fill(a, tensors) for a in arguments], **{name: _fill(a, tensors) for name, a in keywords.items()}
    )


def _holds_slot(argument: Any) -> bool:
    return isinstance(argument, Slot) or (isinstance(argument, list) and any(map(_holds_slot, argument)))


def _fill(argument: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(argument, Slot):
        return tensors[argument.position]
    if isinstance(argument, list):
        return [_fill(item, tensors) for item in argument]
    return argument


def elements(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Number of elements over some dims."""
    return prod(shape[d] for d in dims)
