"""Files in MindFormers' style: what they pin, what is checked with numbers, what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from planner.cli.app import app
from planner.cli.config import GivenOptions, PlanSettings, with_config
from planner.exchange.mindspore.mindformers import is_mindformers, translate
from planner.exchange.mindspore.notes import Sizes, check_sizes, sizes_of, used_devices, vocabulary_marks
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.networks import load_network
from planner.networks.marks import Marks
from planner.plans.file import read_plan
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from planner.sharding.placement import REPLICATE
from simulator.errors import ContextError, InputError, UnsupportedError

FILE: dict[str, Any] = {
    "use_parallel": True,
    "parallel": {"parallel_mode": 1, "gradients_mean": False, "search_mode": "sharding_propagation"},
    "parallel_config": {
        "data_parallel": 2,
        "model_parallel": 2,
        "pipeline_stage": 2,
        "use_seq_parallel": True,
        "micro_batch_num": 4,
        "gradient_aggregation_group": 4,
        "vocab_emb_dp": True,
    },
    "micro_batch_interleave_num": 1,
    "recompute_config": {"recompute": True, "select_recompute": False, "mp_comm_recompute": True},
    "swap_config": {"swap": False},
}


OPTIMIZER = {"enable_parallel_optimizer": True}
PARAMETERS_AGAIN = {"parallel_optimizer_comm_recompute": True}


def changed(**parts: Any) -> dict[str, Any]:
    """The file with keys of sections changed, or sections replaced by what is no mapping; None leaves one out."""
    document = copy.deepcopy(FILE)
    for name, value in parts.items():
        if isinstance(value, dict):
            document[name] = {**document.get(name, {}), **value}
        elif value is None:
            del document[name]
        else:
            document[name] = value
    return document


def configured(folder: Path, document: dict[str, Any], **given: Any) -> GivenOptions:
    path = folder / "parallel.yaml"
    path.write_text(yaml.safe_dump(document))
    return with_config(PlanSettings(**{"network": "zoo:gpt2", "hw": "dgx-a100", **given}), path)


def pins(settings: PlanSettings) -> dict[str, str]:
    return settings.pins.named()


def test_degrees_are_pinned_and_their_product_is_the_devices(tmp_path: Path) -> None:
    found = configured(tmp_path, FILE)
    assert (found.settings.devices, found.settings.parallel_mode) == (8, "auto_parallel")
    assert found.settings.search_mode is None  # semi-automatic mode searches no strategies
    assert any("search_mode" in note for note in found.notes)
    assert pins(found.settings) == {
        "dp": "2",
        "tp": "2",
        "pp": "2",
        "vpp": "1",
        "cp": "1",
        "ep": "1",
        "micro_batches": "4",
        "sequence_parallel": "true",
        "recompute": "full",
    }


@pytest.mark.parametrize(
    ("mode", "expected", "free"),
    [
        (1, "auto_parallel", False),
        ("SEMI_AUTO_PARALLEL", "auto_parallel", False),
        (2, "auto_parallel", True),
        ("auto_parallel", "auto_parallel", True),
        (0, "data_parallel", True),
        ("data_parallel", "data_parallel", True),
    ],
)
def test_modes(tmp_path: Path, mode: object, expected: str, free: bool) -> None:
    document = {"parallel": {"parallel_mode": mode}, "parallel_config": {"data_parallel": 4}}
    found = configured(tmp_path, document, devices=4)
    assert found.settings.parallel_mode == expected
    assert pins(found.settings) == (
        {"dp": "4"} if free else {"dp": "4", **dict.fromkeys(("tp", "pp", "vpp", "cp", "ep"), "1")}
    )


def test_the_search_mode_counts_in_the_automatic_mode(tmp_path: Path) -> None:
    found = configured(tmp_path, changed(parallel={"parallel_mode": 2}))
    assert found.settings.search_mode == "sharding_propagation"


def test_no_parallelism(tmp_path: Path) -> None:
    found = configured(tmp_path, changed(use_parallel=False))
    assert (found.settings.devices, found.settings.parallel_mode) == (1, "stand_alone")
    assert pins(found.settings) == {"recompute": "full"}
    assert any("parallel_config" in note and "not read" in note for note in found.notes)


def test_sections_that_say_nothing_of_the_plan_are_named(tmp_path: Path) -> None:
    of_stages = {"model": {"model_config": {"offset": [1, -1]}}, "seed": 1}
    of_shapes = {"model": {"model_config": {"hidden_size": 768}}, "seed": 1}
    for sections, named in (
        (of_stages, "seed"),
        (of_shapes, "model, seed"),
        (of_stages | {"use_parallel": False}, "model, seed"),
    ):
        notes = translate({"parallel_config": {"pipeline_stage": 2}, **sections}).notes
        assert f"not read, for they say nothing of the plan: {named}" in notes


def test_the_command_line_wins(tmp_path: Path) -> None:
    found = configured(tmp_path, changed(parallel={"strategy_ckpt_save_file": "a.json"}), pin=Pins(pp=4), out="b.json")
    assert found.settings.devices == 16
    assert pins(found.settings)["pp"] == "4"
    assert found.settings.out == "b.json"
    assert configured(tmp_path, changed(parallel={"strategy_ckpt_save_file": "a.json"})).settings.out == "a.json"


def test_options_stand_beside_the_sections(tmp_path: Path) -> None:
    found = configured(
        tmp_path, {**FILE, "global_batch": 64, "seq_len": 512, "optimizer": {"type": "AdamW"}, "seed": 1}
    )
    assert (found.settings.global_batch, found.settings.sequence_length, found.settings.optimizer) == (64, 512, None)
    assert any("optimizer, seed" in note for note in found.notes)


@pytest.mark.parametrize(
    ("section", "pinned"),
    [
        ({"recompute": True}, {"recompute": "full"}),
        ({"select_recompute": True}, {"recompute": "selective", "recompute_messages": "false"}),
        (
            {"recompute": False, "select_recompute": True, "select_comm_recompute": True},
            {"recompute": "selective"},
        ),
        ({"recompute": False}, {"recompute": "none"}),
        ({"mp_comm_recompute": True}, {}),
    ],
)
def test_recomputation(section: dict[str, Any], pinned: dict[str, str]) -> None:
    assert translate({"recompute_config": section, "parallel": {"parallel_mode": 2}}).pins == pinned


@pytest.mark.parametrize(("name", "expected"), [("colossalai_cp", "ring"), ("ulysses_cp", "all_to_all")])
def test_context_parallel_algorithms(name: str, expected: str) -> None:
    config = {"context_parallel": 2, "context_parallel_algo": name}
    found = translate({"parallel_config": config}).pins
    assert (found["cp"], found["context_algorithm"]) == ("2", expected)


def test_the_optimizer_of_the_parallel_section(tmp_path: Path) -> None:
    keys = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"optimizer_level": "level1"}}
    found = pins(configured(tmp_path, changed(parallel=keys)).settings)
    assert (found["optimizer_sharding"], found["sharding_threshold_kb"]) == ("zero1", "64")


@pytest.mark.parametrize(
    ("parts", "without", "note"),
    [
        (
            {"parallel": OPTIMIZER, "parallel_config": {"data_parallel": 1}},
            {"optimizer_sharding", "sharding_threshold_kb"},
            "enable_parallel_optimizer has no effect: parameters have one replica",
        ),
        ({"parallel_config": {"model_parallel": 1}}, {"sequence_parallel"}, "use_seq_parallel has no effect"),
        (
            {
                "parallel": {
                    "enable_parallel_optimizer": False,
                    "parallel_optimizer_config": {"optimizer_level": "level3"},
                }
            },
            {"sharding_threshold_kb"},
            "parallel_optimizer_config has no effect: enable_parallel_optimizer is False",
        ),
        (
            {"recompute_config": {"recompute_slice_activation": True}, "parallel_config": {"use_seq_parallel": False}},
            set(),
            "recompute_slice_activation is not followed: use_seq_parallel is False",
        ),
        (
            {"recompute_config": {"recompute": False, "recompute_slice_activation": True}},
            set(),
            "recompute_slice_activation has no effect: nothing computes again",
        ),
        (
            {"parallel": {"enable_parallel_optimizer": False}, "recompute_config": PARAMETERS_AGAIN},
            {"sharding_threshold_kb"},
            "parallel_optimizer_comm_recompute has no effect: the parallel optimizer is off",
        ),
        ({"parallel_config": {"seq_split_num": 8}}, set(), "seq_split_num=8 is not followed"),
        ({"parallel": {"dataset_strategy": [[2, 1]] * 4, "full_batch": False}}, set(), "each of 4 columns"),
    ],
)
def test_what_has_no_effect_is_noted(parts: dict[str, Any], without: set[str], note: str) -> None:
    found = translate(changed(**parts))
    assert not without & found.pins.keys()
    assert any(note in said for said in found.notes), found.notes


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"parallel_config": {"optimizer_shard": True}}, {"parallel": OPTIMIZER}),
        (
            {"parallel": {"strategy_ckpt_save_file": "a.json"}},
            {"parallel": {"strategy_ckpt_config": {"save_file": "a.json", "only_trainable_params": False}}},
        ),
        ({}, {"use_legacy": False, "pretrained_model_dir": "m", "monitor_config": {"monitor_on": False}}),
    ],
)
def test_older_and_newer_names_mean_the_same(older: dict[str, Any], newer: dict[str, Any]) -> None:
    first, second = translate({**FILE, **changed(**older)}), translate({**FILE, **changed(**newer)})
    assert (first.pins, first.context.values()) == (second.pins, second.context.values())


@pytest.mark.parametrize(
    ("scheduler", "chunks", "schedule"),
    [("1f1b", 2, "interleaved_1f1b"), ("1f1b", 1, "1f1b"), ("gpipe", 1, "gpipe"), ("seqpipe", 2, "interleaved_1f1b")],
)
def test_schedules_of_pipelines(scheduler: str, chunks: int, schedule: str) -> None:
    parallel = {"pipeline_config": {"pipeline_interleave": chunks > 1, "pipeline_scheduler": scheduler}}
    found = translate(changed(parallel=parallel, model={"model_config": {"pp_interleave_num": chunks}}))
    assert (found.pins["schedule"], found.pins["vpp"]) == (schedule, str(chunks))
    assert any("seqpipe is planned as" in note for note in found.notes) == (scheduler == "seqpipe")


def test_experts_are_dealt_out_over_model_parallel_ranks_too() -> None:
    found = translate(changed(parallel_config={"expert_parallel": 4}))
    assert (found.pins["ep"], found.pins["expert_cut"]) == ("2", "whole")


TRAINING: dict[str, Any] = {
    **FILE,
    "recompute_config": {"recompute": [1, 0], "select_recompute": {r"feed_forward\.w1\.activation\.silu": [5, 4]}},
    "runner_config": {"batch_size": 2},
    "model": {
        "model_config": {
            "type": "LlamaConfig", "num_layers": 13, "hidden_size": 256, "num_heads": 4, "n_kv_heads": 2,
            "intermediate_size": 512, "vocab_size": 1024, "seq_length": 128, "compute_dtype": "bfloat16",
            "offset": [1, 0],
        }
    },
}  # fmt: skip


def test_a_training_file_states_its_network_and_its_batch(tmp_path: Path) -> None:
    found = configured(tmp_path, TRAINING, network=None)
    settings = found.settings
    assert settings.network == f"hf:{tmp_path / 'parallel.yaml'}"
    assert (settings.devices, settings.global_batch, settings.sequence_length, str(settings.precision)) == (
        8,
        16,
        128,
        "bf16",
    )
    network = load_network(settings.network, sequence_length=settings.sequence_length)
    assert (network.depth, network.sequence_length) == (13, 128)
    assert found.marks is not None
    assert [*found.marks.stages.values()] == [0] * 7 + [1] * 6
    assert list(found.marks.recompute.values()) == [
        True,
        *["selective"] * 4,
        False,
        False,
        *["selective"] * 4,
        False,
        False,
    ]
    assert any("compute again all that is cheap" in note for note in found.notes)


@pytest.mark.slow
def test_a_training_file_is_planned(tmp_path: Path) -> None:
    file, out = tmp_path / "training.yaml", tmp_path / "plan.json"
    file.write_text(yaml.safe_dump(TRAINING))
    result = run("plan", "--config", str(file), "--hw", "ascend910b-atlas800t-a2", "--out", str(out), "-q")
    assert result.exit_code == 0, result.stderr
    plan = read_plan(out)
    assert (plan.devices, plan.degree("tensor"), plan.pipeline, plan.micro_batch) == (8, 2, 2, 2)


def test_one_stage_reads_no_number_of_micro_batches(tmp_path: Path) -> None:
    found = configured(tmp_path, changed(parallel_config={"pipeline_stage": 1}))
    assert "micro_batches" not in pins(found.settings)
    assert any("micro_batch_num=4 is not read" in note for note in found.notes)


# Checks with numbers


@pytest.mark.parametrize(
    ("parts", "given", "words"),
    [
        (
            {"parallel_config": {"data_parallel": 4}},
            {"devices": 8},
            ("= 16 is more than the 8 devices", "--devices 16"),
        ),
        ({"parallel_config": {"micro_batch_num": 1}}, {}, ("micro_batch_num=1", "pipeline_stage=2", "=2 or more")),
        ({"parallel_config": {"model_parallel": 5}}, {}, ("model_parallel=5", "hidden_size=768", "3 are left")),
        ({"parallel_config": {"model_parallel": 8}}, {}, ("model_parallel=8", "num_heads=12", "model_parallel=6")),
        ({"parallel_config": {"vocab_emb_dp": False}}, {}, ("vocab_size=50257", "model_parallel=1")),
        (
            {"parallel_config": {"pipeline_stage": 16, "micro_batch_num": 16}},
            {},
            ("pipeline_stage=16", "num_layers=12", "12 or less"),
        ),
        ({"parallel": {"pipeline_config": {"pipeline_scheduler": "2f2b"}}}, {}, ("pipeline_scheduler='2f2b'", "gpipe")),
        ({"parallel": {"strategy_ckpt_config": {"safe_file": "a"}}}, {}, ("did you mean 'save_file'",)),
        ({"parallel": {"parallel_mode": 4}}, {}, ("parallel_mode=4", "0 data_parallel", "3 hybrid_parallel")),
        ({"parallel": {"parallel_mode": "auto_paralel"}}, {}, ("'auto_paralel'", "did you mean 'auto_parallel'")),
        ({"parallel": {"gradient_mean": True}}, {}, ("'gradient_mean'", "did you mean 'gradients_mean'")),
        ({"parallel": {"pipeline_stages": 4}}, {}, ("pp=4", "pp=2", "leave one of them out")),
        ({"parallel": {"parallel_mode": 0, "full_batch": True}}, {}, ("full_batch=True", "data_parallel")),
        ({"parallel_config": {"modle_parallel": 2}}, {}, ("did you mean 'model_parallel'",)),
        ({"parallel_config": {"model_parallel": "2"}}, {}, ("model_parallel='2'", "whole number")),
        ({"parallel_config": {"use_seq_parallel": 1}}, {}, ("use_seq_parallel=1", "True or False")),
        ({"parallel_config": [1]}, {}, ("parallel_config=[1]", "mapping")),
        ({"recompute_config": {"recompte": True}}, {}, ("did you mean 'recompute'",)),
        ({"recompute_config": {"select_recompute": True}}, {}, ("recompute=True", "select_recompute=True")),
        ({"recompute_config": {"select_recompute": [1, 0]}}, {}, ("recompute=True", "select_recompute=[1, 0]")),
        ({"recompute_config": {"recompute": [True, 2]}}, {}, ("recompute=[True, 2]", "[1, 0]")),
        (
            {"recompute_config": {"recompute": False, "select_recompute": {"actvation": True}}},
            {},
            ("'actvation'", "names nothing", "attention_norm.native_layer_norm"),
        ),
        ({"recompute_config": {"recompute": 0, "select_recompute": ["(add"]}}, {}, ("'(add'", "no regular expression")),
        ({"recompute_config": {"recompute": False, "select_recompute": {3: True}}}, {}, ("3 for a pattern",)),
        (
            {"recompute_config": {"recompute": False, "select_recompute": [1, 2, 3]}},
            {},
            ("select_recompute=[1, 2, 3]", "3 numbers for pipeline_stage=2"),
        ),
        ({"paralel_config": {}}, {}, ("did you mean 'parallel_config'",)),
        ({"use_parallel": "yes"}, {}, ("use_parallel='yes'",)),
        ({"devices": 0}, {}, ("devices", "0")),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, parts: dict[str, Any], given: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as error:
        configured(tmp_path, changed(**parts), **given)
    assert not isinstance(error.value, UnsupportedError)
    text = str(error.value)
    assert text.startswith(f"config {tmp_path / 'parallel.yaml'}: ")
    assert text.count("config /") == 1
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"parallel_config": {"context_parallel_algo": "hybrid_cp"}}, ("hybrid_cp", "ulysses_cp")),
        ({"micro_batch_interleave_num": 3}, ("micro_batch_interleave_num=3", "use 1 or 2")),
        (
            {"recompute_config": {"recompute": False, "select_comm_recompute": True}},
            ("select_comm_recompute=True", "nothing else computes again"),
        ),
        (
            {"recompute_config": {"recompute": [2, 0], "select_comm_recompute": [3, 0]}},
            ("select_comm_recompute names layer 2", "keeps everything"),
        ),
        (
            {"recompute_config": {"recompute": False, "select_recompute": {"gelu": True}}},
            ("for gelu alone", "name attention_norm.native_layer_norm, add, feed_forward_norm.native_layer_norm as"),
        ),
        (
            {"recompute_config": {"select_recompute_exclude": [r"attention\.output"]}},
            ("select_recompute_exclude", "leave out", "attention.query.addmm"),
        ),
        (
            {"recompute_config": {"parallel_optimizer_comm_recompute": True}, "parallel": OPTIMIZER},
            ("optimizer_sharding=zero2", "optimizer_level: level3"),
        ),
        ({"recompute_config": {"select_comm_recompute_exclude": True}}, ("default is False",)),
    ],
)
def test_what_is_not_followed_yet_is_refused(tmp_path: Path, parts: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError) as error:
        configured(tmp_path, changed(**parts))
    assert all(word in str(error.value) for word in ("not supported yet", *words)), str(error.value)


def test_uneven_stages_are_possible_and_their_cost_is_said(tmp_path: Path) -> None:
    found = configured(tmp_path, changed(parallel_config={"pipeline_stage": 5, "micro_batch_num": 5}))
    assert any("num_layers=12" in note and "3 layers" in note and "25%" in note for note in found.notes)


def test_idle_devices_are_said(tmp_path: Path) -> None:
    found = configured(tmp_path, FILE, devices=16)
    assert found.settings.devices == 8
    assert any("= 8 of 16 devices: 8 stay idle" in note for note in found.notes)
    assert used_devices(Pins(dp=2), 2) == (2, "")


def test_sizes_of_networks() -> None:
    gpt2 = sizes_of(load_network("zoo:gpt2").capture())
    assert gpt2 == Sizes(layers=12, hidden=768, heads=12, vocabulary=50257)
    assert sizes_of(load_network("zoo:gpt3-175b").capture()) == Sizes(
        layers=96, hidden=12288, heads=96, vocabulary=50257
    )
    assert check_sizes(Pins(tp=3), Sizes()) == ()


# The command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_both_forms_are_told_apart_by_what_they_say() -> None:
    assert is_mindformers(FILE)
    assert is_mindformers({"recompute_config": {}})
    assert not is_mindformers({"parallel_mode": "auto_parallel", "devices": 8, "pin": {"tp": 2}})


def test_the_command_plans_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"strategy_ckpt_save_file": "made.json", "enable_alltoall": True}
    config = {"pipeline_stage": 1, "use_seq_parallel": False}
    document = changed(parallel=keys, parallel_config=config, recompute_config={"recompute": False})
    Path("a.yaml").write_text(yaml.safe_dump(document))
    result = run("plan", "zoo:mlp", "--hw", "dgx-a100", "--config", "a.yaml", "--top", "1")
    assert result.exit_code == 0, result.stderr
    plan = read_plan("made.json")
    assert (plan.devices, plan.degree("data"), plan.degree("tensor"), plan.recompute) == (4, 2, 2, "none")
    assert "micro_batch_num=4 is not read" in result.stderr


def test_the_command_takes_a_stored_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"pipeline_stage": 1, "use_seq_parallel": False}
    document = changed(
        parallel={"enable_alltoall": True}, parallel_config=config, recompute_config={"recompute": False}
    )
    Path("a.yaml").write_text(yaml.safe_dump(document))
    command = ("plan", "zoo:mlp", "--hw", "dgx-a100", "--json")
    first = run(*command, "--config", "a.yaml", "--top", "1", "--out", "made.json")
    assert first.exit_code == 0, first.stderr
    document["parallel"]["strategy_ckpt_load_file"] = "made.json"
    Path("b.yaml").write_text(yaml.safe_dump(document))
    again = run(*command, "--config", "b.yaml", "--out", "copy.json")
    assert again.exit_code == 0, again.stderr
    assert read_plan("copy.json") == read_plan("made.json")
    made, copied = json.loads(first.stdout), json.loads(again.stdout)
    assert copied["plan"] == made["plan"]
    assert copied["prediction"]["step_time_s"] == pytest.approx(made["prediction"]["step_time_s"])
    assert copied["alternatives"] == []
    assert "the plan is that of made.json" in again.stderr
    other = run("plan", "zoo:gpt2-tiny", "--hw", "dgx-a100", "--config", "b.yaml", "--out", "copy.json")
    assert other.exit_code == 2
    assert "strategy_ckpt_load_file='made.json' is of another network" in " ".join(other.stderr.split())
    itself = run(*command, "--config", "b.yaml", "--out", "made.json")
    assert itself.exit_code == 2
    assert "is a file that this command reads" in itself.stderr
    document["parallel_config"]["data_parallel"] = 1
    Path("c.yaml").write_text(yaml.safe_dump(document))
    contradicted = run(*command, "--config", "c.yaml", "--out", "copy.json")
    assert contradicted.exit_code == 2
    assert "made.json" in contradicted.stderr


def table_of(
    tmp_path: Path, cut: bool, mode: str = "dynamic_programming", devices: int = 4
) -> tuple[tuple[int, ...], Plan]:
    """Where the table of tokens of GPT-2 lies on the axes that are not of samples, and the plan."""
    config = {"data_parallel": 2, "model_parallel": devices // 2, "vocab_emb_dp": not cut}
    file, out = tmp_path / "v.yaml", tmp_path / f"{cut}.json"
    file.write_text(yaml.safe_dump({"parallel": {"parallel_mode": 1, "search_mode": mode}, "parallel_config": config}))
    options = ("--hw", "dgx-a100", "--devices", str(devices), "--config", str(file), "--out", str(out), "-q")
    result = run("plan", "zoo:gpt2-tiny", *options)
    assert result.exit_code == 0, result.stderr
    plan = read_plan(out)
    rules = plan.rules["token_embedding/embedding"]
    return tuple(r.inputs[0] for a, r in zip(plan.mesh.axes, rules, strict=True) if a.name != "data"), plan


@pytest.mark.parametrize("mode", ["dynamic_programming", "sharding_propagation"])
def test_the_table_of_tokens_is_whole_or_cut(tmp_path: Path, mode: str) -> None:
    assert table_of(tmp_path, cut=True, mode=mode)[0] == (0,)
    assert table_of(tmp_path, cut=False, mode=mode)[0] == (REPLICATE,)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
def test_a_table_that_is_whole_or_cut_is_executed(tmp_path: Path, cut: bool) -> None:
    _, plan = table_of(tmp_path, cut=cut)
    report = execute_plan(plan, ExecuteOptions(strategy="unused", steps=2, verify=True, precision="fp64"))
    assert report.verified


@pytest.mark.slow
def test_the_table_of_tokens_is_cut_in_stages(tmp_path: Path) -> None:
    config = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "vocab_emb_dp": False}
    options = ("--hw", "dgx-a100", "--devices", "8", "--out", str(tmp_path / "plan.json"), "-q")
    for number, extra in enumerate(({}, {"recompute_config": {"recompute": True}})):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump({"parallel": {"parallel_mode": 1}, "parallel_config": config, **extra}))
        result = run("plan", "zoo:gpt2-tiny", "--config", str(file), *options)
        assert result.exit_code == 0, result.stderr
        plan = read_plan(tmp_path / "plan.json")
        assert (plan.pipeline, plan.recompute == "none") == (2, not extra)
        assert [r.inputs[0] for r in plan.rules["token_embedding/embedding"]] == [REPLICATE, 0]


def test_where_no_strategies_are_kept_the_table_is_left_to_the_search() -> None:
    note = vocabulary_marks(Pins(dp=2, tp=2, cp=2), load_network("zoo:gpt2-tiny").capture(), cut=False)
    assert note[0] == Marks()
    assert "vocab_emb_dp=True is left to the search" in note[1]
    assert "cp=2" in note[1]
    mlp = vocabulary_marks(Pins(dp=2, tp=2), load_network("zoo:mlp").capture(), cut=False)
    assert mlp == (Marks(), "")
    graph = load_network("zoo:gpt2-tiny").capture()
    with pytest.raises(ContextError, match="vocab_emb_dp=False: mlp has no table of tokens"):
        vocabulary_marks(Pins(dp=2, tp=2), load_network("zoo:mlp").capture(), cut=True)
    with pytest.raises(ContextError, match="needs data_parallel and model_parallel"):
        vocabulary_marks(Pins(tp=2), graph, cut=True)
    marks, said = vocabulary_marks(Pins(dp=2, tp=2, ep=2), graph, cut=True)
    assert marks == Marks()
    assert "vocab_emb_dp=False is left to the search" in said


def test_interleaved_micro_batches_are_run_in_copies(tmp_path: Path) -> None:
    alone = {"parallel_config": {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 1}}
    file, out = tmp_path / "c.yaml", tmp_path / "c.json"
    file.write_text(yaml.safe_dump({**alone, "micro_batch_interleave_num": 2}))
    options = ("--hw", "dgx-a100", "--devices", "4", "--global-batch", "8", "--config", str(file), "--out", str(out))
    result = run("plan", "zoo:gpt2-tiny", *options, "-q")
    assert result.exit_code == 0, result.stderr
    assert read_plan(out).copies == 2
    alone["parallel_config"]["pipeline_stage"] = 2
    file.write_text(yaml.safe_dump({**alone, "micro_batch_interleave_num": 2}))
    result = run("plan", "zoo:gpt2-tiny", *options[:3], "8", *options[4:], "--json")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)["plan"]
    assert (said["copies"], said["pp"]) == (2, 2)
