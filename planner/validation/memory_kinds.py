"""Which figure of a run's memory a measurement is to be compared with."""

from __future__ import annotations

import re

from planner.estimate.memory import MemoryFigure

_FIGURES = (
    (r"tensorboard|mem-max-allocated", MemoryFigure.LAST_STAGE_ALLOCATED),
    (r"reserved", MemoryFigure.RESERVED),
    (r"nvidia-smi|npu-smi|used of total|^gb as printed|device memory", MemoryFigure.DEVICE),
)


def figure_of(kind: str) -> MemoryFigure:
    """The figure that the words of a measurement's ``mem_kind`` mean: allocated bytes unless they say more.

    >>> figure_of("nvidia-smi GB, max (first/last stage)")
    <MemoryFigure.DEVICE: 'device'>
    >>> figure_of("peak active")
    <MemoryFigure.ALLOCATED: 'allocated'>
    """
    return next((figure for words, figure in _FIGURES if re.search(words, kind.lower())), MemoryFigure.ALLOCATED)
