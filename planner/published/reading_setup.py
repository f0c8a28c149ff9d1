"""From a measurement row to the words of a training setup: precision, software, kernels, what is kept and shared."""

from __future__ import annotations

import re

from planner.cost.memory.states import usual_gradient_bytes
from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import NOVOGRAD, LayeredNetwork, OptimizerSharding, Recompute, TransformerShape
from planner.published.measurement_file import FileRow
from planner.published.reading_memory import (
    cumulative,
    long_term_support,
    recomputed_modules,
    torchtune_recipe,
    whole_on_one_device,
)
from planner.published.source_rules import stated

Network = TransformerShape | LayeredNetwork
FROZEN_TRAINED_FRACTION = 0.005
"""Low-rank adapters of rank 8 to 32 hold some 0.1 to 1 % of a network's weights."""
SIMULATORS_DEFAULT = "recomputation stated by a simulator alone: where one sample does not fit a device without"
"""Note on a run whose recomputation is that of a simulator's configuration, not of the run."""


def all_words(row: FileRow) -> str:
    """What a row says of its software and settings, in lower case."""
    columns = ("framework", "other_flags", "model", "source_table", "notes")
    return " ; ".join(row.text(column) for column in columns).lower()


def year_month(row: FileRow) -> str:
    """When it was measured, as ``2023-07``; nothing where no year is stated.

    >>> from planner.published.measurement_file import FileRow
    >>> year_month(FileRow(file="", line=1, texts={"measured_date": "07/05/2021 (month/da"}, numbers={}))
    '2021-07'
    """
    text = row.text("measured_date")
    slashes = re.match(r"(\d{1,2})/\d{1,2}/(\d{4})", text)
    if slashes:
        return f"{slashes[2]}-{int(slashes[1]):02d}"
    found = re.search(r"(20[12]\d)(?:-(\d\d))?", text) or re.search(r"\b(20[12]\d)()\b", row.text("framework"))
    return f"{found[1]}-{found[2] or '06'}" if found else ""


def release(row: FileRow) -> float:
    """When the software was released, as a year with its part, 0 where nothing tells.

    A stated version counts before the date of the measurement: NVIDIA names containers by year and month.

    >>> from planner.published.measurement_file import FileRow
    >>> release(FileRow(file="", line=1, texts={"measured_date": "2025-06-09 (v24.11.1)"}, numbers={}))
    2024.8333333333333
    """
    version = re.search(r"(?:\(v|^)(2\d)\.(0\d|1[0-2])\b", row.text("measured_date"))
    if version:
        return 2000 + int(version[1]) + (int(version[2]) - 1) / 12
    year, _, month = year_month(row).partition("-")
    return int(year) + (int(month) - 1) / 12 if year else 0.0


def is_ascend(row: FileRow) -> bool:
    """Whether the row ran on Ascend devices."""
    return "ascend" in f"{row.text('accelerator')} {row.text('hw')}".lower()


def precision(row: FileRow, notes: list[str]) -> str:
    """What matrices are multiplied in."""
    text, kind = row.text("precision").lower(), row.text("precision_kind").lower()
    if stated(row, "mixed_precision_ignored"):
        return _full_precision(row, notes)
    for pattern, word in ((r"fp4|float4", "fp4"), (r"fp8|float8|\bf8", "fp8"), (r"tf32", "tf32")):
        if re.search(pattern, text):
            return word
    if re.search(r"amp o0", text):
        return "fp32"
    for value in (kind, text):
        for pattern, word in ((r"fp8", "fp8"), (r"fp4", "fp4"), (r"bf16|bfloat16", "bf16"), (r"fp16|float16", "fp16")):
            if re.search(pattern, value):
                return word
        if re.search(r"fp32|float32", value):
            return _full_precision(row, notes)
    if re.search(r"\bamp\b|mixed|half", text):
        return "fp16"
    device = row.text("accelerator").lower()
    word = "fp16" if re.search(r"v100|910a|910\b(?!\s?[b*])|p40", device) else "bf16"
    notes.append(f"precision not stated: {word}")
    return word


def _full_precision(row: FileRow, notes: list[str]) -> str:
    """NVIDIA's containers multiply float32 matrices as TF32 where the device can."""
    of_nvidia = row.says(r"nvidia|deeplearningexamples|tensorflow|flagperf", "framework", "source")
    if of_nvidia and row.says(r"h100|h200|a100|a800|h800|a6000|a10\b", "accelerator"):
        notes.append("float32 matrices as TF32, the default of NVIDIA's containers")
        return "tf32"
    return "fp32"


