"""Fit the numbers that the profiles call fitted: ``python -m simulator.calibration.fit_profiles MEASUREMENTS_DIR``.

Every fit minimises the mean of ``|ln(predicted / measured)|``, which outliers move little, with the very
functions that the simulator uses. Printed per number: value, rows, median and 90th percentile of the
relative error ``exp(|ln(predicted / measured)|) - 1``. Nothing is written; the profiles quote the output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from simulator.collectives import collective_time
from simulator.hardware import Hardware, KernelModel, Level, load_profile
from simulator.kernels import kernel_time
from simulator.program import Collective, Kernel
from simulator.topology import group_shape

FloatArray = NDArray[np.float64]
COLLECTIVES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
}
STREAMS = ("stream_scale", "stream_triad", "stream_3pt", "membw_copy", "membw_mul", "membw_add", "membw_triad")
SMALLEST_MESSAGE = 512  # bytes; below, a collective is all overhead
FABRIC_SHARE = 0.95  # what the fits of dgx-a100 and dgx-h200 leave of the datasheet rate
CONVOLUTION_LIMIT = 0.8  # no better than the best matrix products


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which published rows speak for one profile: what their columns accelerator and inter_node_link hold.

    ``link`` is the datasheet rate of a device's network port, ``peak_flops`` the 16-bit peak of the measured
    device where that is another one than the profile's.
    """

    profile: str
    gemm: str = ""
    attention: str = ""
    stream: tuple[str, ...] = ()
    layers: str = ""
    node: tuple[str, ...] = ()
    node_sizes: tuple[int, ...] = (2, 4, 8)
    fabric: str = ""
    fabric_links: str = ""
    link: float = 0.0
    fixed_link: bool = False
    peak_flops: float = 0.0
    images: str = ""


