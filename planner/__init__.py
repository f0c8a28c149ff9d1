"""Networks to plans, and plans to runs."""

from planner.exchange.mindspore.auto_parallel import AutoParallel, plan
from planner.exchange.mindspore.context import (
    AutoParallelContext,
    auto_parallel_context,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from planner.exchange.mindspore.entry import Planned
from planner.exchange.mindspore.pipeline import Pipeline
from planner.exchange.mindspore.running import execute
from planner.exchange.mindspore.shard import shard
from planner.networks.marks import offload, recompute, set_comm_fusion, set_pipeline_stage
from simulator.errors import ContextError, IgnoredKeyWarning

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
