"""Lowered plans are followed value by value: what is read is there and placed as its operator wants it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import prod

import numpy as np
import pytest

from planner.cost.work import optimizer
from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph, Role, TensorRef
from planner.lowering import LoweringOptions, lower_graph
from planner.lowering.instructions import (
    Accumulate,
    Communicate,
    Compute,
    HostCopy,
    Instruction,
    LoweredPlan,
    Mask,
    Slice,
    Update,
)
from planner.plans.request import ParameterStorage
from planner.search.dynamic_programming import fastest
from planner.search.problem.problem import Cost, Problem
from planner.search.problem.solution import node_rules
from planner.sharding.placement import PARTIAL, REPLICATE, Placements
from simulator import engine, fast_engine
from simulator.profiles import load_profile
from simulator.program import SUMMED_CLASS, Collective, Kernel, Phase, Task
from simulator.timeline import Timeline
from tests.planner.graph.conftest import small_network
from tests.planner.search.problems import captured, captured_small, make_mesh, make_problem

MESHES: tuple[Mapping[str, int], ...] = ({}, {"data": 4}, {"tensor": 2}, {"data": 2, "tensor": 2})
BUCKET_BYTES = 100_000


def lowered_from(problem: Problem) -> LoweredPlan:
    """Lower the fastest plan of a problem without runs."""
    rules, layers = node_rules(problem, fastest(problem))
    assert not layers
    options = LoweringOptions(
        mesh=problem.setting.costs.mesh,
        micro_batches=problem.setting.micro_batches,
        optimizer=optimizer("adamw"),
        bucket_bytes=BUCKET_BYTES,
    )
    return lower_graph(problem.graph, rules, options)


@cache
def lowered_plan(
    name: str, axes: tuple[tuple[str, int], ...], micro_batches: int, storage: ParameterStorage = "free", seed: int = 0
) -> LoweredPlan:
    """Lower a plan of a network; a seed other than 0 makes operators prefer random strategies."""
    graph = captured_small("bert", 2) if name == "bert" else captured(name, 2)
    problem = make_problem(graph, make_mesh(**dict(axes)), micro_batches=micro_batches, storage=storage, unfolded=True)
    if seed:
        random = np.random.default_rng(seed)
        problem.unary = tuple(Cost(random.exponential(1.0, c.time.shape), c.memory) for c in problem.unary)
    return lowered_from(problem)


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


def reads_of(instruction: Instruction) -> tuple[str, ...]:
    if isinstance(instruction, Compute):
        return instruction.inputs
    if isinstance(instruction, Communicate):
        return instruction.sources
    if isinstance(instruction, Accumulate):
        return (instruction.source,) if instruction.first else (instruction.source, instruction.accumulator)
    return (instruction.parameter, instruction.gradient) if isinstance(instruction, Update) else (instruction.source,)


@dataclass
class Rank:
    """What one rank holds: the placements and local bytes of every value, followed instruction by instruction."""

    lowered: LoweredPlan
    placed: dict[str, Placements] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = {node.name: node for node in self.lowered.graph.nodes}
        for stored in (*self.lowered.parameters, *self.lowered.inputs):
            self._write(stored.value, stored.placements, nodes[stored.value].outputs[0].size_bytes)

    def _write(self, value: str, placements: Placements, whole_bytes: float) -> None:
        sizes = self.lowered.mesh.sizes
        self.placed[value] = placements
        self.size[value] = whole_bytes / prod(n for p, n in zip(placements, sizes, strict=True) if p >= 0)

    def _move(self, source: str, target: str, axis: int, before: int | None, after: int) -> None:
        """Change the placement on one axis; it must have been `before` (None: any shard or replica)."""
        old = self.placed[source]
        if before is not None:
            assert old[axis] == before
        touched = {p for p in (old[axis], after) if p >= 0}
        assert not touched & set(old[axis + 1 :]), "chunks nest outer axis first"
        sizes = self.lowered.mesh.sizes
        factor = (sizes[axis] if old[axis] >= 0 else 1) / (sizes[axis] if after >= 0 else 1)
        self.placed[target] = (*old[:axis], after, *old[axis + 1 :])
        self.size[target] = self.size[source] * factor

    def follow(self, task: Task, instruction: Instruction) -> None:
        for value in reads_of(instruction):
            assert value in self.placed, f"{task.name} reads {value}, which is not there"
            while value in self.base:
                value = self.base[value]
                assert value in self.placed, f"{task.name} reads a view of {value}, which is not there"
        if isinstance(instruction, Compute):
            self._compute(task, instruction)
        elif isinstance(instruction, Communicate):
            self._communicate(task, instruction)
        elif isinstance(instruction, Slice):
            self._move(instruction.source, instruction.target, instruction.axis, REPLICATE, instruction.dim)
        elif isinstance(instruction, Mask):
            self._move(instruction.source, instruction.target, instruction.axis, REPLICATE, PARTIAL)
        elif isinstance(instruction, HostCopy):
            self.placed[instruction.target] = self.placed[instruction.source]
            self.size[instruction.target] = 0.0 if instruction.to_host else task.bytes_moved
        elif isinstance(instruction, Accumulate):
            if instruction.first:
                self.placed[instruction.accumulator] = self.placed[instruction.source]
                self.size[instruction.accumulator] = self.size[instruction.source]
            assert self.placed[instruction.accumulator] == self.placed[instruction.source]
        else:
            assert self.placed[instruction.gradient] == self.placed[instruction.parameter]
            assert instruction.divisor == self.lowered.micro_batches
        for buffer in task.allocates:
            assert buffer.size_bytes in (0 if buffer.name in self.base else -1, int(self.size[buffer.name]))
        for value in task.releases:
            for table in (self.placed, self.size):
                del table[value]

    def _compute(self, task: Task, instruction: Compute) -> None:
        graph = self.lowered.graph
        node = graph.nodes[instruction.node]
        assert task.name.removeprefix("recompute ") == node.name
        summed = any(rule.reduced_elements for rule in instruction.rules)
        assert task.kernel is (SUMMED_CLASS.get(node.kernel, node.kernel) if summed else node.kernel)
        for position, value in enumerate(instruction.inputs):
            assert self.placed[value] == tuple(rule.inputs[position] for rule in instruction.rules)
        for output, (value, spec) in enumerate(zip(instruction.outputs, node.outputs, strict=True)):
            if value:
                self._write(value, tuple(rule.outputs[output] for rule in instruction.rules), spec.size_bytes)
                if node.kernel is Kernel.VIEW and instruction.inputs:
                    self.base[value] = instruction.inputs[0]

    def _communicate(self, task: Task, message: Communicate) -> None:
        assert task.collective is message.collective
        assert task.axis == self.lowered.mesh.axes[message.axis].name
        if not message.sources:
            return
        for source, target, gather, split in zip(
            message.sources, message.targets, message.gather_dims, message.split_dims, strict=True
        ):
            before, after = {
                Collective.ALL_REDUCE: (PARTIAL, REPLICATE),
                Collective.ALL_GATHER: (gather, REPLICATE),
                Collective.REDUCE_SCATTER: (PARTIAL, split),
                Collective.ALL_TO_ALL: (gather, split),
            }[message.collective]
            self._move(source, target, message.axis, before, after)
        moved = message.targets if message.collective is Collective.ALL_GATHER else message.sources
        assert task.payload_bytes == pytest.approx(sum(self.size[value] for value in moved))


def steps(lowered: LoweredPlan) -> Iterator[tuple[Task, Instruction]]:
    """Tasks with their instructions in the order of a step, every repetition."""
    for segment, instructions in zip(lowered.program.segments, lowered.instructions, strict=True):
        assert len(segment.tasks) == len(instructions)
        for _ in range(segment.count):
            yield from zip(segment.tasks, instructions, strict=True)


@plans
def test_every_value_is_there_when_it_is_read_and_placed_as_it_is_wanted(
    name: str, axes: tuple[tuple[str, int], ...], micro_batches: int, storage: ParameterStorage, seed: int
) -> None:
    lowered = lowered_plan(name, axes, micro_batches, storage, seed)
    assert sum(segment.count for segment in lowered.program.segments) == micro_batches
    rank = Rank(lowered)
    for task, instruction in steps(lowered):
        rank.follow(task, instruction)
    assert rank.placed[lowered.loss] == (REPLICATE,) * len(axes)
    stored = {entry.value for entry in (*lowered.parameters, *lowered.inputs)}
    assert set(rank.placed) == stored | {lowered.loss}


@plans
def test_every_operator_runs_once_a_micro_batch_and_every_parameter_is_updated_once_a_step(
    name: str, axes: tuple[tuple[str, int], ...], micro_batches: int, storage: ParameterStorage, seed: int
) -> None:
    lowered = lowered_plan(name, axes, micro_batches, storage, seed)
    operators = [i for i, node in enumerate(lowered.graph.nodes) if node.role not in (Role.PARAMETER, Role.INPUT)]
    for instructions in lowered.instructions:
        assert [i.node for i in instructions if isinstance(i, Compute)] == operators
    updates = [i.parameter for _, i in steps(lowered) if isinstance(i, Update)]
    trained = [lowered.graph.nodes[p.node].name for p in lowered.graph.parameters if p.gradient]
    assert sorted(updates) == sorted(trained)
    assert not any(isinstance(i, Update) for part in lowered.instructions[:-1] for i in part)


@plans
def test_memory_ends_where_it_began_and_times_respect_what_is_read(
    name: str, axes: tuple[tuple[str, int], ...], micro_batches: int, storage: ParameterStorage, seed: int
) -> None:
    lowered = lowered_plan(name, axes, micro_batches, storage, seed)
    timeline = fast_engine.simulate(lowered.program, load_profile("dgx-a100"))
    memory = timeline.memory
    assert memory.unreleased == (lowered.loss,)
    loss_bytes = lowered.graph.spec(lowered.graph.loss).size_bytes
    assert memory.final_bytes - memory.resident_bytes in (0, loss_bytes)
    check_order_in_time(lowered, timeline)


def check_order_in_time(lowered: LoweredPlan, timeline: Timeline) -> None:
    """No task starts before what it reads is made, nor ends after what it reads is released."""
    for segment, instructions, times in zip(
        lowered.program.segments, lowered.instructions, timeline.segments, strict=True
    ):
        made: dict[str, int] = {}
        released = {value: i for i, task in enumerate(segment.tasks) for value in task.releases}
        for index, (task, instruction) in enumerate(zip(segment.tasks, instructions, strict=True)):
            for value in reads_of(instruction):
                if value in made:
                    assert times.starts_s[index] >= times.ends_s[made[value]]
                if value in released:
                    assert times.ends_s[index] <= times.ends_s[released[value]], (task.name, value)
            made.update({buffer.name: index for buffer in task.allocates})


@plans
def test_a_task_waits_for_nothing_but_what_it_reads(
    name: str, axes: tuple[tuple[str, int], ...], micro_batches: int, storage: ParameterStorage, seed: int
) -> None:
    lowered = lowered_plan(name, axes, micro_batches, storage, seed)
    for segment, instructions in zip(lowered.program.segments, lowered.instructions, strict=True):
        for task, instruction in zip(segment.tasks, instructions, strict=True):
            wanted = set(reads_of(instruction))
            for index in task.after:
                name, inside = segment.tasks[index].name, task.name.partition(" inside ")[2]
                if inside and name.endswith(inside):
                    continue  # a message of the operator itself
                before, made = instructions[index], {buffer.name for buffer in segment.tasks[index].allocates}
                if isinstance(before, Accumulate):
                    made.add(before.accumulator)
                if " inside " in name:  # what the operator makes is complete behind its messages
                    owner = next(one for one in segment.tasks if one.name == name.partition(" inside ")[2])
                    made |= {buffer.name for buffer in owner.allocates}
                assert made & wanted, f"{task.name} waits for {name}"


@pytest.mark.parametrize("hardware", ["dgx-a100", "ascend910-atlas800"])
@pytest.mark.parametrize("axes", MESHES[1:])
@pytest.mark.parametrize("name", ["mlp", "gpt2-tiny"])
def test_both_engines_agree(name: str, axes: Mapping[str, int], hardware: str) -> None:
    lowered = lowered_plan(name, tuple(axes.items()), 2)
    one, other = (e.simulate(lowered.program, load_profile(hardware)) for e in (engine, fast_engine))
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-12)
    assert one.peak_memory_bytes == other.peak_memory_bytes
    assert one.breakdown == pytest.approx(other.breakdown)


def data_parallel(graph: OperatorGraph, micro_batches: int, storage: ParameterStorage = "replicated") -> LoweredPlan:
    problem = make_problem(
        graph, make_mesh(data=4), batch=8, micro_batches=micro_batches, storage=storage, unfolded=True
    )
    batch_only = storage == "replicated"
    setting = replace(problem.setting, batch_only=batch_only)
    return lowered_from(Problem(problem.graph, problem.decisions, setting))


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "gpt2-tiny"])
def test_data_parallel_ranks_share_the_work_and_reduce_every_gradient_once(name: str, micro_batches: int) -> None:
    lowered = data_parallel(captured(name, 2), micro_batches)
    mesh = lowered.mesh
    flops = sum(
        segment.count * task.flops
        for segment in lowered.program.segments
        for task in segment.tasks
        if task.phase is not Phase.UPDATE
    )
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
    assert len(gathered) == len(lowered.parameters)
    states = sum(b.size_bytes for b in lowered.program.resident if b.name.endswith(".states"))
    assert states == 2 * 4 * lowered.graph.parameter_count / 4


def test_micro_batches_share_their_segments() -> None:
    counts = {
        n: [(s.name, s.count) for s in lowered_plan("mlp", (("data", 4),), n).program.segments] for n in (1, 2, 4)
    }
    assert counts == {
        1: [("step", 1)],
        2: [("first", 1), ("last", 1)],
        4: [("first", 1), ("middle", 2), ("last", 1)],
    }


def test_no_two_redistributions_of_a_micro_batch_make_the_same_value() -> None:
    for seed in range(1, 10):
        axes = tuple(MESHES[1 + seed % 3].items())
        lowered = lowered_plan(
            ("mlp", "gpt2-tiny", "bert")[seed % 3 - 1], axes, 1 + seed % 2, ("free", "sharded")[seed % 4 == 1], seed
        )
        for segment in lowered.program.segments:
            names = [buffer.name for task in segment.tasks for buffer in task.allocates]
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
    rules = {i.node: i.rules for i in lowered.instructions[0] if isinstance(i, Compute)}
    expected = [
        rule.reduced_elements
        * DTYPE_BYTES["float64" if lowered.graph.nodes[node].phase is Phase.FORWARD else "float32"]
        for node, chosen in rules.items()
        for rule in chosen
        if rule.reduced_elements
    ]
    assert [task.payload_bytes for _, task in inner] == expected
    rank = Rank(lowered)
    for task, instruction in steps(lowered):
        rank.follow(task, instruction)
