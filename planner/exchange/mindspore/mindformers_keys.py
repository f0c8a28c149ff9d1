"""The keys of MindFormers' files: those that are translated, those that must keep their default, those not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARKS = (
    *("use_parallel", "parallel", "parallel_config", "recompute_config", "micro_batch_interleave_num"),
    "swap_config",
)
"""Sections that say how a network is to be parallel."""
OPTIONS = (
    *("network", "hw", "devices", "global_batch", "seq_len", "precision", "optimizer", "hints", "top", "out"),
    *("software", "attention", "norms"),
)
"""Options of ``plan`` that may stand beside them."""
SECTIONS = (
    *("seed", "output_dir", "load_checkpoint", "load_ckpt_format", "src_strategy_path_or_dir", "auto_trans_ckpt"),
    *("only_save_strategy", "resume_training", "run_mode", "trainer", "runner_config", "runner_wrapper", "model"),
    *("train_dataset", "train_dataset_task", "eval_dataset", "eval_dataset_task", "do_eval", "eval_step_interval"),
    *("eval_epoch_interval", "optimizer", "lr_schedule", "callbacks", "eval_callbacks", "context", "processor"),
    *("metric", "moe_config", "auto_tune", "filepath_prefix", "autotune_per_step", "profile", "profile_start_step"),
    *("profile_stop_step", "init_start_profile", "profile_communication", "profile_memory", "remote_save_url"),
    *("layer_scale", "layer_decay", "lr_scale", "lr_scale_factor", "use_legacy", "pretrained_model_dir"),
    *("ignore_data_skip", "print_separate_loss", "profiler_level", "train_precision_sync", "transform_process_num"),
    *("monitor_config", "grouped_lr_schedule"),
)
"""Sections of such a file that say nothing of the plan."""
MODEL_KEYS = frozenset({"offset", "pp_interleave_num"})
"""Keys of ``model.model_config`` that do."""
SCHEDULERS: Mapping[str, str] = {"1f1b": "1f1b", "gpipe": "gpipe", "zero_bubble_v": "zbv"}
"""Values of ``parallel.pipeline_config.pipeline_scheduler`` with their schedules."""
SPLITTING = ("seqpipe", "seqvpp", "seqsmartvpp")
"""Schedules that also split sequences, which no plan does."""
MODES: Mapping[int, str] = dict(enumerate(("data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel")))
DEGREES: Mapping[str, str] = {
    "data_parallel": "dp",
    "model_parallel": "tp",
    "pipeline_stage": "pp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
    "micro_batch_num": "micro_batches",
}
"""Keys of ``parallel_config`` that are numbers, with the pins they stand for."""
LATER_CONFIG: Mapping[str, Any] = {"ulysses_degree_in_cp": 1, "mem_coeff": 0.1}
"""Keys of ``parallel_config`` that nothing follows yet, with their defaults."""
RECOMPUTE_KEYS = (
    *("recompute", "select_recompute", "select_recompute_exclude", "select_comm_recompute"),
    *("recompute_slice_activation", "parallel_optimizer_comm_recompute", "mp_comm_recompute"),
)
LATER_RECOMPUTE: Mapping[str, Any] = {"select_comm_recompute_exclude": False}
LATER_PARALLEL: Mapping[str, Any] = {
    "sharding_propagation": False,
    "optimizer_weight_shard_size": -1,
    "optimizer_weight_shard_aggregated_save": False,
    "force_fp32_communication": False,
    "communi_parallel_mode": "all_group_parallel",
    "pipeline_segments": 1,
    "pipeline_result_broadcast": False,
    "auto_pipeline": False,
    "group_ckpt_save_file": "",
}
"""Keys of newer contexts that nothing follows yet."""
