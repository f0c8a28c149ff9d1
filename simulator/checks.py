"""Rules for the values of keys: each check returns the value as it is kept, or raises ContextError."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from simulator.errors import ContextError

Check = Callable[[str, Any], Any]
"""Takes a key and a value; gives the value as it is kept."""

FUSION_KINDS = ("allreduce", "allgather", "reducescatter")
LEVELS = ("level1", "level2", "level3")
LARGEST_FUSION_MB = 2**14


def boolean(key: str, value: Any) -> bool:
    """True or False, nothing that only counts as one."""
    if not isinstance(value, bool):
        raise ContextError(f"{key}={value!r} is {_kind(value)}; it must be True or False")
    return value


def text(key: str, value: Any) -> str:
    """A string, for example a path; empty means none."""
    if not isinstance(value, str):
        raise ContextError(f"{key}={value!r} is {_kind(value)}; it must be a string, the path of a file")
    return value


def integer(least: int, most: int | None = None) -> Check:
    """Check that a key is a whole number between two bounds."""
    bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"

    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ContextError(f"{key}={value!r} is {_kind(value)}; it must be a whole number {bounds}")
        if value < least or (most is not None and value > most):
            nearest = least if value < least else most
            raise ContextError(f"{key}={value} is out of range; it must be {bounds}, the nearest is {nearest}")
        return value

    return check


def choice(*known: str) -> Check:
    """Check that a key is one of these words."""

    def check(key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            near = difflib.get_close_matches(str(value), known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ContextError(f"{key}={value!r} is not one of {', '.join(known)}{hint}")
        return value

    return check


def dataset_strategy(key: str, value: Any) -> str | tuple[tuple[int, ...], ...]:
    """``"data_parallel"``, ``"full_batch"``, or one tuple of cuts for each input of the network."""
    if isinstance(value, str):
        return str(choice("data_parallel", "full_batch")(key, value))
    return strategy(key, value)


def strategy(key: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """One tuple a tensor: in how many parts each of its dims is cut."""
    if not isinstance(value, tuple) or not value:
        raise ContextError(
            f"{key}={value!r} is {_kind(value)}; it must be a tuple with one tuple a tensor, such as ((2, 1), (1, 4))"
        )
    for place, cuts in enumerate(value):
        if not isinstance(cuts, tuple):
            raise ContextError(
                f"{key}[{place}]={cuts!r} is {_kind(cuts)}; every tensor has a tuple with one number a dim, for "
                f"example (2, 1)"
            )
        for dim, parts in enumerate(cuts):
            if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
                raise ContextError(
                    f"{key}[{place}][{dim}]={parts!r}: a dim is cut in a whole number of parts, 1 where it is whole"
                )
    return value


def indices(key: str, value: Any) -> tuple[int, ...]:
    """Ascending places at which a row of messages is divided: ``[20, 35]`` makes three messages of it."""
    if not isinstance(value, list | tuple) or not value:
        raise ContextError(
            f"{key}={value!r} is {_kind(value) if value != [] else 'empty'}; it must list ascending places, for "
            f"example [20, 35]"
        )
    for place in value:
        if isinstance(place, bool) or not isinstance(place, int) or place < 1:
            raise ContextError(f"{key} has {place!r}; places are whole numbers of at least 1, for example [20, 35]")
    for before, after in itertools.pairwise(value):
        if after <= before:
            raise ContextError(f"{key} has {after} after {before}; places ascend and are there once: sort them")
    return tuple(value)


def optimizer_config(key: str, value: Any) -> dict[str, Any]:
    """Keys of ``parallel_optimizer_config``; what is not given keeps its default."""
    known: Mapping[str, Check] = {
        "gradient_accumulation_shard": boolean,
        "parallel_optimizer_threshold": integer(0),
        "optimizer_weight_shard_size": integer(2),
        "optimizer_level": choice(*LEVELS),
    }
    found = _mapping(key, value, known)
    if "optimizer_level" in found and "gradient_accumulation_shard" in found:
        level, shards = found["optimizer_level"], found["gradient_accumulation_shard"]
        if shards != (level != "level1"):
            raise ContextError(
                f"{key}: optimizer_level={level} and gradient_accumulation_shard={shards} contradict each other; "
                f"level1 keeps gradients whole, level2 and level3 shard them: leave gradient_accumulation_shard out"
            )
    return found


def comm_fusion(key: str, value: Any) -> dict[str, Any]:
    """Keys of ``comm_fusion``: for each kind of collective a mode and its configuration."""
    known: dict[str, Check] = {"openstate": boolean}
    known |= {kind: _fusion(kind == "allreduce") for kind in FUSION_KINDS}
    return _mapping(key, value, known)


def _fusion(by_index: bool) -> Check:
    modes = ("auto", "size", "index") if by_index else ("auto", "size")

    def check(key: str, value: Any) -> dict[str, Any]:
        found = _mapping(key, value, {"mode": choice(*modes), "config": lambda name, given: given})
        if "mode" not in found:
            raise ContextError(f"{key} has no mode; give one of {', '.join(modes)}, for example {{'mode': 'auto'}}")
        mode, config = found["mode"], found.get("config")
        if mode == "size":
            config = integer(1, LARGEST_FUSION_MB)(f"{key}.config", config)
        elif mode == "index":
            config = indices(f"{key}.config", config)
        elif config is not None:
            raise ContextError(
                f"{key}.config={config!r}: mode auto has no configuration; leave it out or use mode size"
            )
        return {"mode": mode, "config": config}

    return check


def _mapping(key: str, value: Any, known: Mapping[str, Check]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ContextError(f"{key}={value!r} is {_kind(value)}; it must be a dict with keys of {', '.join(known)}")
    for name in value:
        if name not in known:
            raise ContextError(f"{key} has {unknown(str(name), known)}")
    return {name: known[name](f"{key}.{name}", given) for name, given in value.items()}


def unknown(name: str, known: Iterable[str]) -> str:
    """Words for a key that does not exist."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"no key {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"keys are {', '.join(names)}")


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return tuple(dict.fromkeys([*small, *(number // part for part in reversed(small))]))


def near_divisors(value: int, number: int) -> str:
    """The divisors of a number below and above a value that is none.

    >>> near_divisors(3, 32), near_divisors(9, 8)
    ('2 or 4', '8')
    """
    less, more = [d for d in divisors(number) if d < value], [d for d in divisors(number) if d > value]
    return " or ".join(map(str, [*less[-1:], *more[:1]]))


def nearest(name: str, known: Iterable[str]) -> str:
    """Words that say which known name is meant.

    >>> nearest("recompue", ["recompute", "schedule"])
    "did you mean 'recompute'?"
    >>> nearest("x", ["recompute", "schedule"])
    'choose one of recompute, schedule'
    """
    names = list(known)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {found[0]!r}?" if found else f"choose one of {', '.join(names)}"


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
