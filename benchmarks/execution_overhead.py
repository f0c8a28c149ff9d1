"""Step time of executed plans over PyTorch written by hand for the same parallelism.

Called by ``python -m benchmarks.execution_overhead``. It measures as the execution report does: plan and hand-written
training take turns in the same processes, and the median of the ratios of all rounds counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from planner.plans.file import write_plan
from reports.execution.cases import all_cases, tiny_cases
from reports.execution.figures import OVERHEAD_AIM
from reports.execution.running import TURNS_S, plan_case, turns_of
from simulator.calibration.calibrate import CalibrateOptions, calibrate
from simulator.errors import MeshwrightError


def main() -> None:
    """Print a line for every plan that is also written by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="profile of this machine [calibrated first]")
    parser.add_argument("--seconds", type=float, default=TURNS_S, help="of steps of a plan and by hand together")
    parser.add_argument("--networks", nargs="*", default=[""], help="only networks whose names begin so")
    parser.add_argument("--tiny", action="store_true", help="small plans, to try the command")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        profile = given.profile or Path(folder) / "local.yaml"
        if given.profile is None:
            calibrate(CalibrateOptions(processes=4, out=profile))
        for case in tiny_cases() if given.tiny else all_cases():
            if case.by_hand is None or not case.network.name.startswith(tuple(given.networks)):
                continue
            name = f"{case.network.name} on {case.processes}, {case.name}, over {case.by_hand}"
            file = Path(folder) / "plan.json"
            try:
                plan, predicted_s = plan_case(case, profile)
                write_plan(plan, file)
                turns = turns_of(case, plan, file, predicted_s, given.seconds)
            except MeshwrightError as error:
                sys.stdout.write(f"{name}: {error}\n")
                continue
            ratio = float(np.median(turns.ratios))
            verdict = "met" if ratio - 1 <= OVERHEAD_AIM else "missed"
            rounds = ", ".join(f"{one:.3f}" for one in turns.ratios)
            sys.stdout.write(f"{name}: {ratio:.3f} (rounds {rounds}); aim {1 + OVERHEAD_AIM:.2f}: {verdict}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
