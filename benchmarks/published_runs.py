"""Published training runs in the words of a plan request: `TrainingRun` as networks and pins.

Which facts a row states, and what stands in where it states none, is `planner.published.reading`'s to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.quartznet import OF_FRAMES
from planner.cost.memory_traits import traits_of
from planner.cost.software import SOFTWARE
from planner.cost.stacks import AttentionKernel, Stack
from planner.plans.exchange import UNASKED, Exchange
from planner.plans.hints import Hint, hint
from planner.published.estimate.layered.sequence import padded_frames
from planner.published.estimate.stage_parameters import local_vocabulary
from planner.published.estimate.training_run import (
    LayeredNetwork,
    OptimizerSharding,
    Recompute,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)
from planner.published.reading import MeasuredRow

RESNETS = ("resnet50", "resnet50v1_5", "resnet50_v1_5", "rn50v1_5")
BERTS: Mapping[tuple[str, int], str] = {
    ("BERT-base", 128): "py:benchmarks.pretraining_bert:base_128",
    ("LanguageModeling/BERT", 512): "py:benchmarks.pretraining_bert:large_512",
}
FOLDED = ("zbv", "dualpipe")
"""Schedules whose ranks hold two stages each, which the planner cuts."""
ORDER = "pp-dp-cp-tp"
"""Megatron-LM and DeepSpeed lay tensor ranks out next to each other and stages farthest apart
(``megatron/core/parallel_state.py``, ``deepspeed/runtime/pipe/topology.py``)."""
EXPERTS_ORDER = "pp-dp-cp-ep-tp"
ADAPTERS = json.dumps({"peft_type": "LORA", "r": 32, "lora_alpha": 32, "target_modules": "all-linear"})
"""Those of Megatron-LM where none are described (``LoRA`` of Megatron Bridge: all products, ``dim`` 32)."""
OWN_SAMPLES = Exchange(cross_batch=True)
"""Batch norms of ``DistributedDataParallel`` see a rank's samples alone (documentation of `torch.nn.SyncBatchNorm`)."""
FUSED = (AttentionKernel.FLASH, AttentionKernel.FLASH2, AttentionKernel.VENDOR)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run; ``network`` is a specification or the text of a config, ``pins`` its whole plan.

    ``adapters`` is the text of PEFT's config of those, where they alone are trained.

    ``layers`` are those of each stage in order, none where nothing depends on them; ``again`` is how many layers of a
    stage are computed again, 0 where all or none are, as the pins say; ``hints`` say what tensor ranks do that pins
    leave open. ``software``, ``attention`` and ``norms`` are empty where the plan is not told. ``exchange`` is how
    tensors travel where that is not as the plan has it unasked.
    """

    network: str
    hardware: str
    devices: int
    global_batch: int
    sequence_length: int | None
    precision: str
    pins: tuple[tuple[str, str], ...]
    layers: tuple[int, ...] = ()
    again: int = 0
    hints: tuple[Hint, ...] = ()
    software: str = ""
    attention: str = ""
    norms: str = ""
    adapters: str = ""
    exchange: Exchange = UNASKED


class NotCoveredError(Exception):
    """The row is outside what is compared; the message says why."""


def require(holds: object, why: str) -> None:
    """Leave a row out unless `holds`."""
    if not holds:
        raise NotCoveredError(why)


def read_run(row: MeasuredRow, *, stages: bool = False, told: bool = False) -> Run:
    """Translate a row; NotCoveredError says why it is not compared.

    ``stages`` covers pipelines and recomputation as well: which layers a stage has is left to the planner. ``told``
    covers every kind of attention, products in 8 and 4 bits, experts, stages that compute some of their layers again,
    and what waits on the host besides: the plan is told the kind, the software, and the layers of each stage. The
    vocabulary is padded as the software pads it.
    """
    require(row.run is not None, "misses facts")
    require(row.outcome == "ok" and row.measured_time_s > 0, "did not run, or no time")
    run = row.run
    assert run is not None
    setup = run.setup
    network = _network(run, told=told)
    whole = setup.trained_fraction == 1
    require(whole or (told and network.startswith("{")), "trains a part only")
    require(setup.ep == 1 or setup.expert_tp in ((1, setup.tp) if told else (setup.tp,)), "experts are cut otherwise")
    require(setup.cp == 1 or (told and setup.attention in FUSED), "context ranks")
    require(stages or told or (setup.pp, setup.recompute) == (1, Recompute.NONE), "pipeline or recomputation")
    require(told or not setup.recompute_layers, "recomputes some layers only")
    require(not setup.every_second_product, "recomputes every second product")
    offload = setup.offload_optimizer or setup.offload_parameters or setup.offload_activations
    require(told or not offload, "offload")
    require(setup.stack is not Stack.MINDSPORE_TOOLKIT, "the host changes images in Python, which plans do not time")
    require(not setup.deterministic, "a functional test, bound by the host")
    precision = "fp32" if setup.precision == "tf32" and network == "zoo:resnet50" else setup.precision
    require(precision in ("fp32", "fp16", "bf16") or (told and precision in ("fp8", "fp4")), f"precision {precision}")
    return Run(
        network=network,
        hardware=run.hardware.name,
        devices=setup.devices,
        global_batch=setup.global_batch,
        sequence_length=run.network.sequence_length if network.startswith("{") else None,
        precision=precision,
        pins=tuple(_pins(run, stages=stages or told).items()),
        layers=_layers(run) if told else (),
        again=setup.recompute_layers,
        hints=_between_products(setup, gated=run.network.gated) if told and network.startswith("{") else (),
        software=_software(setup) if told else "",
        attention=str(setup.attention) if told and network.startswith("{") else "",
        norms=_norms(run) if told else "",
        adapters="" if whole else ADAPTERS,
        exchange=OWN_SAMPLES if told and isinstance(run.network, LayeredNetwork) else UNASKED,
    )


def _software(setup: TrainingSetup) -> str:
    """The software by its stack and habits; empty where a plan cannot be told it."""
    if setup.overlap_gradients:
        return str(setup.stack) if str(setup.stack) in SOFTWARE else ""
    if setup.stack is Stack.DEEPSPEED:
        return "aleph_alpha_scaling" if setup.sent_gradient_bytes > setup.gradient_bytes else "megatron_deepspeed"
    apart = (name for name, known in SOFTWARE.items() if known.stack is setup.stack and not known.overlaps)
    return next(apart, str(setup.stack) if str(setup.stack) in SOFTWARE else "")


def _norms(run: TrainingRun) -> str:
    """How root-mean-square norms run, as the row or its stack has it; empty where there are none."""
    network, setup = run.network, run.setup
    if not isinstance(network, TransformerShape) or not network.rms_norm:
        return ""
    fused = (setup.fused_norm or traits_of(setup.stack).fused_rms_norm) and not setup.single_norms
    return "fused" if fused else "unfused"


def _between_products(setup: TrainingSetup, *, gated: bool) -> tuple[Hint, ...]:
    """What tensor ranks do between the products of layers: norms and sums on whole rows, all of these or their part.

    A search shares them out as suits it, numbers of rows as well, which none of these runs did. Beside a context or
    expert axis nothing may be said of single operators.
    """
    if setup.tp == 1 or setup.cp > 1 or setup.ep > 1:
        return ()
    placed = "S(1)" if setup.sequence_parallel else "R"
    norms = hint("*norm/*", "tensor", outputs=[placed]) if gated else hint("*.ln_*/*", "tensor", outputs=[placed] * 3)
    return norms, hint("*.layers.*[0-9]/add*" if gated else "*.h.*[0-9]/add*", "tensor", outputs=[placed])


def _layers(run: TrainingRun) -> tuple[int, ...]:
    """Layers of each stage: as the row or its software has them, else equally many."""
    setup, network = run.setup, run.network
    whole = setup.pp == 1 and not setup.recompute_layers
    if whole or not isinstance(network, TransformerShape) or setup.schedule in FOLDED:
        return ()
    chunks = setup.pp * setup.vpp
    if setup.layers_per_stage:
        return setup.layers_per_stage
    require(network.layers % chunks == 0, "layers do not divide among the stages")
    return (network.layers // chunks,) * chunks


def _expert_axis(setup: TrainingSetup) -> int:
    """Ranks beside tensor ranks that whole experts are dealt out over: Megatron-LM counts tensor ranks in ``ep``."""
    return max(1, setup.ep * setup.expert_tp // setup.tp) if setup.ep > 1 else 1


def _expert_pins(setup: TrainingSetup) -> dict[str, str]:
    """How tokens travel to their experts, and what tensor ranks have of these."""
    pins = {"expert_messages": "once_a_node" if setup.tokens_sent_once else "tokens"}
    if setup.overlap_experts:
        pins["expert_overlap"] = "true"
    if setup.tp > 1:
        pins["expert_cut"] = "width" if setup.expert_tp > 1 else "whole"
    return pins


def _pins(run: TrainingRun, *, stages: bool) -> dict[str, str]:
    setup = run.setup
    sharding = setup.optimizer_sharding if setup.dp > 1 else OptimizerSharding.NONE
    if not stages:
        sharding = OptimizerSharding.NONE if sharding is OptimizerSharding.NONE else OptimizerSharding.ZERO2
    pins = {"dp": str(setup.dp), "tp": str(setup.tp), "micro_batch": str(setup.micro_batch), "order": ORDER}
    if setup.cp > 1:
        # Megatron-LM passes keys and values around unless told otherwise.
        pins |= {"cp": str(setup.cp), "context_algorithm": "ring"}
    if setup.ep > 1:
        experts = _expert_axis(setup)
        pins |= _expert_pins(setup) | {"order": EXPERTS_ORDER, "ep": str(experts)}
        # States are shared out over copies of the same experts.
        sharding = sharding if setup.dp > experts else OptimizerSharding.NONE
    if setup.dp > 1:
        pins["optimizer_sharding"] = str(sharding)
    if sharding is not OptimizerSharding.NONE:
        pins["shard_size"] = str(setup.shard_group or setup.dp // _expert_axis(setup))
    if stages:
        pins |= {"pp": str(setup.pp), "vpp": str(setup.vpp)}
        if not setup.recompute_layers:
            pins["recompute"] = str(setup.recompute)
        for kept in ("offload_optimizer", "offload_parameters", "offload_activations"):
            if getattr(setup, kept):
                pins[kept] = "true"
        if setup.tp > 1:
            pins["sequence_parallel"] = str(setup.sequence_parallel).lower()
            if setup.overlap_tensor and setup.sequence_parallel:
                pins["tensor_overlap"] = "true"
        if setup.pp > 1:
            schedule = "interleaved_1f1b" if setup.vpp > 1 else setup.schedule.replace("-", "_")
            require(schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv"), f"schedule {schedule}")
            pins["schedule"] = schedule
    return pins


def _network(run: TrainingRun, *, told: bool) -> str:
    network = run.network
    if isinstance(network, LayeredNetwork):
        if told and network.name == "quartznet":
            frames = padded_frames(run.setup.micro_batch, run.setup.devices)
            return f"py:benchmarks.quartznet:{OF_FRAMES}{frames}"
        require(network.name in RESNETS, "another network")
        return "zoo:resnet50"
    if not network.causal:
        require((network.name, network.sequence_length) in BERTS, "BERT, other task")
        return BERTS[network.name, network.sequence_length]
    require(told or not network.latent_attention, "latent attention")
    require(told or not network.experts, "experts")
    require(not network.encoder_layers and not network.attention_window, "encoder or windows")
    require(told or run.setup.attention in FUSED, "attention is not fused")
    rows = local_vocabulary(network, run.setup.tp, traits_of(run.setup.stack).padded_vocabulary) * run.setup.tp
    return _config(network, round(rows), told=told)


def _config(network: TransformerShape, vocabulary: int, *, told: bool) -> str:
    require(not network.multi_token_layers, "predicts further tokens")
    if network.latent_attention:
        return json.dumps(_latent(network, vocabulary))
    plain = network.head_size * network.heads == network.hidden
    require(plain or (told and network.gated), "head size is not hidden / heads")
    if network.gated:
        require(network.rms_norm and network.rotary, "another network")
        return json.dumps({
            "model_type": "llama", "num_hidden_layers": network.layers, "hidden_size": network.hidden,
            "num_attention_heads": network.heads, "num_key_value_heads": network.key_value_heads,
            "intermediate_size": network.feed_forward, "vocab_size": vocabulary,
            "max_position_embeddings": network.sequence_length,
        } | ({} if plain else {"head_dim": network.head_size}) | _experts(network))  # fmt: skip
    require(not network.experts, "experts without gate")
    require(network.key_value_heads == network.heads, "grouped heads without gate")
    return json.dumps({
        "model_type": "gpt2", "n_layer": network.layers, "n_embd": network.hidden, "n_head": network.heads,
        "n_inner": network.feed_forward, "vocab_size": vocabulary, "n_positions": network.sequence_length,
        "tie_word_embeddings": network.tied_embeddings,
    })  # fmt: skip


def _latent(network: TransformerShape, vocabulary: int) -> dict[str, object]:
    """A config of DeepSeek-V3, experts in one group, whose routing plans do not price."""
    parts, experts = network.latent_attention, network.experts
    require(experts and parts and parts.query_rank, "latent attention beside dense layers alone")
    assert parts is not None
    assert experts is not None
    return {
        "model_type": "deepseek_v3", "num_hidden_layers": network.layers, "hidden_size": network.hidden,
        "num_attention_heads": network.heads, "num_key_value_heads": network.heads,
        "q_lora_rank": parts.query_rank, "kv_lora_rank": parts.key_value_rank, "v_head_dim": parts.value_head,
        "qk_nope_head_dim": parts.plain_head, "qk_rope_head_dim": parts.rotary_head,
        "intermediate_size": network.feed_forward, "moe_intermediate_size": experts.feed_forward,
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token, "n_group": 1, "topk_group": 1,
        "n_shared_experts": experts.shared_feed_forward // experts.feed_forward,
        "first_k_dense_replace": experts.dense_layers, "vocab_size": vocabulary,
        "max_position_embeddings": network.sequence_length,
    }  # fmt: skip


def _experts(network: TransformerShape) -> dict[str, object]:
    """What a config of Mixtral has beside one of Llama: equal experts in every layer, none of which takes all."""
    if network.experts is None:
        return {}
    experts = network.experts
    require(not experts.shared_feed_forward and not experts.dense_layers, "shared experts or dense layers")
    return {
        "model_type": "mixtral", "intermediate_size": experts.feed_forward,
        "num_local_experts": experts.count, "num_experts_per_tok": experts.per_token,
    }  # fmt: skip
