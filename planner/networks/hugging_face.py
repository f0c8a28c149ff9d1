"""Networks from a Hugging Face ``config.json``; nothing is downloaded and no code of the folder is run."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from planner.graph import cache
from planner.networks.adapters import CONFIG as ADAPTER_CONFIG
from planner.networks.adapters import read_adapters
from planner.networks.child import forks, in_child
from planner.networks.decoder.known import READ, hugging_face_decoder
from planner.networks.inputs import InputSpec
from planner.networks.mindformers_config import transformers_config
from planner.networks.network import CAPTURED_BLOCKS, Facts, Network
from planner.networks.zoo.table import EXPERTS_NOTE, language_inputs
from simulator.errors import InputError, MeshwrightError, NetworkError
from simulator.input_file import FileKind, is_regular
from simulator.whole_file import write_whole

if TYPE_CHECKING:
    from torch import nn

CONFIG_FILE = FileKind(name="config", remedy="give a config.json or its folder", error=NetworkError)
MAXIMUM_SEQUENCE_LENGTH = 4096
MAXIMUM_SIZE = 1 << 24
MAXIMUM_LAYERS = 10_000
"""Modules and plans of more take minutes and gigabytes."""
_IGNORED_KEYS = {
    *("architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "quantization_config"),
    *("_name_or_path", "attn_implementation", "_attn_implementation", "experts_implementation", "model_type"),
    *("_experts_implementation", "return_dict", "use_cache", "output_hidden_states", "output_attentions"),
    "torchscript",
}


class _ModelType(NamedTuple):
    """Keys of a model type's sizes, with the value each has when the file leaves it out; ``vocab_size`` is a number."""

    layers: tuple[str, int]
    vocabulary: int
    positions: tuple[str, int]
    sizes: tuple[str, ...]
    masked: bool = False


