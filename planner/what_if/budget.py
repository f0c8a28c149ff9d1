"""What a training needs: devices, days, cost and energy, with failures and checkpoints counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planner.lowering.checked import checked_graph
from planner.planning.documents import plan_document
from planner.planning.goodput import DAY_S, OPTIONS, checkpoint_bytes, plan_goodput
from planner.planning.planning import capture_for
from planner.planning.shared_tables import SharedTables
from planner.planning.summary import degrees_text
from planner.plans.request import PlanRequest, Request
from planner.what_if.options import WhatIfOptions, requests_of
from planner.what_if.rows import plan_point
from simulator.errors import InfeasibleError, InputError
from simulator.profiles import load_profile

if TYPE_CHECKING:
    from planner.planning.one_stage import Candidate

MOST_DEVICES = 1024
"""Device counts are doubled up to this where none is given."""
HALVINGS = 3
"""Device counts tried between the last that is too slow and the first that is not."""


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

    def __repr__(self) -> str:
        low, high = self.interval_days
        cost = "" if self.cost is None else f", cost {self.cost:,.0f}"
        return (
            f"{self.devices} × {self.hardware}: {self.days:.3g} days ({low:.3g}–{high:.3g}){cost}, "
            f"{degrees_text(self.candidate.plan)}"
        )

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

    Device counts are whole nodes, doubled from one node until the training ends in time; then the gap to the last count
    that was too slow is halved a few times. With ``devices`` only that count is planned. The global batch is the same
    everywhere.

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
    found = [row for name in options.hardware for row in _rows(options, name)]
    rows = [row for row in found if isinstance(row, BudgetRow)]
    if not rows:
        raise InfeasibleError(next((row for row in found if isinstance(row, str)), "no cluster was planned"))
    priced = all(row.cost is not None for row in rows)
    return tuple(sorted(rows, key=lambda row: (not row.meets, row.cost if priced else row.devices, row.days)))


def _rows(options: BudgetOptions, name: str) -> Iterator[BudgetRow | str]:
    """Plan clusters of one profile; yield a row for each, or why none of its plans fits."""
    node, at = load_profile(name).devices_per_node, _planner(options, name)
    if options.devices is not None:
        yield at(options.devices)
        return
    most = max(min(MOST_DEVICES, load_profile(name).max_devices), node)
    too_few, enough = 0, node
    while not _meets(row := at(enough)):
        yield row
        too_few, enough = enough, 2 * enough
        if enough > most:
            return
    yield row
    for _ in range(HALVINGS):
        middle = (too_few + enough) // 2 // node * node
        if middle == too_few:
            return
        yield (row := at(middle))
        too_few, enough = (too_few, middle) if _meets(row) else (middle, enough)


def _meets(row: BudgetRow | str) -> bool:
    return isinstance(row, BudgetRow) and row.meets


def _planner(options: BudgetOptions, name: str) -> Callable[[int], BudgetRow | str]:
    """Return what plans a count of devices of a profile; the network is captured once."""
    shared = options.shared() | {"global_batch": _batch(options)}
    tables: SharedTables | None = None

    def at(devices: int) -> BudgetRow | str:
        nonlocal tables
        (request,) = requests_of(WhatIfOptions(**shared, hardware=(name,), device_counts=(devices,)))
        tables = tables or SharedTables(capture_for(request))
        found = plan_point(request, tables)
        if found.best is None:
            return f"{name}, {devices} devices: {found.reason}"
        return _row(options, request, found.best, tables)

    return at


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
