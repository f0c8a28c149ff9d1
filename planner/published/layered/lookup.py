"""Networks by the names under which they are published."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from planner.cost.training_run import LayeredNetwork
from planner.published.layered import branched, detection, mobile, residual, sequence, tokens
from planner.published.layered.residual import ResidualForm
from simulator.program import Kernel

Match = re.Match[str]
Family = Callable[[str, Match, int], LayeredNetwork | None]


def plain_name(name: str) -> str:
    """`name` in lower case with single underscores: ``Classification/RN50v1.5`` is ``rn50v1_5``."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[^a-z0-9]+", "_", last).strip("_")


def _decimal(text: str | None) -> float:
    """A width multiplier as names write it: ``075``, ``0_5``, ``1_0``, ``100``, ``140``."""
    if not text:
        return 1.0
    if "_" in text:
        return float(text.replace("_", "."))
    return int(text) / 10.0 ** (len(text) - 1)


def _residual(name: str, match: Match, side: int) -> LayeredNetwork | None:
    depth = int(match["depth"])
    if re.search(r"_c\d+_w\d+", name):
        return None  # widths of its own
    grouped = re.search(r"(\d+)x(\d+)d", name)
    wide = re.search(r"_x(\d)$|50x(\d)|101x(\d)", name)
    form = ResidualForm(
        groups=int(grouped[1]) if grouped else 32 if "next" in name else 1,
        base_width=int(grouped[2]) if grouped else 4 if "next" in name else 26 if "res2net" in name else 64,
        width=2.0 if "wide" in name else 1.0,
        outer=next((int(g) for g in wide.groups() if g), 1) if wide and "bit" in name else 1,
        reduction=16 if re.search(r"(^|_)se_?res", name) else 0,
        scales=4 if "res2net" in name else 1,
        preactivated=bool(re.search(r"resnet_?v2|^bit|bigtransfer", name)),
        grouped_norms=name.startswith(("bit", "bigtransfer")),
        deep_stem=name.endswith(("_v1b", "v1d")),
        basic=depth < 50,
        selective="sk" in name,
    )
    return residual.resnet(name, depth, side, form)


VGG_STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def _vgg(name: str, match: Match, side: int) -> LayeredNetwork:
    return residual.vgg(name, VGG_STAGES[int(match["depth"])], side, norms="bn" in name)


def _mobilenet(name: str, match: Match, side: int) -> LayeredNetwork:
    width = _decimal(match["width"])
    if match["version"] == "1":
        return mobile.mobilenet_v1(name, side, width)
    if match["version"] == "2":
        return mobile.mobilenet_v2(name, side, width)
    return mobile.mobilenet_v3(name, side, width, large="small" not in name)


def _efficientnet(name: str, match: Match, side: int) -> LayeredNetwork | None:
    if match["size"] is None:
        return None  # B0 to B7 differ by a factor of 90
    width, depth, own_side = mobile.EFFICIENTNET_SCALES[int(match["size"])]
    return mobile.efficientnet(name, side or own_side, width, depth, wide_squeeze=bool(match["wide"]))


REPVGG = {
    "a0": (0.75, 2.5),
    "a1": (1.0, 2.5),
    "a2": (1.5, 2.75),
    "b0": (1.0, 2.5),
    "b1": (2.0, 4.0),
    "b2": (2.5, 5.0),
    "b3": (3.0, 5.0),
}


def _repvgg(name: str, match: Match, side: int) -> LayeredNetwork:
    blocks = (2, 4, 14, 1) if match["size"].startswith("a") else (4, 6, 16, 1)
    return residual.repvgg(name, side, blocks, *REPVGG[match["size"]], groups=int(match["groups"] or 1))


