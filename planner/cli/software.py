"""`meshwright software`."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.options import DebugFlag, JsonFlag, QuietFlag
from planner.cli.terminal import Terminal

software = typer.Typer(rich_markup_mode=None, invoke_without_command=True, add_completion=False)


@software.callback()
def _software(
    context: typer.Context, as_json: JsonFlag = False, quiet: QuietFlag = False, debug: DebugFlag = False
) -> None:
    """List and show the software that plans are predicted for.

    \b
    Example:
      meshwright software
      meshwright software show megatron_core
    """
    if context.invoked_subcommand is None:
        list_software(as_json=as_json, quiet=quiet, debug=debug)


@software.command("list")
def list_software(as_json: JsonFlag = False, quiet: QuietFlag = False, debug: DebugFlag = False) -> None:
    """List the software that --software takes, and where each is what plans are predicted for without it.

    \b
    Example:
      meshwright software list --json
    """
    from planner.planning.documents import software_document, software_names

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    if terminal.quiet and not terminal.json:
        for name in software_names():
            terminal.line(name)
        return
    found = [software_document(name) for name in software_names()]
    if terminal.json:
        terminal.document({"software": found})
    else:
        from planner.cli.catalogue_tables import software_table

        terminal.show(software_table(found))


@software.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of meshwright software list.")],
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show what a software makes of kernels, launches, messages and memory, each number with its source.

    \b
    Example:
      meshwright software show megatron_core
    """
    from planner.planning.documents import software_document, software_rows

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    found, rows = software_document(name), software_rows(name)
    if terminal.json:
        terminal.document(found | {"rows": rows})
    elif terminal.quiet:
        for row in rows:
            terminal.line(f"{row['field']}\t{row['value']}\t{row['source']}")
    else:
        from planner.cli.catalogue_tables import software_details

        terminal.show(*software_details(found, rows))
