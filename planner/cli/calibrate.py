"""`meshwright calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from planner.cli.execute import Device
from planner.cli.options import natural, option, takes
from planner.cli.terminal import Terminal
from simulator.errors import InputError

PROFILE = Path("local.yaml")
"""The profile to write where none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateArguments:
    """Arguments and options, None where not given."""

    device: Annotated[Device, option("--device", "What to measure.")] = "cpu"
    processes: Annotated[int, option("--processes", "Collectives among 2, 4, … up to N.", "N", natural)] = 4
    out: Annotated[
        Path | None,
        option(
            "--out",
            "The profile to write, local.yaml by default; with --from-measurements the folder to write to, by "
            "default that of the shipped profiles.",
            "PROFILE.yaml",
        ),
    ] = None
    from_measurements: Annotated[
        Path | None,
        option(
            "--from-measurements",
            "Measure nothing: fit shipped profiles to the published timings in MEASUREMENTS_DIR/operators/*.csv, "
            "and, without --hw, what whole training steps leave open to MEASUREMENTS_DIR/*.csv (minutes).",
            "MEASUREMENTS_DIR",
        ),
    ] = None
    from_run: Annotated[
        list[Path] | None,
        option(
            "--from-run",
            "Measure nothing: correct the profile of a run by what `execute --measure --out RUN.json` found; "
            "may be repeated.",
            "RUN.json",
        ),
    ] = None
    hw: Annotated[
        list[str] | None,
        option(
            "--hw",
            "With --from-measurements: only this profile; may be repeated. With --from-run: what to correct.",
            "NAME",
        ),
    ] = None


@takes(CalibrateArguments)
def calibrate(given: CalibrateArguments, terminal: Terminal) -> None:
    """Measure this machine and write its hardware profile, or fit the shipped profiles to published measurements.

    \b
    Example: measure two processes on this machine's cores, then plan for them
      meshwright calibrate --device cpu --processes 2 --out local.yaml
      meshwright plan zoo:mlp --hw local.yaml --devices 2
    \b
    Example: fit one shipped profile to published timings, into a folder of your own
      meshwright calibrate --from-measurements measurements --hw dgx-a100 --out profiles
    \b
    Example: run a plan, and let what was measured improve the profile
      meshwright execute strategy.json --measure --out run.json
      meshwright calibrate --from-run run.json --out better.yaml
    """
    if given.from_run and given.from_measurements is not None:
        raise InputError("--from-run and --from-measurements were given; leave one of them out")
    if given.from_run:
        _correct(terminal, given.from_run, given.hw or [], given.out or PROFILE)
    elif given.from_measurements is not None:
        _fit(terminal, given.from_measurements, given.hw, given.out)
    elif given.hw:
        raise InputError(
            f"--hw {given.hw[0]} names a shipped profile to fit; it needs --from-measurements MEASUREMENTS_DIR"
        )
    else:
        _measure(terminal, given.device, given.processes, given.out or PROFILE)


def _measure(terminal: Terminal, device: Device, processes: int, out: Path) -> None:
    from planner.cli.catalogue_tables import calibration_report
    from planner.planning.documents import profile_document
    from simulator.calibration.calibrate import CalibrateOptions
    from simulator.calibration.calibrate import calibrate as measure
    from simulator.profile_file import check_content
    from simulator.whole_file import check_writable

    check_writable(out)
    with terminal.filling("measuring") as progress:
        content = measure(CalibrateOptions(device=device, processes=processes, out=out), progress)
    hardware = check_content(content, str(out))[1]
    rows = [{"field": row.field, "value": row.value, "source": row.source} for row in hardware.rows]
    document = {**profile_document(hardware), "file": str(out), "rows": rows}
    terminal.result(document, str(out), lambda: calibration_report(hardware, str(out)))


def _correct(terminal: Terminal, runs: list[Path], names: list[str], out: Path) -> None:
    """Correct a profile by runs and write the new one."""
    from planner.cli.catalogue_tables import correction_report
    from planner.cli.options import check_out
    from planner.planning.documents import profile_document
    from simulator.calibration.from_run import correct_profile, correction_rows

    if len(names) > 1:
        raise InputError(f"--hw was given {len(names)} times; --from-run corrects one profile")
    check_out("--out", out, (*runs, *names))
    found = correct_profile(runs, names[0] if names else None, out)
    corrections = correction_rows(found.corrections)
    document = {**profile_document(found.hardware), "file": str(out), "corrections": corrections}
    terminal.result(document, str(out), lambda: correction_report(found))


def _fit(terminal: Terminal, measurements: Path, names: list[str] | None, out: Path | None) -> None:
    """Fit profiles to published measurements and write them."""
    from planner.planning.documents import fitted_document
    from planner.published.measurement_file import read_rows
    from simulator.calibration.fit_profiles import fit_profile, fitted_profiles, shipped_folder, write_fitted
    from simulator.calibration.measurement_files import measurements_folder

    measurements = measurements_folder(measurements)
    folder = out or shipped_folder()
    if not folder.is_dir():
        raise InputError(f"--out {str(folder)!r} is no folder; with --from-measurements give an existing one")
    step_files = [] if names else sorted(measurements.glob("*.csv"))
    for file in step_files:
        read_rows(file)
    chosen = tuple(dict.fromkeys(names)) if names else fitted_profiles()
    with terminal.counting("fitting", len(chosen)) as done:
        fits = []
        for name in chosen:
            fits.append(fit_profile(measurements, name))
            done()
    # All is read and fitted before the first file changes: a wrong measurement file leaves every profile as it was.
    written = [(fit, write_fitted(fit, folder)) for fit in fits]
    steps = _fit_steps(terminal, step_files, folder) if step_files else []
    if terminal.json:
        profiles = [fitted_document(fit, str(path)) for fit, path in written]
        terminal.document({"profiles": profiles, "whole_steps": [str(path) for path in steps]})
    elif terminal.quiet:
        for path in dict.fromkeys([*(path for _, path in written), *steps]):
            terminal.line(str(path))
    else:
        from planner.cli.catalogue_tables import fitted_report

        terminal.show(*(part for fit, path in written for part in fitted_report(fit, str(path))))
        if steps:
            terminal.line(f"whole steps: {steps[0]}, and the corrections in {len(steps) - 1} profiles")


def _fit_steps(terminal: Terminal, files: list[Path], folder: Path) -> list[Path]:
    """Fit what whole training steps leave open to profiles as they now stand."""
    from planner.published.calibrating import calibrate_steps, planned_folds, write_calibration
    from planner.published.reading import read_measurements

    rows = [row for file in files for row in read_measurements(file)]
    with terminal.working("planning whole steps and fitting them"):
        calibration = calibrate_steps(planned_folds(rows))
    return write_calibration(calibration, folder)
