"""The labels of a unit: strategies that are best at some price of time, memory and parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from planner.search.units.factors import Part
from planner.search.units.records import UnitLabels, Weights
from planner.search.units.stage_shape import ENTRY, EXIT
from planner.search.units.stage_tables import Stage, Tabled
from planner.search.units.transient import gradients_in_flight

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MEMORY_PRICES = (1e-6, 0.03, 0.1, 0.3, 1.0, 3.0, 30.0)
PARAMETER_PRICES = (1e-6, 0.1, 1.0, 30.0)
STEP_WEIGHTS = (1 / 64,)
"""What keeping all activations, holding all parameters, and a second a step cost, as parts of a unit's time."""


def unit_labels(stage: Stage, number: int, shared: Mapping[int, int]) -> UnitLabels:
    """Minimise a unit exactly at a sweep of prices, and keep what nothing beats.

    Each price is exact by elimination, so every label lies on the lower convex hull of time, activation bytes and
    parameter elements for its boundary states and recompute mode.
    """
    unit = stage.unit(number)
    modes = stage.options.modes
    base = _solved(stage, unit, stage.rows(Weights(step=STEP_WEIGHTS[0])), shared)
    time, kept, held = _scales(base[1], modes)
    rows = np.concatenate(
        [
            stage.rows(
                Weights(
                    step=step,
                    activation_byte=price * time / kept,
                    parameter_element=value * time / held,
                    expert_element=value * time / held,
                )
            )
            for step in STEP_WEIGHTS
            for price in MEMORY_PRICES
            for value in PARAMETER_PRICES
        ]
    )
    states, parts, which, entry, leave = _solved(stage, unit, rows, shared)
    return _labels(stage, number, states, parts, np.array(modes)[which % len(modes)], entry, leave)


def _scales(parts: FloatArray, modes: tuple[int, ...]) -> tuple[float, float, float]:
    time = float((parts[Part.FORWARD] + parts[Part.BACKWARD]).min())
    kept = float(max(parts[Part.KEPT + mode].max() for mode in modes))
    held = float((parts[Part.ELEMENTS] + parts[Part.EXPERT_ELEMENTS]).max())
    return time, kept or 1.0, held or 1.0


def _solved(
    stage: Stage, unit: Tabled, rows: FloatArray, shared: Mapping[int, int]
) -> tuple[dict[int, IntArray], FloatArray, IntArray, IntArray, IntArray]:
    """Best assignments for every row of weights and boundary states, each once.

    Returns the states of the variables, the parts (PARTS, n), the row, entry and exit of each.
    """
    found = unit.minima(rows)
    place = tuple(shared[v] if v in unit.kept else slice(None) for v in unit.kept if v >= 0)
    table = found.table[(slice(None), *place)]
    table = table.reshape(len(rows), *(unit.sizes.get(end, 1) for end in (ENTRY, EXIT)))
    row, entry, leave = np.nonzero(np.isfinite(table))
    kept = {v: np.full(len(row), shared[v]) for v in unit.kept if v >= 0}
    kept.update({end: at for end, at in ((ENTRY, entry), (EXIT, leave)) if end in unit.kept})
    states = {v: s for v, s in found.assignments(row, kept).items() if v >= 0}
    once = _distinct(np.array([row % len(stage.options.modes), entry, leave, *states.values()]))
    states = {v: s[once] for v, s in states.items()}
    return states, unit.factors.evaluate(states), row[once], entry[once], leave[once]


def _distinct(columns: IntArray) -> IntArray:
    """Positions of the first of each group of equal columns, ascending."""
    multipliers = np.random.default_rng(0).integers(1, 2**62, size=len(columns), dtype=np.int64)
    with np.errstate(over="ignore"):
        numbers = (columns * multipliers[:, None]).sum(axis=0)
    return np.sort(np.unique(numbers, return_index=True)[1])


def _labels(
    stage: Stage,
    number: int,
    states: Mapping[int, IntArray],
    parts: FloatArray,
    mode: IntArray,
    entry: IntArray,
    leave: IntArray,
) -> UnitLabels:
    columns = np.arange(len(mode))
    again, again_communication = (parts[first + mode, columns] for first in (Part.AGAIN, Part.AGAIN_COMMUNICATION))
    kept, transient = (parts[first + mode, columns] for first in (Part.KEPT, Part.TRANSIENT))
    seconds = parts[Part.FORWARD] + parts[Part.BACKWARD] + again
    criteria = np.array([seconds, kept, parts[Part.ELEMENTS], parts[Part.EXPERT_ELEMENTS], parts[Part.STEP]])
    groups = np.array([mode, entry, leave])
    best = np.flatnonzero(_undominated(criteria, groups))
    best = best[np.lexsort((kept[best], seconds[best], mode[best], leave[best], entry[best]))]
    unit = stage.unit(number)
    gradients = gradients_in_flight(unit.model, stage.parts, {v: s[best] for v, s in states.items()}, mode[best])
    ends = {end: end in unit.kept for end in (ENTRY, EXIT)}
    sequence = np.zeros(len(best), dtype=np.bool_)
    for variable, chosen in states.items():
        sequence |= stage.sequence_sharded(variable)[chosen[best]]
    return UnitLabels(
        forward_s=parts[Part.FORWARD, best],
        backward_s=(parts[Part.BACKWARD] + again)[best],
        forward_communication_s=parts[Part.FORWARD_COMMUNICATION, best],
        backward_communication_s=(parts[Part.BACKWARD_COMMUNICATION] + again_communication)[best],
        activation_bytes=kept[best],
        transient_bytes=transient[best] + gradients,
        recomputed_bytes=transient[best],
        step_s=parts[Part.STEP, best],
        gather_s=parts[Part.GATHER, best],
        again_s=again[best],
        late_s=parts[Part.LATE, best],
        gathered_elements=parts[Part.GATHERED, best],
        unsummed_elements=parts[Part.UNSUMMED, best],
        parameter_elements=parts[Part.ELEMENTS, best],
        expert_elements=parts[Part.EXPERT_ELEMENTS, best],
        recompute=mode[best],
        entry=entry[best] if ends[ENTRY] else np.full(len(best), -1),
        exit=leave[best] if ends[EXIT] else np.full(len(best), -1),
        sequence_parallel=sequence,
        assignments=tuple(stage.named(number, {v: int(s[i]) for v, s in states.items()}) for i in best),
    )


def _undominated(criteria: FloatArray, groups: IntArray) -> NDArray[np.bool_]:
    """Columns that no other of the same group beats; of equal ones the first stays.

    Parameters
    ----------
    criteria : array, shape (criteria, n)
    groups : array, shape (keys, n)
    """
    tolerance = 1e-12 * np.abs(criteria).max(axis=1, initial=0.0)[:, None, None]
    no_worse = (criteria[:, :, None] <= criteria[:, None, :] + tolerance).all(axis=0)
    same = (groups[:, :, None] == groups[:, None, :]).all(axis=0)
    ahead = np.arange(groups.shape[1])[:, None] < np.arange(groups.shape[1])[None, :]
    equal = no_worse & no_worse.T
    beats = same & no_worse & (~equal | ahead)
    return np.asarray(~beats.any(axis=0))
