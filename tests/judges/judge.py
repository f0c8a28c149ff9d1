"""Asks the frameworks themselves whether files are legal; runs in their own environment, not in ours.

Reads a JSON list of cases ``{"format", "file", "devices", "data", "experts"}`` of one format from stdin. Its last line
is a JSON object with the ``verdicts``, empty for legal and else what the framework said, and the package's ``version``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

OLDER = "torchtitan-0.2"
"""Folder of the environment with torchtitan 0.2 and what needs it."""

LAYOUT = "model.pipeline_model_parallel_layout"
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


def older_torchtitan(file: str, case: dict[str, Any]) -> Any:
    """Read the TOML file as a job's, and check degrees and batches."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    config = ConfigManager().parse_args(["--job.config_file", file])
    said, training = config.parallelism, config.training
    dims = ParallelDims(
        dp_replicate=said.data_parallel_replicate_degree,
        dp_shard=said.data_parallel_shard_degree,
        cp=said.context_parallel_degree,
        tp=said.tensor_parallel_degree,
        pp=said.pipeline_parallel_degree,
        ep=said.expert_parallel_degree,
        etp=said.expert_tensor_parallel_degree,
        world_size=case["devices"],
    )
    # Its meshes are reshaped to these degrees, which fails later where they do not divide.
    shared = dims.dp_shard * dims.cp * dims.tp
    assert shared % (dims.ep * dims.etp) == 0, f"experts over {dims.ep} x {dims.etp} of {shared} ranks"
    assert dims.fsdp_enabled or not training.enable_cpu_offload, "offload"  # models/llama3/infra/parallelize.py
    ranks = dims.dp_replicate * dims.dp_shard
    assert training.global_batch_size % (training.local_batch_size * ranks) == 0, "batch"
    assert training.local_batch_size % said.pipeline_parallel_microbatch_size == 0, "micro-batch"
    if dims.pp > 1:
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        parts = said.module_fqns_per_model_part
        looped = issubclass(get_schedule_class(said.pipeline_parallel_schedule), PipelineScheduleMulti)
        assert len(parts) % dims.pp == 0, "parts"
        assert (len(parts) // dims.pp >= 2) == looped, "parts a rank"
    return config, dims


def npu_torchtitan(file: str, case: dict[str, Any]) -> None:
    """The same with the classes of torchtitan-npu; then its optimizers, attention over context ranks and products."""
    stand_in("torch_npu", "2.10.0").npu.get_device_name.return_value = "Ascend950"
    for name in ("torchtitan_npu", "torchtitan_npu.converters"):  # whose own imports need a device
        bare(name, Path(sys.prefix) / OLDER / name.replace(".", "/"))
    from torch.nn import Linear
    from torchtitan_npu.converters.quant_converter import MXGroupedMMConverter, MXLinearConverter
    from torchtitan_npu.patches.distributed.custom_context_parallel import validate_ulysses_configs
    from torchtitan_npu.patches.optimizer.virtual_optimizer import build_optimizers_with_virtual_optimizer

    config, dims = older_torchtitan(file, case)
    if config.optimizer.virtual_optimizer:  # swapped states alone are built on a device, and have no rule
        build_optimizers_with_virtual_optimizer([Linear(1, 1)], config.optimizer, dims)
    if config.parallelism.enable_custom_context_parallel and dims.cp > 1:
        ranks = SimpleNamespace(size=lambda: dims.cp)
        validate_ulysses_configs(job_config=config, model_args=SimpleNamespace(n_heads=64), cp_mesh=ranks)
    for kind, converter in (("linear", MXLinearConverter), ("grouped_mm", MXGroupedMMConverter)):
        if f"quantize.{kind}.mx" in config.model.converters:
            converter(config, dims)


def bare(name: str, folder: Path) -> None:
    """A package whose own module is not run, but whose parts can be imported."""
    if name not in sys.modules:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder)]


def stand_in(name: str, version: str) -> Any:
    """A package of which every part exists and does nothing, for one that needs a device."""

    class Part(ModuleType):
        """Classes where names begin with a capital letter, for they may be bases; and what can be called."""

        __version__ = version

        def __getattr__(self, part: str) -> Any:
            if part.startswith("__"):
                raise AttributeError(part)
            found = type(part, (), {}) if part[0].isupper() else MagicMock(name=part)
            setattr(self, part, found)
            return found

    class Finder(MetaPathFinder, Loader):
        """Finds parts of the package, and of no other."""

        def find_spec(self, found: str, path: Any = None, target: Any = None) -> Any:
            return ModuleSpec(found, self, is_package=True) if f"{found}.".startswith(f"{name}.") else None

        def create_module(self, spec: ModuleSpec) -> Any:
            return Part(spec.name)

        def exec_module(self, module: Any) -> None:
            pass

    if name not in sys.modules:
        sys.meta_path.insert(0, Finder())
    return import_module(name)


