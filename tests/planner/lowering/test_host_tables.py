"""Plans with tables of embeddings on the host: what lies where, what it costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cost.work import optimizer, state_bytes
from planner.graph.host_tables import LOOKUP, host_tables
from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph
from planner.graph.scaling import at_precision
from planner.lowering import representatives, unit_work
from planner.lowering.checked import checked_graph, precision_dtype
from planner.lowering.instructions import (
    Communicate,
    Compute,
    HostCopy,
    LoweredStages,
    read_values,
    written_values,
)
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.placed import local_share
from planner.lowering.stages import BACKWARD, FORWARD, lower_stages
from planner.networks import load_network
from planner.planning.planning import PlanRequest, SearchResult, plan_network
from planner.planning.prediction import predict_plan, simulate_plan
from planner.plans.file import plan_from_text, plan_to_text
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from simulator import engine
from simulator.corrections import kernel_factor
from simulator.errors import InputError
from simulator.hardware import HOST_MEMORY_BANDWIDTH
from simulator.pipeline_operators import FIRST, LAST
from simulator.profiles import load_profile
from simulator.program import COMPUTE_STREAM, HOST, BufferKind, Collective, Kernel, Task
from simulator.timing import host_memory_time, host_message_time
from simulator.topology import group_shape
from tests.planner.execution.made import HARDWARE
from tests.planner.execution.small import place
from tests.planner.lowering import steps as steps_of

WIDE, LLAMA, TIED = place("wide_and_deep"), place("llama"), "zoo:gpt2-tiny"
PROFILE = load_profile(HARDWARE)
PINS = (
    {"dp": 2, "optimizer_sharding": "none"},
    {"dp": 2, "optimizer_sharding": "zero1", "micro_batches": 2},
    {"dp": 2, "optimizer_sharding": "zero2", "micro_batches": 2, "offload_optimizer": "true"},
    {"dp": 2, "optimizer_sharding": "zero3", "recompute": "full"},
    {"tp": 2, "micro_batches": 2},
)


@cache
def captured(network: str) -> OperatorGraph:
    return load_network(network).capture()


@cache
def planned_with(network: str, number: int) -> Plan:
    request = PlanRequest(
        network=network,
        hardware=HARDWARE,
        devices=2,
        global_batch=8,
        pins=Pins.read({"host_embeddings": "true"} | {name: str(value) for name, value in PINS[number].items()}),
        top=1,
        sensitivity=False,
    )
    return plan_network(request, graph=captured(network)).candidates[0].plan


@cache
def lowered_of(network: str, number: int, *, on_host: bool = True) -> LoweredStages:
    """The same strategies with tables on the host, or on the devices."""
    plan = planned_with(network, number)
    assert plan.host_embeddings
    return steps_of.lowered_of(replace(plan, host_embeddings=on_host), captured(network))


def rows(lowered: LoweredStages) -> list[tuple[Task, object]]:
    """Tasks of the first and the last micro-batch with their instructions."""
    found = list(steps_of.passes(lowered))
    apart = {id(one): one for _, one in (*found[:2], *found[-2:])}
    return [row for one in apart.values() for row in zip(one.tasks, one.instructions, strict=True)]


@pytest.mark.parametrize("number", range(len(PINS)))
@pytest.mark.parametrize(
    "network", [WIDE, pytest.param(LLAMA, marks=pytest.mark.slow), pytest.param(TIED, marks=pytest.mark.slow)]
)
def test_everything_works_where_its_values_are(network: str, number: int) -> None:
    lowered = lowered_of(network, number)
    assert lowered.host_parameters
    on_host = dict.fromkeys((entry.value for entry in (*lowered.ranks[0].parameters, *lowered.inputs)), False)
    on_host |= dict.fromkeys(lowered.host_parameters, True)
    copies = 0
    for task, instruction in rows(lowered):
        read = [on_host[name] for name in read_values(instruction)]
        if isinstance(instruction, HostCopy):
            assert read == [not instruction.to_host]
            assert task.axis == HOST
            assert task.stream == COMPUTE_STREAM
            on_host[instruction.target] = instruction.to_host
            copies += 1
            continue
        assert len(set(read)) <= 1, f"{task.name} reads from two memories"
        assert task.on_host == (bool(read) and read[0]), task.name
        if isinstance(instruction, Compute):
            assert instruction.on_host == task.on_host
        on_host |= dict.fromkeys(written_values(instruction), task.on_host)
    lookups = sum(node.op == LOOKUP for node in lowered.graph.nodes)
    assert copies >= 4 * lookups, "row numbers and rows, their gradients and row numbers"


def test_an_output_layer_gets_a_copy_of_its_table_and_sends_its_gradient_back() -> None:
    lowered = lowered_of(TIED, 1)
    table = next(name for name in lowered.host_parameters if name.startswith("token"))
    brought = [one.target for _, one in rows(lowered) if isinstance(one, HostCopy) and one.source == table]
    # In the first micro-batch and in the last, for the forward and for the backward pass of the output layer.
    assert len(brought) == 4
    readers = [one for _, one in rows(lowered) if set(read_values(one)) & set(brought)]
    assert readers
    assert not any(isinstance(one, Compute) and one.on_host for one in readers)


@pytest.mark.parametrize("network", [TIED, pytest.param(LLAMA, marks=pytest.mark.slow)])
def test_stages_work_where_their_values_are(network: str) -> None:
    pins = {"pp": "2", "dp": "2", "micro_batches": "2", "optimizer_sharding": "zero2", "schedule": "1f1b"}
    request = PlanRequest(
        network=network,
        hardware=HARDWARE,
        devices=4,
        global_batch=8,
        pins=Pins.read({**pins, "host_embeddings": "true"}),
        top=1,
        sensitivity=False,
    )
    plan = plan_network(request, graph=captured(network)).candidates[0].plan
    graph = checked_graph(plan, captured(network))
    lowered = lower_stages(plan, graph)
    assert lowered.host_parameters
    hosted = set(lowered.host_parameters)
    for stage, rank in zip(lowered.stages, lowered.ranks, strict=True):
        on_host = {entry.value: entry.value in hosted for entry in rank.parameters}
        on_host |= {one.value: False for one in (stage.arrives, stage.gradient_arrives) if one is not None}
        on_host |= {entry.value: False for entry in stage.inputs}
        for kind, variant in ((FORWARD, FIRST), (BACKWARD, FIRST), (BACKWARD, LAST)):
            one = stage.passes[kind, variant]
            for task, instruction in zip(one.tasks, one.instructions, strict=True):
                read = [on_host[name] for name in read_values(instruction)]
                if isinstance(instruction, HostCopy):
                    assert read == [not instruction.to_host]
                    on_host[instruction.target] = instruction.to_host
                    continue
                assert len(set(read)) <= 1, f"{task.name} reads from two memories"
                assert task.on_host == (bool(read) and read[0]), task.name
                on_host |= dict.fromkeys(written_values(instruction), task.on_host)
        for parameter, gradient in stage.gradients.items():
            assert on_host[gradient] == (parameter in hosted)
    on_device = predict_plan(replace(plan, host_embeddings=False), graph, PROFILE)
    found = predict_plan(plan, graph, PROFILE)
    table = max(graph.nodes[entry.node].outputs[0].size_bytes for entry in graph.parameters)
    assert found.memory_at_peak[BufferKind.PARAMETER] < on_device.memory_at_peak[BufferKind.PARAMETER]
    assert found.peak_memory_bytes < on_device.peak_memory_bytes - table / 4


@pytest.mark.parametrize("number", range(len(PINS)))
def test_memory_falls_by_the_tables_and_the_step_waits_for_the_host(number: int) -> None:
    plan = planned_with(WIDE, number)
    graph = checked_graph(plan, captured(WIDE))
    found = [simulate_plan(replace(plan, host_embeddings=on_host), graph, PROFILE) for on_host in (False, True)]
    kept = [one.lowered.sizes.resident for one in found]
    (rank,), nodes = lowered_of(WIDE, number).ranks, {node.name: node for node in lowered_of(WIDE, number).graph.nodes}
    hosted = set(lowered_of(WIDE, number).host_parameters)
    sizes = plan.mesh.sizes
    tables = sum(
        nodes[entry.value].outputs[0].size_bytes * local_share(entry.placements, sizes)
        for entry in rank.parameters
        if entry.value in hosted
    )
    less = [float(kept[0][kind][0] - kept[1][kind][0]) for kind in (BufferKind.PARAMETER, BufferKind.OPTIMIZER_STATE)]
    (dtype,) = {nodes[name].outputs[0].dtype for name in hosted}
    states = state_bytes(optimizer(plan.optimizer), dtype) / DTYPE_BYTES[dtype]
    assert less == [tables, 0.0 if plan.offload_optimizer else states * tables]
    peaks = [one.prediction.peak_memory_bytes for one in found]
    assert peaks[1] < peaks[0] - sum(less)
    slower = predict_plan(plan, graph, replace(PROFILE, host_memory_bandwidth=1e9))
    assert slower.step_time_s > max(one.prediction.step_time_s for one in found)
    reference = simulate_plan(plan, graph, PROFILE, engine=engine.run).prediction
    assert reference.step_time_s == pytest.approx(found[1].prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize("network", [WIDE, pytest.param(LLAMA, marks=pytest.mark.slow)])
def test_equal_layers_are_written_once_and_take_as_long(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned_with(network, 1)
    graph = at_precision(captured(network), precision_dtype(plan.precision))
    found = predict_plan(plan, graph, PROFILE)

    def refuse(*_: object) -> None:
        raise representatives.UnalikeError("layers are not alike")

    monkeypatch.setattr(representatives, "_shortened", refuse)
    unit_work._unit_bodies.cache_clear()
    whole = predict_plan(plan, graph, PROFILE)
    assert found.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)
    assert found.peak_memory_bytes == whole.peak_memory_bytes


def test_host_work_takes_its_bytes_over_the_memory_of_the_host() -> None:
    plan = planned_with(WIDE, 0)
    graph = checked_graph(plan, captured(WIDE))
    timed = lower_pipeline(plan, graph, PROFILE)
    counts = timed.work.counts(timed.schedule)
    ran = [row for row in zip(counts, timed.work.seconds, timed.work.tasks, strict=True) if row[0]]
    share = HOST_MEMORY_BANDWIDTH / PROFILE.devices_per_node
    kernels = []
    for times, took, task in ran:
        if task.on_host and task.collective is None:
            launched = kernel_factor(PROFILE, task.kernel, task.dtype, 1) * PROFILE.kernels[task.kernel].overhead_s
            assert took == pytest.approx(launched + task.bytes_moved / share)
            kernels += [task.kernel] * int(times)
    assert kernels.count(Kernel.EMBEDDING) == 4
    assert kernels.count(Kernel.OPTIMIZER) == 2
    elements = sum(graph.nodes[i].outputs[0].elements for i in host_tables(graph).parameters)
    updates = [times * t.bytes_moved for times, _, t in ran if t.on_host and t.kernel is Kernel.OPTIMIZER]
    assert sum(updates) == 7 * DTYPE_BYTES["float32"] * elements
    assert plan.optimizer == "adamw"


def test_messages_among_hosts_are_no_faster_than_their_memory_nor_their_links() -> None:
    group, payload = group_shape(PROFILE, 8, 1), np.array([1e3, 1e9])
    slow_links = replace(PROFILE, host_memory_bandwidth=1e18)
    memory = host_memory_time(PROFILE, 3.0 * payload)
    found = host_message_time(PROFILE, Collective.ALL_GATHER, payload, group)
    links = host_message_time(slow_links, Collective.ALL_GATHER, payload, group)
    assert found[1] == memory[1] > links[1]
    assert found[0] == links[0] > memory[0]
    assert host_message_time(PROFILE, Collective.ALL_REDUCE, payload, group)[1] == 2 * memory[1]


def test_the_strategy_file_keeps_it_and_contradictions_are_refused() -> None:
    plan = planned_with(WIDE, 0)
    text = plan_to_text(plan)
    assert plan_from_text(text).plan == plan
    assert "host_embeddings" not in plan_to_text(replace(plan, host_embeddings=False))
    with_sums = replace(plan, optimizer="lamb")
    assert plan_from_text(plan_to_text(with_sums)).plan == with_sums


def test_sums_of_tables_and_of_other_parameters_travel_apart() -> None:
    plan = replace(planned_with(LLAMA, 1), optimizer="lamb")
    lowered = steps_of.lowered_of(plan, captured(LLAMA))
    on_host = set(lowered.host_parameters)
    sums = [
        {source.partition(".sums")[0] for source in instruction.sources}
        for instruction in steps_of.updates(lowered)
        if isinstance(instruction, Communicate)
    ]
    assert {bool(parameters & on_host) for parameters in sums} == {False, True}
    assert all(bool(parameters & on_host) == (parameters <= on_host) for parameters in sums)
    work = lower_pipeline(plan, checked_graph(plan, captured(LLAMA)), PROFILE).work
    messages = [work.tasks[number] for number, _ in work.updates[0] if "norms of" in work.tasks[number].name]
    assert [task.on_host for task in messages] == [parameters <= on_host for parameters in sums]


def planned(network: str, hardware: str = HARDWARE, devices: int = 1, **pins: str) -> SearchResult:
    optimizer = pins.pop("optimizer", None)
    request = PlanRequest(network=network, hardware=hardware, devices=devices, global_batch=64, pins=Pins.read(pins))
    return plan_network(replace(request, optimizer=optimizer, sensitivity=False, top=1), graph=captured(network))


@pytest.mark.parametrize(
    ("network", "pins", "words"),
    [
        ("zoo:mlp", {}, ["looks nothing up"]),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(network: str, pins: dict[str, str], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        planned(network, devices=2, host_embeddings="true", **pins)
    for word in ("host_embeddings", *words):
        assert word in str(caught.value)


def test_what_the_pin_costs_is_simulated() -> None:
    names = ("dp", "host_embeddings", "optimizer_sharding", "micro_batches", "bucket_mb", "offload_optimizer")
    values = ("2", "true", "none", "1", "1", "false")
    request = PlanRequest(
        network="zoo:widedeep",
        hardware=HARDWARE,
        devices=2,
        global_batch=64,
        pins=Pins.read(dict(zip(names, values, strict=True))),
    )
    found = plan_network(request)
    costs = {name: seconds for name, seconds, _ in found.pin_costs}
    assert "pp=1" not in costs
    best = found.candidates[0]
    graph = at_precision(captured("zoo:widedeep"), precision_dtype(best.plan.precision))
    other = predict_plan(replace(best.plan, host_embeddings=False), graph, PROFILE)
    assert costs["host_embeddings=true"] == pytest.approx(best.prediction.step_time_s - other.step_time_s)
    assert costs["host_embeddings=true"] > other.step_time_s > 0


def test_tables_larger_than_a_device_are_planned_on_the_host(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "hw_profiles" / f"{HARDWARE}.yaml").read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith("memory_bytes:"))
    profile = tmp_path / "small.yaml"
    profile.write_text(text.replace(line, '  memory_bytes: {value: 4000000000, source: "assumed: a small device"}'))
    assert load_profile(str(profile)).device_memory_bytes < 2 * 652e6 * 4
    assert not planned("zoo:widedeep", str(profile)).candidates
    best = planned("zoo:widedeep", str(profile), host_embeddings="true").candidates[0]
    assert best.plan.host_embeddings
    assert best.prediction.peak_memory_bytes < 10e9 / 100


def test_what_is_off_the_devices_costs_what_is_simulated() -> None:
    pins = {"dp": "2", "optimizer_sharding": "none", "offload_to": "disk", "offload_parameters": "true"}
    request = PlanRequest(network="zoo:mlp", hardware=HARDWARE, devices=2, global_batch=64, pins=Pins.read(pins), top=1)
    found = plan_network(request, graph=captured("zoo:mlp"))
    best, costs = found.candidates[0], {pin: seconds for pin, seconds, _ in found.pin_costs}
    assert (best.plan.offload_optimizer, best.plan.offload_to, best.plan.offload_parameters) == (True, "disk", True)
    assert "offload_optimizer=true" not in costs
    graph = at_precision(captured("zoo:mlp"), precision_dtype(best.plan.precision))
    elsewhere: dict[str, dict[str, Any]] = {
        "offload_to=disk": {"offload_to": "host"},
        "offload_parameters=true": {"offload_parameters": False},
    }
    for name, there in elsewhere.items():
        other = predict_plan(replace(best.plan, **there), graph, PROFILE)
        assert costs[name] == pytest.approx(best.prediction.step_time_s - other.step_time_s)
        assert costs[name] > 0
