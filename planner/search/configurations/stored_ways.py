"""Ways to run units as rows of numbers, alike ones joined, and what units need to know of the network around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from planner.search.configurations.configuration import Configuration
from planner.search.configurations.messages import BatchSums, sends_s
from planner.search.configurations.passes import Row
from planner.search.configurations.schedule_shapes import ScheduleShape, apart_s, turns_apart_s, uneven_s
from planner.search.stages.fragments import COLUMNS, FloatArray, Fragments, IntArray
from planner.search.stages.task import Partition
from simulator.hardware import Hardware
from simulator.topology import meeting_distance, neighbour_distances

if TYPE_CHECKING:
    from planner.search.units.labels import StageTables, TiedParameter, UnitLabels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredWays:
    """Ways to run units whose states are stored in several ways, whatever the order of passes.

    Each is (storages, ways), or (ways,) where it is the same in all of them.

    Seconds of both passes of a micro-batch, of what the backward pass may put off, of what a rank waits besides in
    every micro-batch, and of what is done once a step; what the synchronisation of gradients has left to do after the
    last backward pass and by how much it falls behind; and bytes.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    late_s: FloatArray
    stall_s: FloatArray
    once_s: FloatArray
    queue_s: FloatArray
    backlog_s: FloatArray
    activation_bytes: FloatArray
    resident_bytes: FloatArray
    transient_bytes: FloatArray
    rows: tuple[Row | None, ...]
    """Of each storage, where passes stand in a row and parameters are gathered for each: what a chunk's depend on."""

    def of(self, number: int) -> StoredWays:
        """Ways, (ways,) each, of the units in one of several storages."""
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        picked = {name: array[number] if array.ndim > 1 else array for name, array in arrays.items()}
        return StoredWays(**picked, rows=self.rows[number : number + 1])

    def values(self, shape: ScheduleShape, micro_batches: int) -> FloatArray:
        """(storages, ways, 7) columns of `planner.search.stages.fragments.Fragments` under a schedule."""
        fill = shape.fill_s(self.forward_s, self.backward_s, self.late_s)
        steady = micro_batches * (self.forward_s + self.backward_s + self.stall_s) - fill + self.once_s
        held = (self.activation_bytes, self.resident_bytes, self.transient_bytes)
        found = np.empty((*steady.shape, COLUMNS))
        for number, column in enumerate((fill, steady, self.queue_s, self.backlog_s, *held)):
            found[..., number] = column
        return found

    def once_of_chunks(self, picked: IntArray, ends: Sequence[int]) -> FloatArray:
        """Seconds (chunks,) of what is done once and what synchronisation leaves, for the ways (units,) picked."""
        chunks = [picked[begin:end] for begin, end in pairwise((0, *ends))]
        return np.array([float(self.once_s[ways].sum()) + self.left_s(ways) for ways in chunks])

    def left_s(self, picked: IntArray) -> float:
        """Seconds that synchronisation goes on after the last backward pass of a chunk (`stages.fragments.joined`)."""
        behind = np.cumsum([0.0, *self.backlog_s[picked[:-1]]])
        return max(0.0, float((behind + self.queue_s[picked]).max()))


