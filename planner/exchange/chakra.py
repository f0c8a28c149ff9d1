"""Chakra execution traces of a simulated step, one a rank, for ASTRA-sim and other simulators of networks.

A trace is the protobuf messages of ``schema/protobuf/et_def.proto`` (mlcommons/chakra, the same in 0.0.4 and 1.0.0),
each behind its length: one ``GlobalMetadata``, then a ``Node`` for each operator and each message. Sizes of collectives
are those of a rank's input, as ASTRA-sim takes them (``astra-sim/system/collective/Ring.cc``). Durations are those that
the simulation gives; a simulator of networks takes them for kernels and finds those of messages itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from planner.planning.prediction import SimulatedPlan, operator_run, operator_tasks
from planner.plans.plan import Plan
from simulator.errors import InputError, UnsupportedError
from simulator.pipeline_operators import EPILOGUE, MEETING, PROLOGUE, SEND, STREAMS, exchanges, send_times
from simulator.program import Collective, ProgramAxis, Task

VERSION = "1.0.0"
MAX_NODES = 20_000_000
"""Nodes of all files together."""
COMPUTE, SENDS, RECEIVES, COLLECTIVE = 4, 5, 6, 7
"""Types of nodes."""
KINDS: Mapping[Collective, int] = {
    Collective.ALL_REDUCE: 0,
    Collective.ALL_GATHER: 2,
    Collective.BROADCAST: 5,
    Collective.ALL_TO_ALL: 6,
    Collective.REDUCE_SCATTER: 7,
}
PIPELINE = "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A node of every rank of a pipeline stage.

    Attributes
    ----------
    waits : nodes that it waits for
    turn : node before it in its rank's queue, -1 for none
    axis : axis whose group takes part, or `PIPELINE` with the pipeline ranks in `peers`; empty for kernels
    seconds, micros : duration, and the same in whole microseconds, rounded so that those of a queue add up
    peers : pipeline ranks of a message among stages; for a ring on an axis how far away the other rank is
    tag : number that a send and its receive share
    """

    name: str
    kind: int
    waits: tuple[int, ...] = ()
    turn: int = -1
    seconds: float = 0.0
    micros: int = 0
    flops: float = 0.0
    size_bytes: float = 0.0
    collective: Collective | None = None
    axis: str = ""
    peers: tuple[int, ...] = ()
    tag: int = 0


@dataclass(frozen=True, kw_only=True)
class Traces:
    """Nodes of each pipeline rank, where the ranks of the stages lie, and the axes of their groups."""

    name: str
    nodes: tuple[tuple[_Node, ...], ...]
    ranks: tuple[int, ...]
    stride: int
    axes: Mapping[str, ProgramAxis]

    @property
    def devices(self) -> int:
        """Number of files."""
        return len(self.nodes) * len(self.ranks)

    def files(self) -> Iterator[tuple[int, bytes]]:
        """Rank and file, rank by rank."""
        numbers = self._numbers()
        compute = [[_encoded(n, node) if not node.axis else b"" for n, node in enumerate(one)] for one in self.nodes]
        head = _message(_text(1, VERSION) + _bytes(2, _text(1, "schema") + _text(29, f"Meshwright: {self.name}")))
        for place, rank in sorted((stage, rank) for stage in range(len(self.nodes)) for rank in self.ranks):
            own = rank + place * self.stride
            nodes = (
                done or self._written(n, node, own, place, numbers)
                for n, (node, done) in enumerate(zip(self.nodes[place], compute[place], strict=True))
            )
            yield own, head + b"".join(map(_message, nodes))

    def _written(self, number: int, node: _Node, own: int, place: int, numbers: Mapping[tuple[int, ...], int]) -> bytes:
        among = self._taking_part(node, own, place)
        return _encoded(number, node, among, numbers.get(among, 0), own)

    def groups(self) -> str:
        """The JSON file that gives the ranks of each group (``--comm-group-configuration``)."""
        return json.dumps({str(number): list(ranks) for ranks, number in self._numbers().items()}) + "\n"

    def _numbers(self) -> dict[tuple[int, ...], int]:
        """Numbers of groups, from 1 on."""
        found: dict[tuple[int, ...], int] = {}
        for place, nodes in enumerate(self.nodes):
            kinds = {(node.axis, node.peers): node for node in nodes if node.kind == COLLECTIVE}
            for node in kinds.values():
                for rank in self.ranks:
                    found.setdefault(self._taking_part(node, rank + place * self.stride, place), len(found) + 1)
        return found

    def _taking_part(self, node: _Node, rank: int, place: int) -> tuple[int, ...]:
        """Ranks that a message of a rank is among; of a send or a receive the other one."""
        if node.axis == PIPELINE:
            return tuple(rank + (peer - place) * self.stride for peer in node.peers)
        axis = self.axes[node.axis]
        turn = (rank - place * self.stride) // axis.stride % axis.size
        if node.peers:
            return (rank + ((turn + node.peers[0]) % axis.size - turn) * axis.stride,)
        return tuple(rank + (other - turn) * axis.stride for other in range(axis.size))


