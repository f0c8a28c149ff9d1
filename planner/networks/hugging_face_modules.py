"""Modules of transformers, changed so that one training step captures as plain sharded-friendly operators."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig
from transformers.activations import NewGELUActivation
from transformers.integrations import moe as transformers_experts
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.pytorch_utils import Conv1D

from planner.graph.masked_attention import masked_attention_operator, visible
from planner.graph.tracing import unmaterialised
from planner.networks.adapters import Adapters
from planner.networks.hugging_face_parts import (
    CapturedLatentAttention,
    GroupedRouter,
    adapt,
    check_deepseek,
)
from planner.networks.hugging_face_running import known_tensors, rows_of_ones, rows_of_packed, running
from planner.networks.inputs import InputSpec
from planner.networks.losses import mean_absolute_error, mean_alignment_loss, mean_cross_entropy
from planner.networks.network import Facts
from planner.networks.transformers_classes import (
    BOXES,
    EXPERTS,
    MAXIMUM_LENGTH,
    arguments_of,
    fixed_arguments,
    inputs_of,
    known_arguments,
    make_config,
    masks_of,
    number,
    positions,
    said,
    trainable_class,
)
from planner.networks.zoo.experts import choose_experts, gated_experts, mix_experts
from planner.networks.zoo.llama import RootMeanSquareNorm, rotary_table
from simulator.errors import InputError, MeshwrightError, NetworkError, UnsupportedError

IMPLEMENTATION = "meshwright"


_TOKEN_LOSSES = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")
"""Kinds of loss of transformers that are the cross entropy of every token."""


_FORMS = ((False, False), (True, False), (False, True), (True, True))
"""Whether a model is given masks that hide nothing, and whether its attention gets the masks of transformers."""


class Trained(nn.Module):
    """A model of transformers with its loss.

    The loss of tokens is the mean cross entropy at all positions, to which a router's own is added where the model
    computes one; that of transcripts is over all their alignments (CTC). That of detected objects compares every query
    with the object of its place, among which may be no object: which query is matched to which object depends on data,
    and costs little beside the network. Any other loss is the model's.
    """

    def __init__(self, model: Any, inputs: Mapping[str, InputSpec]) -> None:
        super().__init__()
        self.model = model
        self.specs = dict(inputs)
        names = self.names = tuple(inputs)
        self.fixed = fixed_arguments(type(model))
        self.arguments = arguments_of(type(model))
        self.forms: tuple[tuple[bool, bool], ...] = _FORMS
        tokens = (model.loss_type or _TOKEN_LOSSES[0]) in _TOKEN_LOSSES and model.get_output_embeddings() is not None
        self.of_tokens = tokens and "labels" in names
        self.of_text = model.loss_type == "ForCTC" and "labels" in names
        self.of_objects = BOXES in names

    def forward(self, *inputs: Tensor) -> Tensor:
        """Loss of inputs in the order of `names`."""
        while True:
            try:
                return self._loss(*inputs)
            except (AttributeError, TypeError) as error:
                # What exports a step has to begin anew.
                if detect_fake_mode() is not None or not self.another_form(error):
                    raise

    def _loss(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True))
        ours = self.of_tokens or self.of_text or self.of_objects
        labels, boxes = given.pop("labels") if ours else None, given.pop(BOXES, None)
        if "image_grid_thw" in self.known(1):
            given["pixel_values"] = given["pixel_values"].flatten(0, 1)
        output = self._output(given, inputs[0].shape[0], inputs[0].device)
        if labels is None:
            return output.loss  # type: ignore[no-any-return]
        if boxes is not None:
            classes, places = (found[:, : boxes.shape[1]] for found in (output.logits, output.pred_boxes))
            return mean_cross_entropy(classes, labels) + mean_absolute_error(places, boxes)
        if self.of_text:
            return mean_alignment_loss(output.logits, labels, self.model.config.pad_token_id or 0)
        logits = output.prediction_logits if "prediction_logits" in output else output.logits
        # Where a model puts features before the tokens, these are behind.
        loss = mean_cross_entropy(logits[:, logits.shape[1] - labels.shape[1] :], labels)
        routing = getattr(output, "aux_loss", None)
        return loss if routing is None else loss + self.model.config.router_aux_loss_coef * routing

    def _output(self, given: Mapping[str, Tensor], batch: int, device: torch.device) -> Any:
        """What the model returns."""
        with_masks, own = self.forms[0]
        masks = rows_of_ones(masks_of(type(self.model), self.specs), batch, device) if with_masks else {}
        told = known_tensors(self.known(batch, sizes=with_masks), device)
        if (
            "aspect_ratio_ids" in self.arguments and "pixel_values" in self.specs
        ):  # an image of one shape, all of whose tiles are seen
            tiles = self.specs["pixel_values"].shape[1]
            told["aspect_ratio_ids"] = torch.ones(batch, 1, dtype=torch.int64, device=device)
            told["aspect_ratio_mask"] = torch.ones(batch, 1, tiles, dtype=torch.int64, device=device)
        with running(self.model, batch), _masks_of_transformers(self.model, own):
            return self.model(**given, **self.fixed, **masks, **told)

    def another_form(self, error: Exception) -> bool:
        """Give the model more masks than before; False where no mask was missing, or none is left.

        Some code reads a mask although nothing is hidden, and some takes apart the one that attention gets.
        """
        missing = any(word in str(error) for word in ("NoneType", "Pattern"))
        self.forms = self.forms[1:] if missing else self.forms[:1]
        return missing and bool(self.forms)

    def known(self, batch: int, *, sizes: bool = False) -> Mapping[str, Any]:
        """Numbers that the model is told of the inputs of a batch."""
        return known_arguments(type(self.model), self.model.config, self.specs, batch, sizes=sizes)


@contextmanager
def _masks_of_transformers(model: Any, wanted: bool) -> Iterator[None]:
    """While this is open, attention is written out and gets tensors as masks, if that is wanted."""
    parts = list(_parts(model.config)) if wanted else []
    before = [part._attn_implementation for part in parts]
    for part in parts:
        part._attn_implementation = "eager"
    try:
        yield
    finally:
        for part, implementation in zip(parts, before, strict=True):
            part._attn_implementation = implementation


class FirstPositions(Trained):
    """A BERT whose loss is taken at the first `predicted` positions."""

    def __init__(self, model: Any, inputs: Mapping[str, InputSpec], predicted: int) -> None:
        super().__init__(model, inputs)
        self.predicted = predicted

    def forward(self, *inputs: Tensor) -> Tensor:
        """Loss of tokens against targets, both ``(batch, length)``."""
        tokens, targets = inputs
        hidden = self.model.bert(input_ids=tokens).last_hidden_state[:, : self.predicted]
        return mean_cross_entropy(self.model.cls(hidden), targets[:, : self.predicted])


def facts(
    path: str, kind: str, settings: Mapping[str, Any], architectures: object, sequence_length: int | None
) -> Facts:
    """Describe the network of a configuration.

    Raises
    ------
    InputError, NetworkError, UnsupportedError
        The sequence is longer than the positions; transformers refuses the configuration, or has no class with a loss.
    """
    config = make_config(path, kind, settings)
    model_class = trainable_class(path, config, architectures)
    most = positions(config)
    length = sequence_length or min(most or MAXIMUM_LENGTH, MAXIMUM_LENGTH)
    inputs = tuple(inputs_of(model_class, config, length).values())
    kinds = {spec.kind for spec in inputs}
    tokens = bool(kinds & {"tokens", "next_tokens"})
    if tokens and most and length > most:
        raise InputError(
            f"{path}: the network has {most} positions, fewer than the sequence length {length}; use --seq-len {most} "
            "or less"
        )
    if sequence_length is not None and not tokens:
        raise InputError(f"{path}: the network reads no tokens (given --seq-len {sequence_length}): leave it out")
    whole = json.loads(json.dumps(config.to_dict(), default=str))  # defaults too, as a JSON file has them
    return Facts(
        class_name=model_class.__name__,
        family="language" if tokens else "image" if "image" in kinds else "features",
        inputs=inputs,
        sequence_length=length if tokens else None,
        dropout=tuple(without_chance(config)),
        experts=any(number(part, *EXPERTS) for part in _parts(config)),
        config=whole if model_class.__name__.endswith("ForCausalLM") else {},
    )


MOST_MODULES = 100_000
"""Modules of a network of transformers: of 2,000 layers with 50 each."""


def trained(
    paths: tuple[str, str], kind: str, settings: Mapping[str, Any], length: int, *, architectures: object = None,
    adapters: Adapters | None = None, predicted: int | None = None,
) -> nn.Module:  # fmt: skip
    """Make the module of a configuration with its loss, and adapters beside its products if there are any.

    ``predicted`` is how many positions of a sample a masked network predicts, if not all.
    """
    config = make_config(paths[0], kind, settings)
    model_class = trainable_class(paths[0], config, architectures)
    inputs = inputs_of(model_class, config, length)
    model = make_model(paths[0], config, model_class, length)
    if adapters is not None:
        adapt(paths[1], model, adapters)
    return Trained(model, inputs) if predicted is None else FirstPositions(model, inputs, predicted)


def without_chance(config: PreTrainedConfig) -> list[str]:
    """Set to zero, in place, what draws random numbers in training; return the keys that were not."""
    found = []
    for part in _parts(config):
        for key, value in vars(part).items():
            chance = isinstance(value, float) and value > 0 and any(word in key for word in _CHANCES)
            if chance or (key == "apply_spec_augment" and value):
                setattr(part, key, False if isinstance(value, bool) else 0.0)
                found.append(key)
    return sorted(set(found))


_CHANCES = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def make_model(path: str, config: PreTrainedConfig, model_class: type[Any], length: int) -> nn.Module:
    """Make the model of a configuration, which it changes; transformers' own complaints name the file."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _pattern)
    transformers_experts.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
    _check(path, config.model_type, config)
    for part in _parts(config):
        part.use_cache = False
    config._experts_implementation = IMPLEMENTATION
    without_chance(config)
    try:
        with _few_modules(path):
            model = unmaterialised(lambda: _from_config(model_class, config))
    except MeshwrightError:
        raise
    except Exception as error:
        raise NetworkError(f"{path}: transformers refuses the config: {said(error)}; correct the key") from error
    _simplify(model, config, length)
    return model


