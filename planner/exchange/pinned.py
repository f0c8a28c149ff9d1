"""From what a configuration says to a request whose pins and marks fix it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from planner.exchange.training_config import TrainingConfig, cheap_modules
from planner.graph.chain import chain
from planner.graph.layer_parts import MODULES, in_parts
from planner.graph.operator_graph import OperatorGraph
from planner.networks.marks import Marks
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest
from simulator.errors import InputError

_SAME = (
    *("tp", "pp", "vpp", "cp", "micro_batch", "schedule", "context_algorithm", "sequence_parallel", "tensor_overlap"),
    *("expert_overlap", "offload_optimizer", "offload_parameters", "offload_activations"),
)
"""Keys of a configuration that are pins of the same name and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A request that a configuration fixes, and what of the configuration it fixes only nearly."""

    request: PlanRequest
    notes: tuple[str, ...] = ()


def pinned(config: TrainingConfig, base: PlanRequest, graph: OperatorGraph) -> Pinned:
    """The request for the plan that a configuration says.

    Parameters
    ----------
    base
        Network, hardware and what else the configuration does not say; its devices count where it says none.
    graph
        The network's graph.

    Raises
    ------
    InputError
        The configuration gives stages other layers than the network has.
    """
    devices = config.devices or base.devices
    config = replace(config, devices=devices)
    notes: list[str] = []
    pins: dict[str, object] = {name: value for name in _SAME if (value := getattr(config, name))}
    # An axis of one rank has no messages, and what stays on the device needs no pin.
    if config.sequence_parallel is False and (config.tp or 1) > 1:
        pins["sequence_parallel"] = False
    if config.offload_optimizer is False:
        pins["offload_optimizer"] = False
    dp = config.dp or 1
    expert, experts = _experts(config, dp, notes)
    pins |= experts | _sharding(config, dp, expert)
    marks, recompute = _layers(config, graph, notes)
    return Pinned(
        request=replace(
            base,
            devices=devices,
            global_batch=config.global_batch or base.global_batch,
            sequence_length=config.sequence_length or base.sequence_length,
            precision=config.precision or base.precision,
            optimizer=config.optimizer or base.optimizer,
            pins=Pins.read(pins | recompute).over(base.pins),
            marks=marks if marks else base.marks,
        ),
        notes=tuple(notes),
    )


def _experts(config: TrainingConfig, dp: int, notes: list[str]) -> tuple[int, dict[str, object]]:
    """Ranks of the expert axis, and the pins of experts."""
    expert, tensor, cut = config.ep or 1, config.tp or 1, config.etp or config.tp or 1
    pins: dict[str, object] = {}
    if expert > 1 and tensor > 1:
        whole = cut == 1 and expert % tensor == 0
        pins["expert_cut"] = "whole" if whole else "width"
        if whole:
            expert //= tensor
        elif cut != tensor:
            notes.append(f"experts are cut over {tensor} tensor ranks, not over {cut}")
    if dp % expert:
        notes.append(f"experts are dealt out over {gcd(dp, expert)} data-parallel ranks, not over {expert} ranks")
        expert = gcd(dp, expert)
    if config.ep is not None:
        pins["ep"] = expert
    if expert > 1:
        pins["expert_messages"] = "once_a_node" if config.tokens_once else "tokens"
    return expert, pins


def _sharding(config: TrainingConfig, dp: int, expert: int) -> dict[str, object]:
    level = config.optimizer_sharding
    if level is None:
        return {}
    if level == "none":
        return {"optimizer_sharding": "none"}
    if dp * (config.cp or 1) == 1:
        return {}
    pins: dict[str, object] = {"optimizer_sharding": level, "sharding_threshold_kb": 0}
    ranks = dp // expert
    if config.shard_size and ranks > 1 and ranks % config.shard_size == 0:
        pins["shard_size"] = config.shard_size
    return pins


def _layers(config: TrainingConfig, graph: OperatorGraph, notes: list[str]) -> tuple[Marks | None, dict[str, object]]:
    """Pins that place layers on chunks and say which compute again; marks where layers have modes of their own."""
    names = layer_names(graph)
    chunks, virtual = (config.pp or 1) * (config.vpp or 1), config.vpp or 1
    placed = chunks > 1 and config.schedule in ("1f1b", "interleaved_1f1b", "gpipe", "zb_h1")
    sizes = _sizes(config, len(names), chunks) if placed else ()
    if sizes and not all(sizes[1:-1]):
        notes.append("chunks without layers are given some")
        sizes = ()
    mode = config.recompute
    pins: dict[str, object] = {} if mode in (None, "mixed") else {"recompute": mode}
    if mode == "selective" and config.recompute_modules and config.recompute_modules != cheap_modules(graph):
        pins = _parts(config.recompute_modules, graph, notes)
    if mode == "mixed" or (sizes and not all(sizes)):
        return _marked(config, graph, sizes, names), pins
    if config.recompute_count:
        pins = {"recompute_layers": config.recompute_count * virtual}
    return None, {"stage_layers": sizes, **pins} if sizes else pins


def _parts(modules: Sequence[str], graph: OperatorGraph, notes: list[str]) -> dict[str, object]:
    """Pins of the parts of layers that compute again: those of them that the network has."""
    parts = [name for name in modules if name in MODULES and in_parts(graph, [name])]
    left = [name for name in modules if name not in parts]
    if left == ["core_attn"]:
        notes.append("core_attn: fused attention keeps nothing that could be computed again")
    elif left:
        notes.append(f"recompute_modules={','.join(left)}: no layer has such a part that could be computed again")
    return {"recompute": "selective", "recompute_modules": tuple(parts)} if parts else {"recompute": "none"}


def _marked(config: TrainingConfig, graph: OperatorGraph, sizes: Sequence[int], names: Sequence[str]) -> Marks:
    """Marks on layers: their chunk, and their mode of recomputation where each has its own."""
    stages: dict[str, int] = {}
    if sizes:
        stages = dict(zip(names, (n for n, size in enumerate(sizes) for _ in range(size)), strict=True))
        # A first or last chunk without layers has what lies before or behind them.
        units = chain(graph).names()
        stages |= {} if sizes[0] else {units[0]: 0}
        stages |= {} if sizes[-1] else {units[-1]: len(sizes) - 1}
    modes = config.recompute_layers or ()
    if config.recompute == "mixed" and len(modes) != len(names):
        raise InputError(f"recompute: modes of {len(modes)} layers, and {graph.network} has {len(names)}; correct them")
    again: dict[str, bool | str] = {"none": False, "selective": "selective", "full": True}
    recompute = {name: again[mode] for name, mode in zip(names, modes, strict=True)} if modes else {}
    return Marks(stages=stages, virtual=config.vpp or 1, recompute=recompute)


def _sizes(config: TrainingConfig, layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk; empty where nothing fixes them."""
    found = config.layers or ()
    if config.first_layers or config.last_layers:
        ends = (config.first_layers or 0) + (config.last_layers or 0)
        inner = (config.pp or 1) - bool(config.first_layers) - bool(config.last_layers)
        share = (layers - ends) // inner if inner else 0
        each = [share] * (config.pp or 1)
        each[0], each[-1] = config.first_layers or share, config.last_layers or share
        virtual = config.vpp or 1
        found = tuple(size // virtual for _ in range(virtual) for size in each)
    elif not found and config.layers is not None and chunks > 1 and layers % chunks == 0:
        found = (layers // chunks,) * chunks
    if found and sum(found) != layers:
        raise InputError(
            f"layers of stages {list(found)} add up to {sum(found)}, and the network has {layers}; correct them"
        )
    return found


def layer_names(graph: OperatorGraph) -> list[str]:
    """Names of the layers of the longest row, with those in front that are unlike the others; empty without a row."""
    run = max(graph.runs, key=lambda run: run.count, default=None)
    if run is None:
        return []
    return [name for name in chain(graph).names() if re.fullmatch(re.escape(run.prefix) + r"\.\d+", name)]
