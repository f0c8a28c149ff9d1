"""Branch and bound over configurations: the best plans of the whole space, with a proof of how good they are.

Nodes are opened in the order of their bounds, from degrees and micro-batches (bounded by the work alone, then over all
orders of the axes at once, as if the neighbours along every axis were side by side) over orders of the axes (bounded by
all ways to run units: their time shared out evenly, then whole, then with states and what these leave room for, then
between boundary states) to storages of labels (bounded by what stands on all ranks, by time, then with the memory
limit), whose stages are then partitioned: cheap bounds come first. The search ends when no bound lies under the best
objective found and enough plans are there to choose from, or after `SOLVES` partitions
(`planner.search.configurations.agenda`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from planner.search.configurations.agenda import (
    ALIKE,
    BY_TURNS,
    IDEALISED,
    NAMED,
    NEAR,
    OPTIMISM,
    PROOF,
    SOLVES,
    TABLE_AGAIN,
    VERY_SHORT,
    WIDEST,
    Agenda,
    Depth,
    SearchNode,
    worth_widening,
)
from planner.search.configurations.bounds import (
    chained_bound,
    chains_s,
    even_bound,
    followed,
    least_memory,
    memory_bound,
    never_faster,
    passes_bound,
    standing_bytes,
    states_bounds,
    task_bound,
    time_bound,
    weight,
    whole_bound,
)
from planner.search.configurations.configuration import AXES
from planner.search.configurations.explored import Explored, Placed, Unfit, shape_of
from planner.search.configurations.least_states import LeastStates, least_states_of
from planner.search.configurations.space import Extent, bases, offloaded, orders, storages
from planner.search.configurations.step_model import Configuration, StepModel
from planner.search.exact.blocks import TooWideError
from planner.search.patience import Patience
from planner.search.stages.chain_bound import chain_bound, unlike
from planner.search.stages.fragments import WIDTH, FloatArray
from planner.search.stages.partition import lists_cuts, partition, proves_misfit
from planner.search.stages.task import MANY, PartitionTask, idealised, simplified, undominated
from planner.search.units.labels import StageTables
from simulator.errors import InputError

TablesOf = Callable[[Configuration], StageTables]
"""Makes the tables of a configuration's stage mesh and micro-batch; InputError where the network cannot take them."""


def explore(
    extent: Extent,
    model: StepModel,
    tables_of: TablesOf,
    *,
    sample_s: float = 0.0,
    wanted: int = 1,
    solves: int = SOLVES,
    incumbent_s: float = np.inf,
    until_found: bool = False,
    patience: Patience | None = None,
) -> Explored:
    """Search the space.

    Parameters
    ----------
    sample_s : float
        Bound on the device seconds of one sample (`planner.search.configurations.bounds.work_bound`).
    wanted : int
        Plans to find, counted with at most `PER_SHAPE` of one shape.
    incumbent_s : float
        Seconds of a plan that is known already: what cannot beat it need not be solved.
    solves : int
        Most partitions; tables and nodes are limited in proportion.
    until_found : bool
        Any plan will do.
    patience : Patience
        Asked between nodes whether the user wants an end.
    """
    search = _Search(extent, model, tables_of, sample_s, wanted, solves)
    search.best, search.until_found = incumbent_s, until_found
    search.patience = patience or search.patience
    return search.run()


