"""From a specification such as ``zoo:gpt2`` to a network."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from planner.graph.attention import check_attention
from planner.graph.fusion import check_fusion
from planner.graph.norms import check_norms
from planner.networks.decoder.known import zoo_decoder
from planner.networks.network import Family, Network
from planner.networks.remembered import remembered
from planner.networks.trust import check_program
from planner.networks.zoo.configs import BertConfig, MixtralConfig
from planner.networks.zoo.table import ZOO, ZooEntry, language_inputs, make_language_module
from simulator.errors import InputError, NetworkError

if TYPE_CHECKING:
    from torch import nn

SOURCES = "zoo:NAME, hf:PATH, timm:NAME, tv:NAME, py:MODULE:FACTORY, pt2:FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSummary:
    """A line of the list of built-in networks."""

    name: str
    spec: str
    family: Family
    description: str
    parameters: int
    default_global_batch: int
    default_sequence_length: int | None


def list_networks() -> tuple[NetworkSummary, ...]:
    """List the built-in networks, without importing torch."""
    names = [one.name for one in fields(NetworkSummary) if one.name != "spec"]
    return tuple(
        NetworkSummary(spec=f"zoo:{entry.name}", **{name: getattr(entry, name) for name in names})
        for entry in ZOO.values()
    )


def load_network(
    spec: str | Network, *, sequence_length: int | None = None, attention: str = "", norms: str = "", fusion: str = ""
) -> Network:
    """Find the network that `spec` names.

    Parameters
    ----------
    spec
        ``zoo:NAME``, ``hf:PATH`` (a ``config.json`` or its folder), ``timm:NAME``, ``tv:NAME`` (torchvision),
        ``py:MODULE:FACTORY`` or ``pt2:FILE`` (a saved program of torch.export, which has to be trusted:
        `planner.networks.trust`); or a network itself.
    sequence_length
        Tokens per sample of a language network; ``None`` for the network's own.
    attention
        How attention runs, one of `planner.graph.attention`; empty for the usual fused kernel.
    norms
        How root-mean-square norms run, one of `planner.graph.norms`; empty for single operators, as networks have them.
    fusion
        What fuses operators, one of `planner.graph.fusion`; empty for nothing.
    """
    found = _found(spec, sequence_length)
    if attention:
        found = replace(found, attention=check_attention(attention))
    if fusion:
        found = replace(found, fusion=check_fusion(fusion))
    return replace(found, norms=check_norms(norms)) if norms else found


def _found(spec: str | Network, sequence_length: int | None) -> Network:
    if isinstance(spec, Network):
        return spec
    if sequence_length is not None and sequence_length < 1:
        raise InputError(f"sequence length {sequence_length} is not positive; give a whole number of tokens")
    source, separator, rest = spec.partition(":")
    if not separator or not rest:
        raise NetworkError(f"network {spec!r} names no source; write one of {SOURCES}{_near_zoo(spec)}")
    if source == "zoo":
        return _load_zoo(rest, sequence_length)
    if source == "hf":
        from planner.networks.hugging_face import load_config

        return load_config(rest, sequence_length)
    if source in ("timm", "tv"):
        from planner.networks.vision import load_vision

        return load_vision(source, rest, sequence_length)
    if source == "py":
        return _from_factory(rest, sequence_length)
    if source == "pt2":
        check_program(rest)
        from planner.networks.saved_program import load_program

        return load_program(rest, sequence_length)
    if source == "module":
        raise NetworkError(
            f"network {spec!r} was a module of the program that planned it, which no other program finds; plan it from "
            "a factory, py:MODULE:FACTORY"
        )
    raise NetworkError(f"network {spec!r} has the unknown source {source!r}; use one of {SOURCES}")


def _from_factory(place: str, sequence_length: int | None) -> Network:
    """A network of a user's function, whose module is imported once it is needed."""

    def look() -> Network:
        from planner.networks.python_factory import factory

        return factory(place, sequence_length)[0]()

    def make(depth: int | None) -> nn.Module:
        from planner.networks.python_factory import factory

        return factory(place, sequence_length)[1](depth)

    return remembered(f"py:{place}", sequence_length, look, make)


def _near_zoo(name: str) -> str:
    near = difflib.get_close_matches(name, ZOO, n=2)
    return f" (did you mean {' or '.join('zoo:' + n for n in near)}?)" if near else ""


def _load_zoo(name: str, sequence_length: int | None) -> Network:
    entry = ZOO.get(name)
    if entry is None:
        raise NetworkError(f"no built-in network {name!r}{_near_zoo(name)}; there are {', '.join(ZOO)}")
    if entry.config is not None:
        return _language_network(entry, sequence_length)
    if sequence_length is not None:
        raise InputError(
            f"zoo:{name} takes no sequence length (given {sequence_length}); it reads no tokens: leave it out"
        )
    make = entry.make
    assert make is not None
    return _network(entry, sequence_length=None, inputs=entry.inputs, make=lambda depth: make(), content=f"zoo:{name}")


def _network(entry: ZooEntry, **own: Any) -> Network:
    same = ("name", "family", "description", "default_global_batch", "default_optimizer", "notes")
    return Network(spec=f"zoo:{entry.name}", **{name: getattr(entry, name) for name in same}, **own)


def _language_network(entry: ZooEntry, sequence_length: int | None) -> Network:
    config = entry.config
    assert config is not None
    assert entry.default_sequence_length is not None
    length = sequence_length or entry.default_sequence_length
    if length > config.positions:
        raise InputError(
            f"zoo:{entry.name} has {config.positions} positions, fewer than the sequence length {length}; use "
            f"--seq-len {config.positions} or less"
        )
    return _network(
        entry,
        sequence_length=length,
        inputs=language_inputs(config.vocabulary, length, masked=isinstance(config, BertConfig)),
        make=partial(make_language_module, config),
        depth=config.layers,
        content=f"zoo:{entry.name} {config!r}",
        decoder=zoo_decoder(config) if length > 1 or not isinstance(config, MixtralConfig) else None,
    )
