"""Batch norm as execution runs it and calibration times it: on rows of pixels where torch's kernel is slow.

torch's gradient on a CPU goes through each image of a channel a vector at a time, and through those shorter than a
vector a number at a time: 2 x 2 pixels take five times as long as 4 x 4. Laid in rows, a pixel of all channels each,
they are vectors again, which costs moving gradient and values there and the result back.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

aten = torch.ops.aten
FEWEST_PIXELS, MOST_PIXELS = 2, 7
"""Of an image: a single pixel is a row as it is, and eight are a vector."""
FEWEST_SAMPLES, FEWEST_NUMBERS = 4, 4096
"""Below, moving costs as much as it saves."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def batch_norm_backward(
    gradient: Tensor,
    values: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    mean: Tensor | None,
    deviation: Tensor | None,
    training: bool,
    epsilon: float,
    output_mask: Sequence[bool],
) -> Gradients:
    """``aten.native_batch_norm_backward``: gradients of values, weight and bias, None of those not asked for."""
    rest = (weight, running_mean, running_variance, mean, deviation, training, epsilon, output_mask)
    if not in_rows(values):
        made: Gradients = aten.native_batch_norm_backward.default(gradient, values, *rest)
        return made
    of_rows, of_weight, of_bias = aten.native_batch_norm_backward.default(_rows(gradient), _rows(values), *rest)
    return _images(of_rows, values) if output_mask[0] else None, of_weight, of_bias


def in_rows(values: Tensor) -> bool:
    """Whether the gradient is worked out on rows: on a CPU, of many small images."""
    return (
        values.is_cpu
        and FEWEST_PIXELS <= prod(values.shape[2:]) <= MOST_PIXELS
        and values.shape[0] >= FEWEST_SAMPLES
        and values.numel() >= FEWEST_NUMBERS
        and values.dtype in (torch.float32, torch.float64)
        and values.is_contiguous()
    )


def _rows(images: Tensor) -> Tensor:
    """Pixels of all samples in rows (samples * pixels, channels)."""
    return images.flatten(2).transpose(1, 2).reshape(-1, images.shape[1])


def _images(rows: Tensor, like: Tensor) -> Tensor:
    """Images (samples, channels, ...) of rows of pixels, of the shape of `like`."""
    return rows.view(like.shape[0], -1, like.shape[1]).transpose(1, 2).contiguous().view(like.shape)
