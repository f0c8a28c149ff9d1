"""Stages whose meshes have the same axes: the tables of all of them are one set of sums, worked out many at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.search.exact.blocks import TooWideError
from planner.search.problem.amounts import AmountLedger, Amounts, MeshCase
from planner.search.problem.parts import Parts
from planner.search.problem.states import States
from planner.search.units.records import (
    PARTS,
    RECOMPUTE,
    Least,
    TableLayout,
    UnitFactors,
    UnitLabels,
    UnitWeights,
    rows_of,
)
from planner.search.units.stage_decisions import TENSOR, StageDecisions, axis_names
from planner.search.units.stage_shape import WIDEST, KeptParts, StageOptions, StageShape, divisibility, ways_of_masks
from planner.search.units.unit_terms import UnitTerms, unit_terms
from planner.sharding.inner_messages import inner_messages
from planner.sharding.placement import REPLICATE
from simulator.errors import InputError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
MOST_DIMS = 58
"""Tied parameters that tables of numpy have dims for, beside six more."""
MOST_NUMBERS = 4_000_000
"""Most entries of tables that are worked out at once."""
KEEPS_ALL = RECOMPUTE.index("none")
PASSES = UnitWeights()
PLAIN = UnitWeights(step=1 / 32)
"""A plain training step, for which tied parameters lie best."""


class Family:
    """All stages with some axes, whatever their sizes, links and micro-batch.

    Parameters
    ----------
    wide : Parts
        Their states are those of all stages of the family.
    options : StageOptions
    within : Family, optional
        One with further axes, of the same units: where nothing is cut along those, its sums are those of this one.
    """

    def __init__(
        self, source: StageDecisions, wide: Parts, options: StageOptions, within: Family | None = None
    ) -> None:
        self.source, self.wide, self.options = source, wide, options
        self.shape = StageShape(source, wide, StageOptions(modes=options.modes, sequence_parallel=None))
        self._variables = range(len(source.decisions.variables))
        self._first_state = np.cumsum([0, *(len(wide.states(v)) for v in self._variables)])
        self._kind_of = [wide.states(v).kind for v in self._variables]
        self._shapes: dict[tuple[object, ...], StageShape | None] = {}
        self._shape_of: dict[tuple[tuple[int, ...], int], StageShape | None] = {}
        self._factors: dict[tuple[int, int], Mapping[int, UnitFactors]] = {}
        self._tabled: dict[tuple[int, int], TableLayout] = {}
        self.labels: dict[tuple[int, int], tuple[UnitLabels, ...]] = {}
        self.elements: dict[int, FloatArray] = {}
        self.priced: dict[tuple[int, int], tuple[FloatArray, FloatArray]] = {}
        self._of_shape: dict[int, BoolArray] = {}
        self._inside_of: dict[int, BoolArray] = {}
        self._crossed: dict[int, list[tuple[IntArray, IntArray]]] = {}
        self._least: dict[tuple[int, int], Least] = {}
        self._values: OrderedDict[tuple[int, int], FloatArray] = OrderedDict()
        self._added: dict[tuple[int, ...], list[tuple[IntArray, IntArray]]] = {}
        self.terms, self.amounts = self._taken_down() if within is None else self._taken_from(within)
        self._join()

    def _taken_from(self, within: Family) -> tuple[Mapping[int, UnitTerms], Amounts]:
        """What the tables of all units add up, of a family with further axes along which nothing is done."""
        whole = within.whole_states
        if whole is None:
            return self._taken_down()
        return {n: terms.at(whole) for n, terms in within.terms.items()}, within.amounts

    def _taken_down(self) -> tuple[Mapping[int, UnitTerms], Amounts]:
        """List what the tables of all units add up.

        Where the batch alone is cut, and boundaries leave nothing open, what single states make up decides nothing.
        """
        ledger = AmountLedger(self.wide)
        models = {self.source.tabled(n): None for n in range(len(self.source.models))}
        closed = not self.source.shared and all(len(states) == 1 for states, _ in self.shape.classes)
        decided = not (self.wide.setting.batch_only and closed)
        terms = {n: unit_terms(self.source.models[n], ledger, decided=decided) for n in models}
        return terms, ledger.amounts()

    @cached_property
    def whole_states(self) -> Mapping[int, int] | None:
        """For each variable the state in which nothing is cut nor sent along any axis; None where one has none."""
        found: dict[int, int] = {}
        of_kind: dict[int, int | None] = {}
        for number in self._variables:
            states = self.wide.states(number)
            if states.kind not in of_kind:
                of_kind[states.kind] = _whole_state(states)
            if (state := of_kind[states.kind]) is None:
                return None
            found[number] = state
        return found

    def _join(self) -> None:
        """Put the sums of all units behind each other."""
        starts = np.cumsum([0, *(terms.entries for terms in self.terms.values())])
        self._starts = dict(zip(self.terms, starts.tolist(), strict=False))
        self.entries = int(starts[-1])
        parts = np.concatenate([terms.parts for terms in self.terms.values()])
        places = np.concatenate([terms.places + self._starts[n] for n, terms in self.terms.items()])
        numbers = self.amounts.numbers(np.concatenate([terms.amounts for terms in self.terms.values()]))
        order = np.argsort(parts * self.entries + places, kind="stable")
        self._parts, self._places, self._numbers = parts[order], places[order], numbers[order]
        self._forbidden = np.concatenate([terms.forbidden for terms in self.terms.values()])
        self._ends = np.concatenate([self._states_of(terms) for terms in self.terms.values()], axis=1)

    def _states_of(self, terms: UnitTerms) -> IntArray:
        """First and last state that each entry of a unit stands for, shape (2, entries)."""
        begins = self._first_state[np.array([(scope[0], scope[-1]) for scope in terms.scopes])]
        lasting = np.array([terms.sizes[scope[-1]] if len(scope) == 2 else 1 for scope in terms.scopes])
        starts = np.array(terms.starts)
        table = np.repeat(np.arange(len(starts)), np.diff(starts, append=terms.entries))
        first, last = np.divmod(np.arange(terms.entries) - starts[table], lasting[table])
        alone = np.array([len(scope) == 1 for scope in terms.scopes])[table]
        ends: IntArray = np.array([first, np.where(alone, first, last)]) + begins[table].T
        return ends

    # Shapes

    @cached_property
    def _kinds(self) -> dict[int, int]:
        """Place of the first state of each kind of variable."""
        found: dict[int, int] = {}
        place = 0
        for number in self._variables:
            kind = self.wide.states(number).kind
            if kind not in found:
                found[kind] = place
                place += len(self.wide.states(kind))
        return found

    @cached_property
    def _conditions(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        return divisibility(self.wide, self._kinds)

    def known_shape(self, case: MeshCase) -> StageShape:
        """Shape of a stage of the family."""
        shape = self.shape_of(case)
        assert shape is not None  # the family is the stage's
        return shape

    def shape_of(self, case: MeshCase) -> StageShape | None:
        """Shape of a stage; None where it has states that the family lacks.

        Raises
        ------
        InputError
            The sequence cannot be sharded as asked.
        """
        sizes = case.costs.mesh.sizes
        if (sizes, case.batch) not in self._shape_of:
            self._shape_of[sizes, case.batch] = self._find_shape(case)
        return self._shape_of[sizes, case.batch]

    def _find_shape(self, case: MeshCase) -> StageShape | None:
        sizes = case.costs.mesh.sizes
        places, extents, grows, masks = self._conditions
        before = self.wide.graph.batch_size
        extents = np.where(grows, extents // before * case.batch, extents)
        keep = np.ones(sum(len(self.wide.states(kind)) for kind in self._kinds), dtype=np.bool_)
        keep[places[extents % ways_of_masks(sizes)[masks] != 0]] = False
        key = (sizes, keep.tobytes())
        if key not in self._shapes:
            self._shapes[key] = self._shape(case, keep)
        return self._shapes[key]

    def _shape(self, case: MeshCase, keep: BoolArray) -> StageShape | None:
        of_kind = {
            kind: np.flatnonzero(keep[first : first + len(self.wide.states(kind))])
            for kind, first in self._kinds.items()
        }
        if not all(len(states) for states in of_kind.values()):
            return None
        setting = replace(self.wide.setting, costs=case.costs)
        return StageShape(self.source, KeptParts(self.wide, self.wide.graph, setting, of_kind), self.options)

    def _allowed(self, shape: StageShape) -> BoolArray:
        """Which of the family's states a stage may take, shape (states of all variables,)."""
        if id(shape) not in self._of_shape:
            self._of_shape[id(shape)] = self._find_allowed(shape)
        return self._of_shape[id(shape)]

    def _find_allowed(self, shape: StageShape) -> BoolArray:
        found, crosses = self._inside(shape).copy(), shape.crosses()
        for number in self._variables if shape.bars else crosses:
            allowed = ~shape.barred(number)
            found[self._first_state[number] + self._kept(shape, number)] = allowed & crosses.get(number, allowed)
        return found

    def _inside(self, shape: StageShape) -> BoolArray:
        """Which of the family's states a stage has, shape (states of all variables,)."""
        if id(shape) not in self._inside_of:
            of_kind = {kind: np.zeros(len(self.wide.states(kind)), dtype=np.bool_) for kind in self._kinds}
            for kind, inside in of_kind.items():
                inside[self._kept(shape, kind)] = True
            self._inside_of[id(shape)] = np.concatenate([of_kind[kind] for kind in self._kind_of])
        return self._inside_of[id(shape)]

    def _kept(self, shape: StageShape, number: int) -> IntArray:
        assert isinstance(shape.parts, KeptParts)  # all but the widest
        return shape.parts.kept[self._kind_of[number]]

    # Tables

    def parts(self, case: MeshCase) -> FloatArray:
        """Parts of the tables of all units, shape (entries, PARTS)."""
        known = self._values.pop(case.key, None)
        values = self.amounts.values([case])[0] if known is None else known
        places, numbers = self._in_order
        found = np.bincount(places, weights=values[numbers], minlength=self.entries * PARTS)
        return found.reshape(self.entries, PARTS).astype(np.float64, copy=False)

    @cached_property
    def _in_order(self) -> tuple[IntArray, IntArray]:
        """Entries of all parts, those of one entry behind each other, and what is added to each, as by `_rounds`."""
        rounds = self._rounds(tuple(range(PARTS)))
        places, numbers = (np.concatenate(column) for column in zip(*rounds, strict=True))
        return places % self.entries * PARTS + places // self.entries, numbers

    def _keep(self, cases: Sequence[MeshCase], values: FloatArray) -> None:
        """Keep the amounts of cases whose least passes are worked out, for their tables."""
        self._values.update((case.key, row.copy()) for case, row in zip(cases, values, strict=True))
        while self._values and len(self._values) * values.shape[1] > MOST_NUMBERS:
            self._values.popitem(last=False)

    def _summed(self, values: FloatArray, wanted: Sequence[int]) -> FloatArray:
        """Some parts of the tables of all units from amounts (cases, amounts), shape (wanted, entries, cases)."""
        found = np.zeros((len(wanted) * self.entries, len(values)))
        amounts = np.ascontiguousarray(values.T)
        for places, numbers in self._rounds(tuple(wanted)):
            found[places] += amounts[numbers]
        return found.reshape(len(wanted), self.entries, len(values))

    def _rounds(self, wanted: tuple[int, ...]) -> list[tuple[IntArray, IntArray]]:
        """Entries of the parts, and what is added to each: in every round once at most, to most in the last alone."""
        if wanted not in self._added:
            place = np.full(PARTS, -1)
            place[list(wanted)] = np.arange(len(wanted))
            chosen = np.flatnonzero(place[self._parts] >= 0)
            where = place[self._parts[chosen]] * self.entries + self._places[chosen]
            first = np.flatnonzero(np.diff(where, prepend=-1))
            turn = np.arange(len(where)) - np.repeat(first, np.diff(first, append=len(where)))
            rounds = [np.flatnonzero(turn == n) for n in (*range(1, int(turn.max(initial=0)) + 1), 0)]
            self._added[wanted] = [(where[one], self._numbers[chosen[one]]) for one in rounds]
        return self._added[wanted]

    def tables(self, case: MeshCase) -> Mapping[int, UnitFactors]:
        """Tables of all units of a stage, made once for all stages of one case."""
        if case.key not in self._factors:
            shape, parts = self.known_shape(case), self.parts(case)
            self._factors[case.key] = {number: self.factors(shape, number, parts) for number in self.terms}
        return self._factors[case.key]

    def factors(self, shape: StageShape, number: int, parts: FloatArray) -> UnitFactors:
        """Tables of one unit of a stage; `parts` are those of the family."""
        key = (id(shape), number)
        if key not in self._tabled:
            self._tabled[key] = self._table(shape, number)
        return UnitFactors(self._tabled[key], parts[self._tabled[key].entries])

    def _table(self, shape: StageShape, number: int) -> TableLayout:
        terms, start = self.terms[number], self._starts[number]
        inside, (first, last) = self._inside(shape), self._ends[:, start : start + terms.entries]
        entries = np.flatnonzero(inside[first] & inside[last])
        forbidden = terms.forbidden[entries]
        if shape.bars:
            barred = np.zeros(len(inside), dtype=np.bool_)
            for v in terms.sizes:
                barred[(self._first_state[v] + self._kept(shape, v))[shape.barred(v)]] = True
            forbidden = forbidden | (barred[first] & (first == last))[entries]
        sizes = {v: len(self._kept(shape, v)) for v in terms.sizes}
        starts = tuple(np.searchsorted(entries, terms.starts).tolist())
        return TableLayout(sizes, terms.scopes, starts, entries + start, forbidden)

    # Least passes

    def least(self, case: MeshCase) -> Least:
        """Least passes of a stage, worked out together with those of others that are expected."""
        if case.key not in self._least:
            others = (c for c in self.source.expected(case) if c.key not in self._least and c.key != case.key)
            rows = len(self.options.modes) * (2 if self.source.shared else 1)
            most = max(1, MOST_NUMBERS // (rows * self.entries))
            cases, shapes = [case], [self.known_shape(case)]
            for other in others:
                shape = self._possible(other) if len(cases) < most else None
                if shape is not None:
                    cases.append(other)
                    shapes.append(shape)
            for one, found in zip(cases, self._least_of(cases, shapes), strict=True):
                self._least[one.key] = found
        return self._least[case.key]

    def _possible(self, case: MeshCase) -> StageShape | None:
        try:
            return self.shape_of(case)
        except InputError:
            return None

    def _least_of(self, cases: Sequence[MeshCase], shapes: Sequence[StageShape]) -> list[Least]:
        shared = self.source.shared
        tables, *plain = self._lowest(cases, shapes, (PASSES, PLAIN) if shared else (PASSES,))
        sizes = tuple(len(self.wide.states(v)) for v in shared)
        best = self._best_shared(plain[0], sizes) if shared else np.zeros(len(cases), int)
        each = np.arange(len(cases))
        flat = [np.broadcast_to(t, (len(cases), *sizes, *t.shape[-2:])) for t in tables]
        least = [t.reshape(len(cases), prod(sizes), *t.shape[-2:])[each, best] for t in flat]
        whole = np.zeros((len(cases), 1))
        for number in self.source.chain.positions:
            whole = (whole[:, :, None] + least[number]).min(axis=1)
        states = np.array(np.unravel_index(best, sizes)).T if shared else np.zeros((len(cases), 0), int)
        return [
            Least(self._between(shape, [t[case] for t in least]), float(whole[case, 0]), self._named(shape, row))
            for case, (shape, row) in enumerate(zip(shapes, states.tolist(), strict=True))
        ]

    def _between(self, shape: StageShape, tables: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
        """Tables between the family's boundary states as those between the states of one mesh."""
        if id(shape) not in self._crossed:
            mine = [{state: n for n, state in enumerate(states)} for states, _ in self.shape.classes]
            kept = [[of[state] for state in states] for of, (states, _) in zip(mine, shape.classes, strict=True)]
            states = [np.array(numbers) for numbers in ([0], *kept, [0])]
            self._crossed[id(shape)] = [(before[:, None], behind) for before, behind in pairwise(states)]
        return tuple(t[ends] for t, ends in zip(tables, self._crossed[id(shape)], strict=True))

    def _named(self, shape: StageShape, states: Sequence[int]) -> Mapping[int, int]:
        """Numbers of the family's states of tied parameters on one mesh."""
        return {
            v: int(np.searchsorted(self._kept(shape, v), s)) for v, s in zip(self.source.shared, states, strict=True)
        }

    def _best_shared(self, tables: Sequence[FloatArray], sizes: tuple[int, ...]) -> IntArray:
        """Number of the states of tied parameters of which the whole chain is cheapest, shape (cases,)."""
        count = len(tables[0])
        full = [np.broadcast_to(t, (count, *sizes, *t.shape[-2:])).reshape(count, -1, *t.shape[-2:]) for t in tables]
        value = np.zeros((count, prod(sizes), 1))
        for number in self.source.chain.positions:
            value = (value[..., None] + full[number]).min(axis=2)
        return np.asarray(value[..., 0].argmin(axis=1))

    def _lowest(
        self, cases: Sequence[MeshCase], shapes: Sequence[StageShape], weights: Sequence[UnitWeights]
    ) -> list[list[FloatArray]]:
        """Least sums of each unit in any mode for some weights, where a kept byte costs nothing.

        What computes again then takes no less than what does not: where that is allowed, it is the least alone. Arrays
        have shape (cases, states of shared stations …, entries, exits).
        """
        placements = prod(len(self.wide.states(v)) for v in self.source.shared)
        if placements > WIDEST or len(self.source.shared) > MOST_DIMS:
            raise TooWideError(
                f"{len(self.source.shared)} parameters that several blocks share can lie in {placements:.1e} ways "
                f"where {' and '.join(self.wide.names)} axes cut them: there pipelines, recomputation and sharded "
                "states are bounded, not searched; --pin tp=1 leaves fewer"
            )
        modes = self.options.modes
        modes = modes if KEEPS_ALL not in modes else (KEEPS_ALL,)
        rows = np.concatenate([rows_of(weighting, modes) for weighting in weights])
        wanted = np.flatnonzero(rows.any(axis=0))
        values = self.amounts.values(cases)
        self._keep(cases, values)
        parts = self._summed(values, wanted.tolist())
        total = np.tensordot(rows[:, wanted], parts, axes=1).transpose(1, 2, 0)
        total[self._forbidden] = np.inf
        alone = np.flatnonzero(self._ends[0] == self._ends[1])
        allowed = np.array([self._allowed(shape) for shape in shapes])
        total[alone] += np.where(allowed[:, self._ends[0, alone]].T, 0.0, np.inf)[..., None]
        flat = np.ascontiguousarray(total).reshape(self.entries, -1)
        made: dict[int, FloatArray] = {}
        for number, terms in self.terms.items():
            table = self._unit_lowest(number, flat[self._starts[number] :][: terms.entries])
            made[number] = table.reshape(len(cases), len(weights), -1, *table.shape[1:]).min(axis=2)
        tabled = [made[self.source.tabled(n)] for n in range(len(self.source.models))]
        return [[table[:, place] for table in tabled] for place in range(len(weights))]

    def _unit_lowest(self, number: int, sums: FloatArray) -> FloatArray:
        """Least sums of one unit for the sums (entries, weightings), shape (weightings, shared …, entries, exits)."""
        terms = self.terms[number]
        shape = self.shape.unit(number, terms.scopes, terms.sizes)
        return shape.spread(shape.lowest(sums, terms.starts), self.source.shared)


def _whole_state(states: States) -> int | None:
    """First state of which every choice keeps everything whole and sends nothing."""
    whole = [
        all(
            not rule.splits_work and {*rule.inputs, *rule.outputs} <= {REPLICATE} and not inner_messages(rule)
            for rule in choice.rules
        )
        and {*choice.reads.values(), *choice.writes.values()} <= {REPLICATE}
        for choice in states.variable.choices
    ]
    found = np.flatnonzero(np.array(whole)[states.choice].all(axis=0))
    return int(found[0]) if len(found) else None


def family_of(source: StageDecisions, parts: Parts, options: StageOptions) -> Family:
    """The family of a stage: one for all meshes with its axes, if it has no states that others lack."""
    setting = parts.setting
    experts = (setting.experts_stay, setting.expert_cut, setting.expert_load, setting.tensor_cut, setting.shares_states)
    restricted = (options, setting.batch_only, setting.storage, experts, id(setting.context))
    names = axis_names(setting.costs.mesh)
    case = MeshCase(setting.costs, parts.graph.batch_size)

    def made(key: tuple[object, ...], wide: Parts, within: Family | None = None) -> Family:
        if key not in source.families:
            source.families[key] = Family(source, wide, options, within)
        found = source.families[key]
        assert isinstance(found, Family)
        return found

    if (names, *restricted) in source.families or setting.batch_only:
        found = made((names, *restricted), parts)
    else:
        within = None
        if not names and source.expects(TENSOR):  # it will be wanted anyway
            within = made((TENSOR, *restricted), source.widest(setting, TENSOR))
        found = made((names, *restricted), source.widest(setting, names), within)
    return found if found.shape_of(case) is not None else made((names, *restricted, case.key), parts)
