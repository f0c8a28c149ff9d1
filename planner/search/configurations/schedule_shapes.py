"""What the closed form needs to know of a pipeline schedule: who holds which chunk, what fills, what is in flight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.search.stages.fragments import FloatArray, IntArray
from simulator.pipeline_passes import step_of_passes
from simulator.schedules import ActionKind, Schedule, make_schedule
from simulator.schedules.generators import interleaved, interleaved_group

ONE_STAGE = "none"
SPLIT = frozenset({"zb_h1", "zb_h2", "zbv", "dualpipe_v"})
"""Schedules that put off weight gradients."""
SEARCHED = ("1f1b", "interleaved_1f1b", "zb_h1", "zbv", "gpipe")
"""Schedules that are searched where none is pinned, besides no pipeline."""
PINNED = ("zb_h2", "dualpipe_v")
"""Schedules that are planned where they are pinned: ZB-H2 keeps the activations of twice as many micro-batches as
1F1B, and the fill of DualPipe-V is bounded by that of ZBV, which is never longer."""


_FILL_SENDS = {"zb_h1": 2.0}
"""How often the fill pays for a message there and one back, where not once and ranks compute while they send."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleShape:
    """A schedule in numbers.

    Attributes
    ----------
    rank_of : (chunks,) rank of each chunk in the order of the network
    in_flight : (chunks,) micro-batches that a chunk keeps when its rank keeps most of all its chunks
    fill_share : part of a chunk's passes that the fill pays
    split : the fill pays for what `ScheduleShape.fill_s` says instead of both passes
    put_off : how many times what a backward pass puts off counts against the fill
    ahead : so many forward passes come first that no rank waits for a backward pass: the fill need not pay for one
    together : ranks wait for each other at the end of a step, so that the fill pays for the one that begins last
    fill_sends, steady_sends : how often the fill and a rank pay for the messages over a cut
    still_sends : how many of a rank's messages stop its kernels, so that nothing hides them
    hidden_share : part of a rank's own time behind which its other messages hide
    mixes : how many of a rank's micro-batches in flight have gone forward, and how many wait for weight gradients
        alone, as parts of most in flight: at the instants with most of the former, of the latter, and of both
    """

    rank_of: IntArray
    in_flight: FloatArray
    fill_share: float
    split: bool
    fill_sends: float
    steady_sends: float
    hidden_share: float = 0.0
    still_sends: float = 0.0
    put_off: float = 0.0
    ahead: bool = False
    together: bool = False
    mixes: tuple[tuple[float, float], ...] = ((1.0, 0.0),)

    def held_bytes(self, kept: FloatArray, waiting: FloatArray) -> FloatArray:
        """Bytes of a micro-batch in flight, of those kept from the forward pass and those weight gradients read."""
        held: FloatArray = np.max([gone * kept + late * waiting for gone, late in self.mixes], axis=0)
        return held

    def fill_s(self, forward_s: FloatArray, backward_s: FloatArray, late_s: FloatArray) -> FloatArray:
        """Seconds that passes add to the fill of the pipeline; `late_s` of the backward pass may be put off."""
        seconds = forward_s + backward_s
        if self.split:
            early, half = backward_s - late_s, backward_s / 2
            first = forward_s if self.ahead or self.put_off == 1 else np.maximum(forward_s, early)
            waits = first + early - self.put_off * late_s
            if self.together:
                waits = np.maximum(waits, forward_s)
                seconds = waits if self.ahead else np.maximum(waits, np.maximum(early, half))
            elif self.ahead:
                seconds = np.maximum(waits, 0.0)
            elif self.put_off == 1:
                seconds = np.maximum(waits, np.maximum(early, half))
            else:
                behind = np.maximum(2 * forward_s - backward_s, half - forward_s)
                seconds = np.maximum(np.maximum(waits, behind), 0.0)
        filled: FloatArray = self.fill_share * seconds
        return filled


