"""The commands: what they print, where, and with which exit code."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

import planner.cli
from planner.cli.app import COMMANDS as LISTED
from planner.cli.app import app
from planner.planning import planning
from planner.plans.file import read_strategy, write_plan
from simulator.errors import ExecutionError
from tests.results import infeasible_result, make_plan, make_result, make_rows

COMMANDS = (
    ["plan"],
    ["simulate"],
    ["what-if"],
    ["execute"],
    ["calibrate"],
    ["validate"],
    ["networks"],
    ["export"],
    ["profiles"],
    ["profiles", "list"],
    ["profiles", "show"],
    ["profiles", "check"],
    ["profiles", "new"],
    ["profiles", "infragraph"],
    ["profiles", "rank-table"],
    ["software"],
    ["software", "list"],
    ["software", "show"],
    ["serve"],
)
PLAN = ["plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "8"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, list(arguments), prog_name="meshwright")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[planning.PlanRequest]:
    """Plan without searching; gives the requests that were made."""
    requests: list[planning.PlanRequest] = []

    def plan_network(request: planning.PlanRequest, **_: object) -> planning.SearchResult:
        requests.append(request)
        return make_result()

    monkeypatch.setattr(planning, "plan_network", plan_network)
    return requests


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_a_worked_example_and_the_common_options(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert f"meshwright {' '.join(command)}" in result.stdout
    assert "Example" in result.stdout
    for option in ("--json", "--quiet", "--debug", "--help"):
        assert option in result.stdout


def test_plan_prints_a_table_and_writes_the_strategy(planned: list[planning.PlanRequest]) -> None:
    result = run(*PLAN, "--pin", "tp=2", "--top", "3", "--precision", "bf16", "--global-batch", "64")
    assert result.exit_code == 0, result.stderr
    for words in ("100 ms", "80.0–130 ms", "328 k", "41.2 %", "20.0 GiB", "gap 0 %", "calibrated", "strategy.json"):
        assert words in result.stdout
    assert "aten.odd.default has no rule and is replicated" in result.stdout
    assert planned[0].pins.said() == {"tp": 2}
    assert (planned[0].top, planned[0].precision, planned[0].global_batch) == (3, "bf16", 64)
    written = read_strategy("strategy.json")
    assert written.plan == make_result().candidates[0].plan
    assert written.prediction is not None
    assert written.prediction["step_time_s"] == 0.1


def test_plan_json_is_one_document_and_nothing_else(planned: list[planning.PlanRequest]) -> None:
    Path("deep").mkdir()
    result = run(*PLAN, "--json", "--out", "deep/mine.json")
    document = json.loads(result.stdout)
    assert document["status"] == "optimal"
    assert document["search"]["mode"] == "dynamic_programming"
    assert set(document["search"]) >= {
        *("mode", "elapsed_s", "capture_s", "objective_s", "lower_bound_s", "gap", "operators", "distinct_blocks"),
    }
    assert set(document["prediction"]) >= {
        *("step_time_s", "interval_s", "label", "tokens_per_s", "mfu", "peak_memory_bytes", "breakdown"),
    }
    assert document["plan"]["mesh"] == [{"axis": "data", "size": 8, "level": document["plan"]["mesh"][0]["level"]}]
    assert set(document["plan"]) >= {
        *("devices", "mesh", "dp", "tp", "pp", "vpp", "cp", "ep", "micro_batch", "micro_batches"),
        *("sequence_parallel", "recompute", "optimizer_sharding", "schedule"),
    }
    assert [set(other) for other in document["alternatives"]] == [
        {"status", "search", "prediction", "plan", "reason"}
    ] * 2
    assert document["strategy_file"] == "deep/mine.json"
    assert Path("deep/mine.json").is_file()
    assert "no rule" in result.stderr


def test_verbose_adds_what_was_proved_and_where_the_time_goes(planned: list[planning.PlanRequest]) -> None:
    short, long = run(*PLAN).stdout, run(*PLAN, "--verbose").stdout
    for words in ("why not the first", "certificate", "20 % slower: more"):
        assert words in long
        assert words not in short
    assert "--verbose" in short


def test_a_failed_command_writes_one_document(planned: list[planning.PlanRequest]) -> None:
    wrong = json.loads(run("plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "none", "--json").stdout)
    assert wrong["error"]["kind"] == "UsageError"
    assert wrong["error"]["exit_code"] == 2
    assert run("plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "none").stdout == ""


def test_completion_installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "--install-completion", "bash"],
        env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "completion installed" in done.stdout
    script = next((tmp_path / ".bash_completions").iterdir()).read_text()
    assert "_MESHWRIGHT_COMPLETE=complete_bash" in script


def test_plan_quiet_prints_the_file(planned: list[planning.PlanRequest]) -> None:
    result = run(*PLAN, "--quiet")
    assert (result.stdout, result.stderr) == ("strategy.json\n", "")


def test_plan_reads_a_config(planned: list[planning.PlanRequest]) -> None:
    Path("gpt2.yaml").write_text("network: zoo:gpt2\nhw: dgx-a100\ndevices: 16\nseq-len: 512\ntop: 2\n")
    result = run("plan", "--config", "gpt2.yaml", "--devices", "8", "-q")
    assert result.exit_code == 0, result.stderr
    request = planned[0]
    assert (request.network, request.devices, request.sequence_length, request.top) == ("zoo:gpt2", 8, 512, 2)


def test_infeasible_is_a_result_with_exit_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "plan_network", lambda request, **_: infeasible_result())
    result = run(*PLAN, "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert (document["status"], document["plan"], document["strategy_file"]) == ("infeasible", None, None)
    assert "42 GiB over the 78 GiB" in result.stderr
    assert not Path("strategy.json").exists()
    assert run(*PLAN).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "zoo:mpl", "--hw", "dgx-a100", "--devices", "8"], ["mpl", "mlp"]),
        (["plan", "mlp", "--hw", "dgx-a100", "--devices", "8"], ["'mlp'", "zoo:mlp"]),
        (["plan", "hf:nowhere", "--hw", "dgx-a100", "--devices", "8"], ["nowhere"]),
        (["plan", "pt2:x.pt2", "--hw", "dgx-a100", "--devices", "8"], ["there is no file x.pt2"]),
        (["plan", "zoo:mlp", "--hw", "dgx-a10", "--devices", "8"], ["'dgx-a10'", "dgx-a100"]),
        (["plan", "zoo:mlp", "--hw", "none.yaml", "--devices", "8"], ["none.yaml", "does not exist"]),
        (["plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "9"], ["9 devices", "use 8 or 16"]),
        (["plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "0"], ["'0'", "at least 1"]),
        (["plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "-1"], ["'-1'", "at least 1"]),
        (["plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "8x"], ["'8x'", "whole number"]),
        (["plan", "zoo:mlp", "--hw", "dgx-a100"], ["--devices is missing"]),
        (["plan", "zoo:mlp", "--devices", "8"], ["--hw is missing"]),
        (["plan", "--hw", "dgx-a100", "--devices", "8"], ["NETWORK is missing"]),
        ([*PLAN, "--pin", "tq=8"], ["'tq'", "did you mean 'tp'"]),
        ([*PLAN, "--pin", "pp=16"], ["pp=16", "divide the device count, 8"]),
        ([*PLAN, "--pin", "tp=3"], ["tp=3"]),
        ([*PLAN, "--pin", "recompute=half"], ["'half' is no value of recompute"]),
        ([*PLAN, "--search-mode", "guess"], ["'guess'", "dynamic_programming"]),
        ([*PLAN, "--parallel-mode", "hybrid_parallel", "--pin", "tp=2"], ["hybrid_parallel", "tp=2"]),
        ([*PLAN, "--precision", "fp8"], ["fp8", "float8", "--precision bf16"]),
        ([*PLAN, "--optimizer", "adamx"], ["'adamx'", "adamw"]),
        ([*PLAN, "--global-batch", "7", "--pin", "dp=8"], ["7"]),
        ([*PLAN, "--config", "none.yaml"], ["none.yaml", "does not exist"]),
        ([*PLAN, "--out", "/proc/none/strategy.json"], ["cannot write", "/proc/none/strategy.json"]),
        (
            [*PLAN, "--out", "new/strategy.json"],
            ["cannot write 'new/strategy.json'", "'new' does not exist"],
        ),
        ([*PLAN, "--out", "."], ["'.'", "folder"]),
        ([*PLAN, "--nonsense"], ["--nonsense"]),
        ([*PLAN, "--top", "101"], ["'101'", "from 1 to 100"]),
        (["paln"], ["paln"]),
        (["simulate", "none.json"], ["none.json", "does not exist"]),
        (["simulate"], ["STRATEGY"]),
        (["export", ".", "--to", "megatron"], ["'.'", "a folder, not a regular file"]),
        (["execute", "none.json"], ["none.json", "does not exist"]),
        (["execute", "none.json", "--steps", "0"], ["'0'", "at least 1"]),
        (["execute", "none.json", "--learning-rate", "nan"], ["'nan'", "above 0", "0.001"]),
        (["execute", "none.json", "--learning-rate", "0"], ["'0'", "above 0"]),
        (["execute", "none.json", "--timeout", "inf"], ["'inf'", "seconds", "60"]),
        (["what-if", "zoo:mlp", "--hw", "dgx-a100", "--devices", "8,…,64"], ["two counts before"]),
        (["what-if", "zoo:mlp", "--hw", "dgx-a100,", "--devices", "8"], ["'dgx-a100,'"]),
        (["what-if", "zoo:mlp", "--hw", "dgx-a100", "--devices", "9,11"], ["9 devices"]),
        (["calibrate", "--device", "tpu"], ["'tpu'", "cpu"]),
        (["calibrate", "--out", "new/local.yaml"], ["cannot write 'new/local.yaml'", "'new' does not exist"]),
        (["validate", "runs.csv"], ["runs.csv", "does not exist"]),
        (["profiles", "show", "dgx"], ["'dgx'"]),
        (["software", "show", "megatron_cor"], ["'megatron_cor'", "did you mean 'megatron_core'"]),
        (["profiles", "check", "none.yaml"], ["none.yaml"]),
    ],
    ids=" ".join,
)
def test_bad_input_gives_exit_code_2_and_says_why(arguments: list[str], words: list[str]) -> None:
    result = run(*arguments, "--json")
    assert result.exit_code == 2, result.output
    error = json.loads(result.stdout)["error"]
    assert error["exit_code"] == 2
    assert " ".join(error["message"].split())[:40] in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert not Path("strategy.json").exists()


@pytest.mark.parametrize("text", ['{"format": "meshwright-strategy", "vers', "{}", "", "\x00"])
@pytest.mark.parametrize("command", ["simulate", "execute"])
def test_a_broken_strategy_file_gives_exit_code_2(command: str, text: str) -> None:
    Path("broken.json").write_text(text)
    result = run(command, "broken.json")
    assert result.exit_code == 2
    assert "broken.json" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "zoo:mlp", "--hw", "read.yaml", "--devices", "8", "--out", "read.yaml"],
        ["plan", "--config", "read.yaml", "--out", "./read.yaml"],
        ["simulate", "read.yaml", "--trace", "read.yaml"],
        ["execute", "read.yaml", "--out", "read.yaml"],
        ["what-if", "zoo:mlp", "--hw", "dgx-a100,read.yaml", "--devices", "8", "--out", "read.yaml"],
    ],
    ids=" ".join,
)
def test_no_command_writes_over_what_it_reads(arguments: list[str]) -> None:
    Path("read.yaml").write_text("{network: 'zoo:mlp', hw: dgx-a100, devices: 8}", encoding="utf-8")
    result = run(*arguments)
    assert result.exit_code == 2
    assert "is a file that this command reads" in result.stderr
    assert Path("read.yaml").read_text(encoding="utf-8").startswith("{network")


def test_a_strategy_for_another_network_gives_exit_code_2() -> None:
    write_plan(make_plan(network="zoo:mlp", sequence_length=None), "other.json")
    result = run("simulate", "other.json")
    assert result.exit_code == 2
    assert "other.json: the strategy is for another network" in result.stderr
    assert "plan it again" in result.stderr


def test_virtual_processes_are_as_many_as_the_plan_has_devices() -> None:
    write_plan(make_plan(network="zoo:mlp", sequence_length=None), "plan.json")
    result = run("execute", "plan.json", "--virtual", "--processes", "3")
    assert result.exit_code == 2
    assert "--processes 3 differs from the plan's" in result.stderr


def test_a_strategy_whose_profile_is_gone_names_the_file_and_the_remedy() -> None:
    write_plan(make_plan(hardware="gone.yaml"), "mine.json")
    result = run("simulate", "mine.json")
    assert result.exit_code == 2
    for word in ("mine.json: hardware.profile", "gone.yaml' does not exist", "--hw"):
        assert word in result.stderr


def test_numbers_that_json_has_not_are_null() -> None:
    from planner.cli.execute import _finite

    assert _finite({"a": [1.0, math.nan], "b": (math.inf, {"c": -math.inf})}) == {
        "a": [1.0, None],
        "b": [None, {"c": None}],
    }


def test_help_of_execute_takes_precision_from_the_plan() -> None:
    text = " ".join(run("execute", "--help").stdout.split())
    assert "Default: the plan's." in text
    assert "the profile's" not in text


def test_simulating_in_a_precision_the_device_lacks_says_so() -> None:
    planned = run("plan", "zoo:mlp", "--hw", "dgx1-v100", "--devices", "1", "--precision", "bf16", "--json")
    result = run("simulate", "strategy.json", "--json")
    for given in (planned, result):
        assert given.exit_code == 0, given.stderr
        assert "has no bfloat16 peak: timed as float32" in given.stderr
    assert "has no" not in run("simulate", "strategy.json", "--hw", "dgx-a100").stderr


def test_an_unexpected_error_gives_exit_code_1_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: object, **_: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(planning, "plan_network", fail)
    result = run(*PLAN)
    assert result.exit_code == 1
    assert (
        result.stderr
        == "meshwright: internal error: ZeroDivisionError: by zero (this is a defect; --debug shows where)\n"
    )
    assert "Traceback" in run(*PLAN, "--debug").stderr


@pytest.mark.parametrize(
    "arguments",
    [["--LONG"], ["LONG"], ["plan", "--LONG"], [*PLAN, "--devices", "LONG"]],
    ids=" ".join,
)
def test_a_message_about_a_long_argument_is_cut(arguments: list[str]) -> None:
    result = run(*(text.replace("LONG", "y" * 100_000) for text in arguments))
    assert result.exit_code == 2
    assert "characters left out" in " ".join(result.stderr.split())
    assert len(result.stderr) < 5000


def test_debug_shows_where_bad_input_was_noticed() -> None:
    result = run("profiles", "show", "none", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_an_interrupt_gives_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(request: object, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "plan_network", interrupt)
    result = run(*PLAN)
    assert (result.exit_code, result.stderr) == (130, "meshwright: interrupted\n")


def test_a_failed_run_gives_exit_code_4(monkeypatch: pytest.MonkeyPatch) -> None:
    import planner.execution.run

    def fail(options: object, say: object, monitor: object) -> None:
        raise ExecutionError("rank 1 failed")

    monkeypatch.setattr(planner.execution.run, "execute", fail)
    write_plan(make_plan(), "strategy.json")
    result = run("execute", "strategy.json")
    assert (result.exit_code, result.stderr) == (4, "meshwright: rank 1 failed\n")


def test_lists() -> None:
    networks = json.loads(run("networks", "--json").stdout)["networks"]
    assert {network["spec"] for network in networks} >= {"zoo:mlp", "zoo:resnet50", "zoo:gpt2", "zoo:llama2-7b"}
    assert run("networks", "--quiet").stdout.split() == [network["spec"] for network in networks]
    assert "784-512-512-1" in run("networks").stdout
    profiles = json.loads(run("profiles", "--json").stdout)["profiles"]
    assert {profile["name"] for profile in profiles} >= {"dgx-a100", "ascend910-atlas800"}
    assert run("profiles", "list", "-q").stdout.split() == [profile["name"] for profile in profiles]
    assert "dgx-a100" in run("profiles").stdout
    assert json.loads(run("profiles", "show", "dgx-a100", "--json").stdout)["rows"]
    assert "datasheet" in run("profiles", "show", "dgx-a100").stdout
    software = json.loads(run("software", "--json").stdout)["software"]
    assert run("software", "list", "--quiet").stdout.split() == [one["name"] for one in software]
    usual = next(one["usual_for"] for one in software if one["name"] == "megatron_core")
    assert usual == {"hopper": ["language"], "blackwell": ["language"]}
    shown = json.loads(run("software", "show", "megatron_core", "--json").stdout)
    assert all(row["source"] for row in shown["rows"])
    assert {"fusion", "stacks.transformer_engine.launch_s", "memory.padded_vocabulary"} <= {
        row["field"] for row in shown["rows"]
    }
    assert "whole training steps" in run("software", "show", "megatron_core").stdout


def test_a_profile_file_is_checked() -> None:
    import hw_profiles

    path = Path(hw_profiles.__path__[0]) / "dgx-a100.yaml"
    assert "is valid" in run("profiles", "check", str(path)).stdout
    Path("broken.yaml").write_text(path.read_text().replace("devices_per_node", "devices_a_node"))
    result = run("profiles", "check", "broken.yaml")
    assert result.exit_code == 2
    assert "devices_a_node" in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["networks"], ["profiles"], ["--version"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom planner.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'plotly', 'transformers', 'sklearn', 'scipy', 'joblib'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout


def test_help_imports_neither_numbers_nor_schemas() -> None:
    program = (
        "import sys\nfrom planner.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'networkx', 'pydantic', 'rich', 'yaml', 'simpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("asked", [None, "2"])
def test_small_products_take_one_thread_unless_asked_otherwise(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", asked or "")
    if asked is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    found: list[str | None] = []
    monkeypatch.setattr("planner.cli.app.app", lambda **_: found.append(os.environ.get("OPENBLAS_NUM_THREADS")))
    planner.cli.main()
    assert found == [asked or "1"]


def test_the_installed_command_and_its_exit_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "profiles", "show", "nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("meshwright: no hardware profile is named 'nothing'")


@pytest.mark.parametrize(
    ("options", "stdout", "code", "words"),
    [
        (["-q"], "/dev/full", 2, "meshwright: cannot write the output: No space left on device; free some space"),
        (["-q"], None, 141, ""),
        ([], None, 141, ""),
    ],
    ids=["full", "nobody reads", "nobody reads a table"],
)
def test_output_that_cannot_be_written_is_no_defect(
    options: list[str], stdout: str | None, code: int, words: str
) -> None:
    command = [sys.executable, "-m", "planner.cli", "networks", *options]
    if stdout is None:
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open(stdout, os.O_WRONLY)
    with os.fdopen(write, "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.startswith(words)
    assert len(done.stderr.splitlines()) == bool(words)


def test_the_table_of_a_large_sweep_is_whole_at_80_columns() -> None:
    from rich.console import Console

    from planner.cli.plan_tables import what_if_report

    small = make_rows()[-1]
    assert small.result is not None
    best = small.result.candidates[0]
    large = replace(best, plan=replace(make_plan(2048, 16), micro_batches=4096, chunks=best.plan.chunks))
    rows = [replace(small, devices=32768, global_batch=1048576, result=replace(small.result, candidates=(large,)))]
    for asked in (rows, [replace(row, settings={"network": "200Gb", "memory_headroom": "0.05"}) for row in rows]):
        console = Console(width=80)
        with console.capture() as captured:
            console.print(*what_if_report(asked, "strong scaling", None), sep="\n")
        words = captured.get().split()
        assert {"2048", "4096", "1048576", "tokens", "memory,"} <= set(words)
        assert ("scaling" in words[2:]) is (asked is rows)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_tables_fit_their_width(width: int) -> None:
    from io import StringIO

    from rich.console import Console

    from planner.cli.plan_tables import plan_report, what_if_report
    from simulator.profiles import load_profile

    out = StringIO()
    console = Console(file=out, width=width)
    hardware = load_profile("dgx-a100")
    for part in (
        *plan_report(make_result(), hardware, "strategy.json"),
        *plan_report(make_result(), hardware, "strategy.json", verbose=True),
        *what_if_report(make_rows(), "weak scaling", "report.html"),
    ):
        console.print(part)
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for words in ("80.0–130 ms", "328 k", "20 % slower: more", "no plan for 8 devices", "4 × 2", "strategy.json"):
        assert words in text


SMALL = ["zoo:gpt2-tiny", "--hw", "dgx-a100", "--devices", "8", "--global-batch", "64"]


@pytest.mark.parametrize(
    "command",
    [
        ["plan", *SMALL],
        ["plan", *SMALL, "--verbose"],
        ["what-if", *SMALL, "--jobs", "1", "--set", "network=100Gb,200Gb", "--set", "memory_headroom=0.1"],
        ["what-if", *SMALL[:-4], "--jobs", "1", "--devices", "8,16", "--set", "network=200Gb", "--pin", "pp=2"],
        ["budget", *SMALL, "--tokens", "1B", "--price", "dgx-a100=1234"],
        ["networks"],
        ["profiles"],
        ["profiles", "show", "dgx-h100"],
        ["software"],
        ["software", "show", "megatron"],
    ],
    ids=" ".join,
)
def test_what_goes_into_a_pipe_fits_80_columns(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    assert_fits(run(*command))


def test_what_is_said_of_a_plan_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run("plan", *SMALL, "--pin", "tp=2", "--pin", "pp=2").exit_code == 0
    for command in (
        ["simulate", "strategy.json"],
        ["simulate", "strategy.json", "--goodput"],
        ["explain", "strategy.json", "--why-not", "tp=1"],
        ["export", "strategy.json", "--to", "megatron", "--round", "--out", "tiny.sh"],
        ["check", "tiny.sh", "--network", "zoo:gpt2-tiny", "--hw", "dgx-a100"],
    ):
        assert_fits(run(*command))
    Path("tiny.sh").write_text(Path("tiny.sh").read_text().replace("--micro-batch-size ", "--micro-batch-size 7"))
    assert_fits(run("check", "tiny.sh", "--network", "zoo:gpt2-tiny", "--hw", "dgx-a100"), exit_code=2)


def assert_fits(result: Result, *, exit_code: int = 0) -> None:
    """Check that no line is over 80 columns, cut, or padded with blanks."""
    assert result.exit_code == exit_code, result.output
    assert result.stdout
    for line in result.stdout.splitlines():
        assert len(line) <= 80, line
        assert line == line.rstrip()
    assert "…" not in result.stdout


def test_terminals_with_more_room_show_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    wide = run("profiles").stdout.splitlines()
    monkeypatch.setenv("COLUMNS", "40")
    narrow = run("profiles").stdout.splitlines()
    assert 80 < max(map(len, wide)) <= 160
    assert len(wide) < len(narrow)
    assert max(map(len, narrow)) <= 80


@pytest.mark.parametrize(("name", "near"), [("pln", "'plan' or 'explain'"), ("whatif", "'what-if'"), ("zzz", "")])
@pytest.mark.parametrize("options", [[], ["--json"]], ids=str)
def test_an_unknown_command_is_told_what_is_near(name: str, near: str, options: list[str]) -> None:
    result = run(name, *options)
    assert result.exit_code == 2
    message = json.loads(result.stdout)["error"]["message"] if options else result.stderr
    assert f"No such command '{name}'." in message
    assert (f"Did you mean {near}?" in message) is bool(near)
    assert ("Did you mean" in message) is bool(near)


@pytest.mark.parametrize("name", LISTED)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    command = group.get_command(typer.Context(group), name)
    assert command is not None
    assert command.help is not None
    assert " ".join(command.help.partition("\n\n")[0].split()) == LISTED[name]
