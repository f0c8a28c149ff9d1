"""The graphs kept of built-in networks are those that torch captures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.networks import list_networks, load_network
from planner.networks.inputs import InputSpec
from planner.networks.network import capture_short, kept_as
from planner.networks.zoo.captured import FOLDER, kept

CAPTURED = sorted(one.name for one in list_networks() if load_network(one.spec).decoder is None)


def test_every_network_without_a_decoder_has_a_file() -> None:
    assert sorted(file.stem for file in FOLDER.iterdir()) == CAPTURED


@pytest.mark.parametrize("name", CAPTURED)
def test_the_kept_graph_is_the_captured_one(name: str) -> None:
    network = load_network(f"zoo:{name}")
    assert kept(name, kept_as(network)) == capture_short(network)


def test_a_network_on_other_inputs_is_captured() -> None:
    """Of the kept graph nothing says what it is on sequences of another length."""
    network = load_network("zoo:bert-large", sequence_length=128)
    assert kept(network.name, kept_as(network)) is None
    assert {node.outputs[0].shape[1] for node in network.capture().nodes if node.op == "aten.gelu.default"} == {128}


def test_inputs_are_part_of_what_is_kept() -> None:
    network = load_network("zoo:mlp")
    wider = replace(network, inputs=(InputSpec(name="features", kind="features", shape=(785,)), *network.inputs[1:]))
    assert kept_as(wider) != kept_as(network)
