"""A file that is exported and checked is predicted as the plan was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from planner.exchange.checking import check
from planner.exchange.exporting import export_plan
from planner.exchange.formats import ExchangeFormat, rounded
from planner.exchange.registry import FORMATS
from planner.lowering.checked import captured
from planner.planning.planning import plan_network
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest
from simulator.errors import InputError
from tests.planner.exchange.training_configs import usual

WHOLE = ("megatron", "bridge", "mindspeed", "torchtitan", "torchtitan-0.2", "torchtitan-npu", "mindformers")
"""Formats that say all of a plan: none leaves batch, length or recomputation to the user's code."""
EXPERTS = {
    "model_type": "mixtral", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small network with experts."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "config.json").write_text(json.dumps(EXPERTS))
    return f"hf:{folder}"


@st.composite
def asked(draw: st.DrawFn, form: ExchangeFormat, network: str) -> PlanRequest:
    """A request for a plan that the framework of a format can run; tensor ranks share the sequence or do not."""
    table = form.table
    pins: dict[str, Any] = {name: draw(st.sampled_from((1, 2))) for name in ("pp", "tp", "micro_batch")}
    pins["recompute"] = draw(st.sampled_from(table.recompute))
    pins["optimizer_sharding"] = draw(st.sampled_from(table.shardings(pins["pp"])))
    if pins["pp"] > 1:
        pins["schedule"] = draw(st.sampled_from([name for name in table.schedules if name != "none"]))
    if pins["tp"] > 1:
        shared = {"always": True, "never": False}.get(table.sequence_parallel)
        pins["sequence_parallel"] = draw(st.booleans()) if shared is None else shared
    if draw(st.booleans()):
        pins |= {"cp": 2, "context_algorithm": draw(st.sampled_from(table.context))}
    if not network.startswith("zoo:"):
        pins["ep"] = draw(st.sampled_from((1, 2)))
    return PlanRequest(
        network=network, hardware="dgx-a100", devices=draw(st.sampled_from((4, 8))), sequence_length=64,
        global_batch=draw(st.sampled_from((16, 32))), top=1, sensitivity=False,
        software=draw(st.sampled_from(table.software)) if table.software else form.timed_as,
        pins=Pins.read(pins),
    )  # fmt: skip


def assert_predicted_again(form: ExchangeFormat, request: PlanRequest, folder: Path) -> None:
    """Plan, export, check: the times and the memory of both are equal."""
    try:
        found = plan_network(request).candidates
    except InputError:
        reject()  # pins that contradict each other
    if not found:
        reject()
    plan, prediction = found[0].plan, found[0].prediction
    try:
        exported = export_plan(plan, captured(plan), form)
    except InputError:
        reject()
    path = folder / f"plan{form.suffix}"
    path.write_text(exported.written.text)
    checked = check(
        path, form=form.name, network=request.network, hardware=request.hardware, devices=request.devices, better=False
    )
    assert not checked.problems
    assert checked.found is not None, checked.notes
    again = checked.found.prediction
    assert again.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-9)
    assert again.peak_memory_bytes == pytest.approx(prediction.peak_memory_bytes, rel=1e-9)