_VISION = r"^(classification|detection|segmentation)"


def stack(row: FileRow, notes: list[str]) -> Stack:
    """The software that launches the kernels."""
    framework, flags = row.text("framework").lower(), row.text("other_flags").lower()
    on_ascend = _ascend_stack(row, framework)
    if on_ascend is not None:
        return on_ascend
    if re.search(r"automodel", framework):
        return Stack.TRANSFORMER_ENGINE if re.search(r"\bte\b", flags) else Stack.EAGER
    if re.search(r"transformer.?engine|nemo|megatron-bridge|megatron.?core", framework):
        return Stack.TRANSFORMER_ENGINE
    if "mcore" in framework:
        return Stack.MEGATRON if "local" in framework else Stack.TRANSFORMER_ENGINE
    if re.search(r"deepspeed|aa-scaling|sailor|internevo|bmtrain", framework) and "hf trainer" not in framework:
        return Stack.DEEPSPEED
    if re.search(r"megatron|zero bubble|flagscale|hai-llm", framework):
        return _megatron_by_date(row)
    if re.search(r"jax|xla|alpa|parax|maxtext|t5x|pathways", framework) or row.says(r"with xla", "source_table"):
        return Stack.COMPILED
    for named in (Stack.TENSORFLOW, Stack.PADDLE, Stack.MXNET, Stack.ONEFLOW):
        if named.value in framework:
            return named
    if re.search(_VISION, row.text("arch").lower()) and stated(row, "channels_last"):
        return Stack.CHANNELS_LAST
    if re.search(r"torch\.compile|\bcompile\b", flags) or cumulative(row, "compile"):
        return Stack.COMPILED
    if re.search(r"torchtitan", framework) and "float8" in f"{flags} {row.text('precision')}".lower():
        notes.append("torch.compile with float8, as torchtitan recommends")
        return Stack.COMPILED
    if not framework:
        notes.append("software not stated: PyTorch")
    return Stack.EAGER


def _ascend_stack(row: FileRow, framework: str) -> Stack | None:
    if re.search(r"mindspeed|modellink|torch_npu", framework):
        return Stack.MINDSPEED
    if re.search(r"mindspore|mindformers", framework):
        toolkit = row.says(r"mindcv|mindyolo|official/benchmark", "source")
        return Stack.MINDSPORE_TOOLKIT if toolkit else Stack.MINDSPORE
    if is_ascend(row):
        return Stack.MINDSPEED if re.search(r"torch|megatron", framework) else Stack.MINDSPORE
    return None


def _megatron_by_date(row: FileRow) -> Stack:
    newer = row.says(r"main\(|moe_dev|\b[0-9a-f]{12}\b", "framework") or year_month(row) >= "2024-06"
    hopper = row.says(r"[hb][123]00|gb\d00", "accelerator")
    return Stack.TRANSFORMER_ENGINE if newer and hopper else Stack.MEGATRON


