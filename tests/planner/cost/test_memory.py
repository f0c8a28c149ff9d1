"""Parameters, activations and device memory of training runs against published figures and against one another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.memory.activations import layer_activations
from planner.cost.memory.device import reserved_memory_bytes, training_memory
from planner.cost.memory.figures import MemoryFigure
from planner.cost.memory.parameters import parameter_count, stage_contents, stage_parameters, stage_residency
from planner.cost.memory_traits import traits_of
from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import (
    Experts,
    LatentAttention,
    LayeredNetwork,
    LayerWork,
    OptimizerSharding,
    Recompute,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)
from simulator.errors import InputError
from simulator.profiles import load_profile
from simulator.program import Kernel

A100 = load_profile("dgx-a100")


def gpt(layers: int = 96, hidden: int = 12288, heads: int = 96, **changes: Any) -> TransformerShape:
    sizes: dict[str, Any] = {
        "feed_forward": 4 * hidden,
        "vocabulary": 50257,
        "sequence_length": 2048,
        "learned_positions": 2048,
        "dropout": True,
    }
    return TransformerShape(
        name="gpt", layers=layers, hidden=hidden, heads=heads, key_value_heads=heads, head_size=hidden // heads,
        **{**sizes, **changes},
    )  # fmt: skip


def llama(layers: int, hidden: int, heads: int, key_values: int, inner: int, **changes: Any) -> TransformerShape:
    return gpt(
        layers, hidden, heads,
        **{
            "feed_forward": inner, "vocabulary": 32000, "sequence_length": 4096, "learned_positions": 0, "gated": True,
            "rms_norm": True, "biases": False, "rotary": True, "tied_embeddings": False, "dropout": False, **changes,
        },
    ) if key_values == heads else replace(
        llama(layers, hidden, heads, heads, inner, **changes), key_value_heads=key_values
    )  # fmt: skip


LLAMA_7B = llama(32, 4096, 32, 32, 11008)
MIXTRAL = llama(32, 4096, 32, 8, 14336, experts=Experts(count=8, per_token=2, feed_forward=14336))
DEEPSEEK_V2 = TransformerShape(
    name="deepseek-v2", layers=60, hidden=5120, heads=128, key_value_heads=128, head_size=192, feed_forward=12288,
    vocabulary=102400, sequence_length=4096, gated=True, rms_norm=True, biases=False, rotary=True,
    tied_embeddings=False,
    experts=Experts(count=160, per_token=6, feed_forward=1536, shared_feed_forward=3072, dense_layers=1),
    latent_attention=LatentAttention(
        query_rank=1536, key_value_rank=512, rotary_head=64, plain_head=128, value_head=128
    ),
)  # fmt: skip


def run(shape: TransformerShape, **setup: Any) -> TrainingRun:
    degrees = {name: setup.get(name, 1) for name in ("dp", "tp", "pp", "cp")}
    devices = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
    return TrainingRun(network=shape, setup=TrainingSetup(devices=devices, **setup), hardware=A100)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (LLAMA_7B, 6_738_415_616),
        (llama(80, 8192, 64, 8, 28672), 68_976_648_192),
        (llama(32, 4096, 32, 8, 14336, vocabulary=128256), 8_030_261_248),
        (MIXTRAL, 46_702_792_704),
        (DEEPSEEK_V2, 235_741_434_880),
        (gpt(12, 768, 12, learned_positions=1024), 124_439_808),
        (gpt(24, 1024, 16, vocabulary=250880, learned_positions=0, embedding_norm=True), 559_214_592),
    ],
)
def test_parameters_are_those_of_the_published_checkpoints(shape: TransformerShape, count: int) -> None:
    assert parameter_count(shape) == count


def test_parameters_of_gpt3() -> None:
    assert parameter_count(gpt()) == pytest.approx(174.6e9, rel=1e-3)


@pytest.mark.parametrize("shape", [LLAMA_7B, MIXTRAL, DEEPSEEK_V2, gpt(24, 1024, 16)])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_hold_the_network_once(shape: TransformerShape, schedule: str) -> None:
    shape = replace(shape, tied_embeddings=False)
    setup = TrainingSetup(devices=4, pp=4, schedule=schedule)
    held = sum(stage_parameters(shape, setup, stage, False).total for stage in stage_contents(shape, setup))
    assert held == pytest.approx(parameter_count(shape), rel=1e-12)


def test_both_directions_hold_it_twice() -> None:
    setup = TrainingSetup(devices=4, pp=4, schedule="dualpipe", micro_batches=8)
    held = sum(stage_parameters(LLAMA_7B, setup, stage, False).total for stage in stage_contents(LLAMA_7B, setup))
    assert held == pytest.approx(2 * parameter_count(LLAMA_7B))


def activations(shape: TransformerShape, **changes: Any) -> float:
    tp = changes.get("tp", 1)
    setup = TrainingSetup(devices=tp, attention=AttentionKernel.FUSED_SOFTMAX, **changes)
    kept = layer_activations(shape, setup, traits_of(Stack.MEGATRON)).kept(setup, setup.recompute)
    return kept / (setup.micro_batch * shape.sequence_length * shape.hidden)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 4]),
    st.sampled_from([(2048, 12288, 96), (2048, 6144, 64), (1024, 1024, 16)]),
)
@settings(deadline=None, max_examples=30)
def test_activations_of_a_layer_are_korthikantis(tp: int, micro_batch: int, sizes: tuple[int, int, int]) -> None:
    """Table 2 of arXiv:2205.05198, in bytes over ``s b h``."""
    sequence, hidden, heads = sizes
    shape, scores = gpt(1, hidden, heads, sequence_length=sequence), 5 * heads * sequence / hidden
    common: dict[str, Any] = {"tp": tp, "micro_batch": micro_batch}
    parallel = {**common, "sequence_parallel": True}
    assert activations(shape, **common) == pytest.approx(10 + 24 / tp + scores / tp)
    assert activations(shape, **parallel) == pytest.approx((34 + scores) / tp)
    selective = Recompute.SELECTIVE
    assert activations(shape, **common, recompute=selective) == pytest.approx(10 + 24 / tp)
    assert activations(shape, **parallel, recompute=selective) == pytest.approx(34 / tp)
    assert activations(shape, **common, recompute=Recompute.FULL) == pytest.approx(2)


@pytest.mark.parametrize(("hidden", "heads", "saving"), [(12288, 96, 0.70), (20480, 128, 0.65)])
def test_selective_recompute_saves_what_korthikanti_says(hidden: int, heads: int, saving: float) -> None:
    """Section 5: 70 % of the activations of GPT-3, 65 % of those of MT-NLG."""
    shape = gpt(1, hidden, heads)
    kept = activations(shape, recompute=Recompute.SELECTIVE) / activations(shape)
    assert 1 - kept == pytest.approx(saving, abs=0.01)


def test_states_are_those_of_mixed_precision_and_zero() -> None:
    """16 bytes a parameter with 16-bit gradients, of which ZeRO shares out 12, 14, 16 (arXiv:1910.02054, section 5)."""
    for sharding, bytes_per_parameter in (
        (OptimizerSharding.NONE, 16.0),
        (OptimizerSharding.ZERO1, 4 + 12 / 64),
        (OptimizerSharding.ZERO2, 2 + 14 / 64),
        (OptimizerSharding.ZERO3, 16 / 64),
    ):
        memory = training_memory(
            run(LLAMA_7B, dp=64, gradient_bytes=2, optimizer_sharding=sharding, stack=Stack.MINDSPORE)
        )
        stage = memory.fullest
        states = stage.parameters + stage.gradients + stage.master_weights + stage.moments
        assert states == pytest.approx(bytes_per_parameter * parameter_count(LLAMA_7B))


def test_fully_sharded_stages_stay_whole_between_micro_batches() -> None:
    """Without a pipeline two layers are gathered at a time, with one the whole stage and its gradients are."""
    sharded: dict[str, Any] = {"dp": 8, "optimizer_sharding": OptimizerSharding.ZERO3, "stack": Stack.COMPILED}
    alone = training_memory(run(LLAMA_7B, **sharded)).fullest
    staged = training_memory(run(LLAMA_7B, **sharded, pp=2, micro_batches=4)).stages[0]
    assert alone.gathered_parameters < 0.2 * 2 * parameter_count(LLAMA_7B)
    assert staged.gathered_parameters == pytest.approx((2 + 4) * 8 * staged.parameters / 4)


def test_deepspeed_gathers_one_layer_and_reduces_through_one_buffer() -> None:
    bucket = 5e8
    sharded: dict[str, Any] = {"dp": 8, "optimizer_sharding": OptimizerSharding.ZERO3, "stack": Stack.DEEPSPEED}
    plain = training_memory(run(LLAMA_7B, **sharded)).fullest
    buckets = training_memory(run(LLAMA_7B, **sharded, reduce_bucket_elements=bucket)).fullest
    assert buckets.gathered_parameters < plain.gathered_parameters
    assert buckets.communication - plain.communication == pytest.approx(2 * bucket)


def test_feed_forward_is_gone_when_unfused_attention_goes_back() -> None:
    """Scores and their gradients stand beside what attention keeps, not beside the feed-forward network as well."""
    shape, setup = gpt(1, 1024, 64), run(gpt(1, 1024, 64), attention=AttentionKernel.UNFUSED).setup
    narrow, wide = (
        layer_activations(replace(shape, feed_forward=width), setup, traits_of(setup.stack)) for width in (1024, 8192)
    )
    assert wide.saved - narrow.saved > 0
    assert wide.saved + wide.working == pytest.approx(narrow.saved + narrow.working)


def test_components_add_up_and_figures_grow() -> None:
    memory = training_memory(run(LLAMA_7B, tp=2, pp=4, dp=2, micro_batches=8))
    figures = memory.figures()
    needed = figures[MemoryFigure.DEVICE] + memory.fullest.headroom
    assert sum(memory.fullest.components().values()) == pytest.approx(needed)
    assert memory.fullest.headroom > 0
    assert figures[MemoryFigure.ALLOCATED] < figures[MemoryFigure.RESERVED] < figures[MemoryFigure.DEVICE]
    assert figures[MemoryFigure.LAST_STAGE_ALLOCATED] <= figures[MemoryFigure.ALLOCATED]


def test_blocks_of_activations_stay_cached_beside_the_update_of_shards() -> None:
    """Tools show both, up to what the device has; a run that needs the blocks gets them back."""
    plan: dict[str, Any] = {
        "stack": Stack.DEEPSPEED, "dp": 8, "tp": 2, "gradient_bytes": 2, "optimizer_sharding": OptimizerSharding.ZERO1
    }  # fmt: skip
    sharded = training_memory(run(LLAMA_7B, **plan, reduce_bucket_elements=5e8))
    plain = training_memory(run(LLAMA_7B, **plan))
    stage = sharded.fullest
    assert stage.cached > 0 == plain.fullest.cached
    assert sharded.figures()[MemoryFigure.RESERVED] == pytest.approx(stage.reserved_bytes + stage.cached)
    assert stage.shown_bytes(stage.reserved_bytes + stage.context) == stage.reserved_bytes
    assert sum(stage.components().values()) == pytest.approx(stage.device_bytes)


@pytest.mark.parametrize("stack", [Stack.EAGER, Stack.COMPILED, Stack.MEGATRON])
def test_gradients_that_come_one_by_one_are_not_there_at_the_loss(stack: Stack) -> None:
    """Activations go as gradients come, unless these stand in buffers or earlier passes have made them."""
    once, twice = (training_memory(run(LLAMA_7B, stack=stack, micro_batch=8, micro_batches=count)) for count in (1, 2))
    stage = once.fullest
    early = stage.activations + stage.working
    together = early + stage.gradients - stage.late
    assert once.figures()[MemoryFigure.ALLOCATED] == pytest.approx(stage.allocated_bytes)
    assert sum(stage.components().values()) == pytest.approx(stage.device_bytes)
    assert twice.fullest.late == 0
    if stack is Stack.MEGATRON:
        assert stage.late == 0
    else:
        assert together >= max(early, stage.gradients)
        assert 0 < stage.late <= min(early, stage.gradients)
        updating = training_memory(run(replace(LLAMA_7B, sequence_length=64), stack=Stack.EAGER)).fullest
        assert updating.activations == updating.late == 0


@pytest.mark.parametrize("sharding", list(OptimizerSharding))
def test_late_gradients_take_blocks_of_activations_unless_another_stream_makes_them(
    sharding: OptimizerSharding,
) -> None:
    """The allocator has a pool for each stream: what FSDP scatters beside the backward pass finds no free block."""
    plan: dict[str, Any] = {"stack": Stack.EAGER, "micro_batch": 8, "dp": 4, "optimizer_sharding": sharding}
    stage = training_memory(run(LLAMA_7B, **plan)).fullest
    moving = stage.activations + stage.working + stage.gathered_parameters + stage.communication
    traits = traits_of(Stack.EAGER)
    slack = max(traits.allocator_bytes + traits.reserved_share * moving, stage.allocator_slack - stage.late)
    apart = stage.late if sharding is OptimizerSharding.ZERO3 else 0.0
    assert stage.late > 0
    assert stage.allocator_slack == pytest.approx(slack + apart)


def test_norms_of_single_operators_keep_float32_copies() -> None:
    one, single = (
        training_memory(run(LLAMA_7B, stack=Stack.MINDSPEED, single_norms=single)).fullest for single in (False, True)
    )
    stream = LLAMA_7B.sequence_length * LLAMA_7B.hidden
    assert single.activations - one.activations == pytest.approx(2 * LLAMA_7B.layers * 4 * stream)


def test_norms_of_queries_and_keys_keep_their_inputs() -> None:
    plain, normalised = (
        training_memory(run(replace(LLAMA_7B, normalised_queries=norms), tp=2)).fullest for norms in (False, True)
    )
    each = LLAMA_7B.sequence_length * LLAMA_7B.hidden / 2 * 2
    assert normalised.activations - plain.activations == pytest.approx(LLAMA_7B.layers * 2 * each)


def test_biases_by_distance_are_tensors_in_mindspeed() -> None:
    plan: dict[str, Any] = {"stack": Stack.MINDSPEED, "attention": AttentionKernel.VENDOR, "tp": 2, "micro_batch": 2}
    rotated, biased = (
        training_memory(run(replace(LLAMA_7B, rotary=rotary), **plan)).fullest for rotary in (True, False)
    )
    tensor = 2 * LLAMA_7B.heads / 2 * LLAMA_7B.sequence_length**2
    assert biased.activations - rotated.activations == pytest.approx(LLAMA_7B.layers * 2 * tensor)
    assert biased.workspace - rotated.workspace == pytest.approx(5 * tensor)


def test_sums_of_gradients_in_float32_need_a_bucket_for_a_whole_table() -> None:
    """DeepSpeed's ``BF16_Optimizer`` copies whole tensors into a bucket, and its update needs no copies."""
    plan: dict[str, Any] = {
        "stack": Stack.DEEPSPEED, "dp": 8, "pp": 2, "micro_batches": 2, "optimizer_sharding": OptimizerSharding.ZERO1
    }  # fmt: skip
    stage = training_memory(run(LLAMA_7B, **plan, gradient_bytes=6, reduce_bucket_elements=1e6)).stages[0]
    table = 32000 * LLAMA_7B.hidden
    assert stage.communication > 4 * table
    assert stage.gradients == pytest.approx(3 * stage.parameters)


