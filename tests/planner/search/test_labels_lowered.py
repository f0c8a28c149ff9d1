"""What labels say of a plan is what its lowered program takes: seconds without overlap, bytes kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.scaling import at_batch
from planner.lowering import LoweringOptions, lower_graph
from planner.search.labels import RECOMPUTE, StageTables, rules_of, stage_decisions, stage_tables
from planner.sharding.placement import Mesh, MeshAxis
from planner.strategy.plan import LayerRules, NodeRules
from planner.work import optimizer
from simulator.corrections import kernel_factor, message_time
from simulator.hardware import Hardware, load_profile
from simulator.kernels import kernel_time, matmul_time
from simulator.program import BufferKind, Phase, Program, Task
from simulator.topology import group_shape
from tests.planner.search.problems import BUCKET_BYTES, captured_small, make_mesh

HARDWARE = "dgx-a100"


def tables_of(graph: OperatorGraph, mesh: Mesh, micro_batch: int = 2, **options: object) -> StageTables:
    return stage_tables(
        at_batch(graph, micro_batch),
        stage_decisions(graph),
        load_profile(HARDWARE),
        mesh,
        optimizer=optimizer("adamw"),
        bucket_bytes=BUCKET_BYTES,
        **options,  # type: ignore[arg-type]
    )


def path(tables: StageTables, modes: Sequence[int], pick: int) -> list[int]:
    """One label for each unrolled unit, so that boundary states meet; the `pick`-th that fits, modes in turn."""
    chosen: list[int] = []
    state = -1
    for place, number in enumerate(tables.chain.positions):
        labels = tables.units[number]
        mode = modes[place % len(modes)]
        fitting = [i for i in range(len(labels)) if labels.entry[i] == state and labels.recompute[i] == mode]
        chosen.append(fitting[pick % len(fitting)])
        state = int(labels.exit[chosen[-1]])
    return chosen


def by_node(rules: Mapping[str, NodeRules], layers: Sequence[LayerRules]) -> dict[str, NodeRules]:
    found = dict(rules)
    for layer in layers:
        for number in range(layer.first, layer.last + 1):
            found.update({name.replace("*", str(number), 1): r for name, r in layer.rules.items()})
    return found


def seconds(program: Program, task: Task, hardware: Hardware) -> float:
    if any(b.kind is BufferKind.GATHERED_PARAMETER for b in task.allocates):
        return 0.0  # once a step
    if task.collective is not None:
        axis = next(a for a in program.axes if a.name == task.axis)
        group = group_shape(hardware, axis.size, axis.stride)
        return float(message_time(hardware, task.collective, np.array([max(task.payload_bytes, 1.0)]), group)[0])
    if task.name.startswith(("slice ", "mask ")):
        return 0.0  # local copies, which the objective leaves out
    factor = kernel_factor(hardware, task.kernel, task.dtype, program.devices)
    if task.matmul is not None and hardware.matmul_models:
        batch, m, n, k = task.matmul
        return factor * float(matmul_time(hardware, task.dtype, m, n, k, batch))
    return factor * kernel_time(hardware, task.kernel, task.dtype, task.flops, task.bytes_moved)


def totals(program: Program, graph: OperatorGraph, hardware: Hardware) -> dict[Phase, float]:
    """Seconds of each pass without what nothing decides: constants are computed whole everywhere."""
    constants = {node.name for node in graph.nodes if node.role is Role.CONSTANT}
    found = dict.fromkeys(Phase, 0.0)
    for task in program.segments[0].tasks:
        if task.name not in constants:
            found[task.phase] += seconds(program, task, hardware)
    return found


def kept_bytes(program: Program, graph: OperatorGraph) -> float:
    """Bytes that stand when the backward pass begins, without what is resident, constants and the loss."""
    apart = {n.name for n in graph.nodes if n.role is Role.CONSTANT} | {graph.nodes[graph.loss.node].name}
    standing: dict[str, float] = {}
    for task in program.segments[0].tasks:
        if task.phase is Phase.BACKWARD:
            break
        standing.update({b.name: b.size_bytes for b in task.allocates if b.kind is not BufferKind.GATHERED_PARAMETER})
        for name in task.releases:
            standing.pop(name, None)
    return sum(size for name, size in standing.items() if name not in apart)


@pytest.mark.parametrize("pick", [0, 7, 40])
@pytest.mark.parametrize("modes", [(0,), (1,), (2,), (2, 0, 1)], ids=["none", "selective", "full", "mixed"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_seconds_and_bytes_are_those_of_the_lowered_program(name: str, modes: tuple[int, ...], pick: int) -> None:
    graph = captured_small(name, 4)
    hardware, mesh = load_profile(HARDWARE), make_mesh(tensor=2)
    tables = tables_of(graph, mesh)
    chosen = path(tables, modes, pick)
    labels = [(tables.units[n], i) for n, i in zip(tables.chain.positions, chosen, strict=True)]
    recompute = {
        unit: RECOMPUTE[int(ls.recompute[i])] for unit, (ls, i) in zip(tables.chain.names(), labels, strict=True)
    }
    rules = by_node(*rules_of(tables, chosen, 1, sharded=False))
    options = LoweringOptions(
        mesh=mesh,
        micro_batches=1,
        optimizer=optimizer("adamw"),
        bucket_bytes=BUCKET_BYTES,
        recompute=recompute,
    )
    whole = unfold(tables.parts.graph)
    program = lower_graph(whole, rules, options).program
    found = totals(program, whole, hardware)
    assert found[Phase.FORWARD] == pytest.approx(sum(ls.forward_s[i] for ls, i in labels), rel=1e-6)
    assert found[Phase.BACKWARD] == pytest.approx(sum(ls.backward_s[i] for ls, i in labels), rel=1e-6)
    assert kept_bytes(program, whole) == pytest.approx(sum(ls.activation_bytes[i] for ls, i in labels), rel=1e-6)
