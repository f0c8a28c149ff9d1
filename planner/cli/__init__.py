"""The `meshwright` command; nothing here but arguments and rendering."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit."""
    try:
        from planner.cli.app import app
    except KeyboardInterrupt:  # before there is a command that could notice
        sys.stderr.write("meshwright: interrupted\n")
        raise SystemExit(130) from None

    app(prog_name="meshwright")
