"""The graph of blocks of several kinds in any order, from one that was captured with a few blocks of each kind."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from planner.graph.folding import signature
from planner.graph.operator_graph import Node, OperatorGraph, Parameter, TensorRef
from planner.graph.unfolding import copy_node, part_of

ENDS = 2
"""Blocks at each end of a list that keep their own graph: gradients may treat the first like no other."""
OUTSIDE = -1
"""Place of a node that is in no block of the list."""
Key = tuple[int, int]
"""A node of the whole graph: the place of its block in the list, and the captured node that it is a copy of."""


class _DifferError(Exception):
    """Blocks of one kind differ, or a block refers to more than its neighbours."""


def assembled(
    graph: OperatorGraph, prefix: str, kept: Sequence[int], kinds: Sequence[Hashable]
) -> OperatorGraph | None:
    """Write out all blocks of a list, each as a copy of a captured block of its kind.

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
        None where captured blocks of one kind differ, where a block refers to one that is not its neighbour, or
        where something outside the list refers to a block other than those at the ends.
    """
    try:
        return _Assembly(graph, prefix, kept, kinds).graph()
    except _DifferError:
        return None


def place_in(module: str, prefix: str) -> int | None:
    """Number of the block of the list `prefix` that a module lies in.

    >>> place_in("layers.12.norm", "layers"), place_in("layers", "layers"), place_in("head", "layers")
    (12, None, None)
    """
    number = module[len(prefix) + 1 :].partition(".")[0] if module.startswith(f"{prefix}.") else ""
    return int(number) if number.isdigit() else None


def _references(node: Node) -> Iterator[TensorRef]:
    yield from node.tensor_inputs
    if node.forward is not None:
        yield TensorRef(node.forward)


class _Assembly:
    """Writes out one list.

    A block hands tensors to the next block in the forward pass, and to the one before in the backward pass. All
    neighbours hand over the same number of tensors, of the same shapes, so that a copy finds those of its neighbours
    by their order.
    """

    def __init__(self, graph: OperatorGraph, prefix: str, kept: Sequence[int], kinds: Sequence[Hashable]) -> None:
        self.source, self.prefix, self.kept, self.kinds = graph, prefix, kept, kinds
        self.blocks: list[list[int]] = [[] for _ in kept]
        self.block_of: dict[int, int] = {}
        self.position: dict[int, int] = {}
        for index, node in enumerate(graph.nodes):
            if (number := place_in(node.module, prefix)) is not None:
                self.block_of[index], self.position[index] = number, len(self.blocks[number])
                self.blocks[number].append(index)
        self.handed = {step: self._handed(step) for step in (1, -1)}
        self._check()
        places = {place: number for number, place in enumerate(kept)}
        inner = {kinds[place]: number for number, place in enumerate(kept) if self._is_inner(place)}
        self.like = [places[place] if place in places else inner[kind] for place, kind in enumerate(kinds)]
        """Number of the captured block that each block of the list is a copy of."""
        self.number = {key: number for number, key in enumerate(self._order())}

    def _is_inner(self, place: int) -> bool:
        return ENDS <= place < len(self.kinds) - ENDS

    def _handed(self, step: int) -> list[list[TensorRef]]:
        """Tensors that each block hands to the next (``step`` 1) or to the one before (-1)."""
        found: list[set[TensorRef]] = [set() for _ in self.blocks]
        for index, number in self.block_of.items():
            for ref in self.source.nodes[index].tensor_inputs:
                if self.block_of.get(ref.node) == number - step:
                    found[number - step].add(ref)
        return [sorted(refs) for refs in found]

    def _check(self) -> None:
        for pairs in (self.handed[1][:-1], self.handed[-1][1:]):
            specs = {tuple((ref.output, self.source.spec(ref)) for ref in refs) for refs in pairs}
            if len(specs) > 1 or any(len(set(one)) < len(one) for one in specs):
                raise _DifferError  # two tensors alike could be taken for each other
        templates: dict[Hashable, object] = {}
        for number, place in enumerate(self.kept):
            if self._is_inner(place):
                template = self._template(number)
                if templates.setdefault(self.kinds[place], template) != template:
                    raise _DifferError

    def _template(self, number: int) -> object:
        """Everything about a block but its place and its lines of code."""
        head = len(f"{self.prefix}.{number}")

        def seen(ref: TensorRef) -> tuple[object, ...]:
            block = self.block_of.get(ref.node)
            if block is None:
                return ("outside", ref)
            return ("own", self.position[ref.node]) if block == number else (number - block, self._rank(number, ref))

        return [
            (signature(node), node.name[head:], node.module[head:], [seen(ref) for ref in _references(node)])
            for node in (self.source.nodes[index] for index in self.blocks[number])
        ]

    def _rank(self, number: int, ref: TensorRef) -> int:
        """Place of a tensor among those that its block hands to its neighbour `number`."""
        block = self.block_of[ref.node]
        handed = self.handed[number - block][block] if abs(number - block) == 1 else []
        if ref not in handed:
            raise _DifferError
        return handed.index(ref)

    def _read(self, key: Key) -> Iterator[tuple[int, Key]]:
        """Yield each node that the captured node of a key refers to, with the key that its copy refers to instead."""
        place, index = key
        for ref in _references(self.source.nodes[index]):
            block = self.block_of.get(ref.node)
            if block is None:
                yield ref.node, (OUTSIDE, ref.node)
            elif place == OUTSIDE:
                yield ref.node, self._end(ref.node)
            elif block == self.like[place]:
                yield ref.node, (place, ref.node)
            else:
                step, rank = self.like[place] - block, self._rank(self.like[place], ref)
                yield ref.node, (place - step, self.handed[step][self.like[place - step]][rank].node)

    def _end(self, node: int) -> Key:
        """Key of a node that something outside the list refers to."""
        place = OUTSIDE if node not in self.block_of else self.kept[self.block_of[node]]
        if self._is_inner(place):
            raise _DifferError
        return place, node

    def _order(self) -> list[Key]:
        """All nodes in the order of execution.

        Copies follow the nearest captured block, in the forward pass the one before them and in the backward pass the
        one behind them, as far as everything that they read comes before them.
        """
        nodes = self.source.nodes
        wanted = {(OUTSIDE, i): (i, 0, 0) for i in range(len(nodes)) if i not in self.block_of}
        last = {(number, part_of(nodes[i])): i for number, block in enumerate(self.blocks) for i in block}
        for place, like in enumerate(self.like):
            before = max(number for number, at in enumerate(self.kept) if at <= place)
            behind = min(number for number, at in enumerate(self.kept) if at >= place)
            for index in self.blocks[like]:
                part = part_of(nodes[index])
                near, turn = (behind, len(self.like) - place) if part == "backward" else (before, 1 + place)
                captured = before == behind
                wanted[place, index] = (index, 0, 0) if captured else (last.get((near, part), index), turn, index)
        readers: dict[Key, list[Key]] = {key: [] for key in wanted}
        waits: dict[Key, int] = {}
        for key in wanted:
            read = {other for _, other in self._read(key)}
            waits[key] = len(read)
            for other in read:
                readers[other].append(key)
        ready = [(wanted[key], key) for key, count in waits.items() if not count]
        heapq.heapify(ready)
        order: list[Key] = []
        while ready:
            _, key = heapq.heappop(ready)
            order.append(key)
            for reader in readers[key]:
                waits[reader] -= 1
                if not waits[reader]:
                    heapq.heappush(ready, (wanted[reader], reader))
        return order

    def graph(self) -> OperatorGraph:
        """Build the whole graph."""
        return replace(
            self.source,
            nodes=tuple(map(self._copied, self.number)),
            parameters=tuple(self._parameters()),
            inputs=tuple(replace(item, node=self.number[self._end(item.node)]) for item in self.source.inputs),
            loss=TensorRef(self.number[self._end(self.source.loss.node)], self.source.loss.output),
        )

    def _heads(self, place: int) -> tuple[str, str]:
        """What names of a block begin with in the captured graph and in the whole one."""
        return ("", "") if place == OUTSIDE else (f"{self.prefix}.{self.like[place]}", f"{self.prefix}.{place}")

    def _copied(self, key: Key) -> Node:
        place, index = key
        old, new = self._heads(place)
        table = {node: self.number[other] for node, other in self._read(key)}
        return copy_node(self.source.nodes[index], table, len(old), new)

    def _parameters(self) -> Iterator[Parameter]:
        inside: dict[int, list[Parameter]] = {}
        for parameter in self.source.parameters:
            inside.setdefault(self.block_of.get(parameter.node, OUTSIDE), []).append(parameter)
        first = next((p for p in self.source.parameters if p.node in self.block_of), None)
        for parameter in self.source.parameters:
            if parameter.node not in self.block_of:
                yield self._parameter(OUTSIDE, parameter)
            elif parameter is first:
                for place, like in enumerate(self.like):
                    yield from (self._parameter(place, one) for one in inside.get(like, ()))

    def _parameter(self, place: int, parameter: Parameter) -> Parameter:
        old, new = self._heads(place)
        gradient = parameter.gradient
        if gradient is not None:
            own = place != OUTSIDE and self.block_of.get(gradient.node) == self.like[place]
            gradient = TensorRef(
                self.number[(place, gradient.node) if own else self._end(gradient.node)], gradient.output
            )
        return Parameter(
            name=new + parameter.name[len(old) :],
            node=self.number[place, parameter.node],
            gradient=gradient,
            aliases=tuple(
                new + alias[len(old) :] if alias.startswith(f"{old}.") else alias for alias in parameter.aliases
            ),
        )
