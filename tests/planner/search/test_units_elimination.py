"""Min-plus elimination of many weightings: in parts where they are too many numbers for once."""

from __future__ import annotations

import numpy as np
import pytest

from planner.search.units import elimination
from planner.search.units.elimination import lowest, minima


def test_weightings_are_taken_in_parts_where_tables_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes, sizes = [(0, 1), (1, 2), (0, 2), (2,)], {0: 3, 1: 4, 2: 5}
    random = np.random.default_rng(3)
    tables = [random.random((*(sizes[v] for v in scope), 7)) for scope in scopes]
    plan = elimination.elimination(scopes, sizes, (2,))
    assert plan.largest == 60
    whole = minima(plan, tables, (5,)).table
    monkeypatch.setattr(elimination, "AT_ONCE", 100)
    np.testing.assert_array_equal(lowest(plan, tables, (5,)), whole)
    np.testing.assert_allclose(whole[2], np.min([  # every state of the other two
        tables[0][a, b, 2] + tables[1][b, :, 2] + tables[2][a, :, 2] + tables[3][:, 2]
        for a in range(3) for b in range(4)
    ], axis=0))  # fmt: skip
