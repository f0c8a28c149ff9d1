"""`meshwright execute`."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import (
    DebugFlag,
    JsonFlag,
    Precision,
    QuietFlag,
    check_out,
    natural,
    natural_or_zero,
    rate,
    read_shares,
    seconds,
)
from planner.cli.simulate import Slowdown, SlowLinks, Stragglers
from planner.cli.terminal import Terminal
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.execution.run import ExecuteOptions, ExecutionReport


STEPS, VIRTUAL_STEPS = 10, 3


class Device(StrEnum):
    """What to run on."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


def execute(
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")],
    processes: Annotated[
        int | None,
        typer.Option("--processes", parser=natural, metavar="N", help="Local processes; default: the plan's devices."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", parser=natural, metavar="N", help="Training steps [10; virtual ones 3]."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="DATASET", help="Default: a real data set that fits the network.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Train again in one process; exit code 4 if the losses differ.")
    ] = False,
    precision: Annotated[Precision | None, typer.Option("--precision", help="Default: the plan's.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", parser=natural_or_zero, metavar="N", help="Seed of parameters and data [0].")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", parser=rate, metavar="X", help="Default: the optimizer's.")
    ] = None,
    device: Annotated[Device | None, typer.Option("--device", help="Default: the best there is.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", parser=seconds, metavar="SECONDS", help="How long a rank may keep the others waiting [60]."
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option("--top", parser=natural, metavar="K", help="Run the best K plans, and compare their order."),
    ] = None,
    join_timeout: Annotated[
        float | None,
        typer.Option(
            "--join-timeout", parser=seconds, metavar="SECONDS", help="How long to wait for all processes [300]."
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="DIR", help="Save a checkpoint in this folder at the end.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option("--save-every", parser=natural, metavar="N", help="And after every N steps.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="DIR", help="Go on from a checkpoint, or the newest in a folder of them."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start even if the prediction says that memory does not suffice.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what each rank would do; start nothing.")
    ] = False,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", metavar="DIR", help="Keep what every rank says in DIR/device<rank>.")
    ] = None,
    log_every: Annotated[
        int | None,
        typer.Option("--log-every", parser=natural, metavar="N", help="Say the loss after every N steps, on stderr."),
    ] = None,
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Sleep instead of computing: any number of ranks on a few cores.")
    ] = False,
    stragglers: Stragglers = None,
    slowdown: Slowdown = None,
    slow_link: SlowLinks = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Clock every instruction, and say why the prediction was off.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write the step as predicted and as measured for Perfetto."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the result as JSON.")] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
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
    from planner.execution.run import DEFAULT_JOIN_TIMEOUT_S, DEFAULT_TIMEOUT_S, ExecuteOptions

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    if out is not None:
        check_out("--out", out, (strategy,))
    if trace is not None:
        check_out("--trace", trace, (strategy,))
    options = ExecuteOptions(
        strategy=strategy,
        processes=processes,
        steps=STEPS if steps is None else steps,
        data=data,
        verify=verify,
        precision=None if precision is None else str(precision),
        seed=seed,
        learning_rate=learning_rate,
        device=None if device is None else str(device),
        timeout_s=DEFAULT_TIMEOUT_S if timeout is None else timeout,
        join_timeout_s=DEFAULT_JOIN_TIMEOUT_S if join_timeout is None else join_timeout,
        save=save,
        save_every=save_every,
        resume=resume,
        force=force,
        log_dir=log_dir,
        measure=measure,
        trace=trace,
    )
    links = read_shares(slow_link or [])
    if (stragglers is not None or slowdown is not None or links) and not virtual:
        raise InputError("slow ranks and links were given without --virtual, which alone can make some; add it")
    if virtual:
        if top is not None or measure or trace is not None or verify:
            raise InputError("--virtual computes nothing to verify, measure or compare; leave the other options out")
        _run_virtually(terminal, options, steps, stragglers or 0, slowdown, links, out)
    elif top is not None:
        from planner.cli.shoot_out import run_shoot_out

        if trace is not None:
            raise InputError("--trace draws one plan, --top runs several; leave one of them out")
        run_shoot_out(terminal, strategy, top, options, out)
    elif dry_run:
        _rehearse(terminal, options, out)
    else:
        _train(terminal, options, log_every, out)


def _run_virtually(
    terminal: Terminal,
    options: ExecuteOptions,
    steps: int | None,
    stragglers: int,
    slowdown: float | None,
    links: dict[str, float],
    out: Path | None,
) -> None:
    """Let the ranks sleep instead of computing."""
    from planner.cli.reliability import SLOWDOWN
    from planner.cli.virtual import run_virtually
    from planner.execution.virtual.devices import VirtualOptions

    slow = VirtualOptions(
        steps=VIRTUAL_STEPS if steps is None else steps,
        slow_ranks=stragglers,
        slowdown=SLOWDOWN if slowdown is None else slowdown,
        slow_links=links,
        seed=options.seed or 0,
    )
    run_virtually(terminal, Path(options.strategy), slow, out)


def _train(terminal: Terminal, options: ExecuteOptions, log_every: int | None, out: Path | None) -> None:
    """Train, say losses meanwhile where that is asked for, and show what was measured beside the prediction."""
    from json import dumps

    from planner.execution.launch.progress import loss_monitor
    from planner.execution.run import execute as run
    from simulator.whole_file import write_whole

    monitor = None if log_every is None else loss_monitor(terminal.note, options.steps, log_every)
    with terminal.working(f"running {options.strategy}") as say:
        report = run(options, say=say, monitor=monitor)
    if report.rank:
        return
    document = report_document(report)
    if out is not None:
        write_whole(out, dumps(document, indent=2) + "\n")
    if terminal.json:
        terminal.document(document)
    elif terminal.quiet:
        terminal.line(f"{report.measured_step_time_s.median!r}")
    else:
        from planner.cli.tables import execution_report

        terminal.show(*execution_report(report, out))
        if report.comparison is not None:
            from planner.cli.comparison_tables import comparison_report

            trace = None if options.trace is None else Path(options.trace)
            terminal.show(*comparison_report(report.comparison, report.predicted_step_time_s, trace))


def _rehearse(terminal: Terminal, options: ExecuteOptions, out: Path | None) -> None:
    """Tell what each rank would do."""
    from dataclasses import asdict
    from json import dumps

    from planner.execution.run import rehearse
    from simulator.whole_file import write_whole

    with terminal.working(f"looking at {options.strategy}") as say:
        found = rehearse(options, say)
    document = _finite(asdict(found))
    if out is not None:
        write_whole(out, dumps(document, indent=2) + "\n")
    if terminal.json:
        terminal.document(document)
    elif terminal.quiet:
        terminal.line(found.refused or "")
    else:
        from planner.cli.dry_run_tables import dry_run_report

        terminal.show(*dry_run_report(found))


def report_document(report: ExecutionReport) -> dict[str, Any]:
    """The document of ``execute --json``."""
    from dataclasses import asdict

    document: dict[str, Any] = _finite(asdict(report))
    return document


def _finite(value: Any) -> Any:
    """Write null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
