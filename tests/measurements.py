"""Measurement files made for tests, and published ones where they lie beside the repository."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[1] / "../shared/measurements"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no published measurements beside the repository")

COLUMNS = [
    "row_id", "source", "source_table", "measured_date", "model", "arch", "n_layers", "hidden", "n_heads",
    "n_kv_heads", "ffn_hidden", "vocab", "seq_len", "image_size", "n_experts", "moe_topk", "params_b", "hw",
    "accelerator", "accel_mem_gb", "accels_per_node", "intra_node_link", "inter_node_link", "n_accels", "precision",
    "global_batch", "micro_batch", "per_accel_batch", "grad_accum", "tp", "pp", "vpp", "dp", "cp", "ep", "etp",
    "sp", "zero_fsdp", "recompute", "attention_impl", "framework", "other_flags", "recompute_kind",
    "optimizer_sharding", "precision_kind", "sequence_parallel", "plan_complete", "outcome", "step_time_s",
    "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "tflops_kind", "mfu_pct", "mem_gib_per_gpu",
    "mem_kind", "notes",
]  # fmt: skip
PLAIN = {
    "row_id": "T-1", "source": "made for a test", "model": "GPT test", "arch": "decoder-MHA-gelu", "n_layers": "24",
    "hidden": "2048", "n_heads": "16", "vocab": "50257", "seq_len": "2048", "accelerator": "A100-80GB",
    "accel_mem_gb": "80", "accels_per_node": "8", "n_accels": "16", "precision": "bf16", "global_batch": "128",
    "micro_batch": "4", "tp": "2", "pp": "2", "framework": "Megatron-LM", "recompute_kind": "full",
    "optimizer_sharding": "zero1", "precision_kind": "bf16", "sequence_parallel": "true", "outcome": "ok",
    "step_time_s": "2.5", "attention_impl": "flash_attention2",
}  # fmt: skip
"""A row that states everything."""


def write_measurements(path: Path, *changes: dict[str, str], columns: list[str] | None = None) -> Path:
    """Write a file with one row for each dict of `changes` to the plain row."""
    names = COLUMNS if columns is None else columns
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(names)
        for number, change in enumerate(changes, 1):
            row = {**PLAIN, "row_id": f"T-{number}", **change}
            writer.writerow([row.get(name, "") for name in names])
    return path
