"""What every exchange format promises."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.cli.check import CheckedFormat
from planner.cli.export import Format
from planner.exchange.formats import ExchangeFormat, rounded, roundings
from planner.exchange.registry import FORMATS
from planner.exchange.training_config import TrainingConfig
from simulator.errors import InputError
from tests.planner.exchange.training_configs import training_configs, usual

every_format = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def runnable(form: ExchangeFormat, config: TrainingConfig) -> TrainingConfig | None:
    """The nearest configuration that the framework can run, None where there is none."""
    try:
        return rounded(config, form.table)
    except InputError:
        return None


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@every_format
@given(config=training_configs())
@settings(unhurried, max_examples=20)
def test_what_is_written_is_read_again(form: ExchangeFormat, config: TrainingConfig) -> None:
    check_round_trip(form, config)


@pytest.mark.slow
@every_format
@given(config=training_configs())
@settings(unhurried, max_examples=200)
def test_what_is_written_is_read_again_on_many_plans(form: ExchangeFormat, config: TrainingConfig) -> None:
    check_round_trip(form, config)


def check_round_trip(form: ExchangeFormat, config: TrainingConfig) -> None:
    """Write the nearest configuration that the framework can run, and read it again."""
    found = runnable(form, config)
    assume(found is not None and not form.violations(found))
    assert found is not None
    written = form.write(found)
    read = form.read(written.text, f"file{form.suffix}")
    silent = dict.fromkeys(form.silent)
    said = replace(found, **silent).said()
    assert {name: value for name, value in read.config.said().items() if name in said} == said
    assert replace(read.config, **silent).said() == said
    assert not read.not_read
    assert not read.violations
    assert form.recognises(f"file{form.suffix}", written.text)
    assert next(one.name for one in FORMATS.values() if one.recognises(f"file{form.suffix}", written.text)) == form.name


@every_format
@given(config=training_configs())
@settings(unhurried, max_examples=20)
def test_what_a_framework_cannot_run_is_refused_or_rounded_and_named(
    form: ExchangeFormat, config: TrainingConfig
) -> None:
    changes = roundings(config, form.table)
    assert all(change.what and change.to for change in changes)
    assert bool(changes) == any("cannot run" in violation.rule for violation in form.violations(config))
    found = runnable(form, config)
    if found is not None:
        assert roundings(found, form.table) == []
        assert found == config if not changes else found != config


@every_format
def test_files_state_the_version_they_are_for(form: ExchangeFormat) -> None:
    text = form.write(rounded(usual(), form.table)).text
    assert form.version.split()[0] in text


def test_the_command_line_names_every_format() -> None:
    assert set(get_args(CheckedFormat)) == FORMATS.keys() <= set(get_args(Format))


USERS_FILES: dict[str, tuple[str, dict[str, object]]] = {
    "automodel": (
        """
        model: {pretrained_model_name_or_path: a/b}
        step_scheduler: {global_batch_size: 64, local_batch_size: 4, max_steps: 100}
        distributed:
          strategy: fsdp2
          dp_size: none
          tp_size: 2
          pp_size: 2
          activation_checkpointing: true
          pipeline: {pp_schedule: interleaved_1f1b, pp_microbatch_size: 1, pp_batch_size: 4}
        """,
        {
            "tp": 2,
            "pp": 2,
            "devices": None,
            "schedule": "interleaved_1f1b",
            "vpp": 2,
            "recompute": "full",
            "optimizer_sharding": "zero2",
            "micro_batch": 1,
        },
    ),
    "mindformers": (
        """
        seed: 0
        use_parallel: True
        parallel: {parallel_mode: 1, enable_alltoall: True, enable_parallel_optimizer: True}
        parallel_config:
          {data_parallel: 4, model_parallel: 2, pipeline_stage: 2, micro_batch_num: 8, expert_parallel: 8}
        recompute_config: {recompute: [3, 1], select_recompute: False}
        model: {model_config: {num_hidden_layers: 8, seq_length: 4096, offset: [1, -1]}}
        runner_config: {batch_size: 2}
        """,
        {
            "devices": 16,
            "ep": 8,
            "etp": 1,
            "layers": (5, 3),
            "recompute": "mixed",
            "recompute_layers": ("full",) * 3 + ("none",) * 2 + ("full",) + ("none",) * 2,
            "optimizer_sharding": "zero2",
            "micro_batch": 2,
            "global_batch": 64,
        },
    ),
    "mindformers-pynative": (
        """
        training: {steps: 10, local_batch_size: 2, global_batch_size: 32}
        parallelism:
          data_parallel_shard: 8
          tensor_parallel: 2
          sequence_parallel: True
          pipeline_parallel: 2
          pipeline_parallel_interleave_num: 2
          pipeline_parallel_schedule: interleaved_1f1b
          pipeline_parallel_layers_per_stage: ["0-2,5", "3-4,6-7"]
        recompute: {mode: full, full_recompute_layer: ["0-1", "7"]}
        """,
        {
            "layers": (3, 2, 1, 2),
            "vpp": 2,
            "recompute_layers": ("full",) * 2 + ("none",) * 5 + ("full",),
            "optimizer_sharding": "zero2",
            "global_batch": 32,
        },
    ),
    "mindspeed": (
        """
        export HCCL_CONNECT_TIMEOUT=1800
        export CUDA_DEVICE_MAX_CONNECTIONS=1
        torchrun --nproc_per_node 8 --nnodes 2 train.py --bf16 --seq-length 8192 --tensor-model-parallel-size 2 \\
            --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo --sequence-parallel --use-ascend-mc2 \\
            --micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer --swap-attention
        """,
        {
            "devices": 16,
            "context_algorithm": "all_to_all",
            "tensor_overlap": True,
            "offload_activations": True,
            "optimizer_sharding": "zero1",
        },
    ),
    "mindspeed-fsdp2": (
        "parallel: {tp_size: 1, fsdp_size: 16, cp_size: 2, cp_type: ulysses, recompute: true}",
        {
            "cp": 2,
            "context_algorithm": "all_to_all",
            "optimizer_sharding": "zero3",
            "recompute": "full",
            "devices": None,
        },
    ),
    "torchtitan-npu": (
        """
        [job]
        custom_config_module = "torchtitan_npu.config.custom_config"
        [model]
        name = "deepseek_v3"
        converters = ["npu_rms_norm", "quantize.linear.mx"]
        [quantize.linear.mx]
        recipe_name = "hif8"
        [optimizer]
        virtual_optimizer = true
        virtual_optimizer_size = "all"
        [training]
        local_batch_size = 4
        [parallelism]
        data_parallel_shard_degree = 4
        context_parallel_degree = 2
        pipeline_parallel_degree = 2
        enable_custom_context_parallel = true
        """,
        {
            "devices": 16,
            "context_algorithm": "all_to_all",
            "precision": "fp8",
            "offload_optimizer": True,
            "offload_parameters": False,
            "optimizer_sharding": "zero3",
        },
    ),
    "galvatron": (
        """{"pp_deg": 2, "tp_sizes_enc": "4,4,2", "dp_types_enc": "0,0,0", "use_sp": "0,0,0", "checkpoint": "1,0,0",
        "global_bsz": 64, "chunks": 8, "pp_division": "2,1", "pipeline_type": "pipedream_flush",
        "default_dp_type": "zero2"}""",
        {"tp": 4, "layers": (2, 1), "recompute_layers": ("full", "none", "none"), "optimizer_sharding": "zero2"},
    ),
    "simumax": (
        """{"seq_len": 4096, "micro_batch_size": 1, "micro_batch_num": 8, "world_size": 16, "tp_size": 2, "pp_size": 2,
        "zero_state": 1, "enable_recompute": true, "recompute_granularity": "full_block", "recompute_layer_num": 4,
        "num_layers_in_first_pipeline_stage": 15}""",
        {"global_batch": 32, "recompute": "full", "recompute_count": 4, "first_layers": 15, "sequence_parallel": True},
    ),
}


@pytest.mark.parametrize("name", USERS_FILES)
def test_files_that_users_write_are_read(name: str) -> None:
    text, expected = USERS_FILES[name]
    form, text = FORMATS[name], textwrap.dedent(text)
    assert next(one.name for one in FORMATS.values() if one.recognises(f"file{form.suffix}", text)) == name
    read = form.read(text, f"file{form.suffix}")
    assert {key: getattr(read.config, key) for key in expected} == expected
    assert not form.violations(read.config)
    others = {
        "automodel": ("model.pretrained_model_name_or_path", "step_scheduler.max_steps"),
        "galvatron": ("tp_sizes_enc",),
        "mindformers": ("seed",),
        "mindformers-pynative": ("training.steps",),
        "torchtitan-npu": ("model.name",),
    }
    assert read.not_read == others.get(name, ())


def test_what_computes_again_layer_by_layer_is_rounded_to_more() -> None:
    mixed = usual(recompute="mixed", recompute_layers=("selective",) * 8 + ("none",) * 24)
    nearest = rounded(mixed, FORMATS["galvatron"].table)
    assert nearest.recompute_layers == ("full",) * 8 + ("none",) * 24
    assert (
        rounded(replace(mixed, recompute_layers=("full", "selective") * 16), FORMATS["galvatron"].table).recompute
        == "full"
    )


def test_overrides_hold_whatever_the_recipe_of_megatron_bridge_says() -> None:
    """Most recipes have no section `comm_overlap`, and what an optimizer says of itself held over what `ddp` says."""
    form = FORMATS["bridge"]
    lines = form.write(usual(optimizer_sharding="none", overlap_parameters=False)).text.splitlines()
    assert {
        "++comm_overlap._target_=megatron.bridge.training.comm_overlap.CommOverlapConfig",
        "++comm_overlap.tp_comm_overlap=false",
        "optimizer.use_distributed_optimizer=false",
        "optimizer.overlap_param_gather=false",
        "ddp.use_megatron_fsdp=false",
        "model.seq_length=4096",
        "model.recompute_method=null",
        "model.pipeline_model_parallel_layout=null",
    } <= {*lines}
    assert "checkpoint.ckpt_format=fsdp_dtensor" in form.write(usual(optimizer_sharding="zero3", pp=1)).text
    interleaved = usual(schedule="interleaved_1f1b", vpp=2, global_batch=48)
    assert "model.microbatch_group_size_per_vp_stage=6" in form.write(interleaved).text
    assert not form.violations(interleaved)


@pytest.mark.parametrize("name", ["megatron", "bridge"])
def test_activations_on_the_host_name_the_variable_that_keeps_weights(name: str) -> None:
    written = FORMATS[name].write(usual(offload_activations=True))
    assert written.environment["NVTE_CPU_OFFLOAD_V1"] == "1"
    assert "NVTE_CPU_OFFLOAD_V1=1" in written.text
    assert "NVTE_CPU_OFFLOAD_V1" not in FORMATS[name].write(usual()).environment


def test_what_megatron_bridge_turns_off_is_a_note_and_what_it_refuses_a_violation() -> None:
    form = FORMATS["bridge"]
    text = form.write(usual(tensor_overlap=True)).text
    alone = form.read(text.replace("model.sequence_parallel=true", "model.sequence_parallel=false"), "job")
    assert (alone.config.tensor_overlap, len(alone.notes)) == (False, 1)
    assert not alone.violations
    assert not form.violations(alone.config)
    assert form.read(text, "job").config.tensor_overlap
    shorter = form.read(text.replace("model.seq_length=4096", "model.seq_length=2048"), "job")
    assert [one.key for one in shorter.violations] == ["model.seq_length"]
    with pytest.raises(InputError, match=r"model.sequence_parallel='1' is neither true nor false"):
        form.read(text.replace("model.sequence_parallel=true", "model.sequence_parallel=1"), "job")
    grouped = form.write(usual(schedule="interleaved_1f1b", vpp=2, global_batch=48)).text
    broken = form.read(grouped.replace("per_vp_stage=6", "per_vp_stage=5"), "job").violations
    assert [one.key for one in broken] == ["model.microbatch_group_size_per_vp_stage"]


def test_keys_of_torchtitan_npu_that_exclude_each_other_are_named() -> None:
    form = FORMATS["torchtitan-npu"]
    said = {"cp": 2, "context_algorithm": "all_to_all", "optimizer_sharding": "zero3", "offload_optimizer": True}
    config = usual(**said, precision="fp8", global_batch=128, pp=1, schedule="none")
    text = form.write(config).text
    for old, new, key in (
        ("swap_optimizer = true", "swap_optimizer = true\nvirtual_optimizer = true", "optimizer.virtual_optimizer"),
        ("swap_optimizer", "virtual_optimizer", "optimizer.virtual_optimizer_size"),
        ("enable_custom", 'context_parallel_load_balancer = "headtail"\nenable_custom', "parallelism.context_"),
        ("mxfp8", "mxfp8_cublas", "quantize.linear.mx.recipe_name"),
    ):
        broken = form.read(text.replace(old, new, 1), "job.toml").violations
        assert broken
        assert broken[0].key.startswith(key)
        assert not form.read(text, "job.toml").violations
    with pytest.raises(InputError, match="model.converters = 1 is no list of names"):
        form.read(text.replace("converters = [", "converters = 1 # ["), "job.toml")
    overlapped = replace(config, tensor_overlap=True)
    assert [one.key for one in form.violations(overlapped)] == ["parallelism.enable_async_tensor_parallel"]


def test_attention_by_all_to_all_is_of_one_model_of_torchtitan_npu() -> None:
    form = FORMATS["torchtitan-npu"]
    config = usual(cp=2, context_algorithm="all_to_all", optimizer_sharding="zero3")
    read = form.read(form.write(config).text.replace("[model]", "") + '\n[model]\nname = "llama3"\n', "job.toml")
    assert read.config.context_algorithm == "ring"
    assert "llama3 has no attention by all-to-all" in read.notes[0]


def test_groups_of_shards_are_gone_from_deepspeed() -> None:
    form = FORMATS["deepspeed"]
    config = usual(pp=1, schedule="none", tp=1, etp=1, devices=16, optimizer_sharding="zero3", shard_size=8)
    read = form.read(form.write(config).text, "ds_config.json")
    assert [broken.key for broken in form.violations(read.config) if "shard" in broken.key] == [
        "zero_optimization.mics_shard_size"
    ]
    assert rounded(config, form.table).shard_size == 0


@given(name=st.sampled_from(["devices", "tp", "pp", "num_layers", "micro_batch"]), power=st.integers(41, 2000))
def test_numbers_that_no_configuration_has_are_refused(name: str, power: int) -> None:
    with pytest.raises(InputError, match="correct"):
        TrainingConfig(**{name: 2**power})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "once", "words"),
    [
        ("megatron", False, "--moe-token-dispatcher-type alltoall"),
        ("megatron", True, "--moe-token-dispatcher-type flex"),
        ("bridge", False, "model.moe_token_dispatcher_type=alltoall"),
        ("bridge", True, "model.moe_flex_dispatcher_backend=deepep"),
    ],
)
def test_experts_have_the_dispatcher_of_the_plan(name: str, once: bool, words: str) -> None:
    """Megatron-LM would gather all tokens, and Megatron-Bridge do as its recipe has it."""
    text = FORMATS[name].write(usual(ep=4, etp=2, tokens_once=once)).text
    assert words in " ".join(text.split())
    assert FORMATS[name].read(text, "config").config.tokens_once == once
    assert "dispatcher" not in FORMATS[name].write(usual()).text
