"""Steps of plans on one stage, followed instruction by instruction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import pytest

from planner.graph.operator_graph import OperatorGraph
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import (
    Accumulate,
    Communicate,
    Compute,
    HostCopy,
    Instruction,
    LoweredStages,
    Mask,
    PassInstructions,
    Slice,
    Update,
    read_values,
    value_of_copy,
)
from planner.lowering.stages import gradient_of_stage, lower_stages
from planner.plans.plan import Plan
from planner.sharding.placement import PARTIAL, REPLICATE, Placements
from simulator.pipeline_operators import PLAIN, action_variants
from simulator.program import SUMMED_CLASS, Collective, Kernel, Task
from simulator.schedules import ActionKind


def lowered_of(plan: Plan, graph: OperatorGraph | None = None, *, precision: str | None = None) -> LoweredStages:
    """A plan checked and lowered, on its network's graph at any batch."""
    return lower_stages(plan, checked_graph(plan, graph, precision=precision))


def passes(lowered: LoweredStages) -> Iterator[tuple[ActionKind, PassInstructions]]:
    """Every pass of a step on one stage, in order."""
    schedule, (stage,) = lowered.schedule, lowered.stages
    for kind, variant in zip(schedule.kind.tolist(), action_variants(schedule).tolist(), strict=True):
        key = ActionKind(kind)
        yield key, stage.passes[(key, variant) if (key, variant) in stage.passes else (key, PLAIN)]


def steps(lowered: LoweredStages) -> Iterator[tuple[Task, Instruction]]:
    """Tasks of all passes of a step on one stage with their instructions, in order."""
    for _, one in passes(lowered):
        yield from zip(one.tasks, one.instructions, strict=True)


def tasks_of(lowered: LoweredStages) -> list[Task]:
    """Tasks of all passes of a step."""
    return [task for task, _ in steps(lowered)]


def updates(lowered: LoweredStages) -> tuple[Instruction, ...]:
    """What the rank of one stage runs behind its passes."""
    return lowered.ranks[0].update


