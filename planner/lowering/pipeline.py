"""A plan to be timed: its schedule, what every pass of every chunk runs, and the memory it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planner.cost.work import update_traffic
from planner.graph.fusion import of_places, with_imbalance
from planner.graph.operator_graph import OperatorGraph, Role
from planner.lowering.chunk_memory import chunk_bytes, rank_bytes
from planner.lowering.chunk_passes import PassesRun, chunk_drafts, passes_run
from planner.lowering.instructions import NOTHING
from planner.lowering.pass_operators import CrossedLinks, PassTasks, TaskTimes, pass_operators, reports
from planner.lowering.placed import PlacedGraph, local_share
from planner.lowering.representatives import Representatives
from planner.lowering.sums import FLAG_BYTES, check_task, checks_gradients, flag_messages, settle_task, summed
from planner.lowering.unit_work import UnitWork, unit_bodies
from planner.lowering.work import Work
from planner.lowering.writer import offloading
from planner.lowering.written import PassDraft, WrittenTasks
from planner.plans.plan import Plan
from simulator.corrections import message_time
from simulator.errors import InputError, StrategyError
from simulator.hardware import Hardware
from simulator.launches import send_stall
from simulator.pipeline_memory import PipelineBytes
from simulator.pipeline_operators import FIRST, LAST, PLAIN, OperatorCosts, action_variants, in_one_stream
from simulator.program import DISK, HOST, Collective, Kernel, Phase, ProgramAxis, Task
from simulator.schedules import ActionKind, Schedule, make_schedule
from simulator.task_table import FloatArray
from simulator.timing import host_message_time, in_caches, sharing_cores, task_times
from simulator.topology import GroupShape

FORWARD, BACKWARD, INPUT, WEIGHT = ActionKind
Key = tuple[int, ...]
"""Units of a chunk, by those that stand for them: equal chunks have equal keys."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredPipeline:
    """One step of a pipeline.

    ``flops`` are those of the network on one micro-batch of the whole stage mesh; ``hardware`` is as its
    kernels meet it, ``computing`` how many ranks compute at a time on average. ``axes`` say where groups of ranks lie.
    ``sent_bytes`` (stages,) go from each stage to the next, ``meeting_bytes`` are those of ``costs.meetings``.
    """

    schedule: Schedule
    costs: OperatorCosts
    sizes: PipelineBytes
    flops: float
    work: StepTasks
    hardware: Hardware
    computing: float
    axes: tuple[ProgramAxis, ...]
    sent_bytes: FloatArray
    meeting_bytes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTasks:
    """Every task with its seconds, and those of each pass, ``passes[stage][kind, variant]``, and of each update."""

    tasks: Sequence[Task]
    seconds: FloatArray
    passes: Sequence[Mapping[tuple[ActionKind, int], PassTasks]]
    updates: Sequence[Sequence[tuple[int, int]]]

    def counts(self, schedule: Schedule) -> FloatArray:
        """(tasks,) how often each runs in a step, on all pipeline ranks together."""
        found = self.in_passes(schedule)
        for rank in self.updates:
            for number, times in rank:
                found[number] += times
        return found

    def in_passes(self, schedule: Schedule) -> FloatArray:
        """`counts` without what follows the last pass of a rank."""
        found = np.zeros(len(self.tasks))
        which = action_variants(schedule)
        rows = np.stack([schedule.kind, schedule.stage, which], axis=1)
        for (kind, stage, variant), times in zip(*np.unique(rows, axis=0, return_counts=True), strict=True):
            np.add.at(found, self.of_pass(ActionKind(int(kind)), int(stage), int(variant)).numbers, float(times))
        return found

    def of_pass(self, kind: ActionKind, stage: int, variant: int) -> PassTasks:
        """The tasks of a pass; of a plain one where those of the first or the last are no others."""
        passes = self.passes[stage]
        return passes.get((kind, variant), passes[kind, PLAIN])


@dataclass(frozen=True, kw_only=True)
class _Lowering:
    """What all chunks share; ``chunks`` are their units in model order, ``keys`` those that stand for them."""

    plan: Plan
    hardware: Hardware
    schedule: Schedule
    found: Representatives
    units: tuple[UnitWork, ...]
    keys: tuple[Key, ...]
    work: Work

    @property
    def source(self) -> PlacedGraph:
        return self.found.source


