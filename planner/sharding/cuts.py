"""Cuts: in how many parts each dim of an operator's tensors is cut, whatever mesh axes do it.

Strategies are written so in MindSpore: one tuple a tensor, the rest of the devices repeats the work. They are given for
the tensors of a module (what it is called with, then its parameters as they are stored), or of an operator. Between a
module's tensors and its operator lie views and transpositions, through which cuts are carried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from simulator.errors import ContextError, UnsupportedError
from simulator.program import Kernel

Parts = tuple[int, ...]
"""One number a dim: in how many parts it is cut, 1 where it is whole."""
Operand = Parts | None
"""Cuts of one tensor of an operator; None says nothing."""
_SAME = tuple(f"aten.{name}.default" for name in ("clone", "alias", "detach", "_to_copy", "contiguous"))
_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_PRODUCTS = {"aten.mm.default": 0, "aten.bmm.default": 0, "aten.addmm.default": 1, "aten.baddbmm.default": 1}
"""Matrix products, and which tensor is their first factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCuts:
    """Cuts of an operator's inputs and outputs; empty says nothing."""

    inputs: tuple[Parts, ...]
    outputs: tuple[Parts, ...] = ()

    def __str__(self) -> str:
        out = f", out_strategy {self.outputs}" if self.outputs else ""
        return f"in_strategy {self.inputs}{out}"

    def fits_mesh(self, sizes: Sequence[int]) -> bool:
        """Whether axes of these sizes can cut every tensor so, each axis one dim or none."""
        return all(_expressible(parts, sizes) for parts in (*self.inputs, *self.outputs))


