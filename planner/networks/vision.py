"""Networks of timm and torchvision by name, with random weights: nothing is downloaded."""

from __future__ import annotations

import difflib
from functools import partial
from importlib import import_module, metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.graph.tracing import unmaterialised
from planner.networks.inputs import InputSpec
from planner.networks.losses import mean_absolute_error, mean_binary_cross_entropy, mean_cross_entropy
from planner.networks.network import Network
from simulator.errors import InputError, NetworkError

LIBRARIES = {"timm": "timm", "tv": "torchvision"}
"""Libraries by the source that names them."""
SIDE = "@"
"""Between a network's name and the side of its images, where these are not the usual ones: ``efficientnet_b4@380``."""
_SIDE, _FRAMES, _CLASSES = 224, 16, 1000
_LARGEST_SIDE = 8192
_AUXILIARY_WEIGHT = 0.4
"""Of the loss of each auxiliary classifier (Szegedy et al., arXiv:1409.4842, section 5, has 0.3; torchvision 0.4)."""


class Classifier(nn.Module):
    """A network of images with its loss: the mean cross entropy of classes, of pixels where it segments."""

    notes = ()

    def __init__(self, model: nn.Module, *, segments: bool) -> None:
        super().__init__()
        self.model = model
        self.segments = segments

    def targets(self, image: tuple[int, ...]) -> tuple[InputSpec, ...]:
        """Inputs besides images of a shape."""
        return (_labels(image[-2:] if self.segments else (), _CLASSES),)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """Loss of images ``(batch, channels, height, width)`` and their classes ``(batch,)``."""
        loss: Tensor | None = None
        for weight, scores in _outputs(self.model(image)):
            rows = scores.movedim(1, -1) if scores.dim() > 2 else scores
            part = mean_cross_entropy(rows, label) * weight if weight != 1.0 else mean_cross_entropy(rows, label)
            loss = part if loss is None else loss + part
        assert loss is not None  # a model has an output
        return loss


class Detector(nn.Module):
    """A network that detects objects in one pass, with its loss.

    Every anchor is compared with the class and the box of one object of its image: which of them lie on an object
    depends on data, and costs little beside the network. Images are given as large as the network would scale them.
    """

    notes = ()

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def targets(self, image: tuple[int, ...]) -> tuple[InputSpec, ...]:
        """Inputs besides images of a shape."""
        return _labels((), _CLASSES), InputSpec(name="box", kind="target", shape=(4,))

    def forward(self, image: Tensor, label: Tensor, box: Tensor) -> Tensor:
        """Loss of images ``(batch, channels, height, width)``, a class ``(batch,)`` and a box ``(batch, 4)`` each."""
        features = self.model.backbone(image)
        found = self.model.head([features] if isinstance(features, Tensor) else list(features.values()))
        scores, places = found["cls_logits"], found["bbox_regression"]
        loss = mean_cross_entropy(scores, label.unsqueeze(1).expand(scores.shape[:2]))
        loss = loss + mean_absolute_error(places, box.unsqueeze(1).expand_as(places))
        if "bbox_ctrness" in found:
            centred = found["bbox_ctrness"].flatten(1)
            loss = loss + mean_binary_cross_entropy(centred, (label > 0).unsqueeze(1).expand_as(centred))
        return loss


