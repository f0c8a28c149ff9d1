"""Messages of collectives, round by round: what groups that act at once put on the links they share.

A *block* holds the members of a group inside one unit (a node), a group is a list of blocks of equal size. Payloads
count as in `program.Collective`: ``S`` is the whole tensor, of which a member of a gather holds ``S / n``.

Rounds wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Message(NamedTuple):
    """Bytes from one device to another, or between a device and a switch that computes."""

    source: int | str
    destination: int | str
    size_bytes: float


Block = Sequence[int]
Round = list[Message]


def ring_gather(blocks: Sequence[Block], payload: float) -> list[Round]:
    """All-gather or reduce-scatter around ``c`` rings at once, ``c`` the members of a block.

    Ring ``k`` leaves a block by another member than the others do, and reaches the next block at the member of the
    same place, as NCCL's rings do: every second block is run through backwards.
    """
    rings = rings_of(blocks)
    members = len(rings[0])
    size = payload / members / len(rings)
    step = [Message(a, b, size) for ring in rings for a, b in itertools.pairwise([*ring, ring[0]])]
    return [step] * (members - 1)


def pairwise_all_to_all(blocks: Sequence[Block], payload: float) -> list[Round]:
    """``S / n`` from every member to every other, all at once."""
    group = [device for block in blocks for device in block]
    return [[Message(a, b, payload / len(group)) for a, b in itertools.permutations(group, 2)]]


def direct_send(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Every member but the last sends to the next, as the stages of a pipeline do."""
    group = [device for block in blocks for device in block]
    return [[Message(a, b, payload) for a, b in itertools.pairwise(group)]]


Pattern = Callable[[Sequence[Block], float], list[Round]]


def rings_of(blocks: Sequence[Block]) -> list[list[int]]:
    """The rings of `ring_gather`, each a list of devices."""
    if len(blocks) == 1:
        return [list(blocks[0])]
    rings = []
    for start in range(len(blocks[0])):
        ring: list[int] = []
        for number, block in enumerate(blocks):
            turned = [*block[start:], *block[:start]]
            ring += turned[::-1] if number % 2 else turned
        rings.append(ring)
    return rings
