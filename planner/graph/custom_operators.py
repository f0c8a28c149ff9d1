"""Operators of our own in captured graphs.

Dropout, tensors that code writes out, the loss of aligned transcripts, places in experts' buffers.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from planner.graph.operator_graph import PLACES, WRITTEN


@cache
def dropout_operator() -> OpOverload:
    """Define `planner.graph.operator_graph.DROPOUT` for torch as far as capture needs it: shapes and gradient."""

    @torch.library.custom_op("meshwright::dropout", mutates_args=())
    def dropout(x: Tensor, p: float) -> Tensor:
        raise NotImplementedError("dropout of a captured graph is run by planner.sharding.local_operator")

    def keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.p = inputs[1]

    dropout.register_fake(lambda x, p: torch.empty_like(x))
    dropout.register_autograd(lambda ctx, gradient: (dropout(gradient, ctx.p), None), setup_context=keep)
    return torch.ops.meshwright.dropout.default


@cache
def written_operator() -> OpOverload:
    """Define `planner.graph.operator_graph.WRITTEN`: a tensor of given numbers, as `written_arguments` has them."""

    @torch.library.custom_op("meshwright::written", mutates_args=())
    def written(numbers: str, size: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        whole = torch.int64 if not dtype.is_floating_point else torch.float64
        held = bytearray(zlib.decompress(base64.b64decode(numbers)))
        return torch.frombuffer(held, dtype=whole).reshape(tuple(size)).to(device, dtype)

    @written.register_fake
    def _shape(numbers: str, size: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    return torch.ops.meshwright.written.default


def written_arguments(value: Tensor) -> tuple[str, list[int], torch.dtype]:
    """What `written_operator` is called with to make a real tensor: its numbers are packed into one string.

    A list of numbers would not do: those that the batch size of a capture divides would be taken for batch sizes.
    """
    wide = torch.float64 if value.is_floating_point() else torch.int64
    held = value.detach().to(wide).contiguous().numpy().tobytes()
    return base64.b64encode(zlib.compress(held)).decode(), list(value.shape), value.dtype


aten = torch.ops.aten


@cache
def alignment_loss_operator() -> OpOverload:
    """Define `planner.graph.operator_graph.CTC` and its gradient for torch: connectionist temporal classification.

    It sums over all alignments of a transcript with the frames of a sound (Graves et al., ICML 2006). torch's own
    operator takes lengths as a list, which a graph for any batch size cannot hold; here all samples are equally long.
    """

    @torch.library.custom_op("meshwright::ctc_loss", mutates_args=())
    def forward(scores: Tensor, text: Tensor, blank: int) -> Tensor:
        losses: Tensor = aten._ctc_loss.default(*_arguments(scores, text), blank, True)[0]
        return losses

    @torch.library.custom_op("meshwright::ctc_loss_backward", mutates_args=())
    def backward(gradient: Tensor, scores: Tensor, text: Tensor, blank: int) -> Tensor:
        given = _arguments(scores, text)
        losses, alphas = aten._ctc_loss.default(*given, blank, True)
        # autograd does not work inside of an operator
        found: Tensor = aten._ctc_loss_backward.default(gradient, *given, losses, alphas, blank, True)
        return found.transpose(0, 1).contiguous()

    def keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        scores, text, ctx.blank = inputs
        ctx.save_for_backward(scores, text)

    def gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return backward(gradient, *ctx.saved_tensors, ctx.blank), None, None

    forward.register_fake(lambda scores, text, blank: scores.new_empty(scores.shape[:1]))
    backward.register_fake(lambda gradient, scores, text, blank: torch.empty_like(scores))
    forward.register_autograd(gradients, setup_context=keep)
    return torch.ops.meshwright.ctc_loss.default


def _arguments(scores: Tensor, text: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
    """Scores with the frames first, text, and the lengths of both, as torch's operator takes them."""
    frames, letters = ([side.shape[1]] * side.shape[0] for side in (scores, text))
    return scores.transpose(0, 1), text, frames, letters


@cache
def expert_places_operator() -> OpOverload:
    """Define `planner.graph.operator_graph.PLACES` for torch: places of tokens in the buffers of experts, in order.

    A rank with a part of a sequence gives its own tokens their places, in a part of each buffer (Lepikhin et al.,
    arXiv:2006.16668). Written out, the count is a running sum over the sequence, which a rank could not make of its
    part.

    It takes the expert of each choice ``(batch, tokens * chosen)``, the choices of a token, the experts, and the places
    that each has for the tokens. It returns the place of each choice, that of another one where its expert has none
    left; whether it has one; and the token of each place ``(batch, experts * places)``, any one where it is empty.
    """

    @torch.library.custom_op("meshwright::expert_places", mutates_args=())
    def places(index: Tensor, chosen: int, experts: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        order = index.argsort(dim=1, stable=True)
        sorted_index = index.gather(1, order)
        numbers = torch.arange(experts, device=index.device).expand(index.shape[0], experts).contiguous()
        firsts = torch.searchsorted(sorted_index, numbers)
        choices = torch.arange(index.shape[1], device=index.device).expand_as(index)
        position = torch.empty_like(index).scatter_(1, order, choices - firsts.gather(1, sorted_index))
        kept = position < capacity
        place = index * capacity + position.clamp(max=capacity - 1)
        token = index.new_zeros(index.shape[0], experts * capacity)
        return place, kept, token.scatter_add_(1, place, choices // chosen * kept)

    def shapes(index: Tensor, chosen: int, experts: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        token = index.new_empty(index.shape[0], experts * capacity)
        return torch.empty_like(index), torch.empty_like(index, dtype=torch.bool), token

    places.register_fake(shapes)
    return torch.ops.meshwright.expert_places.default


assert (PLACES, WRITTEN) == ("meshwright.expert_places.default", "meshwright.written.default")
