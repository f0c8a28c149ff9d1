"""Which class of transformers trains a configuration, and the tensors that its forward pass is given.

Nothing here is about one family: the class follows from ``architectures`` or from the auto classes' tables, the tensors
from the names of its forward pass and from the sizes that the configuration states.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from planner.networks.inputs import InputSpec
from simulator.errors import NetworkError, UnsupportedError

_TASKS = """
    CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ IMAGE_TEXT_TO_TEXT MULTIMODAL_LM MASKED_LM
    ZERO_SHOT_IMAGE_CLASSIFICATION IMAGE_CLASSIFICATION CTC AUDIO_FRAME_CLASSIFICATION
    AUDIO_CLASSIFICATION VIDEO_CLASSIFICATION SEMANTIC_SEGMENTATION DEPTH_ESTIMATION
    TIME_SERIES_PREDICTION TOKEN_CLASSIFICATION SEQUENCE_CLASSIFICATION QUESTION_ANSWERING
    MASKED_IMAGE_MODELING VISUAL_QUESTION_ANSWERING DOCUMENT_QUESTION_ANSWERING TABLE_QUESTION_ANSWERING
    MULTIPLE_CHOICE IMAGE_TO_IMAGE TEXT_TO_WAVEFORM TEXT_TO_SPECTROGRAM PRETRAINING OBJECT_DETECTION
    INSTANCE_SEGMENTATION UNIVERSAL_SEGMENTATION KEYPOINT_DETECTION TIME_SERIES_CLASSIFICATION
    TIME_SERIES_REGRESSION AUDIO_XVECTOR ZERO_SHOT_OBJECT_DETECTION IMAGE_SEGMENTATION
    CAUSAL_IMAGE_MODELING RNNT TDT KEYPOINT_MATCHING NORMAL_ESTIMATION POINTMAP_ESTIMATION
    POSE_ESTIMATION IMAGE_MATTING NEXT_SENTENCE_PREDICTION
"""
_TABLES = tuple(_TASKS.split())
"""Tasks in the order in which a configuration without ``architectures`` is given one: generation before classes."""
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
"""Settings that are a layer's number of experts."""
LOSS_INPUTS = ("labels", "return_loss", "start_positions", "future_values", "sentence_order_label")
"""Arguments of a forward pass that ask for a loss."""
OBJECTS, BOXES = "ForObjectDetection", "boxes"
"""How names of classes end that detect objects, and the input of our loss for them beside their classes."""
_CLASSES = 1000
"""Bound of labels where the configuration states no number of classes."""
MAXIMUM_LENGTH = 4096
"""Tokens of a sample where the user names no number and the configuration allows more."""


def make_config(path: str, kind: str, settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Make the configuration of a model type, which takes no torch.

    Raises
    ------
    NetworkError
        transformers refuses it.
    """
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, CONFIG_MAPPING.keys(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "correct it, or write the network as py:MODULE:FACTORY"
        raise NetworkError(
            f"{path}: key 'model_type' is {kind!r}, which transformers {transformers.__version__} does not know; {hint}"
        )
    try:
        # transformers writes infinity as an object of its own
        config = transformers.AutoConfig.for_model(kind, **PreTrainedConfig._decode_special_floats(dict(settings)))
    except Exception as error:
        raise NetworkError(f"{path}: transformers refuses the config: {said(error)}; correct the key") from error
    return config


def said(error: Exception) -> str:
    """The text of an error, behind its type where the text alone is a key or an operation."""
    return f"{type(error).__name__}: {error}" if isinstance(error, (LookupError, ArithmeticError)) else str(error)


def check_experts(path: str, config: PreTrainedConfig) -> None:
    """Refuse a token that is to go to more experts than a layer has.

    Raises
    ------
    NetworkError
        It is.
    """
    experts, each = number(config, *EXPERTS), number(config, "num_experts_per_tok")
    if each > experts > 0:
        raise NetworkError(
            f"{path}: key 'num_experts_per_tok' is {each}, and a layer has {experts} experts; correct one of them"
        )


def looks_up(kind: str, key: str) -> bool:
    """Whether the module of a model type takes a key's value from the table of activations, as its source says."""
    return f"ACT2FN[config.{key}]" in _source(kind)


def _source(kind: str) -> str:
    """The source of the modules of a model type; "" where it lies elsewhere."""
    name = model_type_to_module_name(kind)
    place = Path(str(transformers.__file__)).parent / "models" / name / f"modeling_{name}.py"
    try:
        return place.read_text(encoding="utf-8")
    except OSError:
        return ""


def activations() -> frozenset[str]:
    """Names of activations, read from the source: its module needs torch. Empty where they are written otherwise."""
    source = Path(str(transformers.__file__)).with_name("activations.py")
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    tables = (node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))
    names = (key.value for table in tables for key in table.keys if isinstance(key, ast.Constant))
    return frozenset(name for name in names if isinstance(name, str))


