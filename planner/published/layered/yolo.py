"""The YOLO networks: Darknet-53, and cross-stage-partial backbones with a path aggregation neck."""

from __future__ import annotations

from itertools import pairwise

from planner.cost.training_run import LayeredNetwork
from planner.published.layered.builder import NetworkBuilder

SAMPLE = "mosaic image"
USUAL_SIDE = 640
CLASSES = 80
SCALES = {
    "n": (0.25, 1 / 3),
    "t": (0.375, 1 / 3),
    "tiny": (0.375, 1 / 3),
    "s": (0.5, 1 / 3),
    "m": (0.75, 2 / 3),
    "l": (1.0, 1.0),
    "x": (1.25, 4 / 3),
}


def unit(net: NetworkBuilder, channels: int, kernel: int = 3, stride: int = 1) -> NetworkBuilder:
    """Convolution, batch norm, SiLU."""
    return net.unit(channels, kernel, stride, activation="smooth")


def darknet53(name: str, side: int) -> LayeredNetwork:
    """YOLOv3 (arXiv:1804.02767): residual backbone, three scales."""
    net = NetworkBuilder(3, side, side)
    unit(net, 32)
    features = _darknet_backbone(net)
    carried = 0
    for level, channels in enumerate((512, 256, 128)):
        inputs, size = features[-1 - level]
        net.become(inputs + carried, *size)
        if carried:
            net.concatenate(inputs + carried)
        for _ in range(2):
            unit(unit(net, channels, 1), 2 * channels)
        unit(net, channels, 1)
        with net.branch():
            unit(net, 2 * channels).convolution(3 * (5 + CLASSES), 1, bias=True)
        if level < 2:
            unit(net, channels // 2, 1).upsample()
            carried = channels // 2
    return net.finish(name, SAMPLE, area=_area(side, mixed=name.startswith("yolox")))


def _area(side: int, *, mixed: bool) -> float:
    """Mosaics of the usual size that an image takes: YOLOX mixes each with a second one (arXiv:2107.08430)."""
    return (2.0 if mixed else 1.0) * (side / USUAL_SIDE) ** 2


def _darknet_backbone(net: NetworkBuilder) -> list[tuple[int, tuple[int, ...]]]:
    features = []
    for channels, count in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        unit(net, channels, 3, 2)
        for _ in range(count):
            unit(unit(net, channels // 2, 1), channels).add()
        features.append((channels, net.size))
    return features[2:]


def partial_stage(
    net: NetworkBuilder, channels: int, count: int, *, shortcut: bool = True, second: bool = False
) -> None:
    """A cross-stage-partial block: half of the channels pass `count` bottlenecks (C3 of v5; `second`: C2f of v8)."""
    half = channels // 2
    if second:
        unit(net, channels, 1)
        net.become(half)
    else:
        with net.branch():
            unit(net, half, 1)
        unit(net, half, 1)
    for _ in range(count):
        unit(unit(net, half, 3 if second else 1), half)
        if shortcut:
            net.add()
    net.concatenate((2 + count) * half if second else channels)
    unit(net, channels, 1)


def spatial_pyramid(net: NetworkBuilder, channels: int) -> None:
    """Poolings of growing reach, joined."""
    half = net.channels // 2
    unit(net, half, 1).pool(5).pool(5).pool(5).concatenate(4 * half)
    unit(net, channels, 1)


def aggregated(
    name: str, side: int, width: float, depth: float, version: int, *, levels: int = 3, widest: int = 1024
) -> LayeredNetwork:
    """YOLOv5, v8 and YOLOX: backbone, a pyramid down and up again, heads on ``levels`` scales."""
    second = version == 8
    net = NetworkBuilder(3, side, side)
    plan = [128, 256, 512, 1024] if levels == 3 else [128, 256, 512, 768, 1024]
    widths = [_even(min(channels, widest) * width) for channels in plan]
    repeats = {5: [3, 6, 9, 3], 8: [3, 6, 6, 3], 10: [3, 9, 9, 3]}[version]
    if levels == 4:
        repeats = [3, 6, 9, 3, 3]
    _stem(net, _even(64 * width), version)
    features = []
    for index, channels in enumerate(widths):
        unit(net, channels, 3, 2)
        last = index == len(widths) - 1
        if last and version == 10:
            spatial_pyramid(net, channels)
        partial_stage(
            net, channels, max(1, round(repeats[index] * depth)), second=second, shortcut=not (last and version == 10)
        )
        if last and version != 10:
            spatial_pyramid(net, channels)
        features.append((channels, net.size))
    features = features[-levels:]
    count = max(1, round(3 * depth))
    _neck(net, features, count, second=second)
    _heads(net, features, width, version)
    return net.finish(name, SAMPLE, area=_area(side, mixed=version == 10))


def _even(channels: float) -> int:
    return max(8, round(channels / 8) * 8)


def _stem(net: NetworkBuilder, channels: int, version: int) -> None:
    if version == 10:
        net.become(12, *(part // 2 for part in net.size)).copy()
        unit(net, channels)
    elif version == 5:
        net.unit(channels, 6, 2, padding=2, activation="smooth")
    else:
        unit(net, channels, 3, 2)


def _neck(net: NetworkBuilder, features: list[tuple[int, tuple[int, ...]]], count: int, *, second: bool) -> None:
    down = list(reversed(features))
    for _, (channels, size) in pairwise(down):
        if not second:
            unit(net, channels, 1)
        above = net.channels
        net.upsample().become(above + channels, *size).concatenate(above + channels)
        partial_stage(net, channels, count, shortcut=False, second=second)
    for (below, _), (channels, size) in pairwise(features):
        unit(net, below, 3, 2)
        joined = below + (channels if second else below)
        net.become(joined, *size).concatenate(joined)
        partial_stage(net, channels, count, shortcut=False, second=second)


def _heads(net: NetworkBuilder, features: list[tuple[int, tuple[int, ...]]], width: float, version: int) -> None:
    smallest = features[0][0]
    for channels, size in features:
        net.become(channels, *size)
        if version == 5:
            net.convolution(3 * (5 + CLASSES), 1, bias=True)
            continue
        if version == 10:
            unit(net, _even(256 * width), 1)
        inner = net.channels
        for hidden, outputs in (
            ((max(16, smallest // 4, 64), 64), (max(smallest, CLASSES), CLASSES))
            if version == 8
            else ((inner, 5), (inner, CLASSES))
        ):
            with net.branch():
                unit(unit(net, hidden), hidden).convolution(outputs, 1, bias=True)
