"""Files in MindFormers' style: what they say layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from planner.cli.app import app
from planner.exchange.mindspore.mindformers import Translated, translate
from planner.networks import load_network
from planner.networks.marks import Marks, Swap
from planner.plans.file import read_plan
from planner.plans.plan import OffloadRange
from simulator.errors import InputError

run = CliRunner().invoke


def layered(**parts: Any) -> Translated:
    """A file in the automatic mode with two stages and what `parts` say."""
    config = {"pipeline_stage": 2, **parts.pop("parallel_config", {})}
    return translate({"parallel": {"parallel_mode": 2}, "parallel_config": config, **parts})


def marks_of_gpt(translated: Translated, stages: int = 2) -> Marks:
    virtual = int(translated.pins.get("vpp", "1"))
    return translated.layers.marks(load_network("zoo:gpt2").capture(), stages, virtual)


def model(**keys: Any) -> dict[str, Any]:
    return {"model": {"model_config": keys}}


def test_an_offset_moves_layers_between_stages() -> None:
    found = marks_of_gpt(layered(**model(offset=[1, -1])))
    assert [found.stages[f"blocks.{layer}"] for layer in range(12)] == [0] * 7 + [1] * 5
    assert not found.recompute
    assert not found.fusion


@pytest.mark.parametrize(
    ("numbers", "again"), [([2, 1], {0, 1, 6}), (3, {0, 1, 2, 6, 7, 8}), ([0, 6], set(range(6, 12))), (0, set())]
)
def test_the_first_layers_of_stages_compute_again(numbers: object, again: set[int]) -> None:
    found = marks_of_gpt(layered(recompute_config={"recompute": numbers}))
    assert {layer for layer in range(12) if found.recompute[f"blocks.{layer}"]} == again
    assert set(found.stages.values()) == {0, 1}
    assert "recompute" not in layered(recompute_config={"recompute": numbers}).pins


PARTS = [".*norm", "add", "gelu"]
BEHIND: dict[int, object] = dict.fromkeys(range(6, 12), True)


@pytest.mark.parametrize(
    ("section", "modes"),
    [
        ({"select_recompute": [2, 1]}, {0: "selective", 1: "selective", 6: "selective"}),
        ({"recompute": False, "select_recompute": 1}, {0: "selective", 6: "selective"}),
        ({"recompute": [1, 0], "select_recompute": [2, 1]}, {0: True, 1: "selective", 6: "selective"}),
        ({"recompute": [1, 0], "select_recompute": False}, {0: True}),
        ({"recompute": [0, 6], "select_recompute": True}, dict.fromkeys(range(6), "selective") | BEHIND),
        ({"select_recompute": PARTS}, dict.fromkeys(range(12), "selective")),
        ({"select_recompute": {key: [1, 0] for key in PARTS}}, {0: "selective"}),
        (
            {"recompute": True, "select_recompute_exclude": ["expand", r"attention\..*"]},
            dict.fromkeys(range(12), "selective"),
        ),
        ({"recompute": [2, 0], "select_comm_recompute": [1, 0]}, {0: True, 1: True}),
    ],
)
def test_layers_compute_again_in_part(section: dict[str, Any], modes: dict[int, object]) -> None:
    translated = layered(recompute_config=section)
    found = marks_of_gpt(translated)
    assert {layer: mode for layer in range(12) if (mode := found.recompute[f"blocks.{layer}"])} == modes
    assert "recompute" not in translated.pins


@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ({"recompute": [2, 0]}, set()),
        ({"recompute": [2, 0], "select_comm_recompute": False}, set()),
        ({"recompute": [2, 1], "mp_comm_recompute": False}, {0, 1, 6}),
        ({"recompute": [2, 1], "mp_comm_recompute": False, "select_comm_recompute": [1, 0]}, {1, 6}),
        ({"recompute": [1, 0], "select_recompute": [2, 1], "select_comm_recompute": False}, {1, 6}),
        ({"select_recompute": PARTS, "select_comm_recompute": [5, 6]}, {5}),
    ],
)
def test_layers_keep_what_messages_have_brought(section: dict[str, Any], kept: set[int]) -> None:
    found = marks_of_gpt(layered(recompute_config=section))
    assert {layer for layer in range(12) if not found.messages[f"blocks.{layer}"]} == kept


@pytest.mark.parametrize(
    ("section", "pin"),
    [
        ({"recompute": True, "select_comm_recompute": False}, None),
        ({"recompute": True, "mp_comm_recompute": False}, "false"),
        ({"recompute": True, "mp_comm_recompute": False, "select_comm_recompute": True}, None),
        ({"select_recompute": True, "select_comm_recompute": False}, "false"),
        ({"select_recompute": True, "select_comm_recompute": True}, None),
        ({"recompute": False, "mp_comm_recompute": False}, None),
    ],
)
def test_a_network_keeps_what_messages_have_brought(section: dict[str, Any], pin: str | None) -> None:
    assert layered(recompute_config=section).pins.get("recompute_messages") == pin


WHOLE = Swap(prefetch=1)


@pytest.mark.parametrize(
    ("section", "away"),
    [
        ({"swap": True}, dict.fromkeys(range(12), WHOLE)),
        ({"swap": True, "default_prefetch": 7}, dict.fromkeys(range(12), Swap(prefetch=7))),
        (
            {"swap": True, "layer_swap": [{"backward_prefetch": 4, "layers": [0, 3]}]},
            {n: Swap(prefetch=4) for n in (0, 3)},
        ),
        ({"swap": True, "layer_swap": [{"layers": True}]}, dict.fromkeys(range(12), WHOLE)),
        ({"swap": True, "layer_swap": [{"backward_prefetch": "Auto", "layers": [1]}]}, {1: Swap()}),
        (
            {"swap": True, "op_swap": [{"op_name": "gelu", "backward_prefetch": 5, "layers": [2]}]},
            {2: Swap(prefetch=5, operators=("/gelu",))},
        ),
        (
            {
                "swap": True,
                "layer_swap": [{"layers": [2], "backward_prefetch": 2}],
                "op_swap": [{"op_name": ["expand", "gelu"], "layers": [2, 4]}],
            },
            {2: Swap(prefetch=2), 4: Swap(prefetch=1, operators=(".expand/addmm", "/gelu"))},
        ),
    ],
)
def test_layers_have_activations_on_the_host(section: dict[str, Any], away: dict[int, Swap]) -> None:
    found = marks_of_gpt(layered(swap_config=section)).offload
    assert found == {f"blocks.{layer}": swap for layer, swap in away.items()}


def test_nothing_is_swapped_unless_it_is_said() -> None:
    assert not marks_of_gpt(layered(swap_config={"swap": False, "layer_swap": [{"layers": [1]}]})).offload


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"swap": 1}, ("swap_config.swap",)),
        ({"swap": True, "prefetch": 1}, ("swap_config", "prefetch", "default_prefetch")),
        ({"swap": True, "default_prefetch": 0}, ("swap_config.default_prefetch",)),
        ({"swap": True, "layer_swap": {"layers": [1]}}, ("layer_swap", "no list of mappings")),
        ({"swap": True, "layer_swap": [{"layer": [1]}]}, ("layer_swap[0]", "'layer'")),
        ({"swap": True, "layer_swap": [{"layers": 3}]}, ("layer_swap[0].layers", "neither True nor a list")),
        ({"swap": True, "layer_swap": [{"layers": [12]}]}, ("names layer 12", "layers 0 to 11")),
        ({"swap": True, "op_swap": [{"layers": [1]}]}, ("op_swap[0].op_name",)),
        ({"swap": True, "op_swap": [{"op_name": "("}]}, ("op_swap[0].op_name", "no regular expression")),
        ({"swap": True, "op_swap": [{"op_name": "conv"}]}, ("'conv'", "names nothing")),
        ({"swap": True, "op_swap": [{"op_name": "gelu", "backward_prefetch": "soon"}]}, ("backward_prefetch",)),
    ],
)
def test_what_swapping_cannot_be_is_said(section: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as raised:
        marks_of_gpt(layered(swap_config=section))
    for word in words:
        assert word in str(raised.value)


@pytest.mark.slow
def test_a_plan_follows_what_a_file_says_of_swapping(tmp_path: Path) -> None:
    file, out = tmp_path / "gpt.yaml", tmp_path / "strategy.json"
    config = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4}
    swap = {"swap": True, "layer_swap": [{"layers": [0, 1], "backward_prefetch": 2}]}
    file.write_text(yaml.safe_dump({"parallel_config": config, "swap_config": swap}))
    found = run(
        app, ["plan", "zoo:gpt2-tiny", "--hw", "dgx-a100", "--devices", "8", "--config", str(file), "--out", str(out)]
    )
    assert found.exit_code == 0, found.output
    assert read_plan(out).offload_ranges == (OffloadRange(first="blocks.0", last="blocks.1", swap=Swap(prefetch=2)),)


@pytest.mark.parametrize(("offset", "sizes"), [([[1, 0], [0, -1]], [4, 3, 3, 2]), ([[0, 0], [0, 0]], [3, 3, 3, 3])])
def test_an_offset_moves_layers_between_chunks(offset: list[list[int]], sizes: list[int]) -> None:
    found = marks_of_gpt(layered(**model(offset=offset, pp_interleave_num=2)))
    assert [[*found.stages.values()].count(chunk) for chunk in range(4)] == sizes
    assert found.virtual == 2


@pytest.mark.parametrize(("numbers", "again"), [([4, 1], {0, 1, 2, 6, 3}), ([[1, 0], [0, 2]], {0, 9, 10}), (1, {0, 3})])
def test_layers_of_chunks_compute_again(numbers: object, again: set[int]) -> None:
    keys = model(offset=[[0, 0], [0, 0]], pp_interleave_num=2)
    found = marks_of_gpt(layered(**keys, recompute_config={"recompute": numbers}))
    assert {layer for layer in range(12) if found.recompute[f"blocks.{layer}"]} == again


def test_what_layers_keep_is_cut_where_sequences_are() -> None:
    sliced = {"recompute": True, "recompute_slice_activation": True}
    assert layered(recompute_config=sliced, parallel_config={"model_parallel": 2}).pins["sequence_parallel"] == "true"
    alone = layered(recompute_config=sliced, parallel_config={"model_parallel": 1}).pins
    assert "sequence_parallel" not in alone


def test_sharded_parameters_are_gathered_again_at_the_third_level() -> None:
    section = {"recompute": True, "parallel_optimizer_comm_recompute": True}
    assert layered(recompute_config=section).pins["optimizer_sharding"] == "zero3"


def test_one_device_computes_layers_again_as_well() -> None:
    found = translate({"use_parallel": False, "recompute_config": {"recompute": 5}})
    assert [*marks_of_gpt(found, 1).recompute.values()] == [True] * 5 + [False] * 7
    assert not found.pins


def test_without_stages_layers_are_counted_from_the_first() -> None:
    found = marks_of_gpt(translate({"recompute_config": {"recompute": 5}, "parallel": {"parallel_mode": 2}}), 1)
    assert [found.recompute[f"blocks.{layer}"] for layer in range(12)] == [True] * 5 + [False] * 7
    assert not found.stages


@pytest.mark.parametrize(("groups", "size"), [(4, 3), (2, 6), (1, 13), (12, 1), (40, 1)])
def test_gradients_of_neighbouring_layers_are_a_group(groups: int, size: int) -> None:
    found = marks_of_gpt(layered(parallel_config={"gradient_aggregation_group": groups}))
    assert [found.fusion[f"blocks.{layer}"] for layer in range(12)] == [layer // size + 1 for layer in range(12)]


def test_interleaving_is_pinned() -> None:
    assert layered(**model(pp_interleave_num=3)).pins["vpp"] == "3"
    assert "vpp" not in layered(**model(pp_interleave_num=1)).pins


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (model(offset=[1, 1]), ("[7, 7] layers, 14 in all", "there are 12", "add up to 0")),
        (model(offset=[6, -6]), ("[12, 0] layers", "at least 1")),
        (model(offset=[1, 0, -1]), ("3 numbers for pipeline_stage=2",)),
        (model(offset=[1.5, -1]), ("no list of whole numbers",)),
        (model(offset=[[0, 1], [1, -2]]), ("2 rows for pp_interleave_num=1",)),
        (model(offset=[1, -1], pp_interleave_num=2), ("1 row for pp_interleave_num=2",)),
        (model(offset=[[3, -3], [0, 0]], pp_interleave_num=2), ("4 chunks [6, 0, 3, 3] layers", "at least 1")),
        (model(pp_interleave_num=0), ("pp_interleave_num",)),
        ({"recompute_config": {"recompute": [1, 2, 3]}}, ("3 numbers for pipeline_stage=2",)),
        ({"recompute_config": {"recompute": [-1, 2]}}, ("recompute_config.recompute",)),
        ({"parallel_config": {"gradient_aggregation_group": 0}}, ("gradient_aggregation_group",)),
        (
            {"parallel_config": {"pipeline_stage": 5}, "recompute_config": {"recompute": 1}},
            ("pipeline_stage=5 does not divide num_layers=12", "offset"),
        ),
    ],
)
def test_what_does_not_fit_the_layers_is_said(parts: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as raised:
        marks_of_gpt(layered(**parts), parts.get("parallel_config", {}).get("pipeline_stage", 2))
    for word in words:
        assert word in str(raised.value)


def test_a_network_without_layers_is_said() -> None:
    with pytest.raises(InputError, match="no row of equal layers, which offset speaks of"):
        layered(**model(offset=[1, -1])).layers.marks(load_network("zoo:mlp").capture(), 2)


@pytest.mark.slow
def test_a_plan_follows_what_a_file_says_of_layers(tmp_path: Path) -> None:
    file, out = tmp_path / "gpt.yaml", tmp_path / "strategy.json"
    config = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4}
    document = {"parallel": {"parallel_mode": 1}, "parallel_config": config, **model(offset=[1, -1])}
    file.write_text(yaml.safe_dump({**document, "recompute_config": {"recompute": [2, 1]}}))
    found = run(
        app, ["plan", "zoo:gpt2-tiny", "--hw", "dgx-a100", "--devices", "8", "--config", str(file), "--out", str(out)]
    )
    assert found.exit_code == 0, found.output
    plan = read_plan(out)
    assert [(chunk.first, chunk.last) for chunk in plan.chunks] == [
        ("token_embedding", "blocks.2"),
        ("blocks.3", "norm"),
    ]
    assert [(part.first, part.last) for part in plan.recompute_ranges] == [("blocks.0", "blocks.1"), ("blocks.3",) * 2]


@pytest.mark.slow
def test_a_plan_follows_what_a_file_says_of_chunks(tmp_path: Path) -> None:
    file, out = tmp_path / "gpt.yaml", tmp_path / "strategy.json"
    config = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4}
    document = {"parallel": {"parallel_mode": 1}, "parallel_config": config}
    document |= model(offset=[[1, 0], [0, -1]], pp_interleave_num=2)
    again = {"recompute": [1, 0], "select_recompute": [[0, 2], [0, 1]], "recompute_slice_activation": True}
    file.write_text(yaml.safe_dump({**document, "recompute_config": again}))
    found = run(
        app, ["plan", "zoo:gpt2", "--hw", "dgx-a100", "--devices", "8", "--config", str(file), "--out", str(out)]
    )
    assert found.exit_code == 0, found.output
    plan = read_plan(out)
    chunks = [("token_embedding", "blocks.3"), ("blocks.4", "blocks.6"), ("blocks.7", "blocks.9")]
    assert [(chunk.first, chunk.last) for chunk in plan.chunks] == [*chunks, ("blocks.10", "norm")]
    assert [chunk.rank for chunk in plan.chunks] == [0, 1, 0, 1]
    assert (plan.schedule, plan.sequence_parallel) == ("interleaved_1f1b", True)
    assert [(part.first, part.last, part.mode) for part in plan.recompute_ranges] == [
        ("blocks.0", "blocks.0", "full"),
        ("blocks.4", "blocks.5", "selective"),
        ("blocks.10", "blocks.10", "selective"),
    ]
