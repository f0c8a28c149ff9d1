"""Correcting a profile by what runs of plans measured, so that the next plan is predicted better.

Kernels of a class took ``a`` times their fixed cost and ``b`` times the rest of what was predicted; a message of a size
took so many times what the profile's table says. Both are properties of the machine, not of the network that ran: they
hold for other plans as far as those use the same classes and sizes.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy.optimize import minimize

from simulator.calibration.fits import rounded
from simulator.calibration.process import available_cores
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.input_file import FileKind
from simulator.profile_file import PROFILE
from simulator.profiles import load_profile, profile_text, split_cluster_file, write_profile
from simulator.program import Kernel, described_class

PRIOR = 0.02
"""Weight of "nothing to correct" against the logarithmic errors of a class, whose weights add up to one."""
MOST = 20.0
"""Largest factor of a correction."""
SHORTEST = 1e-9
"""Seconds below which a time says nothing: no clock is finer."""
RUN = FileKind(name="run", remedy="give a file of `meshwright execute --measure --out`", max_bytes=64 << 20)

Data = dict[str, Any]
Size = Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, lt=1e6, allow_inf_nan=False)]
Calls = Annotated[int, Field(ge=1, le=10**12)]
Ranks = Annotated[int, Field(ge=1, le=10**7)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRow:
    """All calls of kernels with the same work, on all ranks: seconds of one call, the median measured.

    ``busy_s`` is the median processor time of a call.
    """

    kernel: Kernel
    dtype: str
    flops: Size
    bytes_moved: Size
    calls: Calls
    predicted_s: Seconds
    measured_s: Seconds
    busy_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRow:
    """All equal messages: median seconds of one from when the last rank has come, and of the wait before."""

    collective: str
    axis: str = ""
    group_size: Ranks
    payload_bytes: Size
    calls: Calls
    predicted_s: Seconds
    measured_s: Seconds
    waited_s: Seconds


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ComparisonModel(_Model):
    """What of a run calibration learns from."""

    network: str
    hardware: str
    hardware_hash: str
    processes: Ranks
    work: list[WorkRow]
    messages: list[MessageRow]


class RunModel(_Model):
    """A run's document."""

    backend: str
    comparison: ComparisonModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What runs change: a class of kernels (``fixed`` and ``rest`` factors) or messages of a group (``rest`` alone).

    ``before`` and ``after`` are mean relative errors of the runs' own rows, weighted by their time.
    """

    name: str
    rows: int
    fixed: float | None
    rest: float
    before: float
    after: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Corrected:
    """The new profile and what was changed."""

    hardware: Hardware
    path: Path
    corrections: tuple[Correction, ...]
    runs: tuple[str, ...]


def read_run(path: str | Path) -> RunModel:
    """Read the document of ``execute --measure --out``.

    Raises
    ------
    InputError
        It is no such document; names the file and the field.
    """
    file = Path(path)
    document = RUN.json(RUN.read(file), file)
    if isinstance(document, dict) and document.get("comparison") is None:
        raise InputError(f"{file} has no measurements of instructions; run `meshwright execute --measure --out {file}`")
    try:
        return RunModel.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "".join(f" {part}:" for part in [".".join(map(str, first["loc"]))] if part)
        raise InputError(f"{file}:{field} {first['msg']}; run `meshwright execute --measure --out` again") from None


def correct_profile(run_files: Sequence[str | Path], profile: str | None, out: str | Path) -> Corrected:
    """Correct a profile by runs that were predicted on it, all of them together, and write the new one.

    Parameters
    ----------
    run_files : documents of ``execute --measure --out``
    profile : the profile to correct; by default the one that the first run's prediction was made on
    out : where to write; the old profile stays as it is

    Raises
    ------
    InputError
        A run was predicted on another profile than this one, or there is nothing to correct it by.
    """
    runs = [read_run(file) for file in run_files]
    name = profile or runs[0].comparison.hardware
    hardware = load_profile(name)
    for file, run in zip(run_files, runs, strict=True):
        if hardware.hash != run.comparison.hardware_hash:
            raise InputError(
                f"{name} is not the profile that the run in {file} was predicted on; give that one with --hw, or run "
                "`meshwright execute --measure` with a plan for this one"
            )
    if split_cluster_file(name)[1]:
        raise InputError(
            f"{name} is a profile with the file of a cluster; runs correct a profile alone, give it with --hw"
        )
    data: Data = PROFILE.yaml(profile_text(name)[0], name)
    names = tuple(f"{run.comparison.network} on {run.comparison.processes} processes" for run in runs)
    origin = f"{' and '.join(names)}, {dt.datetime.now(dt.UTC).date().isoformat()}"
    corrections = [
        *_correct_kernels(data, hardware, runs, origin),
        *_correct_messages(data, [row for run in runs for row in run.comparison.messages], origin),
    ]
    if not corrections:
        raise InputError(f"{run_files[0]} has no kernel or message that {name} describes; nothing to correct")
    data["name"] = Path(out).stem
    return Corrected(hardware=write_profile(data, out), path=Path(out), corrections=tuple(corrections), runs=names)


# Kernels


def _correct_kernels(data: Data, hardware: Hardware, runs: Sequence[RunModel], origin: str) -> Iterator[Correction]:
    known = {Kernel(name) for name in data.get("kernels", {})}
    for kernel in Kernel:
        section = data.get("kernels", {}).get(kernel.value)
        rows = [
            (row, hardware.compute_slowdown(run.comparison.processes, kernel), _turns(run))
            for run in runs
            for row in run.comparison.work
            if described_class(row.kernel, known) is kernel and min(row.predicted_s, row.busy_s) >= SHORTEST
        ]
        if not rows or section is None:
            continue
        predicted = np.array([row.predicted_s for row, *_ in rows])
        overhead = hardware.kernels[kernel].overhead_s
        fixed = np.minimum([slowdown * overhead for _, slowdown, _ in rows], predicted)
        measured = np.array([row.busy_s * turns for row, _, turns in rows])
        weights = np.array([row.calls for row, *_ in rows]) * measured
        a, b = fit_factors(fixed, predicted - fixed, measured, weights)
        before = _error(predicted, measured, weights)
        after = _error(a * fixed + b * (predicted - fixed), measured, weights)
        if after >= before:  # rows that contradict each other correct nothing
            continue
        _scale(section, "overhead_s", a, origin)
        for entry in ("bandwidth_efficiency", "compute_efficiency"):
            if entry == "bandwidth_efficiency" or not section.get("peak_flops"):
                _scale(section, entry, 1 / b, origin, most=1.0)
        _scale(section, "cached_bandwidth_bytes_per_s", 1 / b, origin)
        for dtype in section.get("peak_flops", {}):
            _scale(section["peak_flops"], dtype, 1 / b, origin)
        yield Correction(
            name=kernel.value,
            rows=len(rows),
            fixed=a,
            rest=b,
            before=before,
            after=after,
        )


def _turns(run: RunModel) -> float:
    """How often longer a kernel takes because processes that share the cores of a CPU take turns."""
    return max(1.0, run.comparison.processes / available_cores()) if run.backend == "gloo" else 1.0


def fit_factors(
    fixed: np.ndarray[Any, Any],
    rest: np.ndarray[Any, Any],
    measured: np.ndarray[Any, Any],
    weights: np.ndarray[Any, Any],
) -> tuple[float, float]:
    """Factors a and b for which ``a fixed + b rest`` comes nearest to `measured`, all (n,).

    Minimises the weighted mean of ``log((a fixed + b rest) / measured)^2`` and a small pull of both towards 1, which
    decides where the rows do not.
    """
    shares = weights / weights.sum()

    def loss(logs: np.ndarray[Any, Any]) -> float:
        a, b = np.exp(logs)
        apart = np.log(np.maximum(a * fixed + b * rest, 1e-12) / measured)
        return float(shares @ apart**2 + PRIOR * (logs @ logs))

    bound = float(np.log(MOST))
    found = minimize(loss, np.zeros(2), method="L-BFGS-B", bounds=[(-bound, bound)] * 2)
    a, b = np.exp(found.x)
    return float(a), float(b)


def _error(predicted: np.ndarray[Any, Any], measured: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> float:
    return float(np.average(np.abs(predicted / measured - 1), weights=weights))


def _scale(section: Data, name: str, factor: float, origin: str, *, most: float = float("inf")) -> None:
    entry = section.get(name)
    if not isinstance(entry, dict) or not isinstance(entry.get("value"), (int, float)):
        return
    before = str(entry["source"]).split("; corrected")[0]
    entry["value"] = min(most, rounded(float(entry["value"]) * factor))
    entry["source"] = f"{before}; corrected by {factor:.3g} for {origin}"


# Messages


def _correct_messages(data: Data, messages: Sequence[MessageRow], origin: str) -> Iterator[Correction]:
    for table in data.get("collectives", []):
        rows = [
            row
            for row in messages
            if (row.collective, row.group_size) == (table["collective"], table["group_size"])
            and min(row.predicted_s, row.measured_s + row.waited_s) >= SHORTEST
        ]
        if not rows:
            continue
        sizes, ratios = _ratios(rows)
        at = np.exp(np.interp(np.log(np.maximum(table["payload_bytes"], 1.0)), np.log(sizes), np.log(ratios)))
        table["seconds"] = [
            rounded(seconds * float(ratio)) for seconds, ratio in zip(table["seconds"], at, strict=True)
        ]
        before = str(table["source"]).split("; corrected")[0]
        table["source"] = f"{before}; corrected by {at.min():.3g} to {at.max():.3g} for {origin}"
        predicted = np.array([row.predicted_s for row in rows])
        measured = np.array([row.measured_s + row.waited_s for row in rows])
        weights = np.array([row.calls for row in rows]) * measured
        after = predicted * np.exp(
            np.interp(np.log([max(r.payload_bytes, 1.0) for r in rows]), np.log(sizes), np.log(ratios))
        )
        yield Correction(
            name=f"{table['collective']} among {table['group_size']}",
            rows=len(rows),
            fixed=None,
            rest=float(np.average(measured / predicted, weights=weights)),
            before=_error(predicted, measured, weights),
            after=_error(after, measured, weights),
        )


def _ratios(rows: Sequence[MessageRow]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(sizes,), (sizes,) payloads, rising, and how much longer than predicted ranks were held up by messages of each.

    What a rank waits for a late one is part of it: a step pays it at its messages, and nothing else of a profile
    knows of it.
    """
    found: dict[float, list[tuple[float, int]]] = {}
    for row in rows:
        ratio = max(1 / MOST, min(MOST, (row.measured_s + row.waited_s) / row.predicted_s))
        found.setdefault(max(row.payload_bytes, 1.0), []).append((ratio, row.calls))
    sizes = sorted(found)
    ratios = [float(np.average([r for r, _ in found[s]], weights=[c for _, c in found[s]])) for s in sizes]
    return np.array(sizes), np.array(ratios)


def correction_rows(corrections: Sequence[Correction]) -> list[Mapping[str, object]]:
    """The corrections as plain data."""
    return [
        {"name": c.name, "rows": c.rows, "fixed": c.fixed, "rest": c.rest, "before": c.before, "after": c.after}
        for c in corrections
    ]
