"""Networks of any model type of transformers: the class, its inputs, its loss, few blocks for many, windows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.graph.attention import MASKED
from planner.graph.capture import capture_module
from planner.graph.folding import unfold
from planner.graph.operator_graph import CTC, CTC_BACKWARD
from planner.graph.scaling import at_batch, at_precision
from planner.networks import Network, load_network
from simulator.errors import InputError, NetworkError
from simulator.program import Kernel
from tests.oracles.graph_interpreter import assert_equals_autograd

transformers = pytest.importorskip("transformers")

DECODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": DECODER,
    "mistral": {**DECODER, "sliding_window": 3},
    "gemma2": {**DECODER, "num_hidden_layers": 2, "sliding_window": 3, "query_pre_attn_scalar": 4},
    "gpt_oss": {
        **DECODER, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3,
    },
    "bart": {
        "d_model": 16, "encoder_layers": 5, "decoder_layers": 6, "encoder_attention_heads": 4, "vocab_size": 40,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    },
    "t5": {
        "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 40,
        "relative_attention_num_buckets": 4, "relative_attention_max_distance": 6,
    },
    "llava": {
        "text_config": {**DECODER, "model_type": "llama", "num_hidden_layers": 1}, "image_token_index": 39,
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
        },
    },
    "wav2vec2": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40,
        "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "pad_token_id": 0,
        "ctc_loss_reduction": "mean", "ctc_zero_infinity": True,
    },
}  # fmt: skip
CONFIGS["llama"] = DECODER
CONFIGS["llama4_text"] = {
    **DECODER, "num_hidden_layers": 16, "num_local_experts": 4, "intermediate_size_mlp": 24, "attention_chunk_size": 4,
}  # fmt: skip
HYBRID = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
CONFIGS["nemotron_h"] = {
    **{key: value for key, value in DECODER.items() if key != "num_hidden_layers"},
    "layers_block_type": [HYBRID[kind] for kind in "M-M-EM*-MEM*-M--EEM-"], "ssm_state_size": 4, "mamba_num_heads": 8,
    "mamba_head_dim": 4, "n_groups": 2, "chunk_size": 4, "n_routed_experts": 4, "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 12,
}  # fmt: skip
RUNS = {"qwen3": [6], "mistral": [6], "llama4_text": [3], "nemotron_h": []}
"""Networks captured with few of their blocks, and the runs of their graphs."""


def load(folder: Path, kind: str, **changes: Any) -> Network:
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind], **changes}))
    return load_network(f"hf:{folder}", sequence_length=8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_few_blocks_stand_for_all_and_the_graph_is_what_autograd_computes(kind: str, tmp_path: Path) -> None:
    network = load(tmp_path, kind)
    folded = network.capture()
    assert [run.count for run in folded.runs] == RUNS[kind]
    graph = unfold(folded)
    full = capture_module(lambda: network.make(None).train(), network.inputs, name=network.name, notes=network.notes)
    nodes, full_nodes = ([replace(node, source="") for node in g.nodes] for g in (graph, full))
    assert (nodes, graph.parameters, graph.loss) == (full_nodes, full.parameters, full.loss)
    module = network.build(seed=0)
    assert graph.parameter_count == sum(p.numel() for p in module.parameters())
    if kind in ("qwen3", "mistral"):  # the others compute parts in float32 whatever they are given
        assert_equals_autograd(at_precision(at_batch(graph, 2), "float64"), module.double(), seed=1, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss"])
def test_attention_is_what_transformers_computes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.networks.zoo import configs

    monkeypatch.setattr(configs, "CAPACITY", 4)
    ours = load(tmp_path, kind).build(seed=0)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    reference.load_state_dict({n.removeprefix("model."): v for n, v in ours.state_dict().items()}, strict=True)
    tokens, targets = (torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    with torch.no_grad():
        logits = reference(input_ids=tokens).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(ours(tokens, targets), expected, rtol=1e-5, atol=0)


def test_windows_are_attention_with_the_work_of_what_is_seen(tmp_path: Path) -> None:
    graph = load(tmp_path, "mistral").capture()
    attention = [node for node in graph.nodes if node.kernel is Kernel.ATTENTION]
    forward = [node for node in attention if node.op == MASKED]
    assert len(attention) == 2 * len(forward)
    assert all(node.args[3:5] == (True, 3) for node in forward)
    seen = 1 + 2 + 6 * 3
    assert all(node.flops == 2.0 * 4 * seen * (4 + 4) for node in forward)
    with_all = load(tmp_path, "mistral", sliding_window=8).capture()
    assert all(node.op != MASKED for node in with_all.nodes)


def test_a_window_is_the_mask_that_transformers_makes(tmp_path: Path) -> None:
    from planner.graph.masked_attention import visible, visible_keys

    seen = visible(8, 8, (True, 3, 0), torch.device("cpu"))
    config = transformers.MistralConfig(**CONFIGS["mistral"], attn_implementation="sdpa")
    mask = transformers.masking_utils.create_sliding_window_causal_mask(
        config=config, inputs_embeds=torch.zeros(1, 8, 16), attention_mask=None, past_key_values=None
    )
    assert torch.equal(mask[0, 0], seen)
    for pattern in ((True, 3, 0), (False, 3, 0), (True, 0, 4), (True, 3, 4), (False, 0, 0)):
        assert visible_keys(8, 8, *pattern) == int(visible(8, 8, pattern, torch.device("cpu")).sum())


def test_the_architecture_names_the_class(tmp_path: Path) -> None:
    whole = load(tmp_path, "bart")
    assert [spec.name for spec in whole.inputs] == ["tokens", "decoder_tokens", "next_tokens"]
    classes = load(tmp_path, "bart", architectures=["BartForSequenceClassification"])
    assert classes.inputs[-1].shape == ()
    assert "BartForSequenceClassification" in classes.description


def draw(*shape: int, low: int = 0, seed: int = 1) -> torch.Tensor:
    return torch.randint(low, 39, shape, generator=torch.Generator().manual_seed(seed))


def twin(kind: str, ours: Any, class_name: str) -> Any:
    """The class of transformers with the parameters of our module."""
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    twin = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    missing = {key for key in twin.state_dict() if f"model.{key}" not in ours.state_dict()}
    assert missing <= {"wav2vec2.masked_spec_embed"}  # what hides parts of speech, which ours does not
    known = {name.removeprefix("model."): value for name, value in ours.state_dict().items()}
    twin.load_state_dict(known, strict=not missing)
    return twin


def test_images_come_first_in_a_sample_and_count_as_transformers_counts_them(tmp_path: Path) -> None:
    network = load(tmp_path, "llava")
    assert [spec.name for spec in network.inputs] == ["tokens", "image", "next_tokens"]
    ours = network.build(seed=0)
    reference = twin("llava", ours, "LlavaForConditionalGeneration")
    tokens, labels, image = draw(2, 8), draw(2, 8, seed=2), torch.rand(2, 3, 28, 28)
    marked = tokens.clone()
    marked[:, :4] = 39  # a token for each of the patches
    with torch.no_grad():
        logits = reference(input_ids=marked, pixel_values=image).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(ours(tokens, image, labels), expected, rtol=1e-5, atol=0)


def test_a_sequence_too_short_for_an_image_is_refused(tmp_path: Path) -> None:
    load(tmp_path, "llava")
    with pytest.raises(InputError, match="--seq-len 5"):
        load_network(f"hf:{tmp_path}", sequence_length=3).capture()


def test_transcripts_have_the_loss_over_all_alignments(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "wav2vec2", **CONFIGS["wav2vec2"]}))
    network = load_network(f"hf:{tmp_path}")
    ours = network.build(seed=0)
    reference = twin("wav2vec2", ours, "Wav2Vec2ForCTC")
    sound, text = torch.randn(2, 16_000), draw(2, 32, low=1)
    expected = reference(input_values=sound, labels=text).loss
    found = ours(sound, text)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    (wanted,) = torch.autograd.grad(expected, reference.lm_head.weight)
    torch.testing.assert_close(torch.autograd.grad(found, ours.model.lm_head.weight)[0], wanted, rtol=1e-4, atol=1e-6)
    assert {node.op for node in network.capture().nodes} >= {CTC, CTC_BACKWARD}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt_oss", {"num_hidden_layers": 10**9}),  # whose kinds of attention transformers lists
        ("bart", {"encoder_layers": 10_001}),
        ("llama", {"num_hidden_layers": 10**6}),
        ("llava", {"text_config": {**CONFIGS["llava"]["text_config"], "num_hidden_layers": 1e9}}),
    ],
)
def test_layers_without_end_are_refused_before_they_are_made(kind: str, changes: Any, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"layers' is 1\d+(\.0)?; at most 10000 layers are planned"):
        load(tmp_path, kind, **changes)


def test_modules_without_end_are_refused_while_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.networks.hugging_face_modules.MOST_MODULES", 100)
    with pytest.raises(NetworkError, match="more than 100 modules.*layers or experts"):
        load(tmp_path, "qwen3", num_hidden_layers=20).capture()


def test_infinite_settings_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("mamba2", num_hidden_layers=1, vocab_size=40)
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert load_network(f"hf:{tmp_path}", sequence_length=8).family == "language"


@pytest.mark.slow
def test_biases_of_positions_are_added_to_the_scores(tmp_path: Path) -> None:
    network = load(tmp_path, "t5")
    ours = network.build(seed=0)
    reference = twin("t5", ours, "T5ForConditionalGeneration")
    tokens, before, labels = draw(2, 8), draw(2, 8, seed=2), draw(2, 8, seed=3)
    with torch.no_grad():
        for biases in (p for n, p in (*ours.named_parameters(), *reference.named_parameters()) if "relative" in n):
            biases.copy_(torch.linspace(-2.0, 2.0, biases.numel()).view_as(biases))
        logits = reference(input_ids=tokens, decoder_input_ids=before).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(ours(tokens, before, labels), expected, rtol=1e-5, atol=0)
    biases = [p for p in network.capture().parameters if "relative_attention_bias" in p.name]
    assert [p.gradient is not None for p in biases] == [True, True]
