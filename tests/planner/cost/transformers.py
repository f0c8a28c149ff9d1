"""Transformers and runs of them for the tests of estimates."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from planner.cost.software_file import ANY, Interval, SoftwareCoefficients, SoftwareFile
from planner.cost.stacks import LayeredCoefficients
from planner.cost.training_run import (
    Experts,
    LatentAttention,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)
from simulator.hardware import Hardware
from simulator.profiles import load_profile

GPT = TransformerShape(
    name="gpt", layers=24, hidden=2048, heads=16, key_value_heads=16, head_size=128, feed_forward=8192,
    vocabulary=51200, sequence_length=2048, learned_positions=2048,
)  # fmt: skip
LLAMA = TransformerShape(
    name="llama-3-8b", layers=32, hidden=4096, heads=32, key_value_heads=8, head_size=128, feed_forward=14336,
    vocabulary=128256, sequence_length=8192, gated=True, rms_norm=True, biases=False, rotary=True,
    tied_embeddings=False,
)  # fmt: skip
MIXTRAL = replace(
    LLAMA, name="mixtral", vocabulary=32000, sequence_length=4096,
    experts=Experts(count=8, per_token=2, feed_forward=14336),
)  # fmt: skip
DEEPSEEK = TransformerShape(
    name="deepseek-v3", layers=61, hidden=7168, heads=128, key_value_heads=128, head_size=192, feed_forward=18432,
    vocabulary=129280, sequence_length=4096, gated=True, rms_norm=True, biases=False, rotary=True,
    tied_embeddings=False,
    experts=Experts(count=256, per_token=8, feed_forward=2048, shared_feed_forward=2048, dense_layers=3),
    latent_attention=LatentAttention(
        query_rank=1536, key_value_rank=512, rotary_head=64, plain_head=128, value_head=128
    ),
    multi_token_layers=1,
)  # fmt: skip
T5 = replace(
    GPT, name="t5", layers=12, dropout=True, sequence_length=128, encoder_layers=12, encoder_sequence_length=512
)
SOFTWARE = SoftwareFile(
    coefficients=SoftwareCoefficients(stacks={}, attention={}),
    layered=LayeredCoefficients(),
    intervals={(kind, ANY, ANY): Interval(low=0.5, high=2.0, rows=1) for kind in ("transformer", "layered")},
)
"""Neutral coefficients."""


@lru_cache
def profile(name: str) -> Hardware:
    """A shipped profile without the corrections of whole steps, which every calibration changes."""
    return replace(load_profile(name), training={})


def run(shape: TransformerShape = GPT, hardware: str = "dgx-a100", **setup: Any) -> TrainingRun:
    """A run on as many devices as its degrees say."""
    devices = setup.get("dp", 1) * setup.get("tp", 1) * setup.get("pp", 1) * setup.get("cp", 1)
    return TrainingRun(
        network=shape, setup=TrainingSetup(devices=devices, **setup), hardware=profile(hardware)
    )  # fmt: skip


RUNS = (
    run(),
    run(tp=8, pp=3, dp=2, micro_batches=6, sequence_parallel=True),
    run(LLAMA, "dgx-h100", dp=8, optimizer_sharding="zero3", precision="fp8", recompute="full"),
    run(MIXTRAL, "dgx-h100", dp=8, tp=2, pp=4, ep=8, micro_batches=8, sequence_parallel=True),
    run(DEEPSEEK, "dgx-h800", dp=16, pp=16, ep=16, micro_batches=32, schedule="dualpipe"),
    run(T5, "dgx1-v100", dp=8, precision="fp16", attention="unfused", recompute="selective"),
    run(GPT, "ascend910b-atlas800t-a2", cp=4, dp=2, optimizer_sharding="zero1", attention="vendor"),
)
"""One of each kind."""
