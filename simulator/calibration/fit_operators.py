"""Fitted numbers of the operators of a shipped profile, as the fields that the profile file holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simulator.calibration.fit_shapes import (
    LOADING,
    AttentionFit,
    ascend_attention_rows,
    attention_seconds,
    fit_attention,
    fit_convolution,
    fit_matmul,
    fit_part,
    fit_rows_of_groups,
    image_rates,
    inference_attention_rows,
    matmul_rows,
    measured_name,
    product_ratios,
    product_rows,
    training_attention_rows,
)
from simulator.calibration.fits import FittedValues, FloatArray, Rows, minimise, rounded, rows_of
from simulator.calibration.measurement_files import need, read_measurements
from simulator.hardware import AttentionModel, Hardware, KernelModel, MatmulModel
from simulator.kernels import kernel_time
from simulator.profile_parts import OperatorsPart, operator_models
from simulator.profiles import load_profile
from simulator.program import WIDER_CLASS, Kernel

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


Fields = dict[str, dict[str, object]]
"""Content of fields, value and source, by their dotted path in the profile."""

FLASH2_HOPPER = 0.35
"""Part of the peak that FlashAttention-2 reaches on H100: Shah et al., "FlashAttention-3", 2024, abstract."""
FLASH_SPEED = 0.5
"""FlashAttention's speed as a part of FlashAttention-2's: Dao, "FlashAttention-2", 2023, abstract."""
HEAD_SIZE = 128.0  # of the heads that such statements are about
LARGE = 1e11  # FLOPs of a product that keeps the whole device busy


@dataclass(kw_only=True)
class OperatorFits:
    """Fields of one profile and the fits behind them."""

    fields: Fields = field(default_factory=dict)
    fits: list[FittedValues] = field(default_factory=list)

    def add(self, fit: FittedValues, place: str, content: Mapping[str, object], note: str = "") -> None:
        """Record `content` at `place`, with `fit` as its source."""
        self.fields[place] = {**content, "source": fit.source(note)}
        if not any(fit is known for known in self.fits):
            self.fits.append(fit)


def operator_fits(folder: Path, profile: str) -> OperatorFits:
    """Fields of one profile with the fits behind them."""
    base = _base(folder, profile)
    result = OperatorFits(fields=dict(base.fields), fits=list(base.fits))
    if rows_of(profile).images:
        fit = _convolution(folder, profile)
        result.add(fit, "kernels.convolution.compute_efficiency", {"value": fit.numbers["efficiency"]})
    return result


@lru_cache(maxsize=32)
def _base(folder: Path, profile: str) -> OperatorFits:
    """Fields of one profile, its own and those of its nearest devices, convolutions apart."""
    rows, own = rows_of(profile), _own(folder, profile)
    fields = dict(own.fields)
    for kind in ("matmul", "sustained_matmul_speed", "grouped_matmul_rows"):
        _inherit(folder, rows, fields, f"operators.{kind}")
    _complete_attention(folder, rows, fields)
    return OperatorFits(fields=fields, fits=own.fits)


def _inherit(folder: Path, rows: Rows, fields: Fields, place: str) -> None:
    """Take the fields at `place` from the nearest device that has them, unless they are there."""
    if any(_within(name, place) for name in fields):
        return
    for other in rows.like:
        found = {name: content for name, content in _own(folder, other).fields.items() if _within(name, place)}
        if found:
            fields.update({name: _assumed(content, other) for name, content in found.items()})
            return


def _within(name: str, place: str) -> bool:
    return name == place or name.startswith(place + ".")


def _assumed(content: Mapping[str, object], profile: str, why: str = "no rows on this device") -> dict[str, object]:
    told = str(content["source"]).removeprefix("fitted: ").removeprefix("assumed: ")
    return {**content, "source": f"assumed: as for {profile}, {why}; there {told}"[:1000]}


@lru_cache(maxsize=32)
def _own(folder: Path, profile: str) -> OperatorFits:
    """Fields that the rows of the profile's own device, or the one that stands for it, speak for."""
    rows, hardware = rows_of(profile), load_profile(profile)
    fits = OperatorFits()
    cores = {"value": rows.multiprocessors, "source": rows.multiprocessors_source}
    fits.fields["device.multiprocessors"] = cores
    _classes(folder, rows, hardware, fits)
    # The fits start from the device alone, not from what earlier fits left in its profile.
    measured = replace(
        hardware,
        multiprocessors=rows.measured_multiprocessors or rows.multiprocessors,
        matmul_models={},
        sustained_matmul_speed=1.0,
        attention_models={},
    )
    if rows.peak_flops:
        measured = replace(measured, peak_flops=dict.fromkeys(hardware.peak_flops, rows.peak_flops))
    measured = _products(folder, rows, measured, fits)
    if rows.attention == "Ascend":
        _ascend_attention(folder, measured, fits)
    elif rows.attention:
        _attention(folder, rows, measured, fits)
    return fits


