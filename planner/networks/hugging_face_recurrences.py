"""Recurrences of transformers' models as one operator each: state-space scans and gated delta rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from planner.graph.recurrence import recurrence_operator


@contextmanager
def fused_recurrences(model: nn.Module) -> Iterator[None]:
    """While this is open, the model's code calls our operator in place of transformers' own functions in products."""
    places = {type(part).__module__: sys.modules[type(part).__module__] for part in model.modules()}
    found = [(place, name) for place in places.values() for name in _OURS if hasattr(place, name)]
    before = [getattr(place, name) for place, name in found]
    for place, name in found:
        setattr(place, name, _OURS[name])
    try:
        yield
    finally:
        for (place, name), function in zip(found, before, strict=True):
            setattr(place, name, function)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Outputs of a gated delta rule, tensors ``(batch, length, heads, width)``; training asks for no last state."""
    if use_qk_l2norm_in_kernel:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    tensors = (query * query.shape[-1] ** -0.5, key, value, g, beta.to(g.dtype))
    outputs = recurrence_operator()(*(x.transpose(1, 2) for x in tensors), chunk_size)
    return outputs.transpose(1, 2), None


def _scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,  # noqa: N803 they are given by name
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:  # fmt: skip
    """Outputs of a state-space scan, tensors ``(batch, length, heads, width)``, steps ``(batch, length, heads)``."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    if dt_limit[0] > 0 or isfinite(dt_limit[1]) or not dt_softplus:
        dt = dt.clamp(*dt_limit)
    taken = (C, B, hidden_states * dt.unsqueeze(-1), A * dt)
    outputs: Tensor = recurrence_operator()(*(x.transpose(1, 2) for x in taken), None, chunk_size).transpose(1, 2)
    return outputs if D is None else outputs + D.unsqueeze(-1) * hidden_states


_OURS: dict[str, Callable[..., Any]] = {"torch_chunk_gated_delta_rule": _delta_rule, "mamba2_chunk_scan": _scan}
"""By the names that transformers' models call them by."""
