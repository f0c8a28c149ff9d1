"""What a training needs: devices, days, cost and energy, with failures and checkpoints counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planner.lowering.checked import checked_graph
from planner.planning.documents import plan_document
from planner.planning.goodput import DAY_S, OPTIONS, checkpoint_bytes, plan_goodput
from planner.planning.planning import capture_for
from planner.planning.shared_tables import SharedTables
from planner.plans.request import PlanRequest, Request
from planner.what_if.options import WhatIfOptions, requests_of
from planner.what_if.rows import plan_point
from simulator.errors import InfeasibleError, InputError
from simulator.profiles import load_profile

if TYPE_CHECKING:
    from planner.planning.one_stage import Candidate

MOST_DEVICES = 1024
"""Device counts are doubled up to this where none is given."""


@dataclass(frozen=True, kw_only=True)
class BudgetRow:
    """One cluster: the best plan, and what the training takes there.

    ``days`` counts what failures, restarts and checkpoints cost. ``cost`` is None without a price, ``energy_kwh``
    (devices alone, at full power) without a known power, and ``goodput`` is 1 where the profile says nothing of
    failures. ``interval`` is the 90 % interval of the prediction as factors, which time, cost and energy share.
    ``meets`` says whether the limits hold.
    """

    hardware: str
    devices: int
    candidate: Candidate
    days: float
    interval: tuple[float, float]
    tokens: float
    cost: float | None
    energy_kwh: float | None
    goodput: float
    meets: bool
    notes: tuple[str, ...] = ()

    @property
    def interval_days(self) -> tuple[float, float]:
        """The interval of ``days``."""
        return self._between(self.days)

    @property
    def interval_cost(self) -> tuple[float, float] | None:
        """The interval of ``cost``."""
        return None if self.cost is None else self._between(self.cost)

    @property
    def interval_energy_kwh(self) -> tuple[float, float] | None:
        """The interval of ``energy_kwh``."""
        return None if self.energy_kwh is None else self._between(self.energy_kwh)

    def _between(self, value: float) -> tuple[float, float]:
        return value * self.interval[0], value * self.interval[1]

    def document(self) -> dict[str, Any]:
        """Return one element of ``rows`` of ``meshwright budget --json``."""
        prediction = self.candidate.prediction
        return {
            "hw": self.hardware,
            "devices": self.devices,
            "days": self.days,
            "interval_days": self.interval_days,
            "tokens": self.tokens,
            "cost": self.cost,
            "interval_cost": self.interval_cost,
            "energy_kwh": self.energy_kwh,
            "interval_energy_kwh": self.interval_energy_kwh,
            "goodput": self.goodput,
            "meets": self.meets,
            "tokens_per_s": prediction.tokens_per_s,
            "step_time_s": prediction.step_time_s,
            "label": str(prediction.label),
            "plan": plan_document(self.candidate.plan, load_profile(self.hardware)),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(Request):
    """What is given of a training: two of tokens, time and devices.

    ``price`` is that of one device for an hour, by profile.
    """

    network: str
    hardware: tuple[str, ...]
    tokens: float | None = None
    within_s: float | None = None
    devices: int | None = None
    price: Mapping[str, float] = field(default_factory=dict)


def budget(options: BudgetOptions) -> tuple[BudgetRow, ...]:
    """Plan clusters of rising size until the training ends in time.

    Device counts are whole nodes, doubled from one node. With ``devices`` only that count is planned.
    The global batch is the same everywhere.

    Returns
    -------
    tuple of BudgetRow
        By profile in the order given, then by device count; the rows that meet the limits come first, cheapest first
        where all have a price, else those with the fewest devices.

    Raises
    ------
    InputError
        Too little is given, or the network reads no tokens.
    InfeasibleError
        No plan fits on any cluster.
    """
    given = [options.tokens, options.within_s, options.devices]
    if sum(value is not None for value in given) < 2:
        raise InputError("budget needs two of --tokens, --within and --devices; for example --tokens 300B --within 30d")
    for name in options.price:
        if name not in options.hardware:
            raise InputError(f"--price {name}=…: {name!r} is not one of the profiles of --hw; correct it")
    rows: list[BudgetRow] = []
    reasons: list[str] = []
    for name in options.hardware:
        for request, shared in _requests(options, name):
            found = plan_point(request, shared)
            if found.best is None:
                reasons.append(f"{name}, {request.devices} devices: {found.reason}")
                continue
            rows.append(_row(options, request, found.best, shared))
            if options.within_s is not None and rows[-1].meets:
                break
    if not rows:
        raise InfeasibleError(reasons[0] if reasons else "no cluster was planned")
    priced = all(row.cost is not None for row in rows)
    return tuple(sorted(rows, key=lambda row: (not row.meets, row.cost if priced else row.devices, row.days)))


def _requests(options: BudgetOptions, name: str) -> Iterator[tuple[PlanRequest, SharedTables]]:
    hardware = load_profile(name)
    if options.devices is not None:
        counts: tuple[int, ...] = (options.devices,)
    else:
        most = min(MOST_DEVICES, hardware.max_devices)
        doubled = (hardware.devices_per_node << power for power in range(most.bit_length()))
        counts = tuple(count for count in doubled if count <= most) or (hardware.devices_per_node,)
    shared = options.shared() | {"global_batch": _batch(options)}
    requests = requests_of(WhatIfOptions(**shared, hardware=(name,), device_counts=counts))
    tables = SharedTables(capture_for(requests[0]))
    yield from ((request, tables) for request in requests)


def _batch(options: BudgetOptions) -> int:
    from planner.networks import load_network

    if options.global_batch is not None:
        return options.global_batch
    return load_network(options.network, sequence_length=options.sequence_length).default_global_batch


def _row(options: BudgetOptions, request: PlanRequest, best: Candidate, shared: SharedTables) -> BudgetRow:
    prediction, hardware = best.prediction, load_profile(request.hardware)
    if prediction.tokens_per_s is None:
        raise InputError(f"network {options.network!r} reads no tokens; budgets count tokens: give a language network")
    useful, notes = 1.0, []
    if any(not getattr(hardware.reliability, name) for name in OPTIONS if not name.startswith("snapshot")):
        notes.append(f"profile {request.hardware} says nothing of failures: none are counted")
    else:
        size = checkpoint_bytes(best.plan, checked_graph(best.plan, shared.graph), hardware.devices_per_node)
        kept = plan_goodput(
            size, request.devices, hardware, hardware.reliability, step_time_s=prediction.step_time_s, days=1.0
        )
        useful = kept.expected.useful
    speed = prediction.tokens_per_s * useful
    tokens = options.tokens if options.tokens is not None else speed * (options.within_s or 0.0)
    days = tokens / speed / DAY_S
    low, high = (bound / prediction.step_time_s for bound in prediction.interval_s)
    hours, price = 24 * days * request.devices, options.price.get(request.hardware)
    power = hardware.board_power_w
    if price is not None:
        notes.append(f"cost of {request.hardware}: {price:g} a device and hour, as --price says")
    if power is not None:
        source = next((row.source for row in hardware.rows if row.field == "device.board_power_w"), "")
        notes.append(f"energy of {request.hardware}: devices alone, always at {power:g} W ({source})")
    return BudgetRow(
        hardware=request.hardware,
        devices=request.devices,
        candidate=best,
        days=days,
        interval=(low, high),
        tokens=tokens,
        cost=None if price is None else price * hours,
        energy_kwh=None if power is None else power * hours / 1000,
        goodput=useful,
        meets=options.within_s is None or days * DAY_S <= options.within_s * (1 + 1e-9),
        notes=tuple(notes),
    )
