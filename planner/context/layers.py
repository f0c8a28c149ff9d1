"""What a file in MindFormers' style says of single layers, as marks on the blocks of a network."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from planner.context.checks import integer
from planner.context.errors import ContextError
from planner.context.marks import Marks
from simulator.errors import UnsupportedError

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings:
    """Settings layer by layer.

    Attributes
    ----------
    offset : for each stage, layers it has more than its even share; empty for none said
    recompute : for each stage (or one number for all), how many of its first layers compute again; empty for none said
    groups : groups of neighbouring layers whose gradients travel in one message; None for none said
    """

    offset: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    groups: int | None = None

    def __bool__(self) -> bool:
        return bool(self.offset or self.recompute or self.groups)

    def marks(self, graph: OperatorGraph, stages: int) -> Marks:
        """Marks of the blocks of a network on `stages` pipeline stages.

        Where layers are told apart by stage, the stages are MindFormers': even shares and the offset, what lies
        before the layers on the first and what lies behind them on the last stage.

        Raises
        ------
        ContextError
            The network has no row of equal layers, or numbers do not fit it; they are in the message.
        """
        from planner.graph.unfolding import run_start

        run = max(graph.runs, key=lambda run: run.count, default=None)
        if run is None:
            if not self.offset and not self.recompute:
                return Marks()  # groups of layers say nothing of a network without any
            raise ContextError(f"{graph.network} has no row of equal layers, which {self._said()} speaks of")
        start = run_start(graph, run)
        names = [f"{run.prefix}.{start + layer}" for layer in range(run.count)]
        marked: dict[str, Any] = {}
        if self.offset or (self.recompute and stages > 1):
            ends = list(accumulate(self.layers_of_stages(run.count, stages)))
            stage_of = [bisect_right(ends, layer) for layer in range(run.count)]
        else:
            ends, stage_of = [run.count], [0] * run.count
        if len(ends) > 1:
            marked["stages"] = dict(zip(names, stage_of, strict=True))
        if self.recompute:
            again = self.recompute if len(self.recompute) > 1 else self.recompute * len(ends)
            first = [0, *ends]
            marked["recompute"] = {
                name: layer - first[stage] < again[stage]
                for layer, (name, stage) in enumerate(zip(names, stage_of, strict=True))
            }
        if self.groups is not None:
            size = max((run.count + 1) // self.groups, 1)
            marked["fusion"] = {name: layer // size + 1 for layer, name in enumerate(names)}
        return Marks(**marked)

    def layers_of_stages(self, layers: int, stages: int) -> list[int]:
        """Layers of each stage.

        Raises
        ------
        ContextError
            There is not one number a stage, or a stage would have no layer, or layers are left over.
        """
        if len(self.recompute) not in (0, 1, stages):
            raise ContextError(
                f"recompute_config.recompute={list(self.recompute)} has {len(self.recompute)} numbers for "
                f"pipeline_stage={stages}; give one for each stage, or one for all"
            )
        if not self.offset and layers % stages:
            raise ContextError(
                f"recompute_config.recompute={list(self.recompute)} counts layers of stages, and "
                f"pipeline_stage={stages} does not divide num_layers={layers}; say with offset how many each has"
            )
        offset = self.offset or (0,) * stages
        if len(offset) != stages:
            raise ContextError(
                f"offset={list(offset)} has {len(offset)} numbers for pipeline_stage={stages}; give one for each stage"
            )
        found = [layers // stages + more for more in offset]
        if sum(found) != layers or min(found) < 1:
            raise ContextError(
                f"offset={list(offset)} gives the {stages} stages {found} layers, {sum(found)} in all: each needs at "
                f"least 1, and there are {layers}; their offsets add up to {layers - layers // stages * stages}"
            )
        return found

    def _said(self) -> str:
        said = {"offset": self.offset, "recompute": self.recompute}
        return " and ".join(name for name, value in said.items() if value)


def layer_settings(
    config: Mapping[str, Any], recompute: Mapping[str, Any], model: Mapping[str, Any], stages: int
) -> LayerSettings:
    """Read what sections say of layers.

    Parameters
    ----------
    config, recompute, model
        ``parallel_config``, ``recompute_config`` and ``model.model_config``.
    stages
        Pipeline stages.

    Raises
    ------
    ContextError
        A value is of a wrong type or out of range.
    UnsupportedError
        Layers are told apart by the chunks of a rank, or computed again in part.
    """
    groups = config.get("gradient_aggregation_group")
    again = recompute.get("recompute")
    counted = isinstance(again, int | list) and not isinstance(again, bool)
    return LayerSettings(
        offset=_offset(model.get("offset"), stages),
        recompute=_counts("recompute_config.recompute", again) if counted else (),
        groups=None if groups is None else integer(1)("parallel_config.gradient_aggregation_group", groups),
    )


def _offset(value: Any, stages: int) -> tuple[int, ...]:
    key = "model.model_config.offset"
    if value in (None, 0):
        return ()
    found = value if isinstance(value, list) else [value]
    if len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    if any(isinstance(item, list) for item in found):
        raise UnsupportedError(
            f"{key}={value!r} is not supported yet: layers of the chunks of a rank are cut by the search; give one "
            f"number for each of the {stages} stages and leave pp_interleave_num out, or leave offset out"
        )
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        raise ContextError(f"{key}={value!r} is no list of whole numbers, one for each stage, such as [1, -1]")
    return tuple(found)


def _counts(key: str, value: Any) -> tuple[int, ...]:
    found = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) for item in found):
        raise UnsupportedError(
            f"{key}={value!r} is not supported yet: say for each stage how many of its layers compute again, such "
            "as [2, 0]"
        )
    check = integer(0)
    return tuple(check(key, item) for item in found)