def lower_pipeline(
    plan: Plan, graph: OperatorGraph, hardware: Hardware, schedule: Schedule | None = None
) -> LoweredPipeline:
    """Lower a plan with chunks, on a folded graph at the plan's precision; `schedule` stands in for the plan's.

    Raises
    ------
    StrategyError
        The chunks do not cover the network in order, or lie on other ranks than the schedule runs them.
    """
    graph = with_imbalance(graph, plan.expert_load)
    # A single micro-batch adds nothing up.
    fresh = bool(hardware.message_workspace) and plan.micro_batches > 1
    schedule = plan_schedule(plan) if schedule is None else schedule
    kinds = frozenset(map(ActionKind, np.unique(schedule.kind).tolist()))
    bodies = unit_bodies(plan, graph, kinds, counts_fresh=fresh)
    found, units, work = bodies.found, bodies.units, bodies.work
    if schedule.micro_batches != plan.micro_batches:
        raise InputError(
            f"schedule {schedule.name} has {schedule.micro_batches} micro-batches, the plan {plan.micro_batches}; "
            "use a schedule of as many"
        )
    computing = _computing(plan)
    hardware = sharing_cores(hardware, computing)
    keys = tuple(tuple(found.of_unit[i] for i in members) for members in chunk_units(plan, found.names, schedule))
    lowering = _Lowering(
        plan=plan, hardware=hardware, schedule=schedule, found=found, units=units, keys=keys, work=work
    )
    written = WrittenTasks(found.source)
    # Where messages take turns with kernels, plain passes say what travels in every pass, whether they run or not.
    run = passes_run(schedule, every=not hardware.overlaps_communication)
    drafts = {key: _drafts(lowering, key, run, written) for key in dict.fromkeys(keys)}
    updates = [_updates(lowering, rank) for rank in range(schedule.ranks)]
    chunk = {key: chunk_bytes(found.source, [units[n] for n in key]) for key in dict.fromkeys(keys)}
    beside = {key: _beside(lowering, passes, hardware) for key, passes in drafts.items()}
    sizes = PipelineBytes(
        activations=np.array([chunk[key].kept for key in keys]),
        weight_activations=np.array([chunk[key].deferred for key in keys]),
        recomputed=np.array([chunk[key].backward + beside[key][BACKWARD] for key in keys]),
        input_gradients=np.array([chunk[key].inputs + beside[key][INPUT] for key in keys]),
        weight_gradients=np.array([chunk[key].weights + beside[key][WEIGHT] for key in keys]),
        forward=np.array([chunk[key].forward + beside[key][FORWARD] for key in keys]),
        resident=rank_bytes(
            found.source, units, [[keys[s] for s in stages] for stages in _stages_of(schedule)], plan.micro_batches
        ),
    )
    met = sharing_cores(in_caches(hardware, _held_bytes(sizes), plan.devices), computing)
    seconds = _seconds(lowering, met, computing)
    pairs = bool(schedule.paired.any())
    # What the host moves takes nothing from kernels.
    slowing = seconds * [task.axis not in (HOST, DISK) for task in work.tasks] * hardware.lost_to_messages
    times = TaskTimes(seconds, slowing)
    distinct = {id(draft): draft for passes in drafts.values() for draft in passes.values()}
    told = reports(work.tasks)
    axes, (sent_bytes, send_s), meetings = _axes(lowering), _sends(lowering), _meetings(lowering)
    links = CrossedLinks(hardware=met, devices=plan.devices, axes=axes, tasks=work.tasks)
    alone = schedule.ranks == 1
    made_of = pass_operators([*distinct.values()], times, pairs, told, links, alone=alone)
    operators = dict(zip(distinct, made_of, strict=True))
    made = {key: {place: operators[id(draft)][0] for place, draft in passes.items()} for key, passes in drafts.items()}
    ran = {key: {place: operators[id(draft)][1] for place, draft in passes.items()} for key, passes in drafts.items()}
    costs = OperatorCosts(
        passes={kind: [made[key][kind, PLAIN] for key in keys] for kind in kinds},
        first={kind: [made[key][kind, FIRST] for key in keys] for kind in kinds if (kind, FIRST) in made[keys[0]]},
        last={kind: [made[key][kind, LAST] for key in keys] for kind in kinds if kind in (BACKWARD, WEIGHT)},
        send_s=send_s,
        epilogue_s=np.array([sum(times * float(seconds[number]) for number, times in rank) for rank in updates]),
        meetings=[(ranks, seconds) for ranks, _, seconds in meetings],
        send_stall=send_stall(hardware),
    )
    if not hardware.overlaps_communication:
        costs = in_one_stream(schedule, costs)
    timed = StepTasks(tasks=work.tasks, seconds=seconds, passes=[ran[key] for key in keys], updates=updates)
    return LoweredPipeline(
        schedule=schedule,
        costs=costs,
        sizes=sizes,
        flops=_flops(lowering),
        work=timed,
        hardware=met,
        computing=computing,
        axes=axes,
        sent_bytes=sent_bytes,
        meeting_bytes=tuple(payload for _, payload, _ in meetings),
    )


