"""Networks to plans, and plans to runs."""

from planner.context.context import (
    AutoParallelContext,
    auto_parallel_context,
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from planner.context.entry import Planned, plan
from planner.context.errors import ContextError, IgnoredKeyWarning

__all__ = [
    "AutoParallelContext",
    "ContextError",
    "IgnoredKeyWarning",
    "Planned",
    "auto_parallel_context",
    "get_auto_parallel_context",
    "plan",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
]
