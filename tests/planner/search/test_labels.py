"""Labels and minima of a stage: exact, the same count as the whole objective, Megatron's plan found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.work import optimizer
from planner.graph.folding import repeat as repeated
from planner.graph.folding import unfold
from planner.graph.operator_graph import TensorRef
from planner.graph.scaling import at_batch, at_precision
from planner.networks import load_network
from planner.networks.decoder.graph import decoder_graph
from planner.networks.decoder.mixtral import ZooMixtral
from planner.networks.zoo.configs import MixtralConfig
from planner.networks.zoo.table import language_inputs
from planner.search.dynamic_programming import fastest
from planner.search.problem.problem import Problem
from planner.search.problem.variables import Kind
from planner.search.units import sweep
from planner.search.units.labels import StageDecisions, StageTables, UnitWeights, stage_tables
from planner.search.units.records import PARTS, TablePart, UnitFactors, rows_of
from planner.search.units.rules import rules_of
from planner.search.units.stage_tables import ENTRY, EXIT
from planner.sharding.placement import Mesh
from simulator.errors import InputError
from simulator.profiles import load_profile
from tests.planner.search.problems import BUCKET_BYTES, captured, captured_small, make_mesh

WEIGHTS = st.builds(
    UnitWeights,
    forward=st.floats(0.1, 2),
    backward=st.floats(0.1, 2),
    step=st.floats(0, 1),
    activation_byte=st.sampled_from((0.0, 1e-10, 1e-9, 1e-7)),
    parameter_element=st.sampled_from((0.0, 1e-10, 1e-8)),
)


@cache
def prepared(name: str, unfolded: bool = False) -> StageDecisions:
    if name == "gpt3-175b":
        return StageDecisions(at_precision(load_network("zoo:gpt3-175b").capture(), "bfloat16"))
    graph = captured("mlp") if name == "mlp" else captured_small(name, 3)
    return StageDecisions(unfold(graph) if unfolded else graph)


@cache
def tables_of(name: str, mesh: Mesh, sequence_parallel: bool | None = None, *, unfolded: bool = False) -> StageTables:
    source = prepared(name, unfolded)
    return stage_tables(
        at_batch(source.graph, 1 if name == "gpt3-175b" else 8),
        source,
        load_profile("dgx-a100"),
        mesh,
        optimizer=optimizer("adamw"),
        bucket_bytes=BUCKET_BYTES,
        sequence_parallel=sequence_parallel,
    )


def block_rules(tables: StageTables, place: int) -> dict[str, tuple[int, ...]]:
    """Placements of outputs, or of a parameter, on the only axis in the best plan: by node of one block."""
    best = tables.minimum(UnitWeights(step=1 / 64))
    number = tables.chain.positions[place]
    decisions, graph = tables.decisions.decisions, tables.parts.graph
    found = {}
    for index in tables.chain.units[number].nodes:
        variable = decisions.of_node[index]
        if variable in best.assignments[place]:
            states = tables.problem.states[variable]
            chosen = states.variable.choices[states.choice[0, best.assignments[place][variable]]]
            rule = chosen.rules[decisions.variables[variable].nodes.index(index)]
            found[graph.nodes[index].name.removeprefix(tables.chain.units[number].name)[1:]] = rule.outputs
    return found


def test_megatrons_plan_is_found_for_gpt3_within_a_node() -> None:
    tables = tables_of("gpt3-175b", make_mesh(tensor=8))
    rules = block_rules(tables, 40)
    for name in ("attention.query", "attention.key", "attention.value", "expand"):
        assert rules[f"{name}.weight"] == (0,), name  # columns of the product
    for name in ("attention.output", "contract"):
        assert rules[f"{name}.weight"] == (1,), name  # rows
    heads = 1
    assert rules["attention/_scaled_dot_product_flash_attention_for_cpu"][0] == heads
    sequence = 1
    for name in ("attention_norm", "feed_forward_norm"):
        assert rules[f"{name}/native_layer_norm"][0] == sequence


def sequence_parallel(tables: StageTables, unit: int) -> np.ndarray:
    return np.array([tables.sequence_parallel(unit, label) for label in range(len(tables.units[unit]))])


def test_without_sequence_parallelism_norms_are_whole_and_slower() -> None:
    free, without, pinned = (tables_of("gpt3-175b", make_mesh(tensor=8), asked) for asked in (None, False, True))
    weights = UnitWeights(step=1 / 64)
    best = free.minimum(weights).value
    assert best == pytest.approx(pinned.minimum(weights).value, rel=0.01)
    assert without.minimum(weights).value > best * 1.001
    assert not any(sequence_parallel(without, unit).any() for unit in range(len(without.units)))
    assert all(sequence_parallel(pinned, unit).all() for unit in (1, 2))
    assert [state.forward for state in pinned.boundaries] == [((1,),)] * 3


def test_a_sequence_that_does_not_divide_cannot_be_sharded() -> None:
    with pytest.raises(InputError, match=r"cannot be sharded along the sequence over 5 ranks"):
        tables_of("gpt", make_mesh(tensor=5), True)
    assert tables_of("gpt", make_mesh(tensor=5)).minimum(UnitWeights()).value > 0


def test_the_blocks_of_a_run_share_one_table() -> None:
    tables = tables_of("gpt3-175b", make_mesh(tensor=8))
    first, second = tables.units[1:3]
    assert np.array_equal(first.backward_s, second.backward_s)
    decisions = tables.decisions.decisions
    for labels, unit in ((first, tables.chain.units[1]), (second, tables.chain.units[2])):
        decided = {decisions.of_node[i] for i in unit.nodes} - {-1}
        assert all(decided <= set(states) for states in labels.assignments)


MESHES = (make_mesh(), make_mesh(tensor=2), make_mesh(tensor=2, expert=2))


@pytest.mark.parametrize("mesh", MESHES, ids=["one", "tensor", "two-axes"])
@pytest.mark.parametrize("name", ["mlp", "gpt", pytest.param("bert", marks=pytest.mark.slow)])
def test_the_minimum_is_that_of_the_whole_objective(name: str, mesh: Mesh) -> None:
    """Over the unfolded network, parameter updates aside, which labels leave to data parallelism."""
    tables = tables_of(name, mesh, unfolded=True)
    best = tables.minimum(UnitWeights(step=1.0))
    problem = tables.problem
    states: dict[int, int] = {}
    for assignment in best.assignments:
        states.update(assignment)
    updates = 0.0
    for number, variable in enumerate(tables.decisions.decisions.variables):
        if variable.kind is Kind.PARAMETER:
            updates += float(tables.parts.update_seconds(problem.states[number])[states[number]])
    assert objective(problem, states) == pytest.approx(updates + modeless(tables, best.assignments), rel=1e-9)
    if set(best.recompute) == {0}:
        assert best.value == pytest.approx(modeless(tables, best.assignments), rel=1e-9)
        exact = fastest(problem).objective_s
        assert best.value <= exact * (1 + 1e-9)
        assert exact <= best.value + updates + 1e-12


def objective(problem: Problem, states: dict[int, int]) -> float:
    time = sum(float(cost.time[states[v]]) for v, cost in enumerate(problem.unary))
    return time + sum(float(cost.time[states[a], states[b]]) for (a, b), cost in problem.pairs.items())


def modeless(tables: StageTables, assignments: tuple[object, ...]) -> float:
    """Seconds of both passes and the step without recomputation, from the units' tables."""
    total = 0.0
    for number, states in zip(tables.chain.positions, assignments, strict=True):
        parts = tables.unit(number).factors.evaluate({v: np.array([s]) for v, s in states.items()})  # type: ignore[attr-defined]
        total += float(parts[[TablePart.FORWARD, TablePart.BACKWARD, TablePart.STEP]].sum())
    return total


