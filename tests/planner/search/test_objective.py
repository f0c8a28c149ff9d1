"""The objective of a solution is the sum of the terms its docstring lists, counted again one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from planner.cost.work import state_bytes, update_traffic
from planner.graph.operator_graph import DTYPE_BYTES, Role, TensorRef
from planner.networks import load_network
from planner.plans.pins import ParameterStorage
from planner.search.dynamic_programming import fastest, smallest
from planner.search.problem.problem import Cost, Problem, Solution, choices_of
from planner.search.problem.variables import Choice, Kind
from planner.sharding.placement import PARTIAL, REPLICATE, Placements
from planner.sharding.redistribution import redistribution
from planner.sharding.rule_notation import Rule
from simulator.collectives import collective_time
from simulator.kernels import attention_kernel_time, kernel_time, matmul_time
from simulator.profiles import load_profile
from simulator.program import Collective, Kernel, Phase
from simulator.topology import group_shape
from tests.planner.search.problems import BUCKET_BYTES, captured, make_mesh, make_problem

MESHES: tuple[Mapping[str, int], ...] = ({}, {"data": 2}, {"tensor": 4}, {"data": 2, "tensor": 2})


class Recount:
    """Seconds of a plan, one term at a time."""

    def __init__(self, problem: Problem, solution: Solution) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.costs = problem.setting.costs
        self.mesh = self.costs.mesh
        self.choices = [choices_of(problem, v, solution.assignment[v]) for v in range(len(problem.states))]

    def total(self) -> float:
        each = sum(self.kernels()) + sum(self.inner_messages()) + sum(self.moves(parameters=False))
        once = sum(self.moves(parameters=True)) + sum(self.updates())
        return self.problem.setting.micro_batches * each + once

    def share(self, placements: Placements) -> float:
        return 1 / prod(size for p, size in zip(placements, self.mesh.sizes, strict=True) if p >= 0)

    def local_bytes(self, ref: TensorRef, placements: Placements) -> float:
        return self.graph.spec(ref).size_bytes * self.share(placements)

    def kernels(self) -> Iterator[float]:
        for variable, chosen in zip(self.problem.decisions.variables, self.choices, strict=True):
            for position, index in enumerate(variable.nodes):
                node = self.graph.nodes[index]
                if node.role in (Role.PARAMETER, Role.INPUT):
                    continue
                rules = [c.rules[position] for c in chosen]
                refs = [*node.tensor_inputs, *(TensorRef(index, o) for o in range(len(node.outputs)))]
                sizes = [
                    self.local_bytes(ref, tuple((*r.inputs, *r.outputs)[i] for r in rules))
                    for i, ref in enumerate(refs)
                ]
                inputs = len(node.tensor_inputs)
                if node.op.startswith(("aten.embedding.", "aten.nll_loss_forward.")):
                    sizes[0], sizes[inputs] = 0.0, 2 * sizes[inputs]
                if node.op.startswith("aten.nll_loss_backward."):
                    sizes[1] = 0.0
                moved = 0.0 if node.kernel is Kernel.VIEW else sum(sizes)
                split = prod(n for r, n in zip(rules, self.mesh.sizes, strict=True) if r.splits_work)
                dtype = node.outputs[0].dtype
                if node.op.startswith(("aten.mm.", "aten.addmm.", "aten.bmm.")):
                    batch, m, n, k = self.product(index, rules)
                    yield self.factor(node.kernel) * float(matmul_time(self.costs.hardware, dtype, m, n, k, batch))
                    continue
                if node.kernel is Kernel.ATTENTION and self.costs.hardware.attention_models:
                    yield self.factor(node.kernel) * self.attention(index, rules, moved)
                    continue
                kernel = node.kernel
                if kernel is Kernel.BATCH_NORMALIZATION and any(rule.reduced_elements for rule in rules):
                    kernel = Kernel.SYNCHRONIZED_BATCH_NORMALIZATION
                seconds = kernel_time(self.costs.hardware, kernel, dtype, node.flops / split, moved)
                yield self.factor(kernel) * seconds

    def factor(self, kernel: Kernel) -> float:
        """Slow-down by other processes and the correction of whole steps."""
        own = (
            *(Kernel.MATMUL, Kernel.ATTENTION, Kernel.CONVOLUTION, Kernel.CONVOLUTION_BACKWARD),
            Kernel.OPTIMIZER,
        )
        correction = self.correction(kernel.value if kernel in own else "memory")
        return self.costs.hardware.compute_slowdown(self.mesh.size) * correction

    def correction(self, name: str) -> float:
        """What plans take of the profile: device and usual software together, else the device's own."""
        training = self.costs.hardware.training
        return training[f"planned_{name}"] if f"planned_{name}" in training else training.get(name, 1.0)

    def product(self, index: int, rules: Sequence[Rule]) -> tuple[float, float, float, float]:
        """Batch, m, n and k of a product, from the local sizes of its operands dim by dim."""
        refs = self.graph.nodes[index].tensor_inputs
        left, right = (self.local_shape(index, rules, place) for place in (len(refs) - 2, len(refs) - 1))
        return float(prod(left[:-2])), left[-2], right[-1], left[-1]

    def attention(self, index: int, rules: Sequence[Rule], moved: float) -> float:
        """Seconds of causal attention on local heads."""
        hardware, node = self.costs.hardware, self.graph.nodes[index]
        backward = "backward" in node.op
        *heads, queries, size = (np.float64(n) for n in self.local_shape(index, rules, 1 if backward else 0))
        model = hardware.attention_models["flash2"]
        return float(
            attention_kernel_time(
                hardware, node.outputs[0].dtype, model.backward if backward else model.forward, heads=prod(heads),
                queries=queries, seen=queries / 2, head_size=size, passes=2.5 if backward else 1.0, moved=moved,
            )
        )  # fmt: skip

    def local_shape(self, index: int, rules: Sequence[Rule], place: int) -> list[float]:
        shape = self.graph.spec(self.graph.nodes[index].tensor_inputs[place]).shape
        parts = [
            [n for r, n in zip(rules, self.mesh.sizes, strict=True) if r.inputs[place] == d] for d in range(len(shape))
        ]
        return [size / prod(part) for size, part in zip(shape, parts, strict=True)]

    def inner_messages(self) -> Iterator[float]:
        for variable, chosen in zip(self.problem.decisions.variables, self.choices, strict=True):
            for position, index in enumerate(variable.nodes):
                for axis, choice in enumerate(chosen):
                    elements = choice.rules[position].reduced_elements
                    if elements:
                        node = self.graph.nodes[index]
                        wide = node.kernel is Kernel.BATCH_NORMALIZATION and node.phase is Phase.FORWARD
                        size = elements * DTYPE_BYTES["float64" if wide else node.outputs[0].dtype]
                        yield self.message(Collective.ALL_REDUCE, axis, size)
                    if choice.rules[position].messages:
                        yield self.log_softmax(index, [c.rules[position] for c in chosen], axis)

    def log_softmax(self, index: int, rules: Sequence[Rule], axis: int) -> float:
        """Largest exponents and their sums forward, sums of gradients backward: float32, one of each row."""
        rows, _ = self.graph.spec(self.graph.nodes[index].tensor_inputs[0]).shape
        cut = prod(n for rule, n in zip(rules, self.mesh.sizes, strict=True) if rule.inputs[0] == 0)
        messages = 1 if "backward" in self.graph.nodes[index].op else 2
        return messages * self.message(Collective.ALL_REDUCE, axis, 4 * rows / cut)

    def message(self, collective: Collective, axis: int, payload: float) -> float:
        group = group_shape(self.costs.hardware, self.mesh.axes[axis].size, self.mesh.stride(axis))
        correction = self.correction("inside" if group.members[0] == group.size else "outside")
        return correction * collective_time(self.costs.hardware, collective, payload, group)

    def moves(self, *, parameters: bool) -> Iterator[float]:
        """Redistributions on every edge, and inside stations from the summed gradient to the one handed back."""
        variables = self.problem.decisions.variables
        for edge in self.problem.decisions.edges:
            ends = (variables[edge.source].kind, variables[edge.target].kind)
            if (Kind.PARAMETER in ends) == parameters:
                before = tuple(c.writes[edge.tensor] for c in self.choices[edge.source])
                after = tuple(c.reads[edge.tensor] for c in self.choices[edge.target])
                yield self.move(edge.tensor, before, after, fused=parameters)
        for variable, chosen in zip(variables, self.choices, strict=True):
            gradient = [ref for ref in chosen[0].writes if ref != variable.tensor] if chosen else []
            if not parameters and variable.kind is Kind.STATION and gradient:
                before = tuple(self.summed(c, gradient[0]) for c in chosen)
                yield self.move(gradient[0], before, tuple(c.writes[gradient[0]] for c in chosen), fused=False)

    def summed(self, choice: Choice, gradient: TensorRef) -> int:
        return choice.rules[-1].outputs[0] if choice.rules else choice.reads[gradient]

    def move(self, ref: TensorRef, before: Placements, after: Placements, *, fused: bool) -> float:
        steps = redistribution(before, after)
        assert steps is not None
        seconds = 0.0
        for step in steps:
            if isinstance(step.operation, Collective):
                payload = self.graph.spec(ref).size_bytes / prod(self.mesh.sizes[a] for a in step.sharded_axes)
                sent = max(payload, BUCKET_BYTES) if fused else payload
                seconds += self.message(step.operation, step.axis, sent) * payload / sent
            else:
                copied = 2 * self.local_bytes(ref, step.after)
                seconds += self.factor(Kernel.COPY) * kernel_time(self.costs.hardware, Kernel.COPY, "", 0.0, copied)
        return seconds

    def updates(self) -> Iterator[float]:
        update = self.problem.setting.optimizer
        for parameter in self.graph.parameters:
            ref = TensorRef(parameter.node)
            spec = self.graph.spec(ref)
            chosen = self.choices[self.problem.decisions.of_node[parameter.node]]
            held = spec.elements * self.share(tuple(c.writes[ref] for c in chosen))
            moved = held * update_traffic(update, spec.dtype)
            yield self.factor(Kernel.OPTIMIZER) * kernel_time(
                self.costs.hardware, Kernel.OPTIMIZER, spec.dtype, held * update.flops, moved
            )

    def stored_bytes(self) -> float:
        """Parameters with their optimizer states."""
        total = 0.0
        for parameter in self.graph.parameters:
            ref = TensorRef(parameter.node)
            chosen = self.choices[self.problem.decisions.of_node[parameter.node]]
            each = DTYPE_BYTES[self.graph.spec(ref).dtype] + state_bytes(
                self.problem.setting.optimizer, self.graph.spec(ref).dtype
            )
            total += self.graph.spec(ref).elements * self.share(tuple(c.writes[ref] for c in chosen)) * each
        return total


