"""A micro-batch in copies: the same operators on parts of its samples, issued in turn.

A copy's turn ends behind each of its messages, which travel while the others compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from planner.lowering.instructions import Communicate, Compute, HostCopy, Instruction, Mask, Slice, value_of_copy

T = TypeVar("T")


def is_message(instruction: Instruction) -> bool:
    """Whether an instruction sends what other operators wait for; those inside operators are theirs."""
    return isinstance(instruction, Communicate) and bool(instruction.sources)


def in_copy(instruction: Instruction, own: Collection[str], copy: int) -> Instruction:
    """The same instruction in a copy, whose `own` values have names of their own; messages travel beside others."""
    found = with_names(instruction, lambda name: value_of_copy(name, copy) if name in own else name)
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
