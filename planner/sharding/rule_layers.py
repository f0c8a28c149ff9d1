"""Letters of the operators that layers are made of: products, convolutions, norms, embeddings, attention."""

from __future__ import annotations

from dataclasses import replace

from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.rule_families import Family, fixed_layout
from planner.sharding.rule_notation import FIXED, LETTERS, Call, CallLetters, InnerMessage, Operand, Rule, Value
from simulator.program import Collective


def notation(text: str) -> Family:
    """Fixed letters, as in ``mk,kn->mn``."""
    before, _, after = text.partition("->")
    layout = CallLetters(arguments=tuple(before.split(",")), outputs=tuple(after.split(",")))
    return lambda call: layout


def addmm(call: Call) -> CallLetters:
    """Product plus bias.

    Where the summed dim is sharded the bias stays replicated and the output is partial: the local
    operator adds the bias only on the rank with coordinate 0 along that axis.
    """
    return CallLetters(arguments=("mn"[2 - call.tensor(0).rank :], "mk", "kn"), outputs=("mn",))


def baddbmm(call: Call) -> CallLetters:
    """Batched product plus bias, which is added as in `addmm`."""
    return CallLetters(arguments=("bmn"[3 - call.tensor(0).rank :], "bmk", "bkn"), outputs=("bmn",))


def convolution(call: Call) -> CallLetters:
    """By batch, output channel and input channel (bias as in `addmm`); groups only where each is one channel."""
    groups = call.argument(8, "groups", 1)
    source, weight = call.tensor(0), call.tensor(1)
    if source.rank != weight.rank:
        return CallLetters(arguments=("", "", ""), outputs=(None,))
    channels = _channels(groups, source, bool(call.argument(6, "transposed", False)))
    return CallLetters(arguments=_spatial(channels[:3], source.rank), outputs=_spatial(channels[3:], source.rank))


def convolution_backward(call: Call) -> CallLetters:
    """Gradients of input, weight and bias; the last does not depend on the input channels."""
    source = call.tensor(1)
    channels = _channels(call.argument(9, "groups", 1), source, bool(call.argument(7, "transposed", False)))
    values, weight, bias, result = _spatial(channels, source.rank)
    wanted = call.argument(10, "output_mask", (True, True, True))
    outputs = (values, weight, bias + "|c" if bias == "o" else bias)
    return CallLetters(arguments=(result, values, weight), outputs=_masked(outputs, wanted))


def _channels(groups: Value, source: Operand, transposed: bool) -> tuple[str, str, str, str]:
    """First letters of input, weight, bias and output."""
    if groups == 1:
        return "nc", "co" if transposed else "oc", "o", "no"
    if groups == source.extents[1]:
        return "ng", "g" + FIXED, "g", "ng"
    return "n" + FIXED, FIXED * 2, FIXED, "n" + FIXED


def _spatial(labels: tuple[str, ...], rank: int) -> tuple[str, ...]:
    return tuple(label if len(label) == 1 else label + FIXED * (rank - 2) for label in labels)


def _masked(outputs: tuple[str, ...], wanted: Value) -> tuple[str | None, ...]:
    mask = wanted if isinstance(wanted, tuple) else (True,) * len(outputs)
    return tuple(label if flag else None for label, flag in zip(outputs, mask, strict=True))


def batch_norm(training: int | None) -> Family:
    """By channel, or by batch with statistics all-reduced (mean and square of each channel).

    `training` is the position of that flag; ``None`` means always.
    """

    def layout(call: Call) -> CallLetters:
        source = call.tensor(0)
        synchronised = training is None or bool(call.args[training])
        values = ("." if synchronised else "n") + "c" + FIXED * (source.rank - 2)
        tensors = sum(isinstance(value, Operand) for value in call.args)
        others = len(call.outputs) - 1
        extra = Rule((0,) + (REPLICATE,) * (tensors - 1), (0,) + (REPLICATE,) * others, True, _doubled(source))
        statistics = "c" if synchronised else "c|n"
        outputs = tuple(statistics if result.extents != (0,) else None for result in call.outputs[1:])
        return CallLetters(
            arguments=(values,) + ("c",) * (len(call.args) - 1),
            outputs=(values, *outputs),
            extra=(extra,) if synchronised and source.extents[0] > 1 else (),
        )

    return layout


