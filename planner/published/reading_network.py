"""From a measurement row to the network that it trained."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.cost.training_run import Experts, LatentAttention, LayeredNetwork, TransformerShape
from planner.published.known_models import KnownModel, Traits, billions, known_model, plain_name, traits_named
from planner.published.layered import lookup, lookup_by_parameters, sequence
from planner.published.measurement_file import FileRow
from planner.published.source_rules import stated

Notes = list[str]

_UNDESCRIBED = (
    (r"mamba|nemotron-?h|nemotron-?3|nemotron-v3|(?:^|-)hybrid(?!-?cp)|jamba|zamba", "state-space (Mamba) layers"),
    (r"qwen-?3\.5|qwen-?3-next", "linear attention"),
    (r"wan-?2|flux|sora|stable-?diffusion|\bsdxl?\b|\bdit\b|video", "diffusion networks"),
    (r"qwen-?vl|llava|mimo|multimodal|vlm|internvl|\bvl\b", "a vision encoder beside the language network"),
    (r"transformer-?xl", "segment recurrence with an adaptive softmax"),
    (r"deepseek-?v?4", "compressed sparse attention"),
    (r"\bdpo\b|grpo|\bppo\b|rlhf", "training against a second network (preference or reinforcement learning)"),
    (r"albert", "parameters shared by all layers"),
    (r"modelopt-distill|knowledge-distill", "a teacher beside the network that is trained"),
    (r"(?:^|-)noop-layer", "layers that are switched off, how many is not stated"),
)
_LANGUAGE = r"decoder|gpt|llama|\bmoe\b|encoder|bert|\bt5\b|mixtral|transformer|mcore|languagemodeling|nemotron|mla"
_NETWORK_COLUMNS = ("n_layers", "hidden", "n_heads")
_T5_DECODER_LENGTH = 128
_T5_SIZES = (
    (r"t5[-_ ]?(?:v1\.1[-_ ])?small", (6, 512, 8, 2048, 64)),
    (r"t5[-_ ]?(?:v1\.1[-_ ])?base", (12, 768, 12, 3072, 64)),
    (r"t5[-_ ]?(?:v1\.1[-_ ])?large", (24, 1024, 16, 4096, 64)),
    (r"t5[-_ ]?3b", (24, 1024, 32, 16384, 128)),
    (r"t5[-_ ]?11b", (24, 1024, 128, 65536, 128)),
)
"""Layers (of encoder and decoder each), width, heads, feed-forward width and head size (arXiv:1910.10683)."""
_CLASSIFIED = 0.01
"""Share of the work of a vocabulary's logits that the few outputs of a span or a class take, rounded up."""
_INSTRUCTION_LENGTH = 320
"""Tokens of a sample of instruction tuning with its template, on average (Alpaca's 52,000 samples)."""
_BINNED_SHARE = 0.6
"""Mean length of Wikipedia's samples over the longest, in bins of 64 tokens."""
_WHOLE_STAGES = 0.1
"""Guessed layers are rounded to whole pipeline stages where that changes them by less than this share."""


class MissingFactError(Exception):
    """A row does not say what a prediction needs; the message names it."""


def is_transformer(row: FileRow) -> bool:
    """Whether a row's network is a transformer, by its name, its family or the sizes that it states."""
    stated = all(row.whole(column) for column in _NETWORK_COLUMNS)
    known = known_model(row.text("model"), row.number("params_b"))
    return stated or known is not None or re.search(_LANGUAGE, row.text("arch").lower()) is not None


def read_network(row: FileRow, notes: Notes) -> TransformerShape | LayeredNetwork:
    """The network of a row; `notes` gets what was assumed, MissingFactError says what is missing."""
    name = plain_name(row.text("model"))
    words = plain_name(f"{row.text('model')} {row.text('arch')}")
    known = known_model(row.text("model"), row.number("params_b"))
    for pattern, what in () if known and _is_hybrid(row, known) else _UNDESCRIBED:
        if re.search(pattern, words):
            raise MissingFactError(f"{row.text('model') or 'the network'} has {what}, which is not modelled")
    if "t5" in name.split("-"):
        return _encoder_decoder(row, notes)
    if not is_transformer(row):
        return _layered(row, notes)
    shape = _transformer(row, known, notes)
    return _special(row, shape, name, notes)


