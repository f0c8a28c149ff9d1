"""From a folded graph back to one node for each operator of each block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.graph.operator_graph import Argument, Node, OperatorGraph, Parameter, Role, Run, TensorRef, TensorSpec
from simulator.program import Phase

Table = Sequence[int] | Mapping[int, int]
"""New numbers of nodes by their old ones."""


def unfold(graph: OperatorGraph) -> OperatorGraph:
    """Repeat the blocks of every run and return the graph without runs.

    Block ``b`` of a run of ``L`` refers to itself, to its neighbours or to shared nodes as blocks 0 and 1
    do; what block 0 takes from before the run and block 1 from behind it is what the first and the last
    block take. A node outside the run that refers to block 1 means the last block. Forward nodes come
    block after block, backward ones in the opposite order.
    """
    for number in range(len(graph.runs)):
        graph = _Unfolding(graph, number).graph()
    return replace(graph, runs=())


def unfold_run(graph: OperatorGraph, number: int) -> OperatorGraph:
    """Repeat the blocks of one run, which is then none; the others stay."""
    graph = _Unfolding(graph, number).graph()
    return replace(graph, runs=(*graph.runs[:number], *graph.runs[number + 1 :]))


def run_start(graph: OperatorGraph, run: Run) -> int:
    """Index that the names of a run's first block carry."""
    return int(graph.nodes[run.first[0]].module[len(run.prefix) + 1 :].partition(".")[0])


@dataclass(frozen=True, slots=True)
class _Layout:
    """Positions in the unfolded graph.

    ``order`` lists (block, old node), block -1 for a node that is there once; ``place[i]`` is the new index
    of old node ``i``; ``blocks[b][p]`` that of position ``p`` of block ``b``.
    """

    order: list[tuple[int, int]]
    place: list[int]
    blocks: list[list[int]]


def _layout(graph: OperatorGraph, run: Run) -> _Layout:
    """Put the clones of block 1 behind it in the forward pass and before it in the backward pass."""
    position = {node: p for p, node in enumerate(run.second)}
    parts: dict[str, list[int]] = {}
    for node in run.second:
        parts.setdefault(part_of(graph.nodes[node]), []).append(node)
    before = {nodes[0]: nodes for part, nodes in parts.items() if part == "backward"}
    after = {nodes[-1]: nodes for part, nodes in parts.items() if part != "backward"}
    order: list[tuple[int, int]] = []
    for node in range(len(graph.nodes)):
        order += ((b, i) for b in range(run.count - 1, 1, -1) for i in before.get(node, ()))
        order.append((1 if node in position else -1, node))
        order += ((b, i) for b in range(2, run.count) for i in after.get(node, ()))
    place = [0] * len(graph.nodes)
    blocks = [[0] * len(run.second) for _ in range(run.count)]
    for new, (block, node) in enumerate(order):
        if block > 0:
            blocks[block][position[node]] = new
        if block < 2:
            place[node] = new
    blocks[0] = [place[node] for node in run.first]
    return _Layout(order, place, blocks)


def part_of(node: Node) -> str:
    """Where a node stands in the order: in front as a parameter or constant, in the forward or in the backward pass."""
    if node.op in (Role.PARAMETER, Role.CONSTANT):  # what a module holds stands in front of all that is computed
        return node.op
    return "backward" if node.phase is Phase.BACKWARD else "forward"


