"""Networks of depthwise convolutions for small devices: MobileNet, EfficientNet, MnasNet, ShuffleNet, GhostNet."""

from __future__ import annotations

import math

from planner.cost.training_run import LayeredNetwork
from planner.published.layered.builder import NetworkBuilder, divisible

CLASSES = 1000


def mobilenet_v1(name: str, side: int, width: float) -> LayeredNetwork:
    """MobileNet (arXiv:1704.04861): depthwise and 1x1 convolutions in turn."""
    net = NetworkBuilder(3, side, side).unit(int(32 * width), 3, 2)
    mobilenet_v1_body(net, width)
    return net.global_pool().linear(CLASSES).finish(name)


def mobilenet_v1_body(net: NetworkBuilder, width: float) -> None:
    """The thirteen depthwise pairs of MobileNet."""
    pairs = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for channels, stride in pairs:
        net.depthwise(3, stride).unit(int(channels * width), 1)


def inverted(
    net: NetworkBuilder,
    channels: int,
    expanded: int,
    kernel: int,
    stride: int,
    *,
    squeeze: int = 0,
    activation: str = "relu",
    always_expand: bool = False,
    smooth_squeeze: bool = False,
) -> None:
    """An inverted bottleneck (MobileNetV2, arXiv:1801.04381): widen, depthwise, narrow, around a shortcut."""
    inputs = net.channels
    if expanded != inputs or always_expand:
        net.unit(expanded, 1, activation=activation)
    net.depthwise(kernel, stride, activation=activation)
    if squeeze:
        net.squeeze_excite(squeeze, smooth=smooth_squeeze)
    net.unit(channels, 1, activation="")
    if inputs == channels and stride == 1:
        net.add()


def mobilenet_v2(name: str, side: int, width: float) -> LayeredNetwork:
    """MobileNetV2 (arXiv:1801.04381)."""
    net = NetworkBuilder(3, side, side)
    mobilenet_v2_body(net, width)
    return net.unit(divisible(1280 * max(1.0, width)), 1).global_pool().linear(CLASSES).finish(name)


def mobilenet_v2_body(net: NetworkBuilder, width: float) -> None:
    """Stem and inverted bottlenecks of MobileNetV2."""
    net.unit(divisible(32 * width), 3, 2)
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, channels, count, stride in rows:
        for index in range(count):
            inverted(net, divisible(channels * width), expansion * net.channels, 3, 1 if index else stride)


V3_SMALL = (
    (3, 16, 16, True, "relu", 2),
    (3, 72, 24, False, "relu", 2),
    (3, 88, 24, False, "relu", 1),
    (5, 96, 40, True, "smooth", 2),
    (5, 240, 40, True, "smooth", 1),
    (5, 240, 40, True, "smooth", 1),
    (5, 120, 48, True, "smooth", 1),
    (5, 144, 48, True, "smooth", 1),
    (5, 288, 96, True, "smooth", 2),
    (5, 576, 96, True, "smooth", 1),
    (5, 576, 96, True, "smooth", 1),
)
V3_LARGE = (
    (3, 16, 16, False, "relu", 1),
    (3, 64, 24, False, "relu", 2),
    (3, 72, 24, False, "relu", 1),
    (5, 72, 40, True, "relu", 2),
    (5, 120, 40, True, "relu", 1),
    (5, 120, 40, True, "relu", 1),
    (3, 240, 80, False, "smooth", 2),
    (3, 200, 80, False, "smooth", 1),
    (3, 184, 80, False, "smooth", 1),
    (3, 184, 80, False, "smooth", 1),
    (3, 480, 112, True, "smooth", 1),
    (3, 672, 112, True, "smooth", 1),
    (5, 672, 160, True, "smooth", 2),
    (5, 960, 160, True, "smooth", 1),
    (5, 960, 160, True, "smooth", 1),
)


def mobilenet_v3(name: str, side: int, width: float, *, large: bool) -> LayeredNetwork:
    """MobileNetV3 (arXiv:1905.02244): `(kernel, expanded, channels, squeeze, activation, stride)` a block."""
    net = NetworkBuilder(3, side, side).unit(divisible(16 * width), 3, 2, activation="smooth")
    rows = V3_LARGE if large else V3_SMALL
    for kernel, expanded, channels, squeeze, activation, stride in rows:
        wide = divisible(expanded * width)
        inverted(
            net, divisible(channels * width), wide, kernel, stride,
            squeeze=divisible(wide / 4) if squeeze else 0, activation=activation,
        )  # fmt: skip
    net.unit(6 * net.channels, 1, activation="smooth").global_pool()
    return net.linear(divisible((1280 if large else 1024) * max(width, 1.0))).smooth().linear(CLASSES).finish(name)


