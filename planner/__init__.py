"""Networks to plans, and plans to runs."""

from planner.context.auto_parallel import AutoParallel
from planner.context.context import (
    AutoParallelContext,
    auto_parallel_context,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from planner.context.entry import Planned, plan
from planner.context.errors import ContextError, IgnoredKeyWarning
from planner.context.marks import offload, recompute, set_comm_fusion, set_pipeline_stage
from planner.context.pipeline import Pipeline
from planner.context.shard import shard
from planner.running import execute

__all__ = [
    "AutoParallel",
    "AutoParallelContext",
    "ContextError",
    "IgnoredKeyWarning",
    "Pipeline",
    "Planned",
    "auto_parallel_context",
    "execute",
    "get_auto_parallel_context",
    "offload",
    "plan",
    "recompute",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "set_comm_fusion",
    "set_pipeline_stage",
    "shard",
]
