"""Operators of transformers: their FLOPs and parameters are those of the formulas in the literature."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.memory.parameters import parameter_count
from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import TrainingRun, TransformerShape
from planner.published.estimate.columns import columns_of
from planner.published.estimate.transformer_work import (
    FusedAttention,
    MatrixProduct,
    Part,
    Pointwise,
    operators,
    sent_copies,
)
from tests.planner.published.estimate.transformers import DEEPSEEK, GPT, LLAMA, MIXTRAL, T5, run


def products(wanted: TrainingRun) -> dict[str, MatrixProduct]:
    found = [o for o in operators(columns_of([wanted]), 2.0) if isinstance(o, MatrixProduct)]
    return {f"{product.part}: {product.name}": product for product in found}


def flops(product: MatrixProduct) -> float:
    return float(np.sum(2 * product.m * product.n * product.k * product.batch))


def forward_flops(wanted: TrainingRun) -> float:
    """Of the matrix products of the whole network, on all ranks of one replica, for a micro-batch."""
    c = columns_of([wanted])
    decoder = float((c.dense_layers + c.moe_layers)[0])
    layers = {
        Part.ATTENTION_BLOCK: decoder, Part.CROSS_ATTENTION: decoder, Part.DENSE: float(c.dense_layers[0]),
        Part.EXPERTS: float(c.moe_layers[0]), Part.ENCODER: float(c.encoder_layers[0]),
    }  # fmt: skip
    total = sum(flops(product) * layers.get(product.part, 1.0) for product in products(wanted).values())
    return total * wanted.setup.tp * wanted.setup.cp


def unfused(shape: TransformerShape, **setup: object) -> TrainingRun:
    return run(shape, attention=AttentionKernel.UNFUSED, **setup)


@pytest.mark.parametrize("degrees", [{}, {"tp": 8}, {"cp": 4}, {"tp": 2, "cp": 2, "sequence_parallel": True}])
def test_flops_are_those_of_megatron(degrees: dict[str, int]) -> None:
    # Narayanan et al., arXiv:2104.04473, equation 3: forward is a third of 72 B s l h^2 (1 + s / 6h + V / 12 l h).
    batch, s, h, layers, v = 4, GPT.sequence_length, GPT.hidden, GPT.layers, 51200
    expected = 24 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert forward_flops(unfused(GPT, micro_batch=batch, **degrees)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "active"), [(LLAMA, 8.03e9), (MIXTRAL, 12.9e9), (DEEPSEEK, 37.6e9)], ids=lambda x: getattr(x, "name", "")
)
def test_products_with_weights_do_two_flops_for_each_active_parameter(shape: TransformerShape, active: float) -> None:
    shape = replace(shape, multi_token_layers=0)
    table = shape.vocabulary * shape.hidden
    c = columns_of([run(shape)])
    found = 0.0
    for product in products(run(shape)).values():
        layers = {Part.DENSE: c.dense_layers, Part.EXPERTS: c.moe_layers, Part.HEAD: 1.0}.get(
            product.part, shape.layers
        )
        found += flops(product) * product.weight * float(np.sum(layers))
    assert found / 2 / shape.sequence_length + table == pytest.approx(active, rel=0.01)


def test_experts_of_all_ranks_do_the_work_of_one() -> None:
    whole = products(run(MIXTRAL))["experts: experts in"]
    for degrees in ({"ep": 8, "dp": 8}, {"ep": 4, "dp": 4, "tp": 2}, {"expert_tp": 4, "tp": 4}, {"tp": 8, "ep": 8}):
        wanted = run(MIXTRAL, sequence_parallel=True, **degrees)
        part = products(wanted)["experts: experts in"]
        # Every data rank brings a micro-batch of its own.
        assert flops(part) * wanted.setup.tp == pytest.approx(flops(whole))


def test_a_capacity_pads_or_drops_tokens() -> None:
    assert MIXTRAL.experts is not None
    shape = replace(MIXTRAL, experts=replace(MIXTRAL.experts, capacity_factor=1.25))
    ratio = sent_copies(columns_of([run(shape)])) / sent_copies(columns_of([run(MIXTRAL)]))
    assert ratio == pytest.approx(1.25)


def seen_pairs(shape: TransformerShape) -> float:
    attention = next(o for o in operators(columns_of([run(shape)]), 2.0) if isinstance(o, FusedAttention))
    return float((attention.queries * attention.keys * np.where(attention.causal > 0, 0.5, 1.0))[0])


@pytest.mark.parametrize("window", [1, 256, 1000, 2048, 4096])
def test_a_causal_window_leaves_the_pairs_that_a_mask_leaves(window: int) -> None:
    length = GPT.sequence_length
    place = np.arange(length)
    ahead = place[:, None] - place[None, :]
    counted = float(((ahead >= 0) & (ahead < window)).sum())
    assert seen_pairs(replace(GPT, attention_window=window)) == pytest.approx(counted, abs=length)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    assert seen_pairs(replace(GPT, attention_window=2048)) == pytest.approx(seen_pairs(GPT))


def test_encoders_and_decoders_have_their_own_lengths() -> None:
    batch, h = 2, T5.hidden
    seen, said = T5.encoder_sequence_length, T5.sequence_length
    encoder = 12 * batch * (24 * seen * h**2 + 4 * seen**2 * h)
    decoder = 12 * batch * (24 * said * h**2 + 4 * said**2 * h)
    cross = 12 * batch * (4 * said * h**2 + 4 * seen * h**2 + 4 * said * seen * h)
    head = 2 * batch * said * h * 51200
    assert forward_flops(unfused(T5, micro_batch=batch)) == pytest.approx(encoder + decoder + cross + head)


def test_further_tokens_cost_a_layer_a_projection_and_a_head_each() -> None:
    plain, more = (products(run(replace(DEEPSEEK, multi_token_layers=n))) for n in (0, 1))
    assert flops(more["head: logits"]) == 2 * flops(plain["head: logits"])
    h, s = DEEPSEEK.hidden, DEEPSEEK.sequence_length
    assert flops(more["head: joined embedding"]) == 4 * s * h**2
    layers = [columns_of([run(replace(DEEPSEEK, multi_token_layers=n))]).moe_layers[0] for n in (0, 1)]
    assert layers == [58, 59]


@pytest.mark.parametrize("shape", [GPT, LLAMA, MIXTRAL, DEEPSEEK, T5], ids=lambda shape: shape.name)
def test_a_stage_alone_has_all_parameters(shape: TransformerShape) -> None:
    columns = columns_of([run(shape, stack="eager")])
    assert columns.dense_parameters + columns.expert_parameters == pytest.approx(parameter_count(shape))


def test_experts_are_shared_out_and_nothing_else() -> None:
    one, many = (columns_of([run(MIXTRAL, dp=8, ep=ep)]) for ep in (1, 8))
    assert many.expert_parameters * 8 == pytest.approx(one.expert_parameters)
    assert many.dense_parameters == pytest.approx(one.dense_parameters)
    assert (one.expert_replicas[0], many.expert_replicas[0]) == (8, 1)


def softmax(wanted: TrainingRun) -> Pointwise:
    found = [o for o in operators(columns_of([wanted]), 2.0) if isinstance(o, Pointwise) and o.name == "softmax"]
    return next(o for o in found if np.sum(o.forward_bytes) > 0)


def test_fused_softmax_takes_four_matrices_of_scores_at_a_time() -> None:
    whole, ragged = (
        softmax(run(GPT, attention=AttentionKernel.FUSED_SOFTMAX, tp=GPT.heads // 2, micro_batch=size))
        for size in (2, 1)
    )
    apart = softmax(unfused(GPT, tp=GPT.heads // 2, micro_batch=1))
    assert ragged.forward_bytes == pytest.approx(apart.forward_bytes)
    assert np.all(ragged.forward_bytes > whole.forward_bytes)
    assert np.all(np.asarray(ragged.kernels) > whole.kernels)


def test_megatrons_dropout_takes_longer_than_its_bytes() -> None:
    def added(stack: Stack) -> float:
        dry, wet = (
            softmax(unfused(replace(GPT, dropout=dropout), stack=stack)).forward_bytes for dropout in (False, True)
        )
        return float(np.sum(wet - dry))

    scores = GPT.heads * GPT.sequence_length**2
    assert added(Stack.EAGER) == pytest.approx(5.0 * scores)  # read, written, and the mask
    assert added(Stack.MEGATRON) > 2 * added(Stack.EAGER)


def test_biases_have_their_gradients_summed_over_the_tokens() -> None:
    def read(shape: TransformerShape) -> float:
        found = operators(columns_of([run(shape)]), 2.0)
        return float(sum(np.sum(o.backward_bytes) for o in found if isinstance(o, Pointwise) and "bias" in o.name))

    tokens = GPT.sequence_length
    outputs = 3 * GPT.hidden + GPT.hidden + GPT.feed_forward + GPT.hidden
    assert read(GPT) == pytest.approx(2.0 * tokens * outputs)
    assert read(replace(GPT, biases=False)) == 0.0
