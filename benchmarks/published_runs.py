"""Published training runs in the words of a plan request: `TrainingRun` as networks and pins.

Which facts a row states, and what stands in where it states none, is `planner.validation.reading`'s to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from planner.estimate.training_run import (
    AttentionKernel,
    LayeredNetwork,
    OptimizerSharding,
    Recompute,
    Stack,
    TrainingRun,
    TransformerShape,
)
from planner.validation.reading import MeasuredRow

RESNETS = ("resnet50", "resnet50v1_5", "resnet50_v1_5", "rn50v1_5")
BERTS: Mapping[tuple[str, int], str] = {
    ("BERT-base", 128): "py:benchmarks.pretraining_bert:base_128",
    ("LanguageModeling/BERT", 512): "py:benchmarks.pretraining_bert:large_512",
}
FUSED = (AttentionKernel.FLASH, AttentionKernel.FLASH2, AttentionKernel.VENDOR)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run; ``network`` is a specification or the text of a config, ``pins`` its whole plan."""

    network: str
    hardware: str
    devices: int
    global_batch: int
    sequence_length: int | None
    precision: str
    pins: tuple[tuple[str, str], ...]


class NotCoveredError(Exception):
    """The row is outside what is compared; the message says why."""


def require(holds: object, why: str) -> None:
    """Leave a row out unless `holds`."""
    if not holds:
        raise NotCoveredError(why)


def read_run(row: MeasuredRow, *, stages: bool = False, any_attention: bool = False) -> Run:
    """Translate a row; NotCoveredError says why it is not compared.

    ``stages`` covers pipelines and recomputation as well: which layers a stage has is left to the planner.
    ``any_attention`` covers also rows whose attention is not fused: their times are too short, but the order of
    their plans may still hold.
    """
    require(row.run is not None, "misses facts")
    require(row.outcome == "ok" and row.measured_time_s > 0, "did not run, or no time")
    run = row.run
    assert run is not None
    setup = run.setup
    network = _network(run, any_attention=any_attention)
    require(setup.trained_fraction == 1, "trains a part only")
    require((setup.cp, setup.ep) == (1, 1), "context or experts")
    require(stages or (setup.pp, setup.recompute) == (1, Recompute.NONE), "pipeline or recomputation")
    require(not setup.recompute_layers, "recomputes some layers only")
    offload = setup.offload_optimizer or setup.offload_parameters or setup.offload_activations
    require(not offload, "offload")
    require(setup.stack is not Stack.MINDSPORE_TOOLKIT, "the host changes images in Python, which plans do not time")
    require(not setup.deterministic, "a functional test, bound by the host")
    precision = "fp32" if setup.precision == "tf32" and network == "zoo:resnet50" else setup.precision
    require(precision in ("fp32", "fp16", "bf16"), f"precision {precision}")
    return Run(
        network=network,
        hardware=run.hardware.name,
        devices=setup.devices,
        global_batch=setup.global_batch,
        sequence_length=run.network.sequence_length if network.startswith("{") else None,
        precision=precision,
        pins=tuple(_pins(run, stages=stages).items()),
    )


def _pins(run: TrainingRun, *, stages: bool) -> dict[str, str]:
    setup = run.setup
    sharding = setup.optimizer_sharding if setup.dp > 1 else OptimizerSharding.NONE
    if not stages:
        sharding = OptimizerSharding.NONE if sharding is OptimizerSharding.NONE else OptimizerSharding.ZERO2
    pins = {"dp": str(setup.dp), "tp": str(setup.tp), "micro_batch": str(setup.micro_batch)}
    if setup.dp > 1:
        pins["optimizer_sharding"] = str(sharding)
    if stages:
        pins |= {"pp": str(setup.pp), "vpp": str(setup.vpp), "recompute": str(setup.recompute)}
        if setup.tp > 1:
            pins["sequence_parallel"] = str(setup.sequence_parallel).lower()
        if setup.pp > 1:
            schedule = "interleaved_1f1b" if setup.vpp > 1 else setup.schedule.replace("-", "_")
            require(schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"), f"schedule {schedule}")
            pins["schedule"] = schedule
    return pins


def _network(run: TrainingRun, *, any_attention: bool) -> str:
    network = run.network
    if isinstance(network, LayeredNetwork):
        require(network.name in RESNETS, "another network")
        return "zoo:resnet50"
    if not network.causal:
        require((network.name, network.sequence_length) in BERTS, "BERT, other task")
        return BERTS[network.name, network.sequence_length]
    require(not network.experts and not network.latent_attention, "experts or latent attention")
    require(not network.encoder_layers and not network.attention_window, "encoder or windows")
    require(any_attention or run.setup.attention in FUSED, "attention is not fused")
    return _config(network)


def _config(network: TransformerShape) -> str:
    plain = network.head_size * network.heads == network.hidden
    require(plain, "head size is not hidden / heads")
    if network.gated:
        require(network.rms_norm and network.rotary, "another network")
        return json.dumps({
            "model_type": "llama", "num_hidden_layers": network.layers, "hidden_size": network.hidden,
            "num_attention_heads": network.heads, "num_key_value_heads": network.key_value_heads,
            "intermediate_size": network.feed_forward, "vocab_size": network.vocabulary,
            "max_position_embeddings": network.sequence_length,
        })  # fmt: skip
    require(network.key_value_heads == network.heads, "grouped heads without gate")
    return json.dumps({
        "model_type": "gpt2", "n_layer": network.layers, "n_embd": network.hidden, "n_head": network.heads,
        "n_inner": network.feed_forward, "vocab_size": network.vocabulary, "n_positions": network.sequence_length,
    })  # fmt: skip
