"""Graphs written from a config are the captured ones, node for node, and need no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph.cache import SWITCH
from planner.graph.operator_graph import OperatorGraph
from planner.graph.serialization import graph_to_json
from planner.networks import Network, load_network
from planner.networks.decoder.known import zoo_decoder
from planner.networks.zoo.configs import GPTConfig, LlamaConfig, MixtralConfig
from planner.networks.zoo.table import language_inputs, make_language_module
from simulator.errors import NetworkError

ROOT = Path(__file__).parents[3]
GPT = GPTConfig(vocabulary=61, hidden=32, layers=3, heads=4, positions=16)
LLAMA = LlamaConfig(vocabulary=61, hidden=32, layers=3, heads=4, key_value_heads=4, intermediate=44, positions=16)
MIXTRAL = MixtralConfig(
    vocabulary=61,
    hidden=32,
    layers=3,
    heads=4,
    key_value_heads=2,
    intermediate=44,
    positions=16,
    experts=4,
    chosen_experts=2,
)
GPT2_KEYS: dict[str, Any] = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 16}
LLAMA_KEYS: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 16,
}
PUBLISHED_GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 16,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}
PUBLISHED_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

MIXTRAL_KEYS: dict[str, Any] = {
    **LLAMA_KEYS,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
PUBLISHED_MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
KEYS = {"gpt2": GPT2_KEYS, "mixtral": MIXTRAL_KEYS}


def zoo_network(config: GPTConfig | LlamaConfig, length: int) -> Network:
    return Network(
        name="small",
        spec="test:small",
        family="language",
        description="",
        default_global_batch=4,
        default_optimizer="adamw",
        sequence_length=length,
        inputs=language_inputs(config.vocabulary, length, masked=False),
        make=partial(make_language_module, config),
        depth=config.layers,
        content=f"captured once: {config}",
        decoder=zoo_decoder(config),
    )


def config_network(folder: Path, kind: str, keys: dict[str, Any], length: int = 12) -> Network:
    own = KEYS.get(kind, LLAMA_KEYS)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **own, **keys}))
    return load_network(f"hf:{folder}", sequence_length=length)


def assert_written_is_captured(network: Network) -> OperatorGraph:
    assert network.decoder is not None
    written, captured = network.capture(), replace(network, decoder=None).capture()
    assert len(written.nodes) == len(captured.nodes)
    for mine, node in zip(written.nodes, captured.nodes, strict=True):
        assert mine == replace(node, source="")
    without_sources = replace(captured, nodes=written.nodes)
    assert written == without_sources
    assert json.dumps(graph_to_json(written)) == json.dumps(graph_to_json(without_sources))
    assert written.fingerprint == captured.fingerprint
    return written


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (GPT, 12),
        (replace(GPT, layers=1, heads=1, hidden=6), 16),
        (replace(GPT, layers=1), 1),
        (LLAMA, 12),
        (replace(LLAMA, key_value_heads=2, layers=4, intermediate=100), 7),
        (replace(LLAMA, key_value_heads=1, layers=1, hidden=48, rope_base=5e5, epsilon=1e-6), 16),
        (replace(LLAMA, key_value_heads=2, layers=1), 1),
        (MIXTRAL, 12),
        (replace(MIXTRAL, layers=1, key_value_heads=4, chosen_experts=1), 8),
        (replace(MIXTRAL, layers=1, experts=3, chosen_experts=3), 5),
        (replace(MIXTRAL, layers=1, experts=1, chosen_experts=1), 5),
    ],
)
def test_zoo_decoders_equal_their_capture(config: GPTConfig | LlamaConfig, length: int) -> None:
    graph = assert_written_is_captured(zoo_network(config, length))
    assert [run.count for run in graph.runs] == ([config.layers] if config.layers > 2 else [])


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    heads=st.integers(1, 4),
    groups=st.integers(1, 3),
    half_head=st.integers(1, 4),
    intermediate=st.integers(1, 40),
    vocabulary=st.integers(1, 30),
    length=st.integers(1, 9),
    experts=st.integers(1, 5),
    chosen=st.integers(1, 3),
)
def test_sizes_of_any_kind(
    heads: int, groups: int, half_head: int, intermediate: int, vocabulary: int, length: int, experts: int, chosen: int
) -> None:
    hidden = heads * groups * half_head * 2
    llama = LlamaConfig(
        vocabulary=vocabulary,
        hidden=hidden,
        layers=2,
        heads=heads * groups,
        key_value_heads=heads,
        intermediate=intermediate,
        positions=16,
    )
    mixtral = MixtralConfig(**asdict(llama), experts=experts, chosen_experts=min(chosen, experts))
    gpt = GPTConfig(vocabulary=vocabulary, hidden=hidden, layers=2, heads=heads, positions=length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "off")
        assert_written_is_captured(zoo_network(llama, length))
        assert_written_is_captured(zoo_network(mixtral, length + 1))
        assert_written_is_captured(zoo_network(gpt, length))


@pytest.mark.parametrize("name", ["gpt2", "gpt2-tiny", "gpt3-175b", "llama2-7b", "llama3-70b", "mixtral-8x7b"])
def test_built_in_decoders_equal_their_capture(name: str) -> None:
    assert_written_is_captured(load_network(f"zoo:{name}"))


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gpt2", PUBLISHED_GPT2),
        ("gpt2", {"tie_word_embeddings": False, "n_inner": 40, "n_layer": 1, "resid_pdrop": 0.0}),
        ("llama", PUBLISHED_LLAMA),
        ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 0, "num_hidden_layers": 1}),
        ("llama", {"head_dim": 10, "num_hidden_layers": 1, "num_key_value_heads": 1, "attention_dropout": 0.1}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.5}, "num_hidden_layers": 1}),
        ("mixtral", PUBLISHED_MIXTRAL),
        ("mixtral", {"num_experts_per_tok": 1, "num_hidden_layers": 1, "pad_token_id": 0}),
        ("mixtral", {"rope_parameters": {"rope_type": "default"}, "num_hidden_layers": 1, "sliding_window": 64}),
    ],
)
def test_configs_of_transformers_equal_their_capture(kind: str, keys: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert_written_is_captured(config_network(tmp_path, kind, keys))


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"tie_word_embeddings": None}),
        ("gpt2", {"layer_norm_epsilon": "1e-5"}),
        ("gpt2", {"n_embd": None}),
        ("gpt2", {"sliding_windows": 4}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": 0}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"num_key_value_heads": 3}),
        ("llama", {"head_dim": 5}),
        ("llama", {"pad_token_id": 61}),
        ("llama", {"initializer_range": 2.0}),
        ("llama", {"eos_token_id": ["2"]}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e4}),
        ("mixtral", {"num_experts_per_tok": 5}),
        ("mixtral", {"output_router_logits": True}),
        ("mixtral", {"qkv_bias": True}),
        ("bert", {}),
    ],
)
def test_what_is_not_understood_is_left_to_the_capture(kind: str, keys: dict[str, Any], tmp_path: Path) -> None:
    assert config_network(tmp_path, kind, keys).decoder is None


def test_a_refused_config_is_still_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for kind, keys in (("gpt2", {"n_head": 5}), ("llama", {"rope_theta": True})):
        with pytest.raises(NetworkError, match="5 attention heads|rope_theta"):
            config_network(tmp_path, kind, keys)
    with pytest.raises(NetworkError, match="num_attention_heads|attention heads"):
        config_network(tmp_path, "llama", {"hidden_size": 34}).capture()


def test_experts_of_single_tokens_are_captured() -> None:
    """Views of dims of size 1 need fewer copies than what is written."""
    assert load_network("zoo:mixtral-8x7b", sequence_length=1).decoder is None
    assert load_network("zoo:mixtral-8x7b", sequence_length=2).decoder is not None


def test_networks_without_a_decoder_are_captured() -> None:
    assert all(load_network(f"zoo:{name}").decoder is None for name in ("mlp", "resnet50", "bert-large"))


def test_planning_a_known_decoder_imports_no_torch(tmp_path: Path) -> None:
    config_network(tmp_path, "llama", {})
    script = (
        "import sys; from planner.networks import load_network\n"
        f"for spec in ('zoo:gpt3-175b', 'zoo:llama3-70b', 'zoo:mixtral-8x7b', 'hf:{tmp_path}'):\n"
        "    load_network(spec).capture()\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert _python(script) == "False False"


def test_a_whole_plan_of_a_known_decoder_imports_no_torch(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    arguments = ["meshwright", "plan", "zoo:gpt2", "--hw", "dgx-a100", "--devices", "8", "--out", str(plan)]
    script = (
        f"import sys; sys.argv = {arguments!r}\n"
        "from planner.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print('torch' in sys.modules)"
    )
    assert _python(script).splitlines()[-1] == "False"
    assert plan.exists()


def _python(script: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={SWITCH: "off", "HOME": "/nonexistent", "PATH": ""},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