@settings(max_examples=15)
@given(weights=WEIGHTS)
@pytest.mark.parametrize(
    "mesh", [MESHES[1], pytest.param(MESHES[2], marks=pytest.mark.slow)], ids=["tensor", "two-axes"]
)
def test_no_choice_of_labels_is_cheaper_than_the_minimum(mesh: Mesh, weights: UnitWeights) -> None:
    tables = tables_of("gpt", mesh)
    exact = tables.minimum(weights)
    best = {-1: 0.0}
    for number in tables.chain.positions:
        labels = tables.units[number]
        cost = (
            weights.forward * labels.forward_s
            + weights.backward * labels.backward_s
            + weights.step * (labels.step_s + labels.cut_s + labels.cut_last_s)
        )
        cost = cost + weights.activation_byte * labels.activation_bytes
        cost = cost + weights.parameter_element * labels.parameter_elements
        after: dict[int, float] = {}
        for entry, leave, own in zip(labels.entry, labels.exit, cost, strict=True):
            if entry in best:
                after[leave] = min(after.get(leave, np.inf), best[entry] + float(own))
        best = after
    assert exact.value <= best[-1] * (1 + 1e-9)
    assert exact.value >= best[-1] * 0.95


def brute_force(factors: UnitFactors, tables: StageTables, number: int, row: np.ndarray) -> np.ndarray:
    """Least weighted sum of a unit between its boundary states, by trying every assignment."""
    unit = tables.unit(number)
    variables = list(factors.layout.sizes)
    states = np.indices([factors.layout.sizes[v] for v in variables]).reshape(len(variables), -1)
    by_variable = dict(zip(variables, states, strict=True))
    total = np.zeros(states.shape[1])
    sums = np.split(factors.weighted(row[None]), factors.layout.starts[1:])
    for scope, table in zip(factors.layout.scopes, sums, strict=True):
        total += table.reshape([factors.layout.sizes[v] for v in scope])[tuple(by_variable[v] for v in scope)]
    ends = []
    for station, boundary in ((unit.model.entry, number - 1), (unit.model.exit, number)):
        none = np.zeros(states.shape[1], dtype=np.int64)
        ends.append(none if station is None else tables.shape.classes[boundary][1][by_variable[station]])
    found = np.full([unit.sizes.get(end, 1) for end in (ENTRY, EXIT)], np.inf)
    inside = np.array([e < n for e, n in zip(ends, found.shape, strict=True)]).all(axis=0)
    np.minimum.at(found, (ends[0][inside], ends[1][inside]), total[inside])
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [0, 1])
def test_elimination_is_exact(number: int, seed: int) -> None:
    tables = tables_of("mlp", make_mesh(tensor=2))
    random = np.random.default_rng(seed)
    scale = np.array(
        [1.0] * 5 + [1e-9] * 2 + [1.0] * 6 + [1e-9] * 6 + [1.0, 1e-9, 1e-9, 1.0, 1.0, 1.0, 1e-9] + [1e-5] * 5
    )
    row = random.uniform(0, 1, PARTS) * scale
    unit = tables.unit(number)
    found = unit.spread(unit.minima(row[None]).table, ())[0]
    assert found == pytest.approx(brute_force(unit.factors, tables, number, row))


