"""Device memory over a step of a pipeline: what every rank holds when, and what stands at its peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from simulator.errors import ProgramError
from simulator.program import BufferKind
from simulator.schedules import ActionKind, Schedule

FloatArray = npt.NDArray[np.float64]
Numbers = float | FloatArray
_MOVING = (BufferKind.ACTIVATION, BufferKind.RECOMPUTED, BufferKind.LOSS)
_ACTIVATION, _RECOMPUTED, _LOSS = range(len(_MOVING))


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineBytes:
    """Bytes of every stage and rank; a number stands for an array of equal ones.

    Attributes
    ----------
    activations : (stages,) kept from the forward to the backward pass of a micro-batch
    weight_activations : (stages,) the part of them that only the weight gradient releases; by default all
    recomputed : (stages,) stand while a backward pass runs: recomputed values, gradients of the layer at work
    input_gradients : (stages,) the same while the part of a backward pass runs that leads to the input's gradient; by
        default as in whole ones
    weight_gradients : (stages,) the same while the rest of one runs
    forward : (stages,) stand besides while a forward pass runs: what it needs at once beyond what it keeps
    loss : (stages,) stand from the end of a forward pass to the end of its backward pass: logits and loss
    resident : by kind, (ranks,), through the whole step
    """

    activations: Numbers
    weight_activations: Numbers | None = None
    recomputed: Numbers = 0.0
    input_gradients: Numbers | None = None
    weight_gradients: Numbers = 0.0
    forward: Numbers = 0.0
    loss: Numbers = 0.0
    resident: Mapping[BufferKind, Numbers] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankMemory:
    """The curve of one rank: bytes in use after every change, (changes,), at times (changes,); and its peak."""

    times_s: FloatArray
    total_bytes: FloatArray
    peak_bytes: float
    peak_time_s: float
    at_peak: Mapping[BufferKind, float]


def pipeline_memory(
    schedule: Schedule, starts_s: FloatArray, ends_s: FloatArray, sizes: PipelineBytes
) -> tuple[RankMemory, ...]:
    """Memory of every rank that runs `schedule` with its actions from `starts_s` to `ends_s`, (A,).

    Activations stand from the start of the forward to the end of the backward pass. At one instant, what ends is
    released before what starts is allocated. A pair of actions runs together, so both stand
    before either releases.

    Raises
    ------
    ProgramError
        When there is not one start and one end for each action, or an action ends before it starts.
    """
    if starts_s.shape != (schedule.size,) or ends_s.shape != (schedule.size,) or np.any(ends_s < starts_s):
        raise ProgramError(
            f"schedule {schedule.name!r} has {schedule.size} actions; give one start and one later end for each, "
            f"not {starts_s.shape} and {ends_s.shape}"
        )
    actions, at_end, kind, size = _changes(schedule, sizes)
    time = np.where(at_end, ends_s[actions], starts_s[actions])
    rank = schedule.action_rank[actions]
    # An action of no length begins before it ends; ends of others come before what begins at their instant.
    instant = (starts_s == ends_s)[actions]
    order = np.lexsort((at_end, np.where(instant, actions, 0), ~(at_end & ~instant), time, rank))
    moved = np.zeros((len(order), len(_MOVING)))
    moved[np.arange(len(order)), kind[order]] = size[order]
    bounds = np.searchsorted(rank[order], np.arange(schedule.ranks + 1))
    resident = {
        name: np.broadcast_to(np.asarray(value, dtype=np.float64), schedule.ranks)
        for name, value in sizes.resident.items()
    }
    return tuple(
        _curve(time[order][first:last], moved[first:last], {name: float(v[index]) for name, v in resident.items()})
        for index, (first, last) in enumerate(pairwise(bounds))
    )


def _curve(times_s: FloatArray, moved: FloatArray, resident: Mapping[BufferKind, float]) -> RankMemory:
    base = sum(resident.values())
    levels = np.vstack((np.zeros(len(_MOVING)), np.cumsum(moved, axis=0)))
    totals = base + levels.sum(axis=1)
    peak = int(np.argmax(totals))
    at_peak = {**resident, **dict(zip(_MOVING, levels[peak].tolist(), strict=True))}
    return RankMemory(
        times_s=np.concatenate(([0.0], times_s)),
        total_bytes=totals,
        peak_bytes=float(totals[peak]),
        peak_time_s=float(times_s[peak - 1]) if peak else 0.0,
        at_peak={name: value for name, value in at_peak.items() if value},
    )


def _changes(
    schedule: Schedule, sizes: PipelineBytes
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.int64], FloatArray]:
    """(C,) action of each change, whether it comes with the action's end, what it is, and by how many bytes."""

    def of_stage(values: Numbers) -> FloatArray:
        return np.broadcast_to(np.asarray(values, dtype=np.float64), schedule.stages)[schedule.stage]

    kept, recomputed, loss = of_stage(sizes.activations), of_stage(sizes.recomputed), of_stage(sizes.loss)
    extra, late = of_stage(sizes.forward), of_stage(sizes.weight_gradients)
    early = recomputed if sizes.input_gradients is None else of_stage(sizes.input_gradients)
    weight = kept if sizes.weight_activations is None else of_stage(sizes.weight_activations)
    forward = schedule.kind == ActionKind.FORWARD
    whole = schedule.kind == ActionKind.BACKWARD
    inputs = schedule.kind == ActionKind.INPUT_GRADIENT
    weights = schedule.kind == ActionKind.WEIGHT_GRADIENT
    backward = whole | inputs
    rows = (
        (forward, False, _ACTIVATION, kept),
        (forward, False, _ACTIVATION, extra),
        (forward, True, _ACTIVATION, -extra),
        (whole, True, _ACTIVATION, -kept),
        (inputs, True, _ACTIVATION, weight - kept),
        (weights, True, _ACTIVATION, -weight),
        (whole, False, _RECOMPUTED, recomputed),
        (whole, True, _RECOMPUTED, -recomputed),
        (inputs, False, _RECOMPUTED, early),
        (inputs, True, _RECOMPUTED, -early),
        (weights, False, _RECOMPUTED, late),
        (weights, True, _RECOMPUTED, -late),
        (forward, True, _LOSS, loss),
        (backward, True, _LOSS, -loss),
    )
    chosen = [(np.flatnonzero(which & (values != 0)), at_end, kind, values) for which, at_end, kind, values in rows]
    return (
        np.concatenate([index for index, *_ in chosen]),
        np.concatenate([np.full(len(index), at_end) for index, at_end, *_ in chosen]),
        np.concatenate([np.full(len(index), kind) for index, _, kind, _ in chosen]),
        np.concatenate([values[index] for index, _, _, values in chosen]),
    )
