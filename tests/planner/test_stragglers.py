"""Slow ranks and links, against every replica simulated at once and against hand counts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.lowering.pipeline import LoweredPipeline, lower_pipeline
from planner.planning.goodput import checkpoint_bytes
from planner.planning.stragglers import places, slow_cluster, slow_step_s, steps_together, straggle
from planner.plans.plan import Plan
from simulator import fast_engine, launches
from simulator.hardware import Hardware
from simulator.pipeline_operators import LABELS, in_one_stream, operator_table
from simulator.pipeline_passes import period_s, simulate_operators
from simulator.profiles import load_profile
from tests.oracles.simulated import slow_ranks
from tests.planner.lowering.plans import one_stage, pipelined
from tests.planner.search.problems import captured
from tests.simulator.table_copies import expand

GRAPH = captured("gpt2-tiny")
HARDWARE = load_profile("dgx-a100")
BESIDE = LABELS.index("communication beside")
SPEEDS = st.lists(st.sampled_from((1.0, 1.2, 2.0, 5.0)), min_size=8, max_size=8)


@pytest.fixture(autouse=True)
def _hosts_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that are never late: of so small a network nothing else would be seen."""
    monkeypatch.setattr(launches, "launch_time", lambda _: 0.0)


@cache
def plan(schedule: str = "1f1b", storage: str = "sharded", sharding: str = "zero1") -> Plan:
    """Two pipeline ranks of data 2 × tensor 2."""
    made = one_stage(axes=(("data", 2), ("tensor", 2)), storage=storage)  # type: ignore[arg-type]
    made = replace(made, optimizer_sharding=sharding if storage == "sharded" else "none")
    return pipelined(made, GRAPH, 2, schedule, 2 if schedule == "zbv" else 1)


@cache
def lowered(made: str = "1f1b", hardware: Hardware = HARDWARE) -> LoweredPipeline:
    return lower_pipeline(plan(made), GRAPH, hardware)


def all_replicas(made: LoweredPipeline, speeds: np.ndarray) -> float:
    """Every replica in one table, sums of gradients as meetings of all; speeds (replicas, ranks)."""
    table = operator_table(made.schedule, made.costs)
    together = expand(table, len(speeds), joint=table.label == BESIDE, shared=np.zeros(0, dtype=np.bool_))
    slowed = slow_ranks(together, speeds.ravel())
    copies = np.arange(len(speeds))[:, None]
    last = (copies * table.size + np.arange(table.size - speeds.shape[1], table.size)).ravel()
    begins = (copies * speeds.shape[1] + made.schedule.beginning_ranks).ravel()
    return period_s(slowed, last, begins, fast_engine.run(slowed)[1])


@settings(deadline=None, max_examples=25)
@given(factors=SPEEDS, schedule=st.sampled_from(("1f1b", "gpipe", "zb_h1", "zbv")))
def test_replicas_that_meet_at_the_end_are_as_slow_as_the_slowest(factors: list[float], schedule: str) -> None:
    made = lowered(schedule)
    where = places(plan(schedule), made)
    assert where.replicas == 2
    assert sorted(zip(where.rank.tolist(), where.replica.tolist(), strict=True)) == sorted(
        2 * [(rank, replica) for rank in range(2) for replica in range(2)]
    )
    speeds = np.zeros((2, 2))
    np.maximum.at(speeds, (where.replica, where.rank), np.array(factors))
    step = slow_step_s(plan(schedule), HARDWARE, lambda hardware: made, np.array(factors), {}, {})
    assert step == pytest.approx(all_replicas(made, speeds), rel=1e-9)


def test_parameters_gathered_in_every_pass_make_replicas_step_together() -> None:
    apart, joint = plan(), plan(sharding="zero3")
    assert not steps_together(lower_pipeline(apart, GRAPH, HARDWARE))
    made = lower_pipeline(joint, GRAPH, HARDWARE)
    assert steps_together(made)
    assert places(joint, made).replicas == 1
    # One slow device of each replica, in different stages: only together both slow the same pipeline.
    where = places(apart, lower_pipeline(apart, GRAPH, HARDWARE))
    factors = np.ones(8)
    factors[np.flatnonzero((where.rank == 0) & (where.replica == 0))[0]] = 3.0
    factors[np.flatnonzero((where.rank == 1) & (where.replica == 1))[0]] = 3.0
    steps = [
        slow_step_s(one, HARDWARE, lambda hardware, one=one: lower_pipeline(one, GRAPH, hardware), factors, {}, {})
        / lower_pipeline_step(one)
        for one in (apart, joint)
    ]
    assert steps[0] < steps[1]


