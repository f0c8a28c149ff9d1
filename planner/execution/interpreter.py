"""The steps of one rank: its actions in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from planner.execution.communication import Action
from planner.execution.machine import Held, Machine, RankContext
from planner.lowering.instructions import Crossing, LoweredStages, StageInstructions, value_of_copy
from planner.lowering.stages import gradient_of_stage
from simulator.pipeline_operators import PLAIN, action_variants
from simulator.schedules import ActionKind

SENT = -1
"""In place of the stage a message comes from: the wait for what this rank has sent."""
FORWARD, GRADIENT = range(2)
"""Directions in which tensors cross between stages."""

Frame = list[Tensor | None]
"""Values of one micro-batch on one stage while another one runs."""

PassKey = tuple[ActionKind, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """Ranks of the job that hold the stages around: ``rank_of[stage]``, and the groups messages go through.

    A group is None where messages are told apart by tags (gloo); other backends take messages of a group in order, so
    that every pair of stages and each direction has one.
    """

    rank: int
    rank_of: tuple[int, ...]
    groups: Mapping[tuple[int, int], dist.ProcessGroup]


class ChunkRun:
    """One chunk: its machine, its passes compiled, and the frames of the micro-batches it is at work on."""

    def __init__(self, instructions: StageInstructions, machine: Machine, loss: str) -> None:
        self.instructions = instructions
        self.machine = machine
        self.copies = range(len(machine.moments))
        self.inputs = [self.numbers(entry.value) for entry in instructions.inputs]
        self.losses = self.numbers(loss)
        self.ahead: dict[PassKey, list[Action]] = {}
        self.actions: dict[PassKey, list[Action]] = {}
        self.drops: dict[PassKey, list[int]] = {}
        for crossing in (instructions.arrives, instructions.gradient_arrives):
            if crossing is not None:
                self.numbers(crossing.value)
        for key, one in instructions.passes.items():
            self.ahead[key], self.actions[key] = machine.compile_parts(one.instructions, one.releases, one.ahead)
            self.drops[key] = [machine.number(name) for name in one.drops]
        lasting = {machine.number(name) for name in instructions.lasting}
        self.lasting = sorted(lasting)
        stays = lasting | {slot for slot, value in enumerate(machine.slots) if value is not None}
        self.passing = [slot for slot in range(len(machine.slots)) if slot not in stays]
        self.frames: dict[int, Frame] = {}

    def numbers(self, name: str) -> list[int]:
        """Slots of a value of every copy of a micro-batch."""
        return [self.machine.number(value_of_copy(name, copy)) for copy in self.copies]

    def enter(self, micro_batch: int) -> None:
        """Put the values of a micro-batch in place."""
        for slot, value in zip(self.passing, self.frames.pop(micro_batch, ()), strict=False):
            self.machine.slots[slot] = value

    def leave(self, micro_batch: int, key: PassKey, done: bool) -> None:
        """Take the values of a micro-batch out; nothing remains of one that is `done`."""
        slots = self.machine.slots
        for slot in self.drops[key]:
            slots[slot] = None
        if not done:
            self.frames[micro_batch] = [slots[slot] for slot in self.passing]
        for slot in self.passing:
            slots[slot] = None

    def end_step(self) -> None:
        """Forget what lasts from one micro-batch to the next."""
        for slot in self.lasting:
            self.machine.slots[slot] = None


class Interpreter:
    """Runs the steps of one rank.

    Parameters
    ----------
    lowered : LoweredStages
        What to run.
    context : RankContext
        Who runs it; behind the groups of the mesh axes stand those of ``ties``, None where this rank is in none.
    neighbours : Neighbours
        Who holds the other stages.
    held : Held
        Parameters, their updates, and buffers.
    """

    def __init__(
        self,
        lowered: LoweredStages,
        context: RankContext,
        neighbours: Neighbours,
        held: Held,
    ) -> None:
        schedule = lowered.schedule
        self._lowered, self._context, self._neighbours = lowered, context, neighbours
        rank = lowered.pipeline_rank(neighbours.rank)
        mine = lowered.ranks[rank]

        def machine() -> Machine:
            sizes = lowered.mesh.sizes
            return Machine(lowered.graph, sizes, context, mine.parameters, held, lowered.copies, mine.shared)

        self._stages = {number: ChunkRun(lowered.stages[number], machine(), lowered.loss) for number in mine.stages}
        self._update = machine()
        for action in machine().compile(mine.start, [()] * len(mine.start)):
            action()
        names = {name for stage in self._stages.values() for name in stage.instructions.gradients}
        self._given = {
            (number, name): self._update.number(gradient_of_stage(name, number))
            for number, stage in self._stages.items()
            for name in sorted(names & stage.instructions.gradients.keys())
        }
        self._updates = self._update.compile(mine.update, [()] * len(mine.update))
        self._made = [slot for slot, value in enumerate(self._update.slots) if value is None]
        variants = schedule.of_rank(rank, action_variants(schedule))
        self._actions = [*zip(schedule.actions(rank), variants, strict=True)]
        self._shared = {
            number: [(name, stage.machine.number(name)) for name in mine.shared if name in stage.instructions.lasting]
            for number, stage in self._stages.items()
        }
        self._sums: dict[str, Tensor | None] = {}
        self._local: dict[tuple[int, int, int], list[Tensor]] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def run_step(self, feed: Callable[[int], Sequence[Tensor]]) -> list[Tensor]:
        """Run one optimizer step and return the losses of the micro-batches whose last stage is here.

        Parameters
        ----------
        feed : callable
            Gives this rank's piece of every input of a micro-batch, by the micro-batch's index.
        """
        losses: dict[int, Tensor] = {}
        for (number, kind, micro_batch), variant in self._actions:
            self._run(kind, number, micro_batch, variant, feed, losses)
        for (number, name), slot in self._given.items():
            stage = self._stages[number]
            self._take_sums(number)
            self._update.slots[slot] = stage.machine.value(stage.machine.number(stage.instructions.gradients[name]))
        for stage in self._stages.values():
            stage.end_step()
        self._sums.clear()
        for action in self._updates:
            action()
        for slot in self._made:
            self._update.slots[slot] = None
        for work, _ in self._sent:
            self._clocked(SENT, work.wait)
        self._sent = []
        self._context.moment.step += 1
        return [losses[number] for number in sorted(losses)]

    def live_bytes(self) -> int:
        """Bytes of the parameters held between steps."""
        return self._update.live_bytes()

    def _run(
        self,
        kind: ActionKind,
        number: int,
        micro_batch: int,
        variant: int,
        feed: Callable[[int], Sequence[Tensor]],
        losses: dict[int, Tensor],
    ) -> None:
        stage = self._stages[number]
        instructions, slots = stage.instructions, stage.machine.slots
        key = (kind, variant) if (kind, variant) in stage.actions else (kind, PLAIN)
        stage.enter(micro_batch)
        self._take_sums(number)
        first = micro_batch * len(stage.copies)
        for copy, moment in enumerate(stage.machine.moments):
            moment.step, moment.micro_batch = self._context.moment.step, first + copy
        for action in stage.ahead[key]:
            action()  # parameters are gathered while what the pass needs is still on its way
        if kind is ActionKind.FORWARD:
            for copy in stage.copies:
                pieces = dict(zip((entry.name for entry in self._lowered.inputs), feed(first + copy), strict=True))
                for entry, numbers in zip(instructions.inputs, stage.inputs, strict=True):
                    slots[numbers[copy]] = pieces[entry.name]
            self._receive(stage, instructions.arrives, FORWARD, number - 1, micro_batch)
        elif kind is not ActionKind.WEIGHT_GRADIENT:
            self._receive(stage, instructions.gradient_arrives, GRADIENT, number + 1, micro_batch)
        for action in stage.actions[key]:
            action()
        if kind is ActionKind.FORWARD:
            self._send(stage, instructions.leaves, FORWARD, number, number + 1, micro_batch)
            if (number + 1) % self._lowered.schedule.chain_stages == 0:
                losses |= {first + copy: stage.machine.value(slot) for copy, slot in enumerate(stage.losses)}
        elif kind is not ActionKind.WEIGHT_GRADIENT:
            self._send(stage, instructions.gradient_leaves, GRADIENT, number, number - 1, micro_batch)
        for name, slot in self._shared[number]:
            self._sums[name], slots[slot] = slots[slot], None
        stage.leave(micro_batch, key, done=kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT))

    def _take_sums(self, number: int) -> None:
        """Give a stage the sums of gradients that stages of this rank add up together."""
        for name, slot in self._shared[number]:
            self._stages[number].machine.slots[slot] = self._sums.get(name)

    # Between stages

    def _send(
        self, stage: ChunkRun, crossing: Crossing | None, direction: int, number: int, there: int, micro_batch: int
    ) -> None:
        if crossing is None:
            return
        values = [stage.machine.value(slot) for slot in stage.numbers(crossing.value)]
        if there in self._stages:
            self._local[direction, there, micro_batch] = values
            return
        message = values[0].contiguous() if len(values) == 1 else torch.stack(values)
        group, tag = self._way(direction, number, micro_batch)
        work = dist.isend(message, self._neighbours.rank_of[there], group=group, tag=tag)
        assert work is not None  # this rank is in the group
        self._sent = [(one, kept) for one, kept in self._sent if not one.is_completed()]
        self._sent.append((work, message))

    def _receive(
        self, stage: ChunkRun, crossing: Crossing | None, direction: int, origin: int, micro_batch: int
    ) -> None:
        if crossing is None:
            return
        slots, numbers = stage.machine.slots, stage.numbers(crossing.value)
        here = origin + 1 if direction == FORWARD else origin - 1
        if origin in self._stages:
            for slot, one in zip(numbers, self._local.pop((direction, here, micro_batch)), strict=True):
                slots[slot] = one
            return
        shape = crossing.shape if len(numbers) == 1 else (len(numbers), *crossing.shape)
        value = torch.empty(shape, dtype=getattr(torch, crossing.dtype), device=self._context.device)
        group, tag = self._way(direction, origin, micro_batch)
        source = self._neighbours.rank_of[origin]
        self._clocked(origin, lambda: dist.recv(value, source, group=group, tag=tag))
        for slot, one in zip(numbers, [value] if len(numbers) == 1 else value.unbind(), strict=True):
            slots[slot] = one

    def _clocked(self, stage: int, crossing: Callable[[], object]) -> None:
        watch = self._context.watch
        if watch is None:
            crossing()
        else:
            watch.crossing(stage, crossing)

    def _way(self, direction: int, origin: int, micro_batch: int) -> tuple[dist.ProcessGroup | None, int]:
        """Group and tag of the messages that leave a stage in one direction."""
        group = self._neighbours.groups.get((direction, origin))
        tag = (origin * 2 + direction) * self._lowered.micro_batches + micro_batch
        return group, tag if group is None else 0
