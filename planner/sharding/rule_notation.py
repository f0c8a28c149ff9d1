"""The index notation in which the rule table is written, and how rules follow from it.

Every dim of a tensor carries one letter; dims that must go together along a mesh axis carry the same
letter, as in ``mk,kn->mn`` for a matrix product. Sharding letter ``k`` shards every tensor that
carries it, replicates the inputs that do not, and leaves the outputs that do not carry it partial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.graph.operator_graph import Argument, BatchSize, Node, OperatorGraph, TensorRef, TensorSpec
from planner.sharding.placement import PARTIAL, REPLICATE, Placement
from simulator.program import Collective

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FIXED = "."
"""A dim that cannot be sharded."""

_BATCH = 1_000_003
NARROW = frozenset({"float16", "bfloat16"})
_FLOATING = frozenset(("float64", "float32", "float16", "bfloat16"))


@dataclass(frozen=True, slots=True)
class InnerMessage:
    """A collective that an operator runs inside itself, among the ranks of its rule's axis.

    The payload is ``elements`` numbers of the dtype of the operator's first output, or the local pieces of
    ``tensors``, which are numbered as ``Node.tensor_inputs`` with ``Node.outputs`` after them, divided by
    ``divisor``: the number of heads in a row that are copies of one. A ``circulating`` message is sent size − 1
    times, one after the other, until every rank has seen every piece; an ``overlapped`` one travels while the
    operator works on the piece before, ``together`` with how many others of its size. An all-gather counts what
    arrives: the pieces of all ``gathered`` ranks. ``uncut`` tensors count as if the rule's own axis did not cut them:
    with the length of a cut dim as divisor that is one number for each row along it, in float32 at least, so that rules
    are the same in every precision. `planner.sharding.inner_messages` counts and times them.
    """

    collective: Collective
    elements: int = 0
    tensors: tuple[int, ...] = ()
    divisor: int = 1
    circulating: bool = False
    overlapped: bool = False
    gathered: int = 1
    together: int = 1
    uncut: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One strategy of an operator along one mesh axis.

    ``inputs`` are aligned with ``Node.tensor_inputs``, ``outputs`` with ``Node.outputs``.
    ``splits_work`` says that each rank does 1/size of the operator's work. ``reduced_elements`` is
    the number of elements that are all-reduced inside the operator (synchronised batch norm), and
    ``messages`` are its other inner collectives, in order: ``inner_messages(rule)`` lists all of them.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    splits_work: bool
    reduced_elements: int = 0
    messages: tuple[InnerMessage, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument or result.

    ``extents`` are its dims with those that grow with the batch multiplied by a large prime, so that
    they are told apart from dims of the same size, and from size 1, at any batch size.
    """

    extents: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.extents)

    def grows(self, dim: int) -> bool:
        """Whether a dim grows with the batch."""
        return self.extents[dim] % _BATCH == 0


Value = Operand | BatchSize | int | float | bool | str | None | tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class Call:
    """An operator call as the rule families see it: tensors are operands."""

    op: str
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    outputs: tuple[Operand, ...]

    def argument(self, position: int, name: str, default: Value = None) -> Value:
        """Argument by position or by name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def tensor(self, position: int) -> Operand:
        """Positional tensor argument; for a list, its first tensor."""
        value = self.args[position]
        while isinstance(value, tuple):
            value = value[0]
        assert isinstance(value, Operand)
        return value

    def dim(self, position: int, name: str, rank: int, default: int = 0) -> int:
        """Read a tensor dim argument, counted from the front."""
        value = self.argument(position, name, default)
        return int(value) % max(rank, 1) if isinstance(value, int) else default % max(rank, 1)

    def dims(self, position: int, name: str, rank: int) -> frozenset[int]:
        """Read an argument that lists dims; none at all means every dim."""
        value = self.argument(position, name)
        chosen = value if isinstance(value, tuple) else () if value is None else (value,)
        return frozenset(int(d) % rank for d in chosen if isinstance(d, int)) or frozenset(range(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLetters:
    """Letters of one call.

    ``arguments`` are aligned with the positional arguments (those of non-tensors are ignored, a list of
    tensors shares one); ``outputs`` with the outputs, where ``None`` is an output that is not computed
    and letters after ``|`` are those the output does not depend on (it is replicated, not partial).
    ``linear`` lists sets of arguments in which the operator is jointly linear: all of them may be
    partial while the others are replicated. Sharding a letter of ``whole`` saves no work. ``extra``
    are rules the notation cannot say.
    """

    arguments: tuple[str, ...]
    outputs: tuple[str | None, ...]
    keywords: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    whole: str = ""
    extra: tuple[Rule, ...] = ()


def call_of(graph: OperatorGraph, node: Node) -> Call:
    """Describe a node's call with operands for its tensors."""

    def value(argument: Argument) -> Value:
        if isinstance(argument, TensorRef):
            return _operand(graph.spec(argument))
        if isinstance(argument, tuple):
            return tuple(value(item) for item in argument)
        return argument

    return Call(
        node.op,
        tuple(value(a) for a in node.args),
        {name: value(a) for name, a in node.kwargs},
        tuple(_operand(spec) for spec in node.outputs),
    )


