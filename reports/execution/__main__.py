"""Run plans of three networks on this machine and write what came of it: ``python -m reports.execution``.

Calibrates before every round of the plans. A call that is interrupted, or whose time is up, is gone on with by the
next one; ``--fresh`` begins again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from reports.execution.cases import all_cases, tiny_cases
from reports.execution.execution_page import document, execution_page, runs_csv, to_json
from reports.execution.figures import figures
from reports.execution.running import Result, profiles_of, run_all
from simulator.profiles import load_profile
from simulator.whole_file import write_whole

MINUTES = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the plans and write the page."""
    parser = argparse.ArgumentParser(prog="python -m reports.execution", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/execution"), help="folder of page, CSV and JSON")
    parser.add_argument("--work", type=Path, help="folder of profile, plans and journal [reports/out/execution]")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="begin no plan after so many [60]")
    parser.add_argument("--networks", nargs="*", default=[], help="only networks whose names begin so")
    parser.add_argument("--tiny", action="store_true", help="a few small plans, to try the command")
    parser.add_argument("--fresh", action="store_true", help="calibrate and run all again")
    given = parser.parse_args(arguments)
    work = given.work or Path("reports/out/execution")
    if given.fresh and work.exists():
        shutil.rmtree(work)
    given.out.mkdir(parents=True, exist_ok=True)
    cases = tiny_cases() if given.tiny else all_cases()
    if given.networks:
        cases = tuple(case for case in cases if case.network.name.startswith(tuple(given.networks)))

    def show(results: Sequence[Result]) -> None:
        """Write all anew, so that whatever ends the command leaves what has run, whole."""
        hardware = [load_profile(str(profile)) for profile in profiles_of(work)]
        machine, conditions = hardware[0].device_name, [one.conditions for one in hardware]
        warnings = [one.warning if one is not None else "" for one in conditions]
        write_whole(given.out / "index.html", execution_page(results, len(cases), machine, warnings))
        write_whole(given.out / "runs.csv", runs_csv(results))
        write_whole(given.out / "runs.json", to_json(document(results, machine)))

    results = run_all(cases, work, given.minutes, _say, show)
    show(results)
    for one in figures(results):
        met = {None: "nothing run", True: "met", False: "missed"}[one.met]
        value = "–" if one.value is None else f"{one.value:.3f}"
        _say(f"{one.name}: {value}, aim {one.aim:g}, {met}")
    _say(f"written {given.out / 'index.html'}, runs.csv, runs.json")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
