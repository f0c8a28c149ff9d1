"""Simulation by recurrence: the same times as `simulator.engine`, without events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simulator.program import Program, Segment
from simulator.task_order import Streams, execution_order
from simulator.timeline import TaskTimes, Timeline, simulate_segments
from simulator.timing import task_times

if TYPE_CHECKING:
    from simulator.hardware import Hardware

FloatArray = npt.NDArray[np.float64]


def simulate(program: Program, hardware: Hardware) -> Timeline:
    """Simulate one step of `program` on `hardware`.

    Raises
    ------
    ProgramError
        When the program cannot run to its end.
    """
    times = task_times(program, hardware)
    return replay(program, times, overlaps_communication=hardware.overlaps_communication)


def replay(program: Program, times: Sequence[FloatArray], *, overlaps_communication: bool = True) -> Timeline:
    """Simulate one step whose tasks take `times`: one array (tasks,) of seconds for each segment.

    A task starts when the task before it on its stream and all tasks it waits for have ended::

        start_i = max(end_previous(i), max over j in after_i of end_j),  end_i = start_i + time_i

    evaluated once, in an order in which every right-hand side is known.
    """
    return simulate_segments(program, times, _run, overlaps_communication=overlaps_communication)


def _run(segment: Segment, seconds: FloatArray, streams: Streams) -> TaskTimes:
    tasks, lengths = segment.tasks, seconds.tolist()
    stream_of = {index: name for name, indices in streams.items() for index in indices}
    free = dict.fromkeys(streams, 0.0)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    for index in execution_order(segment, streams):
        stream = stream_of[index]
        start = free[stream]
        for before in tasks[index].after:
            if ends[before] > start:
                start = ends[before]
        starts[index] = start
        free[stream] = ends[index] = start + lengths[index]
    return TaskTimes(np.array(starts), np.array(ends))
