"""The pace of the host: kernels of a pass through a unit take at least as long as the host takes to launch them.

A host launches kernels one after the other and runs ahead of its device while that is at work. Where the kernels and
messages of a pass are shorter than their launches, the device waits for the host, and its kernels end at the pace at
which they are launched. A profile states the time of one launch (``training.planned_launch_s``): what devices and the
usual software need for an operator of a network. Without it the host counts for nothing.

Where the software is known (``training.planned_message_launches``), so is how its hosts launch messages: each takes
launches as kernels do, and begins when the last rank has launched it.
Kernels vary in length around their mean, and either waits for the other well before both are equally long. What works
element by element, one right after the other, is launched once, as are norms and rotary embeddings of such software.
A step and its micro-batches then also take what the host does once for each (``training.planned_step_s``,
``training.planned_micro_batch_s``): reading samples, clearing and clipping gradients, the update's loop, logging.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from simulator.corrections import of_tokens
from simulator.hardware import Hardware
from simulator.program import COMPUTE_STREAM, Collective, Kernel, Task
from simulator.topology import GroupShape

FloatArray = npt.NDArray[np.float64]
LAUNCH = "planned_launch_s"
"""Key of a profile's training: seconds in which the host launches one kernel."""
MESSAGE_LAUNCHES = "planned_message_launches"
"""Key of a profile's training: launches of kernels that the launch of one message takes; there where the software is
known."""
DISPATCH = "planned_dispatch_s"
"""Key of a profile's training: seconds of the host around each message of tokens to experts; there where the software
is known."""
STEP, MICRO_BATCH = "planned_step_s", "planned_micro_batch_s"
"""Keys of a profile's training: seconds of the host for a step, and for each micro-batch of the stage with the loss,
while the device waits; there where the software is known."""
SAMPLE, POOLED = "planned_sample_s", "planned_samples_pooled"
"""Keys of a profile's training: seconds in which the host prepares a sample for one device, and the power of the
devices of a host with which they grow: 1 where all share its cores, 0 where each has some of its own; there where the
software says what the host does."""
_TOGETHER = 5.0
"""Exponent of the smooth maximum of what the device and its host do at the same time."""
SEND_STALL = "planned_send_stall"
"""Key of a profile's training: part of the time of a message between stages for which the kernels of its sender stand
still though the two overlap; there where the software is known."""
DISPATCH_S = 0.9e-3
"""Seconds of the host's work around each message of tokens to experts, where software launches operators one by one.

It comes on top of a network's graph: the host gathers and reads back counts of tokens, permutes and sorts tokens, and
launches every expert's product (some twenty operators of ``moe_utils`` and ``token_dispatcher`` of Megatron-Core). The
value was chosen with published steps of H100 and B200 in view; those of clusters with EFA and of PithTrain were not
among them."""
GRAPHED = 10.0
"""How much less of the host's time a kernel takes that is replayed in a CUDA graph: next to a microsecond
(developer.nvidia.com/blog/constant-time-launch-for-straight-line-cuda-graphs)."""
LATE_LAUNCHES = 2.0
"""By how many launches a rank is late for each doubling of the processors whose ranks meet; those of one processor
launch together. Chosen with published steps in view."""
PROCESSORS = 2.0
"""Processors of a node."""
SHARPNESS = 3.5
"""Of the soft maximum of kernels and their launches."""
NOT_LAUNCHED = frozenset({Kernel.VIEW, Kernel.COPY})
"""Kernels without a launch of their own: views cost nothing, and slices and masks go with what reads them."""

CHAINED = frozenset({Kernel.ELEMENTWISE, Kernel.ACCUMULATION, Kernel.REDUCTION, Kernel.POOLING})
"""Kernels that are launched together where they follow one another and the software is known."""


def known_software(hardware: Hardware) -> bool:
    """Whether the launches of this hardware are those of software that was named."""
    return bool(hardware.training.get(MESSAGE_LAUNCHES, 0.0))


def send_stall(hardware: Hardware) -> float:
    """Part of the time of a message between stages for which the kernels of its sender stand still beside it."""
    return hardware.training.get(SEND_STALL, 0.0) if hardware.overlaps_communication else 0.0


def launches_of(kernels: Iterable[Kernel], *, chained: bool) -> int:
    """Launches of the kernels of a pass, in order; those of chains once where they are ``chained``."""
    launched = [kernel for kernel in kernels if kernel not in NOT_LAUNCHED]
    if not chained:
        return len(launched)
    return len(launched) - sum({one, other} <= CHAINED for one, other in pairwise(launched))


def launch_time(hardware: Hardware) -> float:
    """Seconds in which the host launches one kernel; 0 where the profile does not say."""
    return hardware.training.get(LAUNCH, 0.0)


def fixed_time(hardware: Hardware, micro_batches: int) -> float:
    """Seconds of a step in which the device waits for what its host does once for it and for each micro-batch."""
    return hardware.training.get(STEP, 0.0) + micro_batches * hardware.training.get(MICRO_BATCH, 0.0)