@pytest.mark.parametrize(("micro_batches", "storage"), [(1, "free"), (3, "free"), (2, "sharded")])
@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("name", ["mlp", "gpt2-tiny"])
def test_the_objective_is_the_sum_of_its_terms(
    name: str, axes: Mapping[str, int], micro_batches: int, storage: ParameterStorage
) -> None:
    problem = make_problem(
        captured(name, 2), make_mesh(**axes), micro_batches=micro_batches, storage=storage, unfolded=True
    )
    for search in (fastest, smallest):
        solution = search(problem)
        assert Recount(problem, solution).total() == pytest.approx(solution.objective_s, rel=1e-9)
        assert solution.memory_bytes >= Recount(problem, solution).stored_bytes()


@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"data": 4, "tensor": 4}])
def test_corrections_of_whole_steps_count_in_the_objective(axes: Mapping[str, int]) -> None:
    training = {"matmul": 1.25, "attention": 1.5, "memory": 0.75, "inside": 2.0, "outside": 3.0}
    corrected = replace(load_profile("dgx-a100"), training=training)
    problem = make_problem(captured("gpt2-tiny", 2), make_mesh(**axes), hardware=corrected, unfolded=True)
    free = replace(corrected, training={})
    plain = make_problem(captured("gpt2-tiny", 2), make_mesh(**axes), hardware=free, unfolded=True)
    solution = fastest(problem)
    assert Recount(problem, solution).total() == pytest.approx(solution.objective_s, rel=1e-9)
    assert solution.objective_s > fastest(plain).objective_s


