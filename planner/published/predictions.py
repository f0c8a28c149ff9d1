"""Measured rows beside their predictions, and the file of predictions that `meshwright validate` writes."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from planner.cost.memory.device import training_memory
from planner.cost.memory.figures import MemoryFigure, StageMemory
from planner.cost.memory.parameters import parameter_count
from planner.cost.stacks import Stack, family_of
from planner.cost.training_run import (
    LayeredNetwork,
    OptimizerSharding,
    Recompute,
    RunPrediction,
    TrainingRun,
    TransformerShape,
)
from planner.plans.request import PRECISIONS
from planner.published.layered.prediction import BY_LAYERS
from planner.published.metrics import ScoredRow
from planner.published.reading import MeasuredRow
from planner.published.reading_memory import figure_of
from planner.published.source_rules import CHOSEN_TO_FIT
from simulator.errors import MeshwrightError

TRANSFORMERS = "transformers on A100 and H100, stated in full"
ASCEND = "Ascend"
CONVOLUTIONAL = "vision networks and others"
BY_LAYERS_ALONE = "vision and speech networks without a plan, by their layers"
FSDP = "fully sharded (FSDP, ZeRO-3)"
EXPERTS = "experts"
LOW_PRECISION = "products in 8 and 4 bits"
ADAPTERS = "adapters of frozen networks"
IN_PART = "transformers on A100 and H100, stated in part"
ELSEWHERE = "transformers on other devices"
FUNCTIONAL = "functional tests: tiny networks, deterministic kernels"
UNKNOWN_FIGURE = "the source does not say which memory it shows"
MISSING_FACT = "recomputation, batch or size of the network not stated"
CONTRADICTION = "less measured than parameters, gradients and optimizer states of what is described take"
APART = "rows that state the same were measured more than 5 % apart"
DOUBTS = (UNKNOWN_FIGURE, MISSING_FACT, CONTRADICTION, APART)
_APART = 0.05
_UNSAID = re.compile(r"as printed")
_DECIDING = re.compile(r"(?:recomputation|batch|n_layers|hidden|seq_len) not stated(?!.* as published)")
"""Facts without which memory cannot be known; the default that stands in is a guess."""
_ACTIVATION_BYTES = 34.0
"""Bytes of activations that a layer keeps per token and channel, in 16 bits (Korthikanti et al., arXiv:2205.05198)."""
_PASSES = 3.0
"""The backward pass has two products for each of the forward pass."""


def group_of(run: TrainingRun, *, complete: bool = True) -> str:
    """The group whose aim a run falls under; `complete` says that its source states shape and plan in full."""
    family = family_of(run.hardware.device_name)
    if run.setup.deterministic:
        return FUNCTIONAL
    if family.startswith("ascend"):
        return ASCEND
    if isinstance(run.network, LayeredNetwork):
        return CONVOLUTIONAL
    if run.setup.trained_fraction < 1:
        return ADAPTERS
    if run.network.experts is not None:
        return EXPERTS
    if run.setup.precision in ("fp8", "fp4"):
        return LOW_PRECISION
    if run.setup.optimizer_sharding is OptimizerSharding.ZERO3:
        return FSDP
    if family not in ("ampere", "hopper"):
        return ELSEWHERE
    return TRANSFORMERS if complete else IN_PART


def operations_s(run: TrainingRun) -> float:
    """Seconds of a step whose operations run at the peak: 6 N D, where N of experts are those that a token visits."""
    setup, network = run.setup, run.network
    if isinstance(network, LayeredNetwork):
        samples = _PASSES * sum(layer.flops * layer.count for layer in network.layers) * setup.global_batch
    else:
        experts = network.experts and replace(network.experts, count=network.experts.per_token)
        tokens = network.sequence_length * setup.global_batch
        samples = 2 * _PASSES * parameter_count(replace(network, experts=experts)) * tokens
    peak = run.hardware.peak(PRECISIONS["fp32" if setup.precision == "tf32" else setup.precision])
    return samples / (setup.devices * peak)


def roofline_s(run: TrainingRun) -> float:
    """Seconds of a step by its tightest bound: operations, bytes of the memory, or the sum of gradients."""
    setup, network, hardware = run.setup, run.network, run.hardware
    own = setup.tp * setup.pp
    if isinstance(network, LayeredNetwork):
        parameters = network.parameters
        elements = _PASSES * sum(layer.elements_moved * layer.count for layer in network.layers) * setup.global_batch
        moved = elements * (4 if setup.precision in ("fp32", "tf32") else 2) / setup.devices
    else:
        parameters = parameter_count(network) / own
        kept = _ACTIVATION_BYTES * network.sequence_length * network.hidden * network.layers * setup.global_batch
        # Written and read again.
        moved = 2 * kept / setup.devices + _PASSES * 2 * parameters * setup.micro_batches
    summed = 2 * 2 * parameters / setup.ep * (setup.dp - 1) / setup.dp
    level = next((one for one in hardware.levels if one.size >= own * setup.dp), hardware.levels[-1])
    return max(operations_s(run), moved / hardware.memory_bandwidth, summed / level.bandwidth_bytes_per_s)


def memory_doubt(row: MeasuredRow) -> str:
    """Why the row's memory tells little of the estimate; nothing where it is described in full.

    Three reasons: the source does not say which of the figures of `MemoryFigure` it shows, a fact is missing that
    decides, or the row contradicts itself: less was measured than parameters, gradients and optimizer states take
    that it describes.
    """
    if row.run is None or math.isnan(row.memory_gib):
        return ""
    if _UNSAID.search(row.memory_kind.lower()):
        return UNKNOWN_FIGURE
    if any(_DECIDING.match(note) for note in row.run.assumed):
        return MISSING_FACT
    states = _state_bytes(row.run, figure_of(row.memory_kind))
    if states > row.memory_gib * _GIB:
        return CONTRADICTION
    return ""


def measured_apart(rows: Iterable[MeasuredRow]) -> frozenset[tuple[str, str]]:
    """Source and identity of the rows whose twins show another memory: what decides it is stated nowhere.

    Twins are rows of one source that state the same of their runs; no single value is near to all of them.
    """
    twins: dict[object, list[MeasuredRow]] = {}
    for row in rows:
        if not math.isnan(row.memory_gib) and row.outcome in ("", "ok"):
            twins.setdefault((row.source, row.facts), []).append(row)
    return frozenset(
        (row.source, row.row_id)
        for group in twins.values()
        if max(row.memory_gib for row in group) > (1 + _APART) * min(row.memory_gib for row in group)
        for row in group
    )


def _state_bytes(run: TrainingRun, figure: MemoryFigure) -> float:
    if not isinstance(run.network, TransformerShape) or run.network.hybrid:
        return 0.0
    stages = training_memory(run).stages
    if figure is MemoryFigure.LAST_STAGE_ALLOCATED:
        return _states(stages[-1])
    return max(_states(stage) for stage in stages)


def _states(stage: StageMemory) -> float:
    return stage.parameters + stage.gradients + stage.master_weights + stage.moments


OK, SKIPPED, ERROR = "ok", "skipped", "error"


class RunFailedError(MeshwrightError):
    """The prediction of a run ended in an error of our own."""


COLUMNS = (
    "row_id", "status", "predicted_step_time_s", "interval_low_s", "interval_high_s", "predicted_peak_memory_gib",
    "predicted_outcome", "label", "reason",
)  # fmt: skip
RECOMPUTED = "memory with full recomputation, without which it does not fit"
_GIB = 2**30
_SAME_TIME = 0.03
"""Runs of one plan on one cluster differ by so much from day to day."""
_TUNED_STACKS = (Stack.TRANSFORMER_ENGINE, Stack.EAGER, Stack.COMPILED, Stack.MINDSPEED, Stack.MINDSPORE)
"""Software whose published figures are of runs that were tuned until they fitted."""


def score(rows: Sequence[MeasuredRow], outcomes: Sequence[RunPrediction | MeshwrightError]) -> list[ScoredRow]:
    """Rows beside their predictions, in order; ``outcomes`` are those of the rows that have a run."""
    left = iter(outcomes)
    scored = [_scored(row, next(left) if row.run is not None else None) for row in rows]
    apart, unread = measured_apart(rows), _not_read(rows, scored)
    return [
        replace(
            row,
            memory_doubt=APART if (row.source, row.row_id) in apart and not row.memory_doubt else row.memory_doubt,
            not_read=unread.get(place, ()),
            reason="; ".join(filter(None, (row.reason, *(f"not read: {word}" for word in unread.get(place, ()))))),
        )
        for place, row in enumerate(scored)
    ]


def _not_read(rows: Sequence[MeasuredRow], scored: Sequence[ScoredRow]) -> dict[int, tuple[str, ...]]:
    """Words by which rows differ that have one prediction and several times, by the place of the row."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, row in enumerate(scored):
        if row.measured_step_time_s and row.predicted_step_time_s:
            alike.setdefault((row.source, row.predicted_step_time_s, row.workload), []).append(place)
    found: dict[int, tuple[str, ...]] = {}
    for places in alike.values():
        times = [scored[place].measured_step_time_s or 0.0 for place in places]
        if max(times) < (1 + _SAME_TIME) * min(times):
            continue
        words = [_words(rows[place]) for place in places]
        common = set.intersection(*map(set, words))
        own = (tuple(word for word in said if word not in common) for said in words)
        found |= {place: words for place, words in zip(places, own, strict=True) if words}
    return found