def _expressible(parts: Parts, sizes: Sequence[int]) -> bool:
    return any(
        all(prod(s for s, place in zip(sizes, places, strict=True) if place == dim) == n for dim, n in enumerate(parts))
        for places in product(range(-1, len(parts)), repeat=len(sizes))
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """A tensor that a strategy speaks of, and the shape operators between it and a tensor of the operator."""

    tensor: TensorRef
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandCuts:
    """Cuts of the tensors of one operator as it reads and writes them."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


def operand_cuts(
    graph: OperatorGraph, index: int, cuts: OperatorCuts, *, of_module: bool, devices: int, what: str
) -> OperandCuts:
    """Cuts of an operator's own tensors, from those of its module's or its own.

    Parameters
    ----------
    graph
        At the batch of a micro-batch.
    of_module
        Whether cuts are those of the module's tensors.
    devices
        Devices of a stage.
    what
        Words for the operator in errors.

    Raises
    ------
    ContextError
        The number of tensors or dims is wrong, a dim does not divide, there are too few devices, or factors of a
        product are cut in different ways.
    UnsupportedError
        A dim is cut that is merged behind another one.
    """
    node = graph.nodes[index]
    ways = [_way(graph, index, ref) if of_module else _Way(ref, ()) for ref in node.tensor_inputs]
    given = _in_order(graph, ways, cuts, of_module, what)
    for place, (way, parts) in enumerate(given):
        _check(parts, graph.spec(way.tensor).shape, devices, f"{what}: in_strategy[{place}]", _called(graph, way))
    said = {way.tensor: parts for way, parts in given}
    inputs = tuple(_carried(graph, way, said.get(way.tensor), what) for way in ways)
    outputs: tuple[Operand, ...] = (None,) * len(node.outputs)
    if cuts.outputs:
        outputs = _output_cuts(graph, index, cuts, of_module, devices, what)
    _check_product(node, inputs, outputs, what)
    return OperandCuts(inputs=inputs, outputs=outputs)


def _in_order(
    graph: OperatorGraph, ways: Sequence[_Way], cuts: OperatorCuts, of_module: bool, what: str
) -> list[tuple[_Way, Parts]]:
    """Tensors in the order of a strategy with their cuts; biases and other one-dim parameters may be left out."""
    order = list({way.tensor: way for way in ways}.values()) if of_module else list(ways)
    optional = 0
    if of_module:
        place = {parameter.node: number for number, parameter in enumerate(graph.parameters)}
        order.sort(key=lambda way: place.get(way.tensor.node, -1))
        small = [way.tensor.node in place and len(graph.spec(way.tensor).shape) == 1 for way in order]
        optional = next((n for n, one in enumerate(reversed(small)) if not one), len(small))
    if not len(order) - optional <= len(cuts.inputs) <= len(order):
        names = ", ".join(f"{_called(graph, way)} {graph.spec(way.tensor).shape}" for way in order)
        raise ContextError(
            f"{what}: in_strategy {cuts.inputs} has {len(cuts.inputs)} tuples, and there are {len(order)} tensors "
            f"({names}); give one tuple for each"
        )
    return list(zip(order, cuts.inputs, strict=False))


def _called(graph: OperatorGraph, way: _Way) -> str:
    node = graph.nodes[way.tensor.node]
    return f"parameter {node.name!r}" if node.role is Role.PARAMETER else "the input"


def _check(parts: Parts, shape: tuple[int, ...], devices: int, place: str, called: str) -> None:
    if len(parts) != len(shape):
        raise ContextError(
            f"{place}={parts} has {len(parts)} numbers, and {called} has {len(shape)} dims, {shape}; give one a dim"
        )
    for dim, (extent, cut) in enumerate(zip(shape, parts, strict=True)):
        if extent % cut:
            near = min((n for n in range(1, extent + 1) if extent % n == 0), key=lambda n: (abs(n - cut), n))
            raise ContextError(
                f"{place}[{dim}]={cut} does not divide dim {dim} of {called}, {extent} of {shape} in a micro-batch; "
                f"use {near}"
            )
    needed = prod(parts)
    if devices % needed:
        raise ContextError(
            f"{place}={parts} needs {needed} devices, and a stage has {devices}; its product must divide them"
        )


def _check_product(node: Node, inputs: Sequence[Operand], outputs: Sequence[Operand], what: str) -> None:
    """MindSpore's rule for matrix products: both factors are cut in the same way where they meet."""
    if node.op not in _PRODUCTS:
        return
    first, second = inputs[_PRODUCTS[node.op] :][:2]
    if first is None or second is None:
        return
    if first[-1] != second[-2] or first[:-2] != second[:-2]:
        raise ContextError(
            f"{what}: the first factor is cut {first} and the second {second} as they are multiplied: the inner dim is "
            f"in {first[-1]} parts of one and {second[-2]} of the other; they must be equal (the weight of a Linear is "
            "stored as (out, in))"
        )
    made = (*first[:-1], second[-1])
    if outputs[0] is not None and outputs[0] != made:
        raise ContextError(
            f"{what}: out_strategy {outputs[0]} is not what factors cut {first} and {second} make, {made}; leave "
            "out_strategy out"
        )


def _output_cuts(
    graph: OperatorGraph, index: int, cuts: OperatorCuts, of_module: bool, devices: int, what: str
) -> tuple[Operand, ...]:
    node = graph.nodes[index]
    if len(cuts.outputs) > len(node.outputs):
        raise ContextError(
            f"{what}: out_strategy {cuts.outputs} has {len(cuts.outputs)} tuples for {len(node.outputs)} outputs; give "
            "one for each"
        )
    found: list[Operand] = [None] * len(node.outputs)
    for place, parts in enumerate(cuts.outputs):
        steps = tuple(_behind(graph, index, place)) if of_module else ()
        last = TensorRef(steps[-1]) if steps else TensorRef(index, place)
        _check(parts, graph.spec(last).shape, devices, f"{what}: out_strategy[{place}]", "the output")
        for step in reversed(steps):
            parts = _through(graph, step, parts, backwards=True, what=what)
        found[place] = parts
    return tuple(found)


# Between the tensors of a module and those of its operator


def _way(graph: OperatorGraph, index: int, ref: TensorRef) -> _Way:
    """From a tensor of an operator back through the shape operators of its module."""
    steps: list[int] = []
    module = graph.nodes[index].module
    while _is_shape(graph.nodes[ref.node]) and graph.nodes[ref.node].module == module:
        steps.append(ref.node)
        ref = graph.nodes[ref.node].tensor_inputs[0]
    return _Way(ref, tuple(reversed(steps)))


def _behind(graph: OperatorGraph, index: int, output: int) -> Iterator[int]:
    """Shape operators of its module that alone read an operator's output, in order."""
    ref, module = TensorRef(index, output), graph.nodes[index].module
    while True:
        users = [u for u in graph.consumers.get(ref, ()) if graph.nodes[u].phase == graph.nodes[index].phase]
        if len(users) != 1 or not _is_shape(graph.nodes[users[0]]) or graph.nodes[users[0]].module != module:
            return
        yield users[0]
        ref = TensorRef(users[0])


def _is_shape(node: Node) -> bool:
    known = (*_SAME, *_VIEWS, "aten.t.default", "aten.transpose.int", "aten.permute.default")
    return node.role is Role.OPERATOR and node.op in known


def _carried(graph: OperatorGraph, way: _Way, parts: Operand, what: str) -> Operand:
    for step in way.steps:
        if parts is None:
            return None
        parts = _through(graph, step, parts, backwards=False, what=what)
    return parts


def _through(graph: OperatorGraph, index: int, parts: Parts, *, backwards: bool, what: str) -> Parts:
    """Cuts behind a shape operator from those before it, or the other way round."""
    node = graph.nodes[index]
    if node.op in _SAME:
        return parts
    if node.op in _VIEWS:
        before, after = graph.spec(node.tensor_inputs[0]).shape, node.outputs[0].shape
        found = viewed(parts, after, before) if backwards else viewed(parts, before, after)
        if found is None:
            raise UnsupportedError(
                f"{what}: {parts} cuts a dim of {after if backwards else before} that lies behind another one once it "
                f"is seen as {before if backwards else after}; cut the first of the dims that are merged"
            )
        return found
    order = _permutation(node, len(parts))
    if backwards:
        return tuple(parts[order.index(dim)] for dim in range(len(parts)))
    return tuple(parts[dim] for dim in order)


def _permutation(node: Node, dims: int) -> list[int]:
    """For each dim of the output the dim of the input."""
    order = list(range(dims))
    if node.op == "aten.permute.default":
        return [int(dim) % dims for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
    one, other = (0, 1) if node.op == "aten.t.default" else (int(node.args[1]), int(node.args[2]))  # type: ignore[arg-type]
    if dims > 1:
        order[one], order[other] = order[other], order[one]
    return order


def viewed(parts: Parts, before: tuple[int, ...], after: tuple[int, ...]) -> Parts | None:
    """Cuts of a tensor seen in another shape; None where the parts would not be slices of one dim.

    Of dims that are merged or parted the first may be cut.

    >>> viewed((2, 1, 4), (8, 16, 32), (128, 32))
    (2, 4)
    >>> viewed((1, 2, 1), (8, 16, 32), (128, 32)) is None
    True
    """
    found: list[int] = []
    i = 0
    for own, seen in _groups(before, after):
        cut, inner = parts[i : i + len(own)], [n for n, size in enumerate(own) if size > 1]
        i += len(own)
        first = inner[0] if inner else 0
        if any(c > 1 for n, c in enumerate(cut) if n != first):
            return None
        number = cut[first] if cut else 1
        place = next((n for n, size in enumerate(seen) if size > 1), 0)
        if number > 1 and (not seen or seen[place] % number):
            return None
        found += [number if n == place else 1 for n in range(len(seen))]
    return tuple(found)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterable[tuple[list[int], list[int]]]:
    """Dims of both shapes in the smallest groups of equal size, in order."""
    left, right = list(before), list(after)
    while left or right:
        own, seen = left[:1], right[:1]
        del left[:1], right[:1]
        while prod(own) != prod(seen):
            side, rest = (own, left) if prod(own) < prod(seen) else (seen, right)
            side.append(rest.pop(0))
        if not left:
            seen, right = seen + right, []
        if not right:
            own, left = own + left, []
        yield own, seen


def main_operator(graph: OperatorGraph, members: Sequence[int]) -> int | None:
    """The operator that the strategy of a module is for: its only product, convolution or attention, or its only one.

    None where there are several, or none.
    """
    heavy = [i for i in members if graph.nodes[i].flops]
    if heavy:
        return heavy[0] if len(heavy) == 1 else None
    others = [i for i in members if graph.nodes[i].kernel is not Kernel.VIEW and not _is_shape(graph.nodes[i])]
    return others[0] if len(others) == 1 else None
