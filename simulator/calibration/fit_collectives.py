"""Fits of the levels of a cluster from timed collectives."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from simulator.calibration.fits import FittedValues, FloatArray, Rows, minimise, rounded, rows_of
from simulator.calibration.measurement_files import need, read_measurements
from simulator.collectives import collective_time
from simulator.hardware import Hardware, Level
from simulator.profiles import load_profile
from simulator.program import Collective
from simulator.topology import group_shape

COLLECTIVES = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
}
SMALLEST_MESSAGE = 512  # bytes; below, a collective is all overhead
FABRIC_SHARE = 0.95  # what the fits of dgx-a100 and dgx-h200 leave of the datasheet rate


def fit_collectives(folder: Path, profile: str) -> tuple[dict[str, dict[str, object]], list[FittedValues]]:
    """Fitted fields of the levels of one shipped profile, and the fits behind them."""
    rows, hardware = rows_of(profile), load_profile(profile)
    fields: dict[str, dict[str, object]] = {}
    fits: list[FittedValues] = []
    collectives = collective_rows(folder)
    if rows.node:
        inside = pd.concat([collectives[collectives.accelerator == name] for name in rows.node])
        if rows.node == ("Ascend",):
            inside = collectives[collectives.accelerator.str.contains("Atlas 800 A3")]
        inside = inside[inside.n_accels.isin(rows.node_sizes)]
        inside = inside[(inside.n_nodes == 1) | inside.accelerator.str.contains("GB200")]
        fit, hardware = fit_node(hardware, inside, rows)
        fits.append(fit)
        for name, value in fit.numbers.items():
            place = "topology." if name == "collective_overhead_s" else "topology.levels.0."
            fields[place + name] = {"value": value, "source": fit.source()}
    if rows.fabric:
        outside = collectives[collectives.accelerator.str.startswith(rows.fabric)]
        outside = outside[outside.inter_node_link.str.contains(rows.fabric_links)]
        outside = outside[outside.n_accels > hardware.levels[0].size]
        fit = fit_fabric(hardware, outside, rows.link, rows.fixed_link, rows.fabric)
        fits.append(fit)
        note = f"datasheet rate {rows.link / 1e9:g} GB/s a device"
        for name, value in fit.numbers.items():
            fields[f"topology.levels.{len(hardware.levels) - 1}.{name}"] = {"value": value, "source": fit.source(note)}
    return fields, fits


@lru_cache(maxsize=4)
def collective_rows(folder: Path) -> pd.DataFrame:
    """All timed collectives of the three files: accelerator, n_nodes, n_accels, collective, bytes, seconds."""
    columns = ["accelerator", "n_nodes", "n_accels", "inter_node_link", "collective", "size_bytes", "notes", "source"]
    operators = folder / "operators"
    plain_path = operators / "F_collective_bandwidth.csv"
    plain = read_measurements(plain_path, [*columns, "time_us_out_of_place", "busbw_GBps_out_of_place"])
    plain = plain.rename(columns={"time_us_out_of_place": "time_us"})
    # Rows that print only a bus bandwidth: the inverse of its definition in nccl-tests.
    count = plain.n_accels
    travelled = (count - 1) / count * np.where(plain.collective == "all_reduce", 2, 1)
    derived = plain.size_bytes * travelled / plain.busbw_GBps_out_of_place.replace(0, np.nan) * 1e-3
    plain = plain.assign(time_us=plain.time_us.fillna(derived))
    ascend = read_measurements(operators / "F4_ascend_a3_hccl.csv", [*columns, "time_us_out_of_place"])
    ascend = ascend.rename(columns={"time_us_out_of_place": "time_us"})
    other_path = operators / "F2_collectives_aiconfigurator_vidur.csv"
    other = read_measurements(other_path, [*columns, "time_us"])
    need(other_path, other, ["time_us"])
    frame = pd.concat([plain, other, ascend], ignore_index=True)
    frame = frame[frame.collective.isin(list(COLLECTIVES)) & frame.time_us.notna() & frame.n_accels.notna()]
    # vidur timed through torch.distributed, host work included; in-situ rows wait for other ranks.
    alone = ~frame.notes.str.contains("in-situ") & ~frame.source.str.contains("vidur")
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


def fit_node(hardware: Hardware, rows: pd.DataFrame, chosen: Rows) -> tuple[FittedValues, Hardware]:
    """Call overhead, latency, bandwidth and, where switches add, reduction bandwidth of the innermost level."""
    adds = hardware.levels[0].reduction_bandwidth_bytes_per_s > 0
    names = ["collective_overhead_s", "latency_s", "bandwidth_bytes_per_s"] + ["reduction_bandwidth_bytes_per_s"] * adds
    size = max(hardware.levels[0].size, int(rows.n_accels.max()))
    # Rows of larger groups than the level holds come from another machine, whose dies meet at a switch.
    node = hardware.node if size == hardware.levels[0].size else None
    template = replace(hardware, levels=(replace(hardware.levels[0], size=size), *hardware.levels[1:]), node=node)

    def changed(values: FloatArray) -> Hardware:
        numbers = dict(zip(names, values.tolist(), strict=True))
        overhead = numbers.pop("collective_overhead_s")
        return with_level(replace(template, collective_overhead_s=overhead), 0, numbers)

    def ratios(values: FloatArray) -> FloatArray:
        return logarithm(predict(changed(values), rows), rows)

    upper = [1e-2, 1e-3, chosen.node_link, 1e13]
    start = [8e-6, 1e-6, min(300e9, chosen.node_link)] + [300e9] * adds
    best = minimise(lambda values: balanced(ratios(values), rows), start, upper[: len(start)])
    numbers = {name: rounded(float(value)) for name, value in zip(names, best, strict=True)}
    sizes = ", ".join(str(int(count)) for count in sorted(rows.n_accels.unique()))
    place = "Atlas 800 A3 dies" if chosen.node == ("Ascend",) else chosen.node[0].removeprefix("NVIDIA ")
    fit = FittedValues(
        name="innermost level",
        what=f"single-node collectives of {sizes} devices on {place}",
        numbers=numbers,
        ratios=ratios(best),
        before=logarithm(predict(template, rows), rows),
    )
    fitted = changed(best)
    innermost = replace(fitted.levels[0], size=hardware.levels[0].size)
    return fit, replace(fitted, levels=(innermost, *hardware.levels[1:]))


def fit_fabric(hardware: Hardware, rows: pd.DataFrame, link: float, fixed: bool, place: str) -> FittedValues:
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
    numbers = {name: rounded(float(value)) for name, value in zip(names, best, strict=True)}
    what = f"collectives of {int(rows.n_accels.min())} to {int(rows.n_accels.max())} devices on {place}"
    before = logarithm(predict(hardware, rows), rows)
    return FittedValues(name="outermost level", what=what, numbers=numbers, ratios=ratios(best), before=before)


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
