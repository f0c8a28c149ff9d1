"""Device memory of a training run, by stage and use: see `planner.cost.memory.figures`.

A run goes out of memory when it would have to reserve more than the profile says a job can use (the profile already
takes the context off).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from planner.cost.memory.activations import LayerActivations, bias_bytes, layer_activations
from planner.cost.memory.figures import MemoryEstimate, StageMemory
from planner.cost.memory.parameters import (
    RankParameters,
    StageContent,
    distinct_stages,
    layer_parameters,
    local_vocabulary,
    stage_contents,
    stage_parameters,
    stage_residency,
)
from planner.cost.memory.states import (
    RankStates,
    accumulated_apart,
    context_bytes,
    shards,
    states_of,
    step_bytes,
    workspace_bytes,
)
from planner.cost.memory_traits import (
    GATHERED_LOGITS_BYTES,
    LOW_PRECISION_BYTES,
    PLAIN_LOSS_BYTES,
    SCRIPTED_LOSS_BYTES,
    SHIFTED_LOGITS_BYTES,
    MemoryTraits,
    traits_of,
)
from planner.cost.stacks import AttentionKernel
from planner.cost.training_run import (
    LayeredNetwork,
    OptimizerSharding,
    Recompute,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)
from simulator.hardware import Hardware
from simulator.program import Kernel

_PIPELINED = (OptimizerSharding.NONE, OptimizerSharding.ZERO1)
"""What DeepSpeed's pipeline engine runs; with more sharded it runs without."""
_PREFETCHED_ELEMENTS = 5e7
"""DeepSpeed's default ``stage3_prefetch_bucket_size``."""


def training_memory(run: TrainingRun) -> MemoryEstimate:
    """Memory of every stage of `run`."""
    return _memory(run, range(run.setup.pp))


def peak_memory(run: TrainingRun) -> MemoryEstimate:
    """Memory of the stages that can be the fullest, and of the last: the figures are those of `training_memory`.

    Under every schedule the micro-batches in flight do not grow along the pipeline; so among stages of equal content
    the first is the fullest.
    """
    if isinstance(run.network, LayeredNetwork):
        return training_memory(run)
    return _memory(run, sorted({*distinct_stages(run.network, run.setup), run.setup.pp - 1}))


