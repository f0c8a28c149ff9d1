"""Operators of the backward pass that make gradients of their input and of parameters, cut into one of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.cost.work import in_halves
from planner.lowering.instructions import Compute
from planner.lowering.placed import PlacedGraph
from planner.lowering.writer import Draft


def split_backward(source: PlacedGraph, drafts: Sequence[Draft]) -> list[Draft]:
    """Cut every draft that makes both kinds of gradients in two: that of the input comes first.

    So a pass that leads to the gradient of a unit's input leaves those of parameters to another, and what waits in
    between is what they are made of, not themselves.
    """
    return [half for draft in drafts for half in _halves(source, draft)]


def _halves(source: PlacedGraph, draft: Draft) -> Iterator[Draft]:
    made = draft.instruction
    if not isinstance(made, Compute) or draft.completes or not in_halves(source.graph.nodes[made.node]):
        yield draft
        return
    given, *own = made.outputs
    task, recipe = draft.task, source.recipe(made.node)
    # Both read the gradient of the output; one reads the weight and makes the gradient of the image, one the reverse.
    moved = max(0.0, task.bytes_moved - sum(recipe.sizes))
    for outputs, what in (((given, *("" for _ in own)), "input"), (("", *own), "weight")):
        yield replace(
            draft,
            task=replace(task, name=f"{task.name}, {what}", flops=task.flops / 2, bytes_moved=moved),
            instruction=replace(made, outputs=outputs),
            writes=tuple(buffer for buffer in draft.writes if buffer.name in outputs),
        )
