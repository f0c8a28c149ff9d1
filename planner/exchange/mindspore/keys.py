"""Every key of the context: its default, its rule, and the parallel modes that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.plans.request import PARALLEL_MODES, SEARCH_MODES
from simulator.checks import (
    Check,
    boolean,
    choice,
    comm_fusion,
    dataset_strategy,
    indices,
    integer,
    optimizer_config,
    text,
)

AUTO_MODES = ("semi_auto_parallel", "auto_parallel")
PARALLEL = tuple(mode for mode in PARALLEL_MODES if mode != "stand_alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key: the value it has unless it is set, what is allowed, and the modes in which it counts."""

    default: Any
    check: Check
    modes: tuple[str, ...] = PARALLEL_MODES


def _listed(name: str, value: Any) -> list[int]:
    """The list that was given: it is read back as one."""
    return list(indices(name, value))


KEYS: Mapping[str, Key] = {
    "device_num": Key(default=1, check=integer(1, 4096)),
    "global_rank": Key(default=0, check=integer(0, 4095)),
    "parallel_mode": Key(default="stand_alone", check=choice(*PARALLEL_MODES)),
    "gradients_mean": Key(default=False, check=boolean, modes=PARALLEL),
    "mirror_mean": Key(default=False, check=boolean, modes=PARALLEL),
    "gradient_fp32_sync": Key(default=True, check=boolean, modes=AUTO_MODES),
    "loss_repeated_mean": Key(default=True, check=boolean, modes=AUTO_MODES),
    "cross_batch": Key(default=False, check=boolean, modes=AUTO_MODES),
    "search_mode": Key(default="dynamic_programming", check=choice(*SEARCH_MODES), modes=("auto_parallel",)),
    "auto_parallel_search_mode": Key(
        default="dynamic_programming", check=choice(*SEARCH_MODES), modes=("auto_parallel",)
    ),
    "parameter_broadcast": Key(default=False, check=boolean, modes=PARALLEL),
    "strategy_ckpt_load_file": Key(default="", check=text, modes=AUTO_MODES),
    "strategy_ckpt_save_file": Key(default="", check=text, modes=AUTO_MODES),
    "full_batch": Key(default=False, check=boolean, modes=AUTO_MODES),
    "dataset_strategy": Key(default="data_parallel", check=dataset_strategy, modes=AUTO_MODES),
    "enable_parallel_optimizer": Key(default=False, check=boolean, modes=PARALLEL),
    "parallel_optimizer_config": Key(default={}, check=optimizer_config, modes=PARALLEL),
    "enable_alltoall": Key(default=False, check=boolean, modes=PARALLEL),
    "all_reduce_fusion_config": Key(default=[], check=_listed, modes=PARALLEL),
    "comm_fusion": Key(default={}, check=comm_fusion, modes=PARALLEL),
    "pipeline_stages": Key(default=1, check=integer(1), modes=AUTO_MODES),
    "grad_accumulation_step": Key(default=1, check=integer(1), modes=AUTO_MODES),
}
"""Ranges, defaults and modes of ``set_auto_parallel_context``; ``mirror_mean`` and ``cross_batch`` are older names."""

OLDER_NAMES: Mapping[str, str] = {"auto_parallel_search_mode": "search_mode", "mirror_mean": "gradients_mean"}
"""Keys kept under an older name, which warns; both names always hold the same value."""
