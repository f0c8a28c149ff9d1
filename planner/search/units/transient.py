"""Bytes that stand only while a unit goes backward: gradients on their way, from operator to operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.graph.recompute import MODES
from planner.search.problem.parts import Parts
from planner.search.units.unit_model import UnitModel
from planner.sharding.placement import REPLICATE
from simulator.program import Kernel, Phase

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Piece = tuple[TensorRef, int]
"""A tensor as a variable writes it; whole where the variable is −1."""
Copy = tuple[TensorRef, int, int]
"""A tensor with the variables that write it and that read it."""
_COMPUTED = (Role.OPERATOR, Role.GRADIENT_SUM)


class WholeBytes:
    """Bytes of whole tensors, at any batch."""

    def __init__(self, graph: OperatorGraph, tensors: Sequence[TensorRef]) -> None:
        specs = [graph.spec(ref) for ref in tensors]
        self._growth = np.array([sum(spec.batch_dims) for spec in specs], dtype=np.float64)
        sizes = np.array([spec.size_bytes for spec in specs], dtype=np.float64)
        self._of_one = sizes / float(graph.batch_size) ** self._growth

    def at(self, graph: OperatorGraph) -> FloatArray:
        """Bytes of each at the batch of a graph, shape (tensors,)."""
        return np.asarray(self._of_one * float(graph.batch_size) ** self._growth)


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """What stands at each operator of a unit's backward pass, on every mesh alike.

    ``standing[p, i]`` says how often piece i stands at place p, ``released[m, i]`` how much less where mode m computes
    again. ``copies`` are tensors that a reader may want in another placement than its writer's, ``beside[p, c]`` says
    at which place copy c stands. ``waiting`` are the numbers of the pieces that operators read which may be put off
    until the gradient of the input has been sent back, and that others wrote. Of ``moved`` (piece, copy) what waits is
    the copy, where there is one, in the modes of ``moved_modes[m]``; they are in order of their pieces.

    ``bytes_of_pieces`` and ``bytes_of_copies`` are those of whole tensors.
    """

    pieces: tuple[Piece, ...]
    standing: FloatArray
    released: FloatArray
    copies: tuple[Copy, ...]
    beside: FloatArray
    waiting: IntArray
    moved: IntArray
    moved_modes: NDArray[np.bool_]
    bytes_of_pieces: WholeBytes
    bytes_of_copies: WholeBytes


def flight_of(model: UnitModel) -> Flight:
    """Follow the gradients of activations through a unit, less what was kept and is released by then.

    A gradient stands from the operator that writes it to the last one that reads it, or a view of it; what another unit
    reads stands to the end, and what the unit behind sends back from the start. Gradients of parameters are counted
    where they are stored, and copies in other placements only while an operator reads them. What only operators that
    run again read is released before any gradient.
    """
    return _TransientFollower(model).flight()


class _TransientFollower:
    def __init__(self, model: UnitModel) -> None:
        self.model, self.graph = model, model.graph
        self.members = {*model.variables, *model.shared, *(v for v in (model.entry, model.exit) if v is not None)}
        self.owner = _views(model)
        self.order = [i for i in sorted(model.nodes) if _goes_back(model, i)]
        self.final = _of_parameters(model)
        self.last = self._last()
        self.pieces: dict[Piece, int] = {}
        self.changes: list[tuple[int, int, float]] = []

    def flight(self) -> Flight:
        released = self._released()
        self._follow()
        late = self._copied_late()
        copies, beside = self._copies(late)
        waiting = np.array(self._waiting(), dtype=np.int64)
        numbers = {copy: number for number, copy in enumerate(copies)}
        moved = sorted((piece, numbers[copy], modes) for copy, (piece, modes) in late.items())
        change = np.zeros((len(self.order) + 2, len(self.pieces)))
        for place, piece, sign in self.changes:
            change[place, piece] += sign
        less = np.zeros((len(MODES), len(self.pieces)))
        for mode, piece in released:
            less[mode, piece] += 1.0
        of_pieces = WholeBytes(self.graph, [ref for ref, _ in self.pieces])
        of_copies = WholeBytes(self.graph, [ref for ref, _, _ in copies])
        standing = np.cumsum(change, axis=0)[:-1]
        return Flight(
            pieces=tuple(self.pieces),
            standing=standing,
            released=less,
            copies=copies,
            beside=beside,
            waiting=waiting,
            moved=np.array([(piece, copy) for piece, copy, _ in moved], dtype=np.int64).reshape(-1, 2),
            moved_modes=np.array([modes for _, _, modes in moved], dtype=np.bool_).reshape(-1, len(MODES)).T,
            bytes_of_pieces=of_pieces,
            bytes_of_copies=of_copies,
        )

    def _last(self) -> dict[TensorRef, int]:
        """Last place at which each tensor is read."""
        graph, last = self.graph, dict[TensorRef, int]()
        for place, index in enumerate(self.order):
            node = graph.nodes[index]
            for ref in node.tensor_inputs:
                last[_base(self.owner, ref)] = place
            for output in range(len(node.outputs)):
                ref = TensorRef(index, output)
                outside = any(user not in self.model.nodes for user in graph.consumers.get(ref, ()))
                ends = len(self.order) if outside and ref not in self.final else place
                last[_base(self.owner, ref)] = ends
        return last

    def _piece(self, ref: TensorRef, variable: int | None) -> int:
        known = variable is not None and variable in self.members and self._writes(ref, variable)
        return self.pieces.setdefault((ref, variable if known and variable is not None else -1), len(self.pieces))

    def _writes(self, ref: TensorRef, variable: int) -> bool:
        return ref in self.model.decisions.variables[variable].choices[0].writes

    def _stands(self, piece: int, begin: int | None, end: int) -> None:
        """Let a piece stand from a place on, or from before where there is none, to another."""
        if begin is not None:
            self.changes.append((begin, piece, 1.0))
        self.changes.append((end + 1, piece, -1.0))

    def _follow(self) -> None:
        model, graph, of_node = self.model, self.graph, self.model.decisions.of_node
        arrived = {r for i in self.order for r in graph.nodes[i].tensor_inputs if _arrives(model, r)} - self.final
        for ref in sorted(arrived, key=_order):
            self._stands(self._piece(ref, model.exit), 0, self.last[ref])
        for place, index in enumerate(self.order):
            for output in range(len(graph.nodes[index].outputs)):
                ref = TensorRef(index, output)
                if ref not in self.final and ref not in self.owner:
                    self._stands(self._piece(ref, of_node[index]), place, self.last[ref])
        for ref in sorted({_base(self.owner, saved) for saved in model.saved}, key=_order):
            if ref in self.last and (ref == model.entry_tensor or ref.node in model.nodes):
                writer = model.entry if ref == model.entry_tensor else of_node[ref.node]
                self._stands(self._piece(ref, writer), None, self.last[ref])

    def _released(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for mode in (1, 2):
            kept = {_base(self.owner, kept) for kept in self.model.kept(MODES[mode])} - self.last.keys()
            found += [(mode, self._piece(r, self.model.decisions.of_node[r.node])) for r in sorted(kept, key=_order)]
        return found

    def _waiting(self) -> list[int]:
        """Pieces that weight gradients read, written before them: values of the forward pass, and gradients."""
        graph, model = self.graph, self.model
        read = {_base(self.owner, ref) for index in model.late for ref in graph.nodes[index].tensor_inputs}
        pieces = (self._piece_of(ref) for ref in sorted(read - self.final, key=_order))
        return [piece for piece in pieces if piece is not None]

    def _piece_of(self, ref: TensorRef) -> int | None:
        """The piece that a tensor is where it comes to the unit or is written in it before weight gradients."""
        graph, model = self.graph, self.model
        if _arrives(model, ref):
            return self._piece(ref, model.exit)
        if ref == model.entry_tensor:
            return self._piece(ref, model.entry)
        written = ref.node in model.nodes - model.late and graph.nodes[ref.node].role in _COMPUTED
        return self._piece(ref, model.decisions.of_node[ref.node]) if written else None

    def _copied_late(self) -> dict[Copy, tuple[int, tuple[bool, ...]]]:
        """Copies in other placements that weight gradients read and earlier operators too, so that they wait.

        With each the piece that it is a copy of, and in which modes that holds: of the forward pass a copy is there
        where what reads it runs again, or its tensor does not.
        """
        graph, model, of_node = self.graph, self.model, self.model.decisions.of_node
        users: dict[tuple[TensorRef, int], list[int]] = {}
        for index in sorted(model.nodes - model.late):
            if graph.nodes[index].role in _COMPUTED:
                for ref in graph.nodes[index].tensor_inputs:
                    users.setdefault((ref, of_node[index]), []).append(index)
        again = [model.again[mode].nodes for mode in MODES]
        found: dict[Copy, tuple[int, tuple[bool, ...]]] = {}
        for index in sorted(model.late):
            for ref in graph.nodes[index].tensor_inputs:
                earlier = users.get((ref, of_node[index]), [])
                piece = self._piece_of(_base(self.owner, ref)) if earlier and ref not in self.final else None
                if piece is None:
                    continue
                backward = any(graph.nodes[user].phase is Phase.BACKWARD for user in earlier)
                modes = tuple(backward or ref.node not in made or any(u in made for u in earlier) for made in again)
                found |= dict.fromkeys(self._moves(ref, of_node[index]), (piece, modes))
        return found

    def _moves(self, ref: TensorRef, reader: int) -> Iterator[Copy]:
        """Where a tensor, or what it is a view of, may be moved on its way to a reader."""
        model, variables = self.model, self.model.decisions.variables
        while True:
            writer = model.exit if _arrives(model, ref) else model.decisions.of_node[ref.node]
            moves = ref in variables[reader].choices[0].reads and writer != reader and {writer, reader} <= self.members
            if moves and writer is not None and self._writes(ref, writer):
                yield ref, writer, reader
            if ref not in self.owner:
                return
            reader, ref = model.decisions.of_node[ref.node], self.owner[ref]

    def _copies(self, late: Iterable[Copy]) -> tuple[tuple[Copy, ...], FloatArray]:
        """Copies that operators read in other placements than those were written in, and `late` ones."""
        of_node, variables = self.model.decisions.of_node, self.model.decisions.variables
        made = set(self.order)
        found: dict[Copy, list[int]] = {}
        for place, index in enumerate(self.order):
            for ref in dict.fromkeys(self.graph.nodes[index].tensor_inputs):
                writer, reader = of_node[ref.node], of_node[index]
                inside = ref.node in made and ref not in self.owner and {writer, reader} <= self.members
                moved = inside and writer != reader and self._writes(ref, writer)
                if moved and ref in variables[reader].choices[0].reads:
                    found.setdefault((ref, writer, reader), []).append(place)
        for copy in late:
            found.setdefault(copy, [])
        beside = np.zeros((len(self.order) + 1, len(found)))
        for number, places in enumerate(found.values()):
            beside[places, number] += 1.0
        return tuple(found), beside


class FlightSizes:
    """The pieces of a flight on one shape of stage: what is local of each in every state."""

    def __init__(self, flight: Flight, parts: Parts) -> None:
        self.flight = flight
        self._variables = [v for _, v in flight.pieces]
        whole = np.full((len(parts.sizes), 1), REPLICATE)
        pieces = [
            whole if v < 0 else parts.states(v).placements(ref, reads=False) for ref, v in flight.pieces
        ]  # fmt: skip
        here = [parts.states(writer).placements(ref, reads=False) for ref, writer, _ in flight.copies]
        there = [parts.states(reader).placements(ref, reads=True) for ref, _, reader in flight.copies]
        placed, self._first = _behind(pieces, whole)
        self._shares = _shares(parts, placed)
        (self._here, self._first_here), (self._there, self._first_there) = _behind(here, whole), _behind(there, whole)
        self._read = _shares(parts, self._there)

    def peak(
        self, graph: OperatorGraph, states: Mapping[int, IntArray], mode: IntArray
    ) -> tuple[FloatArray, FloatArray]:
        """Most bytes of gradients of activations that stand at once in each assignment, and what waits, (n,) each.

        What waits for the gradients of weights is what they read of both passes, whatever is computed again.

        Parameters
        ----------
        graph : OperatorGraph
            At the batch of the micro-batch.
        states : mapping of int to array, shape (n,)
            State of each variable of the unit in every assignment.
        mode : array, shape (n,)
            Codes of their recompute modes.
        """
        flight, columns = self.flight, np.arange(len(mode))
        chosen = _stacked(states, self._variables, len(mode))
        sizes = self.flight.bytes_of_pieces.at(graph)[:, None] * self._shares[chosen + self._first[:, None]]
        level = flight.standing @ sizes - (flight.released @ sizes)[mode, columns]
        if flight.copies:
            writers = _stacked(states, [writer for _, writer, _ in flight.copies], len(mode))
            readers = _stacked(states, [reader for _, _, reader in flight.copies], len(mode))
            places = readers + self._first_there[:, None]
            differs = (self._here[:, writers + self._first_here[:, None]] != self._there[:, places]).any(axis=0)
            whole = self.flight.bytes_of_copies.at(graph)[:, None]
            copied = differs * (whole * self._read[places])
            level = level + flight.beside @ copied
        waiting = sizes[flight.waiting].sum(axis=0)
        if len(flight.moved):
            pieces, copies = flight.moved.T
            more = np.where(differs[copies] & flight.moved_modes[mode].T, copied[copies] - sizes[pieces], 0.0)
            # Several operators read one copy.
            waiting = waiting + np.maximum.reduceat(more, np.unique(pieces, return_index=True)[1]).sum(axis=0)
        return np.asarray(np.maximum(level.max(axis=0), 0.0)), np.asarray(waiting)


def _shares(parts: Parts, placed: IntArray) -> FloatArray:
    """Part of a tensor that is local, by state; placements have shape (axes, states)."""
    ways = np.where(placed >= 0, np.array(parts.sizes, dtype=np.float64).reshape(-1, 1), 1.0)
    return np.asarray(1.0 / ways.prod(axis=0))


def _behind(placed: Sequence[IntArray], whole: IntArray) -> tuple[IntArray, IntArray]:
    """Put placements behind each other, and say where those of each tensor begin."""
    first = np.cumsum([0, *(each.shape[1] for each in placed)])[:-1]
    return np.concatenate([*placed, whole[:, :0]], axis=1), first


def _stacked(states: Mapping[int, IntArray], variables: list[int], count: int) -> IntArray:
    """States of variables, shape (variables, n); 0 where there is none."""
    nothing = np.zeros(count, dtype=np.int64)
    return np.array([states[v] if v >= 0 else nothing for v in variables], dtype=np.int64).reshape(-1, count)


def _order(ref: TensorRef) -> tuple[int, int]:
    return ref.node, ref.output


def _of_parameters(model: UnitModel) -> set[TensorRef]:
    """Gradients of parameters, and the terms of those with several uses."""
    graph = model.graph
    found: set[TensorRef] = set()
    waiting = [parameter.gradient for parameter in graph.parameters if parameter.gradient is not None]
    while waiting:
        ref = waiting.pop()
        found.add(ref)
        if graph.nodes[ref.node].role is Role.GRADIENT_SUM:
            waiting += graph.nodes[ref.node].tensor_inputs
    return found


def _views(model: UnitModel) -> dict[TensorRef, TensorRef]:
    """What each view of the unit, forward and backward, is a view of."""
    nodes = ((i, model.graph.nodes[i]) for i in sorted(model.nodes))
    return {
        TensorRef(index, output): node.tensor_inputs[0]
        for index, node in nodes
        if node.role is Role.OPERATOR and node.kernel is Kernel.VIEW and node.tensor_inputs
        for output in range(len(node.outputs))
    }


def _goes_back(model: UnitModel, index: int) -> bool:
    node = model.graph.nodes[index]
    return node.phase is Phase.BACKWARD and node.role in (Role.OPERATOR, Role.GRADIENT_SUM)


def _arrives(model: UnitModel, ref: TensorRef) -> bool:
    node = model.graph.nodes[ref.node]
    return node.phase is Phase.BACKWARD and node.role is not Role.CONSTANT and ref.node not in model.nodes


def _base(owner: Mapping[TensorRef, TensorRef], ref: TensorRef) -> TensorRef:
    while ref in owner:
        ref = owner[ref]
    return ref
