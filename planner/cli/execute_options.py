"""What `meshwright execute` may be given."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from planner.cli.options import (
    Slowdown,
    SlowLinks,
    Stragglers,
    TrustFile,
    natural,
    natural_or_zero,
    option,
    rate,
    seconds,
)
from planner.plans.request import Precision
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.cli.reliability import SlowOptions
    from planner.execution.options import ExecuteOptions

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
        int | None,
        option("--processes", "Local processes; default: the plan's devices.", "N", natural),
    ] = None
    steps: Annotated[
        int | None,
        option("--steps", "Training steps [10; virtual ones 3].", "N", natural),
    ] = None
    data: Annotated[str | None, option("--data", "Default: a real data set that fits the network.", "DATASET")] = None
    verify: Annotated[bool, option("--verify", "Train again in one process; exit code 4 if the losses differ.")] = False
    precision: Annotated[Precision | None, option("--precision", "Default: the plan's.")] = None
    seed: Annotated[int | None, option("--seed", "Seed of parameters and data [0].", "N", natural_or_zero)] = None
    learning_rate: Annotated[float | None, option("--learning-rate", "Default: the optimizer's.", "X", rate)] = None
    device: Annotated[Device | None, option("--device", "Default: the best there is.")] = None
    timeout: Annotated[
        float | None,
        option("--timeout", "How long a rank may keep the others waiting [60].", "SECONDS", seconds),
    ] = None
    top: Annotated[
        int | None,
        option("--top", "Run the best K plans, and compare their order.", "K", natural),
    ] = None
    join_timeout: Annotated[
        float | None,
        option("--join-timeout", "How long to wait for all processes [300].", "SECONDS", seconds),
    ] = None
    save: Annotated[Path | None, option("--save", "Save a checkpoint in this folder at the end.", "DIR")] = None
    save_every: Annotated[int | None, option("--save-every", "And after every N steps.", "N", natural)] = None
    resume: Annotated[
        Path | None,
        option("--resume", "Go on from a checkpoint, or the newest in a folder of them.", "DIR"),
    ] = None
    force: Annotated[bool, option("--force", "Start even if the prediction says that memory does not suffice.")] = False
    dry_run: Annotated[bool, option("--dry-run", "Only tell what each rank would do; start nothing.")] = False
    log_dir: Annotated[Path | None, option("--log-dir", "Keep what every rank says in DIR/device<rank>.", "DIR")] = None
    log_every: Annotated[
        int | None,
        option("--log-every", "Say the loss after every N steps, on stderr.", "N", natural),
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
        Path | None,
        option("--trace", "Write the step as predicted and as measured for Perfetto.", "FILE"),
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
        """What to run and how, with defaults for what was not given."""
        from planner.execution.options import ExecuteOptions

        given: dict[str, Any] = {one.name: getattr(self, one.name, None) for one in fields(ExecuteOptions)}
        given |= {"timeout_s": self.timeout, "join_timeout_s": self.join_timeout}
        return ExecuteOptions(**{name: value for name, value in given.items() if value is not None})
