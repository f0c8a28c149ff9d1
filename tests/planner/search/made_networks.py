"""Graphs of networks made for one test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from planner.graph.operator_graph import OperatorGraph
from planner.networks import load_network
from planner.networks.decoder.known import zoo_decoder
from planner.networks.inputs import InputSpec
from planner.networks.network import Network
from planner.networks.zoo.configs import GPTConfig
from planner.networks.zoo.table import language_inputs

if TYPE_CHECKING:
    from torch import nn


@cache
def gpt(*, vocabulary: int, hidden: int, layers: int, heads: int, length: int) -> OperatorGraph:
    """A GPT of any size with tied embeddings, written without torch."""
    config = GPTConfig(vocabulary=vocabulary, hidden=hidden, layers=layers, heads=heads, positions=length)
    network = replace(
        load_network("zoo:gpt2"),
        decoder=zoo_decoder(config),
        inputs=language_inputs(vocabulary, length, masked=False),
        depth=layers,
        sequence_length=length,
        content="",
    )
    return network.capture()


def captured_module(make: Callable[[], nn.Module], shape: tuple[int, ...], target: tuple[int, ...]) -> OperatorGraph:
    """The graph of a module from features of one shape and a target of another to a loss."""
    network = Network(
        name="made",
        spec="test:made",
        family="features",
        description="",
        default_global_batch=8,
        default_optimizer="sgd",
        sequence_length=None,
        inputs=(
            InputSpec(name="features", kind="features", shape=shape),
            InputSpec(name="target", kind="target", shape=target),
        ),
        make=lambda depth: make(),
    )
    return network.capture()
