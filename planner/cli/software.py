"""`meshwright software`."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.options import tells
from planner.cli.terminal import Terminal

software = typer.Typer(rich_markup_mode=None, invoke_without_command=True, add_completion=False)


@software.callback()
@tells
def _software(context: typer.Context, terminal: Terminal) -> None:
    """List and show the software that plans are predicted for.

    \b
    Example:
      meshwright software
      meshwright software show megatron_core
    """
    if context.invoked_subcommand is None:
        list_software(terminal)


def list_software(terminal: Terminal) -> None:
    """List the software that --software takes, and where each is what plans are predicted for without it.

    \b
    Example:
      meshwright software list --json
    """
    from planner.planning.documents import software_document, software_names

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


software.command("list")(tells(list_software))


@software.command()
@tells
def show(
    terminal: Terminal, name: Annotated[str, typer.Argument(metavar="NAME", help="A name of meshwright software list.")]
) -> None:
    """Show what a software makes of kernels, launches, messages and memory, each number with its source.

    \b
    Example:
      meshwright software show megatron_core
    """
    from planner.planning.documents import software_document, software_rows

    found, rows = software_document(name), software_rows(name)
    if terminal.json:
        terminal.document(found | {"rows": rows})
    elif terminal.quiet:
        for row in rows:
            terminal.line(f"{row['field']}\t{row['value']}\t{row['source']}")
    else:
        from planner.cli.catalogue_tables import software_details

        terminal.show(*software_details(found, rows))