def test_first_chunks_hold_more_micro_batches_than_the_last() -> None:
    """Four ranks, two chunks each: the last rank holds four passes of its first chunk and one of its second."""
    even, first, second = (
        TrainingSetup(devices=4, pp=4, vpp=2, micro_batches=8, layers_per_stage=layers)
        for layers in ((1, 1, 1, 1, 1, 1, 1, 1), (1, 1, 1, 2, 1, 1, 1, 0), (1, 1, 1, 0, 1, 1, 1, 2))
    )
    assert [stage_residency(setup, 3) for setup in (even, first, second)] == [2.5, 4, 1]
    assert stage_residency(replace(even, layers_per_stage=()), 3) == 2.5
    assert stage_residency(replace(first, schedule="gpipe"), 3) == 8


def test_larger_groups_hold_more_micro_batches_of_the_first_chunks() -> None:
    """Megatron-LM's warm-up is ``2 (p - i - 1) + (v - 1) g`` passes for groups of ``g`` micro-batches."""
    setup = TrainingSetup(devices=4, pp=4, vpp=3, micro_batches=10)
    held = [stage_residency(replace(setup, micro_batch_group=group), 3) for group in (0, 4, 5, 100)]
    assert held == pytest.approx([9 / 3, 9 / 3, 11 / 3, 10])
    assert stage_residency(replace(setup, vpp=1, micro_batch_group=5), 3) == 1


