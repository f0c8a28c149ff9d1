"""From what the user asks to what ranks are told: where a run begins, what it saves, and when."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from planner.execution.checkpoints.checkpoint import (
    CheckpointRecord,
    checkpoint_name,
    find_undamaged,
    finished_checkpoints,
    read_record,
    remove_unfinished,
)
from planner.execution.data.samples import Position
from planner.plans.plan import Plan
from simulator.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """What ranks are told: where to save and how often (0: only at the end), and what to begin with.

    ``record`` is what the checkpoints of this run will say, but for their step. ``loss_scale`` is that of the
    checkpoint, if it has one, and ``good_steps`` how long it has stood.
    """

    save: Path | None = None
    every: int = 0
    resume: Path | None = None
    position: Position = field(default_factory=Position)
    record: CheckpointRecord | None = None
    loss_scale: float | None = None
    good_steps: int = 0

    def is_due(self, done: int, steps: int) -> bool:
        """Whether a checkpoint is to be saved when ``done`` of ``steps`` steps have been done."""
        return self.save is not None and (done == steps or (self.every > 0 and done % self.every == 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What a run takes over from the checkpoint that it goes on from, or its beginning.

    ``notes`` say which newer checkpoints are damaged.
    """

    seed: int
    data: str | None
    learning_rate: float | None
    position: Position = field(default_factory=Position)
    resume: Path | None = None
    global_batch: int | None = None
    loss_scale: float | None = None
    good_steps: int = 0
    notes: tuple[str, ...] = ()

    def record(self, plan: Plan, learning_rate: float, precision: str) -> CheckpointRecord:
        """What the checkpoints of this run will say, but for their step."""
        return CheckpointRecord(
            step=self.position.step,
            samples=self.position.sample,
            network=plan.network,
            fingerprint=plan.fingerprint,
            optimizer=plan.optimizer,
            learning_rate=learning_rate,
            precision=precision,
            global_batch=plan.global_batch,
            data=self.data,
            seed=self.seed,
            devices=plan.devices,
        )


def find_beginning(
    resume: str | Path | None,
    plan: Plan,
    *,
    steps: int,
    precision: str,
    seed: int | None,
    data: str | None,
    learning_rate: float | None,
) -> Begin:
    """Read the checkpoint to resume from, and take over what the user does not change.

    Raises
    ------
    InputError
        There is none, or it is of another network or another training than the plan's.
    """
    if resume is None:
        return Begin(seed=seed or 0, data=data, learning_rate=learning_rate)
    path, damaged = find_undamaged(Path(resume))
    record = read_record(path)
    _check_same(path, record, plan, precision)
    if seed is not None and seed != record.seed:
        raise InputError(
            f"--seed {seed}: checkpoint {path} was trained with seed {record.seed}, and its place in the data means "
            "nothing with another; leave --seed out"
        )
    if data is not None and data != record.data:
        raise InputError(
            f"--data {data}: checkpoint {path} was trained on {record.data or 'the default data'}, and its place in "
            "the data means nothing with other; leave --data out"
        )
    if steps <= record.step:
        raise InputError(
            f"--steps {steps}: checkpoint {path} has {record.step} steps already, and --steps counts them; "
            f"give more than {record.step}"
        )
    return Begin(
        seed=record.seed,
        data=record.data,
        learning_rate=learning_rate or record.learning_rate,
        position=Position(step=record.step, sample=record.samples),
        resume=path,
        global_batch=record.global_batch,
        loss_scale=record.loss_scale,
        good_steps=record.good_steps,
        notes=damaged,
    )


def _check_same(path: Path, record: CheckpointRecord, plan: Plan, precision: str) -> None:
    for what, theirs, ours, remedy in (
        ("network", record.fingerprint, plan.fingerprint, f"plan {record.network} or resume from another checkpoint"),
        ("optimizer", record.optimizer, plan.optimizer, f"plan with --optimizer {record.optimizer}"),
        ("precision", record.precision, precision, f"give --precision {record.precision}"),
    ):
        if theirs != ours:
            shown = (record.network, plan.network) if what == "network" else (theirs, ours)
            raise InputError(f"checkpoint {path}: its {what} is {shown[0]}, the plan's {shown[1]}; {remedy}")


def checkpoints(save: str | Path | None, every: int | None, begin: Begin, record: CheckpointRecord) -> Checkpoints:
    """Check where to save.

    Raises
    ------
    InputError
        The folder holds checkpoints of another run, or ``every`` is given without it.
    """
    if save is None:
        if every is not None:
            raise InputError(f"--save-every {every} needs a folder to save in; give --save DIR")
        return Checkpoints(
            position=begin.position, resume=begin.resume, loss_scale=begin.loss_scale, good_steps=begin.good_steps
        )
    folder = Path(save).absolute()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--save {save} is a file; name a folder")
    present = finished_checkpoints(folder)
    own = begin.resume is not None and begin.resume.absolute().parent == folder
    if present and not own:
        raise InputError(
            f"--save {save} holds checkpoints already, the newest {present[-1].name}; go on from it with "
            f"--resume {save}, or name another folder"
        )
    return Checkpoints(
        save=folder,
        every=every or 0,
        resume=None if begin.resume is None else begin.resume.absolute(),
        position=begin.position,
        record=record,
        loss_scale=begin.loss_scale,
        good_steps=begin.good_steps,
    )


def last_checkpoint(orders: Checkpoints, steps: int) -> str | None:
    """The checkpoint that a run has left when it ends; None where it saves none."""
    return None if orders.save is None else str(orders.save / checkpoint_name(steps))


def prepare_folder(orders: Checkpoints) -> None:
    """Make the folder of checkpoints and clear away what a crash left in it; one process does this for the whole job.

    Raises
    ------
    InputError
        No file can be made there.
    """
    if orders.save is None:
        return
    try:
        orders.save.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=orders.save):
            pass
    except OSError as error:
        raise InputError(
            f"--save {orders.save}: it cannot be written to: {error.strerror or error}; name a folder you may write to"
        ) from None
    remove_unfinished(orders.save)


def check_verifiable(begin: Begin, plan: Plan, verify: bool) -> None:
    """Refuse to compare a run with an unbroken one that would have had other batches."""
    if verify and begin.global_batch not in (None, plan.global_batch):
        raise InputError(
            f"--verify: the checkpoint was trained with batches of {begin.global_batch}, the plan has "
            f"{plan.global_batch}, so that no unbroken run is like it; leave --verify out or plan with --global-batch "
            f"{begin.global_batch}"
        )


def digest_of(*asked: object) -> str:
    """Digest of what a process was asked to do: equal for equal requests."""
    return hashlib.sha256(repr(asked).encode()).hexdigest()
