"""The network as a chain of units: the pieces that move between pipeline stages and are recomputed as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.graph.unfolding import run_start, unfold_run
from simulator.program import CONVOLUTIONS, Kernel, Phase

_LEVELS = 3
_HEAVY = CONVOLUTIONS | {Kernel.MATMUL, Kernel.ATTENTION, Kernel.EMBEDDING}
_ANYWHERE = -1
"""Position of what depends on inputs and constants only: every unit that reads it has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The smallest piece of a network that moves between stages: a block, or what lies between blocks.

    ``nodes`` are indices of the graph's nodes, forward and backward, with the parameters, inputs and constants
    they read. ``run`` is the number of the run whose first or second block this is. ``count`` is the number of
    units it stands for: in a folded graph the second block of a run stands for all but the first.
    """

    name: str
    nodes: tuple[int, ...]
    run: int | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The one forward tensor that crosses between two units, and the gradient that comes back for it.

    ``gradient`` is None where nothing before the boundary is trained.
    """

    forward: TensorRef
    gradient: TensorRef | None


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Units in model order, and the ``len(units) - 1`` boundaries between them.

    ``heads`` are the prefix and first index of each run, for the names of the blocks that are folded away.
    """

    units: tuple[Unit, ...]
    boundaries: tuple[Boundary, ...]
    heads: tuple[tuple[str, int], ...] = field(default=())

    def names(self) -> tuple[str, ...]:
        """Names of all units, folded ones written out: the same for a graph and its unfolded form."""
        return tuple(name for unit in self.units for name in self.unrolled(unit))

    def unrolled(self, unit: Unit) -> tuple[str, ...]:
        """Names of the units that `unit` stands for, in model order."""
        if unit.count == 1 or unit.run is None:
            return (unit.name,)
        prefix, start = self.heads[unit.run]
        return tuple(f"{prefix}.{start + block}" for block in range(1, unit.count + 1))

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Position in `units` of each of `names`."""
        return tuple(i for i, unit in enumerate(self.units) for _ in range(unit.count))


def chain(graph: OperatorGraph) -> Chain:
    """Cut a graph, folded or not, into units that follow each other.

    A cut is allowed where one forward tensor crosses and at most its gradient comes back. Inputs, constants,
    what is computed of those alone, and tied parameters with the terms of their gradients do not count: they go
    to every unit that reads them. Cuts are made between the blocks that indices in module paths tell apart
    (where no path has an index, between the outermost modules that tell heavy operators apart); blocks that only
    hold others are cut further. A piece without a matrix product, convolution, attention or embedding stays with
    its neighbour. Where no cut is allowed the network is one unit.
    """
    placed = _PlacedRow(graph)
    pieces = _pieces(placed, _segments(placed))
    units = tuple(_units(placed, pieces))
    boundaries = tuple(placed.boundary(piece.stop - 1) for piece in pieces[:-1])
    heads = tuple((run.prefix, run_start(graph, run)) for run in graph.runs)
    return Chain(units=units, boundaries=boundaries, heads=heads)


def uncut_run(graph: OperatorGraph, cut: Chain) -> int | None:
    """Number of a run whose blocks hand more than one tensor to each other; None where all can be planned singly."""
    units = [unit.run for unit in cut.units]
    return next((number for number in range(len(graph.runs)) if units.count(number) != 2), None)


def with_cut_runs(graph: OperatorGraph) -> OperatorGraph:
    """Write out the runs whose blocks cannot be cut from each other."""
    while graph.runs and (number := uncut_run(graph, chain(graph))) is not None:
        graph = unfold_run(graph, number)
    return graph


@dataclass(frozen=True, slots=True)
class _Segment:
    """Forward operators ``start … stop`` (exclusive) that belong to one module; ``repeated`` in a row of equals."""

    key: str
    start: int
    stop: int
    repeated: bool = False


