"""Batch norm as execution runs it and calibration times it: otherwise than torch's kernels where these are slow.

torch's gradient on a CPU goes through each image of a channel a vector at a time, and through those shorter than a
vector a number at a time: 2 x 2 pixels take five times as long as 4 x 4. Laid in rows, a pixel of all channels each,
they are vectors again, which costs moving gradient and values there and the result back.

Forward it goes through every image twice for the statistics, a number at a time in float64. Its gradient's sums, of a
gradient that is the values themselves, are what the statistics need, in one pass and by vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import batch_norm as normalised

aten = torch.ops.aten
FEWEST_PIXELS, MOST_PIXELS = 2, 7
"""Of an image: a single pixel is a row as it is, and eight are a vector."""
FEWEST_SAMPLES, FEWEST_NUMBERS = 4, 4096
"""Below, moving costs as much as it saves."""

FEWEST_TO_SUM = 131072
"""Numbers below which what is done by channel costs more than going through them by vectors saves."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
Total = Callable[[Tensor], Tensor]
"""Sums over the ranks that share a batch."""


def batch_norm(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten._native_batch_norm_legit.no_stats``: the result, and means and inverse deviations of channels."""
    if not by_sums(values):
        made: tuple[Tensor, Tensor, Tensor] = aten._native_batch_norm_legit.no_stats(
            values, weight, bias, True, 0.0, epsilon
        )
        return made
    result, mean, deviation, _ = batch_norm_among(values, weight, bias, epsilon, None, 1)
    return result, mean, deviation


def batch_norm_among(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, total: Total | None, ranks: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    r"""Batch norm with statistics over the ranks that share a batch, each with as many samples.

    Every rank contributes :math:`m_i` and :math:`m_i^2 + v_i`, mean and mean square of its own part, in float64, so
    that one message is enough: the difference in :math:`\sigma^2 = Q - \mu^2` costs a relative error of
    :math:`10^{-16} \mu^2 / \sigma^2`.

    Returns
    -------
    result, mean, deviation : of the values' dtype, as torch's operator returns them; the deviations inverse
    statistics : mean and variance of every channel, in float64
    """
    single = values if values.dtype in (torch.float32, torch.float64) else values.float()
    moments = _moments(single)
    if total is not None:
        moments = total(moments) * (1.0 / ranks)
    mean, square = moments.unbind()
    variance = torch.addcmul(square, mean, mean, value=-1.0).clamp_(min=0.0)
    kept = values.dtype if weight is None else weight.dtype
    narrow = mean.to(kept)
    result = normalised(values, narrow, variance.to(kept), weight, bias, False, 0.0, epsilon)
    # torch's kernels save float32 on accelerators, the parameters' dtype on CPU, and want it back so.
    save = kept if values.device.type == "cpu" else single.dtype
    deviation = (variance + epsilon).rsqrt_().to(save)
    return result, narrow.to(save), deviation, (mean, variance)


def _moments(values: Tensor) -> Tensor:
    """Mean and mean square of every channel (2, channels), in float64."""
    if not by_sums(values):
        mean, variance = _statistics(values)
        moments = torch.stack((mean, variance)).double()
        moments[1].addcmul_(moments[0], moments[0])
        return moments
    # Of the distance to the mean of a sample, which is near, little is lost in differences of sums.
    near = values[0].flatten(1).mean(1)
    apart = values - near.view([-1] + [1] * (values.ndim - 2))
    nothing, one = torch.zeros_like(near), torch.ones_like(near)
    _, squares, sums = aten.native_batch_norm_backward.default(
        apart, apart, None, None, None, nothing, one, True, 0.0, [False, True, True]
    )
    moments = torch.stack((sums, squares)).double().mul_(values.shape[1] / values.numel())
    distance, square = moments.unbind()
    before = distance.clone()
    distance += near
    square.addcmul_(near, before.add_(distance))
    return moments


def _statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and mean squared deviation of every channel (channels,)."""
    if values.device.type == "cpu":  # a third of the time of `var_mean`, which does not know that channels lie apart
        mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
        return mean, variance
    variance, mean = torch.var_mean(values, [d for d in range(values.ndim) if d != 1], correction=0)
    return mean, variance


def by_sums(values: Tensor) -> bool:
    """Whether statistics are worked out by vectors: on a CPU, of many numbers in images of a vector and more."""
    return by_vectors(values) and values.numel() >= FEWEST_TO_SUM


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


def batch_norm_backward_among(
    gradient: Tensor,
    values: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    epsilon: float,
    output_mask: Sequence[bool],
    total: Total,
    ranks: int,
) -> Gradients:
    r"""Gradients of `batch_norm_among`, given what it returns.

    With :math:`S_1 = \sum g` and :math:`S_2 = \sum g \hat x` over the whole batch,
    :math:`dx = w \sigma^{-1} (g - S_1 / N - \hat x S_2 / N)`; :math:`S_2` and :math:`S_1` also are the gradients of
    weight and bias.
    """
    _, product, plain = batch_norm_backward(
        gradient, values, weight, None, None, mean, deviation, True, epsilon, [False, True, True]
    )
    assert product is not None
    assert plain is not None
    sums = total(torch.stack((product, plain)))
    product, plain = sums.unbind()
    if not output_mask[0]:
        return None, product, plain
    factor = deviation if weight is None else deviation * weight
    count = values.numel() // values.shape[1] * ranks
    slope, shift = (sums * (factor / -count)).unbind()
    slope = slope * deviation
    wide = [1, -1] + [1] * (values.ndim - 2)
    if by_vectors(values):
        one = torch.ones_like(slope)
        moved = normalised(values, mean, one, slope, shift, False, 0.0, 0.0)
    else:
        shift = torch.addcmul(shift, slope, mean, value=-1.0)
        shift, slope = (part.to(values.dtype).view(wide) for part in (shift, slope))
        moved = torch.addcmul(shift, values, slope)
    return moved.addcmul_(gradient, factor.to(values.dtype).view(wide)), product, plain


def by_vectors(values: Tensor) -> bool:
    """Whether torch goes through images a vector at a time: on a CPU, of eight pixels and more."""
    return (
        values.is_cpu
        and prod(values.shape[2:]) > MOST_PIXELS
        and values.dtype in (torch.float32, torch.float64)
        and values.is_contiguous()
    )


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
