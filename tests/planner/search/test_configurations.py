"""The search over configurations: equal to trying everything, and it finds what is known to be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.software import as_run
from planner.cost.work import optimizer
from planner.planning.configured import undivided
from planner.plans.pins import Pins
from planner.plans.plan import MOST_PASSES
from planner.search.configurations.bounds import (
    chained_bound,
    computed_ahead,
    even_bound,
    memory_bound,
    never_faster,
    passes_bound,
    standing_bytes,
    states_bounds,
    task_bound,
)
from planner.search.configurations.branch_and_bound import explore
from planner.search.configurations.configuration import AXES
from planner.search.configurations.explored import Explored, diverse, shape_of
from planner.search.configurations.least_states import _least_of, least_states_of
from planner.search.configurations.schedule_shapes import PINNED, SEARCHED
from planner.search.configurations.space import Extent, bases, configurations, orders, schedules, storages
from planner.search.configurations.step_model import Configuration, StepModel
from planner.search.exact.blocks import TooWideError
from planner.search.stages.chain_bound import chain_bound, unlike
from planner.search.stages.partition import partition
from planner.search.stages.task import PartitionTask
from planner.search.units.labels import StageTables
from planner.search.units.records import Least
from simulator.corrections import SHARDED
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from tests.planner.search.made_tables import MadeTables, MadeUnit, made_tables
from tests.planner.search.problems import captured
from tests.planner.search.test_pipeline_partition import brute_force

GIB = 2.0**30
A100 = load_profile("dgx-a100")


def model(limit_gib: float, hardware: Hardware = A100) -> StepModel:
    return StepModel(
        hardware=hardware,
        optimizer=optimizer("adamw"),
        dtype="bfloat16",
        limit_bytes=limit_gib * GIB,
        bucket_bytes=25 * 2**20,
    )


class TurnsAlone:
    """The closed form without what turns of unequal length cost: what the bounds are about."""

    def __init__(self, step: StepModel) -> None:
        self.step = step

    def __getattr__(self, name: str) -> object:
        return getattr(self.step, name)

    def task(self, tables: StageTables, configuration: Configuration) -> PartitionTask:
        """The partition task."""
        return self.tasks(tables, [configuration])[0]

    def tasks(self, tables: StageTables, configurations: Sequence[Configuration]) -> list[PartitionTask]:
        """Several of them."""
        return [replace(task, uneven_s=None) for task in self.step.tasks(tables, configurations)]


def network(blocks: int = 8, seconds: float = 5e-3, elements: float = 1e8, gib: float = 0.5) -> list[MadeUnit]:
    """An embedding, equal blocks and a head."""
    return [
        MadeUnit(forward_s=seconds / 10, activation_bytes=gib * GIB / 20, elements=elements / 2),
        MadeUnit(forward_s=seconds, activation_bytes=gib * GIB, elements=elements, count=blocks),
        MadeUnit(forward_s=seconds / 3, activation_bytes=gib * GIB / 4, elements=elements / 2),
    ]


def search(
    units: list[MadeUnit], devices: int, batch: int, limit_gib: float, pins: Pins | None = None, wanted: int = 1,
    hardware: Hardware = A100, turns_alone: bool = False,
) -> Explored:  # fmt: skip
    extent = Extent(
        hardware=hardware,
        devices=devices,
        global_batch=batch,
        pins=pins or Pins(),
        units=sum(u.count for u in units),
    )
    step = TurnsAlone(model(limit_gib, hardware)) if turns_alone else model(limit_gib, hardware)
    return explore(extent, cast(StepModel, step), lambda c: made_tables(units, c, hardware), wanted=wanted)


@settings(max_examples=10)
@given(
    blocks=st.integers(1, 2),
    devices=st.sampled_from([1, 2, 4]),
    batch=st.sampled_from([2, 6]),
    limit=st.sampled_from([1.0, 2.0, 4.0, 40.0]),
    elements=st.sampled_from([1e2, 1e6, 1e8]),
    gib=st.sampled_from([0.01, 0.4]),
)
def test_the_search_equals_trying_everything(
    blocks: int, devices: int, batch: int, limit: float, elements: float, gib: float
) -> None:
    units = network(blocks, elements=elements, gib=gib)
    pins = Pins()
    found = search(units, devices, batch, limit, pins, turns_alone=True)
    extent = Extent(hardware=A100, devices=devices, global_batch=batch, pins=pins, units=blocks + 2)
    step = TurnsAlone(model(limit))
    best = min((brute_force(step.task(made_tables(units, c, A100), c)) for c in configurations(extent)), default=np.inf)
    assert bool(found.found) == np.isfinite(best)
    if found.found:
        assert found.found[0].objective_s == pytest.approx(best)
        assert found.gap <= 1e-6


@pytest.mark.parametrize("pp", [1, 2])
def test_with_software_that_gathers_one_by_one_the_search_equals_trying_everything(pp: int) -> None:
    """Messages of sharded parameters take 3.7 times as long: the best of all takes longer, and bounds stay below it."""
    units, devices, batch = network(2, elements=2e8), 4, 4
    gathers = as_run(A100, "megatron_deepspeed", "")
    at_once = replace(gathers, training={**gathers.training, SHARDED: 1.0}, hash="at once")
    pins, best = Pins(pp=pp, optimizer_sharding="zero3", recompute="full"), []
    for hardware in (gathers, at_once):
        found = search(units, devices, batch, 3.0, pins, hardware=hardware, turns_alone=True)
        extent = Extent(hardware=hardware, devices=devices, global_batch=batch, pins=pins, units=4)
        step, times = cast(StepModel, TurnsAlone(model(3.0, hardware))), []
        for c in configurations(extent):
            tables = made_tables(units, c, hardware)
            times.append(brute_force(step.task(tables, c)))
            (bound,) = states_bounds(extent, step, tables, c, _least_of(step, tables, [c], (False,)))
            assert bound <= times[-1] * (1 + 1e-9), c
        assert found.found[0].objective_s == pytest.approx(min(times))
        assert found.gap <= 1e-6
        best.append(min(times))
    assert best[0] > 1.05 * best[1]


def computing_all_again(tables: StageTables) -> StageTables:
    """The same with the labels alone that keep nothing."""
    units = []
    for unit in tables.units:
        names = [field.name for field in fields(unit) if field.name != "assignments"]
        kept: dict[str, Any] = {name: getattr(unit, name)[2:] for name in names}
        units.append(replace(unit, **kept, assignments=unit.assignments[2:]))
    return cast(StageTables, replace(cast(MadeTables, tables), units=tuple(units)))


@settings(max_examples=4)
@given(
    blocks=st.integers(1, 3),
    devices=st.sampled_from([2, 4]),
    batch=st.sampled_from([4, 8]),
    limit=st.sampled_from([1.0, 3.0, 40.0]),
    elements=st.sampled_from([1e6, 1e8]),
    recompute=st.sampled_from([None, "full"]),
)
def test_no_configuration_is_faster_than_its_bounds(
    blocks: int, devices: int, batch: int, limit: float, elements: float, recompute: str | None
) -> None:
    """Bounds before storage is known, and with it, lie below what the stages of every configuration really take."""
    units = network(blocks, elements=elements, gib=0.4)
    extent = Extent(
        hardware=A100, devices=devices, global_batch=batch, pins=Pins(recompute=recompute), units=blocks + 2
    )
    step = model(limit)
    for c in configurations(extent):
        tables = made_tables(units, c, A100)
        tables = tables if recompute is None else computing_all_again(tables)
        task, ahead, whole_s = step.task(tables, c), computed_ahead(extent, c), tables.least.whole_s
        found, least = partition(task), _least_of(step, tables, [c], (False,))
        best = np.inf if found is None else found.objective_s
        assert even_bound(c, whole_s, ahead) <= best * (1 + 1e-9), c
        passes = passes_bound(extent, step, tables, c, least.once_s[0])
        if unlike(tables.counts, task.pieces):
            passes = max(passes, chained_bound(extent, step, tables, c, least)[0])
        assert task_bound(task) <= best * (1 + 1e-9), c
        assert task.pieces == 1 or chain_bound(task) <= best * (1 + 1e-9), c
        assert memory_bound(task) <= best * (1 + 1e-9), c
        (stated,) = states_bounds(extent, step, tables, c, least)
        assert stated <= best * (1 + 1e-9), c
        assert passes + least.last_s(step, c)[0] <= best * (1 + 1e-9), c
        if standing_bytes(step, tables, [c])[0] > c.pipeline * step.limit_bytes or not least.fits[0]:
            assert found is None, c


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_no_order_of_axes_is_faster_than_the_bound_over_all_orders(micro_batch: int) -> None:
    """With the neighbours along every axis side by side nothing takes longer than in any order, over several nodes."""
    units, step = network(2, elements=1e8), model(40.0)
    extent = Extent(hardware=A100, devices=64, global_batch=64, pins=Pins(pp=2, micro_batch=micro_batch), units=4)
    compared = 0
    for base in bases(extent):
        beside = replace(base, order=())
        if not all(never_faster(A100, beside, order, AXES[1:]) for order in orders(extent, base)):
            continue
        together = made_tables(units, beside, A100)
        for ordered in orders(extent, base):
            tables = made_tables(units, ordered, A100)
            for stored in storages(extent, ordered):
                unordered = replace(stored, order=())
                least, found = (
                    states_bounds(extent, step, t, c, _least_of(step, t, [c], (False,)))[0]
                    for t, c in ((together, unordered), (tables, stored))
                )
                compared += 1
                assert least <= found * (1 + 1e-9), stored
    assert compared > 100


@pytest.mark.parametrize("virtual", [1, 2])
def test_storages_of_a_chain_are_bounded_together_as_each_alone(virtual: int) -> None:
    """Those with several chunks a rank share the bound of the least of them."""
    units, step = network(2), model(40.0)
    extent = Extent(hardware=A100, devices=8, global_batch=32, pins=Pins(), units=4)
    schedule = "1f1b" if virtual == 1 else "interleaved_1f1b"
    placed = Configuration(pipeline=2, virtual=virtual, schedule=schedule, data=4, micro_batches=8)
    tables, ways = made_tables(units, placed, A100), storages(extent, placed)
    states = least_states_of(extent, step, tables, ways)
    assert states is not None
    assert len(states.ways) > len(ways)
    together = chained_bound(extent, step, tables, placed, states)[[states.place(way) for way in ways]]
    alone = [chained_bound(extent, step, tables, way, _least_of(step, tables, [way], (False,)))[0] for way in ways]
    assert max(alone) > 1.001 * min(alone)
    assert together == pytest.approx(alone if virtual == 1 else [min(together)] * len(ways))
    assert np.all(together <= np.array(alone) * (1 + 1e-9))


@pytest.mark.parametrize("schedule", [None, *SEARCHED, *PINNED])
@pytest.mark.parametrize("overlaps", [True, False])
def test_storages_made_together_are_those_made_alone(schedule: str | None, overlaps: bool) -> None:
    """The ways to run units, and what a partition takes besides, are the same whatever other storages stand beside."""
    hardware = replace(A100, overlaps_communication=overlaps, hash="one way or the other")
    pipeline = 1 if schedule is None else 2
    extent = Extent(
        hardware=hardware, devices=32, global_batch=128, pins=Pins(schedule=schedule, pp=pipeline, tp=1), units=6
    )
    step, units = model(40.0, hardware), network(4, elements=2e6)
    for base in bases(extent):
        ways, tables = storages(extent, base), made_tables(units, base, hardware)
        together = step.tasks(tables, ways)
        assert len({way.optimizer_sharding for way in ways}) == (4 if base.micro_batches > 1 else 3)
        for way, task in zip(ways, together, strict=True):
            alone = step.task(tables, way)
            assert task.limit_bytes == alone.limit_bytes
            for one, other in zip(task.kinds, alone.kinds, strict=True):
                assert np.array_equal(one.values, other.values), way
            found = partition(alone)
            assert found is not None
            assert (task.apart_s is None) == (alone.apart_s is None)
            assert task.apart_s is None or alone.apart_s is None or task.apart_s(found) == alone.apart_s(found)


def test_plans_are_different_and_few_of_one_shape() -> None:
    found = search(network(16), 16, 64, 40.0, wanted=6)
    chosen = list(diverse(found.found, 6))
    assert len(chosen) == 6
    shapes = [shape_of(placed.configuration) for placed in chosen]
    assert max(shapes.count(shape) for shape in shapes) <= 2
    assert [p.objective_s for p in chosen] == sorted(p.objective_s for p in chosen)


def modes(found: Explored) -> tuple[set[int], str]:
    best = found.found[0]
    kinds = [kind for kind, count in zip(best.task.kinds, best.task.counts, strict=True) for _ in range(count)]
    return set(best.partition.labels), best.configuration.optimizer_sharding if kinds else ""


def test_less_memory_turns_on_recomputation_then_sharding_of_states() -> None:
    units = network(8, elements=1e8, gib=0.2)
    pins = Pins(pp=1, tp=1, micro_batch=8)
    roomy = search(units, 8, 64, 60.0, replace(pins, optimizer_sharding="none"))
    tight = search(units, 8, 64, 18.0, replace(pins, optimizer_sharding="none", offload_optimizer=False))
    assert modes(roomy)[0] == {0}
    assert max(modes(tight)[0]) > 0
    assert tight.found[0].objective_s > roomy.found[0].objective_s
    tightest = search(units, 8, 64, 10.0, pins)
    assert modes(tightest)[1] in ("zero1", "zero2", "zero3")
    whole = replace(pins, optimizer_sharding="none")
    assert not search(units, 8, 64, 10.0, replace(whole, offload_optimizer=False)).found
    (moved,) = search(units, 8, 64, 10.0, whole).found
    assert moved.configuration.offload
    assert moved.objective_s > tightest.found[0].objective_s


def test_a_slow_network_between_nodes_keeps_tensor_parallelism_inside() -> None:
    """Where links inside a node are the slower ones, it goes across: nodes alone do not hold it."""
    inside, between = A100.levels
    crawling = replace(inside, bandwidth_bytes_per_s=between.bandwidth_bytes_per_s / 4, latency_s=between.latency_s)
    units, pins = network(16, elements=4e8), Pins(pp=1)
    best, other = (
        search(units, 64, 64, 20.0, pins, hardware=replace(A100, levels=(level, between))).found[0].configuration
        for level in (inside, crawling)
    )
    assert 1 < best.tensor <= best.tensor * best.stride("tensor") <= inside.size
    assert other.tensor > 1
    assert other.stride("tensor") >= inside.size


def test_uneven_stages_make_up_for_a_heavy_head() -> None:
    units = [*network(10)[:2], MadeUnit(forward_s=15e-3, activation_bytes=GIB / 4, elements=5e7)]
    best = search(units, 4, 64, 60.0, Pins(pp=4, schedule="1f1b")).found[0]
    sizes = np.diff((0, *best.partition.ends))
    assert sizes[-1] < sizes[1]


@pytest.mark.parametrize("elements", [1e2, 1e6])
@pytest.mark.parametrize("slow", [False, True], ids=["as it is", "slow memory"])
def test_states_lie_on_the_host_where_it_updates_them_sooner(elements: float, slow: bool) -> None:
    """An update is launched alike on both, and copied to the host and back: it is sooner only for slower memory."""
    units = network(blocks=1, elements=elements, gib=0.0)
    device = replace(A100, memory_bandwidth=1e9) if slow else A100
    free, here, there = (
        search(units, 1, 2, 80.0, Pins(offload_optimizer=pin), hardware=device) for pin in (None, False, True)
    )
    seconds = [explored.found[0].objective_s for explored in (here, there)]
    assert (seconds[1] < seconds[0]) == (slow and elements == 1e6)
    assert free.found[0].objective_s == min(seconds)
    assert free.lower_bound_s <= min(seconds)


def test_states_may_be_shared_by_more_than_a_node_and_fewer_than_all() -> None:
    pins = Pins(pp=1, tp=1, offload_optimizer=False, recompute="none", micro_batch=1)
    units = network(8, 1e-3, 4e8, 0.05)
    node, wider, everyone = (
        search(units, 128, 128, 20.0, replace(pins, shard_size=size)).found[0] for size in (8, 32, 128)
    )
    assert wider.objective_s < min(node.objective_s, everyone.objective_s)
    assert search(units, 128, 128, 20.0, pins).found[0].objective_s == wider.objective_s


def test_states_are_shared_by_ranks_that_divide_the_parameters() -> None:
    """On 96 ranks of which no dim divides, states of a power of two stay whole, whatever a share of them would be."""
    llama = captured("llama2-7b")
    assert undivided(llama, 96) == {3, 6, 12, 24, 48, 96}
    assert not undivided(captured("gpt2"), 24)
    extent = Extent(
        hardware=A100, devices=96, global_batch=96, units=34,
        pins=Pins(pp=1, tp=1, optimizer_sharding="zero3"), undivided=undivided(llama, 96),
    )  # fmt: skip
    assert {c.shard_size for c in configurations(extent)} == {8, 32}
    assert {c.shard_size for c in configurations(replace(extent, devices=48, global_batch=48))} == {8, 16}
    assert 0 in {c.shard_size for c in configurations(replace(extent, undivided=frozenset()))}
    assert {c.shard_size for c in configurations(replace(extent, devices=3, global_batch=3))} == {0}


def test_meshes_whose_units_are_too_wide_to_be_tabled_bound_and_are_no_error() -> None:
    units, pins = network(), Pins(recompute="none")

    class TooWide(MadeTables):
        @property
        def least(self) -> Least:
            raise TooWideError("too wide")

    def some(c: Configuration) -> StageTables:
        made = made_tables(units, c, A100)
        if c.tensor > 1:
            made = cast(StageTables, TooWide(**{f.name: getattr(made, f.name) for f in fields(made)}))
        return made

    extent = Extent(hardware=A100, devices=8, global_batch=16, pins=pins, units=sum(u.count for u in units))
    whole, part = search(units, 8, 16, 60.0, pins), explore(extent, model(60.0), some, sample_s=1e-6)
    assert {p.configuration.tensor for p in part.found} == {1}
    assert 0 < part.lower_bound_s <= whole.found[0].objective_s
    assert part.lower_bound_s < part.found[0].objective_s
    assert part.dense == "too wide"


def test_nothing_fits_names_the_fullest_rank() -> None:
    found = search(network(8, elements=4e9), 4, 16, 10.0)
    assert not found.found
    assert found.unfit
    least = min(found.unfit, key=lambda u: u.needed_bytes)
    assert least.needed_bytes > 10 * GIB
    assert 0 <= least.rank < least.configuration.pipeline


def test_an_interrupted_search_keeps_the_best_plan_and_a_true_bound() -> None:
    units, calls = network(8), []

    def tables(configuration: Configuration) -> object:
        calls.append(configuration)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return made_tables(units, configuration, A100)

    extent = Extent(hardware=A100, devices=16, global_batch=64, pins=Pins(), units=10)
    stopped = explore(extent, model(40.0), tables)  # type: ignore[arg-type]
    whole = search(units, 16, 64, 40.0)
    assert stopped.interrupted
    assert stopped.lower_bound_s <= whole.found[0].objective_s * (1 + 1e-9)
    if stopped.found:
        assert stopped.gap >= 0


def test_non_powers_of_two_and_pins() -> None:
    found = search(network(9), 24, 48, 40.0, Pins(pp=3))
    assert {p.configuration.pipeline for p in found.found} == {3}
    assert all(p.configuration.devices == 24 for p in found.found)


def test_no_pipeline_puts_millions_of_passes_in_order() -> None:
    extent = Extent(hardware=load_profile("dgx-a100"), devices=64, global_batch=2**15, pins=Pins(), units=1024)
    for micro_batches in (2**13, 2**14, 2**15):
        chunks = [virtual for _, virtual in schedules(extent, 64, micro_batches)]
        assert all(64 * virtual * micro_batches <= MOST_PASSES for virtual in chunks)
        assert bool(chunks) == (64 * micro_batches <= MOST_PASSES)
