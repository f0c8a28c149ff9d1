"""What whole training steps put on kernels and messages: factors on the times that these take alone.

A profile has them from measured steps (``training``); one that it lacks is 1. ``planned_matmul`` and its like hold what
devices and the usual software make of a step together; where there is none the device's own factor, ``matmul``, counts.
Kernels of a device that several processes share are slowed as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from simulator.collectives import FloatArray, collective_time
from simulator.crowding import crowded
from simulator.hardware import Hardware
from simulator.program import CONVOLUTIONS, PRODUCTS, Collective, Kernel
from simulator.topology import GroupShape

REUSED_WITHIN = 1e9
"""Parameters: the default, which runs keep (``experiments/gpt2-meg-ds-zero`` of github.com/bigscience-workshop)."""
ATTENTION = 1 / 3
"""Part of a layer's parameters that attention has: 4 of 12 squares of the width."""
_HALF_BYTES = 2.0
SHARDED = "planned_sharded"
"""Key of a profile's training: factor on the messages of sharded parameters where they travel one by one and nothing
runs meanwhile; there where the software is known."""
TENSOR_EXPOSED = "planned_tensor_exposed"
"""Key of a profile's training: part of the time of a gather or scatter of tensor ranks that is left where it travels in
parts beside the product in front of it or behind it; there where a plan asks for that."""

BoolArray = npt.NDArray[np.bool_]

FACTORS: Mapping[Kernel, str] = {
    **dict.fromkeys(PRODUCTS, "matmul"),
    Kernel.ATTENTION: "attention",
    **dict.fromkeys(CONVOLUTIONS, "convolution"),
    Kernel.OPTIMIZER: "optimizer",
    Kernel.ACCUMULATION: "accumulation",
    **dict.fromkeys(
        (
            Kernel.ELEMENTWISE,
            Kernel.ACTIVATION,
            Kernel.TRANSCENDENTAL,
            Kernel.SOFTMAX,
            Kernel.NORMALIZATION,
            Kernel.BATCH_NORMALIZATION,
            Kernel.SYNCHRONIZED_BATCH_NORMALIZATION,
            Kernel.REDUCTION,
            Kernel.POOLING,
            Kernel.EMBEDDING,
            Kernel.COPY,
        ),
        "memory",
    ),
}
"""Keys of ``Hardware.training`` by kernel. Views cost nothing anyway. Sums of gradients are as fast as memory is, or
cost nothing where products add to them (``planned_accumulation`` 0)."""


def kernel_factor(hardware: Hardware, kernel: Kernel, dtype: str, devices: float) -> float:
    """Factor on the time of `kernel` in a job of `devices` devices; products below 16 bits have one of their own."""
    training = hardware.training
    factor = _factor(training, FACTORS.get(kernel, ""))
    if kernel in PRODUCTS and training and hardware.peak_dtype(dtype).startswith(("float8", "float4")):
        factor *= training.get("low_precision", 1.0) / training.get("matmul", 1.0)
    return hardware.compute_slowdown(devices, kernel) * factor


def message_time(
    hardware: Hardware,
    collective: Collective,
    payload: FloatArray,
    group: GroupShape,
    sharded: bool | BoolArray = False,
    axis: str = "",
) -> FloatArray:
    """Seconds (n,) of collectives of `payload` bytes, inside the innermost level or beyond it.

    Those of ``sharded`` parameters (`simulator.program.Task.sharded`) may travel one by one, and some of them once
    more (`simulator.corrections`), those along ``axis``
    tensor beside products, and tokens along ``axis`` expert once to each node or beside another micro-batch. Where
    other processes of the job share the cores of a group, they take as long as that.
    """
    factors = _message_factors(hardware, collective, group, axis)
    if factors.bytes_sent != 1.0:
        payload = payload * factors.bytes_sent
    times: float | FloatArray = factors.time
    if factors.sharded != factors.time:
        times = np.where(sharded, factors.sharded * gathers(collective, payload), factors.time)
    alone = collective_time(hardware, collective, payload, group) * times
    return crowded(hardware.crowding, alone, group.size, hardware.processes) if hardware.crowding else alone


def one_message_time(hardware: Hardware, collective: Collective, payload: float, group: GroupShape) -> float:
    """`message_time` of a single payload, to the last digit, without arrays."""
    factors = _message_factors(hardware, collective, group, "")
    alone = collective_time(hardware, collective, payload * factors.bytes_sent, group) * factors.time
    if not hardware.crowding:
        return alone
    return float(crowded(hardware.crowding, np.full(1, alone), group.size, hardware.processes)[0])


def telling_marks(
    hardware: Hardware, collective: Collective, group: GroupShape, sharded: bool, axis: str
) -> tuple[bool, str]:
    """Marks of messages, ``sharded`` and ``axis`` of `message_time`, without those on which their time does not depend.

    >>> from simulator.profiles import load_profile
    >>> hardware, group = load_profile("dgx-a100"), GroupShape(members=(8, 1))
    >>> telling_marks(hardware, Collective.ALL_GATHER, group, True, "tensor")
    (False, '')
    """
    factors = _message_factors(hardware, collective, group, axis)
    if axis and factors == _message_factors(hardware, collective, group, ""):
        axis = ""
    return sharded and factors.sharded != factors.time, axis


