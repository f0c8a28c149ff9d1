"""Convolutions as execution runs them and calibration times them: as matrix products where torch's kernels are slow.

With one thread, torch gives 1 x 1 convolutions by single steps of fewer than 16 samples to no library: it multiplies
sample by sample, as few columns wide as an image has pixels. oneDNN, which has the others, moves the weights to an
order of its own, and their gradient back. One product whose rows are the pixels of all samples does neither, but moves
pixels. Times are those of `benchmarks.small_convolutions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

aten = torch.ops.aten
MOST_PIXELS = 256
"""Of all samples together: from so many on moving them costs more than what products save."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def convolution(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """``aten.convolution``."""
    if not is_product(image, weight, stride, padding, transposed, groups):
        made: Tensor = aten.convolution.default(
            image, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
        return made
    read = _read(image, stride)
    pixels, columns = _pixels(read), weight.flatten(1).t()
    return _image(pixels.mm(columns) if bias is None else torch.addmm(bias, pixels, columns), read)


def convolution_backward(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Gradients:
    """``aten.convolution_backward``: gradients of image, weight and bias, None of those that are not asked for."""
    if not is_product(image, weight, stride, padding, transposed, groups):
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        made: Gradients = aten.convolution_backward.default(gradient, image, weight, bias_sizes, *geometry, output_mask)
        return made
    of_image, of_weight, of_bias = output_mask
    pixels, read = _pixels(gradient), _read(image, stride)
    return (
        _unread(_image(pixels.mm(weight.flatten(1)), read), image, stride) if of_image else None,
        pixels.t().mm(_pixels(read)).view(weight.shape) if of_weight else None,
        pixels.sum(0) if of_bias else None,
    )


def is_product(
    image: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], transposed: bool, groups: int
) -> bool:
    """Whether a convolution runs as a product: one thread of a CPU, windows of a pixel, few pixels."""
    return (
        image.is_cpu
        and prod(weight.shape[2:]) == 1
        and groups == 1
        and not transposed
        and not any(padding)
        and image.dtype in (torch.float32, torch.float64)
        and 0 < image.shape[0] * prod(_read(image, stride).shape[2:]) < MOST_PIXELS
        and torch.get_num_threads() == 1
    )


def _read(image: Tensor, stride: Sequence[int]) -> Tensor:
    """The pixels that a window meets as it goes by `stride`."""
    if max(stride) == 1:
        return image
    steps = [*stride] * (image.ndim - 2) if len(stride) == 1 else stride
    return image[(slice(None), slice(None), *(slice(None, None, step) for step in steps))]


def _unread(read: Tensor, image: Tensor, stride: Sequence[int]) -> Tensor:
    """Of the size of `image`, with zeros where no window was."""
    if max(stride) == 1:
        return read
    whole = torch.zeros_like(image, memory_format=torch.contiguous_format)
    _read(whole, stride).copy_(read)
    return whole


def _pixels(image: Tensor) -> Tensor:
    """Pixels of all samples in rows (samples * pixels, channels)."""
    return image.flatten(2).transpose(1, 2).reshape(-1, image.shape[1])


def _image(pixels: Tensor, like: Tensor) -> Tensor:
    """Images (samples, channels, ...) of rows of pixels, as many and as large as `like`."""
    samples, channels, *sizes = like.shape[0], pixels.shape[1], *like.shape[2:]
    if prod(sizes) > 1:
        pixels = pixels.view(samples, -1, channels).transpose(1, 2).contiguous()
    return pixels.view(samples, channels, *sizes)
