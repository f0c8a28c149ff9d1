"""Mixtures of experts on a tape, operator by operator as `planner.networks.zoo.experts` calls them."""

from __future__ import annotations

import math

from planner.graph.operator_graph import BatchSize
from planner.networks.decoder.operators import elementwise, expand, transpose, unsqueeze, view
from planner.networks.decoder.tape import Dims, Shape, Tape, Value, elements, size
from planner.networks.zoo.configs import CAPACITY
from simulator.program import Kernel


def choose_experts(tape: Tape, logits: Value, chosen: int) -> tuple[Value, Value]:
    """Write the weights and numbers ``(tokens, chosen)`` of each token's best experts."""
    shares = tape.call("_softmax.default", logits, -1, False, dims=logits.dims, kernel=Kernel.SOFTMAX)
    dims = (logits.dims[0], chosen)
    shapes = (Shape(dims=dims), Shape(dims=dims, dtype="int64"))
    best, index = tape.emit("topk.default", (shares, chosen), shapes, kernel=Kernel.REDUCTION)
    total = tape.call("sum.dim_IntList", best, (-1,), True, dims=(dims[0], 1), kernel=Kernel.REDUCTION)
    return elementwise(tape, "div.Tensor", best, total), index


def mix_experts(tape: Tape, x: Value, index: Value, weights: Value, parameters: tuple[Value, ...], act: str) -> Value:
    """Write the experts' mixture of ``x`` ``(tokens, hidden)``; `act` names the activation's module, if it has one."""
    gate, up, down = parameters
    tokens, experts, chosen, hidden = elements(x.dims[:1]), size(gate.dims[0]), size(index.dims[1]), x.dims[1]
    capacity = min(tokens, math.ceil(CAPACITY * chosen * tokens / experts))
    slots = experts * capacity
    sequences = view(tape, x, (BatchSize(1), tokens, hidden))
    slot, kept = _slots(tape, view(tape, index, (BatchSize(1), tokens * chosen)), experts, capacity)
    token = _tokens_of_slots(tape, slot, chosen, slots)
    padded = tape.call(
        "constant_pad_nd.default",
        *(sequences, (0, 0, 0, 1), 0.0),
        dims=(BatchSize(1), tokens + 1, hidden),
        kernel=Kernel.COPY,
    )
    taken = _gather(tape, padded, token)
    by_expert = transpose(tape, view(tape, taken, (BatchSize(1), experts, capacity, hidden)), 0, 1)
    by_expert = view(tape, by_expert, (experts, BatchSize(capacity), hidden))
    opening = _silu(tape, bmm(tape, by_expert, transpose(tape, gate, 1, 2)), act)
    gated = elementwise(tape, "mul.Tensor", opening, bmm(tape, by_expert, transpose(tape, up, 1, 2)))
    out = bmm(tape, gated, transpose(tape, down, 1, 2))
    out = transpose(tape, view(tape, out, (experts, BatchSize(1), capacity, hidden)), 0, 1)
    out = view(tape, out, (BatchSize(1), slots, hidden))
    place = _whole(tape, "clamp.default", slot, None, slots - 1, dims=slot.dims)
    returned = _gather(tape, out, place)
    shares = elementwise(tape, "mul.Tensor", view(tape, weights, slot.dims), kept)
    weighted = elementwise(tape, "mul.Tensor", returned, unsqueeze(tape, shares, -1))
    apart = view(tape, weighted, (x.dims[0], chosen, hidden))
    return tape.call("sum.dim_IntList", apart, (1,), dims=x.dims, kernel=Kernel.REDUCTION)


def _silu(tape: Tape, x: Value, module: str) -> Value:
    if not module:
        return elementwise(tape, "silu.default", x, kernel=Kernel.TRANSCENDENTAL)
    with tape.inside(module):
        return elementwise(tape, "silu.default", x, kernel=Kernel.TRANSCENDENTAL)


def bmm(tape: Tape, x: Value, y: Value) -> Value:
    """Multiply two stacks of matrices."""
    flops = float(2 * elements(x.dims) * size(y.dims[2]))
    return tape.call("bmm.default", x, y, dims=(*x.dims[:2], y.dims[2]), kernel=Kernel.MATMUL, flops=flops)


def _whole(
    tape: Tape, op: str, *args: object, dims: Dims, dtype: str = "int64", kernel: Kernel = Kernel.ELEMENTWISE
) -> Value:
    """Write an operator on whole numbers."""
    return tape.call(op, *args, dims=dims, dtype=dtype, kernel=kernel)


def _arange(tape: Tape, count: int) -> Value:
    return _whole(tape, "arange.default", count, dims=(count,), kernel=Kernel.COPY)


def _slots(tape: Tape, index: Value, experts: int, capacity: int) -> tuple[Value, Value]:
    """Place of each choice ``(batch, choices)`` in its expert's buffer, or behind all; and whether it has one."""
    dims, each = index.dims, (*index.dims, experts)
    apart = unsqueeze(tape, index, -1)
    mine = _whole(tape, "eq.Tensor", apart, _arange(tape, experts), dims=each, dtype="bool")
    mine = tape.call(
        "_to_copy.default", mine, dims=each, dtype="int64", kernel=Kernel.COPY, kwargs={"dtype": "torch.int64"}
    )
    count = _whole(tape, "cumsum.default", mine, 1, dims=each, kernel=Kernel.REDUCTION)
    count = _whole(tape, "mul.Tensor", _whole(tape, "sub.Tensor", count, 1, dims=each), mine, dims=each)
    position = _whole(tape, "sum.dim_IntList", count, (-1,), dims=dims, kernel=Kernel.REDUCTION)
    kept = _whole(tape, "lt.Scalar", position, capacity, dims=dims, dtype="bool")
    place = _whole(tape, "add.Tensor", _whole(tape, "mul.Tensor", index, capacity, dims=dims), position, dims=dims)
    behind = tape.call(
        *("scalar_tensor.default", experts * capacity),
        dims=(),
        dtype="int64",
        kernel=Kernel.COPY,
        kwargs={"dtype": "torch.int64"},
    )
    return _whole(tape, "where.self", kept, place, behind, dims=dims), kept


def _tokens_of_slots(tape: Tape, slot: Value, chosen: int, slots: int) -> Value:
    """Token in each buffer place ``(batch, slots)``; empty places take the padding token."""
    choices = size(slot.dims[1])
    numbers = _whole(tape, "floor_divide.default", _arange(tape, choices), chosen, dims=(choices,))
    tokens = expand(tape, numbers, slot.dims)
    dims = (slot.dims[0], slots + 1)
    empty = _whole(tape, "new_full.default", slot, dims, choices // chosen, dims=dims, kernel=Kernel.COPY)
    filled = _whole(tape, "scatter.src", empty, 1, slot, tokens, dims=dims, kernel=Kernel.EMBEDDING)
    return _whole(tape, "slice.Tensor", filled, 1, 0, slots, dims=(dims[0], slots), kernel=Kernel.VIEW)


def _gather(tape: Tape, x: Value, index: Value) -> Value:
    """Take rows ``(batch, choices, hidden)`` of ``x`` by an index ``(batch, choices)``."""
    dims = (*index.dims, x.dims[2])
    wide = expand(tape, unsqueeze(tape, index, -1), dims)
    return tape.call("gather.default", x, 1, wide, dims=dims, kernel=Kernel.EMBEDDING)
