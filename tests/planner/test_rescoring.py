"""Which plans of several searches are simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.planning.rescoring import Contender, Field, Foretold, rescore
from planner.plans.plan import Plan


@dataclass(frozen=True)
class _Figures:
    step_time_s: float


class _Named:
    """Stands for a plan: what is said of it is its name."""

    def __init__(self, name: int) -> None:
        self.name = name

    def __getattr__(self, _: str) -> Any:
        return self.name

    @property
    def mesh(self) -> Any:
        return type("Mesh", (), {"axes": ()})


@dataclass(frozen=True)
class _Scored:
    plan: Plan
    prediction: _Figures


def field_of(objectives: list[float], ratios: list[float], first: int = 0) -> Field[Any]:
    def contender(number: int, objective: float, ratio: float) -> Contender[Any]:
        scored = _Scored(cast(Plan, _Named(first + number)), _Figures(objective * ratio))
        return Contender(
            objective_s=objective,
            foretell=lambda: Foretold(plan=scored.plan),
            settle=lambda *_: scored if ratio else None,
        )

    pairs = sorted(zip(objectives, ratios, strict=True))
    return Field(contenders=[contender(number, *pair) for number, pair in enumerate(pairs)])


def steps(*fields: Field[Any]) -> list[float]:
    return [one.prediction.step_time_s for own in fields for one in own.scored]


def test_the_first_of_each_search_is_simulated_and_then_what_promises_most() -> None:
    exact, high = field_of([1.0, 1.3, 2.0], [1.0, 1.0, 1.0]), field_of([0.2, 0.25, 0.5], [4.0, 4.0, 4.0], 10)
    assert not rescore([exact, high], 3)
    assert steps(exact) == [1.0]
    assert steps(high) == pytest.approx([0.8, 1.0])


def test_what_may_still_be_the_first_is_simulated_beyond_what_is_wanted() -> None:
    near = field_of([1.0, 1.04, 1.2], [1.0, 0.9, 0.5])
    rescore([near], 1)
    assert steps(near) == pytest.approx([1.0, 0.936])


def test_a_plan_that_is_delayed_says_nothing_of_the_next() -> None:
    closed, exact = field_of([1.0, 1.01], [1.43, 1.02]), field_of([0.24, 0.241, 0.242], [5.6, 5.6, 5.6], 10)
    closed.usual = 1.0
    rescore([closed, exact], 3)
    assert min(steps(closed, exact)) == pytest.approx(1.0302)


def test_plans_of_which_the_same_is_said_count_once() -> None:
    one, other = field_of([1.0, 3.0], [1.0, 1.0]), field_of([1.1, 9.0], [1.0, 1.0])
    rescore([one, other], 2)
    assert steps(one, other) == [1.0, 3.0, 1.1]


def test_plans_that_do_not_fit_make_room_for_others() -> None:
    plans = field_of([1.0, 2.0, 3.0], [0.0, 1.0, 1.0])
    rescore([plans], 1)
    assert steps(plans) == [2.0]


@pytest.mark.parametrize("at", [0, 1])
def test_an_interruption_ends_it_once_there_is_a_plan(at: int) -> None:
    plans, calls = field_of([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]), []

    def interrupted() -> Foretold:
        calls.append(at)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return plain()

    plain = plans.contenders[at].foretell
    plans.contenders = [
        replace(one, foretell=interrupted) if n == at else one for n, one in enumerate(plans.contenders)
    ]
    assert rescore([plans], 3)
    assert steps(plans) == [1.0]


@given(
    st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.98, 1.02)), min_size=1, max_size=8),
    st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(1.47, 1.53)), min_size=1, max_size=8),
)
def test_the_fastest_is_found_where_objectives_err_alike(
    exact: list[tuple[float, float]], low: list[tuple[float, float]]
) -> None:
    fields = [field_of([o for o, _ in pairs], [r for _, r in pairs], 10 * n) for n, pairs in enumerate((exact, low))]
    rescore(fields, 1)
    assert min(steps(*fields)) == min(objective * ratio for objective, ratio in (*exact, *low))
