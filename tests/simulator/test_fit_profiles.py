"""The numbers that profiles call fitted are what the fits print."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.calibration.fit_profiles import ROWS, collective_rows, fit_profile, main
from simulator.hardware import load_profile
from simulator.program import Kernel

MEASUREMENTS = Path(__file__).parents[2] / "../shared/measurements"


@pytest.mark.slow
@pytest.mark.skipif(not MEASUREMENTS.exists(), reason="published measurements are not beside the repository")
@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-b200"])
def test_the_fits_can_be_repeated(name: str) -> None:
    rows = next(rows for rows in ROWS if rows.profile == name)
    fits = {fit.name: fit for fit in fit_profile(MEASUREMENTS, rows, collective_rows(MEASUREMENTS))}
    hardware = load_profile(name)
    matmul, inside = hardware.kernels[Kernel.MATMUL], hardware.levels[0]
    assert fits["matmul"].values == pytest.approx(
        {
            "compute_efficiency": matmul.compute_efficiency,
            "bandwidth_efficiency": matmul.bandwidth_efficiency,
            "overhead_s": matmul.overhead_s,
        },
        rel=1e-3,
    )
    found = fits["innermost level"].values
    assert found["latency_s"] == pytest.approx(inside.latency_s, rel=1e-3)
    assert found["bandwidth_bytes_per_s"] == pytest.approx(inside.bandwidth_bytes_per_s, rel=1e-3)
    assert found["collective_overhead_s"] == pytest.approx(hardware.collective_overhead_s, rel=1e-3)


def test_a_folder_without_measurements_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert main([]) == 2
    assert "usage: python -m simulator.calibration.fit_profiles" in capsys.readouterr().err