REGNETS = {
    "x_200mf": (24, 36.44, 2.49, 13, 8),
    "x_400mf": (24, 24.48, 2.54, 22, 16),
    "x_600mf": (48, 36.97, 2.24, 16, 24),
    "x_800mf": (56, 35.73, 2.28, 16, 16),
    "x_1_6gf": (80, 34.01, 2.25, 18, 24),
    "x_3_2gf": (88, 26.31, 2.25, 25, 48),
    "x_4_0gf": (96, 38.65, 2.43, 23, 40),
    "x_8_0gf": (80, 49.56, 2.88, 23, 120),
    "y_200mf": (24, 36.44, 2.49, 13, 8),
    "y_400mf": (48, 27.89, 2.09, 16, 8),
    "y_600mf": (48, 32.54, 2.32, 15, 16),
    "y_800mf": (56, 38.84, 2.4, 14, 16),
    "y_1_6gf": (48, 20.71, 2.65, 27, 24),
    "y_3_2gf": (80, 42.63, 2.66, 21, 24),
    "y_4_0gf": (96, 31.41, 2.24, 22, 64),
    "y_8_0gf": (192, 76.82, 2.19, 17, 56),
}


def _regnet(name: str, match: Match, side: int) -> LayeredNetwork | None:
    size = REGNETS.get(match["size"])
    return residual.regnet(name, side, *size, excite=match["size"].startswith("y")) if size else None


VIT_SIZES = {
    "ti": (192, 12, 3),
    "tiny": (192, 12, 3),
    "s": (384, 12, 6),
    "small": (384, 12, 6),
    "b": (768, 12, 12),
    "base": (768, 12, 12),
    "l": (1024, 24, 16),
    "large": (1024, 24, 16),
    "h": (1280, 32, 16),
}
CONVIT_SIZES = {
    "tiny": (192, 12, 4),
    "tiny_plus": (256, 12, 4),
    "small": (432, 12, 9),
    "small_plus": (576, 12, 9),
    "base": (768, 12, 16),
    "base_plus": (1024, 12, 16),
}


def _vit(name: str, match: Match, side: int) -> LayeredNetwork:
    return tokens.vision_transformer(name, side, int(match["patch"] or 16), *VIT_SIZES[match["size"] or "b"])


