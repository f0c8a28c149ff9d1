"""The steps of one rank of a plan on one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from planner.execution.machine import Held, Machine, RankContext
from planner.lowering.instructions import LoweredPlan, value_of_copy


class Interpreter:
    """Runs the steps of one rank.

    Parameters
    ----------
    lowered : LoweredPlan
        What to run.
    context : RankContext
        Who runs it.
    held : Held
        Parameters, their updates, and buffers.
    """

    def __init__(self, lowered: LoweredPlan, context: RankContext, held: Held) -> None:
        copies = range(lowered.copies)
        machine = Machine(lowered.graph, lowered.mesh.sizes, context, lowered.parameters, held, lowered.copies)
        self._machine = machine
        self._inputs = [[machine.number(value_of_copy(i.value, copy)) for i in lowered.inputs] for copy in copies]
        self._losses = [machine.number(value_of_copy(lowered.loss, copy)) for copy in copies]
        for action in machine.compile(lowered.start, [()] * len(lowered.start)):
            action()
        self._segments = [
            (segment.count, machine.compile(instructions, [task.releases for task in segment.tasks]))
            for segment, instructions in zip(lowered.program.segments, lowered.instructions, strict=True)
        ]

    def run_step(self, feed: Callable[[int], Sequence[Tensor]]) -> list[Tensor]:
        """Run one optimizer step and return the loss of each micro-batch, or of each of its copies.

        Parameters
        ----------
        feed : callable
            Gives this rank's piece of every input of a micro-batch, by the micro-batch's index; copies count as such.
        """
        losses: list[Tensor] = []
        slots, moments = self._machine.slots, self._machine.moments
        for count, actions in self._segments:
            for _ in range(count):
                for number, (moment, inputs) in enumerate(zip(moments, self._inputs, strict=True), len(losses)):
                    moment.micro_batch = number
                    for slot, tensor in zip(inputs, feed(number), strict=True):
                        slots[slot] = tensor
                for action in actions:
                    action()
                losses += [self._machine.value(loss) for loss in self._losses]
        for moment in moments:
            moment.step += 1
        return losses

    def live_bytes(self) -> int:
        """Bytes of the tensors held now, shared memory counted once."""
        return self._machine.live_bytes()
