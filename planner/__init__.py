"""Networks to plans, and plans to runs.

Names are imported when they are first used, so that a command that needs none of them starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.exchange.mindspore.auto_parallel import AutoParallel, plan
    from planner.exchange.mindspore.context import (
        AutoParallelContext,
        auto_parallel_context,
        get_auto_parallel_context,
        reset_auto_parallel_context,
        set_auto_parallel_context,
    )
    from planner.exchange.mindspore.entry import Pipeline, Planned, execute, shard
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

_NAMES = {
    "planner.exchange.mindspore.auto_parallel": ("AutoParallel", "plan"),
    "planner.exchange.mindspore.context": (
        *("AutoParallelContext", "auto_parallel_context"),
        *("get_auto_parallel_context", "reset_auto_parallel_context", "set_auto_parallel_context"),
    ),
    "planner.exchange.mindspore.entry": ("Pipeline", "Planned", "execute", "shard"),
    "planner.networks.marks": ("offload", "recompute", "set_comm_fusion", "set_pipeline_stage"),
    "simulator.errors": ("ContextError", "IgnoredKeyWarning"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
