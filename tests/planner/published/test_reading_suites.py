"""Facts that benchmark suites and networks' own scripts state where tables do not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import LayeredNetwork, TransformerShape
from planner.published.reading import MeasuredRow, read_measurements
from planner.published.source_rules import CHOSEN_TO_FIT
from tests.measurements import write_measurements

LAMBDA = {
    "source": "lambdal/deeplearning-benchmark", "framework": "PyTorch (NVIDIA DeepLearningExamples)", "arch": "",
    "n_layers": "", "hidden": "", "n_heads": "", "vocab": "", "seq_len": "", "global_batch": "", "micro_batch": "",
    "tp": "", "pp": "", "n_accels": "1", "optimizer_sharding": "", "recompute_kind": "", "step_time_s": "",
    "samples_per_s": "1000", "attention_impl": "", "sequence_parallel": "",
}  # fmt: skip


def read_one(tmp_path: Path, **changes: str) -> MeasuredRow:
    return read_measurements(write_measurements(tmp_path / "m.csv", changes))[0]


@pytest.mark.parametrize(
    ("model", "precision", "device", "memory", "batch"),
    [
        ("gnmt", "fp16 AMP", "A100 80GB SXM4", "80", 1520),
        ("gnmt", "fp32", "A100 80GB SXM4", "80", 1024),
        ("gnmt", "fp16 AMP", "LambdaCloud V100 16GB", "", 256),
        ("bert_large_squad", "fp16 AMP", "A100 40GB PCIe", "40", 48),
    ],
)
def test_a_suite_chooses_batches_by_memory(
    tmp_path: Path, model: str, precision: str, device: str, memory: str, batch: int
) -> None:
    row = {**LAMBDA, "model": model, "precision": precision, "accelerator": device}
    row["precision_kind"] = precision[:4]
    run = read_one(tmp_path, **row, accel_mem_gb=memory).run
    assert run is not None
    assert (run.setup.micro_batch, run.setup.micro_batches) == (batch, 1)
    assert any("batch not stated" in note for note in run.assumed)
    assert CHOSEN_TO_FIT in run.assumed


def test_flagperf_takes_its_configurations_batch_where_no_parameter_is_changed(tmp_path: Path) -> None:
    row = {**LAMBDA, "source": "FlagOpen/FlagPerf", "framework": "pytorch", "precision": "fp32", "accelerator": "A100"}
    usual, changed = (read_one(tmp_path, **row, model="resnet50", per_accel_batch=batch).run for batch in ("", "256"))
    assert usual is not None
    assert changed is not None
    assert (usual.setup.micro_batch, changed.setup.micro_batch) == (32, 256)
    assert usual.setup.untuned_convolutions
    others = read_one(tmp_path, **{**row, "source": "made"}, model="resnet50", per_accel_batch="256").run
    assert others is not None
    assert not others.setup.untuned_convolutions


@pytest.mark.parametrize(
    ("framework", "size"), [("TensorFlow2", (416, 672)), ("PyTorch", (400, 608))]
)  # a half of the image, after the stem
def test_images_of_mask_r_cnn_are_padded_in_tensorflow(tmp_path: Path, framework: str, size: tuple[int, int]) -> None:
    row = {**LAMBDA, "source": "NVIDIA/DeepLearningExamples", "framework": framework, "precision": "FP32"}
    read = read_one(tmp_path, **row, model="Segmentation/MaskRCNN", accelerator="V100", per_accel_batch="4")
    assert read.run is not None
    assert isinstance(read.run.network, LayeredNetwork)
    assert read.run.network.layers[0].m == size[0] * size[1]


@pytest.mark.parametrize(
    ("model", "source", "early"),
    [("tacotron2", "lambdal/deeplearning-benchmark", True), ("waveglow", "lambdal/deeplearning-benchmark", True),
     ("resnet50", "lambdal/deeplearning-benchmark", False), ("tacotron2", "made", False)],
)  # fmt: skip
def test_a_script_that_reads_its_loss_early_waits_between_the_passes(
    tmp_path: Path, model: str, source: str, early: bool
) -> None:
    row = {**LAMBDA, "source": source, "model": model, "precision": "fp32", "accelerator": "A100 80GB SXM4"}
    run = read_one(tmp_path, **row, per_accel_batch="32").run
    assert run is not None
    assert run.setup.early_loss == early


@pytest.mark.parametrize(("model", "kind"), [("waveglow", "tf32"), ("tacotron2", "tf32"), ("resnet50", "fp16")])
def test_a_flag_that_nothing_reads_changes_no_precision(tmp_path: Path, model: str, kind: str) -> None:
    row = {**LAMBDA, "model": model, "precision": "fp16 AMP", "precision_kind": "fp16", "accelerator": "A100 80GB SXM4"}
    run = read_one(tmp_path, **row).run
    assert run is not None
    assert run.setup.precision == kind


@pytest.mark.parametrize(
    ("model", "devices", "compared"),
    [("tacotron2", "8", False), ("tacotron2", "4", True), ("tacotron2", "1", True), ("waveglow", "8", True)],
)
def test_the_first_steps_of_a_run_are_no_measurement(tmp_path: Path, model: str, devices: str, compared: bool) -> None:
    row = {**LAMBDA, "model": model, "precision": "fp32", "accelerator": "A100 80GB SXM4", "n_accels": devices}
    read = read_one(tmp_path, **row, accel_mem_gb="80")
    assert read.run is not None
    assert math.isfinite(read.measured_time_s) == compared
    assert ("time not compared" in read.reason) != compared


@pytest.mark.parametrize(
    ("date", "text", "kernel"),
    [
        ("2023-07-21", "flash (attn_impl default; not stated per row)", AttentionKernel.FLASH),
        ("2024-01-06", "flash (attn_impl default; not stated per row)", AttentionKernel.FLASH),
        ("2024-06-01", "flash (attn_impl default; not stated per row)", AttentionKernel.FLASH2),
        ("2024-01-06", "flash_attention2", AttentionKernel.FLASH2),
    ],
)
def test_llm_foundry_takes_flash_attention_in_triton_unless_told(
    tmp_path: Path, date: str, text: str, kernel: AttentionKernel
) -> None:
    changes = {"framework": "llm-foundry/Composer PyTorch FSDP", "measured_date": date, "attention_impl": text}
    run = read_one(tmp_path, **changes).run
    assert run is not None
    assert run.setup.attention is kernel
    assert not run.setup.packed_attention


@pytest.mark.parametrize(
    ("framework", "date", "stack", "ahead"),
    [
        ("Megatron + DeepSpeed ZeRO-3", "2021-05", Stack.DEEPSPEED, False),
        ("HF Trainer + DeepSpeed ZeRO-3", "2021-05", Stack.EAGER, False),
        ("Megatron + DeepSpeed ZeRO-3", "2023-05", Stack.DEEPSPEED, True),
        ("HF Trainer + DeepSpeed ZeRO-3", "2023-05", Stack.EAGER, True),
    ],
)
def test_early_deepspeed_gathers_parameters_one_at_a_time(
    tmp_path: Path, framework: str, date: str, stack: Stack, ahead: bool
) -> None:
    changes = {"framework": framework, "measured_date": date, "optimizer_sharding": "zero3", "tp": "1", "pp": "1"}
    run = read_one(tmp_path, **changes, sequence_parallel="false").run
    assert run is not None
    assert (run.setup.stack, run.setup.overlap_parameters) == (stack, ahead)


@pytest.mark.parametrize(("kind", "sharding"), [("bf16", "zero1"), ("fp16", "none")])
def test_deepspeed_shards_its_optimizer_for_bfloat16(tmp_path: Path, kind: str, sharding: str) -> None:
    changes = {"framework": "Megatron-DeepSpeed", "precision": kind, "precision_kind": kind, "optimizer_sharding": ""}
    run = read_one(tmp_path, **changes).run
    assert run is not None
    assert run.setup.optimizer_sharding == sharding


VISION = {**LAMBDA, "source": "made", "per_accel_batch": "32", "accelerator": "Ascend 910", "accel_mem_gb": "32"}


def _flops(run: MeasuredRow) -> float:
    assert run.run is not None
    assert isinstance(run.run.network, LayeredNetwork)
    return sum(layer.flops * layer.count for layer in run.run.network.layers)


def test_mindspore_enlarges_small_images(tmp_path: Path) -> None:
    notes = "dataset CIFAR-10"
    enlarged = read_one(tmp_path, **VISION | {"model": "resnet50", "notes": notes, "framework": "MindSpore 1.3.0"})
    small = read_one(tmp_path, **VISION | {"model": "resnet50", "notes": notes, "framework": "PyTorch"})
    assert _flops(enlarged) > 20 * _flops(small)


@pytest.mark.parametrize(
    ("model", "notes", "missing"),
    [("ResNet_V1_101", "dataset COCO2017", "backbone"), ("efficientnet_v1", "", "no description")],
)
def test_a_name_that_leaves_the_network_open_is_a_missing_fact(
    tmp_path: Path, model: str, notes: str, missing: str
) -> None:
    row = read_one(tmp_path, **VISION | {"model": model, "notes": notes, "framework": "MindSpore 1.3.0"})
    assert row.run is None
    assert missing in row.reason


@pytest.mark.parametrize(
    ("source", "accelerator", "stated", "memory_gb"),
    [
        ("FlagOpen/FlagPerf", "A100", "", 40),
        ("FlagOpen/FlagPerf", "A100", "80", 80),
        ("FlagOpen/FlagPerf", "H100", "", 80),
        ("another suite", "A100", "", 80),
    ],
)
def test_a_suite_states_the_memory_of_its_machines(
    tmp_path: Path, source: str, accelerator: str, stated: str, memory_gb: int
) -> None:
    run = read_one(tmp_path, source=source, accelerator=accelerator, hw="", accel_mem_gb=stated).run
    assert run is not None
    assert run.hardware.device_memory_bytes == pytest.approx(memory_gb * 2**30, rel=0.06)
    assert any("as the suite says" in note for note in run.assumed) == (memory_gb == 40)


@pytest.mark.parametrize(
    ("changes", "eager"),
    [
        ({"framework": "pytorch"}, True),
        ({"framework": "deepspeed"}, False),
        ({"framework": "pytorch", "accelerator": "H100"}, False),
        ({"framework": "pytorch", "source": "another suite"}, False),
    ],
)
def test_a_suite_states_how_old_its_software_is(tmp_path: Path, changes: dict[str, str], eager: bool) -> None:
    row = {"source": "FlagOpen/FlagPerf", "accelerator": "A100", "hw": "", "measured_date": "", **changes}
    run = read_one(tmp_path, **row).run
    assert run is not None
    assert run.setup.eager_kernels == eager


@pytest.mark.parametrize(
    ("model", "framework", "trained"),
    [
        ("tune_llama2_tp8_pp1_ptd", "MindSpeed-LLM CI", 0.005),
        ("tune_qwen7b_tp8_pp1_full_ptd", "MindSpeed-LLM CI", 1.0),
        ("tune_llama2_tp8_pp1_ptd", "Megatron-LM", 1.0),
    ],
)
def test_a_suites_list_says_which_of_its_tests_train_adapters(
    tmp_path: Path, model: str, framework: str, trained: float
) -> None:
    run = read_one(tmp_path, model=model, framework=framework).run
    assert run
    assert run.setup.trained_fraction == trained


EXAMPLE = {**LAMBDA, "source": "NVIDIA/DeepLearningExamples", "framework": "PyTorch"}
RECIPE = {
    **LAMBDA, "source": "mindspore-lab/mindcv", "framework": "MindSpore", "arch": "image classification/seg/det",
    "accelerator": "Ascend 910", "precision": "amp (O2/O3; see recipe)", "precision_kind": "fp16", "micro_batch": "32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "framework", "precision", "memory", "batch", "stack"),
    [
        ("Classification/ConvNets/resnet50v1.5", "PyTorch", "TF32", "80", 256, Stack.CHANNELS_LAST),
        ("Classification/ConvNets/resnet50v1.5", "PyTorch", "FP32", "16", 112, Stack.CHANNELS_LAST),
        ("Classification/ConvNets/se-resnext101-32x4d", "PyTorch", "mixed (AMP fp16)", "16", 112, Stack.CHANNELS_LAST),
        ("ConvNets resnext101-32x4d", "PyTorch", "mixed (AMP fp16)", "80", 128, Stack.CHANNELS_LAST),
        ("ConvNets efficientnet-widese-b4", "PyTorch", "FP32", "16", 16, Stack.CHANNELS_LAST),
        ("Detection/Efficientdet", "PyTorch", "mixed (AMP fp16)", "80", 150, Stack.EAGER),
        ("Detection/Efficientdet", "TensorFlow2", "TF32", "80", 104, Stack.TENSORFLOW),
    ],
)
def test_the_scripts_of_an_example_state_its_batch_and_its_layout(
    tmp_path: Path, model: str, framework: str, precision: str, memory: str, batch: int, stack: Stack
) -> None:
    device = "V100" if memory == "16" else "A100"
    arch = "Detection" if "det" in model else "Classification"
    row = {**EXAMPLE, "model": model, "arch": arch, "framework": framework}
    row |= {"precision": precision, "precision_kind": "", "accelerator": device, "accel_mem_gb": memory}
    run = read_one(tmp_path, **row).run
    assert run is not None
    assert (run.setup.micro_batch, run.setup.stack) == (batch, stack)


@pytest.mark.parametrize(
    ("source", "model", "precision", "sample"),
    [
        ("mindspore-lab/mindcv", "bit_resnet50", "fp32", "image"),
        ("mindspore-lab/mindcv", "inception_v3", "fp32", "policy image"),
        ("mindspore-lab/mindcv", "efficientnet_b0", "fp16", "policy image"),
        ("mindspore-lab/mindcv", "resnet50", "fp16", "image"),
        ("mindspore-ai/models official/benchmark.md", "efficientnet_b0", "fp16", "policy image"),
        ("mindspore-ai/models official/benchmark.md", "inceptionv3", "fp16", "image"),
        ("mindspore-ai/models official/benchmark.md", "pvt_tiny", "fp16", "bicubic augmented image"),
        ("mindspore-lab/mindcv", "pvt_v2_b0", "fp16", "noisy augmented image"),
        ("mindspore-lab/mindcv", "poolformer_s12", "fp16", "augmented image"),
        ("mindspore-ai/models README", "vit_b_16", "fp16", "augmented image"),
        ("FlagOpen/FlagPerf", "swin_transformer", "fp16", "noisy augmented image"),
        ("mindspore-ai/models official/benchmark.md", "bit_resnet50", "fp16", "image"),
    ],
)
def test_a_recipe_states_precision_and_augmentation(
    tmp_path: Path, source: str, model: str, precision: str, sample: str
) -> None:
    run = read_one(tmp_path, **{**RECIPE, "source": source, "model": model}).run
    assert run is not None
    assert isinstance(run.network, LayeredNetwork)
    assert (run.setup.precision, run.network.sample) == (precision, sample)


def test_a_recipe_is_found_by_the_network_where_the_row_names_none(tmp_path: Path) -> None:
    run = read_one(tmp_path, **{**RECIPE, "model": "", "params_b": "0.02716"}).run
    assert run is not None
    assert (run.network.name, run.setup.precision) == ("inception_v3", "fp32")


def test_a_script_states_the_patches_of_a_transformer(tmp_path: Path) -> None:
    row = {**RECIPE, "source": "mindspore-ai/models README performance tables", "precision": "", "model": "vit"}
    named, other = read_one(tmp_path, **row).run, read_one(tmp_path, **{**row, "source": "another table"}).run
    assert named is not None
    assert other is not None
    assert named.network.name == "vit_base_patch32"
    assert other.network.name == "vit"


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({"source": "NVIDIA/DeepLearningExamples", "model": "Segmentation/VNet", "framework": "TensorFlow"}, True),
        (
            {
                "source": "NVIDIA/DeepLearningExamples",
                "model": "Classification/ConvNets/resnet50v1.5",
                "framework": "TensorFlow",
            },
            False,
        ),
        ({"source": "FlagOpen/FlagPerf", "model": "resnet50", "framework": "tensorflow2"}, True),
        ({"source": "FlagOpen/FlagPerf", "model": "resnet50", "framework": "pytorch"}, False),
    ],
)
def test_scripts_say_whether_they_ask_for_xla(tmp_path: Path, changes: dict[str, str], plain: bool) -> None:
    run = read_one(tmp_path, **{**LAMBDA, **changes}, accelerator="A100", accel_mem_gb="80", per_accel_batch="16").run
    assert run is not None
    assert run.setup.plain_graph == plain


@pytest.mark.parametrize(
    ("accelerator", "devices", "rate"),
    [
        ("A100 80GB SXM4", "2", 0.32 * 31.5e9),
        ("V100 16GB", "8", 0.32 * 15.75e9),
        ("H100 80GB SXM5", "8", 0.32 * 63e9),
        ("A100 80GB SXM4", "1", None),
    ],
)
def test_a_suite_sends_messages_through_the_host(
    tmp_path: Path, accelerator: str, devices: str, rate: float | None
) -> None:
    changes = {**LAMBDA, "model": "gnmt", "precision": "fp32", "precision_kind": "fp32", "n_accels": devices}
    through_host = read_one(tmp_path, **changes, accelerator=accelerator).run
    assert through_host is not None
    inner = through_host.hardware.levels[0].bandwidth_bytes_per_s
    assert inner == pytest.approx(rate) if rate else inner > 1e11


@pytest.mark.parametrize(
    ("accelerator", "dp", "tp", "plan", "seconds"),
    [
        ("Ascend 910B (64GB)", "4", "8", (8, 8, 1, 2), 16 * 2048 / (1376 * 8)),
        ("Ascend 910B (64GB)", "32", "1", (32, 32, 1, 1), 0.37),
        ("Ascend 910A (32GB)", "4", "8", (32, 4, 8, 1), 0.37),
    ],
)
def test_a_plan_for_other_devices_gives_way_to_that_of_the_device(
    tmp_path: Path, accelerator: str, dp: str, tp: str, plan: tuple[int, ...], seconds: float
) -> None:
    row = {"source": "MindFormers model cards", "framework": "MindFormers/MindSpore", "model": "gpt2_13b", "hw": ""}
    row |= {"n_layers": "40", "hidden": "5120", "n_heads": "40", "accelerator": accelerator, "n_accels": "32"}
    row |= {"seq_len": "2048", "tokens_per_s_per_gpu": "1376", "step_time_s": "0.37"}
    read = read_one(tmp_path, **row, dp=dp, tp=tp, pp="1", global_batch="32", micro_batch="")
    assert read.run is not None
    setup = read.run.setup
    assert (setup.devices, setup.dp, setup.tp, setup.micro_batch) == plan
    assert read.measured_time_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("framework", "table", "model", "window"),
    [
        ("MindSpeed-LLM (mcore)", "full-parameter SFT packed", "LLaMA2-7B", 320),
        ("MindSpeed-LLM CI", "baseline json", "tune_qwen25_0point5b_tp1_pp1_pack", 320),
        ("MindSpeed-LLM (mcore)", "full-parameter SFT", "LLaMA2-7B", 0),
        ("Megatron-LM", "full-parameter SFT packed", "LLaMA2-7B", 0),
    ],
)
def test_attention_keeps_to_the_samples_that_mindspeed_packs(
    tmp_path: Path, framework: str, table: str, model: str, window: int
) -> None:
    row = {"framework": framework, "source_table": table, "model": model, "seq_len": "32768", "global_batch": "64"}
    run = read_one(tmp_path, **row, accelerator="Ascend 910B (64GB)", hw="Atlas 900 A2 PODc").run
    assert run is not None
    assert isinstance(run.network, TransformerShape)
    assert (run.network.sequence_length, run.network.attention_window) == (32768, window)


@pytest.mark.parametrize(("model", "compared"), [("shufflenet_v2_x2_0", False), ("shufflenet_v1_g3_x1_5", True)])
def test_a_time_that_a_table_repeats_for_other_networks_is_no_measurement(
    tmp_path: Path, model: str, compared: bool
) -> None:
    row = {**LAMBDA, "source": "mindspore-ai/models official/benchmark.md", "framework": "MindSpore", "model": model}
    row |= {"accelerator": "Ascend 910", "precision": "amp O0", "precision_kind": "fp16", "n_accels": "8"}
    row |= {"per_accel_batch": "64", "global_batch": "512", "step_time_s": "0.2678", "samples_per_s": ""}
    read = read_one(tmp_path, **row)
    assert read.run is not None
    assert math.isfinite(read.measured_time_s) == compared
    assert ("time not compared" in read.reason) != compared


@pytest.mark.parametrize(("date", "engine"), [("2023-07-17", False), ("2024-10-26", True), ("", True)])
def test_mindspore_hands_graphs_to_an_engine_from_its_release_of_october_2023(
    tmp_path: Path, date: str, engine: bool
) -> None:
    row = {**LAMBDA, "source": "mindspore-ai/models official/benchmark.md", "framework": "MindSpore"}
    row |= {"accelerator": "Ascend 910", "precision": "amp O2", "precision_kind": "fp16", "per_accel_batch": "64"}
    run = read_one(tmp_path, **row, model="regnet_y_200mf", measured_date=date).run
    assert run is not None
    assert run.setup.graph_engine == engine


@pytest.mark.parametrize(
    ("source", "model", "precision", "kind"),
    [
        ("mindspore-lab/mindyolo", "YOLOv8-S", "amp (O2/O3; see recipe)", "fp32"),
        ("mindspore-lab/mindyolo", "YOLOv5-X6", "amp (O2/O3; see recipe)", "fp32"),
        ("mindspore-lab/mindyolo", "YOLOv5-M6", "amp (O2/O3; see recipe)", "fp16"),
        ("mindspore-lab/mindyolo", "YOLOX-S", "amp O2", "fp16"),
        ("mindspore-lab/mindcv", "bit_resnet50", "amp (O2/O3; see recipe)", "fp32"),
        ("mindspore-lab/mindcv", "resnet50", "amp (O2/O3; see recipe)", "fp16"),
    ],
)
def test_recipes_that_ask_for_no_mixed_precision_keep_float32(
    tmp_path: Path, source: str, model: str, precision: str, kind: str
) -> None:
    row = {**LAMBDA, "source": source, "framework": "MindSpore", "model": model, "per_accel_batch": "8"}
    row |= {"accelerator": "Ascend 910", "precision": precision, "precision_kind": "fp16"}
    run = read_one(tmp_path, **row).run
    assert run is not None
    assert run.setup.precision == kind
