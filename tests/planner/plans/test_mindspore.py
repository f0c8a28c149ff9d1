"""MindSpore's strategy file: what it says of a plan, and the same plan read from it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.app import app
from planner.graph.operator_graph import Role
from planner.plans.file import export_mindspore, read_plan, write_plan
from planner.plans.hints import load_hints
from planner.plans.mindspore import LAYERS, is_mindspore, parts_by_operator, strategy_items
from planner.plans.plan import Plan
from planner.sharding.placement import Mesh, MeshAxis
from planner.sharding.rules import Rule
from simulator.errors import StrategyError
from simulator.program import Phase
from tests.planner.lowering.plans import MEGATRON, one_stage
from tests.planner.search.problems import captured

NETWORK = "gpt2-tiny"


def plan_of(**storage: Any) -> Plan:
    return one_stage(NETWORK, axes=(("data", 2), ("tensor", 4)), **storage)


def exported(tmp_path: Path, plan: Plan) -> tuple[Path, dict[str, Any]]:
    path = export_mindspore(plan, captured(NETWORK), tmp_path / "strategy.json")
    return path, json.loads(path.read_text())


@pytest.mark.parametrize("storage", ["replicated", "sharded"])
def test_a_plan_saved_and_loaded_is_the_same_plan(storage: str, tmp_path: Path) -> None:
    plan = plan_of(storage=storage)
    path, _ = exported(tmp_path, plan)
    again = tmp_path / "again.json"
    write_plan(read_plan(path), again)
    assert read_plan(again) == read_plan(write_plan(plan, tmp_path / "own.json")) == plan


def test_the_parts_are_those_of_the_placements(tmp_path: Path) -> None:
    plan = plan_of()
    _, document = exported(tmp_path, plan)
    assert is_mindspore(document)
    graph = captured(NETWORK)
    for node in graph.nodes:
        if node.role is not Role.OPERATOR or node.phase is not Phase.FORWARD or node.name not in plan.rules:
            continue
        item = document["parallel_strategy_item"][node.name]
        assert item["stage"] == 0
        for number, parts in enumerate(item["parallel_strategy"]):
            for dim, count in enumerate(parts):
                sizes = [
                    axis.size
                    for axis, rule in zip(plan.mesh.axes, plan.rules[node.name], strict=True)
                    if rule.inputs[number] == dim
                ]
                assert count == prod(sizes)
            layout = document["parallel_layout_value_item"][node.name][str(number)]
            cut = [prod(layout["dev_matrix"][-1 - axis] for axis in row if axis >= 0) for row in layout["tensor_map"]]
            assert cut == parts
            assert layout["alias_name"] == ["data", "tensor"]


def test_layers_stand_under_the_names_that_mindspore_looks_for(tmp_path: Path) -> None:
    """It took no strategy from our files: it asks for the kind of an operator and its first parameter."""
    plan = one_stage(NETWORK, axes=(("data", 2), ("tensor", 4)), hints=MEGATRON)
    path, document = exported(tmp_path, plan)
    items = {name: item["parallel_strategy"] for name, item in document["parallel_strategy_item"].items()}
    assert items["MatMul_blocks.0.expand.weight"] == [[2, 1], [4, 1]]
    assert items["BiasAdd_blocks.0.expand.bias"] == [[2, 4], [4]]
    assert items["MatMul_blocks.3.contract.weight"] == [[2, 4], [1, 4]]
    assert items["LayerNorm_norm.gamma"] == [[2, 1, 1], [1], [1]]
    assert items["Gather_token_embedding.embedding_table"] == [[1, 1], [2]]
    assert items["MatMul_token_embedding.embedding_table"] == [[2, 1], [1, 1]]
    layers = {name for name in items if name.partition("_")[0] in LAYERS}
    assert len(layers) == 2 + 4 * (2 + 2 * 6) + 1 + 1
    assert parts_by_operator(document, "file").keys() == items.keys() - layers
    del document["meshwright"]
    path.write_text(json.dumps(document))
    assert {one.pattern for one in load_hints(path)} <= items.keys() - layers


def test_parameters_in_the_words_of_mindspore(tmp_path: Path) -> None:
    plan = plan_of()
    name = "position_embedding.weight"
    whole, rows, columns = (Rule((), (placement,), False) for placement in (-1, 0, 1))

    def layout(*rules: Rule) -> dict[str, Any]:
        _, document = exported(tmp_path, replace(plan, rules={**plan.rules, name: rules}))
        found: dict[str, Any] = document["parallel_layout_item"][name]
        return found

    shape = captured(NETWORK).nodes[next(p.node for p in captured(NETWORK).parameters if p.name == name)].outputs[0]
    assert layout(whole, rows) == {
        "dev_matrix": [2, 4],
        "field": 0,
        "opt_weight_shard_size": 0,
        "opt_weight_shard_step": 0,
        "tensor_map": [0, -1],
        "tensor_shape": list(shape.shape),
    }
    assert layout(whole, columns)["tensor_map"] == [-1, 0]
    sharded = layout(rows, rows)
    assert (sharded["tensor_map"], sharded["opt_weight_shard_size"], sharded["opt_weight_shard_step"]) == (
        [0, -1],
        2,
        4,
    )


def test_states_sharded_along_the_data_axis_are_an_optimizer_shard(tmp_path: Path) -> None:
    _, document = exported(tmp_path, plan_of(storage="sharded"))
    found = document["parallel_layout_item"].values()
    assert {item["opt_weight_shard_size"] for item in found} <= {0, 2}
    shared = [item for item in found if item["opt_weight_shard_size"]]
    assert shared
    assert all(item["opt_weight_shard_step"] == 4 for item in shared)
    assert all(1 not in item["tensor_map"] for item in shared)


def test_the_innermost_axis_comes_last(tmp_path: Path) -> None:
    plan = plan_of()
    turned = replace(plan, mesh=Mesh((MeshAxis("data", 2), MeshAxis("tensor", 4)), strides=(1, 2)))
    items = strategy_items(turned, captured(NETWORK))
    assert items["parallel_layout_item"]["position_embedding.weight"]["dev_matrix"] == [4, 2]
    assert items["parallel_strategy_item"] == strategy_items(plan, captured(NETWORK))["parallel_strategy_item"]


def test_an_edited_file_and_one_of_another_program_are_refused(tmp_path: Path) -> None:
    path, document = exported(tmp_path, plan_of())
    name = next(iter(document["parallel_strategy_item"]))
    document["parallel_strategy_item"][name]["parallel_strategy"][0] = [7]
    path.write_text(json.dumps(document))
    with pytest.raises(StrategyError, match=r"edited after the plan was saved.*remove the key 'meshwright'.*--hints"):
        read_plan(path)
    del document["meshwright"]
    path.write_text(json.dumps(document))
    with pytest.raises(StrategyError, match=r"not the batch, the schedule or the hardware; .*--hints"):
        read_plan(path)
    assert parts_by_operator(document, "file")[name][0] == (7,)


def test_names_that_mindspore_would_read_as_protobuf_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"end in \.json"):
        export_mindspore(plan_of(), captured(NETWORK), tmp_path / "strategy.ckpt")


@pytest.mark.parametrize("item", [None, {"stage": 0}, {"parallel_strategy": [[0]]}, {"parallel_strategy": [[True]]}])
def test_items_without_parts_are_named(item: object) -> None:
    with pytest.raises(StrategyError, match=r"file: parallel_strategy_item\.mm.*\[\[2, 1\], \[1, 4\]\]"):
        parts_by_operator({"parallel_strategy_item": {"mm": item}}, "file")


def test_the_command_writes_both_formats(tmp_path: Path) -> None:
    own = write_plan(plan_of(), tmp_path / "own.json")
    mindspore, back = tmp_path / "mindspore.json", tmp_path / "back.json"
    run = CliRunner().invoke
    assert run(app, ["export", str(own), "--out", str(mindspore)]).stdout.strip() == str(mindspore)
    found = run(app, ["export", str(mindspore), "--to", "meshwright", "--out", str(back), "--json"])
    said = json.loads(found.stdout)
    assert (said["strategy_file"], said["format"], said["files"]) == (str(back), "meshwright", [str(back)])
    assert back.read_text() == own.read_text()
