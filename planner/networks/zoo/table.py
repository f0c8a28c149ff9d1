"""The built-in networks by name. Nothing here imports torch before a module is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.networks.inputs import InputSpec
from planner.networks.network import Family
from planner.networks.zoo.configs import (
    CAPACITY,
    BertConfig,
    GPTConfig,
    LlamaConfig,
    MixtralConfig,
    WideDeepConfig,
    perceptron_parameters,
)

if TYPE_CHECKING:
    from torch import nn

Config = GPTConfig | LlamaConfig | BertConfig
PERCEPTRON_WIDTHS = (784, 512, 512, 1)
WIDE_DEEP = WideDeepConfig(rows=10_000_000, categories=26, numbers=13, width=64, hidden=(1024, 512, 256))


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """A built-in network: what it is, and how to make its inputs and its module."""

    name: str
    family: Family
    description: str
    parameters: int
    default_global_batch: int
    default_optimizer: str
    config: Config | None = None
    inputs: tuple[InputSpec, ...] = ()
    make: Callable[[], nn.Module] | None = None
    default_sequence_length: int | None = None
    notes: tuple[str, ...] = ()


def language_inputs(vocabulary: int, sequence_length: int, *, masked: bool) -> tuple[InputSpec, ...]:
    """Two integer inputs ``(batch, sequence_length)`` below `vocabulary`: tokens, and what to predict at each.

    That is the next token, or for a masked network the token itself.
    """
    predicted = ("original_tokens", "tokens") if masked else ("next_tokens", "next_tokens")
    return tuple(
        InputSpec(name=name, kind=kind, shape=(sequence_length,), dtype="int64", high=vocabulary)
        for name, kind in (("tokens", "tokens"), predicted)
    )


_MODULES: Mapping[type, tuple[str, str]] = {
    GPTConfig: ("gpt", "GPT"),
    LlamaConfig: ("llama", "Llama"),
    MixtralConfig: ("mixtral", "Mixtral"),
    BertConfig: ("bert", "Bert"),
}


def make_language_module(config: Config, layers: int | None) -> nn.Module:
    """Make the module of a language network, of `layers` blocks if given."""
    return _make(*_MODULES[type(config)], config if layers is None else replace(config, layers=layers))


def _make(module: str, name: str, *sizes: Any, **options: Any) -> nn.Module:
    """Make a class of a module of this folder, which is imported now."""
    made: nn.Module = getattr(import_module(f"planner.networks.zoo.{module}"), name)(*sizes, **options)
    return made


EXPERTS_NOTE = f"experts take at most {CAPACITY} times their even share of a sequence's tokens; the rest skip them"


def _language(name: str, description: str, config: Config, *, batch: int, sequence: int | None = None) -> ZooEntry:
    return ZooEntry(
        name=name,
        family="language",
        description=description,
        parameters=config.parameters,
        default_global_batch=batch,
        default_optimizer="adamw",
        config=config,
        default_sequence_length=sequence or config.positions,
        notes=(EXPERTS_NOTE,) if isinstance(config, MixtralConfig) else (),
    )


_ENTRIES = (
    ZooEntry(
        name="mlp",
        family="features",
        description="784-512-512-1 with ReLU, mean absolute error",
        parameters=perceptron_parameters(PERCEPTRON_WIDTHS),
        default_global_batch=64,
        default_optimizer="sgd",
        inputs=(
            InputSpec(name="features", kind="features", shape=(784,)),
            InputSpec(name="target", kind="target", shape=(1,)),
        ),
        make=partial(_make, "mlp", "MultilayerPerceptron", PERCEPTRON_WIDTHS),
    ),
    ZooEntry(
        name="resnet50",
        family="image",
        description="ResNet-50 v1.5 on 224 x 224 images, 1000 classes",
        parameters=25_557_032,
        default_global_batch=256,
        default_optimizer="momentum",
        inputs=(
            InputSpec(name="image", kind="image", shape=(3, 224, 224)),
            InputSpec(name="label", kind="label", shape=(), dtype="int64", high=1000),
        ),
        make=partial(_make, "resnet", "ResNet", (3, 4, 6, 3), classes=1000),
        notes=("batch norm keeps no running statistics: training uses those of the batch",),
    ),
    ZooEntry(
        name="widedeep",
        family="features",
        description="wide and deep: 26 categories hashed to 10 million rows of 64, 13 numbers, 1024-512-256",
        parameters=WIDE_DEEP.parameters,
        default_global_batch=16384,
        default_optimizer="adam",
        inputs=(
            InputSpec(name="numbers", kind="features", shape=(WIDE_DEEP.numbers,)),
            InputSpec(
                name="categories", kind="categories", shape=(WIDE_DEEP.categories,), dtype="int64", high=WIDE_DEEP.rows
            ),
            InputSpec(name="label", kind="label", shape=(), dtype="int64", high=2),
        ),
        make=partial(_make, "wide_deep", "WideAndDeep", WIDE_DEEP),
        notes=("gradients of embedding tables are dense: rows that no sample names are updated too",),
    ),
    _language(
        "gpt2-tiny",
        "a small GPT-2 over bytes, for local runs",
        GPTConfig(vocabulary=256, hidden=128, layers=4, heads=4, positions=64),
        batch=32,
    ),
    _language(
        "gpt2",
        "GPT-2 124M: 12 layers of 768",
        GPTConfig(vocabulary=50257, hidden=768, layers=12, heads=12, positions=1024),
        batch=512,
    ),
    _language(
        "gpt3-175b",
        "GPT-3 175B: 96 layers of 12288",
        GPTConfig(vocabulary=50257, hidden=12288, layers=96, heads=96, positions=2048),
        batch=1536,
    ),
    _language(
        "llama2-7b",
        "Llama 2 7B: 32 layers of 4096",
        LlamaConfig(
            vocabulary=32000, hidden=4096, layers=32, heads=32, key_value_heads=32, intermediate=11008, positions=4096
        ),
        batch=1024,
    ),
    _language(
        "llama3-70b",
        "Llama 3 70B: 80 layers of 8192, 8 key-value heads",
        LlamaConfig(
            vocabulary=128256,
            hidden=8192,
            layers=80,
            heads=64,
            key_value_heads=8,
            intermediate=28672,
            positions=8192,
            rope_base=500000.0,
        ),
        batch=1024,
    ),
    _language(
        "mixtral-8x7b",
        "Mixtral 8x7B: 32 layers of 4096, 2 of 8 experts a token, 8 key-value heads",
        MixtralConfig(
            vocabulary=32000,
            hidden=4096,
            layers=32,
            heads=32,
            key_value_heads=8,
            intermediate=14336,
            positions=32768,
            rope_base=1e6,
            experts=8,
            chosen_experts=2,
        ),
        batch=1024,
        sequence=4096,
    ),
    _language(
        "bert-large",
        "BERT large: 24 layers of 1024, masked-language loss",
        BertConfig(vocabulary=30522, hidden=1024, layers=24, heads=16, intermediate=4096, positions=512),
        batch=256,
    ),
)
ZOO = {entry.name: entry for entry in _ENTRIES}
