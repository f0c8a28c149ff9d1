"""What one rank does from its start to its result."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from planner.execution.communication import make_groups, members, own_group
from planner.execution.data.samples import Batches, BatchInput, Position, open_dataset
from planner.execution.interpreter import Interpreter, Neighbours
from planner.execution.job import Job, batch_shard, own_piece
from planner.execution.launch.joining import meet, process_group
from planner.execution.launch.membership import Membership, find_membership
from planner.execution.launch.rank_log import rank_log
from planner.execution.launch.watch import Watch
from planner.execution.machine import BUFFER, Held, RankContext
from planner.execution.measuring.clocks import RankClocks, RankRecord
from planner.execution.memory import PeakMemory, mapped
from planner.execution.optimizers import LossScale, first_scale, make_step
from planner.execution.step_end import StepEnd, keep_checkpoints, places, resumed_states
from planner.lowering.instructions import LoweredStages, StoredParameter
from planner.networks import load_network
from planner.sharding.local_call import Moment
from planner.sharding.placement import Mesh, Placements
from planner.sharding.sequence import SequenceCut
from simulator.calibration.machine import BACKENDS, MachineUse, load_npu, machine_use, used_since
from simulator.calibration.process import return_free_memory
from simulator.calibration.timing import Pace, timed_paces

PACE_SHARE = 0.1
"""Part of the time of the steps that typical kernels between them take."""
MOST_SPANS = 40
"""Spans of steps between two rounds, however many steps there are."""
AFTER_ROUNDS = 8


def begin_together(device_type: str, *, wanted: bool) -> bool:
    """Whether timed steps begin on all ranks at the same time, behind a barrier; `wanted` is as in `PacedSteps`."""
    return wanted and device_type == "cpu"


class PacedSteps:
    """Spans of steps with rounds of typical kernels before, between and behind them; ``found`` are their seconds.

    An accelerator may have no memory for these kernels before the steps are done. On a processor ranks that share cores
    load data and look after the run between steps one after the other: that is no part of a step, and so none of them
    begins before all are ready.

    Parameters
    ----------
    wanted : whether to time the pace at all
    step_s : seconds of one step, about; 0 if not known
    """

    def __init__(self, device: torch.device, step_s: float, *, wanted: bool) -> None:
        self.found: list[float] = []
        self._device, self._step_s = device, step_s
        self._between = begin_together(device.type, wanted=wanted)
        self._after = wanted and not self._between

    def spans(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """First steps and ends of all spans, one after the other, the same on every rank."""
        if not self._between:
            yield first, end
            if self._after:
                self.found += timed_paces(Pace(self._device), dist.barrier, AFTER_ROUNDS)
            return
        pace = Pace(self._device)
        self.found += timed_paces(pace, dist.barrier, 1)
        every = self._steps_of_span(end - first)
        for begin in range(first, end, every):
            yield begin, min(begin + every, end)
            self.found += timed_paces(pace, dist.barrier, 1)

    def meet(self) -> None:
        """Wait until all ranks are ready for the next step, where that would count as the time of those that are."""
        if self._between:
            dist.barrier()

    def _steps_of_span(self, steps: int) -> int:
        longest = torch.tensor([self._step_s, self.found[0]], dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        step_s, round_s = longest.tolist()
        fewest = -(-steps // MOST_SPANS)
        return max(1, fewest, min(steps, round(round_s / PACE_SHARE / step_s)) if step_s else steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedShare:
    """What a rank gets of one input: the input as all ranks together have it, and how it is cut among them.

    ``placements`` hold, for each mesh axis, the dim that it cuts, or −1; ``cut`` is how a context axis cuts sequences.
    """

    spec: BatchInput
    placements: Placements
    cut: SequenceCut | None = None


class Loader:
    """Loads this rank's share of every input of a micro-batch.

    Batches follow from data set, seed and position alone, so that a run which begins in the middle, or on other
    ranks, goes on with the samples that an unbroken one would have had. Only the rows that this rank needs are read.

    Parameters
    ----------
    batches : Batches
        The stream of samples.
    shares : sequence of Share
        What this rank gets of each input.
    mesh, coordinates : Mesh, tuple of int
        Where this rank stands.
    micro_batches : int
        Micro-batches of a step.
    ahead : int
        Micro-batches that are prepared in a thread while others are trained on; 0 for none.
    """

    def __init__(
        self,
        batches: Batches,
        shares: Sequence[LoadedShare],
        mesh: Mesh,
        coordinates: tuple[int, ...],
        *,
        micro_batches: int,
        position: Position,
        device: torch.device,
        ahead: int = 0,
    ) -> None:
        self._batches, self._shares, self._mesh, self._coordinates = batches, tuple(shares), mesh, coordinates
        self._micro_batches, self._position, self._device = micro_batches, position, device
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="loader") if ahead else None
        self._coming: dict[int, Future[list[Tensor]]] = {}

    def __call__(self, step: int, micro_batch: int) -> list[Tensor]:
        """Give this rank's piece of every input of a micro-batch."""
        number = (step - self._position.step) * self._micro_batches + micro_batch
        if self._pool is None:
            pieces = self._load(number)
        else:
            self._coming = {n: one for n, one in self._coming.items() if n >= number or one.cancel()}
            for later in range(number, number + self._ahead + 1):
                if later not in self._coming:
                    self._coming[later] = self._pool.submit(self._load, later)
            pieces = self._coming.pop(number).result()
        return [piece.to(self._device, non_blocking=True) for piece in pieces]

    def close(self) -> None:
        """Stop preparing."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _load(self, number: int) -> list[Tensor]:
        pieces = []
        for share in self._shares:
            start = self._position.sample + number * share.spec.shape[0]
            rows = self._batches.load(share.spec, start, batch_shard(self._mesh, share.placements, self._coordinates))
            others = tuple(placement if placement > 0 else -1 for placement in share.placements)
            piece = own_piece(rows, self._mesh, others, self._coordinates, share.cut).contiguous()
            # Only a copy out of memory that stays in its place goes on beside computation.
            pieces.append(piece if self._device.type == "cpu" else piece.pin_memory())
        return pieces


SPINNING = ("cpu", "cuda")
"""Devices that a rank waits for with its processor: one that uses none hangs."""
PREPARED_STEPS = 2
"""Steps whose data are loaded ahead where an accelerator computes; on a CPU that would only take cores away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank measured; the losses are of whole batches, and so the same on every rank that knows them.

    With pipeline stages only ranks of the last one do; the others have none.
    ``record`` is there where steps were recorded. ``paces_s`` is what rounds of typical kernels took between the timed
    steps, on all ranks at the same time, where the job asks for them. ``use`` is what the cores did during the timed
    steps.
    """

    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    peak_memory_bytes: int
    memory_method: str
    record: RankRecord | None = None
    paces_s: tuple[float, ...] = ()
    use: MachineUse | None = None


def train(job: Job, membership: Membership | None = None) -> list[RankResult]:
    """Train as one rank of a job and return the results of all ranks, by rank.

    Without a membership the process is one that `launch.run_workers` started.
    """
    membership = membership or find_membership(os.environ)
    assert membership is not None  # the launcher sets the variables that torchrun does
    with rank_log(job.logs, membership.rank):
        device = _device(job.device_type, membership)
        store = meet(membership, job.join_timeout_s, job.digest)
        watch = Watch(store, membership.rank, membership.world_size, stalls=device.type in SPINNING)
        try:
            # The alarm comes before the group is taken down, which may wait for ranks that know nothing yet.
            watch.start()
            with watch.explaining(), process_group(_backend(job), store, membership, job.timeout_s), watch.explaining():
                mine = _train_rank(job, device, store, watch)
                results: list[RankResult] = [mine] * dist.get_world_size()
                dist.all_gather_object(results, mine)
        finally:
            watch.close()
    return results


def _backend(job: Job) -> str:
    """What carries messages; those of tables in the memory of hosts need one for processors as well."""
    backend = BACKENDS[job.device_type]
    hosted = bool(job.lowered.host_parameters)
    return f"cpu:gloo,{job.device_type}:{backend}" if hosted and job.device_type != "cpu" else backend


class Trainer:
    """The tensors of one rank of a job, and what runs its steps; the process group must be there."""

    def __init__(self, job: Job, device: torch.device) -> None:
        coordinates = job.lowered.mesh.coordinates(dist.get_rank())
        timeout, first = timedelta(seconds=job.timeout_s), job.checkpoints.position.step
        self.recorder = RankClocks(job.lowered, dist.get_rank(), device) if job.recorded_steps else None
        context = RankContext(
            coordinates=coordinates,
            groups=_groups(job.lowered, timeout),
            device=device,
            watch=self.recorder,
            moment=Moment(seed=job.seed, step=first),
            scale=_loss_scale(job),
        )
        self._device, self._micro_batches = device, job.lowered.micro_batches
        self._load = _loader(job, coordinates, device)
        self._load(first, 0)
        neighbours = _neighbours(job.lowered, device, timeout)
        _touch_libraries(context, neighbours.groups.values())
        self.memory = PeakMemory(device)
        parameters, self._buffers = _own_tensors(job, coordinates, device)
        to = job.lowered.offload_to
        self._updates = {
            name: make_step(job.optimizer, job.constants, offload=job.lowered.offload_optimizer, to=to)
            for name in parameters
        }
        kept = Held(parameters=parameters, optimizers=self._updates, buffers=self._buffers)
        where = places(job.lowered, held_parameters(job.lowered), coordinates)
        self.save = keep_checkpoints(job, kept, self._updates, where, context.scale)
        self.memory.restart()
        self._interpreter = Interpreter(job.lowered, context, neighbours, kept)

    def batches(self, step: int) -> list[list[Tensor]]:
        """Load this rank's pieces of the inputs of every micro-batch of a step."""
        return [self._load(step, number) for number in range(self._micro_batches)]

    def run(self, batches: list[list[Tensor]]) -> tuple[float | None, float]:
        """Run one step; returns the mean loss, where this rank knows it, and the seconds."""
        _synchronize(self._device)
        start = time.perf_counter()
        found = self._interpreter.run_step(batches.__getitem__)
        _synchronize(self._device)
        seconds = time.perf_counter() - start
        return (sum(float(loss) for loss in found) / len(found) if found else None), seconds

    def held_bytes(self) -> int:
        """What this rank holds between steps."""
        held = (*self._buffers.values(), *resumed_states(self._updates))
        return sum(one.untyped_storage().nbytes() for one in held) + self._interpreter.live_bytes()

    def run_recorded(self, step: int) -> None:
        """Run a step, which counts for nothing else, with every instruction clocked."""
        assert self.recorder is not None
        batches = self.batches(step)
        dist.barrier()
        self.recorder.begin_step()
        self._interpreter.run_step(batches.__getitem__)
        self.recorder.end_step()