@lru_cache(maxsize=4096)
def schedule_shape(
    name: str,
    ranks: int,
    chunks: int,
    micro_batches: int,
    *,
    overlaps: bool = True,
    stall: float = 0.0,
    together: bool = False,
) -> ScheduleShape:
    """The shape of a schedule of `chunks` chunks a rank; without ``overlaps`` a rank stands still while it sends.

    With ``stall`` it does so for that part of the time of each message.

    With F and B the passes of one rank's chunks together, a step takes M (F + B) and the fill, which is (p - 1)(F + B)
    for 1F1B and GPipe, and that over v for v interleaved chunks. Where backward passes B put off weight gradients W, it
    is (p - 1)(F + B - 2 W) for ZB-H1, at least (p - 1) max(B - W, B / 2); (p - 1)(F + B - 3 W) for ZB-H2, no rank of
    which waits for a backward pass, and half of (p - 1)(max(F, B - W) + B - 3 W) for ZBV, both at least nothing
    (docs/schedules.md has the sources), ZBV also half of (p - 1)(2 F - B) and of (p - 1)(B / 2 - F). For
    the next step follows a rank's own update; where ranks wait for each other at the end of a step, ``together``, the
    last one's forward pass comes late, and all are at least (p - 1) F, or half of that. 1F1B and ZB-H1 have
    as many micro-batches in flight as there are ranks behind a rank: they then wait for the messages of every one of
    them, (p - 1)/p times on average, and ZB-H1 does its weight gradients meanwhile, a third of both passes; before the
    first of these there are none to do, so that its fill waits for the messages there and back. GPipe's
    messages follow one another beside the passes, so that the longer of both counts. Interleaved, the first rank has
    p v + p - 1 passes in flight, p - 1 more than a micro-batch's way through all chunks and back takes: behind those
    messages hide. ZB-H2 and ZBV have more in flight and wait in the fill only, ZB-H2 for messages there alone where
    ranks end together. Where p does not divide the micro-batches, they pass chunks in groups g of more than p: a step
    takes the same, and the first rank has (v - 1) g + 2 p - 1 passes in flight.

    Where ranks stand still while they send, those between the others send an activation on and a gradient back for
    every micro-batch and chunk, which is what passes over one cut; of two ranks each sends one of them. In GPipe both
    ways are taken at the pace of a rank that sends, however many there are.
    """
    if name == ONE_STAGE:
        one = np.ones(1)
        return ScheduleShape(
            rank_of=np.zeros(1, dtype=np.int64), in_flight=one, fill_share=0.0, split=False, fill_sends=0.0,
            steady_sends=0.0,
        )  # fmt: skip
    waits, hidden, group = 0.0, 0.0, _group(name, ranks, micro_batches)
    if name in ("1f1b", "zb_h1"):
        waits, hidden = (micro_batches - 1) * (ranks - 1) / ranks, 0.0 if name == "1f1b" else 1 / 3
    elif name == "gpipe":
        waits, hidden = micro_batches - 1.0, 1.0
    elif name == "interleaved_1f1b":
        around, passes = ranks * chunks, (chunks - 1) * group + 2 * ranks - 1
        waits, hidden = micro_batches * (around - 1) / passes, (passes - around) / passes
    alone = name in ("1f1b", *SPLIT) and ranks == 2
    sent = (micro_batches - 1) / (2 if alone else 1)
    # What interleaved ranks send while the pipeline fills and drains stops nobody.
    idle = ranks * (chunks + 2) / chunks if name == "interleaved_1f1b" else 0.0
    still = max(0.0, sent - idle) * stall
    if not overlaps:
        waits, hidden, still = sent, 0.0, sent
    fill_sends = 0.5 if name == "zb_h2" and together else _FILL_SENDS.get(name, 1.0)
    rank_of, in_flight, mixes = _in_flight(name, ranks, chunks, min(micro_batches, 3 * group), group)
    if name == "gpipe":
        in_flight = np.full(ranks, float(micro_batches))
    return ScheduleShape(
        rank_of=rank_of,
        in_flight=in_flight,
        mixes=mixes,
        fill_share=1.0 / chunks,
        split=name in SPLIT,
        put_off=2.0 if name == "zb_h2" else float(chunks),
        ahead=name == "zb_h2",
        together=together,
        fill_sends=fill_sends if overlaps else 1.0,
        steady_sends=max(waits, still),
        hidden_share=hidden,
        still_sends=still,
    )


def uneven_s(
    name: str, ranks: int, chunks: int, micro_batches: int, seconds: FloatArray, *, together: bool = False
) -> float:
    """Seconds by which a step with several chunks a rank takes longer than fill and turns say, less than 0 if shorter.

    Turns follow one another without a wait only where they are equally long; otherwise ranks that are at different
    turns wait for one another. There is no closed form for that: the passes of few micro-batches are simulated, and
    more of them go on at the same pace.

    Parameters
    ----------
    seconds : (ranks * chunks,) both passes of a micro-batch, taken to be a third forward
    together : as in `ScheduleShape`
    """
    scaled = np.round(seconds / max(float(seconds.max()), 1e-30), 3)
    return float(seconds.max()) * _uneven(name, ranks, chunks, micro_batches, tuple(scaled.tolist()), together)


@lru_cache(maxsize=4096)
def _uneven(
    name: str, ranks: int, chunks: int, micro_batches: int, seconds: tuple[float, ...], together: bool
) -> float:
    both = np.array(seconds)
    forward, backward = both / 3, both * 2 / 3

    def step_s(count: int) -> float:
        return step_of_passes(_schedule(name, ranks, chunks, count, group), forward, backward, together=together)

    group = _group(name, ranks, micro_batches)
    few = 3 * group
    if micro_batches <= few:
        made = step_s(micro_batches)
    else:
        made = step_s(few)
        made += (made - step_s(few - group)) / group * (micro_batches - few)
    shape = schedule_shape(name, ranks, chunks, micro_batches, together=together)
    fill = shape.fill_s(forward, backward, backward / 2)
    turns = (micro_batches * both - fill).reshape(chunks, ranks)
    return made - float(fill.sum() + turns.max(axis=1).sum())


