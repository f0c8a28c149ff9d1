"""DeepSpeed: the JSON configuration.

Keys and rules are those of ``deepspeed/runtime/config.py`` and ``deepspeed/runtime/zero/config.py`` of 0.19.8. Which
layers compute again stands in the model's code. Devices are the batch's: the file gives the batch of a step, of a
micro-batch and the micro-batches, and with them the data-parallel ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from planner.exchange.formats import CONFIGURATION, ExchangeFormat, ReadConfig, Violation, Written
from planner.exchange.training_config import TrainingConfig
from simulator.errors import InputError

VERSION = "0.19"
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
READ: Mapping[str, tuple[str, ...]] = {
    "train_batch_size": (),
    "train_micro_batch_size_per_gpu": (),
    "gradient_accumulation_steps": (),
    "zero_optimization": ("stage", "mics_shard_size", "offload_optimizer", "offload_param", "overlap_comm"),
    "tensor_parallel": ("autotp_size",),
    "expert_parallel": ("enabled", "autoep_size", "expert_tensor_parallel_size"),
    "sequence_parallel_size": (),
    "bf16": ("enabled",),
    "fp16": ("enabled",),
    "zero_allow_untested_optimizer": (),
}
SILENT = frozenset(
    {
        "optimizer",
        "sequence_length",
        "recompute",
        "recompute_modules",
        "recompute_layers",
        "recompute_count",
        "num_layers",
        "first_layers",
        "last_layers",
        "mtp_layers",
        "overlap_gradients",
        "overlap_parameters",
    }
)


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
    raw = CONFIGURATION.json(text, source)
    if not isinstance(raw, dict):
        raise InputError(f"{source} is no JSON object; give a configuration of DeepSpeed")
    zero, tensor, expert = (_section(raw, name) for name in ("zero_optimization", "tensor_parallel", "expert_parallel"))
    stage = _number(zero, "stage", source, 0)
    if stage > 3:
        raise InputError(f"{source}: zero_optimization.stage = {stage} is not one of 0, 1, 2, 3")
    tp, cp = max(1, _number(tensor, "autotp_size", source, 1)), _number(raw, "sequence_parallel_size", source, 1)
    batch, micro, steps = (_optional(raw, name, source) for name in list(READ)[:3])
    batch, micro, violations = _batch(batch, micro, steps)
    ranks = batch // (micro * steps) if batch and micro and steps else None
    ep = _number(expert, "autoep_size", source, 1) if expert.get("enabled") else 1
    mics = zero.get("mics_shard_size", -1)
    config = TrainingConfig(
        devices=ranks * tp * cp if ranks else None,
        tp=tp,
        pp=1,
        vpp=1,
        cp=cp,
        ep=ep,
        etp=1 if ep > 1 else tp,
        layers=(),
        schedule="none",
        micro_batch=micro,
        global_batch=batch,
        precision=next((name for name in ("bf16", "fp16") if _section(raw, name).get("enabled")), "fp32"),
        optimizer_sharding=STAGES[stage],
        shard_size=mics if isinstance(mics, int) and mics > 0 else 0,
        sequence_parallel=False,
        context_algorithm="all_to_all" if cp > 1 else "none",
        offload_optimizer=_away(zero, "offload_optimizer"),
        offload_parameters=_away(zero, "offload_param"),
        offload_activations=False,
        tensor_overlap=False,
        expert_overlap=False,
    )
    return ReadConfig(config=config, not_read=tuple(_not_read(raw)), violations=violations)


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


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    return value if isinstance(value, dict) else {}


def _optional(raw: Mapping[str, Any], key: str, source: str) -> int | None:
    """A whole number, None where it is left out or ``"auto"``."""
    return None if raw.get(key) in (None, "auto") else _number(raw, key, source, 1)


def _number(raw: Mapping[str, Any], key: str, source: str, default: int) -> int:
    value = raw.get(key, default)
    value = default if value == "auto" else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**40 or (value == 0 and default):
        raise InputError(f"{source}: {key} = {value!r} is no whole number of at least {min(default, 1)}; correct it")
    return value


def _away(zero: Mapping[str, Any], name: str) -> bool:
    return bool(_section(zero, name).get("device", "none") != "none")


def _not_read(raw: Mapping[str, Any]) -> Iterator[str]:
    for name, value in raw.items():
        if name == "meshwright":
            continue
        if name not in READ:
            yield name
        elif isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value if key not in READ[name])


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
    capability="deepspeed",
    version=VERSION,
    suffix=".json",
    silent=SILENT,
    keys=KEYS,
    write=write,
    read=read,
    recognises=recognises,
    rules=rules,
)