@pytest.mark.parametrize("axes", [{}, {"data": 2}])
def test_batch_norms_that_sum_over_ranks_are_a_class_of_their_own(axes: Mapping[str, int]) -> None:
    plain = load_profile("dgx-a100")
    slow = replace(plain.kernels[Kernel.BATCH_NORMALIZATION], overhead_s=1e-2)
    hardware = replace(plain, kernels={**plain.kernels, Kernel.BATCH_NORMALIZATION: slow})
    graph = load_network("py:tests.planner.exchange.mindspore.trained_networks:normalised").capture()
    problem = make_problem(graph, make_mesh(**axes), hardware=hardware)
    solution = fastest(problem)
    # Convolutions go by shape, which is not recounted.
    assert Recount(problem, solution).total() == pytest.approx(solution.objective_s, rel=0.01)
    assert (solution.objective_s < 1e-2) == bool(axes)


@pytest.mark.parametrize("seed", range(6))
def test_the_objective_of_odd_plans_is_the_sum_of_its_terms_too(seed: int) -> None:
    """Operators that prefer random strategies are redistributed in every way there is."""
    problem = make_problem(captured("gpt2-tiny", 2), make_mesh(**MESHES[1 + seed % 3]), unfolded=True)
    honest = problem.unary
    random = np.random.default_rng(seed)
    problem.unary = tuple(Cost(random.exponential(1.0, c.time.shape), c.memory) for c in honest)
    odd = fastest(problem)
    surplus = sum(float(problem.unary[v].time[s] - honest[v].time[s]) for v, s in odd.assignment.items())
    expected = Recount(problem, odd).total()
    assert odd.objective_s - surplus == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("axes", MESHES[1:])
