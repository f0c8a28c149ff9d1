"""The dims that grow with the sequence are those that differ between captures at two lengths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from planner.graph.capture import capture_module
from planner.graph.operator_graph import OperatorGraph, TensorRef
from planner.graph.scaling import at_batch
from planner.networks import load_network
from planner.sharding.sequence import Span, sequence_dims, sequence_length, sequence_spans
from tests.planner.sharding.single_nodes import Given, one_node
from tests.planner.sharding.small_networks import Bert, Gpt, Llama, graph, tokens

SHORT, LONG = 16, 24
"""The shorter one is also the width of the small networks: sizes must not be taken for each other."""


def growing(short: OperatorGraph, long: OperatorGraph) -> Mapping[TensorRef, tuple[int, ...]]:
    """Dims whose sizes differ between two captures."""
    assert len(short.nodes) == len(long.nodes)
    found = {}
    for index, (one, other) in enumerate(zip(short.nodes, long.nodes, strict=True)):
        for output, (a, b) in enumerate(zip(one.outputs, other.outputs, strict=True)):
            dims = tuple(d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y)
            if dims:
                found[TensorRef(index, output)] = dims
    return found


@pytest.mark.parametrize("spec", ["zoo:gpt2-tiny", "zoo:llama3-70b"])
def test_decoders_of_the_zoo(spec: str) -> None:
    short, long = (load_network(spec, sequence_length=length).capture() for length in (SHORT, LONG))
    assert sequence_dims(short) == growing(short, long)
    assert sequence_dims(at_batch(short, 6)) == sequence_dims(short)


@pytest.mark.parametrize("make", [Gpt, Llama, Bert])
def test_captured_networks(make: Any) -> None:
    """Among them attention that falls apart, whose scores grow with the sequence twice, and a loss by gather."""
    longest = {"length": LONG} if make is Gpt else {}
    inputs = [tokens(length, 20) for length in (SHORT, LONG)]
    if make is Bert:
        label = graph("bert").inputs[1]
        inputs = [(ids, _Label(label.name)) for ids, _ in inputs]  # type: ignore[misc]
    short, long = (capture_module(lambda: make(**longest), given, name="small") for given in inputs)
    expected = growing(short, long)
    assert sequence_dims(short) == expected
    assert make is not Bert or any(len(dims) == 2 for dims in expected.values())


class _Label:
    """The label of a whole sequence."""

    kind, shape, dtype, high = "label", (), "int64", 2

    def __init__(self, name: str) -> None:
        self.name = name


HUGGING_FACE: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 32},
    "bert": {},
    "llama": {"num_key_value_heads": 2},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_networks_of_transformers(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="configs are read by transformers")
    shared = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    shared["max_position_embeddings"] = 32
    config = {"model_type": kind, "vocab_size": 20, **(shared if kind != "gpt2" else {}), **HUGGING_FACE[kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    short, long = (load_network(f"hf:{tmp_path}", sequence_length=n).capture() for n in (SHORT, LONG))
    assert sequence_dims(short) == growing(short, long)


def test_where_the_sequence_lies_inside_merged_dims() -> None:
    """``(batch, length, width)`` as ``(batch * length, width)`` and ``(batch, length * width)``."""
    network, _ = one_node("aten.view.default", Given((4, 8, 3), batch=0), [32, 3], batch_output=0)
    assert sequence_spans(network) == {}
    spans = sequence_spans(load_network("zoo:gpt2-tiny").capture())
    assert set(chain.from_iterable(found.values() for found in spans.values())) == {Span(1, 64)}


def test_networks_without_sequences() -> None:
    for name in ("mlp", "image"):
        assert sequence_length(graph(name)) is None
        assert sequence_dims(graph(name)) == {}
