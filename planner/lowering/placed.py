"""A graph with the strategies of its nodes, and what follows from them for every micro-batch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from math import inf, prod

from planner.cost.work import Optimizer, state_bytes, traffic_bytes
from planner.graph.chain import Chain
from planner.graph.host_tables import NO_TABLES, host_tables
from planner.graph.kernel_shapes import kernel_shape, local_kernel
from planner.graph.operator_graph import DTYPE_BYTES, Node, OperatorGraph, Role, TensorRef, TensorSpec
from planner.lowering.groups import BY_SIZE, message_groups
from planner.lowering.instructions import Communicate, LoweredInput
from planner.lowering.loaded import BATCH_AXES, loaded_placements
from planner.lowering.units import no_units, units_of
from planner.networks.marks import Swap
from planner.plans.exchange import UNASKED, Exchange
from planner.plans.plan import NodeRules
from planner.sharding.context import sequence_cut
from planner.sharding.inner_messages import without_all_to_alls
from planner.sharding.placement import PARTIAL, REPLICATE, Mesh, Placements, placement_name
from planner.sharding.redistribution import Step, redistribution
from planner.sharding.rules import Rule
from planner.sharding.sequence import SequenceCut
from simulator.errors import StrategyError
from simulator.program import Buffer, BufferKind, Collective, Kernel

_GIVEN = frozenset({Role.PARAMETER, Role.INPUT})
"""Roles of nodes that take no work."""
CONTEXT = "context"
"""The mesh axis along which sequences are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringOptions:
    """What a plan says beside the strategies.

    ``recompute`` holds the mode of the units that compute again, by name, of which those in ``keeps_messages`` keep
    what messages bring; ``offload`` says which units have activations on the host; ``shard_size`` the ranks of the data
    axis over which stored shards are spread, 0 for all. ``groups`` are those of gradients by parameter
    (`planner.lowering.groups`), where a shallow network has those of a deeper one; None for what ``exchange`` says.
    The operators of a micro-batch run on each of its ``copies``.
    """

    mesh: Mesh
    micro_batches: int
    optimizer: Optimizer
    bucket_bytes: int
    optimizer_sharding: str = "zero1"
    recompute: Mapping[str, str] = field(default_factory=dict)
    keeps_messages: frozenset[str] = frozenset()
    offload: Mapping[str, Swap] = field(default_factory=dict)
    shard_size: int = 0
    offload_optimizer: bool = False
    offload_to: str = "host"
    offload_parameters: bool = False
    host_embeddings: bool = False
    exchange: Exchange = UNASKED
    groups: Mapping[str, int] | None = None
    copies: int = 1


@cache
def local_share(placements: Placements, sizes: tuple[int, ...]) -> float:
    """Part of a tensor that one rank holds."""
    return 1.0 / prod(size for p, size in zip(placements, sizes, strict=True) if p >= 0)


@lru_cache(maxsize=4096)
def _local_shape(
    kernel: Kernel, sizes: tuple[float, ...], shares: tuple[float, float, float], work: float
) -> tuple[float, float, float, float]:
    """`local_kernel`, of which networks of equal layers have few that differ."""
    first, second, third, fourth = local_kernel(kernel, sizes, shares, work)
    return float(first), float(second), float(third), float(fourth)


@cache
def placements_text(placements: Placements) -> str:
    """Names of placements, outermost axis first.

    >>> placements_text((0, -1))
    'S(0),R'
    """
    return ",".join(map(placement_name, placements))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Placements of a node's inputs and outputs, bytes of each local output, and the local work."""

    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    sizes: tuple[int, ...]
    flops: float
    bytes_moved: float
    shape: tuple[float, float, float, float] | None

    def shape_of(self, part: float) -> tuple[float, float, float, float] | None:
        """Shape of a part of the work, cut by its first size: batch, groups or heads."""
        return self.shape and (self.shape[0] * part, *self.shape[1:])