@contextmanager
def _few_modules(path: str) -> Iterator[None]:
    """Refuse a network of so many modules that to make them would take minutes, while they are made."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise NetworkError(
                f"{path}: the network has more than {MOST_MODULES:,} modules, which is all that are made; correct the "
                "number of its layers or experts"
            )

    hook = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def _from_config(model_class: type[Any], config: PreTrainedConfig) -> nn.Module:
    """Make a model with our attention, or with the first that its class has."""
    for attention in (IMPLEMENTATION, "sdpa"):
        try:
            return model_class._from_config(config, attn_implementation=attention)  # type: ignore[no-any-return]
        except (KeyError, ValueError) as error:
            if "attention" not in str(error) and attention not in str(error):
                raise
    return model_class._from_config(config, attn_implementation="eager")  # type: ignore[no-any-return]


def _check(path: str, kind: str, config: PreTrainedConfig) -> None:
    refused = {
        "gpt2": ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"),
        "bert": ("is_decoder", "add_cross_attention", "chunk_size_feed_forward"),
    }.get(kind, ())
    if kind in ("deepseek_v2", "deepseek_v3"):
        check_deepseek(path, config)
    for key in refused:
        if getattr(config, key, False):
            raise UnsupportedError(
                f"{path}: key {key!r} is {getattr(config, key)!r}, which is not supported yet; leave it out"
            )


def _simplify(model: nn.Module, config: PreTrainedConfig, length: int) -> None:
    """Replace parts by equal ones that shard well and compute in the parameters' precision."""
    for parent in reversed(list(model.modules())):  # what a part is made of comes before it
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            class_name = type(child).__name__
            if class_name == "DeepseekV2RotaryEmbedding":  # tables instead of complex numbers
                child = DeepseekV3RotaryEmbedding(cast(Any, config))
                setattr(parent, name, child)
            if class_name == "GPT2Attention":
                setattr(parent, name, SeparateAttention(config))
            elif class_name.endswith("RMSNorm") and _is_plain_norm(child):
                setattr(parent, name, RootMeanSquareNorm(child.weight.shape[0], child.variance_epsilon))
            elif class_name.endswith("RotaryEmbedding") and _plain_rotary(child):
                setattr(parent, name, RotaryTable(child.config))
            elif isinstance(child, NewGELUActivation):
                setattr(parent, name, nn.GELU(approximate="tanh"))
            elif class_name == "MixtralTopKRouter":
                setattr(parent, name, Router(child))
            elif class_name in ("DeepseekV2TopkRouter", "DeepseekV3TopkRouter"):
                setattr(parent, name, GroupedRouter(child, config))
            elif class_name in ("DeepseekV2Attention", "DeepseekV3Attention"):
                setattr(parent, name, CapturedLatentAttention(child, _attention))
            elif class_name.endswith("Experts") and _is_plain_experts(child):
                setattr(parent, name, SeparateExperts(child, length))
            elif class_name.endswith("Experts"):
                child.sequence_length = length


