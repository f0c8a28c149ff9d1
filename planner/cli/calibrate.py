"""`meshwright calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.execute import Device
from planner.cli.options import DebugFlag, JsonFlag, QuietFlag, natural


def calibrate(
    device: Annotated[Device, typer.Option("--device", help="What to measure.")] = Device.CPU,
    processes: Annotated[
        int, typer.Option("--processes", parser=natural, metavar="N", help="Largest number of processes.")
    ] = 2,
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
    raise NotImplementedError