def rules_of(call: Call, layout: CallLetters) -> tuple[Rule, ...]:
    """Derive the rules: replicated, one for each letter, partial pass-through, extra ones."""
    inputs = list(labelled_inputs(call, layout))
    outputs = list(zip(layout.outputs, call.outputs, strict=False))
    found = {replicated(len(inputs), len(call.outputs)): None}
    labels = [label for _, _, label in inputs] + [label.partition("|")[0] for label, _ in outputs if label]
    for letter in dict.fromkeys("".join(labels)):
        rule = None if letter == FIXED else _letter_rule(letter, inputs, outputs, letter not in layout.whole)
        if rule is not None:
            found[rule] = None
    for positions in layout.linear:
        rule = _linear_rule(positions, call, inputs)
        if rule is not None:
            found[rule] = None
    return (*found, *(rule for rule in layout.extra if rule not in found))


def replicated(inputs: int, outputs: int) -> Rule:
    """Everything whole on every rank."""
    return Rule((REPLICATE,) * inputs, (REPLICATE,) * outputs, False)


_Input = tuple[int, Operand, str]
_Output = tuple[str | None, Operand]


def _operand(spec: TensorSpec) -> Operand:
    extents = tuple(size * _BATCH if batch else size for size, batch in zip(spec.shape, spec.batch_dims, strict=True))
    return Operand(extents, spec.dtype)


def labelled_inputs(call: Call, layout: CallLetters) -> Iterator[_Input]:
    """Position of the argument, operand and letters of every tensor, in the order of ``Node.tensor_inputs``."""
    for position, argument in enumerate(call.args):
        label = layout.arguments[position] if position < len(layout.arguments) else ""
        yield from ((position, operand, label) for operand in _operands(argument))
    for name, argument in call.kwargs.items():
        yield from ((-1, operand, layout.keywords.get(name, "")) for operand in _operands(argument))


def _operands(argument: Value) -> Iterator[Operand]:
    if isinstance(argument, Operand):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _operands(item)


def _place(letter: str, label: str, operand: Operand) -> Placement:
    """Dim that carries the letter; a dim of size 1 is broadcast along it, so replicated."""
    dim = label.find(letter)
    return dim if 0 <= dim < operand.rank and operand.extents[dim] > 1 else REPLICATE


def _letter_rule(letter: str, inputs: Sequence[_Input], outputs: Sequence[_Output], splits: bool) -> Rule | None:
    before = tuple(_place(letter, label, operand) for _, operand, label in inputs)
    after: list[Placement] = []
    for label, operand in outputs:
        carried, _, independent = (label or "").partition("|")
        placement = _place(letter, carried, operand)
        if placement == REPLICATE and label is not None and letter not in independent:
            if operand.dtype == "bool":
                return None
            placement = PARTIAL
        after.append(placement)
    if all(placement < 0 for placement in (*before, *after)):
        return None
    return Rule(before, tuple(after), splits)


def _linear_rule(positions: tuple[int, ...], call: Call, inputs: Sequence[_Input]) -> Rule | None:
    """Pass partial sums on, where nothing is rounded to another dtype between the terms and the sum."""
    if any(p >= len(call.args) or not any(_operands(call.args[p])) for p in positions):
        return None
    dtypes = {operand.dtype for position, operand, _ in inputs if position in positions}
    dtypes |= {operand.dtype for operand in call.outputs}
    if len(dtypes) != 1 or not dtypes <= _FLOATING:
        return None
    before = tuple(PARTIAL if position in positions else REPLICATE for position, _, _ in inputs)
    return Rule(before, (PARTIAL,) * len(call.outputs), False)
