"""Networks of depthwise convolutions for small devices: MobileNet, EfficientNet, MnasNet, ShuffleNet, GhostNet."""

from __future__ import annotations

from planner.estimate.layered.builder import NetworkBuilder, divisible
from planner.estimate.training_run import LayeredNetwork

CLASSES = 1000


def mobilenet_v1(name: str, side: int, width: float) -> LayeredNetwork:
    """MobileNet (arXiv:1704.04861): depthwise and 1x1 convolutions in turn."""
    net = NetworkBuilder(3, side, side).unit(int(32 * width), 3, 2)
    mobilenet_v1_body(net, width)
    net.global_pool().linear(CLASSES)
    return net.finish(name)


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
    net.unit(divisible(1280 * max(1.0, width)), 1).global_pool().linear(CLASSES)
    return net.finish(name)


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
    net.linear(divisible((1280 if large else 1024) * max(width, 1.0))).smooth().linear(CLASSES)
    return net.finish(name)
