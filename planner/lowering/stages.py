"""A plan with pipeline stages as what every rank runs: instructions of each pass of its chunks, and its update.

The passes are those that `planner.lowering.pipeline` times, of every layer instead of one for all layers like it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain as joined

import numpy as np

from planner.graph.chain import Chain, chain
from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph, TensorRef
from planner.lowering.chunk_passes import PassesRun, chunk_drafts, passes_run
from planner.lowering.instructions import (
    Accumulate,
    BeginUpdate,
    CheckGradients,
    Crossing,
    Instruction,
    LoweredStages,
    PassInstructions,
    RankInstructions,
    SettleScale,
    StageInstructions,
    StoredParameter,
    Update,
    read_values,
    value_of_copy,
    whole_message,
    written_values,
)
from planner.lowering.options import lowering_options, spread
from planner.lowering.pipeline import chunk_units, plan_schedule
from planner.lowering.placed import PlacedGraph
from planner.lowering.sums import FLAG, checks_gradients, flag_messages, start_instructions, summed
from planner.lowering.unit_work import UnitWork, units_work
from planner.lowering.work import Work
from planner.lowering.written import WrittenTasks, adds_across_chunks
from planner.plans.plan import Plan, expanded_rules
from planner.sharding.placement import local_shape
from simulator.program import Phase
from simulator.schedules import ActionKind, Schedule

FORWARD, BACKWARD, INPUT, WEIGHT = ActionKind
LATER: Mapping[ActionKind, tuple[ActionKind, ...]] = {
    FORWARD: (BACKWARD, INPUT, WEIGHT),
    BACKWARD: (),
    INPUT: (WEIGHT,),
    WEIGHT: (),
}
"""Passes of a micro-batch that may still read what a pass leaves."""


def lower_stages(plan: Plan, graph: OperatorGraph) -> LoweredStages:
    """Lower a plan with chunks for execution, on a folded graph at the precision it is to run in.

    Raises
    ------
    StrategyError
        The chunks do not cover the network in order, or lie on other ranks than the schedule runs them.
    """
    whole = unfold(graph)
    options, rules = spread(whole, expanded_rules(plan), lowering_options(plan, whole))
    found = chain(whole)
    source = PlacedGraph(whole, rules, options, found)
    schedule = plan_schedule(plan)
    work = Work()
    units = units_work(source, found, work)
    chunks = chunk_units(plan, found.names(), schedule)
    run = passes_run(schedule)
    stages = tuple(
        _stage(source, found, work, units, chunk, schedule, run, number) for number, chunk in enumerate(chunks)
    )
    return LoweredStages(
        graph=whole,
        mesh=options.mesh,
        schedule=schedule,
        pipeline_stride=plan.pipeline_stride,
        stages=stages,
        ranks=_ranks(source, units, chunks, schedule, stages),
        inputs=source.inputs(range(len(whole.nodes))),
        loss=source.loss_value,
        micro_batches=plan.micro_batches * options.copies,
        copies=options.copies,
        offload_optimizer=options.offload_optimizer,
        offload_to=options.offload_to,
        disk_parameters=source.on_disk(),
        host_parameters=tuple(whole.nodes[index].name for index in sorted(source.host.parameters | source.away)),
    )


# Stages


def _stage(
    source: PlacedGraph,
    found: Chain,
    work: Work,
    units: Sequence[UnitWork],
    chunk: range,
    schedule: Schedule,
    run: PassesRun,
    number: int,
) -> StageInstructions:
    members = [units[n] for n in chunk]
    drafts = chunk_drafts(source, work, members, run, WrittenTasks(source))
    first, last = number % schedule.chain_stages == 0, (number + 1) % schedule.chain_stages == 0
    before = None if first else found.boundaries[chunk.start - 1]
    behind = None if last else found.boundaries[chunk.stop - 1]
    crossings = {
        (FORWARD, True): _crossing(source, before.forward if before else None),
        (FORWARD, False): _crossing(source, behind.forward if behind else None),
        (BACKWARD, True): _crossing(source, behind.gradient if behind else None),
        (BACKWARD, False): _crossing(source, before.gradient if before else None),
    }
    synchronised = next((d.synchronised for (kind, _), d in drafts.items() if d.synchronised), {})
    nodes = {index for n in chunk for index in found.units[n].nodes}
    inputs = source.inputs(nodes)
    batch = _of_all_copies(source, (entry.value for entry in inputs))
    lasting = _lasting(source, members, synchronised) | batch
    sent = [one.value for (_, arrives), one in crossings.items() if one and not arrives]
    leaving = _of_all_copies(source, [*sent, *([source.loss_value] if last else [])])
    written = {key: [work.instructions[n] for n in joined(*draft.tasks)] for key, draft in drafts.items()}
    timed = {key: tuple(work.tasks[n] for n in joined(*draft.tasks)) for key, draft in drafts.items()}
    stored = {source.graph.nodes[i].name for i in source.stored}
    return StageInstructions(
        passes={
            key: replace(
                _with_releases(key[0], given, written, lasting | stored, leaving),
                tasks=timed[key],
                ahead=drafts[key].leading,
            )
            for key, given in written.items()
        },
        arrives=crossings[FORWARD, True],
        leaves=crossings[FORWARD, False],
        gradient_arrives=crossings[BACKWARD, True],
        gradient_leaves=crossings[BACKWARD, False],
        inputs=inputs,
        lasting=frozenset(lasting - batch),
        gradients={source.graph.nodes[parameter].name: name for parameter, name in synchronised.items()},
    )


def _of_all_copies(source: PlacedGraph, names: Iterable[str]) -> set[str]:
    """Values of all copies of a micro-batch."""
    return {value_of_copy(name, copy) for name in names for copy in range(source.options.copies)}


def _crossing(source: PlacedGraph, ref: TensorRef | None) -> Crossing | None:
    """A tensor that goes from stage to stage, as a rank has it."""
    if ref is None:
        return None
    spec, placements = source.graph.spec(ref), source.output_placements(ref)
    shape = local_shape(spec.shape, placements, source.sizes)
    return Crossing(value=source.written_name(ref), shape=shape, dtype=spec.dtype)


def _lasting(source: PlacedGraph, units: Sequence[UnitWork], synchronised: Mapping[int, str]) -> set[str]:
    """Values of a chunk that one micro-batch leaves to the next: gathered parameters, gradients that add up."""
    trained = [source.graph.nodes[i].name for i in synchronised]
    found = {f"{name}.accumulated" for name in trained} | set(synchronised.values())
    if not source.by_unit:
        found |= {name for unit in units for *_, name in unit.gathers.get(Phase.FORWARD, ())}
    return found


def _with_releases(
    kind: ActionKind,
    instructions: Sequence[Instruction],
    written: Mapping[tuple[ActionKind, int], Sequence[Instruction]],
    lasting: set[str],
    leaving: set[str],
) -> PassInstructions:
    """Free every value after the last instruction that touches it, unless a later pass reads it or it leaves."""
    later = {
        name
        for (other, _), given in written.items()
        if other in LATER[kind]
        for instruction in given
        for name in read_values(instruction)
    }
    last: dict[str, int] = {}
    for place, instruction in enumerate(instructions):
        last.update(dict.fromkeys((*read_values(instruction), *written_values(instruction)), place))
    releases: list[list[str]] = [[] for _ in instructions]
    for name, place in last.items():
        if name not in later and name not in lasting and name not in leaving:
            releases[place].append(name)
    return PassInstructions(
        instructions=tuple(instructions),
        releases=tuple(map(tuple, releases)),
        drops=tuple(sorted(leaving - later)),
    )


# Ranks


def _ranks(
    source: PlacedGraph,
    units: Sequence[UnitWork],
    chunks: Sequence[range],
    schedule: Schedule,
    stages: Sequence[StageInstructions],
) -> tuple[RankInstructions, ...]:
    held = [dict.fromkeys(i for n in chunk for i in units[n].parameters) for chunk in chunks]
    holders: dict[int, set[int]] = {}
    for stage, nodes in enumerate(held):
        for index in nodes:
            holders.setdefault(index, set()).add(int(schedule.stage_rank[stage]))
    tied_ranks = {tuple(sorted(ranks)) for ranks in holders.values() if len(ranks) > 1}
    everyone = tuple(range(schedule.ranks))
    ties = tuple(sorted(tied_ranks | ({everyone} if checks_gradients(source) and schedule.ranks > 1 else set())))
    found = []
    for rank in range(schedule.ranks):
        mine = np.flatnonzero(schedule.stage_rank == rank).tolist()
        parameters = sorted({i for stage in mine for i in held[stage]})
        tied = {i: ties.index(tuple(sorted(holders[i]))) for i in parameters if len(holders[i]) > 1}
        of_chunks = Counter(i for stage in mine for i in held[stage]) if adds_across_chunks(source) else Counter()
        shared = {source.graph.nodes[i].name for i, count in of_chunks.items() if count > 1}
        found.append(
            RankInstructions(
                stages=tuple(mine),
                parameters=_stored(source, parameters),
                update=tuple(_update(source, [stages[s] for s in mine], mine, parameters, tied, ties, shared)),
                ties=ties,
                start=start_instructions(source, parameters),
                shared=tuple(sorted(f"{name}.accumulated" for name in shared)),
            )
        )
    return tuple(found)


def _stored(source: PlacedGraph, nodes: Iterable[int]) -> tuple[StoredParameter, ...]:
    inside = set(nodes)
    return tuple(
        StoredParameter(name=p.name, value=source.graph.nodes[p.node].name, placements=source.stored[p.node])
        for p in source.graph.parameters
        if p.node in inside
    )


def gradient_of_stage(parameter: str, stage: int) -> str:
    """What a rank's update calls the gradient that one of its stages has made."""
    return f"{parameter}.gradient of stage {stage}"


