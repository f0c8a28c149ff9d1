"""Gradients added up, over the copies of a micro-batch and over micro-batches."""

from __future__ import annotations

from planner.lowering.instructions import Accumulate
from planner.lowering.placed import PlacedGraph
from planner.lowering.writer import Draft
from planner.sharding.placement import Placements
from simulator.program import Buffer, BufferKind, Kernel, Phase, Task

ACCUMULATE = "accumulate "
"""Beginning of the names of tasks that add a gradient to its accumulator."""


def adds_across_chunks(source: PlacedGraph) -> bool:
    """Whether chunks of a rank that share a parameter add its gradient up in one place.

    They do where it travels with no chunk's pass: on stages of one device.
    """
    return source.options.mesh.size == 1 and source.options.micro_batches > 1


def addition(
    source: PlacedGraph,
    parameter: int,
    name: str,
    accumulator: str,
    placements: Placements,
    stream: str,
    *,
    first: bool,
) -> Draft:
    """Add the gradient `name` of a parameter, which lies in `placements`, into `accumulator`, which the first makes."""
    ref = source.gradient_ref(parameter)
    spec = source.graph.spec(ref)
    task = Task(
        name=f"{ACCUMULATE}{source.graph.nodes[parameter].name}",
        phase=Phase.BACKWARD,
        stream=stream,
        kernel=Kernel.VIEW if first else Kernel.ACCUMULATION,
        dtype=spec.dtype,
        bytes_moved=0.0 if first else 3.0 * source.local_bytes(spec, placements),
        on_host=source.host.holds(ref),
    )
    made = Buffer(name=accumulator, size_bytes=source.device_bytes(ref, placements), kind=BufferKind.GRADIENT)
    return Draft(
        task=task,
        instruction=Accumulate(source=name, accumulator=accumulator, first=first),
        reads=(name,) if first else (name, accumulator),
        writes=(made,) if first else (),
        completes=(accumulator,),
    )
