"""What keys do to the messages, gradients and data of a real run on two processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from math import isclose, prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import planner
from planner.execution.data.samples import Batches, open_dataset
from planner.execution.interpreter import Interpreter, Neighbours
from planner.execution.job import Job
from planner.execution.machine import Held, RankContext
from planner.execution.optimizers import hyperparameters, make_step
from planner.execution.reference import gradient_factors, run_reference
from planner.execution.worker import _groups, _loader, _own_tensors
from planner.lowering.checked import checked_graph
from planner.lowering.stages import lower_stages
from planner.networks import load_network
from planner.plans.exchange import Exchange
from planner.plans.plan import Plan
from simulator.calibration.launch import run_workers
from simulator.program import Collective
from tests.planner.lowering.steps import lowered_of, tasks_of

pytestmark = pytest.mark.slow
RATE = 0.1
OWN = "module.3.bias"
SENDERS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "all_to_all_single": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
}


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Losses, what one rank sent (kind, type, bytes) before the steps and in them, its parameters, what it loaded."""

    losses: list[float]
    start: list[tuple[str, str, int]]
    sent: list[tuple[str, str, int]]
    parameters: dict[str, Tensor]
    shapes: list[tuple[int, ...]]


def run_all(cases: dict[str, tuple[Job, bool]]) -> dict[str, Ran]:
    """Run every case, whose parameters differ on the second rank where it is spoilt."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    try:
        log: list[tuple[str, str, int]] = []
        for name in SENDERS:
            setattr(dist, name, recording(getattr(dist, name), name, log))
        return {name: run_one(job, spoilt, log) for name, (job, spoilt) in cases.items()}
    finally:
        dist.destroy_process_group()


def recording(send: Callable[..., Any], name: str, log: list[tuple[str, str, int]]) -> Callable[..., Any]:
    def record(*tensors: Any, **options: Any) -> Any:
        larger = max((one for one in tensors if isinstance(one, Tensor)), key=lambda one: one.nbytes)
        log.append((SENDERS[name].value, str(larger.dtype).removeprefix("torch."), larger.nbytes))
        return send(*tensors, **options)

    return record


def run_one(job: Job, spoilt: bool, log: list[tuple[str, str, int]]) -> Ran:
    device, coordinates = torch.device("cpu"), job.lowered.mesh.coordinates(dist.get_rank())
    groups = _groups(job.lowered, timedelta(seconds=120))
    load = _loader(job, coordinates, device)
    parameters, buffers = _own_tensors(job, coordinates, device)
    if spoilt and dist.get_rank():
        for parameter in parameters.values():
            parameter.add_(1)
    updates = {name: make_step(job.optimizer, job.constants) for name in parameters}
    log.clear()
    context = RankContext(coordinates=coordinates, groups=groups, device=device)
    rank = dist.get_rank()
    neighbours = Neighbours(rank=rank, rank_of=(rank,), groups={})
    held = Held(parameters=parameters, optimizers=updates, buffers=buffers)
    interpreter = Interpreter(job.lowered, context, neighbours, held)
    start = list(log)
    log.clear()
    losses, shapes = [], []
    for step in range(job.steps):
        batches = [load(step, i) for i in range(job.lowered.micro_batches)]
        shapes = [tuple(one.shape) for one in batches[0]]
        found = interpreter.run_step(batches.__getitem__)
        losses.append(sum(float(loss) for loss in found) / len(found))
    return Ran(losses=losses, start=start, sent=list(log), parameters=parameters, shapes=shapes)


def job_of(plan: Plan, precision: str, steps: int) -> Job:
    return Job(
        lowered=lower_stages(plan, checked_graph(plan, precision=precision)),
        network=plan.network,
        sequence_length=plan.sequence_length,
        optimizer=plan.optimizer,
        constants=hyperparameters(plan.optimizer, RATE),
        data=None if "py:" not in plan.network else "digits",
        seed=0,
        steps=steps,
        warm_up_steps=0,
        device_type="cpu",
        timeout_s=120,
    )


def made(network: str, mode: str = "data_parallel", pins: dict[str, str] | None = None, **keys: Any) -> Plan:
    """A plan on two devices."""
    context = planner.AutoParallelContext(parallel_mode=mode, device_num=2, **keys)
    options: dict[str, Any] = {"global_batch": 8, "top": 1, "sensitivity": False, "optimizer": "sgd"}
    return planner.plan(network, "dgx-a100", context, pins=pins, **options).plan


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    place = "py:tests.planner.exchange.mindspore.trained_networks"
    mlp = replace(made("zoo:mlp"), micro_batch=2, micro_batches=2)
    config = {"parallel_optimizer_threshold": 0, "optimizer_level": "level1"}
    sharded = made("zoo:mlp", enable_parallel_optimizer=True, parallel_optimizer_config=config)
    sharded = replace(sharded, micro_batch=2, micro_batches=2)
    gpt = replace(made("zoo:gpt2-tiny"), micro_batch=4, micro_batches=1)
    pins = {"cp": "2", "context_algorithm": "all_to_all", "optimizer_sharding": "none", "recompute": "none"}
    exchanged = made("zoo:gpt2-tiny", "auto_parallel", pins=pins)
    exchanged = replace(exchanged, micro_batch=8, micro_batches=1)
    normalised = replace(made(f"{place}:normalised"), micro_batch=4, micro_batches=1)
    own = replace(made(f"{place}:with_own_head", "hybrid_parallel"), micro_batch=4, micro_batches=1)
    asked = {
        "plain": (mlp, {}),
        "bf16": (mlp, {}),
        "bf16 wide": (mlp, {"gradient_dtype": "float32"}),
        "sharded bf16 wide": (sharded, {"gradient_dtype": "float32"}),
        "summed": (mlp, {"group_power": 1}),
        "divided": (mlp, {"group_power": -1}),
        "alone": (mlp, {"all_reduce_bytes": 0}),
        "by place": (mlp, {"fusion_places": (2, 3)}),
        "sharded": (sharded, {}),
        "sharded, alone": (sharded, {"all_gather_bytes": 0, "reduce_scatter_bytes": 0}),
        "spoilt": (mlp, {}),
        "broadcast": (mlp, {"broadcast": True}),
        "gpt": (gpt, {}),
        "full": (gpt, {"data": "full_batch"}),
        "cut": (gpt, {"data": ((1, 2), (2, 1))}),
        "cut, gathered": (gpt, {"data": ((1, 2), (2, 1)), "all_to_all": False}),
        "exchanged": (exchanged, {}),
        "exchanged, gathered": (exchanged, {"all_to_all": False}),
        "statistics": (normalised, {}),
        "own statistics": (normalised, {"cross_batch": True}),
    }
    found = {name: replace(plan, exchange=Exchange(**exchange)) for name, (plan, exchange) in asked.items()}
    config = {"parallel_optimizer_threshold": 0, "optimizer_level": "level2"}
    keys: dict[str, Any] = {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
    shared = replace(made(f"{place}:with_own_head", "hybrid_parallel", **keys), micro_batch=4, micro_batches=1)
    return found | {"own bias": own, "own bias, sharded": shared}


@pytest.fixture(scope="module")
def ran(plans: dict[str, Plan]) -> list[dict[str, Ran]]:
    """What both ranks did in every case."""
    cases = {
        name: (job_of(plan, "bf16" if "bf16" in name else "fp64", 2), name in ("spoilt", "broadcast"))
        for name, plan in plans.items()
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run_workers(run_all, (cases,), 2)


def gradients(of: Ran) -> list[tuple[str, str, int]]:
    """Messages of more than the few bytes of a loss."""
    return [one for one in of.sent if one[2] > 64]


def test_gradients_travel_as_float32(ran: list[dict[str, Ran]]) -> None:
    for rank in ran:
        narrow, wide = gradients(rank["bf16"]), gradients(rank["bf16 wide"])
        assert {dtype for _, dtype, _ in narrow} == {"bfloat16"}
        assert {dtype for _, dtype, _ in wide} == {"float32"}
        assert sum(size for *_, size in wide) == 2 * sum(size for *_, size in narrow) > 0
        scattered = [dtype for kind, dtype, _ in rank["sharded bf16 wide"].sent if kind == "reduce_scatter"]
        assert scattered
        assert set(scattered) == {"float32"}
        for case in ("bf16 wide", "sharded bf16 wide"):
            assert rank[case].losses == pytest.approx(rank["bf16"].losses, rel=5e-2)


def test_messages_are_those_that_are_simulated(ran: list[dict[str, Ran]], plans: dict[str, Plan]) -> None:
    for name, of in ran[0].items():
        plan = plans[name]
        lowered = lowered_of(plan, precision="bf16" if "bf16" in name else "fp64")
        tasks = [task for task in tasks_of(lowered) if task.collective]
        if "statistics" in name:
            continue  # sums inside an operator are of two kinds of numbers
        wanted = [(str(task.collective), task.dtype, int(task.payload_bytes)) for task in tasks]
        assert of.sent == wanted * 2, name


def test_fusion_divides_the_same_gradients(ran: list[dict[str, Ran]]) -> None:
    rank = ran[0]
    losses_of_a_step = 2
    counts = {name: len(rank[name].sent) // 2 - losses_of_a_step for name in ("plain", "alone", "by place")}
    assert counts["alone"] == 6 > counts["plain"]
    assert counts["by place"] == 3
    assert len(rank["sharded, alone"].sent) > len(rank["sharded"].sent)
    for case in ("alone", "by place", "sharded", "sharded, alone"):
        assert rank[case].losses == pytest.approx(rank["plain"].losses, rel=1e-10)


@pytest.mark.parametrize(("case", "factor"), [("summed", 2.0), ("divided", 0.5)])
def test_gradients_are_sums_or_means(
    ran: list[dict[str, Ran]], plans: dict[str, Plan], case: str, factor: float
) -> None:
    """The first step of gradient descent is so many times as long; reference: its second loss."""
    assert ran[0][case].losses[0] == ran[0]["plain"].losses[0]
    assert ran[0][case].losses[1] == pytest.approx(trained(plans[case], factor)[1], rel=1e-10)
    assert not isclose(ran[0][case].losses[1], ran[0]["plain"].losses[1], rel_tol=1e-6)


def trained(plan: Plan, factor: float) -> list[float]:
    """Losses of one process whose gradients are multiplied."""
    module, loads = network_of(plan)
    found = []
    for step in range(2):
        module.zero_grad()
        losses = [module(*loads(step * plan.micro_batches + i)) for i in range(plan.micro_batches)]
        (sum(losses) * factor / plan.micro_batches).backward()
        found.append(float(sum(losses).detach()) / plan.micro_batches)
        descend(module, RATE)
    return found


def network_of(plan: Plan) -> tuple[torch.nn.Module, Callable[[int], list[Tensor]]]:
    job = job_of(plan, "fp64", 1)
    module = load_network(plan.network).build(0).double()
    batches = Batches(dataset=open_dataset(job.data, job.inputs, 0), seed=0)
    size = job.lowered.graph.batch_size
    return module, lambda number: [batches.load(spec, number * size) for spec in job.inputs]


@torch.no_grad()
def descend(module: torch.nn.Module, rate: float) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.sub_(rate * parameter.grad)


def test_one_process_multiplies_gradients_alike(ran: list[dict[str, Ran]], plans: dict[str, Plan]) -> None:
    for case in ("plain", "summed", "divided"):
        job = job_of(plans[case], "fp64", 2)
        assert run_reference(job) == pytest.approx(ran[0][case].losses, rel=1e-10)
        assert set(gradient_factors(job.lowered).values()) == {{"plain": 1.0, "summed": 2.0, "divided": 0.5}[case]}


def test_parameters_are_those_of_the_first_rank(ran: list[dict[str, Ran]]) -> None:
    for rank in ran:
        assert rank["broadcast"].losses == rank["plain"].losses
        assert rank["spoilt"].losses != rank["plain"].losses
        assert {kind for kind, *_ in rank["broadcast"].start} == {"broadcast"}
        assert rank["plain"].start == []
    sizes = sum(prod(one.shape) * one.itemsize for one in ran[0]["broadcast"].parameters.values())
    assert sum(size for *_, size in ran[0]["broadcast"].start) == sizes


def test_ranks_load_what_they_are_told(ran: list[dict[str, Ran]]) -> None:
    length = ran[0]["gpt"].shapes[0][1]
    assert [rank["gpt"].shapes for rank in ran] == [[(4, length), (4, length)]] * 2
    assert [rank["full"].shapes for rank in ran] == [[(8, length), (8, length)]] * 2
    assert [rank["cut"].shapes for rank in ran] == [[(8, length // 2), (4, length)]] * 2
    for rank in ran:
        for case in ("full", "cut", "cut, gathered"):
            assert rank[case].losses == pytest.approx(rank["gpt"].losses, rel=1e-12)


def test_all_to_alls_are_gathered_instead(ran: list[dict[str, Ran]]) -> None:
    def kinds(case: str) -> set[str]:
        return {kind for kind, *_ in ran[0][case].sent}

    assert "all_to_all" in kinds("cut")
    assert "all_to_all" not in kinds("cut, gathered")
    assert "all_gather" in kinds("cut, gathered") - kinds("gpt")


def test_attention_gathers_what_it_would_exchange(ran: list[dict[str, Ran]]) -> None:
    for rank in ran:
        sent = {case: {kind for kind, *_ in rank[case].sent} for case in ("exchanged", "exchanged, gathered")}
        assert "all_to_all" in sent["exchanged"] - sent["exchanged, gathered"]
        assert "all_gather" in sent["exchanged, gathered"] - sent["exchanged"]
        for case in sent:
            assert rank[case].losses == pytest.approx(rank["gpt"].losses, rel=1e-12)


def test_statistics_are_of_all_samples_or_of_a_rank_alone(ran: list[dict[str, Ran]], plans: dict[str, Plan]) -> None:
    whole, halves = (statistics(plans["statistics"], parts) for parts in (1, 2))
    assert ran[0]["statistics"].losses == pytest.approx(whole, rel=1e-9)
    assert ran[0]["own statistics"].losses == pytest.approx(halves, rel=1e-9)
    assert whole != pytest.approx(halves, rel=1e-6)
    assert len(ran[0]["own statistics"].sent) < len(ran[0]["statistics"].sent)


def statistics(plan: Plan, parts: int) -> list[float]:
    """Losses of one process that shows the network the batch in parts."""
    module, loads = network_of(plan)
    found = []
    for step in range(2):
        module.zero_grad()
        pieces = zip(*(tensor.chunk(parts) for tensor in loads(step)), strict=True)
        losses = [module(*piece) / parts for piece in pieces]
        sum(losses).backward()  # type: ignore[union-attr]
        found.append(float(sum(losses).detach()))  # type: ignore[union-attr]
        descend(module, RATE)
    return found


def test_what_ranks_share_is_sharded_beside_their_own(ran: list[dict[str, Ran]], plans: dict[str, Plan]) -> None:
    plan = plans["own bias, sharded"]
    assert (plan.parallel_mode, plan.optimizer_sharding) == ("hybrid_parallel", "zero2")
    wholes, pieces = ([rank[case].parameters for rank in ran] for case in ("own bias", "own bias, sharded"))
    for whole, piece in zip(wholes, pieces, strict=True):
        assert torch.allclose(piece[OWN], whole[OWN], rtol=1e-10)
    for name in wholes[0].keys() - {OWN}:
        halves, whole = [piece[name] for piece in pieces], wholes[0][name]
        cut = next((dim for dim, size in enumerate(whole.shape) if halves[0].shape[dim] != size), None)
        assert torch.allclose(halves[0] if cut is None else torch.cat(halves, cut), whole, rtol=1e-10), name
    assert any(pieces[0][name].shape != wholes[0][name].shape for name in pieces[0])
    assert {kind for kind, *_ in ran[0]["own bias, sharded"].sent} >= {"all_gather", "reduce_scatter"}


def test_own_parameters_go_their_own_way(ran: list[dict[str, Ran]], plans: dict[str, Plan]) -> None:
    plan = plans["own bias"]
    assert (plan.parallel_mode, plan.exchange.layerwise) == ("hybrid_parallel", (OWN,))
    first, second = (rank["own bias"].parameters for rank in ran)
    assert not torch.equal(first[OWN], second[OWN])
    assert all(torch.equal(first[name], second[name]) for name in first if name != OWN)
    modules, loads = zip(*(network_of(plan) for _ in range(2)), strict=True)
    for step in range(2):
        for rank, module in enumerate(modules):
            module.zero_grad()
            module(*(tensor.chunk(2)[rank] for tensor in loads[0](step))).backward()
        by_name = [dict(module.named_parameters()) for module in modules]
        for name in by_name[0]:
            if name != OWN:
                mean = sum(one[name].grad for one in by_name) / 2  # type: ignore[misc]
                for one in by_name:
                    one[name].grad = mean
        for module in modules:
            descend(module, RATE)
    for rank, module in zip(ran, modules, strict=True):
        for name, parameter in module.named_parameters():
            assert torch.allclose(rank["own bias"].parameters[name], parameter.detach(), rtol=1e-10), name
