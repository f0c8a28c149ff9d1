"""`meshwright budget`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import RequestOptions, natural, option, read_profiles, takes
from planner.cli.terminal import Terminal
from simulator.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.what_if.budget import BudgetRow

_COUNTS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_TIMES = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def scaled(text: str, units: dict[str, float], what: str, example: str) -> float:
    """Read a number with a unit behind it.

    >>> scaled("2T", _COUNTS, "--tokens", "300B"), scaled("36h", _TIMES, "--within", "30d")
    (2000000000000.0, 129600.0)
    """
    factor = units.get(text[-1:], 1.0 if units is _COUNTS else 0.0)
    try:
        value = float(text[:-1] if text[-1:] in units else text) * factor
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{what} {text!r} is not a number above 0 with a unit of {', '.join(units)}; write {example}")
    return value


def read_prices(texts: list[str]) -> dict[str, float]:
    """Read ``PROFILE=PER_HOUR`` texts.

    >>> read_prices(["dgx-h100=2.5"])
    {'dgx-h100': 2.5}
    """
    found = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            price = float(value)
        except ValueError:
            price = math.nan
        if not name or not 0 <= price < math.inf:
            raise InputError(f"--price {text!r} is not PROFILE=PER_HOUR of one device; write dgx-h100=2.5")
        found[name] = price
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetArguments(RequestOptions):
    """Arguments and options, None where not given."""

    network: Annotated[str, typer.Argument(help="A language network, as `plan` takes it.", metavar="NETWORK")]
    hardware: Annotated[str, option("--hw", "Names or paths of profiles.", "PROFILE[,PROFILE...]")]
    tokens: Annotated[str | None, option("--tokens", "Tokens to train on, such as 2T.", "N")] = None
    within: Annotated[str | None, option("--within", "Time limit: 12h, 30d or 4w.", "TIME")] = None
    devices: Annotated[int | None, option("--devices", "Devices; else as few as suffice.", "N", natural)] = None
    price: Annotated[
        list[str] | None, option("--price", "Price of one device for an hour; may be repeated.", "PROFILE=PER_HOUR")
    ] = None


@takes(BudgetArguments)
def budget(given: BudgetArguments, terminal: Terminal) -> None:
    """Find how many devices a training needs, how long it takes and what it costs; two of the limits are given.

    Failures, restarts and checkpoints count. The first row is the answer: the cheapest where all profiles have a price,
    else the fewest devices.

    \b
    Example: 2 trillion tokens in 30 days, on which cluster and on how many devices
      meshwright budget zoo:llama2-7b --tokens 2T --within 30d --hw dgx-h100,dgx-h200 --global-batch 1024
    How long on 64 devices, and what does it cost at 2.50 an hour
      meshwright budget zoo:gpt2 --tokens 300B --devices 64 --hw dgx-h100 --price dgx-h100=2.5 --global-batch 512

    Exit code 3: no plan fits, or none is fast enough.
    """
    from planner.what_if.budget import BudgetOptions
    from planner.what_if.budget import budget as found_rows
    from simulator.errors import InfeasibleError

    options = BudgetOptions(
        **given.asked(),
        hardware=read_profiles(given.hardware),
        tokens=None if given.tokens is None else scaled(given.tokens, _COUNTS, "--tokens", "300B"),
        within_s=None if given.within is None else scaled(given.within, _TIMES, "--within", "30d"),
        devices=given.devices,
        price=read_prices(given.price or []),
    )
    with terminal.working(f"planning {given.network}"):
        rows = found_rows(options)
    first = rows[0]
    terminal.result(
        {"network": given.network, "rows": [row.document() for row in rows]},
        f"{first.hardware} {first.devices} {first.days:.4g}",
        lambda: _report(rows),
    )
    if not first.meets:
        raise InfeasibleError(
            f"no cluster is fast enough: {first.devices} × {first.hardware} takes {first.days:.3g} days; allow more "
            "time, name another profile with --hw, or a larger --global-batch"
        )


def _report(rows: tuple[BudgetRow, ...]) -> Iterator[RenderableType]:
    from rich.text import Text

    from planner.cli.tables import Kind, facts, plain_table
    from planner.planning.summary import degrees_text
    from simulator.quantities import percent_text

    names = ["cluster", "days", "energy, MWh", "goodput", "plan"]
    if any(row.cost is not None for row in rows):
        names.insert(2, "cost")
    kinds: dict[str, Kind] = {"cluster": "name", "plan": "text"}
    table = plain_table(*((name, kinds.get(name, "number")) for name in names))
    for row in rows:
        cells: dict[str, RenderableType] = {
            "cluster": _cluster(row),
            "days": Text(_ranged(row.days, row.interval_days, "{:.3g}"), style="" if row.meets else "red"),
            "cost": _ranged(row.cost, row.interval_cost, "{:,.0f}"),
            "energy, MWh": _ranged(row.energy_kwh, row.interval_energy_kwh, "{:.3g}", 1e-3),
            "goodput": percent_text(row.goodput),
            "plan": degrees_text(row.candidate.plan),
        }
        table.add_row(*(cells[name] for name in names))
    yield table
    first, late = rows[0], [_cluster(row) for row in rows if not row.meets]
    yield facts(
        [
            ("answer", f"{_cluster(first)}: {first.days:.3g} days" if first.meets else ""),
            ("too slow", ", ".join(late)),
            ("ranges", "90 % interval of the prediction"),
            *(("note", note) for note in dict.fromkeys(note for row in rows for note in row.notes)),
        ]
    )


def _cluster(row: BudgetRow) -> str:
    return f"{row.devices} × {row.hardware}"


def _ranged(value: float | None, interval: tuple[float, float] | None, form: str, unit: float = 1.0) -> str:
    """A value over its interval; empty where it is not known."""
    if value is None or interval is None:
        return ""
    middle, low, high = (form.format(unit * number) for number in (value, *interval))
    return f"{middle}\n{low}–{high}"
