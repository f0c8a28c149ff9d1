"""The report of plans that were run."""

import json
import re
from dataclasses import replace
from importlib.resources import files

import pytest

from reports.execution.__main__ import main
from reports.execution.cases import all_cases, tiny_cases
from reports.execution.execution_page import document, execution_page, runs_csv
from reports.execution.figures import choice_regrets, figures, network_taus
from reports.execution.running import (
    JOURNAL,
    ROUNDS,
    Result,
    counted,
    key_of,
    profile_of,
    read_journal,
    run_all,
    with_overhead,
)


def result(network="MLP", processes=1, plan="one process", predicted=1.0, measured=1.0, **others):
    return Result(
        network=network,
        processes=processes,
        plan=plan,
        predicted_step_time_s=predicted,
        measured_step_time_s=measured,
        measured_p10_s=measured,
        measured_p90_s=measured,
        predicted_peak_memory_bytes=110,
        measured_peak_memory_bytes=100,
        **others,
    )


RESULTS = (
    result(predicted=0.9),
    result(processes=2, plan="dp=2", predicted=0.5, measured=0.4, by_hand="DDP", by_hand_step_time_s=0.32,
           beside_by_hand_step_time_s=0.4, overhead_rounds=(0.2, 0.7, 0.25),
           errors=({"kind": "operators", "name": "matmul", "calls": 2, "predicted_s": 0.5, "measured_s": 0.4,
                    "without_core_s": 0.1},)),
    result(processes=2, plan="tp=2", predicted=0.4, measured=0.5),
    result(processes=4, plan="dp=4", predicted=0.3, measured=0.25),
    Result(network="GPT-2 small", processes=8, plan="dp=8", error="rank 3 of 8 failed: <killed>"),
)  # fmt: skip


def test_figures():
    found = {one.key: one for one in figures(RESULTS)}
    assert found["time_mean"].value == pytest.approx((0.1 + 0.25 + 0.2) / 3)
    assert found["time_worst"].value == pytest.approx(0.25)
    assert found["shared_time_mean"].value == pytest.approx(0.2)
    assert found["memory_worst"].value == pytest.approx(0.1)
    assert found["overhead"].value == pytest.approx(0.25)
    assert found["overhead"].met is False
    assert found["regret"].value == pytest.approx(0.25)
    assert network_taus(RESULTS)["MLP"] == pytest.approx(2 / 3)
    assert set(choice_regrets(RESULTS)) == {"MLP, 2 processes"}
    assert all(one.met is None for one in figures(()))


def test_errors_at_the_speed_beside_the_run_stand_beside_those_of_the_prediction():
    """Half as fast as when it was calibrated: what was predicted as 0.5 s would now be 1 s."""
    slow = result(predicted=0.5, measured=0.8, machine_speed=0.5)
    assert slow.time_error == pytest.approx(-0.375)
    assert slow.time_error_at_this_speed == pytest.approx(0.25)
    assert result().time_error_at_this_speed is None
    found = {one.key: one for one in figures((slow, result(processes=4, machine_speed=1.0)))}
    assert found["time_mean"].value == pytest.approx(0.375)
    assert found["scaled_time_mean"].value == pytest.approx(0.25)
    assert found["scaled_shared_time_mean"].value == pytest.approx(0.0)
    assert not any(one.key.startswith("scaled") for one in figures(RESULTS))
    assert "Beside 1 of 1 plans the machine had another speed" in execution_page((slow,), planned=1, machine="here")
    assert "another speed" not in execution_page(RESULTS, planned=5, machine="here")


def test_page_and_tables_hold_every_plan():
    page = execution_page(RESULTS, planned=7, machine="two <cores>")
    assert "two &lt;cores&gt;" in page
    assert "rank 3 of 8 failed: &lt;killed&gt;" in page
    assert "2 of 7 plans have not been run yet" in page
    rows = runs_csv(RESULTS).splitlines()
    assert len(rows) == 1 + len(RESULTS)
    found = json.loads(json.dumps(document(RESULTS, "here"), allow_nan=False))
    assert len(found["plans"]) == len(RESULTS)
    assert found["figures"]["shared_time_mean"]["met"] is True
    assert execution_page((), planned=1, machine="none")


def test_cases_cover_what_is_promised():
    cases = all_cases()
    assert len({case.network.name for case in cases}) == 3
    assert {case.processes for case in cases} == {1, 2, 4, 8}
    assert len({key_of(case) for case in cases}) == len(cases) >= 12
    assert {case.by_hand for case in cases} == {None, "DDP", "FSDP2", "tensor parallel"}
    for case in cases:
        degrees = [case.pins.degree(name) for name in ("dp", "tp", "pp")]
        assert degrees[0] * degrees[1] * degrees[2] == case.processes


