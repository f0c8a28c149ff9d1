"""Optimizers that need norms of whole parameters: what is moved, kept and sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.cost.work import OPTIMIZERS, optimizer, state_bytes, update_bytes, update_traffic
from planner.graph.operator_graph import DTYPE_BYTES
from planner.lowering import representatives, unit_work
from planner.lowering.instructions import BeginUpdate, Communicate, Update
from planner.lowering.pipeline import lower_pipeline
from planner.planning.prediction import predict_plan
from planner.plans.plan import Plan
from simulator.errors import InputError
from simulator.profiles import load_profile
from simulator.program import Collective
from tests.planner.lowering.plans import one_stage, pipelined
from tests.planner.lowering.steps import lowered_of, updates
from tests.planner.search.problems import captured

GRAPH = captured("gpt2-tiny")
HARDWARE = load_profile("dgx-a100")
TRAINED = sum(GRAPH.multiplicity[p.node] for p in GRAPH.parameters if p.gradient is not None)


def finish_traffic(dtype: str) -> int:
    """Bytes of `update_traffic` that are moved after the sums are known: the direction and the parameter, twice."""
    size = DTYPE_BYTES[dtype]
    wide = max(4, size)
    return 3 * wide + (size if size < wide else 0)


def plan(storage: str = "sharded", optimizer: str = "lamb") -> Plan:
    made = one_stage(axes=(("data", 2), ("tensor", 2)), storage=storage)  # type: ignore[arg-type]
    return replace(made, optimizer=optimizer)


def messages(made: Plan) -> dict[str, float]:
    """Bytes of the messages of the update, by axis."""
    work = lower_pipeline(made, GRAPH, HARDWARE).work
    tasks = [work.tasks[number] for rank in work.updates for number, _ in rank]
    return {task.axis: task.payload_bytes for task in tasks if task.collective}


def sharded(made: Plan) -> dict[str, int]:
    """Trained parameters that have shards on each axis."""
    (rank,) = lowered_of(made, GRAPH).ranks
    return {
        axis.name: sum(stored.placements[i] >= 0 for stored in rank.parameters) for i, axis in enumerate(made.mesh.axes)
    }


@pytest.mark.parametrize("storage", ["sharded", "replicated"])
def test_one_message_an_axis_carries_both_norms_of_its_parameters(storage: str) -> None:
    made = plan(storage)
    wanted = {axis: 8.0 * count for axis, count in sharded(made).items() if count}
    assert messages(made) == wanted
    assert messages(replace(made, optimizer="adamw")) == {}


def test_updates_wait_for_the_sums_and_run_after_every_begin() -> None:
    instructions = updates(lowered_of(plan(), GRAPH))
    begun = {one.parameter: n for n, one in enumerate(instructions) if isinstance(one, BeginUpdate)}
    done = {one.parameter: (n, one) for n, one in enumerate(instructions) if isinstance(one, Update)}
    assert begun.keys() == done.keys()
    assert len(done) == TRAINED
    sums = [n for n, one in enumerate(instructions) if isinstance(one, Communicate) and n > min(begun.values())]
    assert max(begun.values()) < min(sums)
    made = {name for n in sums for name in instructions[n].targets} | {  # type: ignore[union-attr]
        one.target for one in instructions if isinstance(one, BeginUpdate)
    }
    assert all(one.sums in made and n > max(sums) for n, one in done.values())
    assert all(instructions[n].collective is Collective.ALL_REDUCE for n in sums)  # type: ignore[union-attr]


def test_a_pipeline_sends_the_same_sums_rank_by_rank() -> None:
    whole = messages(plan())
    found = lower_pipeline(pipelined(plan(), GRAPH, 2, "1f1b"), GRAPH, HARDWARE).work
    total: dict[str, float] = {}
    for rank in found.updates:
        for number, times in rank:
            task = found.tasks[number]
            if task.collective:
                assert times == 1
                total[task.axis] = total.get(task.axis, 0.0) + task.payload_bytes
    # The tied embedding lies on both ranks: its norms are sent twice, along the axes that have shards of it.
    tied = [rule.outputs[0] >= 0 for rule in plan().rules["token_embedding.weight"]]
    twice = {axis.name: 8.0 * cut for axis, cut in zip(plan().mesh.axes, tied, strict=True)}
    assert {axis: total[axis] - whole[axis] for axis in total} == twice


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_step_is_longer_by_what_more_is_moved(ranks: int) -> None:
    steps = []
    for name in ("adam", "lamb"):
        made = plan(optimizer=name)
        made = pipelined(made, GRAPH, ranks, "1f1b") if ranks > 1 else made
        steps.append(predict_plan(made, GRAPH, HARDWARE))
    more = steps[1].step_time_s - steps[0].step_time_s
    assert more > 0
    assert steps[1].memory_at_peak["optimizer_states"] == steps[0].memory_at_peak["optimizer_states"]


def test_shallow_copies_stand_for_whole_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole network takes as long as equal layers written once."""
    made = plan()
    short = predict_plan(made, GRAPH, HARDWARE)

    def refuse(*_: object) -> None:
        raise representatives.UnalikeError("layers are not alike")

    monkeypatch.setattr(representatives, "_shortened", refuse)
    unit_work._unit_bodies.cache_clear()
    assert predict_plan(made, GRAPH, HARDWARE).step_time_s == pytest.approx(short.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "dtype", "moved"),
    [
        # gradient, then parameter, then every state twice, in the parameter's own precision
        ("sgd", "float32", 4 * (1 + 2)),
        ("adamw", "float32", 4 * (1 + 2 + 2 * 2)),
        ("lamb", "float32", 4 * (1 + 2 + 2 * 2 + 5)),
        # gradient and parameter in two bytes each, float32 copy and moments twice in four
        ("adamw", "bfloat16", 2 * (1 + 1) + 4 * 2 * (1 + 2)),
        ("lamb", "bfloat16", 2 * (1 + 1) + 4 * (2 * (1 + 2) + 5)),
    ],
)
def test_traffic_by_hand(name: str, dtype: str, moved: int) -> None:
    assert update_traffic(optimizer(name), dtype) == moved
    assert 0 < finish_traffic(dtype) < moved or name == "sgd"


def test_gradients_may_be_wider_than_their_parameters() -> None:
    found = update_bytes(OPTIMIZERS["adam"], 2, np.array([2.0, 4.0]))
    assert found.tolist() == [28.0, 30.0]
    assert state_bytes(OPTIMIZERS["lamb"], "bfloat16") == 12


def test_an_optimizer_that_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match=r"'lion' is not one of sgd, momentum, adam, adamw, lamb"):
        optimizer("lion")
