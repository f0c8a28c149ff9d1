"""The pace of a machine: typical kernels, timed when it is calibrated and again beside a run.

Clocks, other programs and other machines on the same host change how fast a machine computes from one hour to the next.
The same few kernels on both occasions tell that from an error of a prediction.
"""

from __future__ import annotations

import torch

from simulator.calibration.cases import all_cases
from simulator.calibration.timing import lower_quartile, repeated_case, repeated_seconds

TYPICAL = ("mm 256x768x3072", "backward of conv 16x256x4x4 to 256, 3x3", "gelu 524288", "adam 4194304")
"""Products, convolutions, activations and updates: of arithmetic, and of what comes from memory."""
BUDGET_S = 0.04
ROUNDS = 4


def pace(device: torch.device) -> float:
    """Seconds of one call of each typical kernel, in float32; to be timed while no other rank computes.

    They have their turns in rounds, so that what disturbs the machine for a moment is in one round of each.
    """
    cases = [c for c in all_cases(accelerator=device.type != "cpu") if c.name in TYPICAL and c.dtype == "float32"]
    runs = [repeated_case(case, device) for case in cases]
    rounds = [[repeated_seconds(run, device, BUDGET_S) for run in runs] for _ in range(ROUNDS)]
    return sum(lower_quartile(times) for times in zip(*rounds, strict=True))