def traces(found: SimulatedPlan, plan: Plan) -> Traces:
    """Traces of a simulated plan.

    Raises
    ------
    UnsupportedError
        The schedule runs two passes together.
    InputError
        The files would hold more than `MAX_NODES` nodes.
    """
    schedule, axes = found.lowered.schedule, {axis.name: axis for axis in found.lowered.axes}
    if schedule.paired.any():
        raise UnsupportedError(
            f"schedule {schedule.name} runs two passes together, and a trace has one queue of kernels a rank; plan "
            "with another schedule, for example --pin schedule=1f1b"
        )
    writer, ranks = _TraceWriter(found, axes), tuple(plan.mesh.ranks())
    writer.write()
    count = len(ranks) * sum(map(len, writer.nodes))
    if count > MAX_NODES:
        raise InputError(
            f"traces of {plan.devices} ranks would hold {count} nodes, and at most {MAX_NODES} are written; plan fewer "
            "micro-batches or devices"
        )
    return Traces(
        name=plan.network, nodes=tuple(map(tuple, writer.nodes)), ranks=ranks, stride=plan.pipeline_stride, axes=axes
    )


class _TraceWriter:
    """Writes the nodes of each pipeline rank, in the order of the tasks of a simulated step.

    ``ends`` are the last node of each task on its own rank, ``arrivals`` the receives of each send on the other.
    """

    def __init__(self, found: SimulatedPlan, axes: Mapping[str, ProgramAxis]) -> None:
        self.run, self.lowered, self.axes = operator_run(found), found.lowered, axes
        self.inside = dict(operator_tasks(found, self.run))
        ranks = self.lowered.schedule.ranks
        self.nodes: list[list[_Node]] = [[] for _ in range(ranks)]
        self.last: dict[tuple[int, int], int] = {}
        self.busy: dict[tuple[int, int], float] = {}
        self.ends: dict[int, int] = {}
        self.arrivals: dict[int, tuple[int, int]] = {}
        self.rings = [0] * ranks

    def write(self) -> None:
        """Write all tasks."""
        table, schedule = self.run.table, self.lowered.schedule
        sender, receiver = exchanges(schedule)
        sizes = send_times(schedule, sender, self.lowered.sent_bytes)
        sends = {int(action): n for n, action in enumerate(sender)}
        streams, ranks = table.stream.tolist(), table.stream_rank[table.stream].tolist()
        for task, (stream, rank, label) in enumerate(zip(streams, ranks, table.label.tolist(), strict=True)):
            seconds = float(table.work[task])
            stands_still = self.lowered.costs.stalls and stream < STREAMS * schedule.ranks
            if label == PROLOGUE or (label == SEND and stands_still):
                continue  # the prologue holds messages that passes write, the other what their own send holds up
            if label == SEND:
                place = sends[int(self.run.actions[task])]
                other = int(schedule.action_rank[receiver[place]])
                name, size = f"{schedule.action(int(sender[place]))}", float(sizes[place])
                sent = _Node(
                    name=f"send {name}", kind=SENDS, seconds=seconds, size_bytes=size, axis=PIPELINE, tag=place
                )
                self._add(task, rank, stream, [replace(sent, peers=(other,))])
                got = replace(sent, name=f"receive {name}", kind=RECEIVES, peers=(rank,))
                self.nodes[other].append(got)
                self.arrivals[task] = other, len(self.nodes[other]) - 1
            elif label == MEETING:
                self._add(task, rank, stream, [self._meeting(int(table.meeting[task]), seconds)])
            elif label == EPILOGUE:
                updates = self.lowered.work.updates[rank]
                tasks = [number for number, times in updates for _ in range(times)]
                self._add(task, rank, stream, self._of_tasks(tasks, rank, "update", None))
            else:
                name = f"{schedule.action(int(self.run.actions[task]))}"
                self._add(task, rank, stream, self._of_tasks(self.inside.get(task, ()), rank, name, seconds))

    def _meeting(self, number: int, seconds: float) -> _Node:
        return _Node(
            name="shared gradients",
            kind=COLLECTIVE,
            seconds=seconds,
            size_bytes=self.lowered.meeting_bytes[number],
            collective=Collective.ALL_REDUCE,
            axis=PIPELINE,
            peers=tuple(self.lowered.costs.meetings[number][0]),
        )

    def _add(self, task: int, rank: int, stream: int, made: Sequence[_Node]) -> None:
        """Append the nodes of a task, one behind the other; the first waits for what the task waits for."""
        table, nodes = self.run.table, self.nodes[rank]
        waits = []
        for other in table.dependencies[table.dependency_offsets[task] : table.dependency_offsets[task + 1]].tolist():
            arrival = self.arrivals.get(other)
            if arrival is not None and arrival[0] == rank:
                waits.append(arrival[1])
            elif other in self.ends:
                waits.append(self.ends[other])
        queue = rank, stream
        for node in made:
            before = self.busy.get(queue, 0.0)
            self.busy[queue] = before + node.seconds * 1e6
            micros = round(self.busy[queue]) - round(before)
            nodes.append(replace(node, waits=tuple(waits), turn=self.last.get(queue, -1), micros=micros))
            waits, self.last[queue] = [], len(nodes) - 1
        self.ends[task] = len(nodes) - 1

    def _of_tasks(self, numbers: Sequence[int], rank: int, name: str, seconds: float | None) -> list[_Node]:
        """Nodes of what an operator runs: neighbouring kernels are one; `seconds` are those of kernels alone."""
        tasks = [(self.lowered.work.tasks[n], float(self.lowered.work.seconds[n])) for n in numbers]
        found: list[_Node] = []
        for message, row in groupby(tasks, key=lambda one: self._travels(one[0])):
            if not message:
                found.append(_kernels(list(row), name))
                continue
            for task, taken in row:
                found += self._message(task, taken, rank)
        if not found:
            return [_Node(name=name, kind=COMPUTE, seconds=seconds or 0.0)]
        if seconds is not None and len(found) == 1 and found[0].kind == COMPUTE:
            return [replace(found[0], seconds=seconds)]
        return found

    def _travels(self, task: Task) -> bool:
        return task.collective is not None and self.axes[task.axis].size > 1

    def _message(self, task: Task, seconds: float, rank: int) -> list[_Node]:
        axis, size = self.axes[task.axis], task.payload_bytes
        if task.collective is not Collective.SEND:
            own = size / axis.size if task.collective is Collective.ALL_GATHER else size
            node = _Node(name=task.name, kind=COLLECTIVE, seconds=seconds, size_bytes=own, collective=task.collective)
            return [replace(node, axis=task.axis)]
        # One turn of a ring: every rank sends to the next one, and has what the one before it sends.
        self.rings[rank] += 1
        tag = len(self.lowered.schedule.kind) + self.rings[rank]
        node = _Node(name=task.name, kind=SENDS, seconds=seconds, size_bytes=size, axis=task.axis, peers=(1,), tag=tag)
        return [node, replace(node, kind=RECEIVES, peers=(-1,))]


