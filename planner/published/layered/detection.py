"""Networks that find objects: SSD, YOLO, Mask R-CNN, EfficientDet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from planner.cost.training_run import LayeredNetwork
from planner.published.layered.builder import NetworkBuilder
from planner.published.layered.mobile import efficientnet_body, mobilenet_v1_body, mobilenet_v2_body
from planner.published.layered.residual import DEPTHS, ResidualForm, bottleneck, stem

SAMPLE = "annotated image"
COCO_CLASSES = 81
SSD_ANCHORS = (4, 6, 6, 6, 4, 4)
Feature = tuple[int, tuple[int, ...]]


def residual_stages(
    net: NetworkBuilder, depth: int, stages: int = 4, last_stride: int = 2, frozen: int = 0
) -> list[Feature]:
    """Stem and the first `stages` of a ResNet, of which `frozen` are not trained; returned are channels and sizes."""
    form = ResidualForm()
    net.frozen = frozen > 0
    stem(net, form)
    features = []
    for stage in range(stages):
        for index in range(DEPTHS[depth][stage]):
            first_stride = 1 if not stage else last_stride if stage == stages - 1 else 2
            bottleneck(net, 64 * 2**stage, 1 if index else first_stride, form)
        features.append((net.channels, net.size))
        net.frozen = stage + 1 < frozen
    return features


def boxes(net: NetworkBuilder, feature: Feature, anchors: int, classes: int, kernel: int = 3) -> None:
    """Class scores and box corners from one feature map."""
    channels, size = feature
    net.become(channels, *size)
    for outputs in (anchors * 4, anchors * classes):
        with net.branch():
            net.convolution(outputs, kernel, bias=True)


def ssd_resnet50(name: str, side: int) -> LayeredNetwork:
    """SSD300 on the first stages of ResNet-50, the last without stride (NVIDIA's form of arXiv:1512.02325)."""
    net = NetworkBuilder(3, side, side)
    residual_stages(net, 50, 3, last_stride=1)
    features = [(net.channels, net.size)]
    rows = ((256, 512, 2, None), (256, 512, 2, None), (128, 256, 2, None), (128, 256, 1, 0), (128, 256, 1, 0))
    for narrow, wide, stride, padding in rows:
        net.unit(narrow, 1).unit(wide, 3, stride, padding=padding)
        features.append((net.channels, net.size))
    for feature, anchors in zip(features, SSD_ANCHORS, strict=True):
        boxes(net, feature, anchors, COCO_CLASSES)
    return net.finish(name, SAMPLE)


def ssd_vgg16(name: str, side: int) -> LayeredNetwork:
    """SSD300 on VGG-16 (arXiv:1512.02325)."""
    net = NetworkBuilder(3, side, side)
    features = []
    for stage, (channels, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for _ in range(count):
            net.convolution(channels, 3, bias=True).relu()
        if stage == 3:
            features.append((net.channels, net.size))
        if stage == 2:
            net.pool(2, 2, 1)  # 38 of 75
        else:
            net.pool(2 if stage < 4 else 3, 2 if stage < 4 else 1)
    net.convolution(1024, 3, bias=True, dilation=6).relu().convolution(1024, 1, bias=True).relu()
    features.append((net.channels, net.size))
    for narrow, wide, stride, padding in ((256, 512, 2, None), (128, 256, 2, None), (128, 256, 1, 0), (128, 256, 1, 0)):
        net.convolution(narrow, 1, bias=True).relu().convolution(wide, 3, stride, bias=True, padding=padding).relu()
        features.append((net.channels, net.size))
    for feature, anchors in zip(features, SSD_ANCHORS, strict=True):
        boxes(net, feature, anchors, COCO_CLASSES)
    return net.focal_loss(_scores([size for _, size in features], SSD_ANCHORS)).finish(name, SAMPLE)


def _scores(sizes: Sequence[tuple[int, ...]], anchors: Sequence[int]) -> int:
    """Scores of all classes of all anchors."""
    return sum(math.prod(size) * count * COCO_CLASSES for size, count in zip(sizes, anchors, strict=True))


def ssd_mobilenet(name: str, side: int, version: int) -> LayeredNetwork:
    """SSD300 on MobileNet 1 or 2 with light extra layers."""
    net = NetworkBuilder(3, side, side)
    if version == 1:
        net.unit(32, 3, 2)
        mobilenet_v1_body(net, 1.0)
    else:
        mobilenet_v2_body(net, 1.0)
        net.unit(1280, 1)
    features = [(512 if version == 1 else 576, (-(-side // 16),) * 2), (net.channels, net.size)]
    for narrow, wide in ((256, 512), (128, 256), (128, 256), (64, 128)):
        net.unit(narrow, 1).unit(wide, 3, 2)
        features.append((net.channels, net.size))
    counts = (3, 6, 6, 6, 6, 6)
    for feature, anchors in zip(features, counts, strict=True):
        boxes(net, feature, anchors, COCO_CLASSES)
    return net.focal_loss(_scores([size for _, size in features], counts)).finish(name, SAMPLE)


def feature_pyramid(net: NetworkBuilder, features: Sequence[Feature], width: int = 256) -> None:
    """Lateral and output convolutions of an FPN (arXiv:1612.03144)."""
    for index, (channels, size) in enumerate(features):
        net.become(channels, *size).convolution(width, 1, bias=True)
        if index < len(features) - 1:
            net.add()
        net.convolution(width, 3, bias=True)


def ssd_pyramid(name: str, side: int, *, mobile: bool) -> LayeredNetwork:
    """RetinaNet-like SSD on an FPN of ResNet-50 or MobileNet: four shared 3x3 units, then boxes, on five levels."""
    net = NetworkBuilder(3, side, side)
    features: list[Feature]
    if mobile:
        net.unit(32, 3, 2)
        mobilenet_v1_body(net, 1.0)
        features = [(256, (side // 8,) * 2), (512, (side // 16,) * 2), (1024, (side // 32,) * 2)]
    else:
        features = residual_stages(net, 50)[1:]
    feature_pyramid(net, features)
    sides = [side // 8, side // 16, side // 32, side // 64, side // 128]
    net.become(256, sides[2], sides[2]).unit(256, 3, 2).unit(256, 3, 2)
    before = net.parameters
    for index, here in enumerate(sides):
        for outputs in (6 * 4, 6 * COCO_CLASSES):
            net.become(256, here, here).unit(256).unit(256).unit(256).unit(256).convolution(outputs, 3, bias=True)
        if index:
            net.parameters = before
        before = net.parameters
    return net.focal_loss(_scores([(here, here) for here in sides], [6] * len(sides))).finish(name, SAMPLE)


def mask_rcnn(name: str, size: tuple[int, int] = (800, 1216), *, masks: bool = True) -> LayeredNetwork:
    """Mask R-CNN on ResNet-50 and FPN (arXiv:1703.06870): 512 regions for boxes, 128 for masks.

    Norms are constants, and the stem and the first stage stay as they are (``FREEZE_CONV_BODY_AT: 2``,
    ``FrozenBatchNorm2d``; ``trainable=False`` in TensorFlow).
    """
    net = NetworkBuilder(3, *size)
    net.fixed_norms = True
    features = residual_stages(net, 50, frozen=1)
    net.fixed_norms = False
    feature_pyramid(net, features)
    proposals(net, [*(size for _, size in features), tuple(part // 2 for part in net.size)])
    regions = 512
    net.become(256, 1).regions(regions, 7)
    net.become(256 * 7 * 7, regions).linear(1024).relu().linear(1024).relu()
    with net.branch():
        net.linear(COCO_CLASSES)
    net.linear(4 * COCO_CLASSES)
    if masks:
        net.become(256, 1).regions(128, 14)
        net.become(256, 128 * 14, 14)
        for _ in range(4):
            net.convolution(256, 3, bias=True).relu()
        net.transposed(256).relu().convolution(COCO_CLASSES, 1, bias=True)
    return net.finish(name, SAMPLE)


def proposals(net: NetworkBuilder, sizes: Sequence[tuple[int, ...]]) -> None:
    """The region proposal network, shared by all levels."""
    before = net.parameters
    for size in sizes:
        net.parameters = before
        net.become(256, *size).convolution(256, 3, bias=True).relu()
        boxes(net, (256, net.size), 3, 1, kernel=1)


def efficientdet_d0(name: str, side: int) -> LayeredNetwork:
    """EfficientDet-D0 (arXiv:1911.09070): three BiFPN layers of 64 channels, heads of three separable layers.

    The logits of classes are put in order for a focal loss of one kernel, which writes their gradient on its way
    (``fused_focal_loss`` of ``PyTorch/Detection/Efficientdet`` of NVIDIA's examples).
    """
    net = NetworkBuilder(3, side, side)
    stages = efficientnet_body(net, 1.0, 1.0)
    width, sides = 64, [side // 2**level for level in range(3, 8)]
    for channels, here in (stages[2], stages[4], stages[6]):
        net.become(channels, here, here).unit(width, 1, activation="")
    net.unit(width, 1, activation="").pool(3, 2).pool(3, 2)
    for _ in range(3):
        for here in sides[3::-1]:
            net.become(width, here // 2, here // 2).upsample().weighted_sum(2).smooth()
            net.convolution(width, 3, groups=width).unit(width, 1, activation="")
        for here in sides[1:]:
            net.become(width, 2 * here, 2 * here).pool(3, 2).weighted_sum(2 if here == sides[-1] else 3).smooth()
            net.convolution(width, 3, groups=width).unit(width, 1, activation="")
    before = net.parameters
    for here in sides:
        net.parameters = before
        for outputs in (9 * 90, 9 * 4):
            net.become(width, here, here)
            for _ in range(3):
                net.convolution(width, 3, groups=width).unit(width, 1, activation="smooth")
            net.convolution(width, 3, groups=width).convolution(outputs, 1, bias=True).copy().copy()
    return net.finish(name, SAMPLE)


MOSAIC = "mosaic image"
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
    return net.finish(name, MOSAIC, area=_area(side, mixed=name.startswith("yolox")))


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
    return net.finish(name, MOSAIC, area=_area(side, mixed=version == 10))


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