def _classes(folder: Path, rows: Rows, hardware: Hardware, fits: OperatorFits) -> None:
    """The rooflines of the classes that have rows."""
    if rows.gemm:
        dtype = hardware.default_precision
        peaks = {**hardware.peak_flops, dtype: rows.peak_flops or hardware.peak_flops[dtype]}
        frame = product_work(matmul_rows(folder, rows.gemm, dtype))
        what = f"16-bit matrix products on {measured_name(rows)}"
        fit = fit_kernel(replace(hardware, peak_flops=peaks), Kernel.MATMUL, what, frame, dtype)
        for name, value in fit.numbers.items():
            fits.add(fit, f"kernels.matmul.{name}", {"value": value})
    if rows.stream:
        fit = fit_streams(hardware, folder, rows.stream)
        for kernel in STREAMING:
            fits.add(fit, f"kernels.{kernel}.bandwidth_efficiency", {"value": fit.numbers["bandwidth_efficiency"]})
    layers = dict(fit_layers(hardware, folder, rows))
    for kernel, fit in layers.items():
        # Adds and copies of Ascend are so short that their rows tell an overhead alone: activations stream as they do.
        alike: tuple[Kernel, ...] = () if rows.layers == "Ascend" and kernel is Kernel.ELEMENTWISE else (kernel,)
        if rows.layers == "Ascend" and kernel is Kernel.ACTIVATION:
            alike = (kernel, *STREAMING)
        for place in alike:
            content = {"value": fit.numbers["bandwidth_efficiency"]}
            fits.add(fit, f"kernels.{place}.bandwidth_efficiency", content, "host overhead of the rows left out")
    if rows.layers:
        small = layers[Kernel.ELEMENTWISE] if rows.layers == "Ascend" else fit_overhead(folder, rows.layers)
        for kernel in Kernel:
            # Classes that the profile has no entry of their own for are as fast as the wider one.
            if kernel not in {Kernel.MATMUL, Kernel.ATTENTION, Kernel.VIEW, *WIDER_CLASS}:
                fits.add(small, f"kernels.{kernel}.overhead_s", {"value": small.numbers["overhead_s"]})


def _products(folder: Path, rows: Rows, hardware: Hardware, fits: OperatorFits) -> Hardware:
    """Matrix products by shape; returns the hardware with them."""
    models: dict[str, MatmulModel] = {}
    for dtype in ("bfloat16", "float8_e4m3fn"):
        frame = matmul_rows(folder, rows.gemm, dtype) if rows.gemm and dtype in hardware.peak_flops else None
        if frame is None or len(frame) < 20 or (rows.gemm == "Ascend" and dtype != "bfloat16"):
            continue
        found = fit_matmul(replace(hardware, matmul_models=models), rows, frame, dtype)
        fits.add(found.fit, f"operators.matmul.{dtype}", matmul_content(found.model), found.note)
        models[dtype] = found.model
    hardware = replace(hardware, matmul_models=models)
    if rows.training_attention and models:
        place = rows.training_attention
        dense = product_rows(folder, place, "gemm")
        dense = dense[2 * dense.m * dense.n * dense.k >= LARGE]
        ratios = product_ratios(hardware, dense)
        if rows.sustained:
            what = f"large 16-bit products timed under lasting load on {place}"
            fit = fit_part("sustained matmul speed", what, ratios)
            fits.add(fit, "operators.sustained_matmul_speed", {"value": fit.numbers["part"]})
        grouped = product_rows(folder, place, "group_matmul")
        what = f"grouped 16-bit products of experts, forward and backward, on {place}"
        fit = fit_rows_of_groups(what, grouped, product_ratios(hardware, grouped) - np.median(ratios))
        note = "beside plain products of the same source"
        fits.add(fit, "operators.grouped_matmul_rows", {"value": fit.numbers["rows"]}, note)
    return hardware


