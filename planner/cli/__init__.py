"""The `meshwright` command; nothing here but arguments and rendering."""

from __future__ import annotations


def main() -> None:
    """Run the command line of this process and exit."""
    from planner.cli.app import app

    app(prog_name="meshwright")