EFFICIENTNET = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
EFFICIENTNET_SCALES = (
    (1.0, 1.0, 224),
    (1.0, 1.1, 240),
    (1.1, 1.2, 260),
    (1.2, 1.4, 300),
    (1.4, 1.8, 380),
    (1.6, 2.2, 456),
    (1.8, 2.6, 528),
    (2.0, 3.1, 600),
)


def augmented_area(side: int) -> float:
    """How many times as long the host works on an augmented image as on one of 224 pixels a side.

    Three eighths of the work on the latter is reading, which depends on the file; the rest depends on the pixels.
    """
    return 3 / 8 + 5 / 8 * (side / 224) ** 2


def efficientnet(name: str, side: int, width: float, depth: float, *, wide_squeeze: bool = False) -> LayeredNetwork:
    """EfficientNet (arXiv:1905.11946); ``wide_squeeze`` squeezes from the expanded channels, not the block's input."""
    net = NetworkBuilder(3, side, side)
    efficientnet_body(net, width, depth, wide_squeeze=wide_squeeze)
    net.unit(divisible(1280 * width), 1, activation="smooth").global_pool().linear(CLASSES)
    return net.finish(name, "augmented image", area=augmented_area(side))


def efficientnet_body(
    net: NetworkBuilder, width: float, depth: float, *, wide_squeeze: bool = False
) -> list[tuple[int, int]]:
    """Stem and blocks; returned are `(channels, side)` after every stage."""
    net.unit(divisible(32 * width), 3, 2, activation="smooth")
    stages = []
    for expansion, channels, count, stride, kernel in EFFICIENTNET:
        for index in range(math.ceil(count * depth)):
            expanded = expansion * net.channels
            inverted(
                net,
                divisible(channels * width),
                expanded,
                kernel,
                1 if index else stride,
                squeeze=max(1, (expanded if wide_squeeze else net.channels) // 4),
                activation="smooth",
                smooth_squeeze=True,
            )
        stages.append((net.channels, net.size[0]))
    return stages


EFFICIENTNET_V2_S = (
    (True, 1, 24, 2, 1),
    (True, 4, 48, 4, 2),
    (True, 4, 64, 4, 2),
    (False, 4, 128, 6, 2),
    (False, 6, 160, 9, 1),
    (False, 6, 256, 15, 2),
)


def efficientnet_v2_s(name: str, side: int) -> LayeredNetwork:
    """EfficientNetV2-S (arXiv:2104.00298): the early blocks are plain convolutions."""
    net = NetworkBuilder(3, side, side).unit(24, 3, 2, activation="smooth")
    for fused, expansion, channels, count, stride in EFFICIENTNET_V2_S:
        for index in range(count):
            inputs, step = net.channels, 1 if index else stride
            if not fused:
                inverted(
                    net, channels, expansion * inputs, 3, step,
                    squeeze=inputs // 4, activation="smooth", smooth_squeeze=True,
                )  # fmt: skip
                continue
            net.unit(expansion * inputs if expansion > 1 else channels, 3, step, activation="smooth")
            if expansion > 1:
                net.unit(channels, 1, activation="")
            if inputs == channels and step == 1:
                net.add()
    net.unit(1280, 1, activation="smooth").global_pool().linear(CLASSES)
    return net.finish(name, "augmented image", area=augmented_area(side))


def mnasnet(name: str, side: int, width: float) -> LayeredNetwork:
    """MnasNet-B1 (arXiv:1807.11626)."""
    net = NetworkBuilder(3, side, side).unit(divisible(32 * width), 3, 2)
    net.depthwise().unit(divisible(16 * width), 1, activation="")
    rows = (
        (24, 3, 2, 3, 3),
        (40, 5, 2, 3, 3),
        (80, 5, 2, 6, 3),
        (96, 3, 1, 6, 2),
        (192, 5, 2, 6, 4),
        (320, 3, 1, 6, 1),
    )
    for channels, kernel, stride, expansion, count in rows:
        for index in range(count):
            inverted(net, divisible(channels * width), expansion * net.channels, kernel, 1 if index else stride)
    return net.unit(1280, 1).global_pool().linear(CLASSES).finish(name)


SHUFFLENET_V1_WIDTHS = {1: 144, 2: 200, 3: 240, 4: 272, 8: 384}
SHUFFLENET_V2_WIDTHS = {
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}


def shufflenet_v1(name: str, side: int, groups: int, width: float) -> LayeredNetwork:
    """ShuffleNet (arXiv:1707.01083): grouped 1x1 convolutions with a shuffle between them."""
    net = NetworkBuilder(3, side, side).unit(24 if width >= 1 else 12, 3, 2).pool(3, 2)
    for stage, count in enumerate((4, 8, 4)):
        channels = int(SHUFFLENET_V1_WIDTHS[groups] * width) * 2**stage
        for index in range(count):
            first = not index
            grouped = 1 if first and not stage else groups
            narrow = channels - net.channels if first else channels
            if first:
                with net.branch():
                    net.pool(3, 2)
            net.unit(channels // 4, 1, groups=grouped).copy()
            net.depthwise(3, 2 if first else 1, activation="").unit(narrow, 1, groups=groups, activation="")
            (net.concatenate(channels) if first else net.add()).relu()
    return net.global_pool().linear(CLASSES).finish(name)


def shufflenet_v2(name: str, side: int, width: float) -> LayeredNetwork:
    """ShuffleNetV2 (arXiv:1807.11164): half of the channels pass by, all are shuffled."""
    net = NetworkBuilder(3, side, side).unit(24, 3, 2).pool(3, 2)
    *widths, last = SHUFFLENET_V2_WIDTHS[width]
    for channels, count in zip(widths, (4, 8, 4), strict=True):
        half = channels // 2
        with net.branch():
            net.depthwise(3, 2, activation="").unit(half, 1)
        net.unit(half, 1).depthwise(3, 2, activation="").unit(half, 1).concatenate(channels).copy()
        for _ in range(count - 1):
            net.become(half).unit(half, 1).depthwise(3, 1, activation="").unit(half, 1).concatenate(channels).copy()
    return net.unit(last, 1).global_pool().linear(CLASSES).finish(name)


def squeezenet(name: str, side: int, *, small: bool) -> LayeredNetwork:
    """SqueezeNet 1.0, or 1.1 (`small`; arXiv:1602.07360)."""
    net = NetworkBuilder(3, side, side)
    if small:
        net.convolution(64, 3, 2, bias=True, padding=0).relu().pool(3, 2, 0)
    else:
        net.convolution(96, 7, 2, bias=True, padding=0).relu().pool(3, 2, 0)
    pooled = (2, 4) if small else (3, 7)
    for index, (squeeze, expand) in enumerate(
        ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    ):
        if index in pooled:
            net.pool(3, 2, 0)
        net.convolution(squeeze, 1, bias=True).relu()
        with net.branch():
            net.convolution(expand, 1, bias=True).relu()
        net.convolution(expand, 3, bias=True).relu().concatenate(2 * expand)
    return net.convolution(CLASSES, 1, bias=True).relu().global_pool().finish(name)


GHOSTNET = (
    (3, 16, 16, False, 1),
    (3, 48, 24, False, 2),
    (3, 72, 24, False, 1),
    (5, 72, 40, True, 2),
    (5, 120, 40, True, 1),
    (3, 240, 80, False, 2),
    (3, 200, 80, False, 1),
    (3, 184, 80, False, 1),
    (3, 184, 80, False, 1),
    (3, 480, 112, True, 1),
    (3, 672, 112, True, 1),
    (5, 672, 160, True, 2),
    (5, 960, 160, False, 1),
    (5, 960, 160, True, 1),
    (5, 960, 160, False, 1),
    (5, 960, 160, True, 1),
)


def ghostnet(name: str, side: int, width: float) -> LayeredNetwork:
    """GhostNet (arXiv:1911.11907): half of the features from 1x1 convolutions, half from depthwise ones of these."""
    net = NetworkBuilder(3, side, side).unit(divisible(16 * width, 4), 3, 2)
    for kernel, expanded, channels, squeeze, stride in GHOSTNET:
        wide, narrow = divisible(expanded * width, 4), divisible(channels * width, 4)
        with net.branch():
            if stride > 1 or net.channels != narrow:
                net.depthwise(kernel, stride, activation="").unit(narrow, 1, activation="")
        ghost(net, wide, "relu")
        if stride > 1:
            net.depthwise(kernel, stride, activation="")
        if squeeze:
            net.squeeze_excite(divisible(wide / 4, 4))
        ghost(net, narrow, "")
        net.add()
    net.unit(divisible(960 * width, 4), 1).global_pool().linear(1280).relu().linear(CLASSES)
    return net.finish(name, "augmented image")


def ghost(net: NetworkBuilder, channels: int, activation: str) -> None:
    """One ghost module."""
    half = math.ceil(channels / 2)
    net.unit(half, 1, activation=activation).depthwise(activation=activation).concatenate(channels)


def rexnet(name: str, side: int, width: float) -> LayeredNetwork:
    """ReXNet (arXiv:2007.00992): channels grow by the same step from block to block."""
    net = NetworkBuilder(3, side, side).unit(round(32 * width), 3, 2, activation="smooth")
    strides = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    for index, stride in enumerate(strides):
        inputs, channels = net.channels, round((16 + 11.25 * index) * width)
        expanded = inputs * (6 if index else 1)
        if index:
            net.unit(expanded, 1, activation="smooth")
        net.depthwise(3, stride, activation="")
        if index >= 3:
            net.squeeze_excite(expanded // 12)
        net.relu().unit(channels, 1, activation="")
        if stride == 1 and inputs <= channels:
            net.add()
    net.unit(int(1280 * width), 1, activation="smooth").global_pool().linear(CLASSES)
    return net.finish(name, "augmented image")
