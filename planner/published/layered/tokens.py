"""Vision networks of attention, and their kin without it: ViT, Swin, PVT, PiT, ConvNeXt, PoolFormer, CrossViT, CaiT."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.training_run import LayeredNetwork
from planner.published.layered.builder import NetworkBuilder
from planner.published.layered.mobile import inverted

CLASSES = 1000
SAMPLE = "augmented image"


def attend(net: NetworkBuilder, heads: int, *, keys: int = 0, windows: int = 1, bias: bool = True) -> NetworkBuilder:
    """Norm, joint projection, attention and output projection around a shortcut; every token meets `keys` (0: all)."""
    width = net.channels
    net.norm().linear(3 * width, bias=bias).attention(heads, width, keys or net.positions, windows)
    return net.linear(width).add()


def feed_forward(net: NetworkBuilder, ratio: float) -> NetworkBuilder:
    """Norm and two matrix products with GELU between them around a shortcut."""
    width = net.channels
    return net.norm().linear(int(ratio * width)).smooth().linear(width).add()


def vision_transformer(
    name: str, side: int, patch: int, width: int, depth: int, heads: int, *, sample: str = SAMPLE, gated: int = 0
) -> LayeredNetwork:
    """ViT (arXiv:2010.11929) and DeiT: patches as tokens, and a class token.

    The first ``gated`` layers mix the scores of content and of position after softmax (ConViT, arXiv:2103.10697).
    """
    net = NetworkBuilder(3, side, side, tokens=True).convolution(width, patch, patch, bias=True, padding=0)
    tokens = net.positions + 1
    net.become(width, tokens).add()
    net.parameters += width * (tokens + 1)
    for layer in range(depth):
        if layer < gated:
            with net.branch():
                net.become(heads, tokens, tokens).scale().scale().add()
        feed_forward(attend(net, heads), 4)
    return net.norm().become(width, 1).linear(CLASSES).finish(name, sample)


def swin(
    name: str, side: int, width: int, depths: Sequence[int], heads: Sequence[int], window: int, *, second: bool = False
) -> LayeredNetwork:
    """Swin (arXiv:2103.14030): attention within windows, stages joined by merging 2x2 tokens; ``second`` is SwinV2."""
    net = NetworkBuilder(3, side, side, tokens=True).convolution(width, 4, 4, bias=True, padding=0).norm()
    for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
        if stage:
            channels = net.channels
            net.become(4 * channels, *(part // 2 for part in net.size)).copy()
            if second:
                net.linear(2 * channels, bias=False).norm()
            else:
                net.norm().linear(2 * channels, bias=False)
        keys = min(window**2, net.positions)
        for _ in range(depth):
            net.copy()
            attend(net, count, keys=keys, windows=net.positions // keys).copy()
            feed_forward(net, 4)
            net.parameters += (512 * 3 + 512 * count) if second else (2 * window - 1) ** 2 * count
    return net.norm().global_pool().linear(CLASSES).finish(name, SAMPLE)


def reduced_attention(net: NetworkBuilder, heads: int, reduction: int, pooled: int = 0) -> None:
    """Attention to keys from an image `reduction` times smaller in each direction (PVT, arXiv:2102.12122).

    ``pooled`` above 0 averages to that side instead (PVTv2, arXiv:2106.13797).
    """
    width = net.channels
    net.norm()
    with net.branch():
        if reduction > 1:
            net.convolution(width, reduction, reduction, bias=True, padding=0).norm()
        keys = net.positions
        net.linear(2 * width)
    net.linear(width).attention(heads, width, keys).linear(width).add()


PVT_DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}


def pyramid(name: str, side: int, depths: Sequence[int]) -> LayeredNetwork:
    """PVT (arXiv:2102.12122)."""
    net = NetworkBuilder(3, side, side, tokens=True)
    rows = zip((64, 128, 320, 512), (4, 2, 2, 2), (1, 2, 5, 8), (8, 4, 2, 1), (8, 8, 4, 4), depths, strict=True)
    for width, patch, heads, reduction, ratio, depth in rows:
        net.convolution(width, patch, patch, bias=True, padding=0).norm().add()
        net.parameters += net.elements + (width if width == 512 else 0) * 2
        for _ in range(depth):
            reduced_attention(net, heads, reduction)
            feed_forward(net, ratio)
    return net.norm().become(512, 1).linear(CLASSES).finish(name, SAMPLE)


PVT_V2 = {
    "b0": ((32, 64, 160, 256), (2, 2, 2, 2), (8, 8, 4, 4)),
    "b1": ((64, 128, 320, 512), (2, 2, 2, 2), (8, 8, 4, 4)),
    "b2": ((64, 128, 320, 512), (3, 4, 6, 3), (8, 8, 4, 4)),
    "b3": ((64, 128, 320, 512), (3, 4, 18, 3), (8, 8, 4, 4)),
    "b4": ((64, 128, 320, 512), (3, 8, 27, 3), (8, 8, 4, 4)),
    "b5": ((64, 128, 320, 512), (3, 6, 40, 3), (4, 4, 4, 4)),
}


def pyramid_v2(name: str, side: int, size: str) -> LayeredNetwork:
    """PVTv2 (arXiv:2106.13797): overlapping patches, depthwise convolutions in the feed-forward networks."""
    net = NetworkBuilder(3, side, side, tokens=True)
    widths, depths, ratios = PVT_V2[size]
    for stage, (width, depth, ratio) in enumerate(zip(widths, depths, ratios, strict=True)):
        net.convolution(width, 3 if stage else 7, 2 if stage else 4, bias=True).norm()
        for _ in range(depth):
            reduced_attention(net, (1, 2, 5, 8)[stage], (8, 4, 2, 1)[stage])
            net.norm().linear(ratio * width).convolution(ratio * width, 3, groups=ratio * width, bias=True)
            net.smooth().linear(width).add()
        net.norm()
    return net.global_pool().linear(CLASSES).finish(name, SAMPLE)


PIT = {
    "ti": ((64, 128, 256), (2, 6, 4), (2, 4, 8), 16, 8),
    "xs": ((96, 192, 384), (2, 6, 4), (2, 4, 8), 16, 8),
    "s": ((144, 288, 576), (2, 6, 4), (3, 6, 12), 16, 8),
    "b": ((256, 512, 1024), (3, 6, 4), (4, 8, 16), 14, 7),
}


def pooling_transformer(name: str, side: int, size: str) -> LayeredNetwork:
    """PiT (arXiv:2103.16302): a ViT whose tokens are pooled by depthwise convolutions between its stages."""
    widths, depths, heads, patch, stride = PIT[size]
    net = NetworkBuilder(3, side, side, tokens=True).convolution(widths[0], patch, stride, bias=True, padding=0).add()
    net.parameters += net.elements + widths[0]
    for stage, (width, depth, count) in enumerate(zip(widths, depths, heads, strict=True)):
        if stage:
            with net.branch():
                net.become(net.channels, 1, 1).linear(width)
            net.convolution(width, 3, 2, groups=net.channels, bias=True)
        for _ in range(depth):
            feed_forward(attend(net, count), 4)
    return net.norm().become(widths[-1], 1).linear(CLASSES).finish(name, SAMPLE)


CONVNEXT = {
    "tiny": ((96, 192, 384, 768), (3, 3, 9, 3)),
    "small": ((96, 192, 384, 768), (3, 3, 27, 3)),
    "base": ((128, 256, 512, 1024), (3, 3, 27, 3)),
    "large": ((192, 384, 768, 1536), (3, 3, 27, 3)),
}


def convnext(name: str, side: int, size: str, *, second: bool = False) -> LayeredNetwork:
    """ConvNeXt (arXiv:2201.03545); ``second`` has response normalisation in place of layer scale (V2)."""
    net = NetworkBuilder(3, side, side, tokens=True)
    for stage, (width, depth) in enumerate(zip(*CONVNEXT[size], strict=True)):
        if stage:
            net.norm().convolution(width, 2, 2, bias=True, padding=0)
        else:
            net.convolution(width, 4, 4, bias=True, padding=0).norm()
        for _ in range(depth):
            net.convolution(width, 7, groups=width, bias=True).norm().linear(4 * width).smooth()
            if second:
                net.norm()
            net.linear(width)
            if not second:
                net.scale()
                net.parameters += width
            net.add()
    return net.global_pool().norm().linear(CLASSES).finish(name, SAMPLE)


POOLFORMER = {
    "s12": ((64, 128, 320, 512), (2, 2, 6, 2)),
    "s24": ((64, 128, 320, 512), (4, 4, 12, 4)),
    "s36": ((64, 128, 320, 512), (6, 6, 18, 6)),
    "m36": ((96, 192, 384, 768), (6, 6, 18, 6)),
    "m48": ((96, 192, 384, 768), (8, 8, 24, 8)),
}


def poolformer(name: str, side: int, size: str) -> LayeredNetwork:
    """PoolFormer (arXiv:2111.11418): average pooling in the place of attention."""
    net = NetworkBuilder(3, side, side, tokens=True)
    for stage, (width, depth) in enumerate(zip(*POOLFORMER[size], strict=True)):
        net.convolution(width, 3 if stage else 7, 2 if stage else 4, bias=True, padding=1 if stage else 2)
        for _ in range(depth):
            net.norm().pool(3, 1).add().scale().add()
            feed_forward(net, 4).scale()
            net.parameters += 2 * width
    return net.norm().global_pool().linear(CLASSES).finish(name, SAMPLE)


def cross_vit_9(name: str, side: int) -> LayeredNetwork:
    """CrossViT-9 (arXiv:2103.14899): two transformers of different patches that exchange their class tokens."""
    net = NetworkBuilder(3, side, side, tokens=True)
    sides = ((side, 12, 128), (224 * side // 240, 16, 256))
    grids = []
    for here, patch, width in sides:
        net.become(3, here, here).convolution(width, patch, patch, bias=True, padding=0).add()
        grids.append((width, net.positions + 1))
        net.parameters += width * (net.positions + 2)
    for _ in range(3):
        for (width, tokens), depth in zip(grids, (1, 3), strict=True):
            net.become(width, tokens)
            for _ in range(depth):
                feed_forward(attend(net, 4), 3)
        for (width, _), (other, tokens) in (grids, grids[::-1]):
            net.become(width, 1).norm().smooth().linear(other)
            with net.branch():
                net.become(other, tokens).norm().linear(2 * other)
            net.linear(other).attention(4, other, tokens).linear(other).add().norm().smooth().linear(width)
    for width, tokens in grids:
        net.become(width, tokens).norm().become(width, 1).linear(CLASSES)
    return net.finish(name, SAMPLE)


def class_attention(name: str, side: int, width: int, depth: int, heads: int) -> LayeredNetwork:
    """CaiT (arXiv:2103.17239): layer scale, mixing of heads, two last layers for the class token only."""
    net = NetworkBuilder(3, side, side, tokens=True).convolution(width, 16, 16, bias=True, padding=0)
    tokens = net.positions
    net.become(width, tokens).add()
    net.parameters += width * (tokens + 1)
    for _ in range(depth):
        attend(net, heads).scale()
        with net.branch():
            for _ in range(2):
                net.become(heads, tokens, tokens).copy().linear(heads).copy()  # heads become channels and back
        feed_forward(net, 4).scale()
        net.parameters += 2 * width
    for _ in range(2):
        net.become(width, tokens + 1).norm().linear(2 * width)
        net.become(width, 1).linear(width).attention(heads, width, tokens + 1).linear(width)
        feed_forward(net, 4)
        net.parameters += 2 * width
    return net.norm().linear(CLASSES).finish(name, SAMPLE)


MOBILEVIT = {
    "xx_small": (2, 16, (16, 24, 48, 64, 80), (64, 80, 96), 320),
    "x_small": (4, 16, (32, 48, 64, 80, 96), (96, 120, 144), 384),
    "small": (4, 16, (32, 64, 96, 128, 160), (144, 192, 240), 640),
}


def mobile_transformer(name: str, side: int, size: str) -> LayeredNetwork:
    """MobileViT (arXiv:2110.02178): inverted bottlenecks, and transformers over every fourth pixel."""
    expansion, first, widths, inner_widths, last = MOBILEVIT[size]
    net = NetworkBuilder(3, side, side, tokens=True).unit(first, 3, 2, activation="smooth")
    for stage, width in enumerate(widths):
        for index in range(3 if stage == 1 else 1):
            stride = 2 if stage and not index else 1
            inverted(net, width, expansion * net.channels, 3, stride, activation="smooth")
        if stage >= 2:
            _transformer_between(net, inner_widths[stage - 2], (2, 4, 3)[stage - 2])
    return net.unit(last, 1, activation="smooth").global_pool().linear(CLASSES).finish(name)


def _transformer_between(net: NetworkBuilder, inner: int, depth: int) -> None:
    width = net.channels
    net.unit(width, 3, activation="smooth").convolution(inner, 1)
    for _ in range(depth):
        attend(net, 4, keys=net.positions // 4, windows=4)
        feed_forward(net, 2)
    net.norm().unit(width, 1, activation="smooth").concatenate(2 * width).unit(width, 3, activation="smooth")