def automodel(file: str, case: dict[str, Any]) -> None:
    """Build the setup of the recipe on so many ranks that only count, and its steps."""
    import yaml
    from nemo_automodel.components.distributed.config import DistributedSetup
    from nemo_automodel.components.training.step_scheduler import StepScheduler
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    document = yaml.safe_load(Path(file).read_text())
    found = parse_distributed_section(document["distributed"])
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["devices"])
    try:
        setup = DistributedSetup.build(
            strategy=found["strategy_config"],
            parallelism_sizes=found["parallelism_sizes"],
            pipeline_config=found["pipeline_config"],
            moe_parallel_config=found["moe_parallel_config"],
            activation_checkpointing=found["activation_checkpointing"],
        )
        ranks, stages, tensor = (getattr(setup.mesh_context, f"{name}_size") for name in ("dp", "pp", "tp"))
    finally:
        distributed.destroy_process_group()
    steps = document["step_scheduler"]
    StepScheduler(dp_size=ranks, ckpt_every_steps=1, dataloader=[0], max_steps=1, **steps)
    strategy = found["strategy_config"]
    if tensor > 1 and getattr(strategy, "enable_async_tensor_parallel", False):
        assert strategy.sequence_parallel, "tensor overlap"  # components/distributed/parallelizer.py
    if stages > 1:
        from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

        pipeline = found["pipeline_config"]
        local, parts = steps["local_batch_size"], pipeline.module_fqns_per_model_part
        assert local // pipeline.pp_microbatch_size >= stages, "micro-batches"  # recipes/llm/train_ft.py
        assert local % pipeline.pp_microbatch_size == 0, "micro-batch"
        looped = issubclass(get_schedule_class(pipeline.pp_schedule), PipelineScheduleMulti)
        assert len(parts) % stages == 0, "parts"
        assert (len(parts) // stages >= 2) == looped, "parts a rank"


def bridge(file: str, case: dict[str, Any]) -> None:
    """Override a recipe with Hydra as its scripts do, and finish the configuration as training does.

    What is overridden must still hold then: Megatron-Bridge changes some values without a word.
    """
    config_module, recipe = bridge_parts()
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="NVIDIA H100")
    first, *lines = [line for line in Path(file).read_text().splitlines() if "=" in line]
    variables = ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1")
    for name in variables:
        os.environ.pop(name, None)
    os.environ |= {"WORLD_SIZE": str(case["devices"]), "RANK": "0"}
    os.environ |= dict(word.split("=") for word in first.split() if word.startswith(variables))
    config = recipe()
    experts = {"num_moe_experts": 256, "moe_router_topk": 2, "moe_grouped_gemm": True} if case["experts"] else {}
    config.model = GPTModelProvider(
        num_layers=48, hidden_size=4096, num_attention_heads=64, vocab_size=32000, add_bias_linear=False, **experts
    )
    given = [line for line in lines if not line.startswith("#")]
    process_config_with_overrides(config, cli_overrides=given)
    keys = [line.partition("=")[0].lstrip("+") for line in given]
    asked = {key: value_of(config, key) for key in keys if key not in DERIVED}
    for key, value in asked.items():
        check_type(value_of(config, key.rpartition(".")[0]), key.rpartition(".")[2], value)
    config_module.runtime_config_update(config)
    changed = {key: value for key, value in asked.items() if value_of(config, key) != value}
    assert not changed, f"{changed} did not last"
    model, ranks = config.model, config.data_parallel_size
    each = model.expert_model_parallel_size * model.expert_tensor_parallel_size * model.pipeline_model_parallel_size
    assert case["devices"] % each == 0, "expert ranks do not divide the world"  # megatron/core/parallel_state.py
    assert ranks % config.ddp.num_distributed_optimizer_instances == 0, "instances"  # the same file
    assert config.train.global_batch_size % (config.train.micro_batch_size * ranks) == 0, "batch"
    # Else the first step has no sizes to gather: megatron/core/distributed/param_and_grad_buffer.py
    assert config.ddp.use_distributed_optimizer or not config.ddp.overlap_param_gather, "overlap_param_gather"


DERIVED = {"mixed_precision", "comm_overlap._target_", "model.virtual_pipeline_model_parallel_size", LAYOUT}
"""Keys that Megatron-Bridge replaces by what they mean."""


def check_type(record: Any, name: str, value: Any) -> None:
    """That a field of a dataclass has a value of its type."""
    from pydantic import ConfigDict, TypeAdapter

    (kind,) = (one.type for one in fields(record) if one.name == name)
    if isinstance(kind, str):
        kind = eval(kind, vars(sys.modules[type(record).__module__]))
    TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)


def value_of(config: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def bridge_parts() -> tuple[Any, Any]:
    """Megatron-Bridge's module of configurations, and the recipe that others begin with.

    Its packages import every model and what they need: those on the way are replaced by bare ones.
    """
    stand_in("transformer_engine", "2.12.0")
    stand_in("megatron.energon", "1.0")
    names = ("megatron.bridge", *(f"megatron.bridge.{name}" for name in ("models", "training", "recipes")))
    root = next(Path(place) for place in import_module("megatron").__path__ if (Path(place) / "bridge").is_dir())
    for name in (*names, "megatron.bridge.models.conversion"):
        bare(name, root / Path(*name.split(".")[1:]))
    models: Any = sys.modules["megatron.bridge.models"]
    models.GPTModelProvider = import_module("megatron.bridge.models.gpt_provider").GPTModelProvider
    models.T5ModelProvider = import_module("megatron.bridge.models.t5_provider").T5ModelProvider
    recipe = import_module("megatron.bridge.recipes.common")._pretrain_common
    return import_module("megatron.bridge.training.config"), recipe


def vars_of(record: Any) -> list[str]:
    """Names of the fields of a dataclass or of one of its records."""
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


JUDGES = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "torchtitan-0.2": older_torchtitan,
    "torchtitan-npu": npu_torchtitan,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "automodel": automodel,
    "bridge": bridge,
}
PACKAGES = {
    "megatron": "megatron-core",
    "torchtitan-0.2": "torchtitan",
    "automodel": "nemo-automodel",
    "bridge": "megatron-bridge",
}


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
    cases = json.load(sys.stdin)
    form = cases[0]["format"]
    if form in ("torchtitan-0.2", "torchtitan-npu"):  # beside the current release, in a folder of its own
        sys.path.insert(0, str(Path(sys.prefix) / OLDER))
    found = [verdict(case) for case in cases]
    package = PACKAGES.get(form, form)
    sys.stdout.write("\n" + json.dumps({"verdicts": found, "version": f"{package} {metadata.version(package)}"}))
