"""Small networks shared by the tests of capture and folding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest

from planner.graph import cache as graphs
from planner.graph.capture import capture_module
from planner.graph.operator_graph import OperatorGraph
from planner.networks import Network, load_network
from planner.networks import network as networks
from planner.networks.zoo.configs import BertConfig, GPTConfig, LlamaConfig
from planner.networks.zoo.table import Config, language_inputs, make_language_module

LENGTH = 12
CONFIGS: dict[str, Config] = {
    "gpt": GPTConfig(vocabulary=61, hidden=32, layers=4, heads=4, positions=16),
    "llama": LlamaConfig(vocabulary=61, hidden=32, layers=4, heads=4, key_value_heads=2, intermediate=44, positions=16),
    "bert": BertConfig(vocabulary=61, hidden=32, layers=4, heads=4, intermediate=44, positions=16),
}


def small_network(name: str) -> Network:
    """A small network of a built-in kind."""
    if name == "resnet50":
        network = load_network("zoo:resnet50")
        inputs = (replace(network.inputs[0], shape=(3, 64, 64)), network.inputs[1])
        return replace(network, inputs=inputs, content=f"{network.content} of 64 × 64 pixels")
    if name == "mlp":
        return load_network("zoo:mlp")
    config = CONFIGS[name]
    return Network(
        name=name,
        spec=f"test:{name}",
        family="language",
        description="",
        default_global_batch=4,
        default_optimizer="adamw",
        sequence_length=LENGTH,
        inputs=language_inputs(config.vocabulary, LENGTH, masked=name == "bert"),
        make=partial(make_language_module, config),
        depth=config.layers,
        content=f"{name} {config} {LENGTH}",
    )


@pytest.fixture(scope="session")
def full_graph() -> Callable[[str], OperatorGraph]:
    """Capture every block of a small network, once; other processes find it on disk."""

    @cache
    def captured(name: str) -> OperatorGraph:
        network = small_network(name)
        key = networks._cache_key(replace(network, content=f"every block of {network.content}"))
        graph = graphs.load(key)
        if graph is None:
            graph = capture_module(lambda: network.make(None), network.inputs, name=name)
            graphs.store(key, graph)
            assert graphs.load(key) in (graph, None)
        return graph

    return captured
