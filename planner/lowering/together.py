"""Ways of several tensors to other placements, taken so that equal collectives travel in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from planner.sharding.redistribution import Step
from simulator.program import Collective

Moves = list[tuple[int, Step]]
"""Numbers of ways, each with its next step."""


def together(
    ways: Sequence[tuple[Step, ...]],
    dtypes: Sequence[str],
    size_bytes: Callable[[int, Step], float],
    limit_bytes: float,
) -> Iterator[Moves]:
    """Yield what moves at once, each way's steps in their order.

    A collective waits while another way still has to take the same one later; a message is full at `limit_bytes`.

    Parameters
    ----------
    ways : sequence of tuples of Step
    dtypes : sequence of str
        Type of each tensor: one message has numbers of one type.
    size_bytes : callable
        Bytes that a step of a way adds to its message.
    limit_bytes : float
    """

    def kind(number: int, step: Step) -> tuple[object, ...]:
        if isinstance(step.operation, Collective):
            return step.operation, step.axis, dtypes[number]
        return step.operation, step.axis, number

    done = [0] * len(ways)
    while True:
        waiting: dict[tuple[object, ...], list[int]] = {}
        for number, way in enumerate(ways):
            if done[number] < len(way):
                waiting.setdefault(kind(number, way[done[number]]), []).append(number)
        if not waiting:
            return
        later = {kind(n, step) for n, way in enumerate(ways) for step in way[done[n] + 1 :]}
        chosen = waiting[next((key for key in waiting if key not in later), next(iter(waiting)))]
        moves: Moves = []
        size = 0.0
        for number in chosen:
            step = ways[number][done[number]]
            done[number] += 1
            moves.append((number, step))
            size += size_bytes(number, step)
            if size >= limit_bytes:
                yield moves
                moves, size = [], 0.0
        if moves:
            yield moves