def _drafts(
    lowering: _Lowering, key: Key, run: PassesRun, written: WrittenTasks
) -> Mapping[tuple[ActionKind, int], PassDraft]:
    """The passes of a chunk; those that never run plain are told plain by the last one."""
    found = chunk_drafts(lowering.source, lowering.work, [lowering.units[n] for n in key], run, written)
    first, plain = found.get((FORWARD, FIRST)), found.get((FORWARD, PLAIN))
    if first is not None and plain is not None and first.runs_like(plain):
        found[FORWARD, FIRST] = plain
    return {(kind, PLAIN): found[kind, LAST] for kind, variant in found if variant == LAST} | found


def _beside(
    lowering: _Lowering, passes: Mapping[tuple[ActionKind, int], PassDraft], hardware: Hardware
) -> Mapping[ActionKind, int]:
    """Bytes that a chunk's passes take at once beside their values, by kind of pass: of messages and of sums.

    The largest message stands packed while it is on its way, with what its backend takes; a term of a gradient waits
    for the other that it is added to. Only profiles that say what messages take (`Hardware.message_workspace`) count
    either: they are of machines on which plans are executed as they are lowered.
    """
    found = dict.fromkeys(ActionKind, 0)
    for (kind, _), draft in passes.items() if hardware.message_workspace else ():
        for number in (n for operator in draft.tasks for n in operator):
            task = lowering.work.tasks[number]
            taken = hardware.message_workspace.get(task.collective, 0.0) if task.collective else 0.0
            if task.collective is Collective.ALL_REDUCE and task.axis == "data":
                taken += 1.0
            waiting = lowering.work.waiting.get(number, 0)
            found[kind] = max(found[kind], int(taken * task.payload_bytes + waiting))
    return found


def plan_schedule(plan: Plan) -> Schedule:
    """The schedule of a plan; one stage accumulates gradients of one micro-batch after the other."""
    name = "gradient_accumulation" if plan.schedule == "none" else plan.schedule
    return make_schedule(name, plan.pipeline, plan.micro_batches, plan.virtual)


def chunk_units(plan: Plan, names: Sequence[str], schedule: Schedule) -> tuple[range, ...]:
    """Places in `names` of the units of every chunk, one chunk a stage of the schedule; all units without chunks.

    Raises
    ------
    StrategyError
        As `lower_pipeline`.
    """
    if not plan.chunks and schedule.stages == 1:
        return (range(len(names)),)
    if len(plan.chunks) != schedule.stages:
        raise StrategyError(
            f"stages: the plan has {len(plan.chunks)} chunks, but schedule {schedule.name} with {schedule.ranks} "
            f"pipeline ranks runs {schedule.stages}; give one for each"
        )
    place = {name: i for i, name in enumerate(names)}
    found: list[range] = []
    expected = 0
    for number, chunk in enumerate(plan.chunks):
        if number % schedule.chain_stages == 0:
            expected = 0
        for name in (chunk.first, chunk.last):
            if name not in place:
                raise StrategyError(
                    f"stages.{number}: {name!r} is no unit of {plan.network}; its units go from {names[0]!r} to "
                    f"{names[-1]!r}: plan it again"
                )
        first, last = place[chunk.first], place[chunk.last]
        if first != expected or last < first:
            raise StrategyError(
                f"stages.{number}: chunk {chunk.first!r} to {chunk.last!r} does not follow the one before, which "
                f"ends in front of {names[min(expected, len(names) - 1)]!r}; chunks cover the units in order"
            )
        if chunk.rank != schedule.stage_rank[number]:
            raise StrategyError(
                f"stages.{number}: chunk {number} is on pipeline rank {chunk.rank}, but schedule {schedule.name} runs "
                f"it on rank {schedule.stage_rank[number]}; correct the rank or the schedule"
            )
        expected = last + 1
        if (number + 1) % schedule.chain_stages == 0 and expected != len(names):
            raise StrategyError(
                f"stages.{number}: the last chunk ends with {chunk.last!r}, but the network goes on to {names[-1]!r}; "
                "chunks cover all units"
            )
        found.append(range(first, last + 1))
    return tuple(found)


def _stages_of(schedule: Schedule) -> list[list[int]]:
    return [np.flatnonzero(schedule.stage_rank == rank).tolist() for rank in range(schedule.ranks)]


