"""The labels of a unit: strategies that are best at some price of time, memory and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from planner.search.units.records import TablePart, UnitLabels, UnitWeights, rows_of
from planner.search.units.stage_shape import ENTRY, EXIT
from planner.search.units.stage_tables import Stage, Tabled
from simulator.launches import known_software

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MEMORY_PRICES = (1e-6, 0.03, 0.1, 0.3, 1.0, 3.0, 30.0)
PARAMETER_PRICES = (1e-6, 0.1, 1.0, 30.0)
STEP_WEIGHTS = (1 / 64,)
"""What keeping all activations, holding all parameters, and a second a step cost, as parts of a unit's time."""
TOGETHER = 2**18
"""Most numbers of the largest table where units of one form are minimised at once: more leave the caches."""


class Assignments(Sequence[Mapping[int, int]]):
    """States of a unit's variables in each of its labels, written out as they are asked for.

    Parameters
    ----------
    variables : sequence of int
    states : array, shape (variables, labels)
    """

    def __init__(self, variables: Sequence[int], states: IntArray) -> None:
        self._variables, self._states = tuple(variables), states

    def __len__(self) -> int:
        return int(self._states.shape[1])

    @overload
    def __getitem__(self, label: int) -> Mapping[int, int]: ...
    @overload
    def __getitem__(self, label: slice) -> Assignments: ...
    def __getitem__(self, label: int | slice) -> Mapping[int, int] | Assignments:
        if isinstance(label, slice):
            return Assignments(self._variables, self._states[:, label])
        return dict(zip(self._variables, self._states[:, label].tolist(), strict=True))

    def named(self, names: Mapping[int, int]) -> Assignments:
        """The same of another unit: for each of its variables, `names` gives the one whose states it has."""
        place = {v: row for row, v in enumerate(self._variables)}
        return Assignments([*names], self._states[[place[v] for v in names.values()]])


def all_labels(stage: Stage, shared: Mapping[int, int]) -> tuple[UnitLabels, ...]:
    """Labels of every unit of a stage; units with the same tables have the same but for the names of variables."""
    known = stage.family.labels
    if stage.case.key not in known:
        known[stage.case.key] = tuple(_all_labels(stage, shared))
    return known[stage.case.key]


def _all_labels(stage: Stage, shared: Mapping[int, int]) -> Iterator[UnitLabels]:
    numbers = range(len(stage.chain.units))
    alike: dict[object, list[Tabled]] = {}
    for number in dict.fromkeys(map(stage.decisions.tabled, numbers)):
        unit = stage.unit(number)
        alike.setdefault(unit.shape.form, []).append(unit)
    made: dict[int, UnitLabels] = {}
    for units in alike.values():
        made.update(zip([unit.model.number for unit in units], _labels_of(stage, units, shared), strict=True))
    for number in numbers:
        tabled = stage.decisions.tabled(number)
        labels = made[tabled]
        if tabled != number:
            assert isinstance(labels.assignments, Assignments)  # made here
            names = {**stage.decisions.twins[number], **{v: v for v in stage.decisions.models[number].shared}}
            labels = replace(labels, assignments=labels.assignments.named(names))
        yield labels


def _labels_of(stage: Stage, units: Sequence[Tabled], shared: Mapping[int, int]) -> list[UnitLabels]:
    """Minimise units of one form exactly at a sweep of prices, and keep what nothing beats.

    Each price is exact by elimination, so every label lies on the lower convex hull of time, activation bytes and
    parameter elements for its boundary states and recompute mode.
    """
    modes = stage.options.modes
    if units[0].shape.alone:
        found = [_only(unit, len(modes)) for unit in units]
    else:
        found = _solved(units, [rows_of(UnitWeights(step=STEP_WEIGHTS[0]), modes)] * len(units), shared, len(modes))
    if any(units[0].sizes[v] > 1 for v in units[0].model.variables):
        # Else no price decides anything.
        fixed, kept_bytes, elements = _price_rows(modes)
        rows = []
        for unit, plain in zip(units, found, strict=True):
            time, kept, held = _scales(unit.factors.evaluate(plain.states), modes)
            rows.append(fixed + kept_bytes * (time / kept) + elements * (time / held))
        found = _solved(units, rows, shared, len(modes))
    return [_labels(stage, unit, one, np.array(modes)[one.mode]) for unit, one in zip(units, found, strict=True)]


