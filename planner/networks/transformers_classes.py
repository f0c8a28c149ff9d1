"""Which class of transformers trains a configuration, and the tensors that its forward pass is given.

Nothing here is about one family: the class follows from ``architectures`` or from the auto classes' tables, the tensors
from the names of its forward pass and from the sizes that the configuration states.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Iterator, Mapping
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
    name = model_type_to_module_name(kind)
    source = Path(str(transformers.__file__)).parent / "models" / name / f"modeling_{name}.py"
    try:
        return f"ACT2FN[config.{key}]" in source.read_text(encoding="utf-8")
    except OSError:
        return False


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


def _has_loss(found: Any) -> bool:
    return any(name in LOSS_INPUTS for name in arguments_of(found))


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
    return number(text_config(config), *names)


def inputs_of(model_class: type[Any], config: PreTrainedConfig, length: int) -> dict[str, InputSpec]:
    """The tensors that a class is trained with by their names in its forward pass, in its order."""
    made = dict(_made(model_class, config, length))
    return {name: made[name] for name in arguments_of(model_class) if name in made}


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
    vision = getattr(config, "vision_config", None) or config
    if "pixel_values" in names and (main == "pixel_values" or getattr(config, "vision_config", None) is not None):
        yield "pixel_values", _image(names, vision)
    if "pixel_values_videos" in names and main == "pixel_values_videos":
        frames = number(config, "num_frames", "frames_per_clip", default=16)
        image = _image(names, config)
        yield "pixel_values_videos", InputSpec(name="video", kind="image", shape=(frames, *image.shape))
    yield from _sound(names, config, main)
    if main == "past_values":
        yield from _series(names, config)
    yield from _wanted(model_class, names, config, text, length, vocabulary)


def _image(names: tuple[str, ...], config: Any) -> InputSpec:
    size = getattr(config, "image_size", None) or getattr(config, "img_size", None) or 224
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    channels = number(config, "num_channels", "in_channels", "in_chans", default=3)
    frames = number(config, "num_frames") if "num_frames" in vars(config) else 0
    shape = (channels, int(sides[0]), int(sides[-1]))
    return InputSpec(name="image", kind="image", shape=(frames, *shape) if frames > 1 else shape)


SAMPLES = 16_000
"""Numbers of a wave: a second of speech."""


def _sound(names: tuple[str, ...], config: Any, main: str) -> Iterator[tuple[str, InputSpec]]:
    sound = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    if "input_values" in names and main == "input_values":
        bins = number(sound, "num_mel_bins")
        frames = number(sound, "max_length", "max_time_positions", default=1024)
        shape = (frames, bins) if bins else (SAMPLES,)
        yield "input_values", InputSpec(name="sound", kind="features", shape=shape)
    if "input_features" in names and (main == "input_features" or getattr(config, "audio_config", None) is not None):
        bins = number(sound, "num_mel_bins", "input_feat_per_channel", "feature_size", default=80)
        positions_of = number(sound, "max_source_positions")
        first = main == "input_features" and "input_feat_per_channel" not in vars(sound) and positions_of
        shape = (bins, 2 * positions_of) if first else (1024, bins)
        yield "input_features", InputSpec(name="sound", kind="features", shape=shape)


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
    elif "DepthEstimation" in kind:
        yield "labels", InputSpec(name="target", kind="target", shape=(image, image))
    else:
        yield "labels", InputSpec(name="label", kind="label", shape=(), dtype="int64", high=classes)


def _predicts_tokens(kind: str) -> bool:
    ends = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForCTC", "ForPreTraining")
    return kind.endswith(ends) or "LM" in kind or "Generation" in kind


def fixed_arguments(model_class: type[Any]) -> Mapping[str, object]:
    """Arguments that are no tensors."""
    names = arguments_of(model_class)
    fixed: dict[str, object] = {"return_loss": True, "use_cache": False, "return_dict": True}
    return {name: value for name, value in fixed.items() if name in names}