def matmul_content(model: MatmulModel) -> dict[str, object]:
    """What the profile holds of a model of matrix products."""
    numbers = {name: value for name, value in asdict(model).items() if name not in {"tiles", "utilisation"}}
    return {
        "tiles": [list(tile) for tile in model.tiles],
        **numbers,
        "log10_flops": [point[0] for point in model.utilisation],
        "utilisation": [point[1] for point in model.utilisation],
    }


def _attention(folder: Path, rows: Rows, hardware: Hardware, fits: OperatorFits) -> None:
    """Fused attention of the kinds and directions that have rows."""
    inference = inference_attention_rows(folder, rows.attention)
    name = rows.attention.removeprefix("NVIDIA ")
    kind = "flash2" if rows.training_attention.startswith("A100") else "vendor"  # what its source ran on either
    if rows.training_attention:
        place = rows.training_attention
        forward = training_attention_rows(folder, place, "fwd")
        if kind == "vendor":
            forward = pd.concat([forward, inference], ignore_index=True)
        for direction, frame in (("forward", forward), ("backward", training_attention_rows(folder, place, "bwd"))):
            backward = direction == "backward"
            what = f"causal fused attention on {place}"
            found = fit_attention(hardware, frame, backward=backward, name=f"attention {kind} {direction}", what=what)
            _add_attention(fits, kind, direction, found)
    if kind != "vendor" or not rows.training_attention:
        what = f"causal fused attention of inference, KV cache written, on {name}"
        found = fit_attention(hardware, inference, backward=False, name="attention vendor forward", what=what)
        _add_attention(fits, "vendor", "forward", found)


def _add_attention(fits: OperatorFits, kind: str, direction: str, found: AttentionFit) -> None:
    note = "cost of the exponentials (fill_head_size) and of blocks of 128 queries assumed"
    fits.add(found.fit, f"operators.attention.{kind}.{direction}", asdict(found.model), note)


def _ascend_attention(folder: Path, hardware: Hardware, fits: OperatorFits) -> None:
    """Fused attention of inference on Ascend: its few rows tell an efficiency and nothing else."""
    frame = ascend_attention_rows(folder)
    model = AttentionModel(
        compute_efficiency=0.5,
        bandwidth_efficiency=hardware.kernels[Kernel.ATTENTION].bandwidth_efficiency,
        overhead_s=hardware.kernels[Kernel.MATMUL].overhead_s,
        tile_queries=128,
        fill_keys=0.0,
        fill_head_size=LOADING,
        wave_share=1.0,
    )
    seconds = frame.seconds.to_numpy(float)
    ratios = np.log(attention_seconds(hardware, model, frame, backward=False) / seconds)
    model = replace(model, compute_efficiency=rounded(0.5 * float(np.exp(np.median(ratios)))))
    ratios = np.log(attention_seconds(hardware, model, frame, backward=False) / seconds)
    what = "causal fused attention of inference on one die of an Atlas 800 A3, sequences taken as equally long"
    values = {"compute_efficiency": model.compute_efficiency}
    fit = FittedValues(name="attention vendor forward", what=what, numbers=values, ratios=ratios)
    fits.add(fit, "operators.attention.vendor.forward", asdict(model), "the other numbers assumed")