@lru_cache(maxsize=16)
def _price_rows(modes: tuple[int, ...]) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Weights of all parts at each combination of prices and each mode: what is fixed, of bytes, and of elements."""
    prices = [(step, price, value) for step in STEP_WEIGHTS for price in MEMORY_PRICES for value in PARAMETER_PRICES]
    nothing = UnitWeights(forward=0.0, backward=0.0)
    by_step = {step: rows_of(UnitWeights(step=step), modes) for step in STEP_WEIGHTS}
    by_byte = {price: rows_of(replace(nothing, activation_byte=price), modes) for price in MEMORY_PRICES}
    by_element = {
        value: rows_of(replace(nothing, parameter_element=value, expert_element=value, frozen_element=value), modes)
        for value in PARAMETER_PRICES
    }
    rows = (
        [by_step[step] for step, _, _ in prices],
        [by_byte[price] for _, price, _ in prices],
        [by_element[value] for *_, value in prices],
    )
    fixed, kept_bytes, elements = (np.concatenate(row) for row in rows)
    return fixed, kept_bytes, elements


def _scales(parts: FloatArray, modes: tuple[int, ...]) -> tuple[float, float, float]:
    time = float((parts[TablePart.FORWARD] + parts[TablePart.BACKWARD]).min())
    kept = float(max(parts[TablePart.KEPT + mode].max() for mode in modes))
    held = float((parts[TablePart.ELEMENTS] + parts[TablePart.EXPERT_ELEMENTS] + parts[TablePart.FROZEN]).max())
    return time, kept or 1.0, held or 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Solutions:
    """Assignments, each once: states of each variable, and numbers of the mode, entry and exit, shapes (n,)."""

    states: Mapping[int, IntArray]
    mode: IntArray
    entry: IntArray
    exit: IntArray


def _only(unit: Tabled, modes: int) -> _Solutions:
    """The only assignment, where it is allowed, in each mode."""
    nothing = np.zeros(0 if len(unit.factors.layout.never) else modes, dtype=np.int64)
    return _Solutions({v: nothing for v in unit.sizes if v >= 0}, np.arange(len(nothing)), nothing, nothing)


def _solved(
    units: Sequence[Tabled], rows: Sequence[FloatArray], shared: Mapping[int, int], modes: int
) -> list[_Solutions]:
    """Best assignments of units of one form for every row of weights, those of each, and boundary states."""
    first, weightings = units[0], len(rows[0])
    most = max(1, TOGETHER // (weightings * first.shape.plan.largest))
    if len(units) > most:
        return _solved(units[:most], rows[:most], shared, modes) + _solved(units[most:], rows[most:], shared, modes)
    sums = [unit.factors.weighted(own) for unit, own in zip(units, rows, strict=True)]
    found = first.shape.minima(np.concatenate(sums, axis=1), first.factors.layout.starts)
    table = found.table
    for v in first.kept:
        table = table[:, shared[v]] if v >= 0 else table
    table = table.reshape(len(table), *(first.sizes.get(end, 1) for end in (ENTRY, EXIT)))
    row, entry, leave = np.nonzero(np.isfinite(table))
    kept = {v: np.full(len(row), shared[v]) for v in first.kept if v >= 0}
    kept.update({end: at for end, at in ((ENTRY, entry), (EXIT, leave)) if end in first.kept})
    states = {v: s for v, s in found.assignments(row, kept).items() if v >= 0}
    once = _distinct(np.array([row // weightings, row % modes, entry, leave, *states.values()]))
    ends = row[once].searchsorted(np.arange(len(units) + 1) * weightings)
    solutions = []
    for unit, (begin, end) in zip(units, pairwise(ends.tolist()), strict=True):
        own = once[begin:end]
        named = _named(first, unit, {v: s[own] for v, s in states.items()})
        solutions.append(_Solutions(named, row[own] % modes, entry[own], leave[own]))
    return solutions


def _named(first: Tabled, unit: Tabled, states: Mapping[int, IntArray]) -> dict[int, IntArray]:
    """States of a unit's variables from those of another one of its form."""
    return {v: states[own] for own, v in zip(sorted(first.sizes), sorted(unit.sizes), strict=True) if own >= 0}


def _distinct(columns: IntArray) -> IntArray:
    """Positions of the first of each group of equal columns, ascending."""
    with np.errstate(over="ignore"):
        numbers = _multipliers(len(columns)) @ columns
    order = numbers.argsort(kind="stable")
    ranked = numbers[order]
    first = np.ones(len(order), dtype=np.bool_)
    np.not_equal(ranked[1:], ranked[:-1], out=first[1:])
    order = order[first]
    order.sort()
    return order


@lru_cache(maxsize=256)
def _multipliers(count: int) -> IntArray:
    """Powers of an odd number (the fraction of the golden ratio in 64 bits), of which columns are polynomials."""
    return np.multiply.accumulate(np.full(count, 0x9E3779B97F4A7C15, dtype=np.uint64)).view(np.int64)


