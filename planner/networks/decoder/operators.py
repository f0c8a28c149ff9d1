"""The operators of decoders: the form torch gives them, the shape they make and the work they do.

Memory order is followed where a form depends on it; splitting a dim of a transposed tensor gives one that
is only summed, so its order is left as row-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.graph.operator_graph import Argument, BatchSize, TensorRef
from planner.networks.decoder.tape import Dim, Dims, Tape, TapeTensor, TensorShape, elements, size
from simulator.program import Kernel

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
HEADS_INSIDE = (0, 2, 1, 3)
"""Memory order of attention's results ``(batch, heads, length, dim)``: a token's heads lie together."""
_BACKWARD_RATIO = 2.5
_BATCH = 1_000_003
"""Stands for the batch where dims are told apart: a prime larger than any."""


def view(tape: Tape, x: TapeTensor, dims: Dims) -> TapeTensor:
    """Reshape; merging dims of a transposed tensor copies it first."""
    if dims == x.dims:
        return x
    if not _row_major(x) and (len(dims) < len(x.dims) or _merges(x.dims, dims)):
        x = clone(tape, x)
    return tape.call("view.default", x, dims, dims=dims, dtype=x.dtype, kernel=Kernel.VIEW)


def clone(tape: Tape, x: TapeTensor) -> TapeTensor:
    """Copy into row-major order."""
    kwargs = {"memory_format": "torch.contiguous_format"}
    return tape.call("clone.default", x, dims=x.dims, kernel=Kernel.COPY, kwargs=kwargs)


def to_float32(tape: Tape, x: TapeTensor) -> TapeTensor:
    """Round to float32."""
    return tape.call("_to_copy.default", x, dims=x.dims, kernel=Kernel.COPY, kwargs={"dtype": "torch.float32"})


def _row_major(x: TapeTensor) -> bool:
    long = [dim for dim in x.order if x.dims[dim] != 1]
    return long == sorted(long)


def _merges(before: Dims, after: Dims) -> bool:
    """Whether a reshape joins dims that were apart."""
    return not set(_boundaries(before)) <= set(_boundaries(after))


def _boundaries(dims: Dims) -> Iterator[int]:
    """Elements behind each place between two dims."""
    behind = 1
    for dim in reversed(dims[1:]):
        behind *= size(dim) * (_BATCH if isinstance(dim, BatchSize) else 1)
        yield behind


def t(tape: Tape, x: TapeTensor) -> TapeTensor:
    """Transpose a matrix; twice is not at all."""
    source = untransposed(tape, x)
    if source is not None:
        return source
    order = tuple(1 - dim for dim in x.order)
    return tape.call("t.default", x, dims=x.dims[::-1], order=order, kernel=Kernel.VIEW)


def untransposed(tape: Tape, x: TapeTensor) -> TapeTensor | None:
    """Get the matrix that `x` is the transpose of, if it is one."""
    node = tape.nodes[x.ref.node]
    source = node.args[0] if node.op == "aten.t.default" else None
    return tape.values[source] if isinstance(source, TensorRef) else None


def transpose(tape: Tape, x: TapeTensor, first: int, second: int) -> TapeTensor:
    """Swap two dims."""
    swap = {first: second, second: first}
    dims = tuple(x.dims[swap.get(dim, dim)] for dim in range(len(x.dims)))
    order = tuple(swap.get(dim, dim) for dim in x.order)
    return tape.call("transpose.int", x, first, second, dims=dims, order=order, kernel=Kernel.VIEW)


def unsqueeze(tape: Tape, x: TapeTensor, place: int) -> TapeTensor:
    """Add a dim of size 1."""
    at = place % (len(x.dims) + 1)
    dims = (*x.dims[:at], 1, *x.dims[at:])
    return tape.call("unsqueeze.default", x, place, dims=dims, dtype=x.dtype, kernel=Kernel.VIEW)


def squeeze(tape: Tape, x: TapeTensor, place: int) -> TapeTensor:
    """Remove a dim of size 1."""
    at = place % len(x.dims)
    return tape.call("squeeze.dim", x, place, dims=(*x.dims[:at], *x.dims[at + 1 :]), kernel=Kernel.VIEW)


def expand(tape: Tape, x: TapeTensor, dims: Dims, *, order: tuple[int, ...] | None = None) -> TapeTensor:
    """Repeat along dims of size 1; `order` is the memory order if an operator's form depends on it."""
    if dims == x.dims:
        return x
    return tape.call("expand.default", x, dims, dims=dims, dtype=x.dtype, order=order, kernel=Kernel.VIEW)


