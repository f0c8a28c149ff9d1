"""`meshwright validate`: the file it writes, what it prints, its exit codes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import hw_profiles
import planner.published.fitting
import planner.published.planned
from planner.cli.app import app
from planner.cost.software_file import SoftwareFile, parse_software
from planner.cost.training_run import RunPrediction, TrainingRun
from planner.published.calibrating import calibrate_steps, planned_folds, write_calibration
from planner.published.predictions import COLUMNS, RunFailedError, prediction_lines, recomputing, score
from planner.published.reading import read_measurements
from simulator.errors import InputError, MeshwrightError, ProfileError
from simulator.profiles import check_profile
from tests.measurements import write_measurements

GIB = 2**30


def predict(
    runs: Sequence[TrainingRun],
    advance: Callable[[int], None] | None = None,
    cores: int = 0,
    software: Sequence[SoftwareFile | None] = (),
) -> list[RunPrediction | MeshwrightError]:
    """Seconds by tensor degree and by the device's factor on products; a run on 24 devices cannot be predicted."""
    if advance is not None:
        advance(len(runs))
    files = software or [None] * len(runs)
    return [
        ProfileError("24 devices do not fit")
        if run.setup.devices == 24
        else RunPrediction(
            step_time_s=(2.0 + run.setup.tp / 4) * (file.coefficients.devices[run.family]["matmul"] if file else 1.0),
            interval_s=(2.0, 3.0), label="interpolated", peak_memory_bytes=run.setup.micro_batch * 10.0 * GIB,
            fits=run.setup.micro_batch < 8, breakdown={"compute_s": 2.0}, memory={},
        )
        for run, file in zip(runs, files, strict=True)
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for module in (planner.published.planned, planner.published.fitting):
        monkeypatch.setattr(module, "predict_planned", predict)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["validate", *arguments], prog_name="meshwright")


ROWS: tuple[dict[str, str], ...] = (
    {},
    {"tp": "4", "step_time_s": "2.4"},
    {"accelerator": "Abacus"},
    {"seq_len": "-5"},
    {"micro_batch": "8", "outcome": "oom", "step_time_s": ""},
    {"n_accels": "24", "global_batch": "144"},
)


def test_predictions_one_row_each_in_order(tmp_path: Path) -> None:
    write_measurements(tmp_path / "m.csv", *ROWS)
    result = run("m.csv", "m.csv", "--out", "predictions.csv")
    assert result.exit_code == 0, result.output
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == COLUMNS
    assert [row["row_id"] for row in rows] == [f"T-{n}" for n in range(1, 7)] * 2
    assert [row["status"] for row in rows[:6]] == ["ok", "ok", "skipped", "error", "ok", "skipped"]
    assert rows[0]["predicted_step_time_s"] == "2.5"
    assert (rows[0]["interval_low_s"], rows[0]["interval_high_s"], rows[0]["label"]) == ("2", "3", "interpolated")
    assert rows[0]["predicted_peak_memory_gib"] == "40"
    assert [row["predicted_outcome"] for row in rows[:5]] == ["ok", "ok", "", "", "oom"]
    assert "Abacus" in rows[2]["reason"]
    assert "line 5, column seq_len" in rows[3]["reason"]
    assert "24 devices" in rows[5]["reason"]


def test_tables_for_people_and_faults_beside_them(tmp_path: Path) -> None:
    write_measurements(tmp_path / "m.csv", *ROWS, {"source": "another place"})
    result = run("m.csv")
    assert result.exit_code == 0
    for word in ("7 rows: 4 predicted, 2 skipped, 1 in error", "all", "made for a test", "another place", "regret"):
        assert word in result.stdout
    assert "column seq_len" in result.stderr
    assert "column seq_len" not in result.stdout
    assert not list(tmp_path.glob("*predictions*"))


def test_one_json_document(tmp_path: Path) -> None:
    write_measurements(tmp_path / "m.csv", *ROWS)
    document = json.loads(run("m.csv", "--json").stdout)
    assert [row["status"] for row in document["rows"]] == ["ok", "ok", "skipped", "error", "ok", "skipped"]
    assert document["all"]["rows"] == 6
    assert document["all"]["time_max"] == pytest.approx(0.25)
    assert document["by_source"]["made for a test"]["oom_recall"] == 1.0
    assert run("m.csv", "--quiet", "--out", "p.csv").stdout == "p.csv\n"


def test_the_report_holds_what_made_it(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("a", "b"):
        write_measurements(tmp_path / "runs" / f"{name}.csv", *ROWS)
    result = run("runs/a.csv", "runs/b.csv", "--report", "accuracy")
    assert result.exit_code == 0, result.output
    assert "written accuracy" in result.stdout
    page = (tmp_path / "accuracy" / "index.html").read_text(encoding="utf-8")
    assert "meshwright validate runs/*.csv --report accuracy" in page
    assert "made for a test" in page
    assert (
        json.loads((tmp_path / "accuracy" / "metrics.json").read_text())["fitted_on_everything"]["overall"]["rows"]
        == 12
    )
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    refused = run("runs/a.csv", "--report", "taken", "--json")
    assert refused.exit_code == 2
    assert "--report 'taken'" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothere.csv"], ["nothere.csv"]),
        (["bad.csv"], ["bad.csv", "line 1", "'n_accels'"]),
        (["wrong.csv"], ["no row", "wrong.csv", "line 2", "column tp", "'0'"]),
        (["good.csv", "--out", "nowhere/p.csv"], ["nowhere"]),
        (["empty.csv"], ["empty.csv: line 1 is empty"]),
        (["good.csv", "--out", "good.csv"], ["good.csv", "another name"]),
        ([], ["MEASUREMENTS"]),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    write_measurements(tmp_path / "good.csv", {})
    write_measurements(tmp_path / "wrong.csv", {"tp": "0"})
    (tmp_path / "empty.csv").touch()
    (tmp_path / "bad.csv").write_text("row_id,source\nT-1,x\n", encoding="utf-8")
    before = (tmp_path / "good.csv").read_bytes()
    result = run(*arguments)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words)
    assert result.stdout == ""
    assert (tmp_path / "good.csv").read_bytes() == before


