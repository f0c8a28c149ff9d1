"""Hand-made plans on two processes against plain arithmetic."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from planner.execution.communication import make_message
from planner.execution.interpreter import Interpreter, Neighbours
from planner.execution.machine import Held, RankContext
from planner.execution.optimizers import hyperparameters, make_step
from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef, TensorSpec
from planner.lowering.instructions import (
    Accumulate,
    Communicate,
    Compute,
    LoweredInput,
    LoweredStages,
    Mask,
    PassInstructions,
    RankInstructions,
    Slice,
    StageInstructions,
    StoredParameter,
    Update,
)
from planner.lowering.stages import gradient_of_stage
from planner.sharding.placement import PARTIAL, REPLICATE, Mesh, MeshAxis
from planner.sharding.rules import Rule
from simulator.calibration.launch import run_workers
from simulator.pipeline_operators import FIRST, LAST, PLAIN
from simulator.program import Collective, Kernel, Phase
from simulator.schedules import ActionKind, make_schedule

TWO = Mesh((MeshAxis("data", 2),))
RATE = 0.1


def spec(*shape):
    return TensorSpec(shape=shape, dtype="float64", batch_dims=(False,) * len(shape))


def node(name, op, *args, shape, role=Role.OPERATOR, **kwargs):
    return Node(
        name=name,
        op=op,
        role=role,
        phase=Phase.FORWARD,
        kernel=Kernel.MATMUL,
        args=args,
        kwargs=tuple(kwargs.items()),
        outputs=(spec(*shape),),
    )


GRAPH = OperatorGraph(
    network="line",
    fingerprint="",
    batch_size=4,
    nodes=(
        node("w", "parameter", shape=(3, 2), role=Role.PARAMETER),
        node("x", "input", shape=(4, 3), role=Role.INPUT),
        node("prediction", "aten.mm.default", TensorRef(1), TensorRef(0), shape=(4, 2)),
        node("loss", "aten.sum.default", TensorRef(2), shape=()),
        node("ones", "aten.ones_like.default", TensorRef(2), shape=(4, 2)),
        node("turned", "aten.t.default", TensorRef(1), shape=(3, 4)),
        node("gradient", "aten.mm.default", TensorRef(5), TensorRef(4), shape=(3, 2)),
    ),
    parameters=(),
    inputs=(),
    loss=TensorRef(3),
)


def compute(index, inputs, output, before, after):
    return Compute(node=index, inputs=inputs, outputs=(output,), rules=(Rule(before, (after,), splits_work=True),))


def reduce_all(source, target, asynchronous=False):
    return Communicate(
        collective=Collective.ALL_REDUCE,
        axis=0,
        sources=(source,),
        targets=(target,),
        gather_dims=(-1,),
        split_dims=(-1,),
        asynchronous=asynchronous,
    )


def forward_and_backward():
    """Data parallel: x is cut along its rows; loss and gradient are partial sums."""
    forward = [
        (compute(2, ("x", "w"), "prediction", (0, REPLICATE), 0), ()),
        (compute(3, ("prediction",), "loss:P", (0,), PARTIAL), ()),
        (reduce_all("loss:P", "loss"), ("loss:P",)),
    ]
    backward = [
        (compute(4, ("prediction",), "ones", (0,), 0), ("prediction",)),
        (compute(5, ("x",), "turned", (0,), 1), ()),
        (compute(6, ("turned", "ones"), "gradient", (1, 0), PARTIAL), ("turned", "ones")),
    ]
    return forward, backward


def one_pass(steps):
    """A pass of pairs of an instruction and what it releases."""
    instructions, releases = zip(*steps, strict=True)
    return PassInstructions(instructions=instructions, releases=releases, drops=())


def lowered(micro_batches, update):
    """Accumulate over micro-batches, then run `update`."""
    forward, backward = forward_and_backward()
    passes = {(ActionKind.FORWARD, PLAIN): one_pass(forward)}
    for variant in (PLAIN, FIRST, LAST):
        added = Accumulate(source="gradient", accumulator="sum", first=variant == FIRST)
        passes[ActionKind.BACKWARD, variant] = one_pass([*backward, (added, ("gradient",))])
    inputs = (LoweredInput(name="x", value="x", placements=(0,)),)
    stage = StageInstructions(
        passes=passes,
        arrives=None,
        leaves=None,
        gradient_arrives=None,
        gradient_leaves=None,
        inputs=inputs,
        lasting=frozenset({"sum"}),
        gradients={"w": "sum"},
    )
    parameters = (StoredParameter(name="layer.w", value="w", placements=(REPLICATE,)),)
    return LoweredStages(
        graph=GRAPH,
        mesh=TWO,
        schedule=make_schedule("gradient_accumulation", 1, micro_batches, 1),
        pipeline_stride=0,
        stages=(stage,),
        ranks=(RankInstructions(stages=(0,), parameters=parameters, update=tuple(update), ties=()),),
        inputs=inputs,
        loss="loss",
        micro_batches=micro_batches,
    )


SUM = gradient_of_stage("w", 0)
PLAIN_UPDATE = [reduce_all(SUM, "sum:R"), Update(parameter="w", gradient="sum:R", divisor=3)]
ASYNCHRONOUS = [
    reduce_all(SUM, "sum:R", asynchronous=True),
    Mask(source="w", target="unused", axis=0),
    Update(parameter="w", gradient="sum:R", divisor=3),
]
SCATTERED = [
    Mask(source="w", target="masked", axis=0),
    reduce_all("masked", "whole"),
    Slice(source="whole", target="unused", axis=0, dim=1),
    Communicate(
        collective=Collective.REDUCE_SCATTER,
        axis=0,
        sources=(SUM,),
        targets=("sum:S",),
        gather_dims=(-1,),
        split_dims=(1,),
    ),
    Communicate(
        collective=Collective.ALL_GATHER,
        axis=0,
        sources=("sum:S",),
        targets=("sum:R",),
        gather_dims=(1,),
        split_dims=(-1,),
    ),
    Update(parameter="w", gradient="sum:R", divisor=3),
]


def batch(step, index):
    generator = torch.Generator().manual_seed(10 * step + index)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64)


def start_value():
    return torch.arange(6, dtype=torch.float64).reshape(3, 2)


def train(plan, steps):
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    try:
        rank = dist.get_rank()
        context = RankContext(coordinates=(rank,), groups=(dist.group.WORLD,), device=torch.device("cpu"))
        weights = start_value()
        update = make_step("sgd", hyperparameters("sgd", RATE))
        neighbours = Neighbours(rank=rank, rank_of=(rank,), groups={})
        held = Held(parameters={"layer.w": weights}, optimizers={"layer.w": update})
        interpreter = Interpreter(plan, context, neighbours, held)
        losses = []
        for step in range(steps):
            feed = [[batch(step, index).chunk(2)[rank]] for index in range(plan.micro_batches)]
            losses += [float(loss) for loss in interpreter.run_step(feed.__getitem__)]
        return losses, weights.tolist(), interpreter.live_bytes()
    finally:
        dist.destroy_process_group()


def expected(steps, micro_batches):
    weights, losses = start_value(), []
    for step in range(steps):
        total = torch.zeros(3, 2, dtype=torch.float64)
        for index in range(micro_batches):
            x = batch(step, index)
            losses.append(float((x @ weights).sum()))
            total += x.T @ torch.ones(4, 2, dtype=torch.float64)
        weights -= RATE * total / micro_batches
    return losses, weights


@pytest.mark.parametrize(
    "update",
    [pytest.param(PLAIN_UPDATE, marks=pytest.mark.slow), ASYNCHRONOUS, SCATTERED],
    ids=["plain", "asynchronous", "scattered"],
)
def test_equals_plain_arithmetic(update):
    losses, weights = expected(2, 3)
    for found in run_workers(train, (lowered(3, update), 2), 2):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        torch.testing.assert_close(torch.tensor(found[1], dtype=torch.float64), weights, rtol=1e-12, atol=1e-12)
        assert found[2] == 8 * 6, "only weights stay"


def exchange():
    """Every collective on several tensors and dims at once, against slices of the whole."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    try:
        size, rank = dist.get_world_size(), dist.get_rank()
        whole = [torch.arange(48.0).reshape(4, 12), 100 + torch.arange(32.0).reshape(2, 4, 4)]
        group, failures = dist.group.WORLD, []

        def check(collective, given, wanted, gather=(-1, -1), split=(-1, -1)):
            for tensors in (slice(0, 2), slice(0, 1), slice(1, 2)):
                slots = [*given[tensors], *[None] * len(wanted[tensors])]
                count = len(given[tensors])
                instruction = Communicate(
                    collective=collective,
                    axis=0,
                    sources=("",) * count,
                    targets=("",) * count,
                    gather_dims=gather[tensors],
                    split_dims=split[tensors],
                )
                message = make_message(instruction, slots, tuple(range(count)), tuple(range(count, 2 * count)), group)
                message.start()
                message.finish()
                for found, value in zip(slots[count:], wanted[tensors], strict=True):
                    if not torch.equal(found, value):
                        failures.append((collective.value, rank))

        for dims in ((0, 0), (1, 2), (1, 1)):
            parts = [tensor.chunk(size, dim)[rank].contiguous() for tensor, dim in zip(whole, dims, strict=True)]
            check(Collective.ALL_GATHER, parts, whole, gather=dims)
            summed = [size * part for part in parts]
            check(Collective.REDUCE_SCATTER, whole, summed, split=dims)
        check(Collective.ALL_REDUCE, whole, [size * tensor for tensor in whole])
        columns = [tensor.chunk(size, dim)[rank] for tensor, dim in zip(whole, (1, 1), strict=True)]
        rows = [tensor.chunk(size, dim)[rank] for tensor, dim in zip(whole, (0, 0), strict=True)]
        check(Collective.ALL_TO_ALL, columns, rows, gather=(1, 1), split=(0, 0))
        check(Collective.ALL_TO_ALL, rows, columns, gather=(0, 0), split=(1, 1))
        return failures
    finally:
        dist.destroy_process_group()


def test_collectives():
    assert run_workers(exchange, (), 2) == [[], []]


def test_rank_environment_is_not_left_behind():
    assert "TORCHELASTIC_RUN_ID" not in os.environ
