"""Networks by the names under which they are published."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from planner.estimate.layered import mobile, residual
from planner.estimate.layered.residual import ResidualForm
from planner.estimate.training_run import LayeredNetwork

Match = re.Match[str]
Family = Callable[[str, Match, int], LayeredNetwork]
IMAGE_SIDE = 224


def plain_name(name: str) -> str:
    """`name` in lower case with single underscores: ``Classification/RN50v1.5`` is ``rn50v1_5``."""
    last = name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[^a-z0-9]+", "_", last).strip("_")


def _decimal(text: str | None) -> float:
    """A width multiplier as names write it: ``075``, ``0_5``, ``1_0``, ``100``, ``140``."""
    if not text:
        return 1.0
    if "_" in text:
        return float(text.replace("_", "."))
    return float(text) / 10 ** (len(text) - 1)


def _residual(name: str, match: Match, side: int) -> LayeredNetwork:
    depth = int(match["depth"])
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


FAMILIES: tuple[tuple[str, Family], ...] = (
    (
        r"^(?:bit_)?(?:wide_)?(?:se_?|sk_?)?(?:resnet|resnext|res2net|rn)(?:_?v[12])?_?(?P<depth>18|26|34|50|101|152|269)"
        r"(?:_|v1|x|$)",
        _residual,
    ),
    (r"^vgg_?(?P<depth>11|13|16|19)", _vgg),
    (r"^mobilenet_?v(?P<version>[123])(?:_(?:small|large))?(?:_(?P<width>\d[\d_]*))?$", _mobilenet),
    (r"^alexnet", lambda name, _, side: residual.alexnet(name, side)),
)


@lru_cache(maxsize=1024)
def lookup(model_name: str, image_size: int | None = None) -> LayeredNetwork | None:
    """The network that is published as `model_name`, for images of `image_size` (the family's own by default).

    None where the name says too little. Directory parts, case and separators do not matter.
    """
    name = plain_name(model_name)
    for pattern, family in FAMILIES:
        match = re.search(pattern, name)
        if match:
            return family(name, match, image_size or IMAGE_SIDE)
    return None
