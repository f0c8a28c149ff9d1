"""`shard`: strategies of operators are checked, kept, and followed by the plan, the program and the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import planner
from planner import AutoParallel, ContextError
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.graph.scaling import at_batch
from planner.networks import load_network
from planner.networks.marks import Marks
from planner.plans.hints import Hint, load_hints
from planner.plans.plan import Plan, expanded_rules
from planner.search.problem.hints import first_not_kept
from planner.sharding.cuts import OperatorCuts, viewed
from planner.sharding.placement import PARTIAL, REPLICATE
from simulator.errors import InputError, NetworkError, UnsupportedError
from simulator.program import Collective
from tests.planner.lowering.steps import lowered_of, tasks_of

CLUSTER = "ascend910b-atlas800t-a2"
CONFIGURED = "py:tests.planner.exchange.mindspore.networks:make_configured"
QUICK: dict[str, Any] = {"sensitivity": False, "top": 1}
WRONG: Any = planner.shard
UNTYPED: Any = planner


def cuts_of(plan: Plan, name: str) -> list[tuple[int, ...]]:
    """Mesh axes, by size, that cut each dim of each input of an operator: the product a dim."""
    found = []
    for place in range(len(plan.rules[name][0].inputs)):
        placed = [rule.inputs[place] for rule in plan.rules[name]]
        dims = max(2, *placed) if placed else 2
        row = [1] * dims
        for axis, dim in zip(plan.mesh.axes, placed, strict=True):
            if dim >= 0:
                row[dim] *= axis.size
        found.append(tuple(row[:2]))
    return found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (((3, "a"),), "in_strategy must be"),
        ([(2, 1), (1, 4)], "in_strategy=[(2, 1), (1, 4)] is of type list"),
        ((), "in_strategy=() is of type tuple"),
        ((2, 1), "in_strategy[0]=2 is of type int"),
        (((2, 0),), "in_strategy[0][1]=0: a dim is cut in a whole number of parts"),
        (((True, 1),), "in_strategy[0][0]=True"),
        (((2.0, 1),), "in_strategy[0][0]=2.0"),
    ],
)
def test_strategies_that_are_not_written_so_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ContextError) as error:
        WRONG(nn.ReLU(), given)
    assert words.removeprefix("in_strategy must be") in str(error.value)
    with pytest.raises(ContextError, match="out_strategy"):
        WRONG(nn.ReLU(), ((2, 1),), given)


@pytest.mark.parametrize("thing", [3, nn.Linear, "relu", None])
def test_only_modules_and_functions_have_strategies(thing: Any) -> None:
    with pytest.raises(ContextError, match="is neither a torch.nn.Module nor a function of tensors"):
        WRONG(thing, ((2, 1),))


def test_a_marked_module_computes_and_is_stored_as_before() -> None:
    layer = nn.Linear(4, 3)
    state, x = {k: v.clone() for k, v in layer.state_dict().items()}, torch.ones(2, 4)
    before = layer(x)
    marked = planner.set_comm_fusion(planner.recompute(planner.shard(layer, ((2, 1), (1, 1)))), 2)
    assert marked is layer
    assert torch.equal(layer(x), before)
    assert layer.state_dict().keys() == state.keys()
    assert not list(layer.children())
    call = planner.shard(torch.matmul, ((2, 1), (1, 4)))
    assert torch.equal(call(x, x.T), x @ x.T)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: planner.set_pipeline_stage(nn.ReLU(), -1), "pipeline_stage=-1 is out of range"),
        (lambda: planner.set_pipeline_stage(nn.ReLU(), True), "pipeline_stage=True is of type bool"),
        (lambda: planner.set_pipeline_stage(3, 1), "int is not a torch.nn.Module"),
        (lambda: UNTYPED.recompute(nn.ReLU(), "full"), "recompute mode='full' is of type str"),
        (lambda: planner.recompute(torch.relu), "is not a torch.nn.Module"),
        (lambda: UNTYPED.set_comm_fusion(nn.ReLU(), 1.5), "comm_fusion=1.5 is of type float"),
        (lambda: planner.set_comm_fusion(nn.ReLU(), -1), "comm_fusion=-1 is out of range"),
        (lambda: planner.set_comm_fusion([], 1), "list is not a torch.nn.Module or Parameter"),
    ],
)
def test_wrong_marks_are_refused(act: Any, words: str) -> None:
    with pytest.raises(ContextError) as error:
        act()
    assert words in str(error.value)


# Planned


SLOW_MODE = pytest.param("dynamic_programming", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["semi_auto", "sharding_propagation", SLOW_MODE])
def planned(request: pytest.FixtureRequest) -> tuple[str, Plan]:
    mode = str(request.param)
    return mode, planner.plan(AutoParallel(CONFIGURED, mode, device_num=8), CLUSTER, **QUICK).plan


def test_configured_operators_keep_their_strategies(planned: tuple[str, Plan]) -> None:
    plan = planned[1]
    # A bias, the input, and the weight as it is multiplied: transposed.
    assert cuts_of(plan, "module.expand/addmm")[1:] == [(2, 1), (1, 4)]
    assert cuts_of(plan, "module.contract/addmm")[1:] == [(2, 4), (4, 1)]
    assert cuts_of(plan, "module.product/mm") == [(2, 1), (1, 4)]
    assert plan.mesh.size == 8


def test_the_rest_is_data_parallel_or_follows(planned: tuple[str, Plan]) -> None:
    mode, plan = planned
    relu = cuts_of(plan, "module.relu/relu")
    if mode == "semi_auto":
        assert relu == [(8, 1)]
        assert cuts_of(plan, "module.last/addmm")[1] == (8, 1)
    else:
        assert relu == [(2, 4)]


def test_the_sum_behind_a_cut_inner_dim_is_in_the_program(planned: tuple[str, Plan]) -> None:
    plan = planned[1]
    tensor = next(i for i, axis in enumerate(plan.mesh.axes) if axis.size == 4)
    assert plan.rules["module.contract/addmm"][tensor].outputs == (PARTIAL,)
    tasks = tasks_of(lowered_of(plan))
    sums = [t for t in tasks if t.axis == plan.mesh.axes[tensor].name and t.collective is not None]
    assert any(t.collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER) for t in sums)


def test_semi_automatic_without_strategies_is_data_parallel() -> None:
    found = planner.plan(AutoParallel("zoo:mlp", "semi_auto", device_num=4), CLUSTER, **QUICK).plan
    assert [(axis.name, axis.size) for axis in found.mesh.axes] == [("data", 4)]
    assert found.parallel_mode == "semi_auto_parallel"


def test_the_context_takes_the_mode() -> None:
    context = planner.AutoParallelContext(parallel_mode="semi_auto_parallel", device_num=8)
    found = planner.plan(CONFIGURED, CLUSTER, context, **QUICK).plan
    assert cuts_of(found, "module.relu/relu") == [(8, 1)]


@pytest.mark.slow
def test_what_is_planned_is_executed() -> None:
    found = planner.plan(AutoParallel(CONFIGURED, "semi_auto", device_num=8), "dgx-a100", precision="fp32", **QUICK)
    report = execute_plan(found.plan, ExecuteOptions(strategy="unused", steps=2, verify=True, precision="fp64"))
    assert report.verified
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10


# In pipeline stages


STAGED = "py:tests.planner.exchange.mindspore.networks:make_double_recursion"
IN_STAGES = {
    "layer1": OperatorCuts(inputs=((1, 1), (2, 1))),
    "layer2": OperatorCuts(inputs=((1, 2), (1, 2))),
}


def staged(mode: str) -> Plan:
    """Two stages of two devices: a column-wise layer, recomputed ReLUs, and a row-wise layer on the next stage."""
    stages = {"layer1": 0, "relu1": 0, "layer2": 1, "relu2": 1, "layer3": 1}
    parallel = AutoParallel(planner.Pipeline(STAGED, 4, stage_config=stages), mode, device_num=4)
    parallel.pipeline(stages=2)
    hints = tuple(Hint(pattern=f"*{name}", cuts=cuts) for name, cuts in IN_STAGES.items())
    return planner.plan(parallel, "dgx-a100", hints=hints, precision="fp32", **QUICK).plan


@pytest.mark.parametrize(("mode", "relu"), [("semi_auto", (2, 1)), ("sharding_propagation", (1, 2))])
def test_strategies_are_kept_in_marked_stages(mode: str, relu: tuple[int, int]) -> None:
    plan = staged(mode)
    assert [chunk.last for chunk in plan.chunks] == ["module.layer1", "module.layer3"]
    assert plan.recompute == "selective"
    assert cuts_of(plan, "module.layer1/addmm")[1:] == [(1, 1), (1, 2)]
    assert cuts_of(plan, "module.layer2/addmm")[1:] == [(1, 2), (2, 1)]
    assert cuts_of(plan, "module.relu1/relu") == [relu]


@pytest.mark.slow
def test_saved_strategies_of_stages_are_kept_by_the_next_search(tmp_path: Path) -> None:
    """Each layer of the file is an operator of its own; those of a run say the same."""
    path = str(tmp_path / "operators.json")
    plans: list[Plan] = []
    for use in ("save_operator_strategy_file", "load_operator_strategy_file"):
        parallel = AutoParallel("zoo:gpt2-tiny", "dynamic_programming", device_num=8)
        parallel.pipeline(stages=2)
        getattr(parallel, use)(path)
        pins = {"tp": "2"} if not plans else {}
        plans.append(planner.plan(parallel, CLUSTER, global_batch=16, pins=pins, **QUICK).plan)
    hints = load_hints(path)
    assert len(hints) > 50
    graph = load_network("zoo:gpt2-tiny").capture()
    for plan in plans:
        found = first_not_kept(at_batch(graph, plan.samples), expanded_rules(plan), plan.mesh.axes, hints)
        assert found is None


@pytest.mark.slow
def test_strategies_in_stages_are_executed() -> None:
    options = ExecuteOptions(strategy="unused", steps=2, verify=True, precision="fp64")
    report = execute_plan(staged("semi_auto"), options)
    assert report.verified
    assert report.max_loss_difference is not None
    assert report.max_loss_difference <= 1e-10


# Checked against shapes and devices


def refused(cuts: dict[str, OperatorCuts], network: str = "zoo:mlp", devices: int = 8) -> str:
    with pytest.raises(InputError) as error:
        planner.plan(
            network,
            CLUSTER,
            planner.AutoParallelContext(parallel_mode="semi_auto_parallel", device_num=devices),
            marks=Marks(cuts=cuts),
            global_batch=32,
            **QUICK,
        )
    return str(error.value)


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        (((2, 1),), (), "has 1 tuples, and there are 3 tensors (the input (32, 784), parameter 'layers.0.weight'"),
        (((2, 1), (1, 1), (1,), (1,)), (), "has 4 tuples, and there are 3 tensors"),
        (((2, 1, 1), (1, 1)), (), "in_strategy[0]=(2, 1, 1) has 3 numbers, and the input has 2 dims, (32, 784)"),
        (((1, 1), (3, 1)), (), "no mesh of two axes"),
        (((1, 1), (1, 8)), (), "the inner dim is in 1 parts of one and 8 of the other"),
        (((2, 1), (1, 4)), (), "the weight of a Linear is stored as (out, in)"),
        (((16, 1), (1, 1)), (), "no mesh of two axes"),
        (((2, 1), (4, 1)), ((4, 2),), "out_strategy (4, 2) is not what factors cut (2, 1) and (1, 4) make, (2, 4)"),
        (((2, 1), (4, 1)), ((2, 4), (1, 1)), "has 2 tuples for 1 outputs"),
    ],
)
def test_strategies_are_held_against_shapes_and_devices(inputs: Any, outputs: Any, words: str) -> None:
    assert words in refused({"layers.0": OperatorCuts(inputs=inputs, outputs=outputs)})


def test_a_dim_that_does_not_divide_is_refused() -> None:
    words = refused({"layers.2": OperatorCuts(inputs=((2, 1), (4, 1)))})
    assert "in_strategy[1][0]=4 does not divide dim 0 of parameter 'layers.2.weight', 1 of (1, 512)" in words
    assert "use 1" in words


def test_strategies_that_no_one_mesh_takes_are_refused() -> None:
    cuts = {
        "layers.0": OperatorCuts(inputs=((2, 1), (2, 1))),
        "layers.1": OperatorCuts(inputs=((4, 1), (1, 1))),
    }
    assert "cuts so for all of them at once" in refused(cuts, devices=16)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer.0", "shard names 'layer.0', which is no module of"),
        ("layers", "no operator is its own; shard the modules"),
    ],
)
def test_modules_without_an_operator_are_refused(name: str, words: str) -> None:
    assert words in refused({name: OperatorCuts(inputs=((2, 1), (4, 1)))})


def test_a_call_that_no_module_has_is_refused() -> None:
    with pytest.raises(NetworkError, match=r"keep it as an attribute, self.matmul = planner.shard\(matmul"):
        load_network("py:tests.planner.exchange.mindspore.networks:make_loose").capture()


# Through views


def test_cuts_pass_the_views_of_a_linear_layer() -> None:
    """GPT-2's linear layers see (batch, sequence, hidden) as (batch · sequence, hidden)."""
    context = planner.AutoParallelContext(parallel_mode="semi_auto_parallel", device_num=4)
    cuts = {f"blocks.{n}.expand": OperatorCuts(inputs=((2, 1, 1), (2, 1)), outputs=((2, 1, 2),)) for n in range(4)}
    marks = Marks(cuts=cuts)
    options = {**QUICK, "global_batch": 8}
    found = planner.plan("zoo:gpt2-tiny", CLUSTER, context, marks=marks, **options).plan
    names = {**found.rules, **{name: rules for part in found.layers for name, rules in part.rules.items()}}
    rules = next(rules for name, rules in names.items() if name.endswith(".expand/addmm"))
    assert sorted(rule.outputs for rule in rules) == [(0,), (1,)]
    sequence = {"blocks.0.expand": OperatorCuts(inputs=((1, 2, 1), (2, 1)))}
    with pytest.raises(UnsupportedError, match="cut the first of the dims that are merged"):
        planner.plan("zoo:gpt2-tiny", CLUSTER, context, marks=Marks(cuts=sequence), **options)


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4), st.data())
def test_viewed_cuts_are_the_same_slices(shape: list[int], data: st.DataObject) -> None:
    """Where cuts can be carried, every rank's slice of the view is the view of its slice."""
    size = torch.Size(shape).numel()
    other, left = [], size
    while left > 1:
        part = data.draw(st.sampled_from([n for n in (2, 4, 8) if left % n == 0]))
        other.append(part)
        left //= part
    if data.draw(st.booleans()):
        other.insert(data.draw(st.integers(0, len(other))), 1)
    parts = tuple(data.draw(st.sampled_from([n for n in (1, 2, 4) if extent % n == 0])) for extent in shape)
    found = viewed(parts, tuple(shape), tuple(other))
    if found is None:
        return
    assert torch.Size(found).numel() == torch.Size(parts).numel()
    tensor = torch.arange(size).reshape(shape)
    assert [set(p.flatten().tolist()) for p in pieces(tensor, parts)] == [
        set(p.flatten().tolist()) for p in pieces(tensor.reshape(other), found)
    ]


