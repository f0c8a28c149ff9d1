"""From labels chosen for every unit to the rules of a plan."""

from __future__ import annotations


def rules_of() -> None:
    """Write later."""
