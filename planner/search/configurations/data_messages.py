"""Messages over the data axis where states are stored in several ways: sums of gradients and gathers of parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.search.configurations.messages import message_s, one_message_s
from planner.search.configurations.passes import BoolArray
from planner.search.configurations.storage import Storages
from planner.search.stages.fragments import FloatArray
from simulator.hardware import Hardware
from simulator.program import Collective


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataMessages:
    """How long they take in each storage, (storages, n) seconds of n ways to run units.

    Attributes
    ----------
    bucket : (storages, 1) bytes of a message of several parameters or gradients
    element_bytes, summed_bytes : of an element of a parameter, and of one of a gradient as it is summed
    whole_sums : ZeRO-1 sums gradients whole
    """

    hardware: Hardware
    storages: Storages
    bucket: FloatArray
    element_bytes: int
    summed_bytes: int
    whole_sums: bool = False

    def reduced_s(self, elements: FloatArray) -> FloatArray:
        """Seconds of what is all-reduced: gradients, or shards of them."""
        c, shards = self.storages.placed, self.storages.shards
        stride, held, known = c.stride("data"), elements / shards, dict[tuple[int, float], FloatArray]()
        # ZeRO-1 and 3 over the same ranks reduce the same shards.
        sent = list(zip(shards[:, 0].tolist(), self.bucket[:, 0].tolist(), strict=True))
        for number, key in enumerate(sent):
            if key not in known:
                groups = c.data // key[0], stride * key[0]
                known[key] = self._fused_s(number, Collective.ALL_REDUCE, held[number], *groups)
        return np.array([known[key] for key in sent])

    def scattered_s(self, elements: FloatArray, wanted: BoolArray) -> FloatArray:
        """Seconds in which gradients are reduce-scattered, in storages (storages, 1) where that is ``wanted``."""
        return self._among_shards_s(Collective.REDUCE_SCATTER, elements, wanted)

    def gathered_s(self, elements: FloatArray, wanted: BoolArray) -> FloatArray:
        """Seconds in which parameters are gathered that are fused."""
        return self._among_shards_s(Collective.ALL_GATHER, elements, wanted)

    def first_gather_s(self) -> FloatArray:
        """(storages, 1) seconds of the first message of gathered parameters: no pass is there to hide it."""
        storages, found = self.storages, np.zeros_like(self.bucket)
        if self.hardware.overlaps_communication:
            for number in np.flatnonzero(~(storages.whole | storages.zero3)).tolist():
                group = int(storages.shards[number, 0]), storages.placed.stride("data")
                most = float(self.bucket[number, 0])
                found[number] = one_message_s(self.hardware, Collective.ALL_GATHER, most, *group)
        return found

    def of_units_s(self, collective: Collective, payload: FloatArray) -> FloatArray:
        """(ZeRO-3, n) seconds of messages of a unit's parameters or gradients each, where everything is sharded."""
        stride = self.storages.placed.stride("data")
        ranks = self.storages.shards[self.storages.zero3].tolist()
        given = self.hardware, collective, payload
        found = np.array([message_s(*given, size, stride, sharded=True) for size in ranks])
        return np.where(payload > 0, found, 0.0)

    def usual_gather_s(self, payload: float) -> FloatArray:
        """(ZeRO-3, 1) seconds in which the parameters of one unit are gathered."""
        stride = self.storages.placed.stride("data")
        ranks = self.storages.shards[self.storages.zero3].tolist()
        return np.array([[one_message_s(self.hardware, Collective.ALL_GATHER, payload, n, stride)] for n in ranks])

    def _among_shards_s(self, collective: Collective, elements: FloatArray, wanted: BoolArray) -> FloatArray:
        storages, found = self.storages, np.zeros((len(self.bucket), elements.shape[-1]))
        rows, stride = np.broadcast_to(elements, found.shape), storages.placed.stride("data")
        for number in np.flatnonzero(wanted).tolist():
            whole = self.whole_sums and storages.ways[number].optimizer_sharding == "zero1"
            summed = Collective.ALL_REDUCE if whole and collective is Collective.REDUCE_SCATTER else collective
            ranks = int(storages.shards[number, 0])
            found[number] = self._fused_s(number, summed, rows[number], ranks, stride)
        return found

    def _fused_s(self, number: int, collective: Collective, elements: FloatArray, size: int, stride: int) -> FloatArray:
        """Seconds (n,) of messages of one storage, fused up to the size of a bucket."""
        if size == 1:
            return np.zeros_like(elements)
        payload = elements * (self.element_bytes if collective is Collective.ALL_GATHER else self.summed_bytes)
        most = float(self.bucket[number, 0])
        if float(payload.max(initial=0.0)) <= most:
            fused = one_message_s(self.hardware, collective, most, size, stride)
            return np.asarray(fused * (payload / most))
        sent = np.maximum(payload, most)
        return message_s(self.hardware, collective, sent, size, stride) * (payload / sent)
