"""Plan, simulate and run the parallel training of one network on many accelerators.

>>> import meshwright as mw
>>> result = mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512)
>>> result.best.devices
8
>>> result.prediction.peak_memory_bytes < result.prediction.device_memory_bytes
True

Names are imported when they are first used: importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.checks import CheckResult, check
    from meshwright.plans import Explanation, PinOptions, PlanResult, TrainingPlan, load, plan
    from meshwright.profiles import calibrate, profile
    from meshwright.sweeps import BudgetResult, WhatIfResult, budget, what_if
    from planner.exchange.pytorch import apply
    from planner.planning.prediction import Prediction
    from simulator.errors import ExecutionError, InfeasibleError, InputError, MeshwrightError
    from simulator.hardware import Hardware

__all__ = [
    "BudgetResult",
    "CheckResult",
    "ExecutionError",
    "Explanation",
    "Hardware",
    "InfeasibleError",
    "InputError",
    "MeshwrightError",
    "PinOptions",
    "PlanResult",
    "Prediction",
    "TrainingPlan",
    "WhatIfResult",
    "apply",
    "budget",
    "calibrate",
    "check",
    "load",
    "plan",
    "profile",
    "what_if",
]

_MODULES = {
    **dict.fromkeys(("CheckResult", "check"), "meshwright.checks"),
    **dict.fromkeys(("ExecutionError", "InfeasibleError", "InputError", "MeshwrightError"), "simulator.errors"),
    **dict.fromkeys(("Explanation", "PinOptions", "PlanResult", "TrainingPlan", "load", "plan"), "meshwright.plans"),
    **dict.fromkeys(("BudgetResult", "WhatIfResult", "budget", "what_if"), "meshwright.sweeps"),
    "Hardware": "simulator.hardware",
    "Prediction": "planner.planning.prediction",
    "apply": "planner.exchange.pytorch",
    "calibrate": "meshwright.profiles",
    "profile": "meshwright.profiles",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
