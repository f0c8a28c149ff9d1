"""`meshwright budget`: devices, time and cost of a training."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from planner.cli.app import app

BASE = ["budget", "zoo:gpt2-tiny", "--hw", "dgx-h100", "--global-batch", "64", "--json"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*BASE, *arguments], prog_name="meshwright")


def test_time_cost_and_energy_follow_from_speed_and_goodput() -> None:
    row = json.loads(run("--tokens", "1B", "--devices", "8", "--price", "dgx-h100=2").stdout)["rows"][0]
    assert row["days"] == pytest.approx(1e9 / (row["tokens_per_s"] * row["goodput"]) / 86400)
    assert row["cost"] == pytest.approx(row["days"] * 24 * 8 * 2)
    assert row["energy_kwh"] == pytest.approx(row["days"] * 24 * 8 * 0.7)
    assert 0.9 < row["goodput"] < 1
    assert row["interval_days"][0] < row["days"] < row["interval_days"][1]
    for name in ("cost", "energy_kwh"):
        assert row[f"interval_{name}"] == pytest.approx(
            [row[name] * days / row["days"] for days in row["interval_days"]]
        )


def test_people_see_ranges_and_sources() -> None:
    command = [*BASE[:-1], "--tokens", "1B", "--devices", "8"]
    unpriced = CliRunner().invoke(app, command).stdout
    priced = CliRunner().invoke(app, [*command, "--price", "dgx-h100=1000"]).stdout
    assert "cost" not in unpriced
    assert "cost of dgx-h100: 1000 a device and hour, as --price says" in " ".join(priced.split())
    assert "always at 700 W (datasheet: NVIDIA H100 datasheet" in " ".join(priced.split())
    ranges = next(line for line in priced.splitlines() if "–" in line)
    assert ranges.count("–") == 3


def test_the_limits_decide_how_many_tokens_fit_and_what_is_too_slow() -> None:
    row = json.loads(run("--within", "1h", "--devices", "8").stdout)["rows"][0]
    assert row["tokens"] == pytest.approx(row["tokens_per_s"] * row["goodput"] * 3600)
    slow = run("--tokens", f"{row['tokens'] * 1.01:.0f}", "--within", "1h", "--devices", "8")
    assert slow.exit_code == 3
    assert json.loads(slow.stdout)["rows"][0]["meets"] is False
    first = json.loads(run("--tokens", f"{row['tokens'] * 0.99:.0f}", "--within", "1h").stdout)["rows"][0]
    assert (first["devices"], first["meets"]) == (8, True)


def test_fewer_devices_than_a_doubling_are_found() -> None:
    """What 24 devices do in time takes 24, not 32."""

    def rows(*limits: str) -> list[dict[str, Any]]:
        command = [
            "budget",
            "zoo:gpt2",
            "--hw",
            "dgx-h100",
            "--global-batch",
            "480",
            "--within",
            "1h",
            *limits,
            "--json",
        ]
        found: list[dict[str, Any]] = json.loads(CliRunner().invoke(app, command).stdout)["rows"]
        return found

    tokens = 0.999 * rows("--devices", "24")[0]["tokens"]
    tried = rows("--tokens", f"{tokens:.0f}")
    assert (tried[0]["devices"], tried[0]["meets"]) == (24, True)
    assert {row["devices"]: row["meets"] for row in tried} == {8: False, 16: False, 24: True, 32: True}


@pytest.mark.parametrize(
    "given",
    [
        ["--tokens", "1B"],
        ["--tokens", "many", "--devices", "8"],
        ["--tokens", "1B", "--within", "30"],
        ["--tokens", "1B", "--devices", "8", "--price", "dgx-a100=2"],
        ["--tokens", "1B", "--devices", "8", "--price", "dgx-h100=-2"],
    ],
    ids=" ".join,
)
def test_bad_input(given: list[str]) -> None:
    assert run(*given).exit_code == 2
