"""Ranks of a pipeline that stand still while they send, each over its own links to its neighbours.

A partition takes every message over a cut as long as the mean of all pairs of neighbours. Where messages stop kernels,
what one rank of a balanced pipeline sends over the slowest links is not hidden by the others: its turns take longer.
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
from planner.search.stages.outcome import Partition
from simulator.hardware import Hardware
from simulator.topology import meeting_distance, neighbour_distances

if TYPE_CHECKING:
    from planner.search.configurations.stored_ways import JoinedUnits
    from planner.search.units.labels import StageTables


def own_links_s(
    hardware: Hardware, tables: StageTables, joined: JoinedUnits, c: Configuration, shape: ScheduleShape
) -> Callable[[Partition], float] | None:
    """Seconds of a step in which each rank sends over its own links; None where all are alike, or stop no kernels.

    A rank sends activations to the next one and gradients to the one before, half of what passes over each cut. GPipe,
    and schedules whose ranks hold chunks of both directions, keep the mean.
    """
    if not shape.still_sends or c.in_a_row:
        return None
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

    def turns_s(busy_s: FloatArray) -> float:
        return float(busy_s.reshape(c.virtual, c.pipeline).max(axis=1).sum())

    def seconds(found: Partition) -> float:
        ways = offsets[list(tables.chain.positions)] + np.array(found.labels)
        cuts = np.array(found.ends[:-1])
        states = np.asarray(joined.labels.entry)[ways[cuts]]
        own = np.concatenate([[0.0], tabled[links, cuts - 1, states], [0.0]])
        counted = np.append(0.0, usual[cuts - 1, states])
        busy_s = found.busy_s + shape.still_sends * ((own[:-1] + own[1:]) / 2 - counted)
        return found.objective_s + turns_s(busy_s) - turns_s(found.busy_s)

    return seconds
