"""One training step in closed form: what runs after what, what hides behind what.

The formulas are those of the schedules on equal micro-batches; `pipeline_costs` hands the same stage times to the
simulator, which runs the schedule itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.published.estimate.columns import Columns, FloatArray
from planner.published.estimate.transformer_work import Part, part_shares, tensor_messages
from planner.published.estimate.work import Message, Phase, Work, WorkClass
from simulator.kept_parameters import gathered_again

_LAUNCHES_OF_A_CALL = 1.0  # a collective is launched like a kernel
_DEVICES_OF_A_PROCESSOR = 4.0  # nodes of eight devices have two processors
_LATE_LAUNCHES = 2.0
"""By how many launches a rank is late for each doubling of the processors that launch for a tensor group. Chosen with
the published rows in view: within four tensor ranks hardly any wait shows, among eight that of some two launches."""
_SHARPNESS = 3.5
"""Of the soft maximum of device and host time: kernels vary in length around their mean, so that either waits for the
other well before the means are equal. Chosen with the published rows in view."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Coefficients:
    """What hardware and software make of the work, (N,) or scalars; neutral by default.

    ``matmul``, ``low_precision``, ``attention``, ``memory``, ``experts``, ``optimizer``, ``inside`` and ``outside``
    multiply the seconds of kernels and messages; ``misaligned`` those of products of awkward sizes on top,
    ``memory_half`` those of memory-bound kernels below 32 bits (casts of automatic mixed precision), ``recompute``
    those of a forward pass that is repeated (which may stop before what nothing needs). ``launch_s`` is the host's
    time for one kernel, ``step_overhead_s`` and ``micro_batch_overhead_s`` fixed costs, of which the latter fall to
    the stage that has the loss. The ``exposed`` shares stay
    visible where a message may hide behind computation. ``shard_apart`` multiplies the seconds of sharded parameters'
    messages where they travel one parameter at a time and nothing runs meanwhile. ``jitter`` is the relative delay for
    each doubling of the nodes.
    """

    matmul: FloatArray | float = 1.0
    misaligned: FloatArray | float = 1.0
    low_precision: FloatArray | float = 1.0
    attention: FloatArray | float = 1.0
    memory: FloatArray | float = 1.0
    memory_half: FloatArray | float = 1.0
    experts: FloatArray | float = 1.0
    recompute: FloatArray | float = 1.0
    optimizer: FloatArray | float = 1.0
    inside: FloatArray | float = 1.0
    outside: FloatArray | float = 1.0
    launch_s: FloatArray | float = 3e-6
    step_overhead_s: FloatArray | float = 0.0
    micro_batch_overhead_s: FloatArray | float = 0.0
    tensor_exposed: FloatArray | float = 0.5
    pipeline_exposed: FloatArray | float = 1.0
    gradient_exposed: FloatArray | float = 0.1
    shard_exposed: FloatArray | float = 0.1
    shard_apart: FloatArray | float = 1.0
    context_exposed: FloatArray | float = 0.3
    jitter: FloatArray | float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds of one micro-batch, (N,) each: of one layer and of both ends of the network, and of the step's rest.

    ``layer_forward`` and so on include exposed tensor, context and expert messages and, with sharded parameters, what
    their gathering leaves visible.
    """

    layer_forward: FloatArray
    layer_backward: FloatArray
    layer_weight_gradient: FloatArray
    first_forward: FloatArray
    first_backward: FloatArray
    last_forward: FloatArray
    last_backward: FloatArray
    last_weight_gradient: FloatArray
    send: FloatArray
    gradient_reduce: FloatArray
    parameter_gather: FloatArray
    optimizer: FloatArray
    layer_communication: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Step times (N,) and what they are made of."""

    step_time_s: FloatArray
    compute_s: FloatArray
    exposed_communication_s: FloatArray
    bubble_s: FloatArray
    optimizer_s: FloatArray
    overhead_s: FloatArray
    rest_s: FloatArray
    """What follows the passes over micro-batches: gradients, parameters, optimizer, fixed costs."""
    slower: FloatArray
    """Factor on all of it that the number of nodes brings."""


def _class_sum(work: Work, part: Part, phase: Phase, k: Coefficients) -> FloatArray:
    half = np.where(work.element_bytes < 4, k.memory_half, 1.0)
    factors: dict[WorkClass, FloatArray | float] = {
        WorkClass.MATMUL: k.matmul,
        WorkClass.MISALIGNED: k.matmul * k.misaligned,
        WorkClass.LOW_PRECISION: k.low_precision,
        WorkClass.ATTENTION: k.attention * np.where(work.columns.fused_attention > 0, 1.0, half),
        WorkClass.MEMORY: k.memory * half,
        WorkClass.GRADIENT_SUM: 1.0,
    }
    seconds = np.zeros_like(work.optimizer_s)
    for kind, factor in factors.items():
        found = work.seconds.get((part, phase, kind))
        if found is not None:
            seconds = seconds + found * factor
    return seconds


