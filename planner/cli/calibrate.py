"""`meshwright calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.execute import Device
from planner.cli.options import DebugFlag, JsonFlag, QuietFlag, natural
from planner.cli.terminal import Terminal


def calibrate(
    device: Annotated[Device, typer.Option("--device", help="What to measure.")] = Device.CPU,
    processes: Annotated[
        int, typer.Option("--processes", parser=natural, metavar="N", help="Collectives among 2, 4, … up to N.")
    ] = 4,
    out: Annotated[Path, typer.Option("--out", metavar="PROFILE.yaml", help="The profile to write.")] = Path(
        "local.yaml"
    ),
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Measure this machine and write its hardware profile.

    \b
    Example: measure two processes on this machine's cores, then plan for them
      meshwright calibrate --device cpu --processes 2 --out local.yaml
      meshwright plan zoo:mlp --hw local.yaml --devices 2
    """
    from planner.documents import profile_document
    from simulator.calibration.calibrate import CalibrateOptions
    from simulator.calibration.calibrate import calibrate as measure
    from simulator.profile_file import check_content
    from simulator.whole_file import check_writable

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    check_writable(out)
    with terminal.filling("measuring") as progress:
        content = measure(CalibrateOptions(device=str(device), processes=processes, out=out), progress)
    hardware = check_content(content, str(out))[1]
    if terminal.json:
        rows = [{"field": row.field, "value": row.value, "source": row.source} for row in hardware.rows]
        terminal.document({**profile_document(hardware), "file": str(out), "rows": rows})
    elif terminal.quiet:
        terminal.line(str(out))
    else:
        from planner.cli.tables import calibration_report

        terminal.show(*calibration_report(hardware, str(out)))
