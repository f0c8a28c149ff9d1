"""The loss of transcripts whose alignment with the sound is unknown, as an operator of its own in captured graphs.

Connectionist temporal classification (Graves et al., ICML 2006) sums over all alignments of a transcript with the
frames of a sound. torch's own operator takes the lengths of the samples as a list, which a graph for any batch size
cannot hold; here all transcripts, and all sounds, are equally long, as in a batch without padding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


@cache
def alignment_loss_operator() -> OpOverload:
    """Define `planner.graph.operator_graph.CTC` and its gradient for torch."""

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
