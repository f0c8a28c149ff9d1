"""Figures of all runs together, and what is aimed at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

from reports.execution.running import Result

ROUNDING = 1e-9
OVERHEAD_AIM = 0.10
OWN_CORES = 2
"""Up to so many processes have a core each on the machine that the aims are for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure and its aim; ``value`` is None where nothing was run for it. ``at_least`` aims are met from above."""

    name: str
    key: str
    value: float | None
    aim: float
    at_least: bool = False
    runs: int = 0

    @property
    def met(self) -> bool | None:
        """Whether the aim is met."""
        if self.value is None:
            return None
        return self.value >= self.aim - ROUNDING if self.at_least else self.value <= self.aim + ROUNDING


def figures(results: Sequence[Result]) -> tuple[Figure, ...]:
    """All figures of some results; plans that failed count for none."""
    ran = [result for result in results if not result.error]
    few = _magnitudes(ran, lambda r: r.time_error if r.processes <= OWN_CORES else None)
    many = _magnitudes(ran, lambda r: r.time_error if r.processes > OWN_CORES else None)
    same_few = _magnitudes(ran, lambda r: r.time_error_at_this_speed if r.processes <= OWN_CORES else None)
    same_many = _magnitudes(ran, lambda r: r.time_error_at_this_speed if r.processes > OWN_CORES else None)
    first_few = _magnitudes(ran, lambda r: r.first_time_error if r.processes <= OWN_CORES else None)
    first_many = _magnitudes(ran, lambda r: r.first_time_error if r.processes > OWN_CORES else None)
    memory = _magnitudes(ran, lambda r: r.memory_error)
    overheads = [r.overhead for r in ran if r.overhead is not None]
    taus, regrets = network_taus(ran), choice_regrets(ran)
    return (
        _figure("step time, 1 and 2 processes: mean error", "time_mean", np.mean, few, 0.10),
        _figure("step time, 1 and 2 processes: worst error", "time_worst", np.max, few, 0.25),
        _figure("step time, cores shared: mean error", "shared_time_mean", np.mean, many, 0.20),
        *(
            _figure(f"{name}, predictions scaled by the machine's speed beside each run", key, of, values, aim)
            for name, key, of, values, aim in (
                ("1 and 2 processes: mean error", "scaled_time_mean", np.mean, same_few, 0.10),
                ("1 and 2 processes: worst error", "scaled_time_worst", np.max, same_few, 0.25),
                ("cores shared: mean error", "scaled_shared_time_mean", np.mean, same_many, 0.20),
            )
            if values
        ),
        *(
            _figure(f"{name}, first calibration and run", key, of, values, aim)
            for name, key, of, values, aim in (
                ("1 and 2 processes: mean error", "first_time_mean", np.mean, first_few, 0.10),
                ("1 and 2 processes: worst error", "first_time_worst", np.max, first_few, 0.25),
                ("cores shared: mean error", "first_shared_time_mean", np.mean, first_many, 0.20),
            )
            if values and any(len(r.attempts) > 1 for r in ran)
        ),
        _figure("peak memory: worst error", "memory_worst", np.max, memory, 0.10),
        _figure("Kendall tau, worst network", "kendall_tau", np.min, list(taus.values()), 0.8, at_least=True),
        _figure("regret of the chosen plan, worst", "regret", np.max, list(regrets.values()), 0.05),
        _figure("overhead over PyTorch by hand, worst", "overhead", np.max, overheads, OVERHEAD_AIM),
    )


def network_taus(results: Iterable[Result]) -> dict[str, float]:
    """Rank correlation of predicted and measured step times among all plans of a network."""
    found = {}
    for name, plans in _by(results, lambda r: r.network).items():
        if len(plans) > 1:
            tau = float(kendalltau(*zip(*plans, strict=True)).statistic)
            if np.isfinite(tau):
                found[name] = tau
    return found


def choice_regrets(results: Iterable[Result]) -> dict[str, float]:
    """Time of the plan predicted best over that of the best, less one, by network and number of processes."""
    found = {}
    for name, plans in _by(results, lambda r: f"{r.network}, {r.processes} processes").items():
        if len(plans) > 1:
            predicted, measured = np.array(plans).T
            found[name] = float(measured[np.argmin(predicted)] / measured.min() - 1)
    return found


def _by(results: Iterable[Result], name: Callable[[Result], str]) -> dict[str, list[tuple[float, float]]]:
    """Pairs of predicted and measured seconds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if result.predicted_step_time_s is not None and result.measured_step_time_s is not None:
            pair = (result.predicted_step_time_s, result.measured_step_time_s)
            found.setdefault(name(result), []).append(pair)
    return found


def _magnitudes(results: Iterable[Result], of: Callable[[Result], float | None]) -> list[float]:
    return [abs(value) for value in map(of, results) if value is not None]


def _figure(
    name: str,
    key: str,
    of: Callable[[list[float]], np.floating],
    values: list[float],
    aim: float,
    *,
    at_least: bool = False,
) -> Figure:
    value = float(of(values)) if values else None
    return Figure(name=name, key=key, value=value, aim=aim, at_least=at_least, runs=len(values))
