"""`meshwright execute`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.execute_options import (
    Data,
    DeviceKind,
    DryRunFlag,
    ForceFlag,
    JoinTimeout,
    LearningRate,
    LogEvery,
    LogFolder,
    MeasureFlag,
    OtherPrecision,
    OutFile,
    Processes,
    ResumeFrom,
    RunTrace,
    SaveEvery,
    SaveFolder,
    Seed,
    Steps,
    Strategy,
    Timeout,
    TopPlans,
    VerifyFlag,
    VirtualFlag,
)
from planner.cli.options import DebugFlag, JsonFlag, QuietFlag, check_out, read_shares
from planner.cli.simulate import Slowdown, SlowLinks, Stragglers
from planner.cli.terminal import Terminal
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.execution.run import ExecuteOptions, ExecutionReport


STEPS, VIRTUAL_STEPS = 10, 3


def execute(
    strategy: Strategy,
    processes: Processes = None,
    steps: Steps = None,
    data: Data = None,
    verify: VerifyFlag = False,
    precision: OtherPrecision = None,
    seed: Seed = None,
    learning_rate: LearningRate = None,
    device: DeviceKind = None,
    timeout: Timeout = None,
    top: TopPlans = None,
    join_timeout: JoinTimeout = None,
    save: SaveFolder = None,
    save_every: SaveEvery = None,
    resume: ResumeFrom = None,
    force: ForceFlag = False,
    dry_run: DryRunFlag = False,
    log_dir: LogFolder = None,
    log_every: LogEvery = None,
    virtual: VirtualFlag = False,
    stragglers: Stragglers = None,
    slowdown: Slowdown = None,
    slow_link: SlowLinks = None,
    measure: MeasureFlag = False,
    trace: RunTrace = None,
    out: OutFile = None,
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
    for name, file in (("--out", out), ("--trace", trace)):
        if file is not None:
            check_out(name, file, (strategy,))
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
    slow = _slow(stragglers, slowdown, read_shares(slow_link or []), virtual=virtual)
    _check_apart(options, top, virtual=virtual, dry_run=dry_run)
    if log_every is not None and (virtual or dry_run or top is not None):
        other = "--virtual" if virtual else "--dry-run" if dry_run else f"--top {top}"
        raise InputError(
            f"--log-every says the losses of one run, and {other} trains none to tell; leave one of them out"
        )
    if slow is not None:
        _run_virtually(terminal, options, steps, slow, out)
    elif top is not None:
        from planner.cli.shoot_out import run_shoot_out

        run_shoot_out(terminal, strategy, top, options, out)
    elif dry_run:
        _rehearse(terminal, options, out)
    else:
        _train(terminal, options, log_every, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slow:
    """What is slow of virtual devices: how many ranks and how much, and levels with the shares of their links."""

    ranks: int
    slowdown: float
    links: dict[str, float]


def _slow(stragglers: int | None, slowdown: float | None, links: dict[str, float], *, virtual: bool) -> _Slow | None:
    """Read what is to be slow, which only virtual devices can be; None without them."""
    from planner.cli.reliability import SLOWDOWN

    if virtual and slowdown is not None and stragglers is None:
        raise InputError("--slowdown was given without --stragglers; add it")
    if virtual:
        return _Slow(ranks=stragglers or 0, slowdown=SLOWDOWN if slowdown is None else slowdown, links=links)
    if stragglers is not None or slowdown is not None or links:
        raise InputError("slow ranks and links were given without --virtual, which alone can make some; add it")
    return None


def _check_apart(options: ExecuteOptions, top: int | None, *, virtual: bool, dry_run: bool) -> None:
    """Refuse options that mean nothing together."""
    if dry_run and (virtual or top is not None):
        other = "--virtual" if virtual else f"--top {top}"
        raise InputError(f"--dry-run starts nothing, and {other} starts runs; leave one of them out")
    if virtual and (top is not None or options.measure or options.trace is not None or options.verify):
        raise InputError("--virtual computes nothing to verify, measure or compare; leave the other options out")
    if top is not None and options.trace is not None:
        raise InputError("--trace draws one plan, --top runs several; leave one of them out")


def _run_virtually(
    terminal: Terminal, options: ExecuteOptions, steps: int | None, slow: _Slow, out: Path | None
) -> None:
    """Let the ranks sleep instead of computing."""
    from planner.cli.virtual import run_virtually
    from planner.execution.virtual.devices import VirtualOptions

    asked = VirtualOptions(
        steps=VIRTUAL_STEPS if steps is None else steps,
        slow_ranks=slow.ranks,
        slowdown=slow.slowdown,
        slow_links=slow.links,
        seed=options.seed or 0,
    )
    run_virtually(terminal, Path(options.strategy), asked, out)


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