class _Unfolding:
    """One run being unfolded.

    In a *template*, references are numbered by kind: position ``p`` of the block itself is ``p``, of the
    block before ``size + p``, of the next block ``2 * size + p``, and an outside node ``i`` is ``3 * size + i``.
    """

    def __init__(self, graph: OperatorGraph, number: int) -> None:
        self.source = graph
        self.run = graph.runs[number]
        self.layout = _layout(graph, self.run)
        self.size = len(self.run.second)
        self.first = {node: p for p, node in enumerate(self.run.first)}
        self.second = {node: p for p, node in enumerate(self.run.second)}
        start = run_start(graph, self.run)
        self.heads = [f"{self.run.prefix}.{start + block}" for block in range(self.run.count)]
        last = self.layout.blocks[-1]
        self.outside = list(self.layout.place)
        for node, p in self.second.items():
            self.outside[node] = last[p]

    def graph(self) -> OperatorGraph:
        """Build the graph with this run unfolded."""
        source, place = self.source, self.layout.place
        return replace(
            source,
            nodes=tuple(self._nodes()),
            parameters=tuple(self._parameters()),
            inputs=tuple(replace(item, node=self.outside[item.node]) for item in source.inputs),
            loss=_renumber(source.loss, self.outside),
            runs=tuple(
                replace(run, first=tuple(place[i] for i in run.first), second=tuple(place[i] for i in run.second))
                for run in source.runs
            ),
        )

    def _nodes(self) -> Iterator[Node]:
        nodes, blocks, last = self.source.nodes, self.layout.blocks, self.run.count - 1
        own = [self._template(nodes[i], None) for i in self.run.second]
        middle = [self._template(nodes[i], nodes[j]) for i, j in zip(self.run.second, self.run.first, strict=True)]
        nothing = [0] * self.size
        tables = [
            [*blocks[b], *blocks[b - 1], *(blocks[b + 1] if b < last else nothing), *self.outside]
            for b in range(self.run.count)
        ]
        for block, index in self.layout.order:
            if block > 0:
                position = self.second[index]
                template = own[position] if block == last else middle[position]
                yield copy_node(template, tables[block], len(self.heads[1]), self.heads[block])
            elif index in self.first:
                yield copy_node(nodes[index], self.layout.place, outputs=self._outputs(index))
            else:
                yield copy_node(nodes[index], self.outside)

    def _outputs(self, index: int) -> tuple[TensorSpec, ...]:
        """Outputs of a node of the first block: the objects of those behind it, where both read and write the same."""
        one, other = self.source.nodes[index], self.source.nodes[self.run.second[self.first[index]]]
        read = [[self.source.spec(ref) for ref in node.tensor_inputs] for node in (one, other)]
        return other.outputs if one.outputs == other.outputs and read[0] == read[1] else one.outputs

    def _template(self, second: Node, first: Node | None) -> Node:
        """Number the references of block 1's node; what `first` takes from the next block is taken from there."""
        one = second if first is None else first
        return replace(
            second,
            args=self._slot(second.args, one.args, first is not None),
            kwargs=tuple(
                (key, self._slot(s, f, first is not None))
                for (key, s), (_, f) in zip(second.kwargs, one.kwargs, strict=True)
            ),
            forward=None if second.forward is None else self._number(second.forward),
        )

    def _slot(self, second: Argument, first: Argument, middle: bool) -> Any:
        if not isinstance(second, TensorRef):
            if isinstance(second, tuple) and isinstance(first, tuple):
                return tuple(self._slot(s, f, middle) for s, f in zip(second, first, strict=True))
            return second
        if middle and isinstance(first, TensorRef) and first.node in self.second:
            return TensorRef(2 * self.size + self.second[first.node], first.output)
        return TensorRef(self._number(second.node), second.output)

    def _number(self, node: int) -> int:
        if node in self.second:
            return self.second[node]
        return self.size + self.first[node] if node in self.first else 3 * self.size + node

    def _parameters(self) -> Iterator[Parameter]:
        inside = [p for p in self.source.parameters if p.node in self.second]
        for parameter in self.source.parameters:
            if parameter.node not in self.second:
                table = self.layout.place if parameter.node in self.first else self.outside
                yield replace(parameter, node=table[parameter.node], gradient=_gradient(parameter, table))
            elif parameter is inside[-1]:
                for block in range(1, self.run.count):
                    yield from self._clones(inside, block)

    def _clones(self, parameters: Sequence[Parameter], block: int) -> Iterator[Parameter]:
        table, old, new = list(self.outside), self.heads[1], self.heads[block]
        for node, position in self.second.items():
            table[node] = self.layout.blocks[block][position]
        for parameter in parameters:
            yield Parameter(
                name=new + parameter.name[len(old) :],
                node=table[parameter.node],
                gradient=_gradient(parameter, table),
                aliases=tuple(new + a[len(old) :] if a.startswith(old + ".") else a for a in parameter.aliases),
            )


def _gradient(parameter: Parameter, table: Sequence[int]) -> TensorRef | None:
    return None if parameter.gradient is None else _renumber(parameter.gradient, table)


def _renumber(ref: TensorRef, table: Sequence[int]) -> TensorRef:
    return TensorRef(table[ref.node], ref.output)


def renumber_argument(argument: Argument, table: Table) -> Argument:
    """Replace every node index in an argument by its entry in `table`."""
    if isinstance(argument, TensorRef):
        return TensorRef(table[argument.node], argument.output)
    if isinstance(argument, tuple):
        return tuple([renumber_argument(item, table) for item in argument])
    return argument


def copy_node(
    node: Node,
    table: Table,
    old_head: int = 0,
    head: str = "",
    outputs: tuple[TensorSpec, ...] | None = None,
) -> Node:
    """Copy a node with its references renumbered, and the first `old_head` characters of its names replaced."""
    return Node(
        name=head + node.name[old_head:],
        op=node.op,
        role=node.role,
        phase=node.phase,
        kernel=node.kernel,
        args=tuple([renumber_argument(argument, table) for argument in node.args]),
        kwargs=tuple([(key, renumber_argument(argument, table)) for key, argument in node.kwargs])
        if node.kwargs
        else (),
        outputs=node.outputs if outputs is None else outputs,
        forward=None if node.forward is None else table[node.forward],
        module=head + node.module[old_head:],
        source=node.source,
        flops=node.flops,
        product_dtype=node.product_dtype,
        moved=node.moved,
    )
