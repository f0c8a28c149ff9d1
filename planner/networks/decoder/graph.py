"""The operator graph of a decoder from its sizes, and the derivatives of its operators as autograd runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from planner.graph.operator_graph import BatchSize, NetworkInput, OperatorGraph, Parameter
from planner.networks.decoder.layers import cross_entropy
from planner.networks.decoder.operators import (
    ATTENTION,
    attention_backward,
    bmm,
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
from planner.networks.decoder.tape import Derivative, Dims, Tape, TapeCall, TapeTensor, TensorShape, size, values_in
from simulator.program import Kernel

if TYPE_CHECKING:
    from planner.networks.inputs import InputSpec


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
    yield x, tape.call(f"{call.op}_backward_data.default", *args, dims=x.dims, kernel=Kernel.SOFTMAX)


def _topk(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, gradient = call.args[0], gradients[0]
    zeros = _zeros(tape, gradient, x)
    args = (zeros, -1, call.outputs[1], gradient)
    yield x, tape.call("scatter.src", *args, dims=x.dims, kernel=Kernel.EMBEDDING)


def _zeros(tape: Tape, like: TapeTensor, x: TapeTensor) -> TapeTensor:
    return tape.call("new_zeros.default", like, x.dims, dims=x.dims, kernel=Kernel.COPY)


def _bmm(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    x, y = call.args
    of_y = bmm(tape, transpose(tape, x, 1, 2), gradients[0])
    of_x = bmm(tape, gradients[0], transpose(tape, y, 1, 2))
    yield y, of_y
    yield x, of_x


def _rsqrt(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    cube = elementwise(tape, "pow.Tensor_Scalar", call.outputs[0], 3)
    half = elementwise(tape, "mul.Scalar", gradients[0], -0.5)
    yield call.args[0], elementwise(tape, "mul.Tensor", half, cube)


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


def _nll(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    scores = call.args[0]
    args = (gradients[0], *call.args, call.outputs[1])
    yield scores, tape.call("nll_loss_backward.default", *args, dims=scores.dims, kernel=Kernel.COPY)


def _first(gradient: Callable[..., TapeTensor]) -> Derivative:
    """The derivative of an operator that trains its first argument alone, by its tape, the gradient and arguments."""
    return lambda tape, call, gradients: ((call.args[0], gradient(tape, gradients[0], *call.args)),)


def _pow(tape: Tape, gradient: TapeTensor, x: TapeTensor, exponent: float) -> TapeTensor:
    power = elementwise(tape, "pow.Tensor_Scalar", x, float(exponent - 1))
    return elementwise(tape, "mul.Tensor", gradient, elementwise(tape, "mul.Scalar", power, float(exponent)))


def _gather(tape: Tape, gradient: TapeTensor, x: TapeTensor, dim: int, index: TapeTensor) -> TapeTensor:
    args = (_zeros(tape, gradient, x), dim, index, gradient)
    return tape.call("scatter_add.default", *args, dims=x.dims, kernel=Kernel.EMBEDDING)


def _slice(tape: Tape, gradient: TapeTensor, x: TapeTensor, dim: int, start: int, end: int) -> TapeTensor:
    args = (gradient, x.dims, dim, start, end, 1)
    return tape.call("slice_backward.default", *args, dims=x.dims, kernel=Kernel.COPY)


def _mean(tape: Tape, gradient: TapeTensor, x: TapeTensor, *_: object) -> TapeTensor:
    return elementwise(tape, "div.Scalar", expand(tape, gradient, x.dims), size(x.dims[-1]))


def _gelu(tape: Tape, call: TapeCall, gradients: Gradients) -> Pairs:
    args, kwargs = (gradients[0], call.args[0]), dict(call.kwargs)
    yield call.args[0], elementwise(tape, "gelu_backward.default", *args, kernel=Kernel.TRANSCENDENTAL, kwargs=kwargs)


def _silu(tape: Tape, gradient: TapeTensor, x: TapeTensor) -> TapeTensor:
    return elementwise(tape, "silu_backward.default", gradient, x, kernel=Kernel.TRANSCENDENTAL)


DERIVATIVES: dict[str, Derivative] = {
    "_softmax": _softmax,
    "add": _add,
    "bmm": _bmm,
    "gather": _first(_gather),
    "sum": _sum,
    "topk": _topk,
    "mul": _mul,
    "div": _div,
    "neg": _first(lambda tape, gradient, _: elementwise(tape, "neg.default", gradient)),
    "pow": _first(_pow),
    "rsqrt": _rsqrt,
    "mean": _first(_mean),
    "gelu": _gelu,
    "silu": _first(_silu),
    "view": _first(lambda tape, gradient, x, _: view(tape, gradient, x.dims)),
    "clone": _first(lambda tape, gradient, _: gradient),
    "transpose": _first(lambda tape, gradient, _, first, second: transpose(tape, gradient, first, second)),
    "unsqueeze": _first(lambda tape, gradient, _, place: squeeze(tape, gradient, place)),
    "expand": _first(lambda tape, gradient, x, _: sum_to(tape, gradient, x.dims)),
    "slice": _first(_slice),
    "split": _split,
    "cat": _cat,
    "mm": _mm,
    "addmm": _addmm,
    "native_layer_norm": _layer_norm,
    ATTENTION: _attention,
    "embedding": _embedding,
    "_log_softmax": _softmax,
    "nll_loss_forward": _nll,
}
"""By operator name; ``t`` is missing because products give their gradient to the matrix it transposes."""


class Decoder(Protocol):
    """Sizes of a decoder, and how its module is written down."""

    @property
    def tied(self) -> tuple[str, ...]:
        """All names of the one parameter that has several; may be empty."""

    def parameters(self, blocks: int) -> Iterator[tuple[str, Dims]]:
        """Names and dims of the parameters, tied ones once, in the module's order."""

    def logits(self, tape: Tape, tokens: TapeTensor, blocks: int) -> TapeTensor:
        """Write the forward pass of tokens ``(batch, length)``."""


def decoder_graph(
    decoder: Decoder, blocks: int, inputs: Sequence[InputSpec], *, name: str, notes: tuple[str, ...]
) -> OperatorGraph:
    """Write one training step of a decoder of so many blocks at batch 1, nothing folded."""
    tape = Tape()
    for parameter, dims in decoder.parameters(blocks):
        tape.parameter(parameter, dims)
    aliases = dict.fromkeys(decoder.tied[1:], tape.parameters[decoder.tied[0]]) if decoder.tied else {}
    names = dict(tape.parameters)
    tape.parameters.update(aliases)
    values = [tape.input(spec.name, (BatchSize(1), *spec.shape), spec.dtype) for spec in inputs]
    loss = cross_entropy(tape, decoder.logits(tape, values[0], blocks), values[1])
    tape.backward(loss, DERIVATIVES)
    return OperatorGraph(
        network=name,
        fingerprint="",
        batch_size=1,
        nodes=tuple(tape.nodes),
        parameters=tuple(
            Parameter(
                name=parameter,
                node=value.ref.node,
                gradient=tape.gradients[value.ref].ref,
                aliases=decoder.tied[1:] if decoder.tied[:1] == (parameter,) else (),
            )
            for parameter, value in names.items()
        ),
        inputs=tuple(
            NetworkInput(name=spec.name, node=value.ref.node, kind=spec.kind, high=spec.high)
            for spec, value in zip(inputs, values, strict=True)
        ),
        loss=loss.ref,
        notes=notes,
    )
