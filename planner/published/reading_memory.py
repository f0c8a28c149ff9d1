"""From a measurement row to what software keeps in device memory where that is not the stack's habit."""

from __future__ import annotations

import re
from typing import TypedDict

from planner.cost.memory.figures import MemoryFigure
from planner.cost.training_run import LayeredNetwork, TransformerShape
from planner.published.measurement_file import FileRow

_FOUR_BITS = 0.5
_DEFERRED = 2
"""``--wgrad-deferral-limit`` of Megatron-LM's functional tests of it."""
_GROUP = 5
"""``--microbatch-group-size-per-virtual-pipeline-stage`` of Megatron-LM's test of tuned overlap."""
_IN_PLACE = 16
_CUMULATIVE = (
    "baseline", "packed", "compile", "chunked", "activation checkpointing", "fuse optimizer", "activation offloading",
    "8-bit adamw", "lora",
)  # fmt: skip


class MemorySettings(TypedDict):
    """Fields of `TrainingSetup`."""

    reduce_bucket_elements: float
    fixed_workspaces: bool
    captured_graphs: bool
    captured_step: bool
    grouped_products: bool
    pipelines_in_flight: int
    loss_chunks: int
    vocabulary_parallel_loss: bool
    master_weight_bytes: int
    frozen_weight_bytes: float
    offload_activations: bool
    recompute_activation_function: bool
    recompute_norms: bool
    recompute_modules: tuple[str, ...]
    forced_balance: bool
    every_second_product: bool
    fused_loss: bool
    scripted_loss: bool
    deferred_head_batches: int
    micro_batch_group: int
    packed_attention: bool


def memory_settings(row: FileRow, network: TransformerShape | LayeredNetwork) -> MemorySettings:
    """What the row's framework and flags say."""
    framework = row.text("framework").lower()
    words = f"{row.text('other_flags')} ; {row.text('model')} ; {row.text('recompute')}".lower()
    return MemorySettings(
        # DeepSpeed's default ``reduce_bucket_size``.
        reduce_bucket_elements=5e8 if "deepspeed" in framework else 0.0,
        # Megatron's ``--deterministic-mode`` insists on ``CUBLAS_WORKSPACE_CONFIG``.
        fixed_workspaces="deterministic-mode" in words,
        captured_graphs=bool(re.search(r"cuda[-_ ]?graph", words)),
        captured_step=bool(
            re.search(r"cuda[-_ ]?graph (of the )?whole|full[-_ ]iteration", words) or "maxtext" in framework
        ),
        grouped_products="grouped-gemm" in words,
        pipelines_in_flight=_pipelines_in_flight(words),
        loss_chunks=_loss_chunks(row, framework),
        # Of AA-Scaling's runs those with few layers a device at tp 8 go out of memory: only whole logits explain that.
        vocabulary_parallel_loss="aa-scaling" not in framework,
        master_weight_bytes=2 if "reuse-fp32-param" in words else 4,
        frozen_weight_bytes=_FOUR_BITS if "qlora" in words else 0.0,
        offload_activations=bool(re.search(r"swap-attention|activation offload|fine_grained_offload", words))
        # Megatron's runs with ZeRO-3 keep checkpoints in the host's memory (``PA_CPU``) unless they say otherwise.
        or ("megatron" in framework and "zero-3" in framework and "pa_cpu=n" not in words)
        or cumulative(row, "activation offloading"),
        recompute_activation_function="activation-function recompute" in words
        # Megatron-Core's ``--recompute-modules moe_act``.
        or bool(row.says(r"\b(?:moe_)?act\b", "recompute")),
        recompute_norms=bool(row.says(r"\bnorm, act|\blayernorm\b", "recompute")),
        recompute_modules=recomputed_modules(row, network),
        forced_balance=bool(re.search(r"\bforced? (?:load )?balanc", words)),
        every_second_product="torchtitan" in framework
        and bool(row.says(r"select\w*(?: \(?op\b| \(config)", "recompute")),
        fused_loss=bool(re.search(r"cross[-_]entropy[-_](?:loss[-_])?fusion", words))
        # torchtitan compiles its loss as well since the beginning of 2025 (``build_cross_entropy_loss``).
        or ("torchtitan" in framework and "compile" in words and row.text("measured_date") >= "2025"),
        scripted_loss=long_term_support(row),
        deferred_head_batches=_DEFERRED * bool(re.search(r"defer[-_]embedding[-_]wgrad", words)),
        micro_batch_group=_GROUP * ("tunable_overlap" in words),
        packed_attention="llm-foundry" not in framework,
    )


