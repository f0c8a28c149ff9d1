"""Convolutions as execution runs them and calibration times them: as matrix products where torch's kernels are slow.

With one thread, torch gives 1 x 1 convolutions by single steps of fewer than 16 samples to no library: it multiplies
sample by sample, as few columns wide as an image has pixels. oneDNN, which has the others, moves the weights to an
order of its own, and their gradient back. One product whose rows are the pixels of all samples does neither, but moves
pixels. So does the gradient of wider windows' weights as a product of what each window met, which takes a third to a
half of the time where few windows meet many weights. The gradient of an image of which windows of one pixel miss
some takes oneDNN twice as long as that of the pixels they meet. Times are those of `benchmarks.small_convolutions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten
MOST_PIXELS = 256
"""Of all samples together: from so many on moving them costs more than what products save."""
CHANNELS_BY_WINDOW = 8
"""Output channels for each place of a window, of all samples, from which the gradient of its weights is a product."""

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
    of_image, of_weight, of_bias = output_mask
    if not is_product(image, weight, stride, padding, transposed, groups):
        geometry = (stride, padding, dilation, transposed, output_padding, groups)
        if of_weight and has_few_windows(gradient, weight, dilation, transposed, groups):
            rest, product = (of_image, False, of_bias), _gradient_of_weight(gradient, image, weight, stride, padding)
            if not any(rest):
                return None, product, None
            made = aten.convolution_backward.default(gradient, image, weight, bias_sizes, *geometry, rest)
            return made[0], product, made[2]
        if of_image and misses_pixels(image, weight, stride, padding, transposed, groups):
            met = _read(image, stride).contiguous()
            made = aten.convolution_backward.default(
                gradient, met, weight, bias_sizes, [1], [0], [1], False, [0], 1, output_mask
            )
            return _unread(made[0], image, stride), made[1], made[2]
        made = aten.convolution_backward.default(gradient, image, weight, bias_sizes, *geometry, output_mask)
        return made[0], made[1], made[2]
    pixels, read = _pixels(gradient), _read(image, stride)
    return (
        _unread(_image(pixels.mm(weight.flatten(1)), read), image, stride) if of_image else None,
        pixels.t().mm(_pixels(read)).view(weight.shape) if of_weight else None,
        pixels.sum(0) if of_bias else None,
    )


def is_product(
    image: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], transposed: bool, groups: int
) -> bool:
    """Whether a convolution runs as a product: windows of a pixel, few pixels."""
    return (
        _may_be_other(image, transposed, groups)
        and prod(weight.shape[2:]) == 1
        and not any(padding)
        and 0 < image.shape[0] * prod(_read(image, stride).shape[2:]) < MOST_PIXELS
    )


def has_few_windows(gradient: Tensor, weight: Tensor, dilation: Sequence[int], transposed: bool, groups: int) -> bool:
    """Whether the gradient of the weights is a product: windows of several pixels in few places, many weights."""
    places = gradient.shape[0] * prod(gradient.shape[2:])
    return (
        _may_be_other(gradient, transposed, groups)
        and prod(weight.shape[2:]) > 1
        and max(dilation) == 1
        and 0 < CHANNELS_BY_WINDOW * places <= weight.shape[0]
    )


def misses_pixels(
    image: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], transposed: bool, groups: int
) -> bool:
    """Whether windows of one pixel miss some of the image."""
    return (
        _may_be_other(image, transposed, groups)
        and prod(weight.shape[2:]) == 1
        and max(stride) > 1
        and not any(padding)
    )


def _may_be_other(image: Tensor, transposed: bool, groups: int) -> bool:
    """One thread of a CPU, and a plain convolution."""
    return (
        image.is_cpu
        and groups == 1
        and not transposed
        and image.dtype in (torch.float32, torch.float64)
        and torch.get_num_threads() == 1
    )


def _gradient_of_weight(
    gradient: Tensor, image: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """As the product of the gradient with what each window met (places, input channels * area)."""
    dims = image.ndim - 2
    met = pad(image, [p for p in reversed([*padding] * (dims // len(padding))) for _ in range(2)])
    steps = [*stride] * (dims // len(stride))
    for dim, (size, step) in enumerate(zip(weight.shape[2:], steps, strict=True), 2):
        met = met.unfold(dim, size, step)
    rows = met.permute(0, *range(2, 2 + dims), 1, *range(2 + dims, 2 + 2 * dims)).reshape(-1, weight[0].numel())
    return _pixels(gradient).t().mm(rows).view(weight.shape)


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
