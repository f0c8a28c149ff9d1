"""Sweeps over clusters and device counts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.plans import HardwareLike, PinOptions, TrainingPlan, html_table, profile_of
from planner.planning import summary
from planner.plans.pins import Pins
from planner.what_if.budget import BudgetRow
from planner.what_if.options import WhatIfOptions, batch_rule
from planner.what_if.rows import WhatIfRow, row_document
from planner.what_if.sweep import what_if as swept
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from simulator.quantities import percent_text

if TYPE_CHECKING:
    from typing import Unpack

    from meshwright.plans import NetworkLike, PinValue


@dataclass(frozen=True, kw_only=True)
class WhatIfResult:
    """The best plan on each cluster at each device count.

    Examples
    --------
    >>> import meshwright as mw
    >>> sweep = mw.what_if("zoo:mlp", hardware=["dgx-a100", "dgx-h100"], devices=[1, 8])
    >>> [(row["hw"], row["devices"]) for row in sweep.rows()]
    [('dgx-a100', 1), ('dgx-a100', 8), ('dgx-h100', 1), ('dgx-h100', 8)]
    >>> sweep.plan("dgx-h100", 8).devices
    8
    """

    network: str
    batch_rule: str
    found: tuple[WhatIfRow, ...] = field(repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """Return one document for each point, as ``meshwright what-if --json`` prints them.

        Examples
        --------
        >>> import meshwright as mw
        >>> [row["devices"] for row in mw.what_if("zoo:mlp", hardware="dgx-a100", devices=[1, 8]).rows()]
        [1, 8]
        """
        return [row_document(row) for row in self.found]

    def plan(self, hardware: str, devices: int) -> TrainingPlan:
        """Return the best plan of one point; settings stand behind the profile: ``"dgx-h100, network=400Gb"``.

        Raises
        ------
        KeyError
            There is no such point, or no plan fits there.

        Examples
        --------
        >>> import meshwright as mw
        >>> mw.what_if("zoo:mlp", hardware="dgx-a100", devices=[8]).plan("dgx-a100", 8).devices
        8
        """
        for row in self.found:
            named = hardware in (row.hardware, row.label) and row.devices == devices
            if named and row.best is not None:
                best = row.best
                return TrainingPlan(
                    plan=best.plan, hardware=load_profile(best.plan.hardware), predicted=best.prediction
                )
        raise KeyError((hardware, devices))

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the sweep as a page with pictures, in one HTML file.

        Examples
        --------
        >>> import meshwright as mw, os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = mw.what_if("zoo:mlp", "dgx-a100", [1, 8]).save(os.path.join(folder, "sweep.html"))
        ...     page.stat().st_size < 2_000_000
        True
        """
        from reports.what_if import write_what_if_page

        write_what_if_page(self.found, network=self.network, batch_rule=self.batch_rule, path=Path(path))
        return Path(path)

    def __repr__(self) -> str:
        return f"{self.network}, {self.batch_rule}\n{summary.plain_text_table(*self._table())}"

    def _repr_html_(self) -> str:
        return html_table(f"{self.network}, {html.escape(self.batch_rule)}", *self._table())

    def _table(self) -> tuple[list[summary.Column], list[tuple[str, ...]]]:
        first = next((row.best for row in self.found if row.best is not None), None)
        # The interval has no room beside cluster and scaling in 80 columns; `rows` has it.
        columns = summary.columns(first.prediction) if first is not None else (("plan", False),)
        shown = [place for place, (name, _) in enumerate(columns) if "interval" not in name]
        rows = []
        for row in self.found:
            start = (row.label, str(row.devices))
            if row.best is None:
                rows.append((*start, "", f"no plan: {row.reason}", *[""] * (len(shown) - 1)))
            else:
                scaling = "" if row.scaling_efficiency is None else percent_text(row.scaling_efficiency)
                cells = summary.cells(row.best.plan, row.best.prediction)
                rows.append((*start, scaling, *(cells[place] for place in shown)))
        head = [("hardware", False), ("devices", True), ("scaling", True)]
        return [*head, *(columns[place] for place in shown)], rows


def what_if(
    network: NetworkLike,
    hardware: HardwareLike | Sequence[HardwareLike],
    devices: Sequence[int],
    *,
    global_batch: int | None = None,
    batch_per_device: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    software: str | None = None,
    attention: str | None = None,
    norms: str | None = None,
    expert_imbalance: float = 1.0,
    memory_headroom: float = 0.0,
    settings: Mapping[str, Sequence[object]] | None = None,
    jobs: int = 1,
    cluster: str | None = None,
    pins: Mapping[str, PinValue] | None = None,
    **pinned: Unpack[PinOptions],
) -> WhatIfResult:
    """Find the best plan on each cluster at each device count.

    Parameters
    ----------
    network
        A specification such as ``"zoo:gpt2"``, a configuration or model of transformers, or a factory.
    hardware
        One or several profiles.
    devices
        Device counts.
    global_batch, batch_per_device
        Samples of a step at every count, or for each device; at most one of them.
    settings
        Further axes with their values, all combined: options of the request (``batch``, ``seq_len``, ``precision`` …),
        pins (``tp`` …), or numbers of the profile as ``meshwright profiles new --set`` takes them (``network`` …).
    jobs
        Local processes that plan side by side.
    cluster
        ``dask://HOST:PORT`` of a scheduler whose workers plan instead.
    seq_len, precision, optimizer, software, attention, norms, expert_imbalance, memory_headroom, pins, **pinned
        As `meshwright.plan` has them.

    Raises
    ------
    InputError
        An argument is wrong for every point; what is wrong for some is the reason of their rows.

    Examples
    --------
    >>> import meshwright as mw
    >>> mw.what_if("zoo:mlp", hardware="dgx-a100", devices=[1, 8]).plan("dgx-a100", 1).dp
    1
    >>> sweep = mw.what_if("zoo:mlp", "dgx-a100", [16], global_batch=512, settings={"network": ["100Gb", "400Gb"]})
    >>> [row["settings"] for row in sweep.rows()]
    [{'network': '100Gb'}, {'network': '400Gb'}]
    """
    from planner.networks.given import source_of

    given = [hardware] if isinstance(hardware, str | PathLike | Hardware) else hardware
    spec = source_of(network)
    options = WhatIfOptions(
        network=spec if isinstance(spec, str) else spec.spec,
        hardware=tuple(profile_of(one) for one in given),
        device_counts=tuple(sorted(set(devices))),
        global_batch=global_batch,
        batch_per_device=batch_per_device,
        sequence_length=seq_len,
        precision=precision,
        optimizer=optimizer,
        pins=Pins.read({**(pins or {}), **pinned}),
        software=software or "",
        attention=attention or "",
        norms=norms or "",
        expert_imbalance=expert_imbalance,
        memory_headroom=memory_headroom,
        settings=tuple((key, tuple(map(str, values))) for key, values in (settings or {}).items()),
    )
    return WhatIfResult(
        network=options.network, batch_rule=batch_rule(options)[0], found=swept(options, jobs=jobs, cluster=cluster)
    )


