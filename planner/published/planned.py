"""Predictions of published runs by `plan` itself: the pinned plan, searched, lowered and simulated.

Runs that are the same plan of the same network are predicted once. Runs of one network share its graph, its rules and
the tables of its units.
"""

from __future__ import annotations

import csv
import io
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import yaml

from planner.cost.software import USUAL, fusion_of
from planner.cost.software_file import SoftwareFile, shipped_software, software_on_trial
from planner.cost.training_run import LayeredNetwork, RunPrediction, TrainingRun
from planner.planning.planning import PlanRequest, SearchResult, capture_for, plan_network
from planner.planning.shared_tables import SharedTables
from planner.plans.hints import Hint
from planner.published.layered.prediction import BY_LAYERS, predict_by_layers
from planner.published.pinned import MEMORY, OWN_SAMPLES, PinnedRun, pinned_run
from planner.published.predictions import RECOMPUTED, RunFailedError, recomputing
from planner.published.reading import MeasuredRow
from planner.sharding.placement import placement_name
from simulator.calibration.process import (
    available_cores,
    children_killed_on_error,
    end_with_parent,
    stopped_children_killed,
)
from simulator.errors import InputError, MeshwrightError
from simulator.profiles import load_profile, profile_text
from simulator.whole_file import write_whole

Outcome = RunPrediction | MeshwrightError
Wanted = tuple[SoftwareFile | None, PinnedRun]
"""A run, and the coefficients that it is predicted by; None for the shipped ones."""
UNLIMITED_BYTES = 10**14
"""Memory of a device on which every plan fits."""
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
_GROUP = 100
"""Runs of one network that one process predicts in a row."""


class Workplace:
    """A folder for the files that requests and commands name: configs of networks, hints, profiles without a limit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def request(self, run: PinnedRun, *, limited: bool = True) -> PlanRequest:
        """The request of a run, on the shipped profile or on one with memory for any plan."""
        said = {one.name: getattr(run, one.name) for one in fields(PlanRequest)}
        own = {"network": self._network(run), "hardware": self._profile(run, limited=limited)}
        return PlanRequest(**said | own)

    def file(self, name: str, content: str) -> str:
        """The path of a YAML file of this content, whose name begins with `name`."""
        path = self.folder / f"{name}_{sha256(content.encode()).hexdigest()[:8]}.yaml"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        return str(path)

    def _network(self, run: PinnedRun) -> str:
        if not run.network.startswith("{"):
            return run.network
        folder = self.folder / sha256(f"{run.network}\n{run.adapters}".encode()).hexdigest()[:12]
        for name, content in ((CONFIG, run.network), (ADAPTER_CONFIG, run.adapters)):
            if content and not (folder / name).exists():
                folder.mkdir(parents=True, exist_ok=True)
                write_whole(folder / name, content)
        return f"hf:{folder}"

    def _profile(self, run: PinnedRun, *, limited: bool) -> str:
        """The shipped profile, or a file of one with what the run and this folder change."""
        if limited and not run.tf32 and not run.cluster:
            return run.hardware
        changed = _changed_profile(run.hardware, run.cluster, limited=limited, tf32=run.tf32)
        return self.file(run.hardware, changed)


@lru_cache(maxsize=64)
def _changed_profile(name: str, cluster: tuple[tuple[str, float], ...], *, limited: bool, tf32: bool) -> str:
    """Return the text of a shipped profile with the numbers of another cluster, or more memory.

    ``limited`` keeps the memory, ``tf32`` runs float32 products in TF32.
    """
    content = yaml.safe_load(profile_text(name)[0])
    for path, value in cluster:
        *parents, last = path.split(".")
        section = content
        for key in parents:
            section = section[int(key) if isinstance(section, list) else key]
        if path == MEMORY:
            value += content["device"]["reserved_memory_bytes"]["value"]
        if value:
            section[last] = {"value": value, "source": "assumed: as the row states it"}
        else:
            section.pop(last, None)
    if not limited:
        content["device"]["memory_bytes"]["value"] = UNLIMITED_BYTES
    narrow = content["kernels"].get("convolution", {}).get("peak_flops", {})
    if tf32 and "float32" in narrow:
        content["device"]["peak_flops"]["float32"] = dict(narrow["float32"])
    return str(yaml.safe_dump(content))


def network_key(run: PinnedRun) -> tuple[str, ...]:
    """What the graph of a run depends on."""
    fusion = fusion_of(run.software)
    return (run.network, run.adapters, str(run.sequence_length), run.attention, run.norms, fusion)


class Planner:
    """Plans pinned runs one after the other; those of one network share their tables."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace = workplace
        self._key: tuple[str, ...] = ()
        self._shared: SharedTables | None = None

    def plan(self, run: PinnedRun, *, limited: bool = True) -> SearchResult:
        """The plan of a run, as `meshwright plan` finds it; without `limited` whatever memory it takes."""
        request = self.workplace.request(run, limited=limited)
        if self._shared is None or self._key != network_key(run):
            self._key, self._shared = network_key(run), SharedTables(capture_for(request))
        return plan_network(request, shared=self._shared, changes=False)

    def predict(self, run: PinnedRun) -> RunPrediction:
        """Time and memory of a run, whether or not it fits.

        Raises
        ------
        MeshwrightError
            The run has no plan.
        """
        memory = float(dict(run.cluster).get(MEMORY, load_profile(run.hardware).device_memory_bytes))
        found = self.plan(run, limited=False)
        if not found.candidates:
            raise InputError(f"no plan keeps all pins of the run: {found.infeasible}")
        if found.candidates[0].prediction.peak_memory_bytes > memory:
            # Where memory is short the search may still choose operators that take less of it.
            found = next((other for other in (self.plan(run),) if other.candidates), found)
        told = found.candidates[0].prediction
        return RunPrediction(
            step_time_s=told.step_time_s,
            interval_s=told.interval_s,
            label=told.label,
            peak_memory_bytes=float(told.peak_memory_bytes),
            fits=told.peak_memory_bytes <= memory,
            breakdown=dict(told.breakdown),
            memory={kind: float(size) for kind, size in told.memory_at_peak.items()},
            memory_figures=dict(told.memory_figures),
            notes=run.approximated,
        )


