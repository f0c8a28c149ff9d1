"""Letters of the operators that move, combine or reduce elements: pointwise, views, reductions."""

from __future__ import annotations

from collections.abc import Callable, Collection

from planner.sharding.rule_notation import FIXED, LETTERS, Call, CallLetters, Operand, Value

Family = Callable[[Call], CallLetters]


def pointwise(*linear: tuple[int, ...]) -> Family:
    """Elementwise with broadcasting; `linear` lists the sets of arguments it is jointly linear in."""

    def layout(call: Call) -> CallLetters:
        rank = call.outputs[0].rank
        return CallLetters(arguments=_aligned(call, rank), outputs=(LETTERS[:rank],) * len(call.outputs), linear=linear)

    return layout


def fill(position: int, *linear: tuple[int, ...]) -> Family:
    """Elementwise with a number at `position` that takes part of the elements: linear where it is zero."""

    def layout(call: Call) -> CallLetters:
        value = call.args[position]
        zero = not isinstance(value, Operand | tuple) and value == 0
        return pointwise(*linear if zero else ())(call)

    return layout


def alone(call: Call) -> CallLetters:
    """Replicated only."""
    return CallLetters(arguments=("",) * len(call.args), outputs=(None,) * len(call.outputs))


def created(call: Call) -> CallLetters:
    """Make a tensor from its shape, each rank its own part; a tensor argument only gives the dtype."""
    target = call.outputs[0]
    label = LETTERS[: target.rank]
    given = call.args[0] if call.args and isinstance(call.args[0], Operand) else Operand((), target.dtype)
    same = given.rank == target.rank
    like = "".join(
        letter if same and given.extents[d] == target.extents[d] else FIXED for d, letter in enumerate(label)
    )
    return CallLetters(arguments=(like if same else "",), outputs=(label,))


def along(position: int, name: str, default: int = -1, linear: tuple[tuple[int, ...], ...] = ()) -> Family:
    """Work along one dim (softmax, concatenation, splitting): any other dim may be sharded."""

    def layout(call: Call) -> CallLetters:
        rank = call.tensor(0).rank
        return fixed_layout(call, {call.dim(position, name, rank, default)}, linear)

    return layout


def last(count: int, linear: tuple[tuple[int, ...], ...] = ()) -> Family:
    """Work on the last `count` dims (pooling, triangles): the leading ones may be sharded."""

    def layout(call: Call) -> CallLetters:
        rank = call.tensor(0).rank
        return fixed_layout(call, range(rank - count, rank), linear)

    return layout


def changed(*linear: tuple[int, ...]) -> Family:
    """Dims that keep their size are untouched, the others fixed (slices, padding, repetition)."""

    def layout(call: Call) -> CallLetters:
        source, target = call.tensor(0), call.outputs[0]
        shift = target.rank - source.rank
        fixed = {d for d in range(target.rank) if d < shift or source.extents[d - shift] != target.extents[d]}
        label = "".join(FIXED if d in fixed else LETTERS[d] for d in range(target.rank))
        return CallLetters(arguments=(label[shift:],), outputs=(label,), linear=linear)

    return layout


def elementwise_loss(position: int, *linear: tuple[int, ...]) -> Family:
    """Elementwise where the argument at `position` asks for no reduction; else replicated."""

    def layout(call: Call) -> CallLetters:
        return pointwise(*linear)(call) if call.argument(position, "reduction", 1) == 0 else alone(call)

    return layout


def selected(call: Call) -> CallLetters:
    """Look-up of whole slices by one index: by the other dims, and by the dim of the index."""
    rank = call.tensor(0).rank
    dim = call.dim(1, "dim", rank)
    label = _punctured(rank, dim)
    return CallLetters(arguments=(label, "", "A"), outputs=(label[:dim] + "A" + label[dim + 1 :],), linear=((0,),))


def added_slices(call: Call) -> CallLetters:
    """Add slices at one index: by the other dims."""
    label = _punctured(call.tensor(0).rank, call.dim(1, "dim", call.tensor(0).rank))
    return CallLetters(arguments=(label, "", "", label), outputs=(label,), linear=((0, 3),))


def windows(call: Call) -> CallLetters:
    """Windows along one dim in a new last one: by the other dims."""
    label = _punctured(call.tensor(0).rank, call.dim(1, "dimension", call.tensor(0).rank))
    return CallLetters(arguments=(label,), outputs=(label + FIXED,), linear=((0,),))


def windows_backward(call: Call) -> CallLetters:
    """Gradient of `windows`."""
    rank = call.outputs[0].rank
    label = _punctured(rank, call.dim(2, "dim", rank))
    return CallLetters(arguments=(label + FIXED,), outputs=(label,), linear=((0,),))


def pairs(call: Call) -> CallLetters:
    """From a last dim of real and imaginary parts to complex numbers, or back."""
    rank = max(call.tensor(0).rank, call.outputs[0].rank)
    label = LETTERS[: rank - 1] + FIXED
    return CallLetters(arguments=(label[: call.tensor(0).rank],), outputs=(label[: call.outputs[0].rank],))


