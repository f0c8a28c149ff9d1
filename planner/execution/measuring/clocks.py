"""Where the time of a step goes, by the executor's own clocks around every instruction.

Readings of two clocks and one appended tuple an instruction are all that a recorded step pays; steps whose time is
reported run without. A profiler would cost each operator several times as much, and would name kernels that belong
to no instruction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from planner.execution.communication import Action
from planner.lowering.instructions import Communicate, Instruction, LoweredStages

IntArray = NDArray[np.int64]
REDUCTION, RECEIVE = 3, 4
"""Parts of a step beside those of `planner.execution.machine`: sums inside operators, messages between stages."""
OUTSIDE = -1
"""Number of an instruction that the catalogue does not have."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRecord:
    """What the clocks of one rank showed.

    Attributes
    ----------
    steps : (S, 2) nanoseconds at which each recorded step began and ended
    events : (E, 5) number, part, start and end in nanoseconds, and nanoseconds of processor time between them, in order
        of their ends. The number is that of the instruction in `catalogue`, of a reduction the mesh axis, of a message
        between stages the stage it comes from. An accelerator has no other time than that between start and end.
    machine : ranks with the same one read the same clock
    """

    steps: IntArray
    events: IntArray
    machine: str


class RankClocks:
    """The clocks of one rank; a `planner.execution.machine.Probe` that costs next to nothing while it is off."""

    def __init__(self, lowered: LoweredStages, rank: int, device: torch.device) -> None:
        self.recording = False
        self._numbers = {id(one): number for number, one in enumerate(catalogue(lowered, rank))}
        self._events: list[tuple[int, int, Any, Any, int]] = []
        self._steps: list[tuple[Any, Any]] = []
        self._begun: Any = None
        self._clock: Callable[[], Any] = time.perf_counter_ns if device.type == "cpu" else _device_clock(device)
        self._busy: Callable[[], int] = time.thread_time_ns if device.type == "cpu" else int
        self._device = device

    def action(self, instruction: Instruction, part: int, action: Action) -> Action:
        """The action between two readings of the clock."""
        return partial(self._clocked, self._numbers.get(id(instruction), OUTSIDE), part, action)

    def reduction(self, axis: int, reduction: Callable[[], object]) -> None:
        """Run a reduction inside an operator between two readings of the clock."""
        self._clocked(axis, REDUCTION, reduction)

    def crossing(self, stage: int, receive: Callable[[], object]) -> None:
        """Receive what comes from a stage between two readings of the clock."""
        self._clocked(stage, RECEIVE, receive)

    def _clocked(self, number: int, part: int, action: Callable[[], object]) -> None:
        if not self.recording:
            action()
            return
        start, before = self._clock(), self._busy()
        action()
        after = self._busy()
        self._events.append((number, part, start, self._clock(), after - before))

    def begin_step(self) -> None:
        """Record from here."""
        self.recording = True
        self._begun = self._clock()

    def end_step(self) -> None:
        """Record no more."""
        self._steps.append((self._begun, self._clock()))
        self.recording = False

    def record(self) -> RankRecord:
        """All that was recorded."""
        events, steps = self._events, self._steps
        if self._device.type != "cpu":
            base = steps[0][0]
            getattr(torch, self._device.type).synchronize(self._device)
            since = {id(one): round(base.elapsed_time(one) * 1e6) for pair in steps for one in pair}
            since |= {id(one): round(base.elapsed_time(one) * 1e6) for event in events for one in event[2:4]}
            steps = [(since[id(first)], since[id(last)]) for first, last in steps]
            events = [
                (number, part, since[id(first)], since[id(last)], since[id(last)] - since[id(first)])
                for number, part, first, last, _ in events
            ]
        return RankRecord(
            steps=np.array(steps, np.int64).reshape(-1, 2),
            events=np.array(events, np.int64).reshape(-1, 5),
            machine=_machine() if self._device.type == "cpu" else "",
        )


def catalogue(lowered: LoweredStages, rank: int) -> list[Instruction]:
    """Every instruction that a rank of the job runs, once, in a fixed order.

    Wherever the lowered plan is unpickled an instruction has the same number.
    """
    found: dict[int, Instruction] = {}
    for one in _all_instructions(lowered, rank):
        if not isinstance(one, Communicate) or one.sources:  # one object stands for all that run nothing
            found.setdefault(id(one), one)
    return list(found.values())


def _all_instructions(lowered: LoweredStages, rank: int) -> Iterator[Instruction]:
    mine = lowered.ranks[lowered.pipeline_rank(rank)]
    for number in mine.stages:
        for one in lowered.stages[number].passes.values():
            yield from one.instructions
    yield from mine.update


def aligned(records: Sequence[RankRecord]) -> list[RankRecord]:
    """The records on the clock of the first rank: as they are where all read one, else by the beginning of step one."""
    first = records[0]
    if first.machine and all(record.machine == first.machine for record in records):
        return list(records)
    found = []
    for record in records:
        shift = int(first.steps[0, 0] - record.steps[0, 0])
        events = record.events.copy()
        events[:, 2:4] += shift
        found.append(RankRecord(steps=record.steps + shift, events=events, machine=first.machine))
    return found


def _device_clock(device: torch.device) -> Callable[[], Any]:
    module = getattr(torch, device.type)

    def read() -> Any:
        event = module.Event(enable_timing=True)
        event.record()
        return event

    return read


def _machine() -> str:
    """A word that is the same in all processes which read the same clock, and in no others."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
