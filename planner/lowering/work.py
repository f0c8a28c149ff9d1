"""Tasks of the passes of a pipeline, each with the instruction that runs it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from planner.instructions import Instruction
from planner.lowering.writer import Draft
from simulator.program import Task


@dataclass(slots=True)
class Work:
    """What runs is what is timed: ``instructions[n]`` belongs to ``tasks[n]``."""

    tasks: list[Task] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)

    def add(self, task: Task, instruction: Instruction) -> int:
        """Append a task; returns its number."""
        self.tasks.append(task)
        self.instructions.append(instruction)
        return len(self.tasks) - 1

    def add_all(self, drafts: Iterable[Draft]) -> list[int]:
        """Append drafts; returns their numbers."""
        return [self.add(draft.task, draft.instruction) for draft in drafts]