def trainable_class(path: str, config: PreTrainedConfig, architectures: object) -> type[Any]:
    """The class that trains a configuration.

    Raises
    ------
    UnsupportedError
        No class of transformers computes a loss for this model type.
    """
    for name in architectures if isinstance(architectures, (list, tuple)) else ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if found is not None and _has_loss(found) and found.config_class is type(config):
            return found  # type: ignore[no-any-return]
    for table in (*_first_tables(config), *_TABLES):
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES", {}).get(config.model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            found = getattr(transformers, name, None)
            takes = getattr(found, "config_class", None) or type(config)
            if found is not None and _has_loss(found) and isinstance(config, takes):
                return found  # type: ignore[no-any-return]
    raise UnsupportedError(
        f"{path}: no class of transformers computes a loss for model_type {config.model_type!r}; write the network "
        "with its loss as py:MODULE:FACTORY"
    )


def _first_tables(config: PreTrainedConfig) -> tuple[str, ...]:
    """Tasks that come before generation: those of an encoder before a decoder, and of an encoder alone."""
    if getattr(config, "is_encoder_decoder", False):
        return ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
    return () if getattr(config, "is_decoder", False) else ("MASKED_LM",)


_NO_TRAINING = re.compile(r"if labels is not None:\s*raise ")


def _has_loss(found: Any) -> bool:
    """Whether a class computes a loss: some have an argument for labels, and refuse any."""
    if not any(name in LOSS_INPUTS for name in arguments_of(found)):
        return False
    try:
        return not _NO_TRAINING.search(inspect.getsource(inspect.unwrap(found.forward)))
    except (OSError, TypeError):
        return True


def arguments_of(model_class: type[Any]) -> tuple[str, ...]:
    """Names of a class's forward pass."""
    return tuple(inspect.signature(model_class.forward).parameters)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that reads tokens: itself where it has no parts."""
    parts = [getattr(config, name, None) for name in ("text_config", "llm_config", "language_config", "decoder")]
    part = next((found for found in parts if isinstance(found, PreTrainedConfig)), config)
    return part if part is config else text_config(part)


def number(config: Any, *names: str, default: int = 0) -> int:
    """The first of some settings that is a positive whole number; of a list its first."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default


def positions(config: PreTrainedConfig) -> int:
    """The longest sequence of tokens that a configuration allows; 0 where it states none."""
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length", "n_ctx")
    # Where tokens say what an image is searched for, there are fewer.
    return number(config, "max_text_len", default=number(text_config(config), *names))


def inputs_of(model_class: type[Any], config: PreTrainedConfig, length: int) -> dict[str, InputSpec]:
    """The tensors that a class is trained with by their names in its forward pass, in its order."""
    made = dict(_made(model_class, config, length))
    return {name: made[name] for name in (*arguments_of(model_class), BOXES) if name in made}


