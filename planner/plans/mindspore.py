"""MindSpore's JSON strategy file: how many parts each operator and parameter is cut in, read and written.

Its keys are those of MindSpore 2.10: ``parallel_strategy_item`` and ``parallel_out_strategy_item`` give the parts
of each dim of each input and output of an operator, ``parallel_layout_item`` how a parameter lies, the
``…_layout_value_item`` keys how the tensors of an operator lie on the axes of a device matrix. A tensor map names
for each dim the axis that cuts it, counted from the right; -1 is none.

MindSpore has no words for schedules, micro-batches, recomputation or terms of sums. What `export_plan` writes
therefore holds the whole strategy file as well, under ``meshwright``, which other readers pass over: so a plan that
is saved and loaded is the same plan. A digest tells when the rest of the file was edited afterwards.

MindSpore finds the strategy of an operator by its kind and its first parameter, ``MatMul_blocks.0.expand.weight``. The
layers of ``mindspore.nn`` stand in the file under such names too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from planner.graph.chain import chain
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.unfolding import unfold
from planner.plans.plan import NodeRules, Plan, expanded_rules
from planner.sharding.placement import Mesh, Placements
from simulator.errors import StrategyError
from simulator.program import Phase
from simulator.whole_file import write_whole

OWN = "meshwright"
KEYS = (
    *("current_stage", "parallel_strategy_item", "parallel_out_strategy_item", "parallel_layout_item"),
    *("parallel_layout_value_item", "parallel_out_layout_value_item", "parallel_newshape_layout_value_item"),
    "parallel_out_newshape_layout_value_item",
)
LAYERS = ("MatMul", "BiasAdd", "Gather", "LayerNorm")
"""Kinds of operators that stand under MindSpore's names."""
Document = Mapping[str, Any]
TensorMap = list[list[int]]


def is_mindspore(document: object) -> TypeGuard[Document]:
    """Whether a parsed JSON document is a strategy file of MindSpore."""
    return isinstance(document, Mapping) and any(key in document for key in KEYS[1:])


def export_plan(plan: Plan, graph: OperatorGraph, path: str | Path, strategy: Document) -> Path:
    """Write a plan as MindSpore's strategy file, whole or not at all.

    Parameters
    ----------
    plan, graph
        The plan, and the network's graph, folded or not, at any batch.
    path
        Where to write; the name must end in ``.json``, as MindSpore reads other files as protobuf.
    strategy
        The parsed strategy file of the plan, which stands in the file as well.

    Raises
    ------
    StrategyError
        The name does not end in ``.json``.
    """
    if Path(path).suffix != ".json":
        raise StrategyError(f"{path}: MindSpore reads JSON only from files whose names end in .json; rename it")
    items = strategy_items(plan, graph)
    document = {**items, OWN: {"digest": _digest(items), "strategy": strategy}}
    return write_whole(path, json.dumps(document, indent=1) + "\n")


def embedded_strategy(document: Document, source: str) -> Document:
    """The strategy file that a file of `export_plan` holds.

    Raises
    ------
    StrategyError
        The file was written by another program, or edited; the message says how to use it all the same.
    """
    hints = "give it to `meshwright plan` with --hints, which plans around the strategies it holds"
    own = document.get(OWN)
    if own is None:
        raise StrategyError(
            f"{source}: a MindSpore strategy file says how operators and parameters are cut, not the batch, the "
            f"schedule or the hardware; {hints}"
        )
    if not isinstance(own, Mapping) or not isinstance(own.get("strategy"), Mapping):
        raise StrategyError(f"{source}: {OWN}.strategy is no strategy file; write it again with `meshwright plan`")
    items = {key: value for key, value in document.items() if key != OWN}
    if own.get("digest") != _digest(items):
        raise StrategyError(
            f"{source}: the strategies were edited after the plan was saved, so that {OWN}.strategy says another "
            f"plan; remove the key {OWN!r} and {hints}"
        )
    found: Document = own["strategy"]
    return found


