"""One rank's part of attention over a sequence that is sharded along a context axis.

Liu et al., arXiv:2310.01889 (ring); Jacobs et al., arXiv:2309.14509 (all to all). Under a causal mask a ring has two
chunks of the sequence on every rank, as `planner.sharding.context.positions_of` deals them out, so that what a rank
sees of another's tokens is whole halves and needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from planner.graph.attention import MASKED, MASKED_BACKWARD
from planner.graph.operator_graph import PLACES
from planner.sharding.context import copies_among, positions_of
from planner.sharding.local_attention import attend_anywhere, attend_backward_anywhere
from planner.sharding.local_call import LocalCall, LocalOperator, Parts, Peers, operator
from planner.sharding.rule_notation import InnerMessage
from planner.sharding.sequence import SequenceCut
from simulator.program import Collective

PassOn = Callable[[Parts], Callable[[], Parts]]
"""Sends tensors to the next rank of the axis; what it returns waits for those of the rank before."""
Exchange = Callable[[Parts, int, int], Parts]
"""Cuts each tensor along the first dim given, and joins what arrives along the second, in rank order."""

_HEADS, _LENGTH = 1, 2


def own_part(tensor: Tensor, dim: int, cut: SequenceCut, rank: int, size: int) -> Tensor:
    """Copy a rank's tokens out of a dim that holds the whole sequence, perhaps of several samples."""
    shape = tensor.shape
    apart = tensor.reshape(*shape[:dim], -1, cut.length, cut.stride, *shape[dim + 1 :])
    places = positions_of(cut.length, rank, size, causal=cut.chunks > 1)
    index = torch.tensor(places, device=tensor.device)
    return apart.index_select(dim + 1, index).reshape(*shape[:dim], -1, *shape[dim + 1 :])


def places_on_ranks(index: Tensor, chosen: int, experts: int, capacity: int, cut: SequenceCut, size: int) -> Parts:
    """Give tokens the places of experts as the ranks of a context axis do together, each among its own.

    Arguments and results are those of `planner.graph.custom_operators`; ranks have their parts of a buffer in a row.
    """
    share = capacity // size
    place, kept = torch.empty_like(index), torch.empty_like(index, dtype=torch.bool)
    tokens = []
    for rank in range(size):
        positions = torch.tensor(positions_of(cut.length, rank, size, causal=cut.chunks > 1), device=index.device)
        choices = (positions.unsqueeze(-1) * chosen + torch.arange(chosen, device=index.device)).flatten()
        own, own_kept, own_token = operator(PLACES)(index[:, choices], chosen, experts, share)
        place[:, choices] = own // share * capacity + rank * share + own % share
        kept[:, choices] = own_kept
        tokens.append(positions[own_token].view(-1, experts, share))
    return place, kept, torch.cat(tokens, 2).flatten(1)


def context_attention(call: LocalCall) -> LocalOperator:
    """Attention among the ranks of the axis whose rule has messages.

    By all-to-all the exchanged query, key, value and output come behind the outputs, and the log-sum-exp is that of
    this rank's heads over the whole sequence: that is what the backward pass reads.
    """
    axis, rank, size, copies = _place(call, 0)
    causal, scale = _flag(call, 4), call.keywords.get("scale")
    if _messages(call)[0].collective is Collective.SEND:

        def circulate(tensors: Sequence[Tensor], peers: Peers) -> Parts:
            query, key, value = tensors
            return ring_attention(
                query, key, value, rank=rank, size=size, causal=causal, scale=scale, copies=copies,
                pass_on=lambda parts: peers.pass_on(parts, axis),
            )  # fmt: skip

        return circulate

    attend = partial(attend_anywhere, causal=causal, scale=scale)
    return lambda tensors, peers: exchanged_attention(
        *_three(tensors), attend=attend, copies=copies, exchange=_exchange(call, axis, peers)
    )


