"""Meshes and micro-batches around the operator search: every factorisation, as far as it can pay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from planner.cost.work import Optimizer
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.plans.hints import Hint
from planner.plans.pins import Pins
from planner.plans.plan import MOST_MICRO_BATCHES
from planner.search import dynamic_programming, recursive_programming, sharding_propagation
from planner.search.configurations.pin_checks import check_pins
from planner.search.configurations.space import Extent
from planner.search.dynamic_programming import fastest, least_bytes, once_s
from planner.search.problem.costs import MeshCosts
from planner.search.problem.hints import FREE_AXES, check_cuts, constrained, rest_by_data, targets
from planner.search.problem.parts import Parts
from planner.search.problem.problem import Problem, Setting, Solution
from planner.search.problem.variables import Decisions
from planner.sharding.placement import Mesh, MeshAxis
from simulator.checks import divisors
from simulator.errors import ContextError, InputError
from simulator.hardware import Hardware

ROOMY = 0.5
"""A plan that takes less of the limit than this gains nothing from smaller micro-batches."""

NEAR_ENOUGH = 1.05
"""Where what nothing hides takes this many times the step of a plan found elsewhere, operators are not searched."""

ALTERNATIVE = 1.25
"""A mesh whose bound is this many times the best plan is no alternative."""

PAIRS = 3_000_000
"""Pairs of labels that prove or improve the best plans of one request, about half a second's."""

