"""The current context: module functions, ``with`` blocks, threads, and nothing at import."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import planner
from planner import ContextError


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    planner.reset_auto_parallel_context()
    yield
    planner.reset_auto_parallel_context()


def test_module_functions_act_on_one_context() -> None:
    planner.set_auto_parallel_context(device_num=8, parallel_mode="auto_parallel")
    assert planner.get_auto_parallel_context("device_num") == 8
    planner.set_auto_parallel_context(pipeline_stages=2)
    assert planner.get_auto_parallel_context("parallel_mode") == "auto_parallel"
    with pytest.raises(ContextError, match="pipeline_stages=3"):
        planner.set_auto_parallel_context(pipeline_stages=3)
    assert planner.get_auto_parallel_context("pipeline_stages") == 2
    planner.reset_auto_parallel_context()
    assert planner.get_auto_parallel_context("device_num") == 1
    assert planner.get_auto_parallel_context("parallel_mode") == "stand_alone"


def test_blocks_nest_and_leave_nothing() -> None:
    planner.set_auto_parallel_context(device_num=8, parallel_mode="auto_parallel")
    with planner.auto_parallel_context(device_num=16) as outer:
        assert planner.get_auto_parallel_context("parallel_mode") == "auto_parallel"
        with planner.auto_parallel_context(pipeline_stages=4):
            assert planner.get_auto_parallel_context("device_num") == 16
            planner.set_auto_parallel_context(device_num=32)
            assert planner.get_auto_parallel_context("device_num") == 32
            planner.reset_auto_parallel_context()
            assert planner.get_auto_parallel_context("device_num") == 1
        assert outer.get("pipeline_stages") == 1
        assert planner.get_auto_parallel_context("device_num") == 16
    assert planner.get_auto_parallel_context("device_num") == 8


def test_an_error_inside_or_at_the_door_leaves_nothing() -> None:
    with pytest.raises(RuntimeError), planner.auto_parallel_context(device_num=4):
        raise RuntimeError
    with pytest.raises(ContextError), planner.auto_parallel_context(device_num=0):
        pass
    assert planner.get_auto_parallel_context("device_num") == 1


def test_a_block_is_seen_by_its_own_thread_only() -> None:
    seen: list[int] = []
    with planner.auto_parallel_context(device_num=4):
        other = threading.Thread(target=lambda: seen.append(planner.get_auto_parallel_context("device_num")))
        other.start()
        other.join()
    assert seen == [1]


def test_importing_is_light_and_sets_nothing() -> None:
    program = (
        "import sys, planner\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'yaml', 'networkx', 'pandas', 'scipy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from planner.exchange.mindspore.context import KEYS\n"
        "assert all(planner.get_auto_parallel_context(name) == key.default for name, key in KEYS.items())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
