"""What a run changed in a profile, as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.cli.tables import facts
from planner.quantities import percent_text

if TYPE_CHECKING:
    from simulator.calibration.from_run import Corrected


def correction_report(found: Corrected) -> Iterable[RenderableType]:
    """Everything `meshwright calibrate --from-run` prints."""
    yield Text(f"corrected by {' and '.join(found.runs)}", style="bold")
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True)
    for name in ("", "sizes", "fixed cost", "the rest", "error before", "after"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in found.corrections:
        table.add_row(
            one.name,
            str(one.rows),
            "" if one.fixed is None else f"× {one.fixed:.2f}",
            f"× {one.rest:.2f}",
            percent_text(one.before),
            percent_text(one.after),
        )
    yield Padding(table, (1, 0, 1, 0))
    yield facts([("written", str(found.path))])
