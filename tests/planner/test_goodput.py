"""Stragglers and goodput of real plans, from the planner to the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from planner.cli.app import app
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.checked import checked_graph
from planner.lowering.pipeline import LoweredPipeline, lower_pipeline
from planner.planning.goodput import checkpoint_bytes, plan_goodput, with_given
from planner.planning.stragglers import straggle
from planner.plans.file import read_plan
from simulator.errors import InputError
from simulator.hardware import Hardware, Reliability
from simulator.profiles import load_profile
from simulator.program import BufferKind

PLAN = ["plan", "zoo:gpt2-tiny", "--hw", "dgx-a100", "--devices", "8", "--global-batch", "16"]
RELIABILITY = ["--device-mtbf", "1e6", "--restart", "300", "--storage-bandwidth", "1e6"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="meshwright")


@pytest.fixture(scope="module")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plans of one network: parameters and states sharded over all devices, and whole on each."""
    folder = tmp_path_factory.mktemp("strategies")
    found = {}
    for sharding in ("zero2", "none"):
        found[sharding] = folder / f"{sharding}.json"
        result = run(*PLAN, "--pin", f"optimizer_sharding={sharding}", "--pin", "dp=8", "--out", str(found[sharding]))
        assert result.exit_code == 0, result.stderr
    return found


def graph_of(path: Path) -> OperatorGraph:
    return checked_graph(read_plan(path))


def test_a_checkpoint_is_written_once_however_it_is_sharded(strategies: dict[str, Path]) -> None:
    sharded, whole = (
        checkpoint_bytes(read_plan(strategies[name]), graph_of(strategies[name]), 8) for name in ("zero2", "none")
    )
    assert sharded.written == pytest.approx(whole.written, rel=0.01)
    assert whole.loaded == pytest.approx(8 * whole.written)
    assert sharded.loaded < 0.5 * whole.loaded
    path = strategies["none"]
    found = lower_pipeline(read_plan(path), graph_of(path), load_profile("dgx-a100")).sizes.resident
    assert whole.loaded == sum(found[kind] for kind in (BufferKind.PARAMETER, BufferKind.OPTIMIZER_STATE))


def test_stragglers_slow_the_computation_of_the_step(strategies: dict[str, Path]) -> None:
    plan, hardware = read_plan(strategies["zero2"]), load_profile("dgx-a100")
    graph = graph_of(strategies["zero2"])

    def lower(cluster: Hardware) -> LoweredPipeline:
        return lower_pipeline(plan, graph, cluster)

    calm = straggle(plan, hardware, lower, slow_ranks=0, slowdown=2.0, slow_links={}, seed=0)
    slow = straggle(plan, hardware, lower, slow_ranks=1, slowdown=2.0, slow_links={}, seed=0)
    both = straggle(plan, hardware, lower, slow_ranks=1, slowdown=2.0, slow_links={"NVSwitch": 0.1}, seed=0)
    assert 1.5 < slow.step_time_s / calm.step_time_s < 2.0
    assert both.step_time_s > slow.step_time_s
    assert list(slow.slow_ranks.values()) == [2.0]
    assert calm.slow_ranks == {}


def test_goodput_of_a_plan_is_that_of_its_numbers(strategies: dict[str, Path]) -> None:
    hardware = load_profile("dgx-a100")
    numbers = Reliability(device_mtbf_s=8e4, restart_s=100.0, storage_bandwidth_bytes_per_s=1e6)
    size = checkpoint_bytes(read_plan(strategies["zero2"]), graph_of(strategies["zero2"]), 8)
    found = plan_goodput(size, 8, hardware, numbers, step_time_s=2.0, days=20.0, seed=3)
    assert found.job_mtbf_s == 1e4
    assert found.checkpoint.blocking_s == pytest.approx(8 * found.checkpoint_bytes.written / 1e6)
    assert found.restart_s == pytest.approx(100.0 + found.checkpoint.load_s)
    assert found.expected.interval_s == 2.0 * found.interval_steps
    assert found.simulated.mean.useful == pytest.approx(found.expected.useful, rel=0.01)
    assert found.simulated.failures.mean() == pytest.approx(20 * 86400 / 1e4, rel=0.1)


def test_what_a_profile_does_not_say_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"reliability\.restart_s; give --restart or add"):
        with_given(Reliability(device_mtbf_s=1.0), {"device_mtbf_s": None, "restart_s": None}, profile="mine")
    found = with_given(Reliability(device_mtbf_s=1.0), {"device_mtbf_s": 2.0, "restart_s": 3.0}, profile="mine")
    assert (found.device_mtbf_s, found.restart_s) == (2.0, 3.0)


def test_the_command_reports_both_and_repeats_itself(strategies: dict[str, Path]) -> None:
    call = ["simulate", str(strategies["zero2"]), "--goodput", "--stragglers", "2", "--seed", "5", *RELIABILITY]
    result = run(*call, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["seed"] == 5
    assert [rank["factor"] for rank in document["stragglers"]["slow_ranks"]] == [1.5, 1.5]
    assert document["stragglers"]["step_time_s"] > document["step_time_s"]
    kept = document["goodput"]
    assert sum(kept[share] for share in ("goodput", "checkpoint", "repeated", "restart")) == pytest.approx(1)
    assert kept["tokens_per_s"] == pytest.approx(document["prediction"]["tokens_per_s"] * kept["goodput"])
    assert run(*call, "--json").stdout == result.stdout
    text = run(*call).stdout
    for word in ("goodput", "stragglers", "slow ranks", "checkpoint", "failures", "seed 5"):
        assert word in text


def test_without_the_options_nothing_is_said(strategies: dict[str, Path]) -> None:
    document = json.loads(run("simulate", str(strategies["zero2"]), "--json").stdout)
    assert document["goodput"] is None
    assert document["stragglers"] is None


def test_asynchronous_checkpoints_leave_more(strategies: dict[str, Path]) -> None:
    call = ["simulate", str(strategies["zero2"]), "--goodput", *RELIABILITY, "--json"]
    blocking, background = (json.loads(run(*call, *more).stdout)["goodput"] for more in ([], ["--async-checkpoint"]))
    assert background["goodput"] > blocking["goodput"]
    assert background["checkpoint_background_s"] == blocking["checkpoint_blocking_s"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--async-checkpoint"], "without --goodput"),
        (["--days", "3"], "without --goodput"),
        (["--slowdown", "2"], "without --stragglers"),
        (["--goodput", "--snapshot-bandwidth", "1e9"], "without --async-checkpoint"),
        (["--goodput", "--hw", "dgx1-v100"], "--device-mtbf and --restart and --storage-bandwidth"),
        (["--stragglers", "9"], "9 slow ranks of 8"),
        (["--stragglers", "1", "--slowdown", "0.5"], "at least 1"),
        (["--slow-link", "NVSwitch"], "LEVEL=SHARE"),
        (["--slow-link", "NVSwitch=2"], "LEVEL=SHARE"),
        (["--slow-link", "Ethernet=0.5"], "NVSwitch, InfiniBand"),
        (["--goodput", "--restart", "1e9", "--device-mtbf", "10"], "never gets on"),
        (["--goodput", "--days", "-1"], "above 0"),
        (["--goodput", "--storage-bandwidth", "1e-300"], "takes for ever at 1e-300 bytes/s"),
        (["--goodput", "--device-mtbf", "nan"], "above 0"),
    ],
    ids=str,
)
def test_bad_input_gives_exit_code_2(strategies: dict[str, Path], options: list[str], words: str) -> None:
    result = run("simulate", str(strategies["zero2"]), *options, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["exit_code"] == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())