def pieces(tensor: torch.Tensor, parts: tuple[int, ...]) -> list[torch.Tensor]:
    found = [tensor]
    for dim, number in enumerate(parts):
        found = [piece for part in found for piece in part.chunk(number, dim)]
    return found


# Files


def test_strategies_by_pattern_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "strategies.yaml"
    path.write_text(
        "- {operators: 'layers.0', in_strategy: [[2, 1], [2, 1]], out_strategy: [[2, 2]]}\n"
        "- {operators: 'layers.1/addmm', in_strategy: [[1], [2, 2], [2, 1]]}\n"
    )
    context = planner.AutoParallelContext(parallel_mode="semi_auto_parallel", device_num=4)
    found = planner.plan("zoo:mlp", CLUSTER, context, hints=load_hints(path), **QUICK).plan
    assert cuts_of(found, "layers.0/addmm")[1:] == [(2, 1), (1, 2)]
    assert cuts_of(found, "layers.1/addmm")[1:] == [(2, 2), (2, 1)]
    assert cuts_of(found, "relu") == [(4, 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {operators: a, in_strategy: [[2, 1]], axis: data}", "'axis'; it takes operators, in_strategy"),
        ("- {operators: a, out_strategy: [[2, 1]]}", "it takes operators, in_strategy, out_strategy"),
        ("- {in_strategy: [[2, 1]]}", "it takes operators, in_strategy, out_strategy"),
        ("- {operators: a, in_strategy: 2}", "in_strategy=2 is of type int"),
        ("- {operators: a, in_strategy: [[2, x]]}", "in_strategy[0][1]='x'"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "strategies.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_hints(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.slow
def test_saved_operator_strategies_are_kept_by_the_next_search(tmp_path: Path) -> None:
    path = str(tmp_path / "operators.json")
    first = AutoParallel(CONFIGURED, "semi_auto", device_num=8)
    first.save_operator_strategy_file(path)
    found = planner.plan(first, CLUSTER, **QUICK).plan
    second = AutoParallel("zoo:mlp", "dynamic_programming", device_num=8)
    second.load_operator_strategy_file(path)
    with pytest.raises(InputError, match="matches no operator"):
        planner.plan(second, CLUSTER, **QUICK)
    third = AutoParallel(CONFIGURED, "dynamic_programming", device_num=8)
    third.load_operator_strategy_file(path)
    again = planner.plan(third, CLUSTER, **QUICK).plan
    for name in ("module.relu/relu", "module.last/addmm", "module.product/mm"):
        assert cuts_of(again, name) == cuts_of(found, name)
    assert REPLICATE not in again.rules["module.relu/relu"][0].inputs
