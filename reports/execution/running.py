"""Running the plans within a limit of time; what has run is kept, so that a second call goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from planner.execution.launch.starting import prepare
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.file import read_plan, write_plan
from planner.plans.plan import Plan
from reports.execution.by_hand import HandSplit
from reports.execution.cases import Case
from reports.execution.turns import Turns, rounds_within, take_turns
from simulator.calibration.calibrate import CalibrateOptions, calibrate
from simulator.crowding import MOST_OTHERS
from simulator.errors import MeshwrightError
from simulator.profiles import load_profile

JOURNAL = "runs.jsonl"
WARM_UP = 2
SEED = 0
ROUNDS = 5
"""How often the machine is calibrated and then every plan runs, in turns in their order and backwards.

A drift of the machine's speed meets all plans alike so, and no single calibration foretells them all.
"""
ATTEMPTS = 3
"""How often one round's calibration is made while other programs disturb it."""
FEWEST, MOST = 6, 40
"""Timed steps of a run: a host that is slow for some seconds leaves the median of fewer long ones to chance."""
CASE_S = 5.0
"""Seconds that the timed steps of a run may take together."""
TURNS_S = 12.0
"""Seconds that steps of a plan and by hand in turns take together, about; long steps take more."""
START_S = 25.0
"""What a case takes, about: it is not begun with less time left."""
BESIDE_S = 30.0
"""What the turns with the same by hand take more."""

IN_TURNS = (
    "by_hand",
    "by_hand_error",
    "beside_by_hand_step_time_s",
    "by_hand_step_time_s",
    "overhead_rounds",
    "by_hand_loss_difference",
)

OF_RUNS = ("predicted_step_time_s", "measured_step_time_s", "machine_speed", "others_share", "stolen_share")
"""What every run of a plan has of its own, and what is the mean of them."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one plan: seconds and bytes, ``error`` where there are none.

    ``attempts`` has what was predicted and measured in each run of the plan, in their order, where this is of all.
    In turns the plan took ``beside_by_hand_step_time_s`` and the same by hand ``by_hand_step_time_s``, medians of all
    rounds; ``overhead_rounds`` are the plan's time over that by hand, less one, of each round.
    """

    network: str
    processes: int
    plan: str
    error: str = ""
    steps: int = 0
    predicted_step_time_s: float | None = None
    measured_step_time_s: float | None = None
    measured_p10_s: float | None = None
    measured_p90_s: float | None = None
    predicted_peak_memory_bytes: int | None = None
    measured_peak_memory_bytes: int | None = None
    by_hand: str = ""
    by_hand_error: str = ""
    beside_by_hand_step_time_s: float | None = None
    by_hand_step_time_s: float | None = None
    overhead_rounds: tuple[float, ...] = ()
    by_hand_loss_difference: float | None = None
    machine_speed: float | None = None
    others_share: float | None = None
    stolen_share: float | None = None
    attempts: tuple[Mapping[str, float | None], ...] = ()
    errors: tuple[Mapping[str, Any], ...] = ()

    @property
    def time_error(self) -> float | None:
        """Predicted over measured step time, less one."""
        return error_of(self.predicted_step_time_s, self.measured_step_time_s)

    @property
    def time_error_at_this_speed(self) -> float | None:
        """The error of the prediction divided by the machine's speed beside the run; None where that is not known."""
        return (
            None
            if self.time_error is None or not self.machine_speed
            else (1 + self.time_error) / self.machine_speed - 1
        )

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak memory, less one."""
        return error_of(self.predicted_peak_memory_bytes, self.measured_peak_memory_bytes)

    @property
    def first_time_error(self) -> float | None:
        """The error of the first run of the plan."""
        first = self.attempts[0] if self.attempts else asdict(self)
        return error_of(first["predicted_step_time_s"], first["measured_step_time_s"])

    @property
    def overhead(self) -> float | None:
        """Step time of the plan over that written by hand, less one: the median round's."""
        return median(self.overhead_rounds) if self.overhead_rounds else None

    @property
    def overhead_lowest(self) -> float | None:
        """That of the round in which it was lowest."""
        return min(self.overhead_rounds, default=None)

    @property
    def overhead_highest(self) -> float | None:
        """That of the round in which it was highest."""
        return max(self.overhead_rounds, default=None)


def error_of(predicted: float | None, measured: float | None) -> float | None:
    """Predicted over measured, less one; None where either is not known."""
    return None if predicted is None or not measured else predicted / measured - 1


