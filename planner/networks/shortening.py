"""Leaving equal blocks out of a module before it is captured, so that depth costs nothing.

A list of blocks whose last ones are alike, or repeat a pattern (attention to a window in five layers, to all in the
sixth), keeps a few of them. Their graph folds into a run (`planner.graph.folding`), whose count becomes that of the
whole list; a run of patterns is written out again. They are enough to show how a block refers to its neighbours: three
must fold, so a network whose blocks refer to blocks further away is not shortened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.graph.folding import fold, run_start
from planner.graph.operator_graph import OperatorGraph
from planner.graph.unfolding import unfold_run

if TYPE_CHECKING:
    from torch import nn

KEPT = 4
"""Equal blocks or patterns that a list keeps: three that fold, and one more, as gradients may treat the first like no
other."""
LONGEST_PATTERN = 8
_PLACES = frozenset(
    {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_index", "idx", "index"}
)
"""Attributes in which modules write down their own place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A list of blocks that are `kept` of `whole`: from `start` on they repeat a pattern of `period` blocks."""

    kept: int
    whole: int
    start: int
    period: int = 1

    @property
    def left_out(self) -> int:
        """Patterns that are left out."""
        return (self.whole - self.kept) // self.period


def shorten(module: nn.Module) -> dict[str, Shortened]:
    """Leave out, in place, what stands behind the first `KEPT` patterns at the end of each list of blocks.

    Returns
    -------
    dict
        By the path of the list what became of it.
    """
    from torch import nn

    found: dict[str, Shortened] = {}
    for path, part in list(module.named_modules()):
        if not isinstance(part, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{p}.") for p in found):
            continue
        shortened = _shortest(part)
        if shortened is not None:
            del part[shortened.kept :]
            found[path] = shortened
    return found


def _shortest(blocks: nn.ModuleList | nn.Sequential) -> Shortened | None:
    """How a list is kept shortest; None where all of it is needed."""
    members = list(blocks)
    whole = len(members)
    if whole <= KEPT or len({id(block) for block in members}) < whole:
        return None
    signatures = [_signature(block) for block in members]
    found = (_kept(signatures, period) for period in range(1, min(LONGEST_PATTERN, whole // KEPT) + 1))
    return min((one for one in found if one.kept < whole), key=lambda one: one.kept, default=None)


def _kept(signatures: list[tuple[object, ...]], period: int) -> Shortened:
    whole = len(signatures)
    place = whole - period
    while place and signatures[place - 1] == signatures[place - 1 + period]:
        place -= 1
    start = place + (whole - place) % period
    return Shortened(kept=start + KEPT * period, whole=whole, start=start, period=period)


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


def lengthened(graph: OperatorGraph, lists: Mapping[str, Shortened]) -> OperatorGraph | None:
    """Fold the graph of a shortened module and let its runs stand for all blocks; None where a list has no run.

    Blocks at the end of a list that nothing reads are not in the graph: as many are left out of the whole.
    """
    patterns = {path: one for path, one in lists.items() if one.period > 1}
    folded = fold(_renamed(graph, patterns, _as_pattern))
    counts = {}
    for path, one in lists.items():
        runs = [n for n, run in enumerate(folded.runs) if run.prefix == path]
        if len(runs) != 1:
            return None
        run = folded.runs[runs[0]]
        if any(_in_list(node.module, path, run_start(folded, run) + run.count) for node in folded.nodes):
            return None
        counts[runs[0]] = run.count + one.left_out
    whole_runs = tuple(replace(run, count=counts.get(n, run.count)) for n, run in enumerate(folded.runs))
    whole = replace(folded, runs=whole_runs)
    if not patterns:
        return whole
    while (number := next((n for n, run in enumerate(whole.runs) if run.prefix in patterns), None)) is not None:
        whole = unfold_run(whole, number)
    return fold(_renamed(whole, patterns, _as_blocks))


def _as_pattern(one: Shortened, rest: str) -> str:
    """Name of a block of a pattern by the pattern's number, so that a pattern is one block; of one before them."""
    number, _, behind = rest.partition(".")
    pattern, place = divmod(int(number) - one.start, one.period)
    name = f"before{number}" if pattern < 0 else f"{pattern}.block{place}"
    return f"{name}.{behind}" if behind else name


def _as_blocks(one: Shortened, rest: str) -> str:
    """Undo `_as_pattern`."""
    found = re.fullmatch(r"(?:before(\d+)|(\d+)\.block(\d+))((?:\..*)?)", rest)
    assert found is not None  # `_as_pattern` made it
    before, pattern, place, behind = found.groups()
    return f"{before if before else one.start + int(pattern) * one.period + int(place)}{behind}"


def _renamed(
    graph: OperatorGraph, patterns: Mapping[str, Shortened], rule: Callable[[Shortened, str], str]
) -> OperatorGraph:
    """The graph with what a rule makes of the rest of the paths behind that of a list."""
    if not patterns:
        return graph

    def path(module: str) -> str:
        for prefix, one in patterns.items():
            if module.startswith(f"{prefix}."):
                return f"{prefix}.{rule(one, module[len(prefix) + 1 :])}"
        return module

    def name(text: str) -> str:
        module, slash, operator = text.partition("/")
        return f"{path(module)}{slash}{operator}"

    return replace(
        graph,
        nodes=tuple(replace(node, name=name(node.name), module=path(node.module)) for node in graph.nodes),
        parameters=tuple(replace(p, name=name(p.name), aliases=tuple(map(name, p.aliases))) for p in graph.parameters),
    )


def _in_list(module: str, path: str, first: int) -> bool:
    """Whether a module lies in a list's block number `first` or behind it."""
    place = module[len(path) + 1 :].partition(".")[0] if module.startswith(f"{path}.") else ""
    return place.isdigit() and int(place) >= first
