"""`meshwright check`: configurations of other frameworks, judged, predicted and improved."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.app import app
from planner.exchange.registry import FORMATS
from planner.exchange.shell import read_script

LAUNCH = """
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes 1"
ARGS=(
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 1024 --swiglu --seq-length 128
    --tensor-model-parallel-size 4  # wide
    --pipeline-model-parallel-size ${PP:-1} --sequence-parallel --bf16 --micro-batch-size 1 \\
    --global-batch-size 32 --lr 1e-4 --overlap-grad-reduce
)
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py "${ARGS[@]}"
"""


def checked(text: str, folder: Path, *options: str, suffix: str = ".sh") -> tuple[int, dict[str, Any]]:
    """Exit code and document of ``check --json`` on a file with this text."""
    path = folder / f"given{suffix}"
    path.write_text(text)
    done = CliRunner().invoke(app, ["check", str(path), *options, "--json", "--quiet"])
    return done.exit_code, json.loads(done.stdout) if done.stdout.startswith("{") else {"message": done.stderr}


def test_a_launch_script_is_read_predicted_and_improved(tmp_path: Path) -> None:
    code, said = checked(LAUNCH, tmp_path, "--hw", "dgx-a100")
    assert code == 0, said
    assert said["legal"]
    assert said["not_read"] == ["--lr"]
    plan, best = said["plan"], said["best"]
    assert isinstance(plan, dict)
    assert isinstance(best, dict)
    assert {name: plan[name] for name in ("devices", "dp", "tp", "pp", "micro_batch", "sequence_parallel")} == {
        "devices": 8, "dp": 2, "tp": 4, "pp": 1, "micro_batch": 1, "sequence_parallel": True
    }  # fmt: skip
    near = said["nearest_better"]
    assert isinstance(near, list)
    assert "tp" in {name for one in near for name in one["changed"]}
    assert all(one["gain"] > 1 for one in near)
    assert best["gain"] >= near[0]["gain"] * (1 - 1e-9)
    assert best["plan"]["schedule"] in FORMATS["megatron"].table.schedules


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("--global-batch-size 32", "--global-batch-size 33", "--global-batch-size"),
        ("--sequence-parallel", "--tp-comm-overlap", "--tp-comm-overlap"),
        (
            "--tensor-model-parallel-size 4",
            "--model-parallel-size 4",
            "--model-parallel-size",
        ),
        ("MAX_CONNECTIONS=1", "MAX_CONNECTIONS=8", "CUDA_DEVICE_MAX_CONNECTIONS"),
        ("${PP:-1}", "3", "WORLD_SIZE"),
        ("--bf16", "--bf16 --recompute-granularity full", "--recompute-granularity"),
        ("--bf16", "--bf16 --overlap-param-gather", "--overlap-param-gather"),
        ("--num-layers 4", "--num-layers 5 --num-virtual-stages-per-pipeline-rank 2", "--num-layers"),
    ],
)
def test_what_is_illegal_is_named_with_rule_and_remedy(old: str, new: str, key: str, tmp_path: Path) -> None:
    code, said = checked(LAUNCH.replace(old, new), tmp_path)
    assert code == 2, said
    assert not said["legal"]
    problems = said["problems"]
    assert isinstance(problems, list)
    assert key in {problem["key"] for problem in problems}
    assert all(problem["rule"] and problem["remedy"] for problem in problems)


def test_what_does_not_fit_ends_with_3_and_the_best_plan(tmp_path: Path) -> None:
    text = json.dumps(
        {"train_batch_size": 4096, "train_micro_batch_size_per_gpu": 512, "gradient_accumulation_steps": 1,
         "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}
    )  # fmt: skip
    code, said = checked(text, tmp_path, "--network", "zoo:gpt2", "--hw", "dgx-a100", suffix=".json")
    assert code == 3, said
    assert said["legal"]
    assert said["fits"] is False
    assert said["plan"] is None
    assert said["reason"]
    assert isinstance(said["best"], dict)
    assert said["best"]["plan"]["micro_batch"] < 512
    assert said["best"]["plan"]["pp"] == 1


def test_chunks_of_a_network_that_stands_elsewhere_are_no_fault_of_a_file(tmp_path: Path) -> None:
    text = """
    use_parallel: True
    parallel: {parallel_mode: 1}
    parallel_config: {data_parallel: 1, model_parallel: 1, pipeline_stage: 4, micro_batch_num: 8}
    model: {model_config: {pp_interleave_num: 2, offset: [[0, 0, 0, 1], [0, 0, 0, -1]]}}
    """
    code, said = checked(textwrap.dedent(text), tmp_path, suffix=".yaml")
    assert code == 0, said
    assert said["legal"]


@pytest.mark.parametrize(
    ("fsdp", "code", "shown"),
    [
        ("fsdp_version: 2, fsdp_activation_checkpointing: 7", 2, "neither true nor false"),
        ("fsdp_version: 2, fsdp_state_dict_type: SHARDED_STATE_DICT", 0, "fsdp_config.fsdp_state_dict_type"),
    ],
)
def test_keys_of_accelerate_are_judged_and_those_not_read_listed(
    fsdp: str, code: int, shown: str, tmp_path: Path
) -> None:
    text = f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {{{fsdp}}}\ndebug: false\n"
    found, said = checked(text, tmp_path, suffix=".yaml")
    assert found == code, said
    assert shown in json.dumps(said)


@pytest.mark.parametrize(("local", "code"), [(2, 2), (4, 0)])
def test_automodel_wants_a_micro_batch_for_each_rank_of_a_pipeline(local: int, code: int, tmp_path: Path) -> None:
    parts = [[f"model.layers.{number}"] for number in range(4)]
    section = {"dp_size": 2, "pp_size": 4, "dp_replicate_size": 0, "enable_async_tensor_parallel": True}
    pipeline = {"pp_schedule": "1f1b", "pp_microbatch_size": 1, "module_fqns_per_model_part": parts}
    steps = {"local_batch_size": local, "global_batch_size": 2 * local}
    text = json.dumps({"distributed": {**section, "pipeline": pipeline}, "step_scheduler": steps})
    found, said = checked(text, tmp_path, "--format", "automodel", suffix=".yaml")
    assert found == code, said
    assert [problem["key"] for problem in said["problems"]] == ["step_scheduler.local_batch_size"] * (code == 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "automodel",
            "distributed: {strategy: fsdp2, dp_size: 1, cp_size: 4,"
            " offload_policy: {_target_: torch.distributed.fsdp.CPUOffloadPolicy}}\n"
            "step_scheduler: {local_batch_size: 2, global_batch_size: 8}\n",
        ),
        (
            "accelerate",
            "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n"
            "parallelism_config: {parallelism_config_dp_shard_size: 1, parallelism_config_cp_size: 4}\n",
        ),
    ],
)
def test_parameters_under_fsdp_go_to_the_host_though_one_data_parallel_rank_holds_them(
    name: str, text: str, tmp_path: Path
) -> None:
    code, said = checked(text, tmp_path, "--format", name, suffix=".yaml")
    assert code == 0, said


def test_without_hardware_it_is_said_whether_a_file_is_legal(tmp_path: Path) -> None:
    code, said = checked(LAUNCH, tmp_path)
    assert code == 0
    assert said["legal"]
    assert said["prediction"] is None


def test_what_is_of_no_format_is_an_error(tmp_path: Path) -> None:
    code, said = checked("hello\n", tmp_path)
    assert code == 2
    assert "of no known format" in str(said["error"])


def test_variables_of_a_script_are_put_in() -> None:
    text = "A=2\nB=$((A * 4))\nOPTIONS=\"--one $B --two ${C:-x}\"\nrun $OPTIONS --three='a b' \\\n  --four"
    assert read_script(text).options == {"--one": ("8",), "--two": ("x",), "--three": ("a b",), "--four": ()}
