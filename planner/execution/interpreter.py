"""The steps of one rank of a plan on one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from planner.execution.machine import Held, Machine, RankContext
from planner.instructions import LoweredPlan


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
        machine = Machine(lowered.graph, lowered.mesh.sizes, context, lowered.parameters, held)
        self._machine, self._moment = machine, context.moment
        self._inputs = [machine.number(entry.value) for entry in lowered.inputs]
        self._loss = machine.number(lowered.loss)
        for action in machine.compile(lowered.start, [()] * len(lowered.start)):
            action()
        self._segments = [
            (segment.count, machine.compile(instructions, [task.releases for task in segment.tasks]))
            for segment, instructions in zip(lowered.program.segments, lowered.instructions, strict=True)
        ]

    def run_step(self, feed: Callable[[int], Sequence[Tensor]]) -> list[Tensor]:
        """Run one optimizer step and return the loss of each micro-batch.

        Parameters
        ----------
        feed : callable
            Gives this rank's piece of every input of a micro-batch, by the micro-batch's index.
        """
        losses: list[Tensor] = []
        slots, moment = self._machine.slots, self._moment
        for count, actions in self._segments:
            for _ in range(count):
                moment.micro_batch = len(losses)
                for slot, tensor in zip(self._inputs, feed(len(losses)), strict=True):
                    slots[slot] = tensor
                for action in actions:
                    action()
                losses.append(self._machine.value(self._loss))
        moment.step += 1
        return losses

    def live_bytes(self) -> int:
        """Bytes of the tensors held now, shared memory counted once."""
        return self._machine.live_bytes()
