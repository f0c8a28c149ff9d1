"""`meshwright validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import DebugFlag, JsonFlag, QuietFlag
from simulator.errors import UnsupportedError


def validate(
    measurements: Annotated[list[Path], typer.Argument(metavar="MEASUREMENTS.csv...", help="Measured training runs.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The predictions, one row each.")] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Predict measured runs (not supported yet).

    \b
    Example:
      meshwright validate runs.csv --out predictions.csv
    """
    names = ", ".join(str(path) for path in measurements)
    raise UnsupportedError(
        f"validate ({names}) is not supported yet: predicting runs from CSV needs pipeline and expert parallelism; "
        "use `meshwright plan --pin …` to predict one configuration"
    )