def slice_last(tape: Tape, x: TapeTensor, start: int, end: int, *, last: int | None = None) -> TapeTensor:
    """Take part of the last dim; ``last`` is the end as written, if it is another number."""
    dim = len(x.dims) - 1
    args = (x, dim, start, end if last is None else last)
    return tape.call("slice.Tensor", *args, dims=(*x.dims[:-1], end - start), order=x.order, kernel=Kernel.VIEW)


def halves(tape: Tape, x: TapeTensor) -> tuple[TapeTensor, TapeTensor]:
    """Split the last dim in two."""
    half = size(x.dims[-1]) // 2
    part = TensorShape(dims=(*x.dims[:-1], half), order=x.order)
    left, right = tape.emit("split.Tensor", (x, half, -1), (part, part), kernel=Kernel.VIEW)
    return left, right


def cat(tape: Tape, parts: tuple[TapeTensor, ...], place: int) -> TapeTensor:
    """Join along the last dim, named by `place`."""
    dims = (*parts[0].dims[:-1], sum(size(part.dims[-1]) for part in parts))
    return tape.call("cat.default", parts, place, dims=dims, dtype=parts[0].dtype, kernel=Kernel.COPY)


def elementwise(
    tape: Tape,
    op: str,
    *args: TapeTensor | float,
    kernel: Kernel = Kernel.ELEMENTWISE,
    kwargs: Mapping[str, Argument] | None = None,
) -> TapeTensor:
    """Apply an operator element by element to tensors that broadcast; the first whole one gives the memory order."""
    values = [value for value in args if isinstance(value, TapeTensor)]
    dims = _broadcast([value.dims for value in values])
    order = next((value.order for value in values if value.dims == dims), None)
    return tape.call(op, *args, dims=dims, dtype=values[0].dtype, order=order, kernel=kernel, kwargs=kwargs)


def _broadcast(shapes: list[Dims]) -> Dims:
    rank = max(len(dims) for dims in shapes)
    padded = [(1,) * (rank - len(dims)) + dims for dims in shapes]
    return tuple(_wider(dims) for dims in zip(*padded, strict=True))


def _wider(dims: tuple[Dim, ...]) -> Dim:
    return max(dims, key=lambda dim: (isinstance(dim, BatchSize), size(dim)))


def mean_last(tape: Tape, x: TapeTensor) -> TapeTensor:
    """Average over the last dim, which stays with size 1."""
    return tape.call("mean.dim", x, (-1,), True, dims=(*x.dims[:-1], 1), kernel=Kernel.REDUCTION)


def sum_to(tape: Tape, x: TapeTensor, dims: Dims) -> TapeTensor:
    """Sum over what was broadcast from `dims`."""
    lead = len(x.dims) - len(dims)
    reduced = tuple(i for i, dim in enumerate(x.dims) if i < lead or dims[i - lead] != dim)
    if reduced:
        kept = tuple(1 if i in reduced else dim for i, dim in enumerate(x.dims))
        x = tape.call("sum.dim_IntList", x, reduced, True, dims=kept, kernel=Kernel.REDUCTION)
    return view(tape, x, dims)


def mm(tape: Tape, x: TapeTensor, y: TapeTensor) -> TapeTensor:
    """Multiply two matrices."""
    dims = (x.dims[0], y.dims[1])
    return tape.call("mm.default", x, y, dims=dims, kernel=Kernel.MATMUL, flops=_product_flops(x, y))