def test_wrong_rows_are_still_written(tmp_path: Path) -> None:
    write_measurements(tmp_path / "wrong.csv", {"tp": "0"})
    assert run("wrong.csv", "--out", "p.csv").exit_code == 2
    assert "error" in (tmp_path / "p.csv").read_text(encoding="utf-8")


def test_a_failure_of_ours_is_an_error_and_a_missing_plan_is_not(tmp_path: Path) -> None:
    rows = read_measurements(write_measurements(tmp_path / "m.csv", {}, {"tp": "4"}, {"tp": "1"}))
    good = predict([row.run for row in rows[:1] if row.run is not None])
    scores = score(rows, [*good, RunFailedError("ZeroDivisionError: by zero"), InputError("no plan keeps all pins")])
    assert [row.status for row in scores] == ["ok", "error", "skipped"]
    assert "ZeroDivisionError" in scores[1].reason


def test_tuned_run_that_does_not_say_may_recompute(tmp_path: Path) -> None:
    tuned = {"framework": "NeMo", "recompute_kind": ""}
    rows = read_measurements(write_measurements(tmp_path / "m.csv", {}, tuned, {**tuned, "recompute_kind": "none"}))
    runs = [row.run for row in rows if row.run is not None]
    assert [recomputing(run) is not None for run in runs] == [False, True, False]


def test_scores_say_how_far_they_are(tmp_path: Path) -> None:
    rows = read_measurements(write_measurements(tmp_path / "m.csv", *ROWS))
    scores = score(rows, predict([row.run for row in rows if row.run is not None]))
    assert len(rows) == len(scores)
    assert scores[0].measured_step_time_s == 2.5
    assert scores[4].measured_step_time_s is None
    assert len(list(prediction_lines(scores))) == len(rows) + 1


def test_each_source_may_be_left_out(tmp_path: Path) -> None:
    """The source that is slower than all others is predicted as they ran, and drags the fit along when it counts."""
    rows = [{"tp": tp, "source": "slow", "step_time_s": "9"} for tp in ("1", "2")]
    rows += [{"tp": tp, "source": name, "step_time_s": "3"} for tp in ("1", "2") for name in ("fast", "quick")]
    write_measurements(tmp_path / "m.csv", *rows)
    result = run("m.csv", "--leave-one-source-out", "--json")
    assert result.exit_code == 0, result.output
    left_out = json.loads(result.stdout)["leave_one_source_out"]
    assert left_out["all"]["predicted"] == 6
    assert set(left_out["by_source"]) == {"slow", "fast", "quick"}
    assert left_out["by_source"]["slow"]["time_bias"] < -0.4
    assert left_out["by_source"]["fast"]["time_bias"] > left_out["by_source"]["slow"]["time_bias"]


def test_calibration_writes_software_and_profiles(tmp_path: Path) -> None:
    shipped = Path(hw_profiles.__file__).parent / "dgx-a100.yaml"
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "dgx-a100.yaml").write_bytes(shipped.read_bytes())
    write_measurements(tmp_path / "m.csv", *({"tp": tp, "source": name} for tp in ("1", "2") for name in ("a", "b")))
    calibration = calibrate_steps(planned_folds(read_measurements(tmp_path / "m.csv")))
    written = write_calibration(calibration, tmp_path / "profiles")
    assert [path.name for path in written] == ["training.yaml", "dgx-a100.yaml"]
    software = parse_software(written[0].read_text(encoding="utf-8"), "training.yaml")
    found = calibration.software.coefficients
    assert {name: dict(values) for name, values in software.coefficients.stacks.items()} == {
        name: pytest.approx(dict(values), rel=1e-3) for name, values in found.stacks.items()
    }
    hardware = check_profile(str(written[1]))
    fitted = {name: value for name, value in hardware.training.items() if not name.startswith("planned_")}
    assert fitted == pytest.approx(dict(found.devices["ampere"]), rel=1e-3)
    assert any("4 rows of whole training steps" in row.source for row in hardware.rows)


def test_words_that_tell_runs_apart_and_not_their_predictions_are_named(tmp_path: Path) -> None:
    """Three runs of one plan: two take another time, for which one word is to blame, and one word changes nothing."""
    said = ("fused optimizer", "fused optimizer; turbo", "fused optimizer; new loader", "")
    times = ("1.0", "1.2", "1.0", "2.0")
    rows = read_measurements(
        write_measurements(
            tmp_path / "rows.csv",
            *({"other_flags": flags, "step_time_s": time} for flags, time in zip(said[:3], times, strict=False)),
            {"other_flags": said[3], "step_time_s": times[3], "source": "another"},
        )
    )
    scores = score(rows, predict([row.run for row in rows if row.run is not None]))
    assert [row.not_read for row in scores] == [(), ("turbo",), ("new loader",), ()]
    assert "not read: turbo" in scores[1].reason
    same = read_measurements(write_measurements(tmp_path / "same.csv", *({"other_flags": one} for one in said)))
    assert not any(row.not_read for row in score(same, predict([row.run for row in same if row.run is not None])))
