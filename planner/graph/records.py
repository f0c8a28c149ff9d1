"""Values of a traced graph as specs and arguments; multiples of the marker become the batch size."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from planner.graph.operator_graph import Argument, BatchSize, TensorRef, TensorSpec
from simulator.errors import UnsupportedError

NO_TENSOR = TensorSpec(shape=(0,), dtype="float32", batch_dims=(False,))
"""Stands for an output that the operator was told to leave out."""
_DROPPED_KEYWORDS = {"device", "layout", "pin_memory"}
_SIZED = {torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten.reshape.default}


@dataclass(frozen=True, slots=True)
class Recorder:
    """Translates fake tensors and arguments, given the prime that stands for the batch size."""

    marker: int

    def specs(self, value: Any) -> tuple[TensorSpec, ...]:
        """Specs of a node's outputs at batch 1."""
        values = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(self._spec(item) if isinstance(item, Tensor) else NO_TENSOR for item in values)

    def _spec(self, value: Tensor) -> TensorSpec:
        grows = tuple(dim % self.marker == 0 and dim > 0 for dim in value.shape)
        return TensorSpec(
            shape=tuple(dim // self.marker if g else int(dim) for dim, g in zip(value.shape, grows, strict=True)),
            dtype=str(value.dtype).removeprefix("torch."),
            batch_dims=grows,
        )

    def arguments(
        self, node: fx.Node, index_of: Mapping[fx.Node, int]
    ) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        """Positional and keyword arguments of a call; sizes of views are explicit."""
        args = list(node.args)
        if node.target in _SIZED:
            args[1] = tuple(node.meta["val"].shape)
        keywords = sorted((k, v) for k, v in node.kwargs.items() if k not in _DROPPED_KEYWORDS and v is not None)
        return (
            tuple(self._argument(a, index_of) for a in args),
            tuple((k, self._argument(v, index_of)) for k, v in keywords),
        )

    def _argument(self, value: Any, index_of: Mapping[fx.Node, int]) -> Argument:
        if isinstance(value, fx.Node):
            return reference(value, index_of)
        if isinstance(value, (tuple, list)):
            return tuple(self._argument(item, index_of) for item in value)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)):
            whole = value != 0 and value == value and abs(value) != float("inf") and value % self.marker == 0
            return BatchSize(int(value) // self.marker) if whole else value
        if isinstance(value, (torch.dtype, torch.memory_format)):
            return str(value)
        if isinstance(value, (torch.device, torch.layout)):
            return None
        raise UnsupportedError(
            f"operator argument {value!r} of type {type(value).__name__} is not supported; use numbers"
        )


def reference(node: fx.Node, index_of: Mapping[fx.Node, int]) -> TensorRef:
    """Refer to a traced value; picking from a tuple becomes the output's number."""
    if node.target is operator.getitem:
        source, output = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(output, int)
        return TensorRef(index_of[source], output)
    return TensorRef(index_of[node])
