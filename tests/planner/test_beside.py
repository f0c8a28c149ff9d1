"""Work shared with a fork of the process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.planning.beside import Beside
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.pins import Pins

forks = pytest.mark.skipif(sys.platform != "linux", reason="plans are simulated beside on Linux alone")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


@given(st.integers(0, 6).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=9) if n else st.just([])))
def test_one_core_works_out_what_is_asked_for_alone(asked: Sequence[int]) -> None:
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        return number

    with closing(Beside({n: partial(work, n) for n in range(6)}, 1)) as beside:
        assert [beside.value(n) for n in asked] == list(asked)
    assert done == list(dict.fromkeys(asked))


@pytest.mark.parametrize("asked", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 2, 0), ()])
def test_values_are_those_of_the_functions_in_any_order(asked: Sequence[int]) -> None:
    with closing(Beside({n: partial(pow, 3, n) for n in range(4)}, 2)) as beside:
        assert [beside.value(n) for n in asked] == [3**n for n in asked]


@forks
def test_the_other_process_begins_at_once(tmp_path: Path) -> None:
    def work(number: int) -> int:
        (tmp_path / f"{number} of {os.getpid()}").touch()
        return os.getpid()

    with closing(Beside(dict(enumerate([partial(work, 0), partial(work, 1)])), 2)) as beside:
        _wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
        assert {beside.value(0), beside.value(1)}.isdisjoint({os.getpid()})
    assert len(list(tmp_path.iterdir())) == 2


@forks
def test_what_a_stopped_process_was_at_is_done_here() -> None:
    here = os.getpid()

    def work() -> int:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGSTOP)
        return os.getpid()

    with closing(Beside({0: work, 1: work}, 2)) as beside:
        assert [beside.value(0), beside.value(1)] == [here, here]


@forks
def test_who_waits_does_what_is_next(tmp_path: Path) -> None:
    def slow() -> int:
        _wait_for((tmp_path / "next was done").exists)
        return os.getpid()

    def following() -> int:
        (tmp_path / "next was done").touch()
        return os.getpid()

    begun = tmp_path / "begun"

    def first() -> int:
        begun.touch()
        return slow()

    with closing(Beside(dict(enumerate([first, following])), 2)) as beside:
        _wait_for(begun.exists)
        assert beside.value(0) != os.getpid()
        assert beside.value(1) == os.getpid()


@forks
def test_who_waits_for_the_last_does_nothing_else(tmp_path: Path) -> None:
    begun, go_on, done_by = tmp_path / "begun", tmp_path / "go on", tmp_path / "done by"

    def slow() -> int:
        begun.touch()
        _wait_for(go_on.exists)
        return os.getpid()

    def following() -> None:
        done_by.with_suffix(f".{os.getpid()}").touch()

    with closing(Beside({"slow": slow, "following": following}, 2)) as beside:
        _wait_for(begun.exists)
        threading.Timer(0.05, go_on.touch).start()
        assert beside.value("slow", last=True) != os.getpid()
        assert not done_by.with_suffix(f".{os.getpid()}").exists()


@forks
def test_what_the_other_process_cannot_do_is_done_here() -> None:
    parent = os.getpid()

    def work() -> str:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return "here"

    with closing(Beside(dict(enumerate([work, lambda: "next"])), 2)) as beside:
        assert [beside.value(0), beside.value(1)] == ["here", "next"]


@forks
def test_where_there_can_be_no_other_process_all_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refused)
    with closing(Beside({"one": os.getpid, "other": os.getpid}, 2)) as beside:
        assert {beside.value("one"), beside.value("other")} == {os.getpid()}


def test_errors_are_met_by_who_asks() -> None:
    def work() -> None:
        raise ValueError("of this one")

    with closing(Beside(dict(enumerate([partial(int, 1), work, partial(int, 2)])), 2)) as beside:
        assert beside.value(2) == 2
        assert beside.value(0) == 1
        with pytest.raises(ValueError, match="of this one"):
            beside.value(1)


@forks
def test_values_without_a_name_to_send_them_by_are_worked_out_here() -> None:
    with closing(Beside(dict(enumerate([lambda: os.getpid, lambda: lambda: 7])), 2)) as beside:
        assert beside.value(1)() == 7


@forks
def test_interrupts_are_for_the_process_that_waits(tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"

    def work() -> str:
        begun.write_text(str(os.getpid()))
        _wait_for(go_on.exists)
        return "done all the same"

    with closing(Beside(dict(enumerate([work, int])), 2)) as beside:
        _wait_for(lambda: begun.exists() and bool(begun.read_text()))
        os.kill(int(begun.read_text()), signal.SIGINT)
        go_on.touch()
        assert beside.value(0) == "done all the same"


@forks
@pytest.mark.parametrize("network", ["zoo:mlp", "zoo:gpt2-tiny"])
def test_plans_are_the_same_on_any_number_of_cores(network: str) -> None:
    request = PlanRequest(network=network, hardware="dgx-a100", devices=16, pins=Pins(), top=5)
    one, two = plan_network(request), plan_network(request, cores=2)
    assert one.candidates == two.candidates
    assert (one.status, one.messages, one.shadow_prices) == (two.status, two.messages, two.shadow_prices)


def _wait_for(met: object) -> None:
    assert callable(met)
    end = time.monotonic() + 60
    while not met():
        assert time.monotonic() < end
        time.sleep(0.001)
