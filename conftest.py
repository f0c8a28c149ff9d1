"""Settings of the whole test suite."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
import typer.testing
from hypothesis import settings

# Where the environment forbids bytecode, every process that a test starts compiles the sources again: a second each.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# One thread a process: the suite runs several processes side by side, and results do not depend on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Captured graphs are kept from run to run beside pytest's own cache, not in the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent / ".pytest_cache" / "captures")

# What runs in the background may have interrupts ignored, and with it every process that tests start to interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("meshwright", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "meshwright"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what imports made out of garbage collection, and collect seldom: both are a third of the processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_sessionfinish() -> None:
    """Leave what tests have made out of the collections at the end: pytest makes five, and Python one more."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def commands_are_built_once() -> Iterator[None]:
    """Keep the tree of commands that typer builds anew for every call in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        yield