def _memory(run: TrainingRun, indices: Iterable[int]) -> MemoryEstimate:
    limit = run.hardware.device_memory_bytes
    if isinstance(run.network, LayeredNetwork):
        return MemoryEstimate(stages=(_layered(run.network, run.setup, run.hardware),), limit_bytes=limit)
    rank, indices, setup = _RunMemory.of(run.network, run.setup, run.hardware), tuple(indices), run.setup
    near = max(run.hardware.devices_per_node // (setup.tp * setup.cp * setup.dp), 1)
    return MemoryEstimate(
        stages=tuple(rank.stage(index) for index in indices),
        limit_bytes=limit,
        first_node_stages=sum(index < near for index in indices),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Activation bytes of a run's most frequent layer, with the allocator's share.

    ``kept`` has them for one micro-batch by mode of recomputation. With several micro-batches in flight each takes
    ``in_flight`` times as many. Every rank holds ``fixed`` bytes besides.
    """

    kept: dict[Recompute, float]
    in_flight: float
    fixed: float


def layer_bytes(run: TrainingRun) -> LayerBytes:
    """Activation bytes of one transformer layer, by the formulas of `training_memory`."""
    shape, setup, traits = run.network, run.setup, traits_of(run.setup.stack)
    assert isinstance(shape, TransformerShape)  # others have no layers that are alike
    dense, expert, _ = _activations(shape, setup)
    layer, share = expert if shape.experts else dense, 1 + traits.reserved_share
    return LayerBytes(
        kept={
            mode: (layer.alternate if setup.every_second_product else layer.kept(setup, mode)) * share
            for mode in Recompute
        },
        in_flight=1 + (0.0 if setup.expandable_segments else traits.in_flight_share / share),
        fixed=traits.allocator_bytes + workspace_bytes(traits, setup, run.hardware),
    )


def reserved_memory_bytes(run: TrainingRun) -> float:
    """Peak of the allocator, from the stages that can be the fullest: the scalar that decides whether a run fits."""
    if isinstance(run.network, LayeredNetwork):
        return _layered(run.network, run.setup, run.hardware).reserved_bytes
    rank = _RunMemory.of(run.network, run.setup, run.hardware)
    stages = distinct_stages(run.network, run.setup)
    return max(rank.stage(index, first_step=False).reserved_bytes for index in stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunMemory:
    """What all stages of a run have in common."""

    shape: TransformerShape
    setup: TrainingSetup
    traits: MemoryTraits
    contents: tuple[StageContent, ...]
    dense: LayerActivations
    expert: LayerActivations
    encoder: LayerActivations
    hardware: Hardware
    context: float

    @staticmethod
    def of(shape: TransformerShape, setup: TrainingSetup, hardware: Hardware) -> _RunMemory:
        traits = traits_of(setup.stack)
        dense, expert, encoder = _activations(shape, setup)
        return _RunMemory(
            shape=shape,
            setup=setup,
            traits=traits,
            contents=stage_contents(shape, setup),
            dense=dense,
            expert=expert,
            encoder=encoder,
            hardware=hardware,
            context=context_bytes(setup, traits, hardware),
        )

    def stage(self, index: int, *, first_step: bool = True) -> StageMemory:
        """Memory of stage `index` at its fullest moment; what the first step takes only where it is asked for.

        That is when the loss goes back on the last stage, when the first layer to go back is at work on the others,
        or the optimizer step: by then activations are gone, but 16-bit gradients stand once more in float32.
        """
        shape, setup, content = self.shape, self.setup, self.contents[index]
        parameters = stage_parameters(shape, setup, content, self.traits.padded_vocabulary)
        states, shard = states_of(parameters, setup, self.traits)
        in_flight = stage_residency(setup, index)
        kept, local = self._kept(index), self._local_share(index)
        each = kept * (1 - local) + self._embedded(content)
        activations = each * in_flight
        if setup.offload_activations:
            # What one layer keeps is on its way to the host, what another one keeps on its way back.
            activations = min(activations, 2 * kept / max(content.layers, 1.0))
        layer = working = self._working(index)
        if content.head:
            ends, loss = self._head(content)
            activations += ends
            working = max(working, loss)
        freed = self._freed_logits(content)
        late = self._late(activations + working, states.gradients + layer, states.gradients)
        gathered = self._gathered(content, parameters.total)
        communication = self._communication(content, parameters.total)
        moving = activations + working + gathered + communication
        step, moved = step_bytes(setup, self.traits, shard), activations + working + gathered
        first = self._first_step(content, states, moving, step) if first_step else 0.0
        cached = self._cached(content, min(step, moved), step)
        late = max(step, moved) - max(step, moved - late)  # by the update all gradients are there
        if step > moved:
            activations, working, gathered = 0.0, step, 0.0
        return _stage_memory(
            states,
            self.traits,
            _MomentBytes(
                activations=activations,
                working=working,
                gathered=gathered,
                communication=communication,
                first_step=first,
                cached=cached,
                late=late,
                other_stream=late if self.setup.optimizer_sharding is OptimizerSharding.ZERO3 else 0.0,
                freed=freed,
                workspace=workspace_bytes(self.traits, setup, self.hardware) + self._standing(content),
                several_in_flight=in_flight > 1 and not setup.expandable_segments,
                made_anew=accumulated_apart(setup),
            ),
            self.hardware,
            self.context,
        )

    def _first_step(self, content: StageContent, states: RankStates, moving: float, step: float) -> float:
        """Most bytes up to the end of the first step, with `moving` bytes that come and go in forward and backward.

        The moments are allocated by the update, when those have gone. It works with `step` bytes of gradients in
        float32 or, where they are that already, with the largest tensor once more: a table of the vocabulary, the inner
        product of a layer, or that of all experts of a rank. Before, weights are drawn in float32, tensor by tensor,
        beside those that stand.
        """
        shape, setup = self.shape, self.setup
        ends = content.embedding or content.head
        table = ends * local_vocabulary(shape, setup.tp, self.traits.padded_vocabulary) * shape.hidden
        inner = (2 if shape.gated else 1) * shape.hidden
        dense, expert = max(table, inner * shape.feed_forward / setup.tp * bool(content.dense_layers)), 0.0
        if content.expert_layers and shape.experts:
            expert = inner * shape.experts.feed_forward / setup.expert_tp * shape.experts.count / setup.ep
        drawn = states.parameters + 4 * max(dense, expert)
        update = 4 * self._updated(content, dense, expert)
        return max(states.total - states.moments + moving, states.total + max(update, step), drawn, self._warm_up())

    def _updated(self, content: StageContent, dense: float, expert: float) -> float:
        """Parameters of the largest piece of a tensor that one rank updates, of `dense` and `expert` in the largest.

        A sharded optimizer cuts buckets, not tensors. Where gradients are sent early a tensor this large has a bucket
        to itself; otherwise, and on all stages but the first, all of a stage is one bucket, and a rank's shard can lie
        in one tensor (``DistributedDataParallel`` of Megatron-Core).
        """
        setup = self.setup
        if setup.optimizer_sharding is OptimizerSharding.NONE:
            return max(dense, expert) * setup.trained_fraction
        ranks = shards(setup)
        if setup.overlap_gradients and content.embedding:
            return max(dense / ranks[0], expert / ranks[1]) * setup.trained_fraction
        parameters = stage_parameters(self.shape, setup, content, self.traits.padded_vocabulary)
        return max(min(dense, parameters.dense / ranks[0]), min(expert, parameters.expert / ranks[1])) * (
            setup.trained_fraction
        )

    def _warm_up(self) -> float:
        """Bytes before the model is made, while Megatron's functions warm up on whole sequences, whatever ``cp``."""
        shape, setup = self.shape, self.setup
        tokens = setup.micro_batch * shape.sequence_length
        inner = tokens * shape.feed_forward / setup.tp * LOW_PRECISION_BYTES[setup.precision]
        return self.traits.warm_up_tensors * inner

    def _late(self, early: float, ending: float, gradients: float) -> float:
        """Bytes of `gradients` that do not stand yet at the fullest moment of a backward pass.

        It begins with `early` bytes of activations and the loss, and ends with `ending`, the gradients and what the
        first layer works with; one goes as the other comes. Passes that add to earlier ones find gradients there.
        """
        setup = self.setup
        if not self.traits.late_gradients or setup.micro_batches > 1 or setup.pp > 1:
            return 0.0
        return max(early + gradients - max(early, ending), 0.0)

    def _biases(self) -> float:
        """Biases by distance that stand beside those of the layers: as made, and twice for each sample of a batch.

        The latter are those with the mask added and those that are handed to the kernel (MindSpeed-LLM, ``Alibi``).
        """
        return bias_bytes(self.shape, self.setup, self.traits) * (1 + 2 * self.setup.micro_batch)

    def _standing(self, content: StageContent) -> float:
        """Bytes of attention that stand for good: biases, masks and a buffer of scores.

        The legacy network of MindSpeed-LLM makes a mask for every layer, of a byte a pair of positions
        (``FlashSelfAttention``).
        """
        shape, setup = self.shape, self.setup
        pairs = float(max(shape.sequence_length, shape.encoder_sequence_length) ** 2)
        if setup.attention not in (AttentionKernel.UNFUSED, AttentionKernel.FUSED_SOFTMAX):
            return self._biases() + setup.legacy_model * content.layers * pairs
        element, heads = LOW_PRECISION_BYTES[setup.precision], shape.heads / setup.tp
        return self.traits.scores_buffer * element * heads * setup.micro_batch * pairs / setup.cp

    def _cached(self, content: StageContent, smaller: float, step: float) -> float:
        """Free blocks that no other phase of DeepSpeed's step can use, since its tensors are larger than they are.

        `smaller` are the bytes of either backward pass or update, whichever is less: the update of sharded states works
        with tensors of a whole shard (``stage_1_and_2.py``), which blocks of activations cannot hold; they take the
        place of a bucket. The gradient of an embedding table is a whole tensor, added to the one that stands.
        """
        setup = self.setup
        sharded = setup.optimizer_sharding in (OptimizerSharding.ZERO1, OptimizerSharding.ZERO2)
        if not sharded or not setup.reduce_bucket_elements:
            return 0.0
        element = LOW_PRECISION_BYTES[setup.precision]
        table = content.embedding * local_vocabulary(self.shape, setup.tp, self.traits.padded_vocabulary)
        bucket = min(setup.reduce_bucket_elements * element, step) if setup.dp > 1 else 0.0
        return max(smaller + table * self.shape.hidden * element - bucket, 0.0)

    def _embedded(self, content: StageContent) -> float:
        """Bytes of a micro-batch's embedded tokens, which the norm after the embedding keeps."""
        setup = self.setup
        tokens = setup.micro_batch * self.shape.sequence_length / setup.cp
        stream = tokens * self.shape.hidden / (setup.tp if setup.sequence_parallel else 1)
        kept = content.embedding and self.shape.embedding_norm
        return stream * LOW_PRECISION_BYTES[setup.precision] * kept

    def _local_share(self, index: int) -> float:
        """Share of the layers of a stage that learn locally: the first layers of the network do."""
        layers = [content.layers for content in self.contents]
        local = self.setup.local_share * sum(layers) - sum(layers[:index])
        return min(max(local / max(layers[index], 1.0), 0.0), 1.0)

    def _modes(self, index: int) -> tuple[tuple[float, Recompute], ...]:
        """Shares of the layers of stage `index` by what is computed again of them."""
        setup, layers = self.setup, max(self.contents[index].layers, 1.0)
        if setup.stage_recompute:
            full, selective = (min(count / layers, 1.0) for count in setup.stage_recompute[index])
            shares = (full, Recompute.FULL), (selective, Recompute.SELECTIVE), (1 - full - selective, Recompute.NONE)
            return tuple((share, mode) for share, mode in shares if share > 0)
        if setup.recompute is Recompute.FULL and setup.recompute_layers < layers and setup.recompute_layers:
            share = setup.recompute_layers / layers
            return (share, Recompute.FULL), (1 - share, Recompute.NONE)
        return ((1.0, setup.recompute),)

    def _kept(self, index: int) -> float:
        """Activations of one micro-batch in the layers of stage `index`."""
        content, setup = self.contents[index], self.setup
        kinds = (
            (content.encoder_layers, self.encoder),
            (content.dense_layers, self.dense),
            (content.expert_layers, self.expert),
            (content.multi_token_layers, self.expert if self.shape.experts else self.dense),
        )
        if setup.every_second_product:
            return sum(count * layer.alternate for count, layer in kinds)
        modes = self._modes(index)
        return sum(count * share * layer.kept(setup, mode) for count, layer in kinds for share, mode in modes)

    def _working(self, index: int) -> float:
        """Largest working set of a layer of stage `index`."""
        content, setup = self.contents[index], self.setup
        kinds = (
            (content.dense_layers, self.dense), (content.expert_layers, self.expert),
            (content.encoder_layers, self.encoder),
        )  # fmt: skip
        modes = self._modes(index)
        return max((layer.backward_working(setup, mode) for n, layer in kinds if n for _, mode in modes), default=0.0)

    def _head(self, content: StageContent) -> tuple[float, float]:
        """Bytes kept by the final norm and the head's input; bytes of the logits and the loss."""
        shape, setup = self.shape, self.setup
        tokens = setup.micro_batch * shape.sequence_length / setup.cp
        element = LOW_PRECISION_BYTES[setup.precision]
        stream = tokens * shape.hidden / (setup.tp if setup.sequence_parallel else 1)
        if setup.vocabulary_parallel_loss:
            columns, per_logit = (
                local_vocabulary(shape, setup.tp, self.traits.padded_vocabulary),
                self.traits.loss_bytes,
            )
            if setup.fused_loss:
                per_logit = SCRIPTED_LOSS_BYTES if setup.scripted_loss else self.traits.compiled_loss_bytes
            per_logit += SHIFTED_LOGITS_BYTES * setup.legacy_model
            if setup.micro_batches > 1 and setup.optimizer_sharding in _PIPELINED:
                per_logit += self.traits.earlier_loss_bytes
        else:
            gathered = GATHERED_LOGITS_BYTES if setup.tp > 1 else 0.0
            columns = float(shape.vocabulary)
            per_logit = PLAIN_LOSS_BYTES + gathered
        logits = tokens * shape.predicted_positions * columns
        per_logit -= 0 if element == 2 else 2
        # The logits stand whole, what is computed of them and goes back chunk by chunk.
        per_logit = element + (per_logit - element) / setup.loss_chunks
        heads = 1 + content.multi_token_layers
        kept = 2 * stream * element * heads
        kept += min(setup.deferred_head_batches, setup.micro_batches) * (logits + tokens * shape.hidden) * element
        return kept, logits * per_logit + tokens * shape.hidden * element

    def _freed_logits(self, content: StageContent) -> float:
        """Bytes of low-precision logits that are dropped before the loss goes back.

        Then float32 tensors stand, which their block cannot hold: it waits for the gradient of the logits.
        """
        setup = self.setup
        if not content.head or not self.traits.drops_logits or setup.fused_loss or setup.loss_chunks > 1:
            return 0.0
        tokens = setup.micro_batch * self.shape.sequence_length / setup.cp * self.shape.predicted_positions
        columns = self.shape.vocabulary / (setup.tp if setup.vocabulary_parallel_loss else 1)
        return tokens * columns * LOW_PRECISION_BYTES[setup.precision]

    def _gathered(self, content: StageContent, parameters: float) -> float:
        """Whole parameters, and the gradients before they are scattered, of the layers at work under ``zero3``.

        Between the micro-batches of a pipeline all of a stage stays whole, and so do its gradients until the last one.
        """
        setup = self.setup
        if setup.optimizer_sharding is not OptimizerSharding.ZERO3 or shards(setup)[0] == 1:
            return 0.0
        if setup.pp > 1:
            return parameters * (LOW_PRECISION_BYTES[setup.precision] + setup.gradient_bytes)
        dense, expert, _ = layer_parameters(self.shape, setup)
        layer = max(dense.total if content.dense_layers else 0.0, expert.total if content.expert_layers else 0.0)
        ends = local_vocabulary(self.shape, setup.tp, self.traits.padded_vocabulary) * self.shape.hidden
        element = LOW_PRECISION_BYTES[setup.precision]
        if setup.reduce_bucket_elements:
            # DeepSpeed fetches a bucket ahead and frees the tables between their uses; the gradients of a layer go
            # through the bucket that reduces them.
            ahead, gradients = min(layer, _PREFETCHED_ELEMENTS), min(layer, setup.reduce_bucket_elements)
            return (layer + ahead + gradients) * element
        tables = (content.embedding or content.head) + (content.embedding and content.head) * (
            not self.shape.tied_embeddings
        )
        return (self.traits.gathered_layers * layer + tables * ends) * element + layer * element

    def _communication(self, content: StageContent, parameters: float) -> float:
        """Buckets, and the messages between stages: one that arrives and one that leaves."""
        setup = self.setup
        element = LOW_PRECISION_BYTES[setup.precision]
        buckets = self.traits.bucket_elements * element if setup.dp > 1 else 0.0
        if setup.dp > 1:
            # Two buffers fill and reduce in turn, one gathers parameters. It is one in all with sharded parameters, and
            # in pipelines: they reduce after their last backward pass, and ZeRO-1 ignores ``overlap_comm`` there.
            count = 1 if setup.optimizer_sharding is OptimizerSharding.ZERO3 or setup.pp > 1 else 3
            if accumulated_apart(setup):
                # ``BF16_Optimizer`` sums whole float32 gradients, bucket by bucket of whole tensors.
                largest = local_vocabulary(self.shape, setup.tp, self.traits.padded_vocabulary) * self.shape.hidden
                buckets += 4 * max(min(setup.reduce_bucket_elements, parameters), largest * content.embedding)
            else:
                buckets += count * min(setup.reduce_bucket_elements, parameters) * element
        if setup.pp == 1:
            return buckets
        tokens = setup.micro_batch * self.shape.sequence_length / setup.cp
        stream = tokens * self.shape.hidden / (setup.tp if setup.sequence_parallel else 1)
        return buckets + 2 * stream * element


@lru_cache(maxsize=1024)
def _activations(
    shape: TransformerShape, setup: TrainingSetup
) -> tuple[LayerActivations, LayerActivations, LayerActivations]:
    traits = traits_of(setup.stack)
    dense = layer_activations(shape, setup, traits)
    expert = layer_activations(shape, setup, traits, experts=True) if shape.experts else dense
    encoder = layer_activations(shape, setup, traits, encoder=True) if shape.encoder_layers else dense
    return dense, expert, encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class _MomentBytes:
    """Bytes that come and go, at the fullest moment, and the libraries' workspaces.

    Of the gradients that come ``late``, those made on another stream than activations (``other_stream``) find no free
    blocks: the allocator has a pool for each stream, and FSDP scatters gradients beside the backward pass.
    """

    activations: float
    working: float
    gathered: float
    communication: float
    first_step: float = 0.0
    cached: float = 0.0
    late: float = 0.0
    other_stream: float = 0.0
    freed: float = 0.0
    workspace: float = 0.0
    several_in_flight: bool = False
    made_anew: bool = False
    many_sizes: bool = False


def _stage_memory(
    states: RankStates, traits: MemoryTraits, moment: _MomentBytes, hardware: Hardware, context: float
) -> StageMemory:
    moving = moment.activations + moment.working + moment.gathered + moment.communication
    # States are allocated once, in large pieces: only what comes and goes leaves fragments.
    headroom = traits.in_flight_share * moment.activations if moment.several_in_flight else 0.0
    share = traits.many_sizes_share if moment.many_sizes else traits.reserved_share
    slack = max(traits.allocator_bytes + share * moving, moment.freed) + headroom + moment.other_stream
    if traits.takes_whole_device:
        slack = max(slack, hardware.device_memory_bytes - states.total - moving - moment.workspace)
    return StageMemory(
        parameters=states.parameters,
        gradients=states.gradients,
        master_weights=states.master_weights,
        moments=states.moments,
        activations=moment.activations,
        working=moment.working,
        gathered_parameters=moment.gathered,
        communication=moment.communication,
        workspace=moment.workspace,
        allocator_slack=slack,
        context=context,
        # Gradients that go with every micro-batch leave holes that activations of the next ones cut.
        headroom=0.0 if moment.made_anew else headroom,
        cached=moment.cached,
        late=moment.late,
        first_step_bytes=(moment.first_step or states.total + moving) + moment.workspace,
    )


def _kept_in_float32(network: LayeredNetwork, element: int) -> float:
    """Elements, as wide as the others, that autocast keeps besides: it runs norms over channels and softmax in float32.

    The former keep their input, the latter their output, which the product that follows keeps again in 16 bits.
    """
    wider = 4 / element
    return sum(
        layer.saved * layer.count * (wider if layer.kernel is Kernel.SOFTMAX else wider - 1)
        for layer in network.layers
        if layer.vector and layer.kernel in (Kernel.SOFTMAX, Kernel.NORMALIZATION)
    )


def _layered(network: LayeredNetwork, setup: TrainingSetup, hardware: Hardware) -> StageMemory:
    """States, and what the layers keep of the samples of a micro-batch; the widest layer's gradient works."""
    traits = traits_of(setup.stack)
    element = LOW_PRECISION_BYTES[setup.precision]
    saved = sum(layer.saved * layer.count for layer in network.layers)
    widest = max((layer.saved for layer in network.layers), default=0.0)
    states, _ = states_of(RankParameters(dense=network.parameters), setup, traits)
    if element < 4 and not traits.low_precision_weights:
        saved += _kept_in_float32(network, element)
    casts = network.parameters * element if element < 4 and not traits.low_precision_weights else 0.0
    return _stage_memory(
        states,
        traits,
        _MomentBytes(
            activations=saved * setup.micro_batch * element,
            working=2 * widest * setup.micro_batch * element,
            gathered=casts,
            communication=traits.bucket_elements * 4 if setup.dp > 1 else 0.0,
            workspace=workspace_bytes(traits, setup, hardware),
            many_sizes=True,
        ),
        hardware,
        context_bytes(setup, traits, hardware),
    )