def apart_s(
    micro_batches: int,
    forward_s: FloatArray,
    backward_s: FloatArray,
    fill_s: FloatArray,
    busy_s: FloatArray,
    sends_s: FloatArray | float = 0.0,
) -> float:
    """Seconds of a step of GPipe, whose forward passes go at the pace of their slowest rank and then backward passes.

    A backward pass comes from the last rank: only those from its own rank on slow a rank down. Where one rank is the
    slowest in both, that is the fill and its busy time. Messages beside passes follow one another on each link, so
    that a link slower than all ranks is what sets the pace.

    Parameters
    ----------
    forward_s, backward_s : (ranks,) one pass of one micro-batch
    fill_s, busy_s : (ranks,) both terms of the objective, the latter without waiting for messages
    sends_s : (ranks - 1,) one way over each link
    """
    more = micro_batches - 1
    links = np.broadcast_to(sends_s, len(forward_s) - 1)
    behind = np.maximum.accumulate(np.maximum(backward_s, np.append(links, 0.0))[::-1])[::-1]
    once = busy_s - more * (forward_s + backward_s)
    ahead = max(float(forward_s.max()), float(links.max(initial=0.0)))
    return float(fill_s.sum() + more * ahead + (more * behind + once).max())


def turns_apart_s(
    micro_batches: int, forward_s: FloatArray, backward_s: FloatArray, fill_s: FloatArray, busy_s: FloatArray
) -> float:
    """Seconds of a step of 1F1B, in which a rank that is quick in its passes may do more than others behind them.

    Its last backward pass ends with that of the slowest rank behind it, but for the passes of the ranks before.
    Parameters are those of `apart_s`.
    """
    both, more = forward_s + backward_s, micro_batches - 1
    behind = np.maximum.accumulate(both[::-1])[::-1]
    earlier = np.cumsum(backward_s) - backward_s
    ends = np.maximum(busy_s, busy_s + more * (behind - both) - earlier)
    return float(fill_s.sum() + ends.max())


def fits_schedule(name: str, ranks: int, chunks: int, micro_batches: int) -> bool:
    """Whether the schedule exists for these numbers and its closed form holds."""
    if name == ONE_STAGE:
        return ranks == 1
    if ranks == 1:
        return False
    if name == "interleaved_1f1b":
        return chunks > 1 and micro_batches >= ranks
    if name in ("zbv", "dualpipe_v"):
        return chunks == 2 and micro_batches >= 2 * ranks
    if name in ("zb_h1", "zb_h2"):
        return chunks == 1 and micro_batches >= 2 * ranks
    return chunks == 1


def _group(name: str, ranks: int, micro_batches: int) -> int:
    """Micro-batches after which a schedule repeats itself; after three times as many nothing new happens.

    But that GPipe keeps all of them.
    """
    return interleaved_group(ranks, micro_batches) if name == "interleaved_1f1b" else ranks


def _schedule(name: str, ranks: int, chunks: int, micro_batches: int, group: int) -> Schedule:
    if name == "interleaved_1f1b":
        return interleaved(ranks, micro_batches, chunks, group)
    return make_schedule(name, ranks, micro_batches, chunks)


@lru_cache(maxsize=1024)
def _in_flight(
    name: str, ranks: int, chunks: int, micro_batches: int, group: int
) -> tuple[IntArray, FloatArray, tuple[tuple[float, float], ...]]:
    """(chunks,) rank of each chunk, and forward passes less finished backward passes when its rank has most in flight.

    And `ScheduleShape.mixes`.
    """
    schedule = _schedule(name, ranks, chunks, micro_batches, group)
    rank_of = schedule.stage_rank.astype(np.int64)
    if name == "gpipe":
        return rank_of, np.full(ranks, float(micro_batches)), ((1.0, 0.0),)
    begins = schedule.kind == ActionKind.FORWARD
    ends = (schedule.kind == ActionKind.BACKWARD) | (schedule.kind == ActionKind.WEIGHT_GRADIENT)
    change = begins.astype(np.int64) - ends
    started = (schedule.kind == ActionKind.INPUT_GRADIENT).astype(np.int64)
    waits = started - (schedule.kind == ActionKind.WEIGHT_GRADIENT)
    result, mixes = np.zeros(ranks * chunks), set[tuple[float, float]]()
    for rank in range(ranks):
        own = slice(schedule.offsets[rank], schedule.offsets[rank + 1])
        whole = np.cumsum(change[own])
        until = own.start + int(np.argmax(whole)) + 1
        levels = np.bincount(schedule.stage[own.start : until], change[own.start : until], ranks * chunks)
        mine = rank_of == rank
        result[mine] = levels[mine]
        waiting, most = np.cumsum(waits[own]), whole.max()
        mixes.update(zip(((whole - waiting) / most).tolist(), (waiting / most).tolist(), strict=True))
    last = max(mixes), max(mixes, key=lambda mix: (mix[1], mix[0])), max(mixes, key=lambda mix: (sum(mix), mix[1]))
    return rank_of, result, tuple(dict.fromkeys(last))
