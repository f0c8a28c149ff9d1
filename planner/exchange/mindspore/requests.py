"""From a context to the request for a plan: what is set becomes pins, what is not set is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from planner.exchange.mindspore.context import KEYS, AutoParallelContext
from planner.plans.exchange import DataStrategy, Exchange
from planner.plans.pins import Pins
from planner.plans.request import BY_SAMPLES, PlanRequest
from simulator.checks import FUSION_KINDS, unknown
from simulator.errors import ContextError

if TYPE_CHECKING:
    from planner.networks.network import Network


FUSION_MB = 64
"""Size of fused messages in mode auto."""
MIB = 2**20
BY_RANK = ("data_parallel", "hybrid_parallel")
"""Modes in which a rank's gradients are those of its own mean loss until ``gradients_mean`` says otherwise."""


def exchange_of(context: AutoParallelContext) -> Exchange:
    """What the keys that are set say of messages, gradients and data."""
    found = Exchange(
        gradient_dtype="float32" if context.counted("gradient_fp32_sync") else "",
        all_to_all=context.counted("enable_alltoall", True),
        group_power=_group_power(context),
        repeated_loss=not context.counted("loss_repeated_mean", True),
        cross_batch=context.counted("cross_batch", False),
        broadcast=context.counted("parameter_broadcast", False),
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
    whole = {True: "full_batch", False: "data_parallel", None: ""}[context.counted("full_batch")]
    given: DataStrategy = context.counted("dataset_strategy", whole)
    return given


def _with_fusion(found: Exchange, context: AutoParallelContext) -> Exchange:
    places = tuple(context.counted("all_reduce_fusion_config", ()))
    fusion: Mapping[str, Any] = context.counted("comm_fusion", {})
    if not fusion:
        return replace(found, fusion_places=places)
    if fusion.get("openstate") is False:
        return replace(found, all_reduce_bytes=0, all_gather_bytes=0, reduce_scatter_bytes=0)
    settings = {kind: fusion.get(kind, {"mode": "auto", "config": None}) for kind in FUSION_KINDS}
    sizes = {
        kind: (int(setting["config"]) if setting["mode"] == "size" else FUSION_MB) * MIB
        for kind, setting in settings.items()
    }
    by_place = settings["allreduce"]["mode"] == "index"
    return replace(
        found,
        fusion_places=tuple(settings["allreduce"]["config"]) if by_place else places,
        all_reduce_bytes=sizes["allreduce"],
        all_gather_bytes=sizes["allgather"],
        reduce_scatter_bytes=sizes["reducescatter"],
    )


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


THRESHOLD_KB = 64
"""Parameters of less stay whole where the parallel optimizer is on and no threshold is given."""
LEVELS: Mapping[str, str] = {"level1": "zero1", "level2": "zero2", "level3": "zero3"}
OPTIONS = (
    *("global_batch", "sequence_length", "precision", "optimizer", "hints", "marks", "top", "sensitivity"),
    *("software", "attention", "norms"),
)
NAMES = (*OPTIONS, "layerwise_parallel")
DATA_ONLY: Mapping[str, str] = {
    **dict.fromkeys(("tp", "pp", "cp", "ep"), "1"),
    "recompute": "none",
    "offload_optimizer": "false",
}
"""Pins that leave a data axis and nothing else to choose."""


def request_of(
    context: AutoParallelContext,
    network: str | Network,
    hardware: str,
    *,
    pins: Mapping[str, object] | Pins | None = None,
    **options: Any,
) -> PlanRequest:
    """Translate a context for one network on one cluster.

    Parameters
    ----------
    network, hardware
        As `PlanRequest` has them.
    pins
        More pins than the context's.
    **options
        Other fields of the request: ``global_batch``, ``sequence_length``, ``precision``, ``optimizer``, ``hints``,
        ``marks``, ``top``, ``sensitivity``, ``software``, ``attention``, ``norms``; and ``layerwise_parallel``, names
        or patterns of parameters of which every rank has its own in ``hybrid_parallel``.

    Raises
    ------
    ContextError
        A key is set that the default mode does not read, or a pin contradicts a key.
    """
    for name in options:
        if name not in NAMES:
            raise ContextError(f"a plan has {unknown(name, ('pins', *NAMES)).replace('key', 'option', 1)}")
    check_mode_is_said(context)
    exchange = replace(exchange_of(context), layerwise=_layerwise(context, options.pop("layerwise_parallel", ())))
    own, given = Pins.read(pins_of(context)), pins if isinstance(pins, Pins) else Pins.read(pins or {})
    check_agree(given, own, "of the context; leave one of them out")
    return PlanRequest(
        network=network,
        hardware=hardware,
        devices=context.get("device_num"),
        parallel_mode=searched_mode(context),
        search_mode=context.get("search_mode"),
        pins=given.over(own),
        exchange=exchange,
        **options,
    )


def check_agree(given: Pins, own: Pins, where: str) -> None:
    """Raise ContextError where pins that are given have other values than those that stand `where`."""
    has = own.named()
    for name, text in given.named().items():
        if has.get(name, text) != text:
            raise ContextError(f"pin {name}={text} contradicts {name}={has[name]} {where}")


def _layerwise(context: AutoParallelContext, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ContextError(f"layerwise_parallel={names!r}: give a list of names of parameters, for example ['head.*']")
    mode = context.get("parallel_mode")
    if names and mode != "hybrid_parallel":
        raise ContextError(
            f"layerwise_parallel={list(names)} with parallel_mode={mode}: only hybrid_parallel leaves parameters out "
            f"of the gradients' aggregation; set parallel_mode='hybrid_parallel'"
        )
    return tuple(names)


def check_mode_is_said(context: AutoParallelContext) -> None:
    """Raise ContextError where keys are set that only count in modes other than the default."""
    if context.is_set("parallel_mode"):
        return
    ignored = sorted(name for name in KEYS if context.is_set(name) and not context.counts(name))
    if context.get("device_num") > 1:
        ignored.append("device_num")
    if ignored:
        name = ignored[0]
        raise ContextError(
            f"{name}={context.get(name)!r} is set and parallel_mode is not: its default, stand_alone, runs on one "
            f"device and does not read it; set parallel_mode='auto_parallel', or leave {name} out"
        )


def searched_mode(context: AutoParallelContext) -> str:
    """The request's parallel mode: data parallelism that shards states is searched with only a data axis.

    So is hybrid parallelism, where the request says which parameters every rank has of its own.
    """
    mode = str(context.get("parallel_mode"))
    return "auto_parallel" if mode == "data_parallel" and shards_states(context) else mode


def shards_states(context: AutoParallelContext) -> bool:
    """Whether optimizer states are sharded over data-parallel ranks."""
    return bool(context.counted("enable_parallel_optimizer"))


def pins_of(context: AutoParallelContext) -> dict[str, str]:
    """The pins that the keys set stand for; a key that is not set leaves its choice to the search."""
    found: dict[str, str] = {}
    if context.get("parallel_mode") in BY_SAMPLES and shards_states(context):
        found |= DATA_ONLY
    for key, name in (("pipeline_stages", "pp"), ("grad_accumulation_step", "micro_batches")):
        if context.counts(key):
            found[name] = str(context.get(key))
    for name, text in exchange_pins(context).items():
        found.setdefault(name, text)
    if context.counts("enable_parallel_optimizer"):
        found |= _optimizer_pins(context)
    return found


def _optimizer_pins(context: AutoParallelContext) -> dict[str, str]:
    if not context.get("enable_parallel_optimizer"):
        return {"optimizer_sharding": "none"}
    config = context.get("parallel_optimizer_config")
    usual = "level2" if config.get("gradient_accumulation_shard", True) else "level1"
    found = {
        "optimizer_sharding": LEVELS[config.get("optimizer_level", usual)],
        "sharding_threshold_kb": str(config.get("parallel_optimizer_threshold", THRESHOLD_KB)),
    }
    if "optimizer_weight_shard_size" in config:
        found["shard_size"] = str(config["optimizer_weight_shard_size"])
    elif found["sharding_threshold_kb"] == "0" and context.get("parallel_mode") in BY_SAMPLES:
        # Shards over all ranks are those of the search over configurations, whose operators split the batch alone.
        found["shard_size"] = str(context.get("device_num"))
    return found
