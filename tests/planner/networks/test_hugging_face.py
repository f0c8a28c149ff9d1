"""Networks from config.json files: exact, shallow captures, hostile files refused."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.graph.capture import capture_module
from planner.graph.folding import unfold
from planner.graph.scaling import at_batch, at_precision
from planner.networks import Network, load_network
from simulator.errors import InputError, NetworkError, UnsupportedError
from simulator.program import Kernel
from tests.oracles.graph_interpreter import assert_equals_autograd

pytest.importorskip("transformers")

_ROTARY = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 32,
}
_LATENT = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 2,
    "topk_group": 1,
    "vocab_size": 61,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 32},
    "llama": _ROTARY,
    "bert": {**_ROTARY, "type_vocab_size": 2},
    "mixtral": {**_ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
}

SLOW = [pytest.param(kind, marks=[pytest.mark.slow] if "deepseek" in kind else []) for kind in CONFIGS]


def write(folder: Path, config: object) -> Path:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return file


def load(folder: Path, kind: str, length: int = 10, **changes: Any) -> Network:
    return load_network(f"hf:{write(folder, {'model_type': kind, **CONFIGS[kind], **changes})}", sequence_length=length)


@pytest.mark.parametrize("kind", SLOW)
def test_repeated_capture_is_the_full_one_and_equals_autograd(kind: str, tmp_path: Path) -> None:
    network = load(tmp_path, kind)
    graph = unfold(network.capture())
    full = capture_module(lambda: network.make(None), network.inputs, name=network.name, notes=network.notes)
    nodes, full_nodes = ([replace(node, source="") for node in g.nodes] for g in (graph, full))
    assert (nodes, graph.parameters, graph.loss) == (full_nodes, full.parameters, full.loss)
    graph = at_precision(at_batch(graph, 3), "float64")
    assert_equals_autograd(graph, network.build(seed=0).double(), seed=1, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("kind", SLOW)
def test_attention_is_one_operator_without_masks(kind: str, tmp_path: Path) -> None:
    network = load(tmp_path, kind)
    graph = network.capture()
    attention = [node for node in graph.nodes if node.kernel is Kernel.ATTENTION]
    assert len(attention) == 2 * network.captured_blocks
    assert all("attn_mask" not in dict(node.kwargs) for node in attention)


def original(kind: str, **changes: Any) -> torch.nn.Module:
    """The model as transformers makes it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes})
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_loss_is_the_original_models(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.networks.zoo import configs

    monkeypatch.setattr(configs, "CAPACITY", 4)
    ours = load(tmp_path, kind).build(seed=0)
    reference = original(kind)
    state = dict(reference.state_dict()) if "deepseek" in kind else {}  # biases of routers, which no gradient moves
    state |= {name.removeprefix("model."): value for name, value in ours.state_dict().items()}
    for name in [n for n in state if ".q_proj." in n and kind == "gpt2"]:
        parts = [state.pop(name.replace("q_proj", p)) for p in ("q_proj", "k_proj", "v_proj")]
        joined = torch.cat(parts)
        state[name.replace("q_proj", "c_attn")] = joined.t() if joined.dim() == 2 else joined
    for name in [n for n in state if n.endswith(".experts.gate_proj")]:
        opened = state.pop(name.replace("gate_proj", "up_proj"))
        state[name.replace("gate_proj", "gate_up_proj")] = torch.cat((state.pop(name), opened), dim=1)
    reference.load_state_dict(state, strict=True)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in reference.parameters())
    generator = torch.Generator().manual_seed(5)
    tokens, targets = (torch.randint(61, (3, 10), generator=generator) for _ in range(2))
    with torch.no_grad():
        logits = reference(input_ids=tokens).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(ours(tokens, targets), expected, rtol=2e-6, atol=0)