def strategy_items(plan: Plan, graph: OperatorGraph) -> dict[str, Any]:
    """What MindSpore's file says of a plan.

    Operators are those of the forward pass, by name; their stage is the pipeline rank. A parameter that optimizer
    sharding cuts along the data axis has MindSpore's ``opt_weight_shard_size`` and ``…_step`` (ranks that share it,
    and how far apart they are in the stage) instead of a cut dim. MindSpore's stages are runs of neighbouring ranks;
    where the plan has other ranks they are numbered anew.
    """
    whole = unfold(graph)
    rules = expanded_rules(plan)
    stages = _stages(plan, whole)
    matrix = _DeviceMatrix(plan.mesh)
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    layouts: dict[str, Any] = {}
    out_layouts: dict[str, Any] = {}
    for index, node in enumerate(whole.nodes):
        if node.role is not Role.OPERATOR or node.phase is not Phase.FORWARD or node.name not in rules:
            continue
        read = [_placed(rules[node.name], "inputs", i) for i in range(len(node.tensor_inputs))]
        made = [_placed(rules[node.name], "outputs", i) for i in range(len(node.outputs))]
        read_dims = [len(whole.nodes[ref.node].outputs[ref.output].shape) for ref in node.tensor_inputs]
        made_dims = [len(spec.shape) for spec in node.outputs]
        stage = stages.get(index, 0)
        for parts, maps, placed, dims in ((inputs, layouts, read, read_dims), (outputs, out_layouts, made, made_dims)):
            cuts = [matrix.cuts(p, d) for p, d in zip(placed, dims, strict=True)]
            parts[node.name] = {"stage": stage, "parallel_strategy": cuts}
            maps[node.name] = {str(i): matrix.layout(p, d) for i, (p, d) in enumerate(zip(placed, dims, strict=True))}
    return {
        "current_stage": 1,
        "parallel_strategy_item": {**inputs, **_layers(whole, inputs, outputs)},
        "parallel_out_strategy_item": outputs,
        "parallel_layout_item": {
            parameter.name: matrix.parameter(
                _placed(rules[parameter.name], "outputs", 0), whole.nodes[parameter.node].outputs[0].shape
            )
            for parameter in whole.parameters
            if parameter.name in rules
        },
        "parallel_layout_value_item": layouts,
        "parallel_out_layout_value_item": out_layouts,
    }


def _layers(graph: OperatorGraph, inputs: Document, outputs: Document) -> dict[str, Any]:
    """Parts of the operators of layers of ``mindspore.nn`` whose modules are called as in the network.

    ``Dense`` multiplies a matrix by its weight as it is stored, and adds its bias in an operator of its own.
    ``Embedding`` looks a row of ids up, so that only their first dim may be cut, and calls its weight a table.
    """
    found: dict[str, Any] = {}
    tables = {
        _parameter(graph, node.tensor_inputs[0].node)[0] for node in graph.nodes if node.op == "aten.embedding.default"
    }

    def add(kind: str, parameter: str, stage: int, *parts: Sequence[int]) -> None:
        name = parameter
        if parameter in tables or kind == "LayerNorm":
            ending = ".embedding_table" if parameter in tables else ".gamma"
            name = parameter.removesuffix(".weight") + ending
        if parameter:
            found.setdefault(f"{kind}_{name}", {"stage": stage, "parallel_strategy": [list(part) for part in parts]})

    for node in graph.nodes:
        if node.name not in inputs:
            continue
        stage, read = inputs[node.name]["stage"], inputs[node.name]["parallel_strategy"]
        (made, *_) = outputs[node.name]["parallel_strategy"]
        names = [_parameter(graph, ref.node) for ref in node.tensor_inputs]
        if node.op in ("aten.mm.default", "aten.addmm.default"):
            weight, turned = names[-1]
            add("MatMul", weight, stage, read[-2], read[-1][::-1] if turned else read[-1])
            if len(read) == 3:
                add("BiasAdd", names[0][0], stage, made, made[-1:])
        elif node.op == "aten.embedding.default" and all(count == 1 for count in read[1][1:]):
            add("Gather", names[0][0], stage, read[0], read[1][:1])
        elif node.op == "aten.native_layer_norm.default" and len(read) == 3:
            add("LayerNorm", names[1][0], stage, *read)
    return found


def _parameter(graph: OperatorGraph, index: int) -> tuple[str, bool]:
    """The parameter that a node is, or turns on its side; "" for anything else."""
    node, turned = graph.nodes[index], False
    while node.op == "aten.t.default":
        node, turned = graph.nodes[node.tensor_inputs[0].node], not turned
    return (node.name if node.role is Role.PARAMETER else ""), turned


