"""Which figure of a run's memory a measurement is to be compared with."""

from __future__ import annotations

import re

from planner.cost.memory.figures import MemoryFigure

_FIGURES = (
    (r"tensorboard|mem-max-allocated", MemoryFigure.LAST_STAGE_ALLOCATED),
    # MindSpeed-LLM's baselines keep what Megatron's ``report_memory`` logs, once, after the first iteration.
    (r"max over listed ranks of torch_npu", MemoryFigure.FIRST_STEP_ALLOCATED),
    # Sailor's ``pipe_engine.py`` logs ``memory.used`` of nvidia-smi, of which its script takes the largest.
    (r"includes reserved", MemoryFigure.DEVICE),
    (r"reserved", MemoryFigure.RESERVED),
    (r"^nvidia-smi gb$", MemoryFigure.FIRST_NODE_DEVICE),
    (r"nvidia-smi|npu-smi|used of total|device memory", MemoryFigure.DEVICE),
)
_UNIT_ALONE = re.compile(r"g(?:i)?b as printed")


def figure_of(kind: str) -> MemoryFigure:
    """The figure that the words of a measurement's ``mem_kind`` mean: allocated bytes unless they say more.

    >>> figure_of("nvidia-smi GB, max (first/last stage)")
    <MemoryFigure.DEVICE: 'device'>
    >>> figure_of("peak active")
    <MemoryFigure.ALLOCATED: 'allocated'>
    """
    return next((figure for words, figure in _FIGURES if re.search(words, kind.lower())), MemoryFigure.ALLOCATED)


def says_no_figure(kind: str) -> bool:
    """Whether a ``mem_kind`` states a unit and nothing of what it measures: the figures differ by a third and more.

    >>> says_no_figure("GB as printed"), says_no_figure("peak GB as printed")
    (True, False)
    """
    return _UNIT_ALONE.fullmatch(kind.strip().lower()) is not None
