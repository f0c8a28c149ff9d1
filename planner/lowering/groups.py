"""Gradients that a context puts in one message: by the place of their parameter in the network, or by its group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from planner.graph.operator_graph import OperatorGraph
from planner.graph.unfolding import run_start
from planner.plans.exchange import Exchange

ALONE = -1
"""The group of a gradient that travels in a message of its own."""
BY_SIZE = 0
"""That of one whose message is full at a size."""


def message_groups(exchange: Exchange, trained: Sequence[str]) -> dict[str, int]:
    """The group of each trained parameter whose gradient's message is said, by name.

    Parameters
    ----------
    exchange : Exchange
    trained : sequence of str
        Trained parameters of the whole network, in its order.

    >>> message_groups(Exchange(fusion_places=(1,)), ["a", "b", "c"])
    {'a': 1, 'b': 2, 'c': 2}
    >>> message_groups(Exchange(fusion_groups=(("c", 0), ("a", 7))), ["a", "b", "c"])
    {'a': 7, 'c': -1}
    """
    if exchange.fusion_places:
        return {name: bisect_right(exchange.fusion_places, place) + 1 for place, name in enumerate(trained)}
    named: Mapping[str, int] = dict(exchange.fusion_groups)
    return {name: named[name] or ALONE for name in trained if name in named}


def trained_names(graph: OperatorGraph) -> Iterator[str]:
    """Names of the trained parameters of a graph, folded or not, as they are in it and in their order unfolded."""
    runs = {i: run for run in graph.runs for i in run.second}
    members = {run.prefix: [p for p in graph.parameters if p.node in run.second] for run in graph.runs}
    for parameter in graph.parameters:
        run = runs.get(parameter.node)
        if run is None:
            if parameter.gradient is not None:
                yield parameter.name
        elif parameter is members[run.prefix][-1]:
            start = run_start(graph, run)
            rests = [
                p.name[len(run.prefix) + 1 :].partition(".")[2] for p in members[run.prefix] if p.gradient is not None
            ]
            yield from (f"{run.prefix}.{start + block}.{rest}" for block in range(1, run.count) for rest in rests)
