"""Many jobs on one set of processes, held against one process: starting them takes longer than small networks train.

python -m tests.planner.execution.together --drawn 100 --seed 1   so many combinations, drawn at random
python -m tests.planner.execution.together --rows 3,17            rows of the table that tests run
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from torch import Tensor

from planner.execution.job import Job
from planner.execution.launch.membership import find_membership
from planner.execution.optimizers import hyperparameters
from planner.execution.verification import (
    CHAOS,
    NUDGE,
    ROUNDING,
    ROUNDING_FACTORS,
    TOLERANCES,
    relative_difference,
)
from planner.lowering.checked import checked_graph
from planner.lowering.stages import lower_stages
from planner.plans.plan import Plan
from simulator.calibration.launch import run_workers
from simulator.errors import ExecutionError, MeshwrightError
from tests.planner.execution.combinations import (
    Combination,
    drawn,
    plan_of,
    read_table,
    shared_tables,
    shown,
)
from tests.planner.execution.recording import (
    Sent,
    messages_of,
    planned_messages,
    record_gradients,
    reference_gradients,
    whole_gradients,
)

STEPS = 3
EXACT = "fp64"
LOW = ("fp32", "bf16", "fp16")
MULTIPLE = 3.0
"""How much more than one process's own error sums in another order may make, beside one rounding of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Losses of a job and the whole gradients of its steps, by parameter, or the error that it ended with.

    ``messages`` are those of every step of every rank.
    """

    losses: tuple[float, ...] = ()
    gradients: Mapping[str, list[Tensor]] = field(default_factory=dict)
    messages: Sequence[list[list[Sent]]] = ()
    error: str = ""


def run_together(jobs: Mapping[str, Job]) -> dict[str, Outcome]:
    """Run jobs, those of as many devices on one set of processes; one that fails leaves the others to a new set."""
    found: dict[str, Outcome] = {}
    for devices in sorted({job.lowered.devices for job in jobs.values()}):
        names = [name for name, job in jobs.items() if job.lowered.devices == devices]
        while names:
            with tempfile.TemporaryDirectory() as made:
                folder = Path(made)
                for number, name in enumerate(names):
                    (folder / f"{number}.job").write_bytes(pickle.dumps(jobs[name]))
                error = _run(folder, len(names), devices)
                left = (_outcome(folder, number, devices) for number in range(len(names)))
                done = [outcome for outcome in takewhile(lambda one: one is not None, left) if outcome is not None]
            found.update(zip(names, done, strict=False))
            if len(done) < len(names):
                found[names[len(done)]] = Outcome(error=error)
            names = names[len(done) + 1 :]
    return found


def _run(folder: Path, count: int, devices: int) -> str:
    try:
        run_workers(_train_each, (folder, count), devices)
    except ExecutionError as error:
        return str(error)
    return ""


def _train_each(folder: Path, count: int) -> None:
    """Train as one rank of one job after the other; each meets in a part of the store of its own, as after restarts."""
    membership = find_membership(os.environ)
    assert membership is not None  # elastic sets its variables
    for number in range(count):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        job: Job = pickle.loads((folder / f"{number}.job").read_bytes())
        beside = folder / f"{number}.{membership.rank}.part"
        with messages_of(job) as messages:
            found = record_gradients(job)
        beside.write_bytes(pickle.dumps((*found, messages)))
        beside.rename(beside.with_suffix(".done"))


def _outcome(folder: Path, number: int, devices: int) -> Outcome | None:
    """What all ranks have left of a job; None where one has not."""
    files = [folder / f"{number}.{rank}.done" for rank in range(devices)]
    if not all(file.exists() for file in files):
        return None
    ranks = [pickle.loads(file.read_bytes()) for file in files]
    pieces, losses, messages = zip(*ranks, strict=True)
    return Outcome(losses=losses[0], gradients=whole_gradients([*pieces], STEPS), messages=messages)


# Held against one process


def make_job(chosen: Combination, precision: str = EXACT) -> Job:
    """A combination on numbers at random, with nothing around its steps."""
    plan, graph = plan_of(chosen), shared_tables(chosen).graph
    return Job(
        lowered=lower_stages(plan, checked_graph(plan, graph, precision=precision)),
        network=plan.network,
        sequence_length=plan.sequence_length,
        optimizer=plan.optimizer,
        constants=hyperparameters(plan.optimizer, global_batch=plan.global_batch),
        data="synthetic",
        seed=0,
        steps=STEPS,
        warm_up_steps=0,
        device_type="cpu",
        timeout_s=60.0,
    )


class Trials:
    """Combinations to be trained, each in a precision; one process trains the same once."""

    def __init__(self, trials: Iterable[tuple[Combination, str]]) -> None:
        self.jobs: dict[str, Job] = {}
        self.refused: dict[str, str] = {}
        self._alone: dict[tuple[object, ...], Outcome] = {}
        for chosen, precision in trials:
            name = name_of(chosen, precision)
            try:
                self.jobs[name] = make_job(chosen, precision)
            except MeshwrightError as error:
                self.refused[name] = f"{type(error).__name__}: {error}"
        self._outcomes: dict[str, Outcome] = {}

    def run(self) -> None:
        """Train all of them."""
        self._outcomes = run_together(self.jobs)

    def fault(self, chosen: Combination, precision: str) -> str:
        """What is wrong with a combination; empty where nothing is."""
        name = name_of(chosen, precision)
        if name in self.refused:
            return self.refused[name]
        job, outcome = self.jobs[name], self._outcomes[name]
        other = outcome.error or _other_messages(outcome, plan_of(chosen), job)
        if other:
            return other
        alone = self._in_one_process(job, precision)
        if precision == EXACT:
            found = _unequal(outcome, alone)
            return found and _unequal(outcome, alone, self._in_one_process(job, precision, NUDGE * ROUNDING[precision]))
        exact = self._in_one_process(self.jobs.get(name_of(chosen, EXACT)) or make_job(chosen), EXACT)
        found = _worse(precision, outcome.losses, alone.losses, exact.losses)
        if not found:
            return ""
        disturbed = self._in_one_process(job, precision, NUDGE * ROUNDING[precision])
        return _worse(precision, outcome.losses, alone.losses, exact.losses, disturbed.losses)

    def _in_one_process(self, job: Job, precision: str, nudge: float = 0.0) -> Outcome:
        lowered = job.lowered
        trained = (job.network, job.optimizer, lowered.micro_batches, lowered.graph.batch_size)
        shared = tuple((one.cut, lowered.mesh.sizes) for one in lowered.inputs if one.cut is not None)
        key = (*trained, shared, precision, nudge)
        if key not in self._alone:
            gradients, losses = reference_gradients(job, nudge)
            self._alone[key] = Outcome(losses=losses, gradients=gradients)
        return self._alone[key]


def name_of(chosen: Combination, precision: str) -> str:
    """What a combination is called."""
    return f"{precision} {shown(chosen)}"


def _other_messages(outcome: Outcome, plan: Plan, job: Job) -> str:
    """Where the messages of a rank are not those that are timed, in kind, group, bytes or order."""
    for rank, steps in enumerate(outcome.messages):
        planned = planned_messages(plan, job.lowered, rank)
        for sent in steps:
            if sent != planned:
                place = next((i for i, pair in enumerate(zip(sent, planned, strict=False)) if pair[0] != pair[1]), -1)
                ran, timed = (f"{one[place] if one else None} of {len(one)}" for one in (sent, planned))
                return f"rank {rank}, message {place}: {ran} is sent, {timed} is timed"
    return ""


def _unequal(outcome: Outcome, alone: Outcome, disturbed: Outcome | None = None) -> str:
    """In float64 losses and gradients are those of one process.

    ``disturbed`` is one process whose parameters began in other last places: a multiple of what that makes of a
    network which amplifies rounding is rounding too, as `planner.execution.verification` has it.
    """
    given = alone if disturbed is None else disturbed
    own = min(ROUNDING_FACTORS[EXACT] * _largest_difference(given.losses, alone.losses), CHAOS)
    if not _largest_difference(outcome.losses, alone.losses) < max(TOLERANCES[EXACT], own):
        return f"losses {outcome.losses} are not {alone.losses}"
    if alone.losses[0] == alone.losses[-1]:
        return f"nothing was learnt: {alone.losses}"
    if alone.gradients.keys() != outcome.gradients.keys():
        return f"gradients of {sorted(alone.gradients.keys() ^ outcome.gradients.keys())} are missing on one side"
    for step in range(STEPS):
        largest = max(float(each[step].abs().max()) for each in alone.gradients.values())
        for name, exact in alone.gradients.items():
            apart, size = _apart(outcome.gradients[name][step], exact[step]), float(exact[step].abs().max())
            own = min(ROUNDING_FACTORS[EXACT] * _apart(given.gradients[name][step], exact[step]), CHAOS * size)
            # Some are nothing but rounding: a bias of keys changes no softmax.
            if not apart < max(TOLERANCES[EXACT] * size, own) + 1e-14 * largest:
                return f"step {step}: the gradient of {name} is {apart:.1e} off, its largest element is {size:.1e}"
    return ""


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _worse(
    precision: str,
    losses: Sequence[float],
    one: Sequence[float],
    exact: Sequence[float],
    disturbed: Sequence[float] | None = None,
) -> str:
    """In low precision losses are about as near to float64 as those of one process in that precision.

    ``disturbed`` is one process whose parameters were in other last places: what rounding alone makes of a network
    that amplifies it may be more than the tolerance, as `planner.execution.verification` has it.
    """
    found, own = _largest_difference(losses, exact), _largest_difference(one, exact)
    most = min(MULTIPLE * own + ROUNDING[precision], TOLERANCES[precision])
    if disturbed is not None:
        most = max(most, own + ROUNDING_FACTORS[precision] * _largest_difference(disturbed, one))
    if not found <= most:
        return f"losses {losses} are {found:.1e} off, those of one process {own:.1e}; {most:.1e} is rounding"
    return ""


def _largest_difference(losses: Sequence[float], exact: Sequence[float]) -> float:
    return max(relative_difference(*pair) for pair in zip(losses, exact, strict=True))


def main(arguments: Sequence[str]) -> int:
    """Run combinations by hand; returns how many are at fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=0, help="combinations to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--rows", default="", help="numbers of rows of the table, from 0, with commas")
    parser.add_argument("--precision", default=EXACT, choices=[EXACT, *LOW])
    given = parser.parse_args(arguments)
    table = read_table()
    rows = [table[int(number)] for number in given.rows.split(",") if number]
    rows += drawn(given.drawn, given.seed)
    trials = Trials((row, given.precision) for row in rows)
    trials.run()
    faults = 0
    for row in rows:
        found = trials.fault(row, given.precision)
        faults += bool(found)
        sys.stdout.write(f"{'FAULT' if found else 'equal'}  {shown(row)}\n{found}{found and chr(10)}")
    return faults


if __name__ == "__main__":
    raise SystemExit(min(main(sys.argv[1:]), 100))