def _is_hybrid(row: FileRow, known: KnownModel) -> bool:
    """Whether a row's network has the layers of one kind each that are known of its name, and no other sizes."""
    found = (row.whole("n_layers"), row.whole("hidden"))
    return known.hybrid is not None and all(
        value in (None, size) for value, size in zip(found, known.sizes, strict=False)
    )


def _layered(row: FileRow, notes: Notes) -> LayeredNetwork:
    name = stated(row, "name", "{model}").format(model=row.text("model"))
    mindspore = "mindspore" in row.text("framework").lower()
    if "COCO" in row.text("notes") and re.match(r"resnet", name.lower()):
        raise MissingFactError(f"{name} on a detection dataset is the backbone of a network that is not stated")
    side = row.whole("image_size") or _image_side(row.text("notes"), enlarged=mindspore)
    try:
        found = lookup(name, side) if name else None
    except ZeroDivisionError:
        raise MissingFactError(f"images of {side} pixels are too small for {name}") from None
    counted = row.number("params_b")
    if not name and counted:
        found = lookup_by_parameters(counted * 1e9, side, row.whole("per_accel_batch"))
        if found:
            notes.append(f"network not named: {found.name}, which has as many parameters")
    if found is None and not name:
        raise MissingFactError("the network is not named")
    if found is None:
        raise MissingFactError(f"no description of the network {name!r}: sizes are not stated and the name is unknown")
    together = row.whole("per_accel_batch")
    if together and re.match("quartznet", found.name):
        found = sequence.quartznet(found.name, sequence.padded_frames(together, row.whole("n_accels") or 1))
    sample = stated(row, "sample", found.sample, network=found.name, sample=found.sample)
    return found if sample == found.sample else replace(found, sample=sample)


def _image_side(notes: str, *, enlarged: bool = False) -> int | None:
    """Side of the images; ``enlarged`` where small ones are resized to the network's own size.

    MindSpore's networks do so with CIFAR (``Resize((224, 224))`` in ``create_dataset1`` of its ``dataset.py``).
    """
    found = re.search(r"image_size:\s*(\d+)", notes)
    if found:
        return int(found[1])
    return 32 if "CIFAR" in notes and not enlarged else None


