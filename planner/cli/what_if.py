"""`meshwright what-if`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import (
    AttentionOption,
    DebugFlag,
    GlobalBatch,
    JsonFlag,
    OptimizerOption,
    ParallelMode,
    Pins,
    PrecisionOption,
    QuietFlag,
    SearchMode,
    SequenceLength,
    SoftwareOption,
    check_out,
    natural,
    read_device_counts,
    read_pins,
)
from planner.cli.terminal import Terminal
from simulator.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from planner.what_if import WhatIfOptions, WhatIfRow


def what_if(
    network: Annotated[str, typer.Argument(help="zoo:NAME, hf:PATH or py:module:factory.", metavar="NETWORK")],
    hardware: Annotated[str, typer.Option("--hw", metavar="PROFILE[,PROFILE...]", help="Names or paths of profiles.")],
    devices: Annotated[
        str, typer.Option("--devices", metavar="8,16,...,4096", help="Device counts; an ellipsis continues them.")
    ],
    global_batch: GlobalBatch = None,
    batch_per_device: Annotated[
        int | None,
        typer.Option("--batch-per-device", parser=natural, metavar="N", help="Samples of one step for each device."),
    ] = None,
    sequence_length: SequenceLength = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = None,
    search_mode: Annotated[SearchMode, typer.Option("--search-mode")] = SearchMode.DYNAMIC_PROGRAMMING,
    parallel_mode: Annotated[ParallelMode, typer.Option("--parallel-mode")] = ParallelMode.AUTO_PARALLEL,
    pins: Pins = None,
    software: SoftwareOption = None,
    attention: AttentionOption = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", parser=natural, metavar="N", help="Plans made side by side; all cores by default."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="dask://HOST:PORT", help="Plan on the workers of a Dask scheduler."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="Write a page with pictures.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Plan anew what an interrupted run has left.")] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Find the best plan at each device count.

    With --global-batch every count trains the same batch (strong scaling); else the batch grows with the
    devices (weak scaling), by --batch-per-device. Scaling efficiency is throughput per device against the
    smallest count that has a plan, on the same profile.

    \b
    Example: one network on two clusters, from one node to 512
      meshwright what-if zoo:llama2-7b --hw dgx-a100,dgx-h100 --devices 8,16,...,4096 --out report.html

    With --out, points are kept in FILE.html.partial.jsonl until the page is written: after an
    interruption the same command goes on from there.

    Exit code 3: no plan fits at any count.
    """
    from planner.what_if import WhatIfOptions

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    names = tuple(name.strip() for name in hardware.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise InputError(f"--hw {hardware!r}: a profile is empty or named twice; write for example dgx-a100,dgx-h100")
    options = WhatIfOptions(
        network=network,
        hardware=names,
        device_counts=read_device_counts(devices),
        global_batch=global_batch,
        batch_per_device=batch_per_device,
        sequence_length=sequence_length,
        precision=None if precision is None else str(precision),
        optimizer=None if optimizer is None else str(optimizer),
        search_mode=str(search_mode),
        parallel_mode=str(parallel_mode),
        pins=read_pins(pins or ()),
        software=software or "",
        attention=attention or "",
    )
    if jobs is not None and cluster is not None:
        raise InputError(f"--jobs {jobs} and --cluster {cluster!r}: a cluster plans on all of its workers; give one")
    if out is not None:
        check_out("--out", out, names)
    elif fresh:
        raise InputError("--fresh forgets what is kept beside the report; name the report with --out FILE.html")
    rows = _rows(terminal, options, _Place(jobs=jobs, cluster=cluster, out=out, fresh=fresh))
    _finish(terminal, options, rows, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the points are planned and kept."""

    jobs: int | None
    cluster: str | None
    out: Path | None
    fresh: bool


def _rows(terminal: Terminal, options: WhatIfOptions, place: _Place) -> tuple[WhatIfRow, ...]:
    from planner.what_if import prepare, run
    from planner.what_if.journal import journal_of, read
    from planner.what_if.processes import usable_cores

    journal = None if place.out is None else journal_of(place.out)
    sweep = prepare(options, journal=journal, fresh=place.fresh)
    for text in sweep.notes:
        terminal.note(text)
    notes: list[str] = []
    try:
        with terminal.counting("planning", len(sweep.requests)) as advance:
            jobs = place.jobs or usable_cores()
            return run(sweep, jobs=jobs, cluster=place.cluster, advance=advance, note=notes.append)
    except KeyboardInterrupt:
        if journal is not None:
            # The interrupt may come after a point is written and before it is counted: the file knows.
            rows = read(journal, sweep.requests, sweep.graph).rows
            kept = f"{len(rows)} of {len(sweep.requests)} points"
            terminal.note(f"{kept} are kept in {journal}; the same command goes on from there")
        raise
    finally:
        for text in notes:
            terminal.note(text)


def _finish(terminal: Terminal, options: WhatIfOptions, rows: tuple[WhatIfRow, ...], out: Path | None) -> None:
    from planner.what_if import batch_rule, row_document

    rule, _ = batch_rule(options)
    if out is not None:
        from planner.what_if.journal import discard, journal_of
        from reports.what_if import write_what_if_page

        write_what_if_page(rows, network=options.network, batch_rule=rule, path=out)
        journal = journal_of(out)
        if journal is not None:
            discard(journal)
    report = None if out is None else str(out)
    if terminal.json:
        terminal.document(
            {
                "network": options.network,
                "batch_rule": rule,
                "rows": [row_document(row) for row in rows],
                "report": report,
            }
        )
    elif terminal.quiet:
        if report:
            terminal.line(report)
    else:
        from planner.cli.tables import what_if_report

        terminal.show(*what_if_report(rows, rule, report))
    if all(row.best is None for row in rows):
        raise InfeasibleError(f"no plan fits at any device count; the smallest: {rows[0].reason}")