def _words(row: MeasuredRow) -> tuple[str, ...]:
    """Return the words of a row that describe its software."""
    said = dict(row.facts)
    texts = (
        said.get(column, "") for column in ("framework", "other_flags", "attention_impl", "recompute", "zero_fsdp")
    )
    return tuple(dict.fromkeys(word.strip() for text in texts for word in text.split(";") if word.strip()))


def _scored(row: MeasuredRow, outcome: RunPrediction | MeshwrightError | None) -> ScoredRow:
    if row.run is None or not isinstance(outcome, RunPrediction):
        reason = row.reason
        if outcome is not None:
            reason = f"cannot be predicted: {outcome}"
        return ScoredRow(
            row_id=row.row_id,
            source=row.source,
            file=row.file,
            status=ERROR if row.fault or isinstance(outcome, RunFailedError) else SKIPPED,
            reason=reason,
            measured_outcome=row.outcome,
            transformer=row.transformer,
        )
    fits = outcome.fits or CHOSEN_TO_FIT in row.run.assumed
    reason = "; ".join(filter(None, (row.reason, *outcome.notes)))
    return ScoredRow(
        row_id=row.row_id,
        source=row.source,
        file=row.file,
        status=OK,
        reason=reason,
        label=outcome.label,
        workload=row.workload,
        group=BY_LAYERS_ALONE if BY_LAYERS in outcome.notes else group_of(row.run, complete=row.complete),
        device=row.run.hardware.device_name,
        devices=row.run.setup.devices,
        predicted_step_time_s=outcome.step_time_s,
        interval_s=outcome.interval_s,
        measured_step_time_s=_known(row.measured_time_s) if row.outcome in ("", "ok") else None,
        predicted_memory_bytes=outcome.memory_figures.get(figure_of(row.memory_kind), outcome.peak_memory_bytes),
        measured_memory_bytes=_known(row.memory_gib * _GIB) if row.outcome in ("", "ok") else None,
        predicted_outcome="ok" if fits else "oom",
        measured_outcome=row.outcome,
        transformer=row.transformer,
        memory_doubt=memory_doubt(row) if row.outcome in ("", "ok") else "",
        operations_s=operations_s(row.run),
        roofline_s=roofline_s(row.run),
    )


def recomputing(run: TrainingRun) -> TrainingRun | None:
    """A tuned run with full recomputation, where the row does not say whether it recomputed; else None."""
    unstated = f"recomputation not stated: {Recompute.NONE}" in run.assumed and isinstance(
        run.network, TransformerShape
    )
    if not unstated or run.setup.stack not in _TUNED_STACKS:
        return None
    return replace(run, setup=replace(run.setup, recompute=Recompute.FULL))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def prediction_lines(rows: Sequence[ScoredRow]) -> Iterator[str]:
    """The lines of a prediction file: a header, then one row each."""
    yield _line(COLUMNS)
    for row in rows:
        yield _line((row.row_id, *_cells(row)))


def _cells(row: ScoredRow) -> tuple[str, ...]:
    low, high = row.interval_s or (None, None)
    memory = None if row.predicted_memory_bytes is None else row.predicted_memory_bytes / _GIB
    return (
        row.status, _number(row.predicted_step_time_s), _number(low), _number(high), _number(memory),
        row.predicted_outcome, row.label, row.reason,
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([" ".join(cell.split()) for cell in cells])
    return buffer.getvalue()
