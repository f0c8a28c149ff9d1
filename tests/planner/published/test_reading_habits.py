"""What rows say of software that does otherwise than its stack, and rows that leave memory in doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cost.memory.figures import MemoryFigure
from planner.cost.stacks import AttentionKernel
from planner.cost.training_run import Experts, OptimizerSharding, TrainingSetup, TransformerShape
from planner.published.predictions import CONTRADICTION, MISSING_FACT, UNKNOWN_FIGURE, measured_apart, memory_doubt
from planner.published.reading import MeasuredRow, read_measurements
from planner.published.reading_memory import figure_of
from tests.measurements import write_measurements

DETERMINISTIC = "deterministic-mode; NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"


def read_one(tmp_path: Path, **changes: str) -> MeasuredRow:
    row = read_measurements(write_measurements(tmp_path / "m.csv", changes))[0]
    assert row.run is not None, row.reason
    return row


def setup_of(tmp_path: Path, **changes: str) -> TrainingSetup:
    run = read_one(tmp_path, **changes).run
    assert run is not None
    return run.setup


def test_scaling_of_aleph_alpha(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, framework="AA-Scaling (Megatron-like, 1F1B)")
    assert not setup.scattered_gradients
    assert setup.sent_gradient_bytes == 4
    # 24 layers and embedding, norm and head: 14 and 13 items
    assert setup.layers_per_stage == (13, 11)
    assert not setup.vocabulary_parallel_loss


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"framework": "Megatron-LM"}, "scattered_gradients", True),
        ({"framework": "Megatron-LM"}, "layers_per_stage", ()),
        ({"model": "gpt3_tp2_cross_entropy_loss_fusion"}, "fused_loss", True),
        ({"model": "gpt3_tp2_defer_embedding_wgrad_compute"}, "deferred_head_batches", 2),
        ({"model": "gpt3_multi_dist_optimizer_instances", "tp": "1", "pp": "1", "dp": "16"}, "shard_group", 8),
        ({"model": "multi_dist_optimizer_instances", "tp": "8", "pp": "1", "dp": "2"}, "shard_group", 1),
        ({"model": "llama2_tp4_tp2d", "sequence_parallel": "false", "sp": ""}, "sequence_parallel", True),
        ({"framework": "torchtitan", "recompute": "selective (op SAC)"}, "every_second_product", True),
        ({"framework": "torchtitan", "recompute": "selective (config default)"}, "every_second_product", True),
        ({"framework": "torchtitan", "recompute": "full"}, "every_second_product", False),
        ({"framework": "Megatron-LM", "recompute": "selective (op SAC)"}, "every_second_product", False),
        ({"recompute": "norm, act"}, "recompute_activation_function", True),
        ({"recompute": "norm, act"}, "recompute_norms", True),
        ({"recompute": "selective: moe_act layernorm"}, "recompute_norms", True),
        ({"recompute": "selective"}, "recompute_norms", False),
        (
            {"recompute": "selective: moe_act layernorm", "framework": "Megatron-Core"},
            "recompute_modules",
            ("layernorm",),
        ),
        ({"recompute": "full: layernorm", "framework": "Megatron-Core"}, "recompute_modules", ()),
        ({"other_flags": "DeepEP; routing: forced balance"}, "forced_balance", True),
        ({"other_flags": "routing: learned balance"}, "forced_balance", False),
        ({"recompute": "activations"}, "recompute_activation_function", False),
        ({"model": "gpt3_tp1_pp4_uneven_pipeline", "tp": "1", "pp": "4"}, "layers_per_stage", (2, 10, 10, 2)),
        ({"hw": "dgxa100"}, "scripted_loss", True),
        ({"hw": "dgx_a100"}, "scripted_loss", False),
        ({"framework": "torchtitan", "other_flags": "torch.compile", "measured_date": "2025-06"}, "fused_loss", True),
        ({"framework": "torchtitan", "other_flags": "torch.compile", "measured_date": "2024-12"}, "fused_loss", False),
        ({"framework": "torchtitan", "other_flags": "eager", "measured_date": "2025-06"}, "fused_loss", False),
        ({"model": "gpt3_scoped_cudagraph"}, "captured_graphs", True),
        ({"other_flags": "CUDA graphs"}, "captured_graphs", True),
        ({"other_flags": ""}, "captured_graphs", False),
        ({"measured_date": "2022-02"}, "eager_kernels", True),
        ({"measured_date": "2022-08"}, "eager_kernels", False),
        ({"measured_date": ""}, "eager_kernels", False),
        ({"recompute": "full method=block layers=3", "vpp": "2"}, "recompute_layers", 6),
        (
            {"recompute": "full method=block layers=3", "vpp": "2", "framework": "MindSpeed-LLM CI"},
            "recompute_layers",
            3,
        ),
        ({"other_flags": "Opt Offl=Y; Par Offl=Y"}, "offload_parameters", True),
        ({"other_flags": "Opt Offl=Y; Par Offl=Y"}, "offload_optimizer", True),
        ({"other_flags": "Opt Offl=Y; Par Offl=N"}, "offload_parameters", False),
        ({"source": "MindSpeed-LLM CI baselines (tests/*/baseline*.json)"}, "deterministic", True),
        ({"other_flags": DETERMINISTIC}, "deterministic", True),
        ({"source": "Ascend MindSpeed-LLM README"}, "deterministic", False),
        ({"other_flags": "dispatcher=DeepEP; +1f1b overlap"}, "tokens_sent_once", True),
        ({"other_flags": "dispatcher=DeepEP; +1f1b overlap"}, "overlap_experts", True),
        ({"other_flags": "dispatcher=A2A"}, "tokens_sent_once", False),
        ({"other_flags": "dispatcher=A2A"}, "overlap_experts", False),
        ({"framework": "NeMo/Megatron-Core", "notes": "LoRA"}, "adapted", "q_proj,k_proj,v_proj"),
        ({"framework": "NeMo AutoModel", "notes": "LoRA"}, "adapted", "all-linear"),
        ({"framework": "Megatron-Bridge"}, "tokens_sent_once", True),
        ({"framework": "Megatron-Bridge", "other_flags": "dispatcher alltoall"}, "tokens_sent_once", False),
        ({"other_flags": "CUDA graph of the whole iteration"}, "captured_step", True),
        ({"other_flags": "CUDA graph of attn, moe_router"}, "captured_step", False),
        ({"framework": "torchtitan", "accelerator": "B200", "attention_impl": ""}, "attention", "vendor"),
        ({"framework": "torchtitan", "accelerator": "H100-80GB", "attention_impl": ""}, "attention", "flash2"),
        ({"attention_impl": "flash-attn-4"}, "attention", "vendor"),
        ({"attention_impl": "FlashAttention-3"}, "attention", "vendor"),
        ({"attention_impl": "flash-attn 2.8.3"}, "attention", "flash2"),
    ],
)
def test_words_of_single_stacks(tmp_path: Path, changes: dict[str, str], field: str, value: object) -> None:
    assert getattr(setup_of(tmp_path, **changes), field) == value


@pytest.mark.parametrize(
    ("cluster", "flags", "kernel"),
    [
        ("dgxa100", DETERMINISTIC, AttentionKernel.FUSED_SOFTMAX),
        ("dgxa100", "", AttentionKernel.FLASH2),
        ("dgx_a100", DETERMINISTIC, AttentionKernel.FLASH2),
    ],
)
def test_containers_without_reproducible_flash_attention(
    tmp_path: Path, cluster: str, flags: str, kernel: AttentionKernel
) -> None:
    framework = "Megatron-LM (mcore) transformer_engine"
    setup = setup_of(tmp_path, hw=cluster, other_flags=flags, framework=framework, attention_impl="")
    assert setup.attention is kernel


@pytest.mark.parametrize(
    ("flags", "source", "single"),
    [
        ("use-fused-rmsnorm; swiglu", "MindSpeed-LLM CI baselines", False),
        ("swiglu", "MindSpeed-LLM CI baselines", True),
        ("swiglu", "MindSpeed-LLM README", False),
    ],
)
def test_norms_of_mindspeed_are_one_kernel_unless_a_test_leaves_the_flag_out(
    tmp_path: Path, flags: str, source: str, single: bool
) -> None:
    setup = setup_of(
        tmp_path, other_flags=flags, source=source, framework="MindSpeed-LLM CI", accelerator="Ascend 910B"
    )
    assert setup.single_norms is single
    assert setup.single_gate is False
    assert setup.fused_norm is ("rmsnorm" in flags)


@pytest.mark.parametrize(("flags", "layers"), [("swiglu; mcore", 1), ("swiglu; legacy-model", 2)])
def test_the_legacy_network_counts_layers_that_are_computed_again_by_chunk(
    tmp_path: Path, flags: str, layers: int
) -> None:
    stated = {"n_layers": "16", "pp": "2", "vpp": "2", "recompute": "full method=block layers=1"}
    setup = setup_of(
        tmp_path, other_flags=flags, framework="MindSpeed-LLM CI", accelerator="Ascend 910B", global_batch="16",
        micro_batch="1", **stated,
    )  # fmt: skip
    assert setup.recompute_layers == layers
    assert setup.legacy_model is ("legacy" in flags)


def test_gates_of_mindspeed_but_swiglu_are_single_operators(tmp_path: Path) -> None:
    stated = {"source": "MindSpeed-LLM CI baselines", "framework": "MindSpeed-LLM CI", "accelerator": "Ascend 910B"}
    assert setup_of(tmp_path, other_flags="use-fused-rmsnorm; use-mc2", **stated).single_gate
    assert not setup_of(tmp_path, other_flags="", **{**stated, "source": "MindSpeed-LLM README"}).single_gate


@pytest.mark.parametrize(("model", "share"), [("tune_llama2_lu_lora_ptd", 0.375), ("tune_llama2_lora_ptd", 0)])
def test_lu_lora_learns_the_first_layers_locally(tmp_path: Path, model: str, share: float) -> None:
    assert setup_of(tmp_path, model=model, framework="MindSpeed-LLM CI").local_share == share


def test_reward_models_see_answers_of_variable_length(tmp_path: Path) -> None:
    assert "variable length" in read_one(tmp_path, model="reward_chatglm3_tp2", notes="").reason
    assert "variable length" not in read_one(tmp_path, model="performance_chatglm3", notes="").reason


def test_releases_are_no_plans(tmp_path: Path) -> None:
    first, second, third = (
        read_one(tmp_path, measured_date=date).workload
        for date in ("2025-06-09 (v24.11.1)", "2025-06-09 (v25.04)", "2025-06-10 (v25.04)")
    )
    assert first != second == third


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        ({"mem_gib_per_gpu": "60", "mem_kind": "nvidia-smi GB"}, ""),
        ({"mem_gib_per_gpu": "", "mem_kind": "GB as printed"}, ""),
        ({"mem_gib_per_gpu": "60", "mem_kind": "GB as printed"}, ""),
        ({"mem_gib_per_gpu": "60", "mem_kind": "peak GB as printed"}, UNKNOWN_FIGURE),
        ({"mem_gib_per_gpu": "0.5", "mem_kind": "nvidia-smi GB"}, CONTRADICTION),
        (
            {"mem_gib_per_gpu": "60", "mem_kind": "nvidia-smi GB", "recompute": "", "recompute_kind": ""},
            MISSING_FACT,
        ),
    ],
)
def test_doubts_about_memory(tmp_path: Path, changes: dict[str, str], doubt: str) -> None:
    assert memory_doubt(read_one(tmp_path, **changes)) == doubt


def test_rows_that_state_the_same_leave_in_doubt_what_decides(tmp_path: Path) -> None:
    stated = {"mem_kind": "peak reserved", "source": "one"}
    file = tmp_path / "m.csv"
    write_measurements(
        file,
        {**stated, "row_id": "a", "mem_gib_per_gpu": "20"},
        {**stated, "row_id": "b", "mem_gib_per_gpu": "30", "notes": "again"},
        {**stated, "row_id": "c", "mem_gib_per_gpu": "40", "micro_batch": "8"},
        {**stated, "row_id": "d", "mem_gib_per_gpu": "41", "micro_batch": "8"},
        {**stated, "row_id": "e", "mem_gib_per_gpu": "20", "source": "two"},
        {**stated, "row_id": "f", "mem_gib_per_gpu": "60", "outcome": "oom"},
    )
    assert measured_apart(read_measurements(file)) == {("one", "a"), ("one", "b")}


@pytest.mark.parametrize(
    ("kind", "gib"), [("nvidia-smi GB, max (first/last stage)", 75000 / 1024), ("peak reserved", 75.0)]
)
def test_gigabytes_of_nvidia_smi_are_thousands_of_mebibytes(tmp_path: Path, kind: str, gib: float) -> None:
    assert read_one(tmp_path, mem_gib_per_gpu="75", mem_kind=kind).memory_gib == pytest.approx(gib)


@pytest.mark.parametrize(
    ("changes", "complete"),
    [
        ({}, True),
        ({"plan_complete": "no"}, False),
        ({"precision": "", "precision_kind": ""}, False),
        ({"recompute": "", "recompute_kind": ""}, False),
    ],
)
def test_a_row_in_full_says_what_it_multiplies_in_and_what_it_computes_again(
    tmp_path: Path, changes: dict[str, str], complete: bool
) -> None:
    full = {"plan_complete": "yes", "precision": "bf16", "recompute": "full", "recompute_kind": "full"}
    assert read_one(tmp_path, **{**full, **changes}).complete is complete


@pytest.mark.parametrize(
    ("kind", "figure"),
    [
        ("mem-max-allocated-bytes (rank 0 of the tensorboard log) /2^30", MemoryFigure.LAST_STAGE_ALLOCATED),
        ("max over listed ranks of torch_npu max allocated", MemoryFigure.FIRST_STEP_ALLOCATED),
        ("max over ranks, bytes/2^30 (includes reserved, per repo script)", MemoryFigure.DEVICE),
        ("peak reserved (torchtitan max_reserved)", MemoryFigure.RESERVED),
        ("nvidia-smi GB", MemoryFigure.FIRST_NODE_DEVICE),
        ("nvidia-smi GB, max (first/last stage)", MemoryFigure.DEVICE),
        ("GiB used of total as printed", MemoryFigure.DEVICE),
        ("peak active", MemoryFigure.ALLOCATED),
    ],
)
def test_what_measurements_of_memory_show(kind: str, figure: MemoryFigure) -> None:
    assert figure_of(kind) is figure


@pytest.mark.parametrize(("kind", "compared"), [("GB as printed", False), ("peak GB as printed", True)])
def test_memory_without_a_word_on_what_it_is_is_not_compared(tmp_path: Path, kind: str, compared: bool) -> None:
    row = read_one(tmp_path, mem_gib_per_gpu="60", mem_kind=kind)
    assert (row.memory_gib == 60) is compared
    assert ("not compared" in row.reason) is not compared


def test_memory_without_a_batch_is_not_compared(tmp_path: Path) -> None:
    vision = {"arch": "", "n_layers": "", "hidden": "", "n_heads": "", "vocab": "", "seq_len": "", "tp": "", "pp": ""}
    plain = {**vision, "model": "resnet50", "recompute_kind": "", "mem_gib_per_gpu": "30", "mem_kind": "peak reserved"}
    plain["optimizer_sharding"] = plain["sequence_parallel"] = plain["attention_impl"] = ""
    stated = read_one(tmp_path, **plain, global_batch="2048", micro_batch="128")
    assert stated.memory_gib == 30
    unstated = read_one(tmp_path, **plain, global_batch="", micro_batch="", step_time_s="", samples_per_s="900")
    assert "follows the batch" in unstated.reason
    assert unstated.memory_gib != 30


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"notes": "layers per stage: 20"}, "do not add up to the 24 layers"),
        ({"notes": "layers per stage: 20", "pp": "1", "tp": "4"}, "do not add up to the 24 layers"),
        ({"model": "llama3_mcore_tp2_pp2_vpp2_noop_layer"}, "how many is not stated"),
        ({"model": "gpt3_mcore_te_tp2_pp1_modelopt_distill_resume"}, "a teacher"),
    ],
)
def test_rows_that_do_not_say_which_network_ran(tmp_path: Path, changes: dict[str, str], missing: str) -> None:
    row = read_measurements(write_measurements(tmp_path / "m.csv", changes))[0]
    assert row.run is None
    assert missing in row.reason


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"framework": "MindSpeed-LLM CI"}, {"rotary": True, "learned_positions": 0}),
        ({"framework": "Megatron-LM"}, {"rotary": False, "learned_positions": 2048, "dropout": True}),
        ({"model": "GPT rope_embeddings"}, {"rotary": True, "learned_positions": 0, "dropout": True}),
        ({"model": "llama", "arch": "rope"}, {"rotary": True, "dropout": False}),
        ({"model": "t5_11b_mcore_tp4", "hidden": "4096", "n_heads": "64"}, {"head_size": 64}),
        ({"model": "T5-11B", "hidden": "1024", "n_heads": "128"}, {"head_size": 128}),
        (
            {"model": "deepseek_proxy_fsdp_ep2", "n_experts": "8", "moe_topk": "4", "vocab": "", "n_layers": "2",
             "hidden": "512", "n_heads": "8", "tp": "1", "pp": "1", "global_batch": "128"},
            {"vocabulary": 50257},
        ),
    ],
)  # fmt: skip
def test_networks_as_their_software_has_them(tmp_path: Path, changes: dict[str, str], facts: dict[str, object]) -> None:
    run = read_one(tmp_path, **changes).run
    assert run is not None
    assert {name: getattr(run.network, name) for name in facts} == facts


def test_experts_of_a_published_network_have_their_own_width(tmp_path: Path) -> None:
    sizes = {"n_layers": "2", "hidden": "4096", "n_heads": "64", "ffn_hidden": "13312", "n_experts": "16", "ep": "4"}
    run = read_one(tmp_path, model="pretrain_huyuan3_4k", tp="1", pp="1", moe_topk="8", vocab="120832", **sizes).run
    assert run is not None
    assert isinstance(run.network, TransformerShape)
    assert run.network.experts == Experts(
        count=16, per_token=8, feed_forward=1536, shared_feed_forward=1536, dense_layers=1
    )


@pytest.mark.parametrize(
    ("name", "nodes_of_four", "layers"),
    [("etp1_fine_grained_offloading", 8, 1), ("etp1_no_mtp_fine_grained_offloading_1node", 4, 0)],
)
def test_functional_tests_run_on_eight_devices_or_one_node(
    tmp_path: Path, name: str, nodes_of_four: int, layers: int
) -> None:
    facts = {"n_layers": "15", "hidden": "1024", "n_heads": "32", "ffn_hidden": "4096", "n_experts": "32", "ep": "2"}
    run = read_one(
        tmp_path, model=f"gpt3_moe_mcore_te_tp2_pp2_ep4_{name}", source="NVIDIA/Megatron-LM functional tests",
        n_accels="", accels_per_node="4", vocab="", **facts,
    ).run  # fmt: skip
    assert run is not None
    assert isinstance(run.network, TransformerShape)
    assert run.network.experts == Experts(
        count=32, per_token=4, feed_forward=1024, shared_feed_forward=1024, dense_layers=3
    )
    assert (run.setup.devices, run.network.multi_token_layers) == (nodes_of_four, layers)


def test_flagperf_shards_llama_whole(tmp_path: Path) -> None:
    plain = {"tp": "1", "pp": "1", "optimizer_sharding": "", "attention_impl": "", "sequence_parallel": ""}
    setup = setup_of(tmp_path, source="FlagOpen/FlagPerf", framework="deepspeed", model="llama2_7b", **plain)
    assert (setup.optimizer_sharding, setup.attention) == (OptimizerSharding.ZERO3, AttentionKernel.FLASH2)


@pytest.mark.parametrize(("source", "chunks"), [("NVIDIA NeMo performance summary", 3), ("a cloud's own runs", 1)])
def test_recipes_of_nvidia_interleave_where_nothing_is_stated(tmp_path: Path, source: str, chunks: int) -> None:
    stated = {"framework": "Megatron-Bridge", "source": source, "tp": "1", "pp": "4", "vpp": "", "n_accels": "8"}
    assert setup_of(tmp_path, **stated).vpp == chunks