ROWS = (
    Rows(profile="dgx1-v100", gemm="V100", stream=("V100",), node=("V100",), node_sizes=(8,), images=r"V100(?!.*PCIe)"),
    Rows(
        profile="dgx-a100",
        gemm="NVIDIA A100-SXM4-80GB",
        attention="NVIDIA A100-SXM4-80GB",
        stream=("A100 80GB", "A100-SXM4-80GB"),
        layers="A100 80GB",
        node=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        fabric="A100-SXM4-40GB",
        fabric_links="HDR InfiniBand|OCI",
        link=25e9,
        images=r"^A100$|A100 80GB SXM4",
    ),
    Rows(profile="dgx-a100-40g", stream=("A100 40GB",)),
    Rows(
        profile="dgx-h100",
        gemm="NVIDIA H100 80GB HBM3",
        attention="NVIDIA H100 80GB HBM3",
        stream=("H100 80GB HBM3",),
        layers="H100 80GB",
        node=("NVIDIA H100 80GB HBM3", "H100 80GB", "H100 80GB HBM3"),
        fabric="H100 80GB",
        fabric_links="RoCEv2|dgx-06|NDR",
        link=50e9,
        fixed_link=True,
        images="H100 80GB SXM5",
    ),
    Rows(
        profile="dgx-h200",
        gemm="NVIDIA H200",
        attention="NVIDIA H200",
        stream=("H200", "H200 141GB"),
        node=("NVIDIA H200", "H200 141GB"),
        fabric="H200",
        fabric_links="8x400G|OCI",
        link=50e9,
    ),
    Rows(
        profile="dgx-b200",
        gemm="NVIDIA B200",
        attention="NVIDIA B200",
        node=("NVIDIA B200", "B200"),
        fabric="B200",
        fabric_links=r"8x ConnectX-7|8x400G RDMA(?!.*DraNet)",
        link=50e9,
    ),
    Rows(
        profile="gb200-nvl72",
        gemm="NVIDIA GB200",
        attention="NVIDIA GB200",
        node=("NVIDIA GB200", "GB200"),
        node_sizes=(2, 4, 8, 72),
        fabric="GB200",
        fabric_links="Quantum",
        link=50e9,
        fixed_link=True,
    ),
    Rows(
        profile="ascend910b-atlas800t-a2",
        gemm="Ascend",
        layers="Ascend",
        node=("Ascend",),
        node_sizes=(8, 16),
        peak_flops=353.9e12,
    ),
    Rows(profile="ascend910-atlas800", images="^Ascend 910$"),
)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted values and how well they meet their rows."""

    name: str
    values: dict[str, float]
    ratios: FloatArray

    def __str__(self) -> str:
        errors = np.exp(np.abs(self.ratios)) - 1
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        bias = np.exp(np.median(self.ratios)) - 1
        return (
            f"  {self.name}: {values}; {len(errors)} rows, median error {np.median(errors):.1%}, "
            f"p90 {np.quantile(errors, 0.9):.1%}, bias {bias:+.1%}"
        )


def minimise(loss: Callable[[FloatArray], float], start: Sequence[float], upper: Sequence[float]) -> FloatArray:
    """Compass search in the logarithm: step up and down along each number, halve the step when nothing helps."""
    point, limit = np.log(np.asarray(start)), np.log(np.asarray(upper))
    best, step = loss(np.exp(point)), 0.5
    while step > 1e-3:
        improved = False
        for index in range(len(point)):
            for sign in (step, -step):
                trial = point.copy()
                trial[index] = min(trial[index] + sign, limit[index])
                value = loss(np.exp(trial))
                if value < best - 1e-9:
                    point, best, improved = trial, value, True
        step = step if improved else step / 2
    return np.asarray(np.exp(point))


def fit_kernel(hardware: Hardware, kernel: Kernel, name: str, rows: pd.DataFrame, dtype: str) -> Fit:
    """Efficiencies and overhead of one class from columns flops, bytes, seconds."""
    flops, moved = rows.flops.to_numpy(float), rows.bytes.to_numpy(float)

    def ratios(values: FloatArray) -> FloatArray:
        model = KernelModel(
            compute_efficiency=float(values[0]), bandwidth_efficiency=float(values[1]), overhead_s=float(values[2])
        )
        changed = replace(hardware, kernels={**hardware.kernels, kernel: model})
        return logarithm(kernel_time(changed, kernel, dtype, flops, moved), rows)

    best = minimise(lambda values: float(np.abs(ratios(values)).mean()), [0.6, 0.7, 4e-6], [1, 1, 1e-3])
    names = ("compute_efficiency", "bandwidth_efficiency", "overhead_s")
    return Fit(name=name, values=dict(zip(names, best.tolist(), strict=True)), ratios=ratios(best))


def gemm_rows(folder: Path, accelerator: str) -> pd.DataFrame:
    """16-bit matrix products of the shapes that training runs: no dim under 128."""
    if accelerator == "V100":
        frame = read(folder, "G_single_gpu_ops.csv", op="gemm", accelerator="V100").query("dtype == 'fp16'")
        frame = frame.assign(time_ms=2e-9 * frame.m * frame.n * frame.k / frame.tflops)
    elif accelerator == "Ascend":
        frame = read(folder, "G3_ascend_a3_ops.csv", op="gemm").query("dtype == 'bf16 in'")
    else:
        frame = read(folder, "G2_gemm_attention_aiconfigurator.csv", op="gemm", accelerator=accelerator)
        frame = frame.query("dtype == 'bfloat16'")
    frame = frame.query("m >= 128 and n >= 128 and k >= 128")
    moved = 2 * (frame.m * frame.n + frame.n * frame.k + frame.m * frame.k)
    return frame.assign(flops=2 * frame.m * frame.n * frame.k, bytes=moved, seconds=frame.time_ms * 1e-3)


def attention_rows(folder: Path, accelerator: str) -> pd.DataFrame:
    """Fused causal attention, forward; the masked half is not counted as work."""
    name = "G2_gemm_attention_aiconfigurator.csv"
    frame = read(folder, name, op="attention_forward_context", accelerator=accelerator)
    flops = frame.time_ms * frame.tflops_computed * 1e9
    heads = 2 * frame.n_heads + 2 * frame.n_kv_heads
    moved = 2 * frame.batch * frame.seq_len * frame.head_dim * heads
    return frame.assign(flops=flops, bytes=moved, seconds=frame.time_ms * 1e-3)


def layer_rows(folder: Path, accelerator: str, ops: Sequence[str], passes: float) -> pd.DataFrame:
    """Memory-bound operators: `passes` tensors of ``m`` by the hidden size or ``n``, 2 bytes an element."""
    if accelerator == "Ascend":
        frame = read(folder, "G3_ascend_a3_ops.csv").query("op in @ops and m >= 128")
        moved = frame.mem_bandwidth_GBps * 1e9 * frame.time_ms * 1e-3
    else:
        frame = read(folder, "G_single_gpu_ops.csv", accelerator=accelerator).query("op in @ops and m >= 256")
        hidden = frame.shape_note.astype(str).str.extract(r"hidden (\d+)")[0].astype(float).fillna(frame.n).fillna(1)
        moved = passes * 2 * frame.m * hidden
    return frame.assign(flops=0.0, bytes=moved, seconds=frame.time_ms * 1e-3)


def fit_streams(hardware: Hardware, folder: Path, accelerators: Sequence[str]) -> Fit:
    """Fraction of the memory's peak that copies and triads of large arrays reach at full occupancy."""
    frame = read(folder, "G_single_gpu_ops.csv").query("op in @STREAMS and accelerator in @accelerators")
    frame = frame[frame.shape_note.isna() | frame.shape_note.astype(str).str.contains("1024 threads")]
    reached = frame.mem_bandwidth_GBps.to_numpy(float) * 1e9 / hardware.memory_bandwidth
    middle = float(np.median(reached))
    return Fit(name="elementwise (streams)", values={"bandwidth_efficiency": middle}, ratios=np.log(reached / middle))