def _labels(stage: Stage, unit: Tabled, found: _Solutions, mode: IntArray) -> UnitLabels:
    parts = unit.factors.evaluate(found.states)
    columns = np.arange(len(mode))
    again, again_communication = (
        parts[first + mode, columns] for first in (TablePart.AGAIN, TablePart.AGAIN_COMMUNICATION)
    )
    kept, transient = (parts[first + mode, columns] for first in (TablePart.KEPT, TablePart.TRANSIENT))
    seconds = parts[TablePart.FORWARD] + parts[TablePart.BACKWARD] + again
    once = parts[TablePart.STEP] + parts[TablePart.CUT] + parts[TablePart.CUT_LAST]
    held = [
        parts[part] for part in (TablePart.ELEMENTS, TablePart.EXPERT_ELEMENTS, TablePart.FROZEN) if parts[part].any()
    ]
    criteria = np.array([seconds, kept, *held, once])
    entries, exits = (unit.sizes.get(end, 1) for end in (ENTRY, EXIT))
    best = np.flatnonzero(_undominated(criteria, (mode * entries + found.entry) * exits + found.exit))
    best = best[np.lexsort((kept[best], seconds[best], mode[best], found.exit[best], found.entry[best]))]
    parts, mode, again, again_communication = (
        np.ascontiguousarray(parts[:, best]), mode[best], again[best], again_communication[best]
    )  # fmt: skip
    states = {v: s[best] for v, s in found.states.items()}
    calls = parts[TablePart.BACKWARD_CALLS] + parts[TablePart.AGAIN_CALLS + mode, np.arange(len(mode))]
    number = unit.model.number
    gradients, waiting = stage.shape.flight(number).peak(stage.parts.graph, states, mode)
    nowhere, zeros = np.full(len(best), -1), np.zeros(len(best))
    known = known_software(stage.case.costs.hardware)
    forward_launches, backward_launches = unit.model.chained_launches if known else unit.model.launches
    return UnitLabels(
        forward_s=parts[TablePart.FORWARD],
        backward_s=parts[TablePart.BACKWARD] + again,
        forward_communication_s=parts[TablePart.FORWARD_COMMUNICATION],
        backward_communication_s=parts[TablePart.BACKWARD_COMMUNICATION] + again_communication,
        activation_bytes=kept[best],
        transient_bytes=transient[best] + gradients,
        waiting_bytes=waiting,
        forward_sums_s=zeros,
        backward_sums_s=zeros,
        forward_sums=zeros,
        backward_sums=zeros,
        step_s=parts[TablePart.STEP],
        gather_s=parts[TablePart.GATHER],
        cut_s=parts[TablePart.CUT],
        cut_last_s=parts[TablePart.CUT_LAST],
        again_s=again,
        late_s=parts[TablePart.LATE],
        forward_launches=forward_launches + parts[TablePart.FORWARD_CALLS],
        backward_launches=np.array(backward_launches, dtype=np.float64)[mode] + calls,
        halved=np.full(len(best), float(len(unit.model.halved))),
        gathered_elements=parts[TablePart.GATHERED],
        unsummed_elements=parts[TablePart.UNSUMMED],
        parameter_elements=parts[TablePart.ELEMENTS],
        expert_elements=parts[TablePart.EXPERT_ELEMENTS],
        frozen_elements=parts[TablePart.FROZEN],
        recompute=mode,
        entry=found.entry[best] if ENTRY in unit.kept else nowhere,
        exit=found.exit[best] if EXIT in unit.kept else nowhere,
        assignments=Assignments([*states], np.array([*states.values()], dtype=np.int64).reshape(-1, len(best))),
    )


def _undominated(criteria: FloatArray, groups: IntArray) -> NDArray[np.bool_]:
    """Columns that no other of the same group beats; of equal ones the first stays.

    Parameters
    ----------
    criteria : array, shape (criteria, n)
    groups : array, shape (n,)
        Number of the group of each column.
    """
    keep = np.ones(len(groups), dtype=np.bool_)
    one, other = (groups[:, None] == groups).nonzero()
    if len(one) == len(keep):
        return keep
    most = criteria + 1e-12 * np.abs(criteria).max(axis=1, keepdims=True, initial=0.0)
    no_worse = (criteria.take(one, axis=1) <= most.take(other, axis=1)).all(axis=0)
    one, other = one[no_worse], other[no_worse]
    if len(one) > len(keep):
        table = np.zeros((len(keep), len(keep)), dtype=np.bool_)
        table[one, other] = True
        keep[other[(one < other) | ~table[other, one]]] = False
    return keep
