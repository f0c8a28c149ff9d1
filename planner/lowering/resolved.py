"""Values resolved to dependencies and buffers: a step in columns, its drafts repeated for every unit of the network."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.work import state_bytes
from planner.graph.operator_graph import DTYPE_BYTES, Role
from planner.lowering.blueprint import RELATIVE, SAME, Blueprint, BufferNames, Placing
from planner.lowering.instructions import value_of_copy
from planner.lowering.segment import SegmentWriter
from planner.lowering.turns import stored_values
from simulator.columns import KIND_INDEX, Changes, ProgramColumns, SegmentColumns
from simulator.program import COMPUTE_STREAM, BufferKind, ProgramAxis
from simulator.task_table import BoolArray, IntArray


def step_columns(
    blueprint: Blueprint, writers: Sequence[tuple[str, int, SegmentWriter]], devices: int, axes: tuple[ProgramAxis, ...]
) -> ProgramColumns:
    """The program of written segments, each with its name and how often it runs.

    Raises
    ------
    UnalikeError
        A unit reads what is not beside it.
    """
    placing = Placing(blueprint)
    step = _Step(blueprint, placing)
    segments = tuple(step.segment(name, count, writer) for name, count, writer in writers)
    resident, states = step.resident()
    return ProgramColumns(
        name=blueprint.graph.network,
        devices=devices,
        axes=axes,
        segments=segments,
        resident=resident,
        buffers=BufferNames(placing, states),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Values that rows use, (u,): ``row`` ascending, ``value`` in the whole network, ``use`` its place in drafts."""

    row: IntArray
    value: IntArray
    use: IntArray


