"""What ends a search early leaves a true bound, and what is not searched twice is the same."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from planner.plans.pins import Pins
from planner.plans.plan import MOST_MICRO_BATCHES
from planner.search.candidates import _micro_batch_counts
from planner.search.configurations import agenda, branch_and_bound
from planner.search.configurations.agenda import Depth, SearchNode
from planner.search.configurations.space import Extent, schedules
from planner.search.configurations.step_model import Configuration
from planner.search.exact.blocks import TooWideError
from planner.search.exact.buckets import MAX_DIMS, Buckets, plain
from planner.search.stages.chain_bound import chain_bound
from planner.search.stages.fragments import Fragments
from planner.search.stages.task import MANY, PartitionTask, simplified, undominated
from planner.search.stages.turn_search import SHORT
from tests.planner.search.made_tables import made_tables
from tests.planner.search.test_configurations import A100, model, network, search


@pytest.mark.parametrize(
    ("name", "value"),
    [("LABELLED", 1), ("TABLES", 1), ("OTHERS", 0), ("NODES", 40), ("WORK", {"bounds": 2, "partition": 3})],
)
def test_limits_leave_a_true_bound(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    units = network(4, elements=2e8)
    whole = search(units, 8, 16, 8.0, wanted=3)
    monkeypatch.setattr(agenda, name, value)
    ended = search(units, 8, 16, 8.0, wanted=3)
    best = whole.found[0].objective_s
    assert whole.lower_bound_s == pytest.approx(best)
    assert ended.lower_bound_s <= best * (1 + 1e-9)
    assert all(placed.objective_s >= best * (1 - 1e-9) for placed in ended.found)


def test_labels_for_the_proof_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    units = network(4, elements=2e8)
    best = search(units, 16, 32, 8.0).found[0].objective_s
    monkeypatch.setattr(agenda, "LABELLED", 1)
    monkeypatch.setattr(agenda, "PROOFS", 0)
    without = search(units, 16, 32, 8.0)
    monkeypatch.setattr(agenda, "PROOFS", 64)
    proven = search(units, 16, 32, 8.0, wanted=1)
    assert without.lower_bound_s < proven.lower_bound_s
    assert proven.lower_bound_s == pytest.approx(best)


def unlike_task(units: int, ways: int) -> PartitionTask:
    """A chain of different units with many ways each on two ranks, in one boundary state."""
    random = np.random.default_rng(0)
    kinds = []
    for unit in range(units):
        values = random.uniform(1.0, 2.0, (ways, 7))
        entry, leave = (np.full(ways, -1 if at_end else 0) for at_end in (unit == 0, unit == units - 1))
        kinds.append(Fragments(values, entry, leave, np.arange(ways)[:, None]))
    return PartitionTask(
        kinds=tuple(kinds), counts=(1,) * units, sends_s=np.zeros((units - 1, 1)), fill_sends=1.0, steady_sends=0.0,
        ranks=2, chunks=1, rank_of=np.arange(2), in_flight=np.ones(2), limit_bytes=40.0,
    )  # fmt: skip


def test_few_ways_far_from_the_best_are_not_partitioned_and_prove_as_much() -> None:
    task = unlike_task(SHORT + 2, 4 * MANY)
    placed = Configuration(pipeline=2, schedule="1f1b", data=4, micro_batches=4)
    extent = Extent(hardware=A100, devices=8, global_batch=16, pins=Pins(), units=task.units)
    bound, least = 1.0, chain_bound(simplified(undominated(task)))
    found = []
    for best in (np.inf, least / agenda.NEAR * (1 - 1e-6)):
        tried = branch_and_bound._Search(extent, model(8.0), lambda c: made_tables(network(), c, A100), 0.0, 3, 96)
        assert tried._opened(placed) is not None
        tried.best = best
        tried._solve(bound, SearchNode(Depth.BOUNDED, placed, task))
        found.append(tried)
    every, near = found
    assert (every.result.solved, near.result.solved) == (1, 0)
    assert every.unproven == near.unproven == [bound]
    assert every.best >= least > near.best * agenda.NEAR


def test_gpipe_of_one_micro_batch_is_1f1b() -> None:
    units = network(4)
    found = [
        search(units, 4, 4, 40.0, Pins(schedule=name, pp=2, micro_batches=1)).found[0] for name in ("gpipe", "1f1b")
    ]
    assert found[0].objective_s == pytest.approx(found[1].objective_s)
    extent = Extent(hardware=A100, devices=4, global_batch=4, pins=Pins(), units=6)
    assert ("gpipe", 1) not in set(schedules(extent, 2, 1))
    assert ("gpipe", 1) in set(schedules(extent, 2, 2))


def test_micro_batches_of_an_enormous_batch_are_found_without_counting_to_it() -> None:
    space = SimpleNamespace(global_batch=2 * 10**12, pins=Pins())
    counts = _micro_batch_counts(space, 2)  # type: ignore[arg-type]
    assert counts[0] == 1
    assert counts[-1] <= MOST_MICRO_BATCHES < 2 * counts[-1]
    assert all(10**12 % count == 0 for count in counts)
    assert all(after >= 2 * before for before, after in pairwise(counts[:-1]))


def test_a_table_of_more_dims_than_numpy_has_is_refused() -> None:
    sizes = [2, *[1] * (MAX_DIMS + 1)]
    scopes = [plain((0, other), sizes) for other in range(1, len(sizes))]
    with pytest.raises(TooWideError, match="densely connected"):
        Buckets(scopes, sizes, [0])
