"""A model without its variables of one state is the same model, plans and bounds included."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.exact.certified import Costing
from planner.search.exact.folded import FoldedElimination, Weights, marginals
from planner.search.exact.limited import condensed
from planner.search.exact.model import Model, model_of, possible
from tests.planner.search.problems import captured, make_mesh, make_problem


@cache
def whole() -> Model:
    return model_of(make_problem(captured("gpt2-tiny", 3), make_mesh(data=2, tensor=2), micro_batches=2))


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32 - 1),
    narrow=st.floats(0.3, 1.0),
    weights=st.sampled_from([Weights(1.0, 0.0), Weights(0.0, 1.0), Weights(1.0, 1e-9)]),
)
def test_what_is_left_has_the_same_plans(seed: int, narrow: float, weights: Weights) -> None:
    """Variables keep one of their states with probability `narrow`, the others all; layers share what they keep."""
    random = np.random.default_rng(seed)
    model = possible(whole())
    folded = FoldedElimination(model)
    known, layers = folded.plan(folded.run(Weights(1.0, random.choice([0.0, 1e-10, 1e-8]))))
    keep = [np.ones(size, dtype=np.bool_) for size in model.sizes]
    ends = {v: x for block in model.layout.blocks for v, x in zip(block.entrance, block.exit, strict=True)}
    last = {v: s for row in layers for v, s in row[-1].items()}
    for v, mask in enumerate(keep):
        if random.random() < narrow and v not in ends.values():
            mask[:] = False
            # Any state of a variable by itself, and those of one plan, so that something stays possible.
            mask[last.get(v, known[v])] = True
    for enter, leave in ends.items():
        keep[leave] = keep[enter] | False
    model = model.restricted(keep)
    plain = FoldedElimination(model)
    done = plain.run(weights)
    small = condensed(model)
    fewer = FoldedElimination(small.model)
    left = fewer.run(weights)
    assert all(len(s) > 1 for v, s in enumerate(model.states) if small.number[v] >= 0)
    assert left.total == pytest.approx(done.total, rel=1e-12)
    if not np.isfinite(done.total):
        return
    plan = Costing(whole()).plan(*small.restored(*fewer.plan(left)), model)
    assert weights.seconds * plan.seconds + weights.bytes * plan.bytes == pytest.approx(done.total, rel=1e-9)
    threshold = done.total * (1 + 10.0 ** -random.integers(1, 8))
    expected = marginals(plain, done).below(threshold * (1 + 1e-12))
    found = small.masks(marginals(fewer, left).below(threshold * (1 + 1e-12)))
    for v, (one, other) in enumerate(zip(expected, found, strict=True)):
        if small.number[v] >= 0:
            np.testing.assert_array_equal(one, other)
