"""What one unit of a pipeline does in a micro-batch: its tasks in few operators, and the memory it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from planner.cost.work import in_halves
from planner.graph.chain import Chain
from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.lowering.body import Body, Fetch, Gather
from planner.lowering.instructions import Compute, written_values
from planner.lowering.offload import offload
from planner.lowering.placed import PlacedGraph
from planner.lowering.representatives import Representatives, representatives
from planner.lowering.unit_memory import UnitMemory, unit_memory
from planner.lowering.work import Work
from planner.lowering.writer import HOST_STREAM, Draft
from planner.plans.plan import Plan
from planner.sharding.placement import Placements
from simulator.program import COMPUTE_STREAM, Collective, Phase
from simulator.schedules import ActionKind

Kinds = frozenset[ActionKind]
KERNELS, MESSAGES, BESIDE = range(3)
"""Streams of a rank, as in `simulator.pipeline_operators`."""
_STREAMS = {COMPUTE_STREAM: KERNELS, HOST_STREAM: BESIDE}


@dataclass(frozen=True, slots=True)
class Mark:
    """A complete gradient, or a term of one that several units share."""

    gradient: TensorRef
    parameter: int


@dataclass(slots=True)
class Operator:
    """Tasks of one stream that nothing outside waits for one by one.

    ``tasks`` are their numbers; ``after`` operators of the same part on other streams; ``gathered`` parameters that it
    reads first, ``fetched`` activations from the host; ``marks`` gradients that are complete with it.
    """

    stream: int
    tasks: list[int]
    after: list[int] = field(default_factory=list)
    gathered: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    shared: int = -1
    """Node whose work units share, -1 for none: only the first of a chunk does it."""
    reads_input: bool = False


@dataclass(frozen=True, slots=True)
class PassOperators:
    """Operators of a unit in one pass; ``output`` yields what it hands on, -1 for nothing.

    ``fetches`` are numbers of tasks that bring activations back from the host before, and what they bring.
    """

    operators: tuple[Operator, ...]
    output: int
    fetches: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """One unit.

    ``inputs`` and ``weights`` are the parts of ``backward`` that lead to the gradient of the unit's input, and to those
    of parameters alone. ``gathers`` are the parameters wanted in the forward and in the backward pass.
    """

    forward: PassOperators
    backward: PassOperators
    inputs: PassOperators
    weights: PassOperators
    gathers: Mapping[Phase, tuple[tuple[TensorRef, Placements, str], ...]]
    parameters: tuple[int, ...]
    memory: UnitMemory


def units_work(
    source: PlacedGraph, found: Chain, work: Work, kinds: Kinds = frozenset(ActionKind), *, counts_fresh: bool = False
) -> tuple[UnitWork, ...]:
    """Lower every unit of a chain; their tasks are appended to `work`.

    Backward passes are written whole, in two parts, or both, as actions of these `kinds` run them: the host launches
    what a pass runs, and nothing else. With `counts_fresh` the memory of units has gradients of parameters that stand
    beside what they are added to.
    """
    seen: dict[int, int] = {}
    for unit in found.units:
        for index in unit.nodes:
            seen[index] = seen.get(index, 0) + 1
    shared = frozenset(
        i for i, n in seen.items() if n > 1 and source.graph.nodes[i].role not in (Role.PARAMETER, Role.INPUT)
    )
    terms, sums = gradient_terms(source)
    made = tuple(
        _unit_work(source, found, number, work, shared, terms, sums, kinds, counts_fresh)
        for number in range(len(found.units))
    )
    batch = {node.name for node in source.graph.nodes if node.role is Role.INPUT}
    work.own = frozenset(batch.union(*map(written_values, work.instructions)))
    return made


def gradient_terms(source: PlacedGraph) -> tuple[dict[TensorRef, int], frozenset[int]]:
    """Gradients as operators yield them, with the parameter of each, and the sums of those with several uses."""
    terms: dict[TensorRef, int] = {}
    sums: set[int] = set()
    for ref, parameter in source.gradient_of.items():
        waiting = [ref]
        while waiting:
            one = waiting.pop()
            if source.graph.nodes[one.node].role is Role.GRADIENT_SUM:
                sums.add(one.node)
                waiting += source.graph.nodes[one.node].tensor_inputs
            else:
                terms[one] = parameter
    return terms, frozenset(sums)


def _unit_work(
    source: PlacedGraph,
    found: Chain,
    number: int,
    work: Work,
    shared: frozenset[int],
    terms: Mapping[TensorRef, int],
    sums: frozenset[int],
    kinds: Kinds,
    counts_fresh: bool,
) -> UnitWork:
    unit = found.units[number]
    before = found.boundaries[number - 1] if number else None
    behind = found.boundaries[number] if number < len(found.boundaries) else None
    arrives, returns = before.forward if before else None, behind.gradient if behind else None
    given = [ref for ref in (arrives, returns) if ref is not None]
    sent_on = source.written_name(behind.forward) if behind else ""
    body = Body(source, [i for i in unit.nodes if i not in sums], given, terms)
    offload(body, given, sent_on)
    items = body.items
    coming = [draft for item in items if isinstance(item, Fetch) for draft in item.drafts]
    drafts = [item for item in items if isinstance(item, Draft)]
    made = {item for item in items if isinstance(item, TensorRef)}
    names = {
        source.value_name(ref, source.output_placements(ref)): Mark(ref, p) for ref, p in terms.items() if ref in made
    }
    gathers = {item.phase: item.values for item in items if isinstance(item, Gather)}
    gathered = {name for values in gathers.values() for *_, name in values}
    if not source.by_unit:
        values = tuple(
            (TensorRef(i), wanted, source.value_name(TensorRef(i), wanted))
            for i in unit.nodes
            if source.graph.nodes[i].role is Role.PARAMETER
            for wanted in source.gathered(i)
        )
        gathers, gathered = {Phase.FORWARD: values}, {name for *_, name in values}
    forward = [draft for draft in drafts if draft.task.phase is Phase.FORWARD]
    backward = [draft for draft in drafts if draft.task.phase is Phase.BACKWARD]
    sent_back = source.written_name(before.gradient) if before and before.gradient else ""
    splits = ActionKind.INPUT_GRADIENT in kinds
    halves = [half for draft in backward for half in _halves(source, draft)] if splits else []
    run = backward if ActionKind.BACKWARD in kinds else []
    leads = _leads_to(halves, sent_back)
    inputs = [draft for draft, leads_there in zip(halves, leads, strict=True) if leads_there]
    weights = [draft for draft, leads_there in zip(halves, leads, strict=True) if not leads_there]
    fetches = {draft.writes[0].name: number for draft, number in zip(coming, work.add_all(coming), strict=True)}
    entries = frozenset(source.written_name(ref) for ref in given)
    builder = _OperatorBuilder(entries, gathered, names, shared, source, fetches)
    written = [*{id(draft): draft for draft in (*forward, *run, *halves)}.values()]
    numbers = dict(zip(map(id, written), work.add_all(written), strict=True))
    ends = [name for draft in drafts for name in (b.name for b in draft.writes) if name in names]
    early, late = _marked_late(builder.part(inputs, numbers, sent_back), builder.part(weights, numbers, ""))
    late = replace(late, fetches=tuple(one for one in late.fetches if one not in early.fetches))
    return UnitWork(
        forward=builder.part(forward, numbers, sent_on),
        backward=builder.part(run, numbers, sent_back),
        inputs=early,
        weights=late,
        gathers=gathers,
        parameters=tuple(i for i in unit.nodes if source.graph.nodes[i].role is Role.PARAMETER),
        memory=unit_memory(
            source,
            forward=forward,
            inputs=inputs,
            weights=weights,
            backward=backward,
            arrives=arrives,
            returns=returns,
            leaves=(sent_on, sent_back),
            gradients=frozenset(ends),
            fresh=frozenset(name for name in ends if counts_fresh and _stays_whole(source, names[name])),
            fetched=[draft.writes[0] for draft in coming],
        ),
    )


def _stays_whole(source: PlacedGraph, mark: Mark) -> bool:
    """Whether a gradient is added up as it is made; others wait for the message that they travel in."""
    ahead, _ = source.path_of_gradient(mark.gradient, mark.parameter)
    return not any(isinstance(step.operation, Collective) for step in ahead)


def _marked_late(inputs: PassOperators, weights: PassOperators) -> tuple[PassOperators, PassOperators]:
    """Let gradients of parameters that come with that of the input count as made by the other part."""
    marks = [mark for operator in inputs.operators for mark in operator.marks]
    for operator in inputs.operators:
        operator.marks = []
    if not marks:
        return inputs, weights
    moved = [replace(operator, after=[n + 1 for n in operator.after]) for operator in weights.operators]
    return inputs, PassOperators((Operator(KERNELS, [], marks=marks), *moved), -1, weights.fetches)


def _leads_to(drafts: Sequence[Draft], goal: str) -> list[bool]:
    """Whether each draft is needed for a value; none is if there is no goal.

    Pieces of an operator that messages run beside yield nothing: they belong to the operator, which follows them.
    """
    wanted = {goal} if goal else set()
    found = [False] * len(drafts)
    for index in range(len(drafts) - 1, -1, -1):
        draft = drafts[index]
        makes = {b.name for b in draft.writes} | set(draft.completes)
        if makes & wanted or (not makes and index + 1 < len(drafts) and found[index + 1]):
            found[index] = True
            wanted.update(draft.reads)
            wanted.update(draft.completes)
    return found


@dataclass(frozen=True)
class _OperatorBuilder:
    """Joins drafts to operators."""

    given: frozenset[str]
    gathered: set[str]
    marks: Mapping[str, Mark]
    shared: frozenset[int]
    source: PlacedGraph
    fetches: Mapping[str, int]

    def part(self, drafts: Sequence[Draft], numbers: Mapping[int, int], output: str) -> PassOperators:
        after, maker = _dependencies(drafts)
        streams = [_STREAMS.get(draft.task.stream, MESSAGES) for draft in drafts]
        closes = {n for i, needs in enumerate(after) if streams[i] != KERNELS for n in needs}
        closes |= {maker[name] for name in (*self.marks, output) if name in maker}
        operators: list[Operator] = []
        place: dict[int, int] = {}
        read: set[str] = set()
        waited, is_open = -1, False
        for index, draft in enumerate(drafts):
            needs = [place[n] for n in after[index] if streams[n] != streams[index] or streams[index] != KERNELS]
            if streams[index] == KERNELS:
                needs = [n for n in needs if n > waited]
            new = [name for name in draft.reads if name in self.gathered and name not in read]
            back = [name for name in dict.fromkeys(draft.reads) if name in self.fetches and name not in read]
            read.update((*new, *back))
            owner = self._shared_node(draft)
            joins = (
                is_open
                and streams[index] == KERNELS
                and not needs
                and not new
                and not back
                and operators[-1].shared == owner
            )
            joins = joins and operators[-1].stream == KERNELS
            if joins:
                operators[-1].tasks.append(numbers[id(draft)])
            else:
                operators.append(
                    Operator(streams[index], [numbers[id(draft)]], sorted(set(needs)), list(new), back, shared=owner)
                )
            operators[-1].reads_input |= any(name in self.given for name in draft.reads)
            place[index] = len(operators) - 1
            if streams[index] == KERNELS:
                waited = max([waited, *needs])
                is_open = index not in closes
        for name, mark in self.marks.items():
            if name in maker:
                operators[place[maker[name]]].marks.append(mark)
        fetches = tuple((number, name) for name, number in self.fetches.items() if name in read)
        return PassOperators(tuple(operators), place[maker[output]] if output in maker else -1, fetches)

    def _shared_node(self, draft: Draft) -> int:
        node = getattr(draft.instruction, "node", -1)
        return node if node in self.shared else -1


def _dependencies(drafts: Sequence[Draft]) -> tuple[list[list[int]], dict[str, int]]:
    """Drafts that each waits for, and the draft that makes each value ready."""
    maker: dict[str, int] = {}
    after = []
    for index, draft in enumerate(drafts):
        needs = {maker[name] for name in draft.reads if name in maker}
        if draft.completes and draft.task.collective is not None:
            needs.add(index - 1)
        if draft.beside:
            needs.update([n for n in range(index) if drafts[n].task.stream == COMPUTE_STREAM][-1:])
        after.append(sorted(needs))
        for name in _made(draft):
            maker[name] = index
    return after, maker


def _made(draft: Draft) -> Iterable[str]:
    yield from (buffer.name for buffer in draft.writes)
    yield from draft.completes


def _halves(source: PlacedGraph, draft: Draft) -> Iterator[Draft]:
    """A draft, in two if it makes both kinds of gradients: the input's comes first, those of parameters may wait."""
    made = draft.instruction
    if not isinstance(made, Compute) or draft.completes or not in_halves(source.graph.nodes[made.node]):
        yield draft
        return
    given, *own = made.outputs
    task, recipe = draft.task, source.recipe(made.node)
    # Both read the gradient of the output; one reads the weight and makes the gradient of the image, one the reverse.
    moved = max(0.0, task.bytes_moved - sum(recipe.sizes))
    for outputs, what in (((given, *("" for _ in own)), "input"), (("", *own), "weight")):
        yield replace(
            draft,
            task=replace(task, name=f"{task.name}, {what}", flops=task.flops / 2, bytes_moved=moved),
            instruction=replace(made, outputs=outputs),
            writes=tuple(buffer for buffer in draft.writes if buffer.name in outputs),
        )