def test_schedules_searched_for_within_a_limit_use_it_up_on_every_rank() -> None:
    setup = TrainingSetup(devices=8, pp=8, micro_batches=24, schedule="zb-h1", pipelines_in_flight=2)
    assert [stage_residency(setup, stage) for stage in (0, 3, 7)] == [16, 16, 16]
    assert stage_residency(replace(setup, micro_batches=10), 0) == 10


def test_moments_come_when_activations_have_gone() -> None:
    """By the end of the first step either the activations without moments were the most, or the update was."""
    few, many = (training_memory(run(LLAMA_7B, tp=8, micro_batch=size, stack=Stack.MINDSPEED)) for size in (1, 16))
    (small,), (large,) = few.stages, many.stages
    states = small.parameters + small.gradients + small.master_weights + small.moments
    table = 4 * LLAMA_7B.vocabulary / 8 * LLAMA_7B.hidden
    assert small.first_step_bytes == pytest.approx(states + small.workspace + table, rel=0.01)
    (half,) = training_memory(run(LLAMA_7B, tp=8, stack=Stack.MINDSPEED, precision="fp16", gradient_bytes=2)).stages
    states = half.parameters + half.gradients + half.master_weights + half.moments
    assert half.first_step_bytes == pytest.approx(states + half.workspace + 2 * half.parameters)
    assert large.first_step_bytes == pytest.approx(large.allocated_bytes - large.moments)
    assert few.figures()[MemoryFigure.FIRST_STEP_ALLOCATED] < few.figures()[MemoryFigure.ALLOCATED]