def padded(call: Call) -> CallLetters:
    """Dims that get no padding may be sharded; linear where it pads with zero."""
    rank, padding = call.tensor(0).rank, call.argument(1, "pad")
    amounts = padding if isinstance(padding, tuple) else ()
    fixed = {rank - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    return fixed_layout(call, fixed, () if call.argument(2, "value", 0) else ((0,),))


def rolled(position: int, name: str) -> Family:
    """Move elements along some dims (flip, roll): the others may be sharded."""

    def layout(call: Call) -> CallLetters:
        return fixed_layout(call, call.dims(position, name, call.tensor(0).rank), ((0,),))

    return layout


def fixed_layout(call: Call, fixed: Collection[int], linear: tuple[tuple[int, ...], ...] = ()) -> CallLetters:
    """Tensors of one rank whose dims correspond, some of them not to be sharded."""
    rank = call.tensor(0).rank
    label = "".join(FIXED if d in fixed else LETTERS[d] for d in range(rank))
    return CallLetters(arguments=(label,) * len(call.args), outputs=(label,) * len(call.outputs), linear=linear)


def reduction(position: int, *, adds: bool) -> Family:
    """Reduce over dims; where it adds (or averages), reduced dims may be sharded and leave partial sums.

    The average over a sharded dim is local sums divided by the global count.
    """

    def layout(call: Call) -> CallLetters:
        source, target = call.tensor(0), call.outputs[0]
        dims = call.dims(position, "dim", source.rank)
        label = "".join(FIXED if d in dims and not adds else LETTERS[d] for d in range(source.rank))
        keeps = FIXED if target.rank == source.rank else ""
        kept = "".join(keeps if d in dims else LETTERS[d] for d in range(source.rank))
        return CallLetters(arguments=(label,), outputs=(kept,) * len(call.outputs), linear=((0,),) if adds else ())

    return layout


def view(call: Call) -> CallLetters:
    """Regroup dims: of dims that merge or split together only the leftmost is sharded, in contiguous chunks.

    With equal contiguous chunks on either side, chunk i of the one holds the same elements as chunk
    i of the other as soon as both leftmost dims divide by the number of ranks.
    """
    source, target = call.tensor(0), call.outputs[0]
    before, after = [FIXED] * source.rank, [FIXED] * target.rank
    for letter, (left, right) in zip(LETTERS, _leftmost(source, target), strict=False):
        before[left], after[right] = letter, letter
    return CallLetters(arguments=("".join(before),), outputs=("".join(after),), linear=((0,),))


def _leftmost(source: Operand, target: Operand) -> list[tuple[int, int]]:
    """Leftmost dims (sizes of 1 left out) of each group of dims that a view merges or splits."""
    left = [d for d, size in enumerate(source.extents) if size != 1]
    right = [d for d, size in enumerate(target.extents) if size != 1]
    pairs, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        pairs.append((left[i], right[j]))
        inside, outside = source.extents[left[i]], target.extents[right[j]]
        while inside != outside:
            if inside < outside and i + 1 < len(left):
                i += 1
                inside *= source.extents[left[i]]
            elif outside < inside and j + 1 < len(right):
                j += 1
                outside *= target.extents[right[j]]
            else:
                return []
        i, j = i + 1, j + 1
    return pairs


def permuted(order: Callable[[Call, int], list[int]]) -> Family:
    """Dims in another order; output dim d is input dim ``order[d]``."""

    def layout(call: Call) -> CallLetters:
        rank = call.tensor(0).rank
        moved = "".join(LETTERS[d] for d in order(call, rank))
        return CallLetters(arguments=(LETTERS[:rank],), outputs=(moved,), linear=((0,),))

    return layout


def swapped(call: Call, rank: int) -> list[int]:
    """Order after ``transpose(x, first, second)``."""
    first, second = call.dim(1, "dim0", rank), call.dim(2, "dim1", rank)
    order = list(range(rank))
    order[first], order[second] = second, first
    return order


def reordered(call: Call, rank: int) -> list[int]:
    """Order after ``permute(x, dims)``."""
    value = call.argument(1, "dims")
    return [int(d) % rank for d in value if isinstance(d, int)] if isinstance(value, tuple) else []


def reversed_dims(_: Call, rank: int) -> list[int]:
    """Order after ``t(x)``."""
    return list(range(rank))[::-1]


def dropped(position: int, name: str, default: int = 0) -> Family:
    """One dim is taken out (select, unbind): the others may be sharded."""

    def layout(call: Call) -> CallLetters:
        rank = call.tensor(0).rank
        label = _punctured(rank, call.dim(position, name, rank, default))
        return CallLetters(arguments=(label,), outputs=(label.replace(FIXED, ""),) * len(call.outputs), linear=((0,),))

    return layout


def inserted(position: int, name: str) -> Family:
    """One dim is put in (stack, gradient of select): the others may be sharded."""

    def layout(call: Call) -> CallLetters:
        rank = call.outputs[0].rank
        label = _punctured(rank, call.dim(position, name, rank))
        return CallLetters(arguments=(label.replace(FIXED, ""),), outputs=(label,), linear=((0,),))

    return layout


def _punctured(rank: int, dim: int) -> str:
    return LETTERS[:dim] + FIXED + LETTERS[dim + 1 : rank]


def _aligned(call: Call, rank: int) -> tuple[str, ...]:
    """Letters of the arguments aligned to the right, as broadcasting does."""

    def label(value: Value) -> str:
        if isinstance(value, tuple) and value:
            return label(value[0])
        return LETTERS[rank - value.rank : rank] if isinstance(value, Operand) else ""

    return tuple(label(value) for value in call.args)
