"""Stragglers and goodput: what was asked for, and the answer as text and as a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import RenderableType
from rich.padding import Padding

from planner.cli.options import read_shares
from planner.cli.tables import facts
from planner.planning.summary import throughput
from simulator.errors import InputError
from simulator.quantities import bytes_text, duration_text, percent_text, rate_text, seconds_text

if TYPE_CHECKING:
    from planner.planning.goodput import CheckpointBytes, PlanGoodput
    from planner.planning.planning import Prediction
    from planner.planning.stragglers import StraggledStep
    from simulator.hardware import Hardware

SHOWN_RANKS = 8
DAYS, SLOWDOWN = 30.0, 1.5


@dataclass(frozen=True, kw_only=True)
class SlowOptions:
    """Slow ranks, and the share of bandwidth left to one link of each level; None is the default."""

    ranks: int | None
    slowdown: float | None
    links: Mapping[str, float]
    seed: int

    @classmethod
    def read(cls, ranks: int | None, slowdown: float | None, links: Iterable[str], *, seed: int) -> SlowOptions:
        """Read what was given; InputError where links are no ``LEVEL=SHARE`` or no rank is there to be slow."""
        shares = read_shares(links)
        if slowdown is not None and ranks is None:
            raise InputError("--slowdown was given without --stragglers; add it")
        return cls(ranks=ranks, slowdown=slowdown, links=shares, seed=seed)

    @property
    def factor(self) -> float:
        """How much longer a slow rank computes."""
        return SLOWDOWN if self.slowdown is None else self.slowdown


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A job with failures and checkpoints; numbers in ``given`` stand in for the profile's."""

    given: Mapping[str, float | None]
    interval_s: float | None
    asynchronous: bool
    days: float | None
    seed: int

    def check(self, *, wanted: bool) -> None:
        """Raise InputError where something is given and nothing `wanted`."""
        values = (self.interval_s, self.days, *self.given.values())
        if (self.asynchronous or any(value is not None for value in values)) and not wanted:
            raise InputError("options of failures and checkpoints were given without --goodput; add it")

    def goodput(self, size: CheckpointBytes, devices: int, hardware: Hardware, step_time_s: float) -> PlanGoodput:
        """What failures leave of the time of a plan whose ranks checkpoint `size`."""
        from planner.planning.goodput import plan_goodput, with_given

        return plan_goodput(
            size,
            devices,
            hardware,
            with_given(hardware.reliability, self.given, profile=hardware.name),
            step_time_s=step_time_s,
            interval_s=self.interval_s,
            asynchronous=self.asynchronous,
            days=DAYS if self.days is None else self.days,
            seed=self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class ReliabilityOptions:
    """What is simulated beside the step; None is left out."""

    slow: SlowOptions | None
    job: JobOptions | None


def reliability_document(
    prediction: Prediction, straggled: StraggledStep | None, kept: PlanGoodput | None, seed: int
) -> dict[str, Any]:
    """The part of ``meshwright simulate --json`` about slow ranks and failures."""
    from planner.planning.documents import goodput_document, straggler_document

    return {
        "seed": seed,
        "stragglers": straggled and straggler_document(straggled, prediction.step_time_s),
        "goodput": kept and goodput_document(kept, prediction),
    }


def reliability_report(
    prediction: Prediction, straggled: StraggledStep | None, kept: PlanGoodput | None, seed: int
) -> Iterable[RenderableType]:
    """What was simulated of slow ranks and failures."""
    if straggled is not None:
        yield from straggler_report(straggled, prediction.step_time_s, seed)
    if kept is not None:
        yield from goodput_report(kept, prediction, seed)


def straggler_report(step: StraggledStep, step_time_s: float, seed: int) -> Iterable[RenderableType]:
    """The step with slow ranks and links."""
    ranks = [f"{rank} (x {factor:.2f})" for rank, factor in list(step.slow_ranks.items())[:SHOWN_RANKS]]
    more = len(step.slow_ranks) - len(ranks)
    whose = {name: f" of rank {rank}" for name, rank in step.link_ranks.items()}
    links = [
        f"{name}{whose.get(name, '')} at {percent_text(share)} of its bandwidth"
        for name, share in step.slow_links.items()
    ]
    slower = step.step_time_s / step_time_s - 1 if step_time_s else 0.0
    pairs = [
        ("stragglers", f"step time {seconds_text(step.step_time_s)}, {percent_text(slower)} longer"),
        ("slow ranks", ", ".join(ranks) + (f" and {more} more" if more else "") + (f", seed {seed}" if ranks else "")),
        ("slow links", ", ".join(links)),
    ]
    yield Padding(facts(pairs), (1, 0, 0, 0))


def goodput_report(goodput: PlanGoodput, prediction: Prediction, seed: int) -> Iterable[RenderableType]:
    """What failures and checkpoints leave."""
    expected, simulated, cost = goodput.expected, goodput.simulated, goodput.checkpoint
    low, high = np.quantile(simulated.useful, (0.1, 0.9)).tolist()
    speed, what = throughput(prediction)
    written = f", written in {duration_text(cost.background_s)} meanwhile" if cost.background_s else ""
    pairs = [
        (
            "goodput",
            f"{_precise(expected.useful)} useful, checkpoints {percent_text(expected.checkpoint)}, work done again "
            f"{percent_text(expected.repeated)}, restarts {percent_text(expected.restart)}: "
            f"{rate_text(speed * expected.useful, what)}",
        ),
        (
            "simulated",
            f"{_precise(simulated.mean.useful)} ({_precise(low)} to {_precise(high)} in 8 of 10 of "
            f"{len(simulated.useful)} jobs of {goodput.days:g} days, seed {seed}), {simulated.failures.mean():.3g} "
            "failures each",
        ),
        (
            "failures",
            f"one in {duration_text(goodput.job_mtbf_s)} (a device in "
            f"{duration_text(goodput.reliability.device_mtbf_s)}), back after {duration_text(goodput.restart_s)}",
        ),
        (
            "checkpoint",
            f"every {goodput.interval_steps:,} steps = {duration_text(expected.interval_s)} (Daly "
            f"{duration_text(goodput.daly_interval_s)}, Young {duration_text(goodput.young_interval_s)}); "
            f"{bytes_text(goodput.checkpoint_bytes.written)} a rank stop the job for "
            f"{duration_text(cost.blocking_s)}{written}",
        ),
    ]
    yield Padding(facts(pairs), (1, 0, 0, 0))


def _precise(share: float) -> str:
    """Goodputs are near one: what is missing matters."""
    return f"{100 * share:.2f} %"