class _Search(Agenda):
    def __init__(
        self, extent: Extent, model: StepModel, tables_of: TablesOf, sample_s: float, wanted: int, solves: int
    ) -> None:
        super().__init__(wanted, solves)
        self.extent, self.model, self.tables_of, self.sample_s = extent, model, tables_of, sample_s
        self.families: set[tuple[str, ...]] = set()
        self.too_wide: set[int] = set()
        self.moved: set[Configuration] = set()
        self.states: dict[tuple[int, ...], LeastStates | None] = {}
        self.stored: dict[Configuration, list[Configuration]] = {}
        self.standing: dict[tuple[object, ...], float] = {}
        self.misfits: list[tuple[float, Configuration]] = []

    def run(self) -> Explored:
        turns: Counter[tuple[int, int, int]] = Counter()
        for base in bases(self.extent):
            # Of equal bounds those of different stage meshes come by turns.
            turns[mesh := (base.context, base.expert, base.tensor)] += 1
            # All ranks but those of the data axis share the work of a sample, and each launches all its kernels.
            each = max(self.sample_s * base.micro_batch / (base.tensor * base.context), self.extent.launch_s)
            bound = even_bound(base, each)
            self.push(bound, SearchNode(Depth.BASE, base), hoped_s=bound * (1 + BY_TURNS * turns[mesh]))
        patience = self.patience
        try:
            while not self.spent() and (entry := self.following()) is not None:
                try:
                    with patience.breaking():
                        self._open(*entry)
                except KeyboardInterrupt:
                    self.push(*entry)
                    raise
                patience.found |= bool(self.result.found)
        except KeyboardInterrupt:
            self.result.interrupted = True
        self.result.found.sort(key=lambda placed: placed.objective_s)
        if not self.result.found:
            self._name_misfits()
        self.result.lower_bound_s = min([self.best, *self.unproven, *self.waiting()])
        return self.result

    def _hopeless(self, bound: float, task: PartitionTask) -> bool:
        """Whether a partition would neither raise the bound over the space nor, by experience, be the best.

        Where turns may even out, bounds of several chunks a rank lie far below what is found.
        """
        if task.chunks == 1 or not self.unproven or not min(self.unproven) <= bound < self.best:
            return False
        return bound * self.nearest() >= self.best

    def _open(self, bound: float, node: SearchNode) -> None:
        self.result.opened += 1
        if node.stage is Depth.ORDER:
            self._open_order(bound, node)
        elif node.stage is Depth.SOLVED or node.stage is Depth.BOUNDED:
            with self.result.timed("partition"):
                self._solve(bound, node)
        elif node.stage is Depth.ORDERS:
            for other in node.others:
                self.push(bound, SearchNode(Depth.ORDER, other))
        else:
            if node.stage is Depth.WHOLE:
                with self.result.timed("cost_tables"):
                    len(self._table(node.configuration).units)  # labels are made when they are first asked for
                    self.labelled[node.key] = weight(node.configuration)
            with self.result.timed("bounds"):
                self._bound(bound, node)

    def _bound(self, bound: float, node: SearchNode) -> None:
        if node.stage is Depth.BASE:
            self._any_order(bound, node.configuration)
        elif node.stage is Depth.ANY_ORDER:
            self._states_in_any_order(bound, node)
        elif node.stage is Depth.EVEN:
            self._units(bound, node.configuration)
        elif node.stage is Depth.STATES:
            self._states(bound, node.configuration)
        elif node.stage is Depth.CHAINED:
            self._chain(bound, node)
        elif node.stage is Depth.WHOLE:
            self._store(bound, self._storages(node.configuration), node.least_s)
        elif node.stage is Depth.STORAGE:
            self._time(bound, node)
        else:
            self._limit(bound, node)

    def _any_order(self, bound: float, base: Configuration) -> None:
        """Bound all orders of the axes of a base at once, as if the neighbours along every axis were side by side."""
        ordered, beside = orders(self.extent, base), replace(base, order=())
        if all(never_faster(self.extent.hardware, beside, order, AXES[1:]) for order in ordered):
            if (tables := self._opened(beside)) is None:
                if self.number.of(beside) in self.too_wide:
                    self.unproven.append(bound)
                return
            least = max(bound, whole_bound(self.extent, self.model, tables, beside))
            self.push(least, SearchNode(Depth.ANY_ORDER, beside, others=tuple(ordered)))
        else:
            usual, *others = ordered
            self.push(bound, SearchNode(Depth.ORDER, usual, others=tuple(others)))

    def _states_in_any_order(self, bound: float, node: SearchNode) -> None:
        """Bound all orders by what states take as well; where they may still be the best, the usual one comes first."""
        beside, tables = node.configuration, self._table(node.configuration)
        if beside not in self.stored:
            # Which ranks may share states depends on how far they are apart.
            apart = {order.stride("data"): order for order in node.others}.values()
            ways = (way for order in apart for way in storages(self.extent, order))
            self.stored[beside] = list(dict.fromkeys(replace(way, order=()) for way in ways))
        if (states := self._least_states(tables, beside)) is not None:
            least = float(states_bounds(self.extent, self.model, tables, beside, states, bound).min())
            usual, *others = node.others
            self.push(least, SearchNode(Depth.ORDER, usual, others=tuple(others)))

    def _open_order(self, bound: float, node: SearchNode) -> None:
        """Table an order's stage mesh and bound it by the work of all units; other orders wait for what it says."""
        placed = node.configuration
        if (tables := self._opened(placed)) is None:
            if self.number.of(placed) in self.too_wide:
                self.unproven.append(bound)
            return
        with self.result.timed("bounds"):
            least = max(bound, whole_bound(self.extent, self.model, tables, placed))
            self.push(least, SearchNode(Depth.EVEN, placed))
            wait_s = least / OPTIMISM[Depth.ORDER]
            slower = [o for o in node.others if never_faster(self.extent.hardware, placed, o)]
            for other in (o for o in node.others if o not in slower):
                even = max(bound, whole_bound(self.extent, self.model, tables, other, other=True))
                self.push(even, SearchNode(Depth.ORDER, other), hoped_s=max(even, wait_s))
            if slower:
                # Those in which no pass is faster wait together; without sums over the batch they have one bound.
                count = len(slower) if tables.decisions.sums_over_batch else 1
                even = max(bound, min(whole_bound(self.extent, self.model, tables, other) for other in slower[:count]))
                self.push(even, SearchNode(Depth.ORDERS, placed, others=tuple(slower)), hoped_s=max(even, wait_s))

    def _opened(self, placed: Configuration) -> StageTables | None:
        """The tables of a configuration's stage mesh; None where the network cannot take them."""
        key = self.number.of(placed)
        with self.result.timed("cost_tables"):
            if key not in self.made:
                self.made[key] = self._tables(placed)
            tables = self.made[key]
            try:
                if tables is not None:
                    _ = tables.least  # worked out when it is first asked for
            except TooWideError as error:
                self.result.dense = str(error)
                self.too_wide.add(key)
                self.made[key] = tables = None
        return tables

    def _units(self, bound: float, placed: Configuration) -> None:
        """Bound an order by the passes of units shared out whole; where they will not be chained, with states."""
        tables, least_s = self._table(placed), None
        if not unlike(tables.counts, placed.pipeline * placed.virtual):
            if (states := self._least_states(tables, placed)) is None:
                return
            least_s = states.once_s.min(axis=0)
        elif sum(tables.counts) <= VERY_SHORT:
            # To bound its chain takes no longer and says more.
            self._states(bound, placed)
            return
        least = passes_bound(self.extent, self.model, tables, placed, least_s)
        self.push(max(bound, least), SearchNode(Depth.STATES, placed))

    def _states(self, bound: float, placed: Configuration) -> None:
        """Bound it by what states take, and passes may keep, in each storage that has room."""
        tables = self._table(placed)
        if (states := self._least_states(tables, placed)) is not None:
            behind = Depth.CHAINED if unlike(tables.counts, placed.pipeline * placed.virtual) else Depth.WHOLE
            least_s = states_bounds(self.extent, self.model, tables, placed, states, bound)
            self.push(float(least_s.min()), SearchNode(behind, placed, least_s=least_s))

    def _chain(self, bound: float, node: SearchNode) -> None:
        """Bound each storage by passes between the boundary states of units."""
        placed, tables = node.configuration, self._table(node.configuration)
        states = self._least_states(tables, placed)
        assert states is not None  # it has been bounded with them
        assert node.least_s is not None
        chained_s = chained_bound(self.extent, self.model, tables, placed, states) + states.last_s(self.model, placed)
        least_s = np.maximum(node.least_s, chained_s)
        self.push(max(bound, float(least_s.min())), SearchNode(Depth.WHOLE, placed, least_s=least_s))

    def _least_states(self, tables: StageTables, placed: Configuration) -> LeastStates | None:
        """What states take at least in each storage that all ranks together have room for; None where there is none."""
        c = placed
        key = (self.number.of(c), c.order == (), c.pipeline, c.data, c.stride("data"), c.micro_batches, c.in_a_row)
        if key not in self.states:
            states = least_states_of(self.extent, self.model, tables, self._storages(c))
            if states is not None and not states.fits.all():
                if not states.fits.any():
                    each = (states.standing_bytes / c.pipeline).tolist()
                    self.misfits += zip(each, states.stored, strict=True)
                states = states.take(states.fits) if states.fits.any() else None
            self.states[key] = states
        return self.states[key]

    def _storages(self, placed: Configuration) -> list[Configuration]:
        """The same with every way to store states; asked for before and after the best of them is bounded."""
        if placed not in self.stored:
            self.stored[placed] = storages(self.extent, placed)
        return self.stored[placed]

    def _tables(self, placed: Configuration) -> StageTables | None:
        try:
            self.result.tables += 1
            axes = tuple(axis.name for axis in placed.inner_mesh().axes)
            self.table_work += TABLE_AGAIN if axes in self.families else weight(placed)
            self.families.add(axes)
            return self.tables_of(placed)
        except InputError as error:
            self.result.refused = self.result.refused or str(error)
            return None

    def _table(self, placed: Configuration) -> StageTables:
        tables = self.made[self.number.of(placed)]
        assert tables is not None  # its order was opened
        return tables

    def _store(self, bound: float, ways: list[Configuration], least_s: FloatArray | None = None) -> None:
        """Leave storages out where all ranks together do not hold what stands through the step."""
        if not ways:
            return  # pins leave none
        tables, siblings = self._table(ways[0]), list[tuple[float, SearchNode]]()
        states = self._least_states(tables, ways[0])
        assert states is not None  # it has been bounded with them
        if least_s is None:
            least_s = states_bounds(self.extent, self.model, tables, ways[0], states)
        for c, held in zip(ways, self._standing(ways), strict=True):
            if held > c.pipeline * self.model.room_bytes(c):
                self.result.opened += 1
                self.misfits.append((held / c.pipeline, c))
                self._offload(bound, c)
                continue
            gain_s = states.gain_on_host_s(c, self.model)
            least = max(bound, float(least_s[states.place(c)]) - gain_s)
            siblings.append((least, SearchNode(Depth.STORAGE, c, gain_s=gain_s, siblings=siblings)))
            # All that may be the best are timed before one is solved.
            self.push(*siblings[-1], hoped_s=bound)

    def _standing(self, ways: list[Configuration]) -> list[float]:
        """Bytes that stand through the step on all ranks together."""
        number = self.number.of(ways[0])
        keys = {c: (number, c.data, c.optimizer_sharding, c.shard_size, c.offload) for c in ways}
        new = [c for c in ways if keys[c] not in self.standing]
        if new:
            found = standing_bytes(self.model, self._table(new[0]), new)
            self.standing.update((keys[c], held) for c, held in zip(new, found, strict=True))
        return [self.standing[keys[c]] for c in ways]

    def _time(self, bound: float, node: SearchNode) -> None:
        """Bound a storage by time alone."""
        stored = node.configuration
        if node.task is None:
            self._time_together(bound, node)
        task, timed = node.task, bound
        assert task is not None  # it was just timed
        chained = followed(task)
        if chained and bound < self.best * NEAR:
            timed = max(timed, chain_bound(task) if node.chain_s is None else node.chain_s)
        elif task.pieces > 1 or not chained:
            timed = max(timed, task_bound(task))
        self.push(timed, SearchNode(Depth.TIMED, stored, task))
        if node.gain_s:
            self._offload(max(bound, timed - node.gain_s), stored)

    def _time_together(self, bound: float, node: SearchNode) -> None:
        """Make the task of a storage, and those of siblings that will be timed as well: near it, or maybe the best."""
        limit_s = max(self.best * (1 - PROOF), bound * ALIKE)
        siblings = (one for least, one in node.siblings if least < limit_s and one.task is None)
        nodes = [node, *(one for one in siblings if one is not node)]
        tasks = self.model.tasks(self._table(node.configuration), [one.configuration for one in nodes])
        chains = chains_s(tasks) if bound < self.best * NEAR else [None] * len(tasks)
        for one, task, chain_s in zip(nodes, tasks, chains, strict=True):
            one.task, one.chain_s = task, chain_s

    def _limit(self, bound: float, node: SearchNode) -> None:
        """Bound it with the memory limit."""
        assert node.task is not None  # timed nodes have one
        task, roomy = node.task, node.task.roomy
        # Where no limit binds, one rank's time is bounded already.
        limited = bound if roomy and task.pieces == 1 and followed(task) else max(bound, memory_bound(task))
        self.work["bounds"] += 1
        known = task.chunks > 1 or task.pieces == 1 or unlike(task.counts, task.pieces)
        near = limited < self.best * (1 - PROOF)
        if near and not known and max(len(kind) for kind in task.kinds) > MANY:
            # Where not all ways will be partitioned, units that cannot be divided bound all the same.
            self.work["bounds"] += IDEALISED
            ideal = partition(idealised(node.task))
            limited = max(limited, np.inf if ideal is None else ideal.lower_bound_s)
        if limited > bound * (1 + PROOF) and not roomy:
            self._offload(bound, node.configuration)
        if np.isinf(limited):
            self._misfit(node.configuration, node.task)
        else:
            # All ways of very few units are soon tried.
            width = WIDEST if task.units <= VERY_SHORT and task.chunks == 1 < task.pieces else WIDTH
            self.push(limited, SearchNode(Depth.BOUNDED, node.configuration, task, width=width))

    def _solve(self, bound: float, node: SearchNode) -> None:
        """Partition a configuration, or partition it again with more ways where its proof was too weak."""
        tables, task = self._table(node.configuration), node.task
        assert task is not None  # bounded nodes have one
        if self.late() or (node.placed is None and self._hopeless(bound, task)):
            self.unproven.append(bound)
            return
        task = undominated(task)
        few = task if node.width > WIDTH or lists_cuts(task) else simplified(task)
        if few is not task and not worth_widening(task, node.width) and time_bound(few) > self.best * NEAR:
            # The few ways that are tried take too long for an alternative: to partition them proves nothing.
            self.unproven.append(bound)
            return
        self.result.solved += 1
        self.work["partition"] += len(task.kinds)
        found = partition(few, width=node.width, enough_s=self.best)
        if node.placed is None and (found is None or found.objective_s > bound * (1 + PROOF)) and not task.roomy:
            self._offload(bound, node.configuration)
        if found is None:
            if node.placed is None and not proves_misfit(task, few, node.width):
                if worth_widening(task, node.width):
                    self.push(bound, replace(node, stage=Depth.SOLVED, width=node.width * 8))
                    return
                self.unproven.append(bound)
            if node.placed is None:
                self._misfit(node.configuration, task)
            return
        # What holds for few ways of each unit says nothing of those that were left out.
        proven = found.lower_bound_s if few is task else 0.0
        found = replace(found, lower_bound_s=min(max(bound, proven), found.objective_s))
        placed = Placed(
            configuration=node.configuration, tables=tables, task=task, partition=found, pins=self.extent.pins
        )
        if node.placed is None:
            self.shapes[shape_of(node.configuration)] += 1
            if task.chunks > 1 and bound > 0:
                self.apart.append(placed.objective_s / bound)
        elif node.placed.objective_s < placed.objective_s:
            better = replace(node.placed.partition, lower_bound_s=found.lower_bound_s)
            placed = replace(placed, partition=better)
        self.result.found = [*(p for p in self.result.found if p is not node.placed), placed]
        self.best = min(self.best, placed.objective_s)
        if placed.partition.lower_bound_s < placed.objective_s * (1 - PROOF):
            if worth_widening(task, node.width) and not (few is task and found.exact):
                again = SearchNode(Depth.SOLVED, node.configuration, task, placed, node.width * 8)
                self.push(placed.partition.lower_bound_s, again)
            else:
                self.unproven.append(placed.partition.lower_bound_s)

    def _offload(self, bound: float, stored: Configuration) -> None:
        """Where memory binds, or the host may update them sooner, states may move to it."""
        other = offloaded(self.extent, stored)
        if other is not None and other not in self.moved:
            self.moved.add(other)
            self._store(bound, [other])

    def _name_misfits(self) -> None:
        """Say which rank is fullest in those configurations without room whose ranks need least on average."""
        for _, stored in sorted(self.misfits, key=lambda misfit: misfit[0])[:NAMED]:
            self._misfit(stored)

    def _misfit(self, configuration: Configuration, task: PartitionTask | None = None) -> None:
        model, tables = self.model, self._table(configuration)

        def found() -> tuple[int, float]:
            return least_memory(task or model.task(tables, configuration))

        self.result.unfit.append(Unfit(configuration=configuration, found=found))