def bmm(tape: Tape, x: TapeTensor, y: TapeTensor) -> TapeTensor:
    """Multiply two stacks of matrices."""
    flops = float(2 * elements(x.dims) * size(y.dims[2]))
    return tape.call("bmm.default", x, y, dims=(*x.dims[:2], y.dims[2]), kernel=Kernel.MATMUL, flops=flops)


def addmm(tape: Tape, bias: TapeTensor, x: TapeTensor, y: TapeTensor) -> TapeTensor:
    """Multiply two matrices and add a bias to every row."""
    dims = (x.dims[0], y.dims[1])
    return tape.call("addmm.default", bias, x, y, dims=dims, kernel=Kernel.MATMUL, flops=_product_flops(x, y))


def _product_flops(x: TapeTensor, y: TapeTensor) -> float:
    return float(2 * elements(x.dims) * size(y.dims[1]))


def embedding(tape: Tape, table: TapeTensor, index: TapeTensor, padding: int | None = None) -> TapeTensor:
    """Look rows up; row number `padding` is not trained."""
    args = (table, index) if padding is None else (table, index, padding)
    return tape.call("embedding.default", *args, dims=(*index.dims, table.dims[1]), kernel=Kernel.EMBEDDING)


def layer_norm(tape: Tape, x: TapeTensor, weight: TapeTensor, bias: TapeTensor, epsilon: float) -> TapeTensor:
    """Normalise the last dim."""
    statistic = TensorShape(dims=(*x.dims[:-1], 1))
    args = (x, weight.dims, weight, bias, epsilon)
    shapes = (TensorShape(dims=x.dims), statistic, statistic)
    return tape.emit("native_layer_norm.default", args, shapes, kernel=Kernel.NORMALIZATION)[0]


def attention(tape: Tape, query: TapeTensor, key: TapeTensor, value: TapeTensor) -> TapeTensor:
    """Attend causally: ``(batch, heads, length, dim)`` each."""
    shapes = (TensorShape(dims=query.dims, order=HEADS_INSIDE), TensorShape(dims=query.dims[:-1]))
    args = (query, key, value, 0.0, True)
    flops = _attention_flops(query)
    return tape.emit(f"{ATTENTION}.default", args, shapes, kernel=Kernel.ATTENTION, flops=flops)[0]


def attention_backward(
    tape: Tape, gradient: TapeTensor, inputs: tuple[TapeTensor, ...], outputs: tuple[TapeTensor, ...]
) -> tuple[TapeTensor, ...]:
    """Gradients of query, key and value."""
    shapes = tuple(TensorShape(dims=x.dims, order=HEADS_INSIDE) for x in inputs)
    args = (gradient, *inputs, *outputs, 0.0, True)
    flops = _BACKWARD_RATIO * _attention_flops(inputs[0])
    return tape.emit(f"{ATTENTION}_backward.default", args, shapes, kernel=Kernel.ATTENTION, flops=flops)


def _attention_flops(query: TapeTensor) -> float:
    """Count two products of a lower triangle of scores."""
    return 2.0 * elements(query.dims) * size(query.dims[-2])


def log_softmax(tape: Tape, x: TapeTensor) -> TapeTensor:
    """Logarithms of the softmax over the last dim."""
    return tape.call("_log_softmax.default", x, -1, False, dims=x.dims, kernel=Kernel.SOFTMAX)


def nll_sum(tape: Tape, scores: TapeTensor, labels: TapeTensor) -> TapeTensor:
    """Sum of the labels' negative scores."""
    args, scalar = (scores, labels, None, 2, -100), TensorShape(dims=())
    return tape.emit("nll_loss_forward.default", args, (scalar, scalar), kernel=Kernel.REDUCTION)[0]


def arange(tape: Tape, *bounds: int, dtype: str = "int64") -> TapeTensor:
    """Count from 0; whole numbers where no dtype is named."""
    kwargs = {} if dtype == "int64" else {"dtype": f"torch.{dtype}"}
    overload = "default" if len(bounds) == 1 else "start_step"
    dims = (len(range(*bounds)),)
    return tape.call(f"arange.{overload}", *bounds, dims=dims, dtype=dtype, kernel=Kernel.COPY, kwargs=kwargs)
