"""A micro-batch in copies: the same operators on parts of its samples, issued in turn.

A copy's turn ends behind each of its messages, which travel while the others compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from planner.graph.operator_graph import Role
from planner.lowering.instructions import Communicate, Compute, HostCopy, Instruction, Mask, Slice, value_of_copy
from planner.lowering.placed import PlacedGraph
from planner.lowering.writer import Draft
from simulator.program import Buffer, BufferKind

T = TypeVar("T")


def is_message(instruction: Instruction) -> bool:
    """Whether an instruction sends what other operators wait for; those inside operators are theirs."""
    return isinstance(instruction, Communicate) and bool(instruction.sources)


def values_of_samples(source: PlacedGraph, drafts: Iterable[Draft]) -> frozenset[str]:
    """Names of values that every copy has its own of: the batch, and all that the body makes."""
    batch = {source.graph.nodes[i].name for i in source.stored if source.graph.nodes[i].role is Role.INPUT}
    return frozenset(batch.union(*({buffer.name for buffer in draft.writes} for draft in drafts)))


def stored_values(source: PlacedGraph, index: int) -> tuple[str, ...]:
    """Names of what is held of a parameter or of a batch tensor, of which there is one for every copy."""
    node = source.graph.nodes[index]
    count = source.options.copies if node.role is Role.INPUT else 1
    return tuple(value_of_copy(node.name, copy) for copy in range(count))


def more_batches(source: PlacedGraph) -> Iterator[Buffer]:
    """The batch of every copy but the first."""
    for index, placements in source.stored.items():
        size = source.local_bytes(source.graph.nodes[index].outputs[0], placements)
        for name in stored_values(source, index)[1:]:
            yield Buffer(name=name, size_bytes=size, kind=BufferKind.ACTIVATION)


def draft_of_copy(draft: Draft, own: Collection[str], copy: int) -> Draft:
    """The same draft in a copy, whose `own` values have names of their own.

    Messages are waited for at the first use of what they bring: until then another copy computes.
    """

    def named(name: str) -> str:
        return value_of_copy(name, copy) if name in own else name

    return replace(
        draft,
        task=replace(draft.task, name=value_of_copy(draft.task.name, copy)) if copy else draft.task,
        instruction=_instruction_of_copy(draft.instruction, named, copy),
        reads=tuple(map(named, draft.reads)),
        writes=tuple(replace(buffer, name=named(buffer.name)) for buffer in draft.writes) if copy else draft.writes,
        owners={named(view): named(owner) for view, owner in draft.owners.items()},
        completes=tuple(map(named, draft.completes)),
    )


def in_copy(instruction: Instruction, own: Collection[str], copy: int) -> Instruction:
    """The same instruction in a copy, whose `own` values have names of their own; messages travel beside others."""
    return _instruction_of_copy(instruction, lambda name: value_of_copy(name, copy) if name in own else name, copy)


def _instruction_of_copy(instruction: Instruction, named: Callable[[str], str], copy: int) -> Instruction:
    found = with_names(instruction, named)
    if isinstance(found, Compute):
        return replace(found, copy=copy)
    return replace(found, asynchronous=bool(found.sources)) if isinstance(found, Communicate) else found


def with_names(instruction: Instruction, named: Callable[[str], str]) -> Instruction:
    """An instruction of a pass with other names for its values."""
    if isinstance(instruction, Compute):
        inputs, outputs = tuple(map(named, instruction.inputs)), tuple(map(named, instruction.outputs))
        return replace(instruction, inputs=inputs, outputs=outputs)
    if isinstance(instruction, Communicate):
        sources, targets = tuple(map(named, instruction.sources)), tuple(map(named, instruction.targets))
        return replace(instruction, sources=sources, targets=targets)
    assert isinstance(instruction, HostCopy | Slice | Mask)  # the others are of all copies
    return replace(instruction, source=named(instruction.source), target=named(instruction.target))


def in_turn(copies: Sequence[Iterable[T]], ends_turn: Callable[[T], bool]) -> Iterator[T]:
    """What copies do, one turn of each after the other; all have as many.

    >>> "".join(in_turn(["ab|c|d", "AB|C|D"], lambda letter: letter == "|"))
    'ab|AB|c|C|dD'
    """
    turns = [_turns(copy, ends_turn) for copy in copies]
    for together in zip(*turns, strict=True):
        for turn in together:
            yield from turn


def _turns(copy: Iterable[T], ends_turn: Callable[[T], bool]) -> Iterator[list[T]]:
    turn: list[T] = []
    for item in copy:
        turn.append(item)
        if ends_turn(item):
            yield turn
            turn = []
    yield turn
