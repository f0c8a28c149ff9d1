"""Fits of the roofline of a class of kernels: two efficiencies and the fixed cost of a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from simulator.calibration.fit_rows import Rows
from simulator.calibration.fit_shapes import measured_name
from simulator.calibration.fits import FittedValues, FloatArray, minimise, rounded
from simulator.calibration.measurement_files import need, read_measurements
from simulator.hardware import Hardware, KernelModel
from simulator.kernels import kernel_time
from simulator.program import Kernel

SINGLE = "G_single_gpu_ops.csv"
ASCEND = "G3_ascend_a3_ops.csv"
STREAMS = ("stream_scale", "stream_triad", "stream_3pt", "membw_copy", "membw_mul", "membw_add", "membw_triad")
STREAMING = (
    Kernel.CONVOLUTION,
    Kernel.ATTENTION,
    Kernel.ELEMENTWISE,
    Kernel.REDUCTION,
    Kernel.OPTIMIZER,
    Kernel.COPY,
)
"""Classes without rows of their own that move memory as streams do."""
LAYER_FILES = {"A100 80GB": ("A100 80GB", "A100"), "H100 80GB": ("H100 80GB",), "Ascend": ("Ascend",)}
LAYER_OPS: tuple[tuple[Kernel, str, tuple[str, ...], float], ...] = (
    (Kernel.NORMALIZATION, "A100", ("layernorm",), 2),
    (Kernel.ACTIVATION, "A100", ("gelu",), 2),
    (Kernel.SOFTMAX, "A100", ("softmax",), 2),
    (Kernel.EMBEDDING, "A100 80GB", ("emb",), 2),
    (Kernel.EMBEDDING, "H100 80GB", ("emb",), 2),
    (Kernel.ELEMENTWISE, "Ascend", ("add", "copy (TensorMove)"), 0),
    (Kernel.NORMALIZATION, "Ascend", ("RMSNorm", "add + RMSNorm (AddRmsNormBias)"), 0),
    (Kernel.ACTIVATION, "Ascend", ("SwiGLU",), 0),
)


def fit_kernel(hardware: Hardware, kernel: Kernel, what: str, rows: pd.DataFrame, dtype: str) -> FittedValues:
    """Efficiencies and overhead of one class from columns flops, bytes, seconds."""
    flops, moved, seconds = (rows[name].to_numpy(float) for name in ("flops", "bytes", "seconds"))

    def ratios(values: FloatArray) -> FloatArray:
        model = KernelModel(
            compute_efficiency=float(values[0]), bandwidth_efficiency=float(values[1]), overhead_s=float(values[2])
        )
        changed = replace(hardware, kernels={**hardware.kernels, kernel: model})
        return np.asarray(np.log(kernel_time(changed, kernel, dtype, flops, moved) / seconds))

    best = minimise(lambda values: float(np.abs(ratios(values)).mean()), [0.6, 0.7, 4e-6], [1, 1, 1e-3])
    names = ("compute_efficiency", "bandwidth_efficiency", "overhead_s")
    values = {name: rounded(float(value)) for name, value in zip(names, best, strict=True)}
    return FittedValues(name=kernel.value, what=what, numbers=values, ratios=ratios(best))


def product_work(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of 16-bit matrix products with columns flops and bytes."""
    moved = 2 * (frame.m * frame.n + frame.n * frame.k + frame.m * frame.k)
    return frame.assign(flops=2 * frame.m * frame.n * frame.k, bytes=moved)


def layer_rows(folder: Path, accelerator: str, ops: Sequence[str], passes: float) -> pd.DataFrame:
    """Memory-bound operators: `passes` tensors of ``m`` by the hidden size or ``n``, 2 bytes an element."""
    path = folder / "operators" / (ASCEND if accelerator == "Ascend" else SINGLE)
    frame = read_measurements(path, ["accelerator", "op", "m", "n", "shape_note", "time_ms", "mem_bandwidth_GBps"])
    if accelerator == "Ascend":
        frame = frame[frame.op.isin(ops) & (frame.m >= 128)]
        need(path, frame, ["mem_bandwidth_GBps"])
        moved = frame.mem_bandwidth_GBps * 1e9 * frame.time_ms * 1e-3
    else:
        frame = frame[frame.op.isin(ops) & (frame.m >= 256) & (frame.accelerator == accelerator)]
        hidden = frame.shape_note.str.extract(r"hidden (\d+)")[0].astype(float).fillna(frame.n).fillna(1)
        moved = passes * 2 * frame.m * hidden
    need(path, frame, ["time_ms"])
    return frame.assign(flops=0.0, bytes=moved, seconds=frame.time_ms * 1e-3)


def fit_streams(hardware: Hardware, folder: Path, accelerators: Sequence[str]) -> FittedValues:
    """Fraction of the memory's peak that copies and triads of large arrays reach at full occupancy."""
    path = folder / "operators" / SINGLE
    frame = read_measurements(path, ["accelerator", "op", "shape_note", "mem_bandwidth_GBps"])
    frame = frame[frame.op.isin(STREAMS) & frame.accelerator.isin(accelerators)]
    frame = frame[(frame.shape_note == "") | frame.shape_note.str.contains("1024 threads")]
    need(path, frame, ["mem_bandwidth_GBps"])
    reached = frame.mem_bandwidth_GBps.to_numpy(float) * 1e9 / hardware.memory_bandwidth
    middle = float(np.median(reached))
    what = f"streaming copies and triads on {accelerators[-1]}"
    values = {"bandwidth_efficiency": rounded(middle)}
    return FittedValues(name="streams", what=what, numbers=values, ratios=np.log(reached / middle))


def fit_overhead(folder: Path, accelerator: str) -> FittedValues:
    """Time of the smallest memory-bound kernels (16 tokens and fewer), in which the data takes no time."""
    path = folder / "operators" / SINGLE
    frame = read_measurements(path, ["accelerator", "op", "m", "time_ms"])
    frame = frame[frame.op.isin(["add", "attn_rope", "mlp_act", "input_layernorm"]) & (frame.m <= 16)]
    frame = frame[frame.accelerator == accelerator]
    need(path, frame, ["time_ms"])
    seconds = frame.time_ms.to_numpy(float) * 1e-3
    middle = float(np.median(seconds))
    what = f"kernels on 16 tokens and fewer on {accelerator}"
    values = {"overhead_s": rounded(middle)}
    return FittedValues(name="kernel overhead", what=what, numbers=values, ratios=np.log(middle / seconds))


def fit_layers(hardware: Hardware, folder: Path, rows: Rows) -> Iterator[tuple[Kernel, FittedValues]]:
    """Fits of the memory-bound classes that have rows."""
    for kernel, accelerator, ops, passes in LAYER_OPS:
        if rows.layers and accelerator in LAYER_FILES[rows.layers]:
            place = measured_name(rows) if accelerator == "Ascend" else accelerator
            what = f"{', '.join(ops)} on {place}"
            frame = layer_rows(folder, accelerator, ops, passes)
            yield kernel, fit_kernel(hardware, kernel, what, frame, "float16")
