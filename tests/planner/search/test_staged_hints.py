"""Hints in plans with pipeline stages: what is left to choose is exact, every hint is kept, and wrong ones are said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.work import optimizer
from planner.graph.scaling import at_batch
from planner.planning.planning import PlanRequest, SearchResult, plan_network
from planner.plans.hints import Hint, hint
from planner.plans.pins import Pins
from planner.plans.plan import Plan, Status, expanded_rules
from planner.search.problem.hints import FREE_AXES, first_not_kept, told_apart
from planner.search.problem.unaligned import apart
from planner.search.units.hinted import StageHints, StageMesh, hinted_decisions
from planner.search.units.labels import StageDecisions, StageTables, UnitWeights, stage_tables
from planner.search.units.records import rows_of
from planner.sharding.cuts import OperatorCuts
from planner.sharding.placement import REPLICATE, MeshAxis, placement_name
from planner.sharding.rules import Rule
from simulator.errors import ContextError, InputError, UnsupportedError
from simulator.profiles import load_profile
from tests.planner.search.problems import BUCKET_BYTES, captured, make_mesh
from tests.planner.search.test_families import least_matrices
from tests.planner.search.test_labels import brute_force

HARDWARE = load_profile("dgx-a100")
COLUMNS = Hint(pattern="layers.0", cuts=OperatorCuts(inputs=((2, 1), (2, 1))))
ROWS = Hint(pattern="layers.1", cuts=OperatorCuts(inputs=((2, 2), (1, 2))))
NOTHING = Rule((), (), splits_work=False)


@cache
def source() -> StageDecisions:
    return StageDecisions(captured("mlp"))


def left(*hints: Hint, data: int = 2, samples: int = 8, rest_by_data: bool = False, anywhere: bool = False) -> Any:
    asked = StageHints(hints=hints, rest_by_data=rest_by_data, anywhere=anywhere)
    mesh = StageMesh(hardware=HARDWARE, data=data, tensor=2)
    return hinted_decisions(source(), at_batch(source().graph, samples * data), mesh, optimizer("adamw"), asked)


def tabled(decisions: StageDecisions, samples: int = 8) -> StageTables:
    graph = at_batch(decisions.graph, samples)
    mesh = make_mesh(tensor=2)
    return stage_tables(
        graph, decisions, HARDWARE, mesh, optimizer=optimizer("adamw"), bucket_bytes=BUCKET_BYTES, recompute=("none",)
    )


def outputs_of(tables: StageTables, variable: int, name: str) -> np.ndarray:
    """Placement of an operator's output on the tensor axis in every state of its variable."""
    states = tables.parts.states(variable)
    position = [tables.parts.graph.nodes[i].name for i in states.variable.nodes].index(name)
    return np.array([states.variable.choices[c].rules[position].outputs[0] for c in states.choice[0]])


