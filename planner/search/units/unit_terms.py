"""What the tables of one unit add up: for each entry of each part the numbers of its amounts, on every mesh alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import Role, TensorRef
from planner.graph.recompute import MODES
from planner.search.problem.amounts import NOTHING, AmountLedger, Redistributions, calls_of
from planner.search.problem.parts import Parts, has_partial
from planner.search.problem.states import States
from planner.search.problem.variables import Edge, Kind, Move
from planner.search.units.records import Scope, TablePart
from planner.search.units.unit_model import UnitModel
from planner.sharding.placement import REPLICATE
from simulator.program import Kernel, Phase

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class UnitTerms:
    """Tables of one unit, one behind the other, as sums of amounts that a ledger numbers.

    Table s has a dim for each variable of ``scopes[s]`` and begins at entry ``starts[s]`` of ``entries``. Amount
    ``amounts[i]`` is added to part ``parts[i]`` of entry ``places[i]``. ``forbidden`` has shape (entries,).
    """

    sizes: Mapping[int, int]
    scopes: tuple[Scope, ...]
    starts: tuple[int, ...]
    entries: int
    parts: IntArray
    places: IntArray
    amounts: IntArray
    forbidden: BoolArray

    def at(self, states: Mapping[int, int]) -> UnitTerms:
        """The same with a single state of each variable."""
        chosen = []
        for scope, start in zip(self.scopes, self.starts, strict=True):
            place = 0
            for v in scope:
                place = place * self.sizes[v] + states[v]
            chosen.append(start + place)
        number = np.full(self.entries, -1, dtype=np.int64)
        number[chosen] = np.arange(len(chosen))
        kept = number[self.places] >= 0
        return UnitTerms(
            sizes=dict.fromkeys(self.sizes, 1),
            scopes=self.scopes,
            starts=tuple(range(len(chosen))),
            entries=len(chosen),
            parts=self.parts[kept],
            places=number[self.places[kept]],
            amounts=self.amounts[kept],
            forbidden=self.forbidden[chosen],
        )


def unit_terms(model: UnitModel, ledger: AmountLedger, *, decided: bool = True) -> UnitTerms:
    """Take down what the parts of one unit are made of; unless `decided`, without what only single states make up."""
    return _TermBuilder(model, ledger, decided=decided).build()


class _TermBuilder:
    def __init__(self, model: UnitModel, ledger: AmountLedger, *, decided: bool) -> None:
        self.model, self.ledger, self.decided = model, ledger, decided
        self.parts: Parts = ledger.parts
        self.tables: dict[Scope, int] = {}
        self.entries = 0
        self.charges: list[tuple[tuple[int, ...], int, IntArray]] = []
        self.forbidden: list[tuple[Scope, BoolArray]] = []
        ends = [v for v in (model.entry, model.exit) if v is not None]
        self.members = (*model.variables, *ends, *model.shared)
        self.sizes = {v: len(self.parts.states(v)) for v in self.members}

    def build(self) -> UnitTerms:
        model = self.model
        for number in self.members:
            self._table((number,))
        ends = () if model.entry is None else (model.entry,)
        for number in (*model.variables, *sorted(model.first), *ends):
            if self._counts(number):
                self._variable(number)
        for edge, move in model.edges:
            if self._counts(edge.source, edge.target):
                self._edge(edge, move)
            else:
                self._barred_edge(edge, move)
        self._keep_all()
        for mode in (1, 2):
            self._keep_some(mode)
        forbidden = np.zeros(self.entries, dtype=np.bool_)
        for scope, where in self.forbidden:
            start = self.tables[scope]
            forbidden[start : start + where.size] |= where.ravel()
        parts, places, amounts = self._terms()
        return UnitTerms(
            sizes=self.sizes,
            scopes=tuple(self.tables),
            starts=tuple(self.tables.values()),
            entries=self.entries,
            parts=parts,
            places=places,
            amounts=amounts,
            forbidden=forbidden,
        )

    def _counts(self, *variables: int | None) -> bool:
        """Whether what some variables make up is taken down: all of it, or where one of them has several states."""
        return self.decided or any(self.sizes.get(v, 0) > 1 for v in variables if v is not None)

    def _table(self, scope: Scope) -> int:
        """Where a table begins."""
        if scope not in self.tables:
            self.tables[scope] = self.entries
            size = 1
            for v in scope:
                size *= self.sizes[v]
            self.entries += size
        return self.tables[scope]

    def _charge(self, parts: tuple[int, ...], scope: Scope, amounts: IntArray) -> None:
        """Add to some parts; pairs are stored with the lower variable first, and none is made up of unread states."""
        if len(scope) == 2 and scope[0] > scope[1]:
            scope, amounts = scope[::-1], amounts.T
        if len(scope) == 1 or scope in self.tables:
            self.charges.append((parts, self.tables[scope], amounts.ravel()))

    def _terms(self) -> tuple[IntArray, IntArray, IntArray]:
        """Part, place and amount of all that was charged, one for each part of a charge."""
        if not self.charges:
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing, nothing
        amounts = np.concatenate([charged for _, _, charged in self.charges])
        lengths = np.array([len(charged) for _, _, charged in self.charges])
        begins = np.cumsum(lengths) - lengths
        first = np.array([start for _, start, _ in self.charges])
        kept = np.flatnonzero(amounts != NOTHING)
        charge = np.repeat(np.arange(len(lengths)), lengths)[kept]
        places = kept + (first - begins)[charge]
        # One charge may be for several parts.
        widest = max(len(parts) for parts, _, _ in self.charges)
        listed = np.array([(*parts, *(-1,) * (widest - len(parts))) for parts, _, _ in self.charges])[charge]
        row, column = np.nonzero(listed >= 0)
        return listed[row, column], places[row], amounts[kept][row]

    def _variable(self, number: int) -> None:
        states = self.parts.states(number)
        variable = states.variable
        if variable.kind is Kind.INPUT:
            return
        if variable.kind is Kind.PARAMETER:
            part, elements = self._elements_part(states), self.ledger.elements(states)
            if variable.nodes[0] not in self.model.graph.trained:
                self._charge((TablePart.FROZEN,), (number,), elements)
                return
            self._charge((TablePart.ELEMENTS,), (number,), np.where(part, NOTHING, elements))
            self._charge((TablePart.EXPERT_ELEMENTS,), (number,), np.where(part, elements, NOTHING))
            return
        for position, index in enumerate(variable.nodes):
            total, inside = self.ledger.seconds(states, position)
            forward = self.model.graph.nodes[index].phase is Phase.FORWARD
            again = [mode for mode, name in enumerate(MODES) if index in self.model.again[name].nodes]
            own = TablePart.FORWARD if forward else TablePart.BACKWARD
            waits = TablePart.FORWARD_COMMUNICATION if forward else TablePart.BACKWARD_COMMUNICATION
            late = (TablePart.LATE,) if index in self.model.late else ()
            if index in self.model.halved:
                self._charge((TablePart.LATE,), (number,), self.ledger.half_seconds(states, position))
            self._charge((own, *late, *(TablePart.AGAIN + mode for mode in again)), (number,), total)
            self._charge((waits, *(TablePart.AGAIN_COMMUNICATION + mode for mode in again)), (number,), inside)
            called = (
                TablePart.FORWARD_CALLS if forward else TablePart.BACKWARD_CALLS,
                *(TablePart.AGAIN_CALLS + m for m in again),
            )
            self._charge(called, (number,), self.ledger.calls_inside(states, position))
        if variable.kind is Kind.STATION:
            back = self.ledger.handing_back(states)
            self._forbid((number,), back.impossible)
            self._charge((TablePart.BACKWARD, TablePart.BACKWARD_COMMUNICATION), (number,), back.messages)
            self._charge((TablePart.BACKWARD_CALLS,), (number,), calls_of(back.messages))
            self._charge((TablePart.BACKWARD,), (number,), back.copies)

    def _elements_part(self, states: States) -> BoolArray:
        """States in which the expert axis shards a parameter."""
        placed = states.placements(TensorRef(states.variable.nodes[0]), reads=False)
        found = np.zeros(len(states), dtype=np.bool_)
        for name, row in zip(self.parts.names, placed, strict=True):
            found |= (row != REPLICATE) & (name == "expert")
        return found

    def _forbid(self, scope: Scope, where: BoolArray) -> None:
        if where.any():
            self.forbidden.append((scope, where))

    def _barred_edge(self, edge: Edge, move: Move) -> None:
        """Take down of an edge whether there is a way at all."""
        scope = (min(edge.source, edge.target), max(edge.source, edge.target))
        self._table(scope)
        self._forbid(scope, self.ledger.impossible(edge, move))

    def _edge(self, edge: Edge, move: Move) -> None:
        ways = self.ledger.moves(edge, move)
        impossible = ways.impossible
        scope = (edge.source, edge.target)
        turned = scope if scope[0] < scope[1] else scope[::-1]
        self._table(turned)
        self._forbid(turned, impossible if turned == scope else impossible.T)
        node = self.model.graph.nodes[edge.tensor.node]
        if move[2]:
            self._once_a_step(edge, move, ways, gathers=node.role is Role.PARAMETER)
            return
        if node.phase is Phase.BACKWARD:
            self._charge((TablePart.BACKWARD, TablePart.BACKWARD_COMMUNICATION), scope, ways.messages)
            self._charge((TablePart.BACKWARD_CALLS,), scope, calls_of(ways.messages))
            self._charge((TablePart.BACKWARD,), scope, ways.copies)
            return
        self._charge((TablePart.FORWARD, TablePart.FORWARD_COMMUNICATION), scope, ways.messages)
        self._charge((TablePart.FORWARD_CALLS,), scope, calls_of(ways.messages))
        self._charge((TablePart.FORWARD,), scope, ways.copies)
        for mode in (1, 2):
            again = self._moved_again(edge, mode)
            if again is not None:
                sent, copied = (np.where(again, numbers, NOTHING) for numbers in (ways.messages, ways.copies))
                self._charge((TablePart.AGAIN + mode, TablePart.AGAIN_COMMUNICATION + mode), scope, sent)
                self._charge((TablePart.AGAIN_CALLS + mode,), scope, calls_of(sent))
                self._charge((TablePart.AGAIN + mode,), scope, copied)

    def _once_a_step(self, edge: Edge, move: Move, ways: Redistributions, *, gathers: bool) -> None:
        """Charge messages and copies once a step: which gather parameters, and what stands besides the stored parts."""
        scope = (edge.source, edge.target)
        if gathers:
            read = self.ledger.elements_of(
                edge.tensor, self.parts.states(edge.target).placements(edge.tensor, reads=True)
            )
            self._charge((TablePart.STEP, TablePart.GATHER), scope, ways.messages)
            self._charge((TablePart.CUT_LAST,), scope, ways.copies)
            self._charge((TablePart.GATHERED,), scope, np.where(ways.messages == NOTHING, NOTHING, read[None, :]))
            return
        self._charge((TablePart.STEP,), scope, ways.messages)
        # The data axis scatters a dim of its own where there is one, else the dim that is cut here afterwards.
        last = len(self.model.graph.spec(edge.tensor).shape) == 1
        self._charge((TablePart.CUT_LAST if last else TablePart.CUT,), scope, ways.copies)
        self._charge((TablePart.UNSUMMED,), scope, self.ledger.excess(edge, move))

    def _moved_again(self, edge: Edge, mode: int) -> BoolArray | None:
        """Where a forward tensor is moved again: a column over the writer's states, None where it never is.

        What is kept waits as its operator wrote it, partial sums once they are added up.
        """
        again = self.model.again[MODES[mode]]
        readers = again.readers.get(edge.tensor, frozenset[int]())
        if self.model.graph.nodes[edge.tensor.node].role is not Role.OPERATOR:
            return None
        to_station = self.parts.station_of.get(edge.tensor) == edge.target
        if not (readers if to_station else edge.target in readers):
            return None
        from_station = self.parts.station_of.get(edge.tensor) == edge.source
        if edge.tensor.node in again.nodes or from_station:
            return np.ones((self.sizes[edge.source], 1), dtype=np.bool_)
        written = self.parts.states(edge.source).placements(edge.tensor, reads=False)
        return ~has_partial(written)[:, None]

    def _keep_all(self) -> None:
        """Charge what is kept without recomputation; what another mode computes again stands for a while there."""
        model = self.model
        for ref, readers in model.saved.items():
            owner = model.decisions.of_node[ref.node] if ref != model.entry_tensor else None
            owner = owner if owner in self.sizes else None
            if not self._counts(owner, model.exit, self.parts.station_of.get(ref), *readers):
                continue
            if ref == model.exit_tensor and model.read_behind and model.exit is not None and owner is not None:
                # The next unit keeps it too: it counts here where that keeps it in another placement.
                there, here = self._numbers(ref, model.exit), self._numbers(ref, owner)
                size = self._written(ref, owner)
                differs = here[:, None] != there[None, :]
                self._keep(ref, (owner, model.exit), np.where(differs, size[:, None], NOTHING))
                continue
            for scope, size in self._saved(ref, readers, owner):
                self._keep(ref, scope, size)
        for base, ref, writer, reader in dict.fromkeys(model.copies):
            if writer not in self.sizes or reader not in self.sizes or writer == reader:
                continue
            # A view that is moved again after it was taken stands beside what it views.
            here, there = self._numbers(ref, writer), self._numbers(ref, reader, reads=True)
            size = np.where(here[:, None] != there[None, :], self._read(ref, reader)[None, :], NOTHING)
            self._keep(base, (writer, reader), size)

    def _saved(self, ref: TensorRef, readers: frozenset[int], owner: int | None) -> Iterator[tuple[Scope, IntArray]]:
        """Amounts of keeping a tensor for the backward operators of a unit.

        A view that repeats numbers keeps only those, until a reader wants it in another placement.
        """
        base = self._repeated(ref)
        for scope, placements, differs in self.parts.saved_pieces(ref, readers, owner):
            size = self.ledger.bytes_of(ref, placements)
            if differs is not None:
                yield scope, np.where(differs, size[None, :], NOTHING)
            elif base is None or owner is None:
                yield scope, size
            elif scope == (owner,):
                yield scope, self._read(base, owner)
            else:
                same = self._numbers(ref, owner)[:, None] == self._numbers(ref, scope[0], reads=True)[None, :]
                yield (owner, *scope), np.where(same, self._read(base, owner)[:, None], size[None, :])

    def _repeated(self, ref: TensorRef) -> TensorRef | None:
        """What a tensor views and repeats, if it does."""
        node = self.model.graph.nodes[ref.node]
        if node.kernel is not Kernel.VIEW or not node.tensor_inputs:
            return None
        base, graph = node.tensor_inputs[0], self.model.graph
        owner = self.model.decisions.of_node[ref.node]
        if owner not in self.sizes or base not in self.parts.states(owner).variable.choices[0].reads:
            return None
        return base if graph.spec(base).size_bytes < graph.spec(ref).size_bytes else None

    def _keep(self, ref: TensorRef, scope: Scope, size: IntArray) -> None:
        """Charge bytes of a tensor that is kept, and that stands for a while where it is computed again instead."""
        again = [mode for mode in (1, 2) if ref.node in self.model.again[MODES[mode]].nodes]
        passing = again if ref != self.model.entry_tensor else []
        self._charge((TablePart.KEPT, *(TablePart.TRANSIENT + mode for mode in passing)), scope, size)

    def _numbers(self, ref: TensorRef, number: int, *, reads: bool = False) -> IntArray:
        return self.parts.states(number).numbers(ref, len(self.model.graph.spec(ref).shape), reads=reads)

    def _written(self, ref: TensorRef, number: int) -> IntArray:
        return self.ledger.bytes_of(ref, self.parts.states(number).placements(ref, reads=False))

    def _read(self, ref: TensorRef, number: int) -> IntArray:
        return self.ledger.bytes_of(ref, self.parts.states(number).placements(ref, reads=True))

    def _keep_some(self, mode: int) -> None:
        """Charge what waits for the backward pass in a mode that computes again."""
        model, stations = self.model, self.parts.station_of
        for ref in model.kept(MODES[mode]):
            station = stations.get(ref)
            owner = model.decisions.of_node[ref.node]
            if not self._counts(owner, station, *model.again[MODES[mode]].readers[ref]):
                continue
            if ref == model.entry_tensor:
                assert station is not None  # every boundary has one
                self._charge((TablePart.KEPT + mode,), (station,), self._written(ref, station))
                continue
            readers = sorted(model.again[MODES[mode]].readers[ref])
            written = self._written(ref, owner)
            if owner in readers or not readers or (station is None and len(readers) > 1):
                self._charge((TablePart.KEPT + mode,), (owner,), written)
                continue
            reader = readers[0] if station is None else station
            partial = has_partial(self.parts.states(owner).placements(ref, reads=False))
            size = np.where(partial[:, None], self._read(ref, reader)[None, :], written[:, None])
            self._charge((TablePart.KEPT + mode,), (owner, reader), size)
