"""Errors and warnings of the auto-parallel context."""

from __future__ import annotations

from simulator.errors import InputError


class ContextError(InputError, ValueError):
    """A key is unknown, its value is wrong, or it contradicts another; the message says which and what to do."""


class IgnoredKeyWarning(UserWarning):
    """A key is set that the parallel mode does not read."""
