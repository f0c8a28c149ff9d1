"""What both engines promise about task tables, and that they agree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings

from simulator import engine, fast_engine
from simulator.task_table import TaskTable
from tests.simulator.task_tables import tables

Run = Callable[[TaskTable], tuple[np.ndarray, np.ndarray]]
ENGINES = pytest.mark.parametrize("run", [engine.run, fast_engine.run], ids=["reference", "fast"])


def assert_agree(table: TaskTable, run: Run = fast_engine.run) -> None:
    for reference, fast in zip(engine.run(table), run(table), strict=True):
        np.testing.assert_allclose(fast, reference, rtol=1e-9, atol=1e-12)


@given(table=tables())
@settings(deadline=None, max_examples=200)
def test_engines_agree(table: TaskTable) -> None:
    assert_agree(table)