def batch_norm_backward(call: Call) -> CallLetters:
    """By channel, or by batch with two sums a channel all-reduced, which also are the parameters' gradients."""
    source = call.tensor(1)
    training = bool(call.args[7])
    values = ("." if training else "n") + "c" + FIXED * (source.rank - 2)
    tensors = sum(isinstance(value, Operand) for value in call.args)
    extra = Rule((0, 0) + (REPLICATE,) * (tensors - 2), (0, REPLICATE, REPLICATE), True, _doubled(source))
    return CallLetters(
        arguments=(values, values, "c", "c", "c", "c", "c"),
        outputs=_masked((values, "c", "c"), call.argument(9, "output_mask")),
        linear=((0,),),
        extra=(extra,) if training and source.extents[0] > 1 else (),
    )


def _doubled(source: Operand) -> int:
    return 2 * source.extents[1]


def layer_norm(call: Call) -> CallLetters:
    """By any dim that is not normalised."""
    values, fixed = _normalized(call, 0, 1)
    return CallLetters(arguments=(values, "", fixed, fixed), outputs=(values,) * len(call.outputs))


def layer_norm_backward(call: Call) -> CallLetters:
    """As `layer_norm`; the parameters' gradients are partial."""
    values, fixed = _normalized(call, 1, 2)
    outputs = _masked((values, fixed, fixed), call.argument(7, "output_mask"))
    arguments = (values, values, "", values, values, fixed, fixed)
    return CallLetters(arguments=arguments, outputs=outputs, linear=((0,),))


def _normalized(call: Call, source: int, shape: int) -> tuple[str, str]:
    """Letters of the values, and of the dims that are normalised."""
    rank = call.tensor(source).rank
    value = call.args[shape]
    count = len(value) if isinstance(value, tuple) else 1
    return LETTERS[: rank - count] + FIXED * count, FIXED * count


def rms_norm(call: Call) -> CallLetters:
    """By any dim but the last."""
    values = _rows(call.tensor(0).rank)
    return CallLetters(arguments=(values, FIXED), outputs=(values,))


def rms_norm_backward(call: Call) -> CallLetters:
    """As `rms_norm`; the weight's gradient is partial."""
    values = _rows(call.tensor(0).rank)
    return CallLetters(arguments=(values, values, FIXED), outputs=(values, FIXED), linear=((0,),))


def weight_norm(call: Call) -> CallLetters:
    """By the dim whose slices are normalised, each by itself: a weight and the norms of its slices."""
    values, slices = _slices(call, 2)
    return CallLetters(arguments=(values, slices), outputs=(values, slices))


def weight_norm_backward(call: Call) -> CallLetters:
    """Gradients of the direction and the size, as `weight_norm`."""
    values, slices = _slices(call, 4)
    return CallLetters(arguments=(values, values, slices, slices), outputs=(values, slices), linear=((0,),))


def _slices(call: Call, dim: int) -> tuple[str, str]:
    """Letters of a weight and of what it has one number of for each slice."""
    rank = call.tensor(0).rank
    kept = call.dim(dim, "dim", rank)
    letters = "".join("s" if place == kept else FIXED for place in range(rank))
    return letters, letters


def _rows(rank: int) -> str:
    """Letters of values whose last dim is normalised."""
    return LETTERS[: rank - 1] + FIXED


def group_norm(call: Call) -> CallLetters:
    """By sample, or by channel in whole groups."""
    values = "nc" + FIXED * (call.tensor(0).rank - 2)
    return CallLetters(arguments=(values, "c", "c"), outputs=(values, "nc", "nc"))


def group_norm_backward(call: Call) -> CallLetters:
    """As `group_norm`; by sample the parameters' gradients are partial."""
    values = "nc" + FIXED * (call.tensor(0).rank - 2)
    outputs = _masked((values, "c", "c"), call.argument(9, "output_mask"))
    return CallLetters(arguments=(values, values, "nc", "nc", "c"), outputs=outputs, linear=((0,),))


def embedding(call: Call) -> CallLetters:
    """By position, by feature, or by vocabulary: a masked lookup of one's own words, partial."""
    index = LETTERS[: call.tensor(1).rank]
    return CallLetters(arguments=("VH", index), outputs=(index + "H",), whole="V")


def embedding_backward(call: Call) -> CallLetters:
    """Gradient of `embedding`; scaling by frequency counts words, so it leaves the features only."""
    index, words = LETTERS[: call.tensor(1).rank], "V"
    if call.argument(4, "scale_grad_by_freq", False):
        index, words = FIXED * len(index), FIXED
    linear = ((0,),)
    return CallLetters(arguments=(index + "H", index), outputs=(words + "H",), whole="V", linear=linear)


