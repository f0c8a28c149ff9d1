"""Low-rank adapters as the configuration of Hugging Face's PEFT describes them (``adapter_config.json``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.errors import NetworkError, UnsupportedError

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
_MAXIMUM_RANK = 1 << 16
_MAXIMUM_ALPHA = 1e9
_CHANGING = (
    *("bias", "use_dora", "use_qalora", "lora_bias", "layers_to_transform", "layers_pattern", "layer_replication"),
    *("rank_pattern", "alpha_pattern", "exclude_modules", "target_parameters", "trainable_token_indices"),
    "megatron_config",
)
"""Keys that change what is computed, where they are not null, false, empty or ``none`` (of ``bias``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Trained products of low rank beside frozen ones (LoRA, Hu et al., arXiv:2106.09685).

    A product ``x W`` of a module that `adapts` names becomes ``x W + scaling (x A) B``, where ``A`` has ``rank``
    columns. All other parameters are frozen, but for those of modules that `trains` names. ``targets`` are names, or
    one regular expression of whole names, or ``all-linear`` for every product but the network's last.
    """

    rank: int
    scaling: float
    targets: tuple[str, ...] | str
    saved: tuple[str, ...] = ()

    def adapts(self, name: str) -> bool:
        """Whether a module's whole name is one of the targets; that of ``all-linear`` is not known by name."""
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, name) is not None
        return _ends(name, self.targets)

    def trains(self, name: str) -> bool:
        """Whether a module is trained in full."""
        return _ends(name, self.saved)

    @property
    def note(self) -> str:
        """What the network's description says of them."""
        where = self.targets if isinstance(self.targets, str) else ", ".join(self.targets)
        whole = f" and {', '.join(self.saved)}" if self.saved else ""
        return f"adapters of rank {self.rank} on {where}{whole} are trained; all else is frozen"


def read_adapters(path: Path, config: Mapping[str, Any]) -> tuple[Adapters, tuple[str, ...]]:
    """Read what an ``adapter_config.json`` holds; beside it notes on what is left out.

    Raises
    ------
    NetworkError, UnsupportedError
        A key is wrong, or asks for what is not supported; the message names it.
    """
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind.upper() != "LORA":
        raise UnsupportedError(f"{path}: key 'peft_type' is {kind!r}; adapters are supported as 'LORA' alone")
    for key in _CHANGING:
        value = config.get(key)
        if value and (key, value) != ("bias", "none"):
            raise UnsupportedError(f"{path}: key {key!r} is {value!r}, which is not supported; leave it out")
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _MAXIMUM_RANK:
        raise NetworkError(f"{path}: key 'r' is {rank!r}; it must be a whole number from 1 to {_MAXIMUM_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < _MAXIMUM_ALPHA:
        raise NetworkError(f"{path}: key 'lora_alpha' is {alpha!r}; it must be a number from 0 to {_MAXIMUM_ALPHA:g}")
    adapters = Adapters(
        rank=rank,
        scaling=alpha / (rank**0.5 if config.get("use_rslora") else rank),
        targets=_targets(path, config.get("target_modules")),
        saved=_names(path, "modules_to_save", config.get("modules_to_save") or []),
    )
    dropped = (f"dropout is left out (lora_dropout of {path.name})",) if config.get("lora_dropout") else ()
    return adapters, (adapters.note, *dropped)


def _targets(path: Path, value: object) -> tuple[str, ...] | str:
    if not isinstance(value, str):
        found = _names(path, "target_modules", value)
        if not found:
            raise NetworkError(f"{path}: key 'target_modules' is {value!r}; name the modules that get an adapter")
        return found
    try:
        re.compile(value)
    except re.error as error:
        raise NetworkError(f"{path}: key 'target_modules' is no regular expression ({error}): {value!r}") from error
    return value


def _names(path: Path, key: str, value: object) -> tuple[str, ...]:
    """Names in an order of their own, as PEFT writes them as a set."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name for name in value):
        raise NetworkError(f"{path}: key {key!r} is {value!r}; it must be a list of module names")
    return tuple(sorted(value))


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