class _MessageFactors(NamedTuple):
    """Factors on the time of messages and on that of sharded parameters, and the part of bytes that is sent."""

    time: float
    sharded: float
    bytes_sent: float


@lru_cache(maxsize=4096)
def _message_factors(hardware: Hardware, collective: Collective, group: GroupShape, axis: str) -> _MessageFactors:
    factor = _factor(hardware.training, "outside" if group.outermost else "inside")
    factor *= tensor_exposed(hardware, collective, axis)
    factor *= hardware.training.get(EXPERT_EXPOSED, 1.0) if of_tokens(collective, axis) else 1.0
    sent = sent_share(hardware, collective, axis, group)
    return _MessageFactors(factor, factor * sharded_factor(hardware), sent)


def _factor(training: Mapping[str, float], name: str) -> float:
    return training.get(f"planned_{name}", training.get(name, 1.0))


def gathered_again(elements: FloatArray) -> FloatArray:
    """Part of the parameters of layers of so many ``elements`` on a rank that their backward pass gathers anew.

    DeepSpeed's ZeRO-3 keeps what is needed again before ``stage3_max_reuse_distance`` other parameters are used, and
    releases the rest (``get_reuse_distance_in_numel`` of ``deepspeed/runtime/zero/stage3.py``). Where a layer is
    computed again, its backward pass needs every parameter a second time: those of the feed-forward network, two thirds
    of a layer, soon, those of attention behind the feed-forward network's both forward and backward.
    """
    between = 2 * (1 - ATTENTION) * elements
    return np.where(between >= REUSED_WITHIN, ATTENTION, 0.0)


def gathers(collective: Collective, payload: FloatArray) -> FloatArray:
    """By what a gather of a layer of `payload` bytes in 16 bits grows, of which a step has two."""
    if collective is not Collective.ALL_GATHER:
        return np.ones(1)
    return 1.0 + gathered_again(np.asarray(payload) / _HALF_BYTES) / 2


def sharded_factor(hardware: Hardware) -> float:
    """Factor on the time of messages of sharded parameters; 1 where they hide, and travel a unit's at once."""
    return 1.0 if hardware.overlaps_communication else hardware.training.get(SHARDED, 1.0)


def tensor_exposed(hardware: Hardware, collective: Collective, axis: str) -> float:
    """What a message leaves to wait for: a part, where it travels beside products of tensor ranks, else all of it.

    Beside a sequence that tensor ranks share, rows are gathered in front of a product and scattered behind it, part by
    part (TransformerEngine's user buffers, `torch.distributed._symmetric_memory`); sums wait for whole products.
    """
    beside = axis == "tensor" and collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    return hardware.training.get(TENSOR_EXPOSED, 1.0) if beside else 1.0


Amount = TypeVar("Amount", float, NDArray[np.float64])
AXIS = "expert"
EXPERT_EXPOSED = "planned_expert_exposed"
"""Key of a profile's training: part of the time of tokens' messages that is left where they travel beside another
micro-batch; there where a plan asks for that."""
EXPERT_LOAD = "planned_expert_load"
"""Key of a profile's training: how much longer messages of tokens are for ranks whose experts get more than others."""
EXPERT_WORK = "planned_expert_work"
"""Key of a profile's training: tokens of the busiest rank's experts over an even share."""
SENT_ONCE = "planned_sent_once"
"""Key of a profile's training: experts that a token goes to, where it travels once to each node; there where a plan
asks for that."""


def places_reached(places: Amount, chosen: Amount) -> Amount:
    """Of ``n`` places those that a token's ``k`` experts lie on: ``n (1 - (1 - 1/n)^k)`` on average.

    Experts are drawn evenly from all; a router that draws from few groups of them reaches fewer places.
    """
    reached: Amount = places * (1 - (1 - 1 / places) ** chosen)
    return reached


def sent_share(hardware: Hardware, collective: Collective, axis: str, group: GroupShape) -> float:
    """Share of the bytes of a message that travels: less than all where a token goes once to each node of a group.

    Dispatchers that know the topology pass it on over the links inside (DeepEP; DeepSeek-V3, arXiv:2412.19437, 3.2.2).

    It is more where the experts of some rank get more tokens than an even share and the room beside it.

    Inside a node ranks take the place of nodes, and so they do inside a larger domain of fast links (NVL72).
    """
    chosen = hardware.training.get(SENT_ONCE, 0.0)
    if group.size == 1 or not of_tokens(collective, axis):
        return 1.0
    load = hardware.training.get(EXPERT_LOAD, 1.0)
    if not chosen:
        return load
    near = max(1, max(hardware.devices_per_node, hardware.levels[0].size) // group.stride)
    places = group.size / near if group.size > near else float(group.size)
    return load * places_reached(places, chosen) / chosen


def of_tokens(collective: Collective, axis: str) -> bool:
    """Whether a message takes tokens to experts or back."""
    return axis == AXIS and collective is Collective.ALL_TO_ALL
