"""Gradients that plans update with are those of plain PyTorch in one process, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from planner.execution import reference
from planner.networks import load_network
from simulator.calibration.launch import run_workers
from tests.planner.execution.made import make_job, make_plan
from tests.planner.execution.recording import record_gradients, whole_gradients
from tests.planner.execution.small import place

STEPS = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "devices", "pins"),
    [
        ("gpt", 4, {"dp": 2, "tp": 2, "sequence_parallel": "true", "optimizer_sharding": "zero3", "micro_batch": 2}),
        ("gpt", 4, {"dp": 2, "pp": 2, "schedule": "zb_h1", "micro_batch": 1, "recompute": "full"}),
        ("llama", 2, {"cp": 2, "context_algorithm": "ring", "micro_batch": 4}),
        ("mixtral", 2, {"ep": 2, "dp": 2}),
    ],
)
def test_gradients_are_those_of_one_process(
    network: str, devices: int, pins: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(make_plan(place(network), devices, batch=8, **pins), optimizer="sgd")
    job = make_job(plan, steps=STEPS)
    found = whole_gradients(run_workers(record_gradients, (job,), devices), STEPS)

    exact: list[list[Tensor]] = []
    update = reference._update

    def recorded(optimizer: Any, parameters: list[Any], *others: Any) -> None:
        exact.append([parameter.grad.clone() for parameter in parameters])
        update(optimizer, parameters, *others)

    monkeypatch.setattr(reference, "_update", recorded)
    reference.run_reference(job)
    names = [name for name, _ in load_network(plan.network).build(0).named_parameters()]
    assert found.keys() == set(names)
    for step, gradients in enumerate(exact):
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        for name, gradient in zip(names, gradients, strict=True):
            difference = float((found[name][step] - gradient).abs().max())
            # Some are nothing but rounding: a bias of keys changes no softmax.
            assert difference < 1e-10 * float(gradient.abs().max()) + 1e-14 * largest, (name, step)
