"""Gradients on their ways to their owners, and the messages in which they wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.lowering.blueprint import Block
from planner.sharding.redistribution import Step
from simulator.program import Buffer, Collective

Then = Callable[["Gradient"], None]
"""Takes what a gradient has become."""
Kind = tuple[Collective, int, str, int, bool]
"""Gradients that may travel together: by collective, axis, type on the way, the message they are assigned to, and
whether they lie in the memory of the host."""


class Gradient(NamedTuple):
    """A gradient on its way: the node of its parameter, the unit whose copy it is, and the value that it is now."""

    parameter: int
    unit: int
    value: int


@dataclass(frozen=True, slots=True)
class Move:
    """A collective on a gradient's way: what it is called then, its bytes, and those of its part of the message.

    The gradient waits for it in ``bucket``.
    """

    key: Kind
    bucket: Pending
    target: int
    made: Buffer
    size_bytes: int
    payload: float
    dims: tuple[int, int]
    narrow_bytes: int
    """Bytes of the gradient in its own type, where it travels in another."""


@dataclass(slots=True, eq=False)
class Leg:
    """The way of a parameter's gradient up to its next message: ``blocks`` run before it, then it is ``value``.

    It waits for ``move``, and goes on by ``behind``, which is made of ``steps`` once the message is written. Where no
    message is left, ``then`` takes it. All copies of a layer that is written once share it.
    """

    parameter: int
    value: int
    blocks: tuple[Block, ...]
    move: Move | None
    steps: tuple[Step, ...]
    then: Then
    behind: Leg | None = None


class Accumulated(NamedTuple):
    """What a parameter's gradient is accumulated in, the unit where that is at home, and the steps behind it."""

    name: str
    home: int
    behind: tuple[Step, ...]


Entry = tuple[int, Leg]
"""A gradient that waits: its unit and its leg."""
Sent = tuple[int, Leg, Move]
"""One that leaves, with its move."""


@dataclass(slots=True)
class Pending:
    """Gradients waiting to travel together, until they are ``most`` or take ``full_bytes``."""

    most: float
    full_bytes: float
    entries: list[Entry] = field(default_factory=list)
    size_bytes: int = 0

    def emptied(self) -> list[Entry]:
        """Take out what waits."""
        entries, self.entries, self.size_bytes = self.entries, [], 0
        return entries
