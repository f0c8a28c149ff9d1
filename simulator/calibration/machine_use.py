"""What the cores of this machine do besides: processor time of other programs, and time that the host took away."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from simulator.calibration.process import available_cores, own_cores

STATISTICS = Path("/proc/stat")
USER, NICE, SYSTEM, STOLEN = 0, 1, 2, 7
"""Columns of what a core did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Seconds since some moment.

    By the clock, that all programs computed on this process's cores, that the host took from these cores, and that this
    process computed.
    """

    wall_s: float
    busy_s: float
    stolen_s: float
    own_s: float

    def since(self, before: MachineUse) -> MachineUse:
        """What happened after another moment."""
        return MachineUse(
            wall_s=self.wall_s - before.wall_s,
            busy_s=self.busy_s - before.busy_s,
            stolen_s=self.stolen_s - before.stolen_s,
            own_s=self.own_s - before.own_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Parts of the time of the cores that other programs took, and that the host took."""

    others_share: float
    stolen_share: float


def machine_use(statistics: Path = STATISTICS) -> MachineUse | None:
    """Counters of this moment; None where the system has none."""
    cores = {f"cpu{number}" for number in own_cores()}
    busy = stolen = 0
    try:
        for line in statistics.read_text().splitlines():
            name, *columns = line.split()
            if name in cores:
                busy += int(columns[USER]) + int(columns[NICE]) + int(columns[SYSTEM])
                stolen += int(columns[STOLEN])
    except (OSError, ValueError, IndexError):
        return None
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    return MachineUse(wall_s=time.perf_counter(), busy_s=busy * tick, stolen_s=stolen * tick, own_s=time.process_time())


def used_since(before: MachineUse | None) -> MachineUse | None:
    """What happened since a moment; None where the system does not tell."""
    now = machine_use()
    return None if before is None or now is None else now.since(before)


def disturbance(of_ranks: Sequence[MachineUse | None]) -> Disturbance | None:
    """What disturbed the ranks of one machine, given the same span of time on each; None where it is not known."""
    known = [use for use in of_ranks if use is not None]
    if not known or len(known) < len(of_ranks) or known[0].wall_s <= 0:
        return None
    whole = known[0].wall_s * available_cores()
    others = known[0].busy_s - sum(use.own_s for use in known)
    return Disturbance(others_share=max(0.0, others) / whole, stolen_share=known[0].stolen_s / whole)
