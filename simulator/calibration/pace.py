"""The pace of a machine: typical kernels, timed when it is calibrated and again beside a run.

Clocks, other programs and other machines on the same host change how fast a machine computes from one hour to the next.
The same few kernels on both occasions tell that from an error of a prediction.
"""

from __future__ import annotations

import torch

from simulator.calibration.cases import all_cases
from simulator.calibration.timing import measure_case

TYPICAL = ("mm 256x768x3072", "backward of conv 16x256x4x4 to 256, 3x3", "gelu 524288", "adam 4194304")
"""Products, convolutions, activations and updates: of arithmetic, and of what comes from memory."""
BUDGET_S = 0.04


def pace(device: torch.device) -> float:
    """Seconds of one call of each typical kernel, in float32; to be timed while no other rank computes."""
    cases = [c for c in all_cases(accelerator=device.type != "cpu") if c.name in TYPICAL and c.dtype == "float32"]
    return sum(measure_case(case, device, BUDGET_S) for case in cases)
