"""What a training configuration says of a plan, in the words of pins: formats are written from it and read to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from math import prod
from typing import Any

from planner.graph.experts import experts_of
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.options import recompute_modes
from planner.plans.plan import Plan, deals_experts
from simulator.errors import InputError

CHEAP_MODULES = ("core_attn", "layernorm", "moe_act")
"""Parts of a layer, by Megatron-LM's names, that selective recomputation of a plan computes again."""
MOST_LAYERS = 100_000
"""Layers, and chunks that they are dealt out over, of the longest configuration that is read."""
LOOPED = ("interleaved_1f1b", "zbv", "dualpipe_v")
"""Schedules with several chunks a rank."""
LARGEST = 2**40
"""The largest number of a configuration that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """What is said of a plan; None where nothing is.

    Attributes
    ----------
    devices : product of all degrees but the expert ones
    tp, pp, vpp, cp, ep : degrees of parallelism and chunks a pipeline rank, as pins have them
    etp : tensor ranks that share the experts of a rank of the expert axis; 1 where each has whole ones
    num_layers : layers of the network
    layers : layers of each chunk in model order; empty where they are dealt out evenly
    first_layers, last_layers : layers of the first and the last stage, the others having equal shares of the rest
    mtp_layers : layers behind the last one that predict further tokens
    schedule, optimizer_sharding, shard_size, context_algorithm, micro_batch, precision, optimizer : as pins and options
        have them; a ``shard_size`` of 0 shards over all data-parallel ranks
    recompute : mode of the whole network, or ``"mixed"``
    recompute_modules : parts of layers that compute again with ``"selective"``, by Megatron-LM's names
    recompute_layers : mode of each layer where it is ``"mixed"``
    recompute_count : first layers of each chunk that compute again with ``"full"``; 0 for all
    overlap_gradients, overlap_parameters : sums of gradients, gathers of parameters travel beside kernels
    """

    devices: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    num_layers: int | None = None
    layers: tuple[int, ...] | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    mtp_layers: int | None = None
    schedule: str | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    optimizer_sharding: str | None = None
    shard_size: int | None = None
    sequence_parallel: bool | None = None
    context_algorithm: str | None = None
    recompute: str | None = None
    recompute_modules: tuple[str, ...] | None = None
    recompute_layers: tuple[str, ...] | None = None
    recompute_count: int | None = None
    offload_optimizer: bool | None = None
    offload_parameters: bool | None = None
    offload_activations: bool | None = None
    tensor_overlap: bool | None = None
    expert_overlap: bool | None = None
    tokens_once: bool | None = None
    overlap_gradients: bool | None = None
    overlap_parameters: bool | None = None

    def __post_init__(self) -> None:
        """Bound all numbers, since they size lists: raises InputError."""
        for name, value in self.said().items():
            if isinstance(value, int) and not -1 <= value <= LARGEST:
                raise InputError(f"{name} = {value!r:.30} is no whole number of at most {LARGEST}; correct it")
        _check_size(max(self.num_layers or 0, sum(map(abs, self.layers or ()))), (self.pp or 1) * (self.vpp or 1))

    @property
    def dp(self) -> int | None:
        """Data-parallel ranks; None where devices are not known, or the degrees do not divide them."""
        inner = prod(value or 1 for value in (self.tp, self.pp, self.cp))
        return None if self.devices is None or self.devices % inner else self.devices // inner

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a step on a data-parallel rank; None where that is not known or no whole number."""
        dp, each = self.dp, self.micro_batch
        if not dp or not each or self.global_batch is None or self.global_batch % (dp * each):
            return None
        return self.global_batch // (dp * each)

    @property
    def sharded(self) -> bool:
        """Whether data-parallel ranks share states."""
        return self.optimizer_sharding not in (None, "none")

    @property
    def shard(self) -> int:
        """Data-parallel ranks that share one copy of the states."""
        return (self.shard_size or self.dp or 1) if self.sharded else 1

    def said(self) -> Mapping[str, object]:
        """What is said, by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}

    def over(self, other: TrainingConfig) -> TrainingConfig:
        """What is said here, and what `other` says where nothing is."""
        return replace(other, **self.said())  # type: ignore[arg-type]


def config_of(plan: Plan, graph: OperatorGraph, *, overlaps: bool = True) -> TrainingConfig:
    """What a plan says.

    Parameters
    ----------
    graph
        The plan's network, folded or not.
    overlaps
        Whether the plan's software lets messages of gradients and parameters travel beside kernels.
    """
    experts, tensor = plan.degree("expert"), plan.degree("tensor")
    whole = deals_experts(plan, graph)
    data = plan.degree("data") * experts
    mode, modules, by_layer = _recomputed(plan, graph)
    sharded = plan.optimizer_sharding != "none"
    _, first, last = row_of_layers(plan)
    return TrainingConfig(
        devices=plan.devices,
        tp=tensor,
        pp=plan.pipeline,
        vpp=plan.virtual,
        cp=plan.degree("context"),
        ep=experts * (tensor if whole else 1),
        etp=1 if whole else tensor,
        num_layers=last - first + 1 if last >= first else None,
        layers=uneven(layers_of_chunks(plan)),
        schedule=plan.schedule,
        micro_batch=plan.micro_batch,
        global_batch=plan.global_batch,
        sequence_length=plan.sequence_length,
        precision=plan.precision,
        optimizer=plan.optimizer,
        optimizer_sharding=plan.optimizer_sharding,
        shard_size=0 if plan.shard_size in (data, plan.degree("data")) else plan.shard_size,
        sequence_parallel=plan.sequence_parallel,
        context_algorithm=plan.context_algorithm,
        recompute=mode,
        recompute_modules=modules,
        recompute_layers=by_layer,
        recompute_count=0,
        offload_optimizer=plan.offload_optimizer,
        offload_parameters=plan.offload_parameters,
        offload_activations=bool(plan.offload_ranges),
        tensor_overlap=plan.tensor_overlap,
        expert_overlap=plan.expert_overlap,
        tokens_once=experts > 1 and plan.sent_once > 0,
        overlap_gradients=overlaps and data > 1,
        overlap_parameters=overlaps and data > 1 and sharded,
    )


def even_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk where they are dealt out evenly, the first chunks having those that are left over.

    Raises
    ------
    InputError
        There are more than `MOST_LAYERS` layers or chunks.

    Examples
    --------
    >>> even_layers(10, 4)
    (3, 3, 2, 2)
    """
    _check_size(layers, chunks)
    return tuple(layers // chunks + (place < layers % chunks) for place in range(chunks))


def _check_size(layers: int, chunks: int) -> None:
    if max(layers, chunks) > MOST_LAYERS:
        raise InputError(
            f"{layers} layers in {chunks} chunks are more than the {MOST_LAYERS} that are read; correct the numbers"
        )


PLAIN = TrainingConfig(
    pp=1, vpp=1, schedule="none", layers=(), recompute_layers=(), recompute_count=0, offload_optimizer=False,
    offload_parameters=False, offload_activations=False, tensor_overlap=False, expert_overlap=False, tokens_once=False,
)  # fmt: skip
"""One stage, one mode of recomputation, nothing on the host, no message hidden or sent once a node.

That is what formats without keys for these say.
"""


def module_parts(config: TrainingConfig, first: str, layer: str, last: Sequence[str]) -> list[list[str]]:
    """Names of the modules of each chunk in model order: the first one's embedding, layers, the last one's head.

    >>> module_parts(TrainingConfig(pp=2, num_layers=3), "embed", "layers.{}", ["norm", "head"])
    [['embed', 'layers.0', 'layers.1'], ['layers.2', 'norm', 'head']]
    """
    sizes = config.layers or even_layers(config.num_layers or 0, (config.pp or 1) * (config.vpp or 1))
    numbers = iter(range(sum(sizes)))
    parts = [[layer.format(number) for number in islice(numbers, size)] for size in sizes]
    parts[0].insert(0, first)
    parts[-1] += last
    return parts


def stages_of_parts(schedule: str, parts: object, layer: str, key: str, pipeline: int, source: str) -> dict[str, Any]:
    """Stages whose chunks name their modules, `layer` being how names of layers begin; InputError for other values."""
    if pipeline == 1:
        return {"schedule": "none", "vpp": 1, "layers": ()}
    if parts is None:
        return {"schedule": schedule, "vpp": 2 if schedule in LOOPED else 1, "layers": None}
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise InputError(f"{source}: {key} is no list of lists; correct it")
    sizes = tuple(sum(str(name).startswith(layer) for name in part) for part in parts)
    virtual = max(1, len(sizes) // pipeline)
    return {"schedule": schedule, "vpp": virtual, "num_layers": sum(sizes), "layers": uneven(sizes)}


def row_of_layers(plan: Plan) -> tuple[str, int, int]:
    """Prefix, first and last index of the longest row of equal layers, rows of one prefix taken together."""
    rows: dict[str, tuple[int, int]] = {}
    for part in plan.layers:
        first, last = rows.get(part.prefix, (part.first, part.last))
        rows[part.prefix] = (min(first, part.first), max(last, part.last))
    if not rows:
        return "", 0, -1
    prefix = max(rows, key=lambda name: rows[name][1] - rows[name][0])
    # Layers in front that are unlike the others stand outside the row.
    names = {name.split(".")[1] for name in plan.rules if name.startswith(prefix + ".")}
    outside = [int(name) for name in names if name.isdigit()]
    first, last = rows[prefix]
    return prefix, min([first, *outside]), max([last, *outside])


def layers_of_chunks(plan: Plan) -> tuple[int, ...]:
    """Layers of each chunk in model order; empty with one stage, or where the network is no row of layers."""
    prefix, first, last = row_of_layers(plan)
    if not plan.chunks or last < first:
        return ()
    starts = [first]
    for chunk in plan.chunks[1:]:
        head, _, rest = chunk.first.partition(f"{prefix}.")
        index = rest.partition(".")[0]
        starts.append(int(index) if not head and index.isdigit() else last + 1)
    return tuple(end - start for start, end in zip(starts, [*starts[1:], last + 1], strict=True))


def uneven(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of chunks; empty where all have as many."""
    return () if len(set(layers)) <= 1 else layers


def cheap_modules(graph: OperatorGraph) -> tuple[str, ...]:
    """What selective recomputation that names no parts of layers comes nearest to."""
    return CHEAP_MODULES if experts_of(graph) else CHEAP_MODULES[:2]


def _recomputed(plan: Plan, graph: OperatorGraph) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Mode of the network, modules of the selective one, and the mode of each layer where they differ."""
    from planner.graph.chain import chain

    if not plan.recompute_ranges:
        return "none", (), ()
    names = chain(graph).names()
    modes = recompute_modes(plan, names)
    prefix, first, last = row_of_layers(plan)
    layers = [f"{prefix}.{index}" for index in range(first, last + 1)] if last >= first else list(names)
    found = tuple(modes.get(name, "none") for name in layers)
    if len(set(found)) > 1:
        return "mixed", (), found
    mode = found[0]
    return mode, (plan.recompute_modules or cheap_modules(graph)) if mode == "selective" else (), ()
