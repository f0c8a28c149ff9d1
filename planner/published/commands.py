"""The `meshwright plan` command whose prediction is that of a published run, with the files that it reads."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from planner.cost.software import USUAL
from planner.cost.training_run import RunPrediction
from planner.plans.hints import Hint
from planner.published.layered.prediction import BY_LAYERS
from planner.published.pinned import OWN_SAMPLES, PinnedRun, pinned_run
from planner.published.planned import Outcome, Workplace
from planner.published.predictions import RECOMPUTED
from planner.published.reading import MeasuredRow
from planner.sharding.placement import placement_name

COLUMNS = ("row_id", "command")
_OWN_SAMPLES = {"parallel": {"parallel_mode": "auto_parallel", "cross_batch": True}}
"""The file by which operators over the batch see the samples of one rank alone."""


def command_lines(rows: Sequence[MeasuredRow], outcomes: Sequence[Outcome], file: Path) -> Iterator[str]:
    """The lines of a file of commands: a header, then one row each, without a command where there is no prediction.

    What a command reads, such as a ``config.json``, is written into a folder beside `file`.

    Parameters
    ----------
    outcomes
        Predictions of `planner.published.planned` of the rows that have a run, in order.
    """
    workplace = Workplace(files_beside(file))
    left = iter(outcomes)
    yield _line(COLUMNS)
    for row in rows:
        outcome = next(left) if row.run is not None else None
        known = isinstance(outcome, RunPrediction) and BY_LAYERS not in outcome.notes
        yield _line((row.row_id, _command(row, outcome, workplace) if known else ""))


def files_beside(file: Path) -> Path:
    """The folder of what the commands in `file` read."""
    return file.with_name(f"{file.stem}_files")


def _command(row: MeasuredRow, outcome: Outcome | None, workplace: Workplace) -> str:
    assert row.run is not None
    assert isinstance(outcome, RunPrediction)
    # A run that fits once it recomputes more has the time of the plan without.
    return shlex.join(plan_command(pinned_run(row.run), workplace, outcome.fits and RECOMPUTED not in outcome.notes))


def plan_command(run: PinnedRun, workplace: Workplace, limited: bool) -> list[str]:
    """The words of a run's command, on a profile without a limit of memory unless it is `limited`."""
    request = workplace.request(run, limited=limited)
    words = ["meshwright", "plan", str(request.network), "--hw", request.hardware, "--devices", str(run.devices)]
    words += ["--global-batch", str(run.global_batch), "--precision", run.precision]
    stated = {
        "--seq-len": run.sequence_length, "--optimizer": run.optimizer, "--software": run.software or USUAL,
        "--attention": run.attention, "--norms": run.norms,
    }  # fmt: skip
    for option, value in stated.items():
        words += [option, str(value)] if value else []
    for name, value in run.pins.named().items():
        words += ["--pin", f"{name}={value}"]
    if run.hints:
        words += ["--hints", workplace.file("hints", yaml.safe_dump([_hint(one) for one in run.hints]))]
    if run.exchange == OWN_SAMPLES:
        words += ["--config", workplace.file("own_samples", yaml.safe_dump(_OWN_SAMPLES))]
    return [*words, "--json"]


def _hint(one: Hint) -> dict[str, object]:
    """A hint as `--hints` reads it."""
    return {"operators": one.pattern, "axis": one.axis} | {
        name: ["*" if p is None else placement_name(p) for p in placed]
        for name, placed in (("inputs", one.inputs), ("outputs", one.outputs))
        if placed
    }


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
