"""Published schedules, made as arrays.

Most of them are one rule: forward passes in their order, backward passes in theirs, which start after the rank's
warm-up of forward passes and then alternate with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from simulator.errors import InputError
from simulator.schedules.schedule import ActionKind, BoolArray, IndexArray, OffsetArray, Schedule

FORWARD, BACKWARD, INPUT, WEIGHT = ActionKind


def gpipe(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """All forward passes, then all backward passes (Huang et al., arXiv:1811.06965)."""
    _require_chunks("gpipe", chunks, 1)
    return _alternating("gpipe", ranks, micro_batches, np.full(ranks, micro_batches))


def one_forward_one_backward(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B: rank r warms up with p - 1 - r forward passes (Narayanan et al., arXiv:2006.09503)."""
    _require_chunks("1f1b", chunks, 1)
    return _alternating("1f1b", ranks, micro_batches, ranks - 1 - np.arange(ranks))


def interleaved(ranks: int, micro_batches: int, chunks: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B in the order of Megatron-LM (Narayanan et al., arXiv:2104.04473, 2.2).

    Micro-batches pass the chunks of a rank in groups, by default those of `interleaved_group`.
    """
    group = group or interleaved_group(ranks, micro_batches)
    warmup = 2 * (ranks - 1 - np.arange(ranks)) + (chunks - 1) * group
    return _alternating("interleaved_1f1b", ranks, micro_batches, warmup, chunks=chunks, group=group)


def interleaved_group(ranks: int, micro_batches: int) -> int:
    """Micro-batches that pass one chunk of a rank before the next chunk begins.

    They are as many as ranks p. Where p does not divide the micro-batches, the group is the smallest one above p that
    leaves no remainder below p, which is Megatron-Core's condition for a group.

    >>> interleaved_group(4, 12), interleaved_group(4, 14), interleaved_group(4, 6)
    (4, 5, 6)
    """
    return next(
        (g for g in range(ranks, micro_batches) if micro_batches % g == 0 or micro_batches % g >= ranks), micro_batches
    )


def zb_h1(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients come r micro-batches later on rank r (Qi et al., arXiv:2401.10241, 2.1)."""
    _require_chunks("zb_h1", chunks, 1)
    rank = np.arange(ranks)
    return _alternating("zb_h1", ranks, micro_batches, ranks - 1 - rank, weight_delay=rank)


def zb_h2(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """ZB-H2: twice as many forward passes ahead as 1F1B, which weight gradients 2 r micro-batches late make up for.

    Every rank has work from its first pass to its last (Qi et al., arXiv:2401.10241, 2.2).
    """
    _require_chunks("zb_h2", chunks, 1)
    rank = np.arange(ranks)
    return _alternating("zb_h2", ranks, micro_batches, 2 * (ranks - 1 - rank), weight_delay=2 * rank)


def multi_copy(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """1F1B over pairs of micro-batches that run together, as MindSpore's ``micro_batch_interleave_num`` 2.

    The communication of one copy hides behind the computation of the other; micro-batches 2j and 2j + 1 are the
    copies of one batch.
    """
    _require_chunks("multi_copy", chunks, 1)
    if micro_batches % 2:
        raise InputError(f"multi_copy runs micro-batches in pairs, but there are {micro_batches}: make them even")
    single = _alternating("multi_copy", ranks, micro_batches // 2, ranks - 1 - np.arange(ranks))
    first_of_pair = np.arange(2 * single.size, dtype=np.int32) % 2 == 0
    return Schedule(
        name=single.name,
        ranks=ranks,
        micro_batches=micro_batches,
        stage_rank=single.stage_rank,
        offsets=2 * single.offsets,
        kind=np.repeat(single.kind, 2),
        stage=np.repeat(single.stage, 2),
        micro_batch=2 * np.repeat(single.micro_batch, 2) + ~first_of_pair,
        paired=first_of_pair,
    )


def gradient_accumulation(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Forward and backward of one micro-batch after the other on a single rank."""
    _require_chunks("gradient_accumulation", chunks, 1)
    if ranks != 1:
        raise InputError(f"gradient_accumulation has no pipeline, but {ranks} ranks were given: use 1 or another one")
    return _alternating("gradient_accumulation", ranks, micro_batches, np.zeros(1, dtype=np.int64))


def zbv(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """ZB-V: two stages a rank in a V, backward passes in two parts (Qi et al., arXiv:2405.15362; 2401.10241, 6).

    Fewer than 2p - 1 micro-batches leave out the missing ones of the order for 2p - 1.
    """
    _require_chunks("zbv", chunks, 2)
    count = max(2 * ranks - 1, micro_batches)
    rows = []
    for rank in range(ranks):
        with_forward = count - 2 * ranks + 1 + rank
        rows.append(
            _row(
                ("F0", 2 * (ranks - rank) - 1),
                ("F1 F0", rank),
                ("F1 I1 W1", ranks - rank),
                ("F0 I0 W0 F1 I1 W1", with_forward),
                ("I0 W0 F1 I1 W1", ranks - 1 - rank),
                ("I0 I1", rank),
                ("I0 W0", ranks - rank),
                ("W1", rank),
                ("W0", rank),
            )
        )
    return _two_chunk_schedule("zbv", ranks, micro_batches, rows)


def dualpipe(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """DualPipe: micro-batches enter at both ends (DeepSeek-V3 report, arXiv:2412.19437, 3.2.1; their open code).

    Every rank holds a stage of each of two copies of the network, one for each direction; a forward pass of one runs
    together with a backward pass of the other.
    """
    _require_chunks("dualpipe", chunks, 2)
    if ranks % 2 or micro_batches % 2 or micro_batches < 2 * ranks:
        raise InputError(
            f"dualpipe needs an even number of ranks, and of micro-batches an even number of at least 2 x ranks, "
            f"but got {ranks} and {micro_batches}: change them or use zbv"
        )
    half = [_dualpipe_phases(ranks // 2, micro_batches // 2, rank) for rank in range(ranks // 2)]
    return _two_chunk_schedule("dualpipe", ranks, micro_batches, half + half[::-1], chains=2)


def dualpipe_v(ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """DualPipe folded into a V: one copy of the network, half the ranks (DeepSeek's open code; PyTorch's DualPipeV)."""
    _require_chunks("dualpipe_v", chunks, 2)
    if micro_batches < 2 * ranks:
        raise InputError(
            f"dualpipe_v needs at least 2 x ranks micro-batches, but got {micro_batches} on {ranks} ranks: "
            "add micro-batches or use zbv"
        )
    rows = [_dualpipe_phases(ranks, micro_batches, rank) for rank in range(ranks)]
    return _two_chunk_schedule("dualpipe_v", ranks, micro_batches, rows)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
    "multi_copy": multi_copy,
    "gradient_accumulation": gradient_accumulation,
}
"""Generators by name: ``(ranks, micro_batches, chunks)``, chunks being the stages of a rank."""

TWO_CHUNKS = frozenset({"zbv", "dualpipe", "dualpipe_v"})
"""Schedules that need two stages a rank."""


@lru_cache(maxsize=256)
def make_schedule(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The schedule of a name; ``chunks`` stages a rank, by default as many as the schedule needs.

    >>> [str(action) for action in make_schedule("1f1b", 2, 3).actions(0)]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    if name not in SCHEDULES:
        raise InputError(f"Unknown schedule '{name}': use one of {', '.join(SCHEDULES)}")
    if chunks is None:
        chunks = 2 if name in TWO_CHUNKS else 1
    if min(ranks, micro_batches, chunks) < 1:
        raise InputError(
            f"A schedule needs at least one rank, micro-batch and stage a rank, "
            f"but got {ranks}, {micro_batches} and {chunks}"
        )
    return SCHEDULES[name](ranks, micro_batches, chunks)


def _require_chunks(name: str, chunks: int, needed: int) -> None:
    if chunks != needed:
        remedy = " or interleaved_1f1b" if needed == 1 else ""
        raise InputError(f"{name} has {needed} stage(s) a rank, but {chunks} were given: use {needed}{remedy}")


def _alternating(
    name: str,
    ranks: int,
    micro_batches: int,
    warmup: OffsetArray,
    *,
    chunks: int = 1,
    group: int | None = None,
    weight_delay: OffsetArray | None = None,
) -> Schedule:
    """Forward k, then backward k - warmup, then weight gradient k - warmup - delay, for k = 0, 1, 2, ...

    warmup, weight_delay : (ranks,); without a delay backward passes are whole.
    """
    count = micro_batches * chunks
    number, chunk = _virtual_order(micro_batches, chunks, group or micro_batches)
    turn = np.arange(count)
    starts = [np.zeros(ranks, dtype=np.int64), warmup]
    kinds = [FORWARD, BACKWARD]
    if weight_delay is not None:
        starts, kinds = [*starts, warmup + weight_delay], [FORWARD, INPUT, WEIGHT]
    keys = [len(starts) * (start[:, None] + turn) + place for place, start in enumerate(starts)]
    order = np.argsort(np.concatenate(keys, axis=1), axis=1, kind="stable")
    chunk_of = np.concatenate([chunk, *[chunks - 1 - chunk] * (len(kinds) - 1)])
    stage = chunk_of.astype(np.int32)[order] * np.int32(ranks) + np.arange(ranks, dtype=np.int32)[:, None]
    length = len(kinds) * count
    return Schedule(
        name=name,
        ranks=ranks,
        micro_batches=micro_batches,
        stage_rank=np.tile(np.arange(ranks, dtype=np.int32), chunks),
        offsets=np.arange(ranks + 1, dtype=np.int64) * length,
        kind=np.repeat(np.array(kinds, dtype=np.int32), count)[order].ravel(),
        stage=stage.ravel(),
        micro_batch=np.tile(number.astype(np.int32), len(kinds))[order].ravel(),
        paired=np.zeros(ranks * length, dtype=np.bool_),
    )


def _virtual_order(micro_batches: int, chunks: int, group: int) -> tuple[OffsetArray, OffsetArray]:
    """(micro_batches * chunks,) micro-batch and chunk of each turn: a group passes all chunks before the next."""
    micro_batch, chunk = np.divmod(np.arange(micro_batches * chunks), chunks)
    order = np.lexsort((micro_batch, chunk, micro_batch // group))
    return micro_batch[order], chunk[order]


_KINDS = {kind.letter: int(kind) for kind in ActionKind}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    """Actions of a rank that holds two chunks, as arrays (actions,)."""

    kind: IndexArray
    chunk: IndexArray
    micro_batch: IndexArray
    paired: BoolArray


def _row(*phases: tuple[str, int]) -> _Row:
    """Actions of a rank from patterns such as ``F0 I1 W1``, each repeated; ``F0&B1`` is a pair.

    Micro-batches of each chunk come in order. ``W0`` and ``W1`` take the oldest input gradient of their chunk that
    still lacks its weight gradient, ``W`` the oldest of both chunks.
    """
    blocks = []
    for pattern, repeats in phases:
        pairs = [pair.split("&") for pair in pattern.split()]
        codes = [
            (_KINDS[member[0]], int(member[1:] or -1), place + 1 < len(pair))
            for pair in pairs
            for place, member in enumerate(pair)
        ]
        blocks.append(np.tile(np.array(codes, dtype=np.int32), (repeats, 1)))
    kind, chunk, paired = np.concatenate(blocks).T
    micro_batch = np.zeros_like(kind)
    for number in (0, 1):
        for chosen in ((kind == FORWARD), (kind == BACKWARD) | (kind == INPUT)):
            places = np.flatnonzero(chosen & (chunk == number))
            micro_batch[places] = np.arange(len(places))
    for number in np.unique(chunk[kind == WEIGHT]):
        places = np.flatnonzero((kind == WEIGHT) & (chunk == number))
        sources = np.flatnonzero((kind == INPUT) & ((chunk == number) | (number < 0)))
        chunk[places], micro_batch[places] = chunk[sources], micro_batch[sources]
    return _Row(kind=kind, chunk=chunk, micro_batch=micro_batch, paired=paired.astype(np.bool_))


def _two_chunk_schedule(name: str, ranks: int, micro_batches: int, rows: Sequence[_Row], chains: int = 1) -> Schedule:
    """Rows of all ranks as a schedule; rank r holds stages r and 2p - 1 - r.

    With two chains the second half of the ranks swaps its chunks, and the second half of the stages runs the second
    half of the micro-batches.
    """
    last = 2 * ranks - 1
    per_chain = micro_batches // chains
    kept = [row.micro_batch < per_chain for row in rows]
    stages = []
    for rank, row in enumerate(rows):
        swapped = chains == 2 and rank >= ranks // 2
        stages.append(np.where((row.chunk == 1) ^ swapped, last - rank, rank).astype(np.int32))
    stage = np.concatenate([array[keep] for array, keep in zip(stages, kept, strict=True)])
    kind, micro_batch, paired = (
        np.concatenate([getattr(row, name)[keep] for row, keep in zip(rows, kept, strict=True)])
        for name in ("kind", "micro_batch", "paired")
    )
    stage_rank = np.arange(2 * ranks, dtype=np.int32)
    return Schedule(
        name=name,
        ranks=ranks,
        micro_batches=micro_batches,
        stage_rank=np.minimum(stage_rank, last - stage_rank),
        offsets=np.concatenate(([0], np.cumsum([keep.sum() for keep in kept]))),
        kind=kind,
        stage=stage,
        micro_batch=(micro_batch + per_chain * (stage // (2 * ranks // chains))).astype(np.int32),
        paired=paired,
        chains=chains,
    )


def _dualpipe_phases(ranks: int, micro_batches: int, rank: int) -> _Row:
    """Steps 1 to 8 of DualPipe on a rank of the first half (``ranks`` of them, micro-batches of one direction).

    The innermost rank does not overlap its first pair, which shortens the bubble. Weight gradients are split off from
    the middle of step 6 on.
    """
    outer = ranks - 1 - rank
    main = micro_batches - 2 * ranks + rank + 1
    whole, split_off = (rank + 1) // 2, rank + 1 - (rank + 1) // 2 - 1
    middle = "I1 I0" if rank % 2 else "B1 I0"
    return _row(
        ("F0", 2 * outer),
        ("F0 F1", rank + 1),
        ("I1 W F1", outer),
        ("F0 B1 F1&B0" if outer == 0 else "F0&B1 F1&B0", 1),
        ("F0&B1 F1&B0", main - 1),
        ("B1 F1&B0", outer),
        ("B1 B0", whole),
        (middle, 1),
        ("I1 I0", split_off),
        ("W I0", outer),
        ("W", rank + 1),
    )
