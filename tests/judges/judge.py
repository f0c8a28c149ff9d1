"""Asks the frameworks themselves whether files are legal; runs in their own environment, not in ours.

Reads a JSON list of cases ``{"format", "file", "devices", "data", "experts"}`` from stdin. Its last line is a JSON
object with the ``verdicts``, empty for legal and else what the framework said, and the ``versions`` of packages.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODEL = (
    *(
        "--num-layers",
        "48",
        "--hidden-size",
        "4096",
        "--num-attention-heads",
        "64",
        "--max-position-embeddings",
        "8192",
    ),
    *(
        "--mock-data",
        "--lr",
        "1e-4",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        "32000",
        "--train-iters",
        "10",
    ),
    *("--lr-decay-iters", "10", "--transformer-impl", "local", "--no-gradient-accumulation-fusion"),
    *("--no-persist-layer-norm", "--no-rope-fusion"),
)


def megatron(file: str, case: dict[str, Any]) -> None:
    """Source the script in bash, then parse and validate its arguments."""
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
    from megatron.training.arguments import parse_args, validate_args

    shown = 'printf "%s\\n" "$NUM_GPUS" "$CUDA_DEVICE_MAX_CONNECTIONS" "${PLAN_ARGS[@]}"'
    script = subprocess.run(["bash", "-c", f'set -e; . "{file}"; {shown}'], capture_output=True, text=True)
    assert script.returncode == 0, script.stderr
    devices, connections, *arguments = script.stdout.splitlines()
    os.environ |= {"WORLD_SIZE": devices, "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    experts = ["--num-experts", "256", "--moe-router-topk", "2"] if case["experts"] else []
    sys.argv = ["pretrain_gpt.py", *MODEL, *experts, *arguments]
    args = parse_args()
    validate_args(args)
    ranks = args.expert_model_parallel_size * args.expert_tensor_parallel_size * args.pipeline_model_parallel_size
    assert args.world_size % ranks == 0, "expert ranks do not divide the world"  # megatron/core/parallel_state.py
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0, "batch"
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        found = PipelineParallelLayerLayout.from_str(layout, args.pipeline_model_parallel_size)
        found.validate_layer_layout(num_layers=args.num_layers, mtp_num_layers=args.mtp_num_layers)


def torchtitan(file: str, case: dict[str, Any]) -> None:
    """Set the plan on a default configuration, and check the degrees."""
    from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.parallel_dims import ParallelDims

    space: dict[str, Any] = {}
    exec(Path(file).read_text(), space)
    config = SimpleNamespace(training=TrainingConfig(), parallelism=ParallelismConfig(), compile=CompileConfig())
    known = {"training": set(vars_of(TrainingConfig)), "parallelism": set(vars_of(ParallelismConfig))}
    space["apply"](config)
    for section, names in known.items():
        unknown = set(vars_of(getattr(config, section))) - names
        assert not unknown, unknown
    dims = ParallelDims.from_config(config.parallelism, case["devices"])
    sparse = dims.dp_shard * dims.cp * dims.tp
    assert sparse % dims.ep == 0, f"expert_parallel_degree {dims.ep} does not divide {sparse}"
    training = config.training
    assert training.global_batch_size % (training.local_batch_size * dims.dp_replicate * dims.dp_shard) == 0, "batch"
    assert training.local_batch_size % config.parallelism.pipeline_parallel_microbatch_size == 0, "micro-batch"
    if dims.pp > 1:
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        kind = get_schedule_class(config.parallelism.pipeline_parallel_schedule)
        parts = config.parallelism.module_fqns_per_model_part
        assert len(parts) % dims.pp == 0, "parts"
        looped = issubclass(kind, PipelineScheduleMulti)
        assert (len(parts) // dims.pp >= 2) == looped, "parts a rank"
        assert [name for part in parts for name in part if name.startswith("layers.")] == [
            f"layers.{number}" for number in range(48)
        ]


def vars_of(record: Any) -> list[str]:
    """Names of the fields of a dataclass or of one of its records."""
    from dataclasses import fields

    return [one.name for one in fields(record)]


def deepspeed(file: str, case: dict[str, Any]) -> None:
    """Let DeepSpeed read the configuration for so many data-parallel ranks."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    comm.get_rank = lambda: 0  # without which the number of ranks is not asked for

    class Unit:
        """Stands for Megatron's mpu, which says how many ranks share a batch."""

        def get_data_parallel_world_size(self) -> int:
            """Data-parallel ranks."""
            return int(case["data"])

        get_model_parallel_world_size = get_data_parallel_world_size

    document = json.loads(Path(file).read_text())
    found = DeepSpeedConfig(document, mpu=Unit())
    assert found.train_batch_size == document["train_batch_size"]
    assert found.zero_optimization_stage == document["zero_optimization"]["stage"]


def accelerate(file: str, case: dict[str, Any]) -> None:
    """Load the file, and build its ParallelismConfig."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.parallelism_config import ParallelismConfig

    config = load_config_from_file(file)
    sizes = {
        name.removeprefix("parallelism_config_"): value
        for name, value in (config.parallelism_config or {}).items()
        if name.endswith("_size")
    }
    if sizes:
        assert config.distributed_type == "FSDP" or str(config.distributed_type).endswith("FSDP"), (
            config.distributed_type
        )
        assert config.fsdp_config["fsdp_version"] == 2
        assert ParallelismConfig(**sizes).total_size == config.num_processes


JUDGES = {"megatron": megatron, "torchtitan": torchtitan, "deepspeed": deepspeed, "accelerate": accelerate}
PACKAGES = {name: "megatron-core" if name == "megatron" else name for name in JUDGES}


def verdict(case: dict[str, Any]) -> str:
    """What the framework says against a file; empty where it takes it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            JUDGES[case["format"]](case["file"], case)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a framework raises is its verdict
        return f"{type(error).__name__}: {error}"[:500] or "refused"
    return ""


if __name__ == "__main__":
    found = [verdict(case) for case in json.load(sys.stdin)]
    versions = {name: metadata.version(name) for name in PACKAGES.values()}
    sys.stdout.write("\n" + json.dumps({"verdicts": found, "versions": versions}))
