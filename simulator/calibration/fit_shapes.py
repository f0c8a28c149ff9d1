"""Fits of the operators that are timed by their shape: matrix products, fused attention, convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from simulator.calibration.fits import TILES, FittedValues, FloatArray, Rows, minimise, rounded
from simulator.calibration.measurement_files import need, read_measurements
from simulator.hardware import AttentionModel, AttentionPasses, Hardware, MatmulModel
from simulator.kernels import attention_time, convolution_time, kernel_time, matmul_time, padded_work
from simulator.program import Kernel

TRAINING = 128  # smallest dimension of the matrix products that training runs
CURVE_BINS = 6
HIGHEST = 0.95  # of the peak: leaves the curve room above its mean
LOADING = 22.0  # head size whose products take as long as the exponentials of one score
LAUNCH_S = 25e-6  # most that starting and ending a fused kernel costs; what short sequences lose beyond it is fill
SIMULATOR = "G_single_gpu_ops.csv"
KERNELS = "G2_gemm_attention_aiconfigurator.csv"
ASCEND = "G3_ascend_a3_ops.csv"


@dataclass(frozen=True, kw_only=True)
class MatmulFit:
    """A shape model with its fit."""

    model: MatmulModel
    fit: FittedValues
    note: str = ""


def matmul_rows(folder: Path, accelerator: str, dtype: str) -> pd.DataFrame:
    """Matrix products in `dtype` with no dimension under `TRAINING`: m, n, k, seconds."""
    columns = ["accelerator", "op", "dtype", "m", "n", "k", "time_ms"]
    if accelerator == "V100":
        path = folder / "operators" / SIMULATOR
        frame = read_measurements(path, [*columns, "tflops"])
        frame = frame.query("op == 'gemm' and accelerator == 'V100' and dtype == 'fp16'")
        need(path, frame, ["tflops"])
        frame = frame.assign(time_ms=2e-9 * frame.m * frame.n * frame.k / frame.tflops)
    elif accelerator == "Ascend":
        path = folder / "operators" / ASCEND
        frame = read_measurements(path, columns).query("op == 'gemm' and dtype == 'bf16 in'")
    else:
        path = folder / "operators" / KERNELS
        wanted = {"bfloat16": "bfloat16", "float8_e4m3fn": "fp8"}.get(dtype, dtype)
        frame = read_measurements(path, columns)
        frame = frame[(frame.op == "gemm") & (frame.accelerator == accelerator) & (frame.dtype == wanted)]
    for column in ("m", "n", "k", "time_ms"):
        need(path, frame, [column])
    frame = frame[(frame.m >= TRAINING) & (frame.n >= TRAINING) & (frame.k >= TRAINING)]
    return frame.assign(seconds=frame.time_ms * 1e-3)


def fit_matmul(hardware: Hardware, rows: Rows, frame: pd.DataFrame, dtype: str) -> MatmulFit:
    """Tiles, efficiencies, depth, waves and utilisation curve of matrix products in one precision.

    Products of 8-bit numbers were timed with the quantisation of their left operand; its overhead and its bytes for
    each element are fitted as well and left out of the model, whose overhead is that of 16-bit products.
    """
    m, n, k, seconds = (frame[name].to_numpy(float) for name in ("m", "n", "k", "seconds"))
    wide = next(iter(hardware.matmul_models.values())) if dtype.startswith("float8") else None
    cast = wide is not None

    def predicted(model: MatmulModel, cast_bytes: float) -> FloatArray:
        changed = replace(hardware, matmul_models={dtype: model})
        return np.asarray(matmul_time(changed, dtype, m, n, k) + cast_bytes * m * k / hardware.memory_bandwidth)

    best: tuple[float, MatmulModel, float] | None = None
    for tiles in TILES[rows.tiles]:

        def model_of(values: FloatArray, tiles: tuple[tuple[int, int], ...] = tiles) -> MatmulModel:
            return MatmulModel(
                tiles=tiles,
                compute_efficiency=rounded(values[0]),
                bandwidth_efficiency=rounded(values[1]),
                overhead_s=rounded(values[2], 1e-8),
                fill_depth=rounded(values[3], 0.1),
                tile_loss=rounded(values[4], 1e-3),
                wave_share=rounded(values[5], 1e-3),
                split_share=rounded(values[6], 1e-3),
            )

        def loss(values: FloatArray, model_of: object = model_of) -> float:
            model = model_of(values)  # type: ignore[operator]
            return float(np.abs(np.log(predicted(model, values[7] if cast else 0.0) / seconds)).mean())

        start, upper = [0.8, 0.8, 5e-6, 100, 0.2, 0.5, 0.5, 3.0], [HIGHEST, 1, 1e-3, 1e4, 10, 1, 1, 100]
        size = len(start) if cast else len(start) - 1
        point = minimise(loss, start[:size], upper[:size])
        if best is None or loss(point) < best[0] - 1e-4:
            best = loss(point), model_of(point), float(point[7]) if cast else 0.0
    assert best is not None  # at least one set of tiles
    _, model, cast_bytes = best
    work = padded_work(model, hardware.multiprocessors, m, n, k, np.ones(len(m)))
    model = replace(model, utilisation=_curve(model, work, np.log(predicted(model, cast_bytes) / seconds)))
    ratios = np.log(predicted(model, cast_bytes) / seconds)
    roofline = kernel_time(hardware, Kernel.MATMUL, dtype, 2 * m * n * k, 2 * (m * n + n * k + m * k))
    note = f"quantising the left operand, {cast_bytes:.1f} bytes an element, fitted and left out" if cast else ""
    if wide:
        note += f", as is its overhead, {(model.overhead_s - wide.overhead_s) * 1e6:.1f} us"
        model = replace(model, overhead_s=wide.overhead_s)
    fit = FittedValues(
        name=f"matmul {dtype}",
        what=f"matrix products, no side under {TRAINING}, on {measured_name(rows)}",
        numbers={name: value for name, value in asdict(model).items() if isinstance(value, float)},
        ratios=ratios,
        before=np.log(roofline / seconds),
    )
    return MatmulFit(model=model, fit=fit, note=note)


def _curve(model: MatmulModel, work: FloatArray, ratios: FloatArray) -> tuple[tuple[float, float], ...]:
    """Points of the utilisation curve: what is left of the error at the medians of equally filled ranges of size."""
    place = np.log10(work)
    edges = np.unique(np.quantile(place, np.linspace(0, 1, CURVE_BINS + 1)))
    points: list[tuple[float, float]] = []
    for low, high in itertools.pairwise(edges):
        inside = (place >= low) & (place <= high)
        middle = round(float(np.median(place[inside])), 3)
        factor = float(np.exp(np.median(ratios[inside])))
        factor = min(factor, 1 / model.compute_efficiency)
        if not points or middle > points[-1][0]:
            points.append((middle, round(factor - 5e-5, 4)))
    return tuple(points)


def inference_attention_rows(folder: Path, accelerator: str) -> pd.DataFrame:
    """Fused causal attention of inference, forward, with the writing of the KV cache."""
    path = folder / "operators" / KERNELS
    columns = ["accelerator", "op", "batch", "seq_len", "n_heads", "n_kv_heads", "head_dim", "time_ms"]
    frame = read_measurements(path, columns)
    frame = frame[(frame.op == "attention_forward_context") & (frame.accelerator == accelerator)]
    for column in columns[2:]:
        need(path, frame, [column])
    names = dict(zip(columns[2:7], ("batch", "tokens", "heads", "shared", "size"), strict=True))
    return frame.rename(columns=names).assign(seconds=frame.time_ms * 1e-3)


def training_attention_rows(folder: Path, accelerator: str, direction: str) -> pd.DataFrame:
    """Fused causal attention of training; the source counts the masked half, and 2.5 times the work backward."""
    path = folder / "operators" / SIMULATOR
    frame = read_measurements(path, ["accelerator", "op", "shape_note", "tflops"])
    frame = frame[(frame.op == f"attention_{direction}") & (frame.accelerator == accelerator)]
    need(path, frame, ["tflops"])
    names = ("batch", "tokens", "heads", "shared", "query_size", "value_size")
    pattern = r"batch=(\d+); seq_len=(\d+); head_num=(\d+); kv_head_num=(\d+); qk_head_dim=(\d+); v_head_dim=(\d+)"
    shape = frame.shape_note.str.extract(pattern).astype(float).set_axis(list(names), axis=1)
    # Counted are heads of the mean of both sizes; kernels pad values to the size of queries.
    flops = 2 * shape.batch * shape.heads * shape.tokens**2 * (shape.query_size + shape.value_size)
    seconds = flops * (2.5 if direction == "bwd" else 1.0) / (frame.tflops * 1e12)
    shape = shape.assign(size=shape[["query_size", "value_size"]].max(axis=1), seconds=seconds)
    need(path, shape, ["seconds"])
    return shape


def ascend_attention_rows(folder: Path) -> pd.DataFrame:
    """Fused causal attention over whole sequences on Ascend; only the sum of their lengths is known."""
    path = folder / "operators" / ASCEND
    frame = read_measurements(path, ["op", "shape_note", "time_ms"])
    pattern = r"q (\d+)x(\d+)x(\d+), kv \d+x(\d+)x\d+, causal mask, (\d+) sequences"
    shape = frame.shape_note.str.extract(pattern).astype(float)
    shape = shape.set_axis(["tokens", "heads", "size", "shared", "batch"], axis=1)
    shape = shape.assign(tokens=shape.tokens / shape.batch, seconds=frame.time_ms * 1e-3)
    shape = shape[frame.op.str.startswith("attention") & shape.batch.notna()]
    need(path, shape, ["seconds"])
    return shape


@dataclass(frozen=True, kw_only=True)
class AttentionFit:
    """A shape model of one direction with its fit."""

    model: AttentionModel
    fit: FittedValues


def attention_seconds(
    hardware: Hardware, model: AttentionModel | None, frame: pd.DataFrame, *, backward: bool
) -> FloatArray:
    """Predicted seconds of causal attention of every row; by the roofline without a model."""
    models = {"vendor": AttentionPasses(forward=model, backward=model)} if model else {}
    changed = replace(hardware, attention_models=models)
    batch, heads, shared, tokens, size = (
        frame[name].to_numpy(float) for name in ("batch", "heads", "shared", "tokens", "size")
    )
    return attention_time(
        changed,
        "bfloat16",
        batch=batch,
        heads=heads,
        key_value_heads=shared,
        queries=tokens,
        keys=tokens,
        head_size=size,
        causal=True,
        backward=backward,
        kind="vendor",
    )


def fit_attention(hardware: Hardware, frame: pd.DataFrame, *, backward: bool, name: str, what: str) -> AttentionFit:
    """Efficiency, overhead, fill and waves of one fused attention kernel.

    The bandwidth is that of streams, since no row is bound by memory, and the head's fill is assumed, since nearly
    all rows have heads of one size.
    """
    seconds = frame.seconds.to_numpy(float)

    def model_of(values: FloatArray) -> AttentionModel:
        return AttentionModel(
            compute_efficiency=rounded(values[0]),
            bandwidth_efficiency=hardware.kernels[Kernel.ELEMENTWISE].bandwidth_efficiency,
            overhead_s=rounded(values[1], 1e-8),
            tile_queries=128,
            fill_keys=rounded(values[2], 0.1),
            fill_head_size=LOADING,
            wave_share=rounded(values[3], 1e-3),
        )

    def ratios(values: FloatArray) -> FloatArray:
        return np.asarray(np.log(attention_seconds(hardware, model_of(values), frame, backward=backward) / seconds))

    best = minimise(
        lambda values: float(np.abs(ratios(values)).mean()), [0.6, LAUNCH_S, 100, 0.5], [1, LAUNCH_S, 1e4, 1]
    )
    model = model_of(best)
    before = attention_seconds(hardware, None, frame, backward=backward)
    fit = FittedValues(
        name=name,
        what=what,
        numbers={key: value for key, value in asdict(model).items() if isinstance(value, float)},
        ratios=ratios(best),
        before=np.log(before / seconds),
    )
    return AttentionFit(model=model, fit=fit)


def product_rows(folder: Path, accelerator: str, op: str) -> pd.DataFrame:
    """16-bit products timed under load, forward and both gradients: `op` gemm, or group_matmul for experts."""
    path = folder / "operators" / SIMULATOR
    frame = read_measurements(path, ["accelerator", "op", "dtype", "groups", "m", "n", "k", "tflops"])
    frame = frame[(frame.op == op) & (frame.accelerator == accelerator) & frame.dtype.str.startswith("bf16")]
    for column in ("m", "n", "k", "tflops"):
        need(path, frame, [column])
    groups = frame.groups.fillna(1.0)
    return frame.assign(groups=groups, seconds=2e-12 * groups * frame.m * frame.n * frame.k / frame.tflops)


def product_ratios(hardware: Hardware, frame: pd.DataFrame) -> FloatArray:
    """``ln(predicted / measured)`` of batched products in bfloat16."""
    groups, m, n, k, seconds = (frame[name].to_numpy(float) for name in ("groups", "m", "n", "k", "seconds"))
    return np.asarray(np.log(matmul_time(hardware, "bfloat16", m, n, k, groups) / seconds))


def fit_part(name: str, what: str, ratios: FloatArray) -> FittedValues:
    """Part of the predicted rate that the rows reach: their median, at most 1."""
    part = rounded(min(1.0, float(np.exp(np.median(ratios)))))
    return FittedValues(name=name, what=what, numbers={"part": part}, ratios=ratios - np.log(part), before=ratios)


def fit_rows_of_groups(what: str, frame: pd.DataFrame, ratios: FloatArray) -> FittedValues:
    """Rows a group with which grouped products reach half the rate of plain ones, by the mean of ``|ratios|`` (n,)."""
    rows = np.minimum(frame.m.to_numpy(float), frame.k.to_numpy(float))
    tried = np.arange(0.0, 1000.0, 5.0)[:, None]
    left = ratios + np.log1p(tried / rows)
    best = int(np.argmin(np.abs(left).mean(axis=1))) if len(rows) else 0
    return FittedValues(
        name="grouped matmul", what=what, numbers={"rows": float(tried[best, 0])}, ratios=left[best], before=ratios
    )


def resnet50_kernels(hardware: Hardware, batch: int) -> float:
    """Seconds of the kernels of one ResNet-50 v1.5 training step on 16-bit numbers.

    Every convolution runs forward and as its two gradients (the first one's input has none); the normalisation and
    the activation after it read and write its output 3 + 2 times forward, 5 + 3 times backward.
    """
    table = np.array(list(_resnet50_convolutions()), dtype=float)
    side, inputs, outputs, window, stride, times = table.T
    pixels = batch * (side // stride) ** 2
    dtype = hardware.default_precision
    with_efficiency = replace(hardware, convolution_efficiency=None)
    convolution = convolution_time(
        with_efficiency,
        dtype,
        pixels=pixels,
        in_channels=inputs,
        out_channels=outputs,
        area=window**2,
        input_pixels=batch * side**2,
    )
    passes = np.where(inputs == 3, 2.0, 3.0)
    nothing, moved = np.zeros(len(table)), 2 * pixels * outputs
    others = kernel_time(hardware, Kernel.NORMALIZATION, dtype, nothing, 8 * moved)
    others = others + kernel_time(hardware, Kernel.ACTIVATION, dtype, nothing, 5 * moved)
    return float(np.sum(times * (passes * convolution + others)))


def _resnet50_convolutions() -> Iterator[tuple[int, int, int, int, int, int]]:
    """Input side, input channels, output channels, window, stride and how often it occurs."""
    yield 224, 3, 64, 7, 2, 1
    side, inputs = 56, 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        yield side, inputs, width, 1, 1, 1
        yield side, width, width, 3, stride, 1
        yield side, inputs, 4 * width, 1, stride, 1
        side //= stride
        yield side, width, 4 * width, 1, 1, blocks
        yield side, 4 * width, width, 1, 1, blocks - 1
        yield side, width, width, 3, 1, blocks - 1
        inputs = 4 * width


def image_rates(folder: Path, accelerator: str) -> FloatArray:
    """Published images a second and device of 16-bit ResNet-50 training on at most 8 devices."""
    columns = ["accelerator", "model", "precision_kind", "n_accels", "samples_per_s", "step_time_s", "global_batch"]
    names = ("I_nvidia_dle_dlperf_convnets_bert.csv", "O_flagperf_lambda.csv", "E2_ascend_vision_convnets.csv")
    frame = pd.concat([read_measurements(folder / name, columns) for name in names])
    frame = frame[frame.accelerator.str.contains(accelerator) & (frame.n_accels <= 8)]
    frame = frame[frame.model.str.contains(r"(?:^|/|ConvNets )resnet-?50(?:v1\.5|-v1\.5)?$", case=False)]
    frame = frame[frame.precision_kind.isin(["fp16", "bf16"]) | frame.accelerator.str.startswith("Ascend")]
    rate = frame.samples_per_s.fillna(frame.global_batch / frame.step_time_s) / frame.n_accels
    return rate.dropna().to_numpy(float)


def fit_convolution(hardware: Hardware, rates: FloatArray, what: str, batch: int = 128) -> FittedValues:
    """Part of the peak that convolutions reach by the roofline, to meet ResNet-50 training rates.

    The other classes are as they are. ``convolution_efficiency``, of convolutions by shape, is told by planned steps.
    """

    def ratios(value: float) -> FloatArray:
        model = replace(hardware.kernels[Kernel.CONVOLUTION], compute_efficiency=value)
        changed = replace(hardware, kernels={**hardware.kernels, Kernel.CONVOLUTION: model})
        return np.asarray(np.log(resnet50_kernels(changed, batch) / batch * rates))

    best = minimise(lambda values: float(np.abs(ratios(float(values[0]))).mean()), [0.5], [0.8])
    values = {"efficiency": rounded(float(best[0]))}
    return FittedValues(name="convolution", what=what, numbers=values, ratios=ratios(float(best[0])))


def measured_name(rows: Rows) -> str:
    """The measured device of the kernel rows of a profile."""
    return "one die of an Atlas 800 A3" if rows.gemm == "Ascend" else rows.gemm
