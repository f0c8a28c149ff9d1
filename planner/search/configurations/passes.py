"""Passes of units: at the pace of the host at least, and with what messages beside them expose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.fragments import FloatArray
from simulator.hardware import Hardware
from simulator.launches import launch_time, pass_time

if TYPE_CHECKING:
    from planner.search.units.labels import UnitLabels

BoolArray = NDArray[np.bool_]


def paced_passes(hardware: Hardware, labels: UnitLabels) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds (ways,) of both passes, and of what the backward pass may put off, at the pace of the host at least.

    Kernels of a pass are slowed down together, as `simulator.launches` has it.
    """
    if not launch_time(hardware):
        return labels.forward_s, labels.backward_s, labels.late_s
    forward_s = pass_time(hardware, labels.forward_s, labels.forward_communication_s, labels.forward_launches)
    backward_s = pass_time(hardware, labels.backward_s, labels.backward_communication_s, labels.backward_launches)
    return forward_s, backward_s, labels.late_s * (backward_s / np.maximum(labels.backward_s, 1e-30))


def passes_beside_messages(
    passes_s: tuple[FloatArray, FloatArray, FloatArray],
    messages_s: tuple[FloatArray, FloatArray],
    ends: tuple[BoolArray, BoolArray],
    usual_s: tuple[float, float, float, float],
    *,
    split: bool,
    lost: float = 0.0,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds (ways,) of both passes of units, and of what may be put off, with what their messages expose.

    On a rank of a pipeline the messages of a unit travel while the unit beside it works, which is of the usual kind
    where it begins or ends the network, else like itself. What begins the network is gathered before its pass and not
    for its backward pass, which reads no table of tokens; what ends it is gathered for its backward pass while it goes
    forward, and the usual unit before it while it goes backward.

    Parameters
    ----------
    passes_s : forward and backward work, and what of the latter may be put off, (ways,) each
    messages_s : gather of a unit's parameters and scatter of its gradients, (ways,) each
    ends : whether a unit begins, or ends, the network, (ways,) each
    usual_s : the same three of the usual kind of unit, and its gather
    split : the schedule puts weight gradients off; scatters then travel beside these, gathers beside the rest
    lost : seconds of work that a second of messages beside it costs (`Hardware.lost_to_messages`)

    Notes
    -----
    With l lost, m seconds of messages add ``l m`` to W of work, which hides the rest of them:
    ``max(W + l m, m) = l m + max(W, (1 - l) m)``.
    """
    (forward_s, backward_s, late_s), (gather, scatter), (first, last) = passes_s, messages_s, ends
    usual_forward, usual_backward, usual_late, usual_gather = usual_s
    lost_gather, lost_scatter = lost * gather, lost * scatter
    gather, scatter, usual_gather = gather - lost_gather, scatter - lost_scatter, (1 - lost) * usual_gather
    beside = np.where(first | last, usual_backward, backward_s)
    gathered = np.where(last, usual_gather, gather)
    if split:
        beside_late = np.where(first | last, usual_late, late_s)
        late_waits = np.where(first, 0.0, np.maximum(scatter - beside_late, 0.0))
        waits, late_s = np.maximum(gathered - beside + beside_late, 0.0) + late_waits, late_s + late_waits
    else:
        waits = np.maximum(gathered + scatter - beside, 0.0)
    waits = waits + np.where(last, np.maximum(gather - forward_s, 0.0), 0.0)
    ahead = np.maximum(gather - np.where(last, usual_forward, forward_s), 0.0)
    forward_s = forward_s + lost_gather + np.where(first, 0.0, ahead)
    backward_s = backward_s + lost_scatter + np.where(first, 0.0, waits + lost_gather)
    return forward_s, backward_s, late_s + lost_scatter if split else late_s
