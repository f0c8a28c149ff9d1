"""Leaving equal blocks out of a module before it is captured, so that depth costs nothing.

A list whose last blocks are alike keeps a few of them. Their graph folds into a run (`planner.graph.folding`), whose
count becomes that of the whole list. A list of several kinds of blocks in any order (attention to a window and to all;
attention, state-space and feed-forward layers) keeps its ends and two blocks of each kind, from whose graph that of all
is written out (`planner.graph.assembling`). Where a block refers to others than its neighbours, nothing is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.graph.assembling import ENDS, assembled, place_in
from planner.graph.folding import fold, run_start
from planner.graph.operator_graph import OperatorGraph

if TYPE_CHECKING:
    from torch import nn

KEPT = 4
"""Equal blocks that a list keeps: three that fold, and one more, as gradients may treat the first like no other."""
_OF_A_KIND = 2
"""Blocks of a kind that are kept between the ends: two show that they are alike."""
_PLACES = frozenset(
    {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_index", "idx", "index"}
)
"""Attributes in which modules write down their own place."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """A list of blocks of which some are kept: their places, and the kind of every block of the whole list."""

    kept: tuple[int, ...]
    kinds: tuple[int, ...]

    @property
    def ends_alike(self) -> bool:
        """Whether the first blocks are kept, and all others are like the last of these."""
        return self.kept == tuple(range(len(self.kept))) and len(set(self.kinds[len(self.kept) - KEPT :])) == 1


def shorten(module: nn.Module) -> dict[str, Shortened]:
    """Leave out, in place, blocks that others like them show.

    Lists of one length side by side (blocks, and a norm for each) keep the same places, and so do lists of that length
    in a configuration, by which a network may look up what a block is.

    Returns
    -------
    dict
        By the path of the list what became of it.
    """
    from torch import nn

    found: dict[str, Shortened] = {}
    sides: dict[tuple[str, int], list[tuple[str, nn.ModuleList | nn.Sequential]]] = {}
    for path, part in module.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            sides.setdefault((path.rpartition(".")[0], len(part)), []).append((path, part))
    for lists in sides.values():
        if any(path.startswith(f"{p}.") for path, _ in lists for p in found):
            continue
        shortened = _shortest([part for _, part in lists])
        if shortened is None:
            continue
        for path, part in lists:
            if shortened.ends_alike:
                del part[len(shortened.kept) :]
            else:
                kept = [part[place] for place in shortened.kept]
                del part[:]
                part.extend(kept)
            found[path] = shortened
        if not shortened.ends_alike:
            _shorten_configurations(module, shortened)
    return found


def _shortest(lists: Sequence[nn.ModuleList | nn.Sequential]) -> Shortened | None:
    """How lists side by side are kept shortest; None where all of them is needed."""
    whole = len(lists[0])
    if whole <= KEPT or any(len({id(block) for block in blocks}) < whole for blocks in lists):
        return None
    numbers: dict[Hashable, int] = {}
    kinds = tuple(numbers.setdefault(tuple(map(_signature, side)), len(numbers)) for side in zip(*lists, strict=True))
    start = max((place for place in range(whole) if kinds[place] != kinds[-1]), default=-1) + 1
    best, some = tuple(range(start + KEPT)), _places(kinds)
    # A run is dealt with faster than the same blocks written out.
    if len(some) + KEPT < len(best) and all(name.isdigit() for blocks in lists for name in blocks._modules):
        best = some
    return Shortened(best, kinds) if len(best) < whole else None


def _places(kinds: Sequence[int]) -> tuple[int, ...]:
    """Places of the ends and of the first blocks of each kind between them."""
    inner = range(ENDS, len(kinds) - ENDS)
    seen: Counter[int] = Counter()
    kept = []
    for place in range(len(kinds)):
        if place in inner:
            seen[kinds[place]] += 1
        if place not in inner or seen[kinds[place]] <= _OF_A_KIND:
            kept.append(place)
    return tuple(kept)


def _shorten_configurations(module: nn.Module, shortened: Shortened) -> None:
    for config in {id(c): c for part in module.modules() if (c := getattr(part, "config", None)) is not None}.values():
        for name, value in list(getattr(config, "__dict__", {}).items()):
            if isinstance(value, (list, tuple)) and len(value) == len(shortened.kinds):
                object.__setattr__(config, name, type(value)(value[place] for place in shortened.kept))


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
    """Make the folded graph of all blocks from that of a shortened module; None where its blocks do not show it.

    Blocks at the end of a list that nothing reads are not in the graph: as many are left out of the whole.
    """
    whole: OperatorGraph | None = graph
    for path, one in lists.items():
        if whole is not None and not one.ends_alike and _blocks_of(path, whole):
            whole = assembled(whole, path, one.kept, one.kinds)
    if whole is None:
        return None
    folded = fold(whole)
    counts = {}
    for path, one in lists.items():
        if not one.ends_alike or not _blocks_of(path, graph):
            continue
        runs = [n for n, run in enumerate(folded.runs) if run.prefix == path]
        if len(runs) != 1:
            return None
        run = folded.runs[runs[0]]
        if any(block >= run_start(folded, run) + run.count for block in _blocks_of(path, folded)):
            return None
        counts[runs[0]] = run.count + len(one.kinds) - len(one.kept)
    return replace(
        folded, runs=tuple(replace(run, count=counts.get(n, run.count)) for n, run in enumerate(folded.runs))
    )


def _blocks_of(path: str, graph: OperatorGraph) -> set[int]:
    """Numbers of the blocks of a list that are in a graph."""
    return {number for node in graph.nodes if (number := place_in(node.module, path)) is not None}
