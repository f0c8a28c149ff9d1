"""Device memory of a plan under software that has a name: the plan as a training run of `planner.cost.memory`.

The program of a plan has the tensors of its operators and nothing else. Software keeps gradients in float32, masks of
dropout, workspaces and free blocks besides; what it keeps is a property of the software, read from its source and
measured on published runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import takewhile
from typing import Any

from planner.cost.memory.device import layer_bytes, training_memory
from planner.cost.memory.figures import MemoryEstimate
from planner.cost.memory.parameters import parameter_count
from planner.cost.memory.states import gradient_width, usual_gradient_bytes
from planner.cost.memory_traits import UNEVEN_ROUTING
from planner.cost.software import software_named
from planner.cost.stacks import AttentionKernel, Stack, family_of
from planner.cost.training_run import (
    Experts,
    LatentAttention,
    OptimizerSharding,
    Recompute,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)
from planner.cost.work import optimizer, state_bytes, trained_dtype
from planner.graph.host_tables import host_tables
from planner.graph.operator_graph import DTYPE_BYTES, STORED_BYTES, OperatorGraph
from planner.networks import Network, load_network
from planner.networks.decoder.gpt import ZooGPT
from planner.networks.decoder.llama import ZooLlama
from planner.networks.decoder.mixtral import ZooMixtral
from planner.plans.plan import Plan, deals_experts, stored_parameters
from planner.search.configurations.storage import Held
from planner.search.units.records import RECOMPUTE
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.quantities import bytes_text

_BY_OPERATOR = (Stack.EAGER, Stack.COMPILED)
"""Stacks whose selective recomputation keeps every second product (torchtitan), not all but the attention core."""
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def software_memory(plan: Plan, graph: OperatorGraph, hardware: Hardware) -> MemoryEstimate | None:
    """Memory of every pipeline rank under the software of a plan.

    Returns None where the formulas do not describe the plan: it names no software, its network is no decoder of known
    sizes, or tensor ranks do not share the parameters as all software does.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded or not, at any batch.
    """
    shape = _shape_in(plan, graph)
    if shape is None or not _cut_by_width(plan, graph):
        return None
    try:
        return training_memory(
            TrainingRun(network=shape, setup=_setup(plan, graph, hardware, shape), hardware=hardware)
        )
    except InputError:
        return None  # a schedule without a formula


def held_by_software(
    plan: Plan, graph: OperatorGraph, hardware: Hardware, kept: Sequence[float], *, shares_sequence: bool
) -> Held:
    """Describe the memory of a plan's software for the search.

    Parameters
    ----------
    plan : Plan
        On one device, with one sample, without recomputation.
    kept : sequence of float
        Activation bytes of a layer of it in each mode, by the operators of the network.
    shares_sequence : bool
        Whether tensor ranks share what lies between their products.
    """
    shape = _shape_in(plan, graph)
    if shape is None or min(kept) <= 0:
        return Held()
    software, setup = software_named(plan.software), _setup(plan, graph, hardware, shape)

    @cache
    def layer(tensor: int, context: int, expert: int, micro_batch: int) -> tuple[float, ...]:
        there = replace(
            setup, devices=tensor * context * expert, dp=expert, tp=tensor, cp=context, ep=expert, expert_tp=tensor,
            micro_batch=micro_batch, sequence_parallel=shares_sequence and tensor > 1,
        )  # fmt: skip
        by_operator = replace(there, every_second_product=there.every_second_product or software.stack in _BY_OPERATOR)
        of = {mode: by_operator if mode == Recompute.SELECTIVE else there for mode in RECOMPUTE}
        found = {mode: layer_bytes(TrainingRun(network=shape, setup=of[mode], hardware=hardware)) for mode in RECOMPUTE}
        return tuple(found[mode].kept[Recompute(mode)] for mode in RECOMPUTE)

    alone = layer_bytes(TrainingRun(network=shape, setup=setup, hardware=hardware))
    return Held(
        layer=layer,
        alone=tuple(kept),
        shares_sequence=shares_sequence,
        in_flight=alone.in_flight,
        gradient_bytes=gradient_width(setup),
        whole_between=True,
        fixed_bytes=alone.fixed,
    )


def _shape_in(plan: Plan, graph: OperatorGraph) -> TransformerShape | None:
    """Sizes of the network of a plan, with the places that its experts have; None where no formula describes it."""
    plain = plan.copies == 1 and not plan.host_embeddings and plan.offload_to == "host"
    shape = shape_of(plan.network, plan.sequence_length, graph) if plan.software and plain else None
    if shape is None or shape.experts is None or plan.expert_load <= 1.0:
        return shape
    return replace(shape, experts=replace(shape.experts, capacity_factor=max(plan.expert_load, UNEVEN_ROUTING)))


def _cut_by_width(plan: Plan, graph: OperatorGraph) -> bool:
    """Whether tensor ranks share most parameters, as in all software; a search may let them share the batch."""
    place = next((i for i, axis in enumerate(plan.mesh.axes) if axis.name == "tensor" and axis.size > 1), None)
    if place is None:
        return True
    total = cut = 0
    for elements, placements in stored_parameters(graph, plan.rules, plan.layers):
        total += elements
        cut += elements * (placements[place] >= 0)
    return 2 * cut > total


def _setup(plan: Plan, graph: OperatorGraph, hardware: Hardware, shape: TransformerShape) -> TrainingSetup:
    software = software_named(plan.software)
    tensor, ranks = plan.degree("tensor"), plan.degree("expert")
    whole = ranks > 1 and deals_experts(plan, graph)
    chunks = tuple(_chunk_layers(plan, shape.layers))
    attention = plan.attention or software.attention.get(family_of(hardware.device_name), "") or hardware.attention
    shared = plan.shard_size if plan.shard_size < plan.degree("data") else 0
    recomputed, habits = tuple(_recomputed(plan, chunks)), software.memory
    selective = sum(layers for _, layers in recomputed)
    by_operator = software.stack in _BY_OPERATOR and selective == shape.layers
    sums, kept = habits.gradient_bytes, habits.model_dump(exclude={"optimizer_states"})
    return TrainingSetup(
        devices=plan.devices,
        dp=plan.degree("data") * ranks,
        tp=tensor,
        pp=plan.pipeline,
        vpp=plan.virtual,
        cp=plan.degree("context"),
        ep=ranks * (tensor if whole else 1),
        expert_tp=1 if whole else tensor,
        micro_batch=plan.micro_batch,
        micro_batches=plan.micro_batches,
        schedule="1f1b" if plan.schedule == "none" else plan.schedule,
        stage_recompute=recomputed,
        recompute_modules=plan.recompute_modules,
        optimizer_sharding=OptimizerSharding(plan.optimizer_sharding),
        shard_group=shared * ranks,
        sequence_parallel=plan.sequence_parallel,
        precision=plan.precision,
        optimizer=habits.optimizer_states or plan.optimizer,
        attention=AttentionKernel(attention),
        stack=software.stack,
        offload_optimizer=plan.offload_optimizer,
        offload_parameters=plan.offload_parameters,
        offload_activations=bool(plan.offload_ranges),
        trained_fraction=_trained_fraction(graph),
        layers_per_stage=tuple(len(chunk) for chunk in chunks) if plan.pipeline > 1 else (),
        fused_norm=plan.norms == "fused",
        single_norms=plan.norms == "unfused",
        **kept | {
            "gradient_bytes": usual_gradient_bytes(software.stack, plan.precision) if sums < 0 else sums,
            "every_second_product": habits.every_second_product or by_operator,
            "frozen_weight_bytes": habits.frozen_weight_bytes or _frozen_bytes(graph),
        },
    )  # fmt: skip


def _trained_fraction(graph: OperatorGraph) -> float:
    sizes = {p.node: graph.multiplicity[p.node] * graph.nodes[p.node].outputs[0].elements for p in graph.parameters}
    return sum(sizes[node] for node in graph.trained) / sum(sizes.values())


def _frozen_bytes(graph: OperatorGraph) -> float:
    """Bytes of an element of frozen weights on average; 0 where all are stored as products take them."""
    frozen = [(graph.multiplicity[p.node], graph.nodes[p.node].outputs[0]) for p in graph.parameters if not p.gradient]
    if not any(spec.dtype in STORED_BYTES for _, spec in frozen):
        return 0.0
    wide = DTYPE_BYTES[trained_dtype(graph)]
    held = sum(
        times * (spec.size_bytes if spec.dtype in STORED_BYTES else spec.elements * wide) for times, spec in frozen
    )
    return held / sum(times * spec.elements for times, spec in frozen)


def _layer_of(name: str) -> int | None:
    found = _NUMBER.search(name)
    return None if found is None else int(found[1])


def _chunk_layers(plan: Plan, layers: int) -> Iterator[range]:
    """The layers of each chunk, in the order of the network; those of a copy in the other direction are not told."""
    chunks = plan.chunks[: plan.pipeline * plan.virtual]
    starts = [0]
    for chunk in chunks[1:]:
        number = _layer_of(chunk.first)
        starts.append(layers if number is None else number)
    for start, end in zip(starts, [*starts[1:], layers], strict=True):
        yield range(start, end)


def _recomputed(plan: Plan, chunks: tuple[range, ...]) -> Iterator[tuple[int, int]]:
    """Layers of each pipeline rank that are computed again in full, and selectively."""
    modes: dict[int, str] = {}
    for part in plan.recompute_ranges:
        first, last = _layer_of(part.first), _layer_of(part.last)
        if part.first == part.last and first is None:
            continue
        for layer in range(first or 0, 1 + (chunks[-1].stop - 1 if last is None else last)):
            modes[layer] = part.mode
    ranks = [chunk.rank for chunk in plan.chunks] or [0]
    for rank in range(plan.pipeline):
        own = [modes.get(n, "") for place, chunk in zip(ranks, chunks, strict=False) if place == rank for n in chunk]
        yield own.count(str(Recompute.FULL)), own.count(str(Recompute.SELECTIVE))


_WITH_SIZES = ("zoo:", "hf:")
"""Sources of networks whose sizes are known without their code."""
_TOLERANCE = 0.01
"""Share of the parameters that sizes may leave out: norms of queries and keys, biases, gates of a shared expert."""
_QUERY_NORM = re.compile(r"\bq(uery)?_(layer)?norm\b")
_ROTARY_KEYS = ("rope_theta", "rope_parameters", "rotary_pct", "rotary_dim")


def shape_of(spec: str, sequence: int | None, graph: OperatorGraph) -> TransformerShape | None:
    """Sizes of a decoder of equal layers, dense or of experts; None for any other network.

    Sizes from a configuration count only if they give the number of parameters that the network has.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded or not, at any batch.
    """
    if not spec.startswith(_WITH_SIZES) or sequence is None:
        return None
    normalised = any(_QUERY_NORM.search(parameter.name) for parameter in graph.parameters)
    return _shape(spec, sequence, graph.fingerprint, _parameters(graph), normalised)


def _parameters(graph: OperatorGraph) -> int:
    """Parameters of the network, but for those of adapters: where some are frozen, only these are its own."""
    own = [p for p in graph.parameters if not p.gradient] or graph.parameters
    return sum(graph.multiplicity[p.node] * graph.nodes[p.node].outputs[0].elements for p in own)


@lru_cache(maxsize=64)
def _shape(spec: str, sequence: int, _fingerprint: str, parameters: int, normalised: bool) -> TransformerShape | None:
    """Sizes of a specification; the fingerprint tells apart what files held at different times."""
    network = load_network(spec, sequence_length=sequence)
    found = _built_in(network, sequence)
    if found is not None or not network.config:
        return found
    try:
        shapes = [replace(shape, normalised_queries=normalised) for shape in _described(network, sequence)]
    except (InputError, KeyError, TypeError, ZeroDivisionError):
        return None  # a key is left out or means something else there
    near = min(shapes, key=lambda shape: abs(parameter_count(shape) - parameters), default=None)
    return near if near and abs(parameter_count(near) - parameters) <= _TOLERANCE * parameters else None


def _built_in(network: Network, sequence: int) -> TransformerShape | None:
    known = network.decoder
    if isinstance(known, ZooGPT):
        sizes = known.config
        return TransformerShape(
            name=network.name, layers=sizes.layers, hidden=sizes.hidden, heads=sizes.heads,
            key_value_heads=sizes.heads, head_size=sizes.hidden // sizes.heads, feed_forward=4 * sizes.hidden,
            vocabulary=sizes.vocabulary, sequence_length=sequence, learned_positions=sizes.positions,
        )  # fmt: skip
    if not isinstance(known, ZooLlama):
        return None
    experts, llama = None, known.config
    if isinstance(known, ZooMixtral):
        count = known.config
        experts = Experts(count=count.experts, per_token=count.chosen_experts, feed_forward=count.intermediate)
    return TransformerShape(
        name=network.name, layers=llama.layers, hidden=llama.hidden, heads=llama.heads,
        key_value_heads=llama.key_value_heads, head_size=llama.hidden // llama.heads, feed_forward=llama.intermediate,
        vocabulary=llama.vocabulary, sequence_length=sequence, gated=True, rms_norm=True, biases=False, rotary=True,
        experts=experts, tied_embeddings=False,
    )  # fmt: skip


def _described(network: Network, sequence: int) -> Iterator[TransformerShape]:
    """Read the sizes from a configuration, which does not say whether feed-forward layers have a gate: both ways."""
    config = network.config
    hidden, heads = _stated(config, "hidden_size", "n_embd"), _stated(config, "num_attention_heads", "n_head")
    layers = _stated(config, "num_hidden_layers", "n_layer")
    inner = _stated(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    positions = _stated(config, "max_position_embeddings", "n_positions", default=0)
    rotary = any(key in config for key in _ROTARY_KEYS)
    rms = any("rms" in key for key in config)
    experts = _experts(config, inner)
    for gated in (True, False):
        yield TransformerShape(
            name=network.name, layers=layers, hidden=hidden, heads=heads,
            key_value_heads=1 if config.get("multi_query") else _stated(config, "num_key_value_heads", default=heads),
            head_size=_stated(config, "head_dim", default=hidden // heads),
            feed_forward=inner, vocabulary=_stated(config, "vocab_size"), sequence_length=sequence, gated=gated,
            rms_norm=rms, biases=not rms, rotary=rotary, learned_positions=0 if rotary else positions,
            dropout=any(note.startswith("dropout is left out") for note in network.notes),
            tied_embeddings=bool(config.get("tie_word_embeddings", True)),
            experts=experts, latent_attention=_latent(config),
        )  # fmt: skip


def _stated(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of some sizes that a configuration states."""
    found = next((config[key] for key in keys if config.get(key)), default)
    if found is None:
        raise KeyError(keys[0])
    return int(found)