_LAYERS, _POSITIONS = ("num_hidden_layers", 32), "max_position_embeddings"
_BERT_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "type_vocab_size")
_ROTARY_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_LATENT_SIZES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
)
MODEL_TYPES = {
    "gpt2": _ModelType(("n_layer", 12), 50257, ("n_positions", 1024), ("n_embd", "n_head", "n_inner")),
    "llama": _ModelType(_LAYERS, 32000, (_POSITIONS, 2048), _ROTARY_SIZES),
    "bert": _ModelType((_LAYERS[0], 12), 30522, (_POSITIONS, 512), _BERT_SIZES, masked=True),
    "mixtral": _ModelType(
        _LAYERS, 32000, (_POSITIONS, 4096 * 32), (*_ROTARY_SIZES, "num_local_experts", "num_experts_per_tok")
    ),
    "deepseek_v2": _ModelType(_LAYERS, 102400, (_POSITIONS, 2048), _LATENT_SIZES),
    "deepseek_v3": _ModelType((_LAYERS[0], 61), 129280, (_POSITIONS, 4096), _LATENT_SIZES),
}
"""Model types that are described without transformers: decoders whose graphs are written, and their like."""
PREDICTED = "max_predictions_per_seq"
"""Key of how many positions of a sample a masked network predicts, which are the first ones here: all cost the same.

It is named as in the data scripts of BERT; configs of transformers have no such key, and predict every position."""
WITH_EXPERTS = ("mixtral", "deepseek_v2", "deepseek_v3")
_DENSE_LAYERS: Mapping[str, int] = {"deepseek_v2": 0, "deepseek_v3": 3}
"""Layers in front whose feed-forward layers are no experts, where a config does not say."""
_LATENT: dict[str, Any] = {"num_attention_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64}
_LATENT |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
_LATENT |= {"tie_word_embeddings": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    **READ,
    "deepseek_v2": _LATENT | {
        "hidden_size": 4096, "intermediate_size": 11008, "moe_intermediate_size": 1407, "num_attention_heads": 32,
        "n_shared_experts": 2, "n_routed_experts": 64,
        "first_k_dense_replace": _DENSE_LAYERS["deepseek_v2"],
    },
    "deepseek_v3": _LATENT | {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_routed_experts": 256,
        "first_k_dense_replace": _DENSE_LAYERS["deepseek_v3"],
    },
}  # fmt: skip
"""Sizes that a configuration has where the file leaves them out, as transformers 5 has them; depths and vocabularies
stand in `MODEL_TYPES`."""
_ALIASES = {"gpt2": {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}}
_ALIASES["gpt2"]["max_position_embeddings"] = "n_positions"


def load_config(place: str, sequence_length: int | None) -> Network:
    """Make a network from a ``config.json`` or the folder that holds one, without importing torch.

    Where the folder holds an ``adapter_config.json`` of PEFT, the network is trained by adapters alone.
    """
    path, adapted = _files(Path(place))
    config = _read(path)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise NetworkError(f"{path}: key 'model_type' is {kind!r}; it must name a model type of transformers")
    _check_sizes(path, config)
    if kind not in MODEL_TYPES:
        return _described(place, path, adapted, config, sequence_length)
    model = MODEL_TYPES[kind]
    settings = {_ALIASES.get(kind, {}).get(key, key): v for key, v in config.items() if key not in _IGNORED_KEYS}
    layers, vocabulary, positions = (
        _size(path, settings, *k) for k in (model.layers, ("vocab_size", model.vocabulary), model.positions)
    )
    for key in model.sizes:
        if settings.get(key) is not None:
            _size(path, settings, key, 1)
    length = sequence_length or min(positions, MAXIMUM_SEQUENCE_LENGTH)
    if length > positions:
        raise InputError(
            f"{path}: {model.positions[0]} is {positions}, fewer than the sequence length {length}; use --seq-len "
            f"{positions} or less"
        )
    settings, dropout = _without_dropout(settings, kind)
    notes: tuple[str, ...] = (f"dropout is left out ({', '.join(dropout)} of the config)",) if dropout else ()
    stored, said = _quantised(path, config, adapted=adapted is not None)
    notes += said
    if kind in WITH_EXPERTS:
        notes += (EXPERTS_NOTE,)
    predicted = _predicted(path, kind, settings, length)
    decoder = hugging_face_decoder(kind, settings)
    if decoder is None:
        _check_without_torch(path, kind, settings)
    adapters, content = None, json.dumps({"hf": kind, **settings}, sort_keys=True)
    if adapted is not None:
        adapters, more = read_adapters(adapted, _read(adapted))
        notes, content = notes + more, f"{content}\n{adapters!r}"
    named = adapted or path
    return Network(
        name=named.parent.name if named.name in ("config.json", ADAPTER_CONFIG) and named.parent.name else named.stem,
        spec=f"hf:{place}",
        family="language",
        description=f"{kind} of {layers} layers from {path}",
        default_global_batch=64,
        default_optimizer="adamw",
        sequence_length=length,
        inputs=language_inputs(vocabulary, length, masked=model.masked),
        make=partial(_make, (str(path), str(adapted)), kind, settings, length, predicted=predicted, adapters=adapters),
        depth=layers,
        # Nothing goes back into a first block behind frozen embeddings, which makes it unlike the others.
        captured_blocks=_captured_blocks(path, kind, settings) + (adapters is not None),
        content=content,
        notes=notes,
        stored=stored,
        config={}
        if model.masked
        else {**_DEFAULTS[kind], **settings, model.layers[0]: layers, "vocab_size": vocabulary},
        decoder=decoder
        if adapters is None and (length > 1 or kind != "mixtral") and not _windowed(settings, length)
        else None,
    )


def _predicted(path: Path, kind: str, settings: Mapping[str, Any], length: int) -> int | None:
    """Positions of a sample whose tokens a masked network predicts; None where all are."""
    if settings.get(PREDICTED) is None:
        return None
    if not MODEL_TYPES[kind].masked:
        raise NetworkError(f"{path}: key {PREDICTED!r} is for masked networks, not for {kind!r}; leave it out")
    count = _size(path, settings, PREDICTED, 1)
    if count > length:
        raise NetworkError(f"{path}: key {PREDICTED!r} is {count}, more than the {length} tokens; correct it")
    return count


def _captured_blocks(path: Path, kind: str, settings: Mapping[str, Any]) -> int:
    """Blocks that stand for all: of those behind dense ones more than of these, so that they are told apart."""
    key = "first_k_dense_replace"
    dense = _DENSE_LAYERS.get(kind, 0)
    if kind in _DENSE_LAYERS and settings.get(key, dense) != 0:
        dense = _size(path, settings, key, dense)
    elif settings.get(key) == 0:
        dense = 0
    return dense + max(CAPTURED_BLOCKS, dense + 1)


def _files(place: Path) -> tuple[Path, Path | None]:
    """The config, and that of adapters if a folder has one; its base may lie in another folder, which it names."""
    folder = place.parent if place.name == ADAPTER_CONFIG else place
    adapted = folder / ADAPTER_CONFIG
    if not is_regular(adapted):
        return place / "config.json" if os.path.isdir(place) else place, None  # noqa: PTH112 no path is too long for it
    path = folder / "config.json"
    base = _read(adapted).get("base_model_name_or_path")
    if is_regular(path) or not base:
        return path, adapted
    elsewhere = Path(str(base)) / "config.json"
    if not is_regular(elsewhere):
        raise NetworkError(
            f"{adapted}: key 'base_model_name_or_path' is {base!r}, where no config.json lies; nothing is downloaded: "
            f"put that network's config.json into {folder}"
        )
    return elsewhere, adapted


def _read(path: Path) -> dict[str, Any]:
    """The keys of a ``config.json``, or what a YAML file of MindFormers states of a network."""
    if path.suffix in (".yaml", ".yml"):
        document = CONFIG_FILE.yaml(CONFIG_FILE.read(path), path, strict=False)
        found = transformers_config(document) if isinstance(document, dict) else {}
        if not found:
            raise NetworkError(f"{path} states no sizes under model.model_config; name the network, such as hf:FOLDER")
        return found
    value = CONFIG_FILE.json(CONFIG_FILE.read(path), path, constants=True)
    if not isinstance(value, dict):
        raise NetworkError(f"{path} holds a {type(value).__name__}; a config is a JSON object")
    return value


def _size(path: Path, settings: Mapping[str, Any], key: str, default: int) -> int:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAXIMUM_SIZE:
        raise NetworkError(f"{path}: key {key!r} is {value!r}; it must be a whole number from 1 to {MAXIMUM_SIZE}")
    return value


def _without_dropout(settings: dict[str, Any], kind: str) -> tuple[dict[str, Any], list[str]]:
    defaults = {
        "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        "llama": {"attention_dropout": 0.0},
        "mixtral": {"attention_dropout": 0.0, "router_jitter_noise": 0.0},
        "deepseek_v2": {"attention_dropout": 0.0},
        "deepseek_v3": {"attention_dropout": 0.0},
    }[kind]
    removed = sorted(key for key, default in defaults.items() if settings.get(key, default))
    return {**settings, **dict.fromkeys(defaults, 0.0)}, removed


def _quantised(path: Path, config: Mapping[str, Any], *, adapted: bool) -> tuple[str, tuple[str, ...]]:
    """How frozen weights are stored in few bits, a key of `STORED_BYTES`, and a note that says so.

    Weights that are trained are stored in the precision of the plan, and so are those of methods that are not known.
    """
    value = config.get("quantization_config")
    if not value:
        return "", ()
    if not isinstance(value, dict):
        raise NetworkError(f"{path}: key 'quantization_config' is {value!r}; it must be an object, or left out")
    method, bits = value.get("quant_method", ""), next((n for n in (4, 8) if value.get(f"load_in_{n}bit")), 0)
    known = bits and method in ("", "bitsandbytes")
    if known and adapted:
        return (
            {4: "nf4", 8: "int8"}[bits],
            (f"frozen weights of linear layers are stored in {bits} bits, and cast for every product that reads them",),
        )
    why = "all weights are trained" if known else f"quant_method {method or 'is not said'}"
    return "", (f"quantization_config is left out ({why}): weights are stored in the precision of the plan",)


def _windowed(settings: Mapping[str, Any], length: int) -> bool:
    """Whether tokens attend to some of those before them alone."""
    window = settings.get("sliding_window")
    return isinstance(window, int) and window < length


def _make(
    paths: tuple[str, str], kind: str, settings: Mapping[str, Any], length: int, depth: int | None, **options: Any
) -> nn.Module:
    """The module of a configuration, of `depth` layers if given; `options` are those of `trained`."""
    if depth is not None:
        settings = {**settings, MODEL_TYPES[kind].layers[0]: depth}
    settings = {key: value for key, value in settings.items() if key != PREDICTED}
    module: nn.Module = _built(lambda m: m.trained(paths, kind, settings, length, **options), paths[0], kind)
    return module


_ROTARY = ("llama", "mixtral")
_HEADS = {"gpt2": ("n_embd", "n_head"), **dict.fromkeys(("bert", *_ROTARY), ("hidden_size", "num_attention_heads"))}
"""Sizes of which one divides the other, and at which transformers looks when it makes the module."""
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")


def _check_without_torch(path: Path, kind: str, settings: Mapping[str, Any]) -> None:
    """Refuse what transformers refuses before torch is imported, which takes seconds and 600 MB.

    Its class of the configuration looks at the values in a fork that has no torch, once for a configuration.
    """
    if kind in _HEADS and all(settings.get(key) is not None for key in _HEADS[kind]):
        hidden, heads = (_size(path, settings, key, 1) for key in _HEADS[kind])
        whole = "head_dim" not in settings if kind in _ROTARY else True
        if whole and (hidden < heads if kind in _ROTARY else hidden % heads):
            raise NetworkError(
                f"{path}: the hidden size {hidden} is not dealt out over {heads} attention heads; correct it"
            )
    rotary = settings.get("rope_parameters")
    for part in (settings, rotary if isinstance(rotary, dict) else {}):
        theta = part.get("rope_theta")
        if theta is not None and (isinstance(theta, bool) or not isinstance(theta, (int, float)) or theta <= 0):
            raise NetworkError(f"{path}: key 'rope_theta' is {theta!r}; it must be a number above 0")
    if "torch" in sys.modules or not forks():
        return
    settings = {key: value for key, value in settings.items() if key != PREDICTED}
    content = json.dumps({"hf": kind, **settings}, sort_keys=True) + cache.toolchain()
    folder, digest = cache.folder(), hashlib.sha256(content.encode()).hexdigest()
    checked = None if folder is None else folder / f"{digest}.checked.json"
    if checked is not None and checked.exists():
        return
    with suppress(ImportError):  # the child says that it is missing
        import_module("transformers")  # takes no torch; imported before the fork, both processes have it
    in_child(f"hf:{path}", partial(_transformers_checks, str(path), kind, settings))
    if checked is not None:
        with suppress(OSError, InputError):  # a full or read-only disk is no error
            checked.parent.mkdir(parents=True, exist_ok=True)
            write_whole(checked, "{}")


def _transformers_checks(path: str, kind: str, settings: Mapping[str, Any]) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers finds none, then
    logging.disable()
    try:
        from transformers.utils import import_utils

        for asked in vars(import_utils).values():  # what it has found out about torch before
            if hasattr(asked, "cache_clear"):
                asked.cache_clear()
        from planner.networks.transformers_classes import activations, check_experts, looks_up, make_config
    except ImportError as error:
        raise InputError(f"hf: networks need transformers ({error}); install meshwright[hf]") from error
    check_experts(path, make_config(path, kind, settings))
    known = activations()
    for key in _ACTIVATIONS:
        value = settings.get(key)
        if isinstance(value, str) and known and value not in known and looks_up(kind, key):
            near = difflib.get_close_matches(value, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(sorted(known))}"
            raise NetworkError(f"{path}: key {key!r} is {value!r}, which transformers does not know; {hint}")


Made = TypeVar("Made")


def _built(make: Callable[[Any], Made], path: str, kind: str) -> Made:
    """Call the module that needs transformers."""
    try:
        from planner.networks import hugging_face_modules
    except ImportError as error:
        raise InputError(f"hf: networks need transformers ({error}); install meshwright[hf]") from error
    try:
        return make(hugging_face_modules)
    except MeshwrightError:
        raise
    except Exception as error:  # transformers checks few values of a config: whatever it raises, the config is wrong
        raise NetworkError(
            f"{path}: no {kind} network has these values ({type(error).__name__}: {error}); correct the key that this "
            "names, or compare the config with one of its kind that works"
        ) from error


def _facts(
    path: Path, kind: str, settings: Mapping[str, Any], architectures: object, sequence_length: int | None
) -> Facts:
    """Ask transformers about a configuration, or the cache: the answer takes torch and seconds."""
    asked = {"facts": kind, "architectures": architectures, "sequence_length": sequence_length, **settings}
    key = hashlib.sha256((json.dumps(asked, sort_keys=True) + cache.toolchain()).encode()).hexdigest()
    known = cache.read(key)
    if known is not None:
        inputs = tuple(InputSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in known["inputs"])
        return Facts(**{**known, "inputs": inputs, "dropout": tuple(known["dropout"])})
    _check_without_torch(path, kind, settings)
    found: Facts = _built(lambda m: m.facts(str(path), kind, settings, architectures, sequence_length), str(path), kind)
    cache.write(key, asdict(found))
    return found


def _described(
    place: str, path: Path, adapted: Path | None, config: Mapping[str, Any], sequence_length: int | None
) -> Network:
    """A network of any model type that transformers trains, as its own classes describe it."""
    kind = str(config["model_type"])
    settings = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
    adapters, notes = (None, ()) if adapted is None else read_adapters(adapted, _read(adapted))
    architectures = config.get("architectures")
    content = json.dumps({"hf": kind, "architectures": architectures, **settings}, sort_keys=True)
    content += "" if adapters is None else f"\n{adapters!r}"
    facts = _facts(path, kind, settings, architectures, sequence_length)
    named, paths = adapted or path, (str(path), str(adapted))
    stored, quantised = _quantised(path, config, adapted=adapted is not None)
    dropout = (f"dropout is left out ({', '.join(facts.dropout)} of the config)",) if facts.dropout else ()
    return Network(
        name=named.parent.name if named.name in ("config.json", ADAPTER_CONFIG) and named.parent.name else named.stem,
        spec=f"hf:{place}",
        family=facts.family,
        description=f"{facts.class_name} from {path}",
        default_global_batch=64,
        default_optimizer="adamw",
        sequence_length=facts.sequence_length,
        inputs=facts.inputs,
        make=partial(
            _make, paths, kind, settings, facts.sequence_length or 0, architectures=architectures, adapters=adapters
        ),
        content=content,
        stored=stored,
        config=facts.config,
        notes=dropout + quantised + ((EXPERTS_NOTE,) if facts.experts else ()) + notes,
    )


_SIZES = re.compile(r"(^|_)((hidden|intermediate|vocab|patch|image)_size|d_model|n_embd|heads|n_head|head_dim)$")
_MAY_BE_ZERO = ("intermediate_size", "key_value_heads", "head_dim", "type_vocab_size", "additional_vocab_size")
"""Parts that some networks lack."""


def _check_sizes(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse sizes without sense, and more layers than there is time for, in the config and its parts.

    transformers may list layers as soon as it reads the config, and finds most sizes wrong only as it makes the module.
    """
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_sizes(path, value)
        elif not isinstance(value, int | float):
            continue
        elif re.search(r"(layers?|depth)$", key) and value > MAXIMUM_LAYERS:
            raise NetworkError(
                f"{path}: key {key!r} is {value!r}; at most {MAXIMUM_LAYERS} layers are planned: correct it"
            )
        elif _SIZES.search(key):
            may_be_zero = key.endswith(_MAY_BE_ZERO)
            if value < 0 or (value == 0 and not may_be_zero):
                wanted = "0 or more" if may_be_zero else "above 0"
                raise NetworkError(f"{path}: key {key!r} is {value!r}; it must be {wanted}: correct it")
