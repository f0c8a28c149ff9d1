"""Tasks of the passes of a pipeline, each with the instruction that runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from planner.lowering.instructions import Instruction, value_of_copy
from planner.lowering.turns import in_copy
from planner.lowering.writer import Draft
from simulator.program import Task


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
