"""``swap_config`` of files in MindFormers' style: which layers have activations in the memory of the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.exchange.mindspore.layer_counts import LayerCounts
from planner.exchange.mindspore.layer_modes import LayerChoice, pattern_of
from planner.networks.marks import Swap, prefetched
from simulator.checks import boolean, integer, unknown
from simulator.errors import ContextError

if TYPE_CHECKING:
    from planner.exchange.mindspore.layer_modes import Layer

KEYS = ("swap", "default_prefetch", "layer_swap", "op_swap")
ALL = LayerCounts(key="swap_config", rows=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRule:
    """What of some layers goes to the host.

    ``key`` says so; ``layers`` are their numbers, None for all; ``pattern`` is a regular expression for whole names of
    modules and operators inside, "" for everything.
    """

    key: str
    prefetch: int
    layers: tuple[int, ...] | None = None
    pattern: str = ""

    def counts(self, layer: int) -> bool:
        """Whether a layer is meant."""
        return self.layers is None or layer in self.layers


def read_swaps(section: Mapping[str, Any]) -> tuple[SwapRule, ...]:
    """Read ``swap_config``; nothing where ``swap`` is False.

    Raises
    ------
    ContextError
        A key is unknown, or a value is of a wrong type or out of range.
    """
    for name in section:
        if name not in KEYS:
            raise ContextError(f"swap_config has {unknown(str(name), KEYS)}")
    given = section.get("default_prefetch")
    prefetch = prefetched("swap_config.default_prefetch", 1 if given is None else given)
    layers = _rules("layer_swap", section.get("layer_swap"))
    operators = _rules("op_swap", section.get("op_swap"))
    if not boolean("swap_config.swap", section.get("swap") or False):
        return ()
    return (*layers, *operators) or (SwapRule(key="swap_config.swap", prefetch=prefetch),)


def _rules(name: str, value: Any) -> tuple[SwapRule, ...]:
    """Read a list of mappings; an operator may be given by several patterns."""
    key = f"swap_config.{name}"
    if value is None:
        return ()
    known = ("backward_prefetch", "layers", *(("op_name",) if name == "op_swap" else ()))
    example = "[{backward_prefetch: 20, layers: [0, 1]" + (", op_name: '.*norm'}]" if name == "op_swap" else "}]")
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ContextError(f"{key}={value!r} is no list of mappings; write for example {example}")
    found = []
    for place, item in enumerate(value):
        at = f"{key}[{place}]"
        for inner in item:
            if inner not in known:
                raise ContextError(f"{at} has {unknown(str(inner), known)}")
        prefetch = prefetched(f"{at}.backward_prefetch", item.get("backward_prefetch", 1))
        layers = _layers(f"{at}.layers", item.get("layers", True))
        names = item.get("op_name", "") if name == "layer_swap" else item.get("op_name")
        patterns = names if isinstance(names, list) and names else [names]
        for one in patterns:
            pattern = "" if name == "layer_swap" else pattern_of(f"{at}.op_name", one)
            if layers != ():
                found.append(SwapRule(key=at, prefetch=prefetch, layers=layers, pattern=pattern))
    return tuple(found)


def _layers(key: str, value: Any) -> tuple[int, ...] | None:
    if isinstance(value, bool):
        return None if value else ()
    if not isinstance(value, list) or not value:
        raise ContextError(f"{key}={value!r} is neither True nor a list of numbers of layers, such as [0, 1]; use one")
    number = integer(0)
    return tuple(number(key, layer) for layer in value)


def swapped_layers(rules: Sequence[SwapRule], layer: Layer, count: int) -> dict[int, Swap]:
    """What each of `count` equal layers has on the host, of those that have something.

    Raises
    ------
    ContextError
        A rule names a layer that there is not, or a pattern names nothing.
    """
    for rule in rules:
        beyond = [number for number in rule.layers or () if number >= count]
        if beyond:
            raise ContextError(
                f"{rule.key}.layers names layer {beyond[0]}, and {layer.network} has layers 0 to {count - 1}; leave it "
                "out"
            )
    found: dict[int, Swap] = {}
    for number in range(count):
        mine = [rule for rule in rules if rule.counts(number)]
        if not mine:
            continue
        whole = [rule.prefetch for rule in mine if not rule.pattern]
        if whole:
            found[number] = Swap(prefetch=max(whole))
            continue
        prefetch = max(rule.prefetch for rule in mine)
        chosen = [LayerChoice(key=rule.key, pattern=rule.pattern, counts=ALL) for rule in mine]
        nodes = sorted(frozenset[int]().union(*map(layer.matching, chosen)))
        found[number] = Swap(prefetch=prefetch, operators=tuple(layer.inner[node] for node in nodes))
    return found
