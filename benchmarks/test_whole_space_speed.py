"""Speed of whole plans on two cores: every degree, schedule, storage and order of axes, capture aside.

Run with ``pytest benchmarks/test_whole_space_speed.py``; ``extra_info`` holds the gap of the best plan, its predicted
step and how the time was spent.
"""

from __future__ import annotations

from typing import Any

import pytest

from planner.planning.planning import PlanRequest, capture_for, plan_network

CASES = {
    "gpt3-175b-1024": ("zoo:gpt3-175b", "dgx-a100", 1024),
    "llama3-70b-512": ("zoo:llama3-70b", "dgx-h100", 512),
    "llama2-7b-64": ("zoo:llama2-7b", "dgx-a100", 64),
    "mixtral-8x7b-64": ("zoo:mixtral-8x7b", "dgx-a100", 64),
    "gpt2-8": ("zoo:gpt2", "dgx-a100", 8),
    "gpt3-175b-32": ("zoo:gpt3-175b", "dgx-a100", 32),
    "resnet50-64": ("zoo:resnet50", "dgx-a100", 64),
    "mlp-1024": ("zoo:mlp", "dgx-a100", 1024),
}


@pytest.mark.parametrize("name", list(CASES))
def test_whole_plan(benchmark: Any, name: str) -> None:
    """From a captured network to ranked plans, by default settings."""
    network, hardware, devices = CASES[name]
    request = PlanRequest(network=network, hardware=hardware, devices=devices)
    graph = capture_for(request)
    result = benchmark.pedantic(lambda: plan_network(request, graph=graph, cores=2), rounds=1)
    best = result.candidates[0]
    benchmark.extra_info["gap"] = best.plan.certificate.gap
    benchmark.extra_info["step_time_s"] = best.prediction.step_time_s
    benchmark.extra_info["timings_s"] = {phase: round(seconds, 3) for phase, seconds in result.timings.items()}