def test_damaged_lines_of_the_journal_do_not_count(tmp_path):
    from dataclasses import asdict

    line = json.dumps({"key": "a", "profile": "p", "result": asdict(RESULTS[0])})
    other = json.dumps({"key": "b", "profile": "other", "result": asdict(RESULTS[0])})
    path = tmp_path / "runs.jsonl"
    path.write_text(f'{line}\n{other}\n{{"key": 1}}\n{line}\n{line[:40]}')
    assert read_journal(path, "p") == {"a": RESULTS[0]}


def test_all_runs_of_a_plan_count_alike():
    rows = [{"kind": "operators", "name": "matmul", "calls": 2.0, "measured_s": 1.0}]
    slow = result(predicted=1.0, measured=2.0, machine_speed=0.6, others_share=0.0, errors=rows)
    calm = result(
        predicted=1.4, measured=1.0, machine_speed=1.0, others_share=0.1, errors=[{**rows[0], "measured_s": 3.0}]
    )
    found = counted([slow, calm])
    assert found.measured_step_time_s == pytest.approx(1.5)
    assert (found.measured_p10_s, found.measured_p90_s) == (calm.measured_p10_s, slow.measured_p90_s)
    assert (found.machine_speed, found.others_share, found.stolen_share) == (
        pytest.approx(0.8),
        pytest.approx(0.05),
        None,
    )
    assert [run["machine_speed"] for run in found.attempts] == [0.6, 1.0]
    assert [run["predicted_step_time_s"] for run in found.attempts] == [1.0, 1.4]
    assert found.predicted_step_time_s == pytest.approx(1.2)
    assert found.time_error == pytest.approx(1.2 / 1.5 - 1)
    assert found.first_time_error == pytest.approx(-0.5)
    assert found.errors == ({**rows[0], "measured_s": 2.0},)
    assert counted([RESULTS[-1]]).error
    assert counted([RESULTS[-1], slow]).error == ""


def test_first_runs_stand_beside_all():
    again = counted([result(measured=2.0, machine_speed=0.6), result(measured=1.25, machine_speed=1.0)])
    found = {one.key: one for one in figures((again,))}
    assert found["time_mean"].value == pytest.approx(1 - 1 / 1.625)
    assert found["first_time_mean"].value == pytest.approx(0.5)
    assert not any(one.key.startswith("first") for one in figures(RESULTS))
    page = execution_page((again,), planned=1, machine="here", warnings=("", "it was not quiet"))
    assert "1 of 1 plans ran 2 times" in page
    runs = re.findall(r"<td[^>]*>(\d)</td>" + 3 * r"<td[^>]*>([^<]*)</td>", page)
    assert runs[-2:] == [("1", "1.00 s", "2.00 s", "-50.0 %"), ("2", "1.00 s", "1.25 s", "-20.0 %")]
    assert "Calibration 2 of 2 warned: it was not quiet." in page
    assert "plans ran" not in execution_page(RESULTS, planned=5, machine="here")
    busy = result(others_share=0.3, stolen_share=0.02)
    assert "took up to 30% of the cores&#x27; time, its host up to 2%" in execution_page((busy,), 1, "here")
    line = runs_csv((again,)).splitlines()
    assert dict(zip(line[0].split(","), line[1].split(","), strict=True))["first_time_error"] == "-0.5"


def test_what_was_found_in_turns_stays_with_a_plan():
    """It is taken beside the first run alone."""
    first = replace(RESULTS[1], machine_speed=0.5)
    found = counted([first, result(processes=2, plan="dp=2", machine_speed=1.0)])
    assert found.machine_speed == 0.75
    assert (found.overhead, found.overhead_lowest, found.overhead_highest) == (0.25, 0.2, 0.7)
    assert found.by_hand == "DDP"
    page = execution_page((found,), planned=1, machine="here")
    assert "+25.0 % (+20 to +70)" in page
    failed = result(by_hand="DDP", by_hand_error="ExecutionError: <rank 1>")
    assert "ExecutionError: &lt;rank 1&gt;" in execution_page((failed,), planned=1, machine="here")
    assert {one.key: one for one in figures((failed,))}["overhead"].value is None