def _train_rank(job: Job, device: torch.device, store: Store, watch: Watch) -> RankResult:
    first = job.checkpoints.position.step
    trainer = Trainer(job, device)
    losses: list[float] = []
    times: list[float] = []
    end_step = StepEnd(job, store, trainer.save)

    def run(begin: int, end: int, meet: Callable[[], None] = lambda: None) -> None:
        """Run some steps; loading data is not part of a step's time."""
        for step in range(begin, end):
            batches = trainer.batches(step)
            meet()
            with watch.step():
                loss, seconds = trainer.run(batches)
            if loss is not None:
                losses.append(loss)
            times.append(seconds)
            end_step(step, loss, seconds)

    for step in range(first, first + job.warm_up_steps):
        trainer.memory.record(partial(run, step, step + 1), trainer.held_bytes())
    paced = PacedSteps(device, times[-1] if times else 0.0, wanted=job.times_pace)
    before = machine_use()
    for begin, end in paced.spans(first + job.warm_up_steps, job.steps):
        run(begin, end, paced.meet)
    use = used_since(before)
    for step in range(job.steps, job.steps + job.recorded_steps):
        trainer.run_recorded(step)
    return RankResult(
        losses=tuple(losses),
        step_times_s=tuple(times),
        peak_memory_bytes=trainer.memory.peak_bytes(),
        memory_method=trainer.memory.method,
        record=None if trainer.recorder is None else trainer.recorder.record(),
        paces_s=tuple(paced.found),
        use=use,
    )


