"""Timed steps of a run on the machine that its prediction is for, and the machine's pace beside them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from simulator.calibration.timing import Pace, timed_paces

PACE_SHARE = 0.1
"""Part of the time of the steps that typical kernels between them take."""
MOST_SPANS = 40
"""Spans of steps between two rounds, however many steps there are."""
AFTER_ROUNDS = 8


def begin_together(device_type: str, *, wanted: bool) -> bool:
    """Whether timed steps begin on all ranks at the same time, behind a barrier; `wanted` is as in `PacedSteps`."""
    return wanted and device_type == "cpu"


class PacedSteps:
    """Spans of steps with rounds of typical kernels before, between and behind them; ``found`` are their seconds.

    An accelerator may have no memory for these kernels before the steps are done. On a processor ranks that share cores
    load data and look after the run between steps one after the other: that is no part of a step, and so none of them
    begins before all are ready.

    Parameters
    ----------
    wanted : whether to time the pace at all
    step_s : seconds of one step, about; 0 if not known
    """

    def __init__(self, device: torch.device, step_s: float, *, wanted: bool) -> None:
        self.found: list[float] = []
        self._device, self._step_s = device, step_s
        self._between = begin_together(device.type, wanted=wanted)
        self._after = wanted and not self._between

    def spans(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """First steps and ends of all spans, one after the other, the same on every rank."""
        if not self._between:
            yield first, end
            if self._after:
                self.found += timed_paces(Pace(self._device), dist.barrier, AFTER_ROUNDS)
            return
        pace = Pace(self._device)
        self.found += timed_paces(pace, dist.barrier, 1)
        every = self._steps_of_span(end - first)
        for begin in range(first, end, every):
            yield begin, min(begin + every, end)
            self.found += timed_paces(pace, dist.barrier, 1)

    def meet(self) -> None:
        """Wait until all ranks are ready for the next step, where that would count as the time of those that are."""
        if self._between:
            dist.barrier()

    def _steps_of_span(self, steps: int) -> int:
        longest = torch.tensor([self._step_s, self.found[0]], dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        step_s, round_s = longest.tolist()
        fewest = -(-steps // MOST_SPANS)
        return max(1, fewest, min(steps, round(round_s / PACE_SHARE / step_s)) if step_s else steps)
