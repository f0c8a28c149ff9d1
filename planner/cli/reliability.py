"""Stragglers and goodput as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from rich.console import RenderableType
from rich.padding import Padding

from planner.cli.tables import facts, throughput
from planner.quantities import bytes_text, duration_text, percent_text, rate_text, seconds_text

if TYPE_CHECKING:
    from planner.goodput import PlanGoodput, StraggledStep
    from planner.planning import Prediction

SHOWN_RANKS = 8


def straggler_report(step: StraggledStep, step_time_s: float, seed: int) -> Iterable[RenderableType]:
    """The step with slow ranks and links."""
    ranks = [f"{rank} (x {factor:.2f})" for rank, factor in list(step.slow_ranks.items())[:SHOWN_RANKS]]
    more = len(step.slow_ranks) - len(ranks)
    links = [f"{name} at {percent_text(share)} of its bandwidth" for name, share in step.slow_links.items()]
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
