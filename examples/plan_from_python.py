"""Planning from Python: three clusters, and how much of the MLP's step they spend computing."""

from __future__ import annotations

import meshwright as mw


def main() -> None:
    """Plan the MLP for eight devices of three clusters and print the best plan of each."""
    for hardware in ("dgx1-v100", "dgx-a100", "dgx-h100"):
        best = mw.plan("zoo:mlp", hardware=hardware, devices=8, global_batch=4096).best
        step = best.prediction.step_time_s
        compute = best.prediction.breakdown["compute_s"] / step
        print(f"{hardware}: data {best.dp} × tensor {best.tp}, {step * 1e6:.3g} µs a step, {compute:.0%} compute")


if __name__ == "__main__":
    main()
