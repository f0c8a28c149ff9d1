"""Stages with the same axes share their tables: each is what it would be alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.cost.work import optimizer
from planner.graph.scaling import at_batch
from planner.search.problem.costs import MeshCosts
from planner.search.problem.parts import Parts
from planner.search.problem.states import Setting
from planner.search.problem.variables import Kind
from planner.search.units import family, rules
from planner.search.units.family import Family
from planner.search.units.labels import StageDecisions, StageTables, UnitWeights, stage_tables
from planner.search.units.records import TablePart, rows_of
from planner.search.units.stage_decisions import links_of
from planner.search.units.stage_shape import StageOptions
from planner.search.units.stage_tables import Stage
from planner.search.units.unit_terms import unit_terms
from planner.sharding.placement import Mesh, MeshAxis
from simulator.errors import InputError
from simulator.profiles import load_profile
from simulator.program import Collective
from tests.planner.search.problems import BUCKET_BYTES, captured, captured_small

HARDWARE = load_profile("dgx-a100")
MESHES = st.builds(
    lambda size, stride: Mesh((MeshAxis("tensor", size),), (stride,)),
    st.sampled_from((2, 3, 4, 8)),
    st.sampled_from((1, 2, 16)),
) | st.just(Mesh((), ()))
TWO_AXES = Mesh((MeshAxis("expert", 2), MeshAxis("tensor", 4)))
NAMES = st.sampled_from(("mlp", "gpt"))
BATCHES = st.sampled_from((1, 2, 6, 16))


@cache
def prepared(name: str) -> StageDecisions:
    return StageDecisions(captured("mlp") if name == "mlp" else captured_small(name, 3))


def tables_of(source: StageDecisions, mesh: Mesh, batch: int, sequence_parallel: bool | None = None) -> StageTables:
    return stage_tables(
        at_batch(source.graph, batch),
        source,
        HARDWARE,
        mesh,
        optimizer=optimizer("adamw"),
        bucket_bytes=BUCKET_BYTES,
        sequence_parallel=sequence_parallel,
    )


def own_parts(source: StageDecisions, mesh: Mesh, batch: int) -> Parts:
    costs = source.costs(HARDWARE, mesh, BUCKET_BYTES)
    setting = Setting(costs=costs, micro_batches=1, optimizer=optimizer("adamw"))
    return Parts(at_batch(source.graph, batch), source.decisions, setting)


@given(name=NAMES, mesh=MESHES, batch=BATCHES)
@settings(max_examples=8)
def test_a_stage_has_the_states_of_its_mesh(name: str, mesh: Mesh, batch: int) -> None:
    source = prepared(name)
    parts, own = tables_of(source, mesh, batch).parts, own_parts(source, mesh, batch)
    for number in range(len(source.decisions.variables)):
        assert np.array_equal(parts.states(number).choice, own.states(number).choice)


@given(name=NAMES, mesh=MESHES, batch=BATCHES, sequence_parallel=st.sampled_from((None, False)))
@example(name="mlp", mesh=TWO_AXES, batch=4, sequence_parallel=None)
@settings(max_examples=6)
def test_tables_are_those_of_a_family_of_one(name: str, mesh: Mesh, batch: int, sequence_parallel: bool | None) -> None:
    source = prepared(name)
    stage = tables_of(source, mesh, batch, sequence_parallel)
    alone = Family(
        source, own_parts(source, mesh, batch), StageOptions(modes=(0, 1, 2), sequence_parallel=sequence_parallel)
    )
    shape, parts = alone.known_shape(stage.case), alone.parts(stage.case)
    for number in range(len(source.chain.units)):
        here = stage.unit(number).factors
        there = alone.factors(shape, source.tabled(number), parts)
        one, other = here.layout, there.layout
        assert (one.scopes, one.starts, dict(one.sizes)) == (other.scopes, other.starts, dict(other.sizes))
        assert np.array_equal(one.forbidden, other.forbidden)
        assert here.parts == pytest.approx(there.parts, rel=1e-12)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_stages_without_axes_have_the_tables_of_those_with_one_where_nothing_is_cut(name: str) -> None:
    source, mesh = StageDecisions(prepared(name).graph), Mesh((), ())
    source.expect(HARDWARE, BUCKET_BYTES, [(mesh, 4), (Mesh((MeshAxis("tensor", 4),), (1,)), 4)])
    stage = tables_of(source, mesh, 4)
    assert stage.family.amounts is tables_of(source, Mesh((MeshAxis("tensor", 4),), (1,)), 4).family.amounts
    alone = Family(source, own_parts(source, mesh, 4), StageOptions(modes=(0, 1, 2), sequence_parallel=None))
    shape, parts = alone.known_shape(stage.case), alone.parts(stage.case)
    for number in range(len(source.chain.units)):
        here, there = stage.unit(number).factors, alone.factors(shape, source.tabled(number), parts)
        one, other = here.layout, there.layout
        assert (one.scopes, one.starts, dict(one.sizes)) == (other.scopes, other.starts, dict(other.sizes))
        assert np.array_equal(one.forbidden, other.forbidden)
        assert np.array_equal(here.parts, there.parts)


@pytest.mark.parametrize("data", [2, 8, 16])
def test_what_single_states_make_up_decides_nothing_along_the_data_axis(
    data: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen() -> tuple[object, ...]:
        tables = tables_of(StageDecisions(prepared("mlp").graph), Mesh((), ()), 4)
        axis = rules._data_axis(tables.decisions, tables.parts, data)
        return axis.numbers, axis.assignments

    few = chosen()
    monkeypatch.setattr(family, "unit_terms", lambda model, ledger, *, decided: unit_terms(model, ledger))
    assert few == chosen()


@given(mesh=MESHES, batch=BATCHES, seed=st.integers(0, 100))
@settings(max_examples=15)
def test_seconds_are_those_of_the_whole_objective(mesh: Mesh, batch: int, seed: int) -> None:
    """Any assignment that is possible costs what the search over operators says, updates aside."""
    source = prepared("mlp")
    tables, random = tables_of(source, mesh, batch), np.random.default_rng(seed)
    weights = UnitWeights(forward=random.uniform(0.5, 2), backward=random.uniform(0.5, 2), step=random.uniform(0, 2))
    states: dict[int, int] = {}
    found = tables.minimum(weights)
    for assignment in found.assignments:
        states.update(assignment)
    problem, parts = tables.problem, tables.parts
    seconds = sum(float(cost.time[states[v]]) for v, cost in enumerate(problem.unary))
    seconds += sum(float(cost.time[states[a], states[b]]) for (a, b), cost in problem.pairs.items())
    for number, variable in enumerate(source.decisions.variables):
        if variable.kind is Kind.PARAMETER:
            seconds -= float(parts.update_seconds(parts.states(number))[states[number]])
    counted = 0.0
    for number, assignment in zip(tables.chain.positions, found.assignments, strict=True):
        one = {v: np.array([s]) for v, s in assignment.items()}
        counted += float(
            tables.unit(number).factors.evaluate(one)[[TablePart.FORWARD, TablePart.BACKWARD, TablePart.STEP]].sum()
        )
    assert counted == pytest.approx(seconds, rel=1e-9)


def test_meshes_share_times_of_messages_where_those_are_the_same() -> None:
    source = StageDecisions(captured("mlp"))

    def costs(stride: int) -> MeshCosts:
        return source.costs(HARDWARE, Mesh((MeshAxis("tensor", 4),), (stride,)), BUCKET_BYTES)

    payloads = np.exp2(np.arange(40.0))
    assert costs(8) is costs(16)
    assert costs(1) is not costs(8)
    for stride in (1, 2, 4, 8, 16, 64):
        own = MeshCosts(HARDWARE, Mesh((MeshAxis("tensor", 4),), (stride,)), BUCKET_BYTES)
        for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL):
            shared = costs(stride).message_time(collective, 0, payloads)
            assert np.array_equal(shared, own.message_time(collective, 0, payloads))


@pytest.mark.parametrize("sequence_parallel", [None, True, False])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_stages_that_are_bounded_together_have_their_own_bounds(name: str, sequence_parallel: bool | None) -> None:
    source = StageDecisions(prepared(name).graph)
    meshes = [Mesh((), ()), *(Mesh((MeshAxis("tensor", size),), (stride,)) for size in (2, 3, 8) for stride in (1, 8))]
    stages = [(mesh, batch) for mesh in meshes for batch in (1, 4)]
    source.expect(HARDWARE, BUCKET_BYTES, stages)
    for mesh, batch in stages:
        try:
            tables = tables_of(source, mesh, batch, sequence_parallel)
        except InputError:
            continue
        expected, whole = least_matrices(tables, UnitWeights()), np.zeros(1)
        for number in tables.chain.positions:
            whole = (whole[:, None] + expected[number]).min(axis=0)
        for least, table in zip(tables.least.between_s, expected, strict=True):
            assert least == pytest.approx(table, rel=1e-12)
        assert tables.least.whole_s == pytest.approx(float(whole[0]), rel=1e-12)


@pytest.mark.parametrize("mesh", [Mesh((), ()), TWO_AXES, Mesh((MeshAxis("tensor", 8),), (1,))])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_no_label_passes_faster_than_what_it_keeps_and_holds_leaves_at_least(name: str, mesh: Mesh) -> None:
    tables = tables_of(prepared(name), mesh, 4)
    prices, seconds = tables.priced
    for price, least_s in zip(prices.tolist(), seconds.tolist(), strict=True):
        weights, whole = UnitWeights(activation_byte=price), np.zeros(1)
        matrices = least_matrices(tables, weights)
        for number in tables.chain.positions:
            whole = (whole[:, None] + matrices[number]).min(axis=0)
        assert least_s == pytest.approx(float(whole[0]), rel=1e-9)
        assert least_s >= tables.minimum(weights).value * (1 - 1e-9)
    for unit, least in zip(tables.units, tables.least_elements, strict=True):
        assert (unit.parameter_elements + unit.expert_elements).min() >= least * (1 - 1e-12)


def test_tied_parameters_of_stages_bounded_together_lie_as_is_best_for_each() -> None:
    source = StageDecisions(prepared("gpt").graph)
    stages = [(Mesh((MeshAxis("tensor", size),), (1,)), 4) for size in (2, 4, 8)]
    source.expect(HARDWARE, BUCKET_BYTES, stages)
    for mesh, batch in stages:
        stage = tables_of(source, mesh, batch)
        (station,) = source.shared
        chosen = stage.least.shared[station]
        costs = [plain_step(stage, {station: state}) for state in range(len(stage.parts.states(station)))]
        assert costs[chosen] == pytest.approx(min(costs), rel=1e-12)


def least_matrices(stage: Stage, weights: UnitWeights, shared: Mapping[int, int] | None = None) -> list[np.ndarray]:
    """Least weighted sum of each unit (entries, exits), tied parameters in the given states or in those of labels."""
    result, states = [], stage.least.shared if shared is None else shared
    for table in stage.tables(rows_of(weights, stage.options.modes))[0]:
        least = table.min(axis=0)
        for station in stage.shared:
            least = least[0 if least.shape[0] == 1 else states[station]]
        result.append(least)
    return result


def plain_step(stage: Stage, shared: Mapping[int, int]) -> float:
    """Least cost of a plain step of the whole chain with tied parameters in the given states."""
    value = np.zeros(1)
    matrices = least_matrices(stage, UnitWeights(step=1 / 32), shared)
    for number in stage.chain.positions:
        value = (value[:, None] + matrices[number]).min(axis=0)
    return float(value[0])


@pytest.mark.parametrize(("stride", "used"), [(1, 0), (16, 1)])
def test_faster_links_change_the_tables_of_meshes_whose_messages_use_them(stride: int, used: int) -> None:
    source, mesh = prepared("mlp"), Mesh((MeshAxis("tensor", 4),), (stride,))
    graph, common = at_batch(source.graph, 16), {"optimizer": optimizer("adamw"), "bucket_bytes": BUCKET_BYTES}
    plain = stage_tables(graph, source, HARDWARE, mesh, **common)  # type: ignore[arg-type]
    for number, level in enumerate(HARDWARE.levels):
        faster = replace(level, bandwidth_bytes_per_s=2 * level.bandwidth_bytes_per_s)
        levels = (*HARDWARE.levels[:number], faster, *HARDWARE.levels[number + 1 :])
        hardware = replace(HARDWARE, levels=levels, hash=f"faster {level.name}")
        assert (links_of(hardware, mesh) == links_of(HARDWARE, mesh)) == (number != used)
        found = stage_tables(graph, source, hardware, mesh, **common)  # type: ignore[arg-type]
        passes = zip(found.least.between_s, plain.least.between_s, strict=True)
        assert all(np.array_equal(one, other) for one, other in passes) == (number != used)
