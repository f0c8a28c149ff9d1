"""Parameters of which every rank has its own in ``hybrid_parallel``: by attribute or by name."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from simulator.errors import ContextError

if TYPE_CHECKING:
    from torch import nn

    from planner.graph.operator_graph import OperatorGraph

ATTRIBUTE = "layerwise_parallel"


def marked_layerwise(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module whose ``layerwise_parallel`` is True."""
    found = []
    for name, parameter in module.named_parameters():
        said = getattr(parameter, ATTRIBUTE, False)
        if not isinstance(said, bool):
            raise ContextError(f"{name}.{ATTRIBUTE}={said!r}: it must be True or False")
        if said:
            found.append(name)
    return tuple(found)


def layerwise_names(graph: OperatorGraph, patterns: Iterable[str]) -> tuple[str, ...]:
    """Names of the parameters of a network that patterns (``"head.*"``) name, in its order.

    Raises
    ------
    ContextError
        A pattern names no parameter.
    """
    from planner.graph.folding import unfold

    whole = unfold(graph)
    nodes = {parameter.name: whole.nodes[parameter.node].name for parameter in whole.parameters}
    wanted: set[str] = set()
    for pattern in patterns:
        matching = [name for name in nodes if fnmatchcase(name, pattern)]
        if not matching:
            raise ContextError(
                f"layerwise_parallel: {pattern!r} names no parameter of {graph.network}; its parameters are "
                f"{', '.join(list(nodes)[:8])}{', …' if len(nodes) > 8 else ''}"
            )
        wanted.update(matching)
    return tuple(node for name, node in nodes.items() if name in wanted)
