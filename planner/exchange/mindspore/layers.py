"""What a file in MindFormers' style says of single layers, as marks on the blocks of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from typing import TYPE_CHECKING, Any

from planner.exchange.mindspore.layer_modes import (
    KEPT,
    SELECTIVE,
    WHOLE,
    Layer,
    LayerChoice,
    LayerCounts,
    is_foreign,
    layer_mode,
    pattern_of,
    read_choices,
    read_counts,
    read_rows,
    shown,
)
from planner.networks.marks import Marks, Swap, prefetched
from simulator.checks import boolean, integer, unknown
from simulator.errors import ContextError, UnsupportedError

if TYPE_CHECKING:
    from planner.exchange.mindspore.layer_modes import Layer
    from planner.graph.operator_graph import OperatorGraph


RECOMPUTE = "recompute_config.recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings:
    """Settings layer by layer.

    Attributes
    ----------
    offset : layers that each stage has more than its even share, in one row for each chunk of a stage; empty: not said
    recompute : which layers compute again whole, where they are counted
    select : which layers compute again in part, and what of them
    exclude : what does not compute again
    messages : layers whose messages are sent again, though they compute again in part or ``resends`` is not so
    resends : whether the messages of layers that compute again whole are sent again
    swaps : what layers have on the host from the forward to the backward pass
    groups : groups of neighbouring layers whose gradients travel in one message; None for none said
    """

    offset: tuple[tuple[int, ...], ...] = ()
    recompute: LayerCounts | None = None
    select: tuple[LayerChoice, ...] = ()
    exclude: tuple[LayerChoice, ...] = ()
    messages: tuple[LayerChoice, ...] = ()
    resends: bool = True
    swaps: tuple[SwapRule, ...] = ()
    groups: int | None = None

    def __bool__(self) -> bool:
        return bool(self.offset or self.recomputes or self.swaps or self.groups)

    @property
    def notes(self) -> tuple[str, ...]:
        """The settings that the plan follows only approximately."""
        foreign = [choice.pattern for choice in self.select if is_foreign(choice.pattern)]
        if not foreign:
            return ()
        return (
            f"select_recompute of {', '.join(foreign)}: networks without such modules compute again all that is cheap",
        )

    @property
    def recomputes(self) -> bool:
        """Whether it is said layer by layer what computes again."""
        return self.recompute is not None or bool(self.select or self.exclude)

    def marks(self, graph: OperatorGraph, stages: int, virtual: int = 1) -> Marks:
        """Marks of the blocks of a network on `stages` pipeline stages of `virtual` chunks.

        Where layers are told apart by stage, the stages are MindFormers': even shares and the offset, what lies
        before the layers on the first and what lies behind them on the last chunk.

        Raises
        ------
        ContextError
            The network has no row of equal layers, or numbers do not fit it; they are in the message.
        UnsupportedError
            A layer is to compute again in a part that is none of the known ones.
        """
        from planner.exchange.pinned import layer_names
        from planner.graph.unfolding import run_start

        run = max(graph.runs, key=lambda run: run.count, default=None)
        if run is None:
            if not self.offset and not self.recomputes and not self.swaps:
                return Marks()  # groups of layers say nothing of a network without any
            raise ContextError(f"{graph.network} has no row of equal layers, which {self._said()} speaks of")
        # Layers in front that are unlike the others, such as dense ones before experts, count as well.
        start = run_start(graph, run)
        names = max(layer_names(graph), [f"{run.prefix}.{start + n}" for n in range(run.count)], key=len)
        count = len(names)
        marked: dict[str, Any] = {}
        apart = bool(self.offset) or (self._counts_layers() and stages > 1)
        chunks = self.layers_of_chunks(count, stages, virtual) if apart else [count]
        if len(chunks) > 1:
            numbers = joined.from_iterable([number] * size for number, size in enumerate(chunks))
            marked |= {"stages": dict(zip(names, numbers, strict=True)), "virtual": virtual}
        if self.recomputes:
            modes = self._modes(Layer.of(graph, run), chunks, stages if apart else 1)
            sent = self._sent(modes, chunks, stages if apart else 1)
            marked["recompute"] = {name: _MARKS[mode] for name, mode in zip(names, modes, strict=True)}
            marked["messages"] = dict(zip(names, sent, strict=True))
        if self.swaps:
            away = swapped_layers(self.swaps, Layer.of(graph, run), count)
            marked["offload"] = {names[number]: swap for number, swap in away.items()}
        if self.groups is not None:
            size = max((count + 1) // self.groups, 1)
            marked["fusion"] = {name: layer // size + 1 for layer, name in enumerate(names)}
        return Marks(**marked)

    def layers_of_chunks(self, layers: int, stages: int, virtual: int = 1) -> list[int]:
        """Layers of each chunk, in the order of the network.

        Raises
        ------
        ContextError
            There is not one number a chunk, or a chunk would have no layer, or layers are left over.
        """
        pieces, said = stages * virtual, shown(self.offset)
        of = f"pipeline_stage={stages}" + (f" × pp_interleave_num={virtual}" if virtual > 1 else "")
        if not self.offset and layers % pieces:
            raise ContextError(
                f"{self._counted_key()} counts layers of stages, and {of} does not divide num_layers={layers}; say "
                "with offset how many each has"
            )
        rows = self.offset or ((0,) * stages,) * virtual
        if len(rows) != virtual:
            raise ContextError(
                f"offset={said} has {len(rows)} row{'s' * (len(rows) > 1)} for pp_interleave_num={virtual}; give a "
                f"list of {stages} numbers for each chunk of a stage"
            )
        for row in rows:
            if len(row) != stages:
                raise ContextError(
                    f"offset={said} has {len(row)} numbers for pipeline_stage={stages}; give one for each stage"
                )
        found = [layers // pieces + more for row in rows for more in row]
        if sum(found) != layers or min(found) < 1:
            what = "chunks" if virtual > 1 else "stages"
            raise ContextError(
                f"offset={said} gives the {pieces} {what} {found} layers, {sum(found)} in all: each needs at "
                f"least 1, and there are {layers}; their offsets add up to {layers - layers // pieces * pieces}"
            )
        return found

    def _modes(self, layer: Layer, chunks: list[int], stages: int) -> list[str]:
        """How each layer computes again."""
        whole = self.recompute.chosen(chunks, stages) if self.recompute is not None else [False] * sum(chunks)
        chosen = [(choice, choice.counts.chosen(chunks, stages)) for choice in self.select]
        left_out = [(choice, choice.counts.chosen(chunks, stages)) for choice in self.exclude]
        messages = [choice.counts.chosen(chunks, stages) for choice in self.messages]
        found = []
        for number, again in enumerate(whole):
            parts = tuple(choice for choice, of in chosen if of[number])
            out = tuple(choice for choice, of in left_out if of[number])
            found.append(layer_mode(layer, again, parts, out))
            if found[-1] == KEPT and any(of[number] for of in messages):
                raise UnsupportedError(
                    f"recompute_config.select_comm_recompute names layer {number}, which keeps everything: messages "
                    "are sent again where a layer computes again, and are not supported yet by themselves; name the "
                    "layer in recompute or select_recompute as well, or leave it out"
                )
        return found

    def _sent(self, modes: Sequence[str], chunks: list[int], stages: int) -> list[bool]:
        """Whether each layer sends its messages again."""
        named = [choice.counts.chosen(chunks, stages) for choice in self.messages]
        return [
            mode == KEPT or (mode == WHOLE and self.resends) or any(of[number] for of in named)
            for number, mode in enumerate(modes)
        ]

    def _counted(self) -> list[LayerCounts]:
        of = [choice.counts for choice in (*self.select, *self.exclude, *self.messages)]
        return [one for one in (self.recompute, *of) if one is not None and one.rows]

    def _counts_layers(self) -> bool:
        return bool(self._counted())

    def _counted_key(self) -> str:
        first = self._counted()[0]
        return f"{first.key}={shown(first.rows or ())}"

    def _said(self) -> str:
        said: dict[str, object] = {"offset": self.offset, "recompute": self.recompute, "select_recompute": self.select}
        said |= {"swap_config": self.swaps}
        return " and ".join(name for name, value in said.items() if value) or "select_recompute_exclude"


_MARKS: Mapping[str, bool | str] = {KEPT: False, SELECTIVE: SELECTIVE, WHOLE: True}


def layer_settings(
    config: Mapping[str, Any], recompute: Mapping[str, Any], model: Mapping[str, Any], swap: Mapping[str, Any]
) -> LayerSettings:
    """Read what sections say of layers.

    Parameters
    ----------
    config, recompute, model, swap
        ``parallel_config``, ``recompute_config``, ``model.model_config`` and ``swap_config``.

    Raises
    ------
    ContextError
        A value is of a wrong type or out of range.
    """
    groups = config.get("gradient_aggregation_group")
    again = recompute.get("recompute")
    select, exclude, messages = (
        read_choices(f"recompute_config.{name}", recompute.get(name))
        for name in ("select_recompute", "select_recompute_exclude", "select_comm_recompute")
    )
    layered = said_by_layer(recompute)
    offset = model.get("offset")
    return LayerSettings(
        offset=() if offset in (None, 0) else read_rows("model.model_config.offset", offset, None),
        recompute=read_counts(RECOMPUTE, again) if layered and again is not None else None,
        select=select if layered else (),
        exclude=exclude,
        messages=messages if layered else (),
        swaps=read_swaps(swap),
        resends=recompute.get("mp_comm_recompute") is not False,
        groups=None if groups is None else integer(1)("parallel_config.gradient_aggregation_group", groups),
    )


def said_by_layer(recompute: Mapping[str, Any]) -> bool:
    """Whether ``recompute_config`` says of single layers, or of parts of them, what computes again."""
    values = [recompute.get(name) for name in ("recompute", "select_recompute")]
    return bool(recompute.get("select_recompute_exclude")) or any(
        value is not None and not isinstance(value, bool) for value in values
    )


SWAP_KEYS = ("swap", "default_prefetch", "layer_swap", "op_swap")
ALL_LAYERS = LayerCounts(key="swap_config", rows=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRule:
    """A rule that moves activations of some layers to the host.

    ``key`` is the key that sets it. ``layers`` are numbers of layers, None for all. ``pattern`` is a regular expression
    for whole names of modules and operators inside a layer, "" for everything.
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
        if name not in SWAP_KEYS:
            raise ContextError(f"swap_config has {unknown(str(name), SWAP_KEYS)}")
    given = section.get("default_prefetch")
    prefetch = prefetched("swap_config.default_prefetch", 1 if given is None else given)
    layers = _swap_rules("layer_swap", section.get("layer_swap"))
    operators = _swap_rules("op_swap", section.get("op_swap"))
    if not boolean("swap_config.swap", section.get("swap") or False):
        return ()
    return (*layers, *operators) or (SwapRule(key="swap_config.swap", prefetch=prefetch),)


