"""Keys and values that neither plan, simulation nor execution follow yet: they are refused, never passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.context.context import AutoParallelContext
from simulator.errors import UnsupportedError

WIDE = ("fp32", "fp64")
OWN_PART = "every rank loads its own part of the batch; leave it out, or set dataset_strategy='data_parallel'"


def check_supported(context: AutoParallelContext, precision: str) -> None:
    """Raise UnsupportedError for a key that is set, is read by the parallel mode, and would change nothing.

    Parameters
    ----------
    precision
        What the network trains in, for example ``"bf16"``.
    """
    mode = context.get("parallel_mode")
    if mode in _MODES:
        raise UnsupportedError(f"parallel_mode={mode} is not supported yet: {_MODES[mode]}")
    for key, why in _RULES.items():
        if not context.counts(key):
            continue
        value = context.get(key)
        remedy = why(value, context, precision)
        if remedy:
            raise UnsupportedError(f"{key}={value!r} is not supported yet: {remedy}")


def _gradients_mean(value: Any, context: AutoParallelContext, precision: str) -> str:
    summed = context.get("parallel_mode") == "data_parallel"
    if value == summed:
        return ""
    other = "gradients_mean=True" if summed else "gradients_mean=False"
    return f"gradients are those of the mean loss over the global batch; set {other} or leave it out"


def _fp32_sync(value: Any, context: AutoParallelContext, precision: str) -> str:
    if not value or precision in WIDE:
        return ""
    return (
        f"gradients of a network in {precision} travel in {precision}; set gradient_fp32_sync=False, or train with "
        f"precision fp32"
    )


def _only(allowed: Any, remedy: str) -> Callable[[Any, AutoParallelContext, str], str]:
    return lambda value, context, precision: "" if value == allowed else remedy


def _fusion(value: Any, context: AutoParallelContext, precision: str) -> str:
    if value.get("openstate") is False:
        return (
            "gradients always travel in messages of several; leave openstate out and give mode size with a small config"
        )
    kinds = {kind: setting for kind, setting in value.items() if kind != "openstate"}
    if any(setting["mode"] == "index" for setting in kinds.values()):
        return "messages are divided by their size; use {'mode': 'size', 'config': MB}"
    sizes = {(setting["mode"], setting["config"]) for setting in kinds.values()}
    if len(sizes) > 1:
        return f"all kinds of messages have one size; give {', '.join(kinds)} the same mode and config"
    return ""


def _threshold(value: Any, context: AutoParallelContext, precision: str) -> str:
    """Without a threshold operators are searched one by one, and not all of them would be split by samples."""
    if context.get("parallel_mode") != "data_parallel" or value.get("parallel_optimizer_threshold") != 0:
        return ""
    return "data_parallel needs a threshold; use parallel_optimizer_threshold=1"


_MODES: Mapping[str, str] = {
    "hybrid_parallel": "use data_parallel, or auto_parallel with pins",
    "semi_auto_parallel": (
        "operators cannot be configured one by one; use auto_parallel with pins or hints, or give the degrees in the "
        "parallel_config of a YAML file"
    ),
}
_RULES: Mapping[str, Callable[[Any, AutoParallelContext, str], str]] = {
    "gradients_mean": _gradients_mean,
    "gradient_fp32_sync": _fp32_sync,
    "loss_repeated_mean": _only(
        True, "the loss is the mean over the global batch on every rank; set loss_repeated_mean=True or leave it out"
    ),
    "cross_batch": _only(False, "all ranks of a group read one batch; set cross_batch=False or leave it out"),
    "parameter_broadcast": _only(
        False, "every rank draws its parameters from the same seed; set parameter_broadcast=False or leave it out"
    ),
    "full_batch": _only(False, OWN_PART),
    "dataset_strategy": _only("data_parallel", OWN_PART),
    "all_reduce_fusion_config": _only(
        (), "messages are divided by their size; use comm_fusion={'allreduce': {'mode': 'size', 'config': MB}}"
    ),
    "comm_fusion": _fusion,
    "parallel_optimizer_config": _threshold,
}
"""For each key what is wrong and what to do, empty where the value is followed."""