def fit_overhead(folder: Path, accelerator: str) -> Fit:
    """Time of the smallest memory-bound kernels (16 tokens and fewer), in which the data takes no time."""
    frame = read(folder, "G_single_gpu_ops.csv", accelerator=accelerator)
    frame = frame[frame.op.isin(["add", "attn_rope", "mlp_act", "input_layernorm"]) & (frame.m <= 16)]
    seconds = frame.time_ms.to_numpy(float) * 1e-3
    middle = float(np.median(seconds))
    return Fit(name="kernel overhead", values={"overhead_s": middle}, ratios=np.log(middle / seconds))


def collective_rows(folder: Path) -> pd.DataFrame:
    """All timed collectives of the three files: accelerator, n_nodes, n_accels, collective, bytes, seconds."""
    plain = read(folder, "F_collective_bandwidth.csv").rename(columns={"time_us_out_of_place": "time_us"})
    # Rows that print only a bus bandwidth: the inverse of its definition in nccl-tests.
    count = plain.n_accels
    travelled = (count - 1) / count * np.where(plain.collective == "all_reduce", 2, 1)
    derived = plain.size_bytes * travelled / plain.busbw_GBps_out_of_place.replace(0, np.nan) * 1e-3
    plain = plain.assign(time_us=plain.time_us.fillna(derived))
    ascend = read(folder, "F4_ascend_a3_hccl.csv").rename(columns={"time_us_out_of_place": "time_us"})
    frame = pd.concat([plain, read(folder, "F2_collectives_aiconfigurator_vidur.csv"), ascend], ignore_index=True)
    frame = frame[frame.collective.isin(list(COLLECTIVES)) & frame.time_us.notna() & frame.n_accels.notna()]
    # vidur timed through torch.distributed, host work included; in-situ rows wait for other ranks.
    alone = ~frame.notes.astype(str).str.contains("in-situ") & ~frame.source.str.contains("vidur")
    frame = frame[alone & (frame.size_bytes >= SMALLEST_MESSAGE)]
    return frame.assign(seconds=frame.time_us * 1e-6)


def predict(hardware: Hardware, rows: pd.DataFrame) -> FloatArray:
    """Predicted seconds of `rows`, whose groups start at the first device and have no gaps."""
    seconds = np.empty(len(rows))
    count = rows.n_accels.to_numpy(int)
    kind, size = rows.collective.to_numpy(str), rows.size_bytes.to_numpy(float)
    for key, members in sorted(set(zip(kind, count.tolist(), strict=True))):
        chosen = (kind == key) & (count == members)
        shape = group_shape(hardware, int(members), 1)
        seconds[chosen] = collective_time(hardware, COLLECTIVES[key], size[chosen], shape)
    return seconds


