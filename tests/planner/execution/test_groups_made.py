"""Groups of ranks are made once, however many axes and parameters join the same ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from planner.execution.worker import _groups
from planner.lowering.checked import checked_graph
from planner.lowering.stages import lower_stages
from tests.planner.lowering.plans import one_stage


def test_axes_that_join_the_same_ranks_share_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []

    def new_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
        made.append(tuple(ranks))
        return dist.ProcessGroup(ranks.index(1) if 1 in ranks else 0, len(ranks))

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    plan = one_stage(axes=(("expert", 1), ("data", 2), ("tensor", 1)), micro_batches=1, micro_batch=1)
    lowered = lower_stages(plan, checked_graph(plan))
    expert, data, tensor = _groups(lowered, timedelta(seconds=1))
    assert expert is tensor is not data
    assert sorted(made) == [(0,), (0, 1), (1,)]