def _swap_rules(name: str, value: Any) -> tuple[SwapRule, ...]:
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
        layers = _layer_numbers(f"{at}.layers", item.get("layers", True))
        names = item.get("op_name", "") if name == "layer_swap" else item.get("op_name")
        patterns = names if isinstance(names, list) and names else [names]
        for one in patterns:
            pattern = "" if name == "layer_swap" else pattern_of(f"{at}.op_name", one)
            if layers != ():
                found.append(SwapRule(key=at, prefetch=prefetch, layers=layers, pattern=pattern))
    return tuple(found)


def _layer_numbers(key: str, value: Any) -> tuple[int, ...] | None:
    if isinstance(value, bool):
        return None if value else ()
    if not isinstance(value, list) or not value:
        raise ContextError(f"{key}={value!r} is neither True nor a list of numbers of layers, such as [0, 1]; use one")
    number = integer(0)
    return tuple(number(key, layer) for layer in value)


def swapped_layers(rules: Sequence[SwapRule], layer: Layer, count: int) -> dict[int, Swap]:
    """Layers, of `count` equal ones, that keep something on the host, and what they keep.

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
        chosen = [LayerChoice(key=rule.key, pattern=rule.pattern, counts=ALL_LAYERS) for rule in mine]
        nodes = sorted(frozenset[int]().union(*map(layer.matching, chosen)))
        found[number] = Swap(prefetch=prefetch, operators=tuple(layer.inner[node] for node in nodes))
    return found