def gather(call: Call) -> CallLetters:
    """By dims that source and index share; along the gathered dim by a masked lookup, partial."""
    source, index = call.tensor(0), call.tensor(2)
    dim = call.dim(1, "dim", source.rank)
    shared = _shared(dim, source, index)
    looked_up, positions = (shared[:dim] + letter + shared[dim + 1 :] for letter in "XY")
    return CallLetters(arguments=(looked_up, "", positions), outputs=(positions,), whole="X", linear=((0,),))


def scatter(*linear: tuple[int, ...]) -> Family:
    """By dims that all tensors share; along the scattered dim each rank writes its own range."""

    def layout(call: Call) -> CallLetters:
        target, index, source = call.tensor(0), call.tensor(2), call.args[3]
        dim = call.dim(1, "dim", target.rank)
        shared = _shared(dim, target, index, *([source] if isinstance(source, Operand) else []))
        written, read = (shared[:dim] + letter + shared[dim + 1 :] for letter in ("X", FIXED))
        return CallLetters(arguments=(written, "", read, read), outputs=(written,), linear=linear)

    return layout


def _shared(dim: int, first: Operand, *others: Operand) -> str:
    """Letters of the dims in which all have the same size, with a placeholder at `dim`."""
    return "".join(
        LETTERS[d] if d == dim or all(o.extents[d] == size for o in others) else FIXED
        for d, size in enumerate(first.extents)
    )


def index(call: Call) -> CallLetters:
    """Look-up by index tensors in neighbouring dims: by the other dims and by the dims of the indices."""
    source, indices = call.tensor(0), call.args[1]
    chosen = [d for d, value in enumerate(indices) if isinstance(value, Operand)] if isinstance(indices, tuple) else []
    tensors = [v for v in indices if isinstance(v, Operand)] if isinstance(indices, tuple) else []
    if not chosen or chosen[-1] - chosen[0] + 1 != len(chosen) or any(t.dtype in ("bool", "uint8") for t in tensors):
        return CallLetters(arguments=("", ""), outputs=(None,))
    first, after = chosen[0], chosen[-1] + 1
    positions = LETTERS.upper()[: max(t.rank for t in tensors)]
    label = LETTERS[:first] + FIXED * len(chosen) + LETTERS[after : source.rank]
    result = LETTERS[:first] + positions + LETTERS[after : source.rank]
    if len({t.rank for t in tensors}) > 1:
        fixed = result.replace(positions, FIXED * len(positions))
        return CallLetters(arguments=(label, ""), outputs=(fixed,), linear=((0,),))
    return CallLetters(arguments=(label, positions), outputs=(result,), linear=((0,),))


def index_put(call: Call) -> CallLetters:
    """Write at index tensors in neighbouring dims: by the dims that no index touches, linear where it adds."""
    target, indices, values = call.tensor(0), call.args[1], call.tensor(2)
    chosen = [d for d, value in enumerate(indices) if isinstance(value, Operand)] if isinstance(indices, tuple) else []
    tensors = [v for v in indices if isinstance(v, Operand)] if isinstance(indices, tuple) else []
    if not chosen or chosen[-1] - chosen[0] + 1 != len(chosen) or any(t.dtype in ("bool", "uint8") for t in tensors):
        return CallLetters(arguments=("",) * len(call.args), outputs=(None,))
    before, after = LETTERS[: chosen[0]], LETTERS[chosen[-1] + 1 : target.rank]
    label = before + FIXED * len(chosen) + after
    written = before + FIXED * max(t.rank for t in tensors) + after
    # Values that are broadcast to what is written lack dims in front.
    aligned = written[max(len(written) - values.rank, 0) :]
    adds = bool(call.argument(3, "accumulate", False))
    return CallLetters(arguments=(label, "", aligned), outputs=(label,), linear=((0, 2),) if adds else ())


def log_softmax(call: Call) -> CallLetters:
    """By any dim; along its own all ranks agree on the largest exponents and their sums, a number each a row."""
    return _over_classes(call, 1, messages=2)


def log_softmax_backward(call: Call) -> CallLetters:
    """Gradient of `log_softmax`; along its own dim gradients are summed, a number a row."""
    return _over_classes(call, 2, messages=1, linear=((0,),))


