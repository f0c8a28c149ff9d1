"""The best plans of a strategy file run one after the other, and their measured order beside the predicted one.

What has run stands in a journal, so that neither a plan that dies nor an interruption loses the others' results.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from planner.execution.options import ExecuteOptions
from planner.execution.run import ExecutionReport, execute_plan
from planner.graph.cache import code_digest
from planner.plans.file import alternative_files, plan_to_text, read_plan
from planner.plans.plan import Plan
from simulator.errors import InputError, MeshwrightError
from simulator.input_file import FileKind

SUFFIX = ".shoot-out.jsonl"
JOURNAL = FileKind(name="journal of a comparison", remedy="remove it", max_bytes=1 << 28)
MOST_STARTS = 2
"""A plan that has ended the whole command so often is not started again."""

Say = Callable[[str], None]
Run = Callable[[Plan, ExecuteOptions], ExecutionReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one plan; ``error`` says why there are no measurements."""

    strategy: str
    error: str = ""
    predicted_step_time_s: float | None = None
    measured_step_time_s: float | None = None
    measured_p10_s: float | None = None
    measured_p90_s: float | None = None
    predicted_peak_memory_bytes: int | None = None
    measured_peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShootOut:
    """All outcomes, in the order of the strategy file: predicted best first.

    Attributes
    ----------
    kendall_tau : rank correlation of predicted and measured step times; None with fewer than two plans, or where all
        predictions are equal
    regret : measured time of the plan predicted best over that of the plan measured best, less one
    resumed : outcomes that an interrupted run had left
    """

    outcomes: tuple[Outcome, ...]
    kendall_tau: float | None
    regret: float | None
    steps: int
    resumed: int


def shoot_out(
    strategy: str | Path, top: int, options: ExecuteOptions, say: Say = lambda _: None, run: Run = execute_plan
) -> ShootOut:
    """Run the best `top` plans of a strategy file for a few steps each.

    Parameters
    ----------
    options : ExecuteOptions
        How each of them is run; ``strategy`` is replaced.
    run : callable
        Runs one plan.

    Raises
    ------
    InputError
        There are fewer plans, or they are of different requests.
    """
    files = alternative_files(strategy, top)
    plans = [read_plan(file) for file in files]
    _check_alike(files, plans)
    journal = Path(strategy).resolve()
    journal = journal.with_name(journal.name + SUFFIX)
    keys = [_key(plan, options) for plan in plans]
    known, starts = _read(journal)
    resumed = sum(key in known for key in keys)
    outcomes = []
    for number, (file, plan, key) in enumerate(zip(files, plans, keys, strict=True), 1):
        if key not in known:
            say(f"plan {number} of {len(files)}: {file}")
            known[key] = _outcome(file, plan, replace(options, strategy=file), key, starts.get(key, 0), journal, run)
        outcomes.append(known[key])
    with suppress(OSError):
        journal.unlink()
    tau, regret = order_figures(outcomes)
    return ShootOut(outcomes=tuple(outcomes), kendall_tau=tau, regret=regret, steps=options.steps, resumed=resumed)


def order_figures(outcomes: Sequence[Outcome]) -> tuple[float | None, float | None]:
    """Kendall's tau of predicted and measured times, and the regret of the plan predicted best."""
    pairs = [
        (one.predicted_step_time_s, one.measured_step_time_s)
        for one in outcomes
        if one.predicted_step_time_s is not None and one.measured_step_time_s is not None
    ]
    if len(pairs) < 2:
        return None, 0.0 if pairs else None
    predicted, measured = np.array(pairs, dtype=np.float64).T
    tau = float(kendalltau(predicted, measured).statistic)
    return (tau if np.isfinite(tau) else None), float(measured[np.argmin(predicted)] / measured.min() - 1)


def _check_alike(files: Sequence[Path], plans: Sequence[Plan]) -> None:
    def request(plan: Plan) -> tuple[object, ...]:
        return plan.fingerprint, plan.hardware_hash, plan.devices, plan.global_batch, plan.precision, plan.optimizer

    for file, plan in zip(files[1:], plans[1:], strict=True):
        if request(plan) != request(plans[0]):
            raise InputError(
                f"{file} is a plan of another network, profile, batch or number of devices than {files[0]}; "
                f"write both with one `meshwright plan --top {len(files)} --out {files[0]}`"
            )


def _outcome(
    file: Path, plan: Plan, options: ExecuteOptions, key: str, starts: int, journal: Path, run: Run
) -> Outcome:
    """Run one plan, keeping in the journal that it has begun and how it ended."""
    if starts >= MOST_STARTS:
        return Outcome(strategy=str(file), error=f"it ended the whole command {starts} times and is not run again")
    _append(journal, {"key": key, "started": str(file)})
    try:
        report = run(plan, options)
        found = Outcome(
            strategy=str(file),
            predicted_step_time_s=report.predicted_step_time_s,
            measured_step_time_s=report.measured_step_time_s.median,
            measured_p10_s=report.measured_step_time_s.p10,
            measured_p90_s=report.measured_step_time_s.p90,
            predicted_peak_memory_bytes=report.predicted_peak_memory_bytes,
            measured_peak_memory_bytes=report.measured_peak_memory_bytes,
        )
    except MeshwrightError as error:
        found = Outcome(strategy=str(file), error=str(error))
    _append(journal, {"key": key, "outcome": asdict(found)})
    return found


# The journal: one JSON object a line, "started" when a plan begins and "outcome" when it has ended


def _key(plan: Plan, options: ExecuteOptions) -> str:
    """Digest of everything that a result depends on."""
    settings = {**asdict(options), "strategy": "", "trace": "", "code": code_digest()}
    text = plan_to_text(plan) + json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(journal: Path) -> tuple[dict[str, Outcome], dict[str, int]]:
    """Outcomes by key, and how often plans without one were started; damaged lines do not count."""
    known: dict[str, Outcome] = {}
    starts: dict[str, int] = {}
    for line in _lines(journal):
        if "outcome" in line:
            with suppress(TypeError):
                known[line["key"]] = Outcome(**line["outcome"])
        else:
            starts[line["key"]] = starts.get(line["key"], 0) + 1
    return known, starts


def _lines(journal: Path) -> Iterator[Mapping[str, Any]]:
    if not journal.exists():
        return
    for line in JOURNAL.read(journal).splitlines():
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("key"), str):
                yield found


def _append(journal: Path, line: Mapping[str, object]) -> None:
    """Append a line in one write, so that an interruption leaves whole lines and at most a part of a last one."""
    try:
        number = os.open(journal, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(number).st_size
            broken = size > 0 and os.pread(number, 1, size - 1) != b"\n"
            os.write(number, b"\n" * broken + json.dumps(line).encode() + b"\n")
        finally:
            os.close(number)
    except OSError as error:
        raise InputError(
            f"cannot write {str(journal)!r}, which keeps what has run: {error.strerror or error}; "
            "copy the strategy files to a folder you may write to"
        ) from error