WANTED = {"layers.0/addmm": 1, "layers.1/addmm": -2}
"""Placements of outputs on the tensor axis that `COLUMNS` and `ROWS` leave beside a data axis that cuts the batch."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("number", [0, 1])
def test_tables_are_those_of_all_placements_that_keep_the_hints(number: int, seed: int) -> None:
    """Every placement of every operator of a unit is tried; those that break a hint do not count."""
    random = np.random.default_rng(seed)
    weights = UnitWeights(forward=random.uniform(0.1, 2), backward=random.uniform(0.1, 2), step=random.uniform(0, 1))
    found = least_matrices(tabled(left(COLUMNS, ROWS)), weights)[number]
    free = tabled(source())
    factors, names = free.unit(number).factors, [node.name for node in source().graph.nodes]
    layout = factors.layout
    forbidden = layout.forbidden.copy()
    for name, wanted in WANTED.items():
        variable = source().decisions.of_node[names.index(name)]
        for start, scope in zip(layout.starts, layout.scopes, strict=True):
            if variable in scope:
                breaks = outputs_of(free, variable, name) != wanted
                shape = [len(breaks) if v == variable else 1 for v in scope]
                whole = np.broadcast_to(breaks.reshape(shape), [layout.sizes[v] for v in scope]).ravel()
                forbidden[start : start + len(whole)] |= whole
    assert forbidden.sum() > layout.forbidden.sum()
    barred = replace(factors, layout=replace(layout, forbidden=forbidden))
    exact = brute_force(barred, free, number, rows_of(weights, (0,))[0])
    assert found == pytest.approx(exact)


CUTS = st.sampled_from([(1, 1), (2, 1), (1, 2)])


@settings(max_examples=12)
@given(data=st.sampled_from([1, 2, 4]), batch=st.sampled_from([1, 2, 4]), rows=CUTS, samples=st.sampled_from([1, 2, 4]))
def test_choices_of_both_axes_are_allowed_in_every_combination(
    data: int, batch: int, rows: tuple[int, int], samples: int
) -> None:
    """What is left on the data axis and what is left on the tensor axis cut as asked, whichever of them are taken."""
    asked = Hint(pattern="layers.1", cuts=OperatorCuts(inputs=((batch, rows[1]), rows)))
    try:
        decisions = left(asked, data=data, samples=samples, anywhere=True)
    except InputError:
        return
    graph = at_batch(source().graph, samples * data)
    names = [node.name for node in graph.nodes]
    number = source().decisions.of_node[names.index("layers.1/addmm")]
    sides = [decisions.along_data, decisions] if data > 1 else [decisions]
    axes = [MeshAxis("data", data), MeshAxis("tensor", 2)][2 - len(sides) :]
    choices = [side.decisions.variables[number].choices for side in sides]
    assert all(choices)
    everything = {name: (NOTHING,) * len(axes) for name in names}
    for chosen in product(*choices):
        rules = everything | {"layers.1/addmm": tuple(choice.rules[0] for choice in chosen)}
        assert first_not_kept(graph, rules, axes, [asked]) is None
    if data > 1 and batch in (data, 2 * data):
        assert not decisions.estimated


def test_the_rest_cuts_the_batch_on_both_axes() -> None:
    decisions = left(COLUMNS, rest_by_data=True)
    assert decisions.free_axes == FREE_AXES
    tables = tabled(decisions)
    names = [node.name for node in source().graph.nodes]
    best = tables.minimum(UnitWeights(step=1.0))
    states = {v: s for assignment in best.assignments for v, s in assignment.items()}
    for name, wanted in {"layers.0/addmm": 1, "layers.1/addmm": 0, "relu": 0, "layers.2/addmm": 0}.items():
        variable = decisions.decisions.of_node[names.index(name)]
        assert outputs_of(tables, variable, name)[states[variable]] == wanted


def test_what_the_data_axis_does_not_cut_is_left_to_meshes_that_have_no_other() -> None:
    with pytest.raises(ContextError, match="it does not cut the batch in 2"):
        left(Hint(pattern="layers.1", cuts=OperatorCuts(inputs=((1, 2), (1, 2)))))
    assert left(Hint(pattern="layers.1", cuts=OperatorCuts(inputs=((1, 2), (1, 2)))), anywhere=True).estimated
    with pytest.raises(ContextError, match=r"'layers.1/addmm'.* does not divide a micro-batch of 1"):
        left(Hint(pattern="layers.1", cuts=OperatorCuts(inputs=((2, 1), (4, 1)))), data=4, samples=1, anywhere=True)


# Plans


def planned(
    network: str = "gpt2-tiny", *, devices: int = 8, mode: str = "auto_parallel", **options: Any
) -> SearchResult:
    usual: dict[str, Any] = {"pins": Pins(pp=2), "global_batch": 16, "top": 1, "sensitivity": False}
    given_options = usual | options
    request = PlanRequest(
        network=f"zoo:{network}", hardware="dgx-a100", devices=devices, parallel_mode=mode, **given_options
    )
    return plan_network(request, graph=captured(network))


def kept(plan: Plan, hints: tuple[Hint, ...]) -> bool:
    graph = at_batch(captured(plan.network.removeprefix("zoo:")), plan.samples)
    return first_not_kept(graph, expanded_rules(plan), plan.mesh.axes, hints) is None


@pytest.mark.slow
def test_the_choice_of_the_free_search_as_hints_gives_its_plan() -> None:
    free = planned(pins=Pins(pp=2, tp=2, dp=2)).candidates[0]
    rules = {name: own for part in free.plan.layers for name, own in part.rules.items()}
    hints = tuple(
        hint(name, axis.name, outputs=[placement_name(p) for p in own[place].outputs])
        for name, own in rules.items()
        if name.endswith("/addmm")
        for place, axis in enumerate(free.plan.mesh.axes)
    )
    assert len(hints) == 12
    again = planned(pins=Pins(pp=2, tp=2, dp=2), hints=hints).candidates[0]
    assert kept(free.plan, hints)
    assert again.plan.certificate.objective_s == pytest.approx(free.plan.certificate.objective_s)
    # Of ways that the closed form cannot tell apart either may be taken.
    assert again.prediction.step_time_s == pytest.approx(free.prediction.step_time_s, rel=5e-3)


PAIR = (
    Hint(pattern="blocks.*.expand", cuts=OperatorCuts(inputs=((2, 1, 1), (2, 1)))),
    Hint(pattern="blocks.*.contract", cuts=OperatorCuts(inputs=((2, 1, 2), (1, 2)))),
)


@pytest.mark.parametrize(
    "search_mode", ["dynamic_programming", pytest.param("sharding_propagation", marks=pytest.mark.slow)]
)
def test_every_mode_keeps_strategies_in_stages(search_mode: str) -> None:
    result = planned(hints=PAIR, search_mode=search_mode)
    plan = result.candidates[0].plan
    assert plan.pipeline == 2
    assert {axis.name: axis.size for axis in plan.mesh.axes} == {"data": 2, "tensor": 2}
    assert plan.certificate.status is not Status.HEURISTIC
    assert kept(plan, PAIR)


ONE_LAYER = (
    hint("blocks.2.expand", "tensor", outputs=["S(1)"]),
    hint("blocks.2.contract", "tensor", outputs=["P"]),
    hint("blocks.1.expand", "tensor", outputs=["R"]),
)


def test_layers_are_told_apart_where_hints_are_for_some_of_them() -> None:
    graph = captured("gpt2-tiny")
    assert told_apart(graph, ONE_LAYER) == (0,)
    assert told_apart(graph, (*PAIR, hint("blocks.0.expand", "tensor", outputs=["R"]))) == ()
    assert apart(graph, (0,)).runs == ()


@pytest.mark.slow
@pytest.mark.parametrize("pins", [Pins(pp=2, tp=2, dp=2), Pins(pp=1, tp=2, dp=4)])
def test_single_layers_have_strategies_of_their_own(pins: Pins) -> None:
    result = planned(pins=pins, hints=ONE_LAYER)
    plan = result.candidates[0].plan
    assert kept(plan, ONE_LAYER)
    layers = {n: part for part in plan.layers for n in range(part.first, part.last + 1)}
    axis = [one.name for one in plan.mesh.axes].index("tensor")
    found = [layers[n].rules["blocks.*.expand/addmm"][axis].outputs[0] for n in range(4)]
    assert found[1:3] == [REPLICATE, 1]
    assert plan.certificate.status is not Status.HEURISTIC
    with pytest.raises(InputError, match="contradict each other at 'blocks.2.expand"):
        planned(pins=pins, hints=(*ONE_LAYER, hint("blocks.2.exp*", "tensor", outputs=["R"])))


@pytest.mark.slow
def test_strategies_are_kept_beside_a_free_pipeline_and_recomputation() -> None:
    plan = planned(hints=PAIR, pins=Pins(recompute="full"), devices=4).candidates[0].plan
    assert plan.recompute == "full"
    assert kept(plan, PAIR)


@pytest.mark.parametrize(
    ("hints", "options", "error", "words"),
    [
        ((COLUMNS,), {}, InputError, "matches no operator"),
        (PAIR, {"pins": Pins(pp=2, ep=2)}, UnsupportedError, "pins ep=2 with strategies of operators"),
        (PAIR, {"pins": Pins(pp=8)}, ContextError, "on 1 devices: no mesh of two axes"),
        (PAIR, {"pins": Pins(tp=4, pp=2)}, ContextError, "no mesh of two axes.*there is 1 × 4: use"),
        (
            (*PAIR, hint("blocks.*.expand", "tensor", outputs=["P"])),
            {"pins": Pins(dp=2, tp=2, pp=2)},
            InputError,
            "contradict each other at 'blocks",
        ),
    ],
)
def test_what_cannot_be_kept_is_said(
    hints: tuple[Hint, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        planned(hints=hints, **options)
