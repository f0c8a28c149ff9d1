"""Device and host memory of plans under named software, and how probable it is that they fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.memory.figures import probability_to_fit
from planner.planning.documents import prediction_document
from planner.planning.planning import PlanRequest, plan_network
from planner.planning.prediction import Prediction, predict_plan
from planner.planning.setting import setting_of
from planner.plans.pins import Pins
from simulator.profiles import profile_text
from simulator.program import BufferKind

GPT: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 512, "n_layer": 4, "n_head": 8, "n_positions": 512, "vocab_size": 8192,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 8192, "max_position_embeddings": 512,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def network(folder: Path, **changes: Any) -> str:
    config = {**GPT, **changes} if "model_type" not in changes else changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


def predicted(spec: str, software: str, devices: int = 2, hardware: str = "dgx-a100", **pins: object) -> Prediction:
    fixed = {"tp": 1, "pp": 1, "micro_batch": 1, "recompute": "none", "offload_optimizer": "false", **pins}
    request = PlanRequest(
        network=spec, hardware=hardware, devices=devices, global_batch=8, sequence_length=256, software=software, top=1,
        sensitivity=False, pins=Pins.read(fixed),
    )  # fmt: skip
    found = plan_network(request)
    assert found.candidates, found.infeasible
    return found.candidates[0].prediction


def test_software_keeps_more_than_the_tensors_of_operators(tmp_path: Path) -> None:
    """Megatron sums gradients in float32, DeepSpeed in 16 bits; neither keeps a shard of 16-bit parameters."""
    spec = network(tmp_path)
    told = {name: predicted(spec, name, optimizer_sharding="zero1") for name in ("", "megatron_lm", "deepspeed")}
    plain, megatron, deepspeed = told.values()
    for prediction in told.values():
        assert sum(prediction.memory_at_peak.values()) == pytest.approx(prediction.peak_memory_bytes, abs=16)
        assert prediction_document(prediction)["p_fits"] == prediction.p_fits == 1.0
    parameters = megatron.memory_at_peak[BufferKind.PARAMETER]
    assert megatron.memory_at_peak[BufferKind.GRADIENT] == pytest.approx(2 * parameters, abs=4)
    assert deepspeed.memory_at_peak[BufferKind.GRADIENT] == pytest.approx(parameters, abs=4)
    assert megatron.memory_at_peak[BufferKind.OPTIMIZER_STATE] == pytest.approx(3 * parameters, abs=4)
    assert megatron.memory_figures
    assert not plain.memory_figures
    assert BufferKind.ALLOCATOR_SLACK not in plain.memory_at_peak
    assert plain.peak_memory_bytes < min(megatron.peak_memory_bytes, deepspeed.peak_memory_bytes)


def test_masks_of_dropout_are_counted_though_the_operators_are_left_out(tmp_path: Path) -> None:
    """A score keeps its mask (1 byte) and the output (2): what Korthikanti et al. count, arXiv:2205.05198."""
    chances = {"attn_pdrop": 0.1, "resid_pdrop": 0.1}
    specs = network(tmp_path / "without"), network(tmp_path / "with", **chances)
    without, masked = (predicted(spec, "megatron_lm", dp=2) for spec in specs)
    kept = (p.memory_at_peak[BufferKind.ACTIVATION] for p in (without, masked))
    tokens, layers = 256, 4
    assert -next(kept) + next(kept) == pytest.approx(layers * 2 * tokens * 512, abs=16)


def test_full_recomputation_of_a_plan_keeps_the_inputs_of_its_layers(tmp_path: Path) -> None:
    spec = network(tmp_path)
    kept = {
        mode: predicted(spec, "megatron_lm", dp=2, recompute=mode).memory_at_peak[BufferKind.ACTIVATION]
        for mode in ("none", "full")
    }
    assert kept["full"] < kept["none"] / 3


def test_replicas_of_the_expert_axis_share_the_states_of_all_but_the_experts(tmp_path: Path) -> None:
    spec = network(tmp_path, **MIXTRAL)
    whole, shared = (
        predicted(spec, "megatron_core", 4, "dgx-h100", dp=4, ep=4, optimizer_sharding=level).memory_at_peak
        for level in ("none", "zero1")
    )
    hidden, inner = MIXTRAL["hidden_size"], MIXTRAL["intermediate_size"]
    expert = 2 * 3 * hidden * inner  # one of four on a rank, in two layers
    dense = 2 * 8192 * hidden + 2 * (4 * hidden**2 + 4 * hidden + 2 * hidden) + hidden
    assert shared[BufferKind.OPTIMIZER_STATE] == pytest.approx(12 * (dense / 4 + expert), rel=1e-3)
    assert whole[BufferKind.OPTIMIZER_STATE] == pytest.approx(12 * (dense + expert), rel=1e-3)


def test_the_memory_of_the_host_is_a_limit(tmp_path: Path) -> None:
    spec = network(tmp_path)
    pins = {"dp": 2, "offload_optimizer": "true", "optimizer_sharding": "zero1"}
    held = predicted(spec, "", **pins).host_memory_bytes
    parameters = (8192 + 512 + 2) * 512 + 4 * (12 * 512**2 + 13 * 512)
    assert held == pytest.approx(16 * parameters, rel=1e-3)  # float32: gradient, weight and both moments
    assert predicted(spec, "", dp=2).host_memory_bytes == 0
    content = yaml.safe_load(profile_text("dgx-a100")[0])
    profile = tmp_path / "small_host.yaml"
    for share, fits in ((1.1, True), (0.9, False)):
        content["topology"]["host_memory_bytes"] = {
            "value": share * held,
            "source": "assumed: a small host, as this test needs it",
        }
        profile.write_text(yaml.safe_dump(content))
        fixed = {"tp": 1, "pp": 1, "micro_batch": 1, "recompute": "none", **pins}
        request = PlanRequest(
            network=spec, hardware=str(profile), devices=2, global_batch=8, sequence_length=256, top=1,
            sensitivity=False, pins=Pins.read(fixed),
        )  # fmt: skip
        found = plan_network(request)
        assert bool(found.candidates) is fits
        assert fits or "host memory binds" in found.infeasible


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_states_are_shared_out_over_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    """Shards are uneven where no dim divides, as those of FSDP2 are: no parameter stays whole."""
    spec = network(tmp_path, vocab_size=8191)
    fixed = {"tp": 1, "pp": 1, "dp": ranks, "micro_batch": 1, "optimizer_sharding": "zero3", "shard_size": ranks}
    request = PlanRequest(
        network=spec, hardware="dgx-h100", devices=ranks, global_batch=2 * ranks, sequence_length=256, top=1,
        software="fsdp", sensitivity=False, pins=Pins.read(fixed),
    )  # fmt: skip
    found = plan_network(request)
    parameters = (8191 + 512 + 2) * 512 + 4 * (12 * 512**2 + 13 * 512)
    held = found.candidates[0].prediction.memory_at_peak
    assert held[BufferKind.OPTIMIZER_STATE] == pytest.approx(8 * parameters / ranks, rel=1e-3)
    assert held[BufferKind.PARAMETER] == pytest.approx(4 * parameters / ranks, rel=1e-3)
    assert not [message for message in found.messages if "whole on every rank" in message]


@given(st.floats(1e6, 1e13), st.floats(1e6, 1e13), st.floats(1.0, 10.0), st.sampled_from(["software", "tensors"]))
def test_more_room_never_makes_a_fit_less_probable(needed: float, limit: float, more: float, basis: Any) -> None:
    least, most = (probability_to_fit(needed, room, basis) for room in (limit, more * limit))
    assert 0 <= least <= most <= 1
    assert probability_to_fit(more * needed, limit, basis) <= least


def test_a_plan_with_hardly_any_room_is_as_likely_to_fail_as_not() -> None:
    assert 0.2 < probability_to_fit(77.9, 78.0, "software") < 0.6
    assert probability_to_fit(40.0, 78.0, "software") > 0.95
    assert probability_to_fit(160.0, 78.0, "software") == 0


@pytest.mark.parametrize(
    ("software", "spec", "hardware", "pins"),
    [
        ("megatron_core", "zoo:llama2-7b", "dgx-h100", {}),
        ("megatron_core", "zoo:gpt2", "dgx-a100", {}),
        ("torchtitan", "zoo:llama2-7b", "dgx-a100", {"pp": "2"}),
        ("deepspeed", "zoo:llama2-7b", "dgx-a100", {"recompute": "none"}),
        ("mindspeed", "zoo:llama2-7b", "ascend910b-atlas800t-a2", {"pp": "2"}),
        pytest.param("megatron_core", "zoo:mixtral-8x7b", "dgx-h100", {"pp": "2"}, marks=pytest.mark.slow),
    ],
)
def test_a_search_takes_plans_to_need_what_they_are_predicted_to(
    software: str, spec: str, hardware: str, pins: dict[str, str]
) -> None:
    """Else its best plans do not fit, and its bound is that of plans that nobody can run."""
    request = PlanRequest(
        network=spec, hardware=hardware, devices=16, global_batch=128, software=software, pins=Pins.read(pins)
    )
    setting = setting_of(request)
    search, explored = setting.search, setting.search.explore(setting.pins, wanted=3)
    for placed in explored.found:
        taken = max(placed.partition.memory_bytes) + search.model().software.fixed_bytes
        needed = predict_plan(search.plan(placed, search.certificate(explored)), search.graph, search.hardware)
        assert 0.75 < taken / needed.peak_memory_bytes < 1.25
