"""Residual networks: ResNet and what was built on its blocks, VGG, AlexNet, RegNet, RepVGG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.training_run import LayeredNetwork
from planner.published.layered.builder import NetworkBuilder

CLASSES = 1000
DEPTHS = {
    18: (2, 2, 2, 2),
    26: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    269: (3, 30, 48, 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualForm:
    """How the blocks of a ResNet differ from the plain ones (arXiv:1512.03385).

    ``groups`` and ``base_width`` are ResNeXt's (arXiv:1611.05431), ``width`` multiplies inner channels
    (Wide-ResNet, arXiv:1605.07146), ``outer`` all channels (BiT), ``reduction`` above 0 adds squeeze and
    excitation, ``scales`` above 1 splits the middle convolution (Res2Net, arXiv:1904.01169) and ``radix``
    that of ResNeSt. ``preactivated`` norms stand before their convolutions (ResNetV2, arXiv:1603.05027),
    ``grouped_norms`` sum over groups of the channels of one image (BiT, arXiv:1912.11370).
    """

    groups: int = 1
    base_width: int = 64
    width: float = 1.0
    outer: int = 1
    reduction: int = 0
    scales: int = 1
    preactivated: bool = False
    grouped_norms: bool = False
    deep_stem: bool = False
    basic: bool = False
    selective: bool = False


def resnet(name: str, depth: int, side: int, form: ResidualForm) -> LayeredNetwork:
    """ResNet v1.5 of `depth` layers: the stride of a block is in its 3x3 convolution."""
    net = NetworkBuilder(3, side, side, tokens=form.grouped_norms)
    stem(net, form)
    for stage, blocks in enumerate(DEPTHS[depth]):
        channels = 64 * 2**stage * form.outer
        for index in range(blocks):
            stride = 2 if stage and not index else 1
            if form.preactivated:
                preactivated_block(net, channels, stride, first=not index)
            elif form.basic:
                basic_block(net, channels, stride, form)
            else:
                bottleneck(net, channels, stride, form, first=not index)
    if form.preactivated:
        net.norm().relu()
    return net.global_pool().linear(CLASSES).finish(name)


def stem(net: NetworkBuilder, form: ResidualForm) -> None:
    """First convolutions and pooling, down to a quarter of the image's side."""
    width = 64 * form.outer
    if form.deep_stem:
        net.unit(32, 3, 2).unit(32).unit(64)
    elif form.preactivated:
        net.convolution(width, 7, 2)
    else:
        net.unit(width, 7, 2)
    net.pool(3, 2)


def bottleneck(net: NetworkBuilder, channels: int, stride: int, form: ResidualForm, *, first: bool = False) -> None:
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the output has four times `channels`."""
    inner = int(channels * form.base_width / 64 * form.width) * form.groups * form.scales
    inputs = net.channels
    with net.branch():
        if inputs != 4 * channels or stride > 1:
            net.unit(4 * channels, 1, stride, activation="")
    net.unit(inner, 1)
    if form.scales > 1:
        scaled_middle(net, inner // form.scales, stride, form.scales, first=first)
    else:
        net.unit(inner, 3, stride, groups=form.groups)
    net.unit(4 * channels, 1, activation="")
    if form.reduction:
        net.squeeze_excite(4 * channels // form.reduction, dense=True)
    net.add().relu()


def scaled_middle(net: NetworkBuilder, width: int, stride: int, scales: int, *, first: bool) -> None:
    """Res2Net's chain of ``scales - 1`` convolutions of `width` channels, the last slice passed or pooled."""
    size = net.size
    for index in range(scales - 1):
        net.become(width, *size)
        if index and not first:
            net.add()
        net.unit(width, 3, stride)
    if first:
        net.become(width, *size).pool(3, stride)
    net.concatenate(width * scales)