def _made(model_class: type[Any], config: PreTrainedConfig, length: int) -> Iterator[tuple[str, InputSpec]]:
    names = arguments_of(model_class)
    main = getattr(model_class, "main_input_name", "input_ids")
    text = text_config(config)
    vocabulary = number(text, "vocab_size", "n_token", default=number(config, "vocab_size", default=_CLASSES))
    encoder_decoder = "decoder_input_ids" in names
    reads_tokens = main == "input_ids" or ("input_ids" in names and getattr(config, "text_config", None) is not None)
    if reads_tokens and "input_ids" in names:
        yield "input_ids", InputSpec(name="tokens", kind="tokens", shape=(length,), dtype="int64", high=vocabulary)
    if encoder_decoder:
        tokens = InputSpec(name="decoder_tokens", kind="tokens", shape=(length,), dtype="int64", high=vocabulary)
        yield "decoder_input_ids", tokens
    if "bbox" in names:
        yield "bbox", InputSpec(name="boxes", kind="categories", shape=(length, 4), dtype="int64", high=_CLASSES)
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    sees = main == "pixel_values" or vision is not config or getattr(config, "image_size", None) is not None
    if "pixel_values" in names and sees:
        yield "pixel_values", _image(names, vision)
        if "high_res_pixel_values" in names:
            yield "high_res_pixel_values", _image(names, getattr(config, "high_res_vision_config", vision))
    if "pixel_values_videos" in names and main == "pixel_values_videos":
        frames = number(config, "num_frames", "frames_per_clip", default=16)
        image = _image(names, vision).shape[-3:]
        yield "pixel_values_videos", InputSpec(name="video", kind="image", shape=(frames, *image))
    yield from _sound(names, config, main)
    yield from _rows(names, config)
    if main == "past_values":
        yield from _series(names, config)
    yield from _wanted(model_class, names, config, text, length, vocabulary)


_PACKED = ("image_grid_thw", "spatial_shapes")
"""Arguments that tell how many patches the images have that a class is given as rows of patches."""
_PACKED_SIDE = 448
"""Pixels of a packed image's side where the configuration states none."""


