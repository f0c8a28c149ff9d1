"""What a sweep plans: its clusters and how the batch follows them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.plans.pins import PIN_NAMES, Pins
from planner.plans.request import PlanRequest, Request
from simulator.errors import InputError
from simulator.hardware import is_profile_path, split_settings
from simulator.profiles import load_profile

MOST_POINTS = 1000
"""Points of a sweep."""
_NUMBERS = {
    "global_batch": int,
    "batch_per_device": int,
    "sequence_length": int,
    "memory_headroom": float,
    "expert_imbalance": float,
}
_EXAMPLES = {"memory_headroom": "0.1", "expert_imbalance": "1.3"}
_OF_REQUEST = {
    "batch": "global_batch",
    "global_batch": "global_batch",
    "batch_per_device": "batch_per_device",
    "seq_len": "sequence_length",
    "memory_headroom": "memory_headroom",
    "expert_imbalance": "expert_imbalance",
    **{name: name for name in ("precision", "optimizer", "software", "attention", "norms", "search_mode")},
}
"""Settings that are options of the request, and the fields of `WhatIfOptions` that they set."""


@dataclass(frozen=True, kw_only=True)
class WhatIfOptions(Request):
    """What a sweep plans.

    With `global_batch` every device count trains the same batch (strong scaling). With
    `batch_per_device` the batch is that many samples times the devices (weak scaling). Without either it
    grows with the devices from the network's default at the smallest count.

    ``settings`` are further axes, each a key and its values: an option of the request (``batch``, ``seq_len``,
    ``precision`` …), a pin (``tp`` …), or a number of the profile as ``meshwright profiles new --set`` takes it
    (``network`` …). Every combination is planned.
    """

    network: str
    hardware: tuple[str, ...]
    device_counts: tuple[int, ...]
    batch_per_device: int | None = None
    settings: tuple[tuple[str, tuple[str, ...]], ...] = ()


def combinations(options: WhatIfOptions) -> Iterator[tuple[dict[str, str], WhatIfOptions]]:
    """Each combination of the settings, and the options with it, which have no settings of their own.

    Raises
    ------
    InputError
        A value is wrong, a key stands twice, or there are too many points.
    """
    keys = [key for key, _ in options.settings]
    points = math.prod(len(values) for _, values in options.settings)
    points *= len(options.device_counts) * len(options.hardware)
    if len(set(keys)) < len(keys) or points > MOST_POINTS:
        raise InputError(
            f"--set {' '.join(keys)}: a key stands twice; give all its values at once"
            if len(set(keys)) < len(keys)
            else f"a sweep over {points} points; give fewer values: at most {MOST_POINTS} points are planned"
        )
    for values in itertools.product(*(values for _, values in options.settings)):
        chosen = dict(zip(keys, values, strict=True))
        yield chosen, _with(options, chosen)


def _with(options: WhatIfOptions, chosen: Mapping[str, str]) -> WhatIfOptions:
    of_profile = [f"{key}={value}" for key, value in chosen.items() if key not in _OF_REQUEST and key not in PIN_NAMES]
    fields: dict[str, object] = {
        field: _value(key, field, chosen[key]) for key, field in _OF_REQUEST.items() if key in chosen
    }
    if {"global_batch", "batch_per_device"} & set(fields):
        fields = {"global_batch": None, "batch_per_device": None, **fields}
    pins = Pins.read({key: value for key, value in chosen.items() if key in PIN_NAMES}).over(options.pins)
    hardware = tuple(_profile(name, of_profile) for name in options.hardware) if of_profile else options.hardware
    return replace(options, settings=(), pins=pins, hardware=hardware, **fields)  # type: ignore[arg-type]


def _value(key: str, field: str, text: str) -> object:
    if field not in _NUMBERS:
        return text
    try:
        found = _NUMBERS[field](text)
    except ValueError:
        found = -1
    if not 0 <= found < 10**9 or (field != "memory_headroom" and found < 1):
        example = _EXAMPLES.get(field, "64")
        raise InputError(f"--set {key}={text}: not a number that {key} can be; write for example --set {key}={example}")
    return found


def _profile(name: str, settings: Sequence[str]) -> str:
    """``PROFILE:KEY=VALUE,…``, which must be right for every point."""
    base, before = split_settings(name)
    found = f"{base}:{','.join([*before, *settings])}"
    if is_profile_path(name) or split_settings(found) != (base, (*before, *settings)):
        raise InputError(
            f"--set {settings[0]} for {name!r}: numbers are set of shipped profiles by name; write a second profile "
            "with the other number (meshwright profiles new), and name both with --hw"
        )
    return found


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
    if any(_OF_REQUEST.get(key) in ("global_batch", "batch_per_device") for key, _ in options.settings):
        return "the global batch is as set for each row", {}
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


def points_of(options: WhatIfOptions) -> tuple[tuple[dict[str, str], PlanRequest], ...]:
    """The settings and the request of each point: by profile in the order given, by setting, then by device count.

    Raises
    ------
    InputError
        A profile is missing or malformed, or a setting is wrong.
    """
    found = [(chosen, request) for chosen, one in combinations(options) for request in requests_of(one)]
    order = {name: place for place, name in enumerate(options.hardware)}
    return tuple(sorted(found, key=lambda point: _place(order, point[1].hardware)))


def _place(order: Mapping[str, int], hardware: str) -> int:
    """Which profile of the options a point has, perhaps with numbers set."""
    if hardware in order:
        return order[hardware]
    return next(place for name, place in order.items() if hardware.startswith((f"{name}:", f"{name},")))


def requests_of(options: WhatIfOptions) -> tuple[PlanRequest, ...]:
    """One request for each profile in the order given and each device count; settings are left out.

    Raises
    ------
    ProfileError
        A profile is missing or malformed.
    """
    from planner.cost.software import USUAL, as_run, norms_of
    from planner.planning.planning import with_usual_software

    named = "" if options.software == USUAL else options.software
    for name in options.hardware:
        as_run(load_profile(name), named, options.attention).with_headroom(options.memory_headroom)
    norms_of(named, options.norms)
    _, batches = batch_rule(options)
    return tuple(
        with_usual_software(
            PlanRequest(
                **options.shared() | {"global_batch": batches[devices]},
                hardware=name,
                devices=devices,
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