class _DeviceMatrix:
    """The axes of a mesh with the innermost last, as MindSpore numbers the ranks of a stage."""

    def __init__(self, mesh: Mesh) -> None:
        order = sorted(range(len(mesh.axes)), key=mesh.stride, reverse=True)
        self.mesh = mesh
        self.sizes = [mesh.axes[i].size for i in order] or [1]
        self.names = [mesh.axes[i].name for i in order] or ["data"]
        self.from_right = {axis: len(order) - 1 - place for place, axis in enumerate(order)}

    def tensor_map(self, placements: Placements, dims: int) -> TensorMap:
        """Axes that cut each dim, outermost first, each counted from the right; empty for a whole dim."""
        found: TensorMap = [[] for _ in range(dims)]
        for axis, placement in enumerate(placements):
            if placement >= 0:
                found[placement].append(self.from_right[axis])
        return found

    def cuts(self, placements: Placements, dims: int) -> list[int]:
        """Parts that each dim is cut in."""
        return [prod(self.sizes[-1 - place] for place in row) for row in self.tensor_map(placements, dims)]

    def layout(self, placements: Placements, dims: int) -> dict[str, Any]:
        """How a tensor of an operator lies."""
        return {
            "dev_matrix": self.sizes,
            "tensor_map": [row or [-1] for row in self.tensor_map(placements, dims)],
            "interleaved_parallel": False,
            "alias_name": self.names,
        }

    def parameter(self, placements: Placements, shape: Sequence[int]) -> dict[str, Any]:
        """How a parameter lies between steps."""
        data = next((i for i, axis in enumerate(self.mesh.axes) if axis.name == "data" and placements[i] >= 0), None)
        kept = tuple(-1 if axis == data else placement for axis, placement in enumerate(placements))
        rows = self.tensor_map(kept, len(shape))
        sizes, flat = _flattened(self.sizes, rows)
        return {
            "dev_matrix": sizes,
            "field": 0,
            "opt_weight_shard_size": 0 if data is None else self.mesh.axes[data].size,
            "opt_weight_shard_step": 0 if data is None else prod(self.sizes[len(self.sizes) - self.from_right[data] :]),
            "tensor_map": flat,
            "tensor_shape": list(shape),
        }


def _flattened(sizes: Sequence[int], rows: TensorMap) -> tuple[list[int], list[int | list[int]]]:
    """Give each dim one axis: axes that lie side by side and cut one dim become one; others stay a list.

    >>> _flattened([2, 4, 3], [[2, 1], []])
    ([8, 3], [1, -1])
    """
    merged = list(sizes)
    found = [list(row) for row in rows]
    for row in found:
        while (pair := next((i for i in range(len(row) - 1) if row[i] == row[i + 1] + 1), None)) is not None:
            inner = row.pop(pair + 1)
            place = len(merged) - 1 - inner
            merged[place - 1 : place + 1] = [merged[place - 1] * merged[place]]
            for other in found:
                other[:] = [axis - (axis > inner) for axis in other]
    return merged, [-1 if not row else row[0] if len(row) == 1 else row for row in found]


def _placed(rules: NodeRules, side: str, number: int) -> Placements:
    """Placements along every axis of input or output `number`."""
    return tuple(getattr(rule, side)[number] for rule in rules)


def _stages(plan: Plan, graph: OperatorGraph) -> dict[int, int]:
    """Pipeline rank of every node of an unfolded graph that one unit has; none with one stage."""
    if not plan.chunks:
        return {}
    units = chain(graph).units
    number = {unit.name: i for i, unit in enumerate(units)}
    found: dict[int, int] = {}
    for chunk in plan.chunks:
        for unit in units[number[chunk.first] : number[chunk.last] + 1]:
            found.update((node, chunk.rank) for node in unit.nodes)
    return found


def _digest(items: Document) -> str:
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()


def parts_by_operator(document: Document, source: str) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Parts of each dim of each input, by operator, of a file that any program wrote.

    Entries that `export_plan` repeats under MindSpore's names are left out.

    Raises
    ------
    StrategyError
        An item has no such parts; the message names it.
    """
    items = document.get("parallel_strategy_item", {})
    if not isinstance(items, Mapping):
        raise StrategyError(f"{source}: parallel_strategy_item is no object of operators; correct it")
    ours = any("/" in str(name) for name in items)
    return {
        str(name): _parts(item, f"{source}: parallel_strategy_item.{name}")
        for name, item in items.items()
        if not (ours and str(name).partition("_")[0] in LAYERS)
    }


def _parts(item: object, place: str) -> tuple[tuple[int, ...], ...]:
    found = item.get("parallel_strategy") if isinstance(item, Mapping) else None
    rows = found if isinstance(found, list) else None
    if rows is None or not all(isinstance(row, list) and _all_counts(row) for row in rows):
        raise StrategyError(f"{place}.parallel_strategy: {found!r} is no list of parts such as [[2, 1], [1, 4]]")
    return tuple(tuple(row) for row in rows)


def _all_counts(row: Iterable[object]) -> bool:
    return all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in row)
