"""The reference engine: one SimPy process for each stream of a device.

SimPy runs events in the order (time, priority, serial number); streams start in the order of their
first task, so the same program gives the same event order always.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import simpy

from simulator.program import Program, Segment
from simulator.task_order import Streams, deadlock
from simulator.timeline import TaskTimes, Timeline, simulate_segments
from simulator.timing import task_times

if TYPE_CHECKING:
    from simulator.hardware import Hardware

FloatArray = npt.NDArray[np.float64]


def simulate(program: Program, hardware: Hardware) -> Timeline:
    """Simulate one step of `program` on `hardware` as discrete events.

    Raises
    ------
    ProgramError
        When the program cannot run to its end: the message names the tasks that wait for each other.
    """
    times = task_times(program, hardware)
    return replay(program, times, overlaps_communication=hardware.overlaps_communication)


def replay(program: Program, times: Sequence[FloatArray], *, overlaps_communication: bool = True) -> Timeline:
    """Simulate one step whose tasks take `times`: one array (tasks,) of seconds for each segment.

    Segments run one after the other, so each begins and ends with the device idle; a repeated
    segment is simulated once.
    """
    return simulate_segments(program, times, _run, overlaps_communication=overlaps_communication)


def _run(segment: Segment, seconds: FloatArray, streams: Streams) -> TaskTimes:
    run = _SegmentRun(segment, seconds.tolist())
    for tasks in streams.values():
        run.environment.process(run.stream(tasks))
    run.environment.run()
    if run.unfinished:
        ended = frozenset(index for index, end in enumerate(run.ends) if end == end)
        raise deadlock(segment, streams, ended)
    return TaskTimes(np.array(run.starts), np.array(run.ends))


class _SegmentRun:
    """One repetition of a segment in a SimPy environment; an end that is not a number has not come yet."""

    def __init__(self, segment: Segment, lengths: list[float]) -> None:
        self.environment = simpy.Environment()
        self.tasks = segment.tasks
        self.lengths = lengths
        self.starts = [nan] * len(lengths)
        self.ends = [nan] * len(lengths)
        self.unfinished = len(lengths)
        self._awaited: dict[int, simpy.Event] = {}

    def stream(self, indices: Sequence[int]) -> Generator[simpy.Event, Any, None]:
        """Run tasks one after the other, each when what it waits for has ended.

        Most dependencies have ended when they are asked for: only those that have not get an event.
        """
        environment, tasks, lengths = self.environment, self.tasks, self.lengths
        starts, ends, awaited = self.starts, self.ends, self._awaited
        for index in indices:
            for before in tasks[index].after:
                if ends[before] != ends[before]:
                    event = awaited.get(before)
                    if event is None:
                        event = awaited[before] = environment.event()
                    yield event
            starts[index] = environment.now
            if lengths[index] > 0.0:
                yield environment.timeout(lengths[index])
            ends[index] = environment.now
            self.unfinished -= 1
            if index in awaited:
                awaited.pop(index).succeed()