def _soft_maximum(first: FloatArray, second: FloatArray) -> FloatArray:
    """A maximum with a rounded corner: ``(a^p + b^p)^(1/p)``; kernels vary in length around their mean."""
    high, low = np.maximum(first, second), np.minimum(first, second)
    ratio = low / np.maximum(high, 1e-30)
    return np.asarray(high * (1 + ratio**_SHARPNESS) ** (1 / _SHARPNESS))


def _device(
    work: Work,
    parts: tuple[Part, ...],
    phases: tuple[Phase, ...],
    k: Coefficients,
    communication: FloatArray | float = 0.0,
    calls: FloatArray | float = 0.0,
) -> FloatArray:
    """Seconds of parts of one layer: the device's, or the host's where launching takes longer.

    The device computes and exchanges messages in turn (`communication` seconds), the host launches both (`calls`
    launches for messages).
    """
    c = work.columns
    share = part_shares(c)
    factor = {Part.EXPERTS: k.experts}
    device = np.zeros_like(c.tp)
    launches = np.zeros_like(c.tp)
    for part in parts:
        for phase in phases:
            device = device + _class_sum(work, part, phase, k) * share.get(part, 1.0) * factor.get(part, 1.0)
            launches = launches + work.kernels.get((part, phase), 0.0) * share.get(part, 1.0)
    return _soft_maximum(device + communication, (launches + calls) * k.launch_s)


def stage_times(work: Work, k: Coefficients) -> StageTimes:
    """Times of one layer, of the ends and of the step's rest."""
    c = work.columns
    layer = (Part.ATTENTION_BLOCK, Part.DENSE, Part.EXPERTS, Part.CROSS_ATTENTION, Part.ENCODER)

    def message(name: Message) -> FloatArray:
        return work.inside[name] * k.inside + work.outside[name] * k.outside

    tensor = tensor_messages(c)[0] * message(Message.TENSOR) * np.where(c.overlap_tensor > 0, k.tensor_exposed, 1.0)
    # Where the gate is a product apart its input gradient is summed apart; the sequence ranks' gather is shared.
    again_gate = c.separate_gate * c.gated * (1 - c.sequence_parallel) * part_shares(c)[Part.DENSE]
    gate = again_gate * tensor / np.maximum(tensor_messages(c)[0], 1e-30)
    context = message(Message.CONTEXT) * k.context_exposed
    expert = k.experts * (2 * message(Message.EXPERT) + message(Message.EXPERT_TENSOR)) * part_shares(c)[Part.EXPERTS]
    expert = expert * np.where(c.overlap_experts > 0, k.context_exposed, 1.0)
    communication = tensor + context + expert
    # A message begins when the last rank has launched it. Ranks of one processor launch together.
    processors = np.maximum(c.tp / _DEVICES_OF_A_PROCESSOR, 1.0)
    late = np.where(c.tp > 1, _LAUNCHES_OF_A_CALL + _LATE_LAUNCHES * np.log2(processors), 0.0)
    calls = tensor_messages(c)[0] * (1 + c.sequence_parallel) * late
    calls = calls + np.where(c.ep > 1, 2 * _LAUNCHES_OF_A_CALL * part_shares(c)[Part.EXPERTS], 0.0)
    both = (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)
    forward = _device(work, layer, (Phase.FORWARD,), k, communication, calls)
    backward = _device(work, layer, both, k, communication + context + gate, calls)
    weight = _device(work, layer, (Phase.WEIGHT_GRADIENT,), k)
    again = np.where(c.recompute_full > 0, _recomputed_share(c), 0.0)
    core = sum(seconds * getattr(k, kind.value, 1.0) for kind, seconds in work.core_seconds.items())
    recompute = again * forward * k.recompute + c.recompute_selective * core
    ahead = c.overlap_parameters > 0
    gather, reduce = (
        message(name) * np.where(ahead, 1.0, k.shard_apart) for name in (Message.SHARD_GATHER, Message.SHARD_REDUCE)
    )
    exposed = np.where(ahead, k.shard_exposed, 1.0)
    released = np.where(ahead, 0.0, c.releases_parameters) * gathered_again(c.dense_parameters / c.fullest_layers)

    def behind(transfer: FloatArray, computation: FloatArray) -> FloatArray:
        return np.asarray(np.maximum(transfer - computation, 0.0) + exposed * np.minimum(transfer, computation))

    layer_forward = forward + behind(gather, forward)
    back = backward + recompute
    layer_backward = back + behind(gather * (1 + released) + reduce, back)
    # Ends cut over the vocabulary: the embedding is added up forward, the gradient of the head's input backward; with
    # sequence parallelism the head gathers its input, and once more for the gradient of its weights.
    ends = message(Message.TENSOR)
    gathered = np.where(c.sequence_parallel > 0, 0.5, 0.0)
    return StageTimes(
        layer_forward=layer_forward,
        layer_backward=layer_backward,
        layer_weight_gradient=weight,
        first_forward=_device(work, (Part.EMBEDDING,), (Phase.FORWARD,), k) + ends * (1 - gathered),
        first_backward=_device(work, (Part.EMBEDDING,), (Phase.INPUT_GRADIENT,), k),
        last_forward=_device(work, (Part.HEAD,), (Phase.FORWARD,), k) + ends * gathered + message(Message.LOGITS),
        last_backward=_device(work, (Part.HEAD,), (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT), k) + ends,
        last_weight_gradient=_device(work, (Part.HEAD,), (Phase.WEIGHT_GRADIENT,), k),
        send=message(Message.PIPELINE),
        gradient_reduce=message(Message.GRADIENT_REDUCE),
        parameter_gather=message(Message.PARAMETER_GATHER),
        optimizer=work.optimizer_s * k.optimizer + work.layout_s,
        layer_communication=communication,
    )


