"""What a sweep plans: its clusters and how the batch follows them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from simulator.errors import InputError
from simulator.profiles import load_profile

if TYPE_CHECKING:
    from planner.plans.request import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOptions:
    """What a sweep plans.

    With `global_batch` every device count trains the same batch (strong scaling). With
    `batch_per_device` the batch is that many samples times the devices (weak scaling). Without either it
    grows with the devices from the network's default at the smallest count.
    """

    network: str
    hardware: tuple[str, ...]
    device_counts: tuple[int, ...]
    global_batch: int | None = None
    batch_per_device: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    search_mode: str = "dynamic_programming"
    parallel_mode: str = "auto_parallel"
    pins: Mapping[str, str] = field(default_factory=dict)
    software: str = ""
    attention: str = ""
    norms: str = ""
    memory_headroom: float = 0.0


def batch_rule(options: WhatIfOptions) -> tuple[str, dict[int, int]]:
    """How the global batch follows the device count.

    Returns
    -------
    tuple of str and dict
        The rule in words, and the batch of each device count.

    Raises
    ------
    InputError
        Both a global batch and a batch for each device are given.
    """
    counts = options.device_counts
    if options.global_batch is not None:
        if options.batch_per_device is not None:
            raise InputError(
                f"--global-batch {options.global_batch} and --batch-per-device {options.batch_per_device}: the first "
                "keeps the batch fixed, the second lets it grow with the devices; give one of them"
            )
        words = f"strong scaling: a global batch of {options.global_batch} at every device count"
        return words, dict.fromkeys(counts, options.global_batch)
    if options.batch_per_device is not None:
        each, hint = options.batch_per_device, ""
    else:
        each, hint = _default_batch(options), " (give --global-batch to keep it fixed)"
    return f"weak scaling: the global batch is {each} × devices{hint}", {count: each * count for count in counts}


def _default_batch(options: WhatIfOptions) -> int:
    """Samples for each device that make the network's default batch at the smallest count."""
    from planner.networks import load_network

    default = load_network(options.network, sequence_length=options.sequence_length).default_global_batch
    return max(1, math.ceil(default / min(options.device_counts)))


def requests_of(options: WhatIfOptions) -> tuple[PlanRequest, ...]:
    """One request for each point, by profile in the order given, then by device count.

    Raises
    ------
    ProfileError
        A profile is missing or malformed.
    """
    from planner.cost.software import USUAL, as_run, norms_of
    from planner.planning.planning import with_usual_software
    from planner.plans.request import PlanRequest

    named = "" if options.software == USUAL else options.software
    for name in options.hardware:
        as_run(load_profile(name), named, options.attention).with_headroom(options.memory_headroom)
    norms_of(named, options.norms)
    _, batches = batch_rule(options)
    return tuple(
        with_usual_software(
            PlanRequest(
                network=options.network,
                hardware=name,
                devices=devices,
                global_batch=batches[devices],
                sequence_length=options.sequence_length,
                precision=options.precision,
                optimizer=options.optimizer,
                search_mode=options.search_mode,
                parallel_mode=options.parallel_mode,
                pins=dict(options.pins),
                software=options.software,
                attention=options.attention,
                norms=options.norms,
                memory_headroom=options.memory_headroom,
                top=1,
                sensitivity=False,
            )
        )
        for name in dict.fromkeys(options.hardware)
        for devices in sorted(set(options.device_counts))
    )


def point_name(request: PlanRequest) -> str:
    """How messages call a point of a sweep."""
    return f"{request.network} on {request.devices} devices of {request.hardware}"
