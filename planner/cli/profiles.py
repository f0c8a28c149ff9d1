"""`meshwright profiles`."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.cli.options import DebugFlag, JsonFlag, QuietFlag
from planner.cli.terminal import Terminal

profiles = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


@profiles.callback()
def _profiles(
    context: typer.Context, as_json: JsonFlag = False, quiet: QuietFlag = False, debug: DebugFlag = False
) -> None:
    """List, show and check hardware profiles.

    \b
    Example:
      meshwright profiles
      meshwright profiles show dgx-a100
      meshwright profiles check my-cluster.yaml
    """
    if context.invoked_subcommand is None:
        list_profiles(as_json=as_json, quiet=quiet, debug=debug)


@profiles.command("list")
def list_profiles(as_json: JsonFlag = False, quiet: QuietFlag = False, debug: DebugFlag = False) -> None:
    """List the profiles that are built in.

    \b
    Example:
      meshwright profiles list --json
    """
    from planner.documents import profile_document
    from simulator.hardware import load_profile, profile_names

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    if terminal.quiet and not terminal.json:
        for name in profile_names():
            terminal.line(name)
        return
    found = [load_profile(name) for name in profile_names()]
    if terminal.json:
        terminal.document({"profiles": [profile_document(hardware) for hardware in found]})
    else:
        from planner.cli.tables import profile_table

        terminal.show(profile_table(found))


@profiles.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A profile's name or the path of one.")],
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show every number of a profile with its source.

    \b
    Example:
      meshwright profiles show dgx-a100
    """
    from planner.documents import profile_document
    from simulator.hardware import describe, load_profile

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    hardware = load_profile(name)
    if terminal.json:
        rows = [{"field": row.field, "value": row.value, "source": row.source} for row in describe(hardware)]
        terminal.document({**profile_document(hardware), "rows": rows})
    elif terminal.quiet:
        for row in describe(hardware):
            terminal.line(f"{row.field}\t{row.value}\t{row.source}")
    else:
        from planner.cli.tables import profile_details

        terminal.show(*profile_details(hardware))


@profiles.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The YAML file of a profile.")],
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Check the YAML file of a profile; the error names the field that is wrong.

    \b
    Example:
      meshwright profiles check my-cluster.yaml
    """
    from planner.documents import profile_document
    from simulator.hardware import check_profile

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    hardware = check_profile(file)
    if terminal.json:
        terminal.document({**profile_document(hardware), "file": file, "valid": True})
    elif not terminal.quiet:
        terminal.line(f"{file}: profile {hardware.name} is valid ({len(hardware.rows)} numbers with their sources)")