def test_units_of_one_form_are_solved_together_as_each_is_alone() -> None:
    stage = tables_of("gpt", make_mesh(tensor=2), unfolded=True)
    units = [stage.unit(number) for number in range(len(stage.chain.units))]
    forms = [unit.shape.form for unit in units]
    units = [unit for unit in units if forms.count(unit.shape.form) > 1]
    assert len(units) > 1
    random = np.random.default_rng(3)
    for n, unit in enumerate(units):
        scaled = unit.factors.parts * random.uniform(0.5, 2, unit.factors.parts.shape)
        units[n] = replace(unit, factors=replace(unit.factors, parts=scaled))
    rows, shared = rows_of(UnitWeights(step=1 / 64, activation_byte=1e-9), stage.options.modes), stage.least.shared
    together = sweep._solved(units, [rows] * len(units), shared, len(rows))
    alone = [sweep._solved([unit], [rows], shared, len(rows))[0] for unit in units]
    assert len({np.array([*solved.states.values()]).tobytes() for solved in together}) == len(units)
    for one, other in zip(together, alone, strict=True):
        assert {v: s.tolist() for v, s in one.states.items()} == {v: s.tolist() for v, s in other.states.items()}
        for name in ("mode", "entry", "exit"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_no_label_is_beaten_by_another_between_the_same_states() -> None:
    for labels in tables_of("gpt", make_mesh(tensor=2)).units:
        seconds = labels.forward_s + labels.backward_s
        once = labels.step_s + labels.cut_s + labels.cut_last_s
        columns = (seconds, labels.activation_bytes, labels.parameter_elements, once)
        for i, j in product(range(len(labels)), repeat=2):
            same = (labels.entry[i], labels.exit[i], labels.recompute[i])
            if i != j and same == (labels.entry[j], labels.exit[j], labels.recompute[j]):
                assert any(column[i] > column[j] for column in columns)


def test_recomputation_trades_seconds_for_bytes() -> None:
    labels = tables_of("gpt3-175b", make_mesh(tensor=8)).units[2]
    fastest_of = {}
    for mode in range(3):
        own = np.flatnonzero(labels.recompute == mode)
        fastest_of[mode] = own[(labels.forward_s + labels.backward_s)[own].argmin()]
    kept = [labels.activation_bytes[fastest_of[mode]] for mode in range(3)]
    seconds = [labels.backward_s[fastest_of[mode]] for mode in range(3)]
    assert kept[0] > kept[1] > kept[2] > 0
    assert seconds[0] < seconds[1] < seconds[2]
    # The forward operators run again but for the last product, whose result nobody needs.
    forward = labels.forward_s[fastest_of[2]]
    assert 0.5 * forward < seconds[2] - seconds[0] < forward


def test_tied_parameters_lie_the_same_way_in_every_unit() -> None:
    tables = tables_of("gpt", make_mesh(tensor=2))
    (tied,) = tables.tied
    node = tables.parts.graph.nodes[tied.node]
    assert (node.name, tied.units) == ("token_embedding.weight", (0, 3))
    station = tables.parts.station_of[TensorRef(tied.node)]
    chosen = {states[station] for number in tied.units for states in tables.units[number].assignments}
    assert len(chosen) == 1


def test_an_expert_axis_shards_experts_and_the_batch() -> None:
    config = MixtralConfig(
        vocabulary=512,
        hidden=512,
        layers=3,
        heads=16,
        key_value_heads=4,
        intermediate=2048,
        positions=256,
        experts=8,
        chosen_experts=2,
    )
    inputs = language_inputs(config.vocabulary, 128, masked=False)
    graph = repeated(decoder_graph(ZooMixtral(config=config), 2, inputs, name="experts", notes=()), 3)
    source = StageDecisions(at_precision(graph, "bfloat16"))
    tables = stage_tables(
        at_batch(source.graph, 8),
        source,
        load_profile("dgx-a100"),
        make_mesh(expert=4),
        optimizer=optimizer("adamw"),
        bucket_bytes=BUCKET_BYTES,
    )
    embedding, first, _, head = tables.units
    assert not embedding.expert_elements.any()
    assert not head.expert_elements.any()
    experts = 3 * config.experts * config.hidden * config.intermediate
    assert experts / 4 in first.expert_elements
    assert all(states.forward == ((0,),) for states in tables.boundaries)


def test_modes_and_axes_are_checked() -> None:
    source = prepared("gpt")
    hardware, update = load_profile("dgx-a100"), optimizer("adamw")
    with pytest.raises(InputError, match="has no data axis"):
        stage_tables(source.graph, source, hardware, make_mesh(data=2), optimizer=update, bucket_bytes=1)
    with pytest.raises(InputError, match="recompute modes"):
        stage_tables(source.graph, source, hardware, make_mesh(), optimizer=update, bucket_bytes=1, recompute=("some",))


def test_layers_with_equal_labels_are_one_range() -> None:
    tables = tables_of("gpt3-175b", make_mesh(tensor=8))
    full = [
        int(np.flatnonzero((ls.recompute == 0) & (ls.entry < 2) & (ls.exit == -1 if n == 3 else ls.exit == 1))[0])
        for n, ls in enumerate(tables.units)
    ]
    choices = [full[number] for number in tables.chain.positions]
    _, layers = rules_of(tables, choices, 16, sharding="zero1")
    assert [(layer.first, layer.last) for layer in layers] in ([(0, 95)], [(0, 0), (1, 95)])