class _Step:
    """What all segments of a step share."""

    def __init__(self, blueprint: Blueprint, placing: Placing) -> None:
        self.blueprint, self.placing = blueprint, placing
        self.streams: dict[str, int] = {COMPUTE_STREAM: 0}
        tasks = blueprint.tasks
        self.stream = np.array([self.streams.setdefault(task.stream, len(self.streams)) for task in tasks])
        self.beside = np.array(blueprint.beside)
        self.collective = np.array([task.collective is not None for task in tasks])
        self.uses = {
            name: tuple(np.array(column, dtype=np.int64) for column in (uses.offsets, uses.values, uses.units))
            for name, uses in (("reads", blueprint.reads), ("writes", blueprint.writes), ("done", blueprint.completes))
        }
        self.views = np.array(blueprint.views, dtype=np.int64).reshape(-1, 3)
        owned = [
            (index, blueprint.named(name), blueprint.owners[index])
            for index in blueprint.source.stored
            for name in stored_values(blueprint.source, index)
        ]
        nodes, values, owners = np.array(owned, dtype=np.int64).reshape(-1, 3).T
        places = {owner: np.array(units, dtype=np.int64) for owner, units in blueprint.copies.places.items()}
        counts = [len(places[owner]) for owner in owners.tolist()]
        units = [np.zeros(0, dtype=np.int64), *(places[owner] for owner in owners.tolist())]
        self.stored_nodes: IntArray = np.repeat(nodes, counts)
        self.stored = placing(np.repeat(values, counts), np.concatenate(units))

    def _placed(self, uses: Sequence[tuple[int, int]] | array[int]) -> IntArray:
        pairs = np.array(uses, dtype=np.int64).reshape(-1, 2)
        return self.placing(pairs[:, 0], pairs[:, 1])

    def _rows(self, name: str, which: IntArray, unit: IntArray) -> _Rows:
        offsets, values, units = self.uses[name]
        row, use = _ranges(offsets[which], np.diff(offsets)[which])
        of = units[use]
        of += np.where(of < RELATIVE, unit[row] - SAME, 0)
        return _Rows(row, self.placing(values[use], of), use)

    def segment(self, name: str, count: int, writer: SegmentWriter) -> SegmentColumns:
        """Dependencies, and when values go: when the last reader, or that of a view, is done."""
        which, unit = _expanded(writer.order)
        reads, writes, done = (self._rows(kind, which, unit) for kind in ("reads", "writes", "done"))
        made = self._nowhere()
        made[writes.value] = writes.row
        finished = self._nowhere()
        finished[done.value] = done.row
        dependencies, offsets = self._dependencies(which, reads, made, finished, done)
        last = self._last_uses(which, unit, reads, writes)
        released = self._released(writer, last, (made >= 0) | (finished >= 0))
        new = ~np.isin(writes.value, self._losses) if not writer.first else np.ones(len(writes.row), dtype=bool)
        kept = writes.use[new]
        sizes = np.array(self.blueprint.write_bytes, dtype=np.int64)[kept]
        kinds = np.array(self.blueprint.write_kind, dtype=np.int64)[kept]
        nothing = np.zeros(len(released), dtype=np.int64)
        changes = Changes(
            row=np.concatenate([writes.row[new], last[released]]),
            sign=np.concatenate([np.ones(len(kept), dtype=np.int64), nothing - 1]),
            buffer=np.concatenate([writes.value[new], released]),
            size_bytes=np.concatenate([sizes, nothing]),
            kind=np.concatenate([kinds, nothing]),
        )
        return SegmentColumns(
            name=name,
            count=count,
            tasks=self.blueprint.tasks,
            which=which,
            dependency_offsets=offsets,
            dependencies=dependencies,
            changes=changes,
        )

    @property
    def _losses(self) -> IntArray:
        """The loss of every copy of the micro-batch."""
        source = self.blueprint.source
        names = [value_of_copy(source.loss_value, copy) for copy in range(source.options.copies)]
        return self._placed([(self.blueprint.named(name), 0) for name in names])

    def _nowhere(self) -> IntArray:
        return np.full(self.placing.count, -1, dtype=np.int64)

    def _dependencies(
        self, which: IntArray, reads: _Rows, made: IntArray, finished: IntArray, done: _Rows
    ) -> tuple[IntArray, IntArray]:
        """Rows that each row waits for on other streams, by row and ascending, with their offsets."""
        size = len(which)
        stream = self.stream[which]
        complete = finished[reads.value]
        source = np.where((complete >= 0) & (complete < reads.row), complete, made[reads.value])
        waits = (source >= 0) & (source < reads.row) & (stream[source] != stream[reads.row])
        computing = np.where(stream == 0, np.arange(size), -1)
        before = np.concatenate(([-1], np.maximum.accumulate(computing)[:-1])) if size else computing
        beside = np.flatnonzero(self.beside[which] & (before >= 0))
        behind = np.unique(done.row[self.collective[which[done.row]]])
        row = np.concatenate([reads.row[waits], beside, behind])
        # Three ascending parts, which a stable sort merges.
        keys = np.sort(row * size + np.concatenate([source[waits], before[beside], behind - 1]), kind="stable")
        keys = keys[np.diff(keys, prepend=-1) > 0]
        counts = np.bincount(keys // max(size, 1), minlength=size)
        return keys % max(size, 1), np.concatenate(([0], np.cumsum(counts)))

    def _last_uses(self, which: IntArray, unit: IntArray, reads: _Rows, writes: _Rows) -> IntArray:
        """(values,) the last row that writes or reads each, or a view of it; -1 for none."""
        last, owner = self._nowhere(), self._nowhere()
        views = self._views(which, unit)
        owner[views[0]] = views[1]
        last[writes.value] = writes.row
        values, row = reads.value, reads.row
        while len(values):
            np.maximum.at(last, values, row)
            values = owner[values]
            values, row = values[values >= 0], row[values >= 0]
        return last

    def _views(self, which: IntArray, unit: IntArray) -> tuple[IntArray, IntArray]:
        """Views that are made, and the values in whose memory they stand."""
        drafts, view, owner = self.views.T
        counts = np.bincount(drafts, minlength=len(self.stream))
        row, use = _ranges((np.cumsum(counts) - counts)[which], counts[which])
        of = unit[row]
        return self.placing(view[use], of), self.placing(owner[use], of)

    def _released(self, writer: SegmentWriter, last: IntArray, produced: BoolArray) -> IntArray:
        """Values that go: all but parameters, the batch, the loss, and what a later micro-batch needs."""
        lasting = np.zeros(self.placing.count, dtype=bool)
        lasting[self._placed(writer.persistent)] = True
        fixed = np.zeros(self.placing.count, dtype=bool)
        fixed[self.stored] = fixed[self._losses] = True
        keep = fixed if writer.last else fixed | lasting
        goes = (produced | lasting) if writer.last else produced
        return np.flatnonzero((last >= 0) & ~keep & goes)

    def resident(self) -> tuple[Changes, list[int]]:
        """Parameters, optimizer states and the batch; and the parameter of each state."""
        source, graph = self.blueprint.source, self.blueprint.graph
        # By node: bytes, what they are, and those of its states; nothing of what the host holds.
        sizes = np.full((len(graph.nodes), 3), -1, dtype=np.int64)
        for index in source.stored:
            if source.on_host(index):
                continue
            node = graph.nodes[index]
            spec = node.outputs[0]
            size = source.local_bytes(spec, source.stored[index])
            parameter = node.role is Role.PARAMETER
            kind = KIND_INDEX[BufferKind.PARAMETER if parameter else BufferKind.ACTIVATION]
            more = state_bytes(source.options.optimizer, spec.dtype) * size // DTYPE_BYTES[spec.dtype]
            on_device = source.is_trained(index) and not source.options.offload_optimizer
            sizes[index] = size, kind, more if on_device else 0
        found = sizes[self.stored_nodes]
        here = found[:, 0] >= 0
        values, found = self.stored[here], found[here]
        stateful = found[:, 2] > 0
        states = values[stateful]
        # States stand behind what they are of.
        own = np.arange(len(values)) + np.cumsum(stateful) - stateful
        behind = own[stateful] + 1
        table = np.empty((3, len(values) + len(states)), dtype=np.int64)
        table[:, own] = values, found[:, 0], found[:, 1]
        table[:2, behind] = self.placing.count + np.arange(len(states)), found[stateful, 2]
        table[2, behind] = KIND_INDEX[BufferKind.OPTIMIZER_STATE]
        zeros = np.zeros(table.shape[1], dtype=np.int64)
        changes = Changes(row=zeros, sign=zeros + 1, buffer=table[0], size_bytes=table[1], kind=table[2])
        return changes, states.tolist()


def _ranges(begin: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Numbers from each of `begin`, as many as `counts` says, one after the other: places in `begin`, and numbers."""
    row: IntArray = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) + (begin - np.cumsum(counts) + counts)[row]


def _expanded(order: array[int]) -> tuple[IntArray, IntArray]:
    """(n,) drafts of a segment in order, and the unit that each is run for."""
    blocks = np.array(order, dtype=np.int64).reshape(-1, 3)
    counts = blocks[:, 1] - blocks[:, 0]
    row, drafts = _ranges(blocks[:, 0], counts)
    return drafts, blocks[row, 2]
