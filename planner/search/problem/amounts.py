"""Seconds and bytes of a stage as one row of numbers: taken down once, worked out for many meshes and batches at once.

What the operators of a network take on a mesh depends on the axes' sizes, the links that they use and the
micro-batch; which operators, messages and tensors there are, and how a state divides them, does not. `AmountLedger`
takes the latter down and numbers every amount; `Amounts` works all of them out, a row for each `MeshCase`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import cast_sizes, stored_elements, traffic_sizes
from planner.graph.kernel_shapes import kernel_shape
from planner.graph.operator_graph import Node, TensorRef, TensorSpec
from planner.search.problem.amount_rows import Kernels, Messages, Scaled
from planner.search.problem.costs import MeshCosts, needs_mask
from planner.search.problem.parts import Parts
from planner.search.problem.states import States
from planner.search.problem.variables import Edge, Move
from planner.sharding.inner_messages import bytes_of_sums, inner_messages, of_channels, sent_bytes, summing
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.redistribution import StepTable, placement_index, step_table
from planner.sharding.rule_notation import Rule
from simulator.program import SUMMED_CLASS, Kernel

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
NOTHING = -1
"""Number of an amount that is zero."""
_WORK, _WAIT, _MOVE, _BYTES, _EXCESS, _CALLS_INSIDE, _CALLS = range(7)
_KINDS = 7


@dataclass(frozen=True, slots=True, eq=False)
class MeshCase:
    """One mesh, with times of its messages, at one batch."""

    costs: MeshCosts
    batch: int

    @property
    def key(self) -> tuple[int, int]:
        """Equal for equal cases of one `StageDecisions`."""
        return id(self.costs), self.batch


@dataclass(frozen=True, slots=True, eq=False)
class Redistributions:
    """Ways of a tensor between placements, arrays of one shape.

    Numbers of the amounts of their messages, and of their slices and masks, and where there is no way.
    """

    messages: IntArray
    copies: IntArray
    impossible: NDArray[np.bool_]


@dataclass(slots=True)
class _Cells:
    """Ways of tensors between placements: numbers of the messages, or of the copies, of each, (cells, steps)."""

    steps: list[IntArray] = field(default_factory=list)
    count: int = 0


class AmountLedger:
    """Numbers amounts as they are asked for; equal ones have one number.

    Parameters
    ----------
    parts : Parts
        Gives states; its graph the sizes, which grow with the batch from there.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts, self.graph = parts, parts.graph
        self.axes = len(parts.sizes)
        self.kernels = Kernels()
        self.messages = Messages()
        self.bytes = Scaled()
        self._excesses: dict[tuple[int, int], int] = {}
        self._excess_of: dict[tuple[int, int, Move], IntArray] = {}
        self._byte_numbers: dict[tuple[float, int, int], int] = {}
        self._seconds: dict[tuple[int, int], tuple[IntArray, IntArray]] = {}
        self._halves: dict[tuple[int, int], IntArray] = {}
        self._moves: dict[tuple[object, ...], Redistributions] = {}
        self._barred: dict[tuple[object, ...], NDArray[np.bool_]] = {}
        self._slots: dict[tuple[int, int, int, bool], tuple[int, int]] = {}
        self._cells = _Cells()

    # Bytes

    def bytes_of(self, tensor: TensorRef, placements: IntArray) -> IntArray:
        """Bytes of one rank's piece of a tensor by state; `placements` have shape (axes, states)."""
        spec = self.graph.spec(tensor)
        return self._pieces(float(spec.size_bytes), _growth(spec), axes_of(placements))

    def elements_of(self, tensor: TensorRef, placements: IntArray) -> IntArray:
        """Elements of one rank's piece of a tensor, as `bytes_of`."""
        return self._pieces(stored_elements(self.graph, tensor), _growth(self.graph.spec(tensor)), axes_of(placements))

    def elements(self, states: States) -> IntArray:
        """Local elements of a parameter in each state."""
        ref = TensorRef(states.variable.nodes[0])
        return self.elements_of(ref, states.placements(ref, reads=False))

    def excess(self, edge: Edge, move: Move) -> IntArray:
        """By how many elements a tensor is larger as it is written than as it is read, nothing where it is not.

        Shape (states of the writer, states of the reader).
        """
        key = self._ends(edge, move)
        if key not in self._excess_of:
            source, target = self.parts.states(edge.source), self.parts.states(edge.target)
            written = self.elements_of(edge.tensor, source.placements(edge.tensor, reads=False)) // _KINDS
            read = self.elements_of(edge.tensor, target.placements(edge.tensor, reads=True)) // _KINDS
            (rows, row), (columns, column) = (np.unique(ends, return_inverse=True) for ends in (written, read))
            table = np.array([[self._excess(here, there) for there in columns.tolist()] for here in rows.tolist()])
            self._excess_of[key] = table[row[:, None], column[None, :]]
        return self._excess_of[key]

    def _excess(self, here: int, there: int) -> int:
        if here == there:
            return NOTHING
        return int(_coded(self._excesses.setdefault((here, there), len(self._excesses)), _EXCESS))

    def _ends(self, edge: Edge, move: Move) -> tuple[int, int, Move]:
        """Which tensor of which kinds of variables an edge is about, and how that moves."""
        return self.parts.states(edge.source).kind, self.parts.states(edge.target).kind, move

    def _pieces(self, whole: float, growth: int, axes: IntArray) -> IntArray:
        numbers = np.full(1 << self.axes, NOTHING, dtype=np.int64)
        for mask in dict.fromkeys(axes.tolist()):
            key = (whole, growth, mask)
            if key not in self._byte_numbers:
                self._byte_numbers[key] = len(self._byte_numbers)
                self.bytes.add(whole, growth, np.array([mask]))
            numbers[mask] = _coded(self._byte_numbers[key], _BYTES)
        return np.asarray(numbers[axes])

    # Seconds of operators

    def seconds(self, states: States, position: int) -> tuple[IntArray, IntArray]:
        """Seconds of the `position`-th node of a variable by state: all of them, and the collectives inside it."""
        key = (states.kind, position)
        if key not in self._seconds:
            rows = self._node(states, position)
            self._seconds[key] = _coded(rows, _WORK), _coded(rows, _WAIT)
        return self._seconds[key]

    def calls_inside(self, states: States, position: int) -> IntArray:
        """Launches of the collectives inside the `position`-th node of a variable by state."""
        return self.seconds(states, position)[1] + (_CALLS_INSIDE - _WAIT)

    def half_seconds(self, states: States, position: int) -> IntArray:
        """Seconds of either half of the `position`-th node of a variable by state (`planner.cost.work.in_halves`).

        Each does half of the operations, and reads what both read or as much as it writes.
        """
        key = (states.kind, position)
        if key not in self._halves:
            node = self.parts.node(states, position)
            inputs, outputs = len(node.tensor_inputs), len(node.outputs)
            sizes = [*traffic_sizes(self.graph, node)[:inputs], *(0.0 for _ in range(outputs))]
            rules = [choice.rules[position] for choice in states.variable.choices]
            ports = self._ports(states, node, rules)
            self._halves[key] = _coded(self._kernel_rows(states, node, rules, ports, sizes, 0.5), _WORK)
        return self._halves[key]

    def _ports(self, states: States, node: Node, rules: Sequence[Rule]) -> list[IntArray]:
        """Masks of the axes that cut each input and each output, by state."""
        ports = [_masks(states, np.array([r.inputs[i] >= 0 for r in rules])) for i in range(len(node.tensor_inputs))]
        ports += [_masks(states, np.array([r.outputs[i] >= 0 for r in rules])) for i in range(len(node.outputs))]
        return ports

    def _kernel_rows(
        self,
        states: States,
        node: Node,
        rules: Sequence[Rule],
        ports: Sequence[IntArray],
        sizes: Sequence[float],
        part: float = 1.0,
    ) -> IntArray:
        """Add a node's kernels, or a part of their operations, which move so many bytes at each port; their rows."""
        work = _masks(states, np.array([rule.splits_work for rule in rules]))
        grows = [_growth(spec) for spec in (*map(self.graph.spec, node.tensor_inputs), *node.outputs)]
        flops = (part * node.flops, int(any(grows)))
        moved = [] if node.timed_as is Kernel.VIEW else list(zip(sizes, grows, strict=True))
        shape, rows = kernel_shape(self.graph, node), np.zeros(len(work), dtype=np.int64)
        for kernel, chosen in _classes(states, node, rules):
            cut = [axes[chosen] for axes in ports]
            rows[chosen] = self.kernels.add((kernel, node.kernel_dtype), flops, work[chosen], moved, cut, shape)
        return rows

    def _node(self, states: States, position: int) -> IntArray:
        node = self.parts.node(states, position)
        rules = [choice.rules[position] for choice in states.variable.choices]
        ports = self._ports(states, node, rules)
        rows = self._kernel_rows(states, node, rules, ports, traffic_sizes(self.graph, node))
        specs = (*(self.graph.spec(ref) for ref in node.tensor_inputs), *node.outputs)
        grows, dtype = [_growth(spec) for spec in specs], node.outputs[0].dtype
        if node.product_dtype:
            casts = cast_sizes(self.graph, node)
            narrow = [(size, grows[place]) for place, size in casts]
            nothing = np.zeros_like(rows)
            made = self.kernels.add(
                (Kernel.ELEMENTWISE, dtype), (0.0, 0), nothing, narrow, [ports[place] for place, _ in casts], None
            )
            self.kernels.before.append((rows, made))
        for number, rule in enumerate(rules):
            for message in inner_messages(rule):
                sent = [(sent_bytes(specs[i], message), grows[i], ports[i]) for i in message.tensors]
                if message.elements:
                    sent.append((float(bytes_of_sums(node, message.elements)), 0, ports[of_channels(node)]))
                for axis in range(self.axes):
                    chosen = np.flatnonzero(states.choice[axis] == number)
                    if not len(chosen):
                        continue
                    cut_by = ~(1 << axis) if message.uncut else ~0
                    parts = [(size, growth, axes[chosen] & cut_by) for size, growth, axes in sent]
                    self.messages.add(message, axis, rows[chosen], parts)
        return rows

    # Seconds of messages between operators

    def handing_back(self, states: States) -> Redistributions:
        """How a station turns the summed gradient into what it hands back, shape (states,)."""
        handed = self.parts.handed_back(states)
        if handed is None:
            nothing = np.full(len(states), NOTHING, dtype=np.int64)
            return Redistributions(nothing, nothing, np.zeros(len(states), dtype=np.bool_))
        return self._ways(*handed, masked=False, fused=False)

    def impossible(self, edge: Edge, move: Move) -> NDArray[np.bool_]:
        """Where `moves` has no way, shape (states, states)."""
        key = self._ends(edge, move)
        if key not in self._barred:
            rank = len(self.graph.spec(edge.tensor).shape)
            written, read = self.parts.ends(edge)
            ways = (written[:, None], read[None, :])
            impossible = ~step_table(rank, self.axes).possible[ways]
            self._barred[key] = impossible if move[3] else impossible | needs_mask(rank, self.axes)[ways]
        return self._barred[key]

    def moves(self, edge: Edge, move: Move) -> Redistributions:
        """The ways from each state of an edge's writer to each of its reader, shape (states, states)."""
        key = self._ends(edge, move)
        if key not in self._moves:
            source, target = self.parts.states(edge.source), self.parts.states(edge.target)
            _, _, fused, masked = move
            here, there = source.placements(edge.tensor, reads=False), target.placements(edge.tensor, reads=True)
            self._moves[key] = self._between(edge.tensor, here, there, masked=masked, fused=fused)
        return self._moves[key]

    def _between(
        self, tensor: TensorRef, here: IntArray, there: IntArray, *, masked: bool, fused: bool
    ) -> Redistributions:
        """The ways from each of some placements to each of others; those of tensors of one size are the same."""
        spec = self.graph.spec(tensor)
        key = (len(spec.shape), spec.size_bytes, _growth(spec), here.tobytes(), there.tobytes(), masked, fused)
        if key not in self._moves:
            shape = (here.shape[1], there.shape[1])
            flat = self._ways(
                tensor, np.repeat(here, shape[1], 1), np.tile(there, shape[0]), masked=masked, fused=fused
            )
            self._moves[key] = Redistributions(
                flat.messages.reshape(shape), flat.copies.reshape(shape), flat.impossible.reshape(shape)
            )
        return self._moves[key]

    def _ways(
        self, tensor: TensorRef, before: IntArray, after: IntArray, *, masked: bool, fused: bool
    ) -> Redistributions:
        """Number the ways of a tensor from placements to others, all of shape (axes, ways)."""
        spec = self.graph.spec(tensor)
        rank = len(spec.shape)
        steps = _steps(rank, before.shape, before.tobytes(), after.tobytes(), masked)
        messages, copies = self._first_slots(rank, spec, fused, step_table(rank, self.axes))
        return Redistributions(
            self._numbered(steps.sent, steps.messages, messages),
            self._numbered(steps.copied, steps.copies, copies),
            steps.impossible,
        )

    def _numbered(self, moved: NDArray[np.bool_], slots: IntArray, first: int) -> IntArray:
        """Number sums of slots, (moved, steps), which count from the `first`; NOTHING for ways that are not moved."""
        numbers = np.full(len(moved), NOTHING, dtype=np.int64)
        if len(slots):
            numbers[moved] = np.arange(self._cells.count, self._cells.count + len(slots)) * _KINDS + _MOVE
            self._cells.steps.append(np.where(slots >= 0, slots + first, 0))
            self._cells.count += len(slots)
        return numbers

    def _first_slots(self, rank: int, spec: TensorSpec, fused: bool, table: StepTable) -> tuple[int, int]:
        """Numbers of a tensor's first message and of its first copy; those of all kinds of steps follow each other."""
        size, growth = float(spec.size_bytes), _growth(spec)
        key = (rank, spec.size_bytes, growth, fused)
        if key not in self._slots:
            messages = self.messages.slots(table.kinds, size, growth, fused)
            self._slots[key] = messages, self.messages.copies(table.pieces, size, growth)
        return self._slots[key]

    def amounts(self) -> Amounts:
        """All that was taken down; nothing may be added afterwards."""
        longest = max((steps.shape[1] for steps in self._cells.steps), default=1)
        steps = np.zeros((self._cells.count, longest), dtype=np.int64)
        place = 0
        for cells in self._cells.steps:
            steps[place : place + len(cells), : cells.shape[1]] = cells
            place += len(cells)
        excesses = np.array([*self._excesses], dtype=np.int64).reshape(-1, 2)
        return Amounts(self, steps, excesses)


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Steps of many ways: which of them take messages, and copies, (ways,), and which ones, from 0 and −1 for none."""

    sent: NDArray[np.bool_]
    messages: IntArray
    copied: NDArray[np.bool_]
    copies: IntArray
    impossible: NDArray[np.bool_]


@lru_cache(maxsize=4096)
def _steps(rank: int, shape: tuple[int, int], before: bytes, after: bytes, masked: bool) -> _Steps:
    """Steps of the ways of a tensor of some rank between placements, numbers of `shape` (axes, ways)."""
    here, there = (np.frombuffer(ends, dtype=np.int64).reshape(shape) for ends in (before, after))
    table = step_table(rank, shape[0])
    ends = placement_index(here, rank), placement_index(there, rank)
    impossible = ~table.possible[ends]
    if not masked:
        impossible |= ((here == REPLICATE) & (there == PARTIAL)).any(axis=0)

    def taken(steps: IntArray, count: int) -> tuple[NDArray[np.bool_], IntArray]:
        known = steps < count
        moved = known.any(axis=1) & ~impossible
        return moved, np.where(known, steps, -1)[moved]

    sent, messages = taken(table.steps[ends], len(table.kinds))
    copied, copies = taken(table.copies[ends], len(table.pieces))
    return _Steps(sent, messages, copied, copies, impossible)


class Amounts:
    """The amounts of a ledger, worked out for any cases."""

    def __init__(self, ledger: AmountLedger, steps: IntArray, excesses: IntArray) -> None:
        self._kernels, self._messages, self._bytes = ledger.kernels, ledger.messages, ledger.bytes
        self._steps, self._excesses = steps, excesses
        self._batch, self._axes = ledger.graph.batch_size, ledger.axes
        kernels = len(self._kernels)
        counts = (kernels, kernels, len(steps), len(self._bytes), len(excesses), kernels, len(steps))
        self._offsets = np.cumsum([0, *counts])
        self._kernels.close()
        self._messages.close()
        self._bytes.close()

    def numbers(self, coded: IntArray) -> IntArray:
        """Columns of `values` of what a ledger numbered."""
        return np.asarray(coded // _KINDS + self._offsets[coded % _KINDS])

    def values(self, cases: Sequence[MeshCase]) -> FloatArray:
        """Every amount of each case, shape (cases, amounts); cases are of one cluster and have the same axes.

        Those may be fewer than the ledger's: what is about the others is not to be read.
        """
        ratio = np.array([case.batch / self._batch for case in cases])
        share = np.array([_shares((*case.costs.mesh.sizes, *(1,) * self._axes)[: self._axes]) for case in cases])
        work_s = self._kernels.seconds([case.costs for case in cases], ratio, share)
        inside_s, sent_s = np.zeros_like(work_s), np.zeros((len(cases), self._messages.count))
        calls_inside, calls = np.zeros_like(inside_s), np.zeros_like(sent_s)
        for costs, rows in _by_mesh(cases):
            inside_s[rows], calls_inside[rows] = self._messages.waits(costs, ratio[rows], share[rows], work_s[rows])
            calls[rows] = self._messages.calls(costs)
            sent_s[rows] = self._messages.seconds(costs, ratio[rows], share[rows])
        moves_s = sent_s[:, self._steps].sum(axis=-1)
        pieces = self._bytes.values(ratio, share)
        more = np.maximum(pieces[:, self._excesses[:, 0]] - pieces[:, self._excesses[:, 1]], 0.0)
        moves = calls[:, self._steps].sum(axis=-1)
        return np.concatenate([work_s + inside_s, inside_s, moves_s, pieces, more, calls_inside, moves], axis=1)


def _by_mesh(cases: Sequence[MeshCase]) -> list[tuple[MeshCosts, list[int]]]:
    found: dict[int, tuple[MeshCosts, list[int]]] = {}
    for row, case in enumerate(cases):
        found.setdefault(id(case.costs), (case.costs, []))[1].append(row)
    return list(found.values())


def _shares(sizes: Sequence[int]) -> list[float]:
    """What is left of a tensor that the axes of each mask cut."""
    return [1.0 / prod(s for a, s in enumerate(sizes) if mask >> a & 1) for mask in range(1 << len(sizes))]


def axes_of(placements: IntArray) -> IntArray:
    """Masks of the axes that cut a tensor, by state: axis a is bit a. `placements` have shape (axes, states)."""
    weights = 1 << np.arange(len(placements), dtype=np.int64)
    return np.asarray(weights @ (placements >= 0), dtype=np.int64)


def _masks(states: States, cuts: NDArray[np.bool_]) -> IntArray:
    """Masks of the axes whose choice cuts, by state."""
    weights = 1 << np.arange(len(states.choice), dtype=np.int64)
    return np.asarray(weights @ cuts[states.choice], dtype=np.int64)


def _classes(states: States, node: Node, rules: Sequence[Rule]) -> list[tuple[Kernel, IntArray]]:
    """Classes of an operator's kernel, each with the numbers of the states in which it is of that class."""
    usual = node.timed_as
    among = SUMMED_CLASS.get(usual, usual)
    if among is usual:
        return [(usual, np.arange(len(states)))]
    summed = summing(rules)[states.choice].any(axis=0)
    found = ((usual, np.flatnonzero(~summed)), (among, np.flatnonzero(summed)))
    return [(kernel, chosen) for kernel, chosen in found if len(chosen)]


def calls_of(messages: IntArray) -> IntArray:
    """Launches of the messages of `Redistributions`."""
    return np.where(messages == NOTHING, NOTHING, messages + (_CALLS - _MOVE))


def _growth(spec: TensorSpec) -> int:
    """How many dims grow with the batch."""
    return sum(spec.batch_dims)


def _coded(numbers: IntArray | int, kind: int) -> IntArray:
    return np.asarray(numbers, dtype=np.int64) * _KINDS + kind
