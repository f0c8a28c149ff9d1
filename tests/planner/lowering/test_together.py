"""Steps of tensors that move at once are those of the rule as it is stated, looked up anew for every message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.lowering.together import together
from planner.sharding.redistribution import Step
from simulator.program import Collective

OPERATIONS = (Collective.ALL_GATHER, Collective.ALL_TO_ALL, "slice", "mask")
STEPS = st.builds(
    Step,
    operation=st.sampled_from(OPERATIONS),
    axis=st.integers(0, 1),
    before=st.just((0, -1)),
    after=st.just((-1, -1)),
    sharded_axes=st.just(()),
)
CASES = st.lists(st.lists(STEPS, max_size=4).map(tuple), min_size=1, max_size=4).flatmap(
    lambda pool: st.lists(st.tuples(st.sampled_from(pool), st.sampled_from(["float32", "bfloat16"])), max_size=8)
)


def looked_up(
    ways: Sequence[tuple[Step, ...]], dtypes: Sequence[str], size: Callable[[int, Step], float], limit: float
) -> Iterator[list[tuple[int, Step]]]:
    def kind(number: int, step: Step) -> tuple[object, ...]:
        alone = not isinstance(step.operation, Collective)
        return step.operation, step.axis, number if alone else dtypes[number]

    rest = [list(way) for way in ways]
    while any(rest):
        first = {number: kind(number, way[0]) for number, way in enumerate(rest) if way}
        steps = [(number, step) for number, way in enumerate(rest) for step in way[1:]]
        later = {kind(number, step) for number, step in steps if isinstance(step.operation, Collective)}
        chosen = next((one for one in first.values() if one not in later), next(iter(first.values())))
        message: list[tuple[int, Step]] = []
        for number in [n for n, one in first.items() if one == chosen]:
            message.append((number, rest[number].pop(0)))
            if sum(size(*move) for move in message) >= limit:
                yield message
                message = []
        if message:
            yield message


@settings(max_examples=200, deadline=None)
@given(case=CASES, which=st.lists(st.integers(0, 7), max_size=12), limit=st.sampled_from([1.0, 3.0, 1e9]))
def test_equal_messages_wait_for_each_other(
    case: list[tuple[tuple[Step, ...], str]], which: list[int], limit: float
) -> None:
    ways, dtypes = [way for way, _ in case], [dtype for _, dtype in case]
    taken = [number % len(case) for number in which] if case else []

    def size(number: int, step: Step) -> float:
        return 1.0 + (taken[number] + step.axis) % 3

    sizes = [[1.0 + (number + step.axis) % 3 for step in way] for number, way in enumerate(ways)]
    found = together(ways, dtypes, sizes, np.array(taken, dtype=np.int64), limit)
    listed: list[list[tuple[int, Step]]] = []
    for *moves, alone in found:
        moved = [(n, ways[w][s]) for n, w, s in zip(*(part.tolist() for part in moves), strict=True)]
        listed += [[move] for move in moved] if alone else [moved]
    each = [ways[number] for number in taken], [dtypes[number] for number in taken]
    assert listed == list(looked_up(*each, size, limit))


def test_messages_of_many_tensors_are_full_at_their_size() -> None:
    step = Step(operation=Collective.ALL_GATHER, axis=0, before=(0,), after=(-1,), sharded_axes=())
    many = np.zeros(1000, dtype=np.int64)
    for limit, counts in ((10.0, [10] * 100), (150.0, [150] * 6 + [100])):
        assert [len(moves.numbers) for moves in together([(step,)], ["float32"], [[1.0]], many, limit)] == counts