def _kernels(row: Sequence[tuple[Task, float]], name: str) -> _Node:
    return _Node(
        name=f"{name} {row[0][0].name}",
        kind=COMPUTE,
        seconds=sum(seconds for _, seconds in row),
        flops=sum(task.flops for task, _ in row),
        size_bytes=sum(task.bytes_moved for task, _ in row),
    )


# The wire format of protobuf: https://protobuf.dev/programming-guides/encoding


def _varint(value: int) -> bytes:
    """A whole number, seven bits a byte, the lowest first.

    >>> _varint(300).hex()
    'ac02'
    """
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _number(place: int, value: int) -> bytes:
    return _varint(place << 3) + _varint(value) if value else b""


def _bytes(place: int, content: bytes) -> bytes:
    return _varint(place << 3 | 2) + _varint(len(content)) + content


def _text(place: int, content: str) -> bytes:
    return _bytes(place, content.encode())


def _message(content: bytes) -> bytes:
    """A message behind its length."""
    return _varint(len(content)) + content


def _attribute(name: str, place: int, value: int | str) -> bytes:
    """An ``AttributeProto``; a value of 0 is written as well, to say which kind it is."""
    content = _text(place, value) if isinstance(value, str) else _varint(place << 3) + _varint(value)
    return _bytes(10, _text(1, name) + content)


_BOOL, _INT32, _INT64, _UINT64, _STRING = 27, 7, 9, 13, 29
"""Fields of ``AttributeProto`` by the kind of their value."""


def _encoded(number: int, node: _Node, other: tuple[int, ...] = (), group: int = 0, own: int = 0) -> bytes:
    """A ``Node``; `other` are the ranks that a message is among, and `group` is their number."""
    found = _number(1, number) + _text(2, node.name) + _number(3, node.kind)
    if node.turn >= 0:
        found += _bytes(4, _varint(node.turn))
    if node.waits:
        found += _bytes(5, b"".join(map(_varint, node.waits)))
    found += _number(7, node.micros)
    found += _attribute("is_cpu_op", _BOOL, 0)
    size = round(node.size_bytes)
    if node.kind == COMPUTE:
        return found + _attribute("num_ops", _INT64, round(node.flops)) + _attribute("tensor_size", _UINT64, size)
    found += _attribute("comm_size", _INT64, size)
    if node.collective is not None:
        found += _attribute("comm_type", _INT64, KINDS[node.collective])
        return found + _attribute("pg_name", _STRING, str(group))
    source, target = (own, other[0]) if node.kind == SENDS else (other[0], own)
    found += _attribute("comm_src", _INT32, source) + _attribute("comm_dst", _INT32, target)
    return found + _attribute("comm_tag", _INT32, node.tag)