def lower_pipeline_step(made: Plan) -> float:
    found = lower_pipeline(made, GRAPH, HARDWARE)
    return simulate_operators(found.schedule, found.costs).step_time_s


def test_a_slow_link_slows_the_messages_of_its_rank_alone() -> None:
    """Tensor messages inside one stage, sends on both sides of it; no other kernel or message changes."""
    made = plan()

    def relower(hardware: Hardware) -> LoweredPipeline:
        return lower_pipeline(made, GRAPH, hardware)

    calm = slow_step_s(made, HARDWARE, relower, np.ones(8), {}, {})
    assert calm == pytest.approx(lower_pipeline_step(made), rel=1e-12)
    shares = {"NVSwitch": 0.01}
    slow = [slow_step_s(made, HARDWARE, relower, np.ones(8), shares, {"NVSwitch": device}) for device in (0, 7)]
    both = lower_pipeline(made, GRAPH, slow_cluster(HARDWARE, shares))
    everywhere = simulate_operators(both.schedule, both.costs).step_time_s
    assert calm < min(slow) < everywhere
    assert max(slow) <= everywhere
    assert slow_step_s(made, HARDWARE, relower, np.ones(8), {"InfiniBand": 0.01}, {"InfiniBand": 0}) == calm


def test_hardware_without_overlap_runs_everything_in_turn() -> None:
    alone = replace(HARDWARE, overlaps_communication=False)
    direct = lower_pipeline(plan(), GRAPH, alone)
    beside = lower_pipeline(plan(), GRAPH, replace(HARDWARE, overlap_compute_speed=1.0))
    found = in_one_stream(direct.schedule, beside.costs)
    assert simulate_operators(direct.schedule, found).step_time_s == pytest.approx(
        simulate_operators(direct.schedule, direct.costs).step_time_s, rel=1e-12
    )
    step = slow_step_s(plan(), alone, lambda cluster: lower_pipeline(plan(), GRAPH, cluster), np.ones(8), {}, {})
    assert step == pytest.approx(simulate_operators(direct.schedule, direct.costs).step_time_s, rel=1e-12)


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    def straggled(seed: int) -> object:
        return straggle(
            plan(),
            HARDWARE,
            lambda hardware: lower_pipeline(plan(), GRAPH, hardware),
            slow_ranks=2,
            slowdown=2.0,
            slow_links={"NVSwitch": 0.5},
            seed=seed,
        )

    assert straggled(1) == straggled(1)
    assert len({str(straggled(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize("storage", ["sharded", "replicated"])
def test_a_pipeline_writes_the_checkpoint_of_its_one_stage_plan(storage: str) -> None:
    """Every element once, however it is cut; states of 8 bytes beside 4 of the parameter."""
    flat = one_stage(axes=(("data", 2), ("tensor", 2)), storage=storage)  # type: ignore[arg-type]
    whole = checkpoint_bytes(flat, GRAPH, 8)
    elements = sum(
        GRAPH.nodes[p.node].outputs[0].elements * times
        for p, times in ((p, GRAPH.multiplicity[p.node]) for p in GRAPH.parameters)
    )
    assert 4 * whole.written == pytest.approx(12 * elements)
    found = checkpoint_bytes(plan(storage=storage), GRAPH, 8)
    assert 8 * found.written == pytest.approx(12 * elements)
    # The ranks of a node are those of one stage: the fullest is above the mean.
    alone = checkpoint_bytes(plan(storage=storage), GRAPH, 4)
    assert alone.written > found.written
    assert alone.most == pytest.approx(alone.written)
    assert alone.loaded >= alone.written


def test_states_in_host_memory_are_written_too() -> None:
    flat = one_stage(axes=(("data", 2), ("tensor", 2)), storage="sharded")
    here, there = (checkpoint_bytes(replace(flat, offload_optimizer=away), GRAPH, 8) for away in (False, True))
    assert there == here