# Passes


def _computing(plan: Plan) -> float:
    """Ranks that compute at a time on average: in the bubble of the pipeline each has no work.

    A bubble is ``(p - 1) / (v m + p - 1)`` of a step on p stages of v chunks each and m micro-batches (Narayanan et
    al., *Efficient large-scale language model training on GPU clusters*, 2021).
    """
    passes = plan.virtual * plan.micro_batches
    return plan.devices * passes / (passes + plan.pipeline - 1)


def _held_bytes(sizes: PipelineBytes) -> int:
    """What the fullest rank and the largest pass hold together."""
    standing = np.max(sum(np.asarray(part) for part in sizes.resident.values()))
    moving = np.max(np.asarray(sizes.activations) + np.maximum(sizes.forward, sizes.recomputed))
    return int(standing + moving)


def _axes(lowering: _Lowering) -> tuple[ProgramAxis, ...]:
    """Where the groups of the mesh lie."""
    mesh = lowering.source.options.mesh
    return tuple(ProgramAxis(name=axis.name, size=axis.size, stride=mesh.stride(i)) for i, axis in enumerate(mesh.axes))


def _seconds(lowering: _Lowering, hardware: Hardware, computing: float) -> FloatArray:
    """(tasks,) seconds of all tasks while so many ranks compute."""
    return task_times(lowering.work.tasks, _axes(lowering), hardware, computing)


def _updates(lowering: _Lowering, rank: int) -> list[tuple[int, int]]:
    """Append the optimizer's tasks of a rank; returns their numbers and how many of each there are."""
    source = lowering.source
    update = source.options.optimizer
    parameters = _rank_parameters(lowering, rank)
    found = []
    for index, times in parameters.items():
        node = source.graph.nodes[index]
        elements = node.outputs[0].elements * local_share(source.stored[index], source.sizes)
        task = Task(
            name=f"update {node.name}",
            phase=Phase.UPDATE,
            kernel=Kernel.OPTIMIZER,
            dtype=node.outputs[0].dtype,
            flops=elements * update.flops,
            bytes_moved=elements * update_traffic(update, node.outputs[0].dtype),
            on_host=source.updated_on_host(index),
        )
        found.append((lowering.work.add(task, NOTHING), times))
    messages = summed(source, parameters.items())
    found += [(lowering.work.add(message.task, NOTHING), 1) for message in messages]
    if checks_gradients(source):
        size = sum(
            times * source.local_bytes(source.graph.nodes[index].outputs[0], source.stored[index])
            for index, times in parameters.items()
        )
        checks = (check_task(float(size)), *(task for _, task in flag_messages(source)), settle_task())
        found += [(lowering.work.add(task, NOTHING), 1) for task in checks]
    if source.options.offload_optimizer:
        moved = [(i, n) for i, n in parameters.items() if i not in source.host.parameters]
        copies = offloading(source, moved)
        found += [(lowering.work.add(task, NOTHING), 1) for task in copies]
    return found


def _rank_parameters(lowering: _Lowering, rank: int) -> dict[int, int]:
    """Trained parameters of a rank by node, each with the number of units like its own that the rank holds."""
    keys = [lowering.keys[stage] for stage in _stages_of(lowering.schedule)[rank]]
    trained = lowering.source.graph.trained
    readers = Counter(index for unit in lowering.units for index in unit.parameters)
    found: dict[int, int] = {}
    for key in keys:
        for number in dict.fromkeys(key):
            for index in lowering.units[number].parameters:
                if index in trained:
                    tied = readers[index] > 1
                    found[index] = 1 if tied else found.get(index, 0) + key.count(number)
    return found


# Between stages