def run_all(
    cases: Sequence[Case],
    folder: Path,
    minutes: float,
    say: Say,
    show: Callable[[Sequence[Result]], None] = lambda results: None,
) -> tuple[Result, ...]:
    """Calibrate, then run every case, `ROUNDS` times, until the time is up, without what an earlier call has run.

    Parameters
    ----------
    folder : where profiles, strategy files and journal are kept between calls
    minutes : after so many no further case begins
    show : given what has run so far whenever a plan has
    """
    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / JOURNAL
    rounds: list[dict[str, Result]] = []

    def so_far() -> tuple[Result, ...]:
        runs = ([one[key] for one in rounds if key in one] for key in map(key_of, cases))
        return tuple(counted(of_case) for of_case in runs if of_case)

    for turn in range(ROUNDS):
        profile = profile_of(folder, turn)
        if not profile.exists():
            _calibrate(profile, max([2, *(case.processes for case in cases)]), f"{turn + 1} of {ROUNDS}", say)
        measured_with = load_profile(str(profile)).hash
        found = read_journal(journal, measured_with)
        rounds.append(found)
        for number, case in enumerate(cases[:: 1 if turn % 2 == 0 else -1], 1):
            key = key_of(case)
            if key in found or any(one[key].error for one in rounds if key in one):
                continue
            beside = case.by_hand is not None and turn == 0  # taken in turns, it does not depend on the machine's speed
            if time.monotonic() - begun > 60 * minutes - START_S - BESIDE_S * beside:
                left = len(cases) - number + 1
                say(f"{60 * minutes:.0f} s are over; call again for {left} runs of round {turn + 1} of {ROUNDS}")
                return so_far()
            say(f"round {turn + 1}, {number} of {len(cases)}: {case.network.name} on {case.processes}, {case.name}")
            result = run_case(case, profile, folder, rounds[0].get(key))
            found[key] = with_overhead(result, case, folder) if beside else result
            _append(journal, {"key": key, "profile": measured_with, "result": asdict(found[key])})
            show(so_far())
    return so_far()


def _calibrate(profile: Path, processes: int, which: str, say: Say) -> None:
    """Calibrate, and again where other programs had a part of the cores: that tells nothing of the runs."""
    for attempt in range(1, ATTEMPTS + 1):
        say(f"calibrating, {which}")
        calibrate(CalibrateOptions(processes=processes, out=profile))
        conditions = load_profile(str(profile)).conditions
        if conditions is None or conditions.others_share <= MOST_OTHERS or attempt == ATTEMPTS:
            return
        say(f"other programs took {conditions.others_share:.0%} of the cores' time meanwhile: once more")


def profile_of(folder: Path, turn: int) -> Path:
    """Where the profile of a round lies, counted from 0."""
    return folder / f"local-{turn + 1}.yaml"


def profiles_of(folder: Path) -> list[Path]:
    """The profiles of all rounds that have begun."""
    return [profile for turn in range(ROUNDS) if (profile := profile_of(folder, turn)).exists()]


def counted(runs: Sequence[Result]) -> Result:
    """One result of all runs of a plan: means of their times, foretold and measured, the lowest p10 and highest p90.

    What was found in turns with the same by hand stays with it.
    """
    good = [one for one in runs if not one.error]
    if not good:
        return runs[0]
    in_turns = next((run for run in runs if run.by_hand), runs[0])
    attempts = tuple({name: getattr(run, name) for name in OF_RUNS} for run in good)
    return replace(
        good[0],
        **{name: _over(fmean, good, name) for name in OF_RUNS},
        measured_p10_s=_over(min, good, "measured_p10_s"),
        measured_p90_s=_over(max, good, "measured_p90_s"),
        measured_peak_memory_bytes=_over(max, good, "measured_peak_memory_bytes"),
        errors=_mean_rows([run.errors for run in good if run.errors]),
        attempts=attempts,
        **{name: getattr(in_turns, name) for name in IN_TURNS},
    )


def _over(of: Callable[[list[Any]], Any], runs: Sequence[Result], name: str) -> Any:
    """A value of all runs that have it; None where none has."""
    known = [value for run in runs if (value := getattr(run, name)) is not None]
    return of(known) if known else None


def _mean_rows(tables: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Mapping[str, Any], ...]:
    """Rows of the tables of errors by kind and name, each the mean of all tables; one without a row says 0."""
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in (row for table in tables for row in table):
        rows.setdefault((row["kind"], row["name"]), []).append(row)
    return tuple(
        {
            name: sum(row[name] for row in alike) / len(tables) if isinstance(value, int | float) else value
            for name, value in alike[0].items()
        }
        for alike in rows.values()
    )


def key_of(case: Case) -> str:
    """What tells a case from all others."""
    return json.dumps(asdict(case), sort_keys=True)


