"""What convolutions of ResNet-50 on 32 x 32 images take in one thread, by micro-batch, and what products would take.

    python -m benchmarks.small_convolutions [--batches 8 32]

For each shape: forward, backward, its two gradients apart, and of 1 x 1 convolutions by single steps the same as matrix
products whose rows are pixels. Milliseconds of processor time, medians; below, sums over the network.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from planner.networks.small import resnet50_small_images
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

    @property
    def is_product(self) -> bool:
        """Whether pixels are taken one by one."""
        return (self.window, self.stride, self.padding) == (1, 1, 0)


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
    """Milliseconds by what is done; without products where there are none, those of the convolution count."""
    image = torch.randn(batch, shape.inputs, shape.side, shape.side)
    weight = torch.randn(shape.outputs, shape.inputs, shape.window, shape.window)
    way = ([shape.stride] * 2, [shape.padding] * 2, [1, 1], False, [0, 0], 1)
    gradient = torch.randn_like(aten.convolution.default(image, weight, None, *way))

    def backward(*wanted: bool) -> float:
        mask = [*wanted, False]
        return measured_ms(lambda: aten.convolution_backward.default(gradient, image, weight, None, *way, mask))

    forward = measured_ms(lambda: aten.convolution.default(image, weight, None, *way))
    found = {
        "forward": forward,
        "backward": backward(True, True),
        "of the input": backward(True, False),
        "of the weight": backward(False, True),
    }
    products = shape.is_product
    found["forward as products"] = measured_ms(lambda: _product(image, weight)) if products else forward
    found["backward as products"] = (
        measured_ms(lambda: _gradients(gradient, image, weight)) if products else found["backward"]
    )
    return found


def _pixels(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).reshape(-1, image.shape[1])


def _image(pixels: Tensor, like: Tensor) -> Tensor:
    batch, _, height, width = like.shape
    return pixels.view(batch, height, width, -1).permute(0, 3, 1, 2).contiguous()


def _product(image: Tensor, weight: Tensor) -> Tensor:
    return _image(_pixels(image) @ weight.flatten(1).t(), image)


def _gradients(gradient: Tensor, image: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    pixels = _pixels(gradient)
    return _image(pixels @ weight.flatten(1), image), pixels.t() @ _pixels(image)


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