def fit_node(hardware: Hardware, rows: pd.DataFrame) -> tuple[Fit, Hardware]:
    """Call overhead, latency, bandwidth and, where switches add, reduction bandwidth of the innermost level."""
    adds = hardware.levels[0].reduction_bandwidth_bytes_per_s > 0
    names = ["collective_overhead_s", "latency_s", "bandwidth_bytes_per_s"] + ["reduction_bandwidth_bytes_per_s"] * adds
    size = max(hardware.levels[0].size, int(rows.n_accels.max()))
    template = replace(hardware, levels=(replace(hardware.levels[0], size=size), *hardware.levels[1:]))

    def changed(values: FloatArray) -> Hardware:
        numbers = dict(zip(names, values.tolist(), strict=True))
        overhead = numbers.pop("collective_overhead_s")
        return with_level(replace(template, collective_overhead_s=overhead), 0, numbers)

    def ratios(values: FloatArray) -> FloatArray:
        return logarithm(predict(changed(values), rows), rows)

    start = [8e-6, 1e-6, 300e9] + [300e9] * adds
    best = minimise(lambda values: balanced(ratios(values), rows), start, [1e-2, 1e-3, 1e13, 1e13][: len(start)])
    fit = Fit(name="innermost level", values=dict(zip(names, best.tolist(), strict=True)), ratios=ratios(best))
    fitted = changed(best)
    innermost = replace(fitted.levels[0], size=hardware.levels[0].size)
    return fit, replace(fitted, levels=(innermost, *hardware.levels[1:]))


def fit_fabric(hardware: Hardware, rows: pd.DataFrame, link: float, fixed: bool) -> Fit:
    """Latency and bandwidth of the outermost level, the inner ones as they are.

    A device cannot exceed its `link` (bytes/s). Where the rows do not bind it (`fixed`: all-reduces limited
    inside the nodes), the bandwidth is `FABRIC_SHARE` of the link and the latency alone is fitted.
    """
    names = ("latency_s", "bandwidth_bytes_per_s")
    last = len(hardware.levels) - 1

    def whole(values: FloatArray) -> FloatArray:
        return np.asarray([values[0], FABRIC_SHARE * link]) if fixed else values

    def ratios(values: FloatArray) -> FloatArray:
        changed = with_level(hardware, last, dict(zip(names, values.tolist(), strict=True)))
        return logarithm(predict(changed, rows), rows)

    best = whole(minimise(lambda values: balanced(ratios(whole(values)), rows), [5e-6, 0.8 * link], [1e-2, link]))
    return Fit(name="outermost level", values=dict(zip(names, best.tolist(), strict=True)), ratios=ratios(best))


def logarithm(seconds: FloatArray, rows: pd.DataFrame) -> FloatArray:
    """``ln(predicted / measured)`` of every row."""
    return np.asarray(np.log(seconds / rows.seconds.to_numpy(float)))


def balanced(ratios: FloatArray, rows: pd.DataFrame) -> float:
    """Mean of ``|ratios|`` in which large messages (1 MB and more) and small ones weigh the same."""
    large = rows.size_bytes.to_numpy(float) >= 1e6
    parts = [np.abs(ratios[chosen]).mean() for chosen in (large, ~large) if chosen.any()]
    return float(np.mean(parts))


def with_level(hardware: Hardware, index: int, numbers: dict[str, float]) -> Hardware:
    """`hardware` with other numbers at one level."""
    levels: list[Level] = list(hardware.levels)
    levels[index] = replace(levels[index], **numbers)  # type: ignore[arg-type]
    return replace(hardware, levels=tuple(levels))


