"""`meshwright what-if`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import (
    RequestOptions,
    check_out,
    natural,
    option,
    read_device_counts,
    read_profiles,
    read_settings,
    takes,
)
from planner.cli.terminal import Terminal
from simulator.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from planner.what_if import WhatIfOptions, WhatIfRow


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfArguments(RequestOptions):
    """Arguments and options, None where not given."""

    network: Annotated[
        str,
        typer.Argument(help="zoo:NAME, hf:PATH, timm:NAME, tv:NAME, py:module:factory or pt2:FILE.", metavar="NETWORK"),
    ]
    hardware: Annotated[str, option("--hw", "Names or paths of profiles.", "PROFILE[,PROFILE...]")]
    devices: Annotated[str, option("--devices", "Device counts; an ellipsis continues them.", "8,16,...,4096")]
    batch_per_device: Annotated[
        int | None, option("--batch-per-device", "Samples of one step for each device.", "N", natural)
    ] = None
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            "Another axis: batch, seq_len, precision, a pin (tp), or a number of the profile (network).",
            "KEY=V1,V2,...",
        ),
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", "-j", parser=natural, metavar="N", help="Plans made side by side; all cores by default."
        ),
    ] = None
    cluster: Annotated[
        str | None, option("--cluster", "Plan on the workers of a Dask scheduler.", "dask://HOST:PORT")
    ] = None
    out: Annotated[Path | None, option("--out", "Write a page with pictures.", "FILE.html")] = None
    fresh: Annotated[bool, option("--fresh", "Plan anew what an interrupted run has left.")] = False

    def check(self) -> None:
        """Raise InputError where options mean nothing together, or the report cannot be written."""
        if self.jobs is not None and self.cluster is not None:
            raise InputError(
                f"--jobs {self.jobs} and --cluster {self.cluster!r}: a cluster plans on all of its workers; give one"
            )
        if self.out is not None:
            check_out("--out", self.out, read_profiles(self.hardware))
        elif self.fresh:
            raise InputError("--fresh forgets what is kept beside the report; name the report with --out FILE.html")

    def options(self) -> WhatIfOptions:
        """What to plan."""
        from planner.what_if import WhatIfOptions

        return WhatIfOptions(
            **self.asked(),
            hardware=read_profiles(self.hardware),
            device_counts=read_device_counts(self.devices),
            batch_per_device=self.batch_per_device,
            settings=read_settings(self.settings or ()),
        )


@takes(WhatIfArguments)
def what_if(given: WhatIfArguments, terminal: Terminal) -> None:
    """Find the best plan at each device count.

    With --global-batch every count trains the same batch (strong scaling); else the batch grows with the
    devices (weak scaling), by --batch-per-device. Scaling efficiency is throughput per device against the
    smallest count that has a plan, on the same profile.

    \b
    Example: one network on two clusters, from one node to 512
      meshwright what-if zoo:llama2-7b --hw dgx-a100,dgx-h100 --devices 8,16,...,4096 --out report.html

    --set adds axes; every combination is planned, and the page has a picture for each axis:
      meshwright what-if zoo:llama2-7b --hw dgx-h100 --devices 64 --set network=200Gb,400Gb,800Gb --set batch=256,512

    With --out, points are kept in FILE.html.partial.jsonl until the page is written: after an
    interruption the same command goes on from there.

    Exit code 3: no plan fits at any count.
    """
    options = given.options()
    given.check()
    _finish(terminal, options, _rows(terminal, options, given), given.out)


def _rows(terminal: Terminal, options: WhatIfOptions, given: WhatIfArguments) -> tuple[WhatIfRow, ...]:
    from planner.what_if import prepare, run
    from planner.what_if.journal import discard, journal_of, read
    from planner.what_if.processes import usable_cores
    from simulator.calibration.process import kill_stopped_children_until_exit

    journal = None if given.out is None else journal_of(given.out)
    sweep = prepare(options, journal=journal, fresh=given.fresh)
    for text in sweep.notes:
        terminal.note(text)
    notes: list[str] = []
    try:
        with terminal.counting("planning", len(sweep.requests)) as advance:
            jobs = given.jobs or usable_cores()
            if jobs > 1 and given.cluster is None:
                kill_stopped_children_until_exit()
            return run(sweep, jobs=jobs, cluster=given.cluster, advance=advance, note=notes.append)
    except KeyboardInterrupt:
        if journal is not None:
            # The interrupt may come after a point is written and before it is counted: the file knows.
            rows = read(journal, sweep.requests, sweep.graphs).rows
            kept = f"{len(rows)} of {len(sweep.requests)} points"
            if rows:
                terminal.note(f"{kept} are kept in {journal}; the same command goes on from there")
            else:
                discard(journal)
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
    from planner.cli.plan_tables import what_if_report

    report = None if out is None else str(out)
    documents = [row_document(row) for row in rows] if terminal.json else []
    document = {"network": options.network, "batch_rule": rule, "rows": documents, "report": report}
    terminal.result(document, report, lambda: what_if_report(rows, rule, report))
    if all(row.best is None for row in rows):
        raise InfeasibleError(f"no plan fits at any device count; the smallest: {rows[0].reason}")