def _transformer(row: FileRow, known: KnownModel | None, notes: Notes) -> TransformerShape:
    known = _agreeing(row, known)
    traits = _traits(row, known)
    sizes = known.sizes if known else (0,) * 6
    layers, hidden, heads, key_value_heads, inner, vocabulary = (
        _stated(row, column, size, notes)
        for column, size in zip(
            ("n_layers", "hidden", "n_heads", "n_kv_heads", "ffn_hidden", "vocab"), sizes, strict=True
        )
    )
    if not hidden or not layers:
        layers, hidden = _by_parameters(row, layers, hidden, notes)
    if not heads:
        heads = max(1, hidden // 128)
        notes.append(f"heads not stated: {heads} of 128")
    if not inner:
        inner = -(-8 * hidden // 3 // 256) * 256 if traits.gated else 4 * hidden
        notes.append(f"feed-forward width not stated: {inner}")
    if not vocabulary:
        vocabulary = 32000 if traits.rotary else 30522 if not traits.causal else 50257
        notes.append(f"vocabulary not stated: {vocabulary}")
    length = _length(row, traits, notes)
    experts, inner = _experts(row, known, inner, layers, notes)
    head_size = _head_size(row, known, hidden, heads)
    return TransformerShape(
        name=row.text("model") or "transformer",
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=min(key_value_heads or heads, heads),
        head_size=head_size,
        feed_forward=inner,
        vocabulary=vocabulary,
        sequence_length=length,
        gated=traits.gated,
        rms_norm=traits.rms_norm,
        biases=traits.biases,
        rotary=traits.rotary,
        learned_positions=max(length, 512 if not traits.causal else 0) if traits.positions else 0,
        tied_embeddings=traits.tied_embeddings,
        causal=traits.causal,
        dropout=traits.dropout,
        attention_window=_window(row, known, length, notes),
        experts=experts,
        latent_attention=known.latent_attention if known else None,
        hybrid=known.hybrid if known else None,
        multi_token_layers=known.multi_token_layers if known else 0,
        normalised_queries=bool(re.search(r"qk[-_]layernorm", f"{row.text('model')} {row.text('other_flags')}")),
        embedding_norm=traits.embedding_norm or "embed-norm" in row.text("arch").lower(),
        predicted_positions=_predicted_positions(row, traits, notes),
    )


def _window(row: FileRow, known: KnownModel | None, length: int, notes: Notes) -> int:
    if stated(row, "packed_samples"):
        notes.append(f"attention within packed samples: {_INSTRUCTION_LENGTH} tokens on average, as instructions have")
        return min(length, _INSTRUCTION_LENGTH)
    return known.window if known and length > known.window else 0


def _predicted_positions(row: FileRow, traits: Traits, notes: Notes) -> float:
    """BERT's training predicts 20 of 128 or 80 of 512 tokens; its fine-tuning a span or a class.

    Megatron computes logits everywhere.
    """
    if traits.causal or "megatron" in row.text("framework").lower():
        return 1.0
    if row.says(r"squad|fine-?tun|\bner\b|mnli|glue", "model", "source_table"):
        return _CLASSIFIED
    notes.append("logits for the masked tokens, 5 of 32")
    return 5 / 32


def _agreeing(row: FileRow, known: KnownModel | None) -> KnownModel | None:
    """`known` without its sizes where the row's width says that it is another member of the family."""
    if known is None:
        return None
    hidden, layers = row.whole("hidden"), row.whole("n_layers")
    other = hidden is not None and known.sizes[1] not in (0, hidden)
    if not other:
        return known
    sizes = (layers or 0, 0, 0, 0, 0, known.sizes[5])
    return replace(known, sizes=sizes, experts=None, latent_attention=None, hybrid=None, head_size=0)


def _stated(row: FileRow, column: str, size: int, notes: Notes) -> int:
    value = row.whole(column)
    if value:
        return value
    if size and column != "n_kv_heads":
        notes.append(f"{column} not stated: {size} as published")
    return size


def _traits(row: FileRow, known: KnownModel | None) -> Traits:
    arch = row.text("arch").lower()
    words = f"{arch} {row.text('other_flags').lower()} {row.text('model').lower().replace('_', ' ')}"
    if known:
        traits = known.traits
    elif re.search(r"\bbert\b|\bencoder\b", arch):
        traits = traits_named("bert")
    elif re.search(r"swiglu|llama|rmsnorm|rope", words):
        traits = traits_named("llama")
    else:
        traits = traits_named("gpt")
    if re.search(r"squared[- ]relu", arch):
        return traits
    if "swiglu" in words or "geglu" in words:
        traits = replace(traits, gated=True)
    elif "gelu" in arch:
        traits = replace(traits, gated=False)
    if re.search(r"rmsnorm|rms-norm", words):
        traits = replace(traits, rms_norm=True)
    framework, gpt = row.text("framework").lower(), traits.positions and traits.causal
    # MindSpeed-LLM's scripts have no table of positions, its Baichuan of 13 billion parameters and BLOOM apart.
    if re.search(r"\brope\b|rotary", words) or (gpt and "mindspeed" in framework):
        traits = replace(traits, rotary=True, positions=False)
    if "alibi" in arch:
        traits = replace(traits, positions=False)
    if re.search(r"disable[- ]bias|no bias", words):
        traits = replace(traits, biases=False)
    # The scripts of Zero Bubble's fork of Megatron-LM untie both tables, for its ranks not to wait for each other.
    if re.search(r"\buntied?\b", words) or "zero bubble" in framework:
        traits = replace(traits, tied_embeddings=False)
    elif re.search(r"\btied\b", words):
        traits = replace(traits, tied_embeddings=True)
    if (
        gpt
        and "megatron" in framework
        and "alibi" not in arch
        and not re.search(r"nemo|megatron.?core|bridge", framework)
        and not re.search(r"\b(mtp|mla)\b", words)
    ):
        traits = replace(traits, dropout=True)
    return traits


def _by_parameters(row: FileRow, layers: int, hidden: int, notes: Notes) -> tuple[int, int]:
    """Layers and width of a decoder of about so many parameters: ``12 · layers · hidden²`` (Megatron-LM, eq. 2).

    Where neither is stated the width is 128 times the layers, as in the GPT-3 family.
    """
    stated = row.number("params_b") or billions(row.text("model"))
    if not stated or row.says(r"moe|\dx\d", "model", "arch"):
        missing = "n_layers" if hidden else "hidden and n_layers"
        raise MissingFactError(f"{missing} not stated, and {row.text('model') or 'the network'} is not a known network")
    parameters = stated * 1e9
    if not hidden:
        wanted = (parameters / (12 * layers)) ** 0.5 if layers else (128 * parameters / 12) ** (1 / 3)
        step = 1024 if wanted > 3000 else 128
        hidden = max(step, round(wanted / step) * step)
        notes.append(f"hidden not stated: {hidden} for {stated:g} billion parameters")
    if not layers:
        vocabulary = row.whole("vocab") or 50257
        layers = max(1, round((parameters - vocabulary * hidden) / (12 * hidden**2)))
        stages = row.whole("pp") or 1
        whole = max(1, round(layers / stages)) * stages
        layers = whole if abs(whole / layers - 1) < _WHOLE_STAGES else layers
        notes.append(f"n_layers not stated: {layers} for {stated:g} billion parameters")
    return layers, hidden


def _length(row: FileRow, traits: Traits, notes: Notes) -> int:
    length = row.whole("seq_len")
    if not length:
        return _assumed_length(row, traits, notes)
    remarks = row.text("notes").lower()
    unpacked = "cumulative: baseline" in row.text("other_flags").lower()  # the next step of the list packs samples
    pairs = row.says(r"(?:^|_)(?:orm|prm|reward)_", "model")  # reward models see whole answers
    varying = "variable length" in remarks or pairs
    if unpacked or (varying and "derived" not in remarks and "pack" not in row.text("model").lower()):
        length = min(length, _INSTRUCTION_LENGTH)
        notes.append(f"samples of variable length: {length} tokens on average, as instructions have")
    elif not traits.causal and _binned(row):
        length = round(length * _BINNED_SHARE)
        notes.append(f"samples binned by length: {length} tokens on average")
    return length


def _binned(row: FileRow) -> bool:
    """NVIDIA's later BERT examples load samples through LDDL, which pads them to their bin, not to the longest."""
    said = (r"deeplearningexamples", "source"), (r"^(pytorch|paddlepaddle)$", "framework")
    return all(row.says(*one) for one in (*said, ("pre-training", "source_table"), ("a100", "accelerator")))


def _assumed_length(row: FileRow, traits: Traits, notes: Notes) -> int:
    words = f"{row.text('source_table')} {row.text('hw')} {row.text('model')}".lower()
    if not traits.causal:
        length = 384 if re.search(r"squad|fine-?tun", words) else 128
        if re.search(r"\bner\b", words):
            length = 128
        notes.append(f"sequence length not stated: {length}, as BERT is usually trained for this task")
        return length
    long = row.says(r"mpe=(\d+)", "other_flags")
    if long:
        return int(long[1])
    kilo = re.search(r"(?<!\d)(\d+)k\b", plain_name(row.text("model")))
    if kilo:
        notes.append(f"sequence length not stated: {int(kilo[1]) * 1024} by the name")
        return int(kilo[1]) * 1024
    raise MissingFactError("seq_len not stated")


def _head_size(row: FileRow, known: KnownModel | None, hidden: int, heads: int) -> int:
    stated = re.search(r"head_?dim[ =]?(\d+)", row.text("arch"))
    if stated:
        return int(stated[1])
    if known and known.latent_attention:
        return known.latent_attention.plain_head + known.latent_attention.rotary_head
    if known and known.head_size:
        return known.head_size
    return max(1, hidden // heads)


def _experts(
    row: FileRow, known: KnownModel | None, inner: int, layers: int, notes: Notes
) -> tuple[Experts | None, int]:
    """The experts and the width of the dense network beside them; ``ffn_hidden`` may mean either."""
    count, per_token = row.whole("n_experts"), row.whole("moe_topk")
    published = known.experts if known else None
    if published is not None and known is not None:
        dense = known.sizes[4] if published.dense_layers or published.feed_forward != inner else inner
        if count and count != published.count:
            published = replace(published, count=count)
        if per_token:
            published = replace(published, per_token=per_token)
        return replace(published, dense_layers=min(published.dense_layers, max(0, layers - 1))), dense or inner
    words = plain_name(f"{row.text('model')} {row.text('arch')}")
    named = re.search(r"(?<!\d)(\d+)x\d+(?:\.\d+)?b", words)
    if not count and named and int(named[1]) > 1:
        count = int(named[1])
        notes.append(f"experts not stated: {count} by the name")
    if not count or count < 2:
        if not count and re.search(r"\bmoe\b", words):
            raise MissingFactError("n_experts not stated")
        return None, inner
    if not per_token:
        per_token = 2
        notes.append("experts per token not stated: 2")
    dense = 0
    if row.says(r"alpa|parax|gshard|switch", "framework", "model"):
        dense = layers // 2
        notes.append("experts in every second layer, as in GShard")
    return Experts(count=count, per_token=min(per_token, count), feed_forward=inner, dense_layers=dense), inner


def _special(row: FileRow, shape: TransformerShape, name: str, notes: Notes) -> TransformerShape:
    words = f"{name} {row.text('model').lower()}"
    if re.search(r"(?:^|-)mla(?:-|$)", name) and shape.latent_attention is None:
        # Megatron-Core's defaults of --multi-latent-attention.
        latent = LatentAttention(query_rank=512, key_value_rank=512, rotary_head=64, plain_head=128, value_head=128)
        notes.append("ranks of latent attention not stated: 512")
        shape = replace(shape, latent_attention=latent, head_size=latent.plain_head + latent.rotary_head)
    if shape.latent_attention is not None and re.search(r"w/ mtp|with mtp|(?:^|-)mtp", words) and "no-mtp" not in name:
        shape = replace(shape, multi_token_layers=1)
    if "tokendrop" in name and shape.experts is not None:
        notes.append("tokens beyond a capacity of 1 are dropped")
        shape = replace(shape, experts=replace(shape.experts, capacity_factor=1.0))
    if shape.heads % shape.key_value_heads:
        shape = replace(shape, key_value_heads=shape.heads)
    return shape


def _encoder_decoder(row: FileRow, notes: Notes) -> TransformerShape:
    name = row.text("model").lower()
    published = next((sizes for pattern, sizes in _T5_SIZES if re.search(pattern, name)), (0, 0, 0, 0, 0))
    layers, hidden, heads, inner = (
        _stated(row, column, size, notes)
        for column, size in zip((*_NETWORK_COLUMNS, "ffn_hidden"), published, strict=False)
    )
    if not hidden or not heads:
        raise MissingFactError("hidden or n_heads not stated")
    if not layers:
        layers = 24 if hidden >= 1024 else 12
        notes.append(f"n_layers not stated: {layers}")
    length = row.whole("seq_len") or 512
    notes.append(f"{layers} layers in the encoder and as many in the decoder, {_T5_DECODER_LENGTH} tokens there")
    # What is published holds for networks of the published width; others have ``hidden // heads`` by default.
    head_size = (published[4] if hidden == published[1] else 0) or hidden // heads
    return TransformerShape(
        name=row.text("model"), layers=layers, hidden=hidden, heads=heads, key_value_heads=heads, head_size=head_size,
        feed_forward=inner or 4 * hidden, vocabulary=row.whole("vocab") or 30592, sequence_length=_T5_DECODER_LENGTH,
        learned_positions=length, dropout=True, encoder_layers=layers, encoder_sequence_length=length,
    )  # fmt: skip