def run_case(case: Case, profile: Path, folder: Path, earlier: Result | None = None) -> Result:
    """Plan one case, or take plan and steps of an `earlier` round, and run it; a failure is a result."""
    names: dict[str, Any] = {"network": case.network.name, "processes": case.processes, "plan": case.name}
    try:
        file = plan_file(case, folder)
        if earlier is None:
            plan, predicted_s = plan_case(case, profile)
            timed = max(FEWEST, min(MOST, int(CASE_S / predicted_s)))
        else:
            hash_now = load_profile(str(profile)).hash
            plan, timed = replace(read_plan(file), hardware=str(profile), hardware_hash=hash_now), earlier.steps
        write_plan(plan, file)
        steps = WARM_UP + timed
        report = execute_plan(plan, ExecuteOptions(strategy=file, steps=steps, seed=SEED, measure=True))
    except MeshwrightError as error:
        return Result(**names, error=str(error))
    except Exception as error:  # noqa: BLE001 -- one plan's defect must not lose the others' results
        return Result(**names, error=f"{type(error).__name__}: {error}")
    time_s = report.measured_step_time_s
    errors = () if report.comparison is None else tuple(asdict(row) for row in report.comparison.errors)
    return Result(
        **names,
        steps=timed,
        predicted_step_time_s=report.predicted_step_time_s,
        measured_step_time_s=time_s.median,
        measured_p10_s=time_s.p10,
        measured_p90_s=time_s.p90,
        predicted_peak_memory_bytes=report.predicted_peak_memory_bytes,
        measured_peak_memory_bytes=report.measured_peak_memory_bytes,
        machine_speed=report.machine_speed,
        others_share=report.others_share,
        stolen_share=report.stolen_share,
        errors=errors,
    )


def plan_case(case: Case, profile: Path) -> tuple[Plan, float]:
    """The best plan of a case, and its predicted seconds a step.

    Raises
    ------
    MeshwrightError
        There is none.
    """
    network = case.network
    request = PlanRequest(
        network=network.spec,
        hardware=str(profile),
        devices=case.processes,
        global_batch=network.global_batch,
        sequence_length=network.sequence_length,
        precision="fp32",
        optimizer=network.optimizer,
        pins=case.pins,
        top=1,
    )
    result = plan_network(request)
    if not result.candidates:
        raise MeshwrightError(result.infeasible)
    best = result.candidates[0]
    return best.plan, best.prediction.step_time_s


def turns_of(case: Case, plan: Plan, file: Path, step_s: float, seconds: float = TURNS_S) -> Turns:
    """Train as a plan does and by hand, in turns of so many seconds together; `step_s` is what a step takes, about."""
    job = prepare(plan, ExecuteOptions(strategy=file, seed=SEED), None, lambda text: None).job
    return take_turns(job, HandSplit(case.by_hand or ""), *rounds_within(seconds, step_s))


def with_overhead(found: Result, case: Case, folder: Path) -> Result:
    """Add to what came of a plan how it compares with the same by hand, where that is written."""
    if case.by_hand is None or found.measured_step_time_s is None:
        return found
    file = plan_file(case, folder)
    try:
        turns = turns_of(case, read_plan(file), file, found.measured_step_time_s)
    except Exception as error:  # noqa: BLE001 -- the plan ran all the same
        return replace(found, by_hand=case.by_hand, by_hand_error=f"{type(error).__name__}: {error}")
    return replace(
        found,
        by_hand=case.by_hand,
        beside_by_hand_step_time_s=median(turns.plan_s),
        by_hand_step_time_s=median(turns.by_hand_s),
        overhead_rounds=tuple(ratio - 1 for ratio in turns.ratios),
        by_hand_loss_difference=turns.loss_difference,
    )


def plan_file(case: Case, folder: Path) -> Path:
    """Where the strategy file of a case lies."""
    return folder / f"{'-'.join(f'{case.network.name} {case.processes} {case.name}'.split())}.json"


# The journal: one JSON object a line


def read_journal(journal: Path, profile_hash: str) -> dict[str, Result]:
    """Results by case that were found with this profile; damaged lines do not count."""
    found: dict[str, Result] = {}
    for line in _lines(journal):
        with suppress(ValueError, KeyError, TypeError):
            document = json.loads(line)
            if document["profile"] == profile_hash:
                kept = document["result"]
                lists = {name: tuple(kept[name]) for name in ("errors", "attempts", "overhead_rounds")}
                found[document["key"]] = Result(**{**kept, **lists})
    return found


def _lines(journal: Path) -> Iterable[str]:
    try:
        return journal.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ()


def _append(journal: Path, document: Mapping[str, object]) -> None:
    with journal.open("a+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        if size:
            stream.seek(size - 1)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(json.dumps(document).encode() + b"\n")