def _pair_shape(lowering: _Lowering, one: int, other: int) -> GroupShape:
    """Where two pipeline ranks lie: beside each other on the innermost level that holds both."""
    hardware, stride = lowering.hardware, max(lowering.plan.pipeline_stride, 1)
    low, high = sorted((one * stride, other * stride))
    levels = [level.size for level in hardware.levels]
    crossed = next((i for i, size in enumerate(levels[:-1]) if low // size == high // size), len(levels) - 1)
    members = tuple(2 if i == crossed else 1 for i in range(len(levels)))
    return GroupShape(members=members, stride=high - low)


def _sends(lowering: _Lowering) -> tuple[FloatArray, FloatArray]:
    """(stages,), (stages,) bytes and seconds from each stage to the next, of the tensor as it is written."""
    schedule, source, chain = lowering.schedule, lowering.source, lowering.found.chain
    sizes, seconds = np.zeros(schedule.stages), np.zeros(schedule.stages)
    known: dict[tuple[int, int, int], tuple[float, float]] = {}
    for stage, (key, following) in enumerate(pairwise(lowering.keys)):
        here, there = int(schedule.stage_rank[stage]), int(schedule.stage_rank[stage + 1])
        if (stage + 1) % schedule.chain_stages == 0 or here == there:
            continue
        assert following  # chunks hold at least one unit
        sent = key[-1], here, there
        if sent not in known:
            ref = chain.boundaries[key[-1]].forward
            payload = source.options.copies * source.local_bytes(source.graph.spec(ref), source.output_placements(ref))
            shape = _pair_shape(lowering, here, there)
            taken = message_time(lowering.hardware, Collective.SEND, np.array([float(payload)]), shape)[0]
            known[sent] = float(payload), float(taken)
        sizes[stage], seconds[stage] = known[sent]
    return sizes, seconds


def _meetings(lowering: _Lowering) -> list[tuple[tuple[int, ...], float, float]]:
    """Gradients of parameters that several ranks hold, summed among them once a step: ranks, bytes and seconds."""
    source, found = lowering.source, []
    shared: dict[tuple[tuple[int, ...], bool], float] = {}
    places = _unit_ranks(lowering)
    # Parameters of one unit lie on the same ranks.
    holders: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for index in dict.fromkeys(i for unit in lowering.units for i in unit.parameters):
        if not source.is_trained(index):
            continue
        users = tuple([n for n, unit in enumerate(lowering.units) if index in unit.parameters])
        if users not in holders:
            holders[users] = _holders(places, users)
        for ranks in holders[users]:
            spec = source.graph.nodes[index].outputs[0]
            share = local_share(source.stored[index], source.sizes)
            key = ranks, index in source.host.parameters
            shared[key] = shared.get(key, 0.0) + source.travelling_bytes(spec) * share
    if checks_gradients(source) and lowering.schedule.ranks > 1:  # stages tell each other whether they are numbers
        everyone = tuple(range(lowering.schedule.ranks)), False
        shared[everyone] = shared.get(everyone, 0.0) + FLAG_BYTES
    for (ranks, on_host), payload in sorted(shared.items()):
        pair = _pair_shape(lowering, ranks[0], ranks[-1])
        members = tuple(len(ranks) if count > 1 else 1 for count in pair.members)
        shape = replace(pair, members=members)
        timed = host_message_time if on_host else message_time
        seconds = timed(lowering.hardware, Collective.ALL_REDUCE, np.array([payload]), shape)[0]
        found.append((ranks, payload, float(seconds)))
    return found


def _unit_ranks(lowering: _Lowering) -> dict[int, list[tuple[int, ...]]]:
    """For each unit that stands for others, the ranks that hold each of the units like it."""
    schedule, per_chain = lowering.schedule, lowering.schedule.chain_stages
    kinds: dict[int, int] = {}
    ranks_of: dict[int, list[int]] = {}
    start = 0
    for stage, key in enumerate(lowering.keys):
        start = 0 if stage % per_chain == 0 else start + len(lowering.keys[stage - 1])
        for place, number in enumerate(key, start):
            kinds[place] = number
            ranks_of.setdefault(place, []).append(int(schedule.stage_rank[stage]))
    found: dict[int, list[tuple[int, ...]]] = {}
    for place, ranks in ranks_of.items():
        found.setdefault(kinds[place], []).append(tuple(ranks))
    return found


def _holders(places: Mapping[int, Sequence[tuple[int, ...]]], users: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups of two or more ranks that train a parameter of these units: tied ones, and copies of the whole network."""
    groups = [ranks for number in users for ranks in places.get(number, ())]
    if len(users) > 1:  # tied: all units that use it share one
        groups = [tuple(rank for ranks in groups for rank in ranks)]
    return [ranks for ranks in (tuple(sorted(set(group))) for group in groups) if len(ranks) > 1]


def _flops(lowering: _Lowering) -> float:
    """Floating point operations of one micro-batch of the whole network."""
    graph, units = lowering.source.graph, lowering.found.chain.units
    # What the busiest rank of experts does beyond an even share, others leave.
    more = dict.fromkeys((i for i, *_ in of_places(graph)), lowering.plan.expert_load)
    done = [node.flops / more.get(i, 1.0) if node.role is Role.OPERATOR else 0.0 for i, node in enumerate(graph.nodes)]
    of_unit = [sum(done[i] for i in one.nodes) for one in units]
    total = 0.0
    for number in lowering.found.of_unit:
        total += of_unit[number]
    return lowering.source.options.copies * total
