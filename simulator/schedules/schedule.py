"""A pipeline schedule: which pass of which micro-batch every rank runs, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.errors import ProgramError

IndexArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
OffsetArray = npt.NDArray[np.int64]


class ActionKind(IntEnum):
    """Passes of a micro-batch through a stage; a whole backward pass is its input and its weight part together."""

    FORWARD = 0
    BACKWARD = 1
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3

    @property
    def letter(self) -> str:
        """The letter of PyTorch's schedules: F, B, I, W."""
        return "FBIW"[self]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage, written as in PyTorch: ``2F0``."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.letter}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """Actions (A) of all ranks, rank after rank, each in its order.

    Attributes
    ----------
    stage_rank : (stages,) rank that holds a stage
    offsets : (ranks + 1,) actions of rank r are ``offsets[r]:offsets[r + 1]``
    kind, stage, micro_batch : (A,)
    paired : (A,) runs together with the action after it, the communication of one behind the computation of the other
    chains : copies of the network; each has ``stages / chains`` consecutive stages and
        ``micro_batches / chains`` consecutive micro-batches (DualPipe: one for each direction)
    """

    name: str
    ranks: int
    micro_batches: int
    stage_rank: IndexArray
    offsets: OffsetArray
    kind: IndexArray
    stage: IndexArray
    micro_batch: IndexArray
    paired: BoolArray
    chains: int = 1

    def __post_init__(self) -> None:
        # Schedules are kept and shared.
        for name in ("stage_rank", "offsets", "kind", "stage", "micro_batch", "paired"):
            getattr(self, name).setflags(write=False)

    @property
    def stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.stage_rank)

    @property
    def size(self) -> int:
        """Number of actions on all ranks."""
        return len(self.kind)

    @property
    def chain_stages(self) -> int:
        """Stages that a micro-batch passes."""
        return self.stages // self.chains

    @cached_property
    def beginning_ranks(self) -> OffsetArray:
        """(n,) ranks that begin without waiting for another: those of the first stage of each chain."""
        return np.unique(self.stage_rank[:: self.chain_stages])

    @cached_property
    def leaders(self) -> OffsetArray:
        """(groups,) first actions of what runs together: single actions and pairs."""
        return np.flatnonzero(~np.concatenate(([False], self.paired[:-1])))

    @cached_property
    def action_rank(self) -> IndexArray:
        """(A,) rank that runs an action."""
        return np.repeat(np.arange(self.ranks, dtype=np.int32), np.diff(self.offsets))

    @cached_property
    def previous(self) -> OffsetArray:
        """(A,) action whose output an action takes from a neighbouring stage, -1 for none."""
        forward, gradient = self.positions(ActionKind.FORWARD), self.gradient_positions()
        is_forward = self.kind == ActionKind.FORWARD
        first, last = self.stage % self.chain_stages == 0, (self.stage + 1) % self.chain_stages == 0
        takes_forward = is_forward & ~first
        takes_gradient = (self.kind == ActionKind.BACKWARD) | (self.kind == ActionKind.INPUT_GRADIENT)
        takes_gradient &= ~last
        source = np.full(self.size, -1, dtype=np.int64)
        source[takes_forward] = forward[self.stage[takes_forward] - 1, self.micro_batch[takes_forward]]
        source[takes_gradient] = gradient[self.stage[takes_gradient] + 1, self.micro_batch[takes_gradient]]
        return source

    @cached_property
    def source(self) -> OffsetArray:
        """(A,) action whose result an action needs, its own rank's included; -1 for the first forward pass.

        ``previous``, and for the first backward pass the last forward pass, for a weight gradient its input gradient.
        """
        source = self.previous.copy()
        for kind, before in (
            (ActionKind.BACKWARD, ActionKind.FORWARD),
            (ActionKind.INPUT_GRADIENT, ActionKind.FORWARD),
            (ActionKind.WEIGHT_GRADIENT, ActionKind.INPUT_GRADIENT),
        ):
            open_ones = np.flatnonzero((self.kind == kind) & (source < 0))
            source[open_ones] = self.positions(before)[self.stage[open_ones], self.micro_batch[open_ones]]
        return source

    @cached_property
    def execution_order(self) -> OffsetArray:
        """(groups,) all groups in an order in which each comes after those it needs.

        Ranks take turns, each running as far as it can.

        Raises
        ------
        ProgramError
            When no rank can go on, naming the ranks and what they wait for.
        """
        leaders = self.leaders
        groups = np.cumsum(np.concatenate(([True], ~self.paired[:-1]))) - 1
        needs = np.append(groups, -1)[self.previous]
        needed = needs[leaders].tolist()
        second = np.where(self.paired[leaders], np.append(needs, -1)[leaders + 1], -1).tolist()
        bounds = np.searchsorted(leaders, self.offsets).tolist()
        place, ends = bounds[:-1], bounds[1:]
        done = [False] * len(leaders) + [True]
        order: list[int] = []
        active = list(range(self.ranks))
        while active:
            before = len(order)
            for rank in active:
                group, end = place[rank], ends[rank]
                while group < end and done[needed[group]] and done[second[group]]:
                    done[group] = True
                    order.append(group)
                    group += 1
                place[rank] = group
            if len(order) == before:
                raise ProgramError(_deadlock(self, [int(leaders[place[rank]]) for rank in active], groups, done))
            active = [rank for rank in active if place[rank] < ends[rank]]
        return np.array(order)

    def action(self, index: int) -> Action:
        """The action at a place in the arrays."""
        return Action(int(self.stage[index]), ActionKind(int(self.kind[index])), int(self.micro_batch[index]))

    def actions(self, rank: int) -> list[Action]:
        """What a rank runs, in order."""
        return [self.action(index) for index in range(self.offsets[rank], self.offsets[rank + 1])]

    def of_rank(self, rank: int, values: npt.NDArray[np.int64]) -> list[int]:
        """Those of the actions of a rank among values (A,)."""
        own: list[int] = values[self.offsets[rank] : self.offsets[rank + 1]].tolist()
        return own

    def positions(self, kind: ActionKind) -> OffsetArray:
        """(stages, micro_batches) place of each action of a kind in the arrays, -1 where there is none."""
        found = np.full((self.stages, self.micro_batches), -1, dtype=np.int64)
        chosen = np.flatnonzero(self.kind == kind)
        found[self.stage[chosen], self.micro_batch[chosen]] = chosen
        return found

    def gradient_positions(self) -> OffsetArray:
        """(stages, micro_batches) place of the action that yields the gradient of a stage's input, -1 for none."""
        return np.maximum(self.positions(ActionKind.BACKWARD), self.positions(ActionKind.INPUT_GRADIENT))


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule that does not train every micro-batch on every stage once, in an order that can run.

    Every stage runs one forward pass of each of its micro-batches, then either the whole backward pass or its input
    part and later its weight part.

    Raises
    ------
    ProgramError
        Naming the rank and the action; for a deadlock all ranks that wait, and for what.
    """
    _check_ranks(schedule)
    _check_counts(schedule)
    _check_local_order(schedule)
    _ = schedule.execution_order  # refuses a deadlock


def _check_ranks(schedule: Schedule) -> None:
    away = np.flatnonzero(schedule.stage_rank[schedule.stage] != schedule.action_rank)
    if len(away):
        index = int(away[0])
        raise ProgramError(
            f"Action {schedule.action(index)} is on rank {schedule.action_rank[index]}, but stage "
            f"{schedule.stage[index]} is held by rank {schedule.stage_rank[schedule.stage[index]]}: "
            "put all actions of a stage on one rank"
        )


def _check_counts(schedule: Schedule) -> None:
    shape = (schedule.stages, schedule.micro_batches)
    counts = {
        kind: np.bincount(
            schedule.stage[schedule.kind == kind].astype(np.int64) * shape[1]
            + schedule.micro_batch[schedule.kind == kind],
            minlength=shape[0] * shape[1],
        ).reshape(shape)
        for kind in ActionKind
    }
    chain = np.arange(shape[0])[:, None] // schedule.chain_stages
    own = chain == np.arange(shape[1]) // (shape[1] // schedule.chains)
    backward, inputs, weights = (counts[kind] for kind in list(ActionKind)[1:])
    for rule, holds in (
        ("one forward pass F", counts[ActionKind.FORWARD] == own),
        ("one backward pass, B or I and W", (backward + inputs == own) & (weights == inputs)),
    ):
        if not holds.all():
            stage, micro_batch = (int(i) for i in np.argwhere(~holds)[0])
            found = ", ".join(f"{kind.letter} {counts[kind][stage, micro_batch]}" for kind in ActionKind)
            raise ProgramError(
                f"Stage {stage} (rank {schedule.stage_rank[stage]}) needs {rule} of micro-batch {micro_batch}, "
                f"but its actions are {found}: add or remove the missing or surplus one"
            )


def _check_local_order(schedule: Schedule) -> None:
    forward, gradient = schedule.positions(ActionKind.FORWARD), schedule.gradient_positions()
    weight = schedule.positions(ActionKind.WEIGHT_GRADIENT)
    for before, after, has_both in (
        (forward, gradient, forward >= 0),
        (schedule.positions(ActionKind.INPUT_GRADIENT), weight, weight >= 0),
    ):
        wrong = np.argwhere(has_both & (after < before))
        if len(wrong):
            first, second = (int(array[tuple(wrong[0])]) for array in (before, after))
            raise ProgramError(
                f"Rank {schedule.action_rank[second]} runs {schedule.action(second)} before "
                f"{schedule.action(first)}, whose result it needs: swap them"
            )


def _deadlock(schedule: Schedule, stuck: list[int], groups: OffsetArray, done: list[bool]) -> str:
    waits = []
    for index in stuck:
        together = range(index, index + 1 + int(schedule.paired[index]))
        waiting = next(i for i in together if schedule.previous[i] >= 0 and not done[groups[schedule.previous[i]]])
        source = int(schedule.previous[waiting])
        waits.append(
            f"rank {schedule.action_rank[index]} at {schedule.action(waiting)} waits for {schedule.action(source)} "
            f"of rank {schedule.action_rank[source]}"
        )
    shown = "; ".join(waits[:8]) + (f"; and {len(waits) - 8} more" if len(waits) > 8 else "")
    return f"Deadlock in schedule {schedule.name}: {shown}. Reorder the actions so that one of them can run"