def test_failed_turns_do_not_lose_the_run(tmp_path, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no such way")

    monkeypatch.setattr("reports.execution.running.read_plan", fails)
    cases = tiny_cases()
    found = with_overhead(RESULTS[1], cases[1], tmp_path)
    assert found.by_hand_error == "RuntimeError: no such way"
    assert found.time_error == RESULTS[1].time_error
    assert with_overhead(RESULTS[0], cases[0], tmp_path) is RESULTS[0]


def test_every_round_calibrates_and_runs_forwards_or_backwards(tmp_path, monkeypatch):
    ran, taken, shown = [], [], []

    def run_case(case, profile, folder, earlier):
        ran.append((profile.stem[-1], case.name))
        assert (earlier is None) == (profile == profile_of(folder, 0))
        if case.name == "tp=2":
            return result(plan=case.name, predicted=None, measured=None, error="ExecutionError: no such plan")
        return result(plan=case.name, predicted=float(profile.stem[-1]), measured=float(len(ran)))

    def with_overhead(found, case, folder):
        taken.append(case.name)
        return found

    monkeypatch.setattr("reports.execution.running.run_case", run_case)
    monkeypatch.setattr("reports.execution.running.ROUNDS", 3)
    monkeypatch.setattr("reports.execution.running.with_overhead", with_overhead)
    monkeypatch.setattr("reports.execution.running.calibrate", calibrated_as_number)
    found = run_all(tiny_cases(), tmp_path, 10.0, lambda text: None, shown.append)
    assert taken == ["dp=2", "tp=2"]
    assert [len(results) for results in shown] == [1, 2, 3, 3, 3, 3, 3]
    assert shown[-1] == found
    first, second = [("1", "one process"), ("1", "dp=2"), ("1", "tp=2")], [("2", "dp=2"), ("2", "one process")]
    assert ran == [*first, *second, ("3", "one process"), ("3", "dp=2")]
    assert [len(one.attempts) for one in found] == [3, 3, 0]
    assert [one.predicted_step_time_s for one in found] == [2.0, 2.0, None]
    assert [one.measured_step_time_s for one in found] == pytest.approx([12 / 3, 13 / 3, None])
    assert [one.first_time_error for one in found] == [0.0, -0.5, None]
    assert run_all(tiny_cases(), tmp_path, 10.0, lambda text: None) == found
    assert len(ran) == 7


def test_a_disturbed_calibration_is_made_again(tmp_path, monkeypatch):
    made, shares = [], [0.37, 0.2, 0.01, 0.5, 0.4, 0.3]

    def calibrated(options):
        text = (files("hw_profiles") / "dgx-a100.yaml").read_text()
        share = shares[len(made)]
        lines = ("processes: [1]", "pace_s: [0.01]", "pace_spread: 0.1", f"others_share: {share}", "stolen_share: 0.0",
                 'source: "assumed: by this test"')  # fmt: skip
        options.out.write_text(text + f"conditions: {{{', '.join(lines)}}}\n")
        made.append(share)

    monkeypatch.setattr("reports.execution.running.calibrate", calibrated)
    monkeypatch.setattr("reports.execution.running.ROUNDS", 2)
    said = []
    run_all((), tmp_path, 10.0, said.append)
    assert made == shares
    assert said[1] == "other programs took 37% of the cores' time meanwhile: once more"


def calibrated_as_number(options):
    """A profile unlike that of any other round."""
    text = (files("hw_profiles") / "dgx-a100.yaml").read_text()
    options.out.write_text(text.replace("name: dgx-a100", f"name: dgx-a100-{options.out.stem}", 1))


@pytest.mark.slow
def test_the_command_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """No time is left for any plan at first; then each runs in every round, and a third call runs none."""
    asked = []

    def calibrated(options):
        asked.append(options.processes)
        calibrated_as_number(options)

    monkeypatch.setattr("reports.execution.running.calibrate", calibrated)
    out, work = tmp_path / "out", tmp_path / "work"
    arguments = ["--tiny", "--out", str(out), "--work", str(work)]
    main([*arguments, "--minutes", "0"])
    assert json.loads((out / "runs.json").read_text())["plans"] == []
    main(arguments)
    found = json.loads((out / "runs.json").read_text())["plans"]
    assert [plan["error"] for plan in found] == [""] * len(tiny_cases())
    by_hand = [plan for plan in found if plan["by_hand"]]
    assert [plan["by_hand"] for plan in by_hand] == ["DDP", "tensor parallel"]
    assert all(plan["by_hand_loss_difference"] < 1e-4 and plan["overhead"] is not None for plan in by_hand)
    before = (work / JOURNAL).read_bytes()
    main(arguments)
    assert (work / JOURNAL).read_bytes() == before
    assert asked == [2] * ROUNDS
    assert [len(plan["attempts"]) for plan in found] == [ROUNDS] * len(found)
