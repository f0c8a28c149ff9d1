"""What ends a search early leaves a true bound, and what is not searched twice is the same."""

from __future__ import annotations

import pytest

from planner.request import Pins
from planner.search.configurations import branch_and_bound
from planner.search.configurations.space import Extent, schedules
from tests.planner.search.test_configurations import A100, network, search


@pytest.mark.parametrize(
    ("name", "value"),
    [("LABELLED", 1), ("TABLES", 1), ("OTHERS", 0), ("NODES", 40), ("WORK", {"bounds": 2, "partition": 3})],
)
def test_limits_leave_a_true_bound(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    units = network(4, elements=2e8)
    whole = search(units, 8, 16, 8.0, wanted=3)
    monkeypatch.setattr(branch_and_bound, name, value)
    ended = search(units, 8, 16, 8.0, wanted=3)
    best = whole.found[0].objective_s
    assert whole.lower_bound_s == pytest.approx(best)
    assert ended.lower_bound_s <= best * (1 + 1e-9)
    assert all(placed.objective_s >= best * (1 - 1e-9) for placed in ended.found)


def test_labels_for_the_proof_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    units = network(4, elements=2e8)
    best = search(units, 8, 16, 8.0).found[0].objective_s
    monkeypatch.setattr(branch_and_bound, "LABELLED", 1)
    monkeypatch.setattr(branch_and_bound, "PROOFS", 0)
    without = search(units, 8, 16, 8.0)
    monkeypatch.setattr(branch_and_bound, "PROOFS", 64)
    proven = search(units, 8, 16, 8.0, wanted=1)
    assert without.lower_bound_s < proven.lower_bound_s
    assert proven.lower_bound_s == pytest.approx(best)


def test_gpipe_of_one_micro_batch_is_1f1b() -> None:
    units = network(4)
    found = [
        search(units, 4, 4, 40.0, Pins(schedule=name, pp=2, micro_batches=1)).found[0] for name in ("gpipe", "1f1b")
    ]
    assert found[0].objective_s == pytest.approx(found[1].objective_s)
    extent = Extent(hardware=A100, devices=4, global_batch=4, pins=Pins(), units=6)
    assert ("gpipe", 1) not in set(schedules(extent, 2, 1))
    assert ("gpipe", 1) in set(schedules(extent, 2, 2))
