"""Activations that wait for the backward pass in the memory of the host.

What only the backward operators of one unit read is copied to the host as soon as it is made, and back before they
read it, both beside computation. Views are taken again of what has come back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.graph.operator_graph import TensorRef
from planner.lowering.body import Body, Fetch
from planner.lowering.instructions import Compute, HostCopy
from planner.lowering.units import NOWHERE
from planner.lowering.work import with_names
from planner.lowering.writer import HOST_STREAM, Draft, host_copy
from planner.networks.marks import Swap
from simulator.program import COMPUTE_STREAM, Buffer, BufferKind, Kernel, Phase


def offload(body: Body, given: Iterable[TensorRef], leaves: str) -> None:
    """Write the copies of a body's units that are to have activations on the host into its items.

    Parameters
    ----------
    given : iterable of TensorRef
        Tensors that other bodies have made.
    leaves : str
        What the body hands on, which whoever takes it may offload.
    """
    source, graph = body.source, body.graph
    names, swaps = source.units.names, source.options.offload
    units = {number: swaps[name] for number, name in enumerate(names) if name in swaps}
    if units:
        forward = [ref for ref in given if graph.nodes[ref.node].phase is Phase.FORWARD]
        sizes = {
            source.written_name(ref): source.local_bytes(graph.spec(ref), source.output_placements(ref))
            for ref in forward
        }
        _Offload(body, units, sizes, leaves).write()


@dataclass(slots=True)
class _Spans:
    """Places of items in the forward and in the backward pass of a unit."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


