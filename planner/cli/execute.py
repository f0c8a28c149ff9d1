"""`meshwright execute`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from planner.cli.options import (
    Slowdown,
    SlowLinks,
    Stragglers,
    TrustFile,
    check_out,
    natural,
    natural_or_zero,
    option,
    rate,
    seconds,
    takes,
)
from planner.cli.terminal import Terminal
from planner.plans.request import Precision
from simulator.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.cli.reliability import SlowOptions
    from planner.execution.options import ExecuteOptions
    from planner.execution.run import ExecutionReport


FOR_REAL = (
    *("data", "verify", "precision", "learning_rate", "device", "timeout", "top", "join_timeout", "save", "save_every"),
    *("resume", "force", "log_dir", "measure", "trace"),
)
"""Options of runs that compute, which virtual devices do not."""


Device = Literal["cpu", "cuda", "npu"]
"""What to run on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteArguments:
    """Arguments and options, None where not given."""

    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")]
    processes: Annotated[
        int | None, option("--processes", "Local processes; default: the plan's devices.", "N", natural)
    ] = None
    steps: Annotated[int | None, option("--steps", "Training steps [10; virtual ones 3].", "N", natural)] = None
    data: Annotated[str | None, option("--data", "Default: a real data set that fits the network.", "DATASET")] = None
    verify: Annotated[bool, option("--verify", "Train again in one process; exit code 4 if the losses differ.")] = False
    precision: Annotated[Precision | None, option("--precision", "Default: the plan's.")] = None
    seed: Annotated[int | None, option("--seed", "Seed of parameters and data [0].", "N", natural_or_zero)] = None
    learning_rate: Annotated[float | None, option("--learning-rate", "Default: the optimizer's.", "X", rate)] = None
    device: Annotated[Device | None, option("--device", "Default: the best there is.")] = None
    timeout: Annotated[
        float | None, option("--timeout", "How long a rank may keep the others waiting [60].", "SECONDS", seconds)
    ] = None
    top: Annotated[int | None, option("--top", "Run the best K plans, and compare their order.", "K", natural)] = None
    join_timeout: Annotated[
        float | None, option("--join-timeout", "How long to wait for all processes [300].", "SECONDS", seconds)
    ] = None
    save: Annotated[Path | None, option("--save", "Save a checkpoint in this folder at the end.", "DIR")] = None
    save_every: Annotated[int | None, option("--save-every", "And after every N steps.", "N", natural)] = None
    resume: Annotated[
        Path | None, option("--resume", "Go on from a checkpoint, or the newest in a folder of them.", "DIR")
    ] = None
    force: Annotated[bool, option("--force", "Start even if the prediction says that memory does not suffice.")] = False
    dry_run: Annotated[bool, option("--dry-run", "Only tell what each rank would do; start nothing.")] = False
    log_dir: Annotated[Path | None, option("--log-dir", "Keep what every rank says in DIR/device<rank>.", "DIR")] = None
    log_every: Annotated[
        int | None, option("--log-every", "Say the loss after every N steps, on stderr.", "N", natural)
    ] = None
    virtual: Annotated[bool, option("--virtual", "Sleep instead of computing: any number of ranks on a few cores.")] = (
        False
    )
    stragglers: Stragglers = None
    slowdown: Slowdown = None
    slow_link: SlowLinks = None
    measure: Annotated[bool, option("--measure", "Clock every instruction, and say why the prediction was off.")] = (
        False
    )
    trace: Annotated[
        Path | None, option("--trace", "Write the step as predicted and as measured for Perfetto.", "FILE")
    ] = None
    out: Annotated[Path | None, option("--out", "Write the result as JSON.", "FILE")] = None
    trust_file: TrustFile = False

    def check(self) -> None:
        """Raise InputError where options mean nothing together."""
        if not self.virtual and (self.stragglers is not None or self.slowdown is not None or self.slow_link):
            raise InputError("slow ranks and links were given without --virtual, which alone can make some; add it")
        self.slow()
        top = f"--top {self.top}"
        if self.dry_run and (self.virtual or self.top is not None):
            other = "--virtual" if self.virtual else top
            raise InputError(f"--dry-run starts nothing, and {other} starts runs; leave one of them out")
        if self.top is not None and self.trace is not None:
            raise InputError("--trace draws one plan, --top runs several; leave one of them out")
        if self.top is not None and self.save is not None:
            raise InputError("--save keeps one training, --top runs several; leave one of them out")
        if self.log_every is not None and (self.virtual or self.dry_run or self.top is not None):
            other = "--virtual" if self.virtual else "--dry-run" if self.dry_run else top
            raise InputError(
                f"--log-every says the losses of one run, and {other} trains none to tell; leave one of them out"
            )
        given = [name for name in FOR_REAL if getattr(self, name)]
        if self.virtual and given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise InputError(f"--virtual computes nothing: {names} would do nothing; leave them out")

    def slow(self) -> SlowOptions:
        """Ranks and links that are to be slow."""
        from planner.cli.reliability import SlowOptions

        return SlowOptions.read(self.stragglers, self.slowdown, self.slow_link or (), seed=self.seed or 0)

    def options(self) -> ExecuteOptions:
        """Options of the run, with defaults for those not given."""
        from planner.execution.options import ExecuteOptions

        given: dict[str, Any] = {one.name: getattr(self, one.name, None) for one in fields(ExecuteOptions)}
        given |= {"timeout_s": self.timeout, "join_timeout_s": self.join_timeout}
        return ExecuteOptions(**{name: value for name, value in given.items() if value is not None})


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
    from planner.execution.launch.rank_log import loss_monitor
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
