"""Layers of decoders on a tape, in the order in which the modules call their operators."""

from __future__ import annotations

from planner.graph.operator_graph import BatchSize
from planner.networks.decoder import operators as write
from planner.networks.decoder.tape import Dims, Tape, TapeTensor, elements, size
from simulator.program import Kernel


def _rows(dims: Dims) -> Dims:
    """Dims of a batch of sequences ``(batch, length, width)`` as one matrix."""
    return (BatchSize(elements(dims[:-1])), dims[-1])


def linear(tape: Tape, name: str, x: TapeTensor) -> TapeTensor:
    """``nn.Linear``, with a bias if it has one."""
    with tape.inside(name):
        weight = tape.own("weight")
        if tape.has("bias"):
            rows = write.view(tape, x, _rows(x.dims))
            made = write.addmm(tape, tape.own("bias"), rows, write.t(tape, weight))
        else:
            factor = write.t(tape, weight)
            made = write.mm(tape, write.view(tape, x, _rows(x.dims)), factor)
        return write.view(tape, made, (*x.dims[:-1], weight.dims[0]))


def straight_linear(tape: Tape, name: str, x: TapeTensor) -> TapeTensor:
    """A linear layer with bias whose weight is stored as inputs by outputs, as GPT-2 publishes it."""
    with tape.inside(name):
        weight = tape.own("weight")
        made = write.addmm(tape, tape.own("bias"), write.view(tape, x, _rows(x.dims)), weight)
        return write.view(tape, made, (*x.dims[:-1], weight.dims[1]))


def embedding(tape: Tape, name: str, index: TapeTensor, padding: int | None = None) -> TapeTensor:
    """``nn.Embedding``; row number `padding` is not trained."""
    with tape.inside(name):
        return write.embedding(tape, tape.own("weight"), index, padding)


def layer_norm(tape: Tape, name: str, x: TapeTensor, epsilon: float) -> TapeTensor:
    """``nn.LayerNorm`` over the last dim."""
    with tape.inside(name):
        return write.layer_norm(tape, x, tape.own("weight"), tape.own("bias"), epsilon)


def root_mean_square_norm(tape: Tape, name: str, x: TapeTensor, epsilon: float) -> TapeTensor:
    """Scale to unit root mean square, then by a weight."""
    with tape.inside(name):
        square = write.mean_last(tape, write.elementwise(tape, "pow.Tensor_Scalar", x, 2))
        inverse = write.elementwise(tape, "rsqrt.default", write.elementwise(tape, "add.Tensor", square, epsilon))
        return multiply(tape, tape.own("weight"), multiply(tape, x, inverse))


def add(tape: Tape, x: TapeTensor, y: TapeTensor) -> TapeTensor:
    """Add tensors."""
    return write.elementwise(tape, "add.Tensor", x, y)


def multiply(tape: Tape, x: TapeTensor, y: TapeTensor) -> TapeTensor:
    """Multiply tensors."""
    return write.elementwise(tape, "mul.Tensor", x, y)


def gelu(tape: Tape, x: TapeTensor) -> TapeTensor:
    """The approximation of GELU by a hyperbolic tangent."""
    return write.elementwise(tape, "gelu.default", x, kernel=Kernel.TRANSCENDENTAL, kwargs={"approximate": "tanh"})


def silu(tape: Tape, x: TapeTensor) -> TapeTensor:
    """SiLU."""
    return write.elementwise(tape, "silu.default", x, kernel=Kernel.TRANSCENDENTAL)


def heads(tape: Tape, x: TapeTensor, head: int) -> TapeTensor:
    """From ``(batch, length, heads * head)`` to ``(batch, heads, length, head)``."""
    split = write.view(tape, x, (*x.dims[:-1], size(x.dims[-1]) // head, head))
    return write.transpose(tape, split, 1, 2)


def attend(tape: Tape, query: TapeTensor, key: TapeTensor, value: TapeTensor) -> TapeTensor:
    """Attend causally, heads side by side again: ``(batch, length, heads * head)``."""
    groups = size(query.dims[1]) // size(key.dims[1])
    key, value = repeat_heads(tape, key, groups), repeat_heads(tape, value, groups)
    mixed = write.transpose(tape, write.attention(tape, query, key, value), 1, 2)
    return write.view(tape, mixed, (*mixed.dims[:2], elements(mixed.dims[2:])))


def repeat_heads(tape: Tape, x: TapeTensor, groups: int) -> TapeTensor:
    """Let `groups` heads in a row share each of ``x`` ``(batch, heads, length, head)``.

    The repeats of a single head need no copy to count as heads of their own.
    """
    if groups == 1:
        return x
    batch, count, length, head = x.dims
    repeated = write.expand(tape, write.unsqueeze(tape, x, 2), (batch, count, groups, length, head))
    repeated = repeated if count == 1 else write.clone(tape, repeated)
    return write.view(tape, repeated, (batch, size(count) * groups, length, head))


def rotary_table(tape: Tape, length: int, head: int, base: float) -> tuple[TapeTensor, TapeTensor]:
    """Cosines and sines ``(length, head)`` of every position's angles, computed in float64."""
    steps = write.arange(tape, 0, head, 2, dtype="float64")
    exponents = write.elementwise(tape, "div.Tensor", steps, head)
    positions = write.unsqueeze(tape, write.arange(tape, length, dtype="float64"), 1)
    negative = write.elementwise(tape, "neg.default", exponents)
    powers = tape.call("pow.Scalar", base, negative, dims=negative.dims, dtype="float64")
    angles = multiply(tape, positions, powers)
    angles = write.cat(tape, (angles, angles), -1)
    return _rounded(tape, "cos.default", angles), _rounded(tape, "sin.default", angles)


def _rounded(tape: Tape, op: str, angles: TapeTensor) -> TapeTensor:
    exact = write.elementwise(tape, op, angles)
    return write.to_float32(tape, exact)


def cross_entropy(tape: Tape, logits: TapeTensor, labels: TapeTensor) -> TapeTensor:
    """Mean cross entropy of ``(batch, length, vocabulary)`` against ``(batch, length)``."""
    scores = write.log_softmax(tape, write.view(tape, logits, _rows(logits.dims)))
    count = BatchSize(elements(labels.dims))
    total = write.nll_sum(tape, scores, write.view(tape, labels, (count,)))
    return tape.call("div.Tensor", total, count, dims=())