def _loss_scale(job: Job) -> LossScale:
    """The scale that this run begins with."""
    graph, orders = job.lowered.graph, job.checkpoints
    scale = first_scale(getattr(torch, graph.nodes[graph.parameters[0].node].outputs[0].dtype), job.first_scale)
    return scale if orders.loss_scale is None else LossScale(value=orders.loss_scale, good_steps=orders.good_steps)


def _loader(job: Job, coordinates: tuple[int, ...], device: torch.device) -> Loader:
    """Make what loads this rank's piece of every input of a micro-batch."""
    specs, count = job.inputs, job.lowered.micro_batches
    return Loader(
        Batches(dataset=open_dataset(job.data, specs, job.seed), seed=job.seed),
        [
            LoadedShare(spec=s, placements=i.placements, cut=i.cut)
            for s, i in zip(specs, job.lowered.inputs, strict=True)
        ],
        job.lowered.mesh,
        coordinates,
        micro_batches=count,
        position=job.checkpoints.position,
        device=device,
        ahead=0 if device.type == "cpu" else PREPARED_STEPS * count,
    )


def _own_tensors(
    job: Job, coordinates: tuple[int, ...], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Build the network with the job's seed, keep this rank's piece of each parameter and free the rest.

    Returns the pieces by parameter name, and the buffers that the graph reads, by node name.
    """
    module = load_network(job.network, sequence_length=job.sequence_length).build(job.seed)
    whole = dict(module.named_parameters(remove_duplicate=False))
    graph = job.lowered.graph
    dtypes = {entry.name: graph.nodes[entry.node].outputs[0].dtype for entry in graph.parameters}
    on_host = job.lowered.host_parameters
    kept = {}
    for stored in held_parameters(job.lowered):
        piece = own_piece(whole[stored.name].detach(), job.lowered.mesh, stored.placements, coordinates)
        there = torch.device("cpu") if stored.value in on_host else device
        piece = piece.to(there, getattr(torch, dtypes[stored.name]), copy=True).contiguous()
        on_disk = stored.value in job.lowered.disk_parameters and piece.dim()
        kept[stored.name] = mapped(piece, f"parameter {stored.name}") if on_disk else piece
    held = dict(module.named_buffers(remove_duplicate=False))
    buffers = {
        node.name: held[node.name].to(device, getattr(torch, node.outputs[0].dtype), copy=True)
        for node in graph.nodes
        if node.op == BUFFER
    }
    del module, whole, held
    gc.collect()
    return_free_memory()  # so that the whole network does not count as this rank's
    return kept, buffers


def held_parameters(lowered: LoweredStages) -> tuple[StoredParameter, ...]:
    """Parameters that this rank stores."""
    return lowered.ranks[lowered.pipeline_rank(dist.get_rank())].parameters


def _touch_libraries(context: RankContext, between_stages: Iterable[dist.ProcessGroup]) -> None:
    """Let libraries and connections make their fixed buffers, which are not the plan's memory.

    Groups connect here, in one order on all ranks: nccl does at the first message, for which both sides then wait.
    """
    square = torch.ones(128, 128, device=context.device)
    torch.relu(square @ square).sum()
    for group in (*filter(None, context.groups), *between_stages):
        dist.all_reduce(torch.ones(128, device=context.device), group=group)


def _groups(lowered: LoweredStages, timeout: timedelta) -> tuple[dist.ProcessGroup | None, ...]:
    """Make the groups of every mesh axis and of tied parameters; returns this rank's, None where it is in none."""
    return make_groups(members(lowered), timeout)


def _neighbours(lowered: LoweredStages, device: torch.device, timeout: timedelta) -> Neighbours:
    """Ranks of the other stages at this rank's place in the mesh, and groups to reach them where tags do not count."""
    rank, stride, schedule = dist.get_rank(), lowered.pipeline_stride, lowered.schedule
    base = rank - lowered.pipeline_rank(rank) * stride
    ranks_of_stages = [int(pipeline) * stride for pipeline in schedule.stage_rank]
    groups = {}
    for stage in range(schedule.stages) if device.type != "cpu" else ():
        for direction, there in enumerate((stage + 1, stage - 1)):
            if there in range(schedule.stages) and ranks_of_stages[stage] != ranks_of_stages[there]:
                pairs = [[one + ranks_of_stages[s] for s in (stage, there)] for one in lowered.mesh.ranks()]
                mine = own_group([sorted(pair) for pair in pairs], timeout)
                if mine is not None:
                    groups[direction, stage] = mine
    return Neighbours(rank=rank, rank_of=tuple(base + shift for shift in ranks_of_stages), groups=groups)


def _device(device_type: str, membership: Membership | None) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if device_type == "npu":
        load_npu()
    local_rank = int(os.environ["LOCAL_RANK"]) if membership is None else membership.local_rank
    device = torch.device(device_type, local_rank)
    getattr(torch, device_type).set_device(device)
    return device


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
