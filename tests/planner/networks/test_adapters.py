"""Networks of which adapters alone are trained: exact, shallow captures, as PEFT computes them; wrong files refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.cost.work import cast_sizes
from planner.graph.capture import capture_module
from planner.graph.folding import unfold
from planner.graph.operator_graph import STORED_BYTES
from planner.graph.scaling import at_batch, at_precision
from planner.networks import Network, load_network
from planner.planning.loading import lower_to_run
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.file import write_plan
from planner.plans.pins import Pins
from simulator.errors import InputError, NetworkError, StrategyError, UnsupportedError
from tests.oracles.graph_interpreter import assert_equals_autograd

pytest.importorskip("transformers")

LAYERS, HIDDEN, INNER, VOCABULARY, RANK = 4, 32, 44, 61, 4
BASE = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
}  # fmt: skip
ADAPTERS = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}


def load(folder: Path, base: dict[str, Any] = BASE, **changes: Any) -> Network:
    (folder / "config.json").write_text(json.dumps(base))
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTERS, **changes}))
    return load_network(f"hf:{folder}", sequence_length=10)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [[], ["embed_tokens"]], ids=str)
def test_repeated_capture_is_the_full_one_and_equals_autograd(saved: list[str], tmp_path: Path) -> None:
    """Nothing goes back into a first block behind frozen embeddings: it is captured beside two that stand for all."""
    network = load(tmp_path, modules_to_save=saved)
    captured = network.capture()
    assert [run.count for run in captured.runs] == [LAYERS if saved else LAYERS - 1]
    graph = unfold(captured)
    full = capture_module(lambda: network.make(None), network.inputs, name=network.name, notes=network.notes)
    nodes, full_nodes = ([replace(node, source="") for node in g.nodes] for g in (graph, full))
    assert (nodes, graph.parameters, graph.loss) == (full_nodes, full.parameters, full.loss)
    module = network.build(seed=0).double()
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    assert_equals_autograd(at_precision(at_batch(graph, 3), "float64"), module, seed=1, rtol=1e-11, atol=1e-15)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert {parameter.name for parameter in graph.parameters if parameter.gradient} == trained
    of_adapters = LAYERS * RANK * (2 * HIDDEN + HIDDEN + INNER)
    of_all = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert of_all == of_adapters + (VOCABULARY * HIDDEN if saved else 0)


def whole_weights(module: nn.Module, scaling: float) -> dict[str, Tensor]:
    """Weights of the network without adapters that computes the same: what `merge_and_unload` of PEFT gives."""
    state = module.state_dict()
    merged = {}
    for name, value in state.items():
        if "lora_" not in name:
            begin = name.removesuffix("base_layer.weight")
            if begin != name:
                low = state[f"{begin}lora_B.weight"] @ state[f"{begin}lora_A.weight"]
                value = value + scaling * (low.t() if ".c_" in name else low)  # as GPT-2 keeps its weights
            merged[name.replace(".base_layer", "")] = value
    return merged


@pytest.mark.parametrize(("kind", "rslora"), [("llama", False), ("gpt2", True)])
def test_the_loss_is_that_of_merged_weights(kind: str, rslora: bool, tmp_path: Path) -> None:
    """Adapters add nothing at first, and then ``alpha / r`` times their product, or ``alpha / sqrt(r)`` times."""
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    small = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    base = BASE if kind == "llama" else {**small, **ends}
    adapted = load(tmp_path, base, target_modules="all-linear", use_rslora=rslora).build(seed=0)
    whole = load_network(f"hf:{tmp_path / 'config.json'}", sequence_length=10).build(seed=1)
    tokens = torch.randint(VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(5))
    for touched in (False, True):
        if touched:
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter)
        whole.load_state_dict(whole_weights(adapted, 6 / (2 if rslora else RANK) if touched else 0.0), strict=True)
        torch.testing.assert_close(adapted(tokens, tokens), whole(tokens, tokens), rtol=2e-6, atol=0)
    products = [
        name for name, module in whole.named_modules() if hasattr(module, "weight") and module.weight.dim() == 2
    ]
    beside = {name.removesuffix(".lora_A") for name, _ in adapted.named_modules() if name.endswith(".lora_A")}
    assert beside == {name for name in products if ".h." in name or ".layers." in name}


def test_the_base_may_lie_in_another_folder(tmp_path: Path) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    for folder in (base, tuned):
        folder.mkdir()
    (base / "config.json").write_text(json.dumps(BASE))
    (tuned / "adapter_config.json").write_text(json.dumps({**ADAPTERS, "base_model_name_or_path": str(base)}))
    network = load_network(f"hf:{tuned}")
    assert (network.name, network.depth) == ("tuned", LAYERS)
    assert f"adapters of rank {RANK} on down_proj, q_proj" in network.notes[0]
    (base / "config.json").unlink()
    with pytest.raises(NetworkError, match=r"base_model_name_or_path.*nothing is downloaded"):
        load_network(f"hf:{tuned}")


@pytest.mark.parametrize(
    ("changes", "kind", "parts"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, ("'peft_type'", "'IA3'")),
        ({"r": 0}, NetworkError, ("'r'", "0")),
        ({"lora_alpha": -1}, NetworkError, ("'lora_alpha'", "-1")),
        ({"lora_alpha": 1e999}, NetworkError, ("'lora_alpha'", "inf")),
        ({"use_dora": True}, UnsupportedError, ("'use_dora'", "True")),
        ({"rank_pattern": {"q_proj": 8}}, UnsupportedError, ("'rank_pattern'",)),
        ({"bias": "all"}, UnsupportedError, ("'bias'", "'all'")),
        ({"target_modules": None}, NetworkError, ("'target_modules'", "None")),
        ({"target_modules": []}, NetworkError, ("'target_modules'", "[]")),
        ({"target_modules": "(q_proj"}, NetworkError, ("'target_modules'", "regular expression")),
        ({"modules_to_save": "lm_head"}, NetworkError, ("'modules_to_save'", "'lm_head'")),
        ({"target_modules": ["q_proj", "c_attn"]}, NetworkError, ("c_attn", "gate_proj")),
        ({"target_modules": ".*experts"}, NetworkError, (".*experts", "gate_proj")),
        ({"target_modules": ["embed_tokens"]}, UnsupportedError, ("embed_tokens", "Embedding")),
        ({"modules_to_save": ["score"]}, NetworkError, ("'modules_to_save'", "score")),
    ],
)
def test_bad_files_name_file_and_key(
    changes: dict[str, Any], kind: type[InputError], parts: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        load(tmp_path, **changes).make(1)
    assert all(part in str(caught.value) for part in ("adapter_config.json", *parts)), str(caught.value)


def test_a_config_named_by_its_file_is_the_whole_network(tmp_path: Path) -> None:
    load(tmp_path)
    assert load_network(f"hf:{tmp_path / 'config.json'}").decoder is not None
    assert load_network(f"hf:{tmp_path / 'adapter_config.json'}").decoder is None


def quantised(bits: int, **changes: object) -> dict[str, Any]:
    return {**BASE, "quantization_config": {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True, **changes}}


@pytest.mark.parametrize(("bits", "stored"), [(4, "nf4"), (8, "int8")])
@pytest.mark.parametrize("fusion", ["", "library"])
def test_frozen_weights_of_layers_are_stored_in_few_bits_and_cast_for_each_product(
    bits: int, stored: str, fusion: str, tmp_path: Path
) -> None:
    """Embeddings, norms, the head and what is trained are not; fused products cast each weight that they read."""
    network = replace(load(tmp_path, quantised(bits)), fusion=fusion)
    assert f"stored in {bits} bits" in network.notes[0]
    graph = at_precision(network.capture(), "bfloat16")
    narrow = {
        p.node
        for p in graph.parameters
        if p.gradient is None and "layers" in p.name and len(graph.nodes[p.node].outputs[0].shape) == 2
    }
    for parameter in graph.parameters:
        spec = graph.nodes[parameter.node].outputs[0]
        assert spec.dtype == (stored if parameter.node in narrow else "bfloat16"), parameter.name
    casts = [(node, cast) for node in graph.nodes if node.product_dtype for cast in cast_sizes(graph, node)]
    assert {node.product_dtype for node, _ in casts} == {"bfloat16"}
    # Nothing goes back into frozen embeddings in front of the first queries, keys and values.
    assert len(casts) == 2 * len(narrow) - 3
    for node, (place, size) in casts:
        spec = graph.spec(node.tensor_inputs[place])
        assert size == pytest.approx(spec.elements * (STORED_BYTES[stored] + 2), abs=1)


def test_plans_with_weights_in_few_bits_take_less_memory_and_a_little_longer(tmp_path: Path) -> None:
    """Exactly as much less as the weights are smaller; and they are simulated only."""
    folders = [tmp_path / name for name in ("whole", "narrow")]
    for folder, base in zip(folders, (BASE, quantised(4)), strict=True):
        folder.mkdir()
        load(folder, base)
    pins = Pins.read({"tp": 1, "pp": 1, "dp": 2, "recompute": "none", "micro_batch": 1, "optimizer_sharding": "none"})
    whole, narrow = (
        plan_network(
            PlanRequest(
                network=f"hf:{folder}", hardware="dgx-h100", devices=2, global_batch=4, sequence_length=16, pins=pins,
                precision="bf16", top=1,
            )
        ).candidates[0]
        for folder in folders
    )  # fmt: skip
    assert narrow.prediction.step_time_s > whole.prediction.step_time_s
    graph = load_network(f"hf:{folders[1]}", sequence_length=16).capture()
    small = [
        (graph.multiplicity[p.node], graph.nodes[p.node].outputs[0])
        for p in graph.parameters
        if graph.nodes[p.node].outputs[0].dtype == "nf4"
    ]
    saved = sum(times * (2 * spec.elements - spec.size_bytes) for times, spec in small)
    memory = [one.prediction.memory_at_peak["parameters"] for one in (whole, narrow)]
    assert memory[0] - memory[1] == pytest.approx(saved, abs=8)
    path = write_plan(narrow.plan, tmp_path / "strategy.json")
    with pytest.raises(StrategyError, match="without quantization_config"):
        lower_to_run(narrow.plan, path)


@pytest.mark.parametrize("changes", [{"quant_method": "gptq"}, {"load_in_4bit": False}])
def test_other_ways_to_store_weights_are_left_out_and_named(changes: dict[str, object], tmp_path: Path) -> None:
    network = load(tmp_path, quantised(4, **changes))
    assert network.stored == ""
    assert "quantization_config is left out" in network.notes[0]
