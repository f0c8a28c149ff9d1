"""`meshwright what-if`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import (
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
    sequence_length: SequenceLength = None,
    precision: PrecisionOption = None,
    optimizer: OptimizerOption = None,
    search_mode: Annotated[SearchMode, typer.Option("--search-mode")] = SearchMode.DYNAMIC_PROGRAMMING,
    parallel_mode: Annotated[ParallelMode, typer.Option("--parallel-mode")] = ParallelMode.AUTO_PARALLEL,
    pins: Pins = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", parser=natural, metavar="N", help="Plans made side by side; all cores by default."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.html", help="Write a page with pictures.")] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Find the best plan at each device count.

    With --global-batch every count trains the same batch; without, the batch grows with the devices.

    \b
    Example: one network on two clusters, from one node to 512
      meshwright what-if zoo:llama2-7b --hw dgx-a100,dgx-h100 --devices 8,16,...,4096 --out report.html

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
        sequence_length=sequence_length,
        precision=None if precision is None else str(precision),
        optimizer=None if optimizer is None else str(optimizer),
        search_mode=str(search_mode),
        parallel_mode=str(parallel_mode),
        pins=read_pins(pins or ()),
    )
    if out is not None:
        check_out("--out", out, names)
    rows = _rows(terminal, options, processes or os.cpu_count() or 1)
    _finish(terminal, options, rows, out)


def _rows(terminal: Terminal, options: WhatIfOptions, processes: int) -> tuple[WhatIfRow, ...]:
    from planner.what_if import finish_rows, plan_rows

    found = []
    with terminal.counting("planning", len(options.hardware) * len(options.device_counts)) as advance:
        for row in plan_rows(options, processes=processes):
            found.append(row)
            advance()
    return finish_rows(found)


def _finish(terminal: Terminal, options: WhatIfOptions, rows: tuple[WhatIfRow, ...], out: Path | None) -> None:
    from planner.what_if import batch_rule, row_document

    rule, _ = batch_rule(options)
    if out is not None:
        from reports.what_if import write_what_if_page

        write_what_if_page(rows, network=options.network, batch_rule=rule, path=out)
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
