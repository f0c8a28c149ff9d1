"""The steps of one rank of a plan on one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from planner.execution.machine import Machine, RankContext
from planner.execution.optimizers import StepFunction, SummedStep
from planner.instructions import LoweredPlan


class Interpreter:
    """Runs the steps of one rank.

    Parameters
    ----------
    lowered : LoweredPlan
        What to run.
    context : RankContext
        Who runs it.
    parameters : mapping of str to Tensor
        This rank's shard of every stored parameter, by name; updated in place.
    optimizers : mapping of str to StepFunction or SummedStep
        The update of each parameter, by name.
    buffers : mapping of str to Tensor
        The network's buffers that the graph reads, whole, by the name of their node.
    """

    def __init__(
        self,
        lowered: LoweredPlan,
        context: RankContext,
        parameters: Mapping[str, Tensor],
        optimizers: Mapping[str, StepFunction | SummedStep],
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        machine = Machine(
            lowered.graph, lowered.mesh.sizes, context, lowered.parameters, parameters, optimizers, buffers
        )
        self._machine = machine
        self._inputs = [machine.number(entry.value) for entry in lowered.inputs]
        self._loss = machine.number(lowered.loss)
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
        slots = self._machine.slots
        for count, actions in self._segments:
            for _ in range(count):
                for slot, tensor in zip(self._inputs, feed(len(losses)), strict=True):
                    slots[slot] = tensor
                for action in actions:
                    action()
                losses.append(self._machine.value(self._loss))
        return losses

    def live_bytes(self) -> int:
        """Bytes of the tensors held now, shared memory counted once."""
        return self._machine.live_bytes()