class _PlacedRow:
    """The position of every node in the row of forward operators, and what crosses between positions."""

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.parameter_sums = _parameter_sums(graph)
        trained = _trained(graph)
        self.order = [i for i in trained if graph.nodes[i].phase is Phase.FORWARD]
        self.position = self._positions()
        self._crossing()

    def _positions(self) -> list[int]:
        nodes = self.graph.nodes
        position = [_ANYWHERE] * len(nodes)
        for place, index in enumerate(self.order):
            position[index] = place
        later: list[int] = []
        for index, node in enumerate(nodes):
            if node.phase is not Phase.BACKWARD or node.role not in (Role.OPERATOR, Role.GRADIENT_SUM):
                continue
            if node.forward is not None and position[node.forward] >= 0:
                position[index] = position[node.forward]
                continue
            terms = [position[r.node] for r in node.tensor_inputs if nodes[r.node].phase is Phase.BACKWARD]
            terms = [place for place in terms if place >= 0]
            if terms:
                position[index] = min(terms)
            else:
                later.append(index)
        for index in reversed(later):
            users = [u for o in range(len(nodes[index].outputs)) for u in self._users(TensorRef(index, o))]
            position[index] = max((position[u] for u in users), default=len(self.order) - 1)
        return position

    def _users(self, ref: TensorRef) -> tuple[int, ...]:
        return self.graph.consumers.get(ref, ())

    def _crossing(self) -> None:
        """Count the tensors that cross behind each position, by difference."""
        size = len(self.order)
        self.forward: list[list[TensorRef]] = [[] for _ in range(size)]
        self.back: list[list[TensorRef]] = [[] for _ in range(size)]
        self.closed = [False] * size
        for ref in self.graph.consumers:
            node, here = self.graph.nodes[ref.node], self.position[ref.node]
            if node.role not in (Role.OPERATOR, Role.GRADIENT_SUM) or here < 0:
                continue
            places = [self.position[u] for u in self._users(ref) if u not in self.parameter_sums]
            places = [place for place in places if place >= 0]
            low, high = min(places, default=here), max(places, default=here)
            ahead, behind = range(here, high), range(low, here)
            down, up = (ahead, behind) if node.phase is Phase.FORWARD else (behind, ahead)
            along = self.forward if node.phase is Phase.FORWARD else self.back
            for place in down:
                along[place].append(ref)
            for place in up:
                self.closed[place] = True

    def allowed(self, place: int) -> bool:
        """Whether the network may be cut behind a position."""
        return not self.closed[place] and len(self.forward[place]) == 1 and len(self.back[place]) <= 1

    def boundary(self, place: int) -> Boundary:
        """What crosses behind a position where a cut is allowed."""
        back = self.back[place]
        return Boundary(forward=self.forward[place][0], gradient=back[0] if back else None)


def _parameter_sums(graph: OperatorGraph) -> frozenset[int]:
    """Sums that gather the gradient of a parameter with several uses."""
    found: set[int] = set()
    open_refs = [p.gradient for p in graph.parameters if p.gradient is not None]
    while open_refs:
        ref = open_refs.pop()
        if graph.nodes[ref.node].role is Role.GRADIENT_SUM:
            found.add(ref.node)
            open_refs.extend(graph.nodes[ref.node].tensor_inputs)
    return frozenset(found)


def _trained(graph: OperatorGraph) -> list[int]:
    """Operators whose results depend on parameters, in order."""
    depends = [node.role is Role.PARAMETER for node in graph.nodes]
    found = []
    for index, node in enumerate(graph.nodes):
        if node.role is Role.OPERATOR and any(depends[ref.node] for ref in node.tensor_inputs):
            depends[index] = True
            found.append(index)
    return found


def _key(path: str, level: int) -> str:
    """Module path up to its `level`-th index, empty where it has fewer.

    >>> _key("stages.1.blocks.2.conv", 2)
    'stages.1.blocks.2'
    """
    parts = path.split(".")
    places = [n for n, part in enumerate(parts) if n and part.isdigit()]
    return ".".join(parts[: places[level - 1] + 1]) if len(places) >= level else ""


def _segments(placed: _PlacedRow) -> list[_Segment]:
    modules = [placed.graph.nodes[i].module for i in placed.order]
    keys = [_key(path, 1) for path in modules]
    if not any(keys):
        heavy = [m for i, m in zip(placed.order, modules, strict=True) if placed.graph.nodes[i].kernel in _HEAVY]
        depth = len(common_parts([m for m in heavy if m]))
        keys = [".".join(path.split(".")[: depth + 1]) for path in modules]
        return _grouped(keys, 0)
    return _refined(placed, modules, _marked(placed, _grouped(keys, 0)), 2)


def common_parts(paths: Iterable[str]) -> list[str]:
    """Return the names that module paths begin with alike.

    >>> common_parts(["blocks.3.norm", "blocks.3.mlp.up"])
    ['blocks', '3']
    """
    shared: list[str] = []
    for names in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return shared