def test_updates_work_with_the_experts_of_a_rank_at_once() -> None:
    (stage,) = training_memory(run(replace(MIXTRAL, layers=2), stack=Stack.MINDSPEED)).stages
    states = stage.parameters + stage.gradients + stage.master_weights + stage.moments
    assert stage.first_step_bytes - states - stage.workspace == pytest.approx(4 * 8 * 2 * 4096 * 14336)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("stack", [Stack.MEGATRON, Stack.TRANSFORMER_ENGINE])
def test_weights_of_tokens_within_the_experts_spare_what_comes_out_of_them(stack: Stack, gated: bool) -> None:
    """One tensor of the hidden size less; one more of the inner size where function and weight are not one kernel."""
    network, traits = replace(MIXTRAL, gated=gated), traits_of(stack)
    assert traits.weighted_experts
    setup = run(network, stack=stack).setup
    outside, inside = (
        layer_activations(network, setup, replace(traits, weighted_experts=within), experts=True)
        for within in (False, True)
    )
    routed = 2 * MIXTRAL.sequence_length
    assert inside.saved - outside.saved == routed * 2 * ((0 if gated else 14336) - MIXTRAL.hidden)
    assert inside.function == (1 if gated else 2) * outside.function


@pytest.mark.parametrize("experts", [False, True])
def test_functions_and_norms_that_are_computed_again_are_not_kept(experts: bool) -> None:
    """Two norms of a layer; what a function returns, for experts times their weights."""
    setup, traits = run(MIXTRAL, stack=Stack.TRANSFORMER_ENGINE).setup, traits_of(Stack.TRANSFORMER_ENGINE)
    layer = layer_activations(MIXTRAL, setup, traits, experts=experts)
    tokens, hidden, inner = MIXTRAL.sequence_length, MIXTRAL.hidden, MIXTRAL.feed_forward
    kept = {
        name: layer.kept(replace(setup, **{name: True}), Recompute.NONE)
        for name in ("recompute_norms", "recompute_activation_function", "grouped_products")
    }
    usual = kept.pop("grouped_products")
    assert usual - kept["recompute_norms"] == 2 * tokens * hidden * 2
    times = MIXTRAL.experts.per_token if experts and MIXTRAL.experts else 1
    assert usual - kept["recompute_activation_function"] == pytest.approx(times * tokens * inner * 2)