def test_experts_skip_tokens_beyond_their_capacity(tmp_path: Path) -> None:
    from planner.networks.zoo.configs import CAPACITY

    network = load(tmp_path, "mixtral", length=16)
    products = [n for n in network.capture().nodes if n.op == "aten.bmm.default"]
    places = {n.outputs[0].shape[1] for n in products if n.outputs[0].batch_dims[1]}
    assert math.ceil(CAPACITY * 2 * 16 / 4) in places
    assert any("skip" in note for note in network.capture().notes)


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    import subprocess

    file = write(tmp_path, {"model_type": "llama", **CONFIGS["llama"]})
    script = (
        f"import sys; from planner.networks import load_network; n = load_network('hf:{file}'); "
        "print(n.sequence_length, n.depth, n.family, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    run = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["32", "3", "language", "False", "False"]


def test_names_notes_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my-gpt"
    folder.mkdir()
    write(folder, {"model_type": "gpt2", **CONFIGS["gpt2"], "auto_map": {"AutoModel": "evil.Model"}})
    network = load_network(f"hf:{folder}")
    assert (network.name, network.sequence_length) == ("my-gpt", 32)
    assert "attn_pdrop" in network.notes[0]


@pytest.mark.parametrize(
    ("config", "kind", "parts"),
    [
        ("{", NetworkError, ("config.json", "JSON")),
        ("[" * 100_000, NetworkError, ("config.json", "JSON")),
        ("3", NetworkError, ("int", "JSON object")),
        ({}, NetworkError, ("'model_type'", "None")),
        ({"model_type": "rt_detr_resnet"}, UnsupportedError, ("'rt_detr_resnet'", "py:MODULE:FACTORY")),
        ({"model_type": "no-such-type"}, NetworkError, ("no-such-type",)),
        ({"model_type": "qwen3", "max_position_embeddings": 4}, InputError, ("4 positions", "10")),
        ({"model_type": "llama", "vocab_size": -1}, NetworkError, ("'vocab_size'", "-1")),
        ({"model_type": "llama", "hidden_size": "big"}, NetworkError, ("'hidden_size'", "'big'")),
        ({"model_type": "gpt2", "n_layer": True}, NetworkError, ("'n_layer'", "True")),
        ({"model_type": "gpt2", "num_hidden_layers": 1e9}, NetworkError, ("'num_hidden_layers'", "1000000000.0")),
        ({"model_type": "bert", "max_position_embeddings": 4}, InputError, ("max_position_embeddings", "4", "10")),
    ],
)
def test_bad_configs_name_file_and_key(
    config: object, kind: type[InputError], parts: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        load_network(f"hf:{write(tmp_path, config)}", sequence_length=10)
    assert all(part in str(caught.value) for part in ("config.json", *parts)), str(caught.value)


def test_missing_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match=r"config\.json. does not exist"):
        load_network(f"hf:{tmp_path}")
    write(tmp_path, " " * (1 << 21))
    with pytest.raises(NetworkError, match="bytes"):
        load_network(f"hf:{tmp_path}")


def test_what_transformers_refuses_names_the_file(tmp_path: Path) -> None:
    network = load(tmp_path, "llama", num_attention_heads=5)
    with pytest.raises(NetworkError, match=r"config\.json"):
        network.capture()
    network = load(tmp_path, "gpt2", scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(UnsupportedError, match="scale_attn_by_inverse_layer_idx"):
        network.capture()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_weights_that_are_trained_are_stored_whole(kind: str, tmp_path: Path) -> None:
    config = {"model_type": kind, **CONFIGS["llama"], "num_hidden_layers": 1}
    plain = load_network(f"hf:{write(tmp_path, config)}", sequence_length=10)
    quantised = {**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    graphs = [n.capture() for n in (plain, load_network(f"hf:{write(tmp_path, quantised)}", sequence_length=10))]
    assert graphs[0].nodes == graphs[1].nodes
    more = set(graphs[1].notes) - set(graphs[0].notes)
    assert ["left out (all weights are trained)" in note for note in more] == [True]


def test_a_quantisation_that_is_no_object_is_refused(tmp_path: Path) -> None:
    place = write(tmp_path, {"model_type": "llama", **CONFIGS["llama"], "quantization_config": "nf4"})
    with pytest.raises(NetworkError, match="quantization_config"):
        load_network(f"hf:{place}")