def _grouped(keys: Sequence[str], offset: int) -> list[_Segment]:
    found: list[_Segment] = []
    for place, key in enumerate(keys, offset):
        if found and found[-1].key == key:
            found[-1] = _Segment(key, found[-1].start, place + 1)
        else:
            found.append(_Segment(key, place, place + 1))
    return found


def _marked(placed: _PlacedRow, segments: list[_Segment]) -> list[_Segment]:
    """Mark the segments that equal a neighbour: blocks of a run."""

    def signature(segment: _Segment) -> tuple[object, ...]:
        nodes = (placed.graph.nodes[placed.order[i]] for i in range(segment.start, segment.stop))
        return (segment.key.rpartition(".")[0], *((n.op, n.outputs) for n in nodes))

    signatures = [signature(s) if s.key else () for s in segments]
    equal = [bool(a) and a == b for a, b in pairwise(signatures)]
    return [
        _Segment(s.key, s.start, s.stop, before or after)
        for s, before, after in zip(segments, [False, *equal], [*equal, False], strict=True)
    ]


def _refined(placed: _PlacedRow, modules: list[str], segments: list[_Segment], level: int) -> list[_Segment]:
    """Cut the segments that only hold a row of blocks of their own."""
    if level > _LEVELS:
        return segments
    found: list[_Segment] = []
    for segment in segments:
        keys = [_key(path, level) for path in modules[segment.start : segment.stop]]
        inner = _marked(placed, _grouped(keys, segment.start))
        pairs = [(a, b) for a, b in pairwise(inner) if a.key and b.key]
        if not segment.key or segment.repeated or not pairs or not all(placed.allowed(a.stop - 1) for a, _ in pairs):
            found.append(segment)
        else:
            found += _refined(placed, modules, inner, level + 1)
    return found


def _pieces(placed: _PlacedRow, segments: list[_Segment]) -> list[_Segment]:
    """Join segments between which no cut is allowed, then light ones with what is before them."""

    def light(piece: _Segment) -> bool:
        operators = placed.order[piece.start : piece.stop]
        return not any(placed.graph.nodes[i].kernel in _HEAVY for i in operators)

    whole: list[_Segment] = []
    for segment in segments:
        if whole and not placed.allowed(segment.start - 1):
            whole[-1] = _Segment(whole[-1].key, whole[-1].start, segment.stop)
        else:
            whole.append(segment)
    found: list[_Segment] = []
    for piece in whole:
        # A row of equal blocks stays one whatever surrounds it; only the very first piece joins what follows.
        joins = found and not (piece.repeated or found[-1].repeated)
        if joins and (light(piece) or (len(found) == 1 and light(found[0]))):
            found[-1] = _Segment(found[-1].key, found[-1].start, piece.stop)
        else:
            found.append(piece)
    return found


def _units(placed: _PlacedRow, pieces: list[_Segment]) -> list[Unit]:
    graph = placed.graph
    unit_of = [number for number, piece in enumerate(pieces) for _ in range(piece.start, piece.stop)]
    members: list[list[int]] = [[] for _ in pieces]
    for index, place in enumerate(placed.position):
        if place >= 0:
            members[unit_of[place]].append(index)
    blocks: dict[frozenset[int], tuple[int | None, int]] = {}
    for number, run in enumerate(graph.runs):
        for block, count in ((run.first, 1), (run.second, run.count - 1)):
            blocks[frozenset(i for i in block if placed.position[i] >= 0)] = (number, count)
    taken: dict[str, int] = {}
    found = []
    for own, piece in zip(members, pieces, strict=True):
        number_of_run, count = blocks.get(frozenset(own), (None, 1))
        name = piece.key or _first_name(graph, placed.order[piece.start])
        again = taken.get(name, 0)
        taken[name] = again + 1
        name = f"{name}.{again}" if again else name
        found.append(Unit(name=name, nodes=_with_sources(placed, own), run=number_of_run, count=count))
    return found


def _first_name(graph: OperatorGraph, index: int) -> str:
    node = graph.nodes[index]
    return node.module or node.name


def _with_sources(placed: _PlacedRow, own: list[int]) -> tuple[int, ...]:
    """Add the parameters, inputs, constants, and what is computed of the latter, that nodes read."""
    found, queue = set(own), list(own)
    while queue:
        for ref in placed.graph.nodes[queue.pop()].tensor_inputs:
            if ref.node not in found and placed.position[ref.node] < 0:
                found.add(ref.node)
                queue.append(ref.node)
    return tuple(sorted(found))