def grid_of(config: Any) -> tuple[int, int]:
    """Patches of an image upwards and sideways, of which whole blocks are merged and whole windows attended to."""
    vision = getattr(config, "vision_config", None) or config
    patch = number(vision, "patch_size", "spatial_patch_size", default=14)
    merged = number(vision, "spatial_merge_size", "merge_kernel_size", "downsample_factor", default=2)
    block = max(merged, number(vision, "window_size") // patch // merged * merged)
    side = number(vision, "image_size", default=_PACKED_SIDE)
    count = max(side // patch // block, 1) * block
    return count, count


def _image(names: tuple[str, ...], config: Any) -> InputSpec:
    if any(name in names for name in _PACKED):
        patch = number(config, "patch_size", "spatial_patch_size", default=14)
        frames = number(config, "temporal_patch_size", default=1)
        channels = number(config, "num_channels", "in_channels", "in_chans", default=3)
        return InputSpec(name="image", kind="image", shape=(prod(grid_of(config)), channels * frames * patch**2))
    size = getattr(config, "image_size", None) or getattr(config, "img_size", None) or 224
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    channels = number(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = number(config, "num_frames") if "num_frames" in vars(config) else 0
    shape: tuple[int, ...] = (channels, int(sides[0]), int(sides[-1]))
    if "aspect_ratio_ids" in names:  # tiles of one image
        shape = (1, number(config, "max_num_tiles", default=4), *shape)
    elif "pixel_attention_mask" in names:  # several images a sample, one here
        shape = (1, *shape)
    return InputSpec(name="image", kind="image", shape=(frames, *shape) if frames > 1 else shape)


def _rows(names: tuple[str, ...], config: Any) -> Iterator[tuple[str, InputSpec]]:
    """Tokens of a part in between, and features of regions and patches that were made before."""
    between = getattr(config, "qformer_config", None)
    if "qformer_input_ids" in names and between is not None:
        vocabulary = number(between, "vocab_size", default=_CLASSES)
        shape = (_QUESTION,)
        yield (
            "qformer_input_ids",
            InputSpec(name="question", kind="tokens", shape=shape, dtype="int64", high=vocabulary),
        )
    if "visual_feats" in names:
        yield (
            "visual_feats",
            InputSpec(
                name="regions", kind="features", shape=(_REGIONS, number(config, "visual_feat_dim", default=2048))
            ),
        )
        yield (
            "visual_pos",
            InputSpec(name="places", kind="features", shape=(_REGIONS, number(config, "visual_pos_dim", default=4))),
        )
    if "flattened_patches" in names:
        vision = getattr(config, "vision_config", None) or config
        # A patch has its row and column before its pixels.
        rows, pixels = number(vision, "seq_len", default=2048), 3 * number(vision, "patch_size", default=16) ** 2
        yield "flattened_patches", InputSpec(name="patches", kind="features", shape=(rows, pixels + 2))


_QUESTION, _REGIONS = 32, 36
"""Tokens of a question to the part between images and text, and regions of an image."""
SAMPLES = 16_000
"""Numbers of a wave: a second of speech."""


def _sound(names: tuple[str, ...], config: Any, main: str) -> Iterator[tuple[str, InputSpec]]:
    names_of = ("audio_config", "encoder_config", "encoder")
    sound = next((part for name in names_of if (part := getattr(config, name, None)) is not None), config)
    if "input_values" in names and main in ("input_values", "inputs"):
        bins = 0 if hasattr(sound, "conv_dim") else number(sound, "num_mel_bins")
        frames = number(sound, "max_length", "max_time_positions", default=1024)
        shape = (frames, bins) if bins else (SAMPLES,)
        yield "input_values", InputSpec(name="sound", kind="features", shape=shape)
    if "input_features" in names and (main == "input_features" or getattr(config, "audio_config", None) is not None):
        keys: tuple[str, ...] = ("num_mel_bins", "input_feat_per_channel", "feature_size")
        stacked = re.search(r"Linear\(config\.num_mel_bins \* (\d+)", _source(getattr(sound, "model_type", "")))
        keys = keys if main != "input_features" else ("input_dim", *keys)
        bins = number(sound, "input_size", *keys, default=80) * (int(stacked[1]) if stacked else 1)
        positions_of = number(sound, "max_source_positions")
        first = main == "input_features" and "input_feat_per_channel" not in vars(sound) and positions_of
        if first or _bins_first(getattr(sound, "model_type", "")):
            shape = (bins, 2 * positions_of or FRAMES)
        else:
            shape = (1024, bins)
        yield "input_features", InputSpec(name="sound", kind="features", shape=shape)


FRAMES = 3000
"""Frames of a sound: of half a minute."""


def _bins_first(kind: str) -> bool:
    """Whether a model type takes frequencies before frames: whether it convolves over these, as its source says."""
    return bool(re.search(r"Conv1d\(\s*(self\.|config\.)?num_mel_bins", _source(kind)))


def _series(names: tuple[str, ...], config: Any) -> Iterator[tuple[str, InputSpec]]:
    length = number(config, "context_length", default=64)
    lags = max(getattr(config, "lags_sequence", None) or [0])
    channels = number(config, "num_input_channels", "input_size", default=1)
    series = () if channels == 1 and lags else (channels,)
    yield "past_values", InputSpec(name="past", kind="features", shape=(length + lags, *series))
    if "past_time_features" in names:
        count = number(config, "num_time_features", default=0)
        yield "past_time_features", InputSpec(name="times", kind="features", shape=(length + lags, count))
        yield "past_observed_mask", InputSpec(name="seen", kind="features", shape=(length + lags, *series))
    ahead = number(config, "prediction_length", default=24)
    if "future_values" in names:
        yield "future_values", InputSpec(name="target", kind="target", shape=(ahead, *series))
    if "future_time_features" in names:
        yield "future_time_features", InputSpec(name="times_ahead", kind="features", shape=(ahead, count))


def _wanted(
    model_class: type[Any], names: tuple[str, ...], config: Any, text: Any, length: int, vocabulary: int
) -> Iterator[tuple[str, InputSpec]]:
    """What the loss compares the outputs with."""
    kind = model_class.__name__
    classes = number(config, "num_labels", default=2)
    if "start_positions" in names and "labels" not in names:
        for name in ("start_positions", "end_positions"):
            yield name, InputSpec(name=name, kind="label", shape=(), dtype="int64", high=length)
    if "labels" not in names:
        return
    image = number(config, "image_size", default=224)
    if _predicts_tokens(kind):
        masked = "MaskedLM" in kind or "PreTraining" in kind
        name, what = ("original_tokens", "tokens") if masked else ("next_tokens", "next_tokens")
        if "ForCTC" in kind:
            length, name, what = 32, "text", "target"
        yield "labels", InputSpec(name=name, kind=what, shape=(length,), dtype="int64", high=vocabulary)
    elif "TokenClassification" in kind:
        yield "labels", InputSpec(name="label", kind="next_tokens", shape=(length,), dtype="int64", high=classes)
    elif "SemanticSegmentation" in kind:
        yield "labels", InputSpec(name="label", kind="label", shape=(image, image), dtype="int64", high=classes)
    elif kind.endswith(OBJECTS):
        found = number(config, "num_queries", "num_detection_tokens", default=100)
        yield "labels", InputSpec(name="classes", kind="label", shape=(found,), dtype="int64", high=classes)
        yield BOXES, InputSpec(name="boxes", kind="target", shape=(found, 4))
    elif "DepthEstimation" in kind:
        yield "labels", InputSpec(name="target", kind="target", shape=(image, image))
    else:
        yield "labels", InputSpec(name="label", kind="label", shape=(), dtype="int64", high=classes)


def _predicts_tokens(kind: str) -> bool:
    ends = ("ForCTC", "ForPreTraining", "MTModel", "DecoderModel")
    return kind.endswith(ends) or any(word in kind for word in ("LM", "Generation", "ToText", "2Text"))


def known_arguments(
    model_class: type[Any], config: PreTrainedConfig, given: Mapping[str, InputSpec], batch: int, *, sizes: bool = False
) -> dict[str, Any]:
    """What a class is told of the images of a batch: numbers that are known before a step, as lists.

    Some classes take `sizes` of images, which only some of their vision towers can do with.
    """
    names = arguments_of(model_class)
    found: dict[str, Any] = {}
    image = given.get("pixel_values")
    if image is not None:
        vision = getattr(config, "vision_config", None) or config
        # A batch of images is told as the frames of one clip, which are apart from one another.
        if "image_grid_thw" in names:
            found["image_grid_thw"] = [[batch, *grid_of(vision)]]
        if "spatial_shapes" in names:
            found["spatial_shapes"] = [list(grid_of(vision))] * batch
            found["pixel_attention_mask"] = [[1] * image.shape[0]] * batch
        if "image_sizes" in names and sizes:
            found["image_sizes"] = [list(image.shape[-2:])] * batch
        if "image_embeds_position_mask" in names:
            rows, length = number(config, "latent_query_num"), given["input_ids"].shape[0]
            found["image_embeds_position_mask"] = [[place < rows for place in range(length)]] * batch
    return found


_MASKS = {
    "attention_mask": ("input_ids", "input_features", "input_values"),
    "decoder_attention_mask": ("decoder_input_ids",),
    "input_features_mask": ("input_features",),
    "feature_attention_mask": ("input_features",),
    "encoder_attention_mask": ("input_ids",),
    "qformer_attention_mask": ("qformer_input_ids",),
    "visual_attention_mask": ("visual_feats",),
    "padding_mask": ("input_values",),
}
"""Arguments that are masks of rows, with the inputs that may have these."""


def masks_of(model_class: type[Any], given: Mapping[str, InputSpec]) -> dict[str, int]:
    """How many rows of a sample the masks of a class are of."""
    names = arguments_of(model_class)
    found = {}
    for mask, owners in _MASKS.items():
        owner = next((given[name] for name in owners if name in given), None)
        if mask in names and owner is not None:
            found[mask] = max(owner.shape) if owner.kind == "features" else owner.shape[0]
    return found


def fixed_arguments(model_class: type[Any]) -> Mapping[str, object]:
    """Arguments that are no tensors."""
    names = arguments_of(model_class)
    fixed: dict[str, object] = {"return_loss": True, "use_cache": False, "return_dict": True}
    return {name: value for name, value in fixed.items() if name in names}