def waiting_for_samples(hardware: Hardware, devices: int, samples: float, step_s: float) -> float:
    """Seconds that a step of `step_s` waits for the host, which prepares so many samples for each device meanwhile.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from simulator.profiles import load_profile
    >>> slow = replace(load_profile("dgx-a100"), training={SAMPLE: 1e-3})
    >>> round(waiting_for_samples(slow, 8, 1000, 0.1), 3), round(waiting_for_samples(slow, 8, 10, 0.1), 3)
    (0.9, 0.0)
    """
    sharing = min(devices, hardware.devices_per_node)
    host_s = samples * hardware.training.get(SAMPLE, 0.0) * sharing ** hardware.training.get(POOLED, 0.0)
    longer = max(host_s, step_s)
    together: float = longer * ((host_s / longer) ** _TOGETHER + (step_s / longer) ** _TOGETHER) ** (1 / _TOGETHER)
    return together - step_s


def without_fixed_time(hardware: Hardware) -> Hardware:
    """The hardware whose host does nothing once a step or a micro-batch."""
    rest = {name: value for name, value in hardware.training.items() if name not in (STEP, MICRO_BATCH, SAMPLE)}
    return replace(hardware, training=rest)


def pass_time(hardware: Hardware, whole_s: FloatArray, launches: FloatArray) -> FloatArray:
    """Seconds (n,) of passes at the pace of the host, which runs ahead of messages as of kernels.

    With l the time of a launch, n launches and W seconds of kernels and messages a pass takes ``max(W, n l)``, and
    where the software is known ``(W^p + (n l)^p)^(1/p)``.

    Parameters
    ----------
    whole_s : array, shape (n,)
        Kernels and messages of a pass one after the other.
    launches : array, shape (n,)
        Of its kernels and messages.
    """
    hosts_s = launches * launch_time(hardware)
    if not known_software(hardware):
        return np.asarray(np.maximum(whole_s, hosts_s))
    high, low = np.maximum(whole_s, hosts_s), np.minimum(whole_s, hosts_s)
    return np.asarray(high * (1 + (low / np.maximum(high, 1e-30)) ** SHARPNESS) ** (1 / SHARPNESS))


def message_launches(hardware: Hardware, group: GroupShape, collective: Collective, axis: str) -> float:
    """Launches that a message takes until the last rank of its group has begun it, 0 where software is not known.

    Those of tokens on their way to experts take the launches of their dispatcher, too.
    """
    launches = hardware.training.get(MESSAGE_LAUNCHES, 0.0)
    if not launches or group.size == 1:
        return 0.0
    inside = group.size if group.outermost == 0 else group.within(0)
    processors = max(1.0, min(inside, hardware.devices_per_node) * PROCESSORS / hardware.devices_per_node)
    dispatch_s = hardware.training.get(DISPATCH, 0.0) if of_tokens(collective, axis) else 0.0
    around = dispatch_s / launch_time(hardware) if dispatch_s and launch_time(hardware) else 0.0
    return launches + LATE_LAUNCHES * math.log2(processors) + around


def paced(
    tasks: Sequence[Task], seconds: FloatArray, hardware: Hardware, calls: FloatArray | None = None
) -> FloatArray:
    """Seconds (tasks,) with kernels slowed down evenly where the host launches those of their pass more slowly.

    A pass takes as long as `pass_time` says, and its messages as long as they take alone.

    Parameters
    ----------
    seconds : array, shape (tasks,)
        What each task takes alone.
    calls : array, shape (tasks,), optional
        Launches of each message (`message_launches`).
    """
    each = launch_time(hardware)
    if not each:
        return seconds
    number = np.array([task.launched_with for task in tasks], dtype=np.int64)
    runs = np.array([task.collective is None and task.stream == COMPUTE_STREAM for task in tasks], dtype=np.bool_)
    counts = np.array([task.kernel not in NOT_LAUNCHED for task in tasks], dtype=np.bool_) & runs & (number >= 0)
    size = int(number.max(initial=-1)) + 1
    if not counts.any():
        return seconds
    inside = number >= 0
    sent = np.array([task.collective is not None for task in tasks], dtype=np.bool_) & inside

    def of_passes(which: npt.NDArray[np.bool_], values: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(number[which], values[which], size), dtype=np.float64)

    total, kernels = of_passes(inside, seconds), of_passes(counts, seconds)
    begins = _begins(tasks, number, counts) if known_software(hardware) else np.ones(len(tasks))
    launches = of_passes(counts, begins)
    if calls is not None:
        launches = launches + of_passes(sent, calls)
    waits = pass_time(hardware, total, launches) - total
    slower = 1.0 + waits / np.maximum(kernels, 1e-30)
    found: FloatArray = np.where(counts, seconds * slower[np.where(counts, number, 0)], seconds)
    return found


def _begins(tasks: Sequence[Task], number: npt.NDArray[np.int64], counts: npt.NDArray[np.bool_]) -> FloatArray:
    """(tasks,) 1 for each kernel that is launched, 0 for those that go on with the chain before in their pass."""
    found = np.ones(len(tasks))
    before: dict[int, bool] = {}
    for index in np.flatnonzero(counts).tolist():
        chains = tasks[index].kernel in CHAINED
        found[index] = 0.0 if chains and before.get(int(number[index]), False) else 1.0
        before[int(number[index])] = chains
    return found
