"""Plans from the search for the tests of their execution, and runs of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from planner.execution.job import Job
from planner.execution.optimizers import hyperparameters
from planner.execution.options import ExecuteOptions
from planner.execution.run import ExecutionReport, execute_plan
from planner.planning.loading import lower_to_run
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.pins import Pins
from planner.plans.plan import Plan

HARDWARE = "dgx-a100"


@cache
def _planned(network: str, devices: int, batch: int, precision: str, pins: tuple[tuple[str, str], ...]) -> Plan:
    request = PlanRequest(
        network=network,
        hardware=HARDWARE,
        devices=devices,
        global_batch=batch,
        precision=precision,
        pins=Pins.read(dict(pins)),
        top=1,
    )
    return plan_network(request).candidates[0].plan


def make_plan(network: str, devices: int, *, batch: int, precision: str = "fp32", **pins: object) -> Plan:
    """The best plan under these pins."""
    return _planned(network, devices, batch, precision, tuple((name, str(value)) for name, value in pins.items()))


def run(plan: Plan, **options: Any) -> ExecutionReport:
    """Three steps in float64 beside one process."""
    settings = {
        "strategy": "unused",
        "steps": 3,
        "verify": True,
        "precision": "fp64",
        "device": "cpu",
        "data": "synthetic",
        **options,
    }
    return execute_plan(plan, ExecuteOptions(**settings))


def make_job(plan: Plan, *, steps: int) -> Job:
    """A plan in float64 on numbers at random, with nothing around its steps."""
    return Job(
        lowered=lower_to_run(plan, "plan.json", precision="fp64"),
        network=plan.network,
        sequence_length=plan.sequence_length,
        optimizer=plan.optimizer,
        constants=hyperparameters(plan.optimizer),
        data="synthetic",
        seed=0,
        steps=steps,
        warm_up_steps=0,
        device_type="cpu",
        timeout_s=60.0,
    )