def attention(row: FileRow, used: Stack, notes: list[str]) -> AttentionKernel:
    """How the attention core runs."""
    text, framework = row.text("attention_impl").lower(), row.text("framework").lower()
    date = year_month(row)
    of_source = stated(row, "attention")
    if of_source and not text:
        notes.append(f"attention kernel not stated: {of_source}, as the suite's page says")
        return AttentionKernel(of_source)
    if "llm-foundry" in framework and date < "2024-03" and (not text or "default" in text):
        # ``attn_impl: triton``, the default of LLM Foundry until it went (pull request 1041 of March 2024).
        notes.append("attention kernel not stated: flash, in Triton")
        return AttentionKernel.FLASH
    if text:
        return _stated_attention(text, row, used, date)
    if is_ascend(row):
        recent = date >= "2024" and used in (Stack.MINDSPEED, Stack.MINDSPORE)
        # The fused kernel of CANN (FlashAttentionScore) is for Atlas A2 and later; MindFormers has no fused softmax.
        first = row.says(r"910\s?a|ascend\s?910(?!\s?[bc*])", "accelerator")
        without = AttentionKernel.UNFUSED if recent else AttentionKernel.FUSED_SOFTMAX
        kernel = AttentionKernel.VENDOR if recent and not first else without
    elif used is Stack.TRANSFORMER_ENGINE and _without_flash(row):
        kernel = AttentionKernel.FUSED_SOFTMAX
    elif used is Stack.TRANSFORMER_ENGINE:
        hopper = row.says(r"h[128]00|[bg]b?[23]00|h20", "accelerator")
        kernel = AttentionKernel.VENDOR if hopper else AttentionKernel.FLASH2
    elif used in (Stack.MEGATRON, Stack.DEEPSPEED):
        # Megatron-DeepSpeed takes flash attention only when asked to.
        newer = used is Stack.MEGATRON and date >= "2024"
        kernel = AttentionKernel.FLASH2 if newer else AttentionKernel.FUSED_SOFTMAX
    elif re.search(r"torchtitan|torchtune|flash", framework) or (
        re.search(r"fsdp|deepspeed|pytorch 2", framework) and date >= "2023"
    ):
        # FlashAttention-2 of PyTorch runs on Blackwell as on Ampere; scaled_dot_product_attention takes cuDNN there.
        kernel = AttentionKernel.VENDOR if row.says(r"[bg]b?[23]00", "accelerator") else AttentionKernel.FLASH2
    else:
        kernel = AttentionKernel.UNFUSED
    notes.append(f"attention kernel not stated: {kernel}")
    return kernel


def _without_flash(row: FileRow) -> bool:
    """Whether reproducible kernels are asked of a container that has no reproducible flash attention.

    Transformer Engine then falls back to single operators (``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``; flash attention is
    reproducible from 2.4.1 on, which the container with long-term support does not have).
    """
    return long_term_support(row) and "nvte_allow_nondeterministic_algo=0" in all_words(row)


def _stated_attention(text: str, row: FileRow, used: Stack, date: str) -> AttentionKernel:
    if "flash" in text or re.search(r"cudnn|vendor", text):
        # FlashAttention-3 and -4 are as fast as the device's own kernel (arXiv:2407.08608, arXiv:2603.05451).
        newer = re.search(r"fa[34]|flash(?:_?-?attn|_?-?attention)?[ _-]?v?[34]", text)
        if is_ascend(row) or newer or "cudnn" in text or "vendor" in text:
            return AttentionKernel.VENDOR
        first = re.search(r"v1|flash(?:_?attention)?[ _-]?1", text) or "" < date < "2023-08"
        return AttentionKernel.FLASH if first and "2" not in text else AttentionKernel.FLASH2
    if re.search(r"unfused.*fused scale|scale-mask", text):
        return AttentionKernel.FUSED_SOFTMAX
    if re.search(r"unfused|torch|eager|math", text):
        fused = row.says("megatron", "framework") and "torch" not in text
        return AttentionKernel.FUSED_SOFTMAX if fused else AttentionKernel.UNFUSED
    if "fused" in text:
        return AttentionKernel.VENDOR if used is Stack.TRANSFORMER_ENGINE else AttentionKernel.FUSED_SOFTMAX
    return AttentionKernel.FLASH2


def sharding(row: FileRow, used: Stack, notes: list[str]) -> OptimizerSharding:
    """What the ranks of the data axis share out; MindSpore's parallel optimizer keeps slices of gradients as well."""
    value = _stated_sharding(row, used, notes)
    return OptimizerSharding.ZERO2 if value is OptimizerSharding.ZERO1 and used is Stack.MINDSPORE else value


