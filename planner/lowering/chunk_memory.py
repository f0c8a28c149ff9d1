"""Bytes of a chunk in its passes, and of a pipeline rank through the whole step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from planner.cost.work import state_bytes
from planner.graph.operator_graph import DTYPE_BYTES
from planner.lowering.groups import ALONE, BY_SIZE
from planner.lowering.placed import PlacedGraph
from planner.lowering.unit_work import UnitWork
from planner.lowering.written import adds_across_chunks
from simulator.program import BufferKind, Collective, Phase
from simulator.task_table import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBytes:
    """Bytes of one micro-batch: kept for the backward pass, deferred by its first part, and needed at once beyond.

    ``forward``, ``backward`` and its parts ``inputs`` and ``weights`` are beyond what has been kept, or deferred.
    """

    kept: int
    deferred: int
    forward: int
    backward: int
    inputs: int
    weights: int


def chunk_bytes(source: PlacedGraph, units: Sequence[UnitWork]) -> ChunkBytes:
    """Add up the units of a chunk: what one keeps stands while another works.

    Copies of a micro-batch work on a unit at the same time.
    """
    pending = _pending(source, units)
    kept = []
    for number, unit in enumerate(units):
        memory = unit.memory
        own_input = memory.keeps_input and not (number and units[number - 1].memory.keeps_output)
        kept.append(memory.kept + (memory.input if own_input else 0))
    total = source.options.copies * sum(kept)
    each = source.options.copies
    forward = max(each * (sum(kept[:n]) + unit.memory.forward) for n, unit in enumerate(units))
    next_back = [0, *(unit.memory.fetched for unit in units)]
    backward = max(
        each * (unit.memory.backward + next_back[n] - sum(kept[n + 1 :])) + pending[n] for n, unit in enumerate(units)
    )
    deferred = [unit.memory.deferred for unit in units]
    inputs = max(
        each * (unit.memory.inputs + next_back[n] - sum(kept[n + 1 :]) + sum(deferred[n + 1 :]) - _twice(units, n))
        for n, unit in enumerate(units)
    )
    weights = max(each * (unit.memory.weights - sum(deferred[n + 1 :])) + pending[n] for n, unit in enumerate(units))
    return ChunkBytes(
        kept=total,
        deferred=each * sum(deferred),
        forward=max(0, forward - total),
        backward=max(0, backward),
        inputs=max(0, inputs),
        weights=max(0, weights),
    )


def _twice(units: Sequence[UnitWork], number: int) -> int:
    """Bytes that a unit keeps while those behind have gone back: its output, where the next one defers it too."""
    behind = units[number + 1].memory if number + 1 < len(units) else None
    return behind.input if behind and behind.defers_input and units[number].memory.keeps_output else 0


def rank_bytes(
    source: PlacedGraph, units: Sequence[UnitWork], held: Sequence[Sequence[Sequence[int]]], micro_batches: int
) -> Mapping[BufferKind, FloatArray]:
    """(ranks,) bytes by kind that stand all the time.

    Parameters
    ----------
    held : for each rank, for each of its chunks, the numbers of its units
    """
    found: dict[BufferKind, FloatArray] = {}
    for rank, chunks in enumerate(held):
        for kind, size in _resident(source, units, chunks).items():
            found.setdefault(kind, np.zeros(len(held)))[rank] += size
    return found


def _resident(
    source: PlacedGraph, units: Sequence[UnitWork], chunks: Sequence[Sequence[int]]
) -> dict[BufferKind, float]:
    found = dict.fromkeys(
        (
            BufferKind.PARAMETER,
            BufferKind.GRADIENT,
            BufferKind.OPTIMIZER_STATE,
            BufferKind.GATHERED_PARAMETER,
        ),
        0.0,
    )
    users = Counter(index for unit in units for index in unit.parameters)
    chunks_of = Counter(i for chunk in chunks for i in dict.fromkeys(i for n in chunk for i in units[n].parameters))
    counted: set[int] = set()
    for number, times in Counter(n for chunk in chunks for n in chunk).items():
        for index in units[number].parameters:
            if users[index] > 1 and index in counted:
                continue
            counted.add(index)
            for kind, size in _parameter_bytes(source, index).items():
                sums = kind is BufferKind.GRADIENT and not adds_across_chunks(source)
                found[kind] += size * (times if users[index] == 1 else chunks_of[index] if sums else 1)
    found[BufferKind.GATHERED_PARAMETER] += max((_gathered(source, units, chunk) for chunk in chunks), default=0)
    return found


def _parameter_bytes(source: PlacedGraph, index: int) -> dict[BufferKind, int]:
    """Bytes of one parameter between passes: itself, its states, its accumulated gradient, and gathered for a step."""
    spec = source.graph.nodes[index].outputs[0]
    size = source.local_bytes(spec, source.stored[index])
    found = {BufferKind.PARAMETER: 0 if source.on_host(index) else size}
    if source.is_trained(index) and not source.updated_on_host(index):
        states = state_bytes(source.options.optimizer, spec.dtype)
        found[BufferKind.OPTIMIZER_STATE] = states * size // DTYPE_BYTES[spec.dtype]
    if source.is_trained(index) and index not in source.host.parameters:
        ref = source.gradient_ref(index)
        ahead, _ = source.gradient_path(index)
        placements = ahead[-1].after if ahead else source.output_placements(ref)
        found[BufferKind.GRADIENT] = source.local_bytes(source.graph.spec(ref), placements)
    if index not in source.by_unit:
        gathered = (source.local_bytes(spec, wanted) for wanted in source.gathered(index))
        found[BufferKind.GATHERED_PARAMETER] = sum(gathered)
    return found


def _pending(source: PlacedGraph, units: Sequence[UnitWork]) -> list[int]:
    """Most bytes of whole gradients that wait for a full message, or the end of their unit, while each unit goes back.

    They do where gradients travel every micro-batch; elsewhere each is added to its accumulator at once.
    """
    found = [0] * len(units)
    limit = inf if source.by_unit else source.options.bucket_bytes
    waiting: Counter[int] = Counter()
    sent = {index: tuple(_sent_first(source, index)) for index in {i: None for unit in units for i in unit.parameters}}
    missing = Counter(group for unit in units for index in unit.parameters for group, _ in sent[index])
    for number in range(len(units) - 1, -1, -1):
        for index in units[number].parameters:
            for group, size in sent[index]:
                waiting[group] += size
                missing[group] -= 1
                found[number] = max(found[number], waiting.total())
                full = waiting[group] >= limit if group == BY_SIZE else group == ALONE or not missing[group]
                waiting[group] = 0 if full else waiting[group]
        found[number] = max(found[number], waiting.total())
        waiting[BY_SIZE] = 0 if source.by_unit else waiting[BY_SIZE]
    return found


def _sent_first(source: PlacedGraph, index: int) -> Iterator[tuple[int, int]]:
    """Group and bytes of a parameter's gradient, whole, if it travels every micro-batch."""
    on_device = source.is_trained(index) and index not in source.host.parameters
    steps = source.gradient_path(index)[0] if on_device else ()
    for step in steps:
        if isinstance(step.operation, Collective):
            size = source.local_bytes(source.graph.spec(source.gradient_ref(index)), step.before)
            yield source.fusion_group(index, step.operation), size
            return


def _gathered(source: PlacedGraph, units: Sequence[UnitWork], chunk: Sequence[int]) -> int:
    """Most bytes of parameters gathered unit by unit that stand at once: a unit's, and those of the next."""
    if not source.by_unit:
        return 0
    sizes = [
        max(
            sum(
                source.local_bytes(source.graph.spec(ref), wanted) for ref, wanted, _ in units[n].gathers.get(phase, ())
            )
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        for n in chunk
    ]
    return max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))
