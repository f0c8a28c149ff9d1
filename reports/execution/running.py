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
from planner.execution.measuring.by_hand import Way
from planner.execution.measuring.turns import Turns, rounds_within, take_turns
from planner.execution.run import ExecuteOptions, execute_plan
from planner.planning import PlanRequest, plan_network
from planner.strategy.file import read_plan, write_plan
from planner.strategy.plan import Plan
from reports.execution.cases import Case
from simulator.calibration.calibrate import CalibrateOptions, calibrate
from simulator.errors import MeshwrightError
from simulator.hardware import load_profile

PROFILE, JOURNAL = "local.yaml", "runs.jsonl"
WARM_UP = 2
SEED = 0
ROUNDS = 2
"""How often every plan runs: in their order, then backwards, so that a drift of the machine's speed meets all alike."""
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

OF_RUNS = ("measured_step_time_s", "machine_speed", "others_share", "stolen_share")
"""What every run of a plan has of its own, and what is the mean of them."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one plan: seconds and bytes, ``error`` where there are none.

    ``attempts`` has what was measured in each run of the plan, in their order, where this is of all of them. In turns
    the plan took ``beside_by_hand_step_time_s`` and the same by hand ``by_hand_step_time_s``, medians of all rounds;
    ``overhead_rounds`` are the plan's time over that by hand, less one, of each round.
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
        if self.predicted_step_time_s is None or not self.measured_step_time_s:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1

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
        if self.predicted_peak_memory_bytes is None or not self.measured_peak_memory_bytes:
            return None
        return self.predicted_peak_memory_bytes / self.measured_peak_memory_bytes - 1

    @property
    def first_time_error(self) -> float | None:
        """The error of the first run of the plan."""
        first = self.attempts[0]["measured_step_time_s"] if self.attempts else self.measured_step_time_s
        return None if self.predicted_step_time_s is None or not first else self.predicted_step_time_s / first - 1

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


def run_all(
    cases: Sequence[Case],
    folder: Path,
    minutes: float,
    say: Say,
    show: Callable[[Sequence[Result]], None] = lambda results: None,
) -> tuple[Result, ...]:
    """Calibrate, then plan and run every case `ROUNDS` times, until the time is up, without those of an earlier call.

    Parameters
    ----------
    folder : where profile, strategy files and journal are kept between calls
    minutes : after so many no further case begins
    show : given what has run so far whenever a plan has
    """
    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    profile, journal = folder / PROFILE, folder / JOURNAL
    if not profile.exists():
        say("calibrating")
        most = max(2, *(case.processes for case in cases))
        calibrate(CalibrateOptions(processes=most, out=profile))
    measured_with = load_profile(str(profile)).hash
    known = read_journal(journal, measured_with)

    def so_far() -> tuple[Result, ...]:
        return tuple(counted(known[key_of(case)]) for case in cases if key_of(case) in known)

    def run(case: Case, words: str) -> bool:
        needed_s = START_S + (BESIDE_S if case.by_hand and key_of(case) not in known else 0.0)
        if time.monotonic() - begun > 60 * minutes - needed_s:
            return False
        say(f"{words}: {case.network.name} on {case.processes}, {case.name}")
        found = run_case(case, profile, folder)
        if key_of(case) not in known:  # taken in turns, it does not depend on the machine's speed
            found = with_overhead(found, case, folder)
        known.setdefault(key_of(case), []).append(found)
        _append(journal, {"key": key_of(case), "profile": measured_with, "result": asdict(found)})
        show(so_far())
        return True

    for turn in range(ROUNDS):
        for number, case in enumerate(cases[:: 1 if turn % 2 == 0 else -1], 1):
            runs = known.get(key_of(case), [])
            if len(runs) > turn or any(one.error for one in runs):
                continue
            if not run(case, f"{'again, ' * turn}{number} of {len(cases)}"):
                left = len(cases) - number + 1
                say(f"{60 * minutes:.0f} s are over; call again for {left} runs of round {turn + 1} of {ROUNDS}")
                return so_far()
    return so_far()


def counted(runs: Sequence[Result]) -> Result:
    """One result of all runs of a plan: means of their times and speeds, the lowest p10 and the highest p90.

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


def run_case(case: Case, profile: Path, folder: Path) -> Result:
    """Plan and run one case; a failure is a result."""
    names: dict[str, Any] = {"network": case.network.name, "processes": case.processes, "plan": case.name}
    try:
        plan, predicted_s = plan_case(case, profile)
        file = plan_file(case, folder)
        write_plan(plan, file)
        steps = WARM_UP + max(FEWEST, min(MOST, int(CASE_S / predicted_s)))
        report = execute_plan(plan, ExecuteOptions(strategy=file, steps=steps, seed=SEED, measure=True))
    except MeshwrightError as error:
        return Result(**names, error=str(error))
    except Exception as error:  # noqa: BLE001 -- one plan's defect must not lose the others' results
        return Result(**names, error=f"{type(error).__name__}: {error}")
    time_s = report.measured_step_time_s
    errors = () if report.comparison is None else tuple(asdict(row) for row in report.comparison.errors)
    return Result(
        **names,
        steps=steps - WARM_UP,
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
        pins=dict(case.pins),
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
    return take_turns(job, Way(case.by_hand or ""), *rounds_within(seconds, step_s))


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


def read_journal(journal: Path, profile_hash: str) -> dict[str, list[Result]]:
    """Results of every run by case that were found with this profile; damaged lines do not count."""
    found: dict[str, list[Result]] = {}
    for line in _lines(journal):
        with suppress(ValueError, KeyError, TypeError):
            document = json.loads(line)
            if document["profile"] == profile_hash:
                kept = document["result"]
                lists = {name: tuple(kept[name]) for name in ("errors", "attempts", "overhead_rounds")}
                result = Result(**{**kept, **lists})
                found.setdefault(document["key"], []).append(result)
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
