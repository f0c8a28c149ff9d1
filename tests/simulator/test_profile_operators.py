"""Models by shape in the profile file: what they become, and what is refused."""

from __future__ import annotations

import copy
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.errors import ProfileError
from simulator.profiles import load_profile, profile_names, write_profile

SOURCE = "assumed: for the sake of the test"
PART = st.floats(min_value=0.01, max_value=1)


@cache
def shipped(name: str = "dgx-a100") -> dict[str, Any]:
    loaded = yaml.safe_load((resources.files("hw_profiles") / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def content() -> dict[str, Any]:
    return copy.deepcopy(shipped())


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_describes_its_operators(name: str) -> None:
    hardware = load_profile(name)
    assert hardware.multiprocessors >= 2
    assert hardware.matmul_models
    assert hardware.attention_models
    assert hardware.convolution_efficiency
    rows = {row.field: row for row in hardware.rows}
    assert all(rows[f"operators.matmul.{dtype}"].source for dtype in hardware.matmul_models)


def test_profiles_without_models_load_and_have_none(tmp_path: Path) -> None:
    data = content()
    del data["operators"], data["overlap"], data["device"]["multiprocessors"]
    hardware = write_profile(data, tmp_path / "old.yaml")
    assert (hardware.matmul_models, hardware.attention_models, hardware.multiprocessors) == ({}, {}, 1)
    assert hardware.convolution_efficiency is None
    assert (hardware.overlap_compute_speed, hardware.overlap_transfer_speed) == (1.0, 1.0)


@given(PART, PART, st.lists(st.integers(1, 512), min_size=2, max_size=2), PART, PART)
@settings(max_examples=15, deadline=None)
def test_a_written_model_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, compute: float, share: float, tile: list[int], speed: float, factor: float
) -> None:
    data = content()
    model = data["operators"]["matmul"]["bfloat16"]
    model.update(
        compute_efficiency=compute, wave_share=share, tiles=[tile], log10_flops=[9.0, 10.0], utilisation=[factor, 1.0]
    )
    model["utilisation"][1] = min(1.0, 5 * factor)
    data["overlap"]["compute_speed"] = {"value": speed, "source": SOURCE}
    hardware = write_profile(data, tmp_path_factory.mktemp("written") / "mine.yaml")
    read = hardware.matmul_models["bfloat16"]
    assert (read.compute_efficiency, read.wave_share, read.tiles) == (compute, share, (tuple(tile),))
    assert read.utilisation == ((9.0, factor), (10.0, min(1.0, 5 * factor)))
    assert hardware.overlap_compute_speed == speed
    assert hardware.hash != load_profile("dgx-a100").hash


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compute_efficiency": 1.5}, "compute_efficiency"),
        ({"tiles": []}, "tiles"),
        ({"tiles": [[128]]}, "tiles"),
        ({"wave_share": -0.1}, "wave_share"),
        ({"overhead_s": float("nan")}, "overhead_s"),
        ({"speed": 1.0}, "speed"),
        ({"source": "guess"}, "source"),
        ({"log10_flops": [9.0], "utilisation": []}, "1 log10_flops but 0 utilisations"),
        ({"log10_flops": [9.0, 9.0], "utilisation": [0.5, 0.5]}, "must ascend"),
        ({"log10_flops": [9.0, 9.1], "utilisation": [0.1, 0.9]}, "makes more work take less time"),
        ({"compute_efficiency": 0.9, "log10_flops": [9.0], "utilisation": [1.2]}, "exceeds 1, the peak"),
    ],
)
def test_models_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    data = content()
    data["operators"]["matmul"]["bfloat16"].update(change)
    with pytest.raises(ProfileError, match=rf"operators\.matmul\.bfloat16.*{reason}"):
        write_profile(data, tmp_path / "mine.yaml")


def test_models_need_the_number_of_multiprocessors(tmp_path: Path) -> None:
    data = content()
    del data["device"]["multiprocessors"]
    with pytest.raises(ProfileError, match=r"operators needs device\.multiprocessors"):
        write_profile(data, tmp_path / "mine.yaml")
