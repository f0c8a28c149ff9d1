"""Passes of units: at the pace of the host at least, and with what messages beside them expose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.fragments import FloatArray, IntArray
from simulator.hardware import Hardware
from simulator.launches import launch_time, pass_time

if TYPE_CHECKING:
    from planner.search.units.labels import UnitLabels

BoolArray = NDArray[np.bool_]


def paced_passes(
    hardware: Hardware, labels: UnitLabels, *, split: bool = False
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds (ways,) of both passes, and of what the backward pass may put off, at the pace of the host at least.

    Kernels of a pass are slowed down together, as `simulator.launches` has it. Schedules that ``split`` backward passes
    launch a kernel for each gradient of an operator that makes those of its input and of parameters.
    """
    if not launch_time(hardware):
        return labels.forward_s, labels.backward_s, labels.late_s
    forward_s = pass_time(hardware, labels.forward_s, labels.forward_launches)
    launches = labels.backward_launches + labels.halved if split else labels.backward_launches
    backward_s = pass_time(hardware, labels.backward_s, launches)
    return forward_s, backward_s, labels.late_s * (backward_s / np.maximum(labels.backward_s, 1e-30))


def beside(
    hardware: Hardware,
    work_s: FloatArray,
    messages_s: FloatArray,
    sums_s: FloatArray | float = 0.0,
    sums: FloatArray | float = 0.0,
    part: FloatArray | float = 1.0,
) -> FloatArray:
    """Seconds of work beside messages, which take turns with those of its sums over the batch.

    The first of n ``sums`` waits for messages that began before it, so that the work before it hides them, about a part
    1 / (n + 1) of all; those of several units that travel as one wait for that once, a ``part`` of it each.
    """
    if not hardware.overlaps_communication:
        return work_s + messages_s
    hides = (work_s - sums_s) * np.where(np.asarray(sums) > 0, part / (1 + sums), 1.0)
    lost = hardware.lost_to_messages
    return np.asarray(work_s + lost * messages_s + np.maximum((1 - lost) * messages_s - hides, 0.0))


