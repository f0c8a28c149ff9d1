"""The commands put together, with the one place where errors become messages and exit codes."""

from __future__ import annotations

import difflib
import errno
import json
import os
import signal
import sys
import traceback
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from planner.cli.terminal import DEBUG_KEY, DOCUMENTS
from simulator.errors import InputError, MeshwrightError

COMMANDS = {
    "plan": "Find the fastest plan for a network on a cluster.",
    "simulate": "Simulate one training step of a plan, task by task; with failures, a whole job.",
    "what-if": "Find the best plan at each device count.",
    "execute": "Train for real as a plan says.",
    "calibrate": (
        "Measure this machine and write its hardware profile, or fit the shipped profiles to published measurements."
    ),
    "validate": "Predict measured runs from their configurations alone, and say how far off the predictions are.",
    "networks": "List the networks that are built in.",
    "export": "Write a plan for the framework that trains with it, or as MindSpore's JSON strategy file.",
    "check": (
        "Check a configuration of another framework: is it legal, does it fit, how fast is it, what would be better."
    ),
    "budget": (
        "Find how many devices a training needs, how long it takes and what it costs; two of the limits are given."
    ),
    "explain": "Say why a plan is not another one: the best plan under a pin beside it, task by task.",
    "serve": (
        "Serve a page that plans: network, hardware, devices and pins as controls, plans and the step as pictures."
    ),
    "profiles": "List, show, check and make hardware profiles; write rank tables.",
    "software": "List and show the software that plans are predicted for.",
}
"""Commands in the order of ``--help``, each with what it says there; the first words of its own help are the same."""
INTERNAL_ERROR = 1
INTERRUPTED = 128 + signal.SIGINT
READER_GONE = 128 + signal.SIGPIPE


class ErrorBoundary(TyperGroup):
    """Imports a command when it is asked for, and turns its errors into a message on stderr and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, or None."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            name = cmd_name.replace("-", "_")
            found = getattr(import_module(f"planner.cli.{name}"), name)
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(rich_markup_mode=None, add_completion=False)
                alone.command(name=cmd_name)(found)
                found = alone
            found.pretty_exceptions_enable = False
            self.commands[cmd_name] = typer.main.get_command(found)
            self.commands[cmd_name].name = cmd_name
        return self.commands.get(cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments in front of the command; a message about a long one is cut."""
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            error.message = MeshwrightError.cut(error.message)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name; the message about an unknown one says which are near."""
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            near = difflib.get_close_matches(args[0], COMMANDS)
            if near:
                error.message = f"{error.message.rstrip('.')}. Did you mean {' or '.join(map(repr, near))}?"
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands without importing them."""
        loaded, self.commands = self.commands, {n: TyperCommand(n, help=words) for n, words in COMMANDS.items()}
        try:
            super().format_commands(ctx, formatter)
        finally:
            self.commands = loaded

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors end here."""
        # Whether ``--json`` is among the arguments of the command that is about to run.
        DOCUMENTS.clear()
        given = [*getattr(ctx, "_protected_args", ()), *ctx.args]
        wanted = "--json" in given[: given.index("--")] if "--" in given else "--json" in given
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()  # what cannot be written is noticed here, not when Python ends
            return result
        except (typer.Exit, typer.Abort):
            raise
        except typer.TyperException as error:
            error.message = MeshwrightError.cut(error.message)
            _document(wanted, "UsageError", error.format_message(), error.exit_code)
            raise
        except KeyboardInterrupt:
            typer.echo("meshwright: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except MeshwrightError as error:
            _show(ctx, str(error))
            _document(wanted, type(error).__name__, str(error), error.exit_code)
            raise typer.Exit(error.exit_code) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has seen enough, as `head` has: end as git does
                _drop_output()
                raise typer.Exit(READER_GONE) from None
            if error.errno == errno.ENOSPC and error.filename is None:
                _drop_output()
                _show(ctx, f"cannot write the output: {error.strerror}; free some space or send it elsewhere")
                raise typer.Exit(InputError.exit_code) from error
            _show_defect(ctx, error)
            raise typer.Exit(INTERNAL_ERROR) from error
        except Exception as error:
            _show_defect(ctx, error)
            _document(wanted, type(error).__name__, str(error), INTERNAL_ERROR)
            raise typer.Exit(INTERNAL_ERROR) from error


def _document(wanted: bool, kind: str, message: str, exit_code: int) -> None:
    """Write an error as the one document of ``--json``, unless the command wrote one before it failed."""
    if wanted and not DOCUMENTS:
        error = {"kind": kind, "message": message, "exit_code": exit_code}
        typer.echo(json.dumps({"status": "error", "error": error}, indent=2))


def _show_defect(ctx: typer.Context, error: Exception) -> None:
    message = " ".join(str(error).split())[:500]
    hint = "" if _debug(ctx) else " (this is a defect; --debug shows where)"
    _show(ctx, f"internal error: {type(error).__name__}: {message}{hint}")


def _drop_output() -> None:
    """Send what is still to be written nowhere; Python writes it when it ends, and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _debug(ctx: typer.Context) -> bool:
    return bool(ctx.meta.get(DEBUG_KEY))


def _show(ctx: typer.Context, message: str) -> None:
    if _debug(ctx):
        traceback.print_exc(file=sys.stderr)
    typer.echo(f"meshwright: {message}", err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"meshwright {version('meshwright')}")
        raise typer.Exit


app = typer.Typer(
    cls=ErrorBoundary,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback()
def meshwright(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plan, simulate and run the parallel training of one network on many accelerators.

    \b
    Example:
      meshwright plan zoo:gpt2 --hw dgx-a100 --devices 8
      meshwright simulate strategy.json --trace timeline.json

    --install-completion lets the shell complete commands and options.

    Exit codes: 0 done, 1 internal error, 2 bad input or usage, 3 infeasible (no plan fits),
    4 execution failed or its losses differ.
    """
