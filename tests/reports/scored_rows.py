"""Made-up rows beside made-up predictions, as many as wanted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.published.metrics import AccuracyResult, ScoredRow, accuracy_of
from planner.published.predictions import ASCEND, CONVOLUTIONAL, ELSEWHERE, FSDP, TRANSFORMERS

SOURCES = (
    ("Megatron papers (SC21)", TRANSFORMERS, "NVIDIA A100-SXM4-80GB", 0.04),
    ("MPT <benchmarks> & tables", FSDP, "NVIDIA H100-SXM5-80GB", 0.07),
    ("Layout sweep", TRANSFORMERS, "NVIDIA A100-SXM4-80GB", 0.05),
    ("Language networks on Ascend", ASCEND, "Ascend 910B (64GB)", 0.09),
    ("Vision on Ascend", CONVOLUTIONAL, "Ascend 910", 0.12),
    ("Convolutions and BERT", CONVOLUTIONAL, "NVIDIA V100-SXM2-32GB", 0.10),
    ("Vendor summaries", ELSEWHERE, "NVIDIA GB200", 0.15),
    ("One benchmark suite with quite a long name, version 2, tables three to seventeen", TRANSFORMERS, "TPU v4", 0.3),
)


def made_up_result(count: int = 200, *, seed: int = 0) -> AccuracyResult:
    """Rows of every source and kind: predicted, skipped, wrong; with memory, out of memory, several plans."""
    random = np.random.default_rng(seed)
    fitted = [_row(index, random) for index in range(count)]
    left_out = [_worse(row, float(random.lognormal(0.03, 0.05))) for row in fitted]
    return AccuracyResult(fitted=accuracy_of(fitted), left_out=accuracy_of(left_out))


def _row(index: int, random: np.random.Generator) -> ScoredRow:
    source, group, device, spread = SOURCES[index % len(SOURCES)]
    kind = {"source": source, "file": f"{source[:1]}_file.csv", "transformer": group != CONVOLUTIONAL}
    name = {"row_id": f"R{index:05d}", **kind}
    if random.random() < 0.08:
        reason = ("the network is not named", f"no description of the network 'net{index}'", "n_accels not stated")
        return ScoredRow(**name, status="skipped", reason=reason[index % 3])
    if random.random() < 0.01:
        return ScoredRow(**name, status="error", reason=f"{name['file']}, line {index}, column tp: 'x' is not a number")
    measured = float(10 ** random.uniform(-1.5, 2))
    predicted = measured * float(random.lognormal(0, spread))
    memory = float(random.uniform(8, 90)) * 2**30
    guessed = memory * float(random.lognormal(0, 0.04))
    full = group == TRANSFORMERS and memory > 80 * 2**30
    return ScoredRow(
        **name,
        status="ok",
        reason="vocabulary not stated: 50257" if index % 5 == 0 else "",
        label=("calibrated", "interpolated", "extrapolated")[index % 3],
        workload=f"{source} {index // 40}",
        device=device,
        devices=int(2 ** random.integers(0, 12)),
        group=group,
        predicted_step_time_s=predicted,
        operations_s=0.4 * measured,
        roofline_s=0.5 * measured,
        interval_s=(predicted * (1 - 2 * spread), predicted * (1 + 2 * spread)),
        measured_step_time_s=None if full else measured,
        predicted_memory_bytes=guessed,
        measured_memory_bytes=memory if not full and random.random() < 0.4 else None,
        predicted_outcome="oom" if guessed > 80 * 2**30 else "ok",
        measured_outcome="oom" if full else "ok",
    )


def _worse(row: ScoredRow, factor: float) -> ScoredRow:
    if row.predicted_step_time_s is None:
        return row
    return replace(row, predicted_step_time_s=row.predicted_step_time_s * factor)
