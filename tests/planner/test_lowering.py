"""Lowered plans are followed value by value: what is read is there and placed as its operator wants it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph, Role, TensorRef
from planner.lowering.instructions import Accumulate, Communicate, Compute, LoweredStages, Update, written_values
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.stages import lower_stages
from planner.planning.prediction import predict_plan, simulate_plan
from planner.plans.pins import ParameterStorage
from planner.plans.plan import Plan
from planner.search.problem.problem import Cost, Problem
from simulator import engine
from simulator.profiles import load_profile
from simulator.program import BufferKind, Collective, Phase
from simulator.schedules import ActionKind
from tests.planner.graph.conftest import small_network
from tests.planner.lowering.plans import fastest_plan
from tests.planner.lowering.steps import Rank, passes, steps, tasks_of, updates
from tests.planner.search.problems import captured, captured_small, make_mesh, make_problem

MESHES: tuple[Mapping[str, int], ...] = ({}, {"data": 4}, {"tensor": 2}, {"data": 2, "tensor": 2})
BUCKET_BYTES = 100_000


@cache
def plan_of(
    name: str, axes: tuple[tuple[str, int], ...], micro_batches: int, storage: ParameterStorage = "free", seed: int = 0
) -> tuple[Plan, OperatorGraph]:
    """A plan of a network; a seed other than 0 makes operators prefer random strategies."""
    graph = captured_small("bert", 2) if name == "bert" else captured(name, 2)
    problem = make_problem(graph, make_mesh(**dict(axes)), micro_batches=micro_batches, storage=storage, unfolded=True)
    if seed:
        random = np.random.default_rng(seed)
        problem.unary = tuple(Cost(random.exponential(1.0, c.time.shape), c.memory) for c in problem.unary)
    plan = fastest_plan(problem, bucket_bytes=BUCKET_BYTES)
    assert not plan.layers
    return plan, problem.graph


@cache
def lowered_plan(
    name: str, axes: tuple[tuple[str, int], ...], micro_batches: int, storage: ParameterStorage = "free", seed: int = 0
) -> LoweredStages:
    """`plan_of`, lowered."""
    return lower_stages(*plan_of(name, axes, micro_batches, storage, seed))


def every_plan() -> Iterator[object]:
    for name in ("mlp", "gpt2-tiny"):
        for axes in MESHES:
            for micro_batches in (1, 4) if name == "mlp" else (1, 2):
                label = f"{name}-{'x'.join(f'{a}{n}' for a, n in axes.items()) or 'alone'}-{micro_batches}"
                yield pytest.param(name, tuple(axes.items()), micro_batches, "free", 0, id=label)
    for seed in range(1, 10):
        axes = tuple(MESHES[1 + seed % 3].items())
        name = ("mlp", "gpt2-tiny", "bert")[seed % 3 - 1]
        yield pytest.param(name, axes, 1 + seed % 2, ("free", "sharded")[seed % 4 == 1], seed, id=f"random-{seed}")


plans = pytest.mark.parametrize(("name", "axes", "micro_batches", "storage", "seed"), list(every_plan()))


@plans
def test_every_value_is_there_when_it_is_read_and_placed_as_it_is_wanted(
    name: str, axes: tuple[tuple[str, int], ...], micro_batches: int, storage: ParameterStorage, seed: int
) -> None:
    lowered = lowered_plan(name, axes, micro_batches, storage, seed)
    assert [kind for kind, _ in passes(lowered)] == [ActionKind.FORWARD, ActionKind.BACKWARD] * micro_batches
    Rank(lowered).step()


@plans
def test_every_operator_runs_once_a_micro_batch_and_every_parameter_is_updated_once_a_step(
    name: str, axes: tuple[tuple[str, int], ...], micro_batches: int, storage: ParameterStorage, seed: int
) -> None:
    lowered = lowered_plan(name, axes, micro_batches, storage, seed)
    # What units add to the gradient of a parameter that they share is summed by accumulation.
    summed = {p.gradient.node for p in lowered.graph.parameters if p.gradient}
    operators = [
        i
        for i, node in enumerate(lowered.graph.nodes)
        if node.role not in (Role.PARAMETER, Role.INPUT) and not (node.role is Role.GRADIENT_SUM and i in summed)
    ]
    ran = [[i.node for i in one.instructions if isinstance(i, Compute)] for _, one in passes(lowered)]
    for forward, backward in zip(ran[::2], ran[1::2], strict=True):
        assert forward == sorted(forward)
        assert sorted(forward + backward) == operators
    trained = [lowered.graph.nodes[p.node].name for p in lowered.graph.parameters if p.gradient]
    assert sorted(i.parameter for i in updates(lowered) if isinstance(i, Update)) == sorted(trained)


@pytest.mark.parametrize("hardware", ["dgx-a100", "ascend910-atlas800"])
@pytest.mark.parametrize("axes", MESHES[1:])
@pytest.mark.parametrize("name", ["mlp", "gpt2-tiny"])
def test_both_engines_agree(name: str, axes: Mapping[str, int], hardware: str) -> None:
    plan, graph = plan_of(name, tuple(axes.items()), 2)
    profile = load_profile(hardware)
    one, other = predict_plan(plan, graph, profile), simulate_plan(plan, graph, profile, engine=engine.run).prediction
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-12)
    assert one.peak_memory_bytes == other.peak_memory_bytes
    assert one.breakdown == pytest.approx(other.breakdown)


def data_parallel(graph: OperatorGraph, micro_batches: int, storage: ParameterStorage = "replicated") -> LoweredStages:
    problem = make_problem(
        graph, make_mesh(data=4), batch=8, micro_batches=micro_batches, storage=storage, unfolded=True
    )
    batch_only = storage == "replicated"
    setting = replace(problem.setting, batch_only=batch_only)
    plan = fastest_plan(Problem(problem.graph, problem.decisions, setting), bucket_bytes=BUCKET_BYTES)
    return lower_stages(plan, problem.graph)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "gpt2-tiny"])
def test_data_parallel_ranks_share_the_work_and_reduce_every_gradient_once(name: str, micro_batches: int) -> None:
    lowered = data_parallel(captured(name, 2), micro_batches)
    mesh = lowered.mesh
    flops = sum(task.flops for task in tasks_of(lowered))
    assert flops * mesh.size == pytest.approx(lowered.graph.flops() * micro_batches)
    messages = [(task, i) for task, i in steps(lowered) if isinstance(i, Communicate)]
    gradients = [(task, i) for task, i in messages if task.phase is Phase.BACKWARD]
    assert {i.collective for _, i in messages} == {Collective.ALL_REDUCE}
    trained = [p for p in lowered.graph.parameters if p.gradient]
    assert sum(len(i.sources) for _, i in gradients) == len(trained)
    assert len({source for _, i in gradients for source in i.sources}) == len(trained)
    total = sum(lowered.graph.spec(TensorRef(p.node)).size_bytes for p in trained)
    assert sum(task.payload_bytes for task, _ in gradients) == total
    # The loss is the only other message, once a micro-batch.
    assert len(messages) - len(gradients) == micro_batches


@pytest.mark.parametrize("storage", ["replicated", "sharded"])
@pytest.mark.parametrize("name", ["mlp", "gpt2-tiny"])
def test_fused_messages_are_sent_as_soon_as_a_bucket_is_full(name: str, storage: ParameterStorage) -> None:
    lowered = data_parallel(captured(name, 2), 2, storage)
    wholes = {node.name: node.outputs[0].size_bytes for node in lowered.graph.nodes if node.role is Role.PARAMETER}
    fused: dict[tuple[object, ...], list[list[float]]] = {}
    for task, instruction in steps(lowered):
        if isinstance(instruction, Communicate) and instruction.asynchronous:
            names = [value.split("@")[0] for value in instruction.sources]
            names = [value.removesuffix(".accumulated").removesuffix(".gradient") for value in names]
            if all(value in wholes for value in names):
                sizes = [float(wholes[value]) for value in names]
                kind = (task.phase, instruction.collective)
                # What is gathered along one dim travels together; gradients are flattened.
                dims = instruction.gather_dims[0] if task.phase is Phase.FORWARD else 0
                fused.setdefault((*kind, dims), []).append(sizes)
    assert {kind[0] for kind in fused} >= {Phase.BACKWARD}
    for buckets in fused.values():
        for sizes in buckets:
            assert sum(sizes[:-1]) < BUCKET_BYTES
        for sizes in buckets[:-1]:
            assert sum(sizes) >= BUCKET_BYTES
    if storage == "sharded":
        kinds = {kind[:2] for kind in fused}
        assert {(Phase.FORWARD, Collective.ALL_GATHER), (Phase.BACKWARD, Collective.REDUCE_SCATTER)} <= kinds


def test_sharded_parameters_are_gathered_once_a_step_and_their_states_are_small() -> None:
    lowered = lowered_plan("gpt2-tiny", (("data", 4),), 4, "sharded")
    gathered = [
        target
        for _, i in steps(lowered)
        if isinstance(i, Communicate) and i.collective is Collective.ALL_GATHER and i.asynchronous
        for target in i.targets
    ]
    assert len(set(gathered)) == len(gathered)
    assert len(gathered) == len(lowered.ranks[0].parameters)
    found = lower_pipeline(*plan_of("gpt2-tiny", (("data", 4),), 4, "sharded"), load_profile("dgx-a100"))
    (states,) = found.sizes.resident[BufferKind.OPTIMIZER_STATE]
    assert states == 2 * 4 * lowered.graph.parameter_count / 4


def test_the_first_and_the_last_micro_batch_have_passes_of_their_own_and_all_others_share_theirs() -> None:
    counts = {n: len({id(one) for _, one in passes(lowered_plan("mlp", (("data", 4),), n))}) for n in (1, 2, 4, 6)}
    assert counts == {1: 2, 2: 4, 4: 5, 6: 5}


def test_no_two_redistributions_of_a_micro_batch_make_the_same_value() -> None:
    for seed in range(1, 10):
        axes = tuple(MESHES[1 + seed % 3].items())
        lowered = lowered_plan(
            ("mlp", "gpt2-tiny", "bert")[seed % 3 - 1], axes, 1 + seed % 2, ("free", "sharded")[seed % 4 == 1], seed
        )
        made = [
            [name for i in one.instructions if not isinstance(i, Accumulate) for name in written_values(i)]
            for _, one in passes(lowered)
        ]
        for forward, backward in zip(made[::2], made[1::2], strict=True):
            names = forward + backward
            assert len(set(names)) == len(names)


@pytest.mark.slow
def test_synchronised_batch_norm_is_timed_behind_its_operator() -> None:
    lowered = data_parallel(small_network("resnet50").capture(), 1)
    inner = [
        (before, task)
        for (before, _), (task, i) in pairwise(steps(lowered))
        if isinstance(i, Communicate) and not i.sources
    ]
    assert inner
    for before, task in inner:
        assert task.name == f"all_reduce inside {before.name}" or before.name.startswith("all_reduce inside")
        assert task.payload_bytes > 0
    rules = {i.node: i.rules for _, i in steps(lowered) if isinstance(i, Compute)}
    expected = [
        rule.reduced_elements
        * DTYPE_BYTES["float64" if lowered.graph.nodes[node].phase is Phase.FORWARD else "float32"]
        for node, chosen in rules.items()
        for rule in chosen
        if rule.reduced_elements
    ]
    assert [task.payload_bytes for _, task in inner] == expected
    Rank(lowered).step()
