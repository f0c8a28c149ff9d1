r"""Linear recurrences of a matrix state, as operators of their own in captured graphs.

State-space layers (Mamba-2: Dao and Gu, arXiv:2405.21060) and gated delta rules (Yang et al., arXiv:2412.06464) read
and write one state :math:`S` of a head, token by token:

.. math:: S_t = e^{g_t} S_{t-1} + k_t w_t^T, \qquad o_t = S_t^T q_t

with :math:`w_t = v_t`, or by a delta rule of rate :math:`\beta_t` with
:math:`w_t = \beta_t (v_t - e^{g_t} S_{t-1}^T k_t)`. Written out in products, such a layer is hundreds to thousands of
operators, with all pieces in memory. Kernels of GPUs (mamba-ssm, flash-linear-attention) work chunk by chunk in one,
and compute again in the backward pass, so that one operator each way stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from planner.graph.operator_graph import RECURRENCE


@cache
def recurrence_operator() -> OpOverload:
    """Define `planner.graph.operator_graph.RECURRENCE` and its gradient for torch.

    It takes query and key ``(batch, heads, length, width)``, value ``(batch, value heads, length, value width)``,
    of whose heads several in a row may share one of the others, logarithms of the decay and rates
    ``(batch, value heads, length)``, these None without a delta rule, and the tokens of a chunk. It returns the
    outputs, shaped as the value. The result does not depend on the chunk, which says how kernels divide the work;
    here one token comes after the other.
    """

    @torch.library.custom_op("meshwright::linear_recurrence", mutates_args=())
    def forward(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, chunk: int) -> Tensor:
        query, key = (_per_head(tensor, value) for tensor in (query, key))
        steps = _steps(key, value, decay, rate)
        found = [query[:, :, t, None] @ state for t, (_, _, state) in enumerate(steps)]
        return torch.cat(found, 2).to(value.dtype)

    @torch.library.custom_op("meshwright::linear_recurrence_backward", mutates_args=())
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return _gradients(gradient, query, key, value, decay, rate)

    def backward_shapes(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
        decay, rate, _chunk = others
        of_rate = value.new_empty(0) if rate is None else torch.empty_like(rate)
        return (*map(torch.empty_like, (query, key, value, decay)), of_rate)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.chunk = inputs
        ctx.save_for_backward(*tensors)

    def gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        *others, rate = ctx.saved_tensors
        *found, of_rate = backward(gradient, *others, rate, ctx.chunk)
        return (*found, None if rate is None else of_rate, None)

    forward.register_fake(lambda query, key, value, *_: torch.empty_like(value))
    backward.register_fake(backward_shapes)
    forward.register_autograd(gradients, setup_context=keep)
    return torch.ops.meshwright.linear_recurrence.default


assert RECURRENCE == "meshwright.linear_recurrence.default"


def _per_head(tensor: Tensor, value: Tensor) -> Tensor:
    """Repeat each head for those of the values that share it."""
    return tensor.repeat_interleave(value.shape[1] // tensor.shape[1], 1)


def _steps(key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each token what is left of the state before it, what it writes, and the state behind it."""
    state = key.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1], dtype=decay.dtype)
    for t in range(value.shape[2]):
        left = state * decay[:, :, t, None, None].exp()
        written = value[:, :, t, None]
        if rate is not None:
            written = (written - key[:, :, t, None] @ left) * rate[:, :, t, None, None]
        state = left + key[:, :, t, :, None] @ written
        yield left, written, state


def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""Gradients of a recurrence, from the last token to the first.

    With :math:`dS_t = q_t do_t^T + dL_{t+1} e^{g_{t+1}}`: :math:`dq_t = S_t do_t`, :math:`dk_t = dS_t w_t`,
    :math:`dw_t = dS_t^T k_t`, :math:`dL_t = dS_t`, where :math:`L_t` is what is left of the state. A delta rule adds
    :math:`-L_t (\beta_t dw_t)` to :math:`dk_t` and :math:`-k_t (\beta_t dw_t)^T` to :math:`dL_t`; and
    :math:`dg_t = \sum dL_t L_t`.
    """
    wide_query, wide_key = (_per_head(tensor, value) for tensor in (query, key))
    steps = list(_steps(wide_key, value, decay, rate))
    found: dict[str, list[Tensor]] = {name: [] for name in ("query", "key", "value", "decay", "rate")}
    above = torch.zeros_like(steps[0][2])
    for t in reversed(range(value.shape[2])):
        left, written, state = steps[t]
        out, k = gradient[:, :, t, None].to(state.dtype), wide_key[:, :, t, None]
        above = above + wide_query[:, :, t, :, None] @ out
        of_key, of_written = written @ above.mT, k @ above
        if rate is not None:
            beta = rate[:, :, t, None, None]
            found["rate"].append((of_written * (value[:, :, t, None] - k @ left)).sum((-2, -1)))
            of_written = of_written * beta
            of_key = of_key - of_written @ left.mT
        below = above if rate is None else above - k.mT @ of_written
        found["query"].append(out @ state.mT)
        found["key"].append(of_key)
        found["value"].append(of_written)
        found["decay"].append((below * left).sum((-2, -1)))
        above = below * decay[:, :, t, None, None].exp()
    whole = {
        name: torch.cat(parts[::-1], 2) if parts and parts[0].dim() == 4 else torch.stack(parts[::-1], 2)
        for name, parts in found.items()
        if parts
    }
    return (
        *(_summed(whole[name], like) for name, like in (("query", query), ("key", key), ("value", value))),
        whole["decay"].to(decay.dtype),
        value.new_empty(0) if rate is None else whole["rate"].to(rate.dtype),
    )  # type: ignore[return-value]


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """Add the gradients of heads that share one."""
    batch, heads = like.shape[:2]
    return gradient.reshape(batch, heads, -1, *gradient.shape[2:]).sum(2).to(like.dtype)


def recurrence_flops(key: Any, value: Any, rate: Any, chunk: int) -> float:
    r"""Operations of a recurrence chunk by chunk, forward.

    Of a chunk of c tokens, keys k and values v wide: :math:`q k^T` takes :math:`2 c k` a token and head of the keys,
    :math:`(q k^T) v` :math:`2 c v` of the values, and what the state gives and takes :math:`4 k v`. A delta rule adds
    :math:`k k^T`, solves a triangle of c rows and applies it to keys and values, :math:`2 c (k + c / 3 + k + v)`, and
    takes off what the state has at the keys, :math:`2 k v` (arXiv:2412.06464, section 3.3).
    """
    tokens, width, value_width = int(key.shape[0] * key.shape[2]), int(key.shape[-1]), int(value.shape[-1])
    keys, values = int(key.shape[1]), int(value.shape[1])
    each = 2.0 * chunk * value_width + 4.0 * width * value_width
    if rate is not None:
        each += 2.0 * chunk * (2.0 * width + value_width + chunk / 3.0) + 2.0 * width * value_width
    return tokens * (keys * 2.0 * chunk * width + values * each)
