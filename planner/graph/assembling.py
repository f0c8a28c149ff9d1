"""The graph of blocks of several kinds in any order, from one that was captured with a few blocks of each kind."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.graph.operator_graph import Argument, Node, OperatorGraph, Parameter, TensorRef
from planner.graph.unfolding import part_of

ENDS = 2
"""Blocks at each end of a list that keep their own graph: gradients may treat the first like no other."""


class _DifferError(Exception):
    """Blocks of one kind are not alike, or refer to more than their neighbours."""


def assembled(
    graph: OperatorGraph, prefix: str, kept: Sequence[int], kinds: Sequence[Hashable]
) -> OperatorGraph | None:
    """Write out all blocks of a list, each like a captured block of its kind.

    Parameters
    ----------
    graph
        Graph of the network with only some blocks of the list ``prefix``, unfolded.
    kept
        For each captured block its place among all; `ENDS` at each end and at least one of every kind between them.
    kinds
        The kind of every block of the whole list.

    Returns
    -------
    OperatorGraph or None
        None where captured blocks of one kind are not alike, where a block refers to one that is not its neighbour, or
        where something outside the list refers to a block other than those at the ends.
    """
    try:
        return _Assembly(graph, prefix, kept, kinds).graph()
    except _DifferError:
        return None


@dataclass(frozen=True, slots=True)
class _Home:
    """Where a node of the list stands: the number of its captured block, and its position in that."""

    block: int
    position: int


class _Assembly:
    """One list being written out.

    Neighbours know each other by what they hand over: the tensors of a block that the next reads, in order, and those
    that the block before reads. Every pair of neighbours hands over as many tensors of the same shapes.
    """

    def __init__(self, graph: OperatorGraph, prefix: str, kept: Sequence[int], kinds: Sequence[Hashable]) -> None:
        self.source, self.prefix, self.kept, self.kinds = graph, prefix, kept, kinds
        self.blocks: list[list[int]] = [[] for _ in kept]
        self.homes: dict[int, _Home] = {}
        for index, node in enumerate(graph.nodes):
            number = node.module.removeprefix(f"{prefix}.").partition(".")[0]
            if node.module.startswith(f"{prefix}.") and number.isdigit():
                block = self.blocks[int(number)]
                self.homes[index] = _Home(int(number), len(block))
                block.append(index)
        self.handed = {step: self._handed(step) for step in (1, -1)}
        self._check()
        places = {place: number for number, place in enumerate(kept)}
        inner = {kinds[place]: n for n, place in enumerate(kept) if ENDS <= place < len(kinds) - ENDS}
        self.like = [places[place] if place in places else inner[kind] for place, kind in enumerate(kinds)]

    def _handed(self, step: int) -> list[list[TensorRef]]:
        """What each block hands to the next (``step`` 1) or the one before (-1)."""
        found: list[dict[TensorRef, None]] = [{} for _ in self.blocks]
        for number, block in enumerate(self.blocks):
            for index in block:
                for ref in self.source.nodes[index].tensor_inputs:
                    home = self.homes.get(ref.node)
                    if home is not None and home.block == number - step:
                        found[home.block][ref] = None
        return [sorted(refs) for refs in found]

    def _check(self) -> None:
        for pairs in (self.handed[1][:-1], self.handed[-1][1:]):
            specs = {tuple(self.source.spec(ref) for ref in refs) for refs in pairs}
            if len(specs) > 1 or any(len(set(one)) < len(one) for one in specs):
                raise _DifferError  # two of one shape could be taken for each other
        alike: dict[Hashable, object] = {}
        for number, place in enumerate(self.kept):
            if ENDS <= place < len(self.kinds) - ENDS:
                template = self._template(number)
                if alike.setdefault(self.kinds[place], template) != template:
                    raise _DifferError(place)

    def _template(self, number: int) -> object:
        """Everything of a block but its place and its lines of code."""
        head = f"{self.prefix}.{number}"

        def named(ref: TensorRef) -> Argument:
            home = self.homes.get(ref.node)
            if home is None:
                return ("outside", *ref)
            step = number - home.block
            if not step:
                return ("own", home.position, ref.output)
            return ("handed", step, self._handed_over(step, home.block, ref))

        return [
            (
                *(
                    node.op,
                    node.role,
                    node.phase,
                    node.kernel,
                    node.outputs,
                    node.flops,
                    node.product_dtype,
                    node.moved,
                ),
                *(node.name.removeprefix(head), node.module.removeprefix(head)),
                *(_mapped(node.args, named), _mapped(node.kwargs, named)),
                None if node.forward is None else named(TensorRef(node.forward)),
            )
            for node in (self.source.nodes[index] for index in self.blocks[number])
        ]

    def _handed_over(self, step: int, block: int, ref: TensorRef) -> int:
        """Number of a tensor among those that a captured block hands to its neighbour."""
        if step not in self.handed or ref not in self.handed[step][block]:
            raise _DifferError(ref)
        return self.handed[step][block].index(ref)

    def graph(self) -> OperatorGraph:
        """Build the whole graph."""
        order = self._order()
        self.place = {key: index for index, key in enumerate(order)}
        return replace(
            self.source,
            nodes=tuple(self._copied(where, index) for where, index in order),
            parameters=tuple(self._parameters()),
            inputs=tuple(replace(item, node=self.place[-1, item.node]) for item in self.source.inputs),
            loss=self._seen(-1, self.source.loss),
        )

    def _order(self) -> list[tuple[int, int]]:
        """Place and captured node of every node; place -1 outside the list.

        Blocks that are not captured follow the nearest that is, in the forward pass the one before them and in the
        backward pass the one behind them, as long as nothing is read before it is there.
        """
        wanted: dict[tuple[int, int], tuple[int, int, int]] = {
            (-1, index): (index, 0, 0) for index in range(len(self.source.nodes)) if index not in self.homes
        }
        last = {
            (number, part_of(self.source.nodes[index])): index
            for number, block in enumerate(self.blocks)
            for index in block
        }
        for place, like in enumerate(self.like):
            before = max(number for number, at in enumerate(self.kept) if at <= place)
            behind = min(number for number, at in enumerate(self.kept) if at >= place)
            for index in self.blocks[like]:
                part = part_of(self.source.nodes[index])
                near, turn = (behind, len(self.like) - place) if part == "backward" else (before, 1 + place)
                captured = before == behind
                wanted[place, index] = (index, 0, 0) if captured else (last.get((near, part), index), turn, index)
        return self._sorted(wanted)

    def _sorted(self, wanted: dict[tuple[int, int], tuple[int, int, int]]) -> list[tuple[int, int]]:
        readers: dict[tuple[int, int], list[tuple[int, int]]] = {key: [] for key in wanted}
        waits: dict[tuple[int, int], int] = {}
        for key in wanted:
            read = set(self._read(*key))
            waits[key] = len(read)
            for other in read:
                readers[other].append(key)
        ready = [(wanted[key], key) for key, count in waits.items() if not count]
        heapq.heapify(ready)
        order = []
        while ready:
            _, key = heapq.heappop(ready)
            order.append(key)
            for reader in readers[key]:
                waits[reader] -= 1
                if not waits[reader]:
                    heapq.heappush(ready, (wanted[reader], reader))
        if len(order) < len(wanted):
            raise _DifferError
        return order

    def _read(self, place: int, index: int) -> Iterator[tuple[int, int]]:
        node = self.source.nodes[index]
        for ref in node.tensor_inputs:
            yield self._found(place, ref)[0]
        if node.forward is not None:
            yield self._found(place, TensorRef(node.forward))[0]

    def _found(self, place: int, ref: TensorRef) -> tuple[tuple[int, int], int]:
        """Place, captured node and output of what a node at a place of the whole refers to by `ref`."""
        home = self.homes.get(ref.node)
        if home is None:
            return (-1, ref.node), ref.output
        if place < 0:
            at = self.kept[home.block]
            if ENDS <= at < len(self.kinds) - ENDS:
                raise _DifferError(ref)
            return (at, ref.node), ref.output
        step = self.like[place] - home.block
        if not step:
            return (place, ref.node), ref.output
        there = place - step
        other = self.handed[step][self.like[there]][self._handed_over(step, home.block, ref)]
        return (there, other.node), other.output

    def _seen(self, place: int, ref: TensorRef) -> TensorRef:
        found, output = self._found(place, ref)
        return TensorRef(self.place[found], output)

    def _copied(self, place: int, index: int) -> Node:
        node = self.source.nodes[index]
        name = self._named(place)
        return replace(
            node,
            name=name(node.name),
            module=name(node.module),
            args=_mapped(node.args, lambda ref: self._seen(place, ref)),
            kwargs=_mapped(node.kwargs, lambda ref: self._seen(place, ref)),
            forward=None if node.forward is None else self._seen(place, TensorRef(node.forward)).node,
        )

    def _named(self, place: int) -> Callable[[str], str]:
        if place < 0:
            return str
        old, new = f"{self.prefix}.{self.like[place]}", f"{self.prefix}.{place}"
        return lambda text: new + text[len(old) :] if text.startswith((f"{old}.", f"{old}/")) or text == old else text

    def _parameters(self) -> Iterator[Parameter]:
        written = False
        for parameter in self.source.parameters:
            if parameter.node not in self.homes:
                yield self._parameter(-1, parameter)
            elif not written:
                written = True
                for place, like in enumerate(self.like):
                    for one in self.source.parameters:
                        if (home := self.homes.get(one.node)) is not None and home.block == like:
                            yield self._parameter(place, one)

    def _parameter(self, place: int, parameter: Parameter) -> Parameter:
        name = self._named(place)
        return Parameter(
            name=name(parameter.name),
            node=self.place[place, parameter.node],
            gradient=None if parameter.gradient is None else self._seen(place, parameter.gradient),
            aliases=tuple(map(name, parameter.aliases)),
        )


def _mapped(argument: Any, of: Callable[[TensorRef], Argument]) -> Any:
    if isinstance(argument, TensorRef):
        return of(argument)
    if isinstance(argument, tuple):
        return tuple(_mapped(item, of) for item in argument)
    return argument
