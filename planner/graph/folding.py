"""Finding repeated blocks by structure, so that later costs grow with distinct blocks, not with depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.graph.operator_graph import Argument, Node, OperatorGraph, Run, TensorRef
from planner.graph.unfolding import renumber_argument, run_start, unfold, unfold_run
from simulator.errors import NetworkError

__all__ = ["fold", "repeat", "run_start", "unfold", "without_ends"]

MINIMUM_REPEATS = 3
_LEVELS = 3
Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The nodes of one indexed module, forward and backward, in order."""

    prefix: str
    index: int
    nodes: tuple[int, ...]


def template_name(name: str, prefix: str) -> str:
    """Replace the block's index after `prefix` by ``*``.

    >>> template_name("blocks.12.mlp/gelu", "blocks")
    'blocks.*.mlp/gelu'
    """
    rest = name[len(prefix) + 1 :]
    digits = len(rest) - len(rest.lstrip("0123456789"))
    return f"{prefix}.*{rest[digits:]}"


def block_index(name: str, prefix: str) -> int:
    """Read the block's index after `prefix`.

    >>> block_index("blocks.12.mlp/gelu", "blocks")
    12
    """
    rest = name[len(prefix) + 1 :]
    return int(rest[: len(rest) - len(rest.lstrip("0123456789"))])


def fold(graph: OperatorGraph, minimum: int = MINIMUM_REPEATS) -> OperatorGraph:
    """Keep two blocks of every run of at least `minimum` equal blocks in a row.

    A block is what belongs to one indexed module (``blocks.3``), outermost index first. Blocks are equal
    when their operators, shapes and arguments are, and when they refer to themselves, their neighbours
    and shared nodes in the same way. `unfold` gives back the same graph: a run for which it would not is
    left as it is. Of several rows in one list of blocks (dense layers, then layers with experts) the longest is folded.
    """
    for level in range(1, _LEVELS + 1):
        tried: set[tuple[str, int]] = set()
        while (found := _next_row(graph, level, minimum, tried)) is not None:
            folded = _fold_longest(graph, found, minimum)
            tried |= {(block.prefix, block.index) for block in found}
            graph = graph if folded is None else folded
    return graph


def repeat(graph: OperatorGraph, count: int) -> OperatorGraph:
    """Fold a graph captured with few blocks, the last two alike, and let them stand for all of `count`."""
    folded = fold(graph, minimum=2)
    if len(folded.runs) != 1:
        raise NetworkError(
            f"network {graph.network!r} has no single run of equal blocks ({len(folded.runs)} found); "
            "capture its full depth"
        )
    (run,) = folded.runs
    return replace(folded, runs=(replace(run, count=count - run_start(folded, run)),))


def _next_row(graph: OperatorGraph, level: int, minimum: int, tried: set[tuple[str, int]]) -> list[_Nodes] | None:
    """The next row to fold: the longest of each list of blocks that has no run yet, as names tell runs apart."""
    folded = {run.prefix for run in graph.runs}
    rows = [row for row in _candidates(graph, level, minimum, tried) if row[0].prefix not in folded]
    longest: dict[str, int] = {}
    for row in rows:
        longest[row[0].prefix] = max(len(row), longest.get(row[0].prefix, 0))
    return next((row for row in rows if len(row) == longest[row[0].prefix]), None)


def _candidates(graph: OperatorGraph, level: int, minimum: int, tried: set[tuple[str, int]]) -> Iterator[list[_Nodes]]:
    """Yield the longest rows of blocks with equal signatures that are not tried yet."""
    row: list[_Nodes] = []
    previous: tuple[Signature, ...] = ()
    for block in [*_blocks(graph, level), None]:
        alike = () if block is None else tuple(signature(graph.nodes[i]) for i in block.nodes)
        follows = block and row and block.prefix == row[-1].prefix and block.index == row[-1].index + 1
        if follows and alike == previous:
            row.append(block)  # type: ignore[arg-type]
            continue
        if len(row) >= minimum:
            yield row
        row = [] if block is None or (block.prefix, block.index) in tried else [block]
        previous = alike


def _blocks(graph: OperatorGraph, level: int) -> list[_Nodes]:
    """Group the nodes that no run holds yet by the module at the `level`-th index of their path."""
    held = {i for run in graph.runs for i in (*run.first, *run.second)}
    groups: dict[tuple[str, int], list[int]] = {}
    for i, node in enumerate(graph.nodes):
        key = None if i in held else _indexed_module(node.module, level)
        if key is not None:
            groups.setdefault(key, []).append(i)
    order = {prefix: n for n, prefix in enumerate(dict.fromkeys(prefix for prefix, _ in groups))}
    keys = sorted(groups, key=lambda key: (order[key[0]], key[1]))
    return [_Nodes(prefix, index, tuple(groups[prefix, index])) for prefix, index in keys]


def _indexed_module(path: str, level: int) -> tuple[str, int] | None:
    """Split a path at its `level`-th index.

    >>> _indexed_module("stages.1.blocks.2.conv", 2)
    ('stages.1.blocks', 2)
    """
    parts = path.split(".")
    places = [n for n, part in enumerate(parts) if n and part.isdigit()]
    if len(places) < level:
        return None
    place = places[level - 1]
    return ".".join(parts[:place]), int(parts[place])


