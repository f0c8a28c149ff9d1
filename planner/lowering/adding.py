"""Gradients added up, over the copies of a micro-batch and over micro-batches."""

from __future__ import annotations

from planner.lowering.placed import PlacedGraph

ACCUMULATE = "accumulate "
"""Beginning of the names of tasks that add a gradient to its accumulator."""


def adds_across_chunks(source: PlacedGraph) -> bool:
    """Whether chunks of a rank that share a parameter add its gradient up in one place.

    They do where it travels with no chunk's pass: on stages of one device.
    """
    return source.options.mesh.size == 1 and source.options.micro_batches > 1
