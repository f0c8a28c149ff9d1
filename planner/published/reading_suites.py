"""What benchmark suites state in their scripts and not in their tables: batches, and flags that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from planner.published.measurement_file import FileRow

CHOSEN_TO_FIT = "the suite chose its batches so that they fit"
"""Note on a run whose batch was taken from its suite: it did not run out of memory, whatever is predicted."""
_MEMORIES_GB = (16, 24, 40, 48, 80)
_HALF: Mapping[str, tuple[int, ...]] = {
    "ssd": (96, 140, 224, 256, 448),
    "bert_base": (48, 96, 160, 192, 320),
    "bert_large": (16, 28, 48, 64, 112),
    "gnmt": (256, 464, 800, 968, 1520),
    "resnet50": (256, 448, 720, 928, 1280),
    "tacotron2": (48, 88, 144, 148, 256),
    "waveglow": (8, 18, 24, 32, 48),
}
_SINGLE: Mapping[str, tuple[int, ...]] = {
    "ssd": (48, 80, 128, 144, 256),
    "bert_base": (24, 48, 80, 96, 172),
    "bert_large": (8, 16, 28, 32, 64),
    "gnmt": (128, 288, 512, 576, 1024),
    "resnet50": (128, 224, 360, 496, 640),
    "tacotron2": (48, 88, 144, 136, 256),
    "waveglow": (8, 18, 24, 32, 32),
}
"""Samples a device in Lambda's suite by the device's memory: its configurations are chosen by memory
(github.com/lambdal/deeplearning-benchmark, ``pytorch/pytorch-train-bs-fp16.csv`` and ``-fp32.csv``)."""

_EXAMPLES: tuple[tuple[str, str, Mapping[int, tuple[int, int]]], ...] = (
    (r"(?<!ne)resnet50", "pytorch", {16: (256, 112), 32: (256, 112), 80: (256, 256)}),
    (r"se-?resnext101", "pytorch", {16: (112, 64), 32: (112, 64), 80: (128, 128)}),
    (r"resnext101", "pytorch", {16: (128, 64), 32: (128, 64), 80: (128, 128)}),
    (r"efficientnet-(?:widese-)?b0", "pytorch", {16: (128, 64), 32: (256, 128), 80: (256, 256)}),
    (r"efficientnet-(?:widese-)?b4", "pytorch", {16: (32, 16), 32: (64, 32), 80: (128, 64)}),
    (r"efficientdet", "pytorch", {80: (150, 80)}),
    (r"efficientdet", "tensorflow2", {80: (200, 104)}),
)
"""Samples a device in half and in single precision by the memory of the device, as NVIDIA's examples are run
(``PyTorch/Classification/ConvNets/configs.yml`` and ``*/Detection/Efficientdet/scripts/D0`` of
github.com/NVIDIA/DeepLearningExamples)."""
_FLAGPERF_RESNET = 32
_FP32_DIGITS = 32
_CLIPS = 2500
"""``filelists/ljs_audio_text_train_subset_2500_filelist.txt``, the longest of Lambda's lists."""
_LOCAL_SHARE = 0.375
_TUNING_ADAPTERS = frozenset({"tune_llama2_tp8_pp1_ptd"})
"""MindSpeed-LLM's tests that its list of tests names under LoRA, while their own names and flags do not
(``tests/README.md`` of ModelLink 2.0)."""


def is_lambda(row: FileRow) -> bool:
    """Whether a row is of Lambda's suite, which runs NVIDIA's examples."""
    return "lambdal/" in row.text("source").lower()


def suite_memory_gb(row: FileRow) -> float | None:
    """Memory of a device that a suite says of its machines and not of its rows; None where none says.

    FlagPerf's NVIDIA A100 is that of a DGX A100 with 40 GB (github.com/FlagOpen/FlagPerf,
    ``training/nvidia/*/README.md``).
    """
    return 40.0 if is_flagperf(row) and re.search(r"\ba100", row.text("accelerator").lower()) else None


def suite_release(row: FileRow) -> float:
    """When the software of a suite was released, as a year with its part, 0 where its pages do not say.

    FlagPerf's image networks ran on A100 in the container of PyTorch 1.8.0a0 (``training/nvidia/*-pytorch/README.md``).
    """
    flagperf = is_flagperf(row) and row.text("framework").lower() == "pytorch"
    return 2020 + 11 / 12 if flagperf and re.search(r"\ba100", row.text("accelerator").lower()) else 0.0


