"""What is built in: networks and hardware profiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.cli.tables import plain_table
from simulator.quantities import bytes_text, rate_text

if TYPE_CHECKING:
    from planner.networks import NetworkSummary
    from simulator.hardware import Hardware


def network_table(networks: Sequence[NetworkSummary]) -> Table:
    """The built-in networks."""
    table = plain_table(
        ("network", "name"), ("family", "name"), ("parameters", "number"), ("batch", "number"), ("sequence", "number"),
        ("what it is", "text"),
    )  # fmt: skip
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
        ("profile", "name"),
        ("memory", "number"),
        ("per\nnode", "number"),
        ("at\nmost", "number"),
        ("what it is", "text"),
    )
    for hardware in profiles:
        table.add_row(
            hardware.name,
            bytes_text(hardware.device_memory_bytes),
            str(hardware.devices_per_node),
            str(hardware.max_devices),
            hardware.description.partition(". ")[0].removesuffix("."),
        )
    return table


def profile_details(hardware: Hardware) -> Iterable[RenderableType]:
    """Every number of a profile with its source."""
    yield Text(f"{hardware.name}: {hardware.description}", style="bold")
    yield Text(f"hash {hardware.hash}")
    yield _sources_table((row.field, row.value, row.source) for row in hardware.rows)


def _sources_table(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Numbers with their sources; what a source says several times it says once here."""
    table = plain_table(("field", "text"), ("value", "text"), ("source", "text"))
    for field, value, source in rows:
        table.add_row(Text(field), Text(value), Text("; ".join(dict.fromkeys(source.split("; ")))))
    return table


def software_table(found: Sequence[dict[str, Any]]) -> Table:
    """The software that plans are predicted for."""
    table = plain_table(("software", "name"), ("usual for", "text"), ("what it is", "text"))
    for one in found:
        usual = "; ".join(f"{family}: {', '.join(kinds)}" for family, kinds in one["usual_for"].items())
        table.add_row(one["name"], usual, one["title"])
    return table


def software_details(found: dict[str, Any], rows: Sequence[dict[str, str]]) -> Iterable[RenderableType]:
    """Every number of software with its source."""
    yield Text(f"{found['name']}: {found['title']}", style="bold")
    yield _sources_table((row["field"], row["value"], row["source"]) for row in rows)
