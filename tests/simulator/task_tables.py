"""Task tables that hypothesis makes, all of which run to their end."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from simulator.task_table import TaskTable
from tests.oracles.table_builder import TableBuilder


@st.composite
def tables(draw: st.DrawFn, *, most_tasks: int = 40) -> TaskTable:
    """Ranks with streams of all kinds, meetings, shared links, latencies, equal times and work of nothing."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, links = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    slows, renumbered = draw(st.booleans()), draw(st.booleans())
    builder = TableBuilder()
    streams = [builder.stream(r, k) for r in range(ranks) for k in random.permutation(3)[: random.integers(1, 4)]]
    for _ in range(links):
        builder.link(float(random.choice([1.0, 2.0, 3.0, 7.5])))
    steps = draw(st.integers(0, most_tasks))
    count = 0
    for _ in range(steps):
        members = random.choice(streams, size=min(len(streams), int(random.choice([1, 1, 1, 2, 3]))), replace=False)
        meeting = builder.meeting(len(members)) if len(members) > 1 else -1
        known = count
        for stream in members:
            moves = random.random() < 0.6
            crossed = random.integers(0, links, size=random.integers(0, 3)) if moves and links else ()
            builder.task(
                int(stream),
                work=float(random.choice([0.0, 1.0, 2.0, random.random()])),
                latency_s=float(random.choice([0.0, 0.0, 0.5, random.random()])),
                rate=float(random.choice([1.0, 2.0, 5.0])) if moves else 0.0,
                meeting=meeting,
                after=random.integers(0, known, size=random.integers(0, 3)).tolist() if known else (),
                links=list(crossed),
                weights=random.choice([0.0, 0.5, 1.0, 3.0], size=len(crossed)).tolist(),
                label=f"t{count}",
            )
            count += 1
    speeds = {"compute_speed": 0.8, "transfer_speed": 0.5} if slows else {}
    table = builder.build(**speeds)
    return renumber(table) if renumbered else table


def renumber(table: TaskTable) -> TaskTable:
    """The same tasks numbered stream by stream, so that some wait for later numbers."""
    order = np.argsort(table.stream, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))

    def rows(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = np.diff(offsets)[order]
        index = [np.arange(offsets[t], offsets[t + 1]) for t in order]
        return np.concatenate(([0], np.cumsum(counts))), np.concatenate([np.zeros(0, np.int64), *index])

    dependency_offsets, dependencies = rows(table.dependency_offsets)
    link_offsets, uses = rows(table.link_offsets)
    per_task = {
        name: getattr(table, name)[order]
        for name in ("stream", "work", "latency_s", "rate_bytes_per_s", "meeting", "label")
    }
    return dataclasses.replace(
        table,
        **per_task,
        dependency_offsets=dependency_offsets,
        dependencies=place[table.dependencies[dependencies]],
        link_offsets=link_offsets,
        links=table.links[uses],
        link_weights=table.link_weights[uses],
    )
