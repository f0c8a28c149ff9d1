"""Tasks of the passes of a pipeline, each with the instruction that runs it, and the copies of a micro-batch.

Copies run the same operators on parts of a micro-batch's samples, issued in turn. A copy's turn ends behind each of its
messages, which travel while the others compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from planner.lowering.instructions import Communicate, Compute, HostCopy, Instruction, Mask, Slice, value_of_copy
from planner.lowering.writer import Draft
from simulator.program import Task

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


@dataclass(slots=True)
class Work:
    """What runs is what is timed: ``instructions[n]`` belongs to ``tasks[n]``.

    ``own`` are values that each copy of a micro-batch has of its own; ``copied`` are the numbers of tasks in a copy, by
    the copy and the number that they have been written with. ``waiting`` are bytes that stand beside the values of a
    pass while a task runs, by its number.
    """

    tasks: list[Task] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    own: frozenset[str] = frozenset()
    copied: dict[tuple[int, int], int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Work:
        """The same tasks, to which others may be added."""
        return Work([*self.tasks], [*self.instructions], self.own, dict(self.copied), dict(self.waiting))

    def add(self, task: Task, instruction: Instruction, *, waiting: int = 0) -> int:
        """Append a task, beside which so many bytes wait; returns its number."""
        number = len(self.tasks)
        self.tasks.append(task)
        self.instructions.append(instruction)
        if waiting:
            self.waiting[number] = waiting
        return number

    def in_copy(self, number: int, copy: int) -> int:
        """Number of a task as a copy of the micro-batch runs it."""
        if (copy, number) not in self.copied:
            task, instruction = self.tasks[number], self.instructions[number]
            named = replace(task, name=value_of_copy(task.name, copy)) if copy else task
            self.copied[copy, number] = self.add(named, in_copy(instruction, self.own, copy))
        return self.copied[copy, number]

    def add_all(self, drafts: Iterable[Draft]) -> list[int]:
        """Append drafts; returns their numbers."""
        return [self.add(draft.task, draft.instruction) for draft in drafts]
