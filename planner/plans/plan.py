"""A plan: everything chosen for a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.graph.experts import experts_of
from planner.graph.folding import template_name
from planner.graph.operator_graph import OperatorGraph
from planner.networks.marks import Swap
from planner.plans.exchange import UNASKED, Exchange
from planner.sharding.placement import Mesh, Placements
from planner.sharding.rules import Rule

NodeRules = tuple[Rule, ...]
"""One rule for each mesh axis, outermost first."""


class Status(StrEnum):
    """How good a plan is known to be."""

    OPTIMAL = "optimal"
    BOUNDED = "bounded"
    HEURISTIC = "heuristic"
    INFEASIBLE = "infeasible"


MOST_MICRO_BATCHES = 2**15
"""Of a step. Each costs the simulation time and memory, and no training has nearly as many."""
MOST_PASSES = 2**20
"""Forward passes of a step: of every micro-batch through every chunk."""


_SAME = 1e-9
"""Relative difference of objectives that are one."""


DIGITS = 12
"""Of the numbers in a strategy file: powers and logarithms of another processor differ in the last of a float's 16."""


def to_digits(value: float) -> float:
    """A number as it stands in a strategy file.

    >>> to_digits(0.00720160574297597)
    0.00720160574298
    """
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What the search proved: the least objective found, and a bound that no plan of what was searched can beat.

    Where operators were searched one by one on a mesh, the objective is the plan's own, that of
    `planner.search.problem.problem`, and the bound holds for the same mesh, micro-batches and memory limit. Else both
    speak of the closed form of `planner.search.configurations.step_model`: ``objective_s`` is the least of the plans
    that fit in simulation, and the bound holds for every configuration that the pins leave. The plan shown is the one
    whose simulated step is shortest; its own closed form may be longer, and stands with the prediction. The gap does
    not count that. Where a step simulates shorter, it takes the place of what is longer. Where the
    closed form leaves out what pins cost (`planner.planning.hosted.left_out`), ``objective_s`` is the least simulated
    step.

    Attributes
    ----------
    elimination_width, largest_table : neighbours and entries, the most of one step of the elimination; 0 without one
    states, states_left : states of all variables on the mesh, and those left once dominated ones are out
    configurations, partitions : configurations that were bounded, and those whose stages were cut; 0 for one mesh
    operators, distinct_blocks : operators of the network, and runs of equal blocks
    """

    status: Status
    objective_s: float
    lower_bound_s: float
    elimination_width: int
    operators: int
    distinct_blocks: int
    states: int = 0
    states_left: int = 0
    largest_table: int = 0
    configurations: int = 0
    partitions: int = 0

    def __post_init__(self) -> None:
        for name in ("objective_s", "lower_bound_s"):
            object.__setattr__(self, name, to_digits(getattr(self, name)))

    @property
    def of_mesh(self) -> bool:
        """Whether the bound holds for the plan's mesh alone."""
        return not self.configurations

    def of_fitting(self, objective_s: float) -> Certificate:
        """The same where the least objective of plans that fit is `objective_s`: no less than the least of all."""
        if objective_s <= self.objective_s * (1 + _SAME):
            return self
        status = Status.BOUNDED if self.status is Status.OPTIMAL else self.status
        return replace(self, status=status, objective_s=objective_s)

    def below(self, step_s: float) -> Certificate:
        """The same where a plan of what was searched simulates in `step_s`, which the closed form may exceed a little.

        An optimum stays one: closed form and simulation agree to a few percent.
        """
        if step_s >= self.lower_bound_s and step_s >= self.objective_s:
            return self
        return replace(self, objective_s=min(self.objective_s, step_s), lower_bound_s=min(self.lower_bound_s, step_s))

    @property
    def gap(self) -> float:
        """Relative distance between the least objective found and the bound."""
        return 0.0 if self.objective_s <= 0 else max(0.0, 1 - self.lower_bound_s / self.objective_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRules:
    """The strategies of the layers ``first … last`` (inclusive) of a run of equal blocks.

    Keys are node names with the block's index written ``*``.
    """

    prefix: str
    first: int
    last: int
    rules: Mapping[str, NodeRules]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive units, the first and the last by name, that one pipeline rank holds."""

    rank: int
    first: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeRange:
    """Consecutive units, the first and the last by name, that compute again in the backward pass.

    ``mode`` is ``"full"`` (only the input of each unit is kept) or ``"selective"`` (what is cheap is computed again).
    ``messages`` says whether messages between and inside operators that compute again are sent again; else what they
    bring is kept, and what only they read does not compute again.
    """

    first: str
    last: str
    mode: str
    messages: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRange:
    """Consecutive units, the first and the last by name, that have activations on the host."""

    first: str
    last: str
    swap: Swap


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one network is trained on one cluster.

    ``mesh`` is that of one pipeline stage; its axes are called data, context, expert and tensor. ``rules`` hold every
    node outside runs of equal blocks by name, ``layers`` the nodes inside. A parameter's rule says how it is stored
    between steps (value, gradient and optimizer state). ``micro_batch`` is per data-parallel rank.

    Attributes
    ----------
    pipeline, pipeline_stride : pipeline ranks, and how far apart in rank neighbours are (0 with one)
    virtual : chunks a pipeline rank holds
    chunks : pipeline × virtual of them in model order, none with one stage; DualPipe lists its two copies one after
        the other, the second on the ranks from last to first
    schedule : ``"none"`` with one stage, else a name of `simulator.schedules`
    recompute : the strongest mode in ``recompute_ranges``; units outside them keep everything
    optimizer_sharding : ``"zero1"`` shards optimizer states along the data axis, ``"zero2"`` accumulated gradients as
        well, ``"zero3"`` parameters too: they are gathered unit by unit, in the forward and in the backward pass
    offload_ranges : units that have activations in the memory of the host from the forward to the backward pass
    shard_size : ranks of the data axis that share one copy of the states, which the others repeat; 0 for all
    sharding_threshold_bytes : smaller parameters stay whole
    offload_optimizer : optimizer states live beside the host: in its memory, or with ``offload_to`` ``"disk"`` in
        files that it maps
    offload_parameters : parameters live beside the host as well, where ``offload_to`` says, which updates them there:
        those of a unit are copied to the device when a pass of it begins, and are gone when it ends
    host_embeddings : tables that are looked up in live in the memory of the host, with their gradients and states
    context_algorithm : ``"none"``, ``"ring"`` or ``"all_to_all"``
    exchange : what a context says of how tensors travel
    software : what the plan is predicted for, a name of `planner.cost.software`; empty for the usual software
    attention : how attention runs, one of `planner.graph.attention`; empty for the usual fused kernel
    norms : how root-mean-square norms run, one of `planner.graph.norms`; empty for single operators
    expert_imbalance : tokens of the busiest rank of experts over an even share
    tensor_overlap : gathers and scatters of tensor ranks travel in parts beside the products before or behind them
    expert_overlap : tokens travel to their experts and back beside what another micro-batch computes
    sent_once : experts that a token goes to, where it travels once to each node for all of them; 0 where it travels
        once for each of them
    recompute_modules : parts of layers that ``selective`` computes again (`planner.graph.layer_parts`); none for all
        that is cheap
    whole_experts : a pin gives tensor ranks whole experts of their own, as ranks of an expert axis have
    copies : parts that the samples of a micro-batch are divided into, whose operators are issued in turn so that the
        messages of one travel while another computes
    """

    network: str
    fingerprint: str
    sequence_length: int | None
    hardware: str
    hardware_hash: str
    precision: str
    optimizer: str
    global_batch: int
    micro_batch: int
    micro_batches: int
    mesh: Mesh
    rules: Mapping[str, NodeRules]
    layers: tuple[LayerRules, ...]
    optimizer_sharding: str
    bucket_bytes: int
    certificate: Certificate
    parallel_mode: str = "auto_parallel"
    search_mode: str = "dynamic_programming"
    recompute: str = "none"
    schedule: str = "none"
    sequence_parallel: bool = False
    pipeline: int = 1
    pipeline_stride: int = 0
    virtual: int = 1
    chunks: tuple[Chunk, ...] = ()
    recompute_ranges: tuple[RecomputeRange, ...] = ()
    offload_ranges: tuple[OffloadRange, ...] = ()
    shard_size: int = 0
    sharding_threshold_bytes: int = 0
    offload_optimizer: bool = False
    offload_to: str = "host"
    offload_parameters: bool = False
    host_embeddings: bool = False
    context_algorithm: str = "none"
    exchange: Exchange = UNASKED
    copies: int = 1
    software: str = ""
    attention: str = ""
    norms: str = ""
    expert_imbalance: float = 1.0
    tensor_overlap: bool = False
    expert_overlap: bool = False
    sent_once: int = 0
    whole_experts: bool = False
    recompute_modules: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of all pipeline stages."""
        return self.mesh.size * self.pipeline

    @property
    def samples(self) -> int:
        """Samples that operators work on at once on all data-parallel ranks, of the data and of the expert axis.

        They are those of a micro-batch, or of one of its copies.
        """
        return self.micro_batch // self.copies * self.degree("data") * self.degree("expert")

    def degree(self, axis: str) -> int:
        """Size of the mesh axis called `axis`, 1 where the mesh has none."""
        return next((a.size for a in self.mesh.axes if a.name == axis), 1)

    @property
    def expert_ranks(self) -> int:
        """The ``ep`` that pins this plan: the size of the expert axis, or its product with that of the tensor axis.

        The product counts where tensor ranks hold whole experts and it does not divide the data-parallel ranks.
        """
        expert = self.degree("expert")
        dealt = expert * self.degree("tensor")
        return dealt if self.whole_experts and self.degree("data") * expert % dealt else expert

    @property
    def expert_load(self) -> float:
        """Tokens of the busiest rank's experts over an even share; 1 where every rank has all of its experts."""
        return self.expert_imbalance if self.degree("expert") > 1 or self.whole_experts else 1.0

    def layer_modes(self) -> tuple[str, ...]:
        """Mode of recomputation of each layer of the runs of equal blocks, in the order of the network.

        A range that begins or ends at a unit beside the blocks begins or ends with the blocks.
        """
        names = [f"{part.prefix}.{number}" for part in self.layers for number in range(part.first, part.last + 1)]
        names = list(dict.fromkeys(names))
        places = {name: place for place, name in enumerate(names)}
        modes = ["none"] * len(names)
        for part in self.recompute_ranges:
            if part.first == part.last and part.first not in places:
                continue
            first, last = places.get(part.first, 0), places.get(part.last, len(names) - 1)
            modes[first : last + 1] = [part.mode] * (last + 1 - first)
        return tuple(modes)

    @property
    def recomputation(self) -> str:
        """``none``, ``selective`` or ``full`` where all layers have that mode, else ``mixed``."""
        modes = set(self.layer_modes()) if self.recompute != "none" else set()
        return self.recompute if len(modes | {self.recompute}) == 1 else "mixed"


def expanded_rules(plan: Plan) -> dict[str, NodeRules]:
    """Strategies by name for every node of the unfolded graph."""
    result = dict(plan.rules)
    for part in plan.layers:
        start = len(part.prefix) + 2
        for number in range(part.first, part.last + 1):
            head = f"{part.prefix}.{number}"
            result.update((head + name[start:], rules) for name, rules in part.rules.items())
    return result


def optimizer_sharding(mesh: Mesh, parameters: Iterable[tuple[int, Placements]]) -> str:
    """Name how parameters are stored, each given by its elements and placements.

    ``zero1`` where most optimizer state is sharded along the data axis, else ``none``; whether accumulated gradients
    and parameters at work are sharded as well does not show here.

    >>> from planner.sharding.placement import MeshAxis
    >>> mesh = Mesh((MeshAxis("data", 4), MeshAxis("tensor", 2)))
    >>> optimizer_sharding(mesh, [(100, (0, -1)), (10, (-1, 0))])
    'zero1'
    """
    axis = next((i for i, a in enumerate(mesh.axes) if a.name == "data"), None)
    if axis is None:
        return "none"
    sharded = total = 0
    for elements, placements in parameters:
        total += elements
        sharded += elements * (placements[axis] >= 0)
    return "zero1" if 2 * sharded > total else "none"


def stored_parameters(
    graph: OperatorGraph, rules: Mapping[str, NodeRules], layers: Iterable[LayerRules], *, trained: bool = False
) -> Iterator[tuple[int, Placements]]:
    """Elements and placements of all parameters or those `trained`; equal layers may store theirs in different ways."""
    nodes = graph.trained if trained else {parameter.node for parameter in graph.parameters}
    elements = {graph.nodes[i].name: graph.nodes[i].outputs[0].elements for i in nodes}
    for run in graph.runs:
        for name in [graph.nodes[i].name for i in run.first if i in nodes]:
            elements[template_name(name, run.prefix)] = elements[name]
    parts = [(1, rules), *((part.last - part.first + 1, part.rules) for part in layers)]
    for times, part_rules in parts:
        for name in part_rules.keys() & elements.keys():
            yield times * elements[name], tuple(rule.outputs[0] for rule in part_rules[name])


def deals_experts(plan: Plan, graph: OperatorGraph) -> bool:
    """Whether tensor ranks deal experts out instead of cutting each along its width."""
    axis = next((i for i, a in enumerate(plan.mesh.axes) if a.name == "tensor" and a.size > 1), None)
    if axis is None or not experts_of(graph):
        return False
    rules = expanded_rules(plan)
    cuts = [
        rules[parameter.name][axis].outputs[0]
        for parameter in graph.parameters
        if "expert" in parameter.name
        and parameter.name in rules
        and len(graph.nodes[parameter.node].outputs[0].shape) == 3
    ]
    return bool(cuts) and all(cut == 0 for cut in cuts)