def _recomputed_share(c: Columns) -> FloatArray:
    of_stage = np.maximum(c.all_layers / c.pp, 1.0)
    return np.where(c.recompute_layers > 0, np.minimum(c.recompute_layers / of_stage, 1.0), 1.0)


def step_times(work: Work, k: Coefficients) -> Step:
    """Step times of all runs.

    With ``t_i`` the time of a micro-batch on stage ``i``, ``m`` micro-batches and ``v`` chunks a stage a step takes
    ``m max t_i + (sum t_i - max t_i) / v`` (Narayanan et al., arXiv:2104.04473, section 2.2, for unequal stages).
    """
    c, t = work.columns, stage_times(work, k)
    layers = c.moe_layers + c.dense_layers + c.encoder_layers
    per_layer = t.layer_forward + t.layer_backward
    hidden = c.paired_passes * np.minimum(2 * t.layer_communication, per_layer - 2 * t.layer_communication)
    per_layer = per_layer - hidden
    ends_first = t.first_forward + t.first_backward
    ends_last = t.last_forward + t.last_backward + k.micro_batch_overhead_s
    own = np.where(c.ends_together > 0, c.ends_together, 1.0)
    busiest = np.maximum(
        c.fullest_layers * per_layer,
        np.maximum(
            c.first_layers * per_layer + own * ends_first + c.ends_together * ends_last,
            c.last_layers * per_layer + own * ends_last + c.ends_together * ends_first,
        ),
    )
    whole = layers * per_layer + ends_first + ends_last
    sends = np.where(c.pp > 1, 2 * t.send * c.vpp, 0.0)
    steady = c.micro_batches * busiest
    delayed = c.weight_gradients_in_bubble * (c.pp - 1) * layers / c.pp * t.layer_weight_gradient
    waiting = c.passes_in_bubble * np.maximum(whole - busiest - delayed, 0.0) / c.vpp
    bubble = waiting + np.where(c.pp > 1, 2 * (c.pp - 1) * t.send, 0.0)
    exposed_sends = k.pipeline_exposed * sends * (c.micro_batches - 1)
    window = layers / c.pp * t.layer_backward
    reduce = np.where(
        c.overlap_gradients > 0,
        np.maximum(t.gradient_reduce - window, 0.0) + k.gradient_exposed * np.minimum(t.gradient_reduce, window),
        t.gradient_reduce,
    )
    ahead = layers / c.pp * t.layer_forward
    gather = np.where(
        c.overlap_parameters > 0,
        np.maximum(t.parameter_gather - ahead, 0.0) + k.gradient_exposed * np.minimum(t.parameter_gather, ahead),
        t.parameter_gather,
    )
    communication = layers / c.pp * (2 * t.layer_communication - hidden) * c.micro_batches
    nodes = np.maximum(c.devices / 8, 1.0)
    slower = np.asarray(1 + k.jitter * np.log2(nodes))
    rest = reduce + gather + t.optimizer + k.step_overhead_s
    total = (steady + bubble + exposed_sends + rest) * slower
    return Step(
        step_time_s=total,
        compute_s=steady - communication,
        exposed_communication_s=communication + exposed_sends + reduce + gather,
        bubble_s=bubble,
        optimizer_s=t.optimizer,
        rest_s=np.asarray(rest),
        slower=slower,
        overhead_s=total - (steady + bubble + exposed_sends + reduce + gather + t.optimizer),
    )