class RegionDetector(nn.Module):
    """A network that detects objects in regions of an image (R-CNN), with its loss.

    The network would propose regions itself, so that their number depends on the image. Here they are given: as many
    for each image as it samples, an even share on each level of features. The foreground ones have masks or keypoints.
    All anchors count in the loss of proposals.
    """

    notes = ("regions are given, an even share on each level of features: what chooses them is not timed",)

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        sampler = model.roi_heads.fg_bg_sampler
        self.regions = int(sampler.batch_size_per_image)
        self.foreground = int(sampler.batch_size_per_image * sampler.positive_fraction)

    def targets(self, image: tuple[int, ...]) -> tuple[InputSpec, ...]:
        """Inputs besides images of a shape."""
        heads = self.model.roi_heads
        inputs = [
            _labels((self.regions,), heads.box_predictor.cls_score.out_features),
            InputSpec(name="region", kind="target", shape=(self.regions, 4)),
            InputSpec(name="truth", kind="target", shape=(5,)),
        ]
        if heads.has_mask():
            side = 2 * heads.mask_roi_pool.output_size[0]
            inputs.append(InputSpec(name="detail", kind="target", shape=(self.foreground, side, side)))
        if heads.has_keypoint():
            places = (4 * heads.keypoint_roi_pool.output_size[0]) ** 2
            shape = self.foreground, heads.keypoint_predictor.kps_score_lowres.out_channels
            inputs.append(InputSpec(name="detail", kind="label", shape=shape, dtype="int64", high=places))
        return tuple(inputs)

    def forward(
        self, image: Tensor, label: Tensor, region: Tensor, truth: Tensor, detail: Tensor | None = None
    ) -> Tensor:
        """Loss of images ``(batch, channels, height, width)`` with classes ``(batch, regions)`` of regions.

        A region ``(batch, regions, 4)`` is a middle and two sides, in halves of the image's sides from its middle on.
        Of `truth` ``(batch, 5)`` each anchor learns whether there is an object, and its box. `detail` are the masks
        ``(batch, foreground, height, width)`` or the places of keypoints ``(batch, foreground, keypoints)``.
        """
        heads = self.model.roi_heads
        features = self.model.backbone(image)
        levels = [features[name] for name in heads.box_roi_pool.featmap_names if name in features]
        scores, boxes = heads.box_predictor(heads.box_head(region_features(levels, region, heads.box_roi_pool)))
        loss = mean_cross_entropy(scores, label.flatten()) + mean_absolute_error(
            boxes.unflatten(-1, (-1, 4)), region.flatten(0, 1).unsqueeze(1).expand(-1, boxes.shape[1] // 4, -1)
        )
        for anchors, moved in zip(*self.model.rpn.head(list(features.values())), strict=True):
            there = (truth[:, 0] > 0)[:, None, None, None].expand_as(anchors)
            loss = loss + mean_binary_cross_entropy(anchors, there)
            box = truth[:, 1:].repeat(1, moved.shape[1] // 4)[:, :, None, None].expand_as(moved)
            loss = loss + mean_absolute_error(moved, box)
        front, kinds = region[:, : self.foreground], label[:, : self.foreground]
        if heads.has_mask():
            drawn = heads.mask_predictor(heads.mask_head(region_features(levels, front, heads.mask_roi_pool)))
            chosen = kinds.flatten()[:, None, None, None].expand(-1, 1, *drawn.shape[-2:])
            assert detail is not None
            loss = loss + mean_binary_cross_entropy(drawn.gather(1, chosen).squeeze(1), detail.flatten(0, 1) > 0)
        if heads.has_keypoint():
            maps = heads.keypoint_predictor(
                heads.keypoint_head(region_features(levels, front, heads.keypoint_roi_pool))
            )
            assert detail is not None
            loss = loss + mean_cross_entropy(maps.flatten(2), detail.flatten(0, 1))
        return loss


def region_features(levels: list[Tensor], region: Tensor, pool: Any) -> Tensor:
    """Features of regions, ``(batch · regions, channels, side, side)``, with an even share of regions on each level.

    As RoIAlign does (He et al., arXiv:1703.06870, section 3), each bin is the mean of values that are read between
    pixels. Regions come without a gradient, as proposals do.
    """
    side, points = pool.output_size[0], pool.output_size[0] * pool.sampling_ratio
    steps = (torch.arange(points, device=region.device, dtype=region.dtype) + 0.5) / points - 0.5
    offsets = torch.stack((steps.expand(points, points), steps[:, None].expand(points, points)), dim=-1)
    parts = []
    for level, part in zip(levels, region.tensor_split(len(levels), dim=1), strict=True):
        places = part[:, :, None, None, :2] + part[:, :, None, None, 2:] * offsets
        values = F.grid_sample(level, places.flatten(1, 2), align_corners=False)
        values = F.avg_pool2d(values, pool.sampling_ratio)
        parts.append(values.view(*values.shape[:2], part.shape[1], side, side).transpose(1, 2))
    return torch.cat(parts, dim=1).flatten(0, 1)


_FADING = 0.8
"""Of the loss of each earlier estimate of motion, of the next one's (Teed and Deng, arXiv:2003.12039, section 3.3)."""


class MotionEstimator(nn.Module):
    """A network that estimates where the pixels of an image are in the next one, with its loss."""

    notes = ()

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def targets(self, image: tuple[int, ...]) -> tuple[InputSpec, ...]:
        """Inputs besides images of a shape."""
        motion = InputSpec(name="motion", kind="target", shape=(2, *image[-2:]))
        return InputSpec(name="second", kind="image", shape=image), motion

    def forward(self, image: Tensor, second: Tensor, motion: Tensor) -> Tensor:
        """Loss of two images ``(batch, channels, height, width)`` and the motion ``(batch, 2, height, width)``."""
        estimates = self.model(image, second)
        parts = [mean_absolute_error(one, motion) * _FADING**n for n, one in enumerate(reversed(estimates))]
        return torch.stack(parts).sum()


Trained = Classifier | Detector | RegionDetector | MotionEstimator


def _labels(shape: tuple[int, ...], classes: int) -> InputSpec:
    return InputSpec(name="label", kind="label", shape=shape, dtype="int64", high=classes)


def _outputs(result: Any) -> list[tuple[float, Tensor]]:
    """Scores of classes, the main ones first, with their weights in the loss."""
    if isinstance(result, Tensor):
        return [(1.0, result)]
    parts = list(result.values()) if isinstance(result, dict) else list(result)
    scores = [part for part in parts if isinstance(part, Tensor)]
    return [(1.0 if place == 0 else _AUXILIARY_WEIGHT, part) for place, part in enumerate(scores)]


def load_vision(source: str, name: str, sequence_length: int | None) -> Network:
    """Describe the network `name` of the library that `source` stands for, with the side of its images behind `SIDE`.

    Raises
    ------
    InputError, NetworkError, UnsupportedError
        The library is not installed; it has no such network; the network is no classifier of images or pixels.
    """
    if sequence_length is not None:
        raise InputError(
            f"{source}:{name} takes no sequence length (given {sequence_length}); it reads images: leave it out"
        )
    library = LIBRARIES[source]
    try:
        import_module(library)
    except Exception as error:  # a build for another torch fails in ways of its own
        raise InputError(f"{source}: networks need {library} ({error}); install meshwright[vision]") from error
    spec = f"{source}:{name}"
    name, at, stated = name.partition(SIDE)
    if at and not (stated.isdecimal() and 0 < int(stated) <= _LARGEST_SIDE):
        raise InputError(f"{spec}: behind {SIDE} stands the side of images, a whole number of at most {_LARGEST_SIDE}")
    made = _make(source, name, None)
    side, channels = (int(stated),) * 2 if stated else _sides(source, name, made.model), _channels(made.model)
    image = (channels, _FRAMES, *side) if source == "tv" and _kind(name) == "video" else (channels, *side)
    parameters = sum(p.numel() for p in made.parameters())
    return Network(
        name=name,
        spec=spec,
        family="image",
        description=f"{type(made.model).__name__} of {parameters:,} parameters from {library}",
        default_global_batch=256,
        default_optimizer="momentum",
        sequence_length=None,
        inputs=(InputSpec(name="image", kind="image", shape=image), *made.targets(image)),
        notes=made.notes,
        make=partial(_make, source, name),
        content=f"{spec} {library} {metadata.version(library)}",
    )


def _names(source: str) -> list[str]:
    library = import_module(LIBRARIES[source])
    return list(library.list_models() if source == "timm" else library.models.list_models())


def _make(source: str, name: str, depth: int | None) -> Trained:
    library = import_module(LIBRARIES[source])
    if name not in _names(source):
        near = difflib.get_close_matches(name, _names(source), n=3)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise NetworkError(f"{source}:{name}: {LIBRARIES[source]} has no such network{meant}")
    detects = source == "tv" and _kind(name) == "detection"
    options: dict[str, Any] = {"weights": None, "weights_backbone": None} if detects or _segments(source, name) else {}
    try:
        model = unmaterialised(
            lambda: (
                library.create_model(name, pretrained=False)
                if source == "timm"
                else library.models.get_model(name, **(options or {"weights": None}))
            )
        )
    except Exception as error:
        raise NetworkError(f"{source}:{name}: {LIBRARIES[source]} cannot make it: {error}") from error
    if source == "tv" and _kind(name) == "optical_flow":
        return MotionEstimator(model)
    if detects:
        return RegionDetector(model) if hasattr(model, "roi_heads") else Detector(model)
    return Classifier(model, segments=_segments(source, name))


def _kind(name: str) -> str:
    """Part of torchvision that a network is from, such as ``segmentation`` or ``detection``; "" for classifiers."""
    models = import_module("torchvision.models")
    module = models.get_model_builder(name).__module__
    return next((part for part in ("segmentation", "detection", "video", "optical_flow") if f".{part}." in module), "")


def _segments(source: str, name: str) -> bool:
    return source == "tv" and _kind(name) == "segmentation"


def _sides(source: str, name: str, model: Any) -> tuple[int, ...]:
    """Height and width of images: those that the published weights were trained for, where the library says so."""
    given = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if given:
        return tuple(int(side) for side in given[1:])
    scaled = getattr(model, "transform", None)  # of networks that detect objects
    if scaled is not None:
        return tuple(scaled.fixed_size or (scaled.min_size[-1],) * 2)
    side = getattr(model, "image_size", None)
    if isinstance(side, int):
        return side, side
    weights = next(iter(import_module("torchvision.models").get_model_weights(name)), None) if source == "tv" else None
    cropped = getattr(weights and weights.transforms(), "crop_size", [_SIDE])
    return cropped[0], cropped[-1]


def _channels(model: Any) -> int:
    given = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    return int(given[0]) if given else 3