_ARRAYS = tuple(field.name for field in fields(StoredWays) if field.name != "rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a unit needs to know of the network around it.

    Attributes
    ----------
    units : pieces that move between stages
    elements : trained elements that the ranks of all stages hold together, each unit run in its fastest way
    usual_s : seconds of the kernels of both passes of the most frequent kind of unit, run so, and of what may be put
        off: messages hide behind them
    usual_elements : its elements on a rank, frozen ones with them
    """

    units: int
    elements: float
    usual_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    usual_elements: float = 0.0

    @classmethod
    def of(cls, tables: StageTables) -> Surroundings:
        """Read it off the labels of a network."""
        counts = [unit.count for unit in tables.chain.units]
        fastest = [_fastest(unit) for unit in tables.units]
        held = [
            float(unit.parameter_elements[label] + unit.expert_elements[label])
            for unit, label in zip(tables.units, fastest, strict=True)
        ]
        most = int(np.argmax(counts))
        usual, label = tables.units[most], fastest[most]
        return cls(
            units=sum(counts),
            elements=sum(count * elements for count, elements in zip(counts, held, strict=True)),
            usual_s=(
                float((usual.forward_s - usual.forward_communication_s)[label]),
                float((usual.backward_s - usual.backward_communication_s)[label]),
                float(usual.late_s[label]),
            ),
            usual_elements=held[most] + float(usual.frozen_elements[label]),
        )

    def inner_ends(self, configuration: Configuration) -> float:
        """Ends of chunks inside the network that fall to each unit but one, shared out evenly."""
        return (configuration.pipeline * configuration.virtual - 1) / max(1, self.units - 1)


def _fastest(unit: UnitLabels) -> int:
    """The fastest way of a unit; of equally fast ones that with the fewest elements, whatever else the table holds."""
    seconds = unit.forward_s + unit.backward_s
    elements = unit.parameter_elements + unit.expert_elements
    return int(np.argmin(np.where(seconds <= seconds.min() * (1 + 1e-9), elements, np.inf)))


def holding(labels: UnitLabels, tied: TiedParameter) -> UnitLabels:
    """Labels of a unit whose rank stores a tied parameter as well."""
    apart = tied.whole_elements - tied.elements
    gathered = labels.gathered_elements + (tied.whole_elements if apart > 0 else 0.0)
    if not tied.trained:
        return replace(labels, frozen_elements=labels.frozen_elements + tied.elements, gathered_elements=gathered)
    return replace(
        labels,
        parameter_elements=labels.parameter_elements + tied.elements,
        gathered_elements=gathered,
        unsummed_elements=labels.unsummed_elements + apart,
    )


def waiting(labels: UnitLabels, sums_s: FloatArray, sums: FloatArray) -> UnitLabels:
    """Labels with sums over the batch that operators wait for, once more where they run again.

    Parameters
    ----------
    sums_s, sums : (2, labels) seconds of them forward and backward, and how many there are
    """
    again = np.asarray(labels.recompute) > 0
    forward_s, behind_s = sums_s[0], sums_s[1] + np.where(again, sums_s[0], 0.0)
    return replace(
        labels,
        forward_s=labels.forward_s + forward_s,
        backward_s=labels.backward_s + behind_s,
        forward_communication_s=labels.forward_communication_s + forward_s,
        backward_communication_s=labels.backward_communication_s + behind_s,
        forward_sums_s=labels.forward_sums_s + forward_s,
        backward_sums_s=labels.backward_sums_s + behind_s,
        forward_sums=labels.forward_sums + sums[0],
        backward_sums=labels.backward_sums + sums[1] + np.where(again, sums[0], 0.0),
    )


def trained_parameters(tables: StageTables) -> list[int]:
    """Trained parameters of every unit, at least 1."""
    trained = tables.parts.graph.trained
    return [max(1, len(trained.intersection(unit.nodes))) for unit in tables.chain.units]


def together(units: Sequence[UnitLabels]) -> UnitLabels:
    """Labels of several units as those of one."""
    arrays = [field.name for field in fields(units[0]) if field.name != "assignments"]
    joined = {name: np.concatenate([getattr(unit, name) for unit in units]) for name in arrays}
    return replace(units[0], **joined, assignments=())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedUnits:
    """Labels of all units behind each other, whatever way their states are stored in.

    ``ends`` are the places of the last way of each unit but the last, ``entries`` and ``exits`` its boundary states,
    and ``trained`` (ways,) the trained parameters of the unit of each.
    """

    units: tuple[UnitLabels, ...]
    labels: UnitLabels
    whole: Surroundings
    trained: IntArray
    ends: IntArray
    entries: tuple[IntArray, ...]
    exits: tuple[IntArray, ...]
    numbers: tuple[IntArray, ...]

    @classmethod
    def of(cls, units: tuple[UnitLabels, ...], tables: StageTables) -> JoinedUnits:
        """Join the labels of the units of some tables."""
        sizes = [len(labels) for labels in units]
        return cls(
            units=units,
            labels=together(units),
            whole=Surroundings.of(tables),
            trained=np.repeat(trained_parameters(tables), sizes),
            ends=np.cumsum(sizes)[:-1],
            entries=tuple(np.asarray(unit.entry, dtype=np.int64) for unit in units),
            exits=tuple(np.asarray(unit.exit, dtype=np.int64) for unit in units),
            numbers=tuple(np.arange(size)[:, None] for size in sizes),
        )

    def waiting(self, sums_s: FloatArray, sums: BatchSums) -> JoinedUnits:
        """The same with the sums over the batch of each unit, (units, 2) seconds forward and backward."""
        if not sums_s.any():
            return self
        sizes, counts = [len(entry) for entry in self.entries], [[len(passes) for passes in unit] for unit in sums]
        seconds, numbers = (np.repeat(np.array(values, float), sizes, axis=0).T for values in (sums_s, counts))
        return replace(self, labels=waiting(self.labels, seconds, numbers))

    def fragments(self, values: FloatArray) -> list[Fragments]:
        """Ways of each unit; `values` are those of all of them, as `StoredWays.values` gives them."""
        ends = pairwise((0, *self.ends.tolist(), len(values)))
        parts = zip(ends, self.entries, self.exits, self.numbers, strict=True)
        return [Fragments(values[begin:end], entry, leave, rows) for (begin, end), entry, leave, rows in parts]

    def picked(self, tables: StageTables, labels: Sequence[int]) -> IntArray:
        """(units,) places of the ways that the labels of a partition name, in the order of the network."""
        places: IntArray = np.append(0, self.ends)[list(tables.chain.positions)] + np.array(labels)
        return places

    def step_s(
        self,
        stored: StoredWays,
        hardware: Hardware,
        tables: StageTables,
        c: Configuration,
        shape: ScheduleShape,
    ) -> Callable[[Partition], float] | None:
        """Seconds of the step of a partition whose ranks or links differ in what the sum over turns leaves out.

        A partition takes every message over a cut as long as the mean of all pairs of neighbours. Where messages stop
        kernels, what one rank of a balanced pipeline sends over the slowest links is not hidden by the others: its
        turns take longer. GPipe waits for its slowest link in every pass.
        """
        if c.in_a_row:
            sends = None if shape.still_sends else self._own_sends(hardware, tables, c, shape)
            return self._apart_s(stored, tables, c, sends)
        return self._apart_s(stored, tables, c) or self._own_links_s(hardware, tables, c, shape)

    def _own_sends(
        self, hardware: Hardware, tables: StageTables, c: Configuration, shape: ScheduleShape
    ) -> Callable[[Partition], tuple[FloatArray, FloatArray]] | None:
        """Seconds (cuts,) of both ways over each cut of a partition: over its own links, and over the mean of all.

        None where all links are alike, and of schedules whose ranks hold chunks of both directions.
        """
        neighbours = neighbour_distances(hardware, c.pipeline, c.stride("pipeline"))
        if len(neighbours) < 2 or not np.array_equal(shape.rank_of, np.arange(len(shape.rank_of)) % c.pipeline):
            return None
        pairs = pairwise((shape.rank_of * c.stride("pipeline")).tolist())
        apart = [meeting_distance(hardware, *sorted(pair)) for pair in pairs]
        distances = sorted(set(apart))
        tabled = np.stack([sends_s(hardware, tables, ((one, 1.0),)) for one in distances])
        usual, links = sends_s(hardware, tables, neighbours), np.searchsorted(distances, apart)

        def seconds(found: Partition) -> tuple[FloatArray, FloatArray]:
            cuts = np.array(found.ends[:-1])
            states = np.asarray(self.labels.entry)[self.picked(tables, found.labels)[cuts]]
            return tabled[links, cuts - 1, states], usual[cuts - 1, states]

        return seconds

    def _own_links_s(
        self, hardware: Hardware, tables: StageTables, c: Configuration, shape: ScheduleShape
    ) -> Callable[[Partition], float] | None:
        """Seconds of a step in which each rank sends over its own links; None where all are alike, or stop no kernels.

        A rank sends activations to the next one and gradients to the one before, half of what passes over each cut.
        """
        sends = self._own_sends(hardware, tables, c, shape) if shape.still_sends else None
        if sends is None:
            return None

        def turns_s(busy_s: FloatArray) -> float:
            return float(busy_s.reshape(c.virtual, c.pipeline).max(axis=1).sum())

        def seconds(found: Partition) -> float:
            own, counted = (np.concatenate([[0.0], one, [0.0]]) for one in sends(found))
            busy_s = found.busy_s + shape.still_sends * ((own[:-1] + own[1:]) / 2 - counted[:-1])
            return found.objective_s + turns_s(busy_s) - turns_s(found.busy_s)

        return seconds

    def _apart_s(
        self,
        stored: StoredWays,
        tables: StageTables,
        c: Configuration,
        sends: Callable[[Partition], tuple[FloatArray, FloatArray]] | None = None,
    ) -> Callable[[Partition], float] | None:
        """Seconds of a step by the passes of each chunk where all forward passes come first; None elsewhere.

        In 1F1B with states on the host what a rank does once is long: its passes end with those of slower ranks.
        ``sends`` are the messages of a partition where links differ and stop no kernels (`_own_sends`).
        """
        if c.micro_batches == 1 or not (c.in_a_row or (c.schedule == "1f1b" and c.offload)):
            return None

        def seconds(found: Partition) -> float:
            ways = self.picked(tables, found.labels)
            first = [0, *found.ends[:-1]]
            forward, backward = (
                np.add.reduceat(passes[ways], first) for passes in (stored.forward_s, stored.backward_s)
            )
            busy_s = found.busy_s
            if not c.in_a_row:
                backward = backward + np.add.reduceat(stored.stall_s[ways], first)
                return turns_apart_s(c.micro_batches, forward, backward, found.fill_s, busy_s)
            (row,) = stored.rows
            if row is not None:
                taken = forward + backward
                forward, backward = row.of_chunks(ways, list(pairwise((0, *found.ends))))
                # A rank that waits for its first pass gathers meanwhile: the fill stays what it is.
                busy_s = busy_s + (c.micro_batches - 1) * (forward + backward - taken)
            if sends is None:
                return apart_s(c.micro_batches, forward, backward, found.fill_s, busy_s)
            own_s, mean_s = sends(found)
            busy_s = (c.micro_batches - 1) * (forward + backward) + stored.once_of_chunks(ways, found.ends)
            sent_s = float((own_s - mean_s).sum())
            return sent_s + apart_s(c.micro_batches, forward, backward, found.fill_s, busy_s, own_s / 2)

        return seconds


class Tied(Enum):
    """Where tied parameters lie, which count in the first unit that reads them."""

    SUMMED = "one stage whose micro-batches' gradients are summed: their terms wait beside every unit"
    ONCE = "one stage of a single micro-batch: they wait beside the first unit"
    APART = "the ends of the network lie on different ranks, each of which stores them"
    TOGETHER = "on one rank of a pipeline, or there are none"


@lru_cache(maxsize=64)
def joined_units(tables: StageTables, tied: Tied, element_bytes: int) -> JoinedUnits:
    """The units of all configurations with these tables whose tied parameters lie so."""
    return JoinedUnits.of(_with_tied(tables, tied, element_bytes), tables)


def _with_tied(tables: StageTables, where: Tied, element_bytes: int) -> tuple[UnitLabels, ...]:
    """Labels with tied parameters stored on every rank that reads them."""
    units = list(tables.units)
    if where is Tied.TOGETHER:
        return tuple(units)
    for tied in tables.tied:
        first, *others = tied.units
        if where is Tied.APART:
            for number in others:
                units[number] = holding(units[number], tied)
            continue
        waits = range(len(units)) if where is Tied.SUMMED else [first]
        for number in waits if tied.trained else ():
            transient = units[number].transient_bytes + tied.whole_elements * element_bytes
            units[number] = replace(units[number], transient_bytes=transient)
    return tuple(units)


def uneven_passes_s(configuration: Configuration, together: bool, passes_s: FloatArray) -> float:
    """Seconds by which uneven chunks lengthen a step; `passes_s` are those of each in all its micro-batches."""
    c = configuration
    each_s = passes_s / c.micro_batches
    return uneven_s(c.schedule, c.pipeline, c.virtual, c.micro_batches, each_s, together=together)


def merged(kinds: list[Fragments], counts: list[int]) -> tuple[list[Fragments], list[int]]:
    """Join neighbouring kinds of unit that are alike, so that a run's first block is one of the run."""
    merged: list[Fragments] = []
    together: list[int] = []
    for kind, count in zip(kinds, counts, strict=True):
        if merged and (merged[-1] is kind or _alike(merged[-1], kind)):
            together[-1] += count
        else:
            merged.append(kind)
            together.append(count)
    return merged, together


def _alike(one: Fragments, other: Fragments) -> bool:
    names = ("values", "entry", "exit", "labels")
    return len(one) == len(other) and all(np.array_equal(getattr(one, n), getattr(other, n)) for n in names)
