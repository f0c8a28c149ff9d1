"""Leaving equal blocks out of a module before it is captured, so that depth costs nothing.

A list of blocks whose last ones are alike keeps a few of them. Their graph folds into a run (`planner.graph.folding`),
whose count becomes that of the whole list. They are enough to show how a block refers to its neighbours: three must
fold, so a network whose blocks refer to blocks further away is not shortened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from planner.graph.folding import fold, run_start
from planner.graph.operator_graph import OperatorGraph

KEPT = 4
"""Equal blocks that a list keeps: three that fold, and one more, as gradients may treat the first like no other."""
_PLACES = frozenset(
    {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_index", "idx", "index"}
)
"""Attributes in which modules write down their own place."""


def shorten(module: nn.Module, kept: int = KEPT) -> dict[str, tuple[int, int]]:
    """Leave out, in place, what stands behind the first `kept` of equal blocks at the end of each list of blocks.

    Returns
    -------
    dict
        By the path of the list: its blocks now, and before.
    """
    found: dict[str, tuple[int, int]] = {}
    for path, part in list(module.named_modules()):
        if not isinstance(part, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{p}.") for p in found):
            continue
        whole = len(part)
        length = _first_equal(part) + kept
        if length < whole:
            del part[length:]
            found[path] = length, whole
    return found


def _first_equal(blocks: nn.ModuleList | nn.Sequential) -> int:
    """Place of the first block from which on all are alike."""
    members = list(blocks)
    if len({id(block) for block in members}) < len(members):
        return len(members)
    last = _signature(members[-1])
    place = len(members) - 1
    while place and _signature(members[place - 1]) == last:
        place -= 1
    return place


def _signature(block: nn.Module) -> tuple[object, ...]:
    """Everything of a block that its graph may depend on, but its place."""
    return tuple((name, type(part), _settings(part), _tensors(part)) for name, part in block.named_modules())


def _settings(part: nn.Module) -> tuple[tuple[str, object], ...]:
    plain = ((key, _plain(value)) for key, value in vars(part).items() if key not in _PLACES and key[0] != "_")
    return tuple((key, value) for key, value in plain if value is not None)


def _plain(value: object) -> object:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    return None


def _tensors(part: nn.Module) -> tuple[object, ...]:
    held = (*part._parameters.items(), *part._buffers.items())
    return tuple((name, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad)) for name, t in held)


def lengthened(graph: OperatorGraph, lists: Mapping[str, tuple[int, int]]) -> OperatorGraph | None:
    """Fold the graph of a shortened module and let its runs stand for all blocks; None where a list has no run.

    Blocks at the end of a list that nothing reads are not in the graph: as many are left out of the whole.
    """
    folded = fold(graph)
    counts = {}
    for path, (kept, whole) in lists.items():
        runs = [n for n, run in enumerate(folded.runs) if run.prefix == path]
        if len(runs) != 1:
            return None
        run = folded.runs[runs[0]]
        if any(_in_list(node.module, path, run_start(folded, run) + run.count) for node in folded.nodes):
            return None
        counts[runs[0]] = run.count + whole - kept
    whole_runs = tuple(replace(run, count=counts.get(n, run.count)) for n, run in enumerate(folded.runs))
    return replace(folded, runs=whole_runs)


def _in_list(module: str, path: str, first: int) -> bool:
    """Whether a module lies in a list's block number `first` or behind it."""
    place = module[len(path) + 1 :].partition(".")[0] if module.startswith(f"{path}.") else ""
    return place.isdigit() and int(place) >= first
