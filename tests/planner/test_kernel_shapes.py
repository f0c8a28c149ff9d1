"""Local shapes of kernels: what is left of each size when tensors are cut, and the time it takes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from planner.graph.kernel_shapes import KernelShape, kernel_shape, local_kernel
from planner.graph.operator_graph import OperatorGraph, TensorRef
from planner.graph.scaling import at_batch
from planner.lowering.placed import local_share
from simulator.kernels import attention_time, best_rate, convolution_time, has_shape_model, shaped_time
from simulator.profiles import load_profile
from simulator.program import WIDER_CLASS, Kernel
from tests.planner.search.problems import captured

A100 = load_profile("dgx-a100")
BATCH = 4


def operators(graph: OperatorGraph, kernel: Kernel, *, backward: bool) -> list[tuple[int, KernelShape]]:
    """Numbers and shapes of the operators of a class in one direction."""
    found = []
    for index, node in enumerate(graph.nodes):
        shape = kernel_shape(graph, node)
        if (
            WIDER_CLASS.get(node.kernel, node.kernel) is kernel
            and ("backward" in node.op) == backward
            and shape is not None
        ):
            found.append((index, shape))
    assert found
    return found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("samples", "outputs", "inputs"), list(product((1, 2), (1, 4), (1, 2))))
def test_convolutions_are_cut_as_their_tensors_are(samples: int, outputs: int, inputs: int, *, backward: bool) -> None:
    graph = at_batch(captured("resnet50"), BATCH)
    # The image as read, the weights, and the result, cut by samples, output channels and input channels.
    shares = (1 / samples / inputs, 1 / inputs / outputs, 1 / samples / outputs)
    for _, whole in operators(graph, Kernel.CONVOLUTION, backward=backward):
        groups, positions, columns, depth = local_kernel(
            Kernel.CONVOLUTION, whole.sizes, shares, 1 / samples / outputs / inputs
        )
        assert groups == whole.sizes[0] == 1
        assert (positions * samples, columns * outputs, depth * inputs) == pytest.approx(whole.sizes[1:])


def test_the_ports_of_convolutions_are_image_weights_and_result() -> None:
    graph = at_batch(captured("resnet50"), BATCH)
    for backward in (False, True):
        for index, whole in operators(graph, Kernel.CONVOLUTION, backward=backward):
            node = graph.nodes[index]
            tensors = (*node.tensor_inputs, *(TensorRef(index, o) for o in range(len(node.outputs))))
            image, weights, result = (graph.spec(tensors[port]).shape for port in whole.ports)
            assert whole.sizes[1] == result[0] * result[2] * result[3]
            assert whole.sizes[2] == weights[0] == result[1]
            assert whole.sizes[3] == image[1] * weights[2] * weights[3]
            passes = node.flops / (2 * np.prod(whole.sizes))
            assert passes == pytest.approx(1.0 if not backward or image[1] == 3 else 2.0)


def test_a_convolution_takes_the_time_of_its_shape() -> None:
    shape = tuple(np.array([size]) for size in (1.0, 8 * 28.0 * 28.0, 256.0, 128 * 9.0))
    alone = convolution_time(
        A100, "bfloat16", pixels=8 * 28 * 28, in_channels=128, out_channels=256, area=9, input_pixels=0.0
    )
    flops = 2.0 * np.prod(shape)
    assert has_shape_model(A100, Kernel.CONVOLUTION)
    for passes, kernel in ((1, Kernel.CONVOLUTION), (2, Kernel.CONVOLUTION_BACKWARD)):
        found = shaped_time(A100, kernel, "bfloat16", shape, np.array([passes * flops]), np.zeros(1))
        assert found == pytest.approx(passes * float(alone))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_attention_takes_the_time_of_its_local_heads(heads: int, samples: int, *, backward: bool) -> None:
    graph = at_batch(captured("gpt2-tiny"), BATCH)
    index, whole = operators(graph, Kernel.ATTENTION, backward=backward)[0]
    count, queries, seen, size = local_kernel(
        Kernel.ATTENTION, whole.sizes, (1 / heads / samples,) * 3, local_share((0, 1), (samples, heads))
    )
    spec = graph.spec(graph.nodes[index].tensor_inputs[1 if backward else 0])
    expected = attention_time(
        A100, "bfloat16", batch=BATCH / samples, heads=spec.shape[1] / heads, key_value_heads=spec.shape[1] / heads,
        queries=queries, keys=queries, head_size=size, causal=True, backward=backward,
    )  # fmt: skip
    local = tuple(np.array([value]) for value in (count, queries, seen, size))
    flops, moved = np.array([graph.nodes[index].flops / heads / samples]), np.zeros(1)
    found = shaped_time(A100, Kernel.ATTENTION, "bfloat16", local, flops, moved)
    assert seen == pytest.approx(queries / 2)
    assert found == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("kernel", [Kernel.MATMUL, Kernel.ATTENTION])
def test_no_shape_is_faster_than_the_best_rate(kernel: Kernel) -> None:
    random = np.random.default_rng(0)
    shape = tuple(np.exp2(random.uniform(low, 14, 500)).round() for low in (0, 3, 3, 3))
    for passes in (1.0, 2.5):
        flops = (2.0 if kernel is Kernel.MATMUL else 4.0 * passes) * np.prod(shape, axis=0)
        found = shaped_time(A100, kernel, "bfloat16", shape, flops, np.zeros(500))
        assert (flops / found <= best_rate(A100, kernel, "bfloat16") * (1 + 1e-12)).all()
