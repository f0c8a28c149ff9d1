"""What a file in MindFormers' style says of single layers, as marks on the blocks of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from typing import TYPE_CHECKING, Any

from planner.exchange.mindspore.layer_counts import LayerCounts, read_counts, read_rows, shown
from planner.exchange.mindspore.layer_modes import (
    KEPT,
    SELECTIVE,
    WHOLE,
    Layer,
    LayerChoice,
    is_foreign,
    layer_mode,
    read_choices,
)
from planner.exchange.mindspore.swapping import SwapRule, read_swaps, swapped_layers
from planner.networks.marks import Marks
from simulator.checks import integer
from simulator.errors import ContextError, UnsupportedError

if TYPE_CHECKING:
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
    config: Mapping[str, Any],
    recompute: Mapping[str, Any],
    model: Mapping[str, Any],
    swap: Mapping[str, Any],
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
