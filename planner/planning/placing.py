"""From marks on modules to what is fixed in a plan: cuts between stages, recomputed units, fused gradients.

Marks name modules, the search moves units (`planner.graph.chain`). A unit belongs to a module if the operators of its
forward pass do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from planner.graph.chain import Chain
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.recompute import MODES, recomputed
from planner.lowering.groups import trained_names
from planner.lowering.options import keeps_messages, recompute_modes, swaps
from planner.networks import Network
from planner.networks.marks import Marks, Swap
from planner.plans.hints import Hint
from planner.plans.pins import Pins
from planner.plans.plan import Plan, expanded_rules
from planner.plans.request import PlanRequest
from planner.search.configurations.pin_checks import CHUNKS
from planner.search.problem.hints import first_not_kept
from planner.search.stages.unit_pins import UnitPins
from planner.sharding.cuts import OperatorCuts
from simulator.errors import ContextError, InputError, UnsupportedError
from simulator.program import Kernel, Phase

WRAPPERS = ("_backbone", "network", "module")
"""Names that a cell with a loss gives the network inside; `planner.networks.python_factory` calls it ``module``."""


Value = TypeVar("Value")
_INDEX = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class _Member:
    """A forward operator of a unit: its node, and its module by the name it has unfolded."""

    node: int
    module: str


class PlacedMarks:
    """The marks of a network on its operator graph, folded or not, and its chain.

    Raises
    ------
    ContextError
        A mark names no module of the network.
    """

    def __init__(self, marks: Marks, graph: OperatorGraph, chain: Chain) -> None:
        self.marks, self.graph, self.chain = marks, graph, chain
        self.names = chain.names()
        self.members = tuple(self._members())
        self.stages = {self._path(name, "stage_config"): stage for name, stage in marks.stages.items()}
        self.again = {self._path(name, "recompute"): mode for name, mode in marks.recompute.items()}
        self.away = {self._path(name, "offload"): swap for name, swap in marks.offload.items()}
        self.sent = {self._path(name, "recompute"): sent for name, sent in marks.messages.items()}

    # Modules

    def _members(self) -> Iterator[tuple[_Member, ...]]:
        """Forward operators of every unit, in order."""
        for unit in self.chain.units:
            nodes = [i for i in unit.nodes if self._counts(i)]
            for name in self.chain.unrolled(unit):
                yield tuple(_Member(i, self._module(i, unit.run, unit.name, name)) for i in nodes)

    def _counts(self, index: int) -> bool:
        node = self.graph.nodes[index]
        return node.role is Role.OPERATOR and node.phase is Phase.FORWARD

    def _module(self, index: int, run: int | None, folded: str, name: str) -> str:
        module = self.graph.nodes[index].module
        return name + module[len(folded) :] if run is not None and within(module, folded) else module

    @cached_property
    def _known(self) -> frozenset[str]:
        """Every module of the network, as far as it is known."""
        found = {*self.marks.modules, *(member.module for members in self.members for member in members)}
        return frozenset({"", *found, *(outer for path in found for outer in outers(path))})

    def _path(self, name: str, what: str) -> str:
        """The module that a name means; that of a network inside a cell with its loss may be written as there."""
        head, _, rest = name.partition(".")
        for path in (name, f"module.{name}", f"module.{rest}" if head in WRAPPERS else name, rest):
            if path in self._known and (path or not name):
                return path
        near = difflib.get_close_matches(name, sorted(self._known), 3, 0.4)
        meant = f"; near are {', '.join(near)}" if near else ""
        raise ContextError(f"{what} names {name!r}, which is no module of {self.graph.network}{meant}")

    # Stages

    def stage_count(self) -> int | None:
        """Pipeline stages that are marked; None where there are none.

        Raises
        ------
        ContextError
            A stage before the last one has no module.
        """
        if not self.stages:
            return None
        used = sorted(set(self.stages.values()))
        missing = next((number for number, stage in enumerate(used) if number != stage), None)
        if missing is not None:
            raise ContextError(
                f"stages {_listed(used)} are used and stage {missing} is not: stages are numbered from 0 and each has "
                "a module; renumber them"
            )
        return len(used)

    def cuts(self) -> tuple[range, ...]:
        """Units that may lie before each cut: between the last unit of a stage and the first one of the next.

        Raises
        ------
        ContextError
            A unit has modules of several stages, or stages are not in the order of the network.
        """
        count = self.stage_count()
        if count is None:
            return ()
        placed = [(number, self._stage(number)) for number in range(len(self.names))]
        given = [(number, stage) for number, stage in placed if stage is not None]
        for (before, first), (behind, second) in pairwise(given):
            if second < first:
                raise ContextError(
                    f"stage_config puts {self.names[behind]!r} on stage {second} behind {self.names[before]!r} on "
                    f"stage {first}: stages follow one another as the network does; use stage {first} or more"
                )
        last = {stage: number for number, stage in given}
        first_of = {stage: number for number, stage in reversed(given)}
        empty = next((stage for stage in range(count) if stage not in last), None)
        if empty is not None:
            names = _listed(sorted(name for name, stage in self.stages.items() if stage == empty))
            raise ContextError(f"stage {empty} has only {names}, which compute nothing; give it a module that does")
        return tuple(range(last[stage] + 1, first_of[stage + 1] + 1) for stage in range(count - 1))

    def _stage(self, number: int) -> int | None:
        found = {m.module: _nearest(self.stages, m.module) for m in self.members[number]}
        named = {module: stage for module, stage in found.items() if stage is not None}
        if len(set(named.values())) > 1:
            said = _listed(f"{module or 'the network'} on {stage}" for module, stage in named.items())
            raise ContextError(
                f"stage_config cuts unit {self.names[number]!r} ({said}): the network can be cut where one tensor "
                "crosses between modules; put the whole unit on one stage"
            )
        return next(iter(named.values()), None)

    # Recomputation

    def modes(self) -> tuple[int, ...]:
        """Code of the recompute mode of every unit; empty where nothing is marked.

        A unit whose marked modules hold all that a mode would compute again takes that mode.

        Raises
        ------
        UnsupportedError
            The marked modules hold a part of a unit that is neither.
        """
        if not self.again:
            return ()
        return tuple(self._mode(number) for number in range(len(self.names)))

    def keeps(self) -> tuple[bool, ...]:
        """Whether every unit keeps what messages bring where it computes again; empty where none does."""
        if all(self.sent.values()):
            return ()
        return tuple(any(_nearest(self.sent, m.module) is False for m in members) for members in self.members)

    def swaps(self) -> tuple[Swap | None, ...]:
        """What every unit has on the host between its passes; empty where nothing is marked."""
        return tuple(self._swap(number) for number in range(len(self.names))) if self.away else ()

    def _swap(self, number: int) -> Swap | None:
        unit = self.chain.units[self.chain.positions[number]]
        members = [m for m in self.members[number] if self.graph.nodes[m.node].kernel is not Kernel.VIEW]
        found = {m.node: swap for m in members if (swap := _nearest(self.away, m.module)) is not None}
        if not found:
            return None
        names = {i: self.graph.nodes[i].name.removeprefix(unit.name) for i in found}
        left = tuple(names[i] for i, swap in found.items() if not swap.operators or names[i] in swap.operators)
        whole = len(found) == len(members) and not any(swap.operators for swap in found.values())
        return Swap(prefetch=max(swap.prefetch for swap in found.values()), operators=() if whole else left)

    def _mode(self, number: int) -> int:
        found = {m.node: _nearest(self.again, m.module) for m in self.members[number]}
        marked = {node for node, mode in found.items() if mode}
        if not marked:
            return 0
        unit = self.chain.units[self.chain.positions[number]]
        for code in (2, 1):
            again = recomputed(self.graph, unit.nodes, MODES[code])
            in_part = code == 2 and any(found.get(node) == MODES[1] for node in again)
            if again and marked.issuperset(again) and not in_part:
                return code
        again = recomputed(self.graph, unit.nodes, MODES[1])
        if not marked.intersection(recomputed(self.graph, unit.nodes, MODES[2])):
            return 0
        missing = self._modules_of(number, set(again) - marked)
        raise UnsupportedError(
            f"recompute() marks a part of unit {self.names[number]!r}, and units compute again as a whole, or all but "
            f"products with parameters, convolutions, lookups and attention; mark {_listed(missing)} as well"
        )

    def _modules_of(self, number: int, nodes: set[int]) -> list[str]:
        found = dict.fromkeys(m.module or repr(self.graph.nodes[m.node].name) for m in self.members[number])
        inside = {m.module or repr(self.graph.nodes[m.node].name) for m in self.members[number] if m.node in nodes}
        return [name for name in found if name in inside]

    def unit_pins(self) -> UnitPins:
        """What marks fix of single units."""
        return UnitPins(
            cuts=self.cuts(), modes=self.modes(), keeps=self.keeps(), swaps=self.swaps(), virtual=self.marks.virtual
        )

    # Strategies of operators

    def hints(self) -> tuple[Hint, ...]:
        """Strategies as hints; modules that are alike but for indices in their names and have the same share one."""
        groups: dict[tuple[str, OperatorCuts], list[str]] = {}
        for name, cuts in self.marks.cuts.items():
            path = self._path(name, "shard")
            groups.setdefault((_INDEX.sub(".*", path), cuts), []).append(path)
        return tuple(
            Hint(pattern=pattern if len(paths) > 1 else paths[0], cuts=cuts, modules=frozenset(paths))
            for (pattern, cuts), paths in groups.items()
        )

    def check(self, plan: Plan, graph: OperatorGraph, where: str) -> None:
        """Raise ContextError where a plan that was read, of `graph` at its micro-batch, breaks a mark."""
        ends = [self.names.index(chunk.last) + 1 for chunk in plan.chunks[:-1]]
        cuts = self.cuts()
        said = ""
        if cuts and not (len(ends) == len(cuts) and all(e in places for e, places in zip(ends, cuts, strict=True))):
            said = f"cuts the network behind {_listed(chunk.last for chunk in plan.chunks[:-1]) or 'nothing'}"
        modes = recompute_modes(plan, self.names)
        if self.again and [MODES.index(modes.get(name, "none")) for name in self.names] != [*self.modes()]:
            said = said or f"computes again {_listed(modes) or 'nothing'}"
        kept = keeps_messages(plan, self.names)
        asked = {name for name, keep in zip(self.names, self.keeps(), strict=False) if keep and name in modes}
        if self.again and kept != asked:
            said = said or f"keeps what messages bring in {_listed(sorted(kept)) or 'no unit'}"
        away = swaps(plan, self.names)
        if self.away and [away.get(name) for name in self.names] != [*self.swaps()]:
            said = said or f"has activations of {_listed(away) or 'no unit'} on the host"
        if self.marks.fusion and dict(plan.exchange.fusion_groups) != self.fusion():
            said = said or "fuses other gradients"
        broken = first_not_kept(graph, expanded_rules(plan), plan.mesh.axes, self.hints())
        if broken is not None:
            said = said or f"cuts {broken[1]!r} otherwise than {broken[0]}"
        if said:
            raise ContextError(
                f"{where} {said}, and marks on modules of {plan.network} ask for something else; plan again without "
                "the file, or leave out the marks"
            )

    # Fusion

    def fusion(self) -> dict[str, int]:
        """Group of each trained parameter that is marked, by its unfolded name in the order of the network.

        Raises
        ------
        ContextError
            A mark names neither a module nor a parameter, or one without trained parameters.
        """
        names = tuple(trained_names(self.graph))
        found: dict[str, int] = {}
        used: set[str] = set()
        for name in names:
            marked = next((path for path in (name, *outers(name), "") if path in self.marks.fusion), None)
            if marked is not None:
                found[name] = self.marks.fusion[marked]
                used.add(marked)
        unused = next((path for path in self.marks.fusion if not any(within(name, path) for name in names)), None)
        if unused is not None:
            near = difflib.get_close_matches(unused, names, 2, 0.4)
            meant = f"; near are {', '.join(near)}" if near else ""
            raise ContextError(f"comm_fusion marks {unused!r}, where no parameter is trained{meant}; leave it out")
        return found


def with_stages(pins: Pins, stages: int, virtual: int = 1) -> Pins:
    """Pins with the pipeline that marked stages make, a chunk a rank, or `virtual` of them that are interleaved.

    Raises
    ------
    ContextError
        They ask for another one.
    """
    if virtual > 1:
        return _interleaved(pins, stages // virtual, virtual)
    if pins.pp not in (None, stages):
        raise ContextError(
            f"stage_config uses {stages} stages, and {pins.pp} are asked for (pp={pins.pp}); use pipeline_stages="
            f"{stages}, or put modules on stages 0 to {(pins.pp or 1) - 1}"
        )
    if (pins.vpp or 1) > 1:
        raise ContextError(
            f"stage_config gives each of {stages} stages one piece of the network, and vpp={pins.vpp} asks for more; "
            "use vpp=1, or leave stage_config out"
        )
    if pins.schedule is not None and CHUNKS.get(pins.schedule, 2 if "interleaved" in pins.schedule else 1) > 1:
        raise ContextError(
            f"schedule={pins.schedule} gives each rank several pieces of the network, stage_config one; use 1f1b, "
            "gpipe or zb_h1, or leave stage_config out"
        )
    return replace(pins, pp=stages, vpp=1)


def _interleaved(pins: Pins, stages: int, virtual: int) -> Pins:
    if pins.pp not in (None, stages) or pins.vpp not in (None, virtual):
        raise ContextError(
            f"offset gives {stages} stages {virtual} chunks each, and pp={pins.pp}, vpp={pins.vpp} are asked for; use "
            f"pipeline_stage={stages} and pp_interleave_num={virtual}, or leave offset out"
        )
    if pins.schedule not in (None, "interleaved_1f1b"):
        raise ContextError(
            f"offset says which layers are in the chunks of stages, and schedule={pins.schedule} deals chunks out in "
            "another order; use interleaved_1f1b, or leave offset out"
        )
    return replace(pins, pp=stages, vpp=virtual, schedule="interleaved_1f1b")


def within(path: str, outer: str) -> bool:
    """Whether a module is another one or inside it.

    >>> within("blocks.1.expand", "blocks.1"), within("blocks.10", "blocks.1"), within("head", "")
    (True, False, True)
    """
    return not outer or path == outer or path.startswith(outer + ".")


def outers(path: str) -> list[str]:
    """Modules around one, the nearest first.

    >>> outers("blocks.1.expand")
    ['blocks.1', 'blocks']
    """
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _nearest(marks: Mapping[str, Value], module: str) -> Value | None:
    """The mark of a module, or of the nearest one around it that has one."""
    return next((marks[path] for path in (module, *outers(module), "") if path in marks), None)


def _listed(names: Iterable[object], most: int = 4) -> str:
    found: Sequence[str] = [str(name) for name in names]
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + rest


SEMI_AUTOMATIC = "semi_auto_parallel"


def marked(
    request: PlanRequest, network: Network, graph: OperatorGraph, units: Chain, pins: Pins
) -> tuple[Pins, PlacedMarks | None]:
    """Marks of modules on the units of the network, those of the request over those of its code, and pins with them.

    Raises
    ------
    InputError
        Marks name no module, contradict each other or the pins.
    """
    own = network.marks or Marks()
    marks = request.marks.over(own) if request.marks else own
    if not marks:
        return pins, None
    placed = PlacedMarks(marks, graph, units)
    stages = placed.stage_count()
    if stages is not None:
        pins = with_stages(pins, stages, marks.virtual)
    if marks.recompute and pins.recompute is not None:
        raise InputError(
            f"pin recompute={pins.recompute} and recompute() of {next(iter(marks.recompute))!r} both say what is "
            "computed again; leave one of them out"
        )
    return replace(pins, by_unit=bool(marks.stages or marks.recompute or marks.offload)), placed


def with_groups(request: PlanRequest, placed: PlacedMarks) -> PlanRequest:
    """The request with the groups that gradients travel in.

    Raises
    ------
    InputError
        All-reduces are fused by places as well.
    """
    groups = placed.fusion()
    if not groups:
        return request
    if request.exchange.fusion_places:
        raise InputError(
            f"comm_fusion of {next(iter(groups))!r} and all-reduces fused by the places "
            f"{list(request.exchange.fusion_places)} both say which gradients travel together; leave one of them out"
        )
    exchange = replace(request.exchange, fusion_groups=tuple(groups.items()))
    return replace(request, exchange=exchange)


def semi_automatic(request: PlanRequest, pins: Pins) -> Pins:
    """Pins with which nothing but the batch is sharded, where no operator is configured in semi-automatic mode.

    There are as many pipeline stages as are asked for.
    """
    if request.parallel_mode != SEMI_AUTOMATIC:
        return pins
    pins = replace(pins, pp=pins.pp or 1)
    return pins if request.hints else replace(pins, tp=pins.tp or 1, cp=pins.cp or 1, ep=pins.ep or 1)