def basic_block(net: NetworkBuilder, channels: int, stride: int, form: ResidualForm) -> None:
    """Two 3x3 convolutions around a shortcut."""
    inputs = net.channels
    with net.branch():
        if inputs != channels or stride > 1:
            net.unit(channels, 1, stride, activation="")
    if form.selective:
        selective_kernel(net, channels, stride)
    else:
        net.unit(channels, 3, stride)
    net.unit(channels, 3, activation="")
    if form.reduction:
        net.squeeze_excite(channels // form.reduction, dense=True)
    net.add().relu()


def selective_kernel(net: NetworkBuilder, channels: int, stride: int) -> None:
    """Two 3x3 convolutions, one dilated, weighted by channel (SKNet, arXiv:1903.06586, split over channels)."""
    half = net.channels // 2
    size = net.size
    for dilation in (1, 2):
        net.become(half, *size).unit(channels, 3, stride, dilation=dilation)
    net.add()
    hidden = max(channels // 16, 32)
    with net.branch():
        net.global_pool().convolution(hidden, 1).norm().relu().convolution(2 * channels, 1)
    net.scale().add()


def preactivated_block(net: NetworkBuilder, channels: int, stride: int, *, first: bool) -> None:
    """Norm and ReLU before each of the three convolutions; the shortcut starts after the first norm."""
    net.norm().relu()
    with net.branch():
        if first:
            net.convolution(4 * channels, 1, stride)
    net.unit(channels, 1).unit(channels, 3, stride).convolution(4 * channels, 1).add()


def vgg(name: str, stages: Sequence[int], side: int, *, norms: bool = False) -> LayeredNetwork:
    """VGG (arXiv:1409.1556): `stages` of 3x3 convolutions between poolings, then three dense layers."""
    net = NetworkBuilder(3, side, side)
    for channels, count in zip((64, 128, 256, 512, 512), stages, strict=True):
        for _ in range(count):
            net.convolution(channels, 3, bias=True)
            if norms:
                net.norm()
            net.relu()
        net.pool(2, 2, 0)
    return net.become(512 * 7 * 7, 1).linear(4096).relu().linear(4096).relu().linear(CLASSES).finish(name)


def alexnet(name: str, side: int) -> LayeredNetwork:
    """AlexNet in one column (arXiv:1404.5997)."""
    net = NetworkBuilder(3, side, side)
    net.convolution(64, 11, 4, bias=True, padding=2).relu().pool(3, 2, 0)
    net.convolution(192, 5, bias=True).relu().pool(3, 2, 0)
    for channels in (384, 256, 256):
        net.convolution(channels, 3, bias=True).relu()
    return net.pool(3, 2, 0).become(256 * 6 * 6, 1).linear(4096).relu().linear(4096).relu().linear(CLASSES).finish(name)


def regnet(
    name: str, side: int, initial: int, slope: float, step: float, depth: int, group: int, *, excite: bool
) -> LayeredNetwork:
    """RegNet (arXiv:2003.13678): widths grow linearly by `slope` and are rounded to powers of `step`."""
    widths = []
    for index in range(depth):
        power = round(math.log((initial + slope * index) / initial) / math.log(step))
        widths.append(int(round(initial * step**power / 8) * 8))
    net = NetworkBuilder(3, side, side).unit(32, 3, 2)
    previous = 0
    for width in widths:
        stride = 2 if width != previous else 1
        fitted = min(group, width)
        regnet_block(net, int(round(width / fitted) * fitted), fitted, stride, excite=excite)
        previous = width
    return net.global_pool().linear(CLASSES).finish(name)


def regnet_block(net: NetworkBuilder, width: int, group: int, stride: int, *, excite: bool) -> None:
    """A bottleneck that narrows nothing, with groups of `group` channels."""
    inputs = net.channels
    with net.branch():
        if inputs != width or stride > 1:
            net.unit(width, 1, stride, activation="")
    net.unit(width, 1).unit(width, 3, stride, groups=width // group)
    if excite:
        net.squeeze_excite(round(inputs / 4))
    net.unit(width, 1, activation="").add().relu()


def repvgg(name: str, side: int, blocks: Sequence[int], width: float, last: float, groups: int = 1) -> LayeredNetwork:
    """RepVGG in training form (arXiv:2101.03697): 3x3, 1x1 and identity, each normalised, added and activated.

    ``groups`` hold in every second layer.
    """
    net = NetworkBuilder(3, side, side)
    repvgg_block(net, min(64, int(64 * width)), 2, 1)
    layer = 1
    for stage, count in enumerate(blocks):
        channels = int(64 * 2**stage * (last if stage == 3 else width))
        for index in range(count):
            repvgg_block(net, channels, 1 if index else 2, groups if layer % 2 == 0 else 1)
            layer += 1
    return net.global_pool().linear(CLASSES).finish(name)


def repvgg_block(net: NetworkBuilder, channels: int, stride: int, groups: int) -> None:
    """Parallel branches of one RepVGG layer."""
    if net.channels == channels and stride == 1:
        with net.branch():
            net.norm()
        with net.branch():
            net.add()
    with net.branch():
        net.unit(channels, 1, stride, groups=groups, activation="")
    net.unit(channels, 3, stride, groups=groups, activation="").add().relu()