def resnet50_kernels() -> Iterator[tuple[Kernel, float, float]]:
    """Kernels of one ResNet-50 v1.5 training step per image: class, FLOPs, elements moved.

    A convolution moves its input and output, three times (forward, input gradient, weight gradient); the
    normalisation and the activation after it read and write its output 3 + 2 times forward, 5 + 3 times backward.
    """
    for side, inputs, outputs, window, stride, times in _resnet50_convolutions():
        area = (side // stride) ** 2
        for _ in range(times):
            yield (
                Kernel.CONVOLUTION,
                3 * 2 * area * inputs * outputs * window**2,
                3 * (side**2 * inputs + area * outputs),
            )
            yield Kernel.NORMALIZATION, 0.0, 8 * area * outputs
            yield Kernel.ACTIVATION, 0.0, 5 * area * outputs


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


def fit_convolution(hardware: Hardware, folder: Path, accelerator: str, batch: int = 128) -> Fit:
    """Convolution efficiency that meets published 16-bit ResNet-50 training rates, the other classes as they are."""
    columns = ["accelerator", "model", "precision_kind", "n_accels", "samples_per_s", "step_time_s", "global_batch"]
    names = ("I_nvidia_dle_dlperf_convnets_bert.csv", "O_flagperf_lambda.csv", "E2_ascend_vision_convnets.csv")
    frame = pd.concat([pd.read_csv(folder / name, low_memory=False)[columns] for name in names])
    frame = frame[frame.accelerator.astype(str).str.contains(accelerator) & (frame.n_accels <= 8)]
    frame = frame[frame.model.astype(str).str.contains(r"(?:^|/|ConvNets )resnet-?50(?:v1\.5|-v1\.5)?$", case=False)]
    frame = frame[frame.precision_kind.isin(["fp16", "bf16"]) | frame.accelerator.str.startswith("Ascend")]
    rate = (
        (frame.samples_per_s.fillna(frame.global_batch / frame.step_time_s) / frame.n_accels).dropna().to_numpy(float)
    )
    kernels = list(resnet50_kernels())

    def seconds(efficiency: float) -> float:
        model = replace(hardware.kernels[Kernel.CONVOLUTION], compute_efficiency=efficiency)
        changed = replace(hardware, kernels={**hardware.kernels, Kernel.CONVOLUTION: model})
        return sum(
            kernel_time(changed, kind, "float16", batch * flops, 2 * batch * moved) for kind, flops, moved in kernels
        )

    def ratios(values: FloatArray) -> FloatArray:
        return np.asarray(np.log(seconds(float(values[0])) / batch * rate))

    best = minimise(lambda values: float(np.abs(ratios(values)).mean()), [0.5], [CONVOLUTION_LIMIT])
    return Fit(name="convolution", values={"compute_efficiency": float(best[0])}, ratios=ratios(best))


def read(folder: Path, name: str, **equal: str) -> pd.DataFrame:
    """Rows of one operator file in which the named columns have the given values."""
    frame = pd.read_csv(folder / "operators" / name, low_memory=False)
    for column, value in equal.items():
        frame = frame[frame[column] == value]
    return frame


def fit_profile(folder: Path, rows: Rows, collectives: pd.DataFrame) -> Iterator[Fit]:
    """All fits of one profile."""
    hardware = load_profile(rows.profile)
    if rows.gemm:
        dtype = "float16" if rows.gemm == "V100" else "bfloat16"
        measured = replace(hardware, peak_flops={dtype: rows.peak_flops}) if rows.peak_flops else hardware
        yield fit_kernel(measured, Kernel.MATMUL, "matmul", gemm_rows(folder, rows.gemm), dtype)
    if rows.attention:
        yield fit_kernel(hardware, Kernel.ATTENTION, "attention", attention_rows(folder, rows.attention), "bfloat16")
    if rows.stream:
        yield fit_streams(hardware, folder, rows.stream)
    for kernel, accelerator, ops, passes in LAYER_OPS:
        if rows.layers and accelerator in LAYER_FILES[rows.layers]:
            found = layer_rows(folder, accelerator, ops, passes)
            yield fit_kernel(hardware, kernel, kernel.value, found, "float16")
    if rows.layers in {"A100 80GB", "H100 80GB"}:
        yield fit_overhead(folder, rows.layers)
    if rows.node:
        inside = pd.concat([collectives[collectives.accelerator == name] for name in rows.node])
        if rows.node == ("Ascend",):
            inside = collectives[collectives.accelerator.str.contains("Atlas 800 A3")]
        inside = inside[inside.n_accels.isin(rows.node_sizes)]
        inside = inside[(inside.n_nodes == 1) | inside.accelerator.str.contains("GB200")]
        fit, hardware = fit_node(hardware, inside)
        yield fit
    if rows.fabric:
        outside = collectives[collectives.accelerator.str.startswith(rows.fabric)]
        outside = outside[outside.inter_node_link.astype(str).str.contains(rows.fabric_links)]
        outside = outside[outside.n_accels > hardware.levels[0].size]
        yield fit_fabric(hardware, outside, rows.link, rows.fixed_link)
    if rows.images:
        yield fit_convolution(hardware, folder, rows.images)


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


def main(arguments: Sequence[str]) -> int:
    """Print the fits of every profile."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "operators").is_dir():
        sys.stderr.write(
            "usage: python -m simulator.calibration.fit_profiles MEASUREMENTS_DIR (a folder that holds operators/)\n"
        )
        return 2
    folder = Path(arguments[0])
    collectives = collective_rows(folder)
    for rows in ROWS:
        sys.stdout.write(f"{rows.profile}\n")
        for fit in fit_profile(folder, rows, collectives):
            sys.stdout.write(f"{fit}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
