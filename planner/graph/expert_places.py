"""Places of tokens in the buffers of experts, as an operator of its own in captured graphs.

Each expert takes a fixed number of tokens in order (Lepikhin et al., arXiv:2006.16668). Counted are the tokens that an
operator is given: a rank with a part of a sequence gives its own tokens their places, in a part of each buffer, as
frameworks dispatch the tokens of a rank. Written out, the count is a running sum over the sequence of a map of tokens
and experts, which a rank could not make of its part.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._ops import OpOverload

from planner.graph.operator_graph import PLACES


@cache
def expert_places_operator() -> OpOverload:
    """Define `planner.graph.operator_graph.PLACES` for torch.

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


assert PLACES == "meshwright.expert_places.default"