def test_parts_of_layers_that_are_computed_again_are_not_kept() -> None:
    """Alone each drops what is its own, all of a mixture what its parts would."""
    shape = replace(MIXTRAL, experts=replace(MIXTRAL.experts, shared_feed_forward=512))
    setup, traits = run(shape, stack=Stack.TRANSFORMER_ENGINE).setup, traits_of(Stack.TRANSFORMER_ENGINE)
    layer = layer_activations(shape, setup, traits, experts=True)
    saved = layer.kept(setup, Recompute.NONE)

    def dropped(*modules: str) -> float:
        return saved - layer.kept(replace(setup, recompute_modules=modules), Recompute.SELECTIVE)

    assert 0 < dropped("moe_act") < dropped("moe_act", "shared_experts") < dropped("moe")
    assert dropped("moe", "moe_act", "shared_experts") == dropped("moe")
    assert dropped("core_attn") == layer.kept(setup, Recompute.NONE) - layer.kept(setup, Recompute.SELECTIVE)
    assert dropped("mlp") == dropped("mla_up_proj") == 0
    dense = layer_activations(shape, setup, traits)
    assert dense.kept(replace(setup, recompute_modules=("mlp",)), Recompute.SELECTIVE) < dense.saved
    assert layer.kept(replace(setup, recompute_modules=("moe",)), Recompute.NONE) == saved