SWIN = {
    "tiny": (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "small": (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "base": (128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "large": (192, (2, 2, 18, 2), (6, 12, 24, 48)),
}


def _swin(name: str, match: Match, side: int) -> LayeredNetwork:
    second = bool(match["second"])
    window = int(match["window"] or (8 if second else 7))
    return tokens.swin(name, side, *SWIN[match["size"] or "tiny"], window, second=second)


def _yolo(name: str, match: Match, side: int) -> LayeredNetwork:
    width, depth = detection.SCALES[match["size"]]
    large = match["large"] == "6"
    version = 10 if match["version"] == "x" else int(match["version"][1:])
    if version == 8:
        depth = min(depth, 1.0)
    widest = {"m": 768, "l": 512, "x": 512}.get(match["size"], 1024) if version == 8 else 1024
    side = 1280 if large else side
    return detection.aggregated(name, side, width, depth, version, levels=4 if large else 3, widest=widest)


def _mask_rcnn(name: str, match: Match, side: int) -> LayeredNetwork:
    size = (int(match["height"]), int(match["width"])) if match["height"] else (side, side * 38 // 25)
    return detection.mask_rcnn(name, size)


def _shufflenet(name: str, match: Match, side: int) -> LayeredNetwork:
    return mobile.shufflenet_v1(name, side, int(match["groups"]), _decimal(match["width"]))


def _convit(name: str, match: Match, side: int) -> LayeredNetwork:
    return tokens.vision_transformer(name, side, 16, *CONVIT_SIZES[match["size"]], sample="image", gated=10)


def _by_side(family: Callable[..., LayeredNetwork], **said: Any) -> Family:
    """A family of which the side of the images says all."""
    return lambda name, _, side: family(name, side, **said)


def _by(part: str, family: Callable[..., LayeredNetwork], read: Callable[[str], object] = str) -> Family:
    """A family of which a part of the name says the rest."""
    return lambda name, match, side: family(name, side, read(match[part]))


def _if(part: str, family: Callable[..., LayeredNetwork], option: str) -> Family:
    """A family of which a part of the name, or that it is missing, says whether an option holds."""
    return lambda name, match, side: family(name, side, **{option: bool(match[part])})


FAMILIES: tuple[tuple[str, int, Family], ...] = (
    (r"^ssd(?:_?300)?$|^ssd_?resnet_?50$", 300, _by_side(detection.ssd_resnet50)),
    (r"^ssd_?vgg", 300, _by_side(detection.ssd_vgg16)),
    (r"^ssd_?(?:resnet50|(?P<mobile>mobilenetv1))_fpn", 640, _if("mobile", detection.ssd_pyramid, "mobile")),
    (r"^ssd_?mobilenet_?v(?P<version>[12])$", 300, _by("version", detection.ssd_mobilenet, int)),
    (r"^yolo_?v3", 640, _by_side(detection.darknet53)),
    (r"^yolox_?darknet53", 640, _by_side(detection.darknet53)),
    (r"^yolo_?(?P<version>x)_?(?P<size>n|tiny|t)(?P<large>)(?:ano)?$", 416, _yolo),
    (r"^yolo_?(?P<version>v5|v8|x)_?(?P<size>tiny|t(?=$)|[nsmlx])(?P<large>6)?$", 640, _yolo),
    (r"mask_?rcnn(?:_(?P<height>\d+)x(?P<width>\d+))?", 800, _mask_rcnn),
    (r"faster_?rcnn", 800, lambda name, _, side: detection.mask_rcnn(name, (side, side * 38 // 25), masks=False)),
    (r"^efficientdet(?:_?d0)?$", 512, _by_side(detection.efficientdet_d0)),
    (r"^unet_?3d|^nn_?unet", 128, _by_side(branched.volume_unet, widths=(32, 64, 128, 256, 320, 320))),
    (r"^unet_?industrial", 512, _by_side(branched.industrial_unet)),
    (r"^unet_?medical$", 572, _by_side(branched.unet, example=True)),
    (r"^unet$", 572, _by_side(branched.unet)),
    (r"^v_?net", 32, _by_side(branched.vnet)),
    (r"^deeplab_?v3(?P<plus>_?plus)?", 513, _if("plus", branched.deeplab, "decoder")),
    (
        r"^(?:bit_)?(?:wide_)?(?:se_?|sk_?)?(?:resnet|resnext|res2net|rn)(?:_?v[12])?_?(?P<depth>18|26|34|50|101|152|269)"
        r"(?:_|v1|x|$)",
        224,
        _residual,
    ),
    (r"^vgg_?(?P<depth>11|13|16|19)", 224, _vgg),
    (r"^mobilenet_?v(?P<version>[123])(?:_(?:small|large))?(?:_(?P<width>\d[\d_]*))?$", 224, _mobilenet),
    (r"^jasper", 1, lambda name, *_: sequence.jasper(name)),
    (r"^quartznet", 1, lambda name, *_: sequence.quartznet(name, sequence.padded_frames(*sequence.USUAL_BATCH))),
    (r"^gnmt", 1, lambda name, *_: sequence.gnmt(name)),
    (r"^tacotron_?2", 1, lambda name, *_: sequence.tacotron2(name)),
    (r"^waveglow", 1, lambda name, *_: sequence.waveglow(name)),
    (r"^alexnet", 224, _by_side(residual.alexnet)),
    (r"^efficientnet_?(?:v1|(?:v1_?)?(?P<wide>widese_?)?b(?P<size>[0-7]))$", 0, _efficientnet),
    (r"^efficientnet_?v2(?:_?s)?$", 300, _by_side(mobile.efficientnet_v2_s)),
    (r"^mnasnet(?:_(?P<width>\d[\d_]*))?$", 224, _by("width", mobile.mnasnet, _decimal)),
    (r"^shufflenet_?v1_?g(?P<groups>[12348])_?x?(?P<width>\d[\d_]*)$", 224, _shufflenet),
    (r"^shufflenet_?v2(?:_?x(?P<width>\d[\d_]*))?$", 224, _by("width", mobile.shufflenet_v2, _decimal)),
    (r"^squeezenet(?P<small>_?1_1)?", 224, _if("small", mobile.squeezenet, "small")),
    (r"^ghostnet(?:_(?P<width>\d+))?$", 224, _by("width", mobile.ghostnet, _decimal)),
    (r"^rexnet_?x?(?P<width>\d+)?$", 224, _by("width", mobile.rexnet, _decimal)),
    (r"^repvgg_(?P<size>a[0-2]|b[0-3])(?:g(?P<groups>\d))?$", 224, _repvgg),
    (r"^regnet_?(?P<size>[xy]_[\d_]+[mg]f)$", 224, _regnet),
    (r"^densenet_?(?P<depth>121|161|169|201)$", 224, _by("depth", branched.densenet, int)),
    (r"^googlenet|^inception_?v1$", 224, _by_side(branched.googlenet)),
    (r"^inception_?v3", 299, _by_side(branched.inception_v3)),
    (r"^inception_?v4", 299, _by_side(branched.inception_v4)),
    (r"^xception", 299, _by_side(branched.xception)),
    (r"^dpn_?92", 224, _by_side(branched.dual_path)),
    (r"^resnest_?(?P<depth>50|101|269)", 224, _by("depth", branched.resnest, int)),
    (r"^hrnet_?w(?P<width>\d+)$", 224, _by("width", branched.hrnet, int)),
    (
        r"^(?:vit|deit)(?:_(?P<size>ti|tiny|s|small|b|base|l|large|h))?(?:_?(?:patch)?(?P<patch>14|16|32))?(?:_\d+)?$",
        224,
        _vit,
    ),
    (r"^convit_(?P<size>(?:tiny|small|base)(?:_plus)?)$", 224, _convit),
    (
        r"^swin(?:_?transformer)?(?:_?(?P<second>v2))?(?:_(?P<size>tiny|small|base|large))?(?:_.*?(?:window(?P<window>\d+))?)?$",
        224,
        _swin,
    ),
    (r"^pvt_(?P<size>tiny|small|medium|large)$", 224, _by("size", tokens.pyramid, tokens.PVT_DEPTHS.__getitem__)),
    (r"^pvt_?v2_(?P<size>b[0-5])$", 224, _by("size", tokens.pyramid_v2)),
    (r"^pit_(?P<size>ti|xs|s|b)$", 224, _by("size", tokens.pooling_transformer)),
    (
        r"^convnext_?(?P<second>v2)?_(?P<size>tiny|small|base|large)$",
        224,
        lambda name, m, side: tokens.convnext(name, side, m["size"], second=bool(m["second"])),
    ),
    (r"^poolformer_(?P<size>[sm]\d\d)$", 224, _by("size", tokens.poolformer)),
    (r"^mobile_?vit_(?P<size>xx_small|x_small|small)$", 256, _by("size", tokens.mobile_transformer)),
    (r"^crossvit_9$", 240, lambda name, _, side: tokens.cross_vit_9(name, side or 240)),
    (r"^cait_s24", 224, lambda name, _, side: tokens.class_attention(name, side, 384, 24, 8)),
)


@lru_cache(maxsize=1024)
def lookup(model_name: str, image_size: int | None = None) -> LayeredNetwork | None:
    """The network that is published as `model_name`, for images of `image_size` (the family's own by default).

    None where the name says too little. Directory parts, case and separators do not matter; a family's name may
    stand before the network's, as in ``efficientnet efficientnet-b4``.
    """
    parts = model_name.split()
    for words in (model_name, parts[-1] if len(parts) == 2 else ""):
        name = plain_name(words)
        for pattern, own_side, family in FAMILIES:
            match = re.search(pattern, name)
            if match:
                found = family(name, match, image_size or own_side)
                return found and replace(found, side=image_size or own_side)
    return None


PUBLISHED = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnetv2_101", "resnext50_32x4d", "resnext101_32x4d",
    "resnext101_64x4d", "resnext152_64x4d", "seresnet18", "seresnet34", "seresnet50", "skresnet18", "skresnet34",
    "skresnet50", "res2net50", "res2net101", "res2net152", "resnest50", "resnest101", "bit_resnet50", "bit_resnet101",
    "resnetv2_50", "dpn92", "vgg11", "vgg13", "vgg16", "vgg19", "densenet121", "densenet161", "densenet169",
    "densenet201", "googlenet", "inception_v3", "inception_v4", "xception", "mobilenet_v1_025", "mobilenet_v1_050",
    "mobilenet_v1_075",
    "mobilenet_v1_100", "mobilenet_v2_075", "mobilenet_v2_100", "mobilenet_v2_140", "mobilenet_v3_small_100",
    "mobilenet_v3_large_100", "mnasnet_050", "mnasnet_075", "mnasnet_100", "mnasnet_140", "shufflenet_v1_g3_05",
    "shufflenet_v1_g3_10", "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0",
    "squeezenet1_0", "squeezenet1_1", "ghostnet_050", "ghostnet_100", "ghostnet_130", "rexnet_09", "rexnet_10",
    "rexnet_13", "rexnet_15", "rexnet_20", "efficientnet_b0", "efficientnet_b1", "efficientnet_b4", "regnet_x_200mf",
    "regnet_x_400mf", "regnet_x_600mf", "regnet_x_800mf", "regnet_y_200mf", "regnet_y_400mf", "regnet_y_600mf",
    "regnet_y_800mf", "regnet_y_1_6gf", "repvgg_a0", "repvgg_a1", "repvgg_a2", "repvgg_b0", "repvgg_b1", "repvgg_b2",
    "hrnet_w32", "hrnet_w48", "convnext_tiny", "convnext_small", "convnext_base", "convnextv2_tiny", "vit_b_32_224",
    "vit_b_16_224", "vit_l_32_224", "vit_l_16_224", "convit_tiny", "convit_small", "convit_base", "swin_tiny",
    "swinv2_tiny_window8", "pvt_tiny", "pvt_small", "pvt_v2_b0", "pvt_v2_b1", "pvt_v2_b2", "pit_ti", "pit_xs", "pit_s",
    "pit_b", "poolformer_s12", "poolformer_s24", "crossvit_9", "cait_s24",
    "mobilevit_xx_small", "mobilevit_x_small", "mobilevit_small",
)  # fmt: skip
"""Image classifiers that are told apart by their parameters alone."""
TWINS = {
    "efficientnet_b0": ("nasnet_a_4x1056", 256),
    "mobilenet_v3_large_100": ("coat_tiny", 32),
    "mobilenet_v1_050": ("edgenext_xx_small", 256),
}
"""Classifiers of MindCV with as many parameters as another of its networks, which is not described here, and the
batch of the other's recipe (``configs/nasnet``, ``coat`` and ``edgenext`` of github.com/mindspore-lab/mindcv)."""
_SAME_COUNT = 0.002
"""Relative difference up to which two counts are of one network."""
_ROUND = 1e6
"""Multiples of this are too round to tell networks apart."""


@lru_cache(maxsize=256)
def lookup_by_parameters(
    parameters: float, image_size: int | None = None, batch: int | None = None
) -> LayeredNetwork | None:
    """The image classifier with so many parameters, counted with or without the running statistics of its norms.

    None where ``batch``, of a device, says that it is another with as many (`TWINS`).
    """
    if parameters % _ROUND == 0:
        return None
    found = [network for network in map(lookup, PUBLISHED) if network]
    counts = {network.name: (network.parameters, network.parameters + running_statistics(network)) for network in found}
    distances = {name: min(abs(parameters / count - 1) for count in both) for name, both in counts.items()}
    best = min(distances, key=distances.__getitem__)
    if batch and TWINS.get(best, ("", 0))[1] == batch:
        return None
    return lookup(best, image_size) if distances[best] <= _SAME_COUNT else None


def running_statistics(network: LayeredNetwork) -> float:
    """Mean and variance of every channel of the norms that follow convolutions; norms over groups keep none."""
    if network.name.startswith("bit_"):
        return 0.0
    total, positions = 0.0, 0.0
    for layer in network.layers:
        if layer.kernel is Kernel.CONVOLUTION:
            positions = layer.m
        elif layer.kernel is Kernel.NORMALIZATION and positions:
            total += 2 * layer.elements_moved / (3 * positions)
    return total