def _is_plain_norm(norm: Any) -> bool:
    """Whether a module computes what `RootMeanSquareNorm` does, as tried on numbers."""
    if set(dict(norm.named_parameters())) != {"weight"} or not hasattr(norm, "variance_epsilon"):
        return False
    with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
        x, weight = torch.linspace(-2.0, 3.0, 6).repeat(2, 1), torch.linspace(0.5, 2.0, 6)
        ours = RootMeanSquareNorm(6, norm.variance_epsilon)
        found = [torch.func.functional_call(module, {"weight": weight}, (x,)) for module in (norm, ours)]
        return bool(torch.allclose(found[0], found[1], rtol=1e-6))


def _plain_rotary(rotary: Any) -> bool:
    """Whether a module makes the tables that `RotaryTable` does, as tried on numbers."""
    config: Any = getattr(rotary, "config", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") != "default" or "mrope_section" in parameters:
        return False
    if list(inspect.signature(rotary.forward).parameters)[:3] != ["x", "position_ids"]:
        return False
    with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
        x, places = torch.zeros(1, 3, 1), torch.arange(3).unsqueeze(0)
        try:
            found, ours = type(rotary)(config)(x, places), RotaryTable(config)(x, places)
        except Exception:  # noqa: BLE001 another module's code, called in a way that it may not know
            return False
        # Llama 4 makes complex numbers instead.
        return isinstance(found, tuple) and all(
            a.shape == b.shape and torch.allclose(a, b, atol=1e-6) for a, b in zip(found, ours, strict=True)
        )


class RotaryTable(nn.Module):
    """Cosines and sines of the rotary positions, made from whole numbers instead of kept in a buffer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.base = float(config.rope_parameters["rope_theta"])

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tables ``(1, length, dim)`` for ``x`` ``(batch, length, hidden)``."""
        cosine, sine = rotary_table(x.shape[1], self.dim, self.base, like=x)
        return cosine.unsqueeze(0), sine.unsqueeze(0)


class SeparateAttention(nn.Module):
    """GPT-2's attention with query, key and value projections of their own, so that heads can be sharded."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.head = hidden // config.num_attention_heads
        self.scaling = self.head**-0.5 if config.scale_attn_weights else 1.0
        self.is_causal = True
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, hidden) for _ in range(3))
        self.c_proj = Conv1D(hidden, hidden)  # type: ignore[no-untyped-call]
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.normal_(projection.weight, std=config.initializer_range)
            nn.init.zeros_(projection.bias)
        nn.init.normal_(self.c_proj.weight, std=config.initializer_range / math.sqrt(2 * config.num_hidden_layers))

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Map ``(batch, length, hidden)`` to the same shape."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed, _weights = _attention(self, query, key, value, None, scaling=self.scaling)
        return self.c_proj(mixed.flatten(2)), None


class Router(nn.Module):
    """Choose experts and their weights for each token, in the parameters' precision."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``(tokens, experts)``, weights and expert numbers ``(tokens, top_k)``."""
        logits = F.linear(hidden_states.flatten(0, -2), self.weight)
        weights, index = choose_experts(logits, self.top_k)
        return logits, weights, index


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which keys a query attends to: none behind it if causal, those of a window and of its chunk (0: all)."""

    causal: bool
    window: int = 0
    chunk: int = 0


def _pattern(*_: Any, q_length: int = 0, mask_function: Any = None, **__: Any) -> Pattern | None:
    """Describe a mask; None where attention is causal or whole as its module says, and nothing is padded."""
    parts = list(_mask_parts(mask_function))
    limits = {name: value for _, found in parts for name, value in found.items() if isinstance(value, int)}
    window, chunk = (limits.get(name, 0) for name in ("sliding_window", "chunk_size"))
    window, chunk = (0 if not value or value >= q_length else value for value in (window, chunk))
    causal = any(function is causal_mask_function for function, _ in parts)
    return Pattern(causal, window, chunk) if window or chunk else None


def _mask_parts(function: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Functions that a mask of transformers is combined from, with the values they hold."""
    held = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if held else ()
    found = {name: cell.cell_contents for name, cell in zip(names, held, strict=True)}
    yield function, found
    inner = (found.get("mask_function"), *found.get("mask_functions", ()))
    for part in filter(None, inner):
        yield from _mask_parts(part)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Pattern | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend: ``(batch, heads, length, dim)`` to ``(batch, length, heads, dim)``, with the model's own mask alone.

    ``position_bias`` ``(1, heads, queries, keys)`` is added to the scores.
    """
    _refuse_trained(module, others)
    rows = rows_of_packed(others.get("cu_seq_lens_q"))
    if rows:  # images that are packed into one sample
        query, key, value = (x[0].view(x.shape[1], -1, rows, x.shape[3]).transpose(0, 1) for x in (query, key, value))
        mixed, _none = _attention(
            module, query, key, value, None, scaling, is_causal=False, softcap=softcap, s_aux=s_aux
        )
        return mixed.flatten(0, 1).unsqueeze(0), None
    groups = query.shape[1] // key.shape[1]
    plain = scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if position_bias is not None:
        attention_mask = _biased(position_bias, attention_mask, causal, query, key)
    if isinstance(attention_mask, Pattern) or ((softcap or s_aux is not None) and attention_mask is None):
        pattern = attention_mask or Pattern(causal)
        mixed, _normaliser = masked_attention_operator()(
            query,
            _repeat_heads(key, groups),
            _repeat_heads(value, groups),
            pattern.causal,
            pattern.window,
            pattern.chunk,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap or 0.0,
            s_aux,
        )
        return mixed.transpose(1, 2), None
    mixed = F.scaled_dot_product_attention(
        query,
        _repeat_heads(key, groups),
        _repeat_heads(value, groups),
        attn_mask=attention_mask,
        is_causal=causal and attention_mask is None and query.shape[2] > 1,
        scale=None if plain else scaling,
    )
    return mixed.transpose(1, 2), None


def _refuse_trained(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Raise UnsupportedError where attention is given trained numbers of which nothing is known here."""
    for name, value in others.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise UnsupportedError(
                f"{type(module).__name__} gives its attention {name!r}, which is not supported; write the network with "
                "its loss as py:MODULE:FACTORY"
            )


def _biased(bias: Tensor, mask: Tensor | Pattern | None, causal: bool, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores: a bias, and the least number where a key is hidden."""
    lengths = query.shape[2], key.shape[2]
    bias = bias[..., : lengths[1]]
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        return bias + mask
    pattern = mask if isinstance(mask, Pattern) else Pattern(causal and lengths[0] > 1)
    if isinstance(mask, Tensor):
        seen = mask
    elif pattern.causal or pattern.window or pattern.chunk:
        seen = visible(*lengths, (pattern.causal, pattern.window, pattern.chunk), query.device)
    else:
        return bias
    return torch.where(seen, bias, torch.finfo(bias.dtype).min)


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return x
    batch, heads, length, dim = x.shape
    return x.unsqueeze(2).expand(batch, heads, groups, length, dim).flatten(1, 2)


class SeparateExperts(nn.Module):
    """Experts whose gates and what they open have weights of their own, so that tensor ranks can share an expert."""

    def __init__(self, experts: Any, length: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = map(nn.Parameter, experts.gate_up_proj.detach().chunk(2, dim=1))
        self.down_proj, self.act_fn, self.sequence_length = experts.down_proj, experts.act_fn, length

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map ``(tokens, hidden)`` to the same shape; experts of each token and their weights ``(tokens, top_k)``."""
        return mix_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            experts=self.gate_proj.shape[0],
            length=self.sequence_length,
            compute=lambda x: gated_experts(x, self.gate_proj, self.up_proj, self.down_proj, self.act_fn),
        )


def _is_plain_experts(experts: Any) -> bool:
    """Whether a module of transformers keeps its gates, then what they open, in one weight and nothing beside."""
    own = {name for name, _ in experts.named_parameters()}
    gate = getattr(type(experts), "_apply_gate", None)
    plain = gate is not None and gate is getattr(transformers_experts, "_default_apply_gate", None)
    layout = getattr(experts, "is_concatenated", True) and not getattr(experts, "is_transposed", False)
    return plain and layout and own == {"gate_up_proj", "down_proj"}


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_: Any) -> Tensor:
    """Mix the experts of a module of transformers."""
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedError(
            f"{type(module).__name__} has a norm behind each expert, which is not supported; write the network with "
            "its loss as py:MODULE:FACTORY"
        )
    first = "gate_up_proj" if module.has_gate else "up_proj"
    biases = (getattr(module, f"{first}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    between = module._apply_gate if module.has_gate else module.act_fn
    up = getattr(module, first)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = torch.bmm(x, weight if module.is_transposed else weight.transpose(1, 2))
        return product if bias is None else product + bias.unsqueeze(1)

    return mix_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        experts=up.shape[0],
        length=module.sequence_length,
        compute=lambda x: product(between(product(x, up, biases[0])), module.down_proj, biases[1]),
    )
