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

_CONTEXT = "planner.exchange.mindspore."
_MODULES = {
    "AutoParallel": _CONTEXT + "auto_parallel",
    "plan": _CONTEXT + "auto_parallel",
    "AutoParallelContext": _CONTEXT + "context",
    "auto_parallel_context": _CONTEXT + "context",
    "get_auto_parallel_context": _CONTEXT + "context",
    "reset_auto_parallel_context": _CONTEXT + "context",
    "set_auto_parallel_context": _CONTEXT + "context",
    "Planned": _CONTEXT + "entry",
    "Pipeline": _CONTEXT + "pipeline",
    "execute": _CONTEXT + "running",
    "shard": _CONTEXT + "shard",
    "offload": "planner.networks.marks",
    "recompute": "planner.networks.marks",
    "set_comm_fusion": "planner.networks.marks",
    "set_pipeline_stage": "planner.networks.marks",
    "ContextError": "simulator.errors",
    "IgnoredKeyWarning": "simulator.errors",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