def predict_planned(
    runs: Sequence[TrainingRun],
    advance: Callable[[int], None] | None = None,
    cores: int = 0,
    software: Sequence[SoftwareFile | None] = (),
) -> list[Outcome]:
    """A prediction of each run by its pinned plan, or why it has none; `advance` is told how many runs were done.

    Vision and speech networks that no plan expresses are predicted by their layers, and a note says so.
    ``cores`` processes predict at once; 0: as many as this process may use. ``software`` has the coefficients of each
    run; None, or no list, stands for the shipped ones.
    """
    cores = cores or available_cores()
    files = list(software) or [None] * len(runs)
    found = _predictions(runs, files, cores, advance)
    again = {
        index: other
        for index, outcome in enumerate(found)
        if isinstance(outcome, RunPrediction) and not outcome.fits and (other := recomputing(runs[index]))
    }
    remade = _predictions(list(again.values()), [files[index] for index in again], cores, None)
    for index, outcome in zip(again, remade, strict=True):
        first = found[index]
        if isinstance(first, RunPrediction) and isinstance(outcome, RunPrediction) and outcome.fits:
            found[index] = replace(
                first, fits=True, peak_memory_bytes=outcome.peak_memory_bytes, memory=outcome.memory,
                memory_figures=outcome.memory_figures, notes=(*first.notes, RECOMPUTED),
            )  # fmt: skip
    return found


def _predictions(
    runs: Sequence[TrainingRun], files: Sequence[SoftwareFile | None], cores: int, advance: Callable[[int], None] | None
) -> list[Outcome]:
    pinned = [_pinned(run) for run in runs]
    places: dict[Wanted, list[int]] = {}
    for index, (plan, file) in enumerate(zip(pinned, files, strict=True)):
        if isinstance(plan, PinnedRun):
            places.setdefault((file, plan), []).append(index)
    found: list[Outcome | None] = [None if isinstance(run, PinnedRun) else run for run in pinned]
    if advance is not None:
        advance(sum(outcome is not None for outcome in found))
    for one, outcome in _predicted(list(places), cores):
        for index in places[one]:
            found[index] = outcome
        if advance is not None:
            advance(len(places[one]))
    for index, run in enumerate(runs):
        if isinstance(found[index], MeshwrightError) and isinstance(run.network, LayeredNetwork):
            found[index] = predict_by_layers(run, files[index] or shipped_software())
    return [outcome for outcome in found if outcome is not None]


def _pinned(run: TrainingRun) -> PinnedRun | MeshwrightError:
    try:
        return pinned_run(run)
    except MeshwrightError as error:
        return error


def _predicted(wanted: Sequence[Wanted], cores: int) -> Iterator[tuple[Wanted, Outcome]]:
    """Runs and their coefficients with the predictions, in any order.

    When a process of the pool dies or stays stopped, this process predicts the rest.
    """
    groups: dict[tuple[str, ...], list[Wanted]] = {}
    for one in wanted:
        groups.setdefault(network_key(one[1]), []).append(one)
    for group in groups.values():
        # Runs on one mesh at one micro-batch share tables.
        group.sort(
            key=lambda one: (one[1].hardware, one[1].precision, one[1].software, one[1].devices, str(one[1].pins))
        )
    parts = [group[start : start + _GROUP] for group in groups.values() for start in range(0, len(group), _GROUP)]
    with tempfile.TemporaryDirectory() as folder:
        left = dict(enumerate(parts))
        if cores > 1 and len(parts) > 1:
            # Forked processes could inherit locks of threads that they do not have.
            context = get_context("spawn")
            with (
                suppress(BrokenProcessPool),
                stopped_children_killed(),
                ProcessPoolExecutor(cores, context, end_with_parent) as pool,
                children_killed_on_error(),
            ):
                try:
                    waiting = {pool.submit(_predict_part, part, folder): place for place, part in left.items()}
                except (OSError, ValueError) as error:
                    # A process died, and the pool closed its pipes, while it was starting the next one.
                    raise BrokenProcessPool from error
                for done in as_completed(waiting):
                    outcomes = done.result()
                    yield from zip(left.pop(waiting[done]), outcomes, strict=True)
        for part in left.values():
            yield from zip(part, _predict_part(part, folder), strict=True)


def _predict_part(wanted: Sequence[Wanted], folder: str) -> list[Outcome]:
    planner, found = Planner(Workplace(Path(folder))), []
    for software, run in wanted:
        with software_on_trial(software):
            found.append(_outcome(planner, run))
    return found


def _outcome(planner: Planner, run: PinnedRun) -> Outcome:
    try:
        return planner.predict(run)
    except MeshwrightError as error:
        return error
    except (ArithmeticError, LookupError, ValueError) as error:
        # One run that fails does not take the others with it; the kind of error says that it is ours.
        return RunFailedError(f"{type(error).__name__}: {error}")


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
