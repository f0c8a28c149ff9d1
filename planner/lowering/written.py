"""Passes being written, operator by operator, and what passes of chunks have in common, written once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from planner.lowering.instructions import value_of_copy
from planner.lowering.placed import PlacedGraph, placements_text
from planner.lowering.together import Way
from planner.lowering.unit_work import Mark
from planner.sharding.placement import Placements
from planner.sharding.redistribution import Step
from simulator.program import Collective


@dataclass(slots=True)
class PassDraft:
    """Operators of a pass, their times still to come: ``tasks[i]`` are the numbers of operator i.

    ``waits[i]`` is how many operators it waits for, which come in a row in ``after``. ``synchronised`` is what the
    gradient of each parameter is called in the end, by its node; only in the last micro-batch.
    """

    tasks: list[list[int]] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    ahead: list[bool] = field(default_factory=list)
    output: int = -1
    synchronised: dict[int, str] = field(default_factory=dict)

    @property
    def leading(self) -> int:
        """Tasks at the beginning that wait for no input of the pass."""
        count = 0
        for tasks, ahead in zip(self.tasks, self.ahead, strict=True):
            if tasks and not ahead:
                break
            count += len(tasks)
        return count

    def add(self, tasks: list[int], stream: int, after: list[int], ahead: bool) -> int:
        """Append an operator behind those in ``after``; returns its number."""
        self.tasks.append(tasks)
        self.stream.append(stream)
        self.waits.append(len(after))
        self.after += after
        self.ahead.append(ahead)
        return len(self.tasks) - 1

    def runs_like(self, other: PassDraft) -> bool:
        """Whether two passes run the same in the same order."""
        mine, theirs = ((d.tasks, d.stream, d.waits, d.after, d.ahead, d.output) for d in (self, other))
        return mine == theirs

    def append(self, other: PassDraft, outside: list[int]) -> int:
        """Append operators as `cut` has left them; returns the number of the first of them."""
        start = len(self.tasks)
        self.tasks += other.tasks
        self.stream += other.stream
        self.waits += other.waits
        self.after += [n + start if n >= 0 else outside[~n] for n in other.after]
        self.ahead += other.ahead
        self.synchronised |= other.synchronised
        return start

    def cut(self, start: int, outside: list[int]) -> PassDraft:
        """The operators from `start` on, numbered from zero; those outside before them by ``~place`` in `outside`."""
        place = {n: ~i for i, n in enumerate(outside)}
        begin = sum(self.waits[:start])
        return PassDraft(
            tasks=self.tasks[start:],
            stream=self.stream[start:],
            waits=self.waits[start:],
            after=[n - start if n >= start else place[n] for n in self.after[begin:]],
            ahead=self.ahead[start:],
            synchronised=dict(self.synchronised),
        )


ACCUMULATE = "accumulate "
"""Beginning of the names of tasks that add a gradient to its accumulator."""

Kind = tuple[Collective, int, str, int, bool]
"""Gradients that may travel together: by collective, axis, type on the way, group, and whether they are on the host."""


class GradientOnWay(NamedTuple):
    """A gradient on its way: whose it is, its placement, the operator that makes it ready, and what it is called."""

    mark: Mark
    placements: Placements
    operator: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """A step of a gradient, what the gradient is called behind it, and, of a message, its kind and its bytes."""

    step: Step
    target: str
    kind: Kind | None
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """A gradient as operators write it, and its steps to the accumulator and from there to where it is stored."""

    placements: Placements
    names: tuple[str, ...]
    """In every copy of the micro-batch."""
    ahead: tuple[Leg, ...]
    behind: tuple[Leg, ...]

    @classmethod
    def of(cls, source: PlacedGraph, mark: Mark) -> Route:
        """The route of a gradient, or of a term of one."""
        placements = source.output_placements(mark.gradient)
        name = source.value_name(mark.gradient, placements)
        ahead, behind = source.path_of_gradient(mark.gradient, mark.parameter)
        return cls(
            placements,
            tuple(value_of_copy(name, copy) for copy in range(source.options.copies)),
            tuple(_leg(source, mark, step) for step in ahead),
            tuple(_leg(source, mark, step) for step in behind),
        )


def _leg(source: PlacedGraph, mark: Mark, step: Step) -> Leg:
    target = f"{source.graph.nodes[mark.parameter].name}.gradient@{placements_text(step.after)}"
    if not isinstance(step.operation, Collective):  # slices and masks are moved at once
        return Leg(step, target, None, 0)
    spec = source.graph.spec(mark.gradient)
    group = source.fusion_group(mark.parameter, step.operation)
    on_host = mark.parameter in source.host.parameters
    kind = step.operation, step.axis, source.travelling_dtype(spec), group, on_host
    return Leg(
        step, target, kind, int(source.travelling_bytes(spec) / prod(source.sizes[a] for a in step.sharded_axes))
    )


Entry = tuple[GradientOnWay, tuple[Leg, ...], bool]
"""A gradient, the legs before it, and whether they lead to its accumulator, or on from there."""
Message = tuple[int, list[int], tuple[str, ...]]
"""Stream and tasks of a message of parameters, and the names that they get."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Left:
    """What a stretch leaves in the message of a kind: whether behind what waited before, gradients, and their bytes."""

    behind_others: bool
    entries: tuple[Entry, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Operators that a unit adds to a pass, as in `PassDraft.cut`; ``kernel`` and ``output`` too, None for none.

    ``arrivals`` bring what the next unit reads; ``left`` are the messages that are not yet sent.
    """

    operators: PassDraft
    kernel: int | None
    output: int | None
    arrivals: Mapping[str, int]
    left: Mapping[Kind, Left]


Stretches = dict[object, dict[tuple[Kind, ...], dict[object, Stretch]]]
"""By what a unit does and what stands around it, the messages that leave in it, and the state of the pass for these."""


@dataclass(frozen=True, slots=True)
class WrittenTasks:
    """Tasks by number that layers alike have in common, in all passes and chunks, and the routes of their gradients.

    Keys hold the objects that layers alike share, of which the lowered units keep one each.
    """

    source: PlacedGraph
    accumulations: dict[tuple[Mark, bool], int] = field(default_factory=dict)
    gathers: dict[tuple[int, bool], list[Message]] = field(default_factory=dict)
    """Of a unit, by its identity, forward or not."""
    messages: dict[tuple[tuple[str, Leg], ...], list[int]] = field(default_factory=dict)
    """Of gradients, each by its name before a leg."""
    stretches: Stretches = field(default_factory=dict)
    ways: dict[int, Way] = field(default_factory=dict)
    """Of parameters to where they are read, by the identity of what is wanted."""
    _routes: dict[int, Route] = field(default_factory=dict)

    def route(self, mark: Mark) -> Route:
        """The route of a gradient."""
        found = self._routes.get(id(mark))
        if found is None:
            found = self._routes[id(mark)] = Route.of(self.source, mark)
        return found


def adds_across_chunks(source: PlacedGraph) -> bool:
    """Whether chunks of a rank that share a parameter add its gradient up in one place.

    They do where it travels with no chunk's pass: on stages of one device.
    """
    return source.options.mesh.size == 1 and source.options.micro_batches > 1
