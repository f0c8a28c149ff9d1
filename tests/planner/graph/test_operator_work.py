"""Floating point operations against published counts and formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.graph.folding import unfold
from planner.graph.operator_work import count_flops
from planner.networks import load_network
from simulator.program import Kernel, Phase


def test_resnet50_forward_is_the_published_4_1_giga_multiply_adds() -> None:
    graph = load_network("zoo:resnet50").capture()
    assert 4.08e9 <= graph.flops(Phase.FORWARD) / 2 <= 4.12e9
    assert graph.flops(Phase.BACKWARD) / graph.flops(Phase.FORWARD) == pytest.approx(2, rel=0.03)


def test_convolutions_with_a_stride_go_back_as_a_class_of_their_own() -> None:
    graph = load_network("zoo:resnet50").capture()
    found = [n.module for n in graph.nodes if n.kernel is Kernel.STRIDED_CONVOLUTION_BACKWARD]
    # Windows of one pixel are as fast as without a stride, and nothing asks for the gradient of the network's image.
    assert sorted(found) == [f"layer{number}.0.conv2" for number in (2, 3, 4)]
    pooled = [(n.op, n.phase) for n in graph.nodes if n.kernel is Kernel.POOLING]
    assert pooled == [("aten.max_pool2d_with_indices.default", Phase.FORWARD)]


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("asked", [(True, True, True), (False, True, False), (True, False, False)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_each_gradient_of_a_convolution_is_as_much_work_as_the_convolution(
    groups: int, asked: tuple[bool, bool, bool], transposed: bool
) -> None:
    """A multiplication and an addition for each output, channel of its group and place of the window."""
    image, channels, window = torch.empty(3, 8, 13, device="meta"), 16, 5
    shape = (8, channels // groups, window) if transposed else (channels, 8 // groups, window)
    weight, how = torch.empty(shape, device="meta"), ([2], [2], [1], transposed, [0], groups)
    out = torch.ops.aten.convolution.default(image, weight, None, *how)
    args = (out, image, weight, [channels], *how, asked)
    positions = image if transposed else out
    once = 2 * 3 * positions.shape[2] * 8 * channels // groups * window
    assert count_flops(torch.ops.aten.convolution.default, (image, weight, None, *how), {}, out) == once
    found = count_flops(torch.ops.aten.convolution_backward.default, args, {}, (image, weight, None))
    assert found == once * sum(asked[:2])


@pytest.mark.parametrize(
    ("name", "length", "layers", "hidden"),
    [("gpt2", 1024, 12, 768), ("gpt3-175b", 2048, 96, 12288), ("llama2-7b", 4096, 32, 4096)],
)
def test_transformers_do_six_operations_per_parameter_and_token(
    name: str, length: int, layers: int, hidden: int
) -> None:
    """6 N T for the matrix products (N without look-ups), causal attention 3.5 x 2 T^2 d a layer."""
    graph = load_network(f"zoo:{name}").capture()
    lookups = sum(
        graph.nodes[p.node].outputs[0].elements
        for p in graph.parameters
        if "embedding" in p.name and "head.weight" not in p.aliases
    )
    products = 6 * (graph.parameter_count - lookups) * length
    attention = layers * 3.5 * 2 * length**2 * hidden
    assert graph.flops() == pytest.approx(products + attention, rel=0.002)


def test_attention_counts_half_the_scores_when_causal() -> None:
    causal = load_network("zoo:gpt2", sequence_length=512).capture()
    whole = load_network("zoo:bert-large").capture()

    def forward(graph: object) -> float:
        nodes = [n for n in graph.nodes if n.kernel is Kernel.ATTENTION and n.phase is Phase.FORWARD]  # type: ignore[attr-defined]
        return nodes[0].flops

    assert forward(causal) == 2 * 512**2 * 768
    assert forward(whole) == 4 * 512**2 * 1024


def test_unfolding_175_billion_parameters_keeps_the_count() -> None:
    graph = load_network("zoo:gpt3-175b").capture()
    full = unfold(graph)
    assert full.parameter_count == graph.parameter_count
    assert full.flops() == pytest.approx(graph.flops(), rel=1e-12)
    assert len(full.nodes) == sum(graph.multiplicity)
    assert replace(graph.runs[0], first=(), second=()).count == 96
