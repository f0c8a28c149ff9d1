"""DeepSpeed: the JSON configuration.

Keys and rules are those of ``deepspeed/runtime/config.py`` and ``deepspeed/runtime/zero/config.py`` of 0.19.8. Which
layers compute again stands in the model's code. Devices are the batch's: the file gives the batch of a step, of a
micro-batch and the micro-batches, and with them the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written
from planner.exchange.keyed import Document, json_file
from planner.exchange.training_config import PLAIN, TrainingConfig
from simulator.errors import InputError

VERSION = "0.19"
_KNOWN = "zero_optimization.overlap_comm", "zero_allow_untested_optimizer"
STAGES = ("none", "zero1", "zero2", "zero3")
KEYS: Mapping[str, str] = {
    "devices": "world size",
    "tp": "tensor_parallel.autotp_size",
    "cp": "sequence_parallel_size",
    "ep": "expert_parallel.autoep_size",
    "etp": "expert_parallel.expert_tensor_parallel_size",
    "micro_batch": "train_micro_batch_size_per_gpu",
    "global_batch": "train_batch_size",
    "optimizer_sharding": "zero_optimization.stage",
    "shard_size": "zero_optimization.mics_shard_size",
    "offload_optimizer": "zero_optimization.offload_optimizer",
    "offload_parameters": "zero_optimization.offload_param",
    "precision": "bf16",
}


def write(config: TrainingConfig) -> Written:
    """The file."""
    stage = STAGES.index(config.optimizer_sharding or "none")
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero["overlap_comm"] = config.overlap_gradients is not False
    if config.shard_size:
        zero["mics_shard_size"] = config.shard_size
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    found: dict[str, Any] = {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.micro_batches,
        "zero_optimization": zero,
    }
    if (config.tp or 1) > 1:
        found["tensor_parallel"] = {"autotp_size": config.tp}
    if (config.cp or 1) > 1:
        found["sequence_parallel_size"] = config.cp
    if (config.ep or 1) > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": config.ep, "expert_tensor_parallel_size": 1}
    if config.precision in ("bf16", "fp16"):
        found[str(config.precision)] = {"enabled": True}
    return json_file(f"a plan for DeepSpeed {VERSION}", found)


def read(text: str, source: str) -> ReadConfig:
    """Read a configuration."""
    raw = Document.json(text, source, "DeepSpeed")
    # What is "auto" is for the code that reads the file to fill in.
    raw.values = {key: value for key, value in raw.values.items() if value != "auto"}
    stage = raw.number("zero_optimization.stage", 0, 0)
    if stage > 3:
        raise InputError(f"{source}: zero_optimization.stage = {stage} is not one of 0, 1, 2, 3")
    tp, cp = max(1, raw.number(KEYS["tp"], 1, 0)), raw.number(KEYS["cp"])
    batch, micro, steps = (
        raw.optional(key) for key in (KEYS["global_batch"], KEYS["micro_batch"], "gradient_accumulation_steps")
    )
    violations = tuple(_broken(batch, micro, steps))
    ranks = batch // (micro * steps) if batch and micro and steps else None
    experts, degree = raw.flag("expert_parallel.enabled"), raw.number(KEYS["ep"])
    ep, mics = degree if experts else 1, raw.get(KEYS["shard_size"], -1)
    precisions = {name: raw.flag(f"{name}.enabled") for name in ("bf16", "fp16")}
    away = {
        name: raw.get(f"{KEYS[name]}.device", "none") != "none" for name in ("offload_optimizer", "offload_parameters")
    }
    for prefix in ("meshwright", KEYS["offload_optimizer"], KEYS["offload_parameters"], KEYS["etp"], *_KNOWN):
        raw.pass_over(prefix)
    config = replace(
        PLAIN,
        devices=ranks * tp * cp if ranks else None,
        tp=tp,
        cp=cp,
        ep=ep,
        etp=1 if ep > 1 else tp,
        micro_batch=micro,
        global_batch=batch,
        precision=next((name for name, used in precisions.items() if used), "fp32"),
        optimizer_sharding=STAGES[stage],
        shard_size=mics if isinstance(mics, int) and mics > 0 else 0,
        sequence_parallel=False,
        context_algorithm="all_to_all" if cp > 1 else "none",
        recompute_layers=None,
        recompute_count=None,
        **away,
    )
    return ReadConfig(config=config, not_read=raw.unread(), violations=violations)


def _broken(batch: int | None, micro: int | None, steps: int | None) -> Iterator[Violation]:
    """Rules of the batches of a step and of a micro-batch; a rank's share must be whole."""
    if batch and micro and steps and batch % (micro * steps):
        rule = f"it must be train_micro_batch_size_per_gpu {micro} × gradient_accumulation_steps {steps} × ranks"
        remedy = f"use {micro * steps * max(1, round(batch / (micro * steps)))}"
        yield Violation("train_batch_size", str(batch), rule, remedy)
    if not batch and not micro:
        rule = "it or train_micro_batch_size_per_gpu must be given"
        yield Violation("train_batch_size", "", rule, "add one of them")


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of DeepSpeed across fields."""
    stage = STAGES.index(config.optimizer_sharding or "none")
    if config.offload_optimizer and stage == 0:
        yield Violation(
            KEYS["offload_optimizer"], "cpu", "states go to the host from ZeRO stage 1 on", "use stage 1 or more"
        )
    if config.offload_parameters and stage != 3:
        rule, remedy = "parameters go to the host with ZeRO stage 3", "use stage 3, or leave it out"
        yield Violation(KEYS["offload_parameters"], "cpu", rule, remedy)
    if (config.ep or 1) > 1 and (config.tp or 1) > 1 and (stage == 3 or config.offload_optimizer):
        rule = "beside AutoTP experts go with ZeRO stages 0 to 2, without offload"
        yield Violation(KEYS["ep"], str(config.ep), rule, "use stage 2, or leave tensor parallelism out")


DEEPSPEED = ExchangeFormat(
    name="deepspeed",
    version=VERSION,
    suffix=".json",
    also_silent=frozenset({"recompute", "recompute_count", "recompute_layers", "recompute_modules"}),
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: (
        text.lstrip().startswith("{")
        and any(
            f'"{key}"' in text for key in ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
        )
    ),
    rules=rules,
)
