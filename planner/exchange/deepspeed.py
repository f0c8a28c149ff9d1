"""DeepSpeed: the JSON configuration.

Keys and rules are those of ``deepspeed/runtime/config.py`` and ``deepspeed/runtime/zero/config.py`` of 0.19.8. Which
layers compute again stands in the model's code. Devices are the batch's: the file gives the batch of a step, of a
micro-batch and the micro-batches, and with them the data-parallel ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written
from planner.exchange.keyed import Document
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


def document(config: TrainingConfig) -> dict[str, Any]:
    """The JSON document of a configuration that DeepSpeed can run."""
    found: dict[str, Any] = {
        "train_batch_size": config.global_batch,
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.micro_batches,
        "zero_optimization": _zero(config),
    }
    if (config.tp or 1) > 1:
        found["tensor_parallel"] = {"autotp_size": config.tp}
    if (config.cp or 1) > 1:
        found["sequence_parallel_size"] = config.cp
    if (config.ep or 1) > 1:
        found["expert_parallel"] = {"enabled": True, "autoep_size": config.ep, "expert_tensor_parallel_size": 1}
    if config.precision in ("bf16", "fp16"):
        found[str(config.precision)] = {"enabled": True}
    return found


def _zero(config: TrainingConfig) -> dict[str, Any]:
    stage = STAGES.index(config.optimizer_sharding or "none")
    found: dict[str, Any] = {"stage": stage}
    if stage:
        found["overlap_comm"] = config.overlap_gradients is not False
    if config.shard_size:
        found["mics_shard_size"] = config.shard_size
    if config.offload_optimizer:
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.offload_parameters:
        found["offload_param"] = {"device": "cpu", "pin_memory": True}
    return found


def write(config: TrainingConfig) -> Written:
    """The file. JSON has no comments: the version stands in a key of its own, which DeepSpeed passes over."""
    return Written(
        text=json.dumps({"meshwright": f"a plan for DeepSpeed {VERSION}", **document(config)}, indent=2) + "\n"
    )


def read(text: str, source: str) -> ReadConfig:
    """Read a configuration.

    Raises
    ------
    InputError
        The file is no JSON object, or a value is of a wrong type.
    """
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
    batch, micro, violations = _batch(batch, micro, steps)
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
        **away,
    )
    return ReadConfig(config=config, not_read=raw.unread(), violations=violations)


def _batch(
    batch: int | None, micro: int | None, steps: int | None
) -> tuple[int | None, int | None, tuple[Violation, ...]]:
    """Batches of a step and a micro-batch; a rank's share must be whole."""
    if batch and micro and steps and batch % (micro * steps):
        broken = Violation(
            key="train_batch_size",
            value=str(batch),
            rule=f"it must be train_micro_batch_size_per_gpu {micro} × gradient_accumulation_steps {steps} × ranks",
            remedy=f"use {micro * steps * max(1, round(batch / (micro * steps)))}",
        )
        return batch, micro, (broken,)
    if not batch and not micro:
        broken = Violation(
            key="train_batch_size",
            value="",
            rule="it or train_micro_batch_size_per_gpu must be given",
            remedy="add one of them",
        )
        return batch, micro, (broken,)
    return batch, micro, ()


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of DeepSpeed across fields."""
    stage = STAGES.index(config.optimizer_sharding or "none")
    if config.offload_optimizer and stage == 0:
        yield Violation(
            key=KEYS["offload_optimizer"],
            value="cpu",
            rule="states go to the host from ZeRO stage 1 on",
            remedy="use stage 1 or more",
        )
    if config.offload_parameters and stage != 3:
        yield Violation(
            key=KEYS["offload_parameters"],
            value="cpu",
            rule="parameters go to the host with ZeRO stage 3",
            remedy="use stage 3, or leave it out",
        )
    if (config.ep or 1) > 1 and (config.tp or 1) > 1 and (stage == 3 or config.offload_optimizer):
        yield Violation(
            key=KEYS["ep"],
            value=str(config.ep),
            rule="beside AutoTP experts go with ZeRO stages 0 to 2, without offload",
            remedy="use stage 2, or leave tensor parallelism out",
        )


def recognises(name: str, text: str) -> bool:
    """Whether a file is a configuration of DeepSpeed."""
    return text.lstrip().startswith("{") and any(
        f'"{key}"' in text for key in ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
    )


DEEPSPEED = ExchangeFormat(
    name="deepspeed",
    version=VERSION,
    suffix=".json",
    also_silent=frozenset({"recompute", "recompute_count", "recompute_layers", "recompute_modules"}),
    keys=KEYS,
    write=write,
    read=read,
    recognises=recognises,
    rules=rules,
)
