"""What runs again in a unit that keeps what messages have brought: nothing that only such a message reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.graph.operator_graph import TensorRef
from planner.lowering.placed import PlacedGraph
from planner.sharding.placement import Placements
from simulator.program import Phase

if TYPE_CHECKING:
    from planner.lowering.body import Body


def runs_again(body: Body, unit: int) -> list[int]:
    """Operators of a unit that run again, in order, where messages are not sent again.

    They are those that backward operators, or others that run again, read otherwise than messages of the forward pass
    have brought it. Operators with messages inside keep their results.
    """
    graph, source = body.graph, body.source
    readers = (i for i in body.readers[unit] if graph.nodes[i].phase is Phase.BACKWARD)
    wanted = {read for index in readers for read in _reads(body, index)}
    found: list[int] = []
    for index in reversed(source.units.again[unit]):
        outputs = {TensorRef(index, output) for output in range(len(graph.nodes[index].outputs))}
        if not has_inner(source, index) and any(ref in outputs and not _brought(body, ref, p) for ref, p in wanted):
            found.insert(0, index)
            wanted.update(_reads(body, index))
    return found


def has_inner(source: PlacedGraph, index: int) -> bool:
    """Whether messages travel inside an operator."""
    _, inside = source.messages_inside(index)
    return inside


def _reads(body: Body, index: int) -> Iterator[tuple[TensorRef, Placements]]:
    """What an operator reads, but for what an attention has exchanged before."""
    node = body.graph.nodes[index]
    kept = len(body.exchanged.get(node.forward, ())) if node.phase is Phase.BACKWARD else 0
    wanted = zip(node.tensor_inputs, body.source.recipe(index).inputs, strict=True)
    yield from (read for place, read in enumerate(wanted) if not 1 <= place <= kept)


def _brought(body: Body, ref: TensorRef, wanted: Placements) -> bool:
    """Whether messages of the forward pass have brought a tensor, up to a slice of one's own."""
    ways = (body.source.way(placements, wanted) for placements in body.sent.get(ref, ()))
    return any(way is not None and not body.source.volume(way) for way in ways)
