"""Published measurements as training runs: what was trained, how, on what, and what was measured."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from planner.cost.memory.device import training_memory
from planner.cost.training_run import LayeredNetwork, OptimizerSharding, Recompute, TrainingRun, TransformerShape
from planner.published.measurement_file import FileRow, read_rows
from planner.published.reading_hardware import hardware_for
from planner.published.reading_memory import says_no_figure, stated_memory_gib
from planner.published.reading_network import MissingFactError, is_transformer, read_network
from planner.published.reading_plan import read_setup
from planner.published.reading_setup import SIMULATORS_DEFAULT, release
from planner.published.source_rules import as_configured, starting_up, stated
from simulator.errors import MeshwrightError

_DECISIVE = ("precision not stated", "recomputation not stated")
"""Notes on facts without which the work of a step is guessed: its products' rate, and whether they run once more."""

_NO_FIGURE = "memory not compared: whether it is allocated, reserved or the device's is not stated"
_TWO_SPEEDS = "time not compared: the time of a step and the samples a second that are stated differ by more than twice"
_TWOFOLD = 2.0
_COPIED = "time not compared: the table repeats that of another network"
_STARTING = "time not compared: that of the second or third step of a process, before the steps are alike"
_NO_BATCH = "memory not compared: it follows the batch, which is not stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """A row of a measurement file.

    Attributes
    ----------
    run
        The run in our words, from the row's configuration alone; None where `reason` says what is missing.
    fault
        What is wrong with the row itself, with file, line and column; empty for a row that can be read.
    measured_time_s
        Seconds of a step; not a number where no column tells.
    time_column
        Where the time comes from.
    memory_gib, memory_kind
        Peak memory of a device; not a number where it was not measured.
    outcome
        ``ok``, ``oom``, ``error``, or nothing where it is not stated.
    workload
        The same for rows of one source that trained the same network with the same batch on the same devices.
    transformer
        Whether the network is one, also where the row has no run.
    facts
        All that the row states of its run: rows that state the same may have been measured apart.
    complete
        Whether the source states shape and plan in full (``plan_complete``), what matrices are multiplied in and what
        is computed again included.
    """

    row_id: str
    source: str
    file: str
    line: int
    run: TrainingRun | None = None
    reason: str = ""
    fault: str = ""
    measured_time_s: float = math.nan
    time_column: str = ""
    memory_gib: float = math.nan
    memory_kind: str = ""
    outcome: str = ""
    workload: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    transformer: bool = False
    complete: bool = False


def read_measurements(path: str | Path) -> list[MeasuredRow]:
    """Read every row of a measurement file, in order.

    A row that lacks a fact has no run and says which; a row that is wrong says where.

    Raises
    ------
    InputError
        The file cannot be read, is no CSV, or lacks a column.
    """
    return [measured_row(row) for row in read_rows(Path(path))]


def measured_row(row: FileRow) -> MeasuredRow:
    """One row of a file as a run and its measurement."""
    known = MeasuredRow(
        row_id=row.text("row_id"),
        source=row.text("source"),
        file=row.file,
        line=row.line,
        outcome=row.text("outcome").lower(),
        facts=row.facts(),
    )
    if row.fault:
        return replace(known, fault=row.fault, reason=row.fault)
    row = as_configured(row)
    complete = row.text("plan_complete").lower() in ("yes", "oom")
    known = replace(known, transformer=is_transformer(row))
    notes: list[str] = []
    try:
        run = _run(row, notes)
    except MissingFactError as missing:
        return replace(known, reason=str(missing))
    except MeshwrightError as error:
        return replace(known, reason=f"cannot be described: {error}")
    seconds, column = measured_time(row, run)
    if _contradicted(row):
        seconds, column, run = math.nan, "", replace(run, assumed=(*run.assumed, _TWO_SPEEDS))
    if stated(row, "copied_time"):
        seconds, column, run = math.nan, "", replace(run, assumed=(*run.assumed, _COPIED))
    if starting_up(row, run.setup.devices, run.setup.micro_batch):
        seconds, column, run = math.nan, "", replace(run, assumed=(*run.assumed, _STARTING))
    memory, said = stated_memory_gib(row), run.assumed
    if memory and says_no_figure(row.text("mem_kind")):
        memory, said = None, (*said, _NO_FIGURE)
    if memory and any(note.startswith("batch not stated") for note in said):
        memory, said = None, (*said, _NO_BATCH)
    return replace(
        known,
        run=run,
        complete=complete and not any(note.startswith(_DECISIVE) for note in run.assumed),
        reason="; ".join(said),
        measured_time_s=seconds,
        time_column=column,
        memory_gib=memory or math.nan,
        memory_kind=row.text("mem_kind"),
        workload=workload_key(f"{row.text('source')} | {row.text('hw')}", run, release(row)),
    )


def _run(row: FileRow, notes: list[str]) -> TrainingRun:
    network = read_network(row, notes)
    hardware = hardware_for(row, notes)
    setup = read_setup(row, network, hardware, notes)
    run = TrainingRun(network=network, setup=setup, hardware=hardware, assumed=tuple(dict.fromkeys(notes)))
    if isinstance(network, TransformerShape) and network.hybrid:
        return run  # the closed form of memory, which decides below, has no state-space layers
    if SIMULATORS_DEFAULT in notes:
        return _recomputing_where_needed(run)
    return _recomputing(run) if f"recomputation not stated: {Recompute.NONE}" in notes else run


def _recomputing_where_needed(run: TrainingRun) -> TrainingRun:
    """`run` as it is where its network needs recomputation, else without.

    A simulator's default says nothing of the run. A network is taken to be trained one way in all plans: with
    recomputation where one sample on each device, without any parallelism but replicas, does not fit otherwise.
    """
    alone = replace(
        run.setup, dp=run.setup.devices, tp=1, pp=1, vpp=1, cp=1, ep=1, expert_tp=1, micro_batch=1, micro_batches=1,
        schedule="1f1b", layers_per_stage=(), recompute=Recompute.NONE, recompute_layers=0,
        optimizer_sharding=OptimizerSharding.NONE,
    )  # fmt: skip
    if not training_memory(replace(run, setup=alone)).fits:
        return run
    return replace(run, setup=replace(run.setup, recompute=Recompute.NONE, recompute_layers=0))


def _recomputing(run: TrainingRun) -> TrainingRun:
    """`run` with full recomputation where adapters of a frozen network are trained that fits with it alone."""
    if run.setup.trained_fraction == 1 or training_memory(run).fits:
        return run
    other = replace(run, setup=replace(run.setup, recompute=Recompute.FULL))
    if not training_memory(other).fits:
        return run
    kept = (note for note in run.assumed if not note.startswith("recomputation"))
    return replace(other, assumed=(*kept, "recomputation not stated: full, without which it does not fit"))


def workload_key(origin: str, run: TrainingRun, released: float = 0.0) -> str:
    """What stays the same when only the plan changes; runs of two software releases are no choice between plans.

    ``origin`` is the source, and the cluster as it names it.
    """
    network, setup = run.network, run.setup
    if isinstance(network, TransformerShape):
        sizes = [network.layers, network.hidden, network.heads, network.vocabulary, network.sequence_length]
        sizes += [network.experts.count] if network.experts else []
    else:
        sizes = []
    facts = (
        origin, f"{released:.2f}", network.name, *sizes, run.hardware.name, run.hardware.hash[:8], setup.devices,
        setup.global_batch, setup.precision, setup.stack, setup.trained_fraction < 1,
    )  # fmt: skip
    return " | ".join(str(fact) for fact in facts)


def measured_time(row: FileRow, run: TrainingRun) -> tuple[float, str]:
    """Seconds of a step by the first column that tells, and that column."""
    seconds = row.number("step_time_s")
    if seconds:
        return seconds, "step_time_s"
    network, setup = run.network, run.setup
    batch = row.number("global_batch") or setup.global_batch
    length = 0 if isinstance(network, LayeredNetwork) else network.encoder_sequence_length or network.sequence_length
    tokens = row.number("tokens_per_s_per_gpu")
    if tokens and length:
        return batch * length / (tokens * setup.devices), "tokens_per_s_per_gpu"
    samples = row.number("samples_per_s")
    if samples:
        units = network.units if isinstance(network, LayeredNetwork) else 1.0
        return batch * units / samples, "samples_per_s"
    rate = row.number("tflops_per_gpu")
    if rate and isinstance(network, TransformerShape) and not network.experts:
        work = _step_flops(row, network, batch)
        if work:
            return work / (rate * 1e12 * setup.devices), "tflops_per_gpu"
    return math.nan, ""


def _contradicted(row: FileRow) -> bool:
    """Whether a row states two speeds that cannot both be true."""
    seconds, samples, batch = (row.number(column) for column in ("step_time_s", "samples_per_s", "global_batch"))
    if not seconds or not samples or not batch:
        return False
    return not 1 / _TWOFOLD < batch / samples / seconds < _TWOFOLD


def _step_flops(row: FileRow, network: TransformerShape, batch: float) -> float:
    """Operations of a step by the source's own formula, where it states one; else 0.

    Megatron-LM's (arXiv:2104.04473, eq. 3) is ``96 B s l h² (1 + s/6h + V/16lh)`` with recomputation.
    """
    kind, notes = row.text("tflops_kind").lower(), row.text("notes").lower()
    counted = re.search(r"params\*([34])\*2\*tokens", kind)
    stated = row.number("params_b")
    if counted and stated:
        return 2 * int(counted[1]) * stated * 1e9 * batch * network.sequence_length
    if re.search(r"eq\.? ?3|96bsl|megatron formula", kind) and "without" not in f"{kind} {notes}":
        layers, hidden, length = network.layers, network.hidden, network.sequence_length
        extra = 1 + length / (6 * hidden) + network.vocabulary / (16 * layers * hidden)
        return 96 * batch * length * layers * hidden**2 * extra
    return 0.0
