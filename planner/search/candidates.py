"""Meshes and micro-batches around the operator search: every factorisation, as far as it can pay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.request import Pins
from planner.search import dynamic_programming, recursive_programming, sharding_propagation
from planner.search.dynamic_programming import fastest, smallest
from planner.search.problem.costs import MeshCosts
from planner.search.problem.hints import Hint, constrained
from planner.search.problem.problem import Problem, Setting
from planner.search.problem.solution import Solution
from planner.search.problem.variables import Decisions
from planner.sharding.placement import Mesh, MeshAxis
from planner.work import Optimizer
from simulator.errors import InputError
from simulator.hardware import Hardware

ROOMY = 0.5
"""A plan that takes less of the limit than this gains nothing from smaller micro-batches."""

NEAR_ENOUGH = 1.25
"""A mesh on which the work alone takes this many times a known plan's step is no alternative."""

HOPELESS = 3.0
"""A mesh whose bound is this many times the best plan is no alternative worth solving."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Everything that is fixed for all candidates of one request; ``graph`` is at batch 1."""

    graph: OperatorGraph
    decisions: Decisions
    hardware: Hardware
    devices: int
    global_batch: int
    optimizer: Optimizer
    pins: Pins
    bucket_bytes: int
    search_mode: str = "dynamic_programming"
    hints: tuple[Hint, ...] = ()

    def solve(self, problem: Problem, limit_bytes: float) -> tuple[Solution | None, tuple[str, ...]]:
        """Search one problem in the space's mode; messages are those about hints."""
        if self.search_mode == "sharding_propagation":
            done = sharding_propagation.propagate(problem, limit_bytes, self.hints)
            return done.solution, done.messages
        mode = recursive_programming if self.search_mode == "recursive_programming" else dynamic_programming
        return mode.solve(problem, limit_bytes), ()

    def fastest(self, problem: Problem) -> Solution | None:
        """The plan of one problem without a memory limit."""
        return fastest(problem) if self.search_mode == "dynamic_programming" else self.solve(problem, float("inf"))[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A solved mesh and number of micro-batches."""

    mesh: Mesh
    micro_batches: int
    problem: Problem
    solution: Solution
    messages: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A mesh on which nothing fits, and the least memory it takes."""

    mesh: Mesh
    micro_batches: int
    memory_bytes: float


def make_mesh(data: int, tensor: int) -> Mesh:
    """Data axis outermost, tensor axis on neighbouring ranks; axes of one rank are left out.

    >>> make_mesh(4, 1).axes
    (MeshAxis(name='data', size=4),)
    """
    return Mesh(tuple(MeshAxis(n, s) for n, s in (("data", data), ("tensor", tensor)) if s > 1))


def meshes(space: Space) -> list[tuple[int, int]]:
    """Pairs (data, tensor) with the right product, that honour the pins and divide the batch.

    Raises
    ------
    InputError
        If the pins contradict the device count, or no data degree divides the batch.
    """
    devices, pins, batch = space.devices, space.pins, space.global_batch
    pairs = [(d, devices // d) for d in range(1, devices + 1) if devices % d == 0]
    pinned = [(d, t) for d, t in pairs if pins.dp in (None, d) and pins.tp in (None, t)]
    if pins.storage == "sharded":
        # Parameters are sharded along the data axis, so there has to be one.
        pinned = [(d, t) for d, t in pinned if d > 1] or pinned
    if not pinned:
        asked = " ".join(f"{n}={v}" for n, v in (("dp", pins.dp), ("tp", pins.tp)) if v is not None)
        raise InputError(f"pins {asked}: dp × tp must be the device count, {devices}; change the pins or --devices")
    size = pins.micro_batch or 1
    fitting = [(d, t) for d, t in pinned if batch % (d * size) == 0]
    if not fitting:
        least = min(d for d, _ in pinned) * size
        what = f"micro_batch={pins.micro_batch} × dp" if pins.micro_batch else "dp"
        near = max(least, round(batch / least) * least)
        raise InputError(
            f"global batch {batch} does not divide: {what} must divide it, and the smallest possible is {least}; "
            f"use --global-batch {near}, another device count or other pins"
        )
    return fitting


def explore(space: Space, limit_bytes: float, *, incumbent_s: float = float("inf")) -> Iterator[Found | Misfit]:
    """Solve the meshes, best bound first, at the largest micro-batch that fits and at the next smaller one.

    A mesh's bound is its fastest plan without a memory limit, in one micro-batch: more micro-batches
    or less memory never make the objective smaller. Meshes whose bound is over `HOPELESS` times the best
    known plan are left out. ``incumbent_s`` is the step of a plan found elsewhere: meshes whose operators alone take
    `NEAR_ENOUGH` times that are left out before their messages are timed, which a plan may hide behind work.
    """
    bounded = []
    for data, tensor in meshes(space):
        costs = MeshCosts(space.hardware, make_mesh(data, tensor), space.bucket_bytes)
        counts = _micro_batch_counts(space, data)
        problems: dict[int, Problem] = {}
        problem = _problem(space, costs, counts[0], problems)
        if problem.least_work_s > NEAR_ENOUGH * incumbent_s:
            continue
        free = space.fastest(problem)
        if free is not None:
            bounded.append((free.objective_s, tensor, costs, counts, problems, free))
    best = incumbent_s
    for bound, _, costs, counts, problems, free in sorted(bounded, key=lambda item: item[:2]):
        if bound > HOPELESS * best:
            break
        first: int | Misfit = 0
        if free.memory_bytes > limit_bytes:
            first = _first_fitting(space, costs, counts, limit_bytes, problems)
        if isinstance(first, Misfit):
            yield first
            continue
        for count in counts[first : first + 2]:
            problem = _problem(space, costs, count, problems)
            solution, messages = space.solve(problem, limit_bytes)
            if solution is not None:
                best = min(best, solution.objective_s)
                yield Found(mesh=costs.mesh, micro_batches=count, problem=problem, solution=solution, messages=messages)
                if solution.memory_bytes < ROOMY * limit_bytes:
                    break


def _micro_batch_counts(space: Space, data: int) -> list[int]:
    """Numbers of micro-batches to try, ascending: divisors of the batch per data rank, about doubling."""
    per_rank = space.global_batch // data
    if space.pins.micro_batch:
        return [per_rank // space.pins.micro_batch]
    counts = [1]
    for count in range(2, per_rank + 1):
        if per_rank % count == 0 and (count >= 2 * counts[-1] or count == per_rank):
            counts.append(count)
    return counts


def _problem(space: Space, costs: MeshCosts, count: int, made: dict[int, Problem]) -> Problem:
    if count in made:
        return made[count]
    setting = Setting(
        costs=costs,
        micro_batches=count,
        optimizer=space.optimizer,
        storage=space.pins.storage,
        batch_only=space.pins.batch_only,
        sharded_gradients=space.pins.optimizer_sharding == "zero2",
    )
    problem = Problem(at_batch(space.graph, space.global_batch // count), space.decisions, setting)
    # Propagation settles contradictions between hints itself.
    free = not space.hints or space.search_mode == "sharding_propagation"
    made[count] = problem if free else constrained(problem, space.hints)
    return made[count]


def _first_fitting(
    space: Space, costs: MeshCosts, counts: list[int], limit: float, made: dict[int, Problem]
) -> int | Misfit:
    """Position of the smallest number of micro-batches whose smallest plan fits, by bisection.

    The least memory falls as micro-batches get smaller.
    """
    needs: dict[int, float] = {}

    def need(position: int) -> float:
        if position not in needs:
            needs[position] = smallest(_problem(space, costs, counts[position], made)).memory_bytes
        return needs[position]

    if need(0) <= limit:
        return 0
    low, high = 0, len(counts) - 1
    if need(high) > limit:
        return Misfit(mesh=costs.mesh, micro_batches=counts[high], memory_bytes=need(high))
    while high - low > 1:
        middle = (low + high) // 2
        if need(middle) <= limit:
            high = middle
        else:
            low = middle
    return high