def _over_classes(call: Call, position: int, messages: int, linear: tuple[tuple[int, ...], ...] = ()) -> CallLetters:
    source = call.tensor(0)
    dim = call.dim(position, "dim", source.rank, -1)
    length = source.extents[dim]
    layout = fixed_layout(call, {dim}, linear)
    if length == 1 or source.grows(dim):
        return layout
    row = InnerMessage(Collective.ALL_REDUCE, tensors=(0,), divisor=length, uncut=True)
    tensors = sum(isinstance(value, Operand) for value in call.args)
    rule = Rule((dim,) * tensors, (dim,), splits_work=True, messages=(row,) * messages)
    return replace(layout, extra=(rule,))


_SUM = 2
"""Number of ``reduction="sum"`` in the operators' arguments."""


def summed_loss(call: Call) -> CallLetters:
    """Negative log likelihood summed over the batch: by batch, or by class with a masked look-up; both partial.

    A mean would divide by a local count, so it stays replicated, as do class weights.
    """
    if call.args[2] is not None or call.argument(3, "reduction") != _SUM or call.tensor(0).rank != 2:
        return CallLetters(arguments=("",) * len(call.args), outputs=(None, None))
    return CallLetters(arguments=("nc", "n"), outputs=("", ""), whole="c")


def summed_loss_backward(call: Call) -> CallLetters:
    """Gradient of `summed_loss`, which does not read the total weight: that may as well be partial."""
    if call.args[3] is not None or call.argument(4, "reduction") != _SUM or call.tensor(1).rank != 2:
        return CallLetters(arguments=("",) * len(call.args), outputs=(None,))
    batch = Rule((REPLICATE, 0, 0, PARTIAL), (0,), True)
    classes = Rule((REPLICATE, 1, REPLICATE, PARTIAL), (1,), True)
    return CallLetters(arguments=("", "nc", "n"), outputs=("nc",), linear=((0,),), extra=(batch, classes))


def attention(call: Call) -> CallLetters:
    """By batch and by head; equal chunks keep each query head with its key head when heads are shared."""
    if call.argument(3, "dropout_p", 0.0) or call.tensor(0).rank != 4:
        return CallLetters(arguments=("",) * len(call.args), outputs=(None,) * len(call.outputs))
    return CallLetters(arguments=("bh..",) * 3, outputs=("bh..", "bh."), keywords=_mask(call))


def attention_backward(call: Call) -> CallLetters:
    """As `attention`, without partial sums: an attention is too much work to do on every rank."""
    if call.argument(6, "dropout_p", 0.0) or call.tensor(0).rank != 4:
        return CallLetters(arguments=("",) * len(call.args), outputs=(None,) * len(call.outputs))
    arguments = ("bh..", "bh..", "bh..", "bh..", "bh..", "bh.")
    return CallLetters(arguments=arguments, outputs=("bh..",) * 3, keywords=_mask(call))


def masked_attention(call: Call) -> CallLetters:
    """As `attention`; a sink is a head's."""
    return CallLetters(arguments=("bh..",) * 3 + ("",) * 5 + ("h",), outputs=("bh..", "bh."))


def masked_attention_backward(call: Call) -> CallLetters:
    """As `attention_backward`; the gradient of a sink is summed over the batch."""
    arguments = ("bh..",) * 5 + ("bh.",) + ("",) * 5 + ("h",)
    return CallLetters(arguments=arguments, outputs=("bh..",) * 3 + (None if call.args[11] is None else "h",))


def recurrence(call: Call) -> CallLetters:
    """By batch and by head; equal chunks keep each head with the one of keys that it shares."""
    return CallLetters(arguments=("bh..",) * 3 + ("bh.",) * 2 + ("",), outputs=("bh..",))


def recurrence_backward(call: Call) -> CallLetters:
    """As `recurrence`."""
    of_rate = None if call.args[5] is None else "bh."
    return CallLetters(arguments=("bh..",) * 4 + ("bh.",) * 2 + ("",), outputs=("bh..",) * 3 + ("bh.", of_rate))


def _mask(call: Call) -> dict[str, str]:
    value = call.kwargs.get("attn_mask")
    return {"attn_mask": "bh.."[4 - value.rank :]} if isinstance(value, Operand) else {}


def windowed_backward(count: int) -> Family:
    """Gradient of what works on the last `count` dims: by the others, linear in the gradient."""

    def layout(call: Call) -> CallLetters:
        rank = call.tensor(0).rank
        return fixed_layout(call, range(rank - count, rank), ((0,),))

    return layout
