"""What an optimizer needs of whole parameters: ranks with shards of them add it up in one message an axis.

LAMB scales each parameter's update by the ratio of two norms. Ranks square their own shards; a message of a few bytes
for each parameter sums that over every axis on which the parameter is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.cost.work import sum_bytes
from planner.lowering.placed import PlacedGraph
from simulator.program import Collective, Phase, Task


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
        task = Task(
            name=f"{Collective.ALL_REDUCE} norms of {sum(times for _, times in members)} parameters",
            phase=Phase.UPDATE,
            stream=f"communication:{one.name}",
            dtype="float64" if "float64" in dtypes else "float32",
            collective=Collective.ALL_REDUCE,
            axis=one.name,
            payload_bytes=float(payload),
            on_host=on_host,
        )
        yield Summed(axis=axis, parameters=tuple(index for index, _ in members), task=task)