def _complete_attention(folder: Path, rows: Rows, fields: Fields) -> None:
    """What the device has no rows of, from the kernels of others and from published comparisons."""
    place = "operators.attention."
    if not any(_within(name, "operators.attention") for name in fields):
        for other in rows.like:
            theirs = _base(folder, other).fields
            found = {name: content for name, content in theirs.items() if name.startswith(place)}
            if found:
                fields.update({name: _assumed(content, other) for name, content in found.items()})
                return
    ampere, blackwell = _own(folder, "dgx-a100").fields, _own(folder, "dgx-b200").fields
    if place + "vendor.backward" not in fields:
        hopper = rows.gemm not in {"Ascend", "NVIDIA A100-SXM4-80GB"}
        kind, theirs, other = ("vendor", blackwell, "dgx-b200") if hopper else ("flash2", ampere, "dgx-a100")
        forward, backward = theirs[f"{place}{kind}.forward"], theirs[f"{place}{kind}.backward"]
        ratio = _number(backward) / _number(forward)
        own = _number(fields[place + "vendor.forward"]) * ratio
        why = f"{kind}: backward reaches {ratio:.2f} of the forward efficiency there"
        fields[place + "vendor.backward"] = _scaled(backward, own, other, why)
    if rows.gemm == "Ascend":
        return
    if place + "flash2.forward" not in fields:
        # FlashAttention-2 uses the instructions of A100, which Blackwell does not run faster than Hopper.
        hopper_peak = load_profile("dgx-h100").peak("bfloat16")
        peak = load_profile(rows.profile).peak("bfloat16")
        measured = _number(ampere[place + "flash2.forward"])
        forward_part = FLASH2_HOPPER * (1 + LOADING / HEAD_SIZE) * min(1.0, hopper_peak / peak)
        for direction in ("forward", "backward"):
            content = ampere[f"{place}flash2.{direction}"]
            part = forward_part * _number(content) / measured
            why = "slower by Shah et al., FlashAttention-3, 2024: 35 % of the peak on H100, as many FLOP/s on Blackwell"
            fields[f"{place}flash2.{direction}"] = _scaled(content, part, "dgx-a100", why)
    for direction in ("forward", "backward"):
        content = fields[f"{place}flash2.{direction}"]
        why = "flash2: half as fast by Dao, FlashAttention-2, 2023"
        part = FLASH_SPEED * _number(content)
        fields[f"{place}flash.{direction}"] = _scaled(content, part, rows.profile, why)


def _number(content: Mapping[str, object]) -> float:
    value = content["compute_efficiency"]
    assert isinstance(value, float)
    return value


def _scaled(content: Mapping[str, object], efficiency: float, profile: str, why: str) -> dict[str, object]:
    return {**_assumed(content, profile, why), "compute_efficiency": rounded(min(1.0, efficiency))}


@lru_cache(maxsize=32)
def _convolution(folder: Path, profile: str) -> FittedValues:
    """Convolutions by the roofline on the profile's device."""
    rows, hardware = rows_of(profile), load_profile(profile)
    fields = _base(folder, profile).fields
    what = "16-bit ResNet-50 training rates of 1 to 8 devices"
    return fit_convolution(with_operators(hardware, fields), image_rates(folder, rows.images), what)


def with_operators(hardware: Hardware, fields: Fields) -> Hardware:
    """`hardware` with the models by shape that `fields` hold."""
    content: dict[str, Any] = {}
    for name, value in fields.items():
        parts = name.split(".")
        if parts[0] == "operators":
            place = content
            for part in parts[1:-1]:
                place = place.setdefault(part, {})
            place[parts[-1]] = value
    cores = fields["device.multiprocessors"]["value"]
    assert isinstance(cores, int)
    models = operator_models(OperatorsPart.model_validate_json(json.dumps(content)))
    return replace(hardware, multiprocessors=cores, **models)
