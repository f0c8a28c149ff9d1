"""Measurements of memory that their own row leaves in doubt: what they measured, of what run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from planner.cost.memory.device import training_memory
from planner.cost.memory.figures import MemoryFigure, StageMemory
from planner.cost.training_run import TrainingRun, TransformerShape
from planner.published.memory_kinds import figure_of
from planner.published.reading import MeasuredRow

UNKNOWN_FIGURE = "the source does not say which memory it shows"
MISSING_FACT = "recomputation, batch or size of the network not stated"
CONTRADICTION = "less measured than parameters, gradients and optimizer states of what is described take"
APART = "rows that state the same were measured more than 5 % apart"
DOUBTS = (UNKNOWN_FIGURE, MISSING_FACT, CONTRADICTION, APART)
_APART = 0.05
_GIB = 2**30
_UNSAID = re.compile(r"as printed")
_DECIDING = re.compile(r"(?:recomputation|batch|n_layers|hidden|seq_len) not stated(?!.* as published)")
"""Facts without which memory cannot be known; the default that stands in is a guess."""


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
    if not isinstance(run.network, TransformerShape):
        return 0.0
    stages = training_memory(run).stages
    if figure is MemoryFigure.LAST_STAGE_ALLOCATED:
        return _states(stages[-1])
    return max(_states(stage) for stage in stages)


def _states(stage: StageMemory) -> float:
    return stage.parameters + stage.gradients + stage.master_weights + stage.moments