def sums_of(parameter: str) -> str:
    """What a rank's update calls what it needs of a whole parameter, before any message; those behind add ``@axis``."""
    return f"{parameter}.sums"


def _update(
    source: PlacedGraph,
    stages: Sequence[StageInstructions],
    numbers: Sequence[int],
    parameters: Sequence[int],
    tied: Mapping[int, int],
    ties: Sequence[tuple[int, ...]],
    shared: Container[str],
) -> Iterable[Instruction]:
    """Sum what stages and ranks have of a gradient, then update; messages in the same order on all ranks.

    The stages of a rank have one sum of the gradients of `shared` parameters.
    """
    axes = len(source.sizes)
    totals: dict[int, str] = {}
    for index in parameters:
        name = source.graph.nodes[index].name
        terms = [
            gradient_of_stage(name, number)
            for stage, number in zip(stages, numbers, strict=True)
            if name in stage.gradients
        ]
        if not terms:
            continue
        for term in () if name in shared else terms[1:]:
            yield Accumulate(source=term, accumulator=terms[0], first=False)
        totals[index] = terms[0]
    for index, before in list(totals.items()):
        if index in tied:
            totals[index] = f"{before} and of others"
            spec = source.graph.spec(source.gradient_ref(index))
            wide = source.travelling_dtype(spec)
            yield whole_message(axes + tied[index], [before], [totals[index]], "" if wide == spec.dtype else wide)
    if checks_gradients(source):
        yield from _check(source, list(totals.values()), ties)
    sums = {index: sums_of(source.graph.nodes[index].name) for index in totals} if source.options.optimizer.sums else {}
    for index, target in sums.items():
        name = source.graph.nodes[index].name
        yield BeginUpdate(parameter=name, gradient=totals[index], divisor=source.divisor(index), target=target)
    for message in summed(source, [(index, 1) for index in sums]):
        before_message = [sums[index] for index in message.parameters]
        sums |= {index: f"{sums[index]}@{message.task.axis}" for index in message.parameters}
        yield whole_message(message.axis, before_message, [sums[index] for index in message.parameters])
    for index, total in totals.items():
        name = source.graph.nodes[index].name
        yield Update(parameter=name, gradient=total, divisor=source.divisor(index), sums=sums.get(index, ""))


def _check(source: PlacedGraph, gradients: Sequence[str], ties: Sequence[tuple[int, ...]]) -> Iterable[Instruction]:
    """All ranks of all stages agree whether every gradient is a number; the largest tie is of all pipeline ranks."""
    yield CheckGradients(gradients=tuple(gradients), target=FLAG)
    told = FLAG
    axes = [(number, task.axis) for number, task in flag_messages(source)]
    if ties:
        axes.append((len(source.sizes) + ties.index(max(ties, key=len)), "pipeline"))
    for number, name in axes:
        before, told = told, f"{told}@{name}"
        yield whole_message(number, [before], [told])
    yield SettleScale(source=told)
