"""The `meshwright` command; nothing here but arguments and rendering."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line of this process and exit.

    Products of matrices are small here: threads of BLAS would take longer to meet than to work, and keep cores busy
    that neighbours and other processes of a sweep could use. How many they are is read once, with NumPy.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from planner.cli.app import app
    except KeyboardInterrupt:  # before there is a command that could notice
        sys.stderr.write("meshwright: interrupted\n")
        raise SystemExit(130) from None

    from planner.cli.terminal import write_plainly

    for stream in (sys.stdout, sys.stderr):
        write_plainly(stream)
    app(prog_name="meshwright")