class PlacedGraph:
    """The graph with its strategies, and what follows from them for every segment."""

    def __init__(
        self,
        graph: OperatorGraph,
        rules: Mapping[str, NodeRules],
        options: LoweringOptions,
        units: Chain | None = None,
    ) -> None:
        self.graph = graph
        self.options = options
        self.host = host_tables(graph) if options.host_embeddings else NO_TABLES
        parameters = frozenset(p.node for p in graph.parameters) if options.offload_parameters else frozenset()
        alone = self.host.parameters - self.host.shared
        self.away: frozenset[int] = (parameters - alone) | self.host.shared
        """Parameters in the memory of the host that are copied to the device for each pass of a unit."""
        self.disk: frozenset[int] = parameters - alone if options.offload_to == "disk" else frozenset()
        """Those of them in files that the host maps."""
        self.sizes = options.mesh.sizes
        axes = len(self.sizes)
        self.replicated: Placements = (REPLICATE,) * axes
        self._recipes: dict[tuple[int, int, str, tuple[float, ...]], Recipe] = {}
        self._recipe_of: list[Recipe | None] = [None] * len(graph.nodes)
        self._gathered: dict[int, list[Placements]] = {}
        self._gradient_paths: dict[TensorRef, tuple[tuple[Step, ...], tuple[Step, ...]]] = {}
        self._cuts: dict[tuple[TensorRef, int], SequenceCut] = {}
        self._inside: dict[int, tuple[bool, bool]] = {}
        self._gradient_refs = {p.node: p.gradient for p in graph.parameters if p.gradient is not None}
        self.gradient_of = {p.gradient: p.node for p in graph.parameters if p.gradient is not None}
        self.rules: list[NodeRules] = []
        own_samples: dict[int, NodeRules] = {}
        gathering: dict[int, NodeRules] = {}
        layerwise = frozenset(options.exchange.layerwise)
        places = {entry.node: number for number, entry in enumerate(graph.inputs)}
        for node in graph.nodes:
            if node.role is Role.CONSTANT:
                everywhere = Rule(
                    (REPLICATE,) * len(node.tensor_inputs), (REPLICATE,) * len(node.outputs), splits_work=False
                )
                self.rules.append((everywhere,) * axes)
            elif node.name in layerwise or (node.role in (Role.PARAMETER, Role.INPUT) and node.name not in rules):
                # its own on each rank, or read by nothing, so that no search has placed it
                self.rules.append((Rule((), (REPLICATE,), splits_work=False),) * axes)
            elif options.exchange.data and len(self.rules) in places:
                self.rules.append(self._loaded(node, places[len(self.rules)], rules[node.name]))
            elif options.exchange.cross_batch and any(rule.reduced_elements for rule in rules[node.name]):
                chosen = rules[node.name]
                self.rules.append(own_samples.setdefault(id(chosen), self._of_own_samples(node, chosen)))
            elif not options.exchange.all_to_all and any(rule.messages for rule in rules[node.name]):
                chosen = rules[node.name]
                found = tuple(without_all_to_alls(rule, size) for rule, size in zip(chosen, self.sizes, strict=True))
                self.rules.append(gathering.setdefault(id(chosen), found))
            else:
                self.rules.append(rules[node.name])
        self.stored: dict[int, Placements] = {
            i: self.output_placements(TensorRef(i))
            for i, node in enumerate(graph.nodes)
            if node.role in (Role.PARAMETER, Role.INPUT)
        }
        self.by_unit: frozenset[int] = frozenset(
            p.node for p in graph.parameters if options.optimizer_sharding == "zero3" and self.gathered(p.node)
        )
        fetched = self.by_unit | self.away
        plain = units is None and not fetched and not options.offload and set(options.recompute.values()) <= {"none"}
        self.units = no_units(graph) if plain else units_of(graph, options.recompute, fetched, options.offload, units)
        self.read = {*graph.consumers, graph.loss, *(p.gradient for p in graph.parameters if p.gradient)}
        self.loss_value = self.value_name(graph.loss, self.replicated)

    def with_messages(self, bucket_bytes: int) -> PlacedGraph:
        """The same with messages of another size, on which nothing depends that is kept of it."""
        found = copy(self)
        found.options = replace(self.options, bucket_bytes=bucket_bytes)
        return found

    def _loaded(self, node: Node, number: int, own: NodeRules) -> NodeRules:
        """How a batch tensor arrives."""
        shape, written = node.outputs[0].shape, tuple(rule.outputs[0] for rule in own)
        found = loaded_placements(self.options.exchange.data, number, shape, self.options.mesh.axes, written)
        return tuple(Rule((), (placement,), splits_work=False) for placement in found)

    def _of_own_samples(self, node: Node, chosen: NodeRules) -> NodeRules:
        """Rules with which a rank reduces over its own samples alone; the gradients of parameters are then partial."""
        backward, found = node.op.endswith("backward.default"), []
        for rule, axis in zip(chosen, self.options.mesh.axes, strict=True):
            if rule.reduced_elements and axis.name in BATCH_AXES:
                others = [PARTIAL if backward and p == REPLICATE else p for p in rule.outputs[1:]]
                rule = replace(rule, outputs=(rule.outputs[0], *others), reduced_elements=0)
            found.append(rule)
        return tuple(found)

    def messages_inside(self, index: int) -> tuple[bool, bool]:
        """Whether messages other than sums travel inside an operator, and whether any do."""
        rules = self.rules[index]
        found = self._inside.get(id(rules))
        if found is None:
            sends = any(rule.messages for rule in rules)
            found = self._inside[id(rules)] = sends, sends or any(rule.reduced_elements for rule in rules)
        return found

    def recipe(self, index: int) -> Recipe:
        """Local work of a node; equal blocks with equal strategies share it."""
        return self._recipe_of[index] or self._find_recipe(index)

    def _find_recipe(self, index: int) -> Recipe:
        node, rules = self.graph.nodes[index], self.rules[index]
        key = (id(node.outputs), id(rules), node.op, node.moved)
        found = self._recipes.get(key)
        if found is None:
            found = self._recipes[key] = self._new_recipe(node, rules)
        self._recipe_of[index] = found
        return found

    def _new_recipe(self, node: Node, rules: NodeRules) -> Recipe:
        inputs = tuple([tuple([rule.inputs[n] for rule in rules]) for n in range(len(node.tensor_inputs))])
        outputs = tuple([tuple([rule.outputs[n] for rule in rules]) for n in range(len(node.outputs))])
        sizes = tuple([self.local_bytes(spec, p) for spec, p in zip(node.outputs, outputs, strict=True)])
        if node.role in _GIVEN:
            return Recipe(inputs=inputs, outputs=outputs, sizes=sizes, flops=0.0, bytes_moved=0.0, shape=None)
        shares = [local_share(placements, self.sizes) for placements in (*inputs, *outputs)]
        split = prod([size for rule, size in zip(rules, self.sizes, strict=True) if rule.splits_work])
        return Recipe(
            inputs=inputs,
            outputs=outputs,
            sizes=sizes,
            flops=node.flops / split,
            bytes_moved=traffic_bytes(self.graph, node, shares),
            shape=self._shape(node, shares, 1.0 / split),
        )

    def _shape(self, node: Node, shares: list[float], work: float) -> tuple[float, float, float, float] | None:
        whole = kernel_shape(self.graph, node)
        if whole is None:
            return None
        one, two, three = (shares[port] for port in whole.ports)
        return _local_shape(node.kernel, whole.sizes, (one, two, three), work)

    def shares(self, index: int) -> list[float]:
        """Part of each tensor input, then of each output of a node that is local."""
        recipe = self.recipe(index)
        return [local_share(placements, self.sizes) for placements in (*recipe.inputs, *recipe.outputs)]

    def output_placements(self, ref: TensorRef) -> Placements:
        """Placements in which a tensor's node writes it."""
        return self.recipe(ref.node).outputs[ref.output]

    def local_bytes(self, spec: TensorSpec, placements: Placements) -> int:
        """Bytes of one rank's piece of a tensor."""
        return int(spec.size_bytes * local_share(placements, self.sizes))

    def device_bytes(self, ref: TensorRef, placements: Placements) -> int:
        """Bytes of one rank's piece of a tensor in the memory of its device."""
        return 0 if self.host.holds(ref) else self.local_bytes(self.graph.spec(ref), placements)

    def written_name(self, ref: TensorRef) -> str:
        """Name of a tensor in the placement its node writes."""
        node = self.graph.nodes[ref.node]
        return node.name if len(node.outputs) == 1 else f"{node.name}:{ref.output}"

    def on_host(self, parameter: int) -> bool:
        """Whether a parameter is in the memory of the host between passes."""
        return parameter in self.host.parameters or parameter in self.away

    def on_disk(self) -> tuple[str, ...]:
        """Parameters in files that the host maps into memory."""
        return tuple(self.graph.nodes[index].name for index in sorted(self.disk))

    def updated_on_host(self, parameter: int) -> bool:
        """Whether the host updates a parameter: it does what it holds, or the states of."""
        return self.options.offload_optimizer or self.on_host(parameter)

    def value_name(self, ref: TensorRef, placements: Placements) -> str:
        """Name of a tensor in one placement; as written, it is called like its node."""
        name = self.written_name(ref)
        if placements == self.output_placements(ref):
            return name
        return f"{name}@{placements_text(placements)}"

    def gathered(self, node: int) -> list[Placements]:
        """Placements other than the stored one in which a parameter is read and that need a message."""
        if node not in self._gathered:
            # What comes from the host for a unit is taken to where it is read there and then.
            self._gathered[node] = [] if node in self.away else self._read_elsewhere(node)
        return self._gathered[node]

    def _read_elsewhere(self, node: int) -> list[Placements]:
        ref = TensorRef(node)
        wanted: dict[Placements, None] = {}
        for user in self.graph.consumers.get(ref, ()):
            for placements, used in zip(self.recipe(user).inputs, self.graph.nodes[user].tensor_inputs, strict=True):
                if used == ref:
                    wanted[placements] = None
        return [w for w in wanted if any(isinstance(s.operation, Collective) for s in self.path(self.stored[node], w))]

    def way(self, source: Placements, target: Placements) -> tuple[Step, ...] | None:
        """Steps of a redistribution, by all-to-alls where the plan has them; None where there is no way."""
        return redistribution(source, target, self.options.exchange.all_to_all)

    def inputs(self, nodes: Container[int]) -> tuple[LoweredInput, ...]:
        """Batch tensors among `nodes` as a rank receives them."""
        return tuple(
            LoweredInput(
                name=entry.name,
                value=self.graph.nodes[entry.node].name,
                placements=self.stored[entry.node],
                cut=self._input_cut(entry.node),
            )
            for entry in self.graph.inputs
            if entry.node in nodes
        )

    def _input_cut(self, node: int) -> SequenceCut | None:
        cuts = (self.cut(TensorRef(node), axis, dim) for axis, dim in enumerate(self.stored[node]) if dim >= 0)
        return next((cut for cut in cuts if cut is not None), None)

    def cut(self, ref: TensorRef, axis: int, dim: int) -> SequenceCut | None:
        """How ranks of an axis share a dim of a tensor where it is a context axis; None for equal pieces in a row."""
        if self.options.mesh.axes[axis].name != CONTEXT:
            return None
        key = ref, dim
        if key not in self._cuts:
            self._cuts[key] = sequence_cut(self.graph, [rules[axis] for rules in self.rules], ref, dim, axis)
        return self._cuts[key]

    def path(self, source: Placements, target: Placements) -> tuple[Step, ...]:
        """Steps of a redistribution; StrategyError where there are none."""
        steps = self.way(source, target)
        if steps is None:
            raise StrategyError(
                f"a tensor that is written as {placements_text(source)} is read as {placements_text(target)}, and "
                "nothing sharded can become partial; plan the network again"
            )
        return steps

    def is_trained(self, parameter: int) -> bool:
        """Whether a parameter, by its node, has a gradient."""
        return parameter in self._gradient_refs

    def gradient_ref(self, parameter: int) -> TensorRef:
        """Gradient of a trained parameter, by its node."""
        return self._gradient_refs[parameter]

    def gradient_path(self, parameter: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Steps from a gradient as it is written to the stored placement: every micro-batch, and once a step.

        Where accumulated gradients are sharded, everything up to the last reduce-scatter is done every micro-batch.
        """
        return self.path_of_gradient(self.gradient_ref(parameter), parameter)

    def path_of_gradient(self, ref: TensorRef, parameter: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """The same for one term of a parameter's gradient."""
        if ref not in self._gradient_paths:
            steps = self.path(self.output_placements(ref), self.stored[parameter])
            if self.is_layerwise(parameter):
                steps = ()
            if self.options.exchange.whole_sums and self.options.optimizer_sharding == "zero1":
                steps = tuple(one for step in steps for one in _summed_whole(step))
            scattered = [i for i, step in enumerate(steps) if step.operation is Collective.REDUCE_SCATTER]
            at = scattered[-1] + 1 if scattered and self.options.optimizer_sharding in ("zero2", "zero3") else 0
            self._gradient_paths[ref] = (steps[:at], steps[at:])
        return self._gradient_paths[ref]

    def is_layerwise(self, parameter: int) -> bool:
        """Whether every rank has a parameter of its own, so that its gradient is not added up."""
        return self.graph.nodes[parameter].name in self.options.exchange.layerwise

    def travelling_dtype(self, gradient: TensorSpec) -> str:
        """Type in which a gradient travels."""
        wide = self.options.exchange.gradient_dtype
        return wide if wide and DTYPE_BYTES[gradient.dtype] < DTYPE_BYTES[wide] else gradient.dtype

    def travelling_bytes(self, gradient: TensorSpec) -> int:
        """Bytes of a whole gradient on its way."""
        return gradient.size_bytes // DTYPE_BYTES[gradient.dtype] * DTYPE_BYTES[self.travelling_dtype(gradient)]

    def fused_bytes(self, collective: Collective) -> int:
        """Size at which a message of several tensors is full."""
        return self.options.exchange.fused_bytes(collective, self.options.bucket_bytes)

    def gather_limit(self, *, of_unit: bool) -> float:
        """Size at which a message of parameters is full; those of a unit travel in one unless a size is said."""
        if of_unit and self.options.exchange.all_gather_bytes is None:
            return inf
        return self.fused_bytes(Collective.ALL_GATHER)

    @cached_property
    def fusion_groups(self) -> dict[int, int]:
        """The group of each trained parameter whose gradient's message is said, by its node."""
        trained = {self.graph.nodes[p.node].name: p.node for p in self.graph.parameters if self.is_trained(p.node)}
        groups = self.options.groups
        groups = message_groups(self.options.exchange, list(trained)) if groups is None else groups
        return {trained[name]: group for name, group in groups.items() if name in trained}

    def fusion_group(self, parameter: int, collective: Collective) -> int:
        """The group that a gradient travels with; places speak of all-reduces alone."""
        if collective is not Collective.ALL_REDUCE and (self.options.exchange.fusion_places or self.by_unit):
            return BY_SIZE
        return self.fusion_groups.get(parameter, BY_SIZE)

    def of_shards(self, message: Communicate) -> bool:
        """Whether a message is of a unit's parameters that data ranks share out, or of their gradients."""
        moves = message.asynchronous and message.collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        return bool(self.by_unit) and moves and self.options.mesh.axes[message.axis].name == "data"

    def divisor(self, parameter: int) -> float:
        """What the gradient of a parameter, summed over micro-batches and ranks, is divided by."""
        asked = self.options.exchange
        steps = self.path(self.output_placements(self.gradient_ref(parameter)), self.stored[parameter])
        summing = {step.axis for step in steps if step.operation in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)}
        group = float(prod(self.sizes[axis] for axis in summing))
        power = 1 if self.is_layerwise(parameter) else asked.group_power
        divisor: float = self.options.micro_batches * self.options.copies / group**power
        if asked.repeated_loss:
            written = self.output_placements(self.graph.loss)
            divisor /= prod(size for p, size in zip(written, self.sizes, strict=True) if p == REPLICATE)
        return divisor

    def volume(self, steps: tuple[Step, ...]) -> float:
        """Share of a tensor that a path puts on the wire."""
        return sum(
            (2.0 if s.operation is Collective.ALL_REDUCE else 1.0) / prod(self.sizes[a] for a in s.sharded_axes)
            for s in steps
            if isinstance(s.operation, Collective)
        )

    def resident(self) -> list[Buffer]:
        """Parameters, optimizer states and the batch."""
        buffers = []
        for index, placements in self.stored.items():
            node = self.graph.nodes[index]
            spec = node.outputs[0]
            size = self.local_bytes(spec, placements)
            kind = BufferKind.PARAMETER if node.role is Role.PARAMETER else BufferKind.ACTIVATION
            buffers.append(Buffer(name=node.name, size_bytes=size, kind=kind))
            states = state_bytes(self.options.optimizer, spec.dtype) * size // DTYPE_BYTES[spec.dtype]
            if self.on_host(index):
                buffers.pop()
            elif self.is_trained(index) and states and not self.options.offload_optimizer:
                name = f"{node.name}.states"
                buffers.append(Buffer(name=name, size_bytes=states, kind=BufferKind.OPTIMIZER_STATE))
        return buffers


def _summed_whole(step: Step) -> tuple[Step, ...]:
    """A reduce-scatter as an all-reduce, of which each rank keeps its chunk; other steps as they are."""
    if step.operation is not Collective.REDUCE_SCATTER:
        return (step,)
    whole = (*step.before[: step.axis], REPLICATE, *step.before[step.axis + 1 :])
    return (
        replace(step, operation=Collective.ALL_REDUCE, after=whole),
        replace(step, operation="slice", before=whole),
    )