@dataclass
class Rank:
    """What a rank of one stage holds: placements and local bytes of every value, followed instruction by instruction.

    ``base`` has the value in whose memory a view stands; ``size`` that of values that are gone as well.
    """

    lowered: LoweredStages
    placed: dict[str, Placements] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nodes = {node.name: node for node in self.lowered.graph.nodes}
        for stored in (*self.lowered.ranks[0].parameters, *self.lowered.inputs):
            self._write(stored.value, stored.placements, self._nodes[stored.value].outputs[0].size_bytes)
        self.stored = frozenset(self.placed)

    def step(self) -> None:
        """Follow a step; nothing but what lasts may remain of a micro-batch, and only what is stored of the step."""
        (stage,) = self.lowered.stages
        losses = {value_of_copy(self.lowered.loss, copy) for copy in range(self.lowered.copies)}
        for kind, one in passes(self.lowered):
            self.run(one)
            if kind is ActionKind.FORWARD:
                assert all(set(self.placed[loss]) <= {REPLICATE} for loss in losses)
            for value in one.drops:
                self._free(value)
            if kind is ActionKind.BACKWARD:
                assert set(self.placed) <= self.stored | stage.lasting | set(stage.gradients.values())
        for parameter, gradient in stage.gradients.items():
            own = gradient_of_stage(parameter, 0)
            self.placed[own], self.size[own] = self.placed[gradient], self.size[gradient]
        for value in {*self.placed} & stage.lasting:
            self._free(value)
        for instruction in updates(self.lowered):
            self._there(instruction, type(instruction).__name__)
            if isinstance(instruction, Update):
                assert self.placed[instruction.gradient] == self.placed[instruction.parameter]
                assert instruction.divisor == self.lowered.micro_batches
                self._free(instruction.gradient)
        assert set(self.placed) == self.stored

    def run(self, one: PassInstructions) -> None:
        """Follow a pass."""
        for task, instruction, released in zip(one.tasks, one.instructions, one.releases, strict=True):
            self.follow(task, instruction)
            for value in released:
                self._free(value)

    def standing(self) -> dict[str, float]:
        """Bytes of the values whose memory stands: views stand in that of others."""
        roots = set(self.placed)
        while views := roots & self.base.keys():
            roots = (roots - views) | {self.base[view] for view in views}
        return {value: self.size[value] for value in roots}

    def _free(self, value: str) -> None:
        self.placed.pop(value, None)

    def _write(self, value: str, placements: Placements, whole_bytes: float) -> None:
        sizes = self.lowered.mesh.sizes
        self.placed[value] = placements
        self.size[value] = whole_bytes / prod(n for p, n in zip(placements, sizes, strict=True) if p >= 0)

    def _move(self, source: str, target: str, axis: int, before: int | None, after: int) -> None:
        """Change the placement on one axis; it must have been `before` (None: any shard or replica)."""
        old = self.placed[source]
        if before is not None:
            assert old[axis] == before
        touched = {p for p in (old[axis], after) if p >= 0}
        assert not touched & set(old[axis + 1 :]), "chunks nest outer axis first"
        sizes = self.lowered.mesh.sizes
        factor = (sizes[axis] if old[axis] >= 0 else 1) / (sizes[axis] if after >= 0 else 1)
        self.placed[target] = (*old[:axis], after, *old[axis + 1 :])
        self.size[target] = self.size[source] * factor

    def _there(self, instruction: Instruction, name: str) -> None:
        for read in read_values(instruction):
            assert read in self.placed, f"{name} reads {read}, which is not there"

    def follow(self, task: Task, instruction: Instruction) -> None:
        """Follow an instruction of a pass, whose task must be what it does."""
        self._there(instruction, task.name)
        if isinstance(instruction, Compute):
            self._compute(task, instruction)
        elif isinstance(instruction, Communicate):
            if instruction.sources:
                self._communicate(task, instruction)
        elif isinstance(instruction, Slice):
            self._move(instruction.source, instruction.target, instruction.axis, REPLICATE, instruction.dim)
        elif isinstance(instruction, Mask):
            self._move(instruction.source, instruction.target, instruction.axis, REPLICATE, PARTIAL)
        elif isinstance(instruction, HostCopy):
            self.placed[instruction.target] = self.placed[instruction.source]
            self.size[instruction.target] = 0.0 if instruction.to_host else task.bytes_moved
        else:
            assert isinstance(instruction, Accumulate)
            if instruction.first:
                self.placed[instruction.accumulator] = self.placed[instruction.source]
                self.size[instruction.accumulator] = self.size[instruction.source]
            assert self.placed[instruction.accumulator] == self.placed[instruction.source]

    def _compute(self, task: Task, instruction: Compute) -> None:
        node = self.lowered.graph.nodes[instruction.node]
        assert task.name.removeprefix("recompute ") == node.name
        summed = any(rule.reduced_elements for rule in instruction.rules)
        assert task.kernel is (SUMMED_CLASS.get(node.kernel, node.kernel) if summed else node.timed_as)
        for position, value in enumerate(instruction.inputs):
            assert self.placed[value] == tuple(rule.inputs[position] for rule in instruction.rules)
        for output, (value, spec) in enumerate(zip(instruction.outputs, node.outputs, strict=True)):
            if value:
                self._write(value, tuple(rule.outputs[output] for rule in instruction.rules), spec.size_bytes)
                if node.kernel is Kernel.VIEW and instruction.inputs:
                    self.base[value] = instruction.inputs[0]

    def _communicate(self, task: Task, message: Communicate) -> None:
        assert task.collective is message.collective
        assert task.axis == self.lowered.mesh.axes[message.axis].name
        for source, target, gather, split in zip(
            message.sources, message.targets, message.gather_dims, message.split_dims, strict=True
        ):
            before, after = {
                Collective.ALL_REDUCE: (PARTIAL, REPLICATE),
                Collective.ALL_GATHER: (gather, REPLICATE),
                Collective.REDUCE_SCATTER: (PARTIAL, split),
                Collective.ALL_TO_ALL: (gather, split),
            }[message.collective]
            self._move(source, target, message.axis, before, after)
        moved = message.targets if message.collective is Collective.ALL_GATHER else message.sources
        assert task.payload_bytes == pytest.approx(sum(self.size[value] for value in moved))
