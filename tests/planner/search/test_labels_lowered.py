"""What labels say of a plan is what its lowered program takes: seconds without overlap, bytes kept.

Where memory is so dear that a layer hands on slices of a tensor that both it and the next one work on whole, labels
have the slices kept and gathered again; the program, which is what plans are ranked and checked by, takes less time and
more memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner.cost.work import optimizer
from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.scaling import at_batch
from planner.lowering.instructions import LoweredStages
from planner.lowering.stages import lower_stages
from planner.networks import load_network
from planner.plans.plan import LayerRules, NodeRules, RecomputeRange
from planner.search.units.labels import RECOMPUTE, StageDecisions, StageTables, stage_tables
from planner.search.units.rules import rules_of
from planner.sharding.placement import Mesh
from simulator.corrections import kernel_factor, message_time
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.kernels import has_shape_model, kernel_time, shaped_time
from simulator.pipeline_operators import FIRST, LAST, PLAIN
from simulator.profiles import load_profile
from simulator.program import Kernel, Task
from simulator.schedules import ActionKind
from simulator.topology import group_shape
from tests.planner.lowering.plans import plan_of
from tests.planner.lowering.steps import Rank
from tests.planner.search.problems import BUCKET_BYTES, captured_small, deepened, make_mesh

HARDWARE = "dgx-a100"
MORE = (("gpt", 4), ("llama", 2), ("llama", 4))

DEAR = 1e-7
"""Seconds a byte at which a layer hands a slice on though it and the next layer work on the whole tensor."""


def tables_of(graph: OperatorGraph, mesh: Mesh, micro_batch: int = 2, **options: object) -> StageTables:
    return stage_tables(
        at_batch(graph, micro_batch),
        StageDecisions(graph),
        load_profile(HARDWARE),
        mesh,
        optimizer=optimizer("adamw"),
        bucket_bytes=BUCKET_BYTES,
        **options,  # type: ignore[arg-type]
    )


@cache
def small_tables(name: str, degree: int) -> StageTables:
    return tables_of(captured_small(name, 4), make_mesh(tensor=degree))


def path(tables: StageTables, modes: Sequence[int], price: float) -> list[int]:
    """The labels of all unrolled units, in recompute modes by turns, with the least seconds + price × bytes kept."""
    best: dict[int, tuple[float, list[int]]] = {-1: (0.0, [])}
    for place, number in enumerate(tables.chain.positions):
        labels = tables.units[number]
        cost = labels.forward_s + labels.backward_s + price * labels.activation_bytes
        after: dict[int, tuple[float, list[int]]] = {}
        for i in np.flatnonzero(labels.recompute == modes[place % len(modes)]):
            before = best.get(int(labels.entry[i]))
            if before is not None:
                total = before[0] + float(cost[i])
                if total < after.get(int(labels.exit[i]), (np.inf, []))[0]:
                    after[int(labels.exit[i])] = (total, [*before[1], int(i)])
        best = after
    return best[-1][1]


def by_node(rules: Mapping[str, NodeRules], layers: Sequence[LayerRules]) -> dict[str, NodeRules]:
    found = dict(rules)
    for layer in layers:
        for number in range(layer.first, layer.last + 1):
            found.update({name.replace("*", str(number), 1): r for name, r in layer.rules.items()})
    return found


def seconds(mesh: Mesh, task: Task, hardware: Hardware) -> float:
    if task.collective is not None:
        number = next(i for i, axis in enumerate(mesh.axes) if axis.name == task.axis)
        group = group_shape(hardware, mesh.axes[number].size, mesh.stride(number))
        return float(message_time(hardware, task.collective, np.array([max(task.payload_bytes, 1.0)]), group)[0])
    factor = kernel_factor(hardware, task.kernel, task.dtype, mesh.size)
    if task.shape is None or not has_shape_model(hardware, task.kernel):
        return factor * kernel_time(hardware, task.kernel, task.dtype, task.flops, task.bytes_moved)
    shape, flops, moved = map(np.asarray, (task.shape, task.flops, task.bytes_moved))
    return factor * float(shaped_time(hardware, task.kernel, task.dtype, shape, flops, moved))


def totals(lowered: LoweredStages, hardware: Hardware) -> dict[ActionKind, float]:
    """Seconds of each pass without what nothing decides: constants are computed whole everywhere.

    Parameters that stay are gathered in the first forward pass, which is not looked at. Gradients of a parameter that
    units share are added in place, which labels count as the operator that it is in the graph.
    """
    constants = {node.name for node in lowered.graph.nodes if node.role is Role.CONSTANT}
    (stage,) = lowered.stages
    found = {}
    for key in ((ActionKind.FORWARD, PLAIN), (ActionKind.BACKWARD, LAST)):
        tasks = [
            replace(task, kernel=Kernel.ELEMENTWISE) if task.kernel is Kernel.ACCUMULATION else task
            for task in stage.passes[key].tasks
            if task.name not in constants
        ]
        found[key[0]] = sum(seconds(lowered.mesh, task, hardware) for task in tasks)
    return found


def kept_bytes(lowered: LoweredStages) -> float:
    """Bytes that stand when the backward pass begins, without what is resident, constants and the loss."""
    graph, (stage,) = lowered.graph, lowered.stages
    apart = {n.name for n in graph.nodes if n.role is Role.CONSTANT} | {graph.nodes[graph.loss.node].name}
    rank = Rank(lowered)
    rank.run(stage.passes[ActionKind.FORWARD, FIRST])
    apart |= rank.stored | stage.lasting
    return sum(size for name, size in rank.standing().items() if name not in apart)


@pytest.mark.parametrize(("price", "tolerance"), [(0.0, 1e-6), (1e-9, 1e-3), (DEAR, 0.02)])
@pytest.mark.parametrize("modes", [(0,), (1,), (2,), (2, 0, 1)], ids=["none", "selective", "full", "mixed"])
@pytest.mark.parametrize(
    ("name", "degree"), [("gpt", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_seconds_and_bytes_are_those_of_the_lowered_program(
    name: str, modes: tuple[int, ...], price: float, tolerance: float, degree: int
) -> None:
    hardware, mesh = load_profile(HARDWARE), make_mesh(tensor=degree)
    tables = small_tables(name, degree)
    chosen = path(tables, modes, price)
    labels = [(tables.units[n], i) for n, i in zip(tables.chain.positions, chosen, strict=True)]
    recompute = {
        unit: RECOMPUTE[int(ls.recompute[i])] for unit, (ls, i) in zip(tables.chain.names(), labels, strict=True)
    }
    rules = by_node(*rules_of(tables, chosen, 1))
    ranges = tuple(RecomputeRange(first=u, last=u, mode=mode) for u, mode in recompute.items() if mode != "none")
    plan = plan_of(rules, mesh, bucket_bytes=BUCKET_BYTES, recompute_ranges=ranges)
    lowered = lower_stages(plan, tables.parts.graph)
    found = totals(lowered, hardware)
    forward_s, backward_s = (sum(getattr(ls, passes)[i] for ls, i in labels) for passes in ("forward_s", "backward_s"))
    kept = sum(float(ls.activation_bytes[i]) for ls, i in labels)
    assert kept_bytes(lowered) >= kept * (1 - tolerance)
    if (name, modes, price) == ("llama", (2,), DEAR):
        # The next layer reads the whole tensor where it still stands: no gather, but that is what is kept.
        assert kept_bytes(lowered) > kept
        gathers_s = sum(float(ls.forward_communication_s[i]) for ls, i in labels)
        assert forward_s - gathers_s <= found[ActionKind.FORWARD] < forward_s
        assert backward_s - 2 * gathers_s <= found[ActionKind.BACKWARD] < backward_s
        return
    assert found[ActionKind.FORWARD] == pytest.approx(forward_s, rel=tolerance)
    assert found[ActionKind.BACKWARD] == pytest.approx(backward_s, rel=tolerance)
    if 1 not in modes or price < DEAR:
        # Beyond, kept tensors that are gathered again stand as gathered from the forward pass on.
        assert kept_bytes(lowered) == pytest.approx(kept, rel=tolerance)


@pytest.mark.slow
def test_a_view_that_repeats_numbers_keeps_only_those() -> None:
    tables = tables_of(deepened(load_network("zoo:mixtral-8x7b").capture(), 2), make_mesh(tensor=4))
    chosen = path(tables, (0,), 0.0)
    rules = by_node(*rules_of(tables, chosen, 1))
    lowered = lower_stages(plan_of(rules, make_mesh(tensor=4), bucket_bytes=BUCKET_BYTES), tables.parts.graph)
    numbers = zip(tables.chain.positions, chosen, strict=True)
    kept = sum(float(tables.units[number].activation_bytes[label]) for number, label in numbers)
    assert kept_bytes(lowered) == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_data_axis_shards_the_batch_and_stores_what_is_large(sharded: bool) -> None:
    tables = small_tables("gpt", 2)
    chosen = path(tables, (0,), 0.0)
    rules = by_node(*rules_of(tables, chosen, 4, sharding="zero1" if sharded else "none", threshold_bytes=100))
    whole = unfold(at_batch(tables.parts.graph, 4 * tables.parts.graph.batch_size))
    alone = by_node(*rules_of(tables, chosen, 1))
    for node in whole.nodes:
        if node.role is Role.CONSTANT:
            continue
        assert rules[node.name][1:] == alone[node.name]
        first = rules[node.name][0]
        if node.role is Role.PARAMETER:
            local = node.outputs[0].size_bytes / (2 if alone[node.name][0].outputs[0] >= 0 else 1)
            assert (first.outputs[0] >= 0) == (sharded and local >= 100)
        else:
            for spec, placed in zip(node.outputs, first.outputs, strict=True):
                assert not any(spec.batch_dims) or spec.batch_dims[placed]
    mesh = make_mesh(data=4, tensor=2)
    plan = plan_of(rules, mesh, bucket_bytes=BUCKET_BYTES, micro_batches=2, optimizer_sharding="zero1")
    (stage,) = lower_stages(plan, whole).stages
    hardware = load_profile(HARDWARE)
    labels = [(tables.units[n], i) for n, i in zip(tables.chain.positions, chosen, strict=True)]
    passes = [t for t in stage.passes[ActionKind.FORWARD, PLAIN].tasks if t.axis != "data"]
    beside = {n.name for n in whole.nodes if n.role is Role.CONSTANT}
    found = sum(seconds(mesh, t, hardware) for t in passes if t.name not in beside)
    assert found == pytest.approx(sum(ls.forward_s[i] for ls, i in labels), rel=1e-6)


def test_as_many_labels_as_units_are_asked_for() -> None:
    with pytest.raises(InputError, match="3 labels were chosen for 6 units"):
        rules_of(small_tables("gpt", 2), [0, 0, 0], 1)
