"""Published training runs, row by row, in the words of a plan request."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pandas as pd

DEVICES = (
    (r"PCIe|96GB|94GB|GH200|A800|RTX", ""),
    (r"GB200", "gb200-nvl72"),
    (r"B200", "dgx-b200"),
    (r"H200", "dgx-h200"),
    (r"H100", "dgx-h100"),
    (r"A100.*40GB", "dgx-a100-40g"),
    (r"A100", "dgx-a100"),
    (r"V100", "dgx1-v100"),
    (r"Ascend 910(\*|B)", "ascend910b-atlas800t-a2"),
    (r"Ascend 910", "ascend910-atlas800"),
)
RESNET = r"(?:.*/)?(?:ConvNets )?(?:resnet50(?:v1\.5)?|RN50v1\.5|ResNet50-v1\.5)"
IMAGES = 128


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run as our words have it; ``network`` is a specification or the text of a config."""

    network: str
    hardware: str
    devices: int
    tp: int
    micro_batch: int
    global_batch: int
    sequence_length: int | None
    precision: str | None
    sharded: bool


class NotCoveredError(Exception):
    """The row is outside what is compared; the message says why."""


def _number(row: Any, name: str) -> float | None:
    value = pd.to_numeric(row[name], errors="coerce")
    return None if pd.isna(value) else float(value)


def _text(row: Any, name: str) -> str:
    return "" if pd.isna(row[name]) else str(row[name])


def require(holds: object, why: str) -> None:
    if not holds:
        raise NotCoveredError(why)


def _hardware(row: Any) -> str:
    name = _text(row, "accelerator")
    if "A100" in name and _number(row, "accel_mem_gb") == 40:
        name = "A100-40GB"
    found = next((profile for pattern, profile in DEVICES if re.search(pattern, name)), "")
    require(found, "device without profile")
    return found


def _network(row: Any) -> str:
    model, arch = _text(row, "model"), _text(row, "arch")
    if re.fullmatch(RESNET, model):
        require("CIFAR" not in _text(row, "notes"), "other images")
        return "zoo:resnet50"
    if model in ("BERT-base", "LanguageModeling/BERT"):
        length = _number(row, "seq_len")
        require((model, length) in (("BERT-base", 128), ("LanguageModeling/BERT", 512)), "BERT, other task")
        return "py:benchmarks.pretraining_bert:" + ("base_128" if length == 128 else "large_512")
    layers, hidden, heads = (_number(row, name) for name in ("n_layers", "hidden", "n_heads"))
    require(layers and hidden and heads and _number(row, "seq_len"), "no shape, or another network")
    require(not re.search("moe|gemma|t5|bert|mamba|hybrid|glm", f"{model} {arch}", re.IGNORECASE), "another network")
    inner, vocabulary = _number(row, "ffn_hidden"), _number(row, "vocab")
    config: dict[str, str | float | None]
    if "gelu" in arch or "gpt" in f"{model} {arch}".lower():
        config = {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads,
                  "n_inner": inner or 4 * (hidden or 0), "vocab_size": vocabulary or 50257,
                  "n_positions": _number(row, "seq_len")}  # fmt: skip
    else:
        require(inner, "no feed-forward size")
        config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden,
                  "num_attention_heads": heads, "num_key_value_heads": _number(row, "n_kv_heads") or heads,
                  "intermediate_size": inner, "vocab_size": vocabulary or 32000,
                  "max_position_embeddings": _number(row, "seq_len")}  # fmt: skip
    return json.dumps({k: int(v) if isinstance(v, float) else v for k, v in config.items()})


def read_run(row: Any) -> tuple[Run, float]:
    """Translate a row into a run and its seconds; NotCoveredError says why it is not compared."""
    require(row["outcome"] == "ok", "did not run")
    require(all((_number(row, n) or 1) == 1 for n in ("pp", "vpp", "cp", "ep")), "pipeline, context or experts")
    network, hardware = _network(row), _hardware(row)
    language = network.startswith("{")
    words = f"{row['model']} {row['framework']} {row['other_flags']}"
    require(not re.search("lora|tune|dpo|CI", words), "part, or CI")
    recompute = _text(row, "recompute_kind")
    require(recompute == "none" or (not recompute and not language), "recomputes, or does not say")
    attention = _text(row, "attention_impl")
    require(not language or not attention or "flash" in attention, "attention is not fused")
    kind = _text(row, "precision_kind")
    if row["precision"] in ("TF32", "fp32", "FP32") and network == "zoo:resnet50":
        kind = "fp32"
    require(kind == "fp32" or (kind in ("", "fp16", "bf16") and row["precision"] != "TF32"), "precision")
    require(not (kind == "fp32" and "a100" in hardware and network != "zoo:resnet50"), "precision")
    devices, tp = int(_number(row, "n_accels") or 0), int(_number(row, "tp") or 1)
    require(devices and devices % tp == 0, "device count")
    micro = _number(row, "micro_batch") or _number(row, "per_accel_batch")
    seconds, rate = _number(row, "step_time_s"), _number(row, "samples_per_s")
    batch = _number(row, "global_batch")
    if network == "zoo:resnet50":
        micro = micro or IMAGES
        batch = micro * devices
        seconds = batch / rate if rate else seconds
    elif not language and rate:
        batch = batch or (micro or 0) * devices
        seconds = batch / rate
    require(micro and batch and seconds, "no batch or no time")
    assert micro is not None
    assert batch is not None
    assert seconds is not None
    length = _number(row, "seq_len") if language else None
    run = Run(
        network=network, hardware=hardware, devices=devices, tp=tp, micro_batch=int(micro), global_batch=int(batch),
        sequence_length=int(length) if length else None, precision=kind or None,
        sharded=_text(row, "optimizer_sharding") not in ("", "none"),
    )  # fmt: skip
    return run, seconds
