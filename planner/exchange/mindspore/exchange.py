"""From a context to how the tensors of a plan travel: messages, gradients and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from planner.exchange.mindspore.context import AutoParallelContext
from planner.plans.exchange import DataStrategy, Exchange
from simulator.checks import FUSION_KINDS

FUSION_MB = 64
"""Size of fused messages in mode auto."""
MIB = 2**20
BY_RANK = ("data_parallel", "hybrid_parallel")
"""Modes in which a rank's gradients are those of its own mean loss until ``gradients_mean`` says otherwise."""


def exchange_of(context: AutoParallelContext) -> Exchange:
    """What the keys that are set say of messages, gradients and data."""

    def on(key: str) -> bool:
        return context.counts(key) and bool(context.get(key))

    def off(key: str) -> bool:
        return context.counts(key) and not context.get(key)

    found = Exchange(
        gradient_dtype="float32" if on("gradient_fp32_sync") else "",
        all_to_all=not off("enable_alltoall"),
        group_power=_group_power(context),
        repeated_loss=off("loss_repeated_mean"),
        cross_batch=on("cross_batch"),
        broadcast=on("parameter_broadcast"),
        data=data_of(context),
    )
    return _with_fusion(found, context)


def _group_power(context: AutoParallelContext) -> int:
    """By what power of the group's size gradients of the mean loss are multiplied.

    In the modes of `BY_RANK` the loss is every rank's own mean, whose gradients are summed, and divided where the key
    is set: 1 without the division. In the others the loss is the mean over the whole batch already: −1 with it.
    """
    if not context.counts("gradients_mean"):
        return 0
    by_rank = context.get("parallel_mode") in BY_RANK
    return int(by_rank) - int(context.get("gradients_mean"))


def data_of(context: AutoParallelContext) -> DataStrategy:
    """What ranks load of the batch; "" where nothing is said."""
    if context.counts("dataset_strategy"):
        given: DataStrategy = context.get("dataset_strategy")
        return given
    if context.counts("full_batch"):
        return "full_batch" if context.get("full_batch") else "data_parallel"
    return ""


def _with_fusion(found: Exchange, context: AutoParallelContext) -> Exchange:
    places = tuple(context.get("all_reduce_fusion_config")) if context.counts("all_reduce_fusion_config") else ()
    fusion: Mapping[str, Any] = context.get("comm_fusion") if context.counts("comm_fusion") else {}
    if not fusion:
        return replace(found, fusion_places=places)
    if fusion.get("openstate") is False:
        return replace(found, all_reduce_bytes=0, all_gather_bytes=0, reduce_scatter_bytes=0)
    settings = {kind: fusion.get(kind, {"mode": "auto", "config": None}) for kind in FUSION_KINDS}
    sizes = {kind: size_mb(setting) * MIB for kind, setting in settings.items()}
    by_place = settings["allreduce"]["mode"] == "index"
    return replace(
        found,
        fusion_places=tuple(settings["allreduce"]["config"]) if by_place else places,
        all_reduce_bytes=sizes["allreduce"],
        all_gather_bytes=sizes["allgather"],
        reduce_scatter_bytes=sizes["reducescatter"],
    )


def size_mb(setting: Mapping[str, Any]) -> int:
    """Size of messages in MB that one kind's setting of ``comm_fusion`` stands for."""
    return int(setting["config"]) if setting["mode"] == "size" else FUSION_MB


def exchange_pins(context: AutoParallelContext) -> dict[str, str]:
    """Pins that messages and data ask for: the closed form's size of messages, and axes that cut as the data is cut."""
    found: dict[str, str] = {}
    exchange = exchange_of(context)
    if exchange.all_reduce_bytes is not None:
        found["bucket_mb"] = str(max(1, exchange.all_reduce_bytes // MIB))
    if isinstance(exchange.data, tuple):
        batch = max((cuts[0] for cuts in exchange.data if cuts), default=1)
        inside = max((prod(cuts[1:]) for cuts in exchange.data), default=1)
        found |= {"dp": str(batch)} if batch > 1 else {}
        found |= {"tp": str(inside)} if inside > 1 else {}
    return found
