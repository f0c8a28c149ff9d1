"""Bubbles and activation memory of the schedules, as their papers give them.

Times are those of one micro-batch through one *stage*; a rank of several chunks has several stages. The bubble is
time of a step in which a rank stands still, without the sends, the largest of all ranks; the next step follows before
all have ended where no rank waits for the others. Memory counts micro-batches
of one stage kept for the backward pass; where it is split, ``weight_share`` of one is kept until the weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ScheduleSize:
    """What a formula is about: p ranks, m micro-batches, v stages a rank, F, I, W and F&B in seconds.

    A whole backward pass takes I + W. ``overlapped_s`` is a forward and a backward pass at once (DualPipe), for
    ``multi_copy`` two passes of one kind: ``overlapped_s`` forward, ``overlapped_backward_s`` backward.
    """

    ranks: int
    micro_batches: int
    chunks: int = 1
    forward_s: float = 1.0
    input_gradient_s: float = 1.0
    weight_gradient_s: float = 1.0
    overlapped_s: float = 0.0
    overlapped_backward_s: float = 0.0
    weight_share: float = 1.0

    @property
    def backward_s(self) -> float:
        """A whole backward pass."""
        return self.input_gradient_s + self.weight_gradient_s


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """``bubble_s(shape)``, ``peak(shape)`` (ranks,) or the largest of all ranks (1,), and where both hold."""

    bubble_s: Callable[[ScheduleSize], float]
    peak: Callable[[ScheduleSize], FloatArray]
    source: str
    applies: Callable[[ScheduleSize], bool] = lambda shape: shape.micro_batches >= shape.ranks


def _ranks(shape: ScheduleSize) -> FloatArray:
    return np.arange(shape.ranks, dtype=np.float64)


def _one_forward_one_backward_bubble(shape: ScheduleSize) -> float:
    """``(p - 1)(F + B)`` of a stage: with v stages a rank, ``(p - 1)(F + B) / v`` of all that the rank holds."""
    return (shape.ranks - 1) * (shape.forward_s + shape.backward_s)


def _zb_h1_bubble(shape: ScheduleSize) -> float:
    """``(p - 1)(F + I - W)``, in DeepSeek's letters ``(p - 1)(F + B - 2W)`` with ``B = I + W``."""
    return (shape.ranks - 1) * (shape.forward_s + shape.input_gradient_s - shape.weight_gradient_s)


def _zb_h2_bubble(shape: ScheduleSize) -> float:
    """``(p - 1)(F + I - 2W)``."""
    return (shape.ranks - 1) * (shape.forward_s + shape.input_gradient_s - 2 * shape.weight_gradient_s)


def _dualpipe_bubble(shape: ScheduleSize) -> float:
    """``(p/2 - 1)(F&B + B - 3W)``."""
    time = shape.overlapped_s + shape.backward_s - 3 * shape.weight_gradient_s
    return (shape.ranks / 2 - 1) * time


def _dualpipe_v_bubble(shape: ScheduleSize) -> float:
    """DualPipe's with a rank in place of two: ``(p - 1)(F&B + B - 3W)``."""
    return (shape.ranks - 1) * (shape.overlapped_s + shape.backward_s - 3 * shape.weight_gradient_s)


def _zb_h1_peak(shape: ScheduleSize) -> FloatArray:
    """``(p - r) M_B + r M_W`` on rank r = 0, 1, ..."""
    rank = _ranks(shape)
    return shape.ranks - rank + rank * shape.weight_share


def _zb_h2_peak(shape: ScheduleSize) -> FloatArray:
    """``(2 (p - r) - 1) M_B + 2 r M_W`` on rank r = 0, 1, ...; the last forward pass ahead is what runs."""
    rank = _ranks(shape)
    return 2 * (shape.ranks - rank) - 1 + 2 * rank * shape.weight_share


def _interleaved_peak(shape: ScheduleSize) -> FloatArray:
    """``(v - 1) p + 2 (p - 1 - r) + 1``; on rank 0 the paper's ``1 + (p - 1) / (p v)`` times 1F1B's ``p v``."""
    warmup = (shape.chunks - 1) * shape.ranks + 2 * (shape.ranks - 1 - _ranks(shape))
    return np.minimum(warmup + 1, shape.micro_batches * shape.chunks)