HOPELESS = 3.0
"""The same while there are few plans."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Everything that is fixed for all candidates of one request; ``graph`` is at batch 1.

    With ``rest_by_data`` operators without a hint shard the batch (`planner.search.problem.hints`).
    """

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
    rest_by_data: bool = False

    def solve(self, problem: Problem, limit_bytes: float) -> tuple[Solution | None, tuple[str, ...]]:
        """Search one problem in the space's mode; messages are those about hints."""
        if self.search_mode == "sharding_propagation":
            done = sharding_propagation.propagate(problem, limit_bytes, self.hints)
            return done.solution, done.messages
        if self.search_mode == "recursive_programming":
            return recursive_programming.solve(problem, limit_bytes), ()
        return dynamic_programming.solve(problem, limit_bytes, pairs=0), ()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What another search has found: steps of plans, and the least seconds of both passes on a mesh of data × tensor.

    Beside these the seconds of sums over the batch for which they wait. Where nothing is known of a mesh both are 0,
    unless it is asked to be found out and can be.
    """

    steps_s: Sequence[float] = ()
    passes_s: Callable[[int, int, bool], tuple[float, float]] = lambda data, tensor, find: (0.0, 0.0)


NOTHING_KNOWN = Known()


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
    pairs = [(d, devices // d) for d in divisors(devices)]
    pinned = [(d, t) for d, t in pairs if pins.dp in (None, d) and pins.tp in (None, t)]
    pinned = that_can_cut(pinned, space.hints, devices, rest_by_data=space.rest_by_data)
    if pins.storage == "sharded":
        # Parameters are sharded along the data axis, so there has to be one.
        pinned = [(d, t) for d, t in pinned if d > 1] or pinned
    size = (pins.micro_batch or pins.copies or 1) * (pins.micro_batches or 1)
    exact = bool(pins.micro_batch and pins.micro_batches)
    fitting = [(d, t) for d, t in pinned if batch % (d * size) == 0 and (not exact or batch == d * size)]
    if not fitting:
        alone = replace(pins, pp=1, cp=1, ep=1)
        check_pins(Extent(hardware=space.hardware, devices=devices, global_batch=batch, pins=alone, units=1))
        meshes = " or ".join(f"dp={data}" for data, _ in pinned)
        raise InputError(f"global batch {batch} does not divide over {meshes}, which strategies and pins leave")
    return fitting


def that_can_cut(
    pairs: Sequence[tuple[int, int]], hints: Sequence[Hint], devices: int, *, rest_by_data: bool = False
) -> list[tuple[int, int]]:
    """Meshes whose axes can cut tensors as hints have it.

    Parameters
    ----------
    pairs
        Data and tensor degrees.
    devices
        Devices of a stage, for the message.
    rest_by_data
        Of these the data axis alone, where it suffices for all hints and for a batch cut everywhere else.

    Raises
    ------
    ContextError
        No mesh can.
    """
    cuts = [hint for hint in hints if hint.cuts is not None]
    found = [(d, t) for d, t in pairs if all(hint.cuts.fits_mesh((d, t)) for hint in cuts if hint.cuts)]
    if pairs and not found:
        apart = next((h for h in cuts if h.cuts and not any(h.cuts.fits_mesh(pair) for pair in pairs)), None)
        asked = str(apart) if apart is not None else " and ".join(str(hint) for hint in cuts)
        there = " or ".join(f"{data} × {tensor}" for data, tensor in pairs)
        raise ContextError(
            f"strategy {asked} on {devices} devices: no mesh of two axes, data × tensor, cuts so"
            f"{'' if apart is not None else ' for all of them at once'}; with the parallel mode and the pins there is "
            f"{there}: use numbers of parts that are 1, one of the two, or their product"
        )
    only = [pair for pair in found if pair[1] == 1]
    return only if rest_by_data and only and len(cuts) == len(hints) else found


def explore(
    space: Space, limit_bytes: float, *, known: Known = NOTHING_KNOWN, wanted: int | None = None
) -> Iterator[Found | Misfit]:
    """Solve the meshes, best bound first, at the largest micro-batch that fits and at the next smaller one.

    A mesh's bound is its fastest plan without a memory limit, in one micro-batch: more micro-batches
    or less memory never make the objective smaller. Meshes whose bound is over `HOPELESS` times the best
    known plan, or over `ALTERNATIVE` times where `wanted` plans are known, are left out. So are those that take
    `NEAR_ENOUGH` times a plan found elsewhere with nothing but what passes cannot hide: the least passes (`_left` of
    them), the operators alone, their kernels with the sums that these wait for, and their fastest plan but for messages
    once a step. Plans come with what a price of memory proves of them (`closed` proves more).
    """
    waiting: list[tuple[float, int, int, _Shape]] = []
    graphs: dict[int, OperatorGraph] = {}
    refused: InputError | None = None
    possible = False
    steps = [*known.steps_s]
    most = NEAR_ENOUGH * min(steps, default=float("inf"))
    shapes = {(data, tensor): _Shape(space, data, tensor, graphs) for data, tensor in meshes(space)}
    passes = _passes(shapes, known, most)
    for (data, tensor), shape in shapes.items():
        if sum(passes[data, tensor]) > most:
            possible = True
            continue
        try:
            work = shape.work_s
            if space.hints and space.search_mode == "sharding_propagation":
                check_cuts(shape.problem(shape.counts[0]).parts, space.hints)
        except ContextError as error:
            # Another mesh may be able to.
            refused = error
            continue
        possible = True
        if work <= most and shape.waiting_s(passes[data, tensor][1]) <= most:
            heappush(waiting, (work, tensor, data, shape))
    if refused is not None and not possible:
        raise refused
    while waiting:
        bound, tensor, data, shape = heappop(waiting)
        near = ALTERNATIVE if wanted is not None and len(steps) >= wanted else HOPELESS
        if bound > near * min(steps, default=float("inf")):
            break
        if shape.free is None:
            problem = shape.problem(shape.counts[0])
            shape.free = space.fastest(problem)
            if shape.free is not None and (not known.steps_s or _unhidden_s(problem, shape.free) <= most):
                heappush(waiting, (shape.free.objective_s, tensor, data, shape))
            continue
        for item in shape.solved(limit_bytes):
            if isinstance(item, Found):
                steps.append(item.solution.objective_s)
            yield item


def _unhidden_s(problem: Problem, solution: Solution) -> float:
    """Seconds of a plan but for its messages once a step."""
    return solution.objective_s - once_s(problem, solution)


def _passes(
    shapes: Mapping[tuple[int, int], _Shape], known: Known, most: float
) -> dict[tuple[int, int], tuple[float, float]]:
    """Least seconds of passes on each mesh, of which free strategies leave a part, and of the sums that they wait for.

    What is not known is found out where the mesh with next more data-parallel ranks takes over `most`.
    """
    found = {mesh: known.passes_s(*mesh, False) for mesh in shapes}
    if all(sum(each) <= most for each in found.values()):
        return found  # whatever is left of them
    left, more = _left(shapes, known), 0.0
    for mesh in sorted(shapes, reverse=True):
        passes, waited = known.passes_s(*mesh, more > most)
        found[mesh] = left * passes, waited
        more = sum(found[mesh])
    return found


def _left(shapes: Mapping[tuple[int, int], _Shape], known: Known) -> float:
    """What free strategies along the data axis leave of passes that cut the batch alone, on the mesh with most ranks.

    Where they leave little, such as of passes over tables of which each rank could hold a part, such passes say little.
    """
    mesh = max(shapes)
    passes, _ = known.passes_s(*mesh, False)
    try:
        return min(1.0, shapes[mesh].work_s / passes) if passes else 1.0
    except ContextError:
        return 1.0


def closed(space: Space, found: Sequence[Found], limit_bytes: float) -> list[Found]:
    """Plans by objective; what labels still prove or improve of those that may be the best is looked for, best first.

    `PAIRS` pairs of labels are looked at for all of them together.
    """
    ranked = sorted(found, key=lambda item: item.solution.objective_s)
    room = PAIRS
    for number, item in enumerate(ranked):
        best = min(other.solution.objective_s for other in ranked)
        if space.search_mode != "dynamic_programming" or room <= 0 or item.solution.lower_bound_s > best:
            continue
        solution, looked_at = dynamic_programming.closed(item.problem, item.solution, limit_bytes, pairs=room)
        room -= looked_at
        ranked[number] = replace(item, solution=solution)
    return sorted(ranked, key=lambda item: item.solution.objective_s)


class _Shape:
    """A mesh with the numbers of micro-batches it may take, and the problems made of them."""

    def __init__(self, space: Space, data: int, tensor: int, graphs: dict[int, OperatorGraph] | None = None) -> None:
        self.space = space
        self.graphs = {} if graphs is None else graphs
        """The graph at each number of micro-batches; meshes may share them."""
        self.costs = MeshCosts(space.hardware, make_mesh(data, tensor), space.bucket_bytes)
        self.counts = _micro_batch_counts(space, data)
        self.free: Solution | None = None
        self._made: dict[int, Problem] = {}
        self._parts: dict[int, Parts] = {}

    def parts(self, count: int) -> Parts:
        """What states of operators take at so many micro-batches."""
        if count not in self._parts:
            if count not in self.graphs:
                self.graphs[count] = at_batch(self.space.graph, self.space.global_batch // count)
            setting = _setting(self.space, self.costs, count)
            self._parts[count] = Parts(self.graphs[count], self.space.decisions, setting)
        return self._parts[count]

    def problem(self, count: int) -> Problem:
        """The operator search at so many micro-batches."""
        if count not in self._made:
            self._made[count] = _problem(self.space, self.parts(count))
        return self._made[count]

    @property
    def work_s(self) -> float:
        """Seconds that its operators take at least, nothing sent between them."""
        return self.problem(self.counts[0]).least_work_s

    def waiting_s(self, sums_s: float) -> float:
        """Seconds that its kernels take at least, which wait so long for sums over the batch; 0 where they do not."""
        return self.problem(self.counts[0]).least_kernels_s + sums_s if sums_s else 0.0

    def solved(self, limit: float) -> Iterator[Found | Misfit]:
        """Plans at the first number of micro-batches that fits and at the next."""
        assert self.free is not None  # its bound came before
        first: int | Misfit = 0
        if self.free.memory_bytes > limit:
            first = self._first_fitting(limit)
        if isinstance(first, Misfit):
            yield first
            return
        for count in self.counts[first : first + 2]:
            problem = self.problem(count)
            solution, messages = self.space.solve(problem, limit)
            if solution is not None:
                yield Found(
                    mesh=self.costs.mesh, micro_batches=count, problem=problem, solution=solution, messages=messages
                )
                if solution.memory_bytes < ROOMY * limit:
                    break

    def _first_fitting(self, limit: float) -> int | Misfit:
        """Position of the smallest number of micro-batches whose smallest plan fits.

        A plan's bytes are a constant and a part that grows with the micro-batch, so that the least bytes of any plan
        are concave in the micro-batch: a micro-batch of the share x of one that takes B bytes at least takes x B
        at least, and those over the limit by this alone are not looked at.
        """
        position = 0
        while True:
            count = self.counts[position]
            needed = least_bytes(self.problem(count))
            if needed <= limit:
                return position
            if position == len(self.counts) - 1:
                return Misfit(mesh=self.costs.mesh, micro_batches=count, memory_bytes=needed)
            enough = (n for n, c in enumerate(self.counts) if n > position and c * limit >= count * needed)
            position = next(enough, len(self.counts) - 1)


def _micro_batch_counts(space: Space, data: int) -> list[int]:
    """Numbers of micro-batches to try, ascending: divisors of the batch per data rank, about doubling."""
    per_rank = space.global_batch // data
    if space.pins.micro_batches:
        return [space.pins.micro_batches]
    if space.pins.micro_batch:
        return [per_rank // space.pins.micro_batch]
    most = per_rank // (space.pins.copies or 1)
    counts = [1]
    for count in divisors(most)[1:]:
        if count <= MOST_MICRO_BATCHES and (count >= 2 * counts[-1] or count == most):
            counts.append(count)
    return counts


def _setting(space: Space, costs: MeshCosts, count: int) -> Setting:
    return Setting(
        costs=costs,
        micro_batches=count,
        optimizer=space.optimizer,
        storage=space.pins.storage,
        batch_only=space.pins.batch_only,
        sharded_gradients=space.pins.optimizer_sharding == "zero2",
        free_axes=FREE_AXES if space.rest_by_data or any(hint.cuts for hint in space.hints) else frozenset(),
    )


def _problem(space: Space, parts: Parts) -> Problem:
    problem = Problem(parts.graph, space.decisions, parts.setting, parts)
    if space.rest_by_data:
        problem = rest_by_data(problem, targets(problem.parts, space.hints).keys())
    # Propagation settles contradictions between hints itself.
    free = not space.hints or space.search_mode == "sharding_propagation"
    return problem if free else constrained(problem, space.hints)
