"""Published networks by the names people give them; their sizes stand in ``known_models.yaml``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

from planner.cost.training_run import Experts, Hybrid, LatentAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What members of a family share besides their sizes."""

    gated: bool = False
    rms_norm: bool = False
    biases: bool = True
    rotary: bool = False
    positions: bool = False
    tied_embeddings: bool = True
    causal: bool = True
    dropout: bool = False
    embedding_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One network; ``pattern`` is what its names match.

    ``sizes`` are layers, hidden, heads, key-value heads, feed-forward, vocabulary (0: unknown).
    """

    traits: Traits
    sizes: tuple[int, ...]
    pattern: str = ""
    head_size: int = 0
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    hybrid: Hybrid | None = None
    window: int = 0
    multi_token_layers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelFamily:
    """Networks whose names match; ``members`` by billions of parameters as names write them."""

    pattern: str
    traits: Traits
    vocabulary: int
    members: dict[float, Sequence[int]]
    traits_of_size: dict[float, Traits] = field(default_factory=dict)
    head_size: int = 0
    heads_of_size: dict[float, int] = field(default_factory=dict)
    window: int = 0
    tied_up_to: float = 0.0
    """Members up to this size share the embedding with the output layer."""


@lru_cache(maxsize=1)
def _read() -> tuple[dict[str, Traits], tuple[KnownModel, ...], tuple[_ModelFamily, ...]]:
    """Traits by name, single networks and families of ``known_models.yaml``."""
    found: Any = yaml.safe_load((resources.files(__package__) / "known_models.yaml").read_text(encoding="utf-8"))
    traits = {name: Traits(**said) for name, said in found["traits"].items()}
    parts: dict[str, Callable[[Any], Any]] = {
        "traits": traits.__getitem__,
        "sizes": tuple,
        "traits_of_size": lambda said: {size: traits[name] for size, name in said.items()},
        "experts": lambda said: Experts(**said),
        "latent_attention": lambda said: LatentAttention(**said),
        "hybrid": lambda said: Hybrid(**said),
    }

    def made(items: Any) -> list[dict[str, Any]]:
        return [{key: parts[key](value) if key in parts else value for key, value in item.items()} for item in items]

    return (
        traits,
        tuple(KnownModel(**item) for item in made(found["single"])),
        tuple(_ModelFamily(**item) for item in made(found["families"])),
    )


def traits_named(name: str) -> Traits:
    """Traits by a name of ``known_models.yaml``, such as ``llama``."""
    return _read()[0][name]


_SIZE = re.compile(r"(?<![\d.x])(\d+(?:\.\d+|(?:point)\d+)?)-?([bmt])(?![a-z])")


def plain_name(name: str) -> str:
    """`name` in lower case with dashes between words: ``LLAMA3.1_405B`` is ``llama3.1-405b``.

    >>> plain_name("Meta Llama 3 (8B)")
    'meta-llama-3-8b'
    """
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def billions(name: str) -> float | None:
    """Parameters that a name states, in billions.

    >>> billions("tune_qwen25_0point5b_tp1"), billions("MPT-350m"), billions("BERT")
    (0.5, 0.35, None)
    """
    found = _SIZE.search(plain_name(name))
    if found is None:
        return None
    return float(found[1].replace("point", ".")) / {"b": 1.0, "m": 1e3, "t": 1e-3}[found[2]]


@lru_cache(maxsize=4096)
def known_model(name: str, parameters_b: float | None = None) -> KnownModel | None:
    """The published network that is called `name`; None where the name says too little.

    A member of a family is the one within 6 % of the size that the name (or `parameters_b`) states; a name of a known
    family without a known size gives a model without sizes, for its traits.
    """
    plain = re.sub(r"(qwen|llama|phi|deepseek-?v?)-?([1-4])-?([0-9])(?![0-9.]*b\b)", r"\1\2.\3", plain_name(name))
    _, single, families = _read()
    for model in single:
        if re.search(model.pattern, plain):
            return model
    family = next((f for f in families if re.search(f.pattern, plain)), None)
    if family is None:
        return None
    size = billions(name) or parameters_b
    near = min(family.members, key=lambda member: abs(member - (size or 0)), default=None)
    if size is None or near is None or abs(near - size) > 0.06 * size:
        return KnownModel(traits=family.traits, sizes=(0, 0, 0, 0, 0, family.vocabulary), head_size=0)
    member = family.members[near]
    vocabulary = member[5] if len(member) > 5 else family.vocabulary
    traits = family.traits_of_size.get(near, family.traits)
    if near <= family.tied_up_to:
        traits = replace(traits, tied_embeddings=True)
    layers, hidden, heads, key_value_heads, inner = member[:5]
    return KnownModel(
        traits=traits,
        sizes=(layers, hidden, heads, key_value_heads, inner, vocabulary),
        head_size=family.heads_of_size.get(near, family.head_size),
        window=family.window,
    )
