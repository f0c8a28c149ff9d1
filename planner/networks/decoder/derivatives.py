"""The derivative of every operator of decoders, written as autograd runs it after the capture's cleaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.networks.decoder.experts import bmm
from planner.networks.decoder.operators import (
    ATTENTION,
    attention_backward,
    cat,
    elementwise,
    expand,
    mm,
    slice_last,
    squeeze,
    sum_to,
    t,
    transpose,
    unsqueeze,
    untransposed,
    view,
)
from planner.networks.decoder.tape import Derivative, Tape, TapeCall, TapeTensor, TensorShape, size, values_in
from simulator.program import Kernel

Gradients = tuple[Any, ...]
Pairs = Iterator[tuple[TapeTensor, TapeTensor]]


def _add(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    for x in values_in(call.args):
        if x.trained:
            yield x, sum_to(tape, gradients[0], x.dims)


def _mul(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, y = call.args
    products = [
        (one, elementwise(tape, "mul.Tensor", gradients[0], other)) for one, other in ((y, x), (x, y)) if one.trained
    ]
    for one, product in products:
        yield one, sum_to(tape, product, one.dims)


def _div(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, y = call.args
    if not isinstance(y, TapeTensor):
        yield x, tape.call("div.Tensor", gradients[0], y, dims=x.dims)
        return
    ratio = elementwise(tape, "div.Tensor", elementwise(tape, "div.Tensor", x, y), y)
    product = elementwise(tape, "mul.Tensor", elementwise(tape, "neg.default", gradients[0]), ratio)
    yield x, elementwise(tape, "div.Tensor", gradients[0], y)
    yield y, sum_to(tape, product, y.dims)


def _sum(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    """A sum that drops its dim gets it back as the innermost one in memory."""
    (x, (dim,), *keeps), gradient = call.args, gradients[0]
    if keeps:
        yield x, expand(tape, gradient, x.dims)
        return
    others = [d for d in range(len(x.dims)) if d != dim]
    yield x, expand(tape, unsqueeze(tape, gradient, dim), x.dims, order=(*others, dim))


def _softmax(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, dim, _ = call.args
    args = (gradients[0], call.outputs[0], dim, "torch.float32")
    yield x, tape.call("_softmax_backward_data.default", *args, dims=x.dims, kernel=Kernel.SOFTMAX)


def _topk(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, gradient = call.args[0], gradients[0]
    zeros = _zeros(tape, gradient, x)
    args = (zeros, -1, call.outputs[1], gradient)
    yield x, tape.call("scatter.src", *args, dims=x.dims, kernel=Kernel.EMBEDDING)


def _gather(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, dim, index = call.args
    args = (_zeros(tape, gradients[0], x), dim, index, gradients[0])
    yield x, tape.call("scatter_add.default", *args, dims=x.dims, kernel=Kernel.EMBEDDING)


def _zeros(tape: Tape, like: TapeTensor, x: TapeTensor) -> TapeTensor:
    return tape.call("new_zeros.default", like, x.dims, dims=x.dims, kernel=Kernel.COPY)


def _bmm(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, y = call.args
    of_y = bmm(tape, transpose(tape, x, 1, 2), gradients[0])
    of_x = bmm(tape, gradients[0], transpose(tape, y, 1, 2))
    yield y, of_y
    yield x, of_x


def _neg(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    yield call.args[0], elementwise(tape, "neg.default", gradients[0])


def _pow(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, exponent = call.args
    power = elementwise(tape, "pow.Tensor_Scalar", x, float(exponent - 1))
    slope = elementwise(tape, "mul.Scalar", power, float(exponent))
    yield x, elementwise(tape, "mul.Tensor", gradients[0], slope)


def _rsqrt(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    cube = elementwise(tape, "pow.Tensor_Scalar", call.outputs[0], 3)
    half = elementwise(tape, "mul.Scalar", gradients[0], -0.5)
    yield call.args[0], elementwise(tape, "mul.Tensor", half, cube)


def _mean(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x = call.args[0]
    yield x, elementwise(tape, "div.Scalar", expand(tape, gradients[0], x.dims), size(x.dims[-1]))


def _gelu(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    args, kwargs = (gradients[0], call.args[0]), dict(call.kwargs)
    yield call.args[0], elementwise(tape, "gelu_backward.default", *args, kernel=Kernel.TRANSCENDENTAL, kwargs=kwargs)


def _silu(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x = call.args[0]
    yield x, elementwise(tape, "silu_backward.default", gradients[0], x, kernel=Kernel.TRANSCENDENTAL)


def _view(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    yield call.args[0], view(tape, gradients[0], call.args[0].dims)


def _clone(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    yield call.args[0], gradients[0]


def _transpose(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, first, second = call.args
    yield x, transpose(tape, gradients[0], first, second)


def _unsqueeze(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, place = call.args
    yield x, squeeze(tape, gradients[0], place)


def _expand(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    yield call.args[0], sum_to(tape, gradients[0], call.args[0].dims)


def _slice(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, dim, start, end = call.args
    args = (gradients[0], x.dims, dim, start, end, 1)
    yield x, tape.call("slice_backward.default", *args, dims=x.dims, kernel=Kernel.COPY)


def _split(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    yield call.args[0], cat(tape, gradients, len(call.args[0].dims) - 1)


def _cat(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    start = 0
    pieces = []
    for part in call.args[0]:
        end = start + size(part.dims[-1])
        pieces.append((part, slice_last(tape, gradients[0], start, end)))
        start = end
    yield from pieces


def _mm(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, y = call.args
    yield _right_factor(tape, x, y, gradients[0])
    yield x, mm(tape, gradients[0], t(tape, y))


def _addmm(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    bias, x, y = call.args
    yield x, mm(tape, gradients[0], t(tape, y))
    yield _right_factor(tape, x, y, gradients[0])
    yield bias, sum_to(tape, gradients[0], bias.dims)


def _right_factor(tape: Tape, x: TapeTensor, y: TapeTensor, gradient: TapeTensor) -> tuple[TapeTensor, TapeTensor]:
    """Gradient of the second factor of ``x @ y``, or of the matrix that the factor is the transpose of."""
    source = untransposed(tape, y)
    if source is None:
        return y, mm(tape, t(tape, x), gradient)
    return source, mm(tape, t(tape, gradient), x)


def _layer_norm(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, shape, weight, bias, _ = call.args
    _, mean, deviation = call.outputs
    args = (gradients[0], x, shape, mean, deviation, weight, bias, (True, True, True))
    shapes = tuple(TensorShape(dims=value.dims) for value in (x, weight, bias))
    found = tape.emit("native_layer_norm_backward.default", args, shapes, kernel=Kernel.NORMALIZATION)
    yield from zip((x, weight, bias), found, strict=True)


def _attention(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    inputs = call.args[:3]
    yield from zip(inputs, attention_backward(tape, gradients[0], inputs, call.outputs), strict=True)


def _embedding(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    table, index, *padding = call.args
    args = (gradients[0], index, table.dims[0], padding[0] if padding else -1, False)
    yield table, tape.call("embedding_dense_backward.default", *args, dims=table.dims, kernel=Kernel.EMBEDDING)


def _log_softmax(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, dim, _ = call.args
    args = (gradients[0], call.outputs[0], dim, "torch.float32")
    yield x, tape.call("_log_softmax_backward_data.default", *args, dims=x.dims, kernel=Kernel.SOFTMAX)


def _nll(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    scores = call.args[0]
    args = (gradients[0], *call.args, call.outputs[1])
    yield scores, tape.call("nll_loss_backward.default", *args, dims=scores.dims, kernel=Kernel.COPY)


DERIVATIVES: dict[str, Derivative] = {
    "_softmax": _softmax,
    "add": _add,
    "bmm": _bmm,
    "gather": _gather,
    "sum": _sum,
    "topk": _topk,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "pow": _pow,
    "rsqrt": _rsqrt,
    "mean": _mean,
    "gelu": _gelu,
    "silu": _silu,
    "view": _view,
    "clone": _clone,
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    "expand": _expand,
    "slice": _slice,
    "split": _split,
    "cat": _cat,
    "mm": _mm,
    "addmm": _addmm,
    "native_layer_norm": _layer_norm,
    ATTENTION: _attention,
    "embedding": _embedding,
    "_log_softmax": _log_softmax,
    "nll_loss_forward": _nll,
}
"""By operator name; ``t`` is missing because products give their gradient to the matrix it transposes."""
