"""How fast and how quiet a machine was when its profile was measured, which tells whether it is the same again."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

MOST_OTHERS = 0.05
MOST_STOLEN = 0.02
MOST_SPREAD = 0.25
"""From these parts on a machine was not quiet enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a machine was like while it was calibrated; no prediction depends on it.

    ``paces`` pairs numbers of processes with the seconds that typical kernels took on all of them together.
    ``pace_spread`` is the middle 80 % of these, where each process had a core, over their median, ``others_share`` the
    part of the cores' time that other programs took, and ``stolen_share`` that which their host took.
    """

    paces: tuple[tuple[int, float], ...]
    pace_spread: float = 0.0
    others_share: float = 0.0
    stolen_share: float = 0.0

    def pace_s(self, processes: int) -> float:
        """Seconds of typical kernels on so many processes together.

        Linear between numbers that were measured; beyond the last of several in proportion, as sharing cores is, and
        the same where there is one alone: devices of their own do not slow each other.
        """
        counts = [count for count, _ in self.paces]
        seconds = [found for _, found in self.paces]
        place = bisect.bisect_left(counts, processes)
        if place == len(counts):
            return seconds[-1] * (processes / counts[-1] if len(counts) > 1 else 1.0)
        if counts[place] == processes or place == 0:
            return seconds[place]
        share = (processes - counts[place - 1]) / (counts[place] - counts[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    @property
    def warning(self) -> str:
        """One line on what made the measurements doubtful; empty where nothing did."""
        reasons = []
        if self.others_share > MOST_OTHERS:
            reasons.append(f"other programs took {self.others_share:.0%} of the cores' time")
        if self.stolen_share > MOST_STOLEN:
            reasons.append(f"the host took {self.stolen_share:.0%} of it")
        if self.pace_spread > MOST_SPREAD:
            reasons.append(f"its speed varied by {self.pace_spread:.0%}")
        if not reasons:
            return ""
        return f"the machine was not quiet while it was calibrated: {', '.join(reasons)}; calibrate again when it is"
