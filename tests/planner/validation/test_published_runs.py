"""Published runs as whole plans: a search that may choose nothing more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published_runs import NotCoveredError, read_run
from benchmarks.quartznet import quartznet_15x5
from planner.estimate.layered.sequence import quartznet
from planner.validation.reading import read_measurements
from simulator.program import CONVOLUTIONS
from tests.measurements import write_measurements


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
    pins = dict(read_run(row, told=True).pins)
    assert pins["dp"] == "4"
    assert pins.get("shard_size") == shard_size


def test_low_rank_adapters_are_a_config_beside_that_of_the_network(tmp_path: Path) -> None:
    """Plans of adapters are told what is trained; without being told they are not compared."""
    stated = {"n_accels": "8", "tp": "2", "pp": "1"}
    whole, tuned = (
        read_measurements(write_measurements(tmp_path / f"{flags}.csv", {**stated, "other_flags": flags}))[0]
        for flags in ("", "LoRA")
    )
    full, adapted = read_run(whole, told=True), read_run(tuned, told=True)
    assert (full.adapters, full.network, full.pins) == ("", adapted.network, adapted.pins)
    assert json.loads(adapted.adapters)["peft_type"] == "LORA"
    with pytest.raises(NotCoveredError, match="trains a part only"):
        read_run(tuned)


def test_quartznet_has_the_weights_of_its_description() -> None:
    """15 blocks of five: what is planned, and what layers `validate` predicts, besides biases and norms."""
    module, inputs = quartznet_15x5()
    assert [tuple(tensor.shape[1:]) for tensor in inputs] == [(64, 1664), (1, 1664)]
    weights = sum(p.numel() for p in module.parameters() if p.dim() == 3)
    described = sum(
        layer.weights * layer.count for layer in quartznet("quartznet").layers if layer.kernel in CONVOLUTIONS
    )
    assert weights == described