def test_segments_that_grow_leave_no_holes_of_activations_in_flight() -> None:
    setup = run(MIXTRAL, pp=4, micro_batches=8).setup
    memory = [
        training_memory(run(MIXTRAL, pp=4, micro_batches=8, expandable_segments=grows)) for grows in (False, True)
    ]
    fixed, growing = (max(stage.headroom for stage in found.stages) for found in memory)
    assert setup.pp == 4
    assert fixed > growing == 0


def test_weights_are_drawn_in_float32() -> None:
    """Of one frozen layer and a head, drawing the head's weights takes most."""
    shape = llama(2, 4096, 32, 8, 14336, vocabulary=128256, sequence_length=64)
    memory = training_memory(run(shape, pp=2, trained_fraction=0.005, stack=Stack.MINDSPEED))
    last = memory.stages[-1]
    assert last.first_step_bytes == pytest.approx(last.parameters + 4 * 128256 * 4096 + last.workspace)


def test_one_looks_at_the_first_node() -> None:
    """Two stages of eight devices each: the table of the output layer lies on the other node."""
    shape = llama(2, 4096, 32, 32, 11008, vocabulary=500_000)
    figures = training_memory(run(replace(shape, tied_embeddings=False), tp=8, pp=2, micro_batches=4)).figures()
    assert figures[MemoryFigure.FIRST_NODE_DEVICE] < figures[MemoryFigure.DEVICE]
    near = training_memory(run(shape, tp=2, pp=2, micro_batches=4)).figures()
    assert near[MemoryFigure.FIRST_NODE_DEVICE] == near[MemoryFigure.DEVICE]


