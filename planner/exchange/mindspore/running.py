"""`planner.execute`: train as a plan says, from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.exchange.mindspore.entry import Planned
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.execution.run import ExecutionReport


def execute(
    plan: Planned | str | Path, *, monitor: Callable[[int, float], None] | None = None, **options: Any
) -> ExecutionReport:
    """Train a network as a plan says, on local processes or in the job that started this process.

    Parameters
    ----------
    plan
        What `planner.plan` found, or a strategy file.
    monitor
        Told the number of each step, from 0, and its loss while training goes on
        (`planner.execution.launch.progress.loss_monitor` writes lines).
    options
        As `planner.execution.options.ExecuteOptions` has them: ``steps``, ``verify``, ``precision``, ``data``, ….

    Raises
    ------
    InputError
        There is no such option, or an option, the plan or the data do not fit.
    ExecutionError
        A rank failed, or with ``verify`` the losses differ from those of one process.
    """
    from dataclasses import fields

    from planner.execution.options import ExecuteOptions
    from planner.execution.run import execute_plan
    from planner.plans.file import read_plan

    known = [one.name for one in fields(ExecuteOptions) if one.name != "strategy"]
    for name in options:
        if name not in known:
            raise InputError(f"execute has no option {name!r}; it has {', '.join(known)}")
    found = plan.plan if isinstance(plan, Planned) else read_plan(plan)
    source = plan.plan.network if isinstance(plan, Planned) else plan
    return execute_plan(found, ExecuteOptions(strategy=source, **options), monitor=monitor)