drawn = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@given(data=st.data())
@settings(drawn, max_examples=4)
def test_a_plan_for_megatron_is_predicted_again(data: st.DataObject, tmp_path: Path, experts: str) -> None:
    network = data.draw(st.sampled_from(("zoo:gpt2-tiny", experts)))
    assert_predicted_again(FORMATS["megatron"], data.draw(asked(FORMATS["megatron"], network)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
@given(data=st.data())
@settings(drawn, max_examples=25)
def test_plans_for_every_framework_are_predicted_again(
    name: str, data: st.DataObject, tmp_path: Path, experts: str
) -> None:
    network = data.draw(st.sampled_from(("zoo:gpt2-tiny", experts)))
    assert_predicted_again(FORMATS[name], data.draw(asked(FORMATS[name], network)), tmp_path)


def test_the_software_that_a_plan_is_for_is_stated_where_it_is_the_framework_s(tmp_path: Path) -> None:
    """Megatron-LM's file is predicted for the usual stack; DeepSpeed's JSON has no comments, and says nothing."""
    request = PlanRequest(
        network="zoo:gpt2-tiny", hardware="dgx-a100", devices=4, global_batch=16, top=1, sensitivity=False,
        software="megatron", pins=Pins(pp=1, tp=1, recompute="none", optimizer_sharding="zero1"),
    )  # fmt: skip
    assert_predicted_again(FORMATS["megatron"], request, tmp_path)
    plan = plan_network(request).candidates[0].plan
    graph = captured(plan)
    for name, stated in (("megatron", "megatron"), ("torchtitan", ""), ("deepspeed", "")):
        text = export_plan(replace(plan, optimizer_sharding="zero2"), graph, FORMATS[name], rounds=True).written.text
        assert FORMATS[name].stated_software(text) == stated
    assert FORMATS["megatron"].stated_software("# Predicted for the software deepspeed\n") == ""


def test_parts_of_layers_and_growing_segments_come_back(tmp_path: Path) -> None:
    request = PlanRequest(
        network="zoo:gpt2-tiny", hardware="dgx-a100", devices=4, global_batch=16, top=1, sensitivity=False,
        software="megatron:expandable_segments=true",
        pins=Pins(pp=1, tp=1, recompute_modules=("layernorm",), optimizer_sharding="zero1"),
    )  # fmt: skip
    assert_predicted_again(FORMATS["megatron"], request, tmp_path)
    text = (tmp_path / f"plan{FORMATS['megatron'].suffix}").read_text()
    assert "--recompute-modules layernorm" in text
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text


def test_chunks_without_layers_are_refused_where_a_file_cannot_say_them() -> None:
    """They were written all the same, and not read again."""
    config = usual(schedule="interleaved_1f1b", vpp=2, layers=(0, *(8,) * 3, 8, *(0,) * 3), num_layers=32)
    for name in ("mindformers", "mindformers-pynative"):
        form = FORMATS[name]
        broken = form.violations(rounded(replace(config, tp=1, etp=1, sequence_parallel=False), form.table))
        assert [one.value for one in broken] == ["0-8-8-8-8-0-0-0"]


def test_context_ranks_of_torchtitan_shard_parameters() -> None:
    """Without data-parallel ranks too: FSDP works over both axes."""
    for name in ("torchtitan", "torchtitan-0.2", "torchtitan-npu"):
        form = FORMATS[name]
        config = usual(devices=8, tp=1, etp=1, pp=1, schedule="none", cp=8, context_algorithm="ring", layers=())
        config = replace(config, sequence_parallel=False, global_batch=16)
        sharded = rounded(replace(config, optimizer_sharding="zero3"), form.table)
        assert form.read(form.write(sharded).text, "job").config.optimizer_sharding == "zero3"
        whole = rounded(replace(config, optimizer_sharding="none"), form.table)
        assert [one.key for one in form.violations(whole)] == ["parallelism.context_parallel_degree"]


def test_frameworks_send_tokens_to_experts_and_gather_none_of_them(experts: str) -> None:
    """Weights of experts that are gathered, or lie on all tensor ranks alike, are no framework's."""
    pins = Pins(pp=1, tp=2, ep=2, micro_batch=2, recompute="none", sequence_parallel=False, expert_overlap=False)
    request = PlanRequest(
        network=experts, hardware="dgx-a100", devices=4, sequence_length=64, global_batch=32, top=1, sensitivity=False,
        software="megatron_core", pins=pins,
    )  # fmt: skip
    (free,) = plan_network(request).candidates
    pinned = [
        plan_network(replace(request, pins=replace(pins, expert_messages="once_a_node", expert_cut=cut))).candidates[0]
        for cut in ("width", "whole")
    ]
    assert free.prediction.step_time_s in [one.prediction.step_time_s for one in pinned]