def test_kernels_that_are_loaded_at_once_stand_outside_the_allocator() -> None:
    later, earlier = (training_memory(run(LLAMA_7B, tp=8, eager_kernels=eager)) for eager in (False, True))
    assert earlier.reserved_bytes == later.reserved_bytes
    assert earlier.device_bytes > later.device_bytes


def test_autocast_keeps_norms_and_softmax_in_float32() -> None:
    def kept(kernel: Kernel, precision: str, *, vector: bool = True) -> float:
        layer = LayerWork(kernel=kernel, saved=1e6, vector=vector)
        network = LayeredNetwork(name="one", layers=(layer,), parameters=10)
        training = TrainingSetup(devices=1, micro_batch=8, precision=precision, stack=Stack.EAGER)
        (stage,) = training_memory(TrainingRun(network=network, setup=training, hardware=A100)).stages
        return stage.activations / 8e6

    assert [kept(kernel, "fp16") for kernel in (Kernel.NORMALIZATION, Kernel.SOFTMAX, Kernel.MATMUL)] == [4, 6, 2]
    assert kept(Kernel.NORMALIZATION, "fp16", vector=False) == 2
    assert kept(Kernel.SOFTMAX, "fp32") == 4


SHAPES = st.sampled_from([LLAMA_7B, MIXTRAL, gpt(32, 4096, 32), replace(DEEPSEEK_V2, layers=32)])


@given(
    shape=SHAPES,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 8]),
    micro_batch=st.sampled_from([1, 2]),
    recompute=st.sampled_from(list(Recompute)),
    sharding=st.sampled_from(list(OptimizerSharding)),
    attention=st.sampled_from(list(AttentionKernel)),
    stack=st.sampled_from([stack for stack in Stack if stack is not Stack.TENSORFLOW]),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb_h1"]),
)
@settings(deadline=None, max_examples=60)
def test_more_of_a_remedy_never_needs_more(
    shape: TransformerShape, tp: int, pp: int, dp: int, micro_batch: int, recompute: Recompute,
    sharding: OptimizerSharding, attention: AttentionKernel, stack: Stack, schedule: str,
) -> None:  # fmt: skip
    """States and activations shrink, or stay, with each parallel axis, with sharding, recompute and flash attention."""
    base = {
        "tp": tp, "pp": pp, "dp": dp, "micro_batch": micro_batch, "micro_batches": 16, "recompute": recompute,
        "optimizer_sharding": sharding, "attention": attention, "stack": stack, "schedule": schedule,
        "sequence_parallel": tp > 1, "expert_tp": tp if shape.experts else 1,
    }  # fmt: skip

    def needed(**changes: Any) -> float:
        return training_memory(run(shape, **{**base, **changes})).allocated_bytes

    whole, rounding = needed(), 1 + 1e-9
    assert needed(tp=2 * tp, sequence_parallel=True, expert_tp=2 * tp if shape.experts else 1) <= whole * rounding
    if sharding is not OptimizerSharding.ZERO3:  # with it, more ranks also begin to gather
        assert needed(dp=2 * dp) <= whole * rounding + (0 if dp > 1 else 2**25)
    assert needed(micro_batch=2 * micro_batch) >= whole / rounding
    kinds = list(Recompute)
    for more in kinds[kinds.index(recompute) :]:
        assert needed(recompute=more) <= whole * rounding
    if attention is AttentionKernel.UNFUSED and recompute is Recompute.NONE:
        assert needed(attention=AttentionKernel.FUSED_SOFTMAX) <= whole * rounding
        assert needed(attention=AttentionKernel.FLASH2) <= whole * rounding