def _stated_sharding(row: FileRow, used: Stack, notes: list[str]) -> OptimizerSharding:
    text, kind = row.text("zero_fsdp").lower(), row.text("optimizer_sharding").lower()
    if re.search(r"shard_grad_op", text):
        return OptimizerSharding.ZERO2
    if kind in tuple(OptimizerSharding):
        return OptimizerSharding(kind)
    for pattern, value in (
        (r"zero[- ]?(?:stage[- ]?)?3|full_shard|hsdp|\bz3\b|optim_grads_params", OptimizerSharding.ZERO3),
        (r"zero[- ]?(?:stage[- ]?)?2", OptimizerSharding.ZERO2),
        (r"zero[- ]?(?:stage[- ]?)?1|dist\w*[- ]optimizer|parallel optimizer", OptimizerSharding.ZERO1),
        (r"fsdp(?!=0)|fully sharded", OptimizerSharding.ZERO3),
        (r"none|ddp", OptimizerSharding.NONE),
        (r"zero", OptimizerSharding.ZERO1),
    ):
        if re.search(pattern, text):
            return value
    if of_source := stated(row, "optimizer_sharding"):
        return OptimizerSharding(of_source)
    value = _default_sharding(f"{row.text('framework')} {row.text('source_table')}".lower(), used)
    # DeepSpeed's optimizer for bfloat16 (``BF16_Optimizer``) knows sharded states alone.
    if re.fullmatch(r"megatron-deepspeed", row.text("framework").lower()) and row.text("precision_kind") == "bf16":
        value = OptimizerSharding.ZERO1
    if value is OptimizerSharding.NONE and re.search(r"deepspeed 3d|\bbucket=\d", all_words(row)):
        value = OptimizerSharding.ZERO1
    if (row.whole("n_accels") or 1) > 1 and not text:
        notes.append(f"sharding of the optimizer not stated: {value}")
    return value


def _default_sharding(framework: str, used: Stack) -> OptimizerSharding:
    if used is Stack.TRANSFORMER_ENGINE and re.search(r"nemo|bridge|megatron-core", framework):
        return OptimizerSharding.ZERO1
    if re.search(r"fsdp|torchtitan|full_finetune_distributed|maxtext|zero[- ]?3", framework):
        return OptimizerSharding.ZERO3
    if re.search(r"zero_?2", framework) or ("deepspeed" in framework and not re.search(r"megatron|sailor", framework)):
        return OptimizerSharding.ZERO2
    return OptimizerSharding.NONE


def shard_group(row: FileRow, dp: int, cp: int) -> int:
    """Ranks that share sharded state, 0 for all of the data axis."""
    found = row.says(r"shard(?: group)?=(\d+)", "zero_fsdp")
    if row.says(r"dp\*cp", "zero_fsdp"):
        return dp * cp
    group = int(found[1]) if found else 0
    if "multi_dist_optimizer_instances" in row.text("model"):
        # ``--num-distributed-optimizer-instances 2``, as Megatron-LM's tests of it have; each may be one rank.
        return dp * cp // 2
    return group if 1 < group < dp and dp % group == 0 else 0


