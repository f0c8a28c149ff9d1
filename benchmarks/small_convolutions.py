"""What convolutions of ResNet-50 on 32 x 32 images take in one thread, by micro-batch: as torch runs them, as executed.

    python -m benchmarks.small_convolutions [--batches 8 32]

For each shape: forward, backward and its two gradients apart, by torch's operators and by those that plans run
(`simulator.calibration.convolutions`). Milliseconds of processor time, medians; below, sums over the network.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from planner.networks.small import resnet50_small_images
from simulator.calibration.convolutions import convolution, convolution_backward
from simulator.calibration.process import keep_large_blocks

REPETITIONS, WARM_UP = 7, 2
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Shape:
    """Channels in and out, side of the image, window, stride and padding of a convolution."""

    inputs: int
    outputs: int
    side: int
    window: int
    stride: int
    padding: int


def shapes() -> Counter[Shape]:
    """The network's convolutions, with how many there are of each."""
    found: Counter[Shape] = Counter()
    network, inputs = resnet50_small_images()

    def count(module: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        window, stride, padding = (int(pair[0]) for pair in (module.kernel_size, module.stride, module.padding))
        found[Shape(module.in_channels, module.out_channels, given[0].shape[-1], window, stride, padding)] += 1

    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    with torch.no_grad():
        network(*inputs)
    return found


def measured_ms(work: Callable[[], object]) -> float:
    """Median processor time."""
    taken = []
    for _ in range(WARM_UP + REPETITIONS):
        begun = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - begun))
    return float(np.median(taken[WARM_UP:]))


def times_ms(shape: Shape, batch: int) -> dict[str, float]:
    """Milliseconds by what is done and by whom."""
    image = torch.randn(batch, shape.inputs, shape.side, shape.side)
    weight = torch.randn(shape.outputs, shape.inputs, shape.window, shape.window)
    way = ([shape.stride] * 2, [shape.padding] * 2, [1, 1], False, [0, 0], 1)
    gradient = torch.randn_like(aten.convolution.default(image, weight, None, *way))
    found = {}
    for whose, forward, backward in (
        ("torch's", aten.convolution.default, aten.convolution_backward.default),
        ("executed", convolution, convolution_backward),
    ):
        found[f"{whose} forward"] = measured_ms(partial(forward, image, weight, None, *way))
        for what, mask in (
            ("backward", [True, True, False]),
            ("gradient of the image", [True, False, False]),
            ("gradient of the weight", [False, True, False]),
        ):
            found[f"{whose} {what}"] = measured_ms(partial(backward, gradient, image, weight, None, *way, mask))
    return found


def main() -> None:
    """Print a line for every shape and batch, then the sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 32])
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_large_blocks()
    for batch in given.batches:
        sums: defaultdict[str, float] = defaultdict(float)
        for shape, count in shapes().items():
            found = times_ms(shape, batch)
            told = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
            sys.stdout.write(f"{batch} x {shape}, {count} times: {told}\n")
            for name, value in found.items():
                sums[name] += count * value
        told = ", ".join(f"{name} {value:.0f}" for name, value in sums.items())
        sys.stdout.write(f"batch {batch}, all: {told}\n")


if __name__ == "__main__":
    main()