KEPT = 8
"""Plans whose passes are kept: as many as are usually simulated before the best is tried with other sizes."""


@dataclass(frozen=True, kw_only=True)
class UnitBodies:
    """The units of a plan, and the tasks of their operators, to which others may be added."""

    found: Representatives
    units: tuple[UnitWork, ...]
    work: Work


def unit_bodies(plan: Plan, graph: OperatorGraph, kinds: Kinds, *, counts_fresh: bool) -> UnitBodies:
    """The units of a plan; for `kinds` and `counts_fresh` see `units_work`.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded, at the plan's precision and any batch.
    """
    kept = _unit_bodies(_Asked(plan, graph), kinds, counts_fresh)
    source = kept.found.source.with_messages(plan.bucket_bytes)
    return UnitBodies(found=replace(kept.found, source=source), units=kept.units, work=kept.work.copy())


_BESIDE = {
    "bucket_bytes", "certificate", "global_batch", "schedule", "pipeline", "pipeline_stride", "virtual", "chunks",
    "sharding_threshold_bytes",
}  # fmt: skip
"""Fields of a plan beside its passes: how large messages are, when and where passes run, and what chose strategies."""
_SAID = tuple(field.name for field in fields(Plan) if field.name not in _BESIDE)


class _Asked:
    """A plan for a network, but for what its passes have nothing to do with; networks are compared by identity."""

    __slots__ = ("graph", "plan", "said")

    def __init__(self, plan: Plan, graph: OperatorGraph) -> None:
        self.plan, self.graph = replace(plan, bucket_bytes=0), graph
        self.said = [getattr(plan, name) for name in _SAID], plan.pipeline * plan.virtual > 1

    def __hash__(self) -> int:
        return hash((id(self.graph), self.plan.mesh, self.plan.samples, self.plan.micro_batches))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and other.graph is self.graph and other.said == self.said


@lru_cache(maxsize=KEPT)
def _unit_bodies(asked: _Asked, kinds: Kinds, counts_fresh: bool) -> UnitBodies:
    found, work = representatives(asked.plan, asked.graph), Work()
    units = units_work(found.source, found.chain, work, kinds, counts_fresh=counts_fresh)
    return UnitBodies(found=found, units=units, work=work)
