"""Published names of image classifiers, and the same networks in timm and the planner."""

from __future__ import annotations

import re

_SIDES = (224, 240, 260, 300, 380, 456, 528, 600)
"""Side of the images of EfficientNet B0 to B7 (arXiv:1905.11946)."""
_NETWORKS = (
    (r"(?:rn|resnet)_?50(?:_?v1_?5)?", "zoo:resnet50", 224),
    (r"resnet_?(18|34|101|152)", "timm:resnet{0}", 224),
    (r"resnext_?(50|101)_(\d+x\d+)d", "timm:resnext{0}_{1}d", 224),
    (r"se_?resnet_?(18|34|50|101)", "timm:seresnet{0}", 224),
    (r"se_?resnext_?101_32x4d", "timm:seresnext101_32x4d", 224),
    (r"densenet_?(121|161|169|201)", "timm:densenet{0}", 224),
    (r"vgg_?(11|13|16|19)", "timm:vgg{0}", 224),
    (r"mobilenet_v2_(100|140)", "timm:mobilenetv2_{0}", 224),
    (r"mobilenet_v3_(small|large)_100", "timm:mobilenetv3_{0}_100", 224),
    (r"efficientnet_?(?:widese_?)?b([0-7])", "timm:efficientnet_b{0}", 0),
    (r"efficientnet_?v2(?:_?s)?", "timm:efficientnetv2_s", 300),
    (r"swin_(?:tiny|transformer)", "timm:swin_tiny_patch4_window7_224", 224),
)
"""Patterns of names as `planner.published.layered.lookup.plain_name` has them, specifications, and sides of images."""


def image_network(name: str, side: int = 0) -> str:
    """Return the specification of the classifier that is published as `name`; empty where it is not known.

    Its images have `side` pixels, or as many as usual. Squeezed channels that are wider than usual (``widese``)
    count as the usual ones.

    >>> image_network("se_resnext101_32x4d"), image_network("efficientnet_b4", 320), image_network("ssd")
    ('timm:seresnext101_32x4d@224', 'timm:efficientnet_b4@320', '')
    """
    for pattern, spec, usual in _NETWORKS:
        if found := re.fullmatch(pattern, name):
            source = spec.format(*found.groups())
            return source if source.startswith("zoo:") else f"{source}@{side or usual or _SIDES[int(found[1])]}"
    return ""
