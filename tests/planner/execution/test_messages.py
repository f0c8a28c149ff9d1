"""The messages that run are those of the lowered program: kind, axis, bytes, order.

Here kinds of messages that must be there; `test_combinations` compares those of every row of its table.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from planner.execution.launch.dry_run import rank_line
from simulator.calibration.launch import run_workers
from tests.planner.execution.made import make_job, make_plan
from tests.planner.execution.recording import planned_messages, record
from tests.planner.execution.small import place

slow = pytest.mark.slow
CASES = [
    pytest.param("zoo:gpt2-tiny", 2, 8, {"tp": 2, "micro_batch": 4, "sequence_parallel": "true", "copies": 2},
                 {"all_gather", "reduce_scatter"}, marks=slow),
    pytest.param("zoo:gpt2-tiny", 2, 8, {"tp": 2, "micro_batch": 4, "sequence_parallel": "true", "recompute": "full",
                                         "recompute_messages": "false"}, {"all_gather"}, marks=slow),
    pytest.param(place("gpt"), 2, 8, {"cp": 2, "context_algorithm": "ring"}, {"send"}),
    pytest.param(place("llama"), 4, 8, {"cp": 2, "tp": 2, "context_algorithm": "all_to_all", "recompute": "full"},
                 {"all_to_all"}, marks=slow),
    pytest.param(place("resnet"), 2, 4, {"dp": 2}, {"all_reduce"}, marks=slow),
    pytest.param(place("mixtral"), 2, 8, {"ep": 2, "dp": 2, "expert_messages": "tokens"}, {"all_to_all"}, marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(("network", "devices", "batch", "pins", "kinds"), CASES)
def test_what_is_sent_is_what_is_timed(
    network: str, devices: int, batch: int, pins: dict[str, Any], kinds: set[str]
) -> None:
    plan = make_plan(network, devices, batch=batch, **pins)
    job = make_job(plan, steps=2)
    for rank, steps in enumerate(run_workers(record, (job,), devices)):
        expected = planned_messages(plan, job.lowered, rank)
        assert kinds <= {kind for kind, *_ in expected}
        assert steps == [expected, expected]


@slow
@pytest.mark.parametrize(
    ("pins", "kinds"),
    [
        (
            {"dp": 2, "pp": 2, "schedule": "1f1b", "micro_batch": 1, "optimizer_sharding": "zero2"},
            {"reduce_scatter"},
        ),
        ({"tp": 2, "pp": 2, "schedule": "zb_h1", "micro_batch": 2, "copies": 2}, {"all_reduce"}),
    ],
)
def test_what_ranks_of_stages_send_is_what_is_timed(pins: dict[str, Any], kinds: set[str]) -> None:
    plan = make_plan(place("gpt"), 4, batch=8, **pins)
    job = make_job(plan, steps=2)
    for rank, steps in enumerate(run_workers(record, (job,), 4)):
        expected = planned_messages(plan, job.lowered, rank)
        assert kinds | {"send"} <= {kind for kind, *_ in expected}
        assert steps == [expected, expected]
        told = Counter[str]()
        for line in rank_line(job.lowered, rank).messages:
            told[line.collective] += line.total_bytes
        sent = Counter[str]()
        for kind, _, size in expected:
            sent[kind] += int(size)
        assert told == sent
