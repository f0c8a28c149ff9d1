"""Planning from Python: three clusters, and how much of the MLP's step they spend computing."""

from __future__ import annotations

from planner.planning.planning import PlanRequest, plan_network
from simulator.quantities import percent_text, seconds_text


def main() -> None:
    """Plan the MLP for eight devices of three clusters and print the best plan of each."""
    for hardware in ("dgx1-v100", "dgx-a100", "dgx-h100"):
        result = plan_network(PlanRequest(network="zoo:mlp", hardware=hardware, devices=8, global_batch=4096))
        best = result.candidates[0]
        step = best.prediction.step_time_s
        compute = percent_text(best.prediction.breakdown["compute_s"] / step)
        data, tensor = best.plan.degree("data"), best.plan.degree("tensor")
        print(f"{hardware}: data {data} × tensor {tensor}, {seconds_text(step)} a step, {compute} of it computing")


if __name__ == "__main__":
    main()
