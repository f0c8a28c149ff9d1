"""Dropout as an operator of its own in captured graphs: who runs it draws the mask, the same for any sharding."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


@cache
def dropout_operator() -> OpOverload:
    """Define `planner.graph.operator_graph.DROPOUT` for torch as far as capture needs it: shapes and gradient."""

    @torch.library.custom_op("meshwright::dropout", mutates_args=())
    def dropout(x: Tensor, p: float) -> Tensor:
        raise NotImplementedError("dropout of a captured graph is run by planner.sharding.local_dropout")

    def keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.p = inputs[1]

    dropout.register_fake(lambda x, p: torch.empty_like(x))
    dropout.register_autograd(lambda ctx, gradient: (dropout(gradient, ctx.p), None), setup_context=keep)
    return torch.ops.meshwright.dropout.default
