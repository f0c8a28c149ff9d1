"""The notes of MindFormers' manual as checks: degrees against devices, micro-batches and the sizes of the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING

from planner.sharding.cuts import OperatorCuts
from simulator.checks import near_divisors
from simulator.errors import ContextError
from simulator.program import Phase

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.networks.marks import Marks
    from planner.plans.pins import Pins

DEGREES: Mapping[str, str] = {
    "dp": "data_parallel",
    "tp": "model_parallel",
    "pp": "pipeline_stage",
    "cp": "context_parallel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a network that degrees are held against; 0 where it has none."""

    layers: int = 0
    hidden: int = 0
    heads: int = 0
    vocabulary: int = 0


def vocabulary_marks(pins: Pins, graph: OperatorGraph, *, cut: bool) -> tuple[Marks, str]:
    """Marks with which the table of tokens is whole on every tensor-parallel rank, or cut along its vocabulary.

    Returns
    -------
    Marks
    str
        What to say where the search decides after all: strategies of operators are kept on meshes of data × tensor.

    Raises
    ------
    ContextError
        Data or model parallelism is not configured, or the network has no table of tokens.
    """
    from planner.networks.marks import Marks

    said = f"parallel_config.vocab_emb_dp={not cut}"
    beyond = [f"{name}={pins.degree(name)}" for name in ("cp", "ep") if pins.degree(name) > 1]
    if beyond:
        return Marks(), f"{said} is left to the search: strategies of operators are not kept with {', '.join(beyond)}"
    vocabulary = sizes_of(graph).vocabulary
    tables = (node for node in graph.nodes if node.op == "aten.embedding.default" and node.phase is Phase.FORWARD)
    table = next((n for n in tables if vocabulary and graph.spec(n.tensor_inputs[0]).shape[0] >= vocabulary), None)
    if table is None and not cut:
        return Marks(), ""
    if table is None:
        raise ContextError(f"{said}: {graph.network} has no table of tokens; leave it out")
    if pins.dp is None or pins.tp is None:
        raise ContextError(f"{said} needs data_parallel and model_parallel: they say how the table is cut; add them")
    rest = (1,) * (len(graph.spec(table.tensor_inputs[1]).shape) - 1)
    inputs = ((pins.dp, *rest), (pins.tp if cut else 1, 1))
    return Marks(cuts={table.module: OperatorCuts(inputs=inputs)}), ""


def sizes_of(graph: OperatorGraph) -> Sizes:
    """Layers of the longest run, width and length of the table of tokens, heads of attention."""
    from planner.exchange.pinned import layer_names
    from planner.sharding.context import attention_heads

    vocabulary = max((i.high or 0 for i in graph.inputs if i.kind == "tokens"), default=0)
    tables = [graph.spec(node.tensor_inputs[0]).shape for node in graph.nodes if node.op == "aten.embedding.default"]
    return Sizes(
        layers=max((len(layer_names(graph)), *(run.count for run in graph.runs))),
        hidden=next((shape[1] for shape in tables if vocabulary and shape[0] >= vocabulary), 0),
        heads=max((heads for heads, _ in attention_heads(graph)), default=0),
        vocabulary=vocabulary,
    )


def used_devices(pins: Pins, devices: int | None) -> tuple[int, str]:
    """Devices that configured degrees take, and what to say of those that stay idle.

    Raises
    ------
    ContextError
        The degrees take more than there are.
    """
    found = {name: pins.degree(name) for name in DEGREES}
    shown = {DEGREES[name]: degree for name, degree in found.items() if degree > 1 or name != "cp"}
    product, said = prod(found.values()), " × ".join(f"{name} {degree}" for name, degree in shown.items())
    if devices is None or product == devices:
        return product, ""
    if product > devices:
        raise ContextError(
            f"{said} = {product} is more than the {devices} devices; use --devices {product}, or smaller degrees, for "
            f"example data_parallel {max(1, found['dp'] * devices // product)}"
        )
    return product, f"{said} = {product} of {devices} devices: {devices - product} stay idle"


def check_micro_batches(pins: Pins) -> None:
    """Raise ContextError where a pipeline has fewer micro-batches than stages."""
    stages, count = pins.pp or 1, pins.micro_batches
    if count is not None and count < stages:
        raise ContextError(
            f"micro_batch_num={count} is less than pipeline_stage={stages}: some stages would never work; use "
            f"micro_batch_num={stages} or more"
        )


def check_sizes(pins: Pins, sizes: Sizes, *, vocabulary_cut: bool | None = None) -> tuple[str, ...]:
    """Hold degrees against a network; what is possible but slow is returned as notes.

    Raises
    ------
    ContextError
        Model parallelism does not divide the width or the heads (or the vocabulary, where it is to be cut), or there
        are more stages than layers.
    """
    tensor, stages = pins.tp or 1, pins.pp or 1
    cut = {"hidden_size": sizes.hidden, "num_heads": sizes.heads}
    if vocabulary_cut:
        cut["vocab_size"] = sizes.vocabulary
    for name, size in cut.items():
        if size % tensor:
            other = " or vocab_emb_dp=True" if name == "vocab_size" else ""
            raise ContextError(
                f"model_parallel={tensor} does not divide {name}={size}, {size % tensor} are left over: parameters "
                f"could not be cut evenly; use model_parallel={near_divisors(tensor, size)}{other}"
            )
    if not sizes.layers:
        return ()
    if stages > sizes.layers:
        raise ContextError(
            f"pipeline_stage={stages} is more than num_layers={sizes.layers}; use pipeline_stage={sizes.layers} or less"
        )
    if sizes.layers % stages == 0:
        return ()
    longest, even = ceil(sizes.layers / stages), sizes.layers / stages
    return (
        f"pipeline_stage={stages} does not divide num_layers={sizes.layers}: the longest stage has {longest} layers, "
        f"{longest / even - 1:.0%} more than {even:.3g} on every stage, and all wait for it",
    )
