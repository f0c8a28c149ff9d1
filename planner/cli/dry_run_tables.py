"""What `meshwright execute --dry-run` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from planner.cli.tables import facts
from simulator.quantities import bytes_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.execution.launch.dry_run import DryRun, MessageLine, RankLine

SHOWN_RANKS = 64
SHOWN_PASSES = 12
SHOWN_MEMBERS = 8


def dry_run_report(found: DryRun) -> Iterable[RenderableType]:
    """Everything that a dry run prints: the job, then rank after rank."""
    yield Text(
        f"would train steps {found.first_step} to {found.steps - 1} on {found.processes} processes ({found.backend}), "
        f"{found.precision}, {found.data}, {found.micro_batches} micro-batches a step",
        style="bold",
    )
    time, memory = found.predicted_step_time_s, found.predicted_peak_memory_bytes
    pairs = [
        ("step time", "" if time is None else f"{seconds_text(time)} predicted"),
        ("peak memory", "" if memory is None else f"{bytes_text(memory)} predicted"),
        ("refused here", found.refused or ""),
        *(("note", note) for note in found.notes),
    ]
    yield facts(pairs)
    for line in found.ranks[:SHOWN_RANKS]:
        yield from _rank(line)
    if len(found.ranks) > SHOWN_RANKS:
        yield Text(f"… and {len(found.ranks) - SHOWN_RANKS} more ranks; --json has all of them")


def _rank(line: RankLine) -> Iterator[RenderableType]:
    place = ", ".join(f"{axis} {at}" for axis, at in line.place.items())
    yield Text(f"\nrank {line.rank}" + (f" ({place})" if place else ""), style="bold")
    pairs = [
        ("stages", ", ".join(map(str, line.stages))),
        ("passes", _passes(line.passes)),
        ("holds", f"{line.parameters} parameters, {bytes_text(line.parameter_bytes)}"),
        ("loads", ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in line.inputs.items())),
    ]
    pairs += [(collective, _message(one)) for collective, ones in groupby(line.messages, _kind) for one in ones]
    yield facts(pairs)


def _kind(message: MessageLine) -> str:
    return message.collective


def _message(message: MessageLine) -> str:
    members = ", ".join(map(str, message.group[:SHOWN_MEMBERS]))
    rest = f", … ({len(message.group)} ranks)" if len(message.group) > SHOWN_MEMBERS else ""
    calls = f"{message.count} time{'s' if message.count > 1 else ''} a step"
    return f"{calls}, {bytes_text(message.total_bytes)} in all, {message.axis}: ranks {members}{rest}"


def _passes(passes: tuple[str, ...]) -> str:
    shown = " ".join(passes[:SHOWN_PASSES])
    return shown + (f" … ({len(passes)})" if len(passes) > SHOWN_PASSES else "")