def recomputed_modules(row: FileRow, network: TransformerShape | LayeredNetwork) -> tuple[str, ...]:
    """Parts of layers that compute again by Megatron's names, of those that the network has."""
    text = row.text("recompute").lower()
    if not isinstance(network, TransformerShape) or "full" in text or "megatron" not in row.text("framework").lower():
        return ()
    experts = network.experts
    there = {
        "layernorm": True,
        "mla_up_proj": network.latent_attention is not None,
        "mlp": experts is None or experts.dense_layers > 0,
        "moe": experts is not None,
        "moe_act": experts is not None,
        "shared_experts": experts is not None and experts.shared_feed_forward > 0,
    }
    return tuple(name for name, has in there.items() if has and re.search(rf"\b{name}\b", text))


def _pipelines_in_flight(words: str) -> int:
    """1 and 2 of ZB-1p and ZB-2p, which are searched for within the activations of ``p`` and ``2 p`` micro-batches."""
    found = re.search(r"zb-?([12])p", words)
    return int(found[1]) if found else 0


def long_term_support(row: FileRow) -> bool:
    """Whether a functional test of Megatron-LM ran in the container with long-term support.

    Results of that container name the cluster ``dgxa100`` (``golden_values_lts_dgxa100_dracooci.json``), later ones
    ``dgx_a100``. Its PyTorch compiles by TorchScript.
    """
    return row.text("hw").lower() == "dgxa100"


def stated_memory_gib(row: FileRow) -> float | None:
    """Peak memory of a device in GiB, None where the row states none.

    ``nvidia-smi`` shows MiB alone: who reports GB has left out the last three digits.
    """
    stated = row.number("mem_gib_per_gpu")
    thousands = "nvidia-smi gb" in row.text("mem_kind").lower()
    return stated * 1000 / 1024 if stated and thousands else stated


def _loss_chunks(row: FileRow, framework: str) -> int:
    """8 is torchtune's default; a fused loss that writes its gradient over the logits comes to many chunks."""
    if re.search(r"llm-foundry|composer|mosaic|liger", f"{framework} {row.text('other_flags').lower()}"):
        return _IN_PLACE
    return 8 if cumulative(row, "chunked") or torchtune_recipe(row) else 1


def torchtune_recipe(row: FileRow) -> bool:
    """Whether a row ran a recipe of torchtune as it comes: checkpointed activations, chunked loss."""
    return "torchtune" in row.text("framework").lower() and not row.text("other_flags").lower().startswith("cumulative")


def whole_on_one_device(row: FileRow) -> bool:
    """Torchtune's full fine-tuning on one device: gradients used up at once, paged 8-bit AdamW."""
    flags = f"{row.text('framework')} {row.text('other_flags')}".lower()
    return torchtune_recipe(row) and row.whole("n_accels") == 1 and bool(re.search(r"full[_ ]finetune", flags))


def cumulative(row: FileRow, step: str) -> bool:
    """Whether a row of torchtune's list, which adds one optimisation after the other, is at `step` or beyond.

    >>> row = FileRow(file="", line=1, texts={"other_flags": "cumulative: + Compile"}, numbers={})
    >>> cumulative(row, "packed"), cumulative(row, "chunked")
    (True, False)
    """
    flags = row.text("other_flags").lower()
    if not flags.startswith("cumulative:"):
        return False
    reached = next((index for index, name in enumerate(_CUMULATIVE) if name in flags), -1)
    return reached >= _CUMULATIVE.index(step)


_FIGURES = (
    (r"tensorboard|mem-max-allocated", MemoryFigure.LAST_STAGE_ALLOCATED),
    # MindSpeed-LLM's baselines keep what Megatron's ``report_memory`` logs, once, after the first iteration.
    (r"max over listed ranks of torch_npu", MemoryFigure.FIRST_STEP_ALLOCATED),
    # Sailor's ``pipe_engine.py`` logs ``memory.used`` of nvidia-smi, of which its script takes the largest.
    (r"includes reserved", MemoryFigure.DEVICE),
    (r"reserved", MemoryFigure.RESERVED),
    (r"^nvidia-smi gb$", MemoryFigure.FIRST_NODE_DEVICE),
    (r"nvidia-smi|npu-smi|used of total|device memory", MemoryFigure.DEVICE),
)
_UNIT_ALONE = re.compile(r"g(?:i)?b as printed")


def figure_of(kind: str) -> MemoryFigure:
    """The figure that the words of a measurement's ``mem_kind`` mean: allocated bytes unless they say more.

    >>> figure_of("nvidia-smi GB, max (first/last stage)")
    <MemoryFigure.DEVICE: 'device'>
    >>> figure_of("peak active")
    <MemoryFigure.ALLOCATED: 'allocated'>
    """
    return next((figure for words, figure in _FIGURES if re.search(words, kind.lower())), MemoryFigure.ALLOCATED)


def says_no_figure(kind: str) -> bool:
    """Whether a ``mem_kind`` states a unit and nothing of what it measures: the figures differ by a third and more.

    >>> says_no_figure("GB as printed"), says_no_figure("peak GB as printed")
    (True, False)
    """
    return _UNIT_ALONE.fullmatch(kind.strip().lower()) is not None