def recompute(row: FileRow, network: Network, pp: int, notes: list[str]) -> tuple[Recompute, int]:
    """What is computed again, and in how many layers of a stage (0: all)."""
    text, kind = row.text("recompute").lower(), row.text("recompute_kind").lower()
    if "simulator" in text:
        notes.append(SIMULATORS_DEFAULT)
    per_stage = max(1, network.layers // pp) if isinstance(network, TransformerShape) else 1
    if re.search(r"select\w* (?:layer|op|\(op)|selective \(config", text) and "torchtitan" in row.text("framework"):
        notes.append("selective checkpointing of PyTorch taken as recomputing every second layer")
        return Recompute.FULL, max(1, per_stage // 2)
    listed = re.search(r"\[([\d,\s]+)\]", text)
    if listed:
        counts = [int(part) for part in listed[1].split(",") if part.strip()]
        layers = round(sum(counts) / max(1, len(counts)))
        return (Recompute.SELECTIVE if "select" in text else Recompute.FULL) if layers else Recompute.NONE, layers
    if recomputed_modules(row, network):
        return Recompute.SELECTIVE, 0
    if re.search(r"\bmoe\b|experts", text) and "full" not in text:
        notes.append("recomputed experts taken as whole layers")
        return Recompute.FULL, 0
    if re.search(r"\bnorm, act|layernorm|activation-function", text) and "full" not in text:
        notes.append("norms and activations that are computed again take no time")
        return Recompute.NONE, 0
    if kind in tuple(Recompute):
        block = re.search(r"block layers=(\d+)", text)
        layers = int(block[1]) if block and int(block[1]) < per_stage else 0
        return Recompute(kind), layers if kind == "full" else 0
    if re.search(r"full|gpipe|minimal", text):
        return (Recompute.SELECTIVE if "minimal" in text else Recompute.FULL), 0
    if "selective" in text:
        return Recompute.SELECTIVE, 0
    if text:
        return Recompute.NONE, 0
    return _default_recompute(row, network, notes), 0


def _default_recompute(row: FileRow, network: Network, notes: list[str]) -> Recompute:
    framework, date = row.text("framework").lower(), year_month(row)
    old_megatron = "megatron" in framework and "" < date < "2022" and isinstance(network, TransformerShape)
    checkpointed = old_megatron or torchtune_recipe(row) or cumulative(row, "activation checkpointing")
    value = Recompute.FULL if checkpointed else Recompute.NONE
    if isinstance(network, TransformerShape):
        notes.append(f"recomputation not stated: {value}")
    return value


def sequence_parallel(row: FileRow, used: Stack, tp: int, notes: list[str]) -> bool:
    """Whether norms and dropout between the tensor-parallel parts are cut along the sequence."""
    stated = (row.text("sequence_parallel") or row.text("sp")).lower()
    if tp == 1:
        return False
    if row.says("deepspeed", "framework") and row.says("zero-3", "framework"):
        return True  # its partitioned activations: what is kept is cut over tp
    if row.says(r"tp_?2d", "model"):
        return True  # two-dimensional tensor parallelism cuts the residual stream over both dimensions (MindSpeed)
    if stated:
        return stated in ("true", "yes", "1", "on")
    default = used is Stack.TRANSFORMER_ENGINE or "torchtitan" in row.text("framework").lower()
    notes.append(f"sequence parallelism not stated: {'yes' if default else 'no'}")
    return default


def overlaps(row: FileRow, used: Stack, shard: OptimizerSharding, tp: int) -> tuple[bool, bool, bool]:
    """Whether gradients, parameters and tensor-parallel activations travel while kernels run."""
    flags, framework = row.text("other_flags").lower(), row.text("framework").lower()
    tensor = bool(re.search(r"tp-comm-overlap|mc2|async ?tp|tp_comm_overlap|tp overlap", flags))
    if re.search(r"nemo|bridge|megatron-core|dgxc", f"{framework} {row.text('source').lower()}"):
        return True, True, tp > 1
    if "megatron" in framework or used in (Stack.MINDSPEED, Stack.MEGATRON, Stack.DEEPSPEED):
        zero3 = shard is OptimizerSharding.ZERO3 and not gathers_apart(row)
        return "overlap-grad" in flags or zero3, "overlap-param" in flags or zero3, tensor
    return True, shard is OptimizerSharding.ZERO3 and not gathers_apart(row), tensor


def gathers_apart(row: FileRow) -> bool:
    """Whether sharded parameters are gathered one at a time while nothing else runs.

    So did DeepSpeed's ZeRO-3 of 2021: an all-gather for each parameter, the device synchronised before the next (its
    issue 1069, pull request 1188).
    """
    third = row.says(r"zero[- ]?(?:stage[- ]?)?3", "framework", "zero_fsdp", "source_table")
    return third is not None and "" < year_month(row) < "2022"


def is_recipe(row: FileRow) -> bool:
    """Whether a row ran one of NVIDIA's performance recipes: interleaved stages, gradients reduced in 16 bits.

    What others run with the same software is as they state it.
    """
    origin = f"{row.text('framework')} {row.text('source')}".lower()
    of_recipes = re.search(r"nemo|megatron-bridge|dgxc", origin) is not None and "automodel" not in origin
    return of_recipes and "nvidia" in row.text("source").lower()


def fused_norm(row: FileRow) -> bool:
    """Whether a row says that RMSNorm is one kernel."""
    return bool(re.search(r"rms kernel|fused[-_ ]?rms ?norm", f"{row.text('attention_impl')} {all_words(row)}".lower()))


def leaves_norms_single(row: FileRow) -> bool:
    """Whether a test lists its flags and not ``--use-fused-rmsnorm``, which MindSpeed's other scripts all have."""
    return functional_test(row) and not fused_norm(row)


def leaves_gate_single(row: FileRow) -> bool:
    """Whether a test lists its flags and not ``--swiglu``: no other gate has a kernel in MindSpeed."""
    return functional_test(row) and "swiglu" not in row.text("other_flags").lower()


def legacy_model(row: FileRow) -> bool:
    """Whether a row of MindSpeed ran Megatron's network as it was before its core (no ``--use-mcore-models``)."""
    return "legacy-model" in row.text("other_flags").lower()


def sends_tokens_once(row: FileRow) -> bool:
    """Whether experts get a token once for each node: DeepEP, and HybridEP, which Megatron-Bridge's recipes take.

    They set ``moe_flex_dispatcher_backend`` for networks with experts; others keep the all-to-all of copies.
    """
    words = all_words(row)
    if re.search(r"dispatcher[ =](alltoall|a2a|allgather)", words):
        return False
    of_bridge = "megatron-bridge" in f"{row.text('framework')} {row.text('source')}".lower()
    return of_bridge or re.search(r"deepep|hybrid-?ep", words) is not None


def functional_test(row: FileRow) -> bool:
    """Whether a row is a test of functions, which trains a small network under checks, with reproducible kernels.

    Megatron-LM's say so in their flags, MindSpeed-LLM's in the name of their baselines of continuous integration.
    """
    return bool(
        re.search(r"deterministic[- ](mode|settings)|allow_nondeterministic_algo=0", all_words(row))
        or row.says(r"\bci baselines?\b", "source")
    )


def is_scaling(row: FileRow) -> bool:
    """Whether a row ran Aleph Alpha's Scaling.

    Its source (github.com/Aleph-Alpha/scaling) says: data-parallel ranks all-reduce all gradients as float32
    (``optimizer/allreduce.py``), the two inner products of a SwiGLU network are column-parallel layers of their own
    (``nn/mlp.py``), and every tensor rank takes the loss of the gathered logits (``lm_head.py``).
    """
    return "aa-scaling" in row.text("framework").lower()


def gradient_bytes(row: FileRow, used: Stack, kind: str) -> int:
    """Bytes of a gradient element as it is accumulated and reduced."""
    words = all_words(row)
    deepspeed = "deepspeed" in row.text("framework").lower()
    if "fp32 grad" in f"{words} ; {row.text('precision').lower()}":
        # DeepSpeed accumulates in float32 beside the 16-bit gradients.
        return 6 if deepspeed else 4
    if is_recipe(row) and kind != "fp32":
        return 2
    if cumulative(row, "fuse optimizer") or whole_on_one_device(row):
        return 0  # each gradient is used up at once
    if re.search(r"mp mode=pure|torchtune", words) and kind in ("fp16", "bf16"):
        return 2
    if row.says(r"deepspeed|aa-scaling", "framework") and kind in ("fp16", "bf16"):
        return 2
    return usual_gradient_bytes(used, kind)


def optimizer(row: FileRow, network: Network) -> str:
    """The optimizer, by what is trained."""
    words = all_words(row)
    if isinstance(network, LayeredNetwork):
        if "jasper" in network.name.lower():
            return NOVOGRAD
        if "quartznet" in network.name.lower():
            # Apex updates and averages all tensors at once (``scripts/train.sh`` of NVIDIA's examples).
            return f"fused_{NOVOGRAD}"
        return "momentum" if re.search(r"net|rn50|vgg|yolo|ssd|rcnn", network.name.lower()) else "adamw"
    if "muon" in words:
        return "muon"
    if cumulative(row, "8-bit adamw") or whole_on_one_device(row):
        return "adamw8bit"
    if not network.causal and "pre-training" in words:
        return "lamb"
    return "adamw"


def trained_fraction(row: FileRow, notes: list[str]) -> float:
    """Share of the weights that are trained."""
    words = f"{row.text('model')} {row.text('other_flags')} {row.text('source_table')} {row.text('notes')}".lower()
    if not (re.search(r"\bq?lora\b|_lora|lora_|ptuning|p-tuning|adapter", words) or stated(row, "adapters")):
        return 1.0
    notes.append(f"adapters train {FROZEN_TRAINED_FRACTION:.1%} of the weights")
    return FROZEN_TRAINED_FRACTION


def schedule(row: FileRow, vpp: int) -> str:
    """The pipeline schedule, by the names of `simulator.schedules`."""
    words = f"{row.text('other_flags')} {row.text('framework')}".lower()
    for pattern, name in (
        (r"zb-?2p|zb-?h2", "zb-h2"), (r"zb-?1p|zb-?h1", "zb-h1"), (r"zb-?v", "zbv"),
        (r"dual-?pipe-?v", "dualpipe_v"), (r"dual-?pipe", "dualpipe"),
        (r"gpipe", "gpipe"),
    ):  # fmt: skip
        if re.search(pattern, words):
            return name
    return "interleaved_1f1b" if vpp > 1 else "1f1b"
