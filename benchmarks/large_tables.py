"""Task tables of a size that speed is measured on."""

from __future__ import annotations

import numpy as np

from simulator.task_table import StreamKind, TaskTable

RATE = 25e9


def pipeline_table(
    stages: int, micro_batches: int, operators: int, *, stages_on_a_link: int = 0, overlap: bool = False
) -> TaskTable:
    """Every micro-batch through all stages forward, then back; sends meet receives.

    A stage of a micro-batch is `operators` of unequal lengths, a send and the receive of the stage before it.
    With `stages_on_a_link`, that many neighbours share a link that carries one and a half of their sends at full rate.
    """
    width = operators + 2
    shape = (2, micro_batches, stages, width)
    size = int(np.prod(shape))
    direction, micro_batch, stage, place = (index.ravel() for index in np.indices(shape))
    stage = np.where(direction == 0, stage, stages - 1 - stage)
    sends, receives = place == operators, place == operators + 1
    numbers = np.arange(size).reshape(shape)
    step = (direction * micro_batches + micro_batch) * stages
    # Of the stages in order, each sends to the next; the first receives what the last one sends.
    rank_in_order = np.indices(shape)[2].ravel()
    meeting = np.where(sends, step + rank_in_order, -1)
    meeting = np.where(receives, step + (rank_in_order - 1) % stages, meeting)
    dependency = np.full(size, -1)
    dependency[sends] = numbers[..., operators - 1].ravel()
    first = (place == 0) & (rank_in_order > 0)
    dependency[first] = numbers[..., operators + 1].ravel()[(np.flatnonzero(first)) // width]
    waits = dependency >= 0
    crosses = sends & (stages_on_a_link > 0)
    group = max(stages_on_a_link, 1)
    work = np.where(sends, 2e-4 * RATE, 1e-4 * (1 + (place * 7 + stage * 3) % 11) / 6)
    return TaskTable(
        stream=3 * stage + np.where(sends, 1, np.where(receives, 2, 0)),
        stream_rank=np.repeat(np.arange(stages), 3),
        stream_kind=np.tile([StreamKind.COMPUTE, StreamKind.COMMUNICATION, StreamKind.COPY], stages).astype(np.int64),
        work=np.where(receives, 0.0, work),
        latency_s=np.where(sends, 1e-5, 0.0),
        rate_bytes_per_s=np.where(sends, RATE, 0.0),
        meeting=meeting,
        dependency_offsets=np.concatenate(([0], np.cumsum(waits))),
        dependencies=dependency[waits],
        link_offsets=np.concatenate(([0], np.cumsum(crosses))),
        links=(stage // group)[crosses],
        link_weights=np.ones(int(crosses.sum())),
        link_capacity=np.full(-(-stages // group), 1.5 * RATE) if stages_on_a_link else np.zeros(0),
        compute_speed=0.9 if overlap else 1.0,
        transfer_speed=0.8 if overlap else 1.0,
    )
