"""Published runs as whole plans: a search that may choose nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published_runs import read_run
from planner.validation.reading import read_measurements
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