def suite_batch(row: FileRow, memory_bytes: float) -> int | None:
    """Samples a device that the suite's configuration for a device with so much memory takes; None where none says.

    Parameters
    ----------
    memory_bytes
        Memory of the device; the configuration is the one for the nearest size.
    """
    if not is_lambda(row):
        return _flagperf_batch(row) or _example_batch(row, memory_bytes)
    batches = _HALF if "16" in row.text("precision") else _SINGLE
    model = row.text("model").lower()
    known = next((known for name, known in batches.items() if model.startswith(name)), None)
    nearest = min(range(len(_MEMORIES_GB)), key=lambda place: abs(_MEMORIES_GB[place] * 1e9 - memory_bytes))
    return known[nearest] if known else None


def _flagperf_batch(row: FileRow) -> int | None:
    """Samples a device in FlagPerf where a row changes none of the parameters that its configurations allow to.

    ResNet-50 for PyTorch takes 32 (``training/nvidia/resnet50-pytorch/config/config_A100x1x8.py``).
    """
    return _FLAGPERF_RESNET if _flagperf_resnet(row) else None


def _flagperf_resnet(row: FileRow) -> bool:
    return is_flagperf(row) and row.text("framework").lower() == "pytorch" and row.text("model").lower() == "resnet50"


def is_example(row: FileRow) -> bool:
    """Whether a row is of NVIDIA's own runs of its examples."""
    return "nvidia/deeplearningexamples" in row.text("source").lower()


def _example_batch(row: FileRow, memory_bytes: float) -> int | None:
    """Samples a device as the scripts of NVIDIA's examples have it; None where they do not say."""
    if not is_example(row):
        return None
    model, framework = row.text("model").lower(), row.text("framework").lower()
    half = bool(re.search(r"16|amp", row.text("precision").lower()))
    for name, software, batches in _EXAMPLES:
        if framework == software and re.search(name, model):
            nearest = min(batches, key=lambda size: abs(size * 1e9 - memory_bytes))
            return batches[nearest][0 if half else 1]
    return None


def misread_batch(row: FileRow) -> bool:
    """Whether a batch of 32 is a precision's: TensorFlow's classification prints ``128 (FP32) / 256 (AMP)`` on V100.

    So do the tables of SE-ResNeXt, with 64 and 96 (``TensorFlow/Classification/ConvNets/*/README.md`` of NVIDIA's
    examples). The batch of mixed precision is not 32 then, nor the time of a step that was worked out with it.
    """
    return (
        is_example(row)
        and row.text("framework").lower() == "tensorflow"
        and bool(re.search(r"classification/.*resnet50|se-?resnext101", row.text("model").lower()))
        and "v100" in row.text("accelerator").lower()
        and bool(re.search(r"16|amp", row.text("precision").lower()))
        and row.whole("per_accel_batch") == _FP32_DIGITS
    )


def without_xla(row: FileRow) -> bool:
    """Whether a network of TensorFlow runs without XLA.

    NVIDIA's benchmarks of V-Net do not ask for it (``VNet/examples/vnet_benchmark.py``), those of the other networks
    do; FlagPerf's runtime does not (``training/nvidia/resnet50-tensorflow2/config``).
    """
    flagperf = is_flagperf(row) and "tensorflow" in row.text("framework").lower()
    return flagperf or (is_example(row) and bool(re.search(r"/vnet\b", row.text("model").lower())))


def messages_through_host(row: FileRow) -> bool:
    """Whether devices of a node send through its memory: Lambda's script says ``export NCCL_P2P_DISABLE=1``.

    (``pytorch/scripts/benchmark_pytorch.sh``, in front of every run of several devices.)
    """
    return is_lambda(row) and (row.whole("n_accels") or 1) > 1


def keeps_planes(row: FileRow) -> bool:
    """Whether an example for PyTorch leaves images in planes in half precision as well.

    The scripts of EfficientDet say ``--memory-format nchw``, those of classification ``nhwc``.
    """
    return is_example(row) and "efficientdet" in row.text("model").lower()


