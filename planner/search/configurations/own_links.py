"""Ranks of a pipeline that stand still while they send, each over its own links to its neighbours.

A partition takes every message over a cut as long as the mean of all pairs of neighbours. Where messages stop kernels,
what one rank of a balanced pipeline sends over the slowest links is not hidden by the others: its turns take longer.
GPipe waits for its slowest link in every pass.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from planner.search.configurations.configuration import Configuration
from planner.search.configurations.messages import sends_s
from planner.search.configurations.schedule_shapes import ScheduleShape
from planner.search.stages.fragments import FloatArray
from planner.search.stages.task import Partition
from simulator.hardware import Hardware
from simulator.topology import meeting_distance, neighbour_distances

if TYPE_CHECKING:
    from planner.search.configurations.stored_ways import JoinedUnits, StoredWays
    from planner.search.units.labels import StageTables


def own_sends(
    hardware: Hardware, tables: StageTables, joined: JoinedUnits, c: Configuration, shape: ScheduleShape
) -> Callable[[Partition], tuple[FloatArray, FloatArray]] | None:
    """Seconds (cuts,) of both ways over each cut of a partition: over its own links, and over the mean of all.

    None where all links are alike, and of schedules whose ranks hold chunks of both directions.
    """
    alike = len(neighbour_distances(hardware, c.pipeline, c.stride("pipeline"))) < 2
    if alike or not np.array_equal(shape.rank_of, np.arange(len(shape.rank_of)) % c.pipeline):
        return None
    apart = [
        meeting_distance(hardware, *sorted(pair)) for pair in pairwise((shape.rank_of * c.stride("pipeline")).tolist())
    ]
    distances = sorted(set(apart))
    tabled = np.stack([sends_s(hardware, tables, ((one, 1.0),)) for one in distances])
    usual = sends_s(hardware, tables, neighbour_distances(hardware, c.pipeline, c.stride("pipeline")))
    links = np.searchsorted(distances, apart)
    offsets = np.append(0, joined.ends)

    def seconds(found: Partition) -> tuple[FloatArray, FloatArray]:
        ways = offsets[list(tables.chain.positions)] + np.array(found.labels)
        cuts = np.array(found.ends[:-1])
        states = np.asarray(joined.labels.entry)[ways[cuts]]
        return tabled[links, cuts - 1, states], usual[cuts - 1, states]

    return seconds


def own_links_s(
    hardware: Hardware, tables: StageTables, joined: JoinedUnits, c: Configuration, shape: ScheduleShape
) -> Callable[[Partition], float] | None:
    """Seconds of a step in which each rank sends over its own links; None where all are alike, or stop no kernels.

    A rank sends activations to the next one and gradients to the one before, half of what passes over each cut.
    Where messages stop kernels GPipe keeps the mean; where they do not it goes at the pace of its slowest link
    (`schedule_shapes.apart_s`).
    """
    if not shape.still_sends or c.in_a_row:
        return None
    sends = own_sends(hardware, tables, joined, c, shape)
    if sends is None:
        return None

    def turns_s(busy_s: FloatArray) -> float:
        return float(busy_s.reshape(c.virtual, c.pipeline).max(axis=1).sum())

    def seconds(found: Partition) -> float:
        own, counted = (np.concatenate([[0.0], one, [0.0]]) for one in sends(found))
        busy_s = found.busy_s + shape.still_sends * ((own[:-1] + own[1:]) / 2 - counted[:-1])
        return found.objective_s + turns_s(busy_s) - turns_s(found.busy_s)

    return seconds


def apart_s(
    stored: StoredWays,
    hardware: Hardware,
    tables: StageTables,
    joined: JoinedUnits,
    c: Configuration,
    shape: ScheduleShape,
) -> Callable[[Partition], float] | None:
    """Seconds of the step of a partition whose ranks or links differ in what the sum over turns leaves out."""
    given = hardware, tables, joined, c, shape
    if c.in_a_row:
        return joined.apart_s(stored, tables, c, None if shape.still_sends else own_sends(*given))
    return joined.apart_s(stored, tables, c) or own_links_s(*given)
