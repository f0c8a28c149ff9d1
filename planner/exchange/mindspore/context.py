"""The auto-parallel context: keys that are set, read, reset and nested."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
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
    near_divisors,
    optimizer_config,
    text,
    unknown,
)
from simulator.errors import ContextError, IgnoredKeyWarning

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


class AutoParallelContext:
    """What is said of how a network is to be parallel; keys that are not set have their defaults.

    Values are checked when they are set, all of a call or none: what is out of range or contradicts another key that
    is set raises ContextError (a ValueError) and changes nothing.

    Examples
    --------
    >>> context = AutoParallelContext(parallel_mode="auto_parallel", device_num=8)
    >>> context.set(pipeline_stages=2)
    >>> context.get("pipeline_stages"), context.get("search_mode")
    (2, 'dynamic_programming')
    >>> context.set(pipeline_stages=3)
    Traceback (most recent call last):
    ...
    simulator.errors.ContextError: pipeline_stages=3 does not divide device_num=8; use 2 or 4
    """

    def __init__(self, **keys: Any) -> None:
        self._set: dict[str, Any] = {}
        if keys:
            self.set(**keys)

    def set(self, **keys: Any) -> None:
        """Set some keys.

        Raises
        ------
        ContextError
            A key is unknown, a value is wrong, or values contradict each other.

        Warns
        -----
        DeprecationWarning
            An older name of a key is used.
        IgnoredKeyWarning
            A key is set that the parallel mode does not read.
        """
        given = _checked(keys)
        found = {**self._set, **given}
        _check_together(found)
        newly = set(found) if "parallel_mode" in given else set(given)
        self._set = found
        for name in keys:
            if name in OLDER_NAMES:
                message = f"{name} is the older name of {OLDER_NAMES[name]}; use {OLDER_NAMES[name]}"
                _warn(message, DeprecationWarning)
        for name in sorted(newly):
            self._warn_if_ignored(name)

    def get(self, key: str) -> Any:
        """Value of a key, set or default; ContextError where there is no such key."""
        if key not in KEYS:
            raise ContextError(f"the auto-parallel context has {unknown(key, KEYS)}")
        name = OLDER_NAMES.get(key, key)
        return copy.deepcopy(self._set.get(name, KEYS[name].default))

    def is_set(self, key: str) -> bool:
        """Whether a key was set since the last reset."""
        return OLDER_NAMES.get(key, key) in self._set

    def counts(self, key: str) -> bool:
        """Whether a key is set and the parallel mode reads it."""
        name = OLDER_NAMES.get(key, key)
        return name in self._set and self.get("parallel_mode") in KEYS[name].modes

    def counted(self, key: str, otherwise: Any = None) -> Any:
        """Value of a key that counts, else `otherwise`."""
        return self.get(key) if self.counts(key) else otherwise

    def reset(self) -> None:
        """Give every key its default."""
        self._set = {}

    def values(self) -> dict[str, Any]:
        """Every key with its value."""
        return {name: self.get(name) for name in KEYS}

    def copy(self) -> AutoParallelContext:
        """A context of its own with the same keys set."""
        made = AutoParallelContext()
        made._set = copy.deepcopy(self._set)
        return made

    def _warn_if_ignored(self, name: str) -> None:
        mode = self._set.get("parallel_mode")
        if mode is None or mode in KEYS[name].modes or self._set[name] == KEYS[name].default:
            return
        reads = ", ".join(KEYS[name].modes)
        message = f"parallel_mode={mode} does not read {name}={self._set[name]!r}; it counts in {reads}"
        _warn(message, IgnoredKeyWarning)


def _warn(message: str, category: type[Warning]) -> None:
    """Warn of the line outside this module that set the key."""
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "contextlib"):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)


_DEFAULT = AutoParallelContext()
_CURRENT: ContextVar[AutoParallelContext | None] = ContextVar("auto_parallel_context", default=None)


def current_context() -> AutoParallelContext:
    """The innermost context entered with `auto_parallel_context`, else the default one."""
    return _CURRENT.get() or _DEFAULT


def set_auto_parallel_context(**keys: Any) -> None:
    """Set keys of the current context; `AutoParallelContext.set` says what is raised and warned."""
    current_context().set(**keys)


def get_auto_parallel_context(key: str) -> Any:
    """Value of a key of the current context."""
    return current_context().get(key)


def reset_auto_parallel_context() -> None:
    """Give every key of the current context its default."""
    current_context().reset()


@contextmanager
def auto_parallel_context(**keys: Any) -> Iterator[AutoParallelContext]:
    """Keys that hold inside a ``with`` block, on top of those outside; nothing of it remains afterwards."""
    inner = current_context().copy()
    inner.set(**keys)
    token = _CURRENT.set(inner)
    try:
        yield inner
    finally:
        _CURRENT.reset(token)


def _checked(keys: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in keys.items():
        if name not in KEYS:
            raise ContextError(f"the auto-parallel context has {unknown(name, KEYS)}")
        newest = OLDER_NAMES.get(name, name)
        checked = KEYS[name].check(name, copy.deepcopy(value))
        if newest in found and found[newest] != checked:
            other = given[newest]
            raise ContextError(f"{other}={found[newest]!r} and {name}={value!r} are one key; give {newest} alone")
        found[newest], given[newest] = checked, name
    return found


def _check_together(found: Mapping[str, Any]) -> None:
    """Contradictions among keys that are set; a key left at its default contradicts nothing."""
    devices, mode = found.get("device_num"), found.get("parallel_mode")
    rank, stages = found.get("global_rank"), found.get("pipeline_stages", 1)
    if devices is not None and rank is not None and rank >= devices:
        raise ContextError(f"global_rank={rank} with device_num={devices}: ranks go from 0 to {devices - 1}")
    if devices is not None and devices % stages:
        near = near_divisors(stages, devices)
        raise ContextError(f"pipeline_stages={stages} does not divide device_num={devices}; use {near}")
    if mode == "stand_alone" and devices is not None and devices > 1:
        raise ContextError(
            f"parallel_mode=stand_alone runs on one device, device_num={devices}; use data_parallel or more"
        )
    _check_data(found, mode, devices, stages)
    by_kind = found.get("comm_fusion", {}).get("allreduce")
    listed = found.get("all_reduce_fusion_config")
    if by_kind is not None and listed is not None and by_kind != {"mode": "index", "config": tuple(listed)}:
        raise ContextError(
            f"all_reduce_fusion_config={list(listed)} and comm_fusion.allreduce={by_kind} both say how all-reduces are "
            f"fused; give one of them"
        )
    if found.get("parallel_optimizer_config") and found.get("enable_parallel_optimizer") is False:
        raise ContextError(
            "parallel_optimizer_config is set and enable_parallel_optimizer is False; set "
            "enable_parallel_optimizer=True or leave the configuration out"
        )


def _check_data(found: Mapping[str, Any], mode: str | None, devices: int | None, stages: int) -> None:
    full, data = found.get("full_batch"), found.get("dataset_strategy")
    if full and mode in ("data_parallel", "hybrid_parallel"):
        raise ContextError(
            f"full_batch=True with parallel_mode={mode}: there every device loads its own part of the batch; use "
            f"full_batch=False or semi_auto_parallel or auto_parallel"
        )
    if full is not None and data is not None and data != ("full_batch" if full else "data_parallel"):
        raise ContextError(
            f"full_batch={full} and dataset_strategy={data!r} contradict each other; give dataset_strategy alone"
        )
    if devices is None or not isinstance(data, tuple):
        return
    inside = devices // stages
    for place, cuts in enumerate(data):
        if inside % (parts := prod(cuts)):
            raise ContextError(
                f"dataset_strategy[{place}]={cuts} cuts in {parts} parts, and a stage has {inside} devices (device_num="
                f"{devices}, pipeline_stages={stages}); the parts must divide them"
            )
