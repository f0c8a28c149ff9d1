"""Measurement files as training runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import LayeredNetwork, OptimizerSharding, Recompute, TrainingRun, TransformerShape
from planner.published.known_models import billions, known_model
from planner.published.measurement_file import FileRow
from planner.published.reading import MeasuredRow, measured_row, read_measurements
from simulator.errors import InputError
from simulator.profiles import load_profile
from tests.measurements import COLUMNS, PLAIN, PUBLISHED, needs_published, write_measurements


def read_one(tmp_path: Path, **changes: str) -> MeasuredRow:
    return read_measurements(write_measurements(tmp_path / "m.csv", changes))[0]


def run_of(tmp_path: Path, **changes: str) -> TrainingRun:
    row = read_one(tmp_path, **changes)
    assert row.run is not None, row.reason
    return row.run


def shape_of(tmp_path: Path, **changes: str) -> TransformerShape:
    network = run_of(tmp_path, **changes).network
    assert isinstance(network, TransformerShape)
    return network


@pytest.mark.parametrize(
    ("arch", "normed"), [("decoder (ALiBi/embed-norm)", True), ("decoder, tied embeddings", False)]
)
def test_norm_after_the_embedding(tmp_path: Path, arch: str, normed: bool) -> None:
    assert shape_of(tmp_path, arch=arch).embedding_norm is normed


def test_row_that_states_everything(tmp_path: Path) -> None:
    row = read_one(tmp_path)
    assert row.run is not None
    setup, network = row.run.setup, row.run.network
    assert isinstance(network, TransformerShape)
    assert (network.layers, network.hidden, network.head_size, network.feed_forward) == (24, 2048, 128, 8192)
    assert (setup.dp, setup.tp, setup.pp, setup.micro_batches) == (4, 2, 2, 8)
    assert (setup.recompute, setup.optimizer_sharding) == (Recompute.FULL, OptimizerSharding.ZERO1)
    assert setup.attention is AttentionKernel.FLASH2
    assert setup.sequence_parallel
    assert row.run.hardware == load_profile("dgx-a100")
    assert (row.measured_time_s, row.time_column, row.outcome) == (2.5, "step_time_s", "ok")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("LLAMA3.1_405B", (126, 16384, 128, 8, 53248)),
        ("Meta-Llama-3-8B", (32, 4096, 32, 8, 14336)),
        ("llama-30b", (60, 6656, 52, 52, 17920)),
        ("llama3_1_8b", (32, 4096, 32, 8, 14336)),
        ("tune_qwen25_0point5b_tp1", (24, 896, 14, 2, 4864)),
        ("CodeLlama-34B", (48, 8192, 64, 8, 22016)),
        ("Gemma-2B", (18, 2048, 8, 1, 16384)),
        ("Gemma2-9B", (42, 3584, 16, 8, 14336)),
        ("Internlm-20B", (60, 5120, 40, 40, 13824)),
        ("deepseek-33b", (62, 7168, 56, 8, 19200)),
        ("GPT-3 175B", (96, 12288, 96, 96, 49152)),
        ("bert_base_squad", (12, 768, 12, 12, 3072)),
    ],
)
def test_published_networks_by_name(name: str, sizes: tuple[int, ...]) -> None:
    model = known_model(name)
    assert model is not None
    assert model.sizes[:5] == sizes


def test_experts_of_published_networks() -> None:
    counts = {name: known_model(name) for name in ("Mixtral-8x7B", "Qwen3-235B-A22B", "DeepSeek-V3", "gpt-oss-20b")}
    assert [m.experts.count if m and m.experts else 0 for m in counts.values()] == [8, 128, 256, 32]
    assert known_model("LLaMA-7B") is not known_model("nothing known")
    assert known_model("nothing known") is None


@given(size=st.sampled_from([0.125, 0.5, 7.0, 70.0, 405.0]), unit=st.sampled_from(["b", "B"]))
@settings(max_examples=10, deadline=None)
def test_size_in_a_name(size: float, unit: str) -> None:
    assert billions(f"model_{size:g}{unit}_x") == size


def test_stated_sizes_win_over_published_ones(tmp_path: Path) -> None:
    sizes = {"n_layers": "4", "hidden": "5120", "n_heads": "40", "vocab": ""}
    shape = shape_of(tmp_path, model="LLaMA2-13B", arch="decoder", **sizes)
    assert (shape.layers, shape.feed_forward, shape.vocabulary, shape.gated) == (4, 13824, 32000, True)
    other = shape_of(tmp_path, model="LLaMA2-13B", arch="decoder", hidden="1024", n_heads="16")
    assert other.feed_forward == 2816  # 8/3 of the width, in steps of 256
    assert other.rms_norm


def test_layers_by_parameters(tmp_path: Path) -> None:
    row = read_one(tmp_path, model="GPT 52B", n_layers="", hidden="8192", n_heads="", params_b="52")
    assert row.run is not None
    assert isinstance(row.run.network, TransformerShape)
    assert row.run.network.layers == 64
    assert "n_layers not stated" in row.reason


def test_mixture_of_experts(tmp_path: Path) -> None:
    run = run_of(
        tmp_path, model="Mixtral-8x7B", arch="", n_layers="", hidden="", n_heads="", vocab="", ep="4", tp="1", pp="2"
    )
    assert isinstance(run.network, TransformerShape)
    assert run.network.experts is not None
    assert (run.network.experts.count, run.setup.ep, run.setup.expert_tp) == (8, 4, 1)
    assert "ep 3" in read_one(tmp_path, model="Mixtral-8x7B", ep="3").reason


def test_encoders_and_layered_networks(tmp_path: Path) -> None:
    bert = shape_of(tmp_path, model="BERT-large", arch="encoder", n_layers="", hidden="", n_heads="", seq_len="")
    assert (bert.layers, bert.causal, bert.sequence_length) == (24, False, 128)
    t5 = shape_of(tmp_path, model="t5_test", arch="t5", n_layers="12", hidden="768", n_heads="12", seq_len="512")
    assert (t5.encoder_layers, t5.encoder_sequence_length) == (12, 512)
    images = run_of(
        tmp_path, model="resnet50", arch="Classification", n_layers="", hidden="", n_heads="", seq_len="", tp="",
        pp="", framework="PyTorch", micro_batch="8",
    )  # fmt: skip
    assert isinstance(images.network, LayeredNetwork)
    assert (images.setup.dp, images.setup.optimizer) == (16, "momentum")


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"n_accels": ""}, "n_accels"),
        ({"tp": "", "pp": ""}, "tp, pp and cp"),
        ({"tp": "3"}, "does not divide"),
        ({"global_batch": "", "micro_batch": ""}, "global_batch"),
        ({"global_batch": "2"}, "smaller than the 4 replicas"),
        ({"n_layers": "", "hidden": ""}, "hidden and n_layers"),
        ({"seq_len": ""}, "seq_len"),
        ({"accelerator": "Abacus 9000"}, "Abacus 9000"),
        ({"accelerator": ""}, "accelerator"),
        ({"model": "Zamba2-7B"}, "Mamba"),
        ({"model": "NemotronH_56B"}, "Mamba"),  # of 24 layers, which the published one has not
        ({"pp": "16", "tp": "1", "n_layers": "8"}, "pp 16"),
    ],
)
def test_missing_fact_is_named(tmp_path: Path, changes: dict[str, str], missing: str) -> None:
    row = read_one(tmp_path, **changes)
    assert row.run is None
    assert not row.fault
    assert missing in row.reason


@pytest.mark.parametrize(("batch", "precision", "read"), [("32", "mixed (AMP fp16)", False), ("128", "FP32", True),
                                                           ("256", "mixed (AMP fp16)", True)])  # fmt: skip
def test_a_batch_that_is_the_digits_of_a_precision_is_none(
    tmp_path: Path, batch: str, precision: str, read: bool
) -> None:
    example = {"source": "NVIDIA/DeepLearningExamples", "model": "Classification/ConvNets/resnet50v1.5",
               "framework": "TensorFlow", "accelerator": "V100", "accel_mem_gb": "16", "n_accels": "1", "tp": "",
               "pp": "", "micro_batch": "", "dp": "1"}  # fmt: skip
    row = read_one(tmp_path, **example, per_accel_batch=batch, global_batch=batch, precision=precision)
    assert (row.run is not None) is read, row.reason
    assert read or "bits of FP32" in row.reason


def test_degrees_and_batches_are_derived(tmp_path: Path) -> None:
    assert run_of(tmp_path, dp="1").setup.dp == 4
    assert run_of(tmp_path, tp="", pp="4", dp="2").setup.tp == 2
    assert run_of(tmp_path, micro_batch="", grad_accum="16").setup.micro_batch == 2
    uneven = run_of(tmp_path, n_layers="30", pp="8", tp="1", vpp="4").setup
    assert uneven.schedule == "interleaved_1f1b"
    assert sum(uneven.layers_per_stage) == 30
    assert (uneven.layers_per_stage[0], uneven.layers_per_stage[-1]) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"precision": "FP8-MX", "precision_kind": ""}, "precision", "fp8"),
        ({"precision": "NVFP4"}, "precision", "fp4"),
        ({"precision": "TF32", "precision_kind": ""}, "precision", "tf32"),
        ({"precision": "mixed (AMP fp16)", "precision_kind": "fp16"}, "precision", "fp16"),
        ({"framework": "torchtitan", "other_flags": "torch.compile"}, "stack", Stack.COMPILED),
        ({"framework": "NeMo/Megatron-Core"}, "stack", Stack.TRANSFORMER_ENGINE),
        ({"framework": "MindFormers/MindSpore"}, "stack", Stack.MINDSPORE),
        ({"optimizer_sharding": "", "zero_fsdp": "FSDP FULL_SHARD"}, "optimizer_sharding", OptimizerSharding.ZERO3),
        ({"zero_fsdp": "FSDP2 shard=2"}, "shard_group", 2),
        ({"attention_impl": "flash_attentionv1.0.8"}, "attention", AttentionKernel.FLASH),
        ({"attention_impl": "flash_attention2 + RMS kernel"}, "fused_norm", True),
        ({"other_flags": "overlap-grad-reduce; tp-comm-overlap"}, "overlap_tensor", True),
        ({"other_flags": "LoRA"}, "trained_fraction", 0.005),
        ({"other_flags": "deterministic-mode"}, "deterministic", True),
        ({"other_flags": "schedule ZB-1p"}, "schedule", "zb-h1"),
        ({"other_flags": "schedule ZB-2p"}, "pipelines_in_flight", 2),
        ({"other_flags": "schedule 1F1B"}, "pipelines_in_flight", 0),
        ({"other_flags": "deterministic-mode; moe-grouped-gemm"}, "grouped_products", True),
        ({"recompute_kind": "full", "recompute": "full method=block layers=6"}, "recompute_layers", 6),
    ],
)
def test_words_of_the_setup(tmp_path: Path, changes: dict[str, str], field: str, value: object) -> None:
    assert getattr(run_of(tmp_path, **changes).setup, field) == value


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "expected"), [("24", "1024", "16", "none"), ("40", "6144", "48", "full")]
)
def test_recomputation_of_a_simulators_configuration_counts_where_it_is_needed(
    tmp_path: Path, layers: str, hidden: str, heads: str, expected: str
) -> None:
    # Whether it is needed is a fact of the network, not of the plan: a large micro-batch changes nothing.
    network = {"n_layers": layers, "hidden": hidden, "n_heads": heads, "recompute": "full (default of the simulator)"}
    found = {run_of(tmp_path, micro_batch=size, **network).setup.recompute for size in ("1", "32")}
    assert found == {Recompute(expected)}


def test_network_between_nodes(tmp_path: Path) -> None:
    slow = run_of(tmp_path, inter_node_link="InfiniBand 100 Gb/s").hardware
    again = run_of(tmp_path, inter_node_link="100 Gb/s EDR per node").hardware
    assert slow is again
    assert slow.levels[-1].bandwidth_bytes_per_s == pytest.approx(100e9 / 8 / 8 * 0.95)
    assert slow.hash != load_profile("dgx-a100").hash
    stated = run_of(tmp_path, inter_node_link="8x200Gbps HDR InfiniBand per node (compute)").hardware
    assert stated == load_profile("dgx-a100")
    beside = run_of(tmp_path, hw="8x A100, NVLink3 600 GB/s, EFA 400 Gb/s").hardware
    assert beside.levels[-1].bandwidth_bytes_per_s == pytest.approx(400e9 / 8 / 8 * 0.95)
    small = run_of(tmp_path, accel_mem_gb="40", accelerator="A100").hardware
    assert small.name == "dgx-a100-40g"
    half = run_of(tmp_path, accelerator="V100-SXM2", accel_mem_gb="16").hardware
    assert 14 * 2**30 < half.device_memory_bytes < 15 * 2**30


def test_time_by_the_first_column_that_tells(tmp_path: Path) -> None:
    tokens = read_one(tmp_path, step_time_s="", tokens_per_s_per_gpu="8192", samples_per_s="1")
    assert (tokens.measured_time_s, tokens.time_column) == (2.0, "tokens_per_s_per_gpu")
    samples = read_one(tmp_path, step_time_s="", samples_per_s="64")
    assert samples.measured_time_s == 2.0
    formula = read_one(tmp_path, step_time_s="", tflops_per_gpu="100", tflops_kind="hardware (eq.3)")
    expected = 96 * 128 * 2048 * 24 * 2048**2 * (1 + 1 / 6 + 50257 / (16 * 24 * 2048)) / (100e12 * 16)
    assert formula.measured_time_s == pytest.approx(expected)
    assert math.isnan(read_one(tmp_path, step_time_s="", tflops_per_gpu="100").measured_time_s)


def test_measurements_do_not_change_the_run(tmp_path: Path) -> None:
    plain = run_of(tmp_path)
    other = run_of(tmp_path, step_time_s="99", outcome="oom", mem_gib_per_gpu="7", tflops_per_gpu="3", mfu_pct="1")
    assert plain == other
    assert read_one(tmp_path).workload == read_one(tmp_path, tp="4", pp="1", micro_batch="1").workload
    assert read_one(tmp_path).workload != read_one(tmp_path, global_batch="256").workload


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("seq_len", "-5", "out of range"),
        ("tp", "0", "out of range"),
        ("step_time_s", "1e12", "out of range"),
        ("mem_gib_per_gpu", "1e6", "out of range"),
        ("step_time_s", "nan", "not finite"),
        ("n_layers", "inf", "not finite"),
        ("hidden", "many", "not a number"),
        ("pp", "1.5", "not a whole number"),
        ("row_id", "", "empty"),
    ],
)
def test_wrong_cell_is_named(tmp_path: Path, column: str, value: str, rule: str) -> None:
    rows = read_measurements(write_measurements(tmp_path / "m.csv", {}, {column: value}))
    assert not rows[0].fault
    assert rows[1].run is None
    for word in ("m.csv", "line 3", f"column {column}", rule, value):
        assert word in rows[1].fault


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["line 1 is empty", "names of the columns"]),
        (b"row_id,model\nT-1,GPT\n", ["line 1", "'n_accels'"]),
        (",".join(COLUMNS).encode(), ["no row"]),
        (",".join([*COLUMNS, "model"]).encode(), ["twice", "model"]),
        (b"\xff\xfe\x00", ["UTF-8"]),
        ((",".join(COLUMNS) + '\n"T-1,open\n').encode(), ["not a CSV row", "line 2"]),
    ],
)
def test_file_that_is_none(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_measurements(path)
    assert all(word in str(error.value) for word in ["bad.csv", *words])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothere"):
        read_measurements(tmp_path / "nothere.csv")
    with pytest.raises(InputError, match="is a folder"):
        read_measurements(tmp_path)
    short = tmp_path / "short.csv"
    short.write_text(",".join(COLUMNS) + "\nT-1,x\n", encoding="utf-8")
    assert "line 2" in read_measurements(short)[0].fault


def test_rows_without_measurements_can_be_predicted(tmp_path: Path) -> None:
    speeds = {"step_time_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu_pct", "outcome", "etp"}
    kept = [name for name in COLUMNS if name not in speeds]
    row = read_measurements(write_measurements(tmp_path / "m.csv", {}, columns=kept))[0]
    assert row.run is not None
    assert math.isnan(row.measured_time_s)
    with pytest.raises(InputError, match="'step_time_s'"):
        read_measurements(write_measurements(tmp_path / "m.csv", {}, columns=[*kept, "mfu_pct"]))


words = st.sampled_from(["", "A100", "none", "8", "full", "GPT 7B", "moe", "2x4", "zero3", "1F1B", "LoRA", "64"])
numbers = st.sampled_from(["", "1", "2", "7", "8", "64", "4096"])


@given(
    texts=st.dictionaries(st.sampled_from(["model", "arch", "hw", "framework", "other_flags", "recompute", "notes",
                                           "zero_fsdp", "inter_node_link", "precision", "attention_impl"]), words),
    counts=st.dictionaries(st.sampled_from(["n_layers", "hidden", "n_heads", "n_accels", "tp", "pp", "vpp", "cp", "dp",
                                            "ep", "n_experts", "moe_topk", "global_batch", "micro_batch", "seq_len",
                                            "n_kv_heads", "grad_accum", "accels_per_node"]), numbers),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_row_is_read_or_explained(texts: dict[str, str], counts: dict[str, str]) -> None:
    cells = {**PLAIN, **texts, **counts}
    figures = {name: float(counts.get(name, PLAIN.get(name, ""))) for name in counts if counts[name]}
    figures |= {k: float(v) for k, v in PLAIN.items() if v.replace(".", "").isdigit() and k not in counts}
    row = measured_row(FileRow(file="m.csv", line=2, texts=cells, numbers=figures))
    assert row.run is not None or row.reason


def test_a_row_of_two_speeds_states_no_time(tmp_path: Path) -> None:
    agreeing = read_one(tmp_path, step_time_s="0.05", samples_per_s="5120", global_batch="256")
    assert agreeing.measured_time_s == 0.05
    torn = read_one(tmp_path, step_time_s="4.7", samples_per_s="5120", global_batch="256")
    assert torn.run is not None
    assert math.isnan(torn.measured_time_s)
    assert "differ by more than twice" in torn.reason


@pytest.mark.parametrize(
    ("accelerator", "date", "kernel"),
    [
        ("Ascend 910B (64GB)", "2025-02-24", "vendor"),
        ("Ascend 910A (32GB)", "2025-02-24", "unfused"),  # CANN's fused kernel is for later devices
        ("Ascend 910", "2021-07-05", "fused_softmax"),
    ],
)
def test_attention_on_ascend_where_it_is_not_stated(tmp_path: Path, accelerator: str, date: str, kernel: str) -> None:
    row = {"accelerator": accelerator, "hw": "", "measured_date": date, "framework": "MindFormers/MindSpore"}
    assert run_of(tmp_path, **row, attention_impl="").setup.attention == kernel


def test_variants_are_the_same_object(tmp_path: Path) -> None:
    rows = read_measurements(write_measurements(tmp_path / "m.csv", {"accel_mem_gb": "64"}, {"accel_mem_gb": "64"}))
    first, second = (row.run.hardware for row in rows if row.run)
    assert first is second


def test_a_presumed_accelerator_is_a_missing_fact_unless_the_name_states_it(tmp_path: Path) -> None:
    row = {"accelerator": "Ascend 910B (64GB)?", "hw": "not stated per table (Atlas 800T A2 presumed)", "tp": "8"}
    assert "the accelerator is not stated, 'Ascend 910B (64GB)' is presumed" in read_one(tmp_path, **row).reason
    for change in ({"model": "GPT test(Atlas 800T A2)"}, {"hw": "Atlas 800T A2"}):
        assert "Ascend 910B" in run_of(tmp_path, **{**row, **change}).hardware.device_name


@needs_published
def test_most_published_transformer_rows_are_read() -> None:
    total = read = 0
    for path in sorted(PUBLISHED.glob("*.csv")):
        if path.name[0] in "ABCDEJMN" and not path.name.startswith("E2"):
            rows = read_measurements(path)
            assert not any(row.fault for row in rows if row.run is not None)
            total += len(rows)
            read += sum(row.run is not None for row in rows)
    assert read >= 0.9 * total
