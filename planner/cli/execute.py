"""`meshwright execute`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.cli.execute_options import ExecuteArguments
from planner.cli.options import check_out, takes
from planner.cli.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.execution.run import ExecutionReport

VIRTUAL_STEPS = 3


@takes(ExecuteArguments)
def execute(given: ExecuteArguments, terminal: Terminal) -> None:
    """Train for real as a plan says.

    Shows measured step time and memory beside the predicted.

    Starts its own local processes, or joins the job when torchrun, Slurm or msrun started it.

    \b
    Example: eight processes here, losses compared with those of one process
      meshwright execute strategy.json --processes 8 --steps 20 --verify
    Why was the prediction off, and a trace with both to open at https://ui.perfetto.dev
      meshwright execute strategy.json --measure --trace run.trace.json
    The best three plans, and whether they are as fast as predicted
      meshwright plan zoo:mlp --hw local.yaml --devices 2 --top 3 --out strategy.json
      meshwright execute strategy.json --top 3
    Before a large job: would it start, and what would each rank do
      meshwright execute strategy.json --dry-run
    Save every 100 steps; after a crash, or with another plan for other devices, go on from the newest
      meshwright execute strategy.json --steps 1000 --save run1 --save-every 100
      meshwright execute other.json --steps 1000 --resume run1 --save run1 --save-every 100
    The order of 64 ranks on this machine's cores, one of them slow: simulated beside run
      meshwright execute strategy.json --virtual --stragglers 1 --slowdown 1.5
    Under torchrun
      torchrun --nproc-per-node 8 -m planner.cli execute strategy.json --steps 20
    """
    from planner.plans.file import read_plan

    for name, file in (("--out", given.out), ("--trace", given.trace)):
        if file is not None:
            check_out(name, file, (given.strategy,))
    given.check()
    read_plan(given.strategy)  # a wrong file is refused before torch is imported
    if given.virtual:
        _run_virtually(terminal, given)
    elif given.top is not None:
        from planner.cli.execution_tables import run_shoot_out

        run_shoot_out(terminal, given.strategy, given.top, given.options(), given.out)
    elif given.dry_run:
        _rehearse(terminal, given)
    else:
        _train(terminal, given)


def _run_virtually(terminal: Terminal, given: ExecuteArguments) -> None:
    """Let the ranks sleep instead of computing."""
    from planner.cli.execution_tables import run_virtually
    from planner.execution.virtual.devices import VirtualOptions

    slow = given.slow()
    asked = VirtualOptions(
        steps=VIRTUAL_STEPS if given.steps is None else given.steps,
        slow_ranks=slow.ranks or 0,
        slowdown=slow.factor,
        slow_links=slow.links,
        seed=slow.seed,
    )
    run_virtually(terminal, given.strategy, given.processes, asked, given.out)


def _train(terminal: Terminal, given: ExecuteArguments) -> None:
    """Train, say losses meanwhile where that is asked for, and show what was measured beside the prediction."""
    from planner.execution.launch.progress import loss_monitor
    from planner.execution.run import execute as run

    options = given.options()
    monitor = None if given.log_every is None else loss_monitor(terminal.note, options.steps, given.log_every)
    with terminal.working(f"running {given.strategy}") as say:
        report = run(options, say=say, monitor=monitor)
    if report.rank:
        return
    median = report.measured_step_time_s.median
    terminal.result(_finite(asdict(report)), f"{median!r}", lambda: _report(report, given), given.out)


def _report(report: ExecutionReport, given: ExecuteArguments) -> Iterator[RenderableType]:
    """Everything that a run prints for people."""
    from planner.cli.execution_tables import execution_report

    yield from execution_report(report, given.out)
    if report.comparison is not None:
        from planner.cli.execution_tables import comparison_report

        yield from comparison_report(report.comparison, given.trace)


def _rehearse(terminal: Terminal, given: ExecuteArguments) -> None:
    """Tell what each rank would do."""
    from planner.cli.execution_tables import dry_run_report
    from planner.execution.run import rehearse

    with terminal.working(f"looking at {given.strategy}") as say:
        found = rehearse(given.options(), say)
    terminal.result(_finite(asdict(found)), found.refused or "", lambda: dry_run_report(found), given.out)


def _finite(value: Any) -> Any:
    """Write null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