def _dualpipe_applies(shape: ScheduleSize) -> bool:
    equal = shape.forward_s == shape.input_gradient_s
    return equal and shape.weight_gradient_s <= shape.forward_s and shape.micro_batches >= 2 * shape.ranks


FORMULAS: dict[str, Formulas] = {
    "gpipe": Formulas(
        bubble_s=_one_forward_one_backward_bubble,
        peak=lambda shape: np.full(shape.ranks, float(shape.micro_batches)),
        source="Huang et al., GPipe, arXiv:1811.06965, 2.3: (p - 1) / (m + p - 1) of the step",
    ),
    "1f1b": Formulas(
        bubble_s=_one_forward_one_backward_bubble,
        peak=lambda shape: shape.ranks - _ranks(shape),
        source="Narayanan et al., arXiv:2104.04473, 2.2.1; memory p - r: Qi et al., arXiv:2401.10241, table 2",
    ),
    "interleaved_1f1b": Formulas(
        bubble_s=_one_forward_one_backward_bubble,
        peak=_interleaved_peak,
        source="Narayanan et al., arXiv:2104.04473, 2.2.2; memory: Korthikanti et al., arXiv:2205.05198, 4.2.3",
        applies=lambda shape: shape.micro_batches % shape.ranks == 0,
    ),
    "zb_h1": Formulas(
        bubble_s=_zb_h1_bubble,
        peak=_zb_h1_peak,
        source="Qi et al., Zero Bubble, arXiv:2401.10241, table 2; it assumes W <= F and W <= I",
        applies=lambda shape: (
            shape.weight_gradient_s <= min(shape.forward_s, shape.input_gradient_s)
            and shape.micro_batches >= 2 * shape.ranks
        ),
    ),
    "zb_h2": Formulas(
        bubble_s=_zb_h2_bubble,
        peak=_zb_h2_peak,
        source="Qi et al., Zero Bubble, arXiv:2401.10241, table 2, where no rank waits for others before its update; "
        "it assumes W <= F and W <= I",
        applies=lambda shape: (
            shape.weight_gradient_s <= min(shape.forward_s, shape.input_gradient_s)
            and shape.micro_batches >= 2 * shape.ranks
        ),
    ),
    "zbv": Formulas(
        bubble_s=lambda shape: 0.0,
        peak=lambda shape: np.full(1, 2.0 * shape.ranks),
        source="Qi et al., arXiv:2401.10241, 6, and arXiv:2405.15362: none for F = I = W where no rank waits "
        "for others before its update; memory of 1F1B, p micro-batches of both stages",
        applies=lambda shape: (
            shape.forward_s == shape.input_gradient_s == shape.weight_gradient_s
            and shape.micro_batches >= 2 * shape.ranks
        ),
    ),
    "dualpipe": Formulas(
        bubble_s=_dualpipe_bubble,
        peak=lambda shape: np.full(1, shape.ranks + 1.0),
        source="DeepSeek-V3 report, arXiv:2412.19437, table 2; it assumes F = I and W <= F",
        applies=_dualpipe_applies,
    ),
    "dualpipe_v": Formulas(
        bubble_s=_dualpipe_v_bubble,
        peak=lambda shape: np.full(1, 2.0 * shape.ranks + 1.0),
        source="DeepSeek's DualPipe repository: DualPipe on p / 2 ranks; it assumes F = I and W <= F",
        applies=_dualpipe_applies,
    ),
    "multi_copy": Formulas(
        bubble_s=lambda shape: (shape.ranks - 1) * (shape.overlapped_s + shape.overlapped_backward_s),
        peak=lambda shape: 2 * (shape.ranks - _ranks(shape)),
        source="1F1B with pairs of micro-batches in place of single ones",
        applies=lambda shape: shape.micro_batches >= 2 * shape.ranks,
    ),
    "gradient_accumulation": Formulas(
        bubble_s=lambda shape: 0.0,
        peak=lambda shape: np.ones(1),
        source="one rank, one micro-batch after the other",
    ),
}
"""Formulas by name of the schedule."""
