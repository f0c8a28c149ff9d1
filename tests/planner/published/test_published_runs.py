"""Published runs as whole plans: a search that may choose nothing more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import planner.networks.quartznet as quartznet_module
from planner.published.layered.sequence import padded_frames, quartznet
from planner.published.pinned import PinnedRun, pinned_run
from planner.published.reading import MeasuredRow, read_measurements
from simulator.program import CONVOLUTIONS
from tests.measurements import write_measurements


def read_run(row: MeasuredRow) -> PinnedRun:
    """The pinned plan of a row that can be read."""
    assert row.run is not None
    return pinned_run(row.run)


@pytest.mark.parametrize(
    ("stated", "shard_size"),
    [({"optimizer_sharding": "none"}, None), ({"optimizer_sharding": "zero1"}, "4"), ({"zero_fsdp": "ZeRO-3"}, "4")],
)
def test_states_are_shared_out_over_as_many_ranks_as_they_were(
    stated: dict[str, str], shard_size: str | None, tmp_path: Path
) -> None:
    (row,) = read_measurements(
        write_measurements(tmp_path / "m.csv", {"n_accels": "8", "tp": "2", "pp": "1", **stated})
    )
    pins = read_run(row).pins.named()
    assert pins["dp"] == "4"
    assert pins.get("shard_size") == shard_size


def test_low_rank_adapters_are_a_config_beside_that_of_the_network(tmp_path: Path) -> None:
    """Plans of adapters are told what is trained; without being told they are not compared."""
    stated = {"n_accels": "8", "tp": "2", "pp": "1"}
    whole, tuned = (
        read_measurements(write_measurements(tmp_path / f"{flags}.csv", {**stated, "other_flags": flags}))[0]
        for flags in ("", "LoRA")
    )
    full, adapted = read_run(whole), read_run(tuned)
    assert (full.adapters, full.network, full.pins) == ("", adapted.network, adapted.pins)
    assert json.loads(adapted.adapters).items() >= {"peft_type": "LORA", "target_modules": "all-linear"}.items()
    nemo = {**stated, "other_flags": "LoRA", "framework": "NeMo/Megatron-Core"}
    attention = read_run(read_measurements(write_measurements(tmp_path / "nemo.csv", nemo))[0])
    assert json.loads(attention.adapters)["target_modules"] == ["q_proj", "k_proj", "v_proj"]


def test_quartznet_has_the_weights_of_its_description() -> None:
    """15 blocks of five: what is planned, and what layers `validate` predicts, besides biases and norms."""
    module, inputs = quartznet_module.frames_1664()
    assert [tuple(tensor.shape[1:]) for tensor in inputs] == [(64, 1664), (1, 1664)]
    weights = sum(p.numel() for p in module.parameters() if p.dim() == 3)
    described = sum(
        layer.weights * layer.count for layer in quartznet("quartznet", 1664).layers if layer.kernel in CONVOLUTIONS
    )
    assert weights == described


def test_larger_batches_of_utterances_are_planned_and_predicted_longer(tmp_path: Path) -> None:
    """Both take the longest of a batch; batch norms of data-parallel training see a rank's own samples."""
    silent = ("n_layers", "hidden", "n_heads", "vocab", "seq_len", "tp", "pp", "micro_batch", "attention_impl")
    stated = dict.fromkeys((*silent, "recompute_kind", "optimizer_sharding", "sequence_parallel"), "")
    stated |= {"model": "SpeechRecognition/QuartzNet", "arch": "SpeechRecognition", "framework": "PyTorch"}
    stated |= {"n_accels": "4", "global_batch": "1152"}
    rows = write_measurements(
        tmp_path / "m.csv",
        *({**stated, "per_accel_batch": str(size), "grad_accum": str(288 // size)} for size in (24, 48)),
    )
    small, large = read_measurements(rows)
    few, many = (read_run(row) for row in (small, large))
    for run, utterances in ((few, 24), (many, 48)):
        assert run.network == f"py:planner.networks.quartznet:frames_{padded_frames(utterances, 4)}"
        assert run.exchange.cross_batch
    assert small.run is not None
    assert large.run is not None
    assert small.workload == large.workload
    moved = [
        sum(layer.elements_moved * layer.count for layer in row.run.network.layers)  # type: ignore[union-attr]
        for row in (small, large)
    ]
    assert moved[1] / moved[0] == pytest.approx(padded_frames(48, 4) / padded_frames(24, 4), rel=1e-3)
    assert small.run.setup.optimizer == "fused_novograd"


def test_networks_have_no_factory_without_frames() -> None:
    with pytest.raises(AttributeError, match="frames_many"):
        getattr(quartznet_module, "frames_many")  # noqa: B009 - the name is no attribute of a module as it is written


@pytest.mark.parametrize(
    ("stated", "bucket"),
    [
        ({"framework": "Megatron-LM"}, "16384"),
        ({"framework": "Megatron-Core", "other_flags": "overlap-grad-reduce"}, "76"),
        ({"framework": "Megatron-DeepSpeed"}, "954"),
        ({"framework": "PyTorch DDP"}, "25"),
    ],
)
def test_gradients_travel_in_messages_of_the_software(stated: dict[str, str], bucket: str, tmp_path: Path) -> None:
    """Plans would choose the size that suits them, which no framework does."""
    (row,) = read_measurements(
        write_measurements(tmp_path / "m.csv", {"n_accels": "8", "tp": "2", "pp": "1", **stated})
    )
    pins = read_run(row).pins.named()
    assert pins["bucket_mb"] == bucket
    assert pins["sharding_threshold_kb"] == "0"
