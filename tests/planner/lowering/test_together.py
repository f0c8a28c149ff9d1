"""Steps of tensors that move at once are those of the rule as it is stated, looked up anew for every message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.lowering.together import Moves, together
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
) -> Iterator[Moves]:
    def kind(number: int, step: Step) -> tuple[object, ...]:
        alone = not isinstance(step.operation, Collective)
        return step.operation, step.axis, number if alone else dtypes[number]

    rest = [list(way) for way in ways]
    while any(rest):
        first = {number: kind(number, way[0]) for number, way in enumerate(rest) if way}
        later = {kind(number, step) for number, way in enumerate(rest) for step in way[1:]}
        chosen = next((one for one in first.values() if one not in later), next(iter(first.values())))
        message: Moves = []
        for number in [n for n, one in first.items() if one == chosen]:
            message.append((number, rest[number].pop(0)))
            if sum(size(*move) for move in message) >= limit:
                yield message
                message = []
        if message:
            yield message


@settings(max_examples=100, deadline=None)
@given(case=CASES, limit=st.sampled_from([1.0, 3.0, 1e9]))
def test_equal_messages_wait_for_each_other(case: list[tuple[tuple[Step, ...], str]], limit: float) -> None:
    ways, dtypes = [way for way, _ in case], [dtype for _, dtype in case]

    def size(number: int, step: Step) -> float:
        return 1.0 + (number + step.axis) % 3

    assert list(together(ways, dtypes, size, limit)) == list(looked_up(ways, dtypes, size, limit))


def test_many_equal_ways_are_looked_at_once_each() -> None:
    asked: list[int] = []
    step = Step(operation=Collective.ALL_GATHER, axis=0, before=(0,), after=(-1,), sharded_axes=())

    def size(number: int, step: Step) -> float:
        asked.append(number)
        return 1.0

    found = list(together([(step,)] * 1000, ["float32"] * 1000, size, 10.0))
    assert [len(moves) for moves in found] == [10] * 100
    assert asked == list(range(1000))
