"""What fused kernels read and write: a graph whose operators say which of their tensors never pass through memory.

Networks are written in single operators. Compilers and libraries run chains of them as one kernel, which reads each
tensor from outside once and writes only what is read outside (Chen et al., TVM, arXiv:1802.04799, section 3; Ansel et
al., PyTorch 2, ASPLOS 2024, section 4.2). The operators stay in the graph, for their placements and what is kept of
them; `Node.moved` says what their kernels move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod, sqrt

from planner.graph.norms import norms_in
from planner.graph.operator_graph import DROPOUT, PLACES, Node, OperatorGraph, Role, TensorRef
from planner.graph.recompute import KeptByGraph
from planner.graph.rewriting import wide_nodes
from simulator.errors import InputError
from simulator.program import Kernel, Phase

COMPILER = "compiler"
"""A compiler fuses chains of operators, and norms with what is in front of them (Inductor, XLA)."""
LIBRARY = "library"
"""A library has fused kernels for what stands between products, permutes tokens to their experts in one kernel, and
multiplies what reads the same tensor at once (Megatron-Core with Transformer Engine; MindSpeed)."""
PRODUCTS = "products"
"""Operators run one by one, but products that read the same tensor are one, as networks are written for it
(Megatron-DeepSpeed, LLM Foundry)."""
BATCH_NORMS = "batch_norms"
"""Operators run one by one, but batch norms take the sum and the ReLU behind them along, and their gradients those in
front (cuDNN's fused kernels for 16-bit images with channels last: ``CUDNN_BATCHNORM_OPS_BN_ADD_ACTIVATION``)."""
SINGLE = "single"
"""Operators run one by one (PyTorch without a compiler)."""
KINDS = (COMPILER, LIBRARY, PRODUCTS, BATCH_NORMS, SINGLE)

_POINTWISE = frozenset({Kernel.ELEMENTWISE, Kernel.ACCUMULATION, Kernel.ACTIVATION, Kernel.TRANSCENDENTAL, Kernel.COPY})
_GATHERS = frozenset({"aten.gather.default"})
"""Read at any place of a whole tensor, and pass on what they read."""
_SCATTERS = frozenset({"aten.scatter.src", "aten.scatter_add.default"})
"""Take what is made for them, and write to any place of a whole tensor."""
_ADAPTED = frozenset({"base_layer", "lora_A", "lora_B"})
"""Parts of products with adapters (`planner.networks.hugging_face_parts`)."""
_PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default"})
_AROUND_NORMS = frozenset({"aten.add.Tensor", "aten.relu.default", "aten.threshold_backward.default"})
_SHAPED_LIKE = frozenset({"aten.new_zeros.default", "aten.new_full.default", "aten.zeros_like.default"})
"""Read nothing of their tensor."""
_WHOLE_NUMBERS = frozenset({"int64", "int32", "bool"})
_RUN = (Role.OPERATOR, Role.GRADIENT_SUM)
"""What a step runs; all else is there before."""
LOSSES = ("aten._log_softmax.default", "aten._log_softmax_backward_data.default")
"""Losses, which software runs as casts, maxima, exponentials and sums; each of these passes over the logits."""
_HALF, _WHOLE = 2.0, 4.0
"""Bytes of numbers of 16 and of 32 bits."""
_NORM_BYTES, _NORM_BACKWARD_BYTES = 36.0, 72.0
"""Bytes of an element of 16 bits that a root-mean-square norm of single operators moves: a cast to float32, its square,
their mean, two products and a cast back, and twice as much for the gradient."""
_LOOKED_UP = 0.5
"""Of what a gather moves, the part that it reads."""


def check_fusion(kind: str) -> str:
    """The kind, if it is one of `KINDS` or empty; InputError if not."""
    if kind and kind not in KINDS:
        raise InputError(f"fusion {kind!r} is not one of {', '.join(KINDS)}; choose one, or leave it out")
    return kind


def lying_bytes(graph: OperatorGraph, ref: TensorRef) -> float:
    """Bytes of a tensor, or of the one that it repeats for other reasons than that the batch grows."""
    source, spec = graph.nodes[ref.node], graph.spec(ref)
    if source.op != "aten.expand.default":
        return float(spec.size_bytes)
    beneath = graph.spec(source.tensor_inputs[0])
    return float((beneath if any(beneath.batch_dims) == any(spec.batch_dims) else spec).size_bytes)


def in_memory(graph: OperatorGraph, ref: TensorRef) -> TensorRef:
    """The tensor in memory that a tensor is a view of."""
    while graph.nodes[ref.node].kernel is Kernel.VIEW and graph.nodes[ref.node].tensor_inputs:
        ref = graph.nodes[ref.node].tensor_inputs[0]
    return ref


def with_fusion(graph: OperatorGraph, kind: str, *, joined: bool = False) -> OperatorGraph:
    """The graph, not folded, with what the kernels of a kind of software move; as it is where no kind is named.

    Networks whose authors wrote several products of a tensor as one are ``joined`` with any software.

    A chain is joined where nothing outside of it stands between its operators: operators whose longest ways from the
    inputs have equally many kernels that cannot be joined. Values that a chain needs again backward, and can compute
    from what it reads there anyway, are not written.
    """
    if not check_fusion(kind):
        return graph
    joined = joined or kind in (LIBRARY, PRODUCTS)
    moved = _Fusion(graph=graph, kind=kind, joined=joined).moved() if joined or kind != SINGLE else {}
    if kind in (SINGLE, PRODUCTS, BATCH_NORMS):
        moved |= _wide_norms(graph)
    passes = {*LOSSES, *(_GATHERS | _SCATTERS if kind in (COMPILER, LIBRARY) else ())}
    nodes = [replace(n, kernel=Kernel.ELEMENTWISE) if n.op in passes else n for n in graph.nodes]
    for index, shares in moved.items():
        node = nodes[index]
        parts = float(any(shares))
        if parts and node.kernel is Kernel.MATMUL:
            parts = prod(product_parts(node, shares))
        nodes[index] = replace(node, moved=shares, flops=parts * node.flops)
    return replace(graph, fusion=kind, nodes=tuple(nodes))


def with_imbalance(graph: OperatorGraph, imbalance: float) -> OperatorGraph:
    """The graph of a rank whose experts get so many times an even share of the tokens, made once."""
    if imbalance == 1.0:
        return graph
    return _BUSIEST.once(graph, imbalance, lambda: _imbalanced(graph, imbalance))


_BUSIEST = KeptByGraph[float, OperatorGraph]()


def _imbalanced(graph: OperatorGraph, imbalance: float) -> OperatorGraph:
    nodes = list(graph.nodes)
    for index, _, ports in of_places(graph):
        node = nodes[index]
        before = node.moved or (1.0,) * len(ports)
        shares = tuple(share * imbalance if port else share for share, port in zip(before, ports, strict=True))
        more = imbalance if node.kernel is Kernel.MATMUL and node.flops else 1.0
        nodes[index] = replace(node, moved=shares, flops=more * node.flops)
    return replace(graph, nodes=tuple(nodes))


def of_places(graph: OperatorGraph) -> Iterator[tuple[int, float, tuple[bool, ...]]]:
    """Operators of experts, the part of their places that tokens fill, and which of their ports have rows of places."""
    places: dict[str, tuple[int, float]] = {}
    for node in graph.nodes:
        if node.op == PLACES:
            tokens, count = node.outputs[0].elements, node.outputs[-1].elements
            places[_block(node)] = (count, min(1.0, tokens / count))
    if not places:
        return
    fixed = {p.node for p in graph.parameters}
    sums = {in_memory(graph, p.gradient) for p in graph.parameters if p.gradient is not None}
    for index, node in enumerate(graph.nodes):
        if node.role not in _RUN or (node.kernel is Kernel.VIEW and node.tensor_inputs) or _block(node) not in places:
            continue
        count, part = places[_block(node)]
        refs = [*(in_memory(graph, ref) for ref in node.tensor_inputs)]
        refs += [TensorRef(index, o) for o in range(len(node.outputs))]
        ports = tuple(
            ref.node not in fixed and ref not in sums and prod(graph.spec(ref).shape[:-1]) == count for ref in refs
        )
        if any(ports):
            yield index, part, ports


def _wide_norms(graph: OperatorGraph) -> dict[int, tuple[float, ...]]:
    """Return what single operators of root-mean-square norms move, as shares of their traffic in 16 bits.

    Networks compute these norms in float32 and cast around them (``LlamaRMSNorm`` of transformers).
    """
    found: dict[int, tuple[float, ...]] = {}
    wide = wide_nodes(graph)

    def half_bytes(ref: TensorRef) -> float:
        return graph.spec(ref).elements * (_WHOLE if ref.node in wide else _HALF)

    for norm in norms_in(graph):
        elements = graph.spec(norm.values).elements
        for members, each in ((norm.forward, _NORM_BYTES), (norm.backward, _NORM_BACKWARD_BYTES)):
            nodes = [(index, graph.nodes[index]) for index in members]
            here = sum(half_bytes(ref) for _, node in nodes for ref in node.tensor_inputs)
            here += sum(half_bytes(TensorRef(index, o)) for index, node in nodes for o in range(len(node.outputs)))
            for index, node in nodes:
                found[index] = (each * elements / here,) * (len(node.tensor_inputs) + len(node.outputs))
    return found


def product_parts(node: Node, moved: tuple[float, ...]) -> tuple[float, float, float]:
    """Parts of the rows, columns and depth of a product that are there, by those of its factors and its result."""
    left, right, result = moved[len(node.tensor_inputs) - 2 : len(node.tensor_inputs) + 1]
    return sqrt(left * result / right), sqrt(right * result / left), sqrt(left * right / result)


def _owner(module: str) -> tuple[str, str]:
    """The module that has several products, and which part of each an adapted one is: its own, or its adapter's."""
    product, _, part = module.rpartition(".")
    if part not in _ADAPTED:
        return product, ""
    return product.rpartition(".")[0], part


def _block(node: Node) -> str:
    """The path of the first numbered module that has an operator: chains end where blocks do, which are all alike."""
    parts = node.module.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: numbered + 1])


