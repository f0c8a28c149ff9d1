"""`meshwright export` for other frameworks, from a plan to files and back to the same plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.app import app
from planner.exchange.exporting import export_plan
from planner.exchange.formats import rounded
from planner.exchange.megatron import read_layout, write_layout
from planner.exchange.pinned import pinned
from planner.exchange.registry import FORMATS
from planner.exchange.training_config import config_of
from planner.graph.operator_graph import OperatorGraph
from planner.planning.comparing import request_of
from planner.planning.planning import plan_network
from planner.plans.file import read_plan, write_plan
from planner.plans.pins import read_pins
from planner.plans.plan import Plan
from planner.plans.request import PlanRequest
from simulator.errors import InputError
from simulator.schedules.exchange import format_schedule_csv, parse_schedule_csv
from simulator.schedules.generators import make_schedule


def planned(pins: Sequence[str], *, network: str = "zoo:gpt2", devices: int = 16, batch: int = 64) -> Plan:
    """The best plan with these pins."""
    request = PlanRequest(
        network=network, hardware="dgx-a100", devices=devices, global_batch=batch, top=1, sensitivity=False,
        pins=read_pins(pins),
    )  # fmt: skip
    return plan_network(request).candidates[0].plan


@pytest.fixture(scope="module")
def zero_bubble() -> Plan:
    """A plan that Megatron-LM cannot run: zero bubbles, gradients sharded."""
    pins = "pp=4", "tp=2", "schedule=zbv", "optimizer_sharding=zero2", "sharding_threshold_kb=0", "recompute=none"
    return planned(pins)


@pytest.fixture(scope="module")
def interleaved() -> Plan:
    """A plan that Megatron-LM can run."""
    pins = "pp=2", "tp=2", "schedule=interleaved_1f1b", "vpp=3", "micro_batch=2", "order=pp-dp-tp"
    return planned((*pins, "optimizer_sharding=zero1", "sharding_threshold_kb=0", "sequence_parallel=true"))


def graph_of(plan: Plan) -> OperatorGraph:
    """The network of a plan."""
    from planner.lowering.checked import captured

    return captured(plan)


def test_what_a_framework_cannot_run_is_refused_and_names_what_can_be_done(zero_bubble: Plan) -> None:
    with pytest.raises(InputError, match="schedule=zbv.*--round.*--software megatron_core"):
        export_plan(zero_bubble, graph_of(zero_bubble), FORMATS["megatron"])


@pytest.mark.parametrize(("micro_batch", "rounded_to"), [(4, []), (2, ["schedule=gpipe"])])
def test_torchtitan_runs_fewer_micro_batches_than_stages_in_the_order_of_gpipe(
    micro_batch: int, rounded_to: list[str]
) -> None:
    """Torch refuses 1F1B of fewer micro-batches than stages, where torchtitan only warns."""
    pins = "tp=1", "dp=4", "pp=4", "schedule=1f1b", "optimizer_sharding=zero2", f"micro_batch={micro_batch}"
    plan = planned((*pins, "sharding_threshold_kb=0", "recompute=none"), batch=16)
    graph = graph_of(plan)
    done = export_plan(plan, graph, FORMATS["torchtitan"], rounds=bool(rounded_to))
    assert [one.rounded_to for one in done.cannot_say] == rounded_to
    assert "GPipe" in done.written.text
    assert (FORMATS["torchtitan"].read(done.written.text, "job.py").config.schedule == "gpipe") == bool(rounded_to)


def test_what_is_rounded_is_listed_with_what_it_costs(zero_bubble: Plan, tmp_path: Path) -> None:
    strategy, out = tmp_path / "strategy.json", tmp_path / "plan.sh"
    write_plan(zero_bubble, strategy)
    done = CliRunner().invoke(
        app, ["export", str(strategy), "--to", "megatron", "--round", "--out", str(out), "--json", "--quiet"]
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["format"] == "megatron"
    assert said["version"] == "0.19"
    assert said["files"] == [str(out)]
    assert said["environment"] == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    by_what = {one["what"]: one for one in said["cannot_say"]}
    assert by_what["schedule=zbv"]["rounded_to"] == "schedule=interleaved_1f1b"
    assert by_what["optimizer_sharding=zero2"]["rounded_to"] == "optimizer_sharding=zero1"
    assert all(one["step_time_s"] > 0 and one["peak_memory_bytes"] > 0 for one in said["cannot_say"])
    assert "--tensor-model-parallel-size 2" in out.read_text()


@pytest.mark.parametrize("name", ["megatron", "bridge"])
def test_a_plan_that_is_written_and_read_is_planned_again_as_it_was(interleaved: Plan, name: str) -> None:
    form, graph = FORMATS[name], graph_of(interleaved)
    exported = export_plan(interleaved, graph, form)
    assert exported.cannot_say == ()
    read = form.read(exported.written.text, f"plan{form.suffix}").config
    asked = pinned(replace(read, optimizer=interleaved.optimizer), request_of(interleaved), graph)
    assert not asked.notes
    again = plan_network(asked.request, graph=graph).candidates[0].plan
    assert config_of(again, graph) == config_of(interleaved, graph)


def test_remainders_of_micro_batches_are_planned_and_run_where_the_framework_takes_them() -> None:
    pins = "pp=4", "dp=1", "tp=1", "vpp=2", "micro_batches=6", "schedule=interleaved_1f1b", "recompute=none"
    plan = planned(pins, devices=4, batch=12)
    assert (plan.micro_batches, plan.pipeline, plan.virtual) == (6, 4, 2)
    graph = graph_of(plan)
    megatron = FORMATS["megatron"]
    text = export_plan(plan, graph, megatron).written.text
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    assert f"{flag} 6" in text
    assert not megatron.read(text, "plan.sh").violations
    for group in ("", f"{flag} 4", f"{flag} 7"):
        read = megatron.read(text.replace(f"{flag} 6", group), "plan.sh")
        assert [broken.key for broken in read.violations] == [flag]
    assert export_plan(plan, graph, FORMATS["torchtitan"]).cannot_say == ()
    with pytest.raises(InputError, match="MindFormers.*schedule=interleaved_1f1b.*nearest: schedule=1f1b"):
        export_plan(plan, graph, FORMATS["mindformers"])
    assert not megatron.read(text, "plan.sh").notes
    other = text.replace(f"{flag} 6", f"{flag} 7").replace("--global-batch-size 12", "--global-batch-size 28")
    assert megatron.read(other, "plan.sh").notes == (f"{flag} 7 is timed as 5",)


def test_stages_of_different_size_are_kept() -> None:
    plan = planned(("pp=4", "tp=1", "schedule=1f1b", "optimizer_sharding=none", "micro_batch=1"))
    graph = graph_of(plan)
    config = replace(config_of(plan, graph), layers=(4, 3, 3, 2))
    asked = pinned(config, request_of(plan), graph)
    again = plan_network(asked.request, graph=graph).candidates[0].plan
    assert config_of(again, graph).layers == (4, 3, 3, 2)
    text = FORMATS["megatron"].write(rounded(config, FORMATS["megatron"].table)).text
    assert "Et*4|(t*3|)*2ttL" in text


@pytest.mark.parametrize("layers", [(1, 1), (5, 0, 3, 3, 3, 2), (0, 4), (2,) * 40])
def test_layouts_are_read_as_they_were_written(layers: tuple[int, ...]) -> None:
    assert read_layout(write_layout(layers, 1)) == (layers, 1)


@pytest.mark.parametrize("text", ["", "Et", "tEL", "E(t|*3L", "Et*99999999999L", "ELE"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="pipeline layout"):
        read_layout(text)


def test_strategies_of_every_format_are_written_beside_the_strategy(interleaved: Plan, tmp_path: Path) -> None:
    strategy = tmp_path / "strategy.json"
    write_plan(interleaved, strategy)
    assert read_plan(strategy) == interleaved
    done = CliRunner().invoke(app, ["export", str(strategy), "--to", "torchtitan", "--round", "--quiet"])
    assert done.exit_code == 0, done.output
    assert "pipeline_parallel_degree = 2" in (tmp_path / "strategy.torchtitan.py").read_text()


def test_the_order_of_passes_is_written_as_pytorch_reads_it(zero_bubble: Plan, tmp_path: Path) -> None:
    strategy = tmp_path / "strategy.json"
    write_plan(zero_bubble, strategy)
    done = CliRunner().invoke(app, ["export", str(strategy), "--to", "schedule-csv", "--json", "--quiet"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["version"] == "torch 2.9"
    read = parse_schedule_csv(tmp_path / "strategy.schedule-csv.csv")
    assert format_schedule_csv(read) == format_schedule_csv(make_schedule("zbv", 4, zero_bubble.micro_batches))