def mixed_precision_ignored(row: FileRow) -> bool:
    """Whether a run that asks for mixed precision does without.

    Lambda's configurations of Tacotron 2 and WaveGlow say ``--amp-run``. NVIDIA's script has renamed that to ``--amp``
    and ignores what it does not know (``parse_known_args``): both are trained in single precision.
    """
    return is_lambda(row) and bool(re.match(r"tacotron2|waveglow", row.text("model").lower()))


def tunes_nothing(row: FileRow) -> bool:
    """Whether cuDNN takes reproducible kernels and tries none out.

    FlagPerf's ResNet-50 for PyTorch says ``cudnn_benchmark: bool = False`` and ``cudnn_deterministic: bool = True``
    (``training/benchmarks/resnet50/pytorch/config/_base.py``).
    """
    return _flagperf_resnet(row)


def reads_loss_early(row: FileRow) -> bool:
    """Whether a script reads the loss, and so waits for the device, between the forward and the backward pass.

    So does that of Tacotron 2 and WaveGlow (``reduced_loss = loss.item()`` before ``loss.backward()`` in
    ``PyTorch/SpeechSynthesis/Tacotron2/train.py`` of NVIDIA's examples, which Lambda runs).
    """
    return (is_lambda(row) or is_example(row)) and bool(re.match(r"tacotron2|waveglow", row.text("model").lower()))


def starting_up(row: FileRow, devices: int, batch: int) -> bool:
    """Whether a row tells how long the second or third step of a process took, before the steps are alike.

    Lambda trains Tacotron 2 on at most 2,500 clips, twice or three times, and prints the rate of the last pass. On
    eight devices with 256 clips each it is one step: its log of eight A100 has 35.9, 6.4 and 4.5 s one after the
    other, that of one A100 2.5 s (``pytorch/results/8xA100_80GB_SXM4_v1`` and ``A100_80GB_SXM4_v1``).
    """
    return is_lambda(row) and row.text("model").lower().startswith("tacotron2") and 2 * devices * batch > _CLIPS


def is_flagperf(row: FileRow) -> bool:
    """Whether a row is of FlagPerf (github.com/FlagOpen/FlagPerf)."""
    return "flagperf" in row.text("source").lower()


def is_mindcv(row: FileRow) -> bool:
    """Whether a row is of MindCV, whose recipes are ``configs/*/*_ascend.yaml`` of github.com/mindspore-lab/mindcv."""
    return "mindspore-lab/mindcv" in row.text("source").lower()


def recipe_in_single(row: FileRow, network: str) -> bool:
    """Whether the recipe of a network keeps float32 and the row leaves it to the recipe.

    MindCV's say so (``amp_level: 'O0'``). MindYOLO's ``train.py`` does so unless told otherwise (``--ms_amp_level``,
    ``default="O0"``), which of its recipes those of YOLOv5 do, but not of its largest.
    """
    if "see recipe" not in row.text("precision").lower():
        return False
    if "mindyolo" in row.text("source").lower():
        return not re.match(r"yolov5_?[nsml]", network)
    return is_mindcv(row) and bool(re.match(r"bit_?resnet|inception_?v3|repvgg_a", network))


_NOISY = r"pit_|pvt_v2|convnext|rexnet"
_BICUBIC = r"crossvit|resnest|swin|pvt|vit|cait"
"""Networks whose images MindCV's recipes resize by bicubic interpolation (``interpolation: 'bicubic'``) before random
rules, and those of them that also erase with noise (``re_value: 'random'``)."""


def recipe_sample(row: FileRow, network: str, sample: str) -> str:
    """Kind of sample by the recipe of a network, MindCV's or FlagPerf's, else `sample`.

    EfficientNets and Inceptions take AutoAugment's policy for each image (``auto_augment: 'autoaug'``) and mix none;
    MindSpore's own table of 2023 has the former from MindCV, the latter not. Random rules are told apart by what else
    the recipe does to an image. FlagPerf's Swin Transformer resizes bicubically and erases with noise
    (``data_interpolation`` and ``aug_remode`` of ``training/benchmarks/swin_transformer/pytorch/config/_base.py``).
    """
    own = "official/benchmark" in row.text("source").lower()
    learnt = network.startswith("efficientnet") if own else is_mindcv(row) and re.match(r"efficientnet|incep", network)
    if learnt:
        return "policy image"
    if is_flagperf(row) and network.startswith("swin"):
        return "noisy augmented image"
    if sample == "augmented image" and (own or is_mindcv(row)):
        kind = "noisy " if re.match(_NOISY, network) else "bicubic " if re.match(_BICUBIC, network) else ""
        return kind + sample
    return sample


