"""Numbers of the shipped profiles, fitted to published measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from planner.cli.app import app
from simulator.calibration.fit_operators import operator_fits
from simulator.calibration.fit_profiles import fit_profile, fitted_profiles, shipped_folder, with_fields
from simulator.calibration.fit_shapes import fit_matmul
from simulator.calibration.fits import rows_of
from simulator.calibration.measurement_files import measurements_folder, read_measurements
from simulator.errors import InputError, ProfileError
from simulator.hardware import MatmulModel
from simulator.kernels import matmul_time
from simulator.profile_file import parse_profile
from simulator.profiles import load_profile, profile_names
from simulator.program import Kernel
from tests.measurements import PUBLISHED, needs_published

GEMM = "accelerator,op,dtype,m,n,k,batch,seq_len,n_heads,n_kv_heads,head_dim,time_ms\n"


def numbers(text: str) -> object:
    """The values of a profile without their sources."""

    def bare(part: object) -> object:
        if isinstance(part, dict):
            return {key: bare(value) for key, value in part.items() if key not in {"source", "description"}}
        return [bare(value) for value in part] if isinstance(part, list) else part

    return bare(yaml.safe_load(text))


@pytest.mark.slow
@needs_published
@pytest.mark.parametrize("name", fitted_profiles())
def test_shipped_profiles_hold_what_the_fits_give(name: str) -> None:
    fit = fit_profile(PUBLISHED, name)
    shipped = (shipped_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    hardware = parse_profile(fit.text.encode(), name)
    for kernel in Kernel:
        for field in ("compute_efficiency", "bandwidth_efficiency", "overhead_s"):
            expected = getattr(load_profile(name).kernels[kernel], field)
            assert getattr(hardware.kernels[kernel], field) == pytest.approx(expected, rel=1e-3)
    assert hardware.matmul_models == load_profile(name).matmul_models
    assert fit.text == shipped


@pytest.mark.slow
@needs_published
def test_products_meet_their_rows() -> None:
    for name in fitted_profiles():
        for fit in fit_profile(PUBLISHED, name).fits:
            if fit.name.startswith("matmul "):
                median, tail = fit.errors
                # Cards without the cooling of a server throttle: their rows scatter more.
                assert median < (0.08 if name == "l40s" else 0.06), (name, fit.name)
                assert tail < (0.25 if name == "l40s" else 0.21), (name, fit.name)


@needs_published
def test_fitted_fields_name_their_rows_and_what_they_are_taken_from() -> None:
    fields = operator_fits(PUBLISHED, "dgx-a100-40g").fields
    source = str(fields["operators.matmul.bfloat16"]["source"])
    assert source.startswith("assumed: as for dgx-a100, no rows on this device; there ")
    assert "294 rows" in source
    own = operator_fits(PUBLISHED, "dgx-a100").fields["operators.matmul.bfloat16"]
    assert str(own["source"]).startswith("fitted: meshwright calibrate --from-measurements, matmul bfloat16: 294 rows")
    assert own["utilisation"] == fields["operators.matmul.bfloat16"]["utilisation"]


def test_a_fit_finds_the_model_behind_its_rows() -> None:
    truth = MatmulModel(
        tiles=((256, 128), (128, 256), (128, 128)),
        compute_efficiency=0.8,
        bandwidth_efficiency=0.7,
        overhead_s=5e-6,
        fill_depth=100.0,
        tile_loss=0.1,
        wave_share=0.4,
    )
    hardware = replace(load_profile("dgx-a100"), multiprocessors=108, sustained_matmul_speed=1.0)
    sides = np.array([256.0, 1000.0, 2048.0, 8192.0])
    m, n, k = (axis.ravel() for axis in np.meshgrid(sides, sides, sides))
    seconds = matmul_time(replace(hardware, matmul_models={"bfloat16": truth}), "bfloat16", m, n, k)
    frame = pd.DataFrame({"m": m, "n": n, "k": k, "seconds": seconds * np.where(np.arange(len(m)) % 10, 1.0, 5.0)})
    found = fit_matmul(hardware, rows_of("dgx-a100"), frame, "bfloat16")
    assert found.fit.errors[0] < 0.02  # a tenth of the rows is wrong by a factor of 5
    assert found.model.overhead_s == pytest.approx(5e-6, rel=0.5)


@pytest.mark.parametrize(
    ("cell", "column", "value"),
    [
        ("4096", "m", "wide"),
        ("0.5", "time_ms", "nan"),
        ("0.5", "time_ms", "-1"),
        ("0.5", "time_ms", "1e12"),
        ("0.5", "time_ms", ""),
        ("0.5", "time_ms", "inf"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path: Path, cell: str, column: str, value: str) -> None:
    folder = tmp_path / "operators"
    folder.mkdir()
    row = "NVIDIA H100 80GB HBM3,gemm,bfloat16,4096,2048,1024,,,,,,0.5\n"
    path = folder / "G2_gemm_attention_aiconfigurator.csv"
    path.write_text(GEMM + row + row.replace(cell, value))
    with pytest.raises(InputError, match=rf"G2_gemm_attention_aiconfigurator.csv line 3, column {column}"):
        operator_fits(tmp_path, "dgx-h100")


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with pytest.raises(InputError, match=r"rows.csv cannot be read as CSV: .*; give a readable"):
        read_measurements(path, ["m"])
    path.write_bytes(b"m,n\n\xff\xfe,1\n")
    with pytest.raises(InputError, match="cannot be read as CSV"):
        read_measurements(path, ["m"])
    path.write_text("")
    with pytest.raises(InputError, match="cannot be read as CSV"):
        read_measurements(path, ["m"])
    path.write_text("m,n\n1,2\n")
    with pytest.raises(InputError, match=r"rows.csv line 1: column k is missing; the file has m, n"):
        read_measurements(path, ["m", "k"])
    with pytest.raises(InputError, match="holds no folder operators/"):
        measurements_folder(tmp_path)
    with pytest.raises(InputError, match="no published measurements are known for profile 'mine'"):
        operator_fits(tmp_path, "mine")


def test_text_around_the_numbers_stays() -> None:
    text = (
        "# kept\na:\n  b: {value: 1, source: x}  # kept too\n  c:\n    value: 2\n    source: y\n\n# end\nd: [{e: 1}]\n"
    )
    changed = with_fields(text, {"a.b": {"value": 1.5e-6}, "a.c": {"value": 3}, "a.f.g": {"h": [1, 2.0]}, "d.0.e": 7})
    assert changed == (
        "# kept\na:\n  b: {value: 1.5e-6}  # kept too\n  c:\n    {value: 3}\n  f:\n    g: {h: [1, 2.0]}\n\n"
        "# end\nd: [{e: 7}]\n"
    )
    with pytest.raises(ProfileError, match="no block of keys to add x to"):
        with_fields(text, {"a.b.x": 1})
    with pytest.raises(ProfileError, match="empty"):
        with_fields("", {"a": 1})


@pytest.mark.parametrize("name", profile_names())
def test_writing_a_number_changes_nothing_else(name: str) -> None:
    text = (shipped_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    if "based_on: " in text:
        pytest.skip("has no fitted numbers of its own")
    field = {"value": 0.5, "source": "assumed: any number"}
    changed = with_fields(text, {"kernels.matmul.compute_efficiency": field})
    before, after = numbers(text), numbers(changed)
    assert isinstance(before, dict)
    before["kernels"]["matmul"]["compute_efficiency"] = {"value": 0.5}
    assert after == before


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["calibrate", *arguments], prog_name="meshwright")
        assert result.exit_code == 2
        return result.stderr

    assert "needs --from-measurements" in " ".join(run("--hw", "dgx-a100").split())
    assert "operators/" in run("--from-measurements", str(tmp_path))
    (tmp_path / "operators").mkdir()
    missing = run("--from-measurements", str(tmp_path), "--out", str(tmp_path / "none"))
    assert "is no folder" in " ".join(missing.split())
    unread = run("--from-measurements", str(tmp_path), "--hw", "dgx-h100", "--out", str(tmp_path))
    assert "cannot be read as CSV" in " ".join(unread.split())
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.slow
@needs_published
def test_the_command_writes_profiles(tmp_path: Path) -> None:
    arguments = ["calibrate", "--from-measurements", str(PUBLISHED), "--hw", "dgx1-v100", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, "--json"], prog_name="meshwright")
    assert result.exit_code == 0
    (entry,) = json.loads(result.stdout)["profiles"]
    assert entry["file"] == str(tmp_path / "dgx1-v100.yaml")
    assert {fit["name"] for fit in entry["fits"]} >= {"streams", "innermost level"}
    assert load_profile(entry["file"]).hash == load_profile("dgx1-v100").hash
