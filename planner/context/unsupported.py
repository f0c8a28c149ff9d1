"""Keys and values that neither plan, simulation nor execution follow: they are refused, never passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.context.context import AutoParallelContext
from simulator.errors import UnsupportedError

Rule = Callable[[Any, AutoParallelContext], str]
"""What is wrong with a value and what to do, empty where it is followed."""


def check_supported(context: AutoParallelContext) -> None:
    """Raise UnsupportedError for a key that is set, is read by the parallel mode, and would change nothing."""
    for key, why in RULES.items():
        value = context.get(key)
        remedy = why(value, context) if context.counts(key) else ""
        if remedy:
            raise UnsupportedError(f"{key}={value!r} is not supported yet: {remedy}")


def _optimizer(value: Any, context: AutoParallelContext) -> str:
    if not value or context.get("parallel_mode") != "hybrid_parallel":
        return ""
    return (
        "in hybrid_parallel every rank may have parameters of its own, which cannot be sharded over ranks; use "
        "data_parallel, or leave enable_parallel_optimizer out"
    )


RULES: Mapping[str, Rule] = {"enable_parallel_optimizer": _optimizer}