def test_operators_read_what_their_neighbours_write_or_can_redistribute(axes: Mapping[str, int]) -> None:
    problem = make_problem(captured("gpt2-tiny", 2), make_mesh(**axes), unfolded=True)
    recount = Recount(problem, fastest(problem))
    for edge in problem.decisions.edges:
        for source, target in zip(recount.choices[edge.source], recount.choices[edge.target], strict=True):
            assert not (source.writes[edge.tensor] >= 0 and target.reads[edge.tensor] == PARTIAL)


@pytest.mark.parametrize("name", ["mlp", "gpt2-tiny"])
def test_the_tensor_axis_never_shards_the_batch_and_batch_only_shards_nothing_else(name: str) -> None:
    problem = make_problem(captured(name, 2), make_mesh(data=2, tensor=2), unfolded=True)
    for states in problem.states:
        first = states.variable.choices[0]
        for reads, ports in ((True, first.reads), (False, first.writes)):
            for ref in ports:
                batch = [d for d, grows in enumerate(problem.graph.spec(ref).batch_dims) if grows]
                assert not np.isin(states.placements(ref, reads=reads)[1], batch).any()
    inputs = [s for s in problem.states if s.variable.kind is Kind.INPUT]
    for states in inputs:
        placed = states.placements(TensorRef(states.variable.nodes[0]), reads=False)
        assert (placed[0] == 0).all()
        assert (placed[1] == REPLICATE).all()


def test_pinned_storage_says_how_parameters_lie_along_the_data_axis() -> None:
    for storage, wanted in (("replicated", False), ("sharded", True)):
        problem = make_problem(captured("gpt2-tiny", 2), make_mesh(data=2, tensor=2), storage=storage)  # type: ignore[arg-type]
        for states in problem.states:
            if states.variable.kind is Kind.PARAMETER:
                placed = states.placements(TensorRef(states.variable.nodes[0]), reads=False)
                assert ((placed[0] != REPLICATE) == wanted).all()


def test_more_micro_batches_or_less_memory_never_make_the_objective_smaller() -> None:
    times = [
        fastest(make_problem(captured("gpt2-tiny"), make_mesh(data=2), batch=8 // n, micro_batches=n)).objective_s
        for n in (1, 2, 4)
    ]
    assert times == sorted(times)