def signature(node: Node) -> Signature:
    """Everything of a node but its names and what it refers to."""
    values = (_shape_of(node.args), tuple((key, _shape_of(value)) for key, value in node.kwargs))
    return (
        node.op,
        node.role,
        node.phase,
        node.kernel,
        node.outputs,
        node.flops,
        node.product_dtype,
        node.moved,
        *values,
    )


def _shape_of(argument: Argument) -> object:
    if isinstance(argument, TensorRef):
        return ("tensor", argument.output)
    if isinstance(argument, tuple):
        return tuple(_shape_of(item) for item in argument)
    return (type(argument), argument)


def _fold_longest(graph: OperatorGraph, row: list[_Nodes], minimum: int) -> OperatorGraph | None:
    """Fold the row, or the longest part of it that unfolds to the same graph."""
    for length in range(len(row), minimum - 1, -1):
        for start in range(len(row) - length + 1):
            folded = _fold_row(graph, row[start : start + length])
            if folded is not None and _same(unfold(folded), unfold(graph)):
                return folded
            if length < len(row) - 1:
                break
        if length < len(row) - 1:
            return None
    return None


def _same(a: OperatorGraph, b: OperatorGraph) -> bool:
    """Whether two graphs are equal but for source lines, which may differ between equal blocks."""
    fields = ("parameters", "inputs", "loss")
    return all(getattr(a, f) == getattr(b, f) for f in fields) and all(
        x == y or replace(x, source="") == replace(y, source="") for x, y in zip(a.nodes, b.nodes, strict=True)
    )


def _fold_row(graph: OperatorGraph, row: Sequence[_Nodes]) -> OperatorGraph | None:
    """Drop every block but the first two; the second takes over what the last refers to."""
    first, second, last = row[0], row[1], row[-1]
    before_last = row[-2]
    dropped = {i for block in row[2:] for i in block.nodes}
    keep = [i for i in range(len(graph.nodes)) if i not in dropped]
    table = [-1] * len(graph.nodes)
    for new, old in enumerate(keep):
        table[old] = new
    outside = list(table)
    for old, stand_in in zip(last.nodes, second.nodes, strict=True):
        outside[old] = table[stand_in]
    ends = dict(zip(second.nodes, last.nodes, strict=True))
    end_table = list(outside)
    for old, stand_in in zip(before_last.nodes, first.nodes, strict=True):
        end_table[old] = table[stand_in]
    inside = {i for block in row for i in block.nodes}
    nodes: list[Node] = []
    for old in keep:
        node = graph.nodes[old]
        if old in ends:
            end = graph.nodes[ends[old]]
            node = _redirect(replace(end, name=node.name, module=node.module, source=node.source), end_table)
        else:
            node = _redirect(node, table if old in inside else outside)
        if not _ordered(node, len(nodes)):
            return None
        nodes.append(node)
    parameters = [p for p in graph.parameters if p.node not in dropped]
    if any(p.gradient is not None and table[p.gradient.node] < 0 for p in parameters):
        return None
    return replace(
        graph,
        nodes=tuple(nodes),
        parameters=tuple(
            replace(p, node=table[p.node], gradient=p.gradient and TensorRef(table[p.gradient.node], p.gradient.output))
            for p in parameters
        ),
        inputs=tuple(replace(i, node=table[i.node]) for i in graph.inputs),
        loss=TensorRef(outside[graph.loss.node], graph.loss.output),
        runs=(
            *(
                replace(r, first=tuple(table[i] for i in r.first), second=tuple(table[i] for i in r.second))
                for r in graph.runs
            ),
            Run(
                prefix=first.prefix,
                count=len(row),
                first=tuple(table[i] for i in first.nodes),
                second=tuple(table[i] for i in second.nodes),
            ),
        ),
    )


def _redirect(node: Node, table: Sequence[int]) -> Node:
    return replace(
        node,
        args=tuple(renumber_argument(argument, table) for argument in node.args),
        kwargs=tuple((key, renumber_argument(argument, table)) for key, argument in node.kwargs),
        forward=None if node.forward is None else table[node.forward],
    )


def _ordered(node: Node, index: int) -> bool:
    """Whether everything a node refers to exists and comes before it."""
    references = [ref.node for ref in node.tensor_inputs] + ([] if node.forward is None else [node.forward])
    return all(0 <= reference < index for reference in references)


def without_ends(graph: OperatorGraph, number: int, front: int, back: int) -> OperatorGraph | None:
    """Write out the first `front` and the last `back` blocks of one run; None where the others do not fold alone.

    Where fewer than two blocks would be left, all are written out.
    """
    run = graph.runs[number]
    whole = unfold_run(graph, number)
    first, last = run_start(graph, run) + front, run_start(graph, run) + run.count - 1 - back
    if last - first < 1:
        return whole
    for level in range(1, _LEVELS + 1):
        row = [b for b in _blocks(whole, level) if b.prefix == run.prefix and first <= b.index <= last]
        if len(row) == last - first + 1:
            folded = _fold_row(whole, row)
            if folded is not None and _same(unfold(folded), unfold(graph)):
                return folded
    return None