@dataclass(frozen=True)
class _Fusion:
    """Kernels of a graph."""

    graph: OperatorGraph
    kind: str
    joined: bool

    def moved(self) -> dict[int, tuple[float, ...]]:
        """Shares of inputs and outputs that kernels move, of those that do not move all."""
        found: dict[int, tuple[float, ...]] = {}
        fuses = self.kind in (COMPILER, LIBRARY)
        for members in self.groups if fuses or self.kind == BATCH_NORMS else ():
            found |= self._of_group(members)
        for index in self._beside_attention() if fuses else ():
            found[index] = self._nothing(index)
        for index in self.sums_in_products:
            found[index] = self._nothing(index)
        if self.kind == LIBRARY:
            self._routed(found)
        for index, shares in chain(self._filled() if fuses else (), self._products() if self.joined else ()):
            before = found.get(index, (1.0,) * len(shares))
            found[index] = tuple(one * other for one, other in zip(before, shares, strict=True))
        return {index: shares for index, shares in found.items() if any(share != 1.0 for share in shares)}

    @cached_property
    def sums_in_products(self) -> frozenset[int]:
        """Sums of the gradients of a tensor that one product, of experts too, reads where the graph has several."""
        summed: set[int] = set()
        for index, node in enumerate(self.graph.nodes) if self.joined else ():
            sources = [self.base(ref).node for ref in node.tensor_inputs]
            if node.role is Role.GRADIENT_SUM and all(
                source in summed or self.graph.nodes[source].op in _PRODUCTS for source in sources
            ):
                summed.add(index)
        return frozenset(summed)

    def _nothing(self, index: int) -> tuple[float, ...]:
        node = self.graph.nodes[index]
        return (0.0,) * (len(node.tensor_inputs) + len(node.outputs))

    @cached_property
    def bases(self) -> list[TensorRef | None]:
        """What each view looks at, None for other nodes."""
        found: list[TensorRef | None] = []
        for node in self.graph.nodes:
            beneath = node.tensor_inputs[0] if node.kernel is Kernel.VIEW and node.tensor_inputs else None
            found.append(beneath and (found[beneath.node] or beneath))
        return found

    def base(self, ref: TensorRef) -> TensorRef:
        """The tensor in memory that a tensor is a view of."""
        return self.bases[ref.node] or ref

    @cached_property
    def readers(self) -> Mapping[TensorRef, frozenset[int]]:
        """Kernels that read each tensor in memory, also by views of it."""
        found: dict[TensorRef, set[int]] = {}
        for index, node in enumerate(self.graph.nodes):
            if self.bases[index] is None:
                for ref in node.tensor_inputs:
                    found.setdefault(self.base(ref), set()).add(index)
        return {ref: frozenset(users) for ref, users in found.items()}

    def _passes_on(self, node: Node) -> bool:
        """Whether what reads an operator's result can run in its kernel."""
        if node.kernel is Kernel.BATCH_NORMALIZATION:
            return node.phase is Phase.FORWARD
        return (
            node.op in _AROUND_NORMS if self.kind == BATCH_NORMS else node.kernel in _POINTWISE or node.op in _GATHERS
        )

    def _takes(self, node: Node) -> bool:
        """Whether an operator can run in the kernel that makes what it reads."""
        if node.kernel is Kernel.BATCH_NORMALIZATION:
            return self.kind == COMPILER or node.phase is Phase.BACKWARD
        if self.kind == BATCH_NORMS:
            return node.op in _AROUND_NORMS
        norm = self.kind == COMPILER and node.kernel is Kernel.NORMALIZATION
        return node.kernel in _POINTWISE or node.kernel is Kernel.REDUCTION or node.op in _SCATTERS or norm

    def _joins(self, source_index: int, target_index: int) -> bool:
        source, target = self.graph.nodes[source_index], self.graph.nodes[target_index]
        if self.kind == BATCH_NORMS and source.kernel is target.kernel:
            return False  # neither sums nor activations in a row
        made = source.role in _RUN and source.phase is target.phase and _block(source) == _block(target)
        own = source_index not in self.sums_in_products and target_index not in self.sums_in_products
        return made and own and self._passes_on(source) and self._takes(target)

    @cached_property
    def levels(self) -> list[int]:
        """Kernels that cannot be joined on the longest way to each operator."""
        nodes = self.graph.nodes
        found = [0] * len(nodes)
        for index, node in enumerate(nodes):
            sources = [self.base(ref).node for ref in node.tensor_inputs] if node.role in _RUN else []
            view = self.bases[index] is not None
            steps = ((s, nodes[s].role in _RUN and not view and not self._joins(s, index)) for s in sources)
            found[index] = max((found[s] + apart for s, apart in steps), default=0)
        return found

    @cached_property
    def groups(self) -> list[list[int]]:
        """Operators that share a kernel, in order; those that stand alone, too.

        Chains that read the same tensor are joined as well.
        """
        import networkx as nx

        nodes, level = self.graph.nodes, self.levels
        shared: nx.Graph[int] = nx.Graph()
        shared.add_nodes_from(i for i, node in enumerate(nodes) if self.bases[i] is None and node.role in _RUN)
        beside: dict[tuple[TensorRef, Phase, str, int], int] = {}
        for index in shared:
            node = nodes[index]
            for ref in map(self.base, node.tensor_inputs):
                source = nodes[ref.node]
                if source.role not in _RUN:
                    continue
                if level[ref.node] == level[index] and self._joins(ref.node, index):
                    shared.add_edge(ref.node, index)
                single = self.kind == BATCH_NORMS or index in self.sums_in_products
                if node.kernel in _POINTWISE and not single:
                    shared.add_edge(beside.setdefault((ref, node.phase, _block(node), level[index]), index), index)
        return sorted(map(sorted, nx.connected_components(shared)))

    @cached_property
    def recomputed(self) -> Mapping[TensorRef, frozenset[int]]:
        """What chains compute again backward rather than write it, with the operators that read it there."""
        group_of = {index: members for members in self.groups for index in members}
        found = {}
        for members in self.groups:
            for index in members if len(members) > 1 else ():
                node, tensor = self.graph.nodes[index], TensorRef(index)
                again = self.readers.get(tensor, frozenset()) - frozenset(members)
                if node.phase is not Phase.FORWARD or node.kernel not in _POINTWISE or node.op == DROPOUT or not again:
                    continue
                if again == self.readers[tensor] or any(not self._computes(node, group_of[user]) for user in again):
                    continue
                found[tensor] = again
        return found

    def _computes(self, node: Node, members: list[int]) -> bool:
        """Whether the operators of a kernel backward read all that makes a value of `node`."""
        if any(
            self.graph.nodes[i].phase is not Phase.BACKWARD or not self._takes(self.graph.nodes[i]) for i in members
        ):
            return False
        read = {self.base(ref) for index in members for ref in self.graph.nodes[index].tensor_inputs}
        return all(self.base(ref) in read for ref in node.tensor_inputs)

    def _of_group(self, members: list[int]) -> dict[int, tuple[float, ...]]:
        """Shares of what the operators of one kernel move."""
        inside, left = frozenset(members), dict[TensorRef, float]()
        if len(members) == 1 and self.graph.nodes[members[0]].op not in _SHAPED_LIKE:
            return {}
        found = {}
        for index in members:
            node = self.graph.nodes[index]
            shares = [self._read(index, ref, inside, left) for ref in node.tensor_inputs]
            unwritten = _LOOKED_UP if node.op in _GATHERS else 0.0
            shares += [
                1.0 if self._written(TensorRef(index, o), inside) else unwritten for o in range(len(node.outputs))
            ]
            found[index] = tuple(shares)
        return found

    def _read(self, index: int, ref: TensorRef, inside: frozenset[int], left: dict[TensorRef, float]) -> float:
        """The share of one input that its kernel has not read for another operator."""
        base, size = self.base(ref), lying_bytes(self.graph, ref)
        made_here = base.node in inside or index in self.recomputed.get(base, ())
        if made_here or self.graph.nodes[index].op in _SHAPED_LIKE or not size:
            return 0.0
        rest = left.setdefault(base, float(self.graph.spec(base).size_bytes))
        taken = min(size, rest)
        left[base] = rest - taken
        return taken / size

    def _written(self, tensor: TensorRef, inside: frozenset[int]) -> bool:
        readers = self.readers.get(tensor, frozenset())
        outside = readers - inside - self.recomputed.get(tensor, frozenset())
        return bool(outside) or not readers or tensor == self.graph.loss

    def _routed(self, found: dict[int, tuple[float, ...]]) -> None:
        """Drop the traffic of routing operators that a library does not run.

        Its router makes maps of a byte for each token and expert, and no numbers of places
        (``fused_topk_with_score_function`` of Transformer Engine). Experts weigh what their activation function returns
        by the share of the token (``weighted_bias_swiglu`` of Megatron-Core): nothing reads their results backward.
        """
        nodes = self.graph.nodes
        routing = {_block(node) for node in nodes if node.op in _GATHERS and node.kernel is Kernel.EMBEDDING}
        inside = [i for i, n in enumerate(nodes) if n.role in _RUN and self.bases[i] is None and _block(n) in routing]
        left_out = set[int]()
        for index in inside:
            node = nodes[index]
            if {spec.dtype for spec in node.outputs} <= _WHOLE_NUMBERS:
                left_out.add(index)
            elif node.op in _GATHERS and (again := self._weighed(index)) is not None:
                found[index] = (1.0,) * len(node.tensor_inputs) + (_LOOKED_UP,)
                left_out.add(again)
        for index in inside:
            refs, outputs = nodes[index].tensor_inputs, len(nodes[index].outputs)
            shares = found.get(index, (1.0,) * (len(refs) + outputs))
            read = [0.0 if self.base(ref).node in left_out else s for ref, s in zip(refs, shares, strict=False)]
            found[index] = self._nothing(index) if index in left_out else (*read, *shares[len(refs) :])

    def _weighed(self, index: int) -> int | None:
        """Return the one backward operator that reads a gather's result, to get the gradient of its rows' weights."""
        readers = self.readers.get(TensorRef(index), frozenset())
        behind = [user for user in readers if self.graph.nodes[user].phase is Phase.BACKWARD]
        ahead = [user for user in readers if self.graph.nodes[user].phase is Phase.FORWARD]
        products = all(self.graph.nodes[user].op == "aten.mul.Tensor" for user in readers)
        return behind[0] if products and len(ahead) == len(behind) == 1 else None

    def _filled(self) -> Iterator[tuple[int, tuple[float, ...]]]:
        """The part of the experts' places that tokens fill, for what reads and writes these.

        Networks give each expert as many places, some more than it gets tokens on average. Grouped products and the
        permutation around them have rows for tokens alone (Gale et al., MegaBlocks, arXiv:2211.15841, section 4).
        """
        for index, part, ports in of_places(self.graph):
            if part < 1.0:
                yield index, tuple(part if port else 1.0 for port in ports)

    def _products(self) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Products of one tensor with weights of one module, and their gradients: the first of each does all of it.

        Queries, keys and values are one product, and so are a gate and what it opens (``linear_qkv`` and ``linear_fc1``
        of Megatron-Core). Backward the gradient of the tensor is one product, over the depth of all, and that of the
        weights another.
        """
        nodes = self.graph.nodes
        fixed = {p.node for p in self.graph.parameters}
        together: dict[tuple[TensorRef, str, str], list[int]] = {}
        for index, node in enumerate(nodes):
            if node.kernel is Kernel.MATMUL and node.role is Role.OPERATOR and node.phase is Phase.FORWARD:
                left, right = map(self.base, node.tensor_inputs[-2:])
                if right.node in fixed and left.node not in fixed:
                    together.setdefault((left, *_owner(node.module)), []).append(index)
        backward: dict[int, list[int]] = {}
        for index, node in enumerate(nodes):
            if node.kernel is Kernel.MATMUL and node.phase is Phase.BACKWARD and node.forward is not None:
                backward.setdefault(node.forward, []).append(index)
        for (tensor, *_), members in together.items():
            widths = [nodes[index].outputs[0].shape[-1] for index in members]
            if len(members) == 1 or len({nodes[index].outputs[0].shape[:-1] for index in members}) > 1:
                continue
            ratio = sum(widths) / widths[0]
            yield from self._as_one(members, {-1: ratio, -2: 1.0}, ratio)
            of_input, of_weight = list[int](), list[int]()
            for index in (user for member in members for user in backward.get(member, ())):
                factors = set(map(self.base, nodes[index].tensor_inputs[-2:]))
                (of_weight if tensor in factors else of_input).append(index)
            if len(of_input) == len(members):
                yield from self._as_one(of_input, {-1: ratio, -2: ratio}, 1.0)
            if len(of_weight) == len(members):
                on_left = self.base(nodes[of_weight[0]].tensor_inputs[-2]) == tensor
                wider, other = (-1, -2) if on_left else (-2, -1)
                yield from self._as_one(of_weight, {wider: ratio, other: 1.0}, ratio)

    def _as_one(
        self, members: list[int], factors: Mapping[int, float], result: float
    ) -> Iterator[tuple[int, tuple[float, ...]]]:
        """The first of the members with all that they read and write, and the others with nothing."""
        first, *others = members
        shares = [1.0] * len(self.graph.nodes[first].tensor_inputs)
        for place, share in factors.items():
            shares[place] = share
        yield first, (*shares, result)
        for index in others:
            yield index, self._nothing(index)

    def _beside_attention(self) -> Iterator[int]:
        """Copies of keys and values for the heads that share them, and the sums of their gradients.

        Fused kernels serve groups of heads as they lie (Ainslie et al., arXiv:2305.13245; FlashAttention-2, cuDNN and
        FlashAttentionScore take fewer key than query heads).
        """
        nodes = self.graph.nodes
        for index, node in enumerate(nodes):
            if node.role is not Role.OPERATOR or node.kernel not in (Kernel.COPY, Kernel.REDUCTION):
                continue
            if not node.tensor_inputs:
                continue  # first states of a recurrent network, filled with zeros
            source = self.base(node.tensor_inputs[0])
            readers = self.readers.get(TensorRef(index), frozenset())
            repeats = self.graph.spec(source).elements < node.outputs[0].elements
            copied = repeats and readers and all(nodes[user].kernel is Kernel.ATTENTION for user in readers)
            summed = node.kernel is Kernel.REDUCTION and nodes[source.node].kernel is Kernel.ATTENTION
            if (node.kernel is Kernel.COPY and copied) or summed:
                yield index