@dataclass(frozen=True, kw_only=True)
class BudgetResult:
    """Estimate what a training needs on each cluster; the first row is the answer if its ``meets`` is true.

    Examples
    --------
    >>> import meshwright as mw
    >>> found = mw.budget("zoo:gpt2", "dgx-h100", tokens=1e9, devices=8, global_batch=64, price={"dgx-h100": 2.5})
    >>> found.best.devices, found.best.cost > 0
    (8, True)
    """

    network: str
    found: tuple[BudgetRow, ...] = field(repr=False)

    @property
    def best(self) -> BudgetRow:
        """The cheapest cluster that meets the limits, or the one with the fewest devices where prices are unknown."""
        return self.found[0]

    def rows(self) -> list[dict[str, Any]]:
        """Return one document for each cluster, as ``meshwright budget --json`` prints them.

        Examples
        --------
        >>> import meshwright as mw
        >>> found = mw.budget("zoo:gpt2", "dgx-h100", tokens=1e9, devices=8, global_batch=64)
        >>> [(row["hw"], row["devices"]) for row in found.rows()]
        [('dgx-h100', 8)]
        """
        return [row.document() for row in self.found]

    def __repr__(self) -> str:
        return f"{self.network}\n{summary.plain_text_table(*self._table())}"

    def _repr_html_(self) -> str:
        return html_table(html.escape(self.network), *self._table())

    def _table(self) -> tuple[list[summary.Column], list[tuple[str, ...]]]:
        names = ("hardware", "devices", "days", "cost", "energy,\nkWh", "goodput", "plan")
        rows: list[tuple[str, ...]] = [
            (
                row.hardware,
                str(row.devices),
                f"{row.days:.3g}",
                "" if row.cost is None else f"{row.cost:,.0f}",
                "" if row.energy_kwh is None else f"{row.energy_kwh:,.0f}",
                percent_text(row.goodput),
                summary.degrees_text(row.candidate.plan),
            )
            for row in self.found
        ]
        return [(name, name not in ("hardware", "plan")) for name in names], rows


def budget(
    network: NetworkLike,
    hardware: HardwareLike | Sequence[HardwareLike],
    *,
    tokens: float | None = None,
    within_days: float | None = None,
    devices: int | None = None,
    price: Mapping[str, float] | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    software: str | None = None,
    memory_headroom: float = 0.0,
    pins: Mapping[str, PinValue] | None = None,
    **pinned: Unpack[PinOptions],
) -> BudgetResult:
    """Find how many devices a training needs, how long it takes and what it costs.

    Parameters
    ----------
    network
        A language network: a specification, a configuration or model of transformers, or a factory.
    hardware
        One or several profiles.
    tokens, within_days, devices
        Two of these: tokens to train on, days that it may take, devices.
    price
        Price of one device for an hour, by profile.
    global_batch, seq_len, precision, optimizer, software, memory_headroom, pins, **pinned
        As `meshwright.plan` has them.

    Raises
    ------
    InputError
        Too little is given, or the network reads no tokens.
    InfeasibleError
        No plan fits on any cluster.

    Examples
    --------
    >>> import meshwright as mw
    >>> row = mw.budget("zoo:gpt2", "dgx-h100", tokens=1e9, devices=8, global_batch=64).best
    >>> row.days > 0 and row.interval_days[0] < row.days < row.interval_days[1]
    True
    """
    from planner.networks.given import source_of
    from planner.what_if.budget import BudgetOptions
    from planner.what_if.budget import budget as budgeted

    given = [hardware] if isinstance(hardware, str | PathLike | Hardware) else hardware
    spec = source_of(network)
    options = BudgetOptions(
        network=spec if isinstance(spec, str) else spec.spec,
        hardware=tuple(profile_of(one) for one in given),
        tokens=tokens,
        within_s=None if within_days is None else within_days * 86400,
        devices=devices,
        price=dict(price or {}),
        global_batch=global_batch,
        sequence_length=seq_len,
        precision=precision,
        optimizer=optimizer,
        pins=Pins.read({**(pins or {}), **pinned}),
        software=software or "",
        memory_headroom=memory_headroom,
    )
    return BudgetResult(network=options.network, found=budgeted(options))
