"""The fit of planned steps finds the factors that made the times, and keeps what no run speaks for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.step_factors import NAMES, PlannedSteps, centres, fit_factors, left_out_s

FAMILIES = ("ampere", "hopper")
KNOWN = {"ampere": np.full(len(NAMES), 1.1), "hopper": np.full(len(NAMES), 1.2), "volta": np.full(len(NAMES), 1.3)}


def steps(rng: np.random.Generator, factors: dict[str, np.ndarray], runs: int = 200) -> PlannedSteps:
    """Runs whose work is shared out to kinds at random, as the factors make them."""
    families = [FAMILIES[i % 2] for i in range(runs)]
    response = rng.dirichlet(np.ones(len(NAMES)), runs)
    made = 1.0 + ((np.array([factors[f] for f in families]) - 1) * response).sum(axis=1)
    sources = [f"source {i % max(5, runs // 20)}" for i in range(runs)]
    return PlannedSteps(
        families=families, sources=sources, measured_s=made, neutral_s=np.ones(runs), response_s=response
    )


@settings(max_examples=5)
@given(st.integers(0, 100))
def test_the_factors_that_made_the_times_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    factors = {f: KNOWN[f] * np.exp(rng.normal(0, 0.05, len(NAMES))) for f in FAMILIES}
    made = steps(rng, factors, runs=1000)
    found = fit_factors(made, KNOWN)
    np.testing.assert_allclose(found.predicted_s(made, KNOWN), made.measured_s, rtol=0.01)
    for family in FAMILIES:
        np.testing.assert_allclose(found.families[family], factors[family], rtol=0.05)


def test_what_no_run_speaks_for_stays_where_it_is_known() -> None:
    factors = {"ampere": KNOWN["ampere"].copy(), "hopper": KNOWN["hopper"].copy()}
    made = steps(np.random.default_rng(0), factors)
    found = fit_factors(made, KNOWN)
    assert "volta" not in found.families
    np.testing.assert_allclose(found.common, 1.0, atol=0.01)
    np.testing.assert_allclose(found.families["ampere"], KNOWN["ampere"], rtol=0.01)


def test_a_run_is_predicted_without_its_source() -> None:
    made = steps(np.random.default_rng(1), {f: KNOWN[f] for f in FAMILIES})
    strange = np.array([source == "source 3" for source in made.sources])
    wrong = PlannedSteps(
        families=made.families, sources=made.sources, neutral_s=made.neutral_s, response_s=made.response_s,
        measured_s=np.where(strange, 3.0, 1.0) * made.measured_s,
    )  # fmt: skip
    left_out = left_out_s(wrong, KNOWN)
    np.testing.assert_allclose(left_out[strange], made.measured_s[strange], rtol=0.01)


def test_centres_are_what_device_and_the_usual_software_make_together() -> None:
    stacks = {"eager": {"memory": 1.8, "optimizer": 1.4}, "mindspore": {"memory": 9.0}}
    found = dict(zip(NAMES, centres({"ampere": {"matmul": 1.1, "memory": 0.9}}, stacks)["ampere"], strict=True))
    assert found["matmul"] == 1.1
    assert found["memory"] == pytest.approx(0.9 * 1.8)
    assert found["optimizer"] == 1.4
    assert found["outside"] == 1.0
