"""The pace at which the host launches kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.hardware import Hardware
from simulator.launches import LAUNCH, MESSAGE_LAUNCHES, launches_of, message_launches, paced, pass_time
from simulator.profiles import load_profile
from simulator.program import Collective, Kernel, Task
from simulator.timing import task_times
from simulator.topology import group_shape
from tests.simulator.programs import AXES, DEVICES, communication, task

HARDWARE = load_profile("dgx-a100")
EACH = 40e-6


def hosted(seconds: float) -> Hardware:
    return replace(HARDWARE, training={LAUNCH: seconds} if seconds else {})


def launched(number: int, kernel: Kernel = Kernel.ELEMENTWISE) -> Task:
    return replace(task("k", kernel=kernel, flops=1.0, bytes_moved=1e3), launched_with=number)


def test_short_kernels_of_a_pass_end_at_the_pace_of_their_launches() -> None:
    tasks = [launched(0), launched(0), launched(0, Kernel.VIEW), launched(1), launched(-1)]
    found = paced(tasks, np.array([1e-6, 3e-6, 0.0, 60e-6, 2e-6]), hosted(EACH))
    # Two launches of the first pass; its view has none. The second pass is longer than its launch, the last task alone.
    np.testing.assert_allclose(found, [20e-6, 60e-6, 0.0, 60e-6, 2e-6])


def test_the_host_runs_ahead_while_messages_of_the_pass_travel() -> None:
    message = replace(communication("c", "tensor", collective=Collective.ALL_REDUCE), launched_with=0)
    seconds = np.array([10e-6, 10e-6, 50e-6])
    found = paced([launched(0), launched(0), message], seconds, hosted(EACH))
    np.testing.assert_allclose(found, [15e-6, 15e-6, 50e-6])
    long = np.array([10e-6, 10e-6, 70e-6])
    np.testing.assert_allclose(paced([launched(0), launched(0), message], long, hosted(EACH)), long)


def test_a_profile_that_states_no_launches_counts_none() -> None:
    tasks = [launched(0), launched(0)]
    alone = task_times(tasks, AXES, hosted(0.0), DEVICES)
    assert alone.sum() < 2 * EACH
    assert task_times(tasks, AXES, hosted(EACH), DEVICES).sum() == pytest.approx(2 * EACH)


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.sampled_from(list(Kernel)), st.floats(0.0, 1e-3)), min_size=1),
    st.floats(1e-6, 1e-4),
)
def test_a_pass_takes_the_longer_of_its_kernels_and_their_launches(
    given_tasks: list[tuple[int, Kernel, float]], each: float
) -> None:
    tasks = [launched(number, kernel) for number, kernel, _ in given_tasks]
    seconds = np.array([0.0 if kernel is Kernel.VIEW else s + 1e-9 for _, kernel, s in given_tasks])
    found = paced(tasks, seconds, hosted(each))
    assert (found >= seconds).all()
    for number in range(4):
        rows = [i for i, one in enumerate(tasks) if one.launched_with == number]
        count = sum(tasks[i].kernel not in (Kernel.VIEW, Kernel.COPY) for i in rows)
        least = max(seconds[rows].sum(), count * each) if count else seconds[rows].sum()
        assert found[rows].sum() == pytest.approx(least)
    outside = [i for i, one in enumerate(tasks) if one.launched_with < 0]
    np.testing.assert_array_equal(found[outside], seconds[outside])


def named(seconds: float = EACH) -> Hardware:
    return replace(HARDWARE, training={LAUNCH: seconds, MESSAGE_LAUNCHES: 1.0})


times = st.floats(0.0, 1.0)


@given(times, times, st.floats(0.0, 1e4))
def test_a_pass_of_known_software_takes_at_least_as_long(kernels: float, messages: float, launches: float) -> None:
    given_ = np.array([kernels + messages]), np.array([launches])
    usual, known = pass_time(hosted(EACH), *given_)[0], pass_time(named(), *given_)[0]
    assert known >= usual * (1 - 1e-12)
    assert known <= kernels + messages + launches * EACH + 1e-12


def test_the_host_of_known_software_launches_messages_too_and_runs_ahead_of_them() -> None:
    message = replace(communication("c", "tensor", collective=Collective.ALL_REDUCE), launched_with=0)
    tasks = [launched(0, Kernel.MATMUL), launched(0, Kernel.MATMUL), message]
    found = paced(tasks, np.array([1e-9, 1e-9, 50e-6]), named(), np.array([0.0, 0.0, 1.0]))
    np.testing.assert_allclose(found.sum(), (50e-6**3.5 + (3 * EACH) ** 3.5) ** (1 / 3.5), rtol=1e-4)
    np.testing.assert_allclose(found[2], 50e-6)


def test_ranks_of_two_processors_wait_for_each_other_at_a_message() -> None:
    groups = {size: group_shape(HARDWARE, size, 1) for size in (1, 2, 4, 8, 16)}
    waits = {size: message_launches(named(), group, Collective.ALL_REDUCE, "tensor") for size, group in groups.items()}
    assert waits[1] == 0.0
    assert waits[2] == waits[4] == 1.0
    assert waits[8] == waits[16] == pytest.approx(3.0)
    assert all(
        message_launches(hosted(EACH), group, Collective.ALL_REDUCE, "tensor") == 0.0 for group in groups.values()
    )


kinds = st.lists(st.sampled_from([Kernel.MATMUL, Kernel.ELEMENTWISE, Kernel.REDUCTION, Kernel.VIEW, Kernel.COPY]))


@given(kinds)
def test_chains_are_launched_once_in_plans_and_in_programs(kernels: list[Kernel]) -> None:
    tasks = [launched(0, kernel) for kernel in kernels]
    tiny = np.full(len(tasks), 1e-12)
    for hardware, chained in ((hosted(EACH), False), (named(), True)):
        counted = launches_of(kernels, chained=chained)
        whole = paced(tasks, tiny, hardware)[[k not in (Kernel.VIEW, Kernel.COPY) for k in kernels]].sum()
        assert whole == pytest.approx(counted * EACH, abs=1e-9)