def _experts(config: Mapping[str, Any], inner: int) -> Experts | None:
    count = _stated(config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", default=0)
    if count < 2:
        return None
    width = _stated(config, "moe_intermediate_size", default=inner)
    kinds = config.get("mlp_layer_types") or ()
    dense = _stated(config, "first_k_dense_replace", default=len(list(takewhile(lambda kind: kind == "dense", kinds))))
    return Experts(
        count=count,
        per_token=_stated(config, "num_experts_per_tok", "num_experts_per_token", "moe_k"),
        feed_forward=width,
        shared_feed_forward=_stated(
            config, "shared_expert_intermediate_size", default=width * _stated(config, "n_shared_experts", default=0)
        ),
        dense_layers=dense,
    )


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=int(config.get("q_lora_rank") or 0),
        key_value_rank=_stated(config, "kv_lora_rank"),
        rotary_head=_stated(config, "qk_rope_head_dim"),
        plain_head=_stated(config, "qk_nope_head_dim"),
        value_head=_stated(config, "v_head_dim"),
    )


_GRADIENT_BYTES = 4
"""Gradients of states on the host wait there in float32, as its optimizer takes them (ZeRO-Offload,
arXiv:2101.06840)."""


def host_memory_bytes(plan: Plan, graph: OperatorGraph, devices_per_node: int) -> int:
    """Bytes that the host of one node holds of parameters, gradients and optimizer states; 0 with all on the devices.

    States are shared out over the ranks that shard them; a node has those of its own devices. What lies on disk does
    not count.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded or not.
    """
    moved = plan.offload_optimizer or plan.offload_parameters
    if (not moved or plan.offload_to != "host") and not plan.host_embeddings:
        return 0
    update, on_host = optimizer(plan.optimizer), host_tables(graph).parameters if plan.host_embeddings else ()
    ranks = plan.devices // sharing(plan)
    total = 0.0
    for parameter in graph.parameters:
        node, trained = parameter.node, parameter.gradient is not None
        spec = graph.nodes[node].outputs[0]
        elements = graph.multiplicity[node] * spec.elements
        there = node in on_host
        if trained and (there or (plan.offload_optimizer and plan.offload_to == "host")):
            total += elements * (state_bytes(update, spec.dtype) + _GRADIENT_BYTES)
        if there or (plan.offload_parameters and plan.offload_to == "host"):
            total += graph.multiplicity[node] * spec.size_bytes
    nodes = max(1, plan.devices // devices_per_node)
    return round(total * ranks / nodes)


def host_refusal(held_bytes: int, limit_bytes: float) -> str:
    """Why a plan does not fit the host, and what to do."""
    return (
        f"host memory binds: a node's host would hold {bytes_text(held_bytes)} of parameters, gradients and optimizer "
        f"states, of {bytes_text(limit_bytes)}; use more nodes, --pin offload_to=disk, or --pin offload_optimizer=false"
    )


def sharing(plan: Plan) -> int:
    """Devices that together hold one copy of the states: all but those of replicas that share none."""
    if plan.optimizer_sharding == "none":
        return plan.devices // (plan.degree("data") * plan.degree("context"))
    replicas = plan.degree("data") // plan.shard_size if plan.shard_size else 1
    return plan.devices // max(1, replicas)
