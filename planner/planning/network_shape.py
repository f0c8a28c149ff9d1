"""Sizes of a transformer as formulas of memory take them, read from what describes the network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any

from planner.cost.memory.parameters import parameter_count
from planner.cost.training_run import Experts, LatentAttention, TransformerShape
from planner.graph.operator_graph import OperatorGraph
from planner.networks import Network, load_network
from planner.networks.decoder.gpt import ZooGPT
from planner.networks.decoder.llama import ZooLlama
from planner.networks.decoder.mixtral import ZooMixtral
from simulator.errors import InputError

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
    hidden, heads = _first(config, "hidden_size", "n_embd"), _first(config, "num_attention_heads", "n_head")
    layers = _first(config, "num_hidden_layers", "n_layer")
    inner = _first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    positions = _first(config, "max_position_embeddings", "n_positions", default=0)
    rotary = any(key in config for key in _ROTARY_KEYS)
    rms = any("rms" in key for key in config)
    experts = _experts(config, inner)
    for gated in (True, False):
        yield TransformerShape(
            name=network.name, layers=layers, hidden=hidden, heads=heads,
            key_value_heads=1 if config.get("multi_query") else _first(config, "num_key_value_heads", default=heads),
            head_size=_first(config, "head_dim", default=hidden // heads),
            feed_forward=inner, vocabulary=_first(config, "vocab_size"), sequence_length=sequence, gated=gated,
            rms_norm=rms, biases=not rms, rotary=rotary, learned_positions=0 if rotary else positions,
            dropout=any(note.startswith("dropout is left out") for note in network.notes),
            tied_embeddings=bool(config.get("tie_word_embeddings", True)),
            experts=experts, latent_attention=_latent(config),
        )  # fmt: skip


def _first(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of some sizes that a configuration states."""
    found = next((config[key] for key in keys if config.get(key)), default)
    if found is None:
        raise KeyError(keys[0])
    return int(found)


def _experts(config: Mapping[str, Any], inner: int) -> Experts | None:
    count = _first(config, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", default=0)
    if count < 2:
        return None
    width = _first(config, "moe_intermediate_size", default=inner)
    kinds = config.get("mlp_layer_types") or ()
    dense = _first(config, "first_k_dense_replace", default=len(list(takewhile(lambda kind: kind == "dense", kinds))))
    return Experts(
        count=count,
        per_token=_first(config, "num_experts_per_tok", "num_experts_per_token", "moe_k"),
        feed_forward=width,
        shared_feed_forward=_first(
            config, "shared_expert_intermediate_size", default=width * _first(config, "n_shared_experts", default=0)
        ),
        dense_layers=dense,
    )


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=int(config.get("q_lora_rank") or 0),
        key_value_rank=_first(config, "kv_lora_rank"),
        rotary_head=_first(config, "qk_rope_head_dim"),
        plain_head=_first(config, "qk_nope_head_dim"),
        value_head=_first(config, "v_head_dim"),
    )
