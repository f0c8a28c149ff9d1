"""In float16 a step whose gradients overflow is left out by all ranks, which agree on it before any update.

Micikevicius et al., *Mixed precision training* (arXiv:1710.03740), section 3.2. A rank looks at its gradients, a
message of a few bytes on every axis tells the others, and the scale of the next step's loss is set.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.cost.work import NARROW_RANGE
from planner.lowering.placed import PlacedGraph
from simulator.program import Collective, Kernel, Phase, Task

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
            task = Task(
                name=f"{Collective.ALL_REDUCE} whether gradients are numbers",
                phase=Phase.UPDATE,
                stream=f"communication:{axis.name}",
                dtype="float32",
                collective=Collective.ALL_REDUCE,
                axis=axis.name,
                payload_bytes=float(FLAG_BYTES),
            )
            yield number, task
