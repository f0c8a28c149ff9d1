"""Where a chunk of a pipeline may lie: every row of units that any cut within the limits has, and few others."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.search.stages.chunk_places import ChunkPlaces
from planner.search.stages.fragments import ACTIVATION, RESIDENT, STEADY, TRANSIENT
from planner.search.stages.task import PartitionTask
from tests.planner.search.test_pipeline_partition import tasks


@given(tasks(), st.sampled_from([3.0, 8.0, 20.0, np.inf]))
def test_no_row_of_a_cut_within_the_limits_is_left_out(task: PartitionTask, longest_s: float) -> None:
    if task.units < task.pieces:
        return
    places = ChunkPlaces(task, longest_s)
    least = np.array([kind.values.min(axis=0) for kind in task.kinds]).repeat(task.counts, axis=0)
    for cuts in combinations(range(1, task.units), task.pieces - 1):
        rows = list(pairwise((0, *cuts, task.units)))
        sums = np.array([least[begin:end].sum(axis=0) for begin, end in rows])
        most = np.array([least[begin:end, TRANSIENT].max() for begin, end in rows])
        held = task.in_flight * sums[:, ACTIVATION] + sums[:, RESIDENT] + most
        if np.all(sums[:, STEADY] <= longest_s) and np.all(held <= task.limit_bytes):
            for begin, end in rows:
                assert begin in places(range(task.units - (end - begin) + 1), end - begin)


@given(tasks(), st.sampled_from([3.0, 8.0, 20.0, np.inf]))
def test_rows_lie_in_some_cut_into_as_many_chunks(task: PartitionTask, longest_s: float) -> None:
    """Of two chunks, which have no others between them, just those that some cut within the seconds has."""
    task = replace(task, ranks=2, rank_of=np.arange(2), in_flight=np.ones(2), limit_bytes=np.inf)
    places = ChunkPlaces(task, longest_s)
    least = np.repeat([kind.values[:, STEADY].min() for kind in task.kinds], task.counts)
    busy = np.concatenate([[0.0], np.cumsum(least)])
    for cut in range(1, task.units):
        within = max(busy[cut], busy[-1] - busy[cut]) <= longest_s
        assert bool(places(range(1), cut)) == within
        assert bool(places(range(cut, cut + 1), task.units - cut)) == within
