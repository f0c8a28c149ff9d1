"""Messages of a step beside its passes: broadcasts before the first, sums and agreement behind the last.

In float16 all ranks leave a step out whose gradients overflow, on which they agree before any update (Micikevicius et
al., *Mixed precision training*, arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.cost.work import NARROW_RANGE, sum_bytes
from planner.lowering.instructions import Communicate, Instruction, whole_message
from planner.lowering.placed import PlacedGraph
from planner.lowering.writer import message_task
from simulator.program import Collective, Kernel, Phase, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """One message: its axis by number, the parameters by node, and the task that times it."""

    axis: int
    parameters: tuple[int, ...]
    task: Task


def summed(source: PlacedGraph, parameters: Iterable[tuple[int, int]]) -> Iterator[Summed]:
    """Messages before the update, one axis after the other; none for optimizers that work element by element.

    Parameters
    ----------
    parameters
        Nodes, each with how many parameters like it there are.
    """
    update, given = source.options.optimizer, list(parameters)
    if not update.sums:
        return
    for on_host in (False, True):
        here = [(index, times) for index, times in given if source.on_host(index) is on_host]
        yield from _summed(source, here, on_host=on_host)


def _summed(source: PlacedGraph, given: Iterable[tuple[int, int]], *, on_host: bool) -> Iterator[Summed]:
    """Messages of parameters that all lie on the device, or all in the memory of the host."""
    update, given = source.options.optimizer, list(given)
    for axis, (one, size) in enumerate(zip(source.options.mesh.axes, source.sizes, strict=True)):
        members = [(index, times) for index, times in given if source.stored[index][axis] >= 0]
        if not members or size == 1:
            continue
        dtypes = {source.graph.nodes[index].outputs[0].dtype for index, _ in members}
        payload = sum(times * sum_bytes(update, source.graph.nodes[index].outputs[0].dtype) for index, times in members)
        name = f"{Collective.ALL_REDUCE} norms of {sum(times for _, times in members)} parameters"
        dtype = "float64" if "float64" in dtypes else "float32"
        task = message_task(name, Phase.UPDATE, Collective.ALL_REDUCE, one.name, payload, dtype, on_host=on_host)
        yield Summed(axis=axis, parameters=tuple(index for index, _ in members), task=task)


FLAG = "gradients that are no numbers"
FLAG_BYTES = 4
PASSES = 2.0
"""How often a gradient's bytes are moved: it is read, and a byte for each number is written and read."""


def checks_gradients(source: PlacedGraph) -> bool:
    """Whether the network trains in a format whose range gradients may leave."""
    graph = source.graph
    return any(graph.nodes[p.node].outputs[0].dtype == NARROW_RANGE for p in graph.parameters)


def check_task(gradient_bytes: float) -> Task:
    """Time a look at all gradients of a rank."""
    return Task(
        name="look for gradients that are no numbers",
        phase=Phase.UPDATE,
        kernel=Kernel.REDUCTION,
        dtype=NARROW_RANGE,
        bytes_moved=PASSES * gradient_bytes,
    )


def settle_task() -> Task:
    """Time the decision whether to update, once all ranks have told."""
    return Task(
        name="settle the scale of the loss", phase=Phase.UPDATE, kernel=Kernel.COPY, bytes_moved=float(FLAG_BYTES)
    )


def flag_messages(source: PlacedGraph) -> Iterator[tuple[int, Task]]:
    """One message for every axis that has several ranks, with the axis's number."""
    for number, axis in enumerate(source.options.mesh.axes):
        if axis.size > 1:
            name = f"{Collective.ALL_REDUCE} whether gradients are numbers"
            yield number, message_task(name, Phase.UPDATE, Collective.ALL_REDUCE, axis.name, FLAG_BYTES, "float32")


def broadcasts(source: PlacedGraph, parameters: Iterable[int]) -> Iterator[tuple[Task, Communicate]]:
    """Messages that send whole parameters, by their nodes, from the first rank of a mesh to all others.

    Along one axis after the other, outermost first, the rank at its beginning sends: what a rank sends along the last
    has come from the first of all. Parameters that some axis shards stay as they are drawn, and so do those of which
    every rank has its own.
    """
    whole = [
        index
        for index in parameters
        if set(source.stored[index]) <= set(source.replicated) and not source.is_layerwise(index)
    ]
    limit = source.options.bucket_bytes
    for axis, one in enumerate(source.options.mesh.axes):
        for members in _full(source, whole, limit):
            names = tuple(source.graph.nodes[index].name for index in members)
            specs = [source.graph.nodes[index].outputs[0] for index in members]
            name = f"{Collective.BROADCAST} {len(members)} parameters from {names[0]}"
            payload, on_host = sum(spec.size_bytes for spec in specs), source.on_host(members[0])
            kind, dtype = Collective.BROADCAST, specs[0].dtype
            task = message_task(name, Phase.UPDATE, kind, one.name, payload, dtype, on_host=on_host)
            yield task, whole_message(axis, names, names, collective=kind)


def start_instructions(source: PlacedGraph, parameters: Iterable[int]) -> tuple[Instruction, ...]:
    """What a rank with these parameters runs before the first step."""
    if not source.options.exchange.broadcast:
        return ()
    return tuple(instruction for _, instruction in broadcasts(source, parameters))


def _full(source: PlacedGraph, parameters: Iterable[int], limit_bytes: int) -> Iterator[list[int]]:
    """Parameters of one type each, on the host or on the device, as many together as fill a message."""
    by_type: dict[tuple[str, bool], list[int]] = {}
    for index in parameters:
        key = source.graph.nodes[index].outputs[0].dtype, source.on_host(index)
        by_type.setdefault(key, []).append(index)
    for members in by_type.values():
        held: list[int] = []
        size = 0
        for index in members:
            held.append(index)
            size += source.graph.nodes[index].outputs[0].size_bytes
            if size >= limit_bytes:
                yield held
                held, size = [], 0
        if held:
            yield held
