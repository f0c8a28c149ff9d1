"""Schedules and their files against PyTorch's own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.schedules import format_schedule_csv, make_schedule, parse_schedule_csv
from simulator.torch_versions import torch_version

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

CASES = [
    ("gpipe", "ScheduleGPipe", 4, 6, 1),
    ("1f1b", "Schedule1F1B", 4, 4, 1),
    ("1f1b", "Schedule1F1B", 5, 17, 1),
    ("zb_h1", "ScheduleInterleavedZeroBubble", 4, 12, 1),
    ("interleaved_1f1b", "ScheduleInterleaved1F1B", 4, 8, 3),
    ("interleaved_1f1b", "ScheduleInterleaved1F1B", 4, 10, 2),
    ("interleaved_1f1b", "ScheduleInterleaved1F1B", 6, 21, 4),
    ("interleaved_1f1b", "ScheduleInterleaved1F1B", 8, 3, 2),
    ("zbv", "ScheduleZBVZeroBubble", 4, 12, 2),
    ("zbv", "ScheduleZBVZeroBubble", 4, 3, 2),
    ("dualpipe_v", "ScheduleDualPipeV", 4, 8, 2),
    ("dualpipe_v", "ScheduleDualPipeV", 5, 13, 2),
]
EVERY_CASE = pytest.mark.parametrize(("name", "oracle", "ranks", "micro_batches", "chunks"), CASES)


def expected(oracle: str, ranks: int, micro_batches: int, chunks: int) -> dict[int, list[Any]]:
    """Order of every rank, made without processes: the generators read but a few sizes."""
    schedule = object.__new__(getattr(torch_schedules, oracle))
    rounds = max(1, micro_batches // ranks)
    vars(schedule).update(
        _n_microbatches=micro_batches,
        _num_stages=ranks * chunks,
        num_stages=ranks * chunks,
        pp_group_size=ranks,
        n_local_stages=chunks,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )
    if hasattr(schedule, "_calculate_single_rank_operations"):
        order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    else:
        order = schedule._get_pipeline_order()
    order = {
        rank: [action for action in actions if action is not None and action.is_compute_op]
        for rank, actions in order.items()
    }
    if oracle == "Schedule1F1B":
        # Torch 2.13 lists the forward passes of the last rank from 1 on, but runs them from 0.
        assert str(order[ranks - 1][0]) == f"{ranks - 1}F1"
        order[ranks - 1][::2] = [a._replace(microbatch_index=a.microbatch_index - 1) for a in order[ranks - 1][::2]]
    return order


@EVERY_CASE
def test_order_is_that_of_torch(
    name: str, oracle: str, ranks: int, micro_batches: int, chunks: int, tmp_path: Path
) -> None:
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    order = expected(oracle, ranks, micro_batches, chunks)
    path = tmp_path / "written.csv"
    path.write_text(format_schedule_csv(schedule))

    loaded = object.__new__(torch_schedules.PipelineScheduleMulti)
    vars(loaded).update(
        pipeline_order={}, pp_group_size=ranks, _num_stages=ranks * chunks, _n_microbatches=micro_batches, _stages=[]
    )
    loaded._load_csv(path)
    assert loaded.pipeline_order == order
    assert [loaded.stage_index_to_group_rank[s] for s in range(ranks * chunks)] == schedule.stage_rank.tolist()


@EVERY_CASE
def test_files_with_communication_are_read(
    name: str, oracle: str, ranks: int, micro_batches: int, chunks: int, tmp_path: Path
) -> None:
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    # Torch 2.9 has no sums of gradients among its actions.
    add_reduce_grad = getattr(torch_schedules, "_add_reduce_grad", lambda actions, _: actions)
    order = {
        rank: add_reduce_grad(torch_schedules._add_unshard_reshard(actions), micro_batches)
        for rank, actions in expected(oracle, ranks, micro_batches, chunks).items()
    }
    order = torch_schedules._add_send_recv(order, lambda stage: int(schedule.stage_rank[stage]), ranks * chunks)
    path = tmp_path / "comms.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(order[rank] for rank in range(ranks))
    read = parse_schedule_csv(path)
    for field in ("offsets", "kind", "stage", "micro_batch"):
        np.testing.assert_array_equal(getattr(read, field), getattr(schedule, field))
    # Torch 2.9 takes pairs apart where it adds messages.
    together = schedule.paired & (torch_version() > (2, 9))
    np.testing.assert_array_equal(read.paired, together)
