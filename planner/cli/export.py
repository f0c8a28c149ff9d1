"""`meshwright export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.options import DebugFlag, JsonFlag, QuietFlag, TrustFile, check_out
from planner.cli.terminal import Terminal


class Format(StrEnum):
    """Strategy files that can be written."""

    MINDSPORE = "mindspore"
    MESHWRIGHT = "meshwright"


def export(
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file, of either format.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.json", help="Where to write.")],
    to: Annotated[Format, typer.Option("--to", help="The format to write.")] = Format.MINDSPORE,
    trust_file: TrustFile = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Write a plan as MindSpore's JSON strategy file, or such a file as a strategy file again.

    \b
    Example:
      meshwright export strategy.json --out mindspore.json
      meshwright simulate mindspore.json
    """
    from planner.lowering.checked import captured
    from planner.plans.file import export_mindspore, read_strategy, write_plan
    from planner.plans.loading import naming

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    check_out("--out", out, (strategy,))
    found = read_strategy(strategy)
    if to is Format.MESHWRIGHT:
        written = write_plan(found.plan, out, found.prediction)
    else:
        with terminal.working("capturing the network"), naming(strategy):
            graph = captured(found.plan)
        written = export_mindspore(found.plan, graph, out, found.prediction)
    if terminal.json:
        terminal.document({"strategy_file": str(written), "format": to.value})
    else:
        terminal.line(str(written))