class _Offload:
    def __init__(self, body: Body, units: Mapping[int, Swap], given: Mapping[str, int], leaves: str) -> None:
        self.body, self.units, self.given, self.leaves = body, units, given, leaves
        self.spans = self._spans()
        self.backward = {place for place, draft in self._drafts(range(len(body.items))) if _goes_back(draft)}
        self.owner: dict[str, str] = {}
        self.made: dict[str, int] = dict.fromkeys(given, -1)
        self.buffers = {
            name: Buffer(name=name, size_bytes=size, kind=BufferKind.ACTIVATION) for name, size in given.items()
        }
        self.node: dict[str, int] = {}
        self.readers: dict[str, set[int]] = defaultdict(set)
        self.before: dict[int, list[Draft | Fetch]] = defaultdict(list)
        self.behind: dict[int, list[Draft | Fetch]] = defaultdict(list)
        self._follow()

    def _drafts(self, places: Iterable[int]) -> Iterable[tuple[int, Draft]]:
        items = self.body.items
        return ((place, item) for place in places if isinstance(item := items[place], Draft))

    def _spans(self) -> dict[int, _Spans]:
        body, found, begin = self.body, dict[int, _Spans](), 0
        for index, end in zip(body.nodes, body.reached, strict=True):
            unit = body.source.units.of_node[index]
            if unit != NOWHERE:
                span = found.setdefault(unit, _Spans())
                forward = body.graph.nodes[index].phase is Phase.FORWARD
                (span.forward if forward else span.backward).extend(range(begin, end))
            begin = end
        return found

    def _follow(self) -> None:
        """Note who makes every value, and which units read it on their way back."""
        for place, draft in self._drafts(range(len(self.body.items))):
            self.owner.update(draft.owners)
            for buffer in draft.writes:
                self.made[buffer.name], self.buffers[buffer.name] = place, buffer
                if isinstance(draft.instruction, Compute):
                    self.node[buffer.name] = draft.instruction.node
                elif draft.reads:
                    self.node[buffer.name] = self.node.get(self._base(draft.reads[0]), NOWHERE)
            self.made.update(dict.fromkeys(draft.completes, place))
        places = (place for span in self.spans.values() for place in span.forward)
        taken_before = {name for _, draft in self._drafts(places) for name in draft.owners}
        for unit, span in self.spans.items():
            for _, draft in self._drafts(span.backward):
                for name in draft.reads:
                    # A view of the forward pass would be left without what it views.
                    self.readers[self._base(name)].update((unit, NOWHERE) if name in taken_before else (unit,))

    def _base(self, name: str) -> str:
        while name in self.owner:
            name = self.owner[name]
        return name

    def write(self) -> None:
        """Insert the copies, and let backward operators read what comes back."""
        for unit, swap in self.units.items():
            if unit in self.spans:
                self._unit(unit, swap)
        items, shifts, moved = self.body.items, [0] * (len(self.body.items) + 1), []
        for place, item in enumerate(items):
            around = [*self.before[place], item, *self.behind[place]]
            shifts[place + 1] = shifts[place] + len(around) - 1
            moved += around
        self.body.items = moved
        self.body.reached = [end + shifts[end] for end in self.body.reached]

    def _unit(self, unit: int, swap: Swap) -> None:
        span, place = self.spans[unit], self.body.source.units.names[unit]
        begin = span.forward[0]
        away: dict[str, str] = {}
        coming: list[Draft] = []
        for name in [n for n, units in self.readers.items() if units == {unit} and self._may_leave(n, unit, swap)]:
            buffer, made = self.buffers[name], self.made[name]
            there, back = f"{name} away from {place}", f"{name} back in {place}"
            # What is made inside the unit may be of no unit: a constant, say.
            where = self.before[begin] if made < begin else self.behind[made]
            where.append(_copy(name, replace(buffer, name=there, size_bytes=0), buffer.size_bytes, Phase.FORWARD))
            away[name] = back
            coming.append(_copy(there, replace(buffer, name=back), buffer.size_bytes, Phase.BACKWARD))
        self._bring_back(unit, swap, away, coming)

    def _may_leave(self, name: str, unit: int, swap: Swap) -> bool:
        buffer = self.buffers.get(name)
        if buffer is None or not buffer.size_bytes or name == self.leaves or self.made[name] in self.backward:
            return False
        if not swap.operators:
            return True
        node = self.node.get(name, NOWHERE)
        head = self.body.source.units.names[unit]
        return node != NOWHERE and self.body.graph.nodes[node].name.removeprefix(head) in swap.operators

    def _bring_back(self, unit: int, swap: Swap, away: Mapping[str, str], coming: Sequence[Draft]) -> None:
        backward = self.spans[unit].backward
        read: dict[str, int] = {}
        for place, draft in self._drafts(backward):
            if any(name in away for name in draft.reads):
                for name in draft.reads:
                    read.setdefault(name, place)
                _rename(draft, away)
        if not coming:
            return
        whole = swap.prefetch == 0
        if whole and self.body.source.options.copies == 1:
            self.before[backward[0]].append(Fetch(unit, tuple(coming)))
            return
        for name, draft in zip(away, coming, strict=True):
            at = backward[0] if whole else self._ahead(backward, read[name], swap.prefetch)
            self.before[at].append(draft)

    def _ahead(self, backward: Sequence[int], place: int, operators: int) -> int:
        """The place of the operator so many before another one, the first of the pass at most."""
        earlier = [at for at, draft in self._drafts(backward) if at < place and _computes(draft)]
        return earlier[-operators] if len(earlier) >= operators else backward[0]


def _goes_back(draft: Draft) -> bool:
    return draft.task.phase is not Phase.FORWARD


def _computes(draft: Draft) -> bool:
    return draft.task.stream == COMPUTE_STREAM and draft.task.kernel is not Kernel.VIEW


def _copy(source: str, made: Buffer, size_bytes: int, phase: Phase) -> Draft:
    to_host = phase is Phase.FORWARD
    task = replace(host_copy(size_bytes, f"copy {source}", phase), stream=HOST_STREAM)
    instruction = HostCopy(source=source, target=made.name, to_host=to_host, asynchronous=True)
    return Draft(task, instruction, (source,), (made,), beside=not to_host)


def _rename(draft: Draft, names: Mapping[str, str]) -> None:
    draft.instruction = with_names(draft.instruction, lambda name: names.get(name, name))
    draft.reads = tuple(names.get(name, name) for name in draft.reads)
    draft.owners = {view: names.get(owner, owner) for view, owner in draft.owners.items()}