def masked_context_attention(call: LocalCall) -> LocalOperator:
    """Attention over a part of the keys, by all-to-all, as `context_attention`; a rank has the sinks of its heads."""
    axis, rank, _, copies = _place(call, 0)
    pattern, run = call.arguments[3:8], operator(MASKED)

    def attend(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        def local(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            sinks = _own_heads(tensors[3], rank, query.shape[_HEADS]) if len(tensors) > 3 else None
            return _pair(run(query, key, value, *pattern, sinks))

        exchange = _exchange(call, axis, peers)
        return exchanged_attention(*_three(tensors), attend=local, copies=copies, exchange=exchange)

    return attend


def context_attention_backward(call: LocalCall) -> LocalOperator:
    """Gradient of `context_attention`, of what that has kept."""
    axis, rank, size, copies = _place(call, 1)
    causal, scale = _flag(call, 7), call.keywords.get("scale")
    if _messages(call)[0].collective is Collective.SEND:

        def circulate(tensors: Sequence[Tensor], peers: Peers) -> Parts:
            return ring_attention_backward(
                tensors, rank=rank, size=size, causal=causal, scale=scale, copies=copies,
                pass_on=lambda parts: peers.pass_on(parts, axis),
            )  # fmt: skip

        return circulate

    attend = partial(attend_backward_anywhere, causal=causal, scale=scale)
    return lambda tensors, peers: exchanged_attention_backward(
        tensors, attend=attend, copies=copies, exchange=_exchange(call, axis, peers)
    )


def masked_context_attention_backward(call: LocalCall) -> LocalOperator:
    """Gradient of `masked_context_attention`, of what that has kept; a sink's is that of this rank's heads."""
    axis, rank, _, copies = _place(call, 1)
    pattern, run = call.arguments[6:11], operator(MASKED_BACKWARD)

    def attend(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        of_sinks: list[Tensor] = []

        def local(asking: Sequence[Tensor], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            gradient, query, output, normaliser = asking
            sinks = _own_heads(tensors[6], rank, query.shape[_HEADS]) if len(tensors) > 6 else None
            *found, own = run(gradient, query, key, value, output, normaliser, *pattern, sinks)
            if sinks is not None:
                of_sinks.append(torch.zeros_like(tensors[6]))
                _own_heads(of_sinks[0], rank, query.shape[_HEADS]).copy_(own)
            else:
                of_sinks.append(own)
            return _three(found)

        exchange = _exchange(call, axis, peers)
        found = exchanged_attention_backward(tensors[:6], attend=local, copies=copies, exchange=exchange)
        return (*found, *of_sinks)

    return attend


def _own_heads(sinks: Tensor, rank: int, heads: int) -> Tensor:
    """Sinks of the heads that an all-to-all brings to a rank."""
    return sinks[rank * heads : (rank + 1) * heads]


def _exchange(call: LocalCall, axis: int, peers: Peers) -> Exchange:
    """How this rank exchanges heads for tokens with the others of its axis."""
    directly = _messages(call)[0].collective is Collective.ALL_TO_ALL
    return lambda parts, split, join: peers.exchange(parts, axis, split, join, all_to_all=directly)


def _messages(call: LocalCall) -> tuple[InnerMessage, ...]:
    return next(rule.messages for rule in call.rules if rule.messages)


def _place(call: LocalCall, query: int) -> tuple[int, int, int, int]:
    """The context axis, this rank's place on it, its size, and how many local heads in a row share keys and values."""
    axis = next(i for i, rule in enumerate(call.rules) if rule.messages)
    copies = copies_among(max(m.divisor for m in call.rules[axis].messages), call.input_shape(query)[_HEADS])
    return axis, call.coordinates[axis], call.sizes[axis], copies


def _flag(call: LocalCall, position: int) -> bool:
    return bool(call.arguments[position]) if len(call.arguments) > position else False


# Ring


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rank: int,
    size: int,
    causal: bool,
    scale: float | None,
    copies: int,
    pass_on: PassOn,
) -> tuple[Tensor, Tensor]:
    r"""Attend to the keys of every rank as they go round, each piece while the next one travels.

    Tensors ``(batch, heads, local length, width)``. Returns the output and the log-sum-exp of the scores
    ``(batch, heads, local length)``. Outputs O and log-sum-exps L over two sets of keys are merged by
    :math:`L = \log(e^{L_1} + e^{L_2})`, :math:`O = e^{L_1 - L} O_1 + e^{L_2 - L} O_2`.
    """
    pieces = _single(key, copies), _single(value, copies)
    output, normaliser = query, query
    for turn in range(size):
        arriving = pass_on(pieces) if turn < size - 1 else None
        asks, offers, masked = _visible(query.shape[_LENGTH], rank, (rank - turn) % size, causal)
        key, value = (_wide(part[:, :, offers], copies) for part in pieces)
        found, sums = attend_anywhere(query[:, :, asks], key, value, causal=masked, scale=scale)
        found = found.to(sums.dtype)
        if turn == 0:
            output, normaliser = found.contiguous(), sums.contiguous()
        else:
            before = normaliser[:, :, asks]
            total = torch.logaddexp(before, sums)
            shares = [(one - total).exp().unsqueeze(-1) for one in (before, sums)]
            output[:, :, asks] = output[:, :, asks] * shares[0] + found * shares[1]
            normaliser[:, :, asks] = total
        if arriving is not None:
            pieces = _pair(arriving())
    return output.to(query.dtype), normaliser


def ring_attention_backward(
    saved: Sequence[Tensor],
    *,
    rank: int,
    size: int,
    causal: bool,
    scale: float | None,
    copies: int,
    pass_on: PassOn,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `ring_attention` for ``saved``: gradient, query, key, value, output and log-sum-exp.

    Keys and values go round once more, each piece while the one before is worked on; the sums of their gradients follow
    one piece behind, and in the end go home. Of heads that are copies of one the first has the whole gradient: only
    their sum is asked for.
    """
    gradient, query, key, value, output, normaliser = saved
    pieces = _single(key, copies), _single(value, copies)
    of_query = torch.zeros_like(query)
    sums = torch.zeros_like(pieces[0]), torch.zeros_like(pieces[1])
    for turn in range(size):
        arriving = pass_on(pieces) if turn < size - 1 else None
        coming = pass_on(sums) if turn else None
        asks, offers, masked = _visible(query.shape[_LENGTH], rank, (rank - turn) % size, causal)
        key, value = (_wide(part[:, :, offers], copies) for part in pieces)
        found = attend_backward_anywhere(
            [tensor[:, :, asks] for tensor in (gradient, query, output, normaliser)],
            key, value, causal=masked, scale=scale,
        )  # fmt: skip
        of_query[:, :, asks] += found[0]
        if coming is not None:
            sums = _pair(coming())
        for total, part in zip(sums, found[1:], strict=True):
            total[:, :, offers] += _summed(part, copies)
        if arriving is not None:
            pieces = _pair(arriving())
    sums = _pair(pass_on(sums)())
    return of_query, _spread(sums[0], copies), _spread(sums[1], copies)


def _visible(length: int, rank: int, other: int, causal: bool) -> tuple[slice, slice, bool]:
    """Which of this rank's queries see which of another rank's keys, and whether a causal mask lies between them."""
    whole = slice(0, length)
    if not causal or rank == other:
        return whole, whole, causal
    return (whole, slice(0, length // 2), False) if other < rank else (slice(length // 2, length), whole, False)


# All to all


def exchanged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attend: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    copies: int,
    exchange: Exchange,
) -> Parts:
    """Attend with some heads over the whole sequence, between two all-to-alls.

    Returns the output ``(batch, heads, local length, width)``, the log-sum-exp of this rank's heads over the whole
    sequence, and the exchanged query, key, value and output, keys and values once for the heads that share them.
    """
    (query,) = exchange((query,), _HEADS, _LENGTH)
    key, value = exchange((_single(key, copies), _single(value, copies)), _HEADS, _LENGTH)
    found, normaliser = attend(query, _wide(key, copies), _wide(value, copies))
    (output,) = exchange((found,), _LENGTH, _HEADS)
    return output, normaliser, query, key, value, found


def exchanged_attention_backward(
    saved: Sequence[Tensor],
    *,
    attend: Callable[[Sequence[Tensor], Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    copies: int,
    exchange: Exchange,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `exchanged_attention` for ``saved``: gradient, then what that has kept, then the log-sum-exp.

    One all-to-all of the incoming gradient, one of the gradients of key and value, one of the query's.
    """
    gradient, query, key, value, output, normaliser = saved
    (gradient,) = exchange((gradient,), _HEADS, _LENGTH)
    asking, wide = (gradient, query, output, normaliser), (_wide(key, copies), _wide(value, copies))
    of_query, of_key, of_value = attend(asking, *wide)
    of_key, of_value = exchange((_summed(of_key, copies), _summed(of_value, copies)), _LENGTH, _HEADS)
    (of_query,) = exchange((of_query,), _LENGTH, _HEADS)
    return of_query, _spread(of_key, copies), _spread(of_value, copies)


# Heads that are copies of one


def _pair(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    one, other = parts
    return one, other


def _three(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third, *_ = parts
    return first, second, third


def _single(tensor: Tensor, copies: int) -> Tensor:
    """One head of those that are equal."""
    return tensor[:, ::copies]


def _wide(tensor: Tensor, copies: int) -> Tensor:
    """Every head as often as it is shared."""
    return tensor if copies == 1 else tensor.repeat_interleave(copies, _HEADS)


def _summed(gradient: Tensor, copies: int) -> Tensor:
    """Sum of the gradients of equal heads."""
    return (
        gradient
        if copies == 1
        else gradient.reshape(gradient.shape[0], -1, copies, *gradient.shape[2:]).sum(_HEADS + 1)
    )


def _spread(total: Tensor, copies: int) -> Tensor:
    """Gradients of equal heads that have this sum."""
    if copies == 1:
        return total
    found = total.new_zeros((total.shape[0], total.shape[1] * copies, *total.shape[2:]))
    found[:, ::copies] = total
    return found