def published_name(row: FileRow) -> str:
    """The network's name, with what scripts add to it.

    ViT of MindSpore's models takes patches of 32 pixels (``official/cv/VIT/config/vit_patch32_*.yml``). TensorFlow's
    Mask R-CNN of NVIDIA's examples pads all images to 832 by 1,344 (``image_size`` of
    ``TensorFlow2/Segmentation/MaskRCNN/mrcnn_tf2/config.py``).
    """
    name = row.text("model")
    if is_example(row) and "tensorflow" in row.text("framework").lower() and name.lower().endswith("maskrcnn"):
        return f"{name}_832x1344"
    plain = name.lower() == "vit" and "mindspore-ai/models" in row.text("source").lower()
    return "vit_base_patch32" if plain else name


def trains_adapters(row: FileRow) -> bool:
    """Whether a suite's list of tests says that a row trains adapters alone, where the row does not."""
    return "mindspeed" in row.text("framework").lower() and row.text("model").lower() in _TUNING_ADAPTERS


def local_share(row: FileRow) -> float:
    """Share of the layers that LU-LoRA trains locally: what MindSpeed-LLM's documentation recommends.

    That is 37.5 %, and what its script sets: the first 12 of 32 layers (``--lu-lora-final-layer-index 11``).
    """
    words = f"{row.text('model')} {row.text('other_flags')}".lower()
    return _LOCAL_SHARE if re.search(r"lu[-_]lora", words) else 0.0


def flagperf_llama(row: FileRow) -> bool:
    """Whether a row is FlagPerf's LLaMA under DeepSpeed: ZeRO-3 and FlashAttention 2 (``ds_config.json``, README)."""
    return is_flagperf(row) and row.text("framework").lower() == "deepspeed" and "llama" in row.text("model").lower()


def packs_samples(row: FileRow) -> bool:
    """Whether short samples fill a row of tokens and attention keeps to each of them.

    MindSpeed-LLM's scripts of packed tuning say ``--reset-position-ids`` (``tune_llama2_7b_full_pack_32k.sh``), by
    which its trainer hands the lengths of the samples to the attention kernel (``generate_actual_seq_len`` in
    ``tasks/posttrain/sft/sft_trainer.py``).
    """
    words = f"{row.text('source_table')} {row.text('model')}".lower()
    return "mindspeed" in row.text("framework").lower() and bool(re.search(r"packed|tune_.*_pack(?:_|$)", words))


def copied_time(row: FileRow) -> bool:
    """Whether a table repeats the time of another network.

    MindSpore's ``official/benchmark.md`` of 2023 gives all ShuffleNets of version 2 the times and the accuracies
    (57.05 and 67.77 %) of two of version 1.
    """
    return "official/benchmark" in row.text("source").lower() and row.text("model").lower().startswith("shufflenet_v2")


_OWN_CONFIGURATION = {"n_accels": 8.0, "dp": 8.0, "tp": 1.0, "micro_batch": 2.0, "global_batch": 16.0}
"""``configs/gpt2/run_gpt2_13b_910b.yaml`` of MindFormers, whose device has 59 GB."""


def as_configured(row: FileRow) -> FileRow:
    """The row with the plan of its own device, where it has that of a configuration for another one.

    MindFormers' rows have their plans from configurations. That of GPT-2 13B which they name has four replicas of eight
    devices of 32 GB (``configs/gpt2/run_gpt2_13b.yaml``: ``max_device_memory: "30GB"``); there is one for 910B. Its
    rows state tokens a second; the time of a step was worked out with the other plan.
    """
    foreign = (
        "mindformers" in row.text("source").lower()
        and row.text("model").lower() == "gpt2_13b"
        and "910b" in row.text("accelerator").lower()
        and (row.whole("dp"), row.whole("tp")) == (4, 8)
    )
    if not foreign:
        return row
    stated = {name: value for name, value in row.numbers.items() if name not in ("step_time_s", "samples_per_s")}
    texts = {name: f"{value:g}" for name, value in _OWN_CONFIGURATION.items()}
    return replace(row, numbers=stated | _OWN_CONFIGURATION, texts={**row.texts, **texts})
