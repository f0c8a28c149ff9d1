"""Networks of timm and torchvision by name, with random weights: nothing is downloaded."""

from __future__ import annotations

import difflib
from functools import partial
from importlib import import_module, metadata
from typing import Any

from torch import Tensor, nn

from planner.graph.tracing import unmaterialised
from planner.networks.inputs import InputSpec
from planner.networks.losses import mean_absolute_error, mean_binary_cross_entropy, mean_cross_entropy
from planner.networks.network import Network
from simulator.errors import InputError, NetworkError, UnsupportedError

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

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

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

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

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
    label = side if _segments(source, name) else ()
    parameters = sum(p.numel() for p in made.parameters())
    return Network(
        name=name,
        spec=spec,
        family="image",
        description=f"{type(made.model).__name__} of {parameters:,} parameters from {library}",
        default_global_batch=256,
        default_optimizer="momentum",
        sequence_length=None,
        inputs=(
            InputSpec(name="image", kind="image", shape=image),
            InputSpec(name="label", kind="label", shape=label, dtype="int64", high=_CLASSES),
            *([InputSpec(name="box", kind="target", shape=(4,))] if isinstance(made, Detector) else []),
        ),
        make=partial(_make, source, name),
        content=f"{spec} {library} {metadata.version(library)}",
    )


def _names(source: str) -> list[str]:
    library = import_module(LIBRARIES[source])
    return list(library.list_models() if source == "timm" else library.models.list_models())


def _make(source: str, name: str, depth: int | None) -> nn.Module:
    library = import_module(LIBRARIES[source])
    if name not in _names(source):
        near = difflib.get_close_matches(name, _names(source), n=3)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise NetworkError(f"{source}:{name}: {LIBRARIES[source]} has no such network{meant}")
    if source == "tv" and _kind(name) == "optical_flow":
        raise UnsupportedError(
            f"{source}:{name} compares two images, and no loss of it is known here; write it with its loss as "
            "py:MODULE:FACTORY"
        )
    detects = source == "tv" and _kind(name) == "detection"
    if detects and "rcnn" in name:
        raise UnsupportedError(
            f"{source}:{name} looks at regions that it finds itself, whose number and places depend on the image; "
            "write it with fixed regions as py:MODULE:FACTORY, or use a network that detects in one pass, such as "
            "tv:retinanet_resnet50_fpn"
        )
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
    return Detector(model) if detects else Classifier(model)


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
