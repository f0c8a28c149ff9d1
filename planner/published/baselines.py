"""Two naive predictions of step times, which plans have to beat.

- *Utilisation*: six operations a parameter and token (Kaplan et al., arXiv:2001.08361), at one share of the peak for
  each device: the median of its sources, functional tests of tiny networks left aside.
- *Roofline*: the longest of three times (Williams et al., 2009). Operations take the device's peak, bytes its
  memory's bandwidth, and the sum of gradients the links over which replicas lie. Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.cost.memory.parameters import parameter_count
from planner.cost.training_run import LayeredNetwork, TrainingRun, TransformerShape
from planner.plans.request import PRECISIONS
from planner.published.aims import FUNCTIONAL
from planner.published.metrics import ScoredRow

UTILISATION, ROOFLINE = "6·N·D at one utilisation a device", "roofline"
_ACTIVATION_BYTES = 34.0
"""Bytes of activations that a layer keeps per token and channel, in 16 bits (Korthikanti et al., arXiv:2205.05198)."""
_PASSES = 3.0
"""The backward pass has two products for each of the forward pass."""


def operations_s(run: TrainingRun) -> float:
    """Seconds of a step whose operations run at the peak: 6 N D, where N of experts are those that a token visits."""
    setup, network = run.setup, run.network
    if isinstance(network, LayeredNetwork):
        samples = _PASSES * sum(layer.flops * layer.count for layer in network.layers) * setup.global_batch
    else:
        tokens = network.sequence_length * setup.global_batch
        samples = 2 * _PASSES * parameter_count(_visited(network)) * tokens
    peak = run.hardware.peak(PRECISIONS["fp32" if setup.precision == "tf32" else setup.precision])
    return samples / (setup.devices * peak)


def roofline_s(run: TrainingRun) -> float:
    """Seconds of a step by its tightest bound: operations, bytes of the memory, or the sum of gradients."""
    setup, network, hardware = run.setup, run.network, run.hardware
    own = setup.tp * setup.pp
    if isinstance(network, LayeredNetwork):
        parameters = network.parameters
        elements = _PASSES * sum(layer.elements_moved * layer.count for layer in network.layers) * setup.global_batch
        moved = elements * (4 if setup.precision in ("fp32", "tf32") else 2) / setup.devices
    else:
        parameters = parameter_count(network) / own
        kept = _ACTIVATION_BYTES * network.sequence_length * network.hidden * network.layers * setup.global_batch
        # Written and read again.
        moved = 2 * kept / setup.devices + _PASSES * 2 * parameters * setup.micro_batches
    summed = 2 * 2 * parameters / setup.ep * (setup.dp - 1) / setup.dp
    level = next((one for one in hardware.levels if one.size >= own * setup.dp), hardware.levels[-1])
    return max(operations_s(run), moved / hardware.memory_bandwidth, summed / level.bandwidth_bytes_per_s)


def _visited(network: TransformerShape) -> TransformerShape:
    if network.experts is None:
        return network
    return replace(network, experts=replace(network.experts, count=network.experts.per_token))


def baseline_errors(rows: Sequence[ScoredRow], *, left_out: bool) -> dict[str, dict[str, float]]:
    """Mean absolute errors of step times by baseline and group of rows; ``""`` stands for all rows.

    Only rows count that have a prediction and a measured time. With `left_out` a row's utilisation is that of the other
    sources, of all devices where none of them ran on its own.
    """
    timed = [row for row in rows if row.time_error is not None and row.operations_s and row.measured_step_time_s]
    share = _shares(timed, left_out=left_out)
    found: dict[str, dict[str, float]] = {}
    guesses: Mapping[str, Callable[[ScoredRow], float]] = {
        UTILISATION: lambda row: (row.operations_s or 0.0) / share(row),
        ROOFLINE: lambda row: row.roofline_s or 0.0,
    }
    for name, guess in guesses.items():
        errors: dict[str, list[float]] = {}
        for row in timed:
            error = abs(guess(row) / (row.measured_step_time_s or 1.0) - 1)
            for group in {"", row.group}:
                errors.setdefault(group, []).append(error)
        found[name] = {group: float(np.mean(values)) for group, values in errors.items()}
    return found


def _shares(rows: Sequence[ScoredRow], *, left_out: bool) -> Callable[[ScoredRow], float]:
    """The share of the peak that a row's device reaches."""
    reached: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.group != FUNCTIONAL:
            share = (row.operations_s or 0.0) / (row.measured_step_time_s or 1.0)
            reached.setdefault(row.device, {}).setdefault(row.source, []).append(share)

    def median(devices: Iterable[str], without: str) -> float:
        """The median over sources of the median of each: a large source has one voice."""
        known = [np.median(found) for one in devices for of, found in reached.get(one, {}).items() if of != without]
        return float(np.median(known)) if known else 0.0

    found: dict[tuple[str, str], float] = {}
    for device, source in {(row.device, row.source if left_out else "") for row in rows}:
        found[device, source] = median([device], source) or median(reached, source) or 1.0
    return lambda row: found[row.device, row.source if left_out else ""]
