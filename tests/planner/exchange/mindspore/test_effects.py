"""What keys do to the plan and to the simulated program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner
from planner import AutoParallelContext, ContextError, Planned
from planner.execution.measuring.recorded import timed_instructions
from planner.graph.scaling import at_precision
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import Communicate
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.stages import lower_stages
from planner.networks import load_network
from planner.planning import planning
from planner.planning.planning import SearchResult
from planner.plans.file import read_plan
from planner.plans.plan import Plan, Status
from simulator.errors import InfeasibleError
from simulator.profiles import load_profile
from simulator.program import Collective, Task
from tests.planner.lowering.steps import lowered_of

FAST: dict[str, Any] = {"top": 1, "sensitivity": False}


def planned(network: str = "zoo:mlp", *, pins: dict[str, str] | None = None, **keys: Any) -> Planned:
    options = {name: keys.pop(name) for name in ("global_batch", "precision", "sequence_length") if name in keys}
    context = AutoParallelContext(**{"parallel_mode": "auto_parallel", "device_num": 8, **keys})
    return planner.plan(network, "dgx-a100", context, pins=pins, **FAST, **options)


def messages(plan: Plan) -> list[Task]:
    graph = at_precision(load_network(plan.network, sequence_length=plan.sequence_length).capture(), "bfloat16")
    found = lower_pipeline(plan, graph, load_profile("dgx-a100"))
    counts = found.work.counts(found.schedule).astype(int).tolist()
    tasks = [task for task, count in zip(found.work.tasks, counts, strict=True) for _ in range(count)]
    return [task for task in tasks if task.collective is not None]


def test_devices_and_the_current_context() -> None:
    with planner.auto_parallel_context(parallel_mode="data_parallel", device_num=4):
        found = planner.plan("zoo:mlp", "dgx-a100", **FAST).plan
    assert (found.devices, found.parallel_mode, found.degree("data")) == (4, "data_parallel", 4)
    with planner.auto_parallel_context(parallel_mode="stand_alone"):
        assert planner.plan("zoo:mlp", "dgx-a100", **FAST).plan.devices == 1


@pytest.mark.parametrize("mode", ["recursive_programming", "sharding_propagation"])
def test_search_modes(mode: str) -> None:
    assert planned(search_mode=mode).plan.search_mode == mode


def test_stages_and_accumulation() -> None:
    found = planned(pipeline_stages=2, grad_accumulation_step=4).plan
    assert (found.pipeline, found.micro_batches) == (2, 4)


def test_the_size_of_messages_is_that_of_the_simulated_program() -> None:
    mode = {"parallel_mode": "data_parallel"}
    counts = {}
    for size in (1, 64):
        found = planned(**mode, comm_fusion={"allreduce": {"mode": "size", "config": size}}).plan
        assert found.bucket_bytes == size * 2**20
        counts[size] = sum(task.collective is Collective.ALL_REDUCE for task in messages(found))
        lowered = lower_stages(found, checked_graph(found))
        run = [one for one, _, times in timed_instructions(lowered, 0) for _ in range(times)]
        executed = [one for one in run if isinstance(one, Communicate)]
        assert counts[size] == sum(i.collective is Collective.ALL_REDUCE for i in executed)
    assert counts[1] > counts[64] >= 1
    auto = planned(**mode, comm_fusion={"allreduce": {"mode": "auto"}}).plan
    assert auto.bucket_bytes == 64 * 2**20


def stored_whole(plan: Plan) -> set[str]:
    axis = [axis.name for axis in plan.mesh.axes].index("data")
    graph = load_network(plan.network).capture()
    names = {parameter.name for parameter in graph.parameters}
    return {name for name in names & plan.rules.keys() if plan.rules[name][axis].outputs[0] < 0}


@pytest.mark.parametrize(
    ("mode", "config", "sharding"),
    [
        ("data_parallel", {}, "zero2"),
        ("data_parallel", {"gradient_accumulation_shard": False}, "zero1"),
        ("data_parallel", {"optimizer_level": "level1"}, "zero1"),
        ("data_parallel", {"optimizer_level": "level2"}, "zero2"),
        ("data_parallel", {"optimizer_level": "level3"}, "zero3"),
        ("auto_parallel", {"optimizer_level": "level3"}, "zero3"),
    ],
)
def test_the_parallel_optimizer(mode: str, config: dict[str, Any], sharding: str) -> None:
    keys = {"parallel_mode": mode, "enable_parallel_optimizer": True, "parallel_optimizer_config": config}
    found = planned(**keys).plan
    assert found.optimizer_sharding == sharding
    assert found.sharding_threshold_bytes == 64 * 1024
    if mode == "data_parallel":
        assert (found.degree("data"), found.pipeline, found.recompute) == (8, 1, "none")
        gathers = {task.collective for task in messages(found)}
        assert Collective.ALL_GATHER in gathers
        assert Collective.REDUCE_SCATTER in gathers


def test_the_threshold_leaves_small_parameters_whole() -> None:
    keys: dict[str, Any] = {"parallel_mode": "data_parallel", "enable_parallel_optimizer": True}
    small = planned(**keys, parallel_optimizer_config={"parallel_optimizer_threshold": 1}).plan
    large = planned(**keys, parallel_optimizer_config={"parallel_optimizer_threshold": 600}).plan
    assert stored_whole(small) < stored_whole(large)
    assert "layers.1.weight" in stored_whole(large) - stored_whole(small)


def test_the_parallel_optimizer_can_be_forbidden_and_grouped() -> None:
    assert planned(enable_parallel_optimizer=False).plan.optimizer_sharding == "none"
    config = {"optimizer_weight_shard_size": 4, "optimizer_level": "level1"}
    keys: dict[str, Any] = {"parallel_mode": "data_parallel", "enable_parallel_optimizer": True}
    assert planned(**keys, parallel_optimizer_config=config).plan.shard_size == 4


# Files


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """File of a plan with two stages."""
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    planned(pipeline_stages=2, strategy_ckpt_save_file=path)
    return path


def test_a_plan_is_written_and_read_again(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    first = planned(pipeline_stages=2, strategy_ckpt_save_file=path)
    assert first.result is not None
    assert first.written == Path(path)
    again = planned(pipeline_stages=2, strategy_ckpt_load_file=path, strategy_ckpt_save_file=f"{path}.copy")
    assert again.result is None
    assert again.plan == first.plan == read_plan(path)
    assert again.prediction.step_time_s == pytest.approx(first.prediction.step_time_s, rel=1e-12)
    assert read_plan(f"{path}.copy") == first.plan


@pytest.mark.parametrize(
    ("network", "keys", "words"),
    [
        ("zoo:gpt2", {}, ("another network", "zoo:gpt2")),
        ("zoo:mlp", {"device_num": 4}, ("8 devices", "device_num=4")),
        ("zoo:mlp", {"pipeline_stages": 4}, ("pp=2", "pp=4")),
        ("zoo:mlp", {"global_batch": 2}, ("global_batch=", "global_batch=2")),
        ("zoo:mlp", {"precision": "fp32"}, ("precision=bf16", "precision=fp32")),
        ("zoo:mlp", {"comm_fusion": {"allreduce": {"mode": "size", "config": 9999}}}, ("bucket_mb=9999",)),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    two_stages: str, network: str, keys: dict[str, Any], words: tuple[str, ...]
) -> None:
    path = two_stages
    with pytest.raises(ContextError) as error:
        planned(network, strategy_ckpt_load_file=path, **keys)
    assert all(word in str(error.value) for word in (*words, path)), str(error.value)


def test_an_infeasible_network_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SearchResult(
        status=Status.INFEASIBLE, candidates=(), elapsed_s=1.0, capture_s=0.0, messages=(), infeasible="42 GiB over"
    )
    monkeypatch.setattr(planning, "plan_network", lambda request, graph: nothing)
    with pytest.raises(InfeasibleError, match="42 GiB over"):
        planned()


# All-to-alls


def kinds(plan: Plan) -> set[Collective | None]:
    return {task.collective for task in messages(plan)}


def test_attention_gathers_where_all_to_alls_are_off(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    pins = {"dp": "2", "cp": "4", "context_algorithm": "all_to_all", "tp": "1", "pp": "1", "micro_batch": "1"}
    pins |= {"recompute": "none", "optimizer_sharding": "zero1", "shard_size": "2", "offload_optimizer": "false"}
    found = planned("zoo:gpt2", pins=pins, enable_alltoall=True, strategy_ckpt_save_file=path)
    without = planned("zoo:gpt2", pins=pins, enable_alltoall=False)
    assert (found.plan.context_algorithm, without.plan.context_algorithm) == ("all_to_all", "all_to_all")
    assert Collective.ALL_TO_ALL in kinds(found.plan)
    assert Collective.ALL_TO_ALL not in kinds(without.plan)
    # Whether the step takes longer depends on what hides the messages.
    sent = [
        sum(task.payload_bytes for task in messages(one.plan) if task.axis == "context") for one in (without, found)
    ]
    assert sent[0] > sent[1]
    with pytest.raises(ContextError, match="has all_to_all=True, and the context asks for False"):
        planned("zoo:gpt2", pins=pins, enable_alltoall=False, strategy_ckpt_load_file=path)


def test_experts_are_gathered_instead() -> None:
    """Samples come to their experts by all-gathers and slices, which move more."""
    pins = {"ep": "8", "dp": "16", "tp": "1", "pp": "1", "cp": "1", "micro_batch": "1", "recompute": "full"}
    pins |= {"optimizer_sharding": "zero3", "sharding_threshold_kb": "64", "offload_optimizer": "false"}
    found = {}
    for allowed in (True, False):
        context = AutoParallelContext(parallel_mode="auto_parallel", device_num=16, enable_alltoall=allowed)
        options: dict[str, Any] = {"global_batch": 16, "sequence_length": 512, **FAST}
        found[allowed] = planner.plan("zoo:mixtral-8x7b", "dgx-h100", context, pins=pins, **options)
    sent = {allowed: kinds(one.plan) for allowed, one in found.items()}
    assert [Collective.ALL_TO_ALL in sent[allowed] for allowed in (True, False)] == [True, False]
    assert found[True].plan.rules == found[False].plan.rules
    assert found[False].prediction.step_time_s > found[True].prediction.step_time_s


# Hybrid parallelism, and shards of everything


def test_a_threshold_of_nothing_shards_all_that_divides() -> None:
    keys: dict[str, Any] = {"parallel_mode": "data_parallel", "enable_parallel_optimizer": True}
    found = planned(**keys, parallel_optimizer_config={"parallel_optimizer_threshold": 0}).plan
    graph = load_network("zoo:mlp").capture()
    shapes = {p.name: graph.nodes[p.node].outputs[0].shape for p in graph.parameters}
    assert stored_whole(found) == {name for name, shape in shapes.items() if not any(n % 8 == 0 for n in shape)}
    assert (found.degree("data"), found.sharding_threshold_bytes, found.optimizer_sharding) == (8, 0, "zero2")
    layers = [node.name for node in graph.nodes if node.op in ("aten.addmm.default", "aten.relu.default")]
    assert {found.rules[name][0].outputs for name in layers} == {(0,)}, "samples are cut, and nothing else"
    assert layers


def test_own_parameters_are_named() -> None:
    context = AutoParallelContext(parallel_mode="hybrid_parallel", device_num=8, gradients_mean=True)
    found = planner.plan("zoo:mlp", "dgx-a100", context, layerwise_parallel=["layers.2.*"], **FAST).plan
    assert (found.parallel_mode, found.degree("data")) == ("hybrid_parallel", 8)
    assert found.exchange.layerwise == ("layers.2.weight", "layers.2.bias")
    with pytest.raises(ContextError, match=r"'head\.\*' names no parameter of .*layers\.0\.weight"):
        planner.plan("zoo:mlp", "dgx-a100", context, layerwise_parallel=["head.*"], **FAST)


def test_own_parameters_stay_whole_where_the_others_are_sharded() -> None:
    keys = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
    context = AutoParallelContext(parallel_mode="hybrid_parallel", device_num=8, gradients_mean=True, **keys)
    options: dict[str, Any] = {"layerwise_parallel": ["layers.2.*"], **FAST}
    found = planner.plan("zoo:mlp", "dgx-a100", context, **options).plan
    assert (found.parallel_mode, found.optimizer_sharding, found.degree("data")) == ("hybrid_parallel", "zero2", 8)
    stored = {one.name: one.placements for one in lowered_of(found).ranks[0].parameters}
    assert stored["layers.0.weight"] != (-1,)
    assert {stored[name] for name in found.exchange.layerwise} == {(-1,)}


def test_a_file_that_travels_otherwise_is_refused(two_stages: str) -> None:
    with pytest.raises(ContextError, match="has gradient_dtype='', and the context asks for 'float32'"):
        planned(pipeline_stages=2, gradient_fp32_sync=True, strategy_ckpt_load_file=two_stages)
