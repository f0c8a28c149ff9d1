"""What ranks send before the first step: the parameters of the first rank, so that all begin with the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.lowering.instructions import Communicate, Instruction
from planner.lowering.placed import PlacedGraph
from simulator.program import Collective, Phase, Task


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
            spec = source.graph.nodes[members[0]].outputs[0]
            task = Task(
                name=f"{Collective.BROADCAST} {len(members)} parameters from {names[0]}",
                phase=Phase.UPDATE,
                stream=f"communication:{one.name}",
                dtype=spec.dtype,
                collective=Collective.BROADCAST,
                axis=one.name,
                payload_bytes=float(sum(source.graph.nodes[index].outputs[0].size_bytes for index in members)),
                on_host=source.on_host(members[0]),
            )
            nowhere = (-1,) * len(members)
            yield (
                task,
                Communicate(
                    collective=Collective.BROADCAST,
                    axis=axis,
                    sources=names,
                    targets=names,
                    gather_dims=nowhere,
                    split_dims=nowhere,
                ),
            )


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