@given(pp=st.sampled_from([1, 2, 4]), sharding=st.sampled_from(list(OptimizerSharding)))
@settings(deadline=None, max_examples=12)
def test_longer_pipelines_and_more_sharding_hold_less_state(pp: int, sharding: OptimizerSharding) -> None:
    def states(**changes: Any) -> float:
        memory = training_memory(run(LLAMA_7B, **{"dp": 8, "pp": pp, "optimizer_sharding": sharding, **changes}))
        return max(s.parameters + s.gradients + s.master_weights + s.moments for s in memory.stages)

    assert states(pp=2 * pp) < states()
    kinds = list(OptimizerSharding)
    for more in kinds[kinds.index(sharding) + 1 :]:
        assert states(optimizer_sharding=more) < states()


@given(
    shape=SHAPES,
    pp=st.sampled_from([1, 2, 4, 8]),
    vpp=st.sampled_from([1, 2]),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "zb-h1", "zb-h2", "zbv", "dualpipe"]),
)
@settings(deadline=None, max_examples=40)
def test_the_short_way_gives_the_fullest_stage(shape: TransformerShape, pp: int, vpp: int, schedule: str) -> None:
    described = run(shape, pp=pp, vpp=vpp, schedule=schedule, micro_batches=32)
    stages = training_memory(described).stages
    assert reserved_memory_bytes(described) == pytest.approx(max(stage.reserved_bytes for stage in stages))


def test_whole_logits_decide_what_fits() -> None:
    """Every tensor rank computes the loss on 128,000 words of 8,192 tokens: cutting the layers does not help."""
    shape = llama(40, 5120, 40, 40, 13824, vocabulary=128000, sequence_length=8192)
    common: dict[str, Any] = {
        "tp": 4, "pp": 4, "dp": 8, "micro_batch": 4, "recompute": Recompute.FULL, "stack": Stack.DEEPSPEED,
        "optimizer_sharding": OptimizerSharding.ZERO1, "gradient_bytes": 2,
    }  # fmt: skip
    assert training_memory(run(shape, **common)).fits
    assert not training_memory(run(shape, **common, vocabulary_parallel_loss=False)).fits


def test_experts_of_a_rank_get_more_than_an_even_share_of_tokens_where_none_are_dropped() -> None:
    def routed(ep: int, capacity: float) -> float:
        experts = Experts(count=8, per_token=2, feed_forward=14336, capacity_factor=capacity)
        shape = replace(MIXTRAL, experts=experts)
        setup = TrainingSetup(devices=ep, dp=ep, ep=ep)
        return layer_activations(shape, setup, traits_of(Stack.MEGATRON), experts=True).saved

    even = routed(1, 0.0)
    # Attention, norms and router, which every rank has for its own tokens, stay as they are.
    assert 1.15 * even < routed(8, 0.0) < 1.3 * even
    assert routed(8, 1.0) == even


def test_a_layered_network_keeps_what_its_layers_save() -> None:
    layer = LayerWork(kernel=Kernel.CONVOLUTION, saved=1e6, count=3)
    network = LayeredNetwork(name="net", layers=(layer,), parameters=1e6)
    setup = TrainingSetup(devices=1, micro_batch=8, stack=Stack.EAGER, precision="fp32", optimizer="momentum")
    memory = training_memory(TrainingRun(network=network, setup=setup, hardware=A100)).fullest
    assert memory.activations == 3e6 * 8 * 4
    assert memory.parameters + memory.gradients + memory.moments == 12e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "magic"}, "choose one of"),
        ({"schedule": "magic"}, "choose one of 1f1b|choose one of gpipe"),
        ({"pp": 2, "layers_per_stage": (3, 4)}, "needs 2 entries that add up to the 32 layers"),
    ],
)
def test_what_cannot_be_estimated_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        training_memory(run(LLAMA_7B, **changes))
