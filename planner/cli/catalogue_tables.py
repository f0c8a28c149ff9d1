"""What is built in: networks and hardware profiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.cli.tables import (
    plain_table,
)
from simulator.quantities import bytes_text, rate_text

if TYPE_CHECKING:
    from planner.networks import NetworkSummary
    from simulator.hardware import Hardware


def network_table(networks: Sequence[NetworkSummary]) -> Table:
    """The built-in networks."""
    table = plain_table(
        ("network", ""), ("family", ""), ("parameters", "right"), ("batch", "right"), ("sequence", "right")
    )
    table.add_column("what it is")
    for network in networks:
        table.add_row(
            network.spec,
            network.family,
            count_text(network.parameters),
            str(network.default_global_batch),
            str(network.default_sequence_length or ""),
            network.description,
        )
    return table


def count_text(count: int) -> str:
    """A count with three figures, such as ``25.6 M``; ``B`` is 10⁹."""
    return rate_text(float(count), "").removesuffix("/s").strip().replace("G", "B")


def profile_table(profiles: Sequence[Hardware]) -> Table:
    """The built-in profiles."""
    table = plain_table(
        ("profile", ""), ("device", ""), ("memory", "right"), ("per node", "right"), ("at most", "right")
    )
    table.add_column("what it is")
    for hardware in profiles:
        table.add_row(
            hardware.name,
            hardware.device_name,
            bytes_text(hardware.device_memory_bytes),
            str(hardware.devices_per_node),
            str(hardware.max_devices),
            hardware.description,
        )
    return table


def profile_details(hardware: Hardware) -> Iterable[RenderableType]:
    """Every number of a profile with its source."""
    yield Text(f"{hardware.name}: {hardware.description}", style="bold")
    yield Text(f"hash {hardware.hash}")
    table = plain_table()
    for name in ("field", "value", "source"):
        table.add_column(name, overflow="fold")
    for row in hardware.rows:
        table.add_row(Text(row.field), Text(row.value), Text(row.source))
    yield table


def software_table(found: Sequence[dict[str, Any]]) -> Table:
    """The software that plans are predicted for."""
    table = plain_table(("software", ""), ("stack", ""), ("fused by", ""))
    table.add_column("usual for")
    table.add_column("what it is")
    for one in found:
        usual = "; ".join(f"{family}: {', '.join(kinds)}" for family, kinds in one["usual_for"].items())
        table.add_row(one["name"], one["stack"], one["fusion"], usual, one["title"])
    return table


def software_details(found: dict[str, Any], rows: Sequence[dict[str, str]]) -> Iterable[RenderableType]:
    """Every number of software with its source."""
    yield Text(f"{found['name']}: {found['title']}", style="bold")
    table = plain_table()
    for name in ("field", "value", "source"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(Text(row["field"]), Text(row["value"]), Text(row["source"]))
    yield table