def passes_beside_messages(
    passes_s: tuple[FloatArray, FloatArray, FloatArray],
    messages_s: tuple[FloatArray, FloatArray],
    ends: tuple[BoolArray, BoolArray],
    usual_s: tuple[float, float, float, FloatArray | float],
    *,
    split: bool,
    inside_s: tuple[FloatArray | float, FloatArray | float] = (0.0, 0.0),
    lost: float = 0.0,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds of both passes of units, and of what may be put off, with what their messages expose.

    On a rank of a pipeline the messages of a unit travel while the unit beside it works, which is of the usual kind
    where it begins or ends the network, else like itself. What begins the network is gathered before its pass and not
    for its backward pass, which reads no table of tokens; what ends it is gathered for its backward pass while it goes
    forward, and the usual unit before it while it goes backward.

    Parameters
    ----------
    passes_s : forward and backward work, and what of the latter may be put off, (ways,) each
    messages_s : gather of a unit's parameters and scatter of its gradients, (ways,) or (storages, ways) each
    ends : whether a unit begins, or ends, the network, (ways,) each
    usual_s : the same three of the usual kind of unit, and its gather, (storages, 1) of several storages
    split : the schedule puts weight gradients off; scatters then travel beside these, gathers beside the rest
    inside_s : messages inside both passes, (ways,) each: others take turns with them and hide behind the rest
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
    beside = np.where(first | last, usual_backward, backward_s - inside_s[1])
    gathered = np.where(last, usual_gather, gather)
    if split:
        beside_late = np.where(first | last, usual_late, late_s)
        late_waits = np.where(first, 0.0, np.maximum(scatter - beside_late, 0.0))
        waits, late_s = np.maximum(gathered - beside + beside_late, 0.0) + late_waits, late_s + late_waits
    else:
        waits = np.maximum(gathered + scatter - beside, 0.0)
    waits = waits + np.where(last, np.maximum(gather - forward_s + inside_s[0], 0.0), 0.0)
    ahead = np.maximum(gather - np.where(last, usual_forward, forward_s - inside_s[0]), 0.0)
    forward_s = forward_s + lost_gather + np.where(first, 0.0, ahead)
    backward_s = backward_s + lost_scatter + np.where(first, 0.0, waits + lost_gather)
    return forward_s, backward_s, late_s + lost_scatter if split else late_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """Work and messages of units whose passes stand in a row, (ways,) each, or (storages, ways) of several storages.

    A rank of GPipe goes forward with all micro-batches and then backward with all: a pass stands between two of its
    kind. Seconds of both passes without messages, of the gather of a unit's parameters before each of them (none for
    the backward pass of what begins the network, unless it computes all again: it reads no table of tokens) and the
    scatter of its gradients, the messages inside both passes, with which these take turns, whether anything is computed
    again, and what a second of messages beside work costs of it (`Hardware.lost_to_messages`).
    """

    forward_s: FloatArray
    backward_s: FloatArray
    gather: FloatArray
    again: FloatArray
    scatter: FloatArray
    inside_s: tuple[FloatArray, FloatArray]
    recomputes: BoolArray
    lost: float

    def of(self, number: int) -> Row:
        """Those of one storage of several."""
        backward_s, gather, again, scatter = (
            seconds[number] for seconds in (self.backward_s, self.gather, self.again, self.scatter)
        )
        return replace(self, backward_s=backward_s, gather=gather, again=again, scatter=scatter)

    def alone(self, first: BoolArray, usual_s: float) -> tuple[FloatArray, FloatArray]:
        """Seconds (ways,) of both passes of units, whatever chunk they are in: messages beside their own work.

        What begins the network, the ``first``, is gathered beside a forward pass of the usual kind of unit, and its
        gradients are scattered when all is computed.
        """
        gather, behind = self.gather, self.again + self.scatter
        beside = np.where(first, usual_s, self.forward_s - self.inside_s[0])
        forward_s = self.forward_s + self.lost * gather + np.maximum((1 - self.lost) * gather - beside, 0.0)
        backward_s = np.maximum(self.backward_s + self.lost * behind, behind + self.inside_s[1])
        return forward_s, np.where(first, np.maximum(self.backward_s + self.scatter, backward_s), backward_s)

    def of_chunks(self, picked: IntArray, chunks: Sequence[tuple[int, int]]) -> tuple[FloatArray, FloatArray]:
        """Seconds (chunks,) between two forward passes of a chunk, and between two backward passes.

        Parameters
        ----------
        picked : (units,) the way of each unit, in the order of the network
        chunks : the first unit of each chunk and the one behind its last

        Notes
        -----
        A unit is gathered while the one before it in the pass works; the first of a pass while the pass before ends.
        Backward, messages have one order, so that the gather for a pass waits for the last scatter of the pass before,
        which waits for its work: neither hides. A chunk of one unit has its messages beside itself, unless it computes
        again: what that reads is not there from the forward pass.
        """
        found = [self._of_chunk(picked[begin:end]) for begin, end in chunks]
        forward_s, backward_s = np.array(found).T
        return forward_s, backward_s

    def _of_chunk(self, ways: IntArray) -> tuple[float, float]:
        ahead, back = self.forward_s[ways], self.backward_s[ways]
        gather, again, scatter = self.gather[ways], self.again[ways], self.scatter[ways]
        inside, inside_back = (seconds[ways] for seconds in self.inside_s)
        work = float(ahead.sum() + self.lost * gather.sum()), float(back.sum() + self.lost * (again + scatter).sum())
        if len(ways) == 1:
            behind = float(again[0] + scatter[0])
            waits = (1 - self.lost) * behind if again[0] and self.recomputes[ways[0]] else 0.0
            return max(work[0], float(gather[0] + inside[0])), max(work[1] + waits, behind + float(inside_back[0]))
        gather, again, scatter = ((1 - self.lost) * seconds for seconds in (gather, again, scatter))
        waits = np.maximum(np.roll(gather, -1) - (ahead - inside), 0.0).sum()
        beside = np.append(0.0, again[:-1]) + np.append(scatter[1:], 0.0)
        exposed = scatter[0] + again[-1] + np.maximum(beside - (back - inside_back), 0.0).sum()
        return work[0] + float(waits), work[1] + float(exposed)
